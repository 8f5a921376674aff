//! One HTTP/2 connection to an endpoint: which requests may use it, which streams it carries, and
//! what follows when [`super::health`] changes its state.
//!
//! The driver is the only task that touches the socket. Requests open streams through
//! [`Connection::reserve`], which counts them: h2 queues a stream above the peer's limit without an
//! error, and the apiserver allows 100.

mod driver;
mod error_text;
mod lifecycle;
mod permit;
mod response_waits;
mod responsiveness;
mod stream_slots;

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::Duration;

use bytes::Bytes;
use h2::client::SendRequest;
use tokio::sync::Notify;
use tokio::time::Instant;

pub use self::error_text::describe_h2_error;
use self::lifecycle::ConnectionLifecycle;
pub use self::lifecycle::{DrainReason, DrainUrgency};
pub use self::permit::Permit;
use self::response_waits::ResponseWaits;
use self::stream_slots::StreamSlots;
use super::balance;
use super::credentials::CredentialClass;
use super::endpoint::Endpoint;
pub use super::health::ConnectionState;
use super::stats::ConnectionStats;
use super::watch_moves::{MoveEligibility, WatchMoves};
use crate::net::tls::certificate::{CertInfo, Subject};
use crate::observe::events::{Change, EventKind};

/// Whether a connection that shows the certificate of `shown` may carry a request whose client has
/// proven the subject `proven`. jackstay's own requests are made for no client.
fn may_carry(class: CredentialClass, shown: Option<&Subject>, proven: Option<&Subject>) -> bool {
    match class {
        CredentialClass::Identity(_) => proven.is_some() && shown == proven,
        CredentialClass::Token | CredentialClass::UnprovenToken | CredentialClass::Anonymous => {
            shown.is_none() && proven.is_none()
        }
        CredentialClass::Probe | CredentialClass::Discovery => proven.is_none(),
    }
}

/// A connection, shared inside one worker.
pub struct Connection {
    pub endpoint: Arc<Endpoint>,
    pub class: CredentialClass,
    /// The generation of its credential: connections of older generations drain.
    pub generation: u64,
    stats: Arc<ConnectionStats>,
    /// The client certificate that it shows, if it shows one.
    certificate: Option<Arc<CertInfo>>,
    send: SendRequest<Bytes>,
    lifecycle: ConnectionLifecycle,
    slots: StreamSlots,
    waits: ResponseWaits,
    /// The moves offered to its watches.
    pub moves: WatchMoves,
    driver: RefCell<Option<Waker>>,
    /// Notified on every change of state: requests that wait on it listen.
    changed: Notify,
    /// The same for the pool.
    pool: Rc<Notify>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("endpoint", &self.endpoint.label)
            .field("class", &self.class)
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl Connection {
    pub fn state(&self) -> ConnectionState {
        self.lifecycle.state.get()
    }

    pub fn was_open(&self, then: Instant) -> bool {
        self.stats.was_open(then)
    }

    /// Since when its PING has been late, also after it has died of that. `None` while it is live,
    /// and where it ended without being suspect before.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.lifecycle.suspect_since.get()
    }

    /// Waits for the next change of its state.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whether streams that can move should leave it: its process is stopped, its path lost, its
    /// certificate old or its endpoint removed. A GOAWAY alone is no reason: an apiserver sends one
    /// now and then to spread its clients (`--goaway-chance`).
    pub fn should_drain(&self) -> bool {
        self.drain_urgency().is_some()
    }

    /// How urgently streams that can move should leave it, if they should.
    pub fn drain_urgency(&self) -> Option<DrainUrgency> {
        self.lifecycle.drain_urgency.get()
    }

    /// Waits until [`Self::should_drain`], or until [`WatchMoves::notification_count`] differs from
    /// `seen`.
    pub async fn drain_or_notification(&self, seen: u32) {
        while !self.should_drain() && self.moves.notification_count() == seen {
            self.changed.notified().await;
        }
    }

    /// Its endpoint is degraded: requests that wait here may want a second attempt, and after a
    /// GOAWAY watches move now.
    pub fn endpoint_degraded(&self) {
        if self.state() == ConnectionState::Draining {
            self.lifecycle.drain_urgency.set(Some(DrainUrgency::Immediate));
        }
        self.changed.notify_waiters();
    }

    /// Whether it may carry a request whose client has proven the subject `proven`: its certificate
    /// names the same subject, or there is neither.
    pub fn may_carry(&self, proven: Option<&Subject>) -> bool {
        may_carry(self.class, self.certificate.as_ref().map(|shown| &shown.subject), proven)
    }

    /// Streams that it could take now.
    pub fn free_streams(&self, now: Instant) -> usize {
        self.slots.free(self.streams(), now)
    }

    pub fn stream_limit(&self) -> usize {
        self.slots.limit.get()
    }

    pub fn streams(&self) -> usize {
        self.stats.streams.load(Ordering::Relaxed)
    }

    /// Watches among them.
    pub fn watches(&self) -> usize {
        self.stats.watches.load(Ordering::Relaxed)
    }

    /// Since when it has had no open stream, if it has none.
    pub fn idle_since(&self) -> Option<Instant> {
        (self.streams() == 0).then(|| self.slots.idle_since.get())
    }

    /// Load for the picker: lower is better. `lot` is for [`balance::slow_start_factor`].
    pub fn cost(&self, now: Instant, lot: f64) -> f64 {
        balance::cost(self.streams(), self.waits.latency(now))
            * balance::slow_start_factor(self.endpoint.slow_start_share(now), lot)
    }

    pub fn last_received(&self) -> Instant {
        self.waits.last_received.get()
    }

    /// Whether new requests should prefer another connection: a request has waited here for a while
    /// without a byte arriving, or the latest `/readyz` failed or is overdue.
    pub fn has_warning_signs(&self, now: Instant) -> bool {
        self.endpoint.probe.is_failing() || self.waits.has_warning(now)
    }

    /// Whether a request has waited for its response head for a whole `pause`, where a response
    /// usually takes less than a quarter of that. Each request counts once. To be called once every
    /// `pause`.
    pub fn has_slow_response_heads(&self, pause: Duration, now: Instant) -> bool {
        self.waits.has_slow_heads(pause, now)
    }

    /// Takes no new streams from now on; closes when the open ones have ended.
    pub fn drain(&self, reason: DrainReason) {
        let urgency = reason.urgency();
        match self.state() {
            ConnectionState::Live | ConnectionState::Suspect => {
                self.lifecycle.drain_urgency.set(urgency);
                self.enter(ConnectionState::Draining, reason.as_str());
                self.wake_driver();
            }
            // It drains after a GOAWAY, for which alone no stream has to move.
            ConnectionState::Draining if urgency.is_some() && !self.should_drain() => {
                self.lifecycle.drain_urgency.set(urgency);
                self.changed.notify_waiters();
            }
            ConnectionState::Draining | ConnectionState::Unresponsive | ConnectionState::Dead => {}
        }
    }

    /// Either side is expected to end the connection from now on: its end is no event, and no sign
    /// that the endpoint fails.
    pub fn expect_end(&self) {
        self.lifecycle.end_expected.set(true);
    }

    /// Closes now; open streams fail.
    pub fn close(&self, reason: DrainReason) {
        self.lifecycle.close_requested.set(Some(reason));
        self.wake_driver();
    }

    /// Offers `count` moves to one of `targets`, instead of those offered before.
    pub(super) fn offer_moves(
        &self,
        eligible: MoveEligibility,
        targets: &Rc<[Arc<Endpoint>]>,
        count: usize,
    ) {
        self.moves.offer(eligible, targets, count);
        self.changed.notify_waiters();
    }

    /// Requests a self-check of every watch.
    pub(super) fn request_self_check(&self) {
        self.moves.request_self_check();
        self.changed.notify_waiters();
    }

    fn enter(&self, state: ConnectionState, reason: &str) {
        self.change(state, reason, false);
    }

    /// Enters a state. The `orderly` end of a connection without streams is routine and no event: an
    /// apiserver closes a connection that is idle for 90 s, and the pool opens another one.
    fn change(&self, state: ConnectionState, reason: &str, orderly: bool) {
        let Some(before) = self.lifecycle.enter(state) else { return };
        self.stats.set_state(state);
        let takes_streams = matches!(state, ConnectionState::Live | ConnectionState::Suspect);
        if !takes_streams && self.lifecycle.counted.replace(false) {
            self.endpoint.connection_closed(self.lifecycle.responds.get(), reason);
        }
        self.publish(before, state, reason, orderly);
        self.changed.notify_waiters();
        self.pool.notify_waiters();
    }

    fn publish(&self, from: ConnectionState, to: ConnectionState, reason: &str, orderly: bool) {
        if self.lifecycle.end_expected.get() {
            tracing::debug!(
                upstream = &*self.endpoint.upstream,
                endpoint = &*self.endpoint.label,
                from = from.as_str(),
                to = to.as_str(),
                reason,
                "connection ends as expected"
            );
            return;
        }
        let local = self.stats.local.map_or_else(String::new, |local| format!(" from {local}"));
        let change = Change {
            kind: EventKind::Connection,
            upstream: Some(&self.endpoint.upstream),
            name: &self.endpoint.label,
            detail: &format!("class {}{local}", self.class.as_str()),
            from: from.as_str(),
            to: if orderly { "closed" } else { to.as_str() },
            reason,
            effect: &lifecycle::effect(to, self.streams(), self.watches()),
            bad: false, // The endpoint publishes faults.
        };
        if orderly {
            self.endpoint.metrics.routine(&change);
        } else {
            self.endpoint.metrics.changed(&change);
        }
    }

    fn wake_driver(&self) {
        if let Some(waker) = self.driver.borrow().as_ref() {
            waker.wake_by_ref();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair};

    fn subject(name: &str) -> Subject {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        Subject::from_der(certificate.der()).unwrap()
    }

    #[test]
    fn connection_carries_only_requests_of_the_subject_that_it_shows() {
        let (alice, bob) = (subject("alice"), subject("bob"));
        let identity = CredentialClass::Identity(0);
        for (class, shown, proven, may) in [
            (identity, Some(&alice), Some(&alice), true),
            (identity, Some(&alice), Some(&bob), false),
            (identity, Some(&alice), None, false),
            (identity, None, Some(&alice), false),
            (identity, None, None, false),
            (CredentialClass::Token, None, None, true),
            (CredentialClass::Token, Some(&alice), None, false),
            (CredentialClass::UnprovenToken, None, Some(&alice), false),
            (CredentialClass::Anonymous, Some(&alice), Some(&alice), false),
            (CredentialClass::Probe, Some(&alice), None, true),
            (CredentialClass::Discovery, Some(&alice), Some(&alice), false),
        ] {
            assert_eq!(may_carry(class, shown, proven), may, "{class:?} {shown:?} {proven:?}");
        }
    }
}
