//! What may be sent again, and when.
//!
//! | request | not sent | unprocessed | sent | head | body |
//! |---|---|---|---|---|---|
//! | get, list, discovery | again | again | again | again | reset |
//! | watch | again | again | again | again | resume |
//! | log, log -f | again | again | again | again | reset |
//! | create, update, patch, delete, … | again | again | **fail** | forward | reset |
//! | create of *Review types, dryRun=All | again | again | again | again | reset |
//! | exec, attach, port-forward, proxy | again | fail | fail | forward | reset |
//!
//! *Again*: if what has come of its body is held; what has none always is. Where the body is not held,
//! the client gets a Retry-After, but only for a request that was not sent or unprocessed. *Not sent*: connect or
//! TLS failed, or the stream was never opened. *Unprocessed*: the server says so, by
//! `REFUSED_STREAM`, by a GOAWAY whose last stream is below this one, or by one of the two answers
//! that kube-apiserver gives before any handler runs while it shuts down. *Sent*: no response head.
//! *Head*: a head, and nothing of it forwarded; what may be sent again is held back until its
//! beginning is there ([`super::body_prefix`]). *Body*: part of the answer is out.
//!
//! A watch that is answered with 410 is asked for at the other ready endpoints, once each: history
//! is per server, and one that has just started knows none. That has a [`RetryBudget`]: a client that asks
//! with an old version again and again would otherwise ask all of them each time. Beyond it the
//! client gets the 410 of the first.
//!
//! A write whose fate is unknown is never sent again, and its failure carries no Retry-After:
//! client-go re-sends every verb on a 429 or 5xx that does.

use super::request_info::RequestKind;

/// How far a request got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Connect or TLS failed, or the stream was never opened.
    NotSent,
    /// The server says that it did nothing.
    Unprocessed,
    /// No response head.
    Sent,
    /// A head, nothing of it forwarded.
    Head,
    /// Part of the answer is forwarded.
    Body,
}

/// What to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryDecision {
    /// Send it again, on another connection, if the whole body so far is still held, else fail. Any
    /// method may have a body, a GET too.
    Again,
    /// Answer with an error of ours.
    Fail,
    /// Forward what came.
    Forward,
    /// Reset the client's stream: truncation must not look complete.
    Reset,
    /// Go on with the watch elsewhere.
    Resume,
}

/// The table above.
pub fn decide(kind: RequestKind, stage: Stage) -> RetryDecision {
    match (kind, stage) {
        (RequestKind::Watch, Stage::Body) => RetryDecision::Resume,
        (_, Stage::Body) => RetryDecision::Reset,
        (
            RequestKind::Read | RequestKind::Watch | RequestKind::Log | RequestKind::SafeCreate,
            _,
        )
        | (RequestKind::Write, Stage::NotSent | Stage::Unprocessed)
        | (RequestKind::Tunnel, Stage::NotSent) => RetryDecision::Again,
        (RequestKind::Write | RequestKind::Tunnel, Stage::Head) => RetryDecision::Forward,
        (RequestKind::Write, Stage::Sent)
        | (RequestKind::Tunnel, Stage::Unprocessed | Stage::Sent) => RetryDecision::Fail,
    }
}

/// Whether a second attempt may run beside the first: only what may be sent again while the first
/// may still reach its handler.
pub fn may_hedge(kind: RequestKind) -> bool {
    decide(kind, Stage::Sent) == RetryDecision::Again
}

/// How far a stream got that ended with this error before its response head (h2's terms: since
/// 0.4.20 a GOAWAY is the error only of streams above its last stream id).
pub fn stage_of(error: &h2::Error) -> Stage {
    let refused = error.reason() == Some(h2::Reason::REFUSED_STREAM);
    if error.is_remote() && (error.is_go_away() || refused) {
        Stage::Unprocessed
    } else {
        Stage::Sent
    }
}

/// What we ask beyond what clients ask, limited to a tenth of their requests over time, so that an
/// overloaded apiserver is not asked for more and no client multiplies what it asks; with a burst
/// for what may come at once.
///
/// It belongs to a worker's line to an upstream, not to a listener: it is the apiservers that are
/// spared, and listeners that share them share what they can bear.
#[derive(Debug)]
pub struct RetryBudget {
    most: f64,
    tokens: std::cell::Cell<f64>,
}

/// Least number of hedges at once: a switch that forgets flows forgets them all, and kube-apiserver
/// allows 100 streams on each.
const HEDGES: usize = 128;
/// Largest number of second opinions at once: two for each watch of a client that watches
/// everything (kube-controller-manager: about 200 kinds, all at once when it starts).
const OPINIONS: usize = 512;
/// What one request earns.
const SHARE: f64 = 0.1;

impl RetryBudget {
    /// For attempts beside one that waits; what waits on a connection of so many streams may be
    /// hedged at once.
    pub fn hedges(streams: usize) -> Self {
        Self::of(streams.max(HEDGES))
    }

    /// For asking others where one has answered a client's watch with 410.
    pub fn opinions() -> Self {
        Self::of(OPINIONS)
    }

    fn of(most: usize) -> Self {
        Self { most: most as f64, tokens: std::cell::Cell::new(most as f64) }
    }

    /// A request was made.
    pub fn earn(&self) {
        self.tokens.set((self.tokens.get() + SHARE).min(self.most));
    }

    /// Takes one, if there is one.
    pub fn take(&self) -> bool {
        let left = self.tokens.get() - 1.0;
        if left < 0.0 {
            return false;
        }
        self.tokens.set(left);
        true
    }

    /// What was taken is not spent: nothing was sent.
    pub fn give_back(&self) {
        self.tokens.set((self.tokens.get() + 1.0).min(self.most));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell() {
        use RetryDecision::{Again, Fail, Forward, Reset, Resume};
        use Stage::{Body, Head, NotSent, Sent, Unprocessed};
        let stages = [NotSent, Unprocessed, Sent, Head, Body];
        for (kind, row) in [
            (RequestKind::Read, [Again, Again, Again, Again, Reset]),
            (RequestKind::Watch, [Again, Again, Again, Again, Resume]),
            (RequestKind::Log, [Again, Again, Again, Again, Reset]),
            (RequestKind::Write, [Again, Again, Fail, Forward, Reset]),
            (RequestKind::SafeCreate, [Again, Again, Again, Again, Reset]),
            (RequestKind::Tunnel, [Again, Fail, Fail, Forward, Reset]),
        ] {
            for (stage, expected) in stages.into_iter().zip(row) {
                assert_eq!(decide(kind, stage), expected, "{kind:?} {stage:?}");
            }
        }
    }

    #[test]
    fn only_what_is_safe_is_hedged() {
        assert!(
            may_hedge(RequestKind::Read)
                && may_hedge(RequestKind::Watch)
                && may_hedge(RequestKind::Log)
        );
        assert!(may_hedge(RequestKind::SafeCreate));
        assert!(!may_hedge(RequestKind::Write) && !may_hedge(RequestKind::Tunnel));
    }

    #[test]
    fn reasons_of_our_own_are_not_proof() {
        assert_eq!(stage_of(&h2::Reason::REFUSED_STREAM.into()), Stage::Sent);
        assert_eq!(stage_of(&h2::Reason::INTERNAL_ERROR.into()), Stage::Sent);
    }

    #[test]
    fn a_budget_is_a_tenth_with_a_burst() {
        for (budget, burst) in [
            (RetryBudget::hedges(1), 128),
            (RetryBudget::hedges(1_000), 1_000),
            (RetryBudget::opinions(), 512),
        ] {
            let taken = |times: u32| (0..times).filter(|_| budget.take()).count();
            assert_eq!(taken(2_000), burst);
            assert!(!budget.take());
            (0..1_000).for_each(|_| budget.earn());
            let tenth = taken(1_000);
            assert!((99..=101).contains(&tenth), "{tenth}");
            (0..100_000).for_each(|_| budget.earn());
            assert_eq!(taken(2_000), burst, "what is not used is not saved up");
            budget.give_back();
            assert_eq!(taken(2_000), 1);
            (0..2_000).for_each(|_| budget.give_back());
            assert_eq!(taken(2_000), burst, "nor is what comes back");
        }
    }
}
