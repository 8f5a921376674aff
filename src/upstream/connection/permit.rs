//! A slot for one stream on a connection. It is taken before the stream is opened, since h2 queues a
//! stream above the peer's limit without an error, and given back on drop.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use h2::SendStream;
use h2::client::ResponseFuture;
use http::Request;
use tokio::time::Instant;

use super::Connection;
use crate::upstream::health::ConnectionState;

impl Connection {
    /// Takes a slot for one stream. The caller has checked [`Self::free_streams`].
    pub fn reserve(self: &Rc<Self>, watch: bool, now: Instant) -> Permit {
        self.stats.streams.fetch_add(1, Ordering::Relaxed);
        if watch {
            self.stats.watches.fetch_add(1, Ordering::Relaxed);
        }
        Permit {
            connection: Rc::clone(self),
            watch,
            reserved_at: now,
            waits: false,
            round: 0,
            stream: StreamState::Closed,
        }
    }
}

/// A slot for one stream on a connection, given back on drop.
#[derive(Debug)]
pub struct Permit {
    connection: Rc<Connection>,
    watch: bool,
    /// When it was taken; the stream is opened at once.
    reserved_at: Instant,
    /// It waits for a response head.
    waits: bool,
    /// The round in which the request was sent ([`Connection::has_slow_response_heads`]).
    round: u32,
    stream: StreamState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    /// Not opened yet, or ended by the peer.
    Closed,
    /// Open; its response could come from another connection.
    Open,
    /// Open; its response cannot come from another connection.
    Pinned,
}

impl Permit {
    pub fn connection(&self) -> &Rc<Connection> {
        &self.connection
    }

    /// Opens the stream and sends the request head; `end` says that there is no body.
    ///
    /// # Errors
    /// The stream was not opened: nothing was sent.
    pub fn open(
        &mut self,
        request: Request<()>,
        end: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        // A clone has no pending stream of its own, so h2 accepts the request at once.
        let opened = self.connection.send.clone().send_request(request, end)?;
        self.stream = StreamState::Open;
        self.waits = true;
        self.connection.waits.request_sent(self.reserved_at);
        if !self.watch {
            self.round = self.connection.waits.enter_round();
        }
        Ok(opened)
    }

    /// The response head arrived: a latency sample, except for a watch, whose head may wait for the
    /// first event.
    pub fn head_arrived(&mut self, now: Instant) {
        if self.end_wait() && !self.watch {
            let latency = now.saturating_duration_since(self.reserved_at);
            self.connection.waits.observe_latency(latency, now);
        }
    }

    /// Says whether the rest of the response cannot come from another connection. Such a stream
    /// keeps an unresponsive connection open for a while ([`crate::upstream::health`]).
    pub fn pin(&mut self, pinned: bool) {
        let states = [StreamState::Open, StreamState::Pinned];
        let (from, to) = (states[usize::from(!pinned)], states[usize::from(pinned)]);
        if self.stream == from {
            self.stream = to;
            self.connection.slots.pin(pinned);
        }
    }

    /// The peer ended the stream: its slot is free at once.
    pub fn finished(&mut self) {
        self.pin(false);
        self.stream = StreamState::Closed;
    }

    /// Ends the wait for a response head; returns whether there was one.
    fn end_wait(&mut self) -> bool {
        if !std::mem::take(&mut self.waits) {
            return false;
        }
        self.connection.waits.wait_ended();
        if !self.watch {
            self.connection.waits.leave_round(self.round);
        }
        true
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pin(false);
        self.end_wait();
        let connection = &self.connection;
        if self.watch {
            connection.stats.watches.fetch_sub(1, Ordering::Relaxed);
        }
        let open_before = connection.stats.streams.fetch_sub(1, Ordering::Relaxed);
        let state = connection.state();
        if self.stream != StreamState::Closed && state != ConnectionState::Dead {
            connection.slots.cancelled(Instant::now());
        }
        if open_before == 1 {
            connection.slots.idle_since.set(Instant::now());
            if matches!(state, ConnectionState::Draining | ConnectionState::Unresponsive) {
                connection.wake_driver();
            }
        }
        if open_before >= connection.slots.limit.get() {
            // It was full: requests may wait for this slot.
            connection.pool.notify_waiters();
        }
    }
}
