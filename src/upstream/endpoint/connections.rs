//! What the connections and flows to an endpoint report.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::Endpoint;
use super::health::Observation;
use crate::upstream::health::WRITE_PATIENCE;
use crate::upstream::stats::ConnectionStats;

/// Pause between two looks of [`Endpoint::no_response_expected`].
const NO_RESPONSE_POLL: Duration = Duration::from_millis(100);

impl Endpoint {
    /// A connection became live. `/status` shows its statistics as long as they live.
    pub fn connection_opened(&self, stats: &Arc<ConnectionStats>) {
        self.statistics.add_connection(stats);
        self.observe(Observation::ConnectionOpened);
    }

    /// A connection that [`Self::connection_opened`] counted takes no new streams any more;
    /// `responded` says whether its last PING was answered in time. With the last connection the
    /// result of `/readyz` is forgotten: the next process may not be ready yet.
    pub fn connection_closed(&self, responded: bool, reason: &str) {
        self.observe(Observation::ConnectionClosed { responded, reason, at: Instant::now() });
    }

    /// PINGs on a connection that [`Self::connection_opened`] counted are answered again, or no
    /// longer. The endpoint is suspect while no connection has its PINGs answered.
    pub fn connection_responds(&self, responds: bool) {
        self.observe(Observation::ConnectionResponds(responds));
    }

    /// The prober's connection received a GOAWAY: the apiserver shuts down. New connections will be
    /// refused, but what runs there may finish.
    pub fn goaway_received(&self) {
        self.observe(Observation::GoawayReceived);
    }

    /// Neither a PONG nor a fresh handshake for too long, although its kernel may answer.
    pub fn mark_unresponsive(&self, reason: &str) {
        self.observe(Observation::Unresponsive(reason));
    }

    /// It answers on a connection that was open all the time.
    pub fn mark_responsive(&self) {
        self.observe(Observation::Responsive);
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
            if let Some((at, reason)) = self.guarded().health.unanswered_loss()
                && *at >= sent
                && at.elapsed() >= WRITE_PATIENCE
            {
                return reason.clone();
            }
            sleep(NO_RESPONSE_POLL).await;
        }
    }
}

/// Counts a passed connection to an endpoint.
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
