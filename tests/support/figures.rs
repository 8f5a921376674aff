//! Measured durations and the durations that jackstay promises. A test fails if a measured duration exceeds
//! its bound: four times the promise, because CI machines are noisy, or with `JACKSTAY_STRICT=1` the promise.
//! If `JACKSTAY_REPORT` names a file (`tests/report` creates it), each measured duration is appended to it.

use std::io::Write;
use std::time::Duration;

/// The longest duration with which a test succeeds.
pub fn bound(promise: Duration) -> Duration {
    let strict = std::env::var("JACKSTAY_STRICT").is_ok_and(|value| value == "1");
    promise * if strict { 1 } else { 4 }
}

/// Records a measured duration, and panics if it exceeds its bound.
#[track_caller]
pub fn check_figure(name: &str, took: Duration, promise: Duration) {
    let (bound, crate_name) = (bound(promise), env!("CARGO_CRATE_NAME"));
    let ratio = took.as_secs_f64() / promise.as_secs_f64();
    println!("{name}: {took:.1?} (promised {promise:?})");
    if let Some(path) = std::env::var_os("JACKSTAY_REPORT") {
        let row = format!(
            "| tests/{crate_name} | {name} | {took:.1?} | {promise:?} | {ratio:.2} | {bound:?} |\n"
        );
        let mut report = std::fs::OpenOptions::new().append(true).open(path).unwrap();
        report.write_all(row.as_bytes()).unwrap();
    }
    assert!(took <= bound, "{name}: {took:?}, bound {bound:?}, promised {promise:?}");
}
