//! The body of a response on its way to the client. What the client's window does not allow is held, and the apiserver
//! may send as much as was forwarded.

use std::collections::VecDeque;

use super::{RequestId, State, Stream};
use crate::http2::{Data, Frame, ReceiveWindow};
use crate::net::Side;
use crate::node::{Io, Node};

/// A body.
#[derive(Debug)]
pub(in crate::node) struct Body {
    stream: Stream,
    upstream: ReceiveWindow,
    /// Bytes that the client's window allows.
    window: u32,
    held: VecDeque<Data>,
    /// The apiserver has ended it.
    ended: bool,
}

impl Body {
    /// A body with the window of the client's stream and that of the stream upstream, in bytes.
    pub(super) fn new(stream: Stream, window: u32, upstream: u32) -> Self {
        let upstream = ReceiveWindow::new(upstream);
        Self { stream, upstream, window, held: VecDeque::new(), ended: false }
    }

    /// The stream upstream.
    pub(super) fn stream(&self) -> Stream {
        self.stream
    }

    /// Removes the first piece that the client's window allows.
    fn next(&mut self) -> Option<Data> {
        self.window = self.window.checked_sub(self.held.front()?.len())?;
        self.held.pop_front()
    }
}

impl Node {
    fn body_mut(&mut self, id: RequestId) -> Option<&mut Body> {
        match &mut self.requests.get_mut(&id)?.state {
            State::Streaming(body) => Some(body),
            _ => None,
        }
    }

    /// A piece of a body has arrived.
    pub(super) fn forward_body(&mut self, io: &mut Io<'_>, id: RequestId, data: Data) {
        if let Some(body) = self.body_mut(id) {
            body.held.push_back(data);
        }
        self.flush_body(io, id);
    }

    /// The apiserver has ended a body.
    pub(super) fn body_ended(&mut self, io: &mut Io<'_>, id: RequestId) {
        if let Some(body) = self.body_mut(id) {
            body.ended = true;
        }
        self.flush_body(io, id);
    }

    /// The client has read a part of a body.
    pub(in crate::node) fn client_has_read(&mut self, io: &mut Io<'_>, id: RequestId, bytes: u32) {
        if let Some(body) = self.body_mut(id) {
            body.window += bytes;
        }
        self.flush_body(io, id);
    }

    fn flush_body(&mut self, io: &mut Io<'_>, id: RequestId) {
        while let Some(body) = self.body_mut(id) {
            let Some(data) = body.next() else {
                if body.ended && body.held.is_empty() {
                    self.end_request(io, id, true);
                }
                return;
            };
            let (connection, stream) = body.stream;
            let announced = body.upstream.read(data.len()).filter(|_| !body.ended);
            self.send_to_client(io, id, data);
            if let Some(bytes) = announced {
                let update = Frame::WindowUpdate(stream, bytes);
                io.net.send(io.s, connection, Side::Client, update);
            }
        }
    }
}
