//! A round of attempts to continue a watch after the loss of its stream, and the jitter between them.
//!
//! An apiserver that dies leaves tens of thousands of watches at one moment, so even the first attempt
//! is jittered: by up to 50 ms for a watch that was delivering events, by up to 1 s for a quiet one,
//! whose client does not notice. The jitter doubles with every attempt, up to 2 s.

use bytes::Bytes;
use std::time::Duration;
use tokio::time::Instant;

/// How long a watch looks for an endpoint that takes it.
const ROUND: Duration = Duration::from_secs(30);
/// How long it looks for one if an ERROR event is withheld from its client.
pub(super) const ROUND_WITHHELD: Duration = Duration::from_secs(3);
/// How long one attempt may take. A server that answers PINGs and nothing else would otherwise hold the
/// watch up for ever, and the client of a watch has no timeout of its own.
const ATTEMPT: Duration = Duration::from_secs(10);
/// The longest pause that an endpoint may ask for (Retry-After) before the watch is better ended, so
/// that its client sees it.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// The largest jitter of the first attempt for a watch that was delivering events.
const FIRST_JITTER: Duration = Duration::from_millis(50);
/// The same for a quiet watch. A dead connection is noticed within 2.3 s, and a quiet watch may be
/// silent for 3.5 s.
const FIRST_JITTER_QUIET: Duration = Duration::from_secs(1);
/// The largest jitter of any attempt: 5,000 nodes may make one at the same moment.
const MAX_JITTER: Duration = Duration::from_secs(2);
/// The largest jitter after a total outage.
const MAX_RETURN_JITTER: Duration = Duration::from_secs(5);
/// The jitter after a total outage is at most its length divided by this: the longer the outage, the
/// more nodes return from it.
const RETURN_JITTER_DIVISOR: u32 = 8;

/// How long a watch that was held for `held` in a total outage waits before its first attempt.
/// `random` is evenly distributed.
pub fn return_jitter(held: Duration, quiet: bool, random: u64) -> Duration {
    let largest = (held / RETURN_JITTER_DIVISOR).clamp(first_jitter(quiet), MAX_RETURN_JITTER);
    largest.mul_f64(fraction(random))
}

fn first_jitter(quiet: bool) -> Duration {
    if quiet { FIRST_JITTER_QUIET } else { FIRST_JITTER }
}

/// A random number as a fraction of its range.
fn fraction(random: u64) -> f64 {
    random as f64 / u64::MAX as f64
}

/// The attempts that follow one loss.
#[derive(Debug)]
pub struct Round {
    end: Instant,
    attempts: u32,
    quiet: bool,
    /// The ERROR event that the client gets if no endpoint takes the watch.
    error_event: Option<Bytes>,
}

impl Round {
    /// Begins a round. Every one of the `recent` rounds of the last minute doubles the jitter, as an
    /// attempt does.
    pub fn begin(now: Instant, recent: u32, quiet: bool) -> Self {
        Self { end: now + ROUND, attempts: recent, quiet, error_event: None }
    }

    /// Begins a short round that looks for a better answer than this ERROR event.
    pub fn withholding(now: Instant, recent: u32, error_event: Bytes) -> Self {
        Self {
            end: now + ROUND_WITHHELD,
            error_event: Some(error_event),
            ..Self::begin(now, recent, false)
        }
    }

    /// How long to wait before the next attempt; `None` if the round is over. `random` is evenly
    /// distributed.
    pub fn next(&mut self, now: Instant, random: u64) -> Option<Duration> {
        if now >= self.end {
            return None;
        }
        let doubled = first_jitter(self.quiet).saturating_mul(1 << self.attempts.min(10));
        self.attempts += 1;
        Some(doubled.min(MAX_JITTER).mul_f64(fraction(random)))
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.quiet
    }

    pub(super) fn withholds(&self) -> bool {
        self.error_event.is_some()
    }

    pub(super) fn take_error_event(&mut self) -> Option<Bytes> {
        self.error_event.take()
    }

    /// How long one attempt may take.
    pub(super) fn attempt_timeout(&self) -> Duration {
        if self.withholds() { ROUND_WITHHELD } else { ATTEMPT }
    }

    /// The longest pause between two attempts.
    pub(super) fn max_pause(&self) -> Duration {
        if self.withholds() { ROUND_WITHHELD } else { MAX_PAUSE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn return_jitter_grows_with_the_outage() {
        let largest = |held, quiet| return_jitter(Duration::from_secs(held), quiet, u64::MAX);
        for (held, quiet, expected) in [
            (0, false, 50),
            (0, true, 1_000),
            (16, true, 2_000),
            (16, false, 2_000),
            (600, false, 5_000),
        ] {
            assert_eq!(largest(held, quiet), Duration::from_millis(expected), "{held} s");
        }
        assert_eq!(return_jitter(Duration::from_secs(600), true, 0), Duration::ZERO);
    }

    #[test]
    fn round_jitters_its_attempts_and_ends() {
        let start = Instant::now();
        let mut round = Round::begin(start, 0, false);
        assert_eq!(round.next(start, 0), Some(Duration::ZERO));
        assert_eq!(round.next(start, u64::MAX), Some(Duration::from_millis(100)));
        for _ in 0..40 {
            assert!(round.next(start, u64::MAX).unwrap() <= MAX_JITTER);
        }
        assert_eq!(round.next(start + ROUND, 0), None);
        let mut quiet = Round::begin(start, 0, true);
        assert_eq!(quiet.next(start, u64::MAX), Some(Duration::from_secs(1)));
        assert_eq!(quiet.next(start, u64::MAX / 2).map(|d| d.as_millis()), Some(1_000));
        let short = || Round::withholding(start, 0, Bytes::new());
        assert!(short().next(start + ROUND_WITHHELD / 2, 0).is_some());
        assert_eq!(short().next(start + ROUND_WITHHELD, 0), None);
    }
}
