//! Detects that the path of an endpoint loses packets.

use std::time::{Duration, Instant};

/// Number of refuted suspicions after which a path counts as lossy: on the flows of an endpoint within two
/// minutes, or on the flow of one upgrade.
pub const LOSSY_AFTER: u32 = 3;
/// After each such period the number of refuted suspicions is halved.
const HALF_LIFE: Duration = Duration::from_secs(60);

/// The recent number of flows of an endpoint that were suspected and then answered, which indicates packet loss on the
/// path to this endpoint, and none on those to others. Each worker counts those of its own flows.
#[derive(Debug, Clone, Copy)]
pub struct LossyPath {
    refuted: u32,
    /// When the number was last halved.
    since: Instant,
}

impl LossyPath {
    /// A path without refuted suspicions.
    pub fn new(now: Instant) -> Self {
        Self { refuted: 0, since: now }
    }

    /// Records that a suspicion was refuted.
    pub fn record_refuted(&mut self) {
        self.refuted = self.refuted.saturating_add(1);
    }

    /// Combines what two endpoints with the same address have recorded: their path is the same.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        if other.refuted > self.refuted { other } else { self }
    }

    /// Whether the path loses packets.
    pub fn is_lossy(&mut self, now: Instant) -> bool {
        if now.saturating_duration_since(self.since) > HALF_LIFE {
            (self.refuted, self.since) = (self.refuted / 2, now);
        }
        self.refuted >= LOSSY_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_lossy_after_three_refuted_suspicions_within_two_minutes() {
        let start = Instant::now();
        let mut path = LossyPath::new(start);
        for expected in [false, false, true] {
            path.record_refuted();
            assert_eq!(path.is_lossy(start), expected);
        }
        assert!(path.is_lossy(start + HALF_LIFE));
        assert!(!path.is_lossy(start + 2 * HALF_LIFE), "3 / 2 are left");
        (0..2).for_each(|_| path.record_refuted());
        assert!(path.is_lossy(start + 2 * HALF_LIFE));
        for mut merged in [path.merge(LossyPath::new(start)), LossyPath::new(start).merge(path)] {
            assert!(merged.is_lossy(start + 2 * HALF_LIFE));
        }
    }
}
