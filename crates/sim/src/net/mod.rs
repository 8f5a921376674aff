//! Hosts, processes, links and TCP connections between them.
//!
//! Kernels and processes are distinct: the kernel of a stopped process accepts connections and acknowledges bytes until
//! its receive buffer is full, and the process answers nothing.

mod coarse;
mod connections;
mod lifecycle;
mod link;
mod payload;
mod segments;
mod socket_state;
#[cfg(feature = "shell")]
pub mod sockets;
mod tcp;

use std::collections::VecDeque;
use std::io;
use std::task::Waker;
use std::time::{Duration, Instant};

use jackstay_core::tcp_info::TcpInfo;

use self::connections::Connections;
pub use self::link::Link;
pub use self::payload::{Payload, Schedule};
pub use self::socket_state::{Keepalive, SocketOptions};
pub use self::tcp::Side;
use self::tcp::{Connection, Content, End, Segment};
use crate::http2::Frame;
use crate::trace::Entry;

/// A host.
pub type HostId = u16;
/// A process on a host.
pub type ProcessId = u16;
/// A connection. Numbers are not used again.
pub type ConnectionId = u32;

/// Time until the first repetition of a SYN; it doubles (Linux, `TCP_TIMEOUT_INIT`).
const SYN_TIMEOUT: Duration = Duration::from_secs(1);
/// Repetitions of a SYN (Linux, `tcp_syn_retries`).
const SYN_RETRIES: u8 = 6;

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// It runs.
    Running,
    /// SIGSTOP.
    Stopped,
    /// SIGKILL: its kernel refuses connections.
    Dead,
}

/// An event of the network.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // packets and timers, named as in TCP
pub enum NetEvent {
    Syn { id: ConnectionId },
    SynTimeout { id: ConnectionId, retries: u8 },
    SynAnswer { id: ConnectionId },
    SynAnswerTimeout { id: ConnectionId, retries: u8 },
    Established { id: ConnectionId },
    Segment { id: ConnectionId, from: Side, number: u64 },
    Ack { id: ConnectionId, to: Side, next: u64, gap: bool, window: u32 },
    Timeout { id: ConnectionId, side: Side },
    Probe { id: ConnectionId, from: Side },
    Keepalive { id: ConnectionId, side: Side },
    Reset { id: ConnectionId, to: Side },
    Message { id: ConnectionId, from: Side },
}

impl NetEvent {
    fn connection(self) -> ConnectionId {
        match self {
            Self::Syn { id }
            | Self::SynTimeout { id, .. }
            | Self::SynAnswer { id }
            | Self::SynAnswerTimeout { id, .. }
            | Self::Established { id }
            | Self::Segment { id, .. }
            | Self::Ack { id, .. }
            | Self::Timeout { id, .. }
            | Self::Probe { id, .. }
            | Self::Keepalive { id, .. }
            | Self::Reset { id, .. }
            | Self::Message { id, .. } => id,
        }
    }
}

/// An event on a connection, and the process that receives it.
#[derive(Debug)]
pub struct Delivery<P = Frame> {
    /// The process.
    pub process: ProcessId,
    /// The connection.
    pub id: ConnectionId,
    /// What has happened.
    pub what: Arrival<P>,
}

/// What has happened on a connection.
#[derive(Debug)]
pub enum Arrival<P = Frame> {
    /// The connect has succeeded.
    Connected,
    /// A message.
    Frame(P),
    /// The peer has closed the connection.
    Ended,
    /// The connection was reset or refused, or the connect has timed out.
    Lost,
}

/// The network.
#[derive(Debug)]
pub struct Network<P = Frame> {
    hosts: usize,
    /// Links to each server: from each host.
    to_servers: Vec<Link>,
    /// Links from each server: to each host.
    from_servers: Vec<Link>,
    loopback: Vec<Link>,
    processes: Vec<(HostId, ProcessState)>,
    connections: Connections<P>,
    /// Connections are not made of segments; see [`coarse`].
    coarse: bool,
    /// SYNs that have arrived at each server.
    pub connects: Vec<u64>,
    /// What the world has to pass to processes, oldest first.
    pub deliveries: VecDeque<Delivery<P>>,
    /// Packets that were sent.
    pub packets: u64,
    /// Bytes that were sent.
    pub bytes: u64,
    /// The tasks that wait for a socket whose state has changed, in this order.
    wakers: Vec<Waker>,
}

impl<P: Payload> Network<P> {
    /// A network of this number of hosts, of which the first ones are servers. Clients on a host reach their own host and
    /// the servers.
    pub fn new(hosts: usize, servers: usize) -> Self {
        let links = vec![Link::local_network(); hosts * servers];
        Self {
            hosts,
            to_servers: links.clone(),
            from_servers: links,
            loopback: vec![Link::loopback(); hosts],
            processes: Vec::new(),
            connections: Connections::default(),
            coarse: false,
            connects: vec![0; servers],
            deliveries: VecDeque::new(),
            packets: 0,
            bytes: 0,
            wakers: Vec::new(),
        }
    }

    /// Connections are not made of segments from now on.
    pub(crate) fn be_coarse(&mut self) {
        self.coarse = true;
    }

    /// Adds a process to a host.
    pub fn add_process(&mut self, host: HostId) -> ProcessId {
        self.processes.push((host, ProcessState::Running));
        (self.processes.len() - 1) as ProcessId
    }

    /// The link from one host to another, of which one is a server.
    fn link(&mut self, from: HostId, to: HostId) -> &mut Link {
        let (from, to, servers) = (usize::from(from), usize::from(to), self.connects.len());
        if from == to {
            &mut self.loopback[from]
        } else if to < servers {
            &mut self.to_servers[to * self.hosts + from]
        } else {
            &mut self.from_servers[from * self.hosts + to]
        }
    }

    /// Changes all links between hosts.
    pub fn change_all_links(&mut self, change: impl Fn(&mut Link)) {
        self.to_servers.iter_mut().chain(&mut self.from_servers).for_each(change);
    }

    /// Changes all links to and from a server's host.
    pub fn change_links(&mut self, host: HostId, change: impl Fn(&mut Link)) {
        self.change_links_to(host, &change);
        for other in (0..self.hosts as HostId).filter(|&other| other != host) {
            change(self.link(host, other));
        }
    }

    /// Changes the links to a server's host, and leaves those from it as they are.
    pub fn change_links_to(&mut self, host: HostId, change: impl Fn(&mut Link)) {
        for other in (0..self.hosts as HostId).filter(|&other| other != host) {
            change(self.link(other, host));
        }
    }

    /// The state of a process.
    pub fn process(&self, process: ProcessId) -> ProcessState {
        self.processes[usize::from(process)].1
    }

    /// Connects to a process that accepts connections. `thin`: with `TCP_THIN_LINEAR_TIMEOUTS`.
    pub fn connect(
        &mut self,
        s: &mut impl Schedule,
        from: ProcessId,
        to: ProcessId,
        thin: bool,
    ) -> ConnectionId {
        let id = self.add_connection(s, from, (self.host_of(to), to), thin);
        self.send_syn(s, id, 0);
        id
    }

    /// Adds a connection, before its SYN.
    fn add_connection(
        &mut self,
        s: &mut impl Schedule,
        from: ProcessId,
        (server, to): (HostId, ProcessId),
        thin: bool,
    ) -> ConnectionId {
        let client = self.host_of(from);
        let rtt = self.link(client, server).latency + self.link(server, client).latency;
        let id = self.connections.push(Connection {
            ends: [
                End::new(client, from, thin, rtt, s.now()),
                End::new(server, to, false, rtt, s.now()),
            ],
            local: client == server,
            established: false,
            dropped: [false; 2],
            forgotten: false,
        });
        s.record(Entry::Connect { connection: id, from, to: server });
        id
    }

    /// Sends what is one segment.
    fn send_payload(
        &mut self,
        s: &mut impl Schedule,
        id: ConnectionId,
        side: Side,
        (bytes, payload): (u32, P),
    ) {
        if self.coarse {
            return self.send_message(s, id, side, bytes, Content::Message(payload));
        }
        self.queue_segment(s, id, side, Segment::new(bytes, Content::Message(payload)));
    }

    /// Closes a connection after what was sent.
    pub fn close(&mut self, s: &mut impl Schedule, id: ConnectionId, side: Side) {
        if self.coarse {
            return self.close_coarsely(s, id, side);
        }
        self.queue_segment(s, id, side, Segment::fin());
        let end = self.connections[id].end(side);
        end.closed = true;
        end.clear_unread();
    }

    /// Resets a connection.
    pub fn abort(&mut self, s: &mut impl Schedule, id: ConnectionId, side: Side) {
        if !self.connections.contains(id) {
            return;
        }
        let connection = &mut self.connections[id];
        let end = connection.end(side);
        if !std::mem::replace(&mut end.closed, true) && connection.established {
            self.packet(s, id, side, 40, NetEvent::Reset { id, to: side.other() });
        }
        self.connections[id].end(side).clear();
        self.forget_if_closed(id);
    }

    /// Sends a keepalive probe, which the peer's kernel answers.
    pub fn probe(&mut self, s: &mut impl Schedule, id: ConnectionId, side: Side) {
        if self.coarse {
            return self.probe_coarsely(s, id, side);
        }
        let end = self.connections[id].end(side);
        end.probes = end.probes.saturating_add(1);
        end.segments_out += 1;
        self.packet(s, id, side, 40, NetEvent::Probe { id, from: side });
    }

    /// The kernel's figures.
    pub fn tcp_info(&self, id: ConnectionId, side: Side, now: Instant) -> TcpInfo {
        if self.coarse {
            return self.coarse_info(id, side, now);
        }
        self.connections[id].ends[side as usize].info(now)
    }

    /// A device on the path forgets the established connections to a host: it drops their packets, or resets them when
    /// one passes. New connections work.
    pub fn forget_flows(&mut self, host: HostId, dropped: [bool; 2]) {
        for connection in self.connections.iter_mut() {
            if connection.established && connection.ends[1].host == host && !connection.local {
                connection.forgotten = dropped == [false; 2];
                connection.dropped = dropped;
            }
        }
    }

    /// Stops a process, lets it continue, kills or restarts it. Its kernel closes the connections of a killed one.
    pub fn set_process(&mut self, s: &mut impl Schedule, process: ProcessId, state: ProcessState) {
        self.processes[usize::from(process)].1 = state;
        for id in self.connections.ids() {
            for side in [Side::Client, Side::Server] {
                if !self.connections.contains(id) {
                    break;
                }
                let end = &self.connections[id].ends[side as usize];
                if end.process != process || end.closed || !self.connections[id].established {
                    continue;
                }
                match state {
                    ProcessState::Running => self.deliver(s, id, side),
                    ProcessState::Dead => self.close(s, id, side),
                    ProcessState::Stopped => {}
                }
            }
        }
    }

    /// Whether neither end has closed a connection.
    pub fn is_open(&self, id: ConnectionId) -> bool {
        self.connections.contains(id) && self.connections[id].ends.iter().all(|end| !end.closed)
    }

    /// Takes in an event.
    pub fn handle(&mut self, s: &mut impl Schedule, event: NetEvent) {
        if !self.connections.contains(event.connection()) {
            return;
        }
        match event {
            NetEvent::Syn { id } => self.syn_arrives(s, id),
            NetEvent::SynTimeout { id, retries } => self.syn_times_out(s, id, retries),
            NetEvent::SynAnswer { id } => self.syn_answer_arrives(s, id),
            NetEvent::Segment { id, from, number } => self.segment_arrives(s, id, from, number),
            NetEvent::Ack { id, to, next, gap, window } => {
                self.ack_arrives(s, id, to, (next, gap, window));
            }
            NetEvent::Timeout { id, side } => self.timeout(s, id, side),
            NetEvent::Probe { id, from } => {
                let end = self.connections[id].end(from.other());
                end.segments_in += 1;
                end.last_segment = s.now();
                if end.closed && (!P::IS_READ || end.socket.reset) {
                    self.packet(s, id, from.other(), 40, NetEvent::Reset { id, to: from });
                } else {
                    self.send_ack(s, id, from.other());
                }
            }
            NetEvent::Reset { id, to } => self.reset_arrives(s, id, to),
            NetEvent::Message { id, from } => self.message_arrives(s, id, from),
            NetEvent::SynAnswerTimeout { id, retries } => self.syn_answer_times_out(s, id, retries),
            NetEvent::Keepalive { id, side } => self.keepalive_due(s, id, side),
            // The layer of sockets accepts the connection before this.
            NetEvent::Established { id } => self.connections[id].ends[1].last_segment = s.now(),
        }
    }

    fn host_of(&self, process: ProcessId) -> HostId {
        self.processes[usize::from(process)].0
    }

    fn send_syn(&mut self, s: &mut impl Schedule, id: ConnectionId, retries: u8) {
        let is_first = retries == 0;
        self.connections[id].ends[0].socket.handshake_at = is_first.then(|| s.now());
        self.packet(s, id, Side::Client, 60, NetEvent::Syn { id });
        let pause = SYN_TIMEOUT * (1 << retries);
        s.queue(s.now() + pause, NetEvent::SynTimeout { id, retries: retries + 1 });
    }

    fn syn_times_out(&mut self, s: &mut impl Schedule, id: ConnectionId, retries: u8) {
        let connection = &self.connections[id];
        if connection.established || connection.ends[0].closed {
            return self.forget_if_over(id);
        }
        if retries <= SYN_RETRIES {
            self.send_syn(s, id, retries);
        } else if P::IS_READ {
            self.fail(s, id, Side::Client, io::ErrorKind::TimedOut);
        } else {
            self.reset_arrives(s, id, Side::Client);
        }
    }

    fn syn_arrives(&mut self, s: &mut impl Schedule, id: ConnectionId) {
        let end = &mut self.connections[id].ends[1];
        let (host, process, is_answered) = (end.host, end.process, end.socket.answered);
        end.last_segment = s.now();
        if let Some(count) = self.connects.get_mut(usize::from(host)) {
            *count += 1;
        }
        let accepts =
            if P::IS_READ { is_answered } else { self.process(process) != ProcessState::Dead };
        if !accepts {
            self.connections[id].ends[1].closed = true;
            return self.packet(s, id, Side::Server, 40, NetEvent::Reset { id, to: Side::Client });
        }
        self.packet(s, id, Side::Server, 60, NetEvent::SynAnswer { id });
    }

    fn syn_answer_arrives(&mut self, s: &mut impl Schedule, id: ConnectionId) {
        let connection = &mut self.connections[id];
        let end = &mut connection.ends[0];
        end.last_segment = s.now();
        if P::IS_READ {
            return self.complete_connect(s, id);
        }
        if !std::mem::replace(&mut connection.established, true) && !end.closed {
            let process = end.process;
            s.record(Entry::ConnectEnded { connection: id, ok: true });
            self.deliveries.push_back(Delivery { process, id, what: Arrival::Connected });
        }
    }
}

impl Network {
    /// Sends a message.
    pub fn send(&mut self, s: &mut impl Schedule, id: ConnectionId, side: Side, frame: Frame) {
        self.send_payload(s, id, side, (frame.bytes(), frame));
    }
}
