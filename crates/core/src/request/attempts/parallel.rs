//! The parallel attempts of a round: the first one, whose connection is in trouble, and its hedges. Each hedge belongs to
//! the attempt before it, which may be a hedge itself: a switch that loses its flow table breaks all connections.

use std::time::{Duration, Instant};

use super::facts::Facts;
use super::input::{AttemptEffect, AttemptFailure, Awaited, HedgeOutcome};
use crate::pool::EndpointKey;
use crate::request::retry::Stage;

/// Maximum number of parallel attempts, the first included.
pub const MAX_PARALLEL: usize = 4;
/// Pause after a hedge that found no connection or failed. A request reaches an apiserver within this time after it
/// returns.
pub const HEDGE_INTERVAL: Duration = Duration::from_secs(1);
/// How often a request on a silent connection checks whether another connection of its class is still live.
pub const LIVE_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The hedges of a request.
#[derive(Debug, Default)]
pub(super) struct Hedges {
    /// Number of hedges that got a stream.
    pub(super) sent: u32,
    /// What has not been counted yet.
    pub(super) outcomes: Vec<HedgeOutcome>,
    /// The last hedge follows a late head, and has taken a token of the budget of groups.
    pub(super) is_for_slow: bool,
}

impl Hedges {
    /// An attempt has ended that was hedged `since` this number of hedges, if it was. Nothing is reported if none of its
    /// hedges got a stream.
    fn ended(&mut self, since: Option<u32>, outcome: HedgeOutcome) {
        if since.is_some_and(|since| self.sent > since) {
            self.outcomes.push(outcome);
        }
    }
}

/// What follows the end of an attempt.
pub(super) enum Next<C> {
    /// The other attempts go on.
    Wait,
    /// All attempts have failed. The failure is that of the first one.
    RoundFailed(AttemptFailure<C>),
    /// The attempt did not run.
    Impossible,
}

/// See the module documentation. The last attempt is the only one that may have no hedge.
#[derive(Debug)]
pub(super) struct Parallel<C>(Vec<Attempt<C>>);

#[derive(Debug)]
enum Attempt<C> {
    /// A hedge without a stream.
    Acquiring,
    /// Its connection is not in trouble.
    Sent,
    Troubled {
        hedging: Hedging,
        /// It is hedged because its response head is late, and its connection is not in trouble.
        is_late: bool,
        /// When the silence of its connection is considered; `None` for a request that must not be sent twice.
        silence_from: Option<Instant>,
    },
    /// It has failed, and its hedge runs. `since`: as in [`Hedging`].
    Failed { failure: AttemptFailure<C>, since: u32 },
}

/// Whether an attempt is hedged. `since`: the number of hedges that the request had sent before those of this attempt.
#[derive(Debug, Clone, Copy)]
enum Hedging {
    /// It must not be hedged, or the budget is used up.
    Off,
    /// A hedge asks for a token, waits for a stream, or runs.
    Running { since: u32 },
    /// The last hedge has ended. The next one follows trouble at or after this time.
    Paused { since: u32, until: Instant },
}

impl<C> Attempt<C> {
    /// The number of hedges that the request had sent before those of this attempt, if it is hedged.
    fn hedged_since(&self) -> Option<u32> {
        match *self {
            Self::Troubled {
                hedging: Hedging::Running { since } | Hedging::Paused { since, .. },
                ..
            }
            | Self::Failed { since, .. } => Some(since),
            _ => None,
        }
    }
}

impl<C> Parallel<C> {
    /// The first attempt of a round, on a connection without trouble.
    pub(super) fn new() -> Self {
        Self(vec![Attempt::Sent])
    }

    /// What an attempt waits for; `None` if it has ended.
    pub(super) fn awaited(&self, attempt: usize) -> Option<Awaited> {
        match *self.0.get(attempt)? {
            Attempt::Sent => Some(Awaited::Trouble { may_be_slow: self.0.len() < MAX_PARALLEL }),
            Attempt::Troubled { hedging, silence_from, .. } => {
                let hedge_from = match hedging {
                    Hedging::Paused { until, .. } => Some(until),
                    Hedging::Off | Hedging::Running { .. } => None,
                };
                Some(Awaited::Loss { silence_from, hedge_from })
            }
            Attempt::Acquiring => Some(Awaited::Stream),
            Attempt::Failed { .. } => None,
        }
    }

    /// The connection of an attempt is in trouble.
    pub(super) fn troubled(
        &mut self,
        attempt: usize,
        is_safe: bool,
        facts: &impl Facts<C>,
        hedges: &mut Hedges,
        now: Instant,
    ) -> Option<AttemptEffect> {
        let Some(troubled @ Attempt::Sent) = self.0.get_mut(attempt) else { return None };
        let may_hedge = is_safe && facts.has_whole_body() && attempt + 1 < MAX_PARALLEL;
        let hedging =
            if may_hedge { Hedging::Running { since: hedges.sent } } else { Hedging::Off };
        let silence_from = is_safe.then_some(now);
        *troubled = Attempt::Troubled { hedging, is_late: false, silence_from };
        let effect =
            if may_hedge { self.hedge(attempt, true, facts, hedges) } else { AttemptEffect::Wait };
        Some(effect)
    }

    /// The response head of the last attempt is late. `excluded`: where it is not hedged; `None` if it is not hedged at all.
    pub(super) fn slow(
        &mut self,
        attempt: usize,
        excluded: Option<Vec<EndpointKey>>,
        hedges: &mut Hedges,
        now: Instant,
    ) -> Option<AttemptEffect> {
        let is_last = attempt + 1 == self.0.len() && self.0.len() < MAX_PARALLEL;
        let Some(slow @ Attempt::Sent) = self.0.get_mut(attempt) else { return None };
        let Some(excluded) = excluded.filter(|_| is_last) else { return Some(AttemptEffect::Wait) };
        let hedging = Hedging::Running { since: hedges.sent };
        *slow = Attempt::Troubled { hedging, is_late: true, silence_from: Some(now) };
        hedges.is_for_slow = true;
        self.0.push(Attempt::Acquiring);
        Some(AttemptEffect::HedgeLate { attempt: attempt + 1, excluded })
    }

    /// The pause after a failed hedge is over.
    pub(super) fn hedge_due(
        &mut self,
        attempt: usize,
        facts: &impl Facts<C>,
        hedges: &mut Hedges,
    ) -> Option<AttemptEffect> {
        let Some(Attempt::Troubled { hedging, .. }) = self.0.get_mut(attempt) else { return None };
        let Hedging::Paused { since, .. } = *hedging else { return None };
        *hedging = Hedging::Running { since };
        Some(self.hedge(attempt, false, facts, hedges))
    }

    /// Hedges the last attempt, unless the budget is used up.
    fn hedge(
        &mut self,
        attempt: usize,
        probe: bool,
        facts: &impl Facts<C>,
        hedges: &mut Hedges,
    ) -> AttemptEffect {
        if facts.take_hedge_token() {
            hedges.is_for_slow = false;
            self.0.push(Attempt::Acquiring);
            // All connections to a degraded endpoint are in trouble.
            let exclude = facts.has_better_endpoint(attempt);
            return AttemptEffect::Hedge { attempt: attempt + 1, exclude, probe };
        }
        hedges.outcomes.push(HedgeOutcome::OverBudget);
        if let Some(Attempt::Troubled { hedging, .. }) = self.0.get_mut(attempt) {
            *hedging = Hedging::Off;
        }
        if probe { AttemptEffect::Probe { attempt } } else { AttemptEffect::Wait }
    }

    /// A hedge has a stream.
    pub(super) fn granted(&mut self, attempt: usize, hedges: &mut Hedges) -> Option<AttemptEffect> {
        let Some(hedge @ Attempt::Acquiring) = self.0.get_mut(attempt) else { return None };
        *hedge = Attempt::Sent;
        hedges.sent += 1;
        Some(AttemptEffect::Send { attempt })
    }

    /// The connection of an attempt at a safe request is silent.
    pub(super) fn silent(
        &mut self,
        attempt: usize,
        facts: &impl Facts<C>,
        now: Instant,
    ) -> Option<AttemptEffect> {
        let Some(Attempt::Troubled { silence_from: Some(from), .. }) = self.0.get_mut(attempt)
        else {
            return None;
        };
        if !facts.has_live() {
            let reason = "PING unanswered".into();
            return Some(AttemptEffect::GiveUp { attempt, stage: Stage::NoHead, reason });
        }
        *from = now + LIVE_CHECK_INTERVAL;
        Some(AttemptEffect::Wait)
    }

    /// The attempts after this number of them are given up. Only the last one can be without a stream.
    pub(super) fn cancel_after(&self, attempts: usize, hedges: &mut Hedges) {
        if self.0.iter().skip(attempts).any(|attempt| matches!(attempt, Attempt::Acquiring)) {
            hedges.outcomes.push(HedgeOutcome::Cancelled);
        }
    }

    /// An attempt has its response.
    pub(super) fn responded(&self, attempt: usize, hedges: &mut Hedges) {
        self.cancel_after(attempt, hedges);
        for (index, other) in self.0.iter().enumerate().take(attempt + 1) {
            let outcome =
                if index < attempt { HedgeOutcome::Hedge } else { HedgeOutcome::Original };
            hedges.ended(other.hedged_since(), outcome);
        }
    }

    /// An attempt has failed. Its hedge goes on, unless the attempt is given up.
    pub(super) fn failed(
        &mut self,
        attempt: usize,
        failure: AttemptFailure<C>,
        is_given_up: bool,
        hedges: &mut Hedges,
        now: Instant,
    ) -> Next<C> {
        let Some(failed @ (Attempt::Sent | Attempt::Troubled { .. })) = self.0.get_mut(attempt)
        else {
            return Next::Impossible;
        };
        let since = failed.hedged_since();
        if let Some(since) = since
            && attempt + 1 < self.0.len()
            && !is_given_up
        {
            self.0[attempt] = Attempt::Failed { failure, since };
            return Next::Wait;
        }
        hedges.ended(since, HedgeOutcome::Failed);
        self.cancel_after(attempt, hedges);
        self.0.truncate(attempt);
        if self.0.is_empty() { Next::RoundFailed(failure) } else { self.hedge_ended(hedges, now) }
    }

    /// The pool has no stream for a hedge.
    pub(super) fn no_stream(
        &mut self,
        attempt: usize,
        hedges: &mut Hedges,
        now: Instant,
    ) -> Next<C> {
        let Some(Attempt::Acquiring) = self.0.get(attempt) else { return Next::Impossible };
        hedges.outcomes.push(HedgeOutcome::NoConnection);
        self.0.truncate(attempt);
        self.hedge_ended(hedges, now)
    }

    /// The hedge of the last attempt has ended without a response.
    fn hedge_ended(&mut self, hedges: &mut Hedges, now: Instant) -> Next<C> {
        while let Some(last) = self.0.pop() {
            let since = last.hedged_since();
            match last {
                Attempt::Failed { failure, .. } => {
                    hedges.ended(since, HedgeOutcome::Failed);
                    if self.0.is_empty() {
                        return Next::RoundFailed(failure);
                    }
                }
                Attempt::Troubled { is_late: true, .. } => {
                    // Another endpoint may answer, and is asked after the same time.
                    hedges.ended(since, HedgeOutcome::Failed);
                    self.0.push(Attempt::Sent);
                    break;
                }
                Attempt::Troubled { silence_from, is_late: false, .. } => {
                    // The attempt may wait 20 s for a stopped apiserver, and another endpoint may return before that.
                    let until = now + HEDGE_INTERVAL;
                    let since = since.unwrap_or(hedges.sent);
                    let hedging = Hedging::Paused { since, until };
                    self.0.push(Attempt::Troubled { hedging, is_late: false, silence_from });
                    break;
                }
                other => {
                    self.0.push(other);
                    break;
                }
            }
        }
        Next::Wait
    }
}
