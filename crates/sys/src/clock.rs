//! The clock of the process.

use std::time::{Duration, Instant};

/// The present time by tokio's clock, which tests can pause.
///
/// Decisions take the time as an argument of type [`Instant`], so they do not depend on tokio.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// The time that has passed since `start`, by the same clock.
pub fn elapsed(start: Instant) -> Duration {
    now().saturating_duration_since(start)
}
