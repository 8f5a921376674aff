//! A worker's line to one upstream, and what crosses it: requests are opened here, their heads
//! awaited, and trouble noticed while they wait.
//!
//! What is sent again, and when, is decided by those who use it: [`super::forward`] for requests,
//! [`super::watch::body`] for watches that go on elsewhere.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::response;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use super::request_body::UploadTask;
use super::retry_budget::RetryBudget;
use super::watch::limits::WatchLimits;
use crate::observe::ByteBudget;
use crate::observe::Metrics;
use crate::upstream::Upstream;
use crate::upstream::connection::ConnectionState;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::pool::Pool;

/// Pause before a second attempt is tried again that found no connection, or failed. Within a second
/// of the return of an apiserver traffic flows.
const HEDGE_AGAIN: Duration = Duration::from_secs(1);

/// Pause between two looks at a client that drains.
const DRAIN_TICK: Duration = Duration::from_millis(10);

/// A worker's client of one upstream. All listeners of the worker that lead to the upstream share it.
pub struct UpstreamClient {
    /// The connections to the upstream's endpoints.
    pub pool: Rc<Pool>,
    /// Limits the attempts that run beside another attempt at the same request.
    pub hedges: RetryBudget,
    /// The limits that all watches of this client share.
    pub watches: WatchLimits,
    /// Counts retries, hedges and resumed watches.
    pub metrics: Arc<Metrics>,
    /// Limits the bytes of request bodies that all workers hold for retries.
    pub bodies: Arc<ByteBudget>,
    /// The task that keeps the pool full; `None` if the caller of [`UpstreamClient::new`] runs it.
    maintenance: Option<AbortHandle>,
}

impl UpstreamClient {
    /// A client that uses `pool`. The caller runs [`Pool::run`].
    pub fn new(pool: Rc<Pool>, metrics: Arc<Metrics>, bodies: Arc<ByteBudget>) -> Self {
        Self {
            hedges: RetryBudget::hedges(pool.upstream().config().connections.max_streams),
            pool,
            watches: WatchLimits::new(&metrics),
            metrics,
            bodies,
            maintenance: None,
        }
    }

    /// Starts a client with a pool of its own, which opens its first connections at once.
    pub fn start(
        upstream: &Arc<Upstream>,
        metrics: &Arc<Metrics>,
        bodies: &Arc<ByteBudget>,
    ) -> Rc<Self> {
        let pool = Pool::new(Arc::clone(upstream));
        let maintenance = spawn_local(Pool::run(Rc::clone(&pool))).abort_handle();
        let client = Self::new(pool, Arc::clone(metrics), Arc::clone(bodies));
        Rc::new(Self { maintenance: Some(maintenance), ..client })
    }

    /// Whether this is a client of `upstream`.
    pub fn leads_to(&self, upstream: &Arc<Upstream>) -> bool {
        Arc::ptr_eq(self.pool.upstream(), upstream)
    }

    /// Opens no more connections and waits until no request uses the client, or until `is_over`; then
    /// closes the connections.
    pub async fn drain(self: Rc<Self>, is_over: impl Fn() -> bool) {
        if let Some(maintenance) = &self.maintenance {
            maintenance.abort();
        }
        self.pool.retire();
        // Requests and watches hold a reference to the client, response bodies hold a stream.
        while (Rc::strong_count(&self) > 1 || self.pool.streams() > 0) && !is_over() {
            sleep(DRAIN_TICK).await;
        }
        self.pool.close();
    }

    /// A request was made.
    pub fn earn(&self) {
        self.hedges.earn();
        self.watches.earn();
    }

    /// Whether there is a ready endpoint other than these.
    pub fn has_ready_besides(&self, others: &[Arc<Endpoint>]) -> bool {
        self.pool.upstream().endpoints().iter().any(|endpoint| {
            endpoint.state() == EndpointState::Ready
                && !others.iter().any(|other| Arc::ptr_eq(other, endpoint))
        })
    }
}

/// The head of an answer, and what comes after it.
pub struct UpstreamResponse {
    /// The head.
    pub head: response::Parts,
    /// The body.
    pub recv: RecvStream,
    /// The first piece of the body, where the head was held back for it.
    pub first: Option<Bytes>,
    /// The place of its stream.
    pub permit: Permit,
    /// What is still sent of its request's body.
    pub upload: Option<UploadTask>,
}

/// Waits until the request should not rely on this connection alone: it is suspected, its path is
/// lost, or it drains because its process is stopped, or its endpoint is unwell.
pub async fn troubled(connection: &Rc<Connection>, line: &UpstreamClient) {
    loop {
        connection.changed().await;
        if is_troubled(connection, line) {
            return;
        }
    }
}

/// Waits a while, and then until the request should still not rely on this connection alone.
pub async fn still_troubled(connection: &Rc<Connection>, line: &UpstreamClient) {
    sleep(HEDGE_AGAIN).await;
    while !is_troubled(connection, line) {
        connection.changed().await;
    }
}

fn is_troubled(connection: &Connection, line: &UpstreamClient) -> bool {
    connection.state() == ConnectionState::Suspect
        || connection.should_drain()
        || is_better_elsewhere(connection, line)
}

/// Whether its endpoint is unwell while another one is well. Where all are unwell, asking more of
/// them makes none of them better.
pub fn is_better_elsewhere(connection: &Connection, line: &UpstreamClient) -> bool {
    connection.endpoint.state() == EndpointState::Degraded && line.has_ready_besides(&[])
}

/// Gives back the window of what the client has taken.
pub fn release(recv: &mut RecvStream, unreleased: &mut usize) {
    if *unreleased > 0 {
        // It fails only for more than was received, which cannot be.
        let _ = recv.flow_control().release_capacity(std::mem::take(unreleased));
    }
}
