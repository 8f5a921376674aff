//! The pool: `Class`, `PoolState` and `select` of the core decide which connection takes a request, how long requests
//! wait, and which connects start. This file describes connections and endpoints to them, and executes the effects.
//!
//! There is one class, that of a configured identity: its connections are kept while no request uses them.

use std::time::Instant;

use jackstay_core::connection::{ConnectionMachine, ConnectionState, DrainReason};
use jackstay_core::credential_class::CredentialClass;
use jackstay_core::pool::limits::ConnectionLimits;
use jackstay_core::pool::{
    self, Arrival, Candidate, Class, ConnectionKey, ConnectionRow, Effect, EndpointKey,
    EndpointRow, PoolState, Preference, PreviousFailure, Refusal, Requirements, Round,
    SLOW_HEAD_INTERVAL, Scope, Situation, Surroundings, WarmClasses, is_nearly_full, select,
};
use jackstay_core::probe::schedule::ProbeTrigger;

use super::connection::{DialFor, Upstream};
use super::request::RequestId;
use super::{Io, Node, NodeTimer};
use crate::net::ConnectionId;

/// The class of the connections, and the generation of its credential.
const CLASS: CredentialClass = CredentialClass::Identity(0);
const GENERATION: u64 = 1;

/// What a stream is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// The first attempt of a round.
    Attempt,
    /// A parallel attempt with this number.
    Hedge(usize),
    /// A watch has lost its stream.
    Resume,
    /// A watch leaves a stream that works.
    Move,
}

/// The connection on which a request failed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Previous {
    pub(super) connection: ConnectionId,
    pub(super) endpoint: usize,
    /// The endpoint has refused it; otherwise the connection was silent or lost.
    pub(super) refused: bool,
}

impl From<Previous> for PreviousFailure {
    fn from(previous: Previous) -> Self {
        let connection = ConnectionKey(previous.connection as usize);
        if previous.refused {
            Self::Refusal(connection, EndpointKey(previous.endpoint))
        } else {
            Self::Silence(connection)
        }
    }
}

/// A request that waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    request: RequestId,
    purpose: Purpose,
    start: Instant,
}

/// A pool without connections.
pub(super) fn new(now: Instant) -> (PoolState, Class<Waiting>) {
    let clients = pool::Purpose::Clients(WarmClasses::Identities);
    (PoolState::new(clients), Class::new(CLASS, now))
}

impl Node {
    /// Gets a stream for a request, now or later.
    pub(super) fn acquire(
        &mut self,
        io: &mut Io<'_>,
        request: RequestId,
        purpose: Purpose,
        required: Requirements,
    ) {
        let now = io.s.now;
        if purpose == Purpose::Resume {
            self.checks.watch_resumes(now);
        }
        match self.class.request(required.may_be_held, self.pool.is_total_outage(), now) {
            Arrival::Refuse(refusal) => return self.unavailable(io, request, purpose, refusal),
            Arrival::Select => {
                if let Some(connection) = self.select_now(io, &required) {
                    return self.granted(io, request, purpose, connection);
                }
            }
            Arrival::Wait => {}
        }
        let (_, table) = self.table(now);
        let is_unrestricted = !required.long_running && required.excluded.is_empty();
        let waiting = Waiting { request, purpose, start: now };
        let begun = self
            .pool
            .may_wait(true)
            .and_then(|()| self.class.begin_wait(&table, required, waiting, now));
        match begun {
            Ok(wait) => {
                self.waits.push((request, purpose, wait));
                self.checks.wait_begun(wait, is_unrestricted);
                self.changed = true;
            }
            Err(refusal) => self.unavailable(io, request, purpose, refusal),
        }
    }

    /// The best live connection that may take the request.
    pub(super) fn select_now(
        &mut self,
        io: &mut Io<'_>,
        required: &Requirements,
    ) -> Option<ConnectionId> {
        let now = io.s.now;
        let (ids, mut table) = self.table(now);
        let index = select(
            &table,
            required,
            Scope { allow_suspect: false, max_connections: self.settings.max_connections },
            |_| Preference::default(),
            |index| self.cost(ids[index], now),
            &mut io.s.rng,
        )?;
        table[index].free_streams -= 1;
        self.changed |= is_nearly_full(&table, index);
        Some(ids[index])
    }

    fn cost(&self, id: ConnectionId, now: Instant) -> f64 {
        self.upstreams.get(&id).map_or(0.0, |upstream| upstream.machine.cost(now))
    }

    fn candidate(&self, id: ConnectionId, upstream: &Upstream, now: Instant) -> Candidate {
        let endpoint = &self.endpoints[upstream.endpoint];
        let machine = &upstream.machine;
        Candidate {
            connection: ConnectionKey(id as usize),
            endpoint: EndpointKey(upstream.endpoint),
            state: machine.state(),
            is_silent: upstream.is_silent(),
            endpoint_state: endpoint.state,
            is_fallback: false,
            has_warning: endpoint.probe_failing || machine.has_waiting_request(now),
            free_streams: machine.free_streams(now),
            stream_limit: machine.stream_limit(),
            watches: machine.watches(),
            last_received: machine.last_received(),
            share: endpoint.slow_start_share(now),
        }
    }

    /// The connections of the class.
    fn table(&self, now: Instant) -> (Vec<ConnectionId>, Vec<Candidate>) {
        let of_class = self.upstreams.iter().filter(|(_, upstream)| !upstream.is_probe);
        of_class.map(|(&id, upstream)| (id, self.candidate(id, upstream, now))).unzip()
    }

    /// The connections of the class as maintenance sees them.
    fn connection_rows(&mut self, now: Instant) -> (Vec<ConnectionId>, Vec<ConnectionRow>) {
        let is_slow_head_round = self.class.begin_slow_head_round(now);
        let (ids, table) = self.table(now);
        let mut rows = Vec::with_capacity(ids.len());
        for (id, candidate) in ids.iter().zip(table) {
            let Some(upstream) = self.upstreams.get_mut(id) else { continue };
            let machine = &mut upstream.machine;
            rows.push(ConnectionRow {
                candidate,
                generation: GENERATION,
                probe_is_failing: self.endpoints[upstream.endpoint].probe_failing,
                has_slow_heads: is_slow_head_round
                    && machine.has_slow_response_heads(SLOW_HEAD_INTERVAL, now),
                is_mostly_proven: machine.is_mostly_proven(),
                idle_since: machine.idle_since(),
                peak_streams: machine.peak_streams(),
                draining_since: machine.draining_since(),
            });
        }
        (ids, rows)
    }

    fn endpoint_rows(&self, now: Instant) -> Vec<EndpointRow> {
        let row = |(key, endpoint): (usize, &super::Endpoint)| EndpointRow {
            key: EndpointKey(key),
            state: endpoint.state,
            is_fallback: false,
            rank: key as u64,
            version_side: None,
            is_usable: endpoint.is_usable(),
            ready_for: endpoint.ready_for(now),
            last_failure: endpoint.backoff.last_failure(),
        };
        self.endpoints.iter().enumerate().map(row).collect()
    }

    /// Maintains the connections and serves the requests that wait, as the task of the program's pool.
    pub(super) fn run_pool(&mut self, io: &mut Io<'_>) {
        let now = io.s.now;
        if self.pool.may_wait(true).is_err() {
            return; // The task has ended.
        }
        let endpoints = self.endpoint_rows(now);
        if self.pool.observe_endpoints(&endpoints, now).is_some() {
            self.outage_ended(io);
        }
        self.place_watches(io);
        self.plan(io, &endpoints);
        self.serve_waiters(io, &endpoints);
        self.pool_due = self.pool.next_run(now, &mut io.s.rng);
        self.arm_pool(io);
    }

    /// The task of the pool ends, as when its upstream is removed from the configuration: every request that waits is
    /// refused.
    pub(crate) fn stop_pool(&mut self, io: &mut Io<'_>) {
        let refusal = self.pool.stop();
        while let Some(Waiting { request, purpose, .. }) = self.class.refuse_next() {
            self.take_wait(request, purpose);
            self.unavailable(io, request, purpose, refusal);
        }
        self.settle(io);
    }

    /// The timer of the pool has ended; the run may have been put off since.
    pub(super) fn pool_timer(&mut self, io: &mut Io<'_>) {
        self.pool_armed_for = self.pool_armed_for.filter(|&armed| armed > io.s.now);
        if io.s.now >= self.pool_due {
            self.changed = true;
        } else {
            self.arm_pool(io);
        }
    }

    /// Starts a timer for the next run, unless an earlier one runs.
    fn arm_pool(&mut self, io: &mut Io<'_>) {
        if self.pool_armed_for.is_none_or(|armed| self.pool_due < armed) {
            self.pool_armed_for = Some(self.pool_due);
            self.start_timer(io.s, self.pool_due, NodeTimer::Pool);
        }
    }

    fn plan(&mut self, io: &mut Io<'_>, endpoints: &[EndpointRow]) {
        let now = io.s.now;
        let limits = ConnectionLimits {
            min: self.settings.min_connections,
            max: self.settings.max_connections,
            max_streams: self.settings.max_streams,
        };
        let around = Surroundings {
            endpoints,
            limits,
            generation: Some(GENERATION),
            is_warm: self.pool.is_warm(CLASS),
            fanout: self.pool.fanout(CLASS),
            is_retired: self.pool.is_retired(),
            now,
        };
        let none_usable = PoolState::none_usable(endpoints);
        let (ids, mut rows) = self.connection_rows(now);
        let handshakes: Vec<_> = (0..endpoints.len()).map(|at| self.dials_to(at)).collect();
        let (class, all) = (&mut self.class, &mut self.endpoints);
        let checks = &mut self.checks;
        let effects = class.plan(&mut rows, &around, |at| {
            let may_start = all[at].backoff.claim(none_usable, handshakes[at], now);
            checks.connect_claimed(at, may_start);
            may_start
        });
        for effect in effects {
            self.execute_plan(io, &ids, effect);
        }
    }

    fn execute_plan(&mut self, io: &mut Io<'_>, ids: &[ConnectionId], effect: Effect) {
        let now = io.s.now;
        match effect {
            Effect::Probe(index) => {
                let endpoint = self.endpoint_of(ids[index]);
                self.request_probe(io, endpoint, ProbeTrigger::PassiveEvidence);
            }
            Effect::Drain(index, cause) => {
                self.input(io, ids[index], |machine| machine.drain(cause, now));
            }
            Effect::Close(index) => {
                self.input(io, ids[index], |machine| machine.close(DrainReason::ConnectionLimit));
            }
            Effect::NotifyDegraded(index) => {
                self.input(io, ids[index], ConnectionMachine::endpoint_degraded);
            }
            Effect::NotifySuspected(index) => self.notified.push(ids[index]),
            Effect::Dial(endpoint) => {
                self.dial(io, endpoint, DialFor::Requests);
            }
            Effect::WakeAt(at) => self.pool.wake_at(at),
            Effect::Retire => {}
        }
    }

    /// Whether a connection for requests is live.
    pub(super) fn has_live(&self) -> bool {
        self.upstreams.values().any(|upstream| !upstream.is_probe && upstream.is_live())
    }

    /// Gives streams to the requests that wait, and ends the wait of those that must not wait longer.
    fn serve_waiters(&mut self, io: &mut Io<'_>, endpoints: &[EndpointRow]) {
        let now = io.s.now;
        let mut round = Round::default();
        while self.class.waiting() > 0 {
            let situation = Situation {
                endpoints,
                is_outage: self.pool.is_total_outage(),
                max_connections: self.settings.max_connections,
                now,
            };
            let (ids, table) = self.table(now);
            let upstreams = &self.upstreams;
            let answer = self.class.next_answer(
                &mut round,
                &table,
                &situation,
                |_, _| Preference::default(),
                |index| upstreams[&ids[index]].machine.cost(now),
                &mut io.s.rng,
            );
            let Some((Waiting { request, purpose, start }, answer)) = answer else { break };
            let wait = self.take_wait(request, purpose);
            self.longest_wait = self.longest_wait.max(now - start);
            let is_live = answer.is_ok_and(|index| table[index].state == ConnectionState::Live);
            self.checks.answered(wait, is_live);
            match answer {
                Ok(index) => self.granted(io, request, purpose, ids[index]),
                Err(refusal) => self.unavailable(io, request, purpose, refusal),
            }
        }
        if let Some(at) = round.wake_at() {
            self.pool.wake_at(at);
        }
    }

    /// Forgets a wait that has had its answer. Returns its number.
    fn take_wait(&mut self, request: RequestId, purpose: Purpose) -> Option<u64> {
        let at = self.waits.iter().position(|wait| (wait.0, wait.1) == (request, purpose))?;
        let wait = self.waits.remove(at).2;
        self.checks.wait_ended(wait);
        Some(wait)
    }

    /// Ends the waits of a request.
    pub(super) fn forget_waits(&mut self, request: RequestId, of: impl Fn(Purpose) -> bool) {
        let (class, checks) = (&mut self.class, &mut self.checks);
        self.waits.retain(|&(waiting, purpose, wait)| {
            let ends = waiting == request && of(purpose);
            if ends {
                class.leave(wait);
                checks.wait_ended(wait);
            }
            !ends
        });
    }

    fn granted(
        &mut self,
        io: &mut Io<'_>,
        request: RequestId,
        purpose: Purpose,
        connection: ConnectionId,
    ) {
        match purpose {
            Purpose::Attempt => self.attempt_granted(io, request, 0, connection),
            Purpose::Hedge(attempt) => self.attempt_granted(io, request, attempt, connection),
            Purpose::Resume | Purpose::Move => self.watch_granted(io, request, purpose, connection),
        }
    }

    fn unavailable(
        &mut self,
        io: &mut Io<'_>,
        request: RequestId,
        purpose: Purpose,
        refusal: Refusal,
    ) {
        match purpose {
            Purpose::Attempt => self.attempt_unavailable(io, request, refusal),
            Purpose::Hedge(attempt) => self.hedge_unavailable(io, request, attempt),
            Purpose::Resume | Purpose::Move => {
                self.watch_unavailable(io, request, purpose, refusal);
            }
        }
    }
}
