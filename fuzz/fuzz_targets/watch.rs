//! Any bytes as a watch: no panic, nothing kept above the cap, and every byte out in its order.
//!
//! How to run it is in `fuzz/README.md`; what it finds goes to `tests/corpus/watch`, which the ordinary
//! tests run.
#![no_main]

use bytes::Bytes;
use jackstay::proxy::byte_budget::ByteBudget;
use jackstay::proxy::watch::Encoding;
use jackstay::proxy::watch::event::read;
use jackstay::proxy::watch::frame::{Cut, Splitter};
use libfuzzer_sys::fuzz_target;

const CAP: usize = 64;
/// Less than that: both bounds are met.
const ROOM: usize = 48;

fuzz_target!(|bytes: &[u8]| {
    for encoding in [Encoding::Json, Encoding::Protobuf] {
        let _ = read(encoding, bytes);
        for step in [1, 7, bytes.len().max(1)] {
            let mut splitter = Splitter::with_cap(encoding, CAP, &ByteBudget::unmetered(ROOM));
            let mut out = Vec::new();
            for chunk in bytes.chunks(step) {
                let mut rest = chunk;
                while !rest.is_empty() {
                    let (frame, len) = match splitter.cut(rest) {
                        Cut::Whole(len) | Cut::Blank(len) => {
                            (Bytes::copy_from_slice(&rest[..len]), len)
                        }
                        Cut::Joined(len, frame) => (frame, len),
                        Cut::Oversized { kept, len, .. } => {
                            out.extend_from_slice(&kept);
                            (Bytes::copy_from_slice(&rest[..len]), len)
                        }
                        Cut::Partial => (Bytes::new(), rest.len()),
                    };
                    let _ = read(encoding, &frame);
                    out.extend_from_slice(&frame);
                    rest = &rest[len..];
                    assert!(splitter.kept() <= CAP);
                }
            }
            out.extend_from_slice(&splitter.take_partial());
            assert_eq!(out, bytes);
        }
    }
});
