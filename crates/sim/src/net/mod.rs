//! Hosts, processes, links and TCP connections between them.
//!
//! Kernels and processes are distinct: the kernel of a stopped process accepts connections and acknowledges bytes until
//! its receive buffer is full, and the process answers nothing.

mod coarse;
mod connections;
mod link;
mod tcp;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use jackstay_core::tcp_info::TcpInfo;

use self::connections::Connections;
pub use self::link::Link;
pub use self::tcp::Side;
use self::tcp::{Connection, Content, End, Segment};
use crate::http2::Frame;
use crate::scheduler::{Event, Scheduler};
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
    Segment { id: ConnectionId, from: Side, number: u64 },
    Ack { id: ConnectionId, to: Side, next: u64, gap: bool, window: u32 },
    Timeout { id: ConnectionId, side: Side },
    Probe { id: ConnectionId, from: Side },
    Reset { id: ConnectionId, to: Side },
    Message { id: ConnectionId, from: Side },
}

impl NetEvent {
    fn connection(self) -> ConnectionId {
        match self {
            Self::Syn { id }
            | Self::SynTimeout { id, .. }
            | Self::SynAnswer { id }
            | Self::Segment { id, .. }
            | Self::Ack { id, .. }
            | Self::Timeout { id, .. }
            | Self::Probe { id, .. }
            | Self::Reset { id, .. }
            | Self::Message { id, .. } => id,
        }
    }
}

/// An event on a connection, and the process that receives it.
#[derive(Debug)]
pub struct Delivery {
    /// The process.
    pub process: ProcessId,
    /// The connection.
    pub id: ConnectionId,
    /// What has happened.
    pub what: Arrival,
}

/// What has happened on a connection.
#[derive(Debug)]
pub enum Arrival {
    /// The connect has succeeded.
    Connected,
    /// A message.
    Frame(Frame),
    /// The peer has closed the connection.
    Ended,
    /// The connection was reset or refused, or the connect has timed out.
    Lost,
}

/// The network.
#[derive(Debug, Default)]
pub struct Network {
    hosts: usize,
    /// Links to each server: from each host.
    to_servers: Vec<Link>,
    /// Links from each server: to each host.
    from_servers: Vec<Link>,
    loopback: Vec<Link>,
    processes: Vec<(HostId, ProcessState)>,
    connections: Connections,
    /// Connections are not made of segments; see [`coarse`].
    coarse: bool,
    /// SYNs that have arrived at each server.
    pub connects: Vec<u64>,
    /// What the world has to pass to processes, oldest first.
    pub deliveries: VecDeque<Delivery>,
    /// Packets that were sent.
    pub packets: u64,
}

impl Network {
    /// A network of this number of hosts, of which the first ones are servers. Clients on a host reach their own host and
    /// the servers.
    pub fn new(hosts: usize, servers: usize) -> Self {
        let links = vec![Link::local_network(); hosts * servers];
        Self {
            hosts,
            to_servers: links.clone(),
            from_servers: links,
            loopback: vec![Link::loopback(); hosts],
            connects: vec![0; servers],
            ..Self::default()
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
        s: &mut Scheduler,
        from: ProcessId,
        to: ProcessId,
        thin: bool,
    ) -> ConnectionId {
        let (client, server) = (self.host_of(from), self.host_of(to));
        let rtt = self.link(client, server).latency + self.link(server, client).latency;
        let id = self.connections.push(Connection {
            ends: [
                End::new(client, from, thin, rtt, s.now),
                End::new(server, to, false, rtt, s.now),
            ],
            local: client == server,
            established: false,
            dropped: [false; 2],
            forgotten: false,
        });
        s.record(Entry::Connect { connection: id, from, to: server });
        self.send_syn(s, id, 0);
        id
    }

    /// Sends a message.
    pub fn send(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side, frame: Frame) {
        if self.coarse {
            return self.send_message(s, id, side, frame.bytes(), Content::Message(frame));
        }
        let segment =
            Segment { bytes: frame.bytes(), content: Content::Message(frame), repeated: false };
        self.queue_segment(s, id, side, segment);
    }

    /// Closes a connection after what was sent.
    pub fn close(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side) {
        if self.coarse {
            return self.close_coarsely(s, id, side);
        }
        let segment = Segment { bytes: 1, content: Content::Fin, repeated: false };
        self.queue_segment(s, id, side, segment);
        let end = self.connections[id].end(side);
        end.closed = true;
        end.unread.clear();
        end.unread_bytes = 0;
    }

    /// Resets a connection.
    pub fn abort(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side) {
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
    pub fn probe(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side) {
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
    pub fn set_process(&mut self, s: &mut Scheduler, process: ProcessId, state: ProcessState) {
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
    pub fn handle(&mut self, s: &mut Scheduler, event: NetEvent) {
        if !self.connections.contains(event.connection()) {
            return;
        }
        match event {
            NetEvent::Syn { id } => self.syn_arrives(s, id),
            NetEvent::SynTimeout { id, retries } => {
                let connection = &mut self.connections[id];
                if connection.established || connection.ends[0].closed {
                    return;
                }
                if retries > SYN_RETRIES {
                    return self.reset_arrives(s, id, Side::Client);
                }
                self.send_syn(s, id, retries);
            }
            NetEvent::SynAnswer { id } => {
                let connection = &mut self.connections[id];
                let end = &mut connection.ends[0];
                end.last_segment = s.now;
                if !std::mem::replace(&mut connection.established, true) && !end.closed {
                    let process = end.process;
                    s.record(Entry::ConnectEnded { connection: id, ok: true });
                    self.deliveries.push_back(Delivery { process, id, what: Arrival::Connected });
                }
            }
            NetEvent::Segment { id, from, number } => self.segment_arrives(s, id, from, number),
            NetEvent::Ack { id, to, next, gap, window } => {
                self.ack_arrives(s, id, to, (next, gap, window));
            }
            NetEvent::Timeout { id, side } => self.timeout(s, id, side),
            NetEvent::Probe { id, from } => {
                let end = self.connections[id].end(from.other());
                end.segments_in += 1;
                end.last_segment = s.now;
                if end.closed {
                    self.packet(s, id, from.other(), 40, NetEvent::Reset { id, to: from });
                } else {
                    self.send_ack(s, id, from.other());
                }
            }
            NetEvent::Reset { id, to } => self.reset_arrives(s, id, to),
            NetEvent::Message { id, from } => self.message_arrives(s, id, from),
        }
    }

    fn host_of(&self, process: ProcessId) -> HostId {
        self.processes[usize::from(process)].0
    }

    fn send_syn(&mut self, s: &mut Scheduler, id: ConnectionId, retries: u8) {
        self.packet(s, id, Side::Client, 60, NetEvent::Syn { id });
        let pause = SYN_TIMEOUT * (1 << retries);
        s.after(pause, Event::Net(NetEvent::SynTimeout { id, retries: retries + 1 }));
    }

    fn syn_arrives(&mut self, s: &mut Scheduler, id: ConnectionId) {
        let end = &mut self.connections[id].ends[1];
        let (host, process) = (end.host, end.process);
        end.last_segment = s.now;
        if let Some(count) = self.connects.get_mut(usize::from(host)) {
            *count += 1;
        }
        if self.process(process) == ProcessState::Dead {
            self.connections[id].ends[1].closed = true;
            return self.packet(s, id, Side::Server, 40, NetEvent::Reset { id, to: Side::Client });
        }
        self.packet(s, id, Side::Server, 60, NetEvent::SynAnswer { id });
    }

    /// Sends a packet, unless it is lost. Packets of one direction do not overtake each other.
    fn packet(
        &mut self,
        s: &mut Scheduler,
        id: ConnectionId,
        from: Side,
        bytes: u32,
        event: NetEvent,
    ) {
        self.packets += 1;
        let connection = &mut self.connections[id];
        let (sender, receiver) = connection.both(from);
        let (sends, receives) = (sender.host, receiver.host);
        if connection.dropped[from as usize] {
            return;
        }
        if connection.forgotten && !matches!(event, NetEvent::Reset { .. }) {
            // The device answers in place of the peer.
            return s.at(s.now, Event::Net(NetEvent::Reset { id, to: from }));
        }
        let Some(at) = self.link(sends, receives).arrival(bytes, s.now, &mut s.rng) else { return };
        let end = self.connections[id].end(from);
        end.last_arrival = at.max(end.last_arrival);
        let at = end.last_arrival;
        s.at(at, Event::Net(event));
    }

    fn queue_segment(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side, segment: Segment) {
        let end = self.connections[id].end(side);
        if end.closed {
            return;
        }
        end.unsent.push_back(segment);
        self.send_queued(s, id, side);
    }

    /// Sends what the window allows.
    fn send_queued(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side) {
        loop {
            let end = self.connections[id].end(side);
            if !end.may_send() {
                break;
            }
            let Some(segment) = end.unsent.pop_front() else { break };
            let number = end.first + end.in_flight.len() as u64;
            end.bytes_in_flight += segment.bytes;
            end.in_flight.push_back(segment);
            self.transmit(s, id, side, number);
        }
        self.arm_timer(s, id, side);
    }

    fn transmit(&mut self, s: &mut Scheduler, id: ConnectionId, from: Side, number: u64) {
        let end = self.connections[id].end(from);
        end.segments_out += 1;
        let bytes = end.in_flight[(number - end.first) as usize].bytes;
        self.packet(s, id, from, bytes, NetEvent::Segment { id, from, number });
    }

    /// Starts the retransmission timer if something waits for an acknowledgement or for the window.
    fn arm_timer(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side) {
        let connection = &mut self.connections[id];
        if connection.local {
            return;
        }
        let end = connection.end(side);
        if end.in_flight.is_empty() && end.unsent.is_empty() {
            end.timer_at = None;
            return;
        }
        let at = *end.timer_at.get_or_insert(s.now + end.rto);
        if !std::mem::replace(&mut end.timer_queued, true) {
            s.at(at, Event::Net(NetEvent::Timeout { id, side }));
        }
    }

    fn timeout(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        end.timer_queued = false;
        let Some(at) = end.timer_at else { return };
        if at > s.now {
            return self.arm_timer(s, id, side);
        }
        end.timed_out();
        end.timer_at = None;
        if let Some(first) = end.in_flight.front_mut() {
            first.repeated = true;
            end.retransmitted += 1;
            let (number, count) = (end.first, end.retransmits);
            s.record(Entry::Retransmit { connection: id, count });
            self.transmit(s, id, side, number);
        } else {
            // The window is closed.
            self.probe(s, id, side);
        }
        self.arm_timer(s, id, side);
    }

    fn segment_arrives(&mut self, s: &mut Scheduler, id: ConnectionId, from: Side, number: u64) {
        let connection = &mut self.connections[id];
        let local = connection.local;
        let (sender, receiver) = connection.both(from);
        receiver.segments_in += 1;
        receiver.data_segments_in += 1;
        receiver.last_segment = s.now;
        if receiver.closed {
            // What arrives for a closed socket resets the connection, except if both sides have closed it.
            if sender.closed {
                receiver.next = receiver.next.max(number + 1);
                return self.send_ack(s, id, from.other());
            }
            return self.packet(s, id, from.other(), 40, NetEvent::Reset { id, to: from });
        }
        if number > receiver.next {
            receiver.out_of_order += 1;
            if let Err(at) = receiver.early.binary_search(&number) {
                receiver.early.insert(at, number);
            }
        } else if number == receiver.next {
            receiver.last_data = s.now;
            loop {
                let Some((bytes, content)) = sender.take(receiver.next) else { break };
                receiver.next += 1;
                receiver.unread_bytes += bytes;
                receiver.unread.push_back((bytes, content));
                if receiver.early.first() != Some(&receiver.next) {
                    break;
                }
                receiver.early.remove(0);
            }
        }
        if local {
            sender.acknowledged(receiver.next);
            sender.last_segment = s.now;
            self.deliver(s, id, from.other());
            return self.send_queued(s, id, from);
        }
        self.deliver(s, id, from.other());
        self.send_ack(s, id, from.other());
    }

    fn send_ack(&mut self, s: &mut Scheduler, id: ConnectionId, from: Side) {
        let end = self.connections[id].end(from);
        let (next, gap, window) = (end.next, !end.early.is_empty(), end.receive_window());
        let to = from.other();
        self.packet(s, id, from, 40, NetEvent::Ack { id, to, next, gap, window });
    }

    fn ack_arrives(
        &mut self,
        s: &mut Scheduler,
        id: ConnectionId,
        to: Side,
        (next, gap, window): (u64, bool, u32),
    ) {
        let end = self.connections[id].end(to);
        end.segments_in += 1;
        end.last_segment = s.now;
        end.probes = 0;
        end.window = window;
        if end.acknowledged(next) || end.in_flight.is_empty() {
            end.path_works();
            end.timer_at = None;
        }
        // A later segment has arrived, so the first one is lost (RACK).
        if gap
            && end.first == next
            && let Some(first) = end.in_flight.front_mut()
            && !std::mem::replace(&mut first.repeated, true)
        {
            end.retransmitted += 1;
            let number = end.first;
            self.transmit(s, id, to, number);
        }
        self.send_queued(s, id, to);
    }

    fn reset_arrives(&mut self, s: &mut Scheduler, id: ConnectionId, to: Side) {
        let connection = &mut self.connections[id];
        let end = connection.end(to);
        end.last_segment = s.now;
        if end.closed {
            return end.clear();
        }
        end.clear();
        end.unread.push_back((0, Content::Reset));
        self.deliver(s, id, to);
    }

    /// Passes what has arrived to the process, if it runs.
    fn deliver(&mut self, s: &mut Scheduler, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        let process = end.process;
        if end.closed || self.processes[usize::from(process)].1 != ProcessState::Running {
            return;
        }
        let was_closed = end.receive_window() < tcp::MIN_WINDOW;
        while let Some((bytes, content)) = end.unread.pop_front() {
            end.unread_bytes -= bytes;
            let what = match content {
                Content::Message(frame) => Arrival::Frame(frame),
                Content::Fin => {
                    end.peer_ended = true;
                    s.record(Entry::Closed { connection: id, reset: false });
                    Arrival::Ended
                }
                Content::Reset => {
                    end.closed = true;
                    s.record(Entry::Closed { connection: id, reset: true });
                    Arrival::Lost
                }
                Content::Taken => continue,
            };
            self.deliveries.push_back(Delivery { process, id, what });
        }
        if was_closed {
            self.send_ack(s, id, side);
        }
        self.forget_if_closed(id);
    }
}
