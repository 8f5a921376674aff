//! Executes the effects of the state machine ([`jackstay_core::request::attempts`]) for a request that does not get its
//! response from its first attempt, on a connection without trouble.

use std::rc::Rc;
use std::time::{Duration, Instant};

use fastrand::Rng;
use futures_util::future::LocalBoxFuture;
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::attempts::{AttemptEffect, NoStream, Refused};
use jackstay_core::request::retry::Stage;
use jackstay_core::request::status_error::StatusError;
use jackstay_sys::clock;
use tokio::time::sleep;

use super::slots::{Event, Response, Slots, later};
use super::{ForwardedRequest, Progress};
use crate::proxy::attempt::{AttemptInput, failed};
use crate::proxy::upstream_client::UpstreamResponse;
use crate::proxy::watch::hold::{HoldEnd, hold_end, outage_ended};
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::ProbeTrigger;
use crate::upstream::pool::{PreviousFailure, StreamRequirements, Unavailable};

/// See the module documentation.
struct Execution<'a, 'p> {
    request: &'a ForwardedRequest,
    progress: &'a mut Progress<'p>,
    /// The attempts that run.
    slots: Slots<'a>,
    /// The response that has arrived.
    response: Option<UpstreamResponse>,
    /// Ends the hold of a new watch, while it is held.
    hold_end: Option<HoldEnding>,
}

/// The future of [`hold_end`].
type HoldEnding = LocalBoxFuture<'static, HoldEnd>;

/// The future of an execution, which ends when the client can be answered.
pub(super) type Executing<'a> = LocalBoxFuture<'a, Result<UpstreamResponse, Box<Refused>>>;

impl ForwardedRequest {
    /// Continues with a stream for the first attempt, or without one.
    pub(super) fn execute_acquired<'a>(
        &'a self,
        progress: &'a mut Progress<'_>,
        acquired: Result<Permit, Unavailable>,
    ) -> Executing<'a> {
        let mut execution = Execution::new(self, progress);
        let input = execution.acquired(acquired);
        Box::pin(execution.run(input))
    }

    /// Continues after `input`, with the first attempt if that runs.
    pub(super) fn execute<'a>(
        &'a self,
        progress: &'a mut Progress<'_>,
        first: Option<(Rc<Connection>, Response<'a>)>,
        input: AttemptInput,
    ) -> Executing<'a> {
        let mut execution = Execution::new(self, progress);
        if let Some((connection, response)) = first {
            execution.slots.send(0, connection, response);
        }
        Box::pin(execution.run(input))
    }
}

impl<'a, 'p> Execution<'a, 'p> {
    fn new(request: &'a ForwardedRequest, progress: &'a mut Progress<'p>) -> Self {
        let slots = Slots::default();
        Self { request, progress, slots, response: None, hold_end: None }
    }

    /// Executes effects, from that of `input` on, until the client can be answered.
    async fn run(mut self, mut input: AttemptInput) -> Result<UpstreamResponse, Box<Refused>> {
        let mut rng = Rng::new();
        loop {
            let facts = self.request.facts(Some(&self.slots));
            let now = clock::now();
            let effect = self.progress.attempts.step(input, &facts, now, &mut rng);
            self.count_hedges();
            self.follow(now);
            let next = match effect {
                AttemptEffect::Acquire => Some(self.acquire().await),
                AttemptEffect::Retry => {
                    self.record_retry();
                    Some(self.acquire().await)
                }
                AttemptEffect::Send { attempt } => self.send(attempt),
                AttemptEffect::Hedge { attempt, exclude, probe } => {
                    let hedged = attempt.checked_sub(1).and_then(|one| self.slots.connection(one));
                    let hedged = hedged.filter(|_| exclude).map(|one| one.endpoint.key());
                    self.acquire_hedge(attempt, hedged.into_iter().collect(), probe)
                }
                AttemptEffect::HedgeLate { attempt, excluded } => {
                    self.acquire_hedge(attempt, excluded, true)
                }
                AttemptEffect::GiveUp { attempt, stage, reason } => {
                    Some(self.give_up(attempt, stage, &reason))
                }
                AttemptEffect::Probe { attempt } => {
                    self.probe(attempt);
                    None
                }
                AttemptEffect::Hold { until } => Some(self.hold(until).await),
                AttemptEffect::PauseRetry { delay } => {
                    sleep(delay).await;
                    Some(AttemptInput::PauseEnded)
                }
                AttemptEffect::Pause { delay } => Some(self.pause(delay).await),
                AttemptEffect::Refuse(refused) => return Err(refused),
                AttemptEffect::Respond { .. } | AttemptEffect::Wait => None,
            };
            if let Some(response) = self.response.take() {
                return Ok(response);
            }
            input = match next {
                Some(input) => input,
                None => self.next_input().await,
            };
        }
    }

    /// Counts what has happened to hedges.
    fn count_hedges(&mut self) {
        let upstream = &self.request.upstream;
        let of_group = self.progress.attempts.is_hedged_as_slow();
        for outcome in self.progress.attempts.hedge_outcomes() {
            match outcome.returns_token() {
                true if of_group => self.request.return_group_token(),
                true => upstream.hedge_budget.release(),
                false => {}
            }
            upstream.metrics.hedged(outcome.as_str());
        }
    }

    /// Waits for the next event of the attempts that run, or of a heartbeat.
    async fn next_input(&mut self) -> AttemptInput {
        if !self.slots.are_waiting() {
            return AttemptInput::NotExecutable;
        }
        let due = self.progress.attempts.heartbeat_due();
        let (attempt, event) = tokio::select! {
            biased;
            event = self.slots.next() => event,
            () = later(due) => return AttemptInput::HeartbeatDue,
        };
        match event {
            Event::Granted => AttemptInput::Granted { attempt },
            Event::NoStream => AttemptInput::NoHedgeStream { attempt },
            Event::Responded(response) => self.responded(attempt, *response),
            Event::Failed(failure) => self.request.failed(attempt, failure),
            Event::Troubled => {
                if let Some(heartbeat) = &self.request.heartbeat {
                    heartbeat.last.trouble.notify_one();
                }
                AttemptInput::Troubled { attempt }
            }
            Event::Slow => AttemptInput::Slow { attempt },
            Event::Silent => AttemptInput::Silent { attempt },
            Event::HedgeDue => AttemptInput::HedgeDue { attempt },
        }
    }

    fn responded(&mut self, attempt: usize, response: UpstreamResponse) -> AttemptInput {
        match self.request.compare(response, &mut self.progress.attempts) {
            Ok(response) => {
                if self.progress.attempts.is_hedged_as_slow() {
                    for silent in 0..attempt {
                        if let Some(connection) = self.slots.connection(silent) {
                            self.request
                                .record_silent_group((silent, connection), (attempt, &response));
                        }
                    }
                }
                self.request.record_response(&response, self.progress, attempt);
                self.response = Some(response);
                AttemptInput::Responded { attempt }
            }
            Err(failure) => self.request.failed(attempt, failure),
        }
    }

    /// Takes a stream for the first attempt of a round.
    async fn acquire(&mut self) -> AttemptInput {
        let acquire = self.request.acquire(&self.progress.attempts);
        match unless(&mut self.hold_end, acquire).await {
            Some(acquired) => self.acquired(acquired),
            None => AttemptInput::HoldEnded,
        }
    }

    fn acquired(&mut self, acquired: Result<Permit, Unavailable>) -> AttemptInput {
        let reason = match acquired {
            Ok(permit) => {
                if self.hold_end.take().is_some() {
                    self.progress.requested_at = clock::now();
                }
                self.progress.sent_to(permit.connection());
                self.slots.grant(0, permit);
                return AttemptInput::Granted { attempt: 0 };
            }
            Err(Unavailable::Unreachable(reasons)) => NoStream::Unreachable(reasons),
            Err(unavailable) => NoStream::Other(StatusError::from(&unavailable)),
        };
        AttemptInput::NoStream { reason }
    }

    /// Sends the request on a granted stream.
    fn send(&mut self, attempt: usize) -> Option<AttemptInput> {
        let request = self.request;
        let Some(permit) = self.slots.take_permit(attempt) else {
            return Some(AttemptInput::NotExecutable);
        };
        let connection = Rc::clone(permit.connection());
        let now = clock::now();
        let opened = match request.open(attempt, permit, &mut self.progress.attempts, now) {
            Ok(opened) => opened,
            Err(failure) => return Some(request.failed(attempt, failure)),
        };
        let response = opened.response(request.expected(attempt));
        self.slots.send(attempt, connection, Box::pin(response));
        self.follow(now);
        None
    }

    /// The attempts wait for what the state machine says, from now on.
    fn follow(&mut self, now: Instant) {
        let late_at = self.request.late_at(now);
        self.slots.follow(&self.progress.attempts, &self.request.upstream, late_at);
    }

    fn probe(&self, attempt: usize) {
        if let Some(connection) = self.slots.connection(attempt) {
            connection.probe().request(ProbeTrigger::PassiveEvidence);
        }
    }

    /// Takes a stream for a hedge, on another connection than that of the attempt before.
    fn acquire_hedge(
        &mut self,
        attempt: usize,
        excluded: Vec<EndpointKey>,
        probe: bool,
    ) -> Option<AttemptInput> {
        let request = self.request;
        let before = attempt.checked_sub(1).and_then(|before| self.slots.connection(before));
        let Some(hedged) = before.map(Rc::clone) else { return Some(AttemptInput::NotExecutable) };
        if probe {
            hedged.probe().request(ProbeTrigger::PassiveEvidence);
        }
        let version = request.wanted_version(&self.progress.attempts);
        let acquire = async move {
            let required = StreamRequirements {
                previous_failure: Some(PreviousFailure::Silence(
                    hedged.key(),
                    hedged.endpoint.key(),
                )),
                excluded,
                live_only: true,
                without_connection_since: hedged.suspect_since(),
                ..StreamRequirements::default()
            };
            let stream = request.stream_request(version, required, false);
            request.upstream.pool.acquire(&request.class, stream).await
        };
        self.slots.acquire(attempt, Box::pin(acquire));
        None
    }

    /// Ends an attempt, which resets its stream.
    fn give_up(&mut self, attempt: usize, stage: Stage, reason: &str) -> AttemptInput {
        match self.slots.end(attempt) {
            Some(connection) => {
                AttemptInput::Failed { attempt, failure: failed(stage, reason, &connection) }
            }
            None => AttemptInput::NotExecutable,
        }
    }

    /// Holds a new watch while no apiserver is reachable.
    async fn hold(&mut self, until: Instant) -> AttemptInput {
        let request = self.request;
        let end = || Box::pin(hold_end(Some(until), request.drain.clone())) as HoldEnding;
        self.hold_end.get_or_insert_with(end);
        let ended = outage_ended(&request.upstream, &request.class);
        let held = unless(&mut self.hold_end, ended).await;
        held.map_or(AttemptInput::HoldEnded, |held| AttemptInput::OutageEnded { held })
    }

    async fn pause(&mut self, delay: Duration) -> AttemptInput {
        let paused = async {
            sleep(delay).await;
            // If the client certificate has expired meanwhile, the watch is held until the deadline,
            // and the client's next request gets a 401.
            self.request.proof.confirmed().await;
        };
        let paused = unless(&mut self.hold_end, paused).await;
        paused.map_or(AttemptInput::HoldEnded, |()| AttemptInput::PauseEnded)
    }

    fn record_retry(&self) {
        let attempts = &self.progress.attempts;
        if let Some(after) = attempts.after_not_reached() {
            self.request.continue_without_version(after, attempts);
        }
        let Some(failure) = attempts.failure() else { return };
        self.request.upstream.metrics.retried(failure.stage.retry_reason());
        let verb = self.request.info.verb.as_str();
        tracing::debug!(reason = failure.reason, verb, "request is sent again");
    }
}

impl Drop for Execution<'_, '_> {
    /// The client may abandon the request while a hedge waits for a stream.
    fn drop(&mut self) {
        self.progress.attempts.cancel();
        self.count_hedges();
    }
}

/// Waits for a future, but not longer than a hold lasts. Returns `None` if that has ended.
async fn unless<T>(
    hold_end: &mut Option<HoldEnding>,
    future: impl Future<Output = T>,
) -> Option<T> {
    let Some(hold_end) = hold_end else { return Some(future.await) };
    tokio::select! {
        value = future => Some(value),
        _ = hold_end => None,
    }
}
