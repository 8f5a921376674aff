//! One HTTP/2 connection to an endpoint: the shell of [`ConnectionMachine`], which owns its state and makes its
//! decisions.
//!
//! Only the [`driver`] task reads and writes the socket. A request takes a slot with
//! [`Connection::reserve`] before it opens a stream. The slots are counted because h2 queues a stream
//! above the peer's limit without an error; kube-apiserver allows 100.

mod driver;
mod line_windows;
mod permit;
mod receiving;
mod window_updates;

use std::cell::{Cell, OnceCell, RefCell};
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::Waker;
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::SendRequest;
use jackstay_core::connection::{
    ConnectionMachine, ConnectionTransition, Effects, Responsiveness, Significance,
};
pub use jackstay_core::connection::{ConnectionState, DrainReason, DrainUrgency};
use jackstay_core::endpoint_condition::EndpointCondition;
use jackstay_core::pool::ConnectionKey;
use jackstay_net::tls::certificate::{CertInfo, Subject};
use jackstay_sys::clock;
use tokio::sync::Notify;

pub use self::permit::Permit;
use self::receiving::ReceivingStreams;
use super::credentials::CredentialClass;
use super::endpoint::{Endpoint, Observation, ProbeSignals};
use super::stats::ConnectionStats;
use super::watch_moves::{MoveEligibility, WatchMoves};
use crate::observe::events::{Change, EventKind, Severity};
use crate::observe::{OpenStreams, StateGauge};

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

/// What the watches of a connection look at when it changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Watched {
    /// [`WatchMoves::notification_count`].
    notifications: u32,
    is_suspect: bool,
}

static NEXT_KEY: AtomicUsize = AtomicUsize::new(0);

/// A connection, shared inside one worker.
pub struct Connection {
    key: ConnectionKey,
    pub endpoint: Arc<Endpoint>,
    /// Whether it takes one request only.
    for_one_request: bool,
    /// The signals of its own probes, if it is probed itself.
    own_probe: OnceCell<Rc<ProbeSignals>>,
    /// The generation of its credential. Connections of older generations drain.
    pub generation: u64,
    class: Cell<CredentialClass>,
    machine: RefCell<ConnectionMachine>,
    /// What `/status` shows of it; never read here.
    stats: Arc<ConnectionStats>,
    /// The gauge of its state; `None` once it is dead.
    gauge: RefCell<Option<StateGauge>>,
    /// The local address.
    local: Option<SocketAddr>,
    /// The client certificate that it shows, if any.
    certificate: Option<Arc<CertInfo>>,
    send: SendRequest<Bytes>,
    receiving: ReceivingStreams,
    /// The moves that are offered to its watches.
    pub moves: WatchMoves,
    /// See [`Effects::ask_others`].
    asks_others: Cell<bool>,
    /// The first stream of which the apiserver cannot have read the request; `None` if that is not known, and while the
    /// connection is open.
    first_unsent: Cell<Option<u32>>,
    /// The waker of the driver task.
    driver: RefCell<Option<Waker>>,
    /// Notifies requests on this connection of each change that concerns them.
    changed: Notify,
    /// Notifies the pool's task of changes of state and of free streams.
    pool: Rc<Notify>,
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
    /// The signals of the probes that say whether its apiserver is ready: its own, or those of the endpoint.
    pub fn probe(&self) -> &ProbeSignals {
        self.own_probe.get().map_or(&self.endpoint.probe, |probe| probe)
    }

    /// From now on the connection is probed itself. Returns the signals of these probes.
    pub(super) fn probe_itself(&self) -> Rc<ProbeSignals> {
        Rc::clone(self.own_probe.get_or_init(Rc::default))
    }

    /// Records that a response head with this status arrived.
    pub fn response_received(&self, status: u16) {
        match self.own_probe.get() {
            Some(probe) => {
                self.endpoint.metrics.answered(status);
                probe.response_received(status);
            }
            None => self.endpoint.response_received(status),
        }
    }

    /// The endpoint in a decision of core, as this connection shows it.
    pub fn endpoint_condition(&self) -> EndpointCondition {
        EndpointCondition { probe_fails: self.probe().is_failing(), ..self.endpoint.condition() }
    }

    /// Names the connection in the tables of core. No other one ever has this key.
    pub fn key(&self) -> ConnectionKey {
        self.key
    }

    pub fn state(&self) -> ConnectionState {
        self.machine.borrow().state()
    }

    /// The credential class whose requests it serves.
    pub fn class(&self) -> CredentialClass {
        self.class.get()
    }

    pub fn is_to(&self, endpoint: &Arc<Endpoint>) -> bool {
        Arc::ptr_eq(&self.endpoint, endpoint)
    }

    /// Whether it takes one request only, one that waits for it.
    pub fn is_for_one_request(&self) -> bool {
        self.for_one_request
    }

    /// Whether the connection was opened at or before `at`.
    pub fn was_open(&self, at: Instant) -> bool {
        self.machine.borrow().opened_at() <= at
    }

    /// When the connection last became suspect; also set after it has left that state to drain or die.
    /// `None` while it is live, and if it has never been suspect.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.machine.borrow().suspect_since()
    }

    /// Whether it is suspect.
    pub fn is_suspect(&self) -> bool {
        self.state() == ConnectionState::Suspect
    }

    /// Whether it was suspect and has become live again within `period`.
    pub fn has_recovered_within(&self, period: Duration, now: Instant) -> bool {
        self.machine.borrow().has_recovered_within(period, now)
    }

    /// When the connection began to drain. `None` once it is dead.
    pub fn draining_since(&self) -> Option<Instant> {
        self.machine.borrow().draining_since()
    }

    /// Whether a request sent on this connection now would probably get no response, because its path or the
    /// process of the apiserver has shown no evidence of life for a second.
    pub fn is_silent(&self) -> bool {
        self.machine.borrow().responsiveness() == Responsiveness::Silent
    }

    /// Whether its PINGs are answered, as far as is known.
    pub fn responds(&self) -> bool {
        self.machine.borrow().responsiveness() == Responsiveness::Responds
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

    /// Waits until no response head can be expected, and returns the reason
    /// ([`ConnectionMachine::no_response_reason`]).
    pub async fn no_response_expected(&self, safe: bool) -> &'static str {
        loop {
            let reason = self.machine.borrow().no_response_reason(safe);
            if let Some(reason) = reason {
                return reason.as_str();
            }
            self.changed.notified().await;
        }
    }

    /// Waits until it is neither live nor suspect: it will take no new streams.
    pub async fn until_unusable(&self) {
        while matches!(self.state(), ConnectionState::Live | ConnectionState::Suspect) {
            self.changed().await;
        }
    }

    /// Waits until it is not suspect.
    pub async fn while_suspect(&self) {
        while self.state() == ConnectionState::Suspect {
            self.changed().await;
        }
    }

    /// Waits for the next change of its state.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// [`Self::changed`] ends at `at` at the latest, or 10 ms later, while a request waits for its response head.
    pub fn notify_at(&self, at: Instant) {
        let effects = self.machine.borrow_mut().notify_at(at);
        self.execute(effects, "");
    }

    /// Whether streams that can move should leave the connection: its process is stopped, its path is
    /// lost, its certificate was replaced or its endpoint was removed. A GOAWAY alone is no reason: an
    /// apiserver sends one now and then to spread its clients (`--goaway-chance`).
    pub fn should_drain(&self) -> bool {
        self.drain_urgency().is_some()
    }

    /// How urgently streams that can move should leave the connection; `None` if they may stay.
    pub fn drain_urgency(&self) -> Option<DrainUrgency> {
        self.machine.borrow().drain_urgency()
    }

    /// Waits until [`Self::should_drain`].
    pub async fn until_should_drain(&self) {
        while !self.should_drain() {
            self.changed.notified().await;
        }
    }

    /// What its watches look at when it changes.
    pub fn watched(&self) -> Watched {
        Watched { notifications: self.moves.notification_count(), is_suspect: self.is_suspect() }
    }

    /// Waits until [`Self::should_drain`], or until [`Self::watched`] differs from `seen`.
    pub async fn drain_or_change(&self, seen: Watched) {
        while !self.should_drain() && self.watched() == seen {
            self.changed.notified().await;
        }
    }

    /// Its endpoint is degraded: notifies the requests on the connection, which may start a second
    /// attempt. If the connection is draining, its watches move at once.
    pub fn endpoint_degraded(&self) {
        self.input(ConnectionMachine::endpoint_degraded);
    }

    /// The latest `/readyz` of its endpoint failed or is overdue: notifies the requests on the connection, which may
    /// start a second attempt. If the endpoint limits PINGs, one is due.
    pub fn endpoint_suspected(&self) {
        self.input(|machine| machine.endpoint_suspected(clock::now()));
    }

    /// A watch on another connection has shown an event at `now` that a watch on this one should show, too.
    pub(super) fn event_expected(&self, now: Instant) {
        self.input(|machine| machine.event_expected(now));
    }

    /// Whether the other connections should be asked. Each time once.
    pub(super) fn take_question(&self) -> bool {
        self.asks_others.take()
    }

    /// Asks the apiserver by a PING whether it responds, unless one was answered recently.
    pub(super) fn ask(&self, now: Instant) {
        self.input(|machine| machine.ask(now));
    }

    /// Notifies the watches on the connection, which look at what has changed.
    pub fn notify_watches(&self) {
        self.moves.notify();
        self.changed.notify_waiters();
    }

    /// Whether the connection may carry a request whose client has proven the subject `proven`.
    pub fn may_carry(&self, proven: Option<&Subject>) -> bool {
        may_carry(self.class(), self.certificate.as_ref().map(|shown| &shown.subject), proven)
    }

    /// Number of streams that can be opened now.
    pub fn free_streams(&self, now: Instant) -> usize {
        self.machine.borrow().free_streams(now)
    }

    pub fn stream_limit(&self) -> usize {
        self.machine.borrow().stream_limit()
    }

    /// Number of open streams.
    pub fn streams(&self) -> usize {
        self.machine.borrow().streams()
    }

    /// Number of open streams that are watches.
    pub fn watches(&self) -> usize {
        self.machine.borrow().watches()
    }

    /// Whether most of its streams, without those that wait for a response, have had one that proves the token of
    /// the client ([`Permit::token_proven`]).
    pub fn is_mostly_proven(&self) -> bool {
        self.machine.borrow().is_mostly_proven()
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
        self.class.set(CredentialClass::Token);
        self.stats.hand_over();
    }

    /// It serves the heartbeats of its class, and nothing else.
    pub(super) fn serve_heartbeats(&self) {
        self.stats.serve_heartbeats();
    }

    /// When the last open stream ended; `None` while a stream is open.
    pub fn idle_since(&self) -> Option<Instant> {
        self.machine.borrow().idle_since()
    }

    /// The largest number of streams that were open at once.
    pub fn peak_streams(&self) -> usize {
        self.machine.borrow().peak_streams()
    }

    /// Load for [`jackstay_core::balance::pick_by_share`]: lower is better.
    pub fn cost(&self, now: Instant) -> f64 {
        self.machine.borrow().cost(now)
    }

    /// The smoothed round-trip time of its PINGs.
    pub fn rtt(&self) -> Duration {
        self.machine.borrow().rtt()
    }

    pub fn last_received(&self) -> Instant {
        self.machine.borrow().last_received()
    }

    /// Whether new requests should prefer another connection: a request has waited here for 50 ms without
    /// a byte arriving, or the latest `/readyz` failed or is overdue.
    pub fn has_warning_signs(&self, now: Instant) -> bool {
        self.probe().is_failing() || self.machine.borrow().has_waiting_request(now)
    }

    /// Whether a request has waited for its response head for a whole number of `interval`s that is four times as long
    /// as a response usually takes, or for five. Each request counts once. To be called once in each `interval`.
    pub fn has_slow_response_heads(&self, interval: Duration, now: Instant) -> bool {
        self.machine.borrow_mut().has_slow_response_heads(interval, now)
    }

    /// Whether the apiserver cannot have read the request of this stream, and never will.
    fn is_unsent(&self, stream: u32) -> bool {
        self.first_unsent.get().is_some_and(|first| stream >= first)
    }

    /// Stops taking new streams. The connection closes when the open ones have ended.
    pub fn drain(&self, reason: DrainReason) {
        self.input(|machine| machine.drain(reason, clock::now()));
    }

    /// Sets whether its end is expected ([`ConnectionMachine::set_end_expected`]).
    pub fn set_end_expected(&self, expected: bool) {
        self.machine.borrow_mut().set_end_expected(expected);
    }

    /// Whether it shows a client certificate.
    pub fn shows_certificate(&self) -> bool {
        self.certificate.is_some()
    }

    /// Closes the connection. Open streams fail.
    pub fn close(&self, reason: DrainReason) {
        self.input(|machine| machine.close(reason));
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

    /// Gives the machine an input that is no error of h2, and executes its effects.
    fn input(&self, input: impl FnOnce(&mut ConnectionMachine) -> Effects) {
        self.execute(self.step(input), "");
    }

    /// Gives the machine an input, and publishes its figures for `/status`.
    fn step<T>(&self, input: impl FnOnce(&mut ConnectionMachine) -> T) -> T {
        let mut machine = self.machine.borrow_mut();
        let result = input(&mut machine);
        self.stats.publish(&machine);
        result
    }

    /// Executes effects but those on the socket. `error` is the text of the error of h2 that was the input.
    fn execute(&self, effects: Effects, error: &str) {
        if effects.shutdown_announced {
            self.endpoint.observe(Observation::GoawayReceived);
        }
        if let Some(change) = effects.responsiveness {
            let (from, to) = (change.from, change.to);
            self.endpoint.observe(Observation::ResponsivenessChanged { from, to });
        }
        if let Some(rtt) = effects.round_trip {
            self.endpoint.metrics.rtt(rtt);
            self.stats.set_rtt(self.machine.borrow().rtt());
        }
        if let Some(transition) = effects.transition {
            self.publish(transition, transition.reason.text(error));
        }
        if effects.notify_requests {
            self.changed.notify_waiters();
        }
        if effects.ask_others {
            self.asks_others.set(true);
        }
        if effects.notify_pool {
            self.pool.notify_one();
        }
        if effects.wake_driver
            && let Some(waker) = self.driver.borrow().as_ref()
        {
            waker.wake_by_ref();
        }
    }

    /// Shows a change of state in metrics, in the log, as an event, and to the endpoint.
    fn publish(&self, transition: ConnectionTransition, reason: &str) {
        let to = transition.to;
        if to == ConnectionState::Dead {
            self.gauge.take();
        } else if let Some(gauge) = self.gauge.borrow_mut().as_mut() {
            gauge.set(to.as_str());
        }
        self.report(transition, reason);
        // After the report: the endpoint may fail at once, on another thread, and its line reports what was lost.
        if transition.leaves_service() {
            let responsiveness = self.machine.borrow().responsiveness();
            self.endpoint.connection_closed(responsiveness, reason);
        }
    }

    /// Shows a change of state in the log and as an event.
    fn report(&self, transition: ConnectionTransition, reason: &str) {
        let ConnectionTransition { from, to, significance, .. } = transition;
        if significance == Significance::Expected {
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
        let orderly = significance == Significance::OrderlyEnd;
        let open = if orderly || self.class() == CredentialClass::Probe {
            OpenStreams::default()
        } else {
            OpenStreams::of_connection(self.streams(), self.watches())
        };
        let local = self.local.map_or_else(String::new, |local| format!(" from {local}"));
        let change = Change {
            kind: EventKind::Connection,
            upstream: Some(&self.endpoint.upstream),
            name: &self.endpoint.label,
            detail: &format!("class {}{local}", self.class().as_str()),
            from: from.as_str(),
            to: if orderly { "closed" } else { to.as_str() },
            reason,
            effect: &effect(to, open),
            bad: false, // Depends on its severity.
        };
        let events = self.endpoint.metrics.events();
        let severity = match significance {
            Significance::Expected | Significance::OrderlyEnd => return events.routine(&change),
            Significance::ServerShutdown => Severity::Routine,
            Significance::Notable => Severity::Notable,
            Significance::Fault => Severity::Fault,
        };
        events.connection_changed(&change, open, severity);
    }
}

/// What a new state means for the streams on the connection, for the log.
fn effect(state: ConnectionState, open: OpenStreams) -> String {
    let none_open = open.is_empty();
    let open = if none_open { "no open streams".to_owned() } else { format!("open: {open}") };
    match state {
        ConnectionState::Live => "takes new streams again".to_owned(),
        ConnectionState::Suspect => {
            format!("no new streams; a replacement is opened if no other is left; {open}")
        }
        ConnectionState::Draining => format!("no new streams; {open}"),
        ConnectionState::Unresponsive => {
            format!("no new streams; streams that can move are moved; {open}")
        }
        ConnectionState::Dead if none_open => format!("closed; {open}"),
        ConnectionState::Dead => {
            format!("closed; watches are resumed, safe requests retried elsewhere; {open}")
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
