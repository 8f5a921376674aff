//! Permits: a request reserves a slot on a connection before it opens its stream, because h2 queues a
//! stream above the peer's limit without an error.

use std::rc::Rc;
use std::time::Instant;

use bytes::Bytes;
use h2::client::ResponseFuture;
use h2::{RecvStream, SendStream};
use http::Request;
use jackstay_core::connection::Stream;
use jackstay_sys::clock;

use super::{Connection, DrainReason};

impl Connection {
    /// Reserves a slot for one stream. The caller has checked [`Self::free_streams`].
    pub fn reserve(self: &Rc<Self>, long_running: bool, now: Instant) -> Permit {
        let stream = self.step(|machine| machine.reserve(long_running, now));
        if self.for_one_request {
            self.drain(DrainReason::TokenRefused);
        }
        Permit { connection: Rc::clone(self), stream, id: 0, received: false }
    }
}

/// A slot for one stream on a connection. Dropping it frees the slot.
#[derive(Debug)]
pub struct Permit {
    connection: Rc<Connection>,
    stream: Stream,
    /// The number of the stream; 0 before it is opened.
    id: u32,
    /// Its body is received piece by piece.
    received: bool,
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
        self.id = opened.0.stream_id().as_u32();
        self.connection.step(|machine| machine.opened(&mut self.stream));
        Ok(opened)
    }

    /// Whether the connection has ended, and the apiserver cannot have read the request and never will.
    pub fn is_unsent(&self) -> bool {
        self.connection.is_unsent(self.id)
    }

    /// Records that the response head arrived. Its latency is a sample, except for a watch, whose head
    /// may wait for the first event.
    pub fn head_arrived(&mut self, now: Instant) {
        self.connection.step(|machine| machine.head_arrived(&mut self.stream, now));
    }

    /// Records that the response head arrived, without a sample of its latency.
    pub fn head_arrived_without_sample(&mut self) {
        self.connection.step(|machine| machine.head_arrived_without_sample(&mut self.stream));
    }

    /// Pins an open stream, or removes the pin. A stream is pinned while the rest of its response cannot be
    /// requested from another connection. It then keeps an unresponsive connection open for a while
    /// ([`jackstay_core::connection`]).
    pub fn set_pinned(&mut self, pinned: bool) {
        self.connection.step(|machine| machine.set_pinned(&mut self.stream, pinned));
    }

    /// The body of the response is received piece by piece from `recv`, which is dropped together with this.
    pub fn receives(&mut self, recv: &mut RecvStream) {
        if !std::mem::replace(&mut self.received, true) {
            self.connection.receiving.add(self.id, recv);
        }
    }

    /// Records that the response has proven the token of the request. The pool hands a connection with many such
    /// streams over ([`Connection::is_mostly_proven`]).
    pub fn token_proven(&mut self) {
        self.connection.input(|machine| machine.token_proven(&mut self.stream));
    }

    /// Records that the peer ended the stream. Its slot is free as soon as the permit is dropped.
    pub fn finished(&mut self) {
        self.connection.step(|machine| machine.finished(&mut self.stream));
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if self.received {
            self.connection.receiving.remove(self.id);
        }
        self.connection.input(|machine| machine.release(&mut self.stream, clock::now()));
    }
}
