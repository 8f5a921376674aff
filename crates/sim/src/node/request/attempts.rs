//! Executes the effects of `Attempts` of the core, and tells it what happens to the attempts that run.

use std::rc::Rc;
use std::time::Instant;

use jackstay_core::pool::{EndpointKey, PreviousFailure, Refusal, Requirements};
use jackstay_core::probe::schedule::ProbeTrigger;
use jackstay_core::request::attempts::{
    Attempts, Awaited, BodyState, Effect, FailureCause, Input, MAX_PARALLEL, NoStream, NotReached,
    OtherBudget, VersionOrigin,
};
use jackstay_core::request::info::RequestKind;
use jackstay_core::request::retry::Stage;
use jackstay_core::request::retry_budget::RetryBudget;
use jackstay_core::request::status_error::StatusError;
use jackstay_core::watch::session::no_connection_pause;

use super::{AttemptInput, Hold, HoldStep, RequestId, Slot, State};
use crate::net::ConnectionId;
use crate::node::pool::{Previous, Purpose};
use crate::node::{Io, Node, NodeTimer};
use crate::trace::Entry;

/// Puts the tokens of hedges that were not sent back into the budget.
pub(super) fn return_tokens(
    attempts: &mut Attempts<usize, ConnectionId>,
    hedge_budget: &RetryBudget,
) {
    for _ in attempts.hedge_outcomes().filter(|outcome| outcome.returns_token()) {
        hedge_budget.release();
    }
}

impl Node {
    /// Takes a stream for the first attempt of a round.
    pub(super) fn acquire_first(&mut self, io: &mut Io<'_>, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if let Some(hold) = &mut request.hold {
            hold.next = HoldStep::Stream;
        }
        let attempts = &request.attempts;
        let required = attempts.requirements();
        let previous = required.previous_failure.map(|(cause, &connection)| Previous {
            connection,
            endpoint: attempts.failure().map_or(0, |failure| failure.endpoint),
            refused: cause == FailureCause::Refusal,
        });
        let required = Requirements {
            long_running: request.request.info.long_running(),
            may_be_held: request.kind == RequestKind::Watch,
            live_only: required.live_only,
            previous_failure: previous.map(PreviousFailure::from),
            excluded: required.excluded.iter().map(|&at| EndpointKey(at)).collect(),
            without_connection_since: required.without_connection_since,
        };
        self.acquire(io, id, Purpose::Attempt, required);
    }

    /// Takes a stream for a hedge, on another connection than that of the attempt before.
    fn acquire_hedge(&mut self, io: &mut Io<'_>, id: RequestId, attempt: usize, exclude: bool) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Some(hedged) = attempt.checked_sub(1).and_then(|at| request.connection_of(at)) else {
            return;
        };
        request.slots[attempt] = Slot::Acquiring;
        let (long_running, may_be_held) =
            (request.request.info.long_running(), request.kind == RequestKind::Watch);
        let endpoint = self.endpoint_of(hedged);
        let previous = Previous { connection: hedged, endpoint, refused: false };
        let required = Requirements {
            long_running,
            may_be_held,
            live_only: true,
            previous_failure: Some(previous.into()),
            excluded: exclude.then_some(EndpointKey(endpoint)).into_iter().collect(),
            without_connection_since: self.connection_facts(hedged).suspect_since,
        };
        self.acquire(io, id, Purpose::Hedge(attempt), required);
    }

    /// The pool has a stream for an attempt.
    pub(in crate::node) fn attempt_granted(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        attempt: usize,
        connection: ConnectionId,
    ) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if request.hold.take().is_some() {
            request.requested_at = io.s.now;
        }
        request.slots[attempt] = Slot::Granted(connection);
        self.attempts_step(io, id, Input::Granted { attempt });
    }

    /// The pool has no stream for the first attempt of a round.
    pub(in crate::node) fn attempt_unavailable(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        why: Refusal,
    ) {
        let reason = match why {
            Refusal::Unreachable | Refusal::Closed | Refusal::Stopped => {
                NoStream::Unreachable("no endpoint is usable".to_owned())
            }
            Refusal::Exhausted | Refusal::NoCredential => {
                NoStream::Other(StatusError::too_many_requests("every stream is taken"))
            }
        };
        self.attempts_step(io, id, Input::NoStream { reason, may_hold: true });
    }

    /// The pool has no stream for a hedge.
    pub(in crate::node) fn hedge_unavailable(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        attempt: usize,
    ) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.slots[attempt] = Slot::Ended;
        self.attempts_step(io, id, Input::NoHedgeStream { attempt });
    }

    /// Gives the machine an input, and executes the effects until it waits.
    pub(super) fn attempts_step(&mut self, io: &mut Io<'_>, id: RequestId, input: AttemptInput) {
        let mut next = Some(input);
        while let Some(input) = next {
            let Some(request) = self.requests.get_mut(&id) else { return };
            let effect = request.attempts.step(input, io.s.now, &mut io.s.rng);
            return_tokens(&mut request.attempts, &self.hedge_budget);
            self.end_slots(io, id);
            next = self.execute_attempts(io, id, effect);
        }
        self.arm_request(io, id);
    }

    /// Drops the attempts that have ended.
    fn end_slots(&mut self, io: &mut Io<'_>, id: RequestId) {
        for attempt in 0..MAX_PARALLEL {
            let Some(request) = self.requests.get_mut(&id) else { return };
            if request.attempts.awaited(attempt).is_some() {
                continue;
            }
            match std::mem::take(&mut request.slots[attempt]) {
                Slot::Sent { stream, .. } => self.cancel_stream(io, stream),
                Slot::Acquiring => {
                    self.forget_waits(id, |purpose| purpose == Purpose::Hedge(attempt));
                }
                Slot::Ended | Slot::Granted(_) => {}
            }
        }
    }

    fn execute_attempts(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        effect: Effect,
    ) -> Option<AttemptInput> {
        match effect {
            Effect::Acquire => self.acquire_first(io, id),
            Effect::Retry => {
                self.requests.get_mut(&id)?.rounds += 1;
                self.acquire_first(io, id);
            }
            Effect::Send { attempt } => self.send_attempt(io, id, attempt),
            Effect::TakeHedgeToken { attempt, probe } => {
                let endpoint = self.endpoint_of(self.requests.get(&id)?.connection_of(attempt)?);
                if probe {
                    self.request_probe(io, endpoint, ProbeTrigger::PassiveEvidence);
                }
                let taken = self.hedge_budget.take();
                let has_better_endpoint = self.has_better_endpoint(endpoint);
                self.requests.get_mut(&id)?.avoided = has_better_endpoint.then_some(endpoint);
                return Some(Input::HedgeToken { attempt, taken, has_better_endpoint });
            }
            Effect::Hedge { attempt, exclude } => self.acquire_hedge(io, id, attempt, exclude),
            Effect::GiveUp { attempt, stage, .. } => {
                return self.give_up(io, id, attempt, stage, "given up");
            }
            Effect::Probe { attempt } => {
                let endpoint = self.endpoint_of(self.requests.get(&id)?.connection_of(attempt)?);
                self.request_probe(io, endpoint, ProbeTrigger::PassiveEvidence);
            }
            Effect::Hold { until } => self.hold(io, id, until),
            Effect::Pause { delay } => {
                let at = io.s.now + delay;
                self.requests.get_mut(&id)?.hold.as_mut()?.next = HoldStep::Jitter(at);
            }
            Effect::ReportFacts => {
                let connection = self.requests.get(&id)?.attempts.failure()?.connection;
                let connection = self.connection_facts(connection);
                return Some(Input::FailureFacts { connection, body: BodyState::Held });
            }
            Effect::RecordRejection { pause } => {
                let endpoint = self.requests.get(&id)?.attempts.failure()?.endpoint;
                return Some(Input::Rejecting(self.record_rejection(
                    endpoint,
                    io.s.now + pause,
                    io.s.now,
                )));
            }
            Effect::AskForOther { budget } => return self.ask_for_other(id, budget),
            Effect::AskForLongerUp => return self.ask_for_longer_up(id),
            Effect::AskForVersion { may_ask_other } => {
                let excluded = self.requests.get(&id)?.attempts.excluded();
                let missed = NotReached {
                    origin: VersionOrigin::Client,
                    asked_elsewhere: excluded.len() > 1,
                    other_ready: may_ask_other && self.has_ready_besides(excluded),
                };
                return Some(Input::AfterNotReached(missed.next()));
            }
            Effect::Refuse(refused) => self.refuse(io, id, &refused),
            Effect::Respond { .. } | Effect::Wait => {}
        }
        None
    }

    fn send_attempt(&mut self, io: &mut Io<'_>, id: RequestId, attempt: usize) {
        let Some(request) = self.requests.get(&id) else { return };
        let Slot::Granted(connection) = request.slots[attempt] else { return };
        let (sent, number) = (Rc::clone(&request.request), request.rounds);
        let stream = (connection, self.open_stream(io, connection, id, &sent));
        let (node, hedge) = (self.index, attempt > 0);
        io.s.record(Entry::Attempt { node, request: id, connection, number, hedge });
        let endpoint = self.endpoint_of(connection);
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.slots[attempt] = Slot::Sent { stream, head: None };
        if hedge {
            request.hedges += 1;
            self.checks.hedged(self.settings.max_streams, request.avoided == Some(endpoint));
        }
    }

    fn ask_for_other(&mut self, id: RequestId, budget: OtherBudget) -> Option<AttemptInput> {
        let is_ready = self.has_ready_besides(self.requests.get(&id)?.attempts.excluded());
        let budget = match budget {
            OtherBudget::TooOld => &self.too_old_budget,
            OtherBudget::Rejected => &self.rejected_budget,
        };
        Some(Input::OtherEndpoint { may_be_asked: is_ready && budget.take() })
    }

    fn ask_for_longer_up(&mut self, id: RequestId) -> Option<AttemptInput> {
        let refusing = self.requests.get(&id)?.attempts.failure()?.endpoint;
        let not_asked = self.not_asked_after_refusal(refusing);
        Some(Input::LongerUp { not_asked: not_asked.filter(|_| self.hedge_budget.take()) })
    }

    /// Holds a new watch.
    fn hold(&mut self, io: &mut Io<'_>, id: RequestId, until: Instant) {
        let next = if self.pool.is_total_outage() {
            HoldStep::Outage
        } else {
            HoldStep::NoConnection(io.s.now + no_connection_pause(&mut io.s.rng))
        };
        if let Some(request) = self.requests.get_mut(&id) {
            request.hold = Some(Hold { until, began: io.s.now, next });
        }
    }

    /// The outage is over for a new watch, if it is held.
    pub(in crate::node) fn hold_outage_ended(&mut self, io: &mut Io<'_>, id: RequestId) {
        let Some(hold) = self.requests.get(&id).and_then(|request| request.hold) else { return };
        if hold.next == HoldStep::Outage {
            self.attempts_step(io, id, Input::OutageEnded { held: io.s.now - hold.began });
        }
    }

    /// Starts a timer for the next event of a request, unless an earlier one runs.
    pub(super) fn arm_request(&mut self, io: &mut Io<'_>, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Some(at) = request.due_at(io.s.now) else { return };
        if request.timer_at.is_none_or(|armed| at < armed) {
            request.timer_at = Some(at);
            self.start_timer(io.s, at, NodeTimer::Request(id));
        }
    }

    /// A timer of a request has ended.
    pub(in crate::node) fn request_timer(&mut self, io: &mut Io<'_>, id: RequestId) {
        let now = io.s.now;
        let Some(request) = self.requests.get_mut(&id) else { return };
        request.timer_at = request.timer_at.filter(|&at| at > now);
        if let Some(hold) = request.hold {
            let input = match hold.next {
                _ if now >= hold.until => {
                    request.hold = None;
                    self.forget_waits(id, |_| true);
                    Input::HoldEnded
                }
                HoldStep::NoConnection(at) if now >= at => {
                    Input::OutageEnded { held: now - hold.began }
                }
                HoldStep::Jitter(at) if now >= at => Input::PauseEnded,
                _ => return self.arm_request(io, id),
            };
            return self.attempts_step(io, id, input);
        }
        if request.attempts.heartbeat_due().is_some_and(|at| now >= at) {
            let connection = request.connection_of(0);
            let is_ill = connection.is_some_and(|connection| self.is_ill(connection));
            let ill_health = is_ill.then(|| "it is not healthy".to_owned());
            self.attempts_step(io, id, Input::HeartbeatDue { ill_health });
        }
        self.check_holds(io, id);
        self.check_attempts(io, id, &[]);
        self.arm_request(io, id);
    }

    /// Looks at the requests on connections that have notified them.
    pub(in crate::node) fn check_requests(&mut self, io: &mut Io<'_>, notified: &[ConnectionId]) {
        let concerned = self.requests.iter().filter(|(_, request)| request.is_on(notified));
        let ids: Vec<_> = concerned.map(|(&id, _)| id).collect();
        for id in ids {
            match self.requests.get(&id).map(|request| &request.state) {
                Some(State::Pending) => self.check_attempts(io, id, notified),
                Some(State::Watching(_)) => self.check_watch(io, id),
                _ => {}
            }
        }
    }

    /// Tells the machine what its attempts wait for. One whose connection has been without trouble looks at it only
    /// when it is notified, as in the program.
    fn check_attempts(&mut self, io: &mut Io<'_>, id: RequestId, notified: &[ConnectionId]) {
        for attempt in 0..MAX_PARALLEL {
            if let Some(input) = self.event_of(io, id, attempt, notified) {
                self.attempts_step(io, id, input);
            }
        }
    }

    fn event_of(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        attempt: usize,
        notified: &[ConnectionId],
    ) -> Option<AttemptInput> {
        let now = io.s.now;
        let request = self.requests.get(&id)?;
        let connection = request.connection_of(attempt)?;
        let upstream = self.upstreams.get(&connection)?;
        let is_over = |at: Option<Instant>| at.is_some_and(|at| now >= at);
        match request.attempts.awaited(attempt)? {
            Awaited::Stream => None,
            Awaited::Trouble => (notified.contains(&connection) && self.is_troubled(connection))
                .then_some(Input::Troubled { attempt, has_whole_body: true }),
            Awaited::Loss { silence_from, hedge_from } => {
                let reason = upstream.machine.no_response_reason(silence_from.is_some());
                if let Some(reason) = reason {
                    self.give_up(io, id, attempt, Stage::NoHead, reason.as_str())
                } else if is_over(silence_from) && upstream.is_silent() {
                    Some(Input::Silent { attempt, has_live: self.has_live() })
                } else if is_over(hedge_from) && self.is_troubled(connection) {
                    Some(Input::HedgeDue { attempt })
                } else {
                    None
                }
            }
        }
    }

    /// Ends an attempt, which resets its stream.
    fn give_up(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        attempt: usize,
        stage: Stage,
        reason: &'static str,
    ) -> Option<AttemptInput> {
        let slot = &mut self.requests.get_mut(&id)?.slots[attempt];
        let Slot::Sent { stream, .. } = std::mem::take(slot) else { return None };
        self.cancel_stream(io, stream);
        Some(self.failed(io, id, attempt, stream, stage, reason, None))
    }
}
