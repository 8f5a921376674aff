//! Lists: whole, or in pages (`limit` and `continue`). A body is sent as far as the window of its stream allows.

use jackstay_core::request::info::first_value;

use super::server::{Apiserver, list_bytes};
use super::store::{Resource, Store};
use crate::http2::{Data, Frame, Head, Request, StreamId};
use crate::net::{ConnectionId, Network, Side};
use crate::scheduler::Scheduler;

/// Size of a DATA frame (`http2`, `maxFrameSize`).
const CHUNK: u32 = 16_384;

/// The rest of a list.
#[derive(Debug)]
pub(super) struct ListBody {
    left: u32,
    window: u32,
}

impl Apiserver {
    /// Answers a list or a page with the objects at the revision of the cache: a watch from there on delivers those that
    /// were written since. The next page begins at the key of its `continue`; nothing writes a collection that is read in
    /// pages, so the pages belong together.
    pub(super) fn list(
        &mut self,
        (s, net): (&mut Scheduler, &mut Network),
        store: &Store,
        (id, stream): (ConnectionId, StreamId),
        (resource, request): (Resource, &Request),
    ) {
        self.lists += 1;
        let query = request.info.query();
        let number = |key| first_value(query, key).and_then(|value| value.parse::<u32>().ok());
        let (first, limit) = (number("continue").unwrap_or(0), number("limit"));
        let is_listed = |object: &(u32, u64)| object.0 >= first && object.1 <= self.applied;
        let mut objects = store.objects(resource).filter(is_listed);
        let count = objects.by_ref().take(limit.map_or(usize::MAX, |limit| limit as usize)).count();
        let next = objects.next().map_or(0, |object| object.0);
        let length = list_bytes(count);
        let head = Head { version: self.applied, next, length, ..Head::status(200) };
        net.send(s, id, Side::Server, Frame::Head(stream, head));
        let Some(window) = self.connections.get(&id).map(|peer| peer.window) else { return };
        if let Some(open) = self.stream_mut((id, stream)) {
            open.list = Some(ListBody { left: length, window });
        }
        self.continue_list((s, net), (id, stream), 0);
    }

    /// The client has read so many bytes of a list.
    pub(super) fn continue_list(
        &mut self,
        (s, net): (&mut Scheduler, &mut Network),
        (id, stream): (ConnectionId, StreamId),
        read: u32,
    ) {
        let Some(body) = self.stream_mut((id, stream)).and_then(|open| open.list.as_mut()) else {
            return;
        };
        body.window += read;
        while body.left > 0 {
            let bytes = CHUNK.min(body.left).min(body.window);
            if bytes == 0 {
                return;
            }
            body.left -= bytes;
            body.window -= bytes;
            net.send(s, id, Side::Server, Frame::Data(stream, Data::Opaque(bytes)));
        }
        net.send(s, id, Side::Server, Frame::End(stream));
        self.finish_stream(id, stream);
    }
}
