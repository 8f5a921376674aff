//! Waiting in tests.
//!
//! A test waits for a condition, with a limit that only a failing test reaches. It never sleeps in the hope that
//! something has happened afterwards. [`pause`] is for time that is part of the test: the rate of a client, the
//! length of a fault, or a window in which nothing may happen. `tests/checks/architecture` rejects `sleep` in other
//! test code.

use std::time::{Duration, Instant};

/// The usual limit of a wait, long enough for a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// The time between two checks of a condition.
const INTERVAL: Duration = Duration::from_millis(5);
/// The time between two checks by the blocking functions, whose conditions are cheap.
const BLOCKING_INTERVAL: Duration = Duration::from_millis(1);

/// Waits until a condition holds; panics after [`PATIENCE`]. `what` completes "timed out waiting until …".
pub async fn until(what: &str, condition: impl AsyncFnMut() -> bool) {
    until_within(PATIENCE, what, condition).await;
}

/// [`until`] with another limit.
pub async fn until_within(limit: Duration, what: &str, condition: impl AsyncFnMut() -> bool) {
    assert!(within(limit, condition).await, "timed out waiting until {what}");
}

/// Whether a condition holds within the limit.
pub async fn within(limit: Duration, mut condition: impl AsyncFnMut() -> bool) -> bool {
    let start = Instant::now();
    while !condition().await {
        if start.elapsed() >= limit {
            return false;
        }
        tokio::time::sleep(INTERVAL).await;
    }
    true
}

/// Repeats an attempt until it succeeds, and returns its value. The panic at the limit shows the last error.
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
                assert!(start.elapsed() < limit, "timed out waiting until {what}: {error}");
            }
        }
        tokio::time::sleep(INTERVAL).await;
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
                assert!(start.elapsed() < limit, "timed out waiting until {what}: {error}");
            }
        }
        std::thread::sleep(BLOCKING_INTERVAL);
    }
}

/// Awaits a future for at most [`PATIENCE`]. `what` names the expected result in the panic.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    let bounded = tokio::time::timeout(PATIENCE, future).await;
    bounded.unwrap_or_else(|_| panic!("{what}: not within {PATIENCE:?}"))
}

/// Lets time pass that is part of the test; never use it to wait until something has happened.
pub async fn pause(time: Duration) {
    tokio::time::sleep(time).await;
}
