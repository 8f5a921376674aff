//! The connections of clients to a node.

use std::collections::BTreeMap;

use super::{Io, Node};
use crate::http2::{Frame, ResetCode};
use crate::net::{Arrival, ConnectionId, Side};

impl Node {
    pub(super) fn client_arrived(&mut self, io: &mut Io<'_>, id: ConnectionId, what: Arrival) {
        let frame = match what {
            Arrival::Frame(frame) => frame,
            Arrival::Connected => return,
            Arrival::Ended | Arrival::Lost => {
                io.net.close(io.s, id, Side::Server);
                for request in self.clients.remove(&id).into_iter().flat_map(BTreeMap::into_values)
                {
                    self.cancel_request(io, request);
                }
                return;
            }
        };
        match frame {
            Frame::Hello => {
                self.clients.insert(id, BTreeMap::new());
                let max_streams = self.settings.client_streams;
                io.net.send(io.s, id, Side::Server, Frame::Settings { max_streams });
            }
            Frame::Ping(number) => io.net.send(io.s, id, Side::Server, Frame::Pong(number)),
            Frame::Request(stream, request) => {
                let Some(streams) = self.clients.get_mut(&id) else { return };
                if streams.len() >= self.settings.client_streams {
                    let reset = Frame::Reset(stream, ResetCode::Refused);
                    return io.net.send(io.s, id, Side::Server, reset);
                }
                streams.insert(stream, self.next_request);
                self.begin_request(io, (id, stream), request);
            }
            Frame::Reset(stream, _) => {
                let removed = self.clients.get_mut(&id).and_then(|streams| streams.remove(&stream));
                if let Some(request) = removed {
                    self.cancel_request(io, request);
                }
            }
            _ => {}
        }
    }
}
