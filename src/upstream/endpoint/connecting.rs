//! Connects to an endpoint: who may start one, and what its result means.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::Endpoint;
use super::connect::{ConnectFailure, ConnectTimeout};
use super::health::Observation;
use super::state::EndpointState;
use super::statistics::HandshakeGuard;

impl Endpoint {
    /// Claims the right to connect now: after a failure one attempt at a time, each after its
    /// backoff. `none_usable` says that no endpoint of the upstream is usable; then the pause is
    /// shorter, and no second handshake starts before the first has ended.
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

    /// A fresh connection is established: TCP, TLS and the first PONG.
    pub fn connected(&self) {
        self.observe(Observation::Connected);
    }

    /// A fresh connect failed. Without a live connection the endpoint is ejected, unless a resource
    /// of this host was exhausted.
    pub fn connect_failed(&self, failure: ConnectFailure, now: Instant) {
        let mut guarded = self.guarded();
        guarded.backoff.failed(&failure, fastrand::f64(), now);
        self.step(guarded, Observation::ConnectFailed(failure));
    }

    /// Counts and logs a failed connect. A repeated failure is logged at debug level only: the
    /// first one is an ejection, which is logged.
    pub fn record_connect_failure(&self, failure: &ConnectFailure) {
        self.metrics.dialled(failure.metric_label());
        tracing::debug!(endpoint = &*self.label, reason = failure.reason(), "connect failed");
    }

    /// Counts a handshake in progress until the guard is dropped.
    pub fn track_handshake(&self) -> HandshakeGuard<'_> {
        HandshakeGuard::new(&self.statistics.handshakes)
    }
}
