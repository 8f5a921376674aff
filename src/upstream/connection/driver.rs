//! The task that owns a connection's socket: it polls h2, sends PINGs, and executes what
//! [`health`] decides.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::Ping;
use h2::client::SendRequest;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::Connection;
use super::error_text::{describe_end, describe_h2_error};
use super::lifecycle::{ConnectionLifecycle, DrainUrgency};
use super::response_waits::ResponseWaits;
use super::stream_slots::StreamSlots;
use crate::config;
use crate::net::sockets::tracked_stream::StreamObserver;
use crate::upstream::credentials::{ClientTls, CredentialClass};
use crate::upstream::dial::DialedConnection;
use crate::upstream::endpoint::{Endpoint, Observation};
use crate::upstream::health::{self, ConnectionHealth, ConnectionState, Evidence, Thresholds};
use crate::upstream::stats::ConnectionStats;
use crate::upstream::watch_moves::WatchMoves;

impl Connection {
    /// Takes an established connection into use and spawns its driver on the current `LocalSet`.
    pub fn start(
        established: DialedConnection,
        endpoint: &Arc<Endpoint>,
        class: CredentialClass,
        shown: &ClientTls,
        config: &config::Upstream,
        pool: Rc<Notify>,
    ) -> Rc<Self> {
        let now = Instant::now();
        let DialedConnection { send, connection, ping, observer, rtt } = established;
        let serial = shown.certificate.as_ref().map(|info| info.serial.clone());
        let stats = ConnectionStats::new(class, serial, observer.local_addr().ok(), now);
        stats.set_rtt(rtt);
        endpoint.connection_opened(&stats);
        endpoint.metrics.rtt(rtt);
        tracing::info!(
            upstream = &*endpoint.upstream,
            endpoint = &*endpoint.label,
            class = class.as_str(),
            local = stats.local.map(tracing::field::display),
            rtt_us = rtt.as_micros() as u64,
            "connection is live"
        );
        let this = Rc::new(Self {
            endpoint: Arc::clone(endpoint),
            class,
            generation: shown.generation,
            certificate: shown.certificate.clone(),
            stats,
            lifecycle: ConnectionLifecycle::new(endpoint.metrics.connection_gauge()),
            slots: StreamSlots::new(
                config.connections.max_streams,
                send.current_max_send_streams(),
                now,
            ),
            send,
            waits: ResponseWaits::new(now),
            moves: WatchMoves::default(),
            driver: RefCell::new(None),
            changed: Notify::new(),
            pool,
        });
        let health = ConnectionHealth::new(Thresholds::of(&config.health), rtt, now);
        let driver =
            Driver { this: Rc::clone(&this), connection, ping, observer, health, bytes_read: 0 };
        tokio::task::spawn_local(driver.run());
        this
    }
}

struct Driver<T> {
    this: Rc<Connection>,
    connection: h2::client::Connection<T, Bytes>,
    ping: h2::PingPong,
    observer: StreamObserver,
    health: ConnectionHealth,
    /// Bytes read up to the last poll.
    bytes_read: u64,
}

/// The end of a connection.
struct End {
    reason: String,
    /// Without open streams, as the protocol provides for.
    orderly: bool,
}

impl End {
    fn abrupt(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), orderly: false }
    }
}

impl<T> Driver<T>
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + 'static,
{
    async fn run(mut self) {
        let mut timer = pin!(sleep_until(Instant::now()));
        let mut goaway = self.this.send.clone();
        let End { reason, orderly } =
            poll_fn(|cx| self.poll(cx, timer.as_mut(), &mut goaway)).await;
        let Self { this, connection, observer, .. } = self;
        this.change(ConnectionState::Dead, &reason, orderly);
        // Open streams fail now, and the socket closes: both halves are dropped.
        drop(connection);
        drop(observer);
        this.pool.notify_waiters();
    }

    /// Handles everything that is ready; ready itself when the connection has ended.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        mut timer: Pin<&mut tokio::time::Sleep>,
        goaway: &mut SendRequest<Bytes>,
    ) -> Poll<End> {
        self.remember_waker(cx);
        loop {
            if let Poll::Ready(result) = Pin::new(&mut self.connection).poll(cx) {
                self.note_goaway_at_end(cx, goaway);
                return Poll::Ready(match result {
                    Ok(()) => End {
                        reason: "closed by the apiserver".to_owned(),
                        orderly: self.this.streams() == 0,
                    },
                    Err(error) => End::abrupt(describe_end(&error)),
                });
            }
            if let Some(reason) = self.this.lifecycle.close_requested.get() {
                return Poll::Ready(End::abrupt(reason.as_str()));
            }
            self.note_bytes(timer.as_mut());
            self.note_goaway(cx, goaway);
            if self.this.streams() == 0 {
                match self.this.state() {
                    ConnectionState::Draining => {
                        return Poll::Ready(End { reason: "drained".to_owned(), orderly: true });
                    }
                    ConnectionState::Unresponsive => {
                        let reason = self.this.lifecycle.unresponsive_reason.get();
                        return Poll::Ready(End::abrupt(reason));
                    }
                    ConnectionState::Live | ConnectionState::Suspect | ConnectionState::Dead => {}
                }
            }
            let mut again = false;
            if self.health.ping_outstanding()
                && let Poll::Ready(Ok(_)) = self.ping.poll_pong(cx)
            {
                self.note_pong();
                again = true;
            }
            self.arm_timer_for_waiting_request(timer.as_mut());
            if timer.as_mut().poll(cx).is_ready() {
                match self.check_health(timer.as_mut()) {
                    Poll::Ready(end) => return Poll::Ready(end),
                    Poll::Pending => again = true,
                }
            }
            if !again {
                return Poll::Pending;
            }
        }
    }

    fn remember_waker(&self, cx: &Context<'_>) {
        let mut slot = self.this.driver.borrow_mut();
        match slot.as_mut() {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *slot = Some(cx.waker().clone()),
        }
    }

    fn note_bytes(&mut self, timer: Pin<&mut tokio::time::Sleep>) {
        let bytes_read = self.observer.bytes_read();
        if bytes_read == self.bytes_read {
            return;
        }
        self.bytes_read = bytes_read;
        let this = &self.this;
        // They may contain SETTINGS.
        if this.slots.set_peer_limit(this.send.current_max_send_streams()) {
            this.pool.notify_waiters();
        }
        let now = Instant::now();
        this.waits.last_received.set(now);
        let check_at = self.health.received(now);
        if check_at < timer.deadline() {
            timer.reset(check_at);
        }
    }

    /// h2 reports no GOAWAY, but refuses to open streams after one.
    fn note_goaway(&mut self, cx: &mut Context<'_>, goaway: &mut SendRequest<Bytes>) {
        if matches!(self.this.state(), ConnectionState::Live | ConnectionState::Suspect)
            && let Poll::Ready(Err(error)) = goaway.poll_ready(cx)
        {
            self.health.drain();
            if self.goaway_means_shutdown() {
                self.this.endpoint.observe(Observation::GoawayReceived);
            }
            self.this.enter(ConnectionState::Draining, &describe_h2_error(&error));
        }
    }

    /// h2 ends a connection without streams, such as the prober's between two probes, in the same
    /// poll in which the GOAWAY arrives.
    fn note_goaway_at_end(&self, cx: &mut Context<'_>, goaway: &mut SendRequest<Bytes>) {
        if self.goaway_means_shutdown()
            && matches!(self.this.state(), ConnectionState::Live | ConnectionState::Suspect)
            && let Poll::Ready(Err(error)) = goaway.poll_ready(cx)
            && error.is_go_away()
            && error.is_remote()
        {
            self.this.endpoint.observe(Observation::GoawayReceived);
        }
    }

    /// Whether a GOAWAY on this connection means that the apiserver shuts down.
    fn goaway_means_shutdown(&self) -> bool {
        self.this.class == CredentialClass::Probe && !self.this.lifecycle.end_expected.get()
    }

    fn note_pong(&mut self) {
        let (rtt, change) = self.health.pong(Instant::now());
        self.this.set_findings(self.health.findings());
        if let Some(rtt) = rtt {
            self.this.endpoint.metrics.rtt(rtt);
            self.this.stats.set_rtt(self.health.rtt());
        }
        // A drain that began meanwhile (GOAWAY, certificate rotated) takes precedence.
        if let Some((state, reason)) = change
            && matches!(self.this.state(), ConnectionState::Suspect | ConnectionState::Unresponsive)
        {
            self.this.enter_derived(state, reason);
        }
    }

    /// A waiting request needs a PING soon. The timer is moved only if it is later than that: under
    /// load it fires ten times a second, not once for each request.
    fn arm_timer_for_waiting_request(&self, timer: Pin<&mut tokio::time::Sleep>) {
        if !self.health.ping_outstanding()
            && let Some(since) = self.this.waits.waiting_since.get()
        {
            // From the last byte, as the health counts, or an old request would fire it at once.
            let check_at = since.max(self.this.waits.last_received.get()) + health::HEAD_WAIT;
            if check_at < timer.deadline() {
                timer.reset(check_at);
            }
        }
    }

    /// The caller has polled the connection just before: the socket has been read until it was
    /// empty, or until tokio's budget was spent, and then the timer would not have fired.
    fn check_health(&mut self, timer: Pin<&mut tokio::time::Sleep>) -> Poll<End> {
        let now = Instant::now();
        if self.this.state() == ConnectionState::Draining {
            self.health.drain();
        }
        let evidence = Evidence {
            tcp: self.observer.tcp_info().ok(),
            waiting_since: self.this.waits.waiting_since.get(),
            pinned: self.this.slots.has_pinned(),
        };
        let decision = self.health.check(evidence, now);
        if decision.probe {
            let _ = self.observer.send_keepalive_probe();
        }
        if decision.ping && self.ping.send_ping(Ping::opaque()).is_err() {
            return Poll::Ready(End::abrupt("connection failed while sending a PING"));
        }
        timer.reset(decision.wake_at);
        self.this.set_findings(self.health.findings());
        let immediate = Some(DrainUrgency::Immediate);
        if decision.leave && self.this.lifecycle.drain_urgency.replace(immediate) != immediate {
            self.this.changed.notify_waiters();
        }
        match decision.change {
            Some((ConnectionState::Dead, reason)) => Poll::Ready(End::abrupt(reason.as_str())),
            Some((state, reason)) => {
                self.this.enter_derived(state, reason);
                Poll::Pending
            }
            None => Poll::Pending,
        }
    }
}
