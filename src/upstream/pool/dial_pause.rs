//! Spreads the connects of a class for clients that have proven nothing. Such a client can make the apiserver end
//! a connection with each request, because the apiserver sends a GOAWAY after a request that it cannot
//! authenticate.

use std::time::{Duration, Instant};

use jackstay_core::backoff::Backoff;

/// The pause after the second of two connects.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Connects further apart than this are independent of each other.
const RECENT: Duration = Duration::from_secs(5);

/// The recent connects to one endpoint.
#[derive(Debug, Clone, Copy)]
pub(super) struct DialPause {
    last: Option<Instant>,
    /// Counts the connects in a row that came soon after the one before.
    in_a_row: Backoff,
}

impl Default for DialPause {
    fn default() -> Self {
        Self { last: None, in_a_row: Backoff::new(FIRST_PAUSE, Duration::MAX) }
    }
}

impl DialPause {
    /// When the next connect may start.
    pub(super) fn next_at(&self, longest: Duration) -> Option<Instant> {
        let last = self.last.filter(|_| self.in_a_row.failures() > 0)?;
        Some(last + self.in_a_row.pause().min(longest))
    }

    /// Records a connect.
    pub(super) fn dialled(&mut self, now: Instant) {
        if self.is_over(now) {
            self.in_a_row.reset();
        } else {
            self.in_a_row.failed();
        }
        self.last = Some(now);
    }

    /// Whether the connects have no influence on the next one any more.
    pub(super) fn is_over(&self, now: Instant) -> bool {
        self.last.is_none_or(|last| now >= last + RECENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    #[test]
    fn pauses_double_up_to_the_longest_and_end_after_a_quiet_time() {
        let start = clock::now();
        let longest = Duration::from_secs(1);
        let mut pause = DialPause::default();
        let mut now = start;
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let next = pause.next_at(longest).unwrap_or(now);
            pauses.push(next.saturating_duration_since(now).as_millis());
            now = now.max(next);
            pause.dialled(now);
        }
        // Two connects may follow each other, as when one connection becomes full.
        assert_eq!(pauses, [0, 0, 50, 100, 200, 400, 800, 1000]);
        assert!(!pause.is_over(now));
        now += RECENT;
        assert!(pause.is_over(now));
        pause.dialled(now);
        assert_eq!(pause.next_at(longest), None);
    }
}
