//! Judges the answers to attempts at going on with a watch on another apiserver.
//!
//! | answer | what follows |
//! |---|---|
//! | 200 with the Content-Type that the client was given | it goes on here |
//! | 410, or an ERROR event instead of the history | another peer; not this one again: history is per server |
//! | 429, 5xx | another peer; this one not before its Retry-After |
//! | none: connecting failed, it was lost before a head, or 10 s passed without one | another peer |
//! | no peer can be reached | it is held until one can, or until its own deadline; then a new round begins |
//! | 200 with another Content-Type, any other status (401, 403, 404, 406, …) | no peer will do better: give up |
//!
//! A round of attempts lasts 30 s, and ends earlier when no peer is left to ask. Where the watch has
//! an answer already, and others are only asked for a better one, it lasts 3 s.
//!
//! The first attempt of a round is jittered, since an apiserver that dies leaves tens of thousands of
//! watches at one moment: by 50 ms for a watch that was delivering, by 1 s for a quiet one, whose
//! client cannot notice.

use std::time::{Duration, Instant};

/// How long a watch looks for an apiserver that takes it.
const ROUND: Duration = Duration::from_secs(30);
/// How long it looks for a better answer than the one that is withheld from its client.
pub const BRIEF: Duration = Duration::from_secs(3);
/// How long one attempt may take: a server that answers PINGs and nothing else would hold a watch up
/// for ever, and its client has no time limit of its own.
pub const ATTEMPT: Duration = Duration::from_secs(10);
/// The largest jitter before the first attempt of a round for a watch that was delivering; it doubles
/// with each attempt.
const FIRST_JITTER: Duration = Duration::from_millis(50);
/// The same for a quiet watch. A dead connection is noticed within 2.3 s, and a quiet watch may be
/// silent for 3.5 s.
const FIRST_JITTER_QUIET: Duration = Duration::from_secs(1);
/// The largest jitter of all: 5,000 nodes may be doing the same at the same moment.
const MAX_JITTER: Duration = Duration::from_secs(2);

/// Largest jitter after a total outage, and the part of its length that it is: the longer it lasted,
/// the more nodes are in it.
const RETURN_JITTER: Duration = Duration::from_secs(5);
const RETURN_JITTER_PART: u32 = 8;

/// How long a watch that was `held` during a total outage waits before it asks; `random` is any
/// number, evenly distributed.
pub fn return_jitter(held: Duration, quiet: bool, random: u64) -> Duration {
    let first = if quiet { FIRST_JITTER_QUIET } else { FIRST_JITTER };
    (held / RETURN_JITTER_PART).clamp(first, RETURN_JITTER).mul_f64(part(random))
}

/// A random number as a part of the whole.
fn part(random: u64) -> f64 {
    random as f64 / u64::MAX as f64
}

/// What an attempt came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer<'a> {
    /// A response head.
    Head {
        /// Its status code.
        status: u16,
        /// Its Content-Type.
        content_type: Option<&'a str>,
        /// Its Retry-After, where it is a number of seconds.
        retry_after: Option<Duration>,
    },
    /// The head was accepted, and then an ERROR event came where history was asked for.
    ErrorEvent,
    /// Connecting failed, or the connection was lost before a head came, or none came in time.
    Unreachable,
}

/// What follows from an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// The watch goes on here.
    Accept,
    /// Ask another peer.
    Another(Shun),
    /// No peer will do better.
    GiveUp,
}

/// For how long the peer that answered is not to be asked again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shun {
    /// Prefer others, no more.
    Not,
    /// Not before this has passed.
    For(Duration),
    /// Not in this round.
    Round,
}

/// The table above.
pub fn judge(answer: Answer<'_>, content_type: &str) -> Judgement {
    match answer {
        Answer::Head { status: 200, content_type: Some(theirs), .. }
            if theirs.trim().eq_ignore_ascii_case(content_type.trim()) =>
        {
            Judgement::Accept
        }
        Answer::Head { status: 410, .. } | Answer::ErrorEvent => Judgement::Another(Shun::Round),
        Answer::Head { status: 429 | 500..=599, retry_after, .. } => {
            Judgement::Another(retry_after.map_or(Shun::Not, Shun::For))
        }
        Answer::Unreachable => Judgement::Another(Shun::Not),
        Answer::Head { .. } => Judgement::GiveUp,
    }
}

/// The attempts that follow one loss.
#[derive(Debug, Clone)]
pub struct Round {
    began: Instant,
    lasts: Duration,
    first_jitter: Duration,
    attempts: u32,
}

impl Round {
    /// A round begins with the loss of a stream. `recent` rounds in the last minute make it wait
    /// longer, as attempts do; so does a watch that is `quiet`.
    pub fn begin(now: Instant, recent: u32, quiet: bool) -> Self {
        let first_jitter = if quiet { FIRST_JITTER_QUIET } else { FIRST_JITTER };
        Self { began: now, lasts: ROUND, first_jitter, attempts: recent }
    }

    /// The same for one that looks for a better answer than the one there is.
    pub fn brief(now: Instant, recent: u32) -> Self {
        Self { lasts: BRIEF, ..Self::begin(now, recent, false) }
    }

    /// How long to wait before the next attempt; `random` is any number, evenly distributed.
    ///
    /// `None` when the round is over.
    pub fn next(&mut self, now: Instant, random: u64) -> Option<Duration> {
        if now.saturating_duration_since(self.began) >= self.lasts {
            return None;
        }
        let most = self.first_jitter.saturating_mul(1 << self.attempts.min(10)).min(MAX_JITTER);
        self.attempts += 1;
        Some(most.mul_f64(part(random)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        let head = |status, content_type| Answer::Head {
            status,
            content_type: Some(content_type),
            retry_after: Some(Duration::from_secs(3)),
        };
        let json = "application/json";
        let again = Judgement::Another(Shun::For(Duration::from_secs(3)));
        for (answer, judgement) in [
            (head(200, json), Judgement::Accept),
            (head(200, "application/vnd.kubernetes.protobuf;stream=watch"), Judgement::GiveUp),
            (
                Answer::Head { status: 200, content_type: None, retry_after: None },
                Judgement::GiveUp,
            ),
            (head(201, json), Judgement::GiveUp),
            (head(301, json), Judgement::GiveUp),
            (head(400, json), Judgement::GiveUp),
            (head(401, json), Judgement::GiveUp),
            (head(403, json), Judgement::GiveUp),
            (head(404, json), Judgement::GiveUp),
            (head(406, json), Judgement::GiveUp),
            (head(410, json), Judgement::Another(Shun::Round)),
            (head(429, json), again),
            (head(500, json), again),
            (head(503, json), again),
            (
                Answer::Head { status: 504, content_type: None, retry_after: None },
                Judgement::Another(Shun::Not),
            ),
            (Answer::ErrorEvent, Judgement::Another(Shun::Round)),
            (Answer::Unreachable, Judgement::Another(Shun::Not)),
        ] {
            assert_eq!(judge(answer, json), judgement, "{answer:?}");
        }
    }

    #[test]
    fn return_jitter_grows_with_the_outage() {
        let most = |held, quiet| return_jitter(Duration::from_secs(held), quiet, u64::MAX);
        for (held, quiet, expected) in [
            (0, false, 50),
            (0, true, 1_000),
            (16, true, 2_000),
            (16, false, 2_000),
            (600, false, 5_000),
        ] {
            assert_eq!(most(held, quiet), Duration::from_millis(expected), "{held} s");
        }
        assert_eq!(return_jitter(Duration::from_secs(600), true, 0), Duration::ZERO);
    }

    #[test]
    fn a_round_is_jittered_and_ends() {
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
        assert!(Round::brief(start, 0).next(start + BRIEF / 2, 0).is_some());
        assert_eq!(Round::brief(start, 0).next(start + BRIEF, 0), None);
    }
}
