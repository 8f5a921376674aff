//! The endpoints of a node: their states, their probes, and when a connect may start. `EndpointHealth`, `ConnectBackoff`
//! and `Prober` of the core decide.

use std::time::{Duration, Instant};

use http::Method;
use jackstay_core::balance;
use jackstay_core::connect::{ConnectBackoff, ConnectFailure, ConnectFailureKind};
use jackstay_core::connection::{ConnectionState, DrainReason};
use jackstay_core::endpoint_condition::{self, EndpointCondition};
use jackstay_core::endpoint_health::{EndpointHealth, EndpointReadiness, Observation};
use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::pool::EndpointKey;
use jackstay_core::probe::answers::{ProbeAnswers, RefusalMeaning};
use jackstay_core::probe::prober::{Prober, RECONNECT_CHECK, Response, Rules};
use jackstay_core::probe::schedule::ProbeTrigger;
use jackstay_core::request::start_up::{self, Uptime};

use super::connection::DialFor;
use super::reachability::Examination;
use super::{Io, Node, NodeTimer};
use crate::http2::{Request, StreamId};
use crate::net::{ConnectionId, ProcessId};
use crate::scheduler::Scheduler;
use crate::trace::Entry;

/// `health.readyz` of the configuration.
const RULES: Rules = Rules { interval: Duration::from_secs(10), rise: 2, fall: 2 };
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);

/// Time until the task of a prober runs that was notified. A probe that confirms another one's failure must be sent after
/// that failure.
const WAKE_UP: Duration = Duration::from_micros(10);

/// The prober's connection and its probe.
#[derive(Debug)]
struct Probing {
    prober: Prober,
    connection: Option<ConnectionId>,
    /// The probe that is not answered, and when it was sent.
    open: Option<(StreamId, Instant)>,
    /// Number of the probe, so that timers of earlier ones have no effect.
    number: u32,
    /// A probe that was requested during this one.
    requested: Option<ProbeTrigger>,
    /// When the prober may connect again.
    connect_at: Instant,
    /// Its connection was lost, or a connect has failed.
    is_lost: bool,
}

/// An endpoint.
#[derive(Debug)]
pub(super) struct Endpoint {
    /// The process of its apiserver.
    pub(super) server: ProcessId,
    /// Its name, by which the rebalancer orders endpoints.
    pub(super) label: String,
    health: EndpointHealth,
    pub(super) backoff: ConnectBackoff,
    pub(super) ping_grid: Instant,
    pub(super) state: EndpointState,
    pub(super) probe_failing: bool,
    ready_since: Option<Instant>,
    slow_start: bool,
    probing: Probing,
    /// Its answers to probes.
    answers: ProbeAnswers,
    pub(super) examination: Option<Examination>,
    /// Until when it is not asked again, because it has rejected requests.
    pub(super) rejects_until: Option<Instant>,
}

impl Endpoint {
    pub(super) fn new(server: ProcessId, ping_grid: Instant, s: &Scheduler) -> Self {
        let probing = Probing {
            prober: Prober::new(s.now),
            connection: None,
            open: None,
            number: 0,
            requested: None,
            connect_at: s.now,
            is_lost: true,
        };
        Self {
            server,
            label: format!("apiserver {server}"),
            health: EndpointHealth::default(),
            backoff: ConnectBackoff::default(),
            ping_grid,
            state: EndpointState::Connecting,
            probe_failing: false,
            ready_since: None,
            slow_start: false,
            probing,
            answers: ProbeAnswers::default(),
            examination: None,
            rejects_until: None,
        }
    }

    /// Whether requests may be sent to the endpoint, as `Endpoint::is_usable` of the program says.
    pub(super) fn is_usable(&self) -> bool {
        match self.state {
            EndpointState::Ready | EndpointState::Degraded => true,
            EndpointState::Connecting | EndpointState::Suspect => {
                self.health.connections.accept_requests()
            }
            EndpointState::Unverified
            | EndpointState::Ejected
            | EndpointState::NoH2
            | EndpointState::Leaving => false,
        }
    }

    /// How long its process has been up, as far as is known.
    fn uptime(&self) -> Uptime {
        let connected_since = self.health.connections.since;
        Uptime { connected_since, is_probe_refused: self.answers.is_starting() }
    }

    /// Whether its process may have just started.
    pub(super) fn is_starting(&self, now: Instant) -> bool {
        self.uptime().is_starting(now)
    }

    pub(super) fn slow_start_share(&self, now: Instant) -> f64 {
        match self.ready_since.filter(|_| self.slow_start) {
            Some(since) => balance::slow_start(now.saturating_duration_since(since)),
            None => 1.0,
        }
    }

    pub(super) fn ready_for(&self, now: Instant) -> Option<Duration> {
        self.ready_since.map(|since| now.saturating_duration_since(since))
    }

    pub(super) fn readiness(&self) -> EndpointReadiness {
        self.health.readiness()
    }

    /// Whether this is the prober's present connection.
    pub(super) fn is_probed_on(&self, id: ConnectionId) -> bool {
        self.probing.connection == Some(id)
    }

    /// Whether the prober has a connection other than this one.
    pub(super) fn has_other_prober_connection(&self, id: ConnectionId) -> bool {
        self.probing.connection.is_some_and(|connection| connection != id)
    }
}

impl Node {
    /// Passes an observation to the state machine of an endpoint.
    pub(super) fn observe(&mut self, io: &mut Io<'_>, at: usize, observation: Observation<'_>) {
        let endpoint = &mut self.endpoints[at];
        let Some(transition) = endpoint.health.step(observation) else { return };
        endpoint.state = transition.to;
        endpoint.ready_since = (transition.to == EndpointState::Ready).then_some(io.s.now);
        if let Some(slow_start) = transition.slow_start {
            endpoint.slow_start = slow_start;
        }
        let state = transition.to;
        io.s.record(Entry::Endpoint { node: self.index, endpoint: at as u8, state });
        self.changed = true;
    }

    pub(super) fn connect_failed(&mut self, io: &mut Io<'_>, at: usize, kind: ConnectFailureKind) {
        let now = io.s.now;
        self.endpoints[at].backoff.failed(kind, &mut io.s.rng, now);
        let failure = ConnectFailure::new(kind, "connect failed");
        self.observe(io, at, Observation::ConnectFailed(failure));
    }

    /// Asks `/readyz` before its time.
    pub(super) fn request_probe(&mut self, io: &mut Io<'_>, at: usize, trigger: ProbeTrigger) {
        let probing = &mut self.endpoints[at].probing;
        if probing.open.is_none() {
            probing.prober.requested(trigger, RULES);
            self.arm_probe(io, at);
        } else {
            probing.requested = Some(trigger);
        }
    }

    fn arm_probe(&self, io: &mut Io<'_>, at: usize) {
        let due = self.endpoints[at].probing.prober.next_at().max(io.s.now + WAKE_UP);
        self.start_timer(io.s, due, NodeTimer::Probe(at));
    }

    /// Connects or probes, if that is due.
    pub(super) fn probe(&mut self, io: &mut Io<'_>, at: usize) {
        let now = io.s.now;
        let probing = &self.endpoints[at].probing;
        let Some(connection) = probing.connection else { return self.connect_prober(io, at) };
        let Some(upstream) = self.upstreams.get(&connection) else { return };
        if probing.open.is_some() || now < probing.prober.next_at() {
            return;
        }
        if upstream.machine.state() != ConnectionState::Live {
            self.endpoints[at].probing.connection = None;
            self.input(io, connection, |machine| machine.drain(DrainReason::ProbingEnded, now));
            return self.connect_prober(io, at);
        }
        let request = Request::new(Method::GET, "/readyz", None);
        let stream = self.open_stream(io, connection, 0, &request);
        let probing = &mut self.endpoints[at].probing;
        // A probe that also asks `/livez` gets the same answer here.
        probing.prober.sent(now);
        probing.open = Some((stream, now));
        probing.number += 1;
        let number = probing.number;
        self.start_timer(io.s, now + PROBE_TIMEOUT / 2, NodeTimer::ProbeOverdue(at, number));
        self.start_timer(io.s, now + PROBE_TIMEOUT, NodeTimer::ProbeFailed(at, number));
    }

    /// The prober of a usable endpoint connects when the next probe is due, that of any other one at once.
    fn connect_prober(&mut self, io: &mut Io<'_>, at: usize) {
        let now = io.s.now;
        let endpoint = &self.endpoints[at];
        let due = endpoint.probing.prober.connect_at(endpoint.is_usable(), now);
        let due = due.max(endpoint.probing.connect_at);
        if now < due {
            return self.start_timer(io.s, due, NodeTimer::Probe(at));
        }
        if self.dials.values().any(|dial| dial.dialed_for == DialFor::Prober && dial.endpoint == at)
        {
            return;
        }
        let none_usable = !self.endpoints.iter().any(Endpoint::is_usable);
        let handshakes = self.dials_to(at);
        self.endpoints[at].probing.prober.connected();
        let is_lost = std::mem::take(&mut self.endpoints[at].probing.is_lost);
        self.endpoints[at].answers.connected(is_lost);
        if self.endpoints[at].backoff.claim(none_usable, handshakes, now) {
            self.dial(io, at, DialFor::Prober);
        } else {
            self.retry_connect(io, at);
        }
    }

    fn retry_connect(&mut self, io: &mut Io<'_>, at: usize) {
        let again = io.s.now + RECONNECT_CHECK;
        self.endpoints[at].probing.connect_at = again;
        self.start_timer(io.s, again, NodeTimer::Probe(at));
    }

    /// The prober has a new connection.
    pub(super) fn replace_prober_connection(
        &mut self,
        io: &mut Io<'_>,
        at: usize,
        id: ConnectionId,
    ) {
        let now = io.s.now;
        if let Some(before) = self.endpoints[at].probing.connection.replace(id) {
            self.input(io, before, |machine| machine.drain(DrainReason::ProbingEnded, now));
        }
        self.arm_probe(io, at);
    }

    /// The connection of the prober has ended, or its connect has failed.
    pub(super) fn probe_connection_ended(&mut self, io: &mut Io<'_>, at: usize, was_open: bool) {
        let jitter = io.s.rng.f64();
        let endpoint = &mut self.endpoints[at];
        let is_ready = endpoint.state == EndpointState::Ready;
        let probing = &mut endpoint.probing;
        probing.connection = None;
        probing.is_lost = true;
        if probing.open.take().is_some() {
            let lost = Response::ConnectionLost;
            probing.prober.received(lost, RULES);
            probing.prober.plan(lost, is_ready, RULES, jitter);
        } else if was_open {
            probing.prober.connection_lost(RULES);
        }
        self.retry_connect(io, at);
    }

    /// The prober's connection takes no more streams, so the prober opens another one.
    pub(super) fn probe_connection_drains(&mut self, io: &mut Io<'_>, at: usize, id: ConnectionId) {
        let probing = &self.endpoints[at].probing;
        if probing.open.is_none() && probing.connection == Some(id) {
            self.endpoints[at].probing.connection = None;
            self.retry_connect(io, at);
        }
    }

    pub(super) fn probe_answered(&mut self, io: &mut Io<'_>, id: ConnectionId, status: u16) {
        let at = self.endpoint_of(id);
        let probing = &mut self.endpoints[at].probing;
        if probing.connection != Some(id) {
            return;
        }
        let Some((_, sent)) = probing.open.take() else { return };
        let response = self.judge(at, status, io.s.now);
        if matches!(response, Response::Ready | Response::Refused) {
            self.probe_succeeded(io, at, sent, response);
        } else {
            self.probe_failed(io, at, response);
        }
    }

    /// What the status of a probe means.
    fn judge(&mut self, at: usize, status: u16, now: Instant) -> Response {
        if status == 200 {
            self.endpoints[at].answers.answered();
            return Response::Ready;
        }
        if !start_up::is_refusal(status) {
            self.endpoints[at].answers.failed();
            return Response::NotReady;
        }
        let others = (0..self.endpoints.len()).filter(|&other| other != at);
        let others: Vec<_> = others.map(|other| self.endpoints[other].answers).collect();
        match self.endpoints[at].answers.refused(others, now) {
            RefusalMeaning::Refused => Response::Refused,
            RefusalMeaning::NotYet => Response::Starting,
        }
    }

    /// The endpoints that are not asked after this one has refused a request.
    pub(super) fn not_asked_after_refusal(&self, refusing: usize) -> Option<Vec<usize>> {
        let endpoints = self.endpoints.iter().enumerate();
        let endpoints: Vec<_> =
            endpoints.map(|(at, endpoint)| (at, endpoint.state, endpoint.uptime())).collect();
        start_up::not_asked_after(refusing, &endpoints)
    }

    /// Half of the time limit of a probe is over.
    pub(super) fn probe_overdue(&mut self, io: &mut Io<'_>, at: usize, number: u32) {
        let probing = &self.endpoints[at].probing;
        if probing.number == number && probing.open.is_some() {
            self.probe_is_failing(io, at);
        }
    }

    /// The time limit of a probe is over.
    pub(super) fn probe_timed_out(&mut self, io: &mut Io<'_>, at: usize, number: u32) {
        let probing = &mut self.endpoints[at].probing;
        if probing.number != number {
            return;
        }
        let (Some((stream, _)), Some(connection)) = (probing.open.take(), probing.connection)
        else {
            return;
        };
        self.cancel_stream(io, (connection, stream));
        self.endpoints[at].answers.failed();
        self.probe_failed(io, at, Response::NotReady);
    }

    /// The latest probe has failed or is overdue. The first time, the other endpoints are probed.
    fn probe_is_failing(&mut self, io: &mut Io<'_>, at: usize) {
        let endpoint = &mut self.endpoints[at];
        endpoint.health.note_probe_failing(io.s.now);
        if std::mem::replace(&mut endpoint.probe_failing, true) {
            return;
        }
        for other in (0..self.endpoints.len()).filter(|&other| other != at) {
            self.request_probe(io, other, ProbeTrigger::Confirmation);
        }
    }

    fn probe_failed(&mut self, io: &mut Io<'_>, at: usize, response: Response) {
        self.probe_is_failing(io, at);
        if self.endpoints[at].probing.prober.received(response, RULES) {
            self.observe(io, at, Observation::ReadyzFailing("/readyz failed"));
        }
        self.plan_probe(io, at, response);
    }

    fn probe_succeeded(&mut self, io: &mut Io<'_>, at: usize, sent: Instant, response: Response) {
        let endpoint = &mut self.endpoints[at];
        endpoint.health.note_probe_ok(sent);
        endpoint.probe_failing = false;
        if endpoint.probing.prober.received(response, RULES) {
            self.observe(io, at, Observation::ReadyzOk);
        }
        self.plan_probe(io, at, response);
    }

    fn plan_probe(&mut self, io: &mut Io<'_>, at: usize, response: Response) {
        let jitter = io.s.rng.f64();
        let endpoint = &mut self.endpoints[at];
        let is_ready = endpoint.state == EndpointState::Ready;
        endpoint.probing.prober.plan(response, is_ready, RULES, jitter);
        if let Some(trigger) = endpoint.probing.requested.take() {
            endpoint.probing.prober.requested(trigger, RULES);
        }
        self.arm_probe(io, at);
    }

    /// Records that an endpoint rejects requests. Returns all that do.
    pub(super) fn record_rejection(
        &mut self,
        endpoint: usize,
        until: Instant,
        now: Instant,
    ) -> Vec<usize> {
        self.endpoints[endpoint].rejects_until = Some(until);
        let rejects =
            |&at: &usize| self.endpoints[at].rejects_until.is_some_and(|until| until > now);
        let mut rejecting: Vec<_> = (0..self.endpoints.len()).filter(rejects).collect();
        if !rejecting.contains(&endpoint) {
            rejecting.push(endpoint);
        }
        rejecting
    }

    /// Connects in progress to an endpoint.
    pub(super) fn dials_to(&self, at: usize) -> usize {
        self.dials.values().filter(|dial| dial.endpoint == at).count()
    }

    /// The endpoints in decisions of the core.
    pub(super) fn endpoint_conditions(&self, now: Instant) -> Vec<EndpointCondition> {
        let condition = |(at, endpoint): (usize, &Endpoint)| EndpointCondition {
            is_starting: endpoint.is_starting(now),
            ..self.endpoint_condition(at)
        };
        self.endpoints.iter().enumerate().map(condition).collect()
    }

    /// An endpoint in decisions that do not depend on its uptime.
    pub(super) fn endpoint_condition(&self, at: usize) -> EndpointCondition {
        let endpoint = &self.endpoints[at];
        let (state, probe_fails) = (endpoint.state, endpoint.probe_failing);
        EndpointCondition { key: EndpointKey(at), state, probe_fails, is_starting: false }
    }

    /// Whether another endpoint is better.
    pub(super) fn has_better_endpoint(&self, at: usize) -> bool {
        let all = (0..self.endpoints.len()).map(|other| self.endpoint_condition(other));
        endpoint_condition::has_better(self.endpoint_condition(at), all)
    }

    /// Why no response can be expected soon from a connection; see `proxy::heartbeat` of the program.
    pub(super) fn is_ill(&self, id: ConnectionId) -> bool {
        let Some(upstream) = self.upstreams.get(&id) else { return true };
        let endpoint = &self.endpoints[upstream.endpoint];
        !matches!(upstream.machine.state(), ConnectionState::Live | ConnectionState::Draining)
            || upstream.is_silent()
            || endpoint.probe_failing
            || matches!(
                endpoint.state,
                EndpointState::Degraded
                    | EndpointState::Suspect
                    | EndpointState::Unverified
                    | EndpointState::Ejected
            )
    }
}
