//! jackstay on a node: the state machines of `jackstay-core`, and in place of tokio, hyper and h2 what executes their
//! effects.
//!
//! | file | part of the program | decided by |
//! |---|---|---|
//! | `connection` | an upstream connection | `ConnectionMachine` |
//! | `pool` | which connection takes a request, the requests that wait, which connects start | `Class`, `PoolState`, `select` |
//! | `request` | the attempts, hedges and retries of a request, and the body of its response | `Attempts` |
//! | `endpoint` | the state of an endpoint, its probes, the backoff of connects | `EndpointHealth`, `Prober`, `ConnectBackoff` |
//! | `reachability` | the examination of a suspect apiserver | `SilenceDetector` |
//! | `placement` | which connections offer moves to their watches | `Rebalancer`, `ActiveEvacuations` |
//! | `watch` | a watch that continues on another connection | `watch::relay`, `watch::session` |
//! | `downstream` | the connections of clients | |
//! | `checks` | what must hold in every run | |
//!
//! Requests look at their connection when it notifies them, and the pool runs when it is notified or when it is time, as
//! in the program. So a machine that forgets a notification breaks a promise.
//!
//! What is not modelled is listed in the README of this crate.

mod checks;
mod connection;
mod downstream;
mod endpoint;
mod placement;
mod pool;
mod reachability;
mod request;
mod watch;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use jackstay_core::connection::Thresholds;
use jackstay_core::endpoint_health::Observation;
use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::pool::{Class, PoolState};
use jackstay_core::receive_windows::ReceiveWindows;
use jackstay_core::request::attempts::ConnectionFacts;
use jackstay_core::request::retry_budget::RetryBudget;

use self::checks::Checks;
use self::connection::{Dial, Upstream};
use self::downstream::Downstream;
use self::endpoint::Endpoint;
use self::placement::Placement;
use self::pool::{Purpose, Waiting};
use self::request::{NodeRequest, RequestId};
use crate::net::{Arrival, ConnectionId, Network, ProcessId};
use crate::scheduler::{Scheduler, Timer};

/// A timer of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeTimer {
    /// The pool runs, although nothing has changed.
    Pool,
    /// An examination of an endpoint looks at its suspect connection.
    Examine(usize),
    /// The health of a connection.
    Check(ConnectionId),
    /// A connect has taken too long.
    Dial(ConnectionId),
    /// `/readyz` of an endpoint.
    Probe(usize),
    /// `/readyz` of an endpoint is overdue, if the number is still that of the probe.
    ProbeOverdue(usize, u32),
    /// `/readyz` of an endpoint has timed out, as above.
    ProbeFailed(usize, u32),
    /// A heartbeat, a hedge, the silence of a connection or the hold of a new watch is due.
    Request(RequestId),
    /// A watch asks for a stream, if the number is still that of its last change.
    Watch(RequestId, u32),
}

/// The configuration of a node: that of the program by default.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Thresholds of connection health.
    pub health: Thresholds,
    /// `connect_timeout`.
    pub connect_timeout: Duration,
    /// `connections.min`.
    pub min_connections: usize,
    /// `connections.max`.
    pub max_connections: usize,
    /// `connections.max_streams`.
    pub max_streams: usize,
    /// Whether connections are passed through to the endpoints, too, so that these are examined.
    pub passthrough: bool,
    /// `limits.max_streams` of the listener.
    pub client_streams: usize,
}

impl Default for Settings {
    fn default() -> Self {
        let health = Thresholds {
            ping_interval: Duration::from_secs(1),
            suspect_after: None,
            dead_after: Duration::from_secs(2),
            tunnel_dead_after: Duration::from_secs(20),
        };
        Self {
            health,
            connect_timeout: Duration::from_secs(3),
            min_connections: 1,
            max_connections: 4,
            max_streams: 100,
            passthrough: true,
            client_streams: 1_000,
        }
    }
}

impl Settings {
    /// The receive windows of connections upstream, which have the certificate of an identity.
    fn windows(&self) -> ReceiveWindows {
        ReceiveWindows::new(self.max_streams, true)
    }
}

/// Time and network, for a step of a node.
#[derive(Debug)]
pub struct Io<'a> {
    /// Time, random numbers and log.
    pub s: &'a mut Scheduler,
    /// The network.
    pub net: &'a mut Network,
}

/// jackstay on a node.
#[derive(Debug)]
pub struct Node {
    index: u16,
    /// Its process.
    pub process: ProcessId,
    settings: Settings,
    endpoints: Vec<Endpoint>,
    /// Connects in progress.
    dials: BTreeMap<ConnectionId, Dial>,
    upstreams: BTreeMap<ConnectionId, Upstream>,
    /// The endpoints of connections that have ended, and what is known of these.
    ended: BTreeMap<ConnectionId, (usize, ConnectionFacts)>,
    clients: BTreeMap<ConnectionId, Downstream>,
    requests: BTreeMap<RequestId, NodeRequest>,
    next_request: RequestId,
    placement: Placement,
    pool: PoolState,
    class: Class<Waiting>,
    /// The numbers of the waits of requests.
    waits: Vec<(RequestId, Purpose, u64)>,
    /// When the pool runs if nothing changes, and for when a timer was started.
    pool_due: Instant,
    pool_armed_for: Option<Instant>,
    hedge_budget: RetryBudget,
    too_old_budget: RetryBudget,
    rejected_budget: RetryBudget,
    /// The pool was notified.
    changed: bool,
    /// Connections that have notified their requests.
    notified: Vec<ConnectionId>,
    /// The longest time that a request has waited for a stream.
    pub longest_wait: Duration,
    checks: Checks,
}

impl Node {
    /// A node in front of these servers.
    pub fn new(
        index: u16,
        process: ProcessId,
        servers: &[ProcessId],
        settings: Settings,
        s: &mut Scheduler,
    ) -> Self {
        // The program creates the endpoints of a set at the same time, and nodes start at different times.
        let grid = s.now + s.random_part(Duration::from_secs(1));
        let endpoints = servers.iter().map(|&server| Endpoint::new(server, grid, s)).collect();
        let (pool, class) = pool::new(s.now);
        Self {
            index,
            process,
            settings,
            endpoints,
            dials: BTreeMap::new(),
            upstreams: BTreeMap::new(),
            ended: BTreeMap::new(),
            clients: BTreeMap::new(),
            requests: BTreeMap::new(),
            next_request: 1,
            placement: Placement::new(s.now, s.rng.fork()),
            pool,
            class,
            waits: Vec::new(),
            pool_due: s.now,
            pool_armed_for: None,
            hedge_budget: RetryBudget::hedges(settings.max_streams),
            too_old_budget: RetryBudget::too_old(),
            rejected_budget: RetryBudget::rejected(),
            changed: false,
            notified: Vec::new(),
            longest_wait: Duration::ZERO,
            checks: Checks::default(),
        }
    }

    /// The process starts.
    pub fn start(&mut self, io: &mut Io<'_>) {
        self.timer(io, NodeTimer::Pool);
        for endpoint in 0..self.endpoints.len() {
            self.timer(io, NodeTimer::Probe(endpoint));
        }
    }

    /// Takes in what has arrived.
    pub fn arrived(&mut self, io: &mut Io<'_>, id: ConnectionId, what: Arrival) {
        if self.upstreams.contains_key(&id) {
            self.upstream_arrived(io, id, what);
        } else if self.dials.contains_key(&id) {
            self.dial_arrived(io, id, &what);
        } else {
            self.client_arrived(io, id, what);
        }
        self.settle(io);
    }

    /// Takes in the end of a timer.
    pub fn timer(&mut self, io: &mut Io<'_>, timer: NodeTimer) {
        match timer {
            NodeTimer::Pool => self.pool_timer(io),
            NodeTimer::Examine(endpoint) => self.examine(io, endpoint),
            NodeTimer::Check(id) => self.check(io, id),
            NodeTimer::Dial(id) => self.dial_timed_out(io, id),
            NodeTimer::Probe(endpoint) => self.probe(io, endpoint),
            NodeTimer::ProbeOverdue(endpoint, number) => self.probe_overdue(io, endpoint, number),
            NodeTimer::ProbeFailed(endpoint, number) => self.probe_timed_out(io, endpoint, number),
            NodeTimer::Request(request) => self.request_timer(io, request),
            NodeTimer::Watch(request, number) => self.watch_timer(io, request, number),
        }
        self.settle(io);
    }

    /// Lets every change have its effect on the requests that wait and on the connections that are wanted.
    fn settle(&mut self, io: &mut Io<'_>) {
        // A change may follow from another one; each ends a wait or an attempt, so there is an end.
        loop {
            let notified = std::mem::take(&mut self.notified);
            if !notified.is_empty() {
                self.check_requests(io, &notified);
            } else if std::mem::take(&mut self.changed) {
                self.run_pool(io);
            } else {
                return;
            }
        }
    }

    fn start_timer(&self, s: &mut Scheduler, at: Instant, timer: NodeTimer) {
        s.timer(at, self.process, Timer::Node(timer));
    }

    /// The endpoint was removed from the set.
    pub(crate) fn remove_endpoint(&mut self, io: &mut Io<'_>, endpoint: usize) {
        self.observe(io, endpoint, Observation::Removed);
        self.settle(io);
    }

    /// The states of the endpoints.
    pub(crate) fn endpoint_states(&self) -> impl Iterator<Item = EndpointState> {
        self.endpoints.iter().map(|endpoint| endpoint.state)
    }

    /// The rules that were broken; see `checks`.
    pub(crate) fn broken_rules(&self) -> impl Iterator<Item = String> {
        self.checks.all_broken().iter().map(|text| format!("node {}: {text}", self.index))
    }

    /// Adds the watches of this node to those of each endpoint.
    pub(crate) fn count_watches(&self, of_endpoints: &mut [u64]) {
        for request in self.requests.values() {
            if let Some(connection) = request.watch_connection() {
                of_endpoints[self.endpoint_of(connection)] += 1;
            }
        }
    }

    /// What is left over when no client is connected: an error for each kind.
    pub fn leftovers(&self, now: Instant) -> Vec<String> {
        let mut left = Vec::new();
        let mut check = |name: &str, count: usize| {
            if count > 0 {
                left.push(format!("node {}: {count} {name} left over", self.index));
            }
        };
        check("requests", self.requests.len());
        check("waiting requests", self.class.waiting());
        check("client connections", self.clients.len());
        let streams = self.upstreams.values().map(Upstream::request_streams).sum();
        check("upstream streams", streams);
        let of_clients = self.upstreams.values().filter(|upstream| !upstream.is_probe);
        let slots = of_clients.map(|upstream| upstream.slots_without_stream(now)).sum();
        check("slots of streams", slots);
        left
    }
}
