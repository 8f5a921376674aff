//! One HTTP/2 connection to an endpoint: which requests may use it, which streams it carries, and the
//! effects of its state, which [`super::health`] derives.
//!
//! Only the [`driver`] task reads and writes the socket. A request takes a slot with
//! [`Connection::reserve`] before it opens a stream. The slots are counted because h2 queues a stream
//! above the peer's limit without an error; kube-apiserver allows 100.

mod driver;
mod error_text;
mod lifecycle;
mod line_windows;
mod permit;
mod receiving;
mod response_waits;
mod stream_slots;
mod window_updates;

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use jackstay_core::balance;
pub use jackstay_core::connection_health::ConnectionState;
use jackstay_core::connection_health::{Responsiveness, StateChangeReason};
use tokio::sync::Notify;

pub use self::error_text::describe_h2_error;
use self::lifecycle::ConnectionLifecycle;
pub use self::lifecycle::{DrainReason, DrainUrgency};
pub use self::permit::Permit;
use self::receiving::ReceivingStreams;
use self::response_waits::ResponseWaits;
use self::stream_slots::StreamSlots;
use super::credentials::CredentialClass;
use super::endpoint::Endpoint;
use super::stats::ConnectionStats;
use super::watch_moves::{MoveEligibility, WatchMoves};
use crate::net::tls::certificate::{CertInfo, Subject};
use crate::observe::OpenStreams;
use crate::observe::events::{Change, EventKind, Severity};

/// Whether a connection whose certificate has the subject `shown` may carry a request whose client has
/// proven the subject `proven`. jackstay's own requests (probe, discovery) have no client.
fn may_carry(class: CredentialClass, shown: Option<&Subject>, proven: Option<&Subject>) -> bool {
    match class {
        CredentialClass::Identity(_) => proven.is_some() && shown == proven,
        CredentialClass::Token
        | CredentialClass::UnprovenToken
        | CredentialClass::SlowedToken
        | CredentialClass::Anonymous => shown.is_none() && proven.is_none(),
        CredentialClass::Probe | CredentialClass::Discovery => proven.is_none(),
    }
}

/// A connection, shared inside one worker.
pub struct Connection {
    pub endpoint: Arc<Endpoint>,
    /// The generation of its credential. Connections of older generations drain.
    pub generation: u64,
    stats: Arc<ConnectionStats>,
    /// The client certificate that it shows, if any.
    certificate: Option<Arc<CertInfo>>,
    send: SendRequest<Bytes>,
    lifecycle: ConnectionLifecycle,
    slots: StreamSlots,
    waits: ResponseWaits,
    receiving: ReceivingStreams,
    /// The moves that are offered to its watches.
    pub moves: WatchMoves,
    /// The waker of the driver task.
    driver: RefCell<Option<Waker>>,
    /// Notifies requests on this connection of each change that concerns them.
    changed: Notify,
    /// Notifies the pool's task of changes of state and of free streams.
    pool: Rc<Notify>,
}

/// Why a connection changes its state, as far as the log distinguishes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// The end without open streams as HTTP/2 provides for. Logged at debug level only: an apiserver closes a
    /// connection that is idle for 90 s, and the pool opens another one.
    OrderlyEnd,
    /// A GOAWAY with `NO_ERROR`: the apiserver closes an idle connection, spreads its clients
    /// (`--goaway-chance`) or shuts down, which the endpoint reports.
    ServerShutdown,
    /// All its streams have failed.
    Failure,
    Other,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("endpoint", &self.endpoint.label)
            .field("class", &self.class())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }
}

impl Connection {
    pub fn state(&self) -> ConnectionState {
        self.lifecycle.state.get()
    }

    /// The credential class whose requests it serves.
    pub fn class(&self) -> CredentialClass {
        self.stats.class()
    }

    pub fn is_to(&self, endpoint: &Arc<Endpoint>) -> bool {
        Arc::ptr_eq(&self.endpoint, endpoint)
    }

    /// Whether the connection was opened at or before `at`.
    pub fn was_open(&self, at: Instant) -> bool {
        self.stats.was_open(at)
    }

    /// When the connection last became suspect; also set after it has left that state to drain or die.
    /// `None` while it is live, and if it has never been suspect.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.lifecycle.suspect_since.get()
    }

    /// When the connection began to drain, if it has.
    pub fn draining_since(&self) -> Option<Instant> {
        self.lifecycle.draining_since.get()
    }

    /// Whether a request sent on this connection now would probably get no response, because its path or the
    /// process of the apiserver has shown no evidence of life for a second.
    pub fn is_silent(&self) -> bool {
        self.lifecycle.responsiveness.get() == Responsiveness::Silent
    }

    /// Whether its path is lost and it stays open only for streams that cannot continue on another
    /// connection.
    pub fn is_unresponsive(&self) -> bool {
        self.state() == ConnectionState::Unresponsive
    }

    /// Waits for [`Self::is_unresponsive`].
    pub async fn became_unresponsive(&self) {
        while !self.is_unresponsive() {
            self.changed.notified().await;
        }
    }

    /// Waits until no response head can be expected, and returns the reason: the path is lost, or the
    /// process has been stopped for too long. The second reason applies only to requests that must not
    /// be sent twice; a `safe` request gets a second attempt on another connection instead.
    pub async fn no_response_expected(&self, safe: bool) -> &'static str {
        loop {
            if self.is_unresponsive() {
                return self.lifecycle.unresponsive_reason.get();
            }
            if !safe && self.lifecycle.fails_unsafe_requests.get() {
                return StateChangeReason::ProcessStopped.as_str();
            }
            self.changed.notified().await;
        }
    }

    /// Waits for the next change of its state.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whether streams that can move should leave the connection: its process is stopped, its path is
    /// lost, its certificate was replaced or its endpoint was removed. A GOAWAY alone is no reason: an
    /// apiserver sends one now and then to spread its clients (`--goaway-chance`).
    pub fn should_drain(&self) -> bool {
        self.drain_urgency().is_some()
    }

    /// How urgently streams that can move should leave the connection; `None` if they may stay.
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

    /// Its endpoint is degraded: notifies the requests on the connection, which may start a second
    /// attempt. If the connection is draining, its watches move at once.
    pub fn endpoint_degraded(&self) {
        if self.state() == ConnectionState::Draining {
            self.lifecycle.drain_urgency.set(Some(DrainUrgency::Immediate));
        }
        self.changed.notify_waiters();
    }

    /// The latest `/readyz` of its endpoint failed or is overdue: notifies the requests on the connection, which may
    /// start a second attempt.
    pub fn endpoint_suspected(&self) {
        self.changed.notify_waiters();
    }

    /// Whether the connection may carry a request whose client has proven the subject `proven`.
    pub fn may_carry(&self, proven: Option<&Subject>) -> bool {
        may_carry(self.class(), self.certificate.as_ref().map(|shown| &shown.subject), proven)
    }

    /// Number of streams that can be opened now.
    pub fn free_streams(&self, now: Instant) -> usize {
        self.slots.free(self.streams(), now)
    }

    pub fn stream_limit(&self) -> usize {
        self.slots.limit.get()
    }

    /// Number of open streams.
    pub fn streams(&self) -> usize {
        self.stats.streams.load(Ordering::Relaxed)
    }

    /// Number of open streams that are watches.
    pub fn watches(&self) -> usize {
        self.stats.watches.load(Ordering::Relaxed)
    }

    /// Whether most of its streams, without those that wait for a response, have had one that proves the token of
    /// the client ([`Permit::token_proven`]).
    pub fn is_mostly_proven(&self) -> bool {
        self.slots.are_mostly_proven(self.waits.waiting())
    }

    /// The connection, which was opened for unproven tokens, serves the requests with proven ones from now on.
    pub(super) fn serve_proven_tokens(&self) {
        tracing::debug!(
            upstream = &*self.endpoint.upstream,
            endpoint = &*self.endpoint.label,
            from = self.class().as_str(),
            to = CredentialClass::Token.as_str(),
            streams = self.streams(),
            "connection handed over"
        );
        self.stats.hand_over();
    }

    /// When the last open stream ended; `None` while a stream is open.
    pub fn idle_since(&self) -> Option<Instant> {
        (self.streams() == 0).then(|| self.slots.idle_since.get())
    }

    /// The largest number of streams that were open at once.
    pub fn peak_streams(&self) -> usize {
        self.slots.peak.get()
    }

    /// Load for [`balance::pick_by_share`]: lower is better.
    pub fn cost(&self, now: Instant) -> f64 {
        balance::cost(self.streams(), self.waits.latency(now))
    }

    pub fn last_received(&self) -> Instant {
        self.waits.last_received.get()
    }

    /// Whether new requests should prefer another connection: a request has waited here for 50 ms without
    /// a byte arriving, or the latest `/readyz` of the endpoint failed or is overdue.
    pub fn has_warning_signs(&self, now: Instant) -> bool {
        self.endpoint.probe.is_failing() || self.waits.has_warning(now)
    }

    /// Whether a request has waited for its response head for a whole number of `interval`s that is four times as long
    /// as a response usually takes, or for five. Each request counts once. To be called once in each `interval`.
    pub fn has_slow_response_heads(&self, interval: Duration, now: Instant) -> bool {
        self.waits.has_slow_heads(interval, now)
    }

    /// Stops taking new streams. The connection closes when the open ones have ended.
    pub fn drain(&self, reason: DrainReason) {
        let urgency = reason.urgency();
        match self.state() {
            state @ (ConnectionState::Live | ConnectionState::Suspect) => {
                if state == ConnectionState::Live && reason == DrainReason::Idle {
                    // Nothing has failed.
                    self.expect_end();
                }
                self.lifecycle.drain_urgency.set(urgency);
                self.enter(ConnectionState::Draining, reason.as_str());
                self.wake_driver();
            }
            // It drains for a reason for which streams may stay, such as a GOAWAY.
            ConnectionState::Draining if urgency.is_some() && !self.should_drain() => {
                self.lifecycle.drain_urgency.set(urgency);
                self.changed.notify_waiters();
            }
            ConnectionState::Draining | ConnectionState::Unresponsive | ConnectionState::Dead => {}
        }
    }

    /// Marks the end of the connection as expected: it is not published as an event, and a GOAWAY does
    /// not mean that the apiserver shuts down.
    pub fn expect_end(&self) {
        self.lifecycle.end_expected.set(true);
    }

    /// Closes the connection. Open streams fail.
    pub fn close(&self, reason: DrainReason) {
        self.lifecycle.close_requested.set(Some(reason));
        self.wake_driver();
    }

    /// Offers `count` moves to one of `targets`, in place of an earlier offer.
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
        self.change(state, reason, Cause::Other);
    }

    fn change(&self, state: ConnectionState, reason: &str, cause: Cause) {
        let Some(before) = self.lifecycle.enter(state) else { return };
        self.stats.set_state(state);
        if !state.is_in_service() && self.lifecycle.counted.replace(false) {
            self.endpoint.connection_closed(self.lifecycle.responsiveness.get(), reason);
        }
        self.publish(before, state, reason, cause);
        self.changed.notify_waiters();
        self.pool.notify_one();
    }

    /// Logs a change of state and records it as an event.
    fn publish(&self, from: ConnectionState, to: ConnectionState, reason: &str, cause: Cause) {
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
        let of_clients = usize::from(self.class() != CredentialClass::Probe);
        let open = OpenStreams::of_connection(of_clients * self.streams(), self.watches());
        let local = self.stats.local.map_or_else(String::new, |local| format!(" from {local}"));
        let change = Change {
            kind: EventKind::Connection,
            upstream: Some(&self.endpoint.upstream),
            name: &self.endpoint.label,
            detail: &format!("class {}{local}", self.class().as_str()),
            from: from.as_str(),
            to: if cause == Cause::OrderlyEnd { "closed" } else { to.as_str() },
            reason,
            effect: &lifecycle::effect(to, open),
            bad: false, // Depends on its severity.
        };
        let events = self.endpoint.metrics.events();
        match cause {
            Cause::OrderlyEnd => events.routine(&change),
            Cause::ServerShutdown => events.connection_changed(&change, open, Severity::Routine),
            Cause::Failure | Cause::Other => {
                // If jackstay closes the connection, nothing has failed.
                let failed = cause == Cause::Failure
                    || self.lifecycle.close_requested.get().is_none()
                        && matches!(to, ConnectionState::Unresponsive | ConnectionState::Dead);
                let severity = if failed { Severity::Fault } else { Severity::Notable };
                events.connection_changed(&change, open, severity);
            }
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
    fn may_carry_requires_the_subject_that_the_connection_shows() {
        let (alice, bob) = (subject("alice"), subject("bob"));
        let identity = CredentialClass::Identity(0);
        for (class, shown, proven, expected) in [
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
            assert_eq!(may_carry(class, shown, proven), expected, "{class:?} {shown:?} {proven:?}");
        }
    }
}
