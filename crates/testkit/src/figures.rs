//! Measured durations and the durations that jackstay promises. A test fails if a measured duration exceeds
//! its bound: four times the promise, because CI machines are noisy, or with `JACKSTAY_STRICT=1` the promise.
//! If `JACKSTAY_REPORT` names a file (`tests/report` creates it), each measured duration is appended to it.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

/// Whether figures are compared with the promise itself.
pub fn is_strict() -> bool {
    std::env::var("JACKSTAY_STRICT").is_ok_and(|value| value == "1")
}

/// The longest duration with which a test succeeds.
pub fn bound(promise: Duration) -> Duration {
    promise * if is_strict() { 1 } else { 4 }
}

/// Records a measured duration, and panics if it exceeds its bound.
#[track_caller]
pub fn check_figure(name: &str, took: Duration, promise: Duration) {
    let bound = bound(promise);
    let ratio = took.as_secs_f64() / promise.as_secs_f64();
    println!("{name}: {took:.1?} (promised {promise:?})");
    if let Some(path) = std::env::var_os("JACKSTAY_REPORT") {
        let test = test_crate();
        let row = format!(
            "| tests/{test} | {name} | {took:.1?} | {promise:?} | {ratio:.2} | {bound:?} |\n"
        );
        let mut report = std::fs::OpenOptions::new().append(true).open(path).unwrap();
        report.write_all(row.as_bytes()).unwrap();
    }
    assert!(took <= bound, "{name}: {took:?}, bound {bound:?}, promised {promise:?}");
}

/// The test crate that runs: the name of its program without the hash that Cargo appends.
fn test_crate() -> String {
    let program = std::env::current_exe().unwrap();
    let name = program.file_name().map(Path::new).unwrap().display().to_string();
    name.rsplit_once('-').map_or(name.clone(), |(name, _)| name.to_owned())
}
