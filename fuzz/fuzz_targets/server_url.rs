//! Runs the target `server_url` of `fuzz/targets` with libFuzzer.
#![no_main]

#[path = "../targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::run("server_url", bytes));
