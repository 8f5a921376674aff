//! Arbitrary bytes as the start of a connection: the parser does not panic, and a result from a prefix does not change
//! when more bytes arrive.
//!
//! `fuzz/README.md` says how to run it. Findings go to `tests/corpus/hello`, which the ordinary tests replay.
#![no_main]

use jackstay::proxy::passthrough::client_hello::{ClientHello, MAX_LENGTH, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut result = ClientHello::Incomplete;
    for end in 0..=bytes.len().min(MAX_LENGTH) {
        let now = read(&bytes[..end]);
        assert!(result == ClientHello::Incomplete || result == now, "{result:?}, then {now:?} at {end}");
        result = now;
    }
});
