//! Permits: a request reserves a slot on a connection before it opens its stream, because h2 queues a
//! stream above the peer's limit without an error.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream, StreamId};
use http::Request;
use jackstay_core::connection_health::ConnectionState;
use jackstay_sys::clock;

use super::Connection;

impl Connection {
    /// Reserves a slot for one stream. The caller has checked [`Self::free_streams`].
    pub fn reserve(self: &Rc<Self>, watch: bool, now: Instant) -> Permit {
        let open = self.stats.streams.fetch_add(1, Ordering::Relaxed) + 1;
        self.slots.peak.set(self.slots.peak.get().max(open));
        if watch {
            self.stats.watches.fetch_add(1, Ordering::Relaxed);
        }
        Permit {
            connection: Rc::clone(self),
            watch,
            reserved_at: now,
            awaits_head: false,
            proven: false,
            round: 0,
            stream: StreamState::Closed,
            received: None,
        }
    }
}

/// A slot for one stream on a connection. Dropping it frees the slot.
#[derive(Debug)]
pub struct Permit {
    connection: Rc<Connection>,
    watch: bool,
    /// When the slot was reserved. The stream is opened right afterwards.
    reserved_at: Instant,
    /// The request was sent, and its response head has not arrived.
    awaits_head: bool,
    /// The response has proven the token of the request.
    proven: bool,
    /// The round of [`super::response_waits`] in which the request was sent; unused for a watch.
    round: u32,
    stream: StreamState,
    /// The stream, if its body is received piece by piece.
    received: Option<StreamId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    /// Not opened yet, or ended by the peer.
    Closed,
    /// Open; the response could be requested from another connection.
    Open,
    /// Open; the rest of the response cannot be requested from another connection.
    Pinned,
}

impl Permit {
    pub fn connection(&self) -> &Rc<Connection> {
        &self.connection
    }

    /// Opens the stream and sends the request head. `end_of_stream` means that there is no body.
    ///
    /// # Errors
    /// The stream was not opened, so nothing was sent.
    pub fn open(
        &mut self,
        request: Request<()>,
        end_of_stream: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        // A clone has no pending stream of its own, so h2 accepts the request at once.
        let opened = self.connection.send.clone().send_request(request, end_of_stream)?;
        self.stream = StreamState::Open;
        self.awaits_head = true;
        self.connection.waits.request_sent(self.reserved_at);
        if !self.watch {
            self.round = self.connection.waits.enter_round();
        }
        Ok(opened)
    }

    /// Records that the response head arrived. Its latency is a sample, except for a watch, whose head
    /// may wait for the first event.
    pub fn head_arrived(&mut self, now: Instant) {
        if self.end_wait() && !self.watch {
            let latency = now.saturating_duration_since(self.reserved_at);
            self.connection.waits.observe_latency(latency, now);
        }
    }

    /// Pins an open stream, or removes the pin. A stream is pinned while the rest of its response cannot be
    /// requested from another connection. It then keeps an unresponsive connection open for a while
    /// ([`jackstay_core::connection_health`]).
    pub fn set_pinned(&mut self, pinned: bool) {
        let (from, to) = if pinned {
            (StreamState::Open, StreamState::Pinned)
        } else {
            (StreamState::Pinned, StreamState::Open)
        };
        if self.stream == from {
            self.stream = to;
            self.connection.slots.count_pinned(pinned);
        }
    }

    /// The body of the response is received piece by piece from `recv`, which is dropped together with this.
    pub fn receives(&mut self, recv: &mut RecvStream) {
        if self.received.is_none() {
            self.received = Some(self.connection.receiving.add(recv));
        }
    }

    /// Records that the response has proven the token of the request. The pool hands a connection with many such
    /// streams over ([`Connection::is_mostly_proven`]).
    pub fn token_proven(&mut self) {
        if !std::mem::replace(&mut self.proven, true) {
            self.connection.slots.count_proven(true);
            if self.connection.is_mostly_proven() {
                self.connection.pool.notify_one();
            }
        }
    }

    /// Records that the peer ended the stream. Its slot is free as soon as the permit is dropped.
    pub fn finished(&mut self) {
        self.set_pinned(false);
        self.stream = StreamState::Closed;
    }

    /// Ends the wait for a response head. Returns whether the request was waiting.
    fn end_wait(&mut self) -> bool {
        if !std::mem::take(&mut self.awaits_head) {
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
        self.set_pinned(false);
        self.end_wait();
        let connection = &self.connection;
        if let Some(stream) = self.received {
            connection.receiving.remove(stream);
        }
        if self.proven {
            connection.slots.count_proven(false);
        }
        if self.watch {
            connection.stats.watches.fetch_sub(1, Ordering::Relaxed);
        }
        let open_before = connection.stats.streams.fetch_sub(1, Ordering::Relaxed);
        let state = connection.state();
        if self.stream != StreamState::Closed && state != ConnectionState::Dead {
            connection.slots.hold_cancelled(clock::now());
        }
        if open_before == 1 {
            connection.slots.idle_since.set(clock::now());
            if matches!(state, ConnectionState::Draining | ConnectionState::Unresponsive) {
                connection.wake_driver();
            }
        }
        if open_before >= connection.slots.limit.get() {
            // The connection was full, so requests may wait for this slot.
            connection.pool.notify_one();
        }
    }
}
