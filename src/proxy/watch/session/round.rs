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
const ROUND_WITHHELD: Duration = Duration::from_secs(3);
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
const MAX_OUTAGE_JITTER: Duration = Duration::from_secs(5);
/// The jitter after a total outage is at most its length divided by this: the longer the outage, the
/// more nodes return from it.
const OUTAGE_JITTER_DIVISOR: u32 = 8;

/// The largest jitter of a watch that was held for `held` in a total outage.
pub fn max_outage_jitter(held: Duration, quiet: bool) -> Duration {
    (held / OUTAGE_JITTER_DIVISOR).clamp(first_jitter(quiet), MAX_OUTAGE_JITTER)
}

fn first_jitter(quiet: bool) -> Duration {
    if quiet { FIRST_JITTER_QUIET } else { FIRST_JITTER }
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
        let end = now + ROUND_WITHHELD;
        Self { end, attempts: recent, quiet: false, error_event: Some(error_event) }
    }

    /// The largest jitter of the next attempt; `None` if the round is over.
    pub fn next_jitter(&mut self, now: Instant) -> Option<Duration> {
        if now >= self.end {
            return None;
        }
        let doubled = first_jitter(self.quiet).saturating_mul(1 << self.attempts.min(10));
        self.attempts += 1;
        Some(doubled.min(MAX_JITTER))
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
    fn outage_jitter_grows_with_the_outage() {
        for (held, quiet, expected) in [
            (0, false, 50),
            (0, true, 1_000),
            (16, true, 2_000),
            (16, false, 2_000),
            (600, false, 5_000),
        ] {
            let jitter = max_outage_jitter(Duration::from_secs(held), quiet);
            assert_eq!(jitter, Duration::from_millis(expected), "{held} s");
        }
    }

    #[test]
    fn round_jitters_its_attempts_and_ends() {
        let start = Instant::now();
        let mut round = Round::begin(start, 0, false);
        assert_eq!(round.next_jitter(start), Some(Duration::from_millis(50)));
        assert_eq!(round.next_jitter(start), Some(Duration::from_millis(100)));
        for _ in 0..40 {
            assert!(round.next_jitter(start).unwrap() <= MAX_JITTER);
        }
        assert_eq!(round.next_jitter(start + ROUND), None);
        let mut quiet = Round::begin(start, 0, true);
        assert_eq!(quiet.next_jitter(start), Some(Duration::from_secs(1)));
        assert_eq!(quiet.next_jitter(start), Some(MAX_JITTER));
        let short = || Round::withholding(start, 0, Bytes::new());
        assert!(short().next_jitter(start + ROUND_WITHHELD / 2).is_some());
        assert_eq!(short().next_jitter(start + ROUND_WITHHELD), None);
    }
}
