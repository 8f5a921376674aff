//! Connects, connections and flows of an endpoint: when a connect may start, and what callers report.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jackstay_core::connect::{ConnectFailure, ConnectTimeout};
use jackstay_core::connection::{Responsiveness, WRITE_PATIENCE};
use jackstay_core::endpoint_health::Observation;
use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::line_delay::handshake_delay;
use jackstay_sys::clock;
use tokio::time::timeout_at;

use super::Endpoint;
use crate::upstream::stats::ConnectionStats;

impl Endpoint {
    /// Claims a connect attempt; returns whether it may start now. After a failure, one attempt may start
    /// after each backoff pause. `none_usable` means that no endpoint of the upstream is usable. Then the
    /// pause is shorter, and no second handshake starts before the first has ended.
    pub fn claim_connect_attempt(&self, none_usable: bool, now: Instant) -> bool {
        if self.state() == EndpointState::Leaving {
            return false;
        }
        let handshakes = self.statistics.handshakes.load(Ordering::Relaxed);
        self.guarded().backoff.claim(none_usable, handshakes, now)
    }

    /// The time limit of the next connect: `configured`, doubled for each timeout since the last success, and what the queue
    /// of the line takes.
    pub fn connect_timeout(&self, configured: Duration) -> ConnectTimeout {
        let delay = handshake_delay(self.line_delay(clock::now()));
        self.guarded().backoff.timeout(configured).later(delay)
    }

    /// When the last connect failed, unless one has succeeded since.
    pub fn last_failure(&self) -> Option<Instant> {
        self.guarded().backoff.last_failure()
    }

    /// Records a failed connect. Without a live connection the endpoint is ejected, unless a resource of
    /// this host was exhausted.
    pub fn connect_failed(&self, failure: ConnectFailure, now: Instant) {
        self.count_connect_failure(&failure);
        let mut guarded = self.guarded();
        guarded.backoff.failed(failure.kind, &mut fastrand::Rng::new(), now);
        guarded.connect_error = Some(failure.reason.clone());
        self.step(guarded, Observation::ConnectFailed(failure));
    }

    /// Counts a failed connect without an effect on state and backoff. It is logged at debug level only,
    /// because the ejection is logged too.
    pub fn count_connect_failure(&self, failure: &ConnectFailure) {
        self.metrics.dialled(failure.kind.metric_label());
        tracing::debug!(endpoint = &*self.label, reason = failure.reason, "connect failed");
    }

    /// Counts a handshake in progress until the guard is dropped.
    pub fn track_handshake(&self) -> HandshakeGuard<'_> {
        self.statistics.handshakes.fetch_add(1, Ordering::Relaxed);
        HandshakeGuard(&self.statistics.handshakes)
    }

    /// Records a new live connection. `/status` shows its statistics until they are dropped.
    pub fn connection_opened(&self, stats: &Arc<ConnectionStats>) {
        self.statistics.add_connection(stats);
        let at = clock::now();
        self.observe(Observation::ConnectionOpened { at });
    }

    /// Records that a connection counted by [`Self::connection_opened`] drains or is closed.
    pub fn connection_closed(&self, responsiveness: Responsiveness, reason: &str) {
        let at = clock::now();
        self.observe(Observation::ConnectionClosed { responsiveness, reason, at });
    }

    /// How often the endpoint was ejected because its process died. The flows that were opened before the
    /// latest death are dead.
    pub fn deaths(&self) -> u64 {
        self.statistics.deaths.load(Ordering::Relaxed)
    }

    /// Number of watches on all connections.
    pub fn watches(&self) -> usize {
        self.statistics.watches()
    }

    /// Number of passthrough flows.
    pub fn flows(&self) -> usize {
        self.statistics.flows.load(Ordering::Relaxed)
    }

    /// Number of watches over WebSocket.
    pub fn tunnelled_watches(&self) -> usize {
        self.statistics.tunnelled_watches.load(Ordering::Relaxed)
    }

    /// Counts a watch over WebSocket until the guard is dropped. As for a flow, no PING is possible inside of it, so the
    /// prober finds out whether the process is stopped.
    pub fn track_watch(self: &Arc<Self>) -> TunnelledWatchGuard {
        self.statistics.tunnelled_watches.fetch_add(1, Ordering::Relaxed);
        TunnelledWatchGuard { deaths: self.deaths(), endpoint: Arc::clone(self) }
    }

    /// Counts a passthrough flow until the guard is dropped.
    pub fn track_flow(self: &Arc<Self>) -> FlowGuard {
        self.statistics.flows.fetch_add(1, Ordering::Relaxed);
        self.metrics.flow_opened();
        FlowGuard(Arc::clone(self))
    }

    /// Waits until no response head can be expected for a request that was sent at `sent` on an HTTP/1.1
    /// connection, which has no PINGs. Returns the reason. No response is expected when the last HTTP/2
    /// connection was given up after `sent` because of an unanswered PING, and no other one was opened for
    /// [`WRITE_PATIENCE`].
    pub async fn no_response_expected(&self, sent: Instant) -> String {
        loop {
            let mut changed = pin!(self.connections_changed.notified());
            // Registered before the loss is read, so that no change is missed.
            changed.as_mut().enable();
            let loss = self.guarded().health.connections.unanswered_loss.clone();
            match loss.filter(|(at, _)| *at >= sent) {
                Some((at, reason)) => {
                    if timeout_at((at + WRITE_PATIENCE).into(), changed).await.is_err() {
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
    /// The endpoint of the flow.
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.0
    }
}

/// Counts a watch over WebSocket until it is dropped.
#[derive(Debug)]
pub struct TunnelledWatchGuard {
    endpoint: Arc<Endpoint>,
    /// How often the process had died when the watch began.
    deaths: u64,
}

impl TunnelledWatchGuard {
    /// Waits until the process of the endpoint has died, and returns the reason.
    pub async fn died(&self) -> String {
        self.endpoint.until_ended(|| self.endpoint.deaths() != self.deaths).await;
        let ejection = self.endpoint.guarded().last_ejection.clone();
        let reason = ejection.map_or_else(String::new, |ejection| ejection.reason);
        format!("the apiserver {} does not answer: {reason}", self.endpoint.label)
    }

    /// Waits until the endpoint is removed from the set.
    pub async fn removed(&self) {
        self.endpoint.removed().await;
    }
}

impl Drop for TunnelledWatchGuard {
    fn drop(&mut self) {
        self.endpoint.statistics.tunnelled_watches.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for FlowGuard {
    fn drop(&mut self) {
        self.0.statistics.flows.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.flow_closed();
    }
}
