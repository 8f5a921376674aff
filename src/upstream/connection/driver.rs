//! The task that owns the socket of a connection: it polls h2, reports what has happened to the
//! [`ConnectionMachine`], and executes its effects on the socket.

use std::cell::{Cell, OnceCell, RefCell};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::{Connection as H2Connection, SendRequest};
use h2::{Ping, PingPong};
use jackstay_config as config;
use jackstay_core::admission::MemoryBudget;
use jackstay_core::connection::{
    ConnectionMachine, ConnectionState, Established, H2End, H2Refusal, Thresholds,
};
use jackstay_core::line_pacing::LinePacing;
use jackstay_core::pool::ConnectionKey;
use jackstay_core::tcp_info::TcpInfo;
use jackstay_core::unsent_requests::SendProgress;
use jackstay_net::frame_limiter::{PeerFrames, SentHeads};
use jackstay_net::http2_error::{
    describe_end, describe_h2_error, describe_write_error, is_ping_complaint,
};
use jackstay_sys::clock;
use jackstay_sys::sockets::cork::Uncork;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use tokio::sync::Notify;
use tokio::time::{Sleep, sleep_until};

use super::line_windows::{LineWindows, account_of};
use super::receiving::ReceivingStreams;
use super::window_updates::WindowUpdates;
use super::{Connection, NEXT_KEY};
use crate::upstream::credentials::{ClientTls, CredentialClass};
use crate::upstream::dial::{DialedConnection, Http2Stream, UpstreamStream};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::stats::ConnectionStats;
use crate::upstream::watch_moves::WatchMoves;

impl Connection {
    /// Takes an established connection into use and spawns its driver on the current `LocalSet`.
    #[allow(clippy::too_many_lines, reason = "puts the parts of a connection together")]
    pub fn start(
        established: DialedConnection,
        endpoint: &Arc<Endpoint>,
        class: CredentialClass,
        tls: &ClientTls,
        config: &config::Upstream,
        memory: &Arc<MemoryBudget>,
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
            certificate: _,
            for_one_request,
            frames,
            heads,
            observer,
            rtt,
        } = established;
        let serial = tls.certificate.as_ref().map(|info| info.serial.clone());
        let stats = ConnectionStats::new(class, serial, observer.local_addr().ok(), now);
        stats.set_rtt(rtt);
        stats.set_stream_window(windows.stream);
        endpoint.connection_opened(&stats);
        endpoint.metrics.rtt(rtt);
        log_live(endpoint, class, stats.local, rtt);
        let machine = ConnectionMachine::new(
            Established {
                thresholds: thresholds(&config.health),
                first_rtt: rtt,
                ping_grid: endpoint.ping_grid,
                max_streams,
                peer_streams: send.current_max_send_streams(),
                is_probe: class == CredentialClass::Probe,
            },
            now,
        );
        let mut gauge = endpoint.metrics.connection_gauge();
        gauge.set(machine.state().as_str());
        let connection = Rc::new(Self {
            key: ConnectionKey(NEXT_KEY.fetch_add(1, Ordering::Relaxed)),
            endpoint: Arc::clone(endpoint),
            own_probe: OnceCell::new(),
            for_one_request,
            generation: tls.generation,
            class: Cell::new(class),
            machine: RefCell::new(machine),
            local: stats.local,
            stats,
            gauge: RefCell::new(Some(gauge)),
            certificate: tls.certificate.clone(),
            send,
            receiving: ReceivingStreams::default(),
            moves: WatchMoves::default(),
            asks_others: Cell::new(false),
            first_unsent: Cell::default(),
            driver: RefCell::new(None),
            changed: Notify::new(),
            pool,
        });
        let line = LineWindows::new(windows, account_of(memory, class), rtt, now);
        let driver = Driver {
            connection: Rc::clone(&connection),
            h2,
            ping,
            goaway: connection.send.clone(),
            windows: WindowUpdates::new(line, frames.clone()),
            frames,
            uncork,
            heads,
            observer,
            pacing: LinePacing::watched(),
            bytes_read: 0,
        };
        tokio::task::spawn_local(driver.run());
        connection
    }
}

fn log_live(endpoint: &Endpoint, class: CredentialClass, local: Option<SocketAddr>, rtt: Duration) {
    // An apiserver closes idle connections, so each endpoint gets a new one every 90 s.
    tracing::debug!(
        upstream = &*endpoint.upstream,
        endpoint = &*endpoint.label,
        class = class.as_str(),
        local = local.map(tracing::field::display),
        rtt_us = rtt.as_micros() as u64,
        "connection is live"
    );
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
    heads: SentHeads,
    uncork: Uncork<UpstreamStream>,
    observer: StreamObserver,
    windows: WindowUpdates,
    pacing: LinePacing,
    /// Bytes read up to the last poll.
    bytes_read: u64,
}

impl Driver {
    async fn run(mut self) {
        let mut timer = pin!(sleep_until((clock::now()).into()));
        poll_fn(|cx| self.poll(cx, timer.as_mut())).await;
        let connection = Rc::clone(&self.connection);
        // Open streams fail, and the socket closes.
        drop(self);
        connection.pool.notify_waiters();
    }

    /// Does what can be done now. Ready when the connection is dead.
    fn poll(&mut self, cx: &mut Context<'_>, mut timer: Pin<&mut Sleep>) -> Poll<()> {
        self.store_waker(cx);
        loop {
            let result = Pin::new(&mut self.h2).poll(cx);
            let sent = self.uncork.poll(cx);
            if self.report_end(result, sent, cx) {
                return Poll::Ready(());
            }
            self.report_received_bytes();
            let adjusted = self.windows.update(&mut self.h2, &self.connection);
            self.report_refusal(cx);
            let (end_due, ping_outstanding, check_at) = {
                let machine = self.connection.machine.borrow();
                (machine.is_end_due(), machine.ping_outstanding(), machine.wake_at())
            };
            if end_due {
                self.keep_unsent();
                self.connection.input(ConnectionMachine::end_if_due);
                return Poll::Ready(());
            }
            let pong = ping_outstanding && matches!(self.ping.poll_pong(cx), Poll::Ready(Ok(_)));
            if pong {
                self.report_pong();
            }
            // Under load the timer is set ten times a second, not once for each request, because it is only moved
            // to an earlier time.
            let wake_at = self.windows.check_at().map_or(check_at, |at| at.min(check_at));
            if wake_at < timer.deadline().into_std() {
                timer.as_mut().reset(wake_at.into());
            }
            let check_due = timer.as_mut().poll(cx).is_ready();
            if check_due && self.check(timer.as_mut()) == ConnectionState::Dead {
                return Poll::Ready(());
            }
            if !pong && !check_due && !adjusted {
                return Poll::Pending;
            }
        }
    }

    /// Stores the waker for inputs from other tasks.
    fn store_waker(&self, cx: &Context<'_>) {
        let mut slot = self.connection.driver.borrow_mut();
        match slot.as_mut() {
            Some(waker) => waker.clone_from(cx.waker()),
            None => *slot = Some(cx.waker().clone()),
        }
    }

    /// Reports the end if h2 or the socket has ended. Returns whether it has.
    fn report_end(
        &mut self,
        h2: Poll<Result<(), h2::Error>>,
        sent: Poll<io::Result<()>>,
        cx: &mut Context<'_>,
    ) -> bool {
        let (end, text) = match (h2, self.frames.violation(), sent) {
            (Poll::Ready(Ok(())), ..) if self.frames.have_ended() => (H2End::Closed, String::new()),
            (Poll::Ready(Ok(())), ..) => (H2End::Finished, String::new()),
            (Poll::Ready(Err(_)), Some(frame), _) => {
                let frame = frame.as_str();
                self.connection.endpoint.metrics.closed_for_frames(frame);
                (H2End::FrameLimit, format!("the apiserver sent too many {frame} frames"))
            }
            (Poll::Ready(Err(error)), None, _) => (H2End::Failed, describe_end(&error)),
            (Poll::Pending, _, Poll::Ready(Err(error))) => {
                (H2End::Failed, describe_write_error(&error))
            }
            (Poll::Pending, ..) => return false,
        };
        let refusal = self.refusal(cx).map(|error| {
            self.report_complaint(&error);
            classify(&error)
        });
        let effects = self.connection.step(|machine| machine.ended(end, refusal));
        self.connection.execute(effects, &text);
        true
    }

    /// Reports what the last poll has read.
    fn report_received_bytes(&mut self) {
        let bytes_read = self.observer.bytes_read();
        if bytes_read == self.bytes_read {
            return;
        }
        self.bytes_read = bytes_read;
        let now = clock::now();
        // They may contain SETTINGS.
        let peer_streams = self.connection.send.current_max_send_streams();
        self.connection.input(|machine| machine.received(peer_streams, now));
        self.windows.received(bytes_read, &self.connection.receiving, now);
        if self.pacing.is_due(now)
            && let Ok(info) = self.observer.tcp_info()
        {
            self.pace(&info, now);
        }
    }

    /// Bounds a bulk transfer that makes the line's queue long.
    fn pace(&mut self, info: &TcpInfo, now: Instant) {
        let socket = self.observer.socket();
        let bound = |bounds| socket.bound_in_flight(bounds);
        self.connection.endpoint.pace(&mut self.pacing, info, now, bound);
    }

    /// Reports that h2 opens no more streams.
    fn report_refusal(&mut self, cx: &mut Context<'_>) {
        if self.connection.state().is_in_service()
            && let Some(error) = self.refusal(cx)
        {
            self.report_complaint(&error);
            let refusal = classify(&error);
            let effects = self.connection.step(|machine| machine.refused(refusal, clock::now()));
            self.connection.execute(effects, &describe_h2_error(&error));
        }
    }

    /// Reports a GOAWAY that complains of PINGs to the endpoint.
    fn report_complaint(&self, error: &h2::Error) {
        let idle = self.connection.idle_since().map(clock::elapsed);
        let used = self.connection.machine.borrow().ping_interval();
        if is_ping_complaint(error, idle, used) {
            self.connection.endpoint.pings_refused(used, &describe_h2_error(error));
        }
    }

    /// Why h2 opens no more streams.
    fn refusal(&mut self, cx: &mut Context<'_>) -> Option<h2::Error> {
        match self.goaway.poll_ready(cx) {
            Poll::Ready(Err(error)) => Some(error),
            Poll::Ready(Ok(())) | Poll::Pending => None,
        }
    }

    fn report_pong(&mut self) {
        let effects = self.connection.step(|machine| machine.pong(clock::now()));
        if let Some(rtt) = effects.round_trip {
            self.windows.round_trip(rtt);
        }
        self.connection.execute(effects, "");
    }

    fn progress(&self, info: &TcpInfo) -> SendProgress {
        SendProgress::new(self.observer.bytes_written(), info)
    }

    /// The connection is dead. Finds out which requests were not sent and keeps the kernel from sending them, before those
    /// that wait for responses learn it.
    fn keep_unsent(&self) {
        let progress = || Some(self.progress(&self.observer.tcp_info().ok()?));
        let requests = self.heads.requests();
        if progress().is_some_and(|progress| requests.may_be_unsent(&progress))
            && self.observer.socket().forbid_sending().is_ok()
            && let Some(last) = progress()
        {
            self.connection.first_unsent.set(requests.first_unsent(&last));
        }
    }

    /// Checks the health and sets the timer. Returns the state.
    ///
    /// The caller has just polled h2, which reads the socket until it is empty, tokio's budget is spent or
    /// the turn of the connection is over. In the second case the timer does not fire either. In the third,
    /// the bytes that were read are evidence of life, and an unread PONG follows with the next poll.
    fn check(&mut self, timer: Pin<&mut Sleep>) -> ConnectionState {
        let tcp = self.observer.tcp_info().ok();
        if let Some(info) = &tcp {
            self.pace(info, clock::now());
            self.heads.requests().observe(&self.progress(info));
        }
        let connection = &self.connection;
        let ping_limit = connection.endpoint.ping_limit();
        let line_delay = connection.endpoint.line_delay(clock::now());
        let effects = connection.step(|machine| {
            if let Some(interval) = ping_limit {
                machine.limit_pings(interval);
            }
            machine.expect_delay(line_delay);
            machine.check(tcp.as_ref(), clock::now())
        });
        if connection.state() == ConnectionState::Dead {
            self.keep_unsent();
        }
        if effects.probe_kernel {
            let _ = self.observer.send_keepalive_probe();
        }
        let ping_failed = effects.send_ping && self.ping.send_ping(Ping::opaque()).is_err();
        connection.execute(effects, "");
        if ping_failed {
            let effects = connection.step(|machine| machine.ended(H2End::Failed, None));
            connection.execute(effects, "connection failed while sending a PING");
        }
        let machine = connection.machine.borrow();
        timer.reset(machine.wake_at().into());
        machine.state()
    }
}

/// Classifies the error with which h2 refuses new streams.
fn classify(error: &h2::Error) -> H2Refusal {
    match error.is_go_away() {
        true if !error.is_remote() => H2Refusal::OwnGoaway,
        true if error.reason() == Some(h2::Reason::NO_ERROR) => H2Refusal::GracefulGoaway,
        true => H2Refusal::Goaway,
        false => H2Refusal::Failure,
    }
}
