//! Figures and what is promised of them. A figure is compared with four times the promise, since the
//! machines of a CI are noisy, and with `JACKSTAY_STRICT=1` with the promise itself. Either way it
//! goes to the report, the file that `JACKSTAY_REPORT` names (`tests/report` begins it).

use std::io::Write;
use std::time::Duration;

/// The most that a test lets pass.
pub fn bound(promise: Duration) -> Duration {
    let strict = std::env::var("JACKSTAY_STRICT").is_ok_and(|value| value == "1");
    promise * if strict { 1 } else { 4 }
}

/// Records a time and fails the test where it is beyond the bound.
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
