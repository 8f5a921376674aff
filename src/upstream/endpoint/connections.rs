//! Connects, connections and flows of an endpoint: when a connect may start, what callers report, and
//! the counts of what is open.

use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::{Instant, timeout_at};

use super::Endpoint;
use super::connect::{ConnectFailure, ConnectTimeout};
use super::health::Observation;
use super::state::EndpointState;
use crate::upstream::health::WRITE_PATIENCE;
use crate::upstream::stats::{ConnectionStats, ConnectionStatus};

/// What is open to an endpoint, and how often its process died.
#[derive(Debug, Default)]
pub(super) struct EndpointStatistics {
    connections: Mutex<Vec<Weak<ConnectionStats>>>,
    /// Passthrough flows of all workers.
    flows: AtomicUsize,
    /// Handshakes in progress: TCP is established, TLS or the first PONG is outstanding.
    handshakes: AtomicUsize,
    /// How often the endpoint was ejected because its process died.
    pub(super) deaths: AtomicU64,
}

impl EndpointStatistics {
    /// The status of each connection whose statistics are still in use.
    pub(super) fn connections(&self) -> Vec<ConnectionStatus> {
        self.list().iter().filter_map(Weak::upgrade).map(|stats| stats.status()).collect()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Weak<ConnectionStats>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Endpoint {
    /// Claims the right to connect now. After a failure only one caller gets it for each backoff pause.
    /// `none_usable` says that no endpoint of the upstream is usable; then the pause is shorter, and no
    /// second handshake starts before the first has ended.
    pub fn claim_connect_attempt(&self, none_usable: bool, now: Instant) -> bool {
        if self.state() == EndpointState::Leaving {
            return false;
        }
        let handshakes = self.statistics.handshakes.load(Ordering::Relaxed);
        self.guarded().backoff.claim(none_usable, handshakes, now)
    }

    /// The time limit of the next connect: `configured`, doubled for each timeout in a row.
    pub fn connect_timeout(&self, configured: Duration) -> ConnectTimeout {
        self.guarded().backoff.timeout(configured)
    }

    /// When the last connect failed, unless one has succeeded since.
    pub fn last_failure(&self) -> Option<Instant> {
        self.guarded().backoff.last_failure()
    }

    /// A fresh connect failed. Without a live connection the endpoint is ejected, unless a resource
    /// of this host was exhausted.
    pub fn connect_failed(&self, failure: ConnectFailure, now: Instant) {
        self.count_connect_failure(&failure);
        let mut guarded = self.guarded();
        guarded.backoff.failed(failure.kind, fastrand::f64(), now);
        self.step(guarded, Observation::ConnectFailed(failure));
    }

    /// Counts a failed connect without an effect on state and backoff. Logs it at debug level, since
    /// the ejection is logged.
    pub fn count_connect_failure(&self, failure: &ConnectFailure) {
        self.metrics.dialled(failure.kind.metric_label());
        tracing::debug!(endpoint = &*self.label, reason = failure.reason, "connect failed");
    }

    /// Counts a handshake in progress until the guard is dropped.
    pub fn track_handshake(&self) -> HandshakeGuard<'_> {
        self.statistics.handshakes.fetch_add(1, Ordering::Relaxed);
        HandshakeGuard(&self.statistics.handshakes)
    }

    /// A connection became live. `/status` shows its statistics as long as they live.
    pub fn connection_opened(&self, stats: &Arc<ConnectionStats>) {
        {
            let mut list = self.statistics.list();
            list.retain(|known| known.strong_count() > 0);
            list.push(Arc::downgrade(stats));
        }
        self.observe(Observation::ConnectionOpened);
    }

    /// A connection that [`Self::connection_opened`] counted takes no new streams any more;
    /// `responded` says whether its last PING was answered in time. With the last connection the
    /// result of `/readyz` is forgotten: the next process may not be ready yet.
    pub fn connection_closed(&self, responded: bool, reason: &str) {
        self.observe(Observation::ConnectionClosed { responded, reason, at: Instant::now() });
    }

    /// How often it was ejected after its process died. Flows opened before the last time are dead;
    /// flows opened since are not.
    pub fn deaths(&self) -> u64 {
        self.statistics.deaths.load(Ordering::Relaxed)
    }

    /// Passed connections to it.
    pub fn flows(&self) -> usize {
        self.statistics.flows.load(Ordering::Relaxed)
    }

    /// Counts a passed connection until the guard is dropped.
    pub fn track_flow(self: &Arc<Self>) -> FlowGuard {
        self.statistics.flows.fetch_add(1, Ordering::Relaxed);
        self.metrics.flow_opened();
        FlowGuard(Arc::clone(self))
    }

    /// Waits until no response head can be expected any more for a request that was sent at `sent`
    /// on a connection without PINGs and must not be repeated; returns why. That is when the PINGs
    /// of all HTTP/2 connections stayed unanswered, the last of these was given up after `sent` and
    /// at least [`WRITE_PATIENCE`] ago, and none was opened since.
    pub async fn no_response_expected(&self, sent: Instant) -> String {
        loop {
            let mut changed = pin!(self.connections_changed.notified());
            // Registered before the loss is read, so that no change falls in between.
            changed.as_mut().enable();
            let loss = self.guarded().health.connections.unanswered_loss.clone();
            match loss.filter(|(at, _)| *at >= sent) {
                Some((at, reason)) => {
                    if timeout_at(at + WRITE_PATIENCE, changed).await.is_err() {
                        return reason;
                    }
                }
                None => changed.await,
            }
        }
    }
}

/// Counts a handshake in progress until it is dropped.
#[derive(Debug)]
pub struct HandshakeGuard<'a>(&'a AtomicUsize);

impl Drop for HandshakeGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Counts a flow to an endpoint until it is dropped.
#[derive(Debug)]
pub struct FlowGuard(Arc<Endpoint>);

impl FlowGuard {
    /// The endpoint.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

impl Drop for FlowGuard {
    fn drop(&mut self) {
        self.0.statistics.flows.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.flow_closed();
    }
}
