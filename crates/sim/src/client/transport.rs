//! HTTP/2 as Go's `net/http` does it with the settings of client-go: one connection until its streams are used up, a
//! PING after 30 s without a frame, and 15 s for its PONG (`x/net/http2`, `ReadIdleTimeout` and `PingTimeout`;
//! apimachinery, `util/net/http.go`).

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use super::ClientTimer;
use crate::http2::{Data, Frame, Head, ReceiveWindow, Request, ResetCode, StreamId};
use crate::net::{Arrival, ConnectionId, Network, ProcessId, ProcessState, Side};
use crate::scheduler::{Scheduler, Timer};

const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
const IDLE_BEFORE_PING: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(15);
/// Window of a stream in bytes (`transportDefaultStreamFlow`).
const STREAM_WINDOW: u32 = 4 << 20;

/// A request of a client. Numbers are not used again.
pub type RequestId = u64;

/// What has happened to a request.
#[derive(Debug)]
pub enum Reply {
    /// The head of its response.
    Head(Head),
    /// A part of the body.
    Data(Data),
    /// The end of the body.
    End,
    /// It has failed.
    Failed(Failure),
}

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// No connection was established.
    Connect,
    /// The connection was lost.
    Connection,
    /// The stream was reset.
    Reset,
}

impl Failure {
    /// For the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Connect => "connect failed",
            Self::Connection => "connection lost",
            Self::Reset => "stream reset",
        }
    }
}

#[derive(Debug)]
struct Stream {
    request: RequestId,
    window: ReceiveWindow,
}

#[derive(Debug)]
struct Connection {
    id: ConnectionId,
    ready: bool,
    draining: bool,
    max_streams: usize,
    next_stream: StreamId,
    streams: BTreeMap<StreamId, Stream>,
    last_frame: Instant,
    ping_sent: Option<Instant>,
}

/// The connections of a client.
#[derive(Debug)]
pub struct Transport {
    process: ProcessId,
    /// The servers: one, or those behind a load balancer, which picks one for each connection.
    servers: Vec<ProcessId>,
    connections: Vec<Connection>,
    waiting: VecDeque<(RequestId, Rc<Request>)>,
    next_request: RequestId,
    /// Bodies are read when they arrive; otherwise the model reads them with [`Self::read`].
    pub reads_at_once: bool,
}

impl Transport {
    /// A transport without connections.
    pub fn new(process: ProcessId, servers: Vec<ProcessId>) -> Self {
        Self {
            process,
            servers,
            connections: Vec::new(),
            waiting: VecDeque::new(),
            next_request: 1,
            reads_at_once: true,
        }
    }

    /// Sends a request.
    pub fn submit(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        request: Rc<Request>,
    ) -> RequestId {
        let id = self.next_request;
        self.next_request += 1;
        self.waiting.push_back((id, request));
        self.flush(s, net);
        id
    }

    /// Gives a request up.
    pub fn cancel(&mut self, s: &mut Scheduler, net: &mut Network, request: RequestId) {
        self.waiting.retain(|waiting| waiting.0 != request);
        for connection in &mut self.connections {
            let stream = connection.streams.iter().find(|(_, open)| open.request == request);
            if let Some((&stream, _)) = stream {
                connection.streams.remove(&stream);
                net.send(s, connection.id, Side::Client, Frame::Reset(stream, ResetCode::Cancel));
            }
        }
        self.flush(s, net);
    }

    /// The client reads so many bytes of the body of a request.
    pub fn read(&mut self, s: &mut Scheduler, net: &mut Network, request: RequestId, bytes: u32) {
        for connection in &mut self.connections {
            let stream = connection.streams.iter_mut().find(|(_, open)| open.request == request);
            if let Some((&stream, open)) = stream
                && let Some(bytes) = open.window.read(bytes)
            {
                net.send(s, connection.id, Side::Client, Frame::WindowUpdate(stream, bytes));
            }
        }
    }

    /// Closes every connection. Its requests fail.
    pub fn close_all(&mut self, s: &mut Scheduler, net: &mut Network) -> Vec<(RequestId, Reply)> {
        let mut replies = Vec::new();
        for connection in std::mem::take(&mut self.connections) {
            net.abort(s, connection.id, Side::Client);
            let lost = connection.streams.into_values();
            replies.extend(lost.map(|open| (open.request, Reply::Failed(Failure::Connection))));
        }
        replies.extend(self.waiting.drain(..).map(|(id, _)| (id, Reply::Failed(Failure::Connect))));
        replies
    }

    /// Sends what waits, and connects if there is no connection for it.
    fn flush(&mut self, s: &mut Scheduler, net: &mut Network) {
        while let Some((id, request)) = self.waiting.pop_front() {
            let free = self
                .connections
                .iter_mut()
                .find(|c| c.ready && !c.draining && c.streams.len() < c.max_streams);
            let Some(connection) = free else {
                self.waiting.push_front((id, request));
                if self.connections.iter().all(|c| c.ready) {
                    self.connect(s, net);
                }
                return;
            };
            let stream = connection.next_stream;
            connection.next_stream += 2;
            let window = ReceiveWindow::new(STREAM_WINDOW);
            connection.streams.insert(stream, Stream { request: id, window });
            net.send(s, connection.id, Side::Client, Frame::Request(stream, request));
        }
        // A connection that drains ends with its last stream.
        let done = |c: &Connection| c.draining && c.streams.is_empty();
        for connection in self.connections.iter().filter(|c| done(c)) {
            net.close(s, connection.id, Side::Client);
        }
        self.connections.retain(|c| !done(c));
    }

    fn connect(&mut self, s: &mut Scheduler, net: &mut Network) {
        let alive: Vec<_> = self
            .servers
            .iter()
            .copied()
            .filter(|&p| net.process(p) != ProcessState::Dead)
            .collect();
        let servers = if alive.is_empty() { &self.servers } else { &alive };
        let server = servers[s.rng.usize(..servers.len())];
        let id = net.connect(s, self.process, server, false);
        self.connections.push(Connection {
            id,
            ready: false,
            draining: false,
            max_streams: 0,
            next_stream: 1,
            streams: BTreeMap::new(),
            last_frame: s.now,
            ping_sent: None,
        });
        s.timer(s.now + DIAL_TIMEOUT, self.process, Timer::Client(ClientTimer::Connection(id)));
    }

    /// Takes in what has arrived.
    pub fn arrived(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        id: ConnectionId,
        what: Arrival,
    ) -> Vec<(RequestId, Reply)> {
        let Some(at) = self.connections.iter().position(|c| c.id == id) else { return Vec::new() };
        let connection = &mut self.connections[at];
        connection.last_frame = s.now;
        let mut replies = Vec::new();
        let frame = match what {
            Arrival::Frame(frame) => frame,
            Arrival::Connected => {
                net.send(s, id, Side::Client, Frame::Hello { window: STREAM_WINDOW });
                return replies;
            }
            Arrival::Ended | Arrival::Lost => return self.lost(s, net, at),
        };
        match frame {
            Frame::Settings { max_streams } => {
                (connection.ready, connection.max_streams) = (true, max_streams);
                let at = s.now + IDLE_BEFORE_PING;
                s.timer(at, self.process, Timer::Client(ClientTimer::Connection(id)));
            }
            Frame::Pong(_) => connection.ping_sent = None,
            Frame::Goaway { .. } => connection.draining = true,
            Frame::Head(stream, head) => {
                let open = connection.streams.get(&stream);
                replies.extend(open.map(|open| (open.request, Reply::Head(head))));
            }
            Frame::Data(stream, data) => {
                let open = connection.streams.get_mut(&stream);
                if let Some(open) = open {
                    let reads = self.reads_at_once;
                    if let Some(bytes) = open.window.read(if reads { data.len() } else { 0 }) {
                        net.send(s, id, Side::Client, Frame::WindowUpdate(stream, bytes));
                    }
                    replies.push((open.request, Reply::Data(data)));
                }
            }
            Frame::End(stream) => {
                let open = connection.streams.remove(&stream);
                replies.extend(open.map(|open| (open.request, Reply::End)));
            }
            Frame::Reset(stream, _) => {
                let reply = Reply::Failed(Failure::Reset);
                let open = connection.streams.remove(&stream);
                replies.extend(open.map(|open| (open.request, reply)));
            }
            Frame::Response(stream, head, data) => {
                if let Some(Stream { request: id, .. }) = connection.streams.remove(&stream) {
                    replies.push((id, Reply::Head(head)));
                    replies.extend(data.map(|data| (id, Reply::Data(data))));
                    replies.push((id, Reply::End));
                }
            }
            Frame::Hello { .. } | Frame::Request(..) | Frame::WindowUpdate(..) | Frame::Ping(_) => {
            }
        }
        self.flush(s, net);
        replies
    }

    fn lost(&mut self, s: &mut Scheduler, net: &mut Network, at: usize) -> Vec<(RequestId, Reply)> {
        let connection = self.connections.remove(at);
        net.abort(s, connection.id, Side::Client);
        let lost = connection.streams.into_values();
        let mut replies: Vec<_> =
            lost.map(|open| (open.request, Reply::Failed(Failure::Connection))).collect();
        if !connection.ready {
            let waiting = self.waiting.drain(..);
            replies.extend(waiting.map(|(id, _)| (id, Reply::Failed(Failure::Connect))));
        }
        self.flush(s, net);
        replies
    }

    /// Takes in the end of a connection's timer.
    pub fn timer(
        &mut self,
        s: &mut Scheduler,
        net: &mut Network,
        id: ConnectionId,
    ) -> Vec<(RequestId, Reply)> {
        let Some(at) = self.connections.iter().position(|c| c.id == id) else { return Vec::new() };
        let connection = &mut self.connections[at];
        if !connection.ready {
            return self.lost(s, net, at);
        }
        let next = match connection.ping_sent {
            Some(sent) if s.now >= sent + PING_TIMEOUT => return self.lost(s, net, at),
            Some(sent) => sent + PING_TIMEOUT,
            None if s.now >= connection.last_frame + IDLE_BEFORE_PING => {
                connection.ping_sent = Some(s.now);
                net.send(s, id, Side::Client, Frame::Ping(0));
                s.now + PING_TIMEOUT
            }
            None => connection.last_frame + IDLE_BEFORE_PING,
        };
        s.timer(next, self.process, Timer::Client(ClientTimer::Connection(id)));
        Vec::new()
    }

    /// Number of connections.
    pub fn connection_count(&self) -> usize {
        self.connections.len()
    }
}
