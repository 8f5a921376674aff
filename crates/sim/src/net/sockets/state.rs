//! Hosts with their addresses, processes, listeners and connections.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::task::Waker;
use std::time::Instant;

use crate::net::balancer::{self, Balancer};
use crate::net::clock::Clock;
use crate::net::event::NetEvent;
use crate::net::log::Entry;
use crate::net::network::Network;
use crate::net::{ConnectionId, HostId, ProcessId, ProcessState, Side, SocketOptions};

/// Connections that wait to be accepted at most (`net.core.somaxconn` of Linux). SYNs above it are dropped.
const MAX_BACKLOG: usize = 4096;
/// The ports of clients (`net.ipv4.ip_local_port_range` of Linux).
const EPHEMERAL_PORTS: std::ops::RangeInclusive<u16> = 32_768..=60_999;
/// The process of the server's end before a listener has answered.
const NO_PROCESS: ProcessId = ProcessId::MAX;

/// The address of a listening socket, and its number, because a later one may have the same address.
#[derive(Debug, Clone, Copy)]
pub(super) struct ListenerPlace {
    pub(super) host: HostId,
    pub(super) port: u16,
    number: u64,
}

/// A listening socket.
#[derive(Debug)]
struct ListenerState {
    number: u64,
    process: ProcessId,
    options: SocketOptions,
    /// Established connections that were not accepted, oldest first.
    backlog: VecDeque<ConnectionId>,
    waker: Option<Waker>,
}

/// See the module.
#[derive(Debug)]
pub(super) struct State {
    pub(super) net: Network,
    pub(super) clock: Clock,
    pub(super) driver: Option<Waker>,
    hosts: usize,
    servers: usize,
    listeners: BTreeMap<(HostId, u16), ListenerState>,
    listeners_so_far: u64,
    /// The port that the next client on each host has.
    next_ports: Vec<u16>,
    /// The addresses of the client and of the server of each connection.
    addresses: Vec<[SocketAddr; 2]>,
    /// The users of processes, as far as they matter.
    pub(super) users: BTreeMap<ProcessId, u32>,
    /// The connects so far: that of each connection.
    pub(super) connects: Vec<Connect>,
    pub(super) balancer: Option<Balancer>,
}

/// A connect of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connect {
    /// The process.
    pub process: ProcessId,
    /// Where it connects to.
    pub to: SocketAddr,
    /// The host that it reaches, if there is one.
    pub host: Option<HostId>,
    /// When it began.
    pub at: Instant,
    /// Whether the process has learned that the connection is established.
    pub established: bool,
    /// When the process has closed it.
    pub closed: Option<Instant>,
}

impl State {
    pub(super) fn new(seed: u64, start: Instant, hosts: usize, servers: usize) -> Self {
        Self {
            net: Network::new(hosts, servers),
            clock: Clock::new(seed, start),
            driver: None,
            hosts,
            servers,
            listeners: BTreeMap::new(),
            listeners_so_far: 0,
            next_ports: vec![*EPHEMERAL_PORTS.start(); hosts],
            addresses: Vec::new(),
            users: BTreeMap::new(),
            connects: Vec::new(),
            balancer: None,
        }
    }

    /// The tasks that have to be woken, in this order.
    pub(super) fn take_wakers(&mut self) -> Vec<Waker> {
        let mut wakers = self.net.take_wakers();
        if std::mem::take(&mut self.clock.has_earlier_event) {
            wakers.extend(self.driver.clone());
        }
        wakers
    }

    pub(super) fn run_until(&mut self, until: Instant) {
        while let Some(event) = self.clock.next(until) {
            self.handle(event);
        }
        self.clock.now = until;
        self.clock.has_earlier_event = false;
    }

    fn handle(&mut self, event: NetEvent) {
        match event {
            NetEvent::Syn { id, .. } if !self.net.connections.contains(id) => return,
            NetEvent::Syn { id, .. } if !self.syn_arrives(id) => return,
            NetEvent::Established { id }
            | NetEvent::Segment { id, from: Side::Client, .. }
            | NetEvent::Probe { id, from: Side::Client }
            | NetEvent::Ack { id, to: Side::Server, .. } => self.establish(id),
            _ => {}
        }
        self.net.handle(&mut self.clock, event);
    }

    /// The listener of a connection answers its SYN. Without one, TCP refuses it. Returns whether it is not dropped.
    fn syn_arrives(&mut self, id: ConnectionId) -> bool {
        let end = self.net.connections[id].end(Side::Server);
        if end.closed || end.socket.answered {
            return true;
        }
        let place = (end.host, self.addresses[id as usize][1].port());
        let Some(listener) = self.listeners.get(&place) else { return true };
        if listener.backlog.len() >= MAX_BACKLOG {
            return false;
        }
        end.process = listener.process;
        let options = listener.options;
        self.net.answer_syn(&mut self.clock, id, options);
        true
    }

    /// The handshake of a connection is complete, so its listener may accept it.
    fn establish(&mut self, id: ConnectionId) {
        if !self.net.connections.contains(id) {
            return;
        }
        let end = self.net.connections[id].end(Side::Server);
        if end.closed || end.socket.accepted || !end.socket.answered {
            return;
        }
        let process = end.process;
        let place = (end.host, self.addresses[id as usize][1].port());
        let Some(listener) = self.listeners.get_mut(&place) else {
            return self.net.reset_socket(&mut self.clock, id, Side::Server);
        };
        (end.socket.accepted, end.socket.owned) = (true, true);
        listener.backlog.push_back(id);
        self.net.wakers.extend(listener.waker.take());
        self.clock.record(Entry::Accepted { connection: id, process });
        self.net.complete_handshake(&mut self.clock, id, Side::Server);
    }

    pub(super) fn listen(
        &mut self,
        process: ProcessId,
        port: u16,
        options: SocketOptions,
    ) -> io::Result<ListenerPlace> {
        let host = self.net.host_of(process);
        let port = if port == 0 { self.free_port(host)? } else { port };
        if self.listeners.contains_key(&(host, port)) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        self.listeners_so_far += 1;
        let number = self.listeners_so_far;
        let (backlog, waker) = (VecDeque::new(), None);
        let listener = ListenerState { number, process, options, backlog, waker };
        self.listeners.insert((host, port), listener);
        self.clock.record(Entry::Listens { process, port });
        Ok(ListenerPlace { host, port, number })
    }

    fn listener(&mut self, place: ListenerPlace) -> Option<&mut ListenerState> {
        let listener = self.listeners.get_mut(&(place.host, place.port))?;
        (listener.number == place.number).then_some(listener)
    }

    /// Takes a connection from the accept queue. If there is none, `waker` is woken for the next one.
    pub(super) fn accept(&mut self, place: ListenerPlace, waker: &Waker) -> Option<ConnectionId> {
        let listener = self.listener(place)?;
        let accepted = listener.backlog.pop_front();
        if accepted.is_none() {
            set_waker(&mut listener.waker, waker);
        }
        accepted
    }

    /// Closes a listening socket, if it is open. Returns the connections that were not accepted.
    pub(super) fn close_listener(&mut self, place: ListenerPlace) -> VecDeque<ConnectionId> {
        if self.listener(place).is_none() {
            return VecDeque::new();
        }
        let listener = self.listeners.remove(&(place.host, place.port));
        listener.map(|listener| listener.backlog).unwrap_or_default()
    }

    /// Resets connections that were not accepted, as the kernel does when their listening socket is closed.
    pub(super) fn reset_backlog(&mut self, backlog: VecDeque<ConnectionId>) {
        for id in backlog {
            let end = self.net.connections[id].end(Side::Server);
            end.socket.resets_when_closed = true;
            self.net.close_socket(&mut self.clock, id, Side::Server);
        }
    }

    /// The host that an address belongs to, as seen from `from`. `None` if no such host exists, so that packets to it
    /// are lost.
    fn route(&mut self, from: HostId, to: IpAddr) -> io::Result<Option<HostId>> {
        if let Some(balancer) = self.balancer.as_mut().filter(|_| to == balancer::ADDRESS) {
            return Ok(balancer.select(from));
        }
        let IpAddr::V4(to) = to else { return Err(io::ErrorKind::NetworkUnreachable.into()) };
        if to.is_loopback() {
            return Ok(Some(from));
        }
        let Some(number) =
            to.to_bits().checked_sub((10 << 24) + 1).filter(|_| to.octets()[0] == 10)
        else {
            return Err(io::ErrorKind::NetworkUnreachable.into());
        };
        let number = number as usize;
        if number >= self.hosts {
            return Ok(None);
        }
        let is_linked = number == usize::from(from)
            || number < self.servers
            || usize::from(from) < self.servers;
        if is_linked {
            Ok(Some(number as HostId))
        } else {
            Err(io::ErrorKind::NetworkUnreachable.into())
        }
    }

    pub(super) fn connect(
        &mut self,
        process: ProcessId,
        to: SocketAddr,
        options: SocketOptions,
    ) -> io::Result<ConnectionId> {
        let host = self.net.host_of(process);
        let server = self.route(host, to.ip())?;
        let port = self.free_port(host)?;
        let own =
            if to.ip().is_loopback() { IpAddr::V4(Ipv4Addr::LOCALHOST) } else { address_of(host) };
        let peer = (server.unwrap_or(host), NO_PROCESS);
        let id = self.net.add_connection(&mut self.clock, process, peer, options.thin);
        self.addresses.push([SocketAddr::new(own, port), to]);
        let at = self.clock.now;
        let host = server;
        self.connects.push(Connect { process, to, host, at, established: false, closed: None });
        let connection = &mut self.net.connections[id];
        connection.dropped = [server.is_none(); 2];
        let socket = &mut connection.end(Side::Client).socket;
        socket.owned = true;
        socket.set_options(options);
        self.net.send_syn(&mut self.clock, id, 0);
        Ok(id)
    }

    /// The next port of a host on which no socket listens. Ports are used again after all others.
    fn free_port(&mut self, host: HostId) -> io::Result<u16> {
        for _ in EPHEMERAL_PORTS {
            let next = &mut self.next_ports[usize::from(host)];
            let port = *next;
            *next =
                if port == *EPHEMERAL_PORTS.end() { *EPHEMERAL_PORTS.start() } else { port + 1 };
            if !self.listeners.contains_key(&(host, port)) {
                return Ok(port);
            }
        }
        Err(io::ErrorKind::AddrNotAvailable.into())
    }

    pub(super) fn address(&self, id: ConnectionId, side: Side) -> SocketAddr {
        self.addresses[id as usize][side as usize]
    }

    /// The user of the process at the other end, if it is on the same host and its user is known.
    pub(super) fn peer_user(&mut self, id: ConnectionId, side: Side) -> Option<u32> {
        if !self.net.connections.contains(id) || !self.net.connections[id].local {
            return None;
        }
        let process = self.net.connections[id].end(side.other()).process;
        self.users.get(&process).copied()
    }

    pub(super) fn set_process(&mut self, process: ProcessId, state: ProcessState) {
        let what = match state {
            ProcessState::Running => "runs",
            ProcessState::Stopped => "is stopped",
            ProcessState::Dead => "is killed",
        };
        self.clock.record(Entry::Process { process, what });
        if state == ProcessState::Dead {
            self.close_all_sockets(process);
        }
    }

    fn close_all_sockets(&mut self, process: ProcessId) {
        let places: Vec<_> = self
            .listeners
            .iter()
            .filter(|(_, listener)| listener.process == process)
            .map(|(place, _)| *place)
            .collect();
        for place in places {
            if let Some(listener) = self.listeners.remove(&place) {
                self.reset_backlog(listener.backlog);
            }
        }
        for id in self.net.connections.ids() {
            for side in [Side::Client, Side::Server] {
                if self.net.connections.contains(id)
                    && self.net.connections[id].end(side).process == process
                {
                    self.net.close_socket(&mut self.clock, id, side);
                }
            }
        }
    }
}

/// The address of a host.
pub(super) fn address_of(host: HostId) -> IpAddr {
    IpAddr::V4(Ipv4Addr::from_bits((10 << 24) + u32::from(host) + 1))
}

/// Stores the waker of the task that waits now, in place of the one before.
pub(super) fn set_waker(slot: &mut Option<Waker>, waker: &Waker) {
    match slot {
        Some(stored) => stored.clone_from(waker),
        None => *slot = Some(waker.clone()),
    }
}
