//! A round: the attempts to resume a watch after the loss of its stream, and the jitter before each of them.
//!
//! When an apiserver dies, tens of thousands of watches lose their streams at the same moment. So even the
//! first attempt is delayed by a random part of a maximum: 50 ms for a watch that was delivering events, 200 ms
//! for a quiet watch, whose client expects no event so soon. The maximum doubles with every attempt and with
//! every recent resume, up to 2 s.

use bytes::Bytes;
use std::time::{Duration, Instant};

use crate::backoff::Backoff;

/// No attempt starts later than this after the start of the round; the watch then ends.
const ROUND_LIMIT: Duration = Duration::from_secs(30);
/// [`ROUND_LIMIT`] of a round that withholds an ERROR event, for which the client waits.
const WITHHOLDING_ROUND_LIMIT: Duration = Duration::from_secs(3);
/// Time limit of one attempt. An apiserver may answer PINGs and never send a response head, and clients set
/// no timeout for watches.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// [`ATTEMPT_TIMEOUT`] after an endpoint has refused the encoding of the watch. The watch ends cleanly if the others
/// cannot be reached, and the client may get another encoding.
pub const ATTEMPT_TIMEOUT_AFTER_REFUSED_ENCODING: Duration = Duration::from_secs(1);
/// The longest Retry-After that a round waits for. If every usable endpoint asks for a longer pause, the
/// watch ends, and the next request of its client shows the overload.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Maximum jitter of the first attempt for a watch that was delivering events.
const FIRST_JITTER: Duration = Duration::from_millis(50);
/// Maximum jitter of the first attempt for a quiet watch.
const FIRST_JITTER_QUIET: Duration = Duration::from_millis(200);
/// Maximum jitter of a quiet watch after a short total outage, in which every node holds its watches.
const OUTAGE_JITTER_QUIET: Duration = Duration::from_secs(1);
/// Upper bound of the maximum jitter while an endpoint is reachable: 5,000 nodes may make an attempt at
/// the same moment.
const MAX_JITTER: Duration = Duration::from_secs(2);
/// Upper bound of the maximum jitter of the first attempt after a total outage.
const MAX_OUTAGE_JITTER: Duration = Duration::from_secs(5);
/// See [`no_connection_pause`].
const NO_CONNECTION_PAUSE: Duration = Duration::from_secs(1);
/// After a total outage the maximum jitter is the length of the outage divided by this number: the longer
/// the outage, the more nodes hold watches.
const OUTAGE_JITTER_DIVISOR: u32 = 8;

/// The maximum jitter after a total outage in which the watch was held for `held`: at least that of a first attempt, or
/// [`OUTAGE_JITTER_QUIET`], and at most [`MAX_OUTAGE_JITTER`].
pub fn max_outage_jitter(held: Duration, quiet: bool) -> Duration {
    let least = if quiet { OUTAGE_JITTER_QUIET } else { FIRST_JITTER };
    (held / OUTAGE_JITTER_DIVISOR).clamp(least, MAX_OUTAGE_JITTER)
}

/// The pause of a held watch if an apiserver can be reached, but its class has no connection: one second, ±50 %.
pub fn no_connection_pause(rng: &mut fastrand::Rng) -> Duration {
    NO_CONNECTION_PAUSE.mul_f64(0.5 + rng.f64())
}

fn first_jitter(quiet: bool) -> Duration {
    if quiet { FIRST_JITTER_QUIET } else { FIRST_JITTER }
}

/// The maximum jitter of the attempts after this number of recent resumes.
fn attempts(quiet: bool, recent_resumes: u32) -> Backoff {
    Backoff::new(first_jitter(quiet), MAX_JITTER).after(recent_resumes)
}

/// The attempts to resume a watch that follow one loss of its stream.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct ResumeRound {
    end: Instant,
    /// Number of attempts and of recent resumes; each doubles the maximum jitter.
    attempts: Backoff,
    /// The watch was not delivering events shortly before the loss.
    quiet: bool,
    /// The ERROR event that the client receives if no endpoint continues the watch.
    withheld_error: Option<Bytes>,
}

impl ResumeRound {
    /// Begins a round after the loss of a stream.
    pub fn begin(now: Instant, recent_resumes: u32, quiet: bool) -> Self {
        let attempts = attempts(quiet, recent_resumes);
        Self { end: now + ROUND_LIMIT, attempts, quiet, withheld_error: None }
    }

    /// Begins a round that withholds this ERROR event while other endpoints are asked.
    pub fn begin_withholding(now: Instant, recent_resumes: u32, error_event: Bytes) -> Self {
        let end = now + WITHHOLDING_ROUND_LIMIT;
        let withheld_error = Some(error_event);
        Self { end, attempts: attempts(false, recent_resumes), quiet: false, withheld_error }
    }

    /// Counts the next attempt and returns its maximum jitter; `None` if the round is over.
    pub fn start_attempt(&mut self, now: Instant) -> Option<Duration> {
        (now < self.end).then(|| self.attempts.failed())
    }

    /// Whether the watch was not delivering events shortly before the loss.
    pub fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Whether an ERROR event is kept for the client.
    pub fn withholds_error(&self) -> bool {
        self.withheld_error.is_some()
    }

    /// The ERROR event that is kept.
    pub fn take_withheld_error(&mut self) -> Option<Bytes> {
        self.withheld_error.take()
    }

    /// How long one attempt may take.
    pub fn attempt_timeout(&self) -> Duration {
        if self.withholds_error() { WITHHOLDING_ROUND_LIMIT } else { ATTEMPT_TIMEOUT }
    }

    /// The longest Retry-After that the round waits for.
    pub fn max_pause(&self) -> Duration {
        if self.withholds_error() { WITHHOLDING_ROUND_LIMIT } else { MAX_PAUSE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn max_outage_jitter_grows_with_the_outage_within_its_bounds() {
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
    fn start_attempt_doubles_the_jitter_until_the_round_is_over() {
        let start = Instant::now();
        let mut round = ResumeRound::begin(start, 0, false);
        assert_eq!(round.start_attempt(start), Some(Duration::from_millis(50)));
        assert_eq!(round.start_attempt(start), Some(Duration::from_millis(100)));
        for _ in 0..40 {
            assert!(round.start_attempt(start).unwrap() <= MAX_JITTER);
        }
        assert_eq!(round.start_attempt(start + ROUND_LIMIT), None);
        let mut quiet = ResumeRound::begin(start, 0, true);
        assert_eq!(quiet.start_attempt(start), Some(Duration::from_millis(200)));
        assert_eq!(quiet.start_attempt(start), Some(Duration::from_millis(400)));
        let mut resumed_before = ResumeRound::begin(start, 2, false);
        assert_eq!(resumed_before.start_attempt(start), Some(Duration::from_millis(200)));
        let withholding = || ResumeRound::begin_withholding(start, 0, Bytes::new());
        assert!(withholding().start_attempt(start + WITHHOLDING_ROUND_LIMIT / 2).is_some());
        assert_eq!(withholding().start_attempt(start + WITHHOLDING_ROUND_LIMIT), None);
    }
}
