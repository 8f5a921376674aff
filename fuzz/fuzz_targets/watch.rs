//! Arbitrary bytes as a watch: the splitter does not panic, buffers no more than its cap, and returns every byte in
//! order.
//!
//! `fuzz/README.md` says how to run it. Findings go to `tests/corpus/watch`, which the ordinary tests replay.
#![no_main]

use bytes::Bytes;
use jackstay::observe::ByteBudget;
use jackstay::proxy::watch::codec::Encoding;
use jackstay::proxy::watch::codec::parse;
use jackstay::proxy::watch::codec::frame::{Piece, FrameSplitter};
use libfuzzer_sys::fuzz_target;

const CAP: usize = 64;
/// Less than [`CAP`], so that both limits are reached.
const BUDGET: usize = 48;

fuzz_target!(|bytes: &[u8]| {
    for encoding in [Encoding::Json, Encoding::Protobuf] {
        let _ = parse(encoding, bytes);
        for step in [1, 7, bytes.len().max(1)] {
            let mut splitter = FrameSplitter::with_cap(encoding, CAP, &ByteBudget::unmetered(BUDGET));
            let mut out = Vec::new();
            for chunk in bytes.chunks(step) {
                let mut rest = chunk;
                while !rest.is_empty() {
                    let (frame, len) = match splitter.split(rest) {
                        Piece::Whole(len) | Piece::Whitespace(len) => {
                            (Bytes::copy_from_slice(&rest[..len]), len)
                        }
                        Piece::Completed(len, frame) => (frame, len),
                        Piece::Oversized { buffered: kept, len, .. } => {
                            out.extend_from_slice(&kept);
                            (Bytes::copy_from_slice(&rest[..len]), len)
                        }
                        Piece::Buffered => (Bytes::new(), rest.len()),
                    };
                    let _ = parse(encoding, &frame);
                    out.extend_from_slice(&frame);
                    rest = &rest[len..];
                    assert!(splitter.buffered() <= CAP);
                }
            }
            out.extend_from_slice(&splitter.reset());
            assert_eq!(out, bytes);
        }
    }
});
