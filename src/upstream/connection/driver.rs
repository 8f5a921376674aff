//! The one task that touches a connection's socket: polls h2, sends PINGs, and does what
//! [`health`] decides.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use h2::Ping;
use h2::client::SendRequest;
use tokio::time::{Instant, sleep_until};

use super::{Connection, DrainUrgency, describe_h2_error};
use crate::net::sockets::tracked_stream::StreamObserver;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::health::{self, ConnectionHealth, ConnectionState, Evidence};

/// Owns the socket.
pub(super) struct Driver<T> {
    pub(super) this: Rc<Connection>,
    pub(super) connection: h2::client::Connection<T, Bytes>,
    pub(super) ping: h2::PingPong,
    pub(super) observer: StreamObserver,
    pub(super) health: ConnectionHealth,
    /// Bytes read when we last looked.
    pub(super) read: u64,
}

/// How a connection ended.
pub(super) struct End {
    why: String,
    /// With nothing on it, as the protocol provides for.
    orderly: bool,
}

impl End {
    fn abrupt(why: impl Into<String>) -> Self {
        Self { why: why.into(), orderly: false }
    }
}

impl<T> Driver<T>
where
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + 'static,
{
    pub(super) async fn run(mut self) {
        let mut timer = pin!(sleep_until(Instant::now()));
        let mut goaway = self.this.send.clone();
        let End { why, orderly } = poll_fn(|cx| self.poll(cx, timer.as_mut(), &mut goaway)).await;
        let Self { this, connection, observer, .. } = self;
        this.change(ConnectionState::Dead, &why, orderly);
        // Whatever still waits on it fails now, and the socket closes: both halves are dropped.
        drop(connection);
        drop(observer);
        this.pool.notify_waiters();
    }

    /// Does what there is to do; ready with the reason when the connection is over.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        mut timer: Pin<&mut tokio::time::Sleep>,
        goaway: &mut SendRequest<Bytes>,
    ) -> Poll<End> {
        self.remember_waker(cx);
        loop {
            if let Poll::Ready(result) = Pin::new(&mut self.connection).poll(cx) {
                self.note_last_words(cx, goaway);
                return Poll::Ready(match result {
                    Ok(()) => End {
                        why: "closed by the peer".to_owned(),
                        orderly: self.this.streams() == 0,
                    },
                    Err(error) => {
                        End::abrupt(format!("connection failed: {}", describe_h2_error(&error)))
                    }
                });
            }
            if let Some(why) = self.this.close.get() {
                return Poll::Ready(End::abrupt(why));
            }
            self.note_bytes(timer.as_mut());
            self.note_goaway(cx, goaway);
            if self.this.streams() == 0 {
                match self.this.life.get() {
                    ConnectionState::Draining => {
                        return Poll::Ready(End { why: "drained".to_owned(), orderly: true });
                    }
                    ConnectionState::Unresponsive => {
                        return Poll::Ready(End::abrupt(self.this.trouble.get()));
                    }
                    ConnectionState::Live | ConnectionState::Suspect | ConnectionState::Dead => {}
                }
            }
            let mut again = false;
            if self.health.ping_out()
                && let Poll::Ready(Ok(_)) = self.ping.poll_pong(cx)
            {
                self.note_pong();
                again = true;
            }
            self.arm_for_waiting(timer.as_mut());
            if timer.as_mut().poll(cx).is_ready() {
                match self.look(timer.as_mut()) {
                    Poll::Ready(why) => return Poll::Ready(why),
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
        let read = self.observer.bytes_read();
        if read == self.read {
            return;
        }
        self.read = read;
        let this = &self.this;
        // SETTINGS may have come with them.
        let cap = this.max_streams.min(this.send.current_max_send_streams());
        if this.cap.replace(cap) < cap {
            this.pool.notify_waiters();
        }
        let now = Instant::now();
        this.heard.set(now);
        let look_at = self.health.heard(now);
        if look_at < timer.deadline() {
            timer.reset(look_at);
        }
    }

    /// h2 has no event for GOAWAY, but no longer lets us open streams.
    fn note_goaway(&mut self, cx: &mut Context<'_>, goaway: &mut SendRequest<Bytes>) {
        if matches!(self.this.life.get(), ConnectionState::Live | ConnectionState::Suspect)
            && let Poll::Ready(Err(error)) = goaway.poll_ready(cx)
        {
            self.health.drain();
            if self.says_goodbye() {
                self.this.endpoint.goaway_received();
            }
            self.this.enter(ConnectionState::Draining, &format!("GOAWAY: {error}"));
        }
    }

    /// A connection without streams, as the prober's mostly is, h2 ends in the same turn in which
    /// the GOAWAY comes.
    fn note_last_words(&self, cx: &mut Context<'_>, goaway: &mut SendRequest<Bytes>) {
        if self.says_goodbye()
            && matches!(self.this.life.get(), ConnectionState::Live | ConnectionState::Suspect)
            && let Poll::Ready(Err(error)) = goaway.poll_ready(cx)
            && error.is_go_away()
            && error.is_remote()
        {
            self.this.endpoint.goaway_received();
        }
    }

    /// Whether a GOAWAY here means that the endpoint ends.
    fn says_goodbye(&self) -> bool {
        self.this.class == CredentialClass::Probe && !self.this.end_expected.get()
    }

    fn note_pong(&mut self) {
        let (rtt, change) = self.health.pong(Instant::now());
        self.note_health();
        if let Some(rtt) = rtt {
            self.this.endpoint.metrics.rtt(rtt);
            self.this.stats.set_rtt(self.health.rtt());
        }
        // Whoever drained it meanwhile (GOAWAY, certificate rotated) has the last word.
        if let Some((life, reason)) = change
            && matches!(
                self.this.life.get(),
                ConnectionState::Suspect | ConnectionState::Unresponsive
            )
        {
            self.this.judged(life, reason);
        }
    }

    fn note_health(&self) {
        let outlook = self.health.outlook();
        self.this.dark.set(outlook.dark);
        self.this.note_answers(!outlook.unanswered);
        self.this.note_ends_writes(outlook.ends_writes);
    }

    /// A request that waits wants a look soon. The timer is moved only if it is later than that:
    /// under load it fires ten times a second, not once per request.
    fn arm_for_waiting(&self, timer: Pin<&mut tokio::time::Sleep>) {
        if !self.health.ping_out()
            && let Some(since) = self.this.waiting_since.get()
        {
            // As the judge counts: from the last byte, or an old request would ask for a look at once.
            let look_at = since.max(self.this.heard.get()) + health::HEAD_WAIT;
            if look_at < timer.deadline() {
                timer.reset(look_at);
            }
        }
    }

    /// The caller has polled the connection just now, so the socket has been read until it is empty,
    /// or until the budget of this turn is spent, and then the timer would not have fired.
    fn look(&mut self, timer: Pin<&mut tokio::time::Sleep>) -> Poll<End> {
        let now = Instant::now();
        if self.this.life.get() == ConnectionState::Draining {
            self.health.drain();
        }
        let evidence = Evidence {
            tcp: self.observer.tcp_info().ok(),
            waiting_since: self.this.waiting_since.get(),
            pinned: self.this.pinned.get() > 0,
        };
        let decision = self.health.look(evidence, now);
        if decision.probe {
            let _ = self.observer.send_keepalive_probe();
        }
        if decision.ping && self.ping.send_ping(Ping::opaque()).is_err() {
            return Poll::Ready(End::abrupt("connection failed while sending a PING"));
        }
        timer.reset(decision.wake_at);
        self.note_health();
        if decision.leave
            && self.this.leave.replace(Some(DrainUrgency::Immediate))
                != Some(DrainUrgency::Immediate)
        {
            self.this.changed.notify_waiters();
        }
        match decision.change {
            Some((ConnectionState::Dead, reason)) => Poll::Ready(End::abrupt(reason.as_str())),
            Some((life, reason)) => {
                self.this.judged(life, reason);
                Poll::Pending
            }
            None => Poll::Pending,
        }
    }
}
