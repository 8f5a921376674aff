//! The task that owns the socket of a connection: it polls h2, sends PINGs, and executes the decisions of
//! [`health`].

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::client::{Connection as H2Connection, SendRequest};
use h2::{Ping, PingPong};
use jackstay_core::connection_health as health;
use jackstay_core::connection_health::{
    ConnectionFindings, ConnectionHealth, ConnectionState, Evidence, Responsiveness,
    StateChangeReason, Thresholds,
};
use jackstay_sys::clock;
use jackstay_sys::sockets::cork::Uncork;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use tokio::sync::Notify;
use tokio::time::{Sleep, sleep_until};

use super::error_text::{describe_end, describe_h2_error, describe_write_error};
use super::lifecycle::{ConnectionLifecycle, DrainUrgency};
use super::line_windows::{LineWindows, account_of};
use super::receiving::ReceivingStreams;
use super::response_waits::ResponseWaits;
use super::stream_slots::StreamSlots;
use super::window_updates::WindowUpdates;
use super::{Cause, Connection};
use crate::config;
use crate::net::frame_limiter::PeerFrames;
use crate::upstream::credentials::{ClientTls, CredentialClass};
use crate::upstream::dial::{DialedConnection, Http2Stream, UpstreamStream};
use crate::upstream::endpoint::{Endpoint, Observation};
use crate::upstream::stats::ConnectionStats;
use crate::upstream::watch_moves::WatchMoves;

impl Connection {
    /// Takes an established connection into use and spawns its driver on the current `LocalSet`.
    pub fn start(
        established: DialedConnection,
        endpoint: &Arc<Endpoint>,
        class: CredentialClass,
        tls: &ClientTls,
        config: &config::Upstream,
        pool: Rc<Notify>,
    ) -> Rc<Self> {
        let now = clock::now();
        let DialedConnection {
            send,
            h2,
            ping,
            max_streams,
            windows,
            uncork,
            frames,
            observer,
            rtt,
        } = established;
        let serial = tls.certificate.as_ref().map(|info| info.serial.clone());
        let stats = ConnectionStats::new(class, serial, observer.local_addr().ok(), now);
        stats.set_rtt(rtt);
        stats.set_stream_window(windows.stream);
        endpoint.connection_opened(&stats);
        endpoint.metrics.rtt(rtt);
        // An apiserver closes idle connections, so each endpoint gets a new one every 90 s.
        tracing::debug!(
            upstream = &*endpoint.upstream,
            endpoint = &*endpoint.label,
            class = class.as_str(),
            local = stats.local.map(tracing::field::display),
            rtt_us = rtt.as_micros() as u64,
            "connection is live"
        );
        let connection = Rc::new(Self {
            endpoint: Arc::clone(endpoint),
            generation: tls.generation,
            certificate: tls.certificate.clone(),
            stats,
            lifecycle: ConnectionLifecycle::new(endpoint.metrics.connection_gauge()),
            slots: StreamSlots::new(max_streams, send.current_max_send_streams(), now),
            send,
            waits: ResponseWaits::new(now),
            receiving: ReceivingStreams::default(),
            moves: WatchMoves::default(),
            driver: RefCell::new(None),
            changed: Notify::new(),
            pool,
        });
        let line = LineWindows::new(windows, account_of(endpoint, class), rtt, now);
        let limits = thresholds(&config.health);
        let driver = Driver {
            connection: Rc::clone(&connection),
            h2,
            ping,
            goaway: connection.send.clone(),
            windows: WindowUpdates::new(line, frames.clone()),
            frames,
            uncork,
            observer,
            health: ConnectionHealth::new(limits, rtt, endpoint.ping_grid, now),
            bytes_read: 0,
        };
        tokio::task::spawn_local(driver.run());
        connection
    }

    /// Enters a state that [`health`] has derived.
    fn enter_derived(&self, state: ConnectionState, reason: StateChangeReason) {
        if state == ConnectionState::Unresponsive {
            self.lifecycle.unresponsive_reason.set(reason.as_str());
        }
        self.enter(state, reason.as_str());
    }

    /// Applies the findings of [`health`] to the requests that wait on the connection and to its
    /// endpoint.
    fn set_findings(&self, findings: ConnectionFindings) {
        let to = findings.responsiveness;
        let from = self.lifecycle.responsiveness.replace(to);
        if from != to && self.lifecycle.counted.get() {
            self.endpoint.observe(Observation::ResponsivenessChanged { from, to });
        }
        let became_silent = from != to && to == Responsiveness::Silent;
        let fails = findings.fails_unsafe_requests;
        if self.lifecycle.fails_unsafe_requests.replace(fails) != fails || became_silent {
            self.changed.notify_waiters();
        }
    }
}

/// The thresholds of a configuration.
fn thresholds(config: &config::Health) -> Thresholds {
    Thresholds {
        ping_interval: config.ping_interval,
        suspect_after: config.suspect_after,
        dead_after: config.dead_after,
        tunnel_dead_after: config.tunnel_dead_after,
    }
}

struct Driver {
    connection: Rc<Connection>,
    h2: H2Connection<Http2Stream, Bytes>,
    ping: PingPong,
    /// Its `poll_ready` fails after a GOAWAY, which h2 does not report otherwise.
    goaway: SendRequest<Bytes>,
    frames: PeerFrames,
    uncork: Uncork<UpstreamStream>,
    observer: StreamObserver,
    health: ConnectionHealth,
    windows: WindowUpdates,
    /// Bytes read up to the last poll.
    bytes_read: u64,
}

/// The end of a connection.
struct End {
    reason: String,
    /// The connection was closed as HTTP/2 provides for, without open streams.
    orderly: bool,
}

impl End {
    fn abrupt(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), orderly: false }
    }

    fn closed(orderly: bool) -> Self {
        Self { reason: "closed by the apiserver".to_owned(), orderly }
    }
}

impl Driver {
    async fn run(mut self) {
        let mut timer = pin!(sleep_until((clock::now()).into()));
        let End { reason, orderly } = poll_fn(|cx| self.poll(cx, timer.as_mut())).await;
        let connection = Rc::clone(&self.connection);
        let cause = if orderly { Cause::OrderlyEnd } else { Cause::Other };
        connection.change(ConnectionState::Dead, &reason, cause);
        // Open streams fail, and the socket closes.
        drop(self);
        connection.pool.notify_waiters();
    }

    /// Does what can be done now. Ready when the connection has ended.
    fn poll(&mut self, cx: &mut Context<'_>, mut timer: Pin<&mut Sleep>) -> Poll<End> {
        self.store_waker(cx);
        loop {
            let result = Pin::new(&mut self.h2).poll(cx);
            let sent = self.uncork.poll(cx);
            if let Poll::Ready(result) = result {
                self.detect_goaway_at_end(cx);
                return Poll::Ready(match (result, self.frames.violation()) {
                    (Ok(()), _) => End::closed(self.connection.streams() == 0),
                    (Err(_), Some(frame)) => {
                        let frame = frame.as_str();
                        self.connection.endpoint.metrics.closed_for_frames(frame);
                        End::abrupt(format!("the apiserver sent too many {frame} frames"))
                    }
                    (Err(_), None) if self.has_closed_after_goaway(cx) => End::closed(true),
                    (Err(error), None) => End::abrupt(describe_end(&error)),
                });
            }
            if let Poll::Ready(Err(error)) = sent {
                return Poll::Ready(if self.has_closed_after_goaway(cx) {
                    End::closed(true)
                } else {
                    End::abrupt(describe_write_error(&error))
                });
            }
            if let Some(reason) = self.connection.lifecycle.close_requested.get() {
                return Poll::Ready(End::abrupt(reason.as_str()));
            }
            self.record_received_bytes(timer.as_mut());
            let adjusted = self.windows.update(&mut self.h2, &self.connection);
            self.detect_goaway(cx);
            if self.connection.streams() == 0 {
                match self.connection.state() {
                    ConnectionState::Draining => {
                        return Poll::Ready(End { reason: "drained".to_owned(), orderly: true });
                    }
                    ConnectionState::Unresponsive => {
                        let reason = self.connection.lifecycle.unresponsive_reason.get();
                        return Poll::Ready(End::abrupt(reason));
                    }
                    ConnectionState::Live | ConnectionState::Suspect | ConnectionState::Dead => {}
                }
            }
            let pong = self.health.ping_outstanding()
                && matches!(self.ping.poll_pong(cx), Poll::Ready(Ok(_)));
            if pong {
                self.handle_pong();
            }
            self.arm_timer_for_waiting_request(timer.as_mut());
            self.arm_timer_for_windows(timer.as_mut());
            let check_due = timer.as_mut().poll(cx).is_ready();
            if check_due && let Some(end) = self.check_health(timer.as_mut()) {
                return Poll::Ready(end);
            }
            if !pong && !check_due && !adjusted {
                return Poll::Pending;
            }
        }
    }

    /// Stores the waker for [`Connection::wake_driver`].
    fn store_waker(&self, cx: &Context<'_>) {
        let mut slot = self.connection.driver.borrow_mut();
        match slot.as_mut() {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *slot = Some(cx.waker().clone()),
        }
    }

    /// Records what the last poll has read.
    fn record_received_bytes(&mut self, timer: Pin<&mut Sleep>) {
        let bytes_read = self.observer.bytes_read();
        if bytes_read == self.bytes_read {
            return;
        }
        self.bytes_read = bytes_read;
        let connection = &self.connection;
        // They may contain SETTINGS.
        if connection.slots.set_peer_limit(connection.send.current_max_send_streams()) {
            connection.pool.notify_one();
        }
        let now = clock::now();
        connection.waits.last_received.set(now);
        let check_at = self.health.received(now);
        if check_at < timer.deadline().into_std() {
            timer.reset(check_at.into());
        }
        self.windows.received(bytes_read, &self.connection.receiving, now);
    }

    fn detect_goaway(&mut self, cx: &mut Context<'_>) {
        if self.connection.state().is_in_service()
            && let Poll::Ready(Err(error)) = self.goaway.poll_ready(cx)
        {
            self.health.drain();
            if self.goaway_means_shutdown() {
                self.connection.endpoint.observe(Observation::GoawayReceived);
            }
            let graceful = error.is_go_away()
                && error.is_remote()
                && error.reason() == Some(h2::Reason::NO_ERROR);
            // After another error than a GOAWAY no stream continues. h2 ends them before the connection.
            let cause = match error.is_go_away() {
                _ if graceful => Cause::ServerShutdown,
                true => Cause::Other,
                false => Cause::Failure,
            };
            let reason = describe_h2_error(&error);
            self.connection.change(ConnectionState::Draining, &reason, cause);
        }
    }

    /// h2 ends a connection without streams in the same poll in which the GOAWAY arrives. The
    /// prober's connection has no streams between two probes.
    fn detect_goaway_at_end(&mut self, cx: &mut Context<'_>) {
        if self.goaway_means_shutdown()
            && self.connection.state().is_in_service()
            && let Poll::Ready(Err(error)) = self.goaway.poll_ready(cx)
            && error.is_go_away()
            && error.is_remote()
        {
            self.connection.endpoint.observe(Observation::GoawayReceived);
        }
    }

    /// Whether the apiserver has ended a connection without streams by GOAWAY with `NO_ERROR`. What is written then, a
    /// PING or the GOAWAY of h2, may meet a closed socket.
    fn has_closed_after_goaway(&mut self, cx: &mut Context<'_>) -> bool {
        self.connection.streams() == 0
            && matches!(self.goaway.poll_ready(cx), Poll::Ready(Err(error))
                if error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
    }

    /// Whether a GOAWAY on this connection means that the apiserver shuts down.
    fn goaway_means_shutdown(&self) -> bool {
        self.connection.class() == CredentialClass::Probe
            && !self.connection.lifecycle.end_expected.get()
    }

    fn handle_pong(&mut self) {
        let (rtt, change) = self.health.pong(clock::now());
        self.connection.set_findings(self.health.findings());
        if let Some(rtt) = rtt {
            self.windows.round_trip(rtt);
            self.connection.endpoint.metrics.rtt(rtt);
            self.connection.stats.set_rtt(self.health.rtt());
        }
        // A drain that has begun since the PING (GOAWAY, certificate rotated) takes precedence.
        if let Some((state, reason)) = change
            && matches!(
                self.connection.state(),
                ConnectionState::Suspect | ConnectionState::Unresponsive
            )
        {
            self.connection.enter_derived(state, reason);
        }
    }

    /// Moves the timer to the PING that a waiting request needs, if it is set to a later time. Under
    /// load the timer thus fires ten times a second, not once for each request.
    fn arm_timer_for_waiting_request(&self, timer: Pin<&mut Sleep>) {
        if !self.health.ping_outstanding()
            && let Some(since) = self.connection.waits.waiting_since.get()
        {
            // Counted from the last received byte, as in `health`. Otherwise the timer would fire at once
            // for a request that has waited for long.
            let check_at = since.max(self.connection.waits.last_received.get()) + health::HEAD_WAIT;
            if check_at < timer.deadline().into_std() {
                timer.reset(check_at.into());
            }
        }
    }

    /// Moves the timer to the next check of the windows, if it is set to a later time.
    fn arm_timer_for_windows(&self, timer: Pin<&mut Sleep>) {
        if let Some(at) = self.windows.check_at()
            && at < timer.deadline().into_std()
        {
            timer.reset(at.into());
        }
    }

    /// Checks the health and carries out the decision; returns the end of the connection if it is dead.
    ///
    /// The caller has just polled h2, which reads the socket until it is empty, tokio's budget is spent or
    /// the turn of the connection is over. In the second case the timer does not fire either. In the third,
    /// the bytes that were read are evidence of life, and an unread PONG follows with the next poll.
    fn check_health(&mut self, timer: Pin<&mut Sleep>) -> Option<End> {
        let now = clock::now();
        if self.connection.state() == ConnectionState::Draining {
            self.health.drain();
        }
        let evidence = Evidence {
            tcp: self.observer.tcp_info().ok(),
            waiting_since: self.connection.waits.waiting_since.get(),
            pinned: self.connection.slots.has_pinned(),
        };
        let decision = self.health.check(evidence, now);
        if decision.probe {
            let _ = self.observer.send_keepalive_probe();
        }
        if decision.ping && self.ping.send_ping(Ping::opaque()).is_err() {
            return Some(End::abrupt("connection failed while sending a PING"));
        }
        timer.reset(decision.wake_at.into());
        self.connection.set_findings(self.health.findings());
        let urgency = &self.connection.lifecycle.drain_urgency;
        let immediate = Some(DrainUrgency::Immediate);
        if decision.move_streams && urgency.replace(immediate) != immediate {
            self.connection.changed.notify_waiters();
        }
        let (state, reason) = decision.change?;
        if state == ConnectionState::Dead {
            return Some(End::abrupt(reason.as_str()));
        }
        self.connection.enter_derived(state, reason);
        None
    }
}
