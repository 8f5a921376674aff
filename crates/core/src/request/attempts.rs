//! The state machine of the attempts at one request: the first attempt, hedges, retries, and the hold of a new watch. It
//! is pure: no I/O, no clock, no randomness. [`Attempts::step`] takes an [`Input`], the time and a random number
//! generator, and returns the [`Effect`] that the shell executes. Endpoints and connections are opaque keys.
//!
//! A request begins with [`Effect::Acquire`]. A *round* has a first attempt and its hedges. If all of them fail, the
//! failure of the first one decides on the next round ([`retry::decide`], at most [`ATTEMPTS`] rounds).
//!
//! # Rounds
//!
//! | state | input | next state | effect |
//! |---|---|---|---|
//! | Acquiring | `Granted` | Sent | `Send` |
//! | Acquiring | `NoStream` | Ended | `Refuse` with an error, or with the rejection that is kept |
//! | Acquiring, a new watch that may be held, no rejection is kept | `NoStream`, unreachable | Holding | `Hold` until [`MAX_NEW_WATCH_HOLD`] or the `timeoutSeconds` of the watch after its arrival |
//! | Holding | `OutageEnded` | Holding | `Pause` for a random part of [`max_outage_jitter`] |
//! | Holding | `PauseEnded` | Holding | `Acquire`, without requirements |
//! | Holding | `NoStream`, unreachable | Holding | `Hold` |
//! | Holding | `Granted` | Sent | `Send` |
//! | Holding | `HoldEnded`, or any other `NoStream` | Ended | `Refuse`: a 429, after which client-go does not list again |
//! | Sent, Parallel | `Responded` | Ended | `Respond`; the other attempts are cancelled |
//! | Sent, or Parallel without another attempt | `Failed` | Failed | `ReportFacts` |
//! | Failed | `FailureFacts`: the request may be sent again | Acquiring, next round | `Retry` |
//! | Failed | `FailureFacts`: it may not | Ended | `Refuse` |
//! | Failed, *too old* | `FailureFacts` | Failed; the endpoint is excluded | `AskForOther` |
//! | Failed, *rejected* | `FailureFacts` | Failed | `RecordRejection` |
//! | Failed, *rejected* | `Rejecting` | Failed; these endpoints are excluded | `AskForOther`; for a second rejection `Refuse` |
//! | Failed, *starting* | `FailureFacts` | Failed | `AskForLongerUp`; for a second refusal `Refuse` |
//! | Failed, *starting* | `LongerUp`: others are not asked | Acquiring, next round; these endpoints are excluded | `Retry` |
//! | Failed, *starting* | `LongerUp`: none | Ended | `Refuse` |
//! | Failed, *not reached* | `FailureFacts` | Failed; the endpoint is excluded | `AskForVersion` |
//! | Failed, *not reached* | `AfterNotReached`: other | Acquiring, next round | `Retry` |
//! | Failed, *not reached* | `AfterNotReached`: again | as before; the endpoint is not excluded | `Retry` |
//! | Failed, *not reached* | `AfterNotReached`: original | as before; no endpoint is excluded | `Retry` |
//! | Failed | `OtherEndpoint`, `AfterNotReached`: none | Ended | `Refuse` |
//!
//! # Hedges
//!
//! Only a request that may reach a handler twice is hedged ([`retry::may_hedge`]), when its body has arrived and while
//! the [budget](super::retry_budget) lasts. The response that arrives first is used.
//!
//! | attempt | input | next | effect |
//! |---|---|---|---|
//! | sent | `Troubled` | in trouble | `TakeHedgeToken`; `Wait` if it is not hedged or is the last of [`MAX_PARALLEL`] |
//! | in trouble | `HedgeToken`, taken | a hedge waits for a stream | `Hedge` |
//! | in trouble | `HedgeToken`, none left | it is not hedged any more | `Wait` |
//! | hedge without a stream | `Granted` | sent | `Send` |
//! | hedge without a stream | the request gets its response, the hedged attempt is given up, or the client abandons the request | it is cancelled, and its token goes back to the budget | |
//! | hedge without a stream | `NoHedgeStream` | the hedged attempt pauses for [`HEDGE_INTERVAL`]; if that has failed, it ends | `Wait`, or as `Failed` |
//! | in trouble, pausing | `HedgeDue` | in trouble | `TakeHedgeToken` |
//! | in trouble, safe | `Silent`, another connection is live | the same after [`LIVE_CHECK_INTERVAL`] | `Wait` |
//! | in trouble, safe | `Silent`, no other is live | | `GiveUp` |
//! | with a hedge | `Failed`, not given up | failed, until its hedge ends | `Wait` |
//! | with a hedge | `Failed`, given up | its hedge is cancelled, and it ends | as without a hedge |
//! | hedge without a hedge | `Failed` | the hedged attempt pauses; if that has failed, it ends | `Wait`, or as `Failed` |
//!
//! An attempt is given up because a stopped apiserver would answer after 20 s at the earliest, when the connection is
//! dead, and kubelet gives up its lease after 10 s. The pool then holds the request, or the client gets an error.
//!
//! # Heartbeats
//!
//! A heartbeat waits at least [`HEARTBEAT_MIN_WAIT`] for its response. It is given up in the stage *unanswered* as soon
//! as its connection or its endpoint is not healthy after that. Each second before, its endpoint is probed.

mod input;
mod parallel;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use fastrand::Rng;

use self::parallel::{Hedges, Parallel};
use super::info::RequestKind;
use super::overload_rejection;
use super::retry::{self, ATTEMPTS, Refusal, RetryDecision, Stage};
use super::start_up;
use super::status_error::StatusError;
use crate::watch::session::max_outage_jitter;

pub use self::input::{
    AfterNotReached, Awaited, BodyState, ConnectionFacts, Effect, Failure, FailureCause,
    HedgeOutcome, HeldResponse, Input, MissedVersion, NoStream, NotReached, OtherBudget, Refused,
    Requirements, VersionOrigin,
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

/// The attempts at one request.
#[derive(Debug)]
pub struct Attempts<E, C> {
    kind: RequestKind,
    /// Until when the request is held, if it is a new watch.
    hold_until: Instant,
    state: State<E, C>,
    /// Number of the round, from 1.
    round: u32,
    /// `Some` for a heartbeat.
    heartbeat: Option<Box<Heartbeat>>,
    hedges: Hedges,
    /// The endpoints that do not have the requested version, any more or yet, or that reject requests.
    excluded: Vec<E>,
    /// The failure of the round before, or of this one while its retry is decided.
    failed: Option<Box<FailedRound<E, C>>>,
    /// The client gets this rejection if no other endpoint accepts the request.
    rejection: Option<Box<HeldResponse>>,
    /// An endpoint that has been up longer was asked after a refusal.
    asked_longer_up: bool,
}

#[derive(Debug)]
enum State<E, C> {
    /// The first attempt waits for a stream.
    Acquiring,
    /// The new watch is held, or waits for a stream after that. The text is the reason of the hold.
    Holding(Box<str>),
    /// The first attempt is sent, and its connection is not in trouble.
    Sent,
    Parallel(Parallel<E, C>),
    /// The round has failed, and its retry is decided.
    Failed,
    Ended,
}

/// The failure of a round, with the facts by which its retry is decided.
#[derive(Debug)]
struct FailedRound<E, C> {
    failure: Failure<E, C>,
    connection: ConnectionFacts,
    body: BodyState,
}

/// The checks of a heartbeat.
#[derive(Debug, Default)]
struct Heartbeat {
    /// When the next one is due, once the heartbeat is sent.
    due: Option<Instant>,
    probes_left: u64,
}

impl<E: Clone, C> Attempts<E, C> {
    /// A request of this kind that has arrived at `requested_at`. The shell acquires a stream for it
    /// ([`Effect::Acquire`]). `timeout`: the `timeoutSeconds` of a watch.
    pub fn new(
        kind: RequestKind,
        is_heartbeat: bool,
        requested_at: Instant,
        timeout: Option<Duration>,
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
            failed: None,
            rejection: None,
            asked_longer_up: false,
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

    /// What has happened to hedges since the last call, to be counted. Some of it returns a token to the budget
    /// ([`HedgeOutcome::returns_token`]).
    pub fn hedge_outcomes(&mut self) -> impl Iterator<Item = HedgeOutcome> {
        self.hedges.outcomes.drain(..)
    }

    /// The failure of the round before, or of this one while its retry is decided.
    pub fn failure(&self) -> Option<&Failure<E, C>> {
        self.failed.as_ref().map(|failed| &failed.failure)
    }

    /// The endpoints that are not asked again.
    pub fn excluded(&self) -> &[E] {
        &self.excluded
    }

    /// The requirements of [`Effect::Acquire`] and [`Effect::Retry`].
    pub fn requirements(&self) -> Requirements<'_, E, C> {
        let failed = match self.state {
            State::Holding(_) => None,
            _ => self.failed.as_ref(),
        };
        let Some(FailedRound { failure, connection, .. }) = failed.map(|failed| &**failed) else {
            return Requirements {
                previous_failure: None,
                excluded: &[],
                live_only: false,
                without_connection_since: None,
            };
        };
        let cause = failure.cause();
        Requirements {
            previous_failure: Some((cause, &failure.connection)),
            excluded: &self.excluded,
            // The request has waited on one connection without a response. Another suspect one would probably not
            // answer either.
            live_only: cause == FailureCause::Silence && connection.is_silent,
            without_connection_since: connection.suspect_since,
        }
    }

    /// What an attempt waits for; `None` if it has ended. The stream of such an attempt is closed.
    pub fn awaited(&self, attempt: usize) -> Option<Awaited> {
        match &self.state {
            State::Sent => (attempt == 0).then_some(Awaited::Trouble),
            State::Parallel(parallel) => parallel.awaited(attempt),
            _ => None,
        }
    }

    /// When a heartbeat that waits for its response is to be checked ([`Input::HeartbeatDue`]).
    pub fn heartbeat_due(&self) -> Option<Instant> {
        self.heartbeat.as_ref()?.due
    }

    /// Processes one input.
    pub fn step(&mut self, input: Input<E, C>, now: Instant, rng: &mut Rng) -> Effect {
        match input {
            Input::Granted { attempt } => self.on_granted(attempt, now),
            Input::Responded { attempt } => self.on_responded(attempt),
            Input::NoStream { reason, may_hold } => self.on_no_stream(reason, may_hold),
            Input::Failed { attempt, failure, is_given_up } => {
                self.on_failed(attempt, failure, is_given_up, now)
            }
            Input::FailureFacts { connection, body } => self.on_failure_facts(connection, body),
            Input::Rejecting(endpoints) => self.on_rejecting(endpoints),
            Input::OtherEndpoint { may_be_asked } => self.decided(may_be_asked, None),
            Input::LongerUp { not_asked } => self.on_longer_up(not_asked),
            Input::AfterNotReached(after) => self.on_after_not_reached(after),
            Input::OutageEnded { held } => {
                Effect::Pause { delay: max_outage_jitter(held, false).mul_f64(rng.f64()) }
            }
            Input::PauseEnded => Effect::Acquire,
            Input::HoldEnded => self.on_hold_ended(),
            Input::HeartbeatDue { ill_health } => self.on_heartbeat_due(ill_health, now),
            Input::Silent { attempt, has_live: false } => {
                Effect::GiveUp { attempt, stage: Stage::NoHead, reason: "PING unanswered".into() }
            }
            Input::Troubled { .. }
            | Input::Silent { .. }
            | Input::HedgeDue { .. }
            | Input::HedgeToken { .. }
            | Input::NoHedgeStream { .. } => self.on_parallel(&input, now),
        }
    }

    fn on_granted(&mut self, attempt: usize, now: Instant) -> Effect {
        if let State::Parallel(parallel) = &mut self.state {
            return parallel.granted(attempt, &mut self.hedges);
        }
        self.state = State::Sent;
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.due = Some(now + PROBE_INTERVAL);
            heartbeat.probes_left = HEARTBEAT_MIN_WAIT.as_secs() - 1;
        }
        Effect::Send { attempt }
    }

    fn on_responded(&mut self, attempt: usize) -> Effect {
        if let State::Parallel(parallel) = &self.state {
            parallel.responded(attempt, &mut self.hedges);
        }
        self.state = State::Ended;
        Effect::Respond { attempt }
    }

    /// The inputs that concern trouble and hedges.
    fn on_parallel(&mut self, input: &Input<E, C>, now: Instant) -> Effect {
        if matches!(self.state, State::Sent) {
            self.state = State::Parallel(Parallel::new());
        }
        let State::Parallel(parallel) = &mut self.state else { return Effect::Wait };
        let hedges = &mut self.hedges;
        match *input {
            Input::Troubled { attempt, has_whole_body } => {
                let is_safe = retry::may_hedge(self.kind);
                parallel.troubled(attempt, is_safe, has_whole_body, hedges, now)
            }
            Input::HedgeToken { attempt, taken, has_better_endpoint } => {
                parallel.hedge_token(attempt, taken, has_better_endpoint, hedges)
            }
            Input::HedgeDue { attempt } => parallel.hedge_due(attempt),
            Input::Silent { attempt, .. } => {
                parallel.silent(attempt, now);
                Effect::Wait
            }
            Input::NoHedgeStream { attempt } => {
                let ended = parallel.no_stream(attempt, hedges, now);
                ended.unwrap_or_else(|failure| self.round_failed(failure))
            }
            _ => Effect::Wait,
        }
    }

    fn on_failed(
        &mut self,
        attempt: usize,
        failure: Failure<E, C>,
        is_given_up: bool,
        now: Instant,
    ) -> Effect {
        if let State::Parallel(parallel) = &mut self.state {
            let ended = parallel.failed(attempt, failure, is_given_up, &mut self.hedges, now);
            return ended.unwrap_or_else(|failure| self.round_failed(failure));
        }
        self.round_failed(failure)
    }

    fn round_failed(&mut self, failure: Failure<E, C>) -> Effect {
        self.state = State::Failed;
        if let Some(heartbeat) = &mut self.heartbeat {
            heartbeat.due = None;
        }
        let connection = ConnectionFacts::default();
        let body = BodyState::Held;
        self.failed = Some(Box::new(FailedRound { failure, connection, body }));
        Effect::ReportFacts
    }

    fn on_failure_facts(&mut self, connection: ConnectionFacts, body: BodyState) -> Effect {
        let Some(failed) = &mut self.failed else { return Effect::Wait };
        (failed.connection, failed.body) = (connection, body);
        let failure = &failed.failure;
        let is_held = body == BodyState::Held;
        match (retry::decide(self.kind, failure.stage, is_held, self.round), failure.stage) {
            (RetryDecision::Retry, _) => self.decided(true, None),
            (RetryDecision::Refuse(refusal), _) => self.decided(false, Some(refusal)),
            (RetryDecision::RetryAtOtherEndpoint, Stage::Rejected) => {
                let headers = failure.response.as_ref().map(|response| &response.0.headers);
                let pause = headers.map_or(Duration::ZERO, overload_rejection::pause);
                Effect::RecordRejection { pause }
            }
            (RetryDecision::RetryAtOtherEndpoint, Stage::Starting) if self.asked_longer_up => {
                self.decided(false, None)
            }
            (RetryDecision::RetryAtOtherEndpoint, Stage::Starting) => Effect::AskForLongerUp,
            (RetryDecision::RetryAtOtherEndpoint, stage) => {
                self.excluded.push(failure.endpoint.clone());
                if stage == Stage::NotReached {
                    Effect::AskForVersion { may_ask_other: self.round + 1 < ATTEMPTS }
                } else {
                    Effect::AskForOther { budget: OtherBudget::TooOld }
                }
            }
        }
    }

    fn on_rejecting(&mut self, endpoints: Vec<E>) -> Effect {
        self.excluded.extend(endpoints);
        if self.rejection.is_some() {
            return self.decided(false, None);
        }
        Effect::AskForOther { budget: OtherBudget::Rejected }
    }

    fn on_longer_up(&mut self, not_asked: Option<Vec<E>>) -> Effect {
        let is_asked = not_asked.is_some();
        self.excluded.extend(not_asked.into_iter().flatten());
        self.asked_longer_up |= is_asked;
        self.decided(is_asked, None)
    }

    fn on_after_not_reached(&mut self, after: AfterNotReached) -> Effect {
        match after {
            AfterNotReached::AskAgain => drop(self.excluded.pop()),
            AfterNotReached::SendOriginal => self.excluded.clear(),
            AfterNotReached::AskOther | AfterNotReached::Respond => {}
        }
        self.decided(after != AfterNotReached::Respond, None)
    }

    /// The request is sent again after a failed round, or refused.
    fn decided(&mut self, is_retried: bool, refusal: Option<Refusal>) -> Effect {
        let Some(failed) = &mut self.failed else { return Effect::Wait };
        let response = failed.failure.response.take();
        // The first rejection for overload is kept while other endpoints are tried, and the last 410, or 504 of a version
        // that the client asks for; any other rejection only if it is the last. A refusal of an apiserver that may
        // be starting says less than any other rejection.
        let held = self.rejection.as_ref().map(|held| held.0.status.as_u16());
        let is_kept = match failed.failure.stage {
            Stage::Rejected | Stage::Starting => held.is_none_or(start_up::is_refusal),
            Stage::TooOld => true,
            Stage::NotReached => !failed.failure.version.is_floor || !is_retried,
            _ => !is_retried,
        };
        if is_kept {
            self.rejection = response.or(self.rejection.take());
        }
        if is_retried {
            self.round += 1;
            self.state = State::Acquiring;
            return Effect::Retry;
        }
        let (failure, is_held) = (&failed.failure, failed.body == BodyState::Held);
        let (error, refusal) = if failed.body == BodyState::Aborted {
            // The upstream stream was reset, so no handler got a complete body.
            (StatusError::bad_request("the request's body was malformed or broke off"), None)
        } else {
            let is_dead = failed.connection.is_dead;
            let reason = &failure.reason;
            (retry::client_error(self.kind, failure.stage, is_held, is_dead, reason), refusal)
        };
        self.refuse(error, refusal)
    }

    fn on_no_stream(&mut self, reason: NoStream, may_hold: bool) -> Effect {
        match reason {
            NoStream::Unreachable(_) if matches!(self.state, State::Holding(_)) => self.hold(),
            NoStream::Unreachable(reasons)
                if may_hold && self.kind == RequestKind::Watch && self.rejection.is_none() =>
            {
                self.state = State::Holding(reasons.into());
                self.hold()
            }
            NoStream::Unreachable(reasons) => self.unreachable(&reasons),
            NoStream::Other(error) => self.refuse(error, None),
        }
    }

    fn hold(&self) -> Effect {
        Effect::Hold { until: self.hold_until }
    }

    fn on_hold_ended(&mut self) -> Effect {
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Holding(reasons) => self.unreachable(&reasons),
            _ => self.unreachable(""),
        }
    }

    fn unreachable(&mut self, reasons: &str) -> Effect {
        let error = match self.kind {
            RequestKind::Watch => StatusError::no_upstream_for_watch(reasons),
            _ => StatusError::no_upstream(reasons),
        };
        self.refuse(error, None)
    }

    fn refuse(&mut self, error: StatusError, refusal: Option<Refusal>) -> Effect {
        self.state = State::Ended;
        Effect::Refuse(Box::new(match self.rejection.take() {
            Some(rejection) => Refused::Rejection(rejection),
            None => Refused::Error(error, refusal),
        }))
    }

    fn on_heartbeat_due(&mut self, ill_health: Option<String>, now: Instant) -> Effect {
        let Some(heartbeat) = &mut self.heartbeat else { return Effect::Wait };
        if heartbeat.probes_left > 0 {
            heartbeat.probes_left -= 1;
            heartbeat.due = heartbeat.due.map(|due| due + PROBE_INTERVAL);
            return Effect::Probe { attempt: 0 };
        }
        heartbeat.due = Some(now + HEALTH_CHECK_INTERVAL);
        let Some(ill_health) = ill_health else { return Effect::Wait };
        let seconds = HEARTBEAT_MIN_WAIT.as_secs();
        let reason = format!("no response for {seconds} s, and {ill_health},").into();
        Effect::GiveUp { attempt: 0, stage: Stage::Unanswered, reason }
    }
}
