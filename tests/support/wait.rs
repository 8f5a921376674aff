//! Waiting in tests.
//!
//! A test waits for a condition, with a limit that is generous because nothing uses it up where
//! things work. It never waits for a time by which something should have happened. Time that belongs
//! to the setup (the pace of a client, the length of a fault, a window in which nothing may happen)
//! passes in [`pause`]. `tests/house.rs` keeps `sleep` out of all other test code.

#![allow(dead_code)] // each test crate uses its part

use std::time::{Duration, Instant};

/// Long enough for a slow machine; nothing waits for it to pass where things work.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two looks at a condition.
const LOOK: Duration = Duration::from_millis(5);
/// The same where each look costs nothing.
const BLOCKING_LOOK: Duration = Duration::from_millis(1);

/// Waits for a condition that another thread brings about.
pub async fn until(what: &str, condition: impl AsyncFnMut() -> bool) {
    until_within(PATIENCE, what, condition).await;
}

/// The same, with another limit.
pub async fn until_within(limit: Duration, what: &str, condition: impl AsyncFnMut() -> bool) {
    assert!(within(limit, condition).await, "waited in vain until {what}");
}

/// Whether a condition holds within the limit.
pub async fn within(limit: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition().await {
        if start.elapsed() >= limit {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
    true
}

/// Tries until it works, and returns what comes of it; the last error is shown where it does not.
pub async fn until_ok<T>(
    limit: Duration,
    what: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, String>,
) -> T {
    let start = Instant::now();
    loop {
        match attempt().await {
            Ok(value) => return value,
            Err(error) => {
                assert!(start.elapsed() < limit, "waited in vain until {what}: {error}");
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// [`until_within`], blocking.
pub fn until_blocking(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    until_ok_blocking(limit, what, || condition().then_some(()).ok_or_else(String::new));
}

/// [`until_ok`], blocking.
pub fn until_ok_blocking<T>(
    limit: Duration,
    what: &str,
    mut attempt: impl FnMut() -> Result<T, String>,
) -> T {
    let start = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return value,
            Err(error) => {
                assert!(start.elapsed() < limit, "waited in vain until {what}: {error}");
            }
        }
        std::thread::sleep(BLOCKING_LOOK);
    }
}

/// Bounds what a test waits for.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let bounded = tokio::time::timeout(PATIENCE, future).await;
    bounded.unwrap_or_else(|_| panic!("{what}: nothing for {PATIENCE:?}"))
}

/// Lets time pass that belongs to the setup, never time for something to happen in.
pub async fn pause(time: Duration) {
    tokio::time::sleep(time).await;
}
