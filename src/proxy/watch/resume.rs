//! Judges the answers to attempts at going on with a watch on another apiserver.
//!
//! | answer | what follows |
//! |---|---|
//! | 200 with the Content-Type that the client was given | it goes on here |
//! | 410, or an ERROR event instead of the history | another peer; not this one again: history is per server |
//! | 429, 5xx | another peer; this one not before its Retry-After |
//! | none: connecting failed, it was lost before a head, or 10 s passed without one | another peer |
//! | 200 with another Content-Type, any other status (401, 403, 404, 406, …) | no peer will do better: give up |
//!
//! A round of attempts lasts 30 s, and ends earlier when no peer is left to ask. Where the watch has
//! an answer already, and others are only asked for a better one, it lasts 3 s.

use std::time::{Duration, Instant};

/// How long a watch looks for an apiserver that takes it.
const ROUND: Duration = Duration::from_secs(30);
/// How long it looks for a better answer than the one that is withheld from its client.
pub const BRIEF: Duration = Duration::from_secs(3);
/// How long one attempt may take: a server that answers PINGs and nothing else would hold a watch up
/// for ever, and its client has no time limit of its own.
pub const ATTEMPT: Duration = Duration::from_secs(10);
/// The largest jitter before the first attempt of a round; it doubles with each.
const FIRST_JITTER: Duration = Duration::from_millis(50);
/// The largest jitter of all: 5,000 nodes may be doing the same at the same moment.
const MAX_JITTER: Duration = Duration::from_secs(2);

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
    attempts: u32,
}

impl Round {
    /// A round begins with the loss of a stream. `recent` rounds in the last minute make it wait
    /// longer, as attempts do.
    pub fn begin(now: Instant, recent: u32) -> Self {
        Self { began: now, lasts: ROUND, attempts: recent }
    }

    /// The same for one that looks for a better answer than the one there is.
    pub fn brief(now: Instant, recent: u32) -> Self {
        Self { lasts: BRIEF, ..Self::begin(now, recent) }
    }

    /// How long to wait before the next attempt; `random` is any number, evenly distributed.
    ///
    /// `None` when the round is over.
    pub fn next(&mut self, now: Instant, random: u64) -> Option<Duration> {
        if now.saturating_duration_since(self.began) >= self.lasts {
            return None;
        }
        let most = FIRST_JITTER.saturating_mul(1 << self.attempts.min(10)).min(MAX_JITTER);
        self.attempts += 1;
        Some(most.mul_f64(random as f64 / u64::MAX as f64))
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
    fn a_round_is_jittered_and_ends() {
        let start = Instant::now();
        let mut round = Round::begin(start, 0);
        assert_eq!(round.next(start, 0), Some(Duration::ZERO));
        assert_eq!(round.next(start, u64::MAX), Some(Duration::from_millis(100)));
        for _ in 0..40 {
            assert!(round.next(start, u64::MAX).unwrap() <= MAX_JITTER);
        }
        assert_eq!(round.next(start + ROUND, 0), None);
        assert!(Round::brief(start, 0).next(start + BRIEF / 2, 0).is_some());
        assert_eq!(Round::brief(start, 0).next(start + BRIEF, 0), None);
    }
}
