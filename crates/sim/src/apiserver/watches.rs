//! The watches of an apiserver, and its watch cache.

use std::time::Instant;

use jackstay_core::request::info::{first_value, parse_bool};

use super::server::Apiserver;
use super::store::{Resource, Store, expired_line, line};
use crate::http2::{Data, Frame, Head, Request, StreamId};
use crate::net::{ConnectionId, Network, Side};
use crate::scheduler::Scheduler;

/// A running watch.
#[derive(Debug)]
pub struct Watcher {
    resource: Resource,
    /// The client has everything until this revision.
    cursor: u64,
    /// When the next bookmark is due, if the client wants any.
    bookmark_at: Option<Instant>,
    ends_at: Option<Instant>,
}

impl Apiserver {
    /// Starts a watch.
    pub(super) fn start_watch(
        &mut self,
        (s, net): (&mut Scheduler, &mut Network),
        store: &Store,
        (connection, stream): (ConnectionId, StreamId),
        (resource, request): (Resource, &Request),
    ) {
        let query = request.info.query();
        let number = |key| first_value(query, key).and_then(|value| value.parse::<u64>().ok());
        let version = number("resourceVersion").unwrap_or(0);
        let mut send = |frame| net.send(s, connection, Side::Server, frame);
        send(Frame::Head(stream, Head::status(200)));
        if version > 0 && version < self.oldest {
            send(Frame::Data(stream, Data::Frames(expired_line())));
            send(Frame::End(stream));
            return self.finish_stream(connection, stream);
        }
        if version == 0 {
            for (key, version) in store.objects(resource).filter(|object| object.1 <= self.applied)
            {
                send(Frame::Data(stream, Data::Frames(line("ADDED", key, version))));
            }
        }
        let cursor = if version == 0 { self.applied } else { version };
        let ends_at =
            number("timeoutSeconds").map(|seconds| s.now + std::time::Duration::from_secs(seconds));
        let mut watcher = Watcher {
            resource,
            cursor,
            bookmark_at: parse_bool(first_value(query, "allowWatchBookmarks").as_deref())
                .then(|| s.now + self.conditions.bookmarks),
            ends_at,
        };
        watcher.catch_up((s, net), store, (connection, stream), self.applied);
        self.is_watched[resource as usize] = true;
        self.watchers.insert((connection, stream), watcher);
    }

    /// The watch cache has reached a revision.
    pub fn replicate(
        &mut self,
        (s, net): (&mut Scheduler, &mut Network),
        store: &Store,
        revision: u64,
    ) {
        let revision = revision.min(store.revision());
        if revision <= self.applied {
            return;
        }
        let has_changed = Resource::ALL.map(|resource| {
            store.next_revision(resource, self.applied).is_some_and(|next| next <= revision)
        });
        self.applied = revision;
        self.oldest = self.oldest.max(revision.saturating_sub(self.conditions.history));
        // Most writes of a fleet renew leases, which no client watches.
        if !has_changed.iter().zip(self.is_watched).any(|(&changed, watched)| changed && watched) {
            return;
        }
        for (&on, watcher) in &mut self.watchers {
            if has_changed[watcher.resource as usize] {
                watcher.catch_up((s, net), store, on, revision);
            }
        }
    }

    /// Sends the bookmarks that are due, and ends watches whose time is over.
    pub(super) fn tend_watches(&mut self, (s, net): (&mut Scheduler, &mut Network)) {
        let (applied, bookmarks) = (self.applied, self.conditions.bookmarks);
        let mut ended = Vec::new();
        self.watchers.retain(|&(connection, stream), watcher| {
            if watcher.ends_at.is_some_and(|at| at <= s.now) {
                net.send(s, connection, Side::Server, Frame::End(stream));
                ended.push((connection, stream));
                return false;
            }
            if watcher.bookmark_at.is_some_and(|at| at <= s.now) && watcher.cursor <= applied {
                watcher.cursor = applied;
                watcher.bookmark_at = Some(s.now + bookmarks);
                let data = Data::Frames(line("BOOKMARK", 0, applied));
                net.send(s, connection, Side::Server, Frame::Data(stream, data));
            }
            true
        });
        for (connection, stream) in ended {
            self.finish_stream(connection, stream);
        }
    }

    /// Ends every watch cleanly.
    pub(super) fn end_watches(&mut self, (s, net): (&mut Scheduler, &mut Network)) {
        for ((connection, stream), _) in std::mem::take(&mut self.watchers) {
            net.send(s, connection, Side::Server, Frame::End(stream));
            self.finish_stream(connection, stream);
        }
    }

    pub(super) fn forget_watches(&mut self, connection: ConnectionId, stream: Option<StreamId>) {
        if let Some(stream) = stream {
            self.watchers.remove(&(connection, stream));
            return;
        }
        let all = (connection, 0)..=(connection, StreamId::MAX);
        let ended: Vec<_> = self.watchers.range(all).map(|(&on, _)| on).collect();
        for on in ended {
            self.watchers.remove(&on);
        }
    }
}

impl Watcher {
    fn catch_up(
        &mut self,
        (s, net): (&mut Scheduler, &mut Network),
        store: &Store,
        (connection, stream): (ConnectionId, StreamId),
        until: u64,
    ) {
        while let Some(revision) = store.next_revision(self.resource, self.cursor)
            && revision <= until
        {
            self.cursor = revision;
            let Some(change) = store.change(revision) else { break };
            let data = Data::Frames(change.line.clone());
            net.send(s, connection, Side::Server, Frame::Data(stream, data));
        }
    }
}
