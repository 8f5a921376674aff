//! Any bytes as the beginning of a connection: no panic, and an answer that is given before all bytes
//! are there is not taken back.
//!
//! How to run it is in `fuzz/README.md`; what it finds goes to `tests/corpus/hello`, which the ordinary
//! tests run.
#![no_main]

use jackstay::proxy::passthrough::client_hello::{ClientHello, MAX, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let mut answer = ClientHello::Incomplete;
    for end in 0..=bytes.len().min(MAX) {
        let now = read(&bytes[..end]);
        assert!(answer == ClientHello::Incomplete || answer == now, "{answer:?}, then {now:?} at {end}");
        answer = now;
    }
});
