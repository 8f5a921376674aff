//! When a shadow is opened, and how many there may be.
//!
//! | the connection of the first stream | the watch |
//! |---|---|
//! | becomes suspect | opens a shadow after up to [`JITTER`], so that the watches of many nodes do not do so at once |
//! | becomes suspect, and a suspicion was wrong in the last minute | the same after [`LOSSY_PAUSE`]: a lost packet is usually repeated by then; a quiet watch after [`LOSSY_PAUSE_QUIET`] |
//! | still suspect, and the first shadow has failed | opens another after up to [`JITTER`]: its connection may have failed, too |
//! | still suspect, and a later shadow has failed | opens another after [`RETRY_PAUSE`] to twice that, [`MAX_ATTEMPTS`] in all |
//! | answers again, and what the client has received does not follow on it within [`CATCH_UP_LIMIT`] | continues on the shadow |
//!
//! Watches take the places of [`MAX_PER_ENDPOINT`] and [`MAX_PER_PROCESS`] in the random order of their jitter. One
//! without a place tries again as after a failure, and is resumed as any other if its stream is lost before.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Maximum random pause before the first request of a shadow.
pub const JITTER: Duration = Duration::from_millis(50);
/// Additional pause while suspicions of the connection are often wrong. Linux retransmits a lost packet after little
/// more than 200 ms, which is 100 ms after the suspicion.
pub const LOSSY_PAUSE: Duration = Duration::from_millis(150);
/// The same of a quiet watch. By then, a packet that was lost twice is nearly repeated.
pub const LOSSY_PAUSE_QUIET: Duration = Duration::from_millis(400);
/// For how long after a wrong suspicion [`LOSSY_PAUSE`] applies.
pub const LOSSY_FOR: Duration = Duration::from_secs(60);
/// Minimum pause before a third shadow is requested.
pub const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// Maximum number of shadows that are requested in one suspicion.
pub const MAX_ATTEMPTS: u32 = 4;
/// Time limit of the response head.
pub const HEAD_TIMEOUT: Duration = Duration::from_secs(1);
/// Time after which a first stream is given up that answers again, but does not show what the client has received.
pub const CATCH_UP_LIMIT: Duration = Duration::from_secs(5);
/// Maximum number of shadows at one endpoint.
pub const MAX_PER_ENDPOINT: usize = 512;
/// Maximum number of shadows of the process.
pub const MAX_PER_PROCESS: usize = 1024;

/// A path on which a suspicion was wrong within [`LOSSY_FOR`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lossy {
    /// It has no such suspicion.
    No,
    /// It has, and the watch was delivering events.
    Delivering,
    /// It has, and the watch is quiet ([`crate::watch::pace`]).
    Quiet,
}

/// The pause before a shadow is requested, after this number of attempts in the suspicion.
pub fn pause(attempts: u32, lossy: Lossy, rng: &mut fastrand::Rng) -> Duration {
    match (attempts, lossy) {
        (0, Lossy::Delivering) => LOSSY_PAUSE + JITTER.mul_f64(rng.f64()),
        (0, Lossy::Quiet) => LOSSY_PAUSE_QUIET + JITTER.mul_f64(rng.f64()),
        (0 | 1, _) => JITTER.mul_f64(rng.f64()),
        _ => RETRY_PAUSE.mul_f64(1.0 + rng.f64()),
    }
}

/// The number of shadows that are open, in the process or at one endpoint.
#[derive(Debug, Default)]
pub struct ShadowCount(AtomicUsize);

impl ShadowCount {
    /// No shadow is open.
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Counts one more, unless `limit` are open. Returns whether it was counted.
    #[must_use]
    pub fn try_add(&self, limit: usize) -> bool {
        let more = |open| (open < limit).then_some(open + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Counts one that was added less.
    pub fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_is_random_and_longer_on_lossy_paths_and_after_failures() {
        use Lossy::{Delivering, No, Quiet};
        let mut rng = fastrand::Rng::with_seed(1);
        for (attempts, lossy, least, most) in [
            (0, No, 0, 50),
            (0, Delivering, 150, 200),
            (0, Quiet, 400, 450),
            (1, Quiet, 0, 50),
            (2, No, 250, 500),
            (3, Delivering, 250, 500),
        ] {
            let pauses = (0..1000).map(|_| pause(attempts, lossy, &mut rng).as_millis());
            let pauses: Vec<_> = pauses.collect();
            let (min, max) = (*pauses.iter().min().unwrap(), *pauses.iter().max().unwrap());
            let range = most - least;
            assert!(min >= least && max <= most, "{attempts} {lossy:?}: {min} {max}");
            assert!(min <= least + range / 10 && max >= most - range / 10, "{min} {max}");
        }
    }

    #[test]
    fn count_ends_at_its_limit() {
        let count = ShadowCount::new();
        assert_eq!((0..5).filter(|_| count.try_add(3)).count(), 3);
        count.remove();
        assert!(count.try_add(3));
        assert!(!count.try_add(3));
    }
}
