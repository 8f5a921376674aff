//! The hosts with their links and processes, and the connections between them.

use std::io;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::connections::Connections;
use super::event::NetEvent;
use super::ids::{ConnectionId, HostId, ProcessId};
use super::link::Link;
use super::log::Entry;
use super::tcp::{Connection, End, Side};

/// Time until the first repetition of a SYN (Linux, `TCP_TIMEOUT_INIT`).
const SYN_TIMEOUT: Duration = Duration::from_secs(1);
/// Repetitions of a SYN after which the time doubles (Linux 6.5, `tcp_syn_linear_timeouts`).
const SYN_LINEAR_TIMEOUTS: u8 = 4;
/// Repetitions of a SYN (Linux, `tcp_syn_retries`), to which those are added.
const SYN_RETRIES: u8 = 6 + SYN_LINEAR_TIMEOUTS;

/// The network.
#[derive(Debug)]
pub(crate) struct Network {
    hosts: usize,
    /// Links to each server: from each host.
    to_servers: Vec<Link>,
    /// Links from each server: to each host.
    from_servers: Vec<Link>,
    loopback: Vec<Link>,
    /// The host of each process.
    processes: Vec<HostId>,
    pub(super) connections: Connections,
    /// SYNs that have arrived at each server.
    pub connects: Vec<u64>,
    /// Packets that were sent.
    pub packets: u64,
    /// Bytes that were sent.
    pub bytes: u64,
    /// The tasks that wait for a socket whose state has changed, in this order.
    pub(super) wakers: Vec<Waker>,
}

impl Network {
    /// A network of this number of hosts, of which the first ones are servers. Clients on a host reach their own host
    /// and the servers.
    pub fn new(hosts: usize, servers: usize) -> Self {
        let links = vec![Link::local_network(); hosts * servers];
        Self {
            hosts,
            to_servers: links.clone(),
            from_servers: links,
            loopback: vec![Link::loopback(); hosts],
            processes: Vec::new(),
            connections: Connections::default(),
            connects: vec![0; servers],
            packets: 0,
            bytes: 0,
            wakers: Vec::new(),
        }
    }

    /// Adds a process to a host.
    pub fn add_process(&mut self, host: HostId) -> ProcessId {
        self.processes.push(host);
        (self.processes.len() - 1) as ProcessId
    }

    /// The link from one host to another, of which one is a server.
    pub(super) fn link(&mut self, from: HostId, to: HostId) -> &mut Link {
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
        self.change_links_from(host, change);
    }

    /// Changes the links from a server's host, and leaves those to it as they are.
    pub fn change_links_from(&mut self, host: HostId, change: impl Fn(&mut Link)) {
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

    /// Adds a connection, before its SYN.
    pub(super) fn add_connection(
        &mut self,
        s: &mut Clock,
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

    /// Sends a keepalive probe, which the peer's kernel answers.
    pub(super) fn probe(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        end.probes = end.probes.saturating_add(1);
        end.segments_out += 1;
        self.packet(s, id, side, 40, NetEvent::Probe { id, from: side });
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

    /// The device on the path knows the connections to a host again.
    pub fn remember_flows(&mut self, host: HostId) {
        for connection in self.connections.iter_mut() {
            if connection.ends[1].host == host {
                (connection.forgotten, connection.dropped) = (false, [false; 2]);
            }
        }
    }

    /// Takes in an event.
    pub(super) fn handle(&mut self, s: &mut Clock, event: NetEvent) {
        if !self.connections.contains(event.connection()) {
            return;
        }
        match event {
            NetEvent::Syn { id, sent_at } => self.syn_arrives(s, id, sent_at),
            NetEvent::SynTimeout { id, retries } => self.syn_times_out(s, id, retries),
            NetEvent::SynAnswer { id, echo } => self.syn_answer_arrives(s, id, echo),
            NetEvent::Segment { id, from, number, ack } => {
                self.segment_arrives(s, id, from, (number, ack));
            }
            NetEvent::Ack { id, to, ack } => self.ack_arrives(s, id, to, ack),
            NetEvent::DelayedAck { id, from } => self.delayed_ack_due(s, id, from),
            NetEvent::Timeout { id, side } => self.timeout(s, id, side),
            NetEvent::Probe { id, from } => {
                let end = self.connections[id].end(from.other());
                end.segments_in += 1;
                end.last_segment = s.now();
                if end.closed && end.socket.reset {
                    self.packet(s, id, from.other(), 40, NetEvent::Reset { id, to: from });
                } else {
                    self.send_ack(s, id, from.other());
                }
            }
            NetEvent::Reset { id, to } => self.reset_arrives(s, id, to),
            NetEvent::SynAnswerTimeout { id, retries } => self.syn_answer_times_out(s, id, retries),
            NetEvent::Keepalive { id, side } => self.keepalive_due(s, id, side),
            // The layer of sockets accepts the connection before this.
            NetEvent::Established { id } => self.connections[id].ends[1].last_segment = s.now(),
        }
    }

    pub(super) fn host_of(&self, process: ProcessId) -> HostId {
        self.processes[usize::from(process)]
    }

    pub(super) fn send_syn(&mut self, s: &mut Clock, id: ConnectionId, retries: u8) {
        self.packet(s, id, Side::Client, 60, NetEvent::Syn { id, sent_at: s.now() });
        let pause = SYN_TIMEOUT * (1 << retries.saturating_sub(SYN_LINEAR_TIMEOUTS));
        s.queue(s.now() + pause, NetEvent::SynTimeout { id, retries: retries + 1 });
    }

    fn syn_times_out(&mut self, s: &mut Clock, id: ConnectionId, retries: u8) {
        let connection = &self.connections[id];
        if connection.established || connection.ends[0].closed {
            return self.forget_if_over(id);
        }
        if retries <= SYN_RETRIES {
            self.send_syn(s, id, retries);
        } else {
            self.fail(s, id, Side::Client, io::ErrorKind::TimedOut);
        }
    }

    fn syn_arrives(&mut self, s: &mut Clock, id: ConnectionId, sent_at: Instant) {
        let end = &mut self.connections[id].ends[1];
        end.socket.note_time_stamp(0, sent_at);
        let (host, is_answered) = (end.host, end.socket.answered);
        end.last_segment = s.now();
        if let Some(count) = self.connects.get_mut(usize::from(host)) {
            *count += 1;
        }
        if !is_answered {
            self.connections[id].ends[1].closed = true;
            return self.packet(s, id, Side::Server, 40, NetEvent::Reset { id, to: Side::Client });
        }
        self.send_syn_answer(s, id);
    }

    pub(super) fn send_syn_answer(&mut self, s: &mut Clock, id: ConnectionId) {
        let echo = self.connections[id].ends[1].socket.time_stamp;
        self.packet(s, id, Side::Server, 60, NetEvent::SynAnswer { id, echo });
    }

    fn syn_answer_arrives(&mut self, s: &mut Clock, id: ConnectionId, echo: Option<Instant>) {
        self.connections[id].ends[0].last_segment = s.now();
        self.connections[id].ends[0].socket.handshake_at = echo;
        self.complete_connect(s, id);
    }
}
