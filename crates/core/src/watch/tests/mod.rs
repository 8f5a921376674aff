//! Tests of the watch codec, relay and session: decision tables, and property tests with random event
//! histories.

pub mod events;
mod gzip;
mod properties;
mod requests;
mod session;
mod shadow;
mod shared_versions;

use super::codec::event::EventType;
use super::codec::frame::FrameSplitter;
use super::codec::{Encoding, parse};
use crate::admission::ByteAccount;
use std::path::{Path, PathBuf};

/// The corpus contains the seeds and the earlier findings of the fuzz target `watch`.
fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/corpus/watch")
}

/// A watch of config maps of kube-apiserver 1.36.2, which encodes the members of each map in random order.
#[test]
fn cbor_of_kubernetes_has_types_and_versions() {
    let bytes = std::fs::read(corpus().join("cbor-kubernetes-1.36")).unwrap();
    let mut splitter = FrameSplitter::new(Encoding::Cbor, ByteAccount::unmetered(usize::MAX));
    let frames = events::split(&mut splitter, &[bytes.into()], usize::MAX);
    let parsed = frames.iter().map(|frame| parse(Encoding::Cbor, frame).unwrap());
    let found: Vec<_> = parsed.map(|event| (event.event_type, event.version.unwrap())).collect();
    assert_eq!(found, [(EventType::Modified, &b"231"[..]), (EventType::Deleted, b"232")]);
}

#[test]
fn splitter_and_parser_accept_the_corpus() {
    let mut files = 0;
    for entry in std::fs::read_dir(corpus()).expect("tests/corpus/watch exists") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        events::check_split_and_parse(&bytes);
        files += 1;
    }
    assert!(files > 0, "the corpus is empty");
}
