//! A worker's client of one upstream: its connections, its limits, and the conditions under which a waiting
//! request should not rely on its connection.
//!
//! [`super::forward`] decides which requests are sent again, and [`super::watch::body`] which watches are
//! resumed.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use http::response;
use jackstay_core::admission::ByteBudget;
use jackstay_core::endpoint_condition::{self, EndpointCondition, has_ready_besides};
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::late_reads::LateReads;
use jackstay_core::request::retry_budget::RetryBudget;
use jackstay_core::request::start_up;
use jackstay_sys::clock;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use super::admission::unproven_requests::{REQUESTS, UPGRADES, UnprovenRequests};
use super::request_body::UploadTask;
use super::watch::limits::WatchLimits;
use crate::observe::{Metrics, RateLimitedWarnings};
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::pool::{Pool, WarmClasses};
use crate::upstream::shared_address::may_hide_apiserver;

/// See [`UpstreamClient::warnings`].
const WARNING_INTERVAL: Duration = Duration::from_secs(60);

/// How often a drain checks whether the client is still in use.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A worker's client of one upstream. All listeners of the worker that lead to the upstream share it.
pub struct UpstreamClient {
    /// The connections to the upstream's endpoints.
    pub pool: Rc<Pool>,
    /// Limits the hedges, and the requests that are sent to another endpoint after a refusal by one that is starting.
    pub hedge_budget: RetryBudget,
    /// Limits the requests that are sent to another endpoint after a rejection for overload.
    pub rejected_budget: RetryBudget,
    /// Limits the requests that are sent again because their API group, which is not built in, fails at an endpoint.
    pub group_budget: RetryBudget,
    /// When reads of built-in groups are late, and how many are asked of another endpoint, too.
    pub late_reads: LateReads,
    /// The endpoints that have rejected a request for overload, each with the time until which it is not asked instead
    /// of another one.
    rejecting: RefCell<Vec<(EndpointKey, Instant)>>,
    /// The limits that all watches of this client share.
    pub watches: WatchLimits,
    /// Counts retries, hedges and resumed watches.
    pub metrics: Arc<Metrics>,
    /// Limits the bytes of request bodies that all workers hold for retries.
    pub body_budget: Arc<ByteBudget>,
    /// Warnings about version floors, and about defects; at most one of a line in [`WARNING_INTERVAL`].
    pub(super) warnings: RateLimitedWarnings,
    /// The requests with tokens that no response has proven yet.
    pub(super) unproven_requests: Rc<UnprovenRequests>,
    /// The upgrades with such a token or none.
    pub(super) unproven_upgrades: Rc<UnprovenRequests>,
    /// The task that maintains the pool; `None` if the caller of [`UpstreamClient::new`] runs it.
    maintenance: Option<AbortHandle>,
}

impl UpstreamClient {
    /// A client that uses `pool`. The caller runs [`Pool::run`].
    pub fn new(pool: Rc<Pool>, metrics: Arc<Metrics>, body_budget: Arc<ByteBudget>) -> Self {
        let memory = &pool.upstream().memory;
        Self {
            unproven_requests: UnprovenRequests::new(REQUESTS, memory),
            unproven_upgrades: UnprovenRequests::new(UPGRADES, memory),
            hedge_budget: RetryBudget::hedges(pool.upstream().config().connections.max_streams),
            watches: WatchLimits::new(&pool.upstream().name, &metrics),
            pool,
            rejected_budget: RetryBudget::rejected(),
            group_budget: RetryBudget::groups(),
            late_reads: LateReads::default(),
            rejecting: RefCell::default(),
            body_budget,
            warnings: RateLimitedWarnings::new(WARNING_INTERVAL),
            maintenance: None,
            metrics,
        }
    }

    /// Starts a client with a new pool, which opens the connections of the `warm` classes at once.
    pub fn start(
        upstream: &Arc<Upstream>,
        warm: WarmClasses,
        metrics: &Arc<Metrics>,
        body_budget: &Arc<ByteBudget>,
    ) -> Rc<Self> {
        let pool = Pool::new(Arc::clone(upstream), warm);
        let maintenance = spawn_local(Pool::run(Rc::clone(&pool))).abort_handle();
        let client = Self::new(pool, Arc::clone(metrics), Arc::clone(body_budget));
        Rc::new(Self { maintenance: Some(maintenance), ..client })
    }

    /// Whether this is a client of `upstream`.
    pub fn is_client_of(&self, upstream: &Arc<Upstream>) -> bool {
        Arc::ptr_eq(self.pool.upstream(), upstream)
    }

    /// Stops opening connections, waits until no request uses the client or `is_over` returns true, and
    /// then closes the connections.
    pub async fn drain(self: Rc<Self>, is_over: impl Fn() -> bool) {
        self.pool.retire();
        // Requests and watches hold a reference to the client, and response bodies hold a stream.
        while (Rc::strong_count(&self) > 1 || self.pool.streams() > 0) && !is_over() {
            sleep(DRAIN_POLL_INTERVAL).await;
        }
        if let Some(maintenance) = &self.maintenance {
            maintenance.abort();
        }
        self.pool.close();
    }

    /// Adds the share of one client request to the budgets.
    pub fn deposit(&self) {
        self.hedge_budget.deposit();
        self.rejected_budget.deposit();
        self.watches.deposit();
    }

    /// Records that this endpoint rejects requests for overload for a time, and returns all endpoints that do.
    pub fn record_rejection(&self, endpoint: EndpointKey, pause: Duration) -> Vec<EndpointKey> {
        let now = clock::now();
        let mut rejecting = self.rejecting.borrow_mut();
        rejecting.retain(|(other, until)| *until > now && *other != endpoint);
        rejecting.push((endpoint, now + pause));
        rejecting.iter().map(|(endpoint, _)| *endpoint).collect()
    }

    /// The endpoints that have rejected a request for overload, and are not asked instead of another one.
    pub fn rejecting(&self) -> Vec<EndpointKey> {
        let (now, rejecting) = (clock::now(), self.rejecting.borrow());
        let asked_later = rejecting.iter().filter(|(_, until)| *until > now);
        asked_later.map(|(endpoint, _)| *endpoint).collect()
    }

    /// Whether an endpoint that is not in `excluded` is ready.
    pub fn has_ready_endpoint_besides(&self, excluded: &[EndpointKey]) -> bool {
        let endpoints = self.pool.upstream().endpoints();
        has_ready_besides(endpoints.iter().map(|endpoint| endpoint.condition()), excluded)
    }

    /// Whether there may be an apiserver behind an address of the upstream that is no endpoint.
    pub fn may_hide_apiserver(&self) -> bool {
        may_hide_apiserver(&self.pool.upstream().endpoints())
    }

    /// The endpoints that are not asked after this one has refused a request ([`start_up::not_asked_after`]).
    pub fn not_asked_after_refusal(&self, refusing: EndpointKey) -> Option<Vec<EndpointKey>> {
        let endpoints = self.pool.upstream().endpoints();
        let uptimes = endpoints.iter().map(|one| (one.key(), one.state(), one.uptime()));
        start_up::not_asked_after(refusing, &uptimes.collect::<Vec<_>>())
    }

    /// The endpoints in decisions of core.
    pub(super) fn endpoint_conditions(&self) -> Vec<EndpointCondition> {
        let endpoints = self.pool.upstream().endpoints();
        endpoints.iter().map(|endpoint| endpoint.condition()).collect()
    }
}

/// A response from an apiserver: its head, and the stream of its body.
pub(super) struct UpstreamResponse {
    pub(super) head: response::Parts,
    pub(super) recv: RecvStream,
    /// The part of the body that has arrived with the head ([`super::body_prefix`]).
    pub(super) prefix: Option<Bytes>,
    pub(super) permit: Permit,
    /// The task that still sends the request's body.
    pub(super) upload: Option<UploadTask>,
}

impl UpstreamResponse {
    /// Reads the rest of the body until it has more than `max_bytes`, or the stream is lost.
    pub(super) async fn read_rest(&mut self, max_bytes: usize) {
        let mut body = BytesMut::from(self.prefix.take().unwrap_or_default());
        let mut unreleased = body.len();
        while body.len() <= max_bytes && !self.recv.is_end_stream() {
            release_window(&mut self.recv, &mut unreleased);
            let Some(Ok(data)) = self.recv.data().await else { break };
            unreleased = data.len();
            body.extend_from_slice(&data);
        }
        self.prefix = Some(body.freeze());
    }
}

/// Waits until a request should not rely on this connection alone ([`endpoint_condition::is_troubled`]).
pub async fn until_troubled(connection: &Rc<Connection>, client: &UpstreamClient) {
    until_concern(connection, client, None).await;
}

/// Why a request asks another connection, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Concern {
    /// Its connection is in trouble ([`until_troubled`]).
    Troubled,
    /// Its response head is late.
    Late,
}

/// Waits until the connection of a request is in trouble, or until its response head is late; without `late_at` it never
/// is.
pub async fn until_concern(
    connection: &Rc<Connection>,
    client: &UpstreamClient,
    late_at: Option<Instant>,
) -> Concern {
    loop {
        if let Some(at) = late_at {
            connection.notify_at(at);
        }
        connection.changed().await;
        if is_troubled(connection, client) {
            return Concern::Troubled;
        }
        if late_at.is_some_and(|at| at <= clock::now()) {
            return Concern::Late;
        }
    }
}

/// As [`until_troubled`], for a connection that may be in trouble already.
pub async fn while_not_troubled(connection: &Rc<Connection>, client: &UpstreamClient) {
    while !is_troubled(connection, client) {
        connection.changed().await;
    }
}

fn is_troubled(connection: &Connection, client: &UpstreamClient) -> bool {
    let has_better = || has_better_endpoint(connection, client);
    endpoint_condition::is_troubled(connection.state(), connection.drain_urgency(), has_better)
}

/// Whether an endpoint is better than that of the connection ([`endpoint_condition::has_better`]).
pub fn has_better_endpoint(connection: &Connection, client: &UpstreamClient) -> bool {
    let endpoints = client.pool.upstream().endpoints();
    let conditions = endpoints.iter().map(|endpoint| endpoint.condition());
    endpoint_condition::has_better(connection.endpoint_condition(), conditions)
}

/// Polls of one response between two turns of other tasks.
const TURN_POLLS: u16 = 2048;

/// Counts a poll of a response. Every [`TURN_POLLS`], other tasks run first: hyper polls until its buffer is full, and
/// an upstream that sends one byte in each frame would delay the other clients for as long as that takes.
pub fn poll_turn(polls: &mut u16, cx: &mut Context<'_>) -> Poll<()> {
    *polls += 1;
    if *polls < TURN_POLLS {
        return Poll::Ready(());
    }
    *polls = 0;
    cx.waker().wake_by_ref();
    Poll::Pending
}

/// Lets other tasks run before the next poll, because this one has taken long.
pub fn end_turn(polls: &mut u16) {
    *polls = TURN_POLLS;
}

/// Grants the upstream new window for `unreleased` bytes, which the client has read, and resets the number.
pub fn release_window(recv: &mut RecvStream, unreleased: &mut usize) {
    if *unreleased > 0 {
        // Releasing fails only for more bytes than were received.
        let _ = recv.flow_control().release_capacity(std::mem::take(unreleased));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::task::Waker;

    #[test]
    fn poll_turn_is_pending_once_in_each_turn() {
        let (mut polls, mut cx) = (0, Context::from_waker(Waker::noop()));
        for _ in 0..3 {
            for _ in 1..TURN_POLLS {
                assert!(poll_turn(&mut polls, &mut cx).is_ready());
            }
            assert!(poll_turn(&mut polls, &mut cx).is_pending());
        }
    }
}
