//! The clock for timestamps: that of the system, or a date from which tokio's clock goes on.

use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use jackstay_sys::{clock, utc};
use rustls::pki_types::UnixTime;
use rustls::time_provider::TimeProvider;

/// Where the date comes from.
#[derive(Debug, Clone, Copy, Default)]
pub enum WallClock {
    /// From the system.
    #[default]
    System,
    /// From tokio's clock, which can be paused.
    StartingAt {
        /// The date at `instant`.
        date: SystemTime,
        /// By tokio's clock.
        instant: Instant,
    },
}

impl WallClock {
    /// A clock that shows `date` now. Call it in the runtime whose clock it shall follow.
    pub fn starting_at(date: SystemTime) -> Self {
        Self::StartingAt { date, instant: clock::now() }
    }

    /// The present date.
    pub fn now(self) -> SystemTime {
        match self {
            Self::System => utc::wall_clock(),
            Self::StartingAt { date, instant } => date + clock::elapsed(instant),
        }
    }

    /// The present date, for the verification of certificates.
    pub(super) fn unix_time(self) -> UnixTime {
        UnixTime::since_unix_epoch(self.now().duration_since(UNIX_EPOCH).unwrap_or_default())
    }

    /// The clock for rustls.
    pub(super) fn time_provider(self) -> Arc<dyn TimeProvider> {
        Arc::new(self)
    }
}

impl TimeProvider for WallClock {
    fn current_time(&self) -> Option<UnixTime> {
        Some(self.unix_time())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn clock_with_a_start_follows_the_paused_clock() {
        let start = UNIX_EPOCH + Duration::from_secs(1_767_225_600);
        let clock = WallClock::starting_at(start);
        assert_eq!(clock.now(), start);
        tokio::time::advance(Duration::from_secs(90)).await;
        assert_eq!(clock.now(), start + Duration::from_secs(90));
    }
}
