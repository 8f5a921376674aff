//! A place for one stream on a connection: taken before the stream is opened, since h2 would queue a
//! stream above the peer's limit without a word, and given back when whatever used it is dropped.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use h2::client::ResponseFuture;
use http::Request;
use tokio::time::Instant;

use super::Connection;
use crate::upstream::health::ConnectionState;

/// A cancelled stream keeps its place for this long. The apiserver's handler may still run: Go
/// queues new streams behind it and closes the connection with `ENHANCE_YOUR_CALM` when the queue
/// is four times its stream limit (`net/http2` `scheduleHandler`).
const CANCELLED_HOLDS: Duration = Duration::from_millis(500);

impl Connection {
    /// Takes a place for one stream. The caller has looked at [`Self::free`].
    pub fn reserve(self: &Rc<Self>, watch: bool, now: Instant) -> Permit {
        self.stats.streams.fetch_add(1, Ordering::Relaxed);
        if watch {
            self.stats.watches.fetch_add(1, Ordering::Relaxed);
        }
        Permit {
            connection: Rc::clone(self),
            watch,
            reserved: now,
            waits: false,
            look: 0,
            stream: Stream::Over,
        }
    }
}

/// A place for one stream on a connection, given back on drop.
#[derive(Debug)]
pub struct Permit {
    connection: Rc<Connection>,
    watch: bool,
    /// When it was taken; a stream is opened at once.
    reserved: Instant,
    /// It waits for a response head.
    waits: bool,
    /// Since this look ([`Connection::has_slow_response_heads`]).
    look: u32,
    stream: Stream,
}

/// What the place is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    /// The stream is over as far as the peer is concerned, or was never opened.
    Over,
    /// What comes of it could come from elsewhere.
    Open,
    /// It could not.
    Pinned,
}

impl Permit {
    /// The connection it belongs to.
    pub fn connection(&self) -> &Rc<Connection> {
        &self.connection
    }

    /// Opens the stream and sends the request head; `end` when there is no body.
    ///
    /// # Errors
    /// The stream was not opened: nothing was sent.
    pub fn open(
        &mut self,
        request: Request<()>,
        end: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        // A clone has no pending stream of its own, so that h2 takes the request at once.
        let opened = self.connection.send.clone().send_request(request, end)?;
        self.stream = Stream::Open;
        self.waits = true;
        self.connection.head_awaited(self.reserved);
        if !self.watch {
            self.look = self.connection.note_wait();
        }
        Ok(opened)
    }

    /// The response head arrived: a measurement, unless the request was one that waits by nature.
    pub fn head_arrived(&mut self, now: Instant) {
        if std::mem::take(&mut self.waits) {
            self.connection.head_settled();
            if !self.watch {
                self.connection.wait_over(self.look);
                let mut latency = self.connection.latency.get();
                latency.observe(now.saturating_duration_since(self.reserved), now);
                self.connection.latency.set(latency);
            }
        }
    }

    /// Says whether what comes of the stream could come from elsewhere: what could not keeps a
    /// connection that does not respond open for a while ([`crate::upstream::health`]).
    pub fn pin(&mut self, pinned: bool) {
        let states = [Stream::Open, Stream::Pinned];
        let (from, to) = (states[usize::from(!pinned)], states[usize::from(pinned)]);
        if self.stream == from {
            self.stream = to;
            self.connection.pin(pinned);
        }
    }

    /// The peer ended the stream: its place is free at once.
    pub fn finished(&mut self) {
        self.pin(false);
        self.stream = Stream::Over;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.pin(false);
        let connection = &self.connection;
        if self.waits {
            connection.head_settled();
            if !self.watch {
                connection.wait_over(self.look);
            }
        }
        if self.watch {
            connection.stats.watches.fetch_sub(1, Ordering::Relaxed);
        }
        let before = connection.stats.streams.fetch_sub(1, Ordering::Relaxed);
        if self.stream != Stream::Over && connection.life.get() != ConnectionState::Dead {
            connection.cancelled.borrow_mut().push_back(Instant::now() + CANCELLED_HOLDS);
        }
        if before == 1 {
            connection.idle_since.set(Instant::now());
            if matches!(
                connection.life.get(),
                ConnectionState::Draining | ConnectionState::Unresponsive
            ) {
                connection.wake_driver();
            }
        }
        if before >= connection.cap.get() {
            // It was full: somebody may wait for this place.
            connection.pool.notify_waiters();
        }
    }
}
