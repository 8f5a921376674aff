//! The connections of clients to a node.

use std::collections::BTreeMap;

use super::request::RequestId;
use super::{Io, Node};
use crate::http2::{Frame, ResetCode, StreamId};
use crate::net::{Arrival, ConnectionId, Side};

/// A connection of a client.
#[derive(Debug)]
pub(super) struct Downstream {
    /// The window with which a stream begins.
    pub(super) window: u32,
    pub(super) streams: BTreeMap<StreamId, RequestId>,
}

impl Node {
    pub(super) fn client_arrived(&mut self, io: &mut Io<'_>, id: ConnectionId, what: Arrival) {
        let frame = match what {
            Arrival::Frame(frame) => frame,
            Arrival::Connected => return,
            Arrival::Ended | Arrival::Lost => {
                io.net.close(io.s, id, Side::Server);
                let client = self.clients.remove(&id);
                for request in client.into_iter().flat_map(|client| client.streams.into_values()) {
                    self.cancel_request(io, request);
                }
                return;
            }
        };
        match frame {
            Frame::Hello { window } => {
                self.clients.insert(id, Downstream { window, streams: BTreeMap::new() });
                let max_streams = self.settings.client_streams;
                io.net.send(io.s, id, Side::Server, Frame::Settings { max_streams });
            }
            Frame::Ping(number) => io.net.send(io.s, id, Side::Server, Frame::Pong(number)),
            Frame::Request(stream, request) => {
                let Some(Downstream { streams, .. }) = self.clients.get_mut(&id) else { return };
                if streams.len() >= self.settings.client_streams {
                    let reset = Frame::Reset(stream, ResetCode::Refused);
                    return io.net.send(io.s, id, Side::Server, reset);
                }
                streams.insert(stream, self.next_request);
                self.begin_request(io, (id, stream), request);
            }
            Frame::Reset(stream, _) => {
                let removed =
                    self.clients.get_mut(&id).and_then(|client| client.streams.remove(&stream));
                if let Some(request) = removed {
                    self.cancel_request(io, request);
                }
            }
            Frame::WindowUpdate(stream, bytes) => {
                let client = self.clients.get(&id);
                if let Some(&request) = client.and_then(|client| client.streams.get(&stream)) {
                    self.client_has_read(io, request, bytes);
                }
            }
            _ => {}
        }
    }
}
