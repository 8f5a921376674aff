//! The state machine of the attempts at one request: the first attempt, hedges, retries, and the hold of a new watch.
//! It does no I/O and reads no clock. [`Attempts::step`] takes an [`AttemptInput`], the [`Facts`], the time and a
//! random number generator, and returns the [`AttemptEffect`] that the shell executes. Some facts take a token from a
//! budget or record a rejection. Connections are opaque.
//!
//! A request begins with [`AttemptEffect::Acquire`]. A *round* has a first attempt and its hedges. If all of them fail,
//! the failure of the first one decides on the next round ([`retry::decide`], at most [`ATTEMPTS`] rounds).
//!
//! # Rounds
//!
//! | state | input | next state | effect |
//! |---|---|---|---|
//! | Acquiring | `Granted` | Sent | `Send` |
//! | Acquiring, only on another connection to an endpoint | `NoStream`, other than unreachable | Acquiring | `Acquire` on any |
//! | Acquiring | `NoStream` | Ended | `Refuse` with an error, or with the rejection that is kept |
//! | Acquiring, a new watch that may be held, no rejection is kept | `NoStream`, unreachable | Holding | `Hold` until [`MAX_NEW_WATCH_HOLD`] or the `timeoutSeconds` of the watch after its arrival |
//! | Holding | `OutageEnded` | Holding | `Pause` for a random part of [`max_outage_jitter`] |
//! | Holding | `PauseEnded` | Holding | `Acquire`, without requirements |
//! | Holding | `NoStream`, unreachable | Holding | `Hold` |
//! | Holding | `Granted` | Sent | `Send` |
//! | Holding | `HoldEnded`, or any other `NoStream` | Ended | `Refuse`: a 429, after which client-go does not list again |
//! | Sent, Parallel | `Responded` | Ended | `Respond`; the other attempts are cancelled |
//! | Sent, or Parallel without another attempt | `Failed`: the request may be sent again | Acquiring, next round | `Retry` |
//! | the same | `Failed`: it may not | Ended | `Refuse` |
//! | Sent, or Parallel without another attempt | `Failed`: the group is unavailable, and the request may be sent again | Pausing | `PauseRetry` |
//! | Pausing | `PauseEnded` | Acquiring | `Retry` |
//! | any | an input that is impossible in it | Ended | `Refuse` with `internal_error`; a panic with debug assertions |
//!
//! Whether a request may be sent again follows from the stage of its failure ([`retry::decide`]). Some stages ask for
//! another endpoint:
//!
//! | stage | excluded | sent again if |
//! |---|---|---|
//! | *too old* | the endpoint | [`Facts::may_ask_other`] |
//! | *rejected* | all that reject ([`Facts::record_rejection`]) | it is the first rejection, no hedge of a late head was sent, and [`Facts::may_ask_other`] |
//! | *starting* | those that are not asked ([`Facts::not_asked_after_refusal`]) | it is the first refusal, others may be asked, and there is a token for a hedge |
//! | *group failed* | those at which the group fails | a ready one is left, and there is a token ([`Facts::take_group_token`]) |
//! | *group unavailable* | none | after a pause, if the group was available a moment ago, at most [`MAX_UNAVAILABLE`] times, and there is a token ([`Facts::may_ask_unavailable_group`]); the number of rounds does not count |
//! | *not reached* | the endpoint, the connection, or none ([`AfterNotReached`]) | [`ConsistentRead::not_reached`] |
//!
//! # Hedges
//!
//! Only a request that may reach a handler twice is hedged ([`retry::may_hedge`]), when its body has arrived and while
//! the [budget](super::retry_budget) lasts. The response that arrives first is used.
//!
//! | attempt | input | next | effect |
//! |---|---|---|---|
//! | sent | `Troubled`, it may be hedged, and there is a token | in trouble; a hedge waits for a stream | `Hedge` |
//! | sent | `Troubled`, there is no token | in trouble; it is not hedged any more | `Probe` |
//! | the last, sent, a safe request | `Slow`, another ready endpoint serves the group, and there is a token ([`Facts::take_group_token`]) | late; a hedge waits for a stream | `HedgeLate` on another endpoint |
//! | the last, sent | `Slow`, otherwise | the same | `Wait` |
//! | late | its hedge has ended without a response | sent, as before | `Wait` |
//! | sent | `Troubled`, it is not hedged or is the last of [`MAX_PARALLEL`] | in trouble | `Wait` |
//! | hedge without a stream | `Granted` | sent | `Send` |
//! | hedge without a stream | the request gets its response, the hedged attempt is given up, or the client abandons the request | it is cancelled, and its token goes back to the budget | |
//! | hedge without a stream | `NoHedgeStream` | the hedged attempt pauses for [`HEDGE_INTERVAL`]; if that has failed, it ends | `Wait`, or as `Failed` |
//! | in trouble, pausing | `HedgeDue` | as after `Troubled` | `Hedge`; `Wait` without a token |
//! | in trouble, safe | `Silent`, another connection is live | the same after [`LIVE_CHECK_INTERVAL`] | `Wait` |
//! | in trouble, safe | `Silent`, no other is live | | `GiveUp` |
//! | with a hedge | `Failed` | failed, until its hedge ends | `Wait` |
//! | with a hedge | `Failed`, its connection is silent, and no other is live | its hedge is cancelled, and it ends | as without a hedge |
//! | hedge without a hedge | `Failed` | the hedged attempt pauses; if that has failed, it ends | `Wait`, or as `Failed` |
//!
//! An attempt is given up because a stopped apiserver would answer after 20 s at the earliest, when the connection is
//! dead, and kubelet gives up its lease after 10 s. The pool then holds the request, or the client gets an error.
//!
//! # Heartbeats
//!
//! A heartbeat waits at least [`HEARTBEAT_MIN_WAIT`] for its response. It is given up in the stage *unanswered* as soon
//! as its connection or its endpoint is not healthy after that. Each second before, its endpoint is probed.

mod facts;
mod input;
mod parallel;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use fastrand::Rng;

use self::parallel::{Hedges, Next, Parallel};
use super::info::RequestKind;
use super::overload_rejection;
use super::retry::{self, ATTEMPTS, RetryDecision, RetryRefusal, Stage};
use super::start_up;
use super::status_error::StatusError;
use crate::backoff::Backoff;
use crate::pool::{ConnectionKey, EndpointKey, PreviousFailure, StreamRequirements};
use crate::reads::{AfterNotReached, ConsistentRead, Unasked};
use crate::watch::session::max_outage_jitter;

pub use self::facts::{BodyState, ConnectionFacts, Facts, OtherBudget};
pub use self::input::{
    AttemptEffect, AttemptFailure, AttemptInput, Awaited, HedgeOutcome, HeldResponse, NoStream,
    Refused,
};
pub use self::parallel::{HEDGE_INTERVAL, LIVE_CHECK_INTERVAL, MAX_PARALLEL};

/// How long a new watch is held at most during an outage, before it is answered with 429.
pub const MAX_NEW_WATCH_HOLD: Duration = Duration::from_secs(30);
/// How long a heartbeat waits at least for its response. Two attempts and a pause of 2 s between them (`RetryPeriod` of
/// leader election) fit into 10 s. A healthy apiserver answers in milliseconds, and a webhook for leases may not
/// take long either.
pub const HEARTBEAT_MIN_WAIT: Duration = Duration::from_secs(4);
/// Interval of the probes of the endpoint before [`HEARTBEAT_MIN_WAIT`].
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of the checks of connection and endpoint after [`HEARTBEAT_MIN_WAIT`].
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The pauses before a request of a group that is unavailable is sent again. While one apiserver has lost its path, it and
/// the others change the shared state in turn, for about 30 ms each and at most 0.2 s (measured with Kubernetes 1.36); on
/// busy machines it takes longer.
const UNAVAILABLE_PAUSES: Backoff =
    Backoff::new(Duration::from_millis(30), Duration::from_millis(60)).with_factors(0.75, 1.25);
/// How often such a request is sent again at most: for about three seconds.
const MAX_UNAVAILABLE: u32 = 50;

/// The attempts at one request.
#[derive(Debug)]
pub struct Attempts<C> {
    kind: RequestKind,
    /// Until when the request is held, if it is a new watch.
    hold_until: Instant,
    state: State<C>,
    /// Number of the round, from 1.
    round: u32,
    /// `Some` for a heartbeat.
    heartbeat: Option<Box<Heartbeat>>,
    hedges: Hedges,
    /// The endpoints that do not have the requested version, any more or yet, or that reject requests.
    excluded: Vec<EndpointKey>,
    /// The connections whose apiservers do not have the requested version yet, while others to their endpoints may reach
    /// another one.
    excluded_connections: Vec<ConnectionKey>,
    /// The failure of the round before.
    failed: Option<Box<FailedRound<C>>>,
    /// The client gets this rejection if no other endpoint accepts the request.
    rejection: Option<Box<HeldResponse>>,
    /// An endpoint that has been up longer was asked after a refusal.
    asked_longer_up: bool,
    /// How often the request was sent again because its group is unavailable.
    unavailable: u32,
    /// `None` if the versions of the request mean nothing for its client.
    read: Option<ConsistentRead>,
    /// How the request continues after the last endpoint that had not reached its version.
    after_not_reached: Option<AfterNotReached>,
}

#[derive(Debug)]
enum State<C> {
    /// The first attempt waits for a stream.
    Acquiring,
    /// The new watch is held, or waits for a stream after that. The text is the reason of the hold.
    Holding(Box<str>),
    /// The first attempt is sent, and its connection is not in trouble.
    Sent,
    Parallel(Parallel<C>),
    /// Before the next round.
    Pausing,
    Ended,
}

impl<C> State<C> {
    /// The name, for the message about an input that is impossible.
    const fn name(&self) -> &'static str {
        match self {
            Self::Acquiring => "Acquiring",
            Self::Holding(_) => "Holding",
            Self::Sent => "Sent",
            Self::Parallel(_) => "Parallel",
            Self::Pausing => "Pausing",
            Self::Ended => "Ended",
        }
    }
}

/// The failure of a round, with the state of its connection then.
#[derive(Debug)]
struct FailedRound<C> {
    failure: AttemptFailure<C>,
    connection: ConnectionFacts,
}

/// The checks of a heartbeat.
#[derive(Debug, Default)]
struct Heartbeat {
    /// When the next one is due, once the heartbeat is sent.
    due: Option<Instant>,
    probes_left: u64,
}

impl<C> Attempts<C> {
    /// A request of this kind that has arrived at `requested_at`. The shell acquires a stream for it
    /// ([`AttemptEffect::Acquire`]). `timeout`: the `timeoutSeconds` of a watch. `read`: what it must not be older
    /// than.
    pub fn new(
        kind: RequestKind,
        is_heartbeat: bool,
        (requested_at, timeout): (Instant, Option<Duration>),
        read: Option<ConsistentRead>,
    ) -> Self {
        let max_hold = timeout.unwrap_or(MAX_NEW_WATCH_HOLD).min(MAX_NEW_WATCH_HOLD);
        Self {
            kind,
            hold_until: requested_at + max_hold,
            state: State::Acquiring,
            round: 1,
            heartbeat: is_heartbeat.then(Box::default),
            hedges: Hedges::default(),
            excluded: Vec::new(),
            excluded_connections: Vec::new(),
            failed: None,
            rejection: None,
            asked_longer_up: false,
            unavailable: 0,
            read,
            after_not_reached: None,
        }
    }

    /// Number of hedges that got a stream.
    pub fn hedges_sent(&self) -> u32 {
        self.hedges.sent
    }

    /// The client has abandoned the request, and its attempts are given up.
    pub fn cancel(&mut self) {
        if let State::Parallel(parallel) = &self.state {
            parallel.cancel_after(0, &mut self.hedges);
        }
        self.state = State::Ended;
    }

    /// Whether the last hedge follows a late head, so that its token is of the budget of groups.
    pub fn is_hedged_as_slow(&self) -> bool {
        self.hedges.is_for_slow
    }

    /// What has happened to hedges since the last call, to be counted. Some of it returns a token to the budget
    /// ([`HedgeOutcome::returns_token`]).
    pub fn hedge_outcomes(&mut self) -> impl Iterator<Item = HedgeOutcome> {
        self.hedges.outcomes.drain(..)
    }

    /// The versions that the request asks for; `None` if they mean nothing for its client.
    pub fn read(&self) -> Option<&ConsistentRead> {
        self.read.as_ref()
    }

    /// [`Self::read`], for what is asked and what is answered.
    pub fn read_mut(&mut self) -> Option<&mut ConsistentRead> {
        self.read.as_mut()
    }

    /// How the request continues after the failure of the round before, if its endpoint had not reached the version.
    pub fn after_not_reached(&self) -> Option<AfterNotReached> {
        self.after_not_reached
            .filter(|_| self.failure().is_some_and(|failure| failure.stage == Stage::NotReached))
    }

    /// The failure of the round before.
    pub fn failure(&self) -> Option<&AttemptFailure<C>> {
        self.failed.as_ref().map(|failed| &failed.failure)
    }

    /// The requirements of [`AttemptEffect::Acquire`] and [`AttemptEffect::Retry`], without those that follow from the
    /// kind of the request.
    pub fn requirements(&self) -> StreamRequirements {
        let required = StreamRequirements::default();
        let failed = self.failed.as_deref().filter(|_| !self.is_holding());
        let Some(FailedRound { failure, connection }) = failed else { return required };
        let previous = failure.previous(connection.key);
        StreamRequirements {
            // The request has waited on one connection without a response. Another suspect one would probably not
            // answer either.
            live_only: matches!(previous, PreviousFailure::Silence(..)) && connection.is_silent,
            previous_failure: Some(previous),
            excluded: self.excluded.clone(),
            excluded_connections: self.excluded_connections.clone(),
            without_connection_since: connection.suspect_since,
            ..required
        }
    }

    /// What an attempt waits for; `None` if it has ended. The stream of such an attempt is closed.
    pub fn awaited(&self, attempt: usize) -> Option<Awaited> {
        match &self.state {
            State::Sent if attempt == 0 => {
                let may_be_slow = retry::may_hedge(self.kind);
                Some(Awaited::Trouble { may_be_slow })
            }
            State::Parallel(parallel) => match parallel.awaited(attempt)? {
                Awaited::Trouble { may_be_slow } => {
                    let may_be_slow = may_be_slow && retry::may_hedge(self.kind);
                    Some(Awaited::Trouble { may_be_slow })
                }
                other => Some(other),
            },
            _ => None,
        }
    }

    /// When a heartbeat that waits for its response is to be checked ([`AttemptInput::HeartbeatDue`]).
    pub fn heartbeat_due(&self) -> Option<Instant> {
        self.heartbeat.as_ref()?.due
    }

    /// Processes one input.
    pub fn step(
        &mut self,
        input: AttemptInput<C>,
        facts: &impl Facts<C>,
        now: Instant,
        rng: &mut Rng,
    ) -> AttemptEffect {
        let (name, state) = (input.name(), self.state.name());
        self.next(input, facts, now, rng).unwrap_or_else(|| {
            debug_assert!(false, "input {name} in state {state}, round {}", self.round);
            self.refuse_impossible(name, state)
        })
    }

    /// The effect of an input; `None` if it is impossible in this state.
    fn next(
        &mut self,
        input: AttemptInput<C>,
        facts: &impl Facts<C>,
        now: Instant,
        rng: &mut Rng,
    ) -> Option<AttemptEffect> {
        match input {
            AttemptInput::Granted { attempt } => self.on_granted(attempt, now),
            AttemptInput::Responded { attempt } => self.on_responded(attempt),
            AttemptInput::NoStream { reason } => self.on_no_stream(reason, facts),
            AttemptInput::Failed { attempt, failure } => {
                self.on_failed(attempt, failure, facts, (now, rng))
            }
            AttemptInput::OutageEnded { held } => {
                let delay = max_outage_jitter(held, false).mul_f64(rng.f64());
                self.is_holding().then_some(AttemptEffect::Pause { delay })
            }
            AttemptInput::PauseEnded => self.on_pause_ended(),
            AttemptInput::HoldEnded => self.on_hold_ended(),
            AttemptInput::HeartbeatDue => self.on_heartbeat_due(facts, now),
            AttemptInput::Troubled { .. }
            | AttemptInput::Silent { .. }
            | AttemptInput::HedgeDue { .. }
            | AttemptInput::Slow { .. }
            | AttemptInput::NoHedgeStream { .. } => self.on_parallel(&input, facts, (now, rng)),
            AttemptInput::NotExecutable => None,
        }
    }

    /// A defect, after which the request could wait forever. Nothing is known about attempts that run, and an earlier
    /// rejection would hide it.
    #[cold]
    fn refuse_impossible(&mut self, input: &str, state: &str) -> AttemptEffect {
        self.cancel();
        self.rejection = None;
        let outcome = if retry::may_hedge(self.kind) {
            ""
        } else {
            "; the request may or may not have been carried out"
        };
        let detail = format_args!("input {input} in state {state}{outcome}");
        self.refuse(StatusError::internal_error(detail), None)
    }

    fn is_holding(&self) -> bool {
        matches!(self.state, State::Holding(_))
    }

    fn on_granted(&mut self, attempt: usize, now: Instant) -> Option<AttemptEffect> {
        match &mut self.state {
            State::Parallel(parallel) => return parallel.granted(attempt, &mut self.hedges),
            State::Acquiring | State::Holding(_) if attempt == 0 => {}
            _ => return None,
        }
        self.state = State::Sent;
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.due = Some(now + PROBE_INTERVAL);
            heartbeat.probes_left = HEARTBEAT_MIN_WAIT.as_secs() - 1;
        }
        Some(AttemptEffect::Send { attempt })
    }

    fn on_responded(&mut self, attempt: usize) -> Option<AttemptEffect> {
        self.awaited(attempt).filter(|awaited| *awaited != Awaited::Stream)?;
        if let State::Parallel(parallel) = &self.state {
            parallel.responded(attempt, &mut self.hedges);
        }
        self.state = State::Ended;
        Some(AttemptEffect::Respond { attempt })
    }

    /// The inputs that concern trouble and hedges.
    fn on_parallel(
        &mut self,
        input: &AttemptInput<C>,
        facts: &impl Facts<C>,
        (now, rng): (Instant, &mut Rng),
    ) -> Option<AttemptEffect> {
        if matches!(self.state, State::Sent) {
            self.state = State::Parallel(Parallel::new());
        }
        let State::Parallel(parallel) = &mut self.state else { return None };
        let hedges = &mut self.hedges;
        match *input {
            AttemptInput::Troubled { attempt } => {
                let is_safe = retry::may_hedge(self.kind);
                parallel.troubled(attempt, is_safe, facts, hedges, now)
            }
            AttemptInput::Slow { attempt } => {
                let may_hedge = retry::may_hedge(self.kind) && facts.has_whole_body();
                let excluded = if may_hedge { facts.take_group_token(Some(attempt)) } else { None };
                parallel.slow(attempt, excluded, hedges, now)
            }
            AttemptInput::HedgeDue { attempt } => parallel.hedge_due(attempt, facts, hedges),
            AttemptInput::Silent { attempt } => parallel.silent(attempt, facts, now),
            AttemptInput::NoHedgeStream { attempt } => {
                let next = parallel.no_stream(attempt, hedges, now);
                self.after(next, facts, rng)
            }
            _ => None,
        }
    }

    fn on_failed(
        &mut self,
        attempt: usize,
        failure: AttemptFailure<C>,
        facts: &impl Facts<C>,
        (now, rng): (Instant, &mut Rng),
    ) -> Option<AttemptEffect> {
        match &mut self.state {
            State::Sent if attempt == 0 => Some(self.round_failed(failure, facts, rng)),
            State::Parallel(parallel) => {
                let is_silent = facts.connection(&failure.connection).is_silent;
                let is_given_up = is_silent && !facts.has_live();
                let hedges = &mut self.hedges;
                let next = parallel.failed(attempt, failure, is_given_up, hedges, now);
                self.after(next, facts, rng)
            }
            _ => None,
        }
    }

    /// Continues after a parallel attempt has ended.
    fn after(
        &mut self,
        next: Next<C>,
        facts: &impl Facts<C>,
        rng: &mut Rng,
    ) -> Option<AttemptEffect> {
        match next {
            Next::Wait => Some(AttemptEffect::Wait),
            Next::RoundFailed(failure) => Some(self.round_failed(failure, facts, rng)),
            Next::Impossible => None,
        }
    }

    /// All attempts of the round have failed: the request is sent again or refused.
    fn round_failed(
        &mut self,
        mut failure: AttemptFailure<C>,
        facts: &impl Facts<C>,
        rng: &mut Rng,
    ) -> AttemptEffect {
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.due = None;
        }
        let (connection, body) = (facts.connection(&failure.connection), facts.body());
        let is_held = body == BodyState::Held;
        let (is_retried, refusal) =
            match retry::decide(self.kind, failure.stage, is_held, self.round) {
                RetryDecision::Retry => (true, None),
                RetryDecision::RetryAtOtherEndpoint => (self.asks_other(&failure, facts), None),
                RetryDecision::Refuse(refusal) => (false, Some(refusal)),
            };
        self.keep_rejection(&mut failure, is_retried);
        if is_retried {
            let is_unavailable = failure.stage == Stage::GroupUnavailable;
            self.failed = Some(Box::new(FailedRound { failure, connection }));
            if is_unavailable {
                self.unavailable += 1;
                let delay = UNAVAILABLE_PAUSES.after(self.unavailable).random_pause(rng);
                self.state = State::Pausing;
                return AttemptEffect::PauseRetry { delay };
            }
            self.round += 1;
            self.state = State::Acquiring;
            return AttemptEffect::Retry;
        }
        let (error, refusal) = if body == BodyState::Aborted {
            // The upstream stream was reset, so no handler got a complete body.
            (StatusError::bad_request("the request's body was malformed or broke off"), None)
        } else {
            let AttemptFailure { stage, reason, .. } = &failure;
            let error = retry::client_error(self.kind, *stage, is_held, connection.is_dead, reason);
            (error, refusal)
        };
        self.refuse(error, refusal)
    }

    /// Whether another endpoint is asked after the answer of one. Excludes those that are not.
    fn asks_other(&mut self, failure: &AttemptFailure<C>, facts: &impl Facts<C>) -> bool {
        let endpoint = failure.endpoint;
        match failure.stage {
            Stage::Rejected => {
                let headers = failure.response.as_ref().map(|response| &response.0.headers);
                let pause = headers.map_or(Duration::ZERO, overload_rejection::pause);
                self.excluded.extend(facts.record_rejection(endpoint, pause));
                // A hedge of a late head has asked another one already.
                let has_asked_other = self.hedges.is_for_slow && self.hedges.sent > 0;
                self.rejection.is_none()
                    && !has_asked_other
                    && facts.may_ask_other(&self.excluded, OtherBudget::Rejected)
            }
            Stage::Starting if self.asked_longer_up => false,
            Stage::Starting => {
                let not_asked = facts.not_asked_after_refusal(endpoint);
                let Some(not_asked) = not_asked.filter(|_| facts.take_hedge_token()) else {
                    return false;
                };
                self.excluded.extend(not_asked);
                self.asked_longer_up = true;
                true
            }
            Stage::GroupUnavailable => {
                self.unavailable < MAX_UNAVAILABLE && facts.may_ask_unavailable_group()
            }
            Stage::GroupFailed => {
                self.excluded.push(endpoint);
                let failing = facts.take_group_token(None);
                let is_other_left = failing.is_some();
                self.excluded.extend(failing.into_iter().flatten());
                is_other_left
            }
            Stage::NotReached => self.asks_other_for_version(failure, facts),
            _ => {
                self.excluded.push(endpoint);
                facts.may_ask_other(&self.excluded, OtherBudget::TooOld)
            }
        }
    }

    fn asks_other_for_version(
        &mut self,
        failure: &AttemptFailure<C>,
        facts: &impl Facts<C>,
    ) -> bool {
        let Some(read) = &mut self.read else { return false };
        let connection = facts.connection(&failure.connection).key;
        self.excluded.push(failure.endpoint);
        let unasked = facts.unasked(&failure.connection, &self.excluded);
        let after = read.not_reached(failure.reached, unasked, ATTEMPTS - self.round);
        match after {
            AfterNotReached::AskAgain => drop(self.excluded.pop()),
            AfterNotReached::AskOther | AfterNotReached::AskMostRecent
                if unasked == Unasked::Connection =>
            {
                self.excluded.pop();
                self.excluded_connections.push(connection);
            }
            AfterNotReached::AskMostRecent => self.excluded.clear(),
            AfterNotReached::SendOriginal => {
                self.excluded.clear();
                self.excluded_connections.clear();
            }
            AfterNotReached::AskOther | AfterNotReached::Respond => {}
        }
        self.after_not_reached = Some(after);
        after != AfterNotReached::Respond
    }

    /// Keeps the rejection of a failed attempt if it says more than the one before. The first one for overload is kept
    /// while other endpoints are tried, and the last 410, or 504 of a version that the client asks for; any other
    /// rejection only if it is the last. A refusal of an apiserver that may be starting says less than any other.
    fn keep_rejection(&mut self, failure: &mut AttemptFailure<C>, is_retried: bool) {
        let kept = self.rejection.as_ref().map(|kept| kept.0.status.as_u16());
        let is_kept = match failure.stage {
            Stage::Rejected | Stage::Starting | Stage::GroupFailed | Stage::GroupUnavailable => {
                kept.is_none_or(start_up::is_refusal)
            }
            Stage::TooOld => true,
            Stage::NotReached => {
                !self.read.as_ref().is_some_and(ConsistentRead::has_floor) || !is_retried
            }
            _ => !is_retried,
        };
        let response = failure.response.take();
        if is_kept {
            self.rejection = response.or(self.rejection.take());
        }
    }

    fn on_no_stream(&mut self, reason: NoStream, facts: &impl Facts<C>) -> Option<AttemptEffect> {
        let is_new_watch = self.kind == RequestKind::Watch && self.rejection.is_none();
        let has_excluded = !self.excluded_connections.is_empty();
        Some(match (reason, &self.state) {
            (NoStream::Other(_), State::Acquiring) if has_excluded => {
                // No other connection was opened in time.
                self.excluded_connections.clear();
                AttemptEffect::Acquire
            }
            (NoStream::Other(error), State::Acquiring | State::Holding(_)) => {
                self.refuse(error, None)
            }
            (NoStream::Unreachable(_), State::Holding(_)) => self.hold(),
            (NoStream::Unreachable(reasons), State::Acquiring)
                if is_new_watch && facts.may_hold() =>
            {
                self.state = State::Holding(reasons.into());
                self.hold()
            }
            (NoStream::Unreachable(reasons), State::Acquiring) => self.unreachable(&reasons),
            _ => return None,
        })
    }

    fn hold(&self) -> AttemptEffect {
        AttemptEffect::Hold { until: self.hold_until }
    }

    fn on_pause_ended(&mut self) -> Option<AttemptEffect> {
        match self.state {
            State::Holding(_) => Some(AttemptEffect::Acquire),
            State::Pausing => {
                self.state = State::Acquiring;
                Some(AttemptEffect::Retry)
            }
            _ => None,
        }
    }

    fn on_hold_ended(&mut self) -> Option<AttemptEffect> {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Holding(reasons) => Some(self.unreachable(&reasons)),
            state => {
                self.state = state;
                None
            }
        }
    }

    fn unreachable(&mut self, reasons: &str) -> AttemptEffect {
        let error = match self.kind {
            RequestKind::Watch => StatusError::no_upstream_for_watch(reasons),
            _ => StatusError::no_upstream(reasons),
        };
        self.refuse(error, None)
    }

    fn refuse(&mut self, error: StatusError, refusal: Option<RetryRefusal>) -> AttemptEffect {
        self.state = State::Ended;
        AttemptEffect::Refuse(Box::new(match self.rejection.take() {
            Some(rejection) => Refused::Rejection(rejection),
            None => Refused::Error(error, refusal),
        }))
    }

    fn on_heartbeat_due(&mut self, facts: &impl Facts<C>, now: Instant) -> Option<AttemptEffect> {
        let heartbeat = self.heartbeat.as_mut()?;
        let due = heartbeat.due.as_mut()?;
        if heartbeat.probes_left > 0 {
            heartbeat.probes_left -= 1;
            *due += PROBE_INTERVAL;
            return Some(AttemptEffect::Probe { attempt: 0 });
        }
        *due = now + HEALTH_CHECK_INTERVAL;
        let Some(ill_health) = facts.ill_health(0) else { return Some(AttemptEffect::Wait) };
        let seconds = HEARTBEAT_MIN_WAIT.as_secs();
        let reason = format!("no response for {seconds} s, and {ill_health},").into();
        Some(AttemptEffect::GiveUp { attempt: 0, stage: Stage::Unanswered, reason })
    }
}
