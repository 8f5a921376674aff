//! Runs the target `watch_events` of `fuzz/targets` with libFuzzer.
#![no_main]

#[path = "../targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| targets::run("watch_events", bytes));
