//! Measured figures and their promises. A figure is compared with four times the promise, since CI
//! machines are noisy, and with `JACKSTAY_STRICT=1` with the promise itself. It is also appended to
//! the report, the file that `JACKSTAY_REPORT` names (`tests/report` creates it).

use std::io::Write;
use std::time::Duration;

/// The highest figure with which a test succeeds.
pub fn bound(promise: Duration) -> Duration {
    let strict = std::env::var("JACKSTAY_STRICT").is_ok_and(|value| value == "1");
    promise * if strict { 1 } else { 4 }
}

/// Records a duration, and fails the test if it is above the bound.
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
