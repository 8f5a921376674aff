//! The process of an apiserver: connections, streams and the verbs.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use http::Method;
use jackstay_core::request::info::first_value;

use super::lists::ListBody;
use super::store::{ChangeKind, Resource, Store, WriteResult};
use super::watches::Watcher;
use crate::http2::{Data, Frame, Head, Request, ResetCode, StreamId, Write};
use crate::net::{Arrival, ConnectionId, Network, ProcessId, Side};
use crate::scheduler::{Event, Scheduler, Timer};
use crate::trace::Entry;

/// How long a read of a version waits for the watch cache (apiserver, `cacher/watch_cache.go`, `blockTimeout`).
const VERSION_WAIT: Duration = Duration::from_secs(3);
/// Pause between two looks at the watch cache.
const VERSION_CHECK: Duration = Duration::from_millis(50);
/// Time between two looks at the bookmarks that are due (apiserver, `cacher/cacher.go`, `dispatchEvents`).
const BOOKMARK_CHECK: Duration = Duration::from_secs(1);
/// How long a server that shuts down serves the streams that are open.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(2);
/// Size of an object, also in a list.
const OBJECT_BYTES: u32 = 1_500;

/// What a scenario injects into a server.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // independent faults
pub struct Conditions {
    /// The shortest time that a request takes. Up to as much is added at random.
    pub service: Duration,
    /// Time from a change in the store to the watch cache.
    pub lag: Duration,
    /// Revisions that the watch cache keeps.
    pub history: u64,
    /// Time from the begin of a watch to its first bookmark, and between two. kube-apiserver sends one a minute.
    pub bookmarks: Duration,
    /// Requests get no response, as without etcd.
    pub hangs: bool,
    /// `/readyz` fails.
    pub unready: bool,
    /// Every request is answered with 403, as by an apiserver whose RBAC informers are not filled. No client is in
    /// `system:masters`, the prober neither.
    pub forbids: bool,
    /// Requests are rejected with 429.
    pub overloaded: bool,
    /// Probability that a request is followed by GOAWAY (`--goaway-chance`).
    pub goaway_chance: f64,
    /// `SETTINGS_MAX_CONCURRENT_STREAMS`.
    pub max_streams: usize,
}

impl Default for Conditions {
    fn default() -> Self {
        Self {
            service: Duration::from_micros(600),
            lag: Duration::from_millis(1),
            history: 10_000,
            bookmarks: Duration::from_secs(5),
            hangs: false,
            unready: false,
            forbids: false,
            overloaded: false,
            goaway_chance: 0.0,
            max_streams: 100,
        }
    }
}

/// A timer of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerTimer {
    /// The handler of a request has its result.
    Handle(ConnectionId, StreamId),
    /// Bookmarks may be due.
    Bookmarks,
    /// A server that shuts down closes its connections.
    ShutDown,
}

/// A stream whose request is handled.
#[derive(Debug)]
pub(super) struct Stream {
    request: Rc<Request>,
    /// How long it has waited for the watch cache.
    waited: Duration,
    /// The rest of a list.
    pub(super) list: Option<ListBody>,
}

/// A connection.
#[derive(Debug)]
pub(super) struct Peer {
    /// The window with which a stream begins.
    pub(super) window: u32,
    pub(super) streams: BTreeMap<StreamId, Stream>,
    /// The last stream, if a GOAWAY was sent. Later ones are ignored.
    goaway: Option<StreamId>,
}

/// An apiserver.
#[derive(Debug)]
pub struct Apiserver {
    index: usize,
    /// Its process.
    pub process: ProcessId,
    /// What is injected.
    pub conditions: Conditions,
    pub(super) connections: BTreeMap<ConnectionId, Peer>,
    pub(super) watchers: BTreeMap<(ConnectionId, StreamId), Watcher>,
    /// Whether there was a watch of each resource.
    pub(super) is_watched: [bool; Resource::ALL.len()],
    /// The revision of the watch cache.
    pub(super) applied: u64,
    /// Lists that were answered.
    pub lists: u64,
    /// The oldest version from which the watch cache can continue a watch.
    pub(super) oldest: u64,
    shutting_down: bool,
}

impl Apiserver {
    /// A server that has just started.
    pub fn new(index: usize, process: ProcessId) -> Self {
        Self {
            index,
            process,
            conditions: Conditions::default(),
            connections: BTreeMap::new(),
            watchers: BTreeMap::new(),
            is_watched: [false; Resource::ALL.len()],
            applied: 0,
            lists: 0,
            oldest: 0,
            shutting_down: false,
        }
    }

    /// The process starts: its watch cache has no history.
    pub fn start(&mut self, s: &mut Scheduler, store: &Store) {
        self.connections.clear();
        self.watchers.clear();
        self.applied = store.revision();
        self.oldest = self.applied;
        self.shutting_down = false;
        s.record(Entry::Server { server: self.index as u8, what: "starts" });
        let first = s.random_part(BOOKMARK_CHECK);
        s.timer(s.now + first, self.process, Timer::Server(ServerTimer::Bookmarks));
    }

    /// SIGTERM: GOAWAY on every connection; watches end, and other streams that are open may end.
    pub fn shut_down(&mut self, s: &mut Scheduler, net: &mut Network) {
        self.shutting_down = true;
        s.record(Entry::Server { server: self.index as u8, what: "shuts down" });
        for (&connection, peer) in &self.connections {
            let last = peer.streams.keys().next_back().copied().unwrap_or(0);
            net.send(s, connection, Side::Server, Frame::Goaway { last });
        }
        self.end_watches((s, net));
        s.timer(s.now + SHUTDOWN_GRACE, self.process, Timer::Server(ServerTimer::ShutDown));
    }

    /// Number of streams on connections that their clients have not closed.
    pub fn leftovers(&self, net: &Network) -> usize {
        let open = self.connections.iter().filter(|(id, _)| net.is_open(**id));
        open.map(|(_, peer)| peer.streams.len()).sum()
    }

    /// Takes in what has arrived.
    pub fn arrived(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        id: ConnectionId,
        what: Arrival,
    ) {
        let frame = match what {
            Arrival::Frame(frame) => frame,
            Arrival::Connected => return,
            Arrival::Ended | Arrival::Lost => {
                self.connections.remove(&id);
                self.forget_watches(id, None);
                return net.close(s, id, Side::Server);
            }
        };
        match frame {
            Frame::Hello { .. } if self.shutting_down => net.abort(s, id, Side::Server),
            Frame::Hello { window } => {
                let peer = Peer { window, streams: BTreeMap::new(), goaway: None };
                self.connections.insert(id, peer);
                let max_streams = self.conditions.max_streams;
                net.send(s, id, Side::Server, Frame::Settings { max_streams });
            }
            Frame::Ping(number) => net.send(s, id, Side::Server, Frame::Pong(number)),
            Frame::Request(stream, request) => self.requested(s, net, (id, stream), request),
            Frame::Reset(stream, _) => self.finish_stream(id, stream),
            Frame::WindowUpdate(stream, bytes) => {
                self.continue_list((s, net), (id, stream), bytes);
            }
            _ => {}
        }
    }

    fn requested(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        (id, stream): (ConnectionId, StreamId),
        request: Rc<Request>,
    ) {
        let Some(peer) = self.connections.get_mut(&id) else { return };
        if peer.goaway.is_some_and(|last| stream > last) {
            return;
        }
        if peer.streams.len() >= self.conditions.max_streams || self.shutting_down {
            return net.send(s, id, Side::Server, Frame::Reset(stream, ResetCode::Refused));
        }
        peer.streams.insert(stream, Stream { request, waited: Duration::ZERO, list: None });
        let service = self.conditions.service;
        let at = s.now + service + s.random_part(service);
        s.timer(at, self.process, Timer::Server(ServerTimer::Handle(id, stream)));
        if self.conditions.goaway_chance > 0.0 && s.rng.f64() < self.conditions.goaway_chance {
            peer.goaway = Some(stream);
            net.send(s, id, Side::Server, Frame::Goaway { last: stream });
        }
    }

    /// Takes in the end of a timer.
    pub fn timer(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        store: &mut Store,
        timer: ServerTimer,
    ) {
        match timer {
            ServerTimer::Handle(id, stream) => self.handle(s, net, store, (id, stream)),
            ServerTimer::Bookmarks => {
                self.tend_watches((s, net));
                s.timer(s.now + BOOKMARK_CHECK, self.process, Timer::Server(timer));
            }
            ServerTimer::ShutDown => {
                if std::mem::take(&mut self.shutting_down) {
                    self.shutting_down = true;
                    for (id, _) in std::mem::take(&mut self.connections) {
                        net.close(s, id, Side::Server);
                    }
                    self.watchers.clear();
                }
            }
        }
    }

    fn handle(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        store: &mut Store,
        (id, stream): (ConnectionId, StreamId),
    ) {
        let Some(request) = self.stream_mut((id, stream)).map(|open| Rc::clone(&open.request))
        else {
            return;
        };
        let path = request.info.path();
        if self.conditions.forbids {
            return self.respond(s, net, (id, stream), Head::status(403), None);
        }
        if path == "/readyz" || path == "/livez" {
            return self.respond(s, net, (id, stream), self.readiness(), None);
        }
        if self.conditions.hangs {
            return;
        }
        if self.conditions.overloaded {
            let head = Head { retry_after: Some(1), ..Head::status(429) };
            return self.respond(s, net, (id, stream), head, None);
        }
        let Some((resource, key)) = Resource::parse(path) else {
            return self.respond(s, net, (id, stream), Head::status(404), None);
        };
        let wanted = first_value(request.info.query(), "resourceVersion")
            .and_then(|version| version.parse::<u64>().ok())
            .unwrap_or(0);
        let is_watch = first_value(request.info.query(), "watch").is_some();
        if wanted > self.applied
            && !is_watch
            && let Some(open) = self.stream_mut((id, stream))
        {
            if open.waited >= VERSION_WAIT {
                let head = Head { retry_after: Some(1), ..Head::status(504) };
                return self.respond(s, net, (id, stream), head, None);
            }
            open.waited += VERSION_CHECK;
            let timer = Timer::Server(ServerTimer::Handle(id, stream));
            return s.timer(s.now + VERSION_CHECK, self.process, timer);
        }
        match (request.parts.method.clone(), request.write, key) {
            (Method::GET, ..) if is_watch => {
                self.start_watch((s, net), store, (id, stream), (resource, &request));
            }
            (Method::GET, _, Some(key)) => {
                let version = store.version(resource, key);
                let status = if version.is_some() { 200 } else { 404 };
                let head = Head { version: version.unwrap_or(0), ..Head::status(status) };
                self.respond(s, net, (id, stream), head, Some(Data::Opaque(OBJECT_BYTES)));
            }
            (Method::GET, _, None) => {
                self.list((s, net), store, (id, stream), (resource, &request));
            }
            (method, Some(write), key) => {
                let head = write_object(s, store, &method, (resource, key.unwrap_or(0)), write);
                self.respond(s, net, (id, stream), head, Some(Data::Opaque(OBJECT_BYTES)));
            }
            _ => self.respond(s, net, (id, stream), Head::status(405), None),
        }
    }

    /// The answer of `/readyz` and `/livez`.
    fn readiness(&self) -> Head {
        let Conditions { unready, hangs, .. } = self.conditions;
        Head::status(if unready || hangs { 500 } else { 200 })
    }

    pub(super) fn stream_mut(
        &mut self,
        (id, stream): (ConnectionId, StreamId),
    ) -> Option<&mut Stream> {
        self.connections.get_mut(&id)?.streams.get_mut(&stream)
    }

    fn respond(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        (id, stream): (ConnectionId, StreamId),
        head: Head,
        body: Option<Data>,
    ) {
        let body = body.filter(|_| head.status < 300);
        net.send(s, id, Side::Server, Frame::Response(stream, head, body));
        self.finish_stream(id, stream);
    }

    pub(super) fn finish_stream(&mut self, id: ConnectionId, stream: StreamId) {
        if let Some(peer) = self.connections.get_mut(&id) {
            peer.streams.remove(&stream);
        }
        self.forget_watches(id, Some(stream));
    }
}

/// The bytes of a list.
pub(crate) fn list_bytes(items: usize) -> u32 {
    OBJECT_BYTES * items.max(1) as u32
}

/// Carries a write out.
fn write_object(
    s: &mut Scheduler,
    store: &mut Store,
    method: &Method,
    object: (Resource, u32),
    write: Write,
) -> Head {
    let kind = match *method {
        Method::POST => ChangeKind::Added,
        Method::DELETE => ChangeKind::Deleted,
        _ => ChangeKind::Modified,
    };
    match store.write(kind, object, write, s.now) {
        WriteResult::Committed(revision) => {
            s.record(Entry::Commit { revision, token: write.token });
            Head {
                version: revision,
                ..Head::status(if kind == ChangeKind::Added { 201 } else { 200 })
            }
        }
        WriteResult::Conflict => Head::status(409),
        WriteResult::NotFound => Head::status(404),
    }
}

/// The watch caches of all servers follow a change.
pub(crate) fn replicate_later(s: &mut Scheduler, servers: &[Apiserver], revision: u64) {
    for server in servers {
        let lag = server.conditions.lag;
        let lag = lag + s.random_part(lag / 2);
        s.after(lag, Event::Replicate { server: server.index, revision });
    }
}
