//! Watches as a whole: the tables, and properties over random histories, cuts and losses.

pub(crate) mod model;
mod properties;
mod requests;
mod states;

use std::path::Path;

/// Everything the corpus has ever taught us goes through the splitter and the parsers again.
#[test]
fn the_corpus_is_digested() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/watch");
    let mut files = 0;
    for entry in std::fs::read_dir(folder).expect("the corpus is in the repository") {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        model::digest(&bytes);
        files += 1;
    }
    assert!(files > 0);
}

#[test]
fn content_types() {
    use super::Encoding::{self, Json, Protobuf};
    for (content_type, encoding) in [
        ("application/json", Some(Json)),
        ("Application/JSON; charset=utf-8", Some(Json)),
        ("application/json;stream=watch", Some(Json)),
        ("application/vnd.kubernetes.protobuf;stream=watch", Some(Protobuf)),
        ("application/vnd.kubernetes.protobuf; stream=\"watch\"", Some(Protobuf)),
        ("application/vnd.kubernetes.protobuf", None),
        ("application/json;stream=other", None),
        ("application/cbor-seq", None),
        ("application/cbor;stream=watch", None),
        ("text/plain", None),
        ("", None),
    ] {
        assert_eq!(Encoding::from_content_type(content_type), encoding, "{content_type}");
    }
}
