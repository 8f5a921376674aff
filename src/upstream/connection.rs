//! One HTTP/2 connection to an endpoint: who may use it, what runs on it, and what becomes of it
//! when [`super::health`] says that it is dead.
//!
//! Its driver is the only task that touches the socket. Requests open streams through
//! [`Connection::reserve`], which counts them: h2 would queue a stream above the peer's limit
//! without a word, and the apiserver allows 100.

mod driver;
mod giving_up;
mod permit;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
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

use super::balance::{self, PeakEwma};
use super::credentials::{ClientTls, CredentialClass};
use super::dial::Established;
use super::endpoint::Endpoint;
pub use super::health::ConnectionState;
use super::health::{ConnectionHealth, Thresholds};
use super::stats::ConnectionStats;
use super::watch_moves::Offers;
use crate::net::tls::certificate::{CertInfo, Subject};
use crate::observe::ConnectionGauge;
use crate::observe::events::{Change, Kind};
use driver::Driver;
pub use permit::Permit;

/// A request that waits this long makes others prefer another connection.
const DOUBT_AFTER: Duration = Duration::from_millis(50);

/// The reason of a drain that nobody needs to make way for.
pub const IDLE: &str = "idle";

/// The same of a connection whose identity or upstream is configured no longer: there is nowhere to
/// go for what runs on it.
pub const RETIRED: &str = "configured no longer";

/// What an error on a connection says to people. Of a peer that is gone without a word rustls says
/// where its manual treats of that.
pub fn describe_h2_error(error: &h2::Error) -> String {
    match error.get_io().map(std::io::Error::kind) {
        Some(std::io::ErrorKind::UnexpectedEof) => "the peer ended it without a word".to_owned(),
        _ => error.to_string(),
    }
}

/// What a change of its life means for what runs on it, for the log.
fn effect(life: ConnectionState, streams: usize, watches: usize) -> String {
    let on_it = match streams {
        0 => "nothing runs on it".to_owned(),
        _ => format!("streams on it: {streams}, watches among them: {watches}"),
    };
    match life {
        ConnectionState::Live => "takes new streams again".to_owned(),
        ConnectionState::Suspect => {
            format!("no new streams; another one is opened if none is left; {on_it}")
        }
        ConnectionState::Draining => format!("no new streams; {on_it}"),
        ConnectionState::Unresponsive => {
            format!("no new streams; what can goes on elsewhere, the rest waits; {on_it}")
        }
        ConnectionState::Dead if streams == 0 => "closed; nothing ran on it".to_owned(),
        ConnectionState::Dead => format!("closed; what may goes on elsewhere; {on_it}"),
    }
}

/// Whether a connection that shows `shown` may carry a request of a client that has proven `proven`.
/// jackstay's own requests are made for no client.
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
    /// Where it goes.
    pub endpoint: Arc<Endpoint>,
    /// Whose requests it carries.
    pub class: CredentialClass,
    /// Of which credential: an older one drains.
    pub generation: u64,
    /// The client certificate that it shows, if it shows one.
    certificate: Option<Arc<CertInfo>>,
    /// For the status page.
    pub stats: Arc<ConnectionStats>,
    send: SendRequest<Bytes>,
    life: Cell<ConnectionState>,
    /// Since when its PING has been late: what follows of it (drain, death) leaves it as it is.
    suspect_since: Cell<Option<Instant>>,
    /// Nothing has come of it lately, or nothing of ours has arrived.
    dark: Cell<bool>,
    /// Streams that cannot move: see [`super::health`].
    pinned: Cell<usize>,
    /// Its PINGs are answered, as far as the endpoint knows.
    answers: Cell<bool>,
    /// See [`Self::given_up`].
    ends_writes: Cell<bool>,
    /// Why it is unresponsive.
    trouble: Cell<&'static str>,
    gauge: RefCell<Option<ConnectionGauge>>,
    /// The endpoint counts on it.
    counted: Cell<bool>,
    /// Streams it may carry: ours and the peer's limit, whichever is less.
    cap: Cell<usize>,
    max_streams: usize,
    latency: Cell<PeakEwma>,
    /// Requests that wait for their response head, and since when there are any.
    waiting: Cell<usize>,
    waiting_since: Cell<Option<Instant>>,
    /// Of those that end, by the look ([`Self::has_slow_response_heads`]) after which they began to wait.
    waits: Cell<[usize; 2]>,
    look: Cell<u32>,
    /// When bytes last arrived.
    heard: Cell<Instant>,
    cancelled: RefCell<VecDeque<Instant>>,
    idle_since: Cell<Instant>,
    driver: RefCell<Option<Waker>>,
    close: Cell<Option<&'static str>>,
    /// What can go on elsewhere should.
    leave: Cell<Option<DrainUrgency>>,
    /// Its end is no event.
    end_expected: Cell<bool>,
    /// What its watches are asked for.
    pub(super) offers: Offers,
    /// Told on every change of state: requests that wait on it, and the pool.
    pub(super) changed: Notify,
    pool: Rc<Notify>,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("endpoint", &self.endpoint.label)
            .field("class", &self.class)
            .field("life", &self.life.get())
            .finish_non_exhaustive()
    }
}

/// How soon what can go on elsewhere should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainUrgency {
    /// It delivers nothing, or may not for long: its process is stopped, or its endpoint is not well.
    Immediate,
    /// It works: its certificate is old, or its endpoint was removed.
    Relaxed,
}

/// What a connection needs to know of its pool.
#[derive(Debug, Clone)]
pub struct Settings {
    /// When it is suspect and when dead.
    pub thresholds: Thresholds,
    /// Our own limit of streams.
    pub max_streams: usize,
}

impl Connection {
    /// Takes an established connection into use and spawns its driver on the current `LocalSet`.
    pub fn start(
        established: Established,
        endpoint: &Arc<Endpoint>,
        class: CredentialClass,
        shown: &ClientTls,
        settings: &Settings,
        pool: Rc<Notify>,
    ) -> Rc<Self> {
        let now = Instant::now();
        let Established { send, connection, ping, observer, rtt } = established;
        let certificate = shown.certificate.clone();
        let serial = certificate.as_ref().map(|info| info.serial.clone());
        let stats = ConnectionStats::new(class, serial, observer.local_addr().ok(), now);
        stats.set_rtt(rtt);
        let mut gauge = endpoint.metrics.connection_gauge();
        gauge.set(ConnectionState::Live.as_str());
        let this = Rc::new(Self {
            endpoint: Arc::clone(endpoint),
            class,
            generation: shown.generation,
            certificate,
            stats,
            cap: Cell::new(settings.max_streams.min(send.current_max_send_streams())),
            max_streams: settings.max_streams,
            send,
            life: Cell::new(ConnectionState::Live),
            suspect_since: Cell::new(None),
            dark: Cell::new(false),
            pinned: Cell::new(0),
            answers: Cell::new(true),
            ends_writes: Cell::new(false),
            trouble: Cell::new(""),
            gauge: RefCell::new(Some(gauge)),
            counted: Cell::new(true),
            latency: Cell::new(PeakEwma::new(now)),
            waiting: Cell::new(0),
            waiting_since: Cell::new(None),
            waits: Cell::default(),
            look: Cell::new(0),
            heard: Cell::new(now),
            cancelled: RefCell::default(),
            idle_since: Cell::new(now),
            driver: RefCell::new(None),
            close: Cell::new(None),
            leave: Cell::new(None),
            end_expected: Cell::new(false),
            offers: Offers::default(),
            changed: Notify::new(),
            pool,
        });
        endpoint.connection_opened(&this.stats);
        endpoint.metrics.rtt(rtt);
        tracing::info!(
            upstream = &*endpoint.upstream,
            endpoint = &*endpoint.label,
            class = class.as_str(),
            local = this.stats.local.map(tracing::field::display),
            rtt_us = rtt.as_micros() as u64,
            "connection is live"
        );
        let health = ConnectionHealth::new(settings.thresholds, rtt, now);
        let driver = Driver { this: Rc::clone(&this), connection, ping, observer, health, read: 0 };
        tokio::task::spawn_local(driver.run());
        this
    }

    /// Its state.
    pub fn state(&self) -> ConnectionState {
        self.life.get()
    }

    /// Since when it has carried nothing that anybody could rely on: since its PING was late, also
    /// when it has died of that. `None` while it is live, and where its end came without a warning.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.suspect_since.get()
    }

    /// Whether what is sent on it would most likely share its end: it is suspect, and its kernel
    /// does not answer either.
    pub fn path_unresponsive(&self) -> bool {
        self.dark.get()
    }

    /// Waits for the next change of its state.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whether what can go on elsewhere should: its process is stopped, its path lost, its
    /// certificate old or its endpoint gone. A GOAWAY alone is no reason, an apiserver sends one now and then to
    /// spread its clients (`--goaway-chance`).
    pub fn should_drain(&self) -> bool {
        self.leave.get().is_some()
    }

    /// How soon, if so.
    pub fn drain_urgency(&self) -> Option<DrainUrgency> {
        self.leave.get()
    }

    /// Waits for [`Self::should_drain`] or until its watches are asked for something
    /// ([`Self::asked`] is no longer what it was).
    pub async fn drain_or_notification(&self, asked: u32) {
        while !self.should_drain() && self.notification_count() == asked {
            self.changed.notified().await;
        }
    }

    /// Its endpoint says that it is not ready. Requests that wait here may want a second attempt,
    /// and after a GOAWAY this is the moment for watches to move.
    pub fn endpoint_degraded(&self) {
        if self.life.get() == ConnectionState::Draining {
            self.leave.set(Some(DrainUrgency::Immediate));
        }
        self.changed.notify_waiters();
    }

    /// Whether it may carry a request whose client has proven `proven`: the certificate that it shows
    /// names the same subject, or there is neither.
    pub fn may_carry(&self, proven: Option<&Subject>) -> bool {
        may_carry(self.class, self.certificate.as_ref().map(|shown| &shown.subject), proven)
    }

    /// Streams it could take now.
    pub fn free(&self, now: Instant) -> usize {
        let used = self.stats.streams.load(Ordering::Relaxed) + self.held_by_cancelled(now);
        self.cap.get().saturating_sub(used)
    }

    /// Streams it carries at most.
    pub fn cap(&self) -> usize {
        self.cap.get()
    }

    /// Open streams.
    pub fn streams(&self) -> usize {
        self.stats.streams.load(Ordering::Relaxed)
    }

    /// Watches among them.
    pub fn watches(&self) -> usize {
        self.stats.watches.load(Ordering::Relaxed)
    }

    /// Load for the picker: lower is better. `lot` is for [`balance::handicap`].
    pub fn cost(&self, now: Instant, lot: f64) -> f64 {
        balance::cost(self.streams(), self.latency.get().value(now))
            * balance::handicap(self.endpoint.slow_start_share(now), lot)
    }

    /// When bytes last arrived on it.
    pub fn last_received(&self) -> Instant {
        self.heard.get()
    }

    /// Whether a request has waited here for a while without a byte arriving, or the latest
    /// `/readyz` does: no reason for a verdict, but one to take another connection if there is one.
    pub fn has_warning_signs(&self, now: Instant) -> bool {
        self.endpoint.is_probe_failing()
            || self
                .waiting_since
                .get()
                .is_some_and(|since| now >= since.max(self.heard.get()) + DOUBT_AFTER)
    }

    /// Whether the head of some request has stayed away since the look before the last one, `pause`
    /// ago, where an answer usually takes less than a quarter of that. Each request is such a sign
    /// once. To be called at that pace.
    pub fn has_slow_response_heads(&self, pause: Duration, now: Instant) -> bool {
        let look = self.look.get().wrapping_add(1);
        self.look.set(look);
        let mut waits = self.waits.get();
        let old = std::mem::take(&mut waits[look as usize % 2]);
        self.waits.set(waits);
        old > 0 && self.latency.get().value(now) * 4.0 < pause.as_secs_f64()
    }

    fn note_wait(&self) -> u32 {
        let look = self.look.get();
        let mut waits = self.waits.get();
        waits[look as usize % 2] += 1;
        self.waits.set(waits);
        look
    }

    fn wait_over(&self, since: u32) {
        if self.look.get().wrapping_sub(since) < 2 {
            let mut waits = self.waits.get();
            waits[since as usize % 2] = waits[since as usize % 2].saturating_sub(1);
            self.waits.set(waits);
        }
    }

    /// Since when it has carried nothing, if it carries nothing.
    pub fn idle_since(&self) -> Option<Instant> {
        (self.streams() == 0).then(|| self.idle_since.get())
    }

    /// Takes no new streams from now on; closes when the running ones are done.
    pub fn drain(&self, why: &'static str) {
        let leaving = (why != IDLE && why != RETIRED).then_some(DrainUrgency::Relaxed);
        match self.life.get() {
            ConnectionState::Live | ConnectionState::Suspect => {
                self.leave.set(leaving);
                self.enter(ConnectionState::Draining, why);
                self.wake_driver();
            }
            // It drains after a GOAWAY, which alone is no reason to leave it.
            ConnectionState::Draining if leaving.is_some() && self.leave.get().is_none() => {
                self.leave.set(leaving);
                self.changed.notify_waiters();
            }
            ConnectionState::Draining | ConnectionState::Unresponsive | ConnectionState::Dead => {}
        }
    }

    /// The connection is expected to end from now on, by either side: its end is no event, and no sign
    /// that the endpoint is failing.
    pub fn expect_end(&self) {
        self.end_expected.set(true);
    }

    /// Closes now, whatever runs on it.
    pub fn close(&self, why: &'static str) {
        self.close.set(Some(why));
        self.wake_driver();
    }

    fn held_by_cancelled(&self, now: Instant) -> usize {
        let mut cancelled = self.cancelled.borrow_mut();
        while cancelled.front().is_some_and(|&until| until <= now) {
            cancelled.pop_front();
        }
        cancelled.len()
    }

    fn enter(&self, life: ConnectionState, why: &str) {
        self.change(life, why, false);
    }

    /// Enters a state. The `orderly` end of a connection on which nothing runs is routine: an apiserver
    /// closes one that is idle for 90 s, and another takes its place.
    fn change(&self, life: ConnectionState, why: &str, orderly: bool) {
        let before = self.life.replace(life);
        if before == life {
            return;
        }
        match life {
            ConnectionState::Live => self.suspect_since.set(None),
            ConnectionState::Suspect => self.suspect_since.set(Some(Instant::now())),
            ConnectionState::Draining | ConnectionState::Unresponsive | ConnectionState::Dead => {}
        }
        self.stats.set_life(life);
        let takes_streams = matches!(life, ConnectionState::Live | ConnectionState::Suspect);
        if !takes_streams && self.counted.replace(false) {
            self.endpoint.connection_closed(self.answers.get(), why);
        }
        match life {
            ConnectionState::Dead => drop(self.gauge.take()),
            _ => self.gauge.borrow_mut().iter_mut().for_each(|gauge| gauge.set(life.as_str())),
        }
        if self.end_expected.get() {
            tracing::debug!(
                upstream = &*self.endpoint.upstream,
                endpoint = &*self.endpoint.label,
                from = before.as_str(),
                to = life.as_str(),
                reason = why,
                "connection ends as expected"
            );
            self.changed.notify_waiters();
            self.pool.notify_waiters();
            return;
        }
        let local = self.stats.local.map_or_else(String::new, |local| format!(" from {local}"));
        let change = Change {
            kind: Kind::Connection,
            upstream: Some(&self.endpoint.upstream),
            name: &self.endpoint.label,
            detail: &format!("class {}{local}", self.class.as_str()),
            from: before.as_str(),
            to: if orderly { "closed" } else { life.as_str() },
            reason: why,
            effect: &effect(life, self.streams(), self.watches()),
            bad: false, // what it means for the endpoint is the endpoint's to say
        };
        if orderly {
            self.endpoint.metrics.routine(&change);
        } else {
            self.endpoint.metrics.changed(&change);
        }
        self.changed.notify_waiters();
        self.pool.notify_waiters();
    }

    fn wake_driver(&self) {
        if let Some(waker) = self.driver.borrow().as_ref() {
            waker.wake_by_ref();
        }
    }

    fn head_awaited(&self, now: Instant) {
        let waiting = self.waiting.get();
        if waiting == 0 {
            self.waiting_since.set(Some(now));
        }
        self.waiting.set(waiting + 1);
    }

    fn head_settled(&self) {
        let waiting = self.waiting.get().saturating_sub(1);
        self.waiting.set(waiting);
        if waiting == 0 {
            self.waiting_since.set(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DnType, KeyPair};
    use std::io::{self, ErrorKind};
    use std::pin::Pin;
    use std::task::{Context, Poll};
    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    /// A peer that takes everything and then fails to say anything.
    struct Gone(ErrorKind);

    impl AsyncRead for Gone {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            Poll::Ready(Err(io::Error::new(self.0, "see the manual")))
        }
    }

    impl AsyncWrite for Gone {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

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

    #[tokio::test(start_paused = true)]
    async fn errors_are_for_people() {
        for (kind, words) in [
            (ErrorKind::UnexpectedEof, "the peer ended it without a word"),
            (ErrorKind::ConnectionReset, "see the manual"),
        ] {
            let (_send, connection) =
                h2::client::handshake(Gone(kind)).await.expect("it takes the preface");
            assert_eq!(describe_h2_error(&connection.await.expect_err("nobody is there")), words);
        }
    }
}
