//! Shows that a worker's loop turns, to whoever asks and whenever: also to the first who does, long
//! after it has stopped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A worker whose loop has not turned for this long is stuck.
const STUCK_AFTER: Duration = Duration::from_secs(5);

/// When a worker's loop last turned.
#[derive(Debug)]
pub struct Pulse {
    born: Instant,
    /// Milliseconds from then to its last turn.
    beat: AtomicU64,
}

impl Pulse {
    /// Of a worker that is about to begin.
    pub fn new(now: Instant) -> Self {
        Self { born: now, beat: AtomicU64::new(0) }
    }

    /// Its loop has turned.
    pub fn beat(&self, now: Instant) {
        let since = now.saturating_duration_since(self.born);
        self.beat.store(since.as_millis() as u64, Ordering::Relaxed);
    }

    /// Whether it still turns.
    pub fn is_alive(&self, now: Instant) -> bool {
        let beat = Duration::from_millis(self.beat.load(Ordering::Relaxed));
        now.saturating_duration_since(self.born + beat) < STUCK_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_asks_for_the_first_time_hears_the_truth() {
        let born = Instant::now();
        let at = |seconds| born + Duration::from_secs(seconds);
        let pulse = Pulse::new(born);
        assert!(pulse.is_alive(at(4)), "it has time to begin");
        assert!(!pulse.is_alive(at(5)), "it never began");
        pulse.beat(at(100));
        assert!(pulse.is_alive(at(104)));
        let pulse = Pulse::new(born);
        pulse.beat(at(100));
        assert!(!pulse.is_alive(at(3_600)), "nobody asked while it still turned");
        pulse.beat(at(3_601));
        assert!(pulse.is_alive(at(3_602)), "it turns again");
    }
}
