//! Everything in a run: network, apiservers, nodes and clients, and the loop that passes events to them.

use std::time::Duration;

use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::pool::UNAVAILABLE_AFTER;

use crate::apiserver::{Apiserver, Resource, Store};
use crate::client::{Client, Surroundings};
use crate::faults::Fault;
use crate::http2::Write;
use crate::invariants::Findings;
use crate::net::{HostId, Network, ProcessId, ProcessState};
use crate::node::{Io, Node};
use crate::scheduler::{Event, Scheduler, Timer};

/// The longest time that a request waits for a stream: the pool answers it at its deadline, not at its next tick.
const LONGEST_WAIT: Duration = UNAVAILABLE_AFTER.saturating_add(Duration::from_millis(1));

/// Pods in the store.
pub const PODS: u32 = 20;
/// Config maps in the store that every client may write.
pub const CONFIG_MAPS: u32 = 20;

/// Secrets in the store, if there are bulk readers. Their size exceeds the window of a slow reader when it was opened
/// again by a little, so that a node holds the end of the list.
pub const SECRETS: u32 = 4_300;

/// Events of one moment, above which a process wakes itself without end.
const MAX_EVENTS_AT_ONCE: u32 = 50_000;

/// What a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The apiserver of this number.
    Server(usize),
    /// The node of this number.
    Node(usize),
    /// The client of this number.
    Client(usize),
}

/// A run.
#[derive(Debug)]
pub struct World {
    /// Time, random numbers and log.
    pub s: Scheduler,
    /// The network.
    pub net: Network,
    /// The store.
    pub store: Store,
    /// The apiservers. Their hosts have the same numbers.
    pub servers: Vec<Apiserver>,
    /// The nodes.
    pub nodes: Vec<Node>,
    /// The clients.
    pub clients: Vec<Client>,
    /// What the run has shown.
    pub findings: Findings,
    /// Secrets in the store.
    pub(crate) secrets: u32,
    pub(crate) roles: Vec<Role>,
    pub(crate) faults: Vec<Fault>,
    /// Timers that wait for stopped processes.
    waiting: Vec<(ProcessId, Timer)>,
}

impl World {
    /// A world without processes.
    pub(crate) fn new(seed: u64, hosts: usize, servers: usize) -> Self {
        Self {
            s: Scheduler::new(seed),
            net: Network::new(hosts, servers),
            store: Store::default(),
            servers: Vec::new(),
            nodes: Vec::new(),
            clients: Vec::new(),
            findings: Findings::default(),
            secrets: 0,
            roles: Vec::new(),
            faults: Vec::new(),
            waiting: Vec::new(),
        }
    }

    /// Adds a process to a host.
    pub(crate) fn add_process(&mut self, host: usize, role: Role) -> ProcessId {
        self.roles.push(role);
        self.net.add_process(host as HostId)
    }

    /// Creates the first objects and starts all processes.
    pub(crate) fn start(&mut self) {
        for (resource, count) in [
            (Resource::Pods, PODS),
            (Resource::ConfigMaps, CONFIG_MAPS),
            (Resource::Secrets, self.secrets),
        ] {
            for key in 0..count {
                let write = Write { token: self.s.rng.u64(1..), replaces: None };
                self.store.create(resource, key, write, self.s.now);
            }
        }
        for server in &mut self.servers {
            server.start(&mut self.s, &self.store);
        }
        for node in &mut self.nodes {
            node.start(&mut Io { s: &mut self.s, net: &mut self.net });
        }
        for at in 0..self.clients.len() {
            self.with_client(at, Client::start);
        }
    }

    /// Goes on for a while.
    pub fn advance(&mut self, time: Duration) {
        let until = self.s.now + time;
        let (mut at, mut count) = (self.s.now, 0_u32);
        while let Some(event) = self.s.next(until) {
            count = if at == self.s.now { count + 1 } else { 0 };
            at = self.s.now;
            if count > MAX_EVENTS_AT_ONCE {
                self.findings
                    .violation(format!("time stands still: {event:?} comes again and again"));
                return;
            }
            self.handle(event);
            while let Some(delivery) = self.net.deliveries.pop_front() {
                let (id, what) = (delivery.id, delivery.what);
                match self.roles[usize::from(delivery.process)] {
                    Role::Server(at) => {
                        self.servers[at].arrived(&mut self.s, &mut self.net, id, what);
                    }
                    Role::Node(at) => {
                        self.nodes[at].arrived(
                            &mut Io { s: &mut self.s, net: &mut self.net },
                            id,
                            what,
                        );
                    }
                    Role::Client(at) => {
                        self.with_client(at, |client, around| client.arrived(around, id, what));
                    }
                }
            }
        }
        self.s.now = until;
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Net(event) => self.net.handle(&mut self.s, event),
            Event::Timer(process, timer) => match self.net.process(process) {
                ProcessState::Running => self.timer(process, timer),
                ProcessState::Stopped => self.waiting.push((process, timer)),
                ProcessState::Dead => {}
            },
            Event::Fault(number) => self.begin_or_end_fault(number),
            Event::Replicate { server, revision } => {
                let server = &mut self.servers[server];
                if self.net.process(server.process) == ProcessState::Running {
                    server.replicate((&mut self.s, &mut self.net), &self.store, revision);
                }
            }
        }
    }

    fn timer(&mut self, process: ProcessId, timer: Timer) {
        match (self.roles[usize::from(process)], timer) {
            (Role::Server(at), Timer::Server(timer)) => {
                let before = self.store.revision();
                self.servers[at].timer(&mut self.s, &mut self.net, &mut self.store, timer);
                if self.store.revision() > before {
                    crate::apiserver::replicate_later(
                        &mut self.s,
                        &self.servers,
                        self.store.revision(),
                    );
                }
            }
            (Role::Node(at), Timer::Node(timer)) => {
                self.nodes[at].timer(&mut Io { s: &mut self.s, net: &mut self.net }, timer);
            }
            (Role::Client(at), Timer::Client(timer)) => {
                self.with_client(at, |client, around| client.timer(around, timer));
            }
            _ => {}
        }
    }

    /// Changes the state of an apiserver's process.
    pub(crate) fn set_server(&mut self, at: usize, state: ProcessState) {
        let process = self.servers[at].process;
        let before = self.net.process(process);
        self.net.set_process(&mut self.s, process, state);
        match (before, state) {
            (ProcessState::Dead, ProcessState::Running) => {
                self.servers[at].start(&mut self.s, &self.store);
            }
            (ProcessState::Stopped, ProcessState::Running) => {
                let revision = self.store.revision();
                self.s.after(Duration::ZERO, Event::Replicate { server: at, revision });
            }
            _ => {}
        }
        let (due, rest) =
            std::mem::take(&mut self.waiting).into_iter().partition(|waiting| waiting.0 == process);
        self.waiting = rest;
        if state == ProcessState::Running && before == ProcessState::Stopped {
            for (process, timer) in due {
                self.s.timer(self.s.now, process, timer);
            }
        }
    }

    fn with_client(&mut self, at: usize, act: impl FnOnce(&mut Client, Surroundings<'_>)) {
        let around = Surroundings {
            s: &mut self.s,
            net: &mut self.net,
            store: &self.store,
            findings: &mut self.findings,
        };
        act(&mut self.clients[at], around);
    }

    /// Ends all clients, waits, and reports what is left over and what was done twice.
    pub(crate) fn finish(&mut self) {
        for at in 0..self.clients.len() {
            self.with_client(at, Client::stop);
        }
        self.advance(Duration::from_secs(60));
        for node in &self.nodes {
            for text in node.leftovers(self.s.now).into_iter().chain(node.broken_rules()) {
                self.findings.violation(text);
            }
            if node.longest_wait > LONGEST_WAIT {
                let text = format!("a request waited {:.3?} for a stream", node.longest_wait);
                self.findings.violation(text);
            }
        }
        self.check_nodes();
        let left = |world: &Self| world.servers.iter().any(|one| one.leftovers(&world.net) > 0);
        if left(self) {
            // It may be a probe.
            self.advance(Duration::from_millis(300));
        }
        for server in &self.servers {
            let count = server.leftovers(&self.net);
            if self.net.process(server.process) == ProcessState::Running && count > 0 {
                self.findings.violation(format!("an apiserver has {count} streams left over"));
            }
        }
        let mut twice: Vec<_> = self.store.writes.iter().filter(|write| *write.1 > 1).collect();
        twice.sort();
        for (token, count) in twice {
            self.findings.violations.push(format!("write {token:x} was carried out {count} times"));
        }
    }

    /// Every endpoint without a fault that lasts is ready again a minute after the end of the scenario.
    fn check_nodes(&mut self) {
        for (number, node) in self.nodes.iter().enumerate() {
            for (server, state) in node.endpoint_states().enumerate() {
                let lasts = |fault: &Fault| fault.server == server && fault.lasts();
                if state != EndpointState::Ready && !self.faults.iter().any(lasts) {
                    let state = state.as_str();
                    let text = format!("node {number}: endpoint {server} is {state} at the end");
                    self.findings.violation(text);
                }
            }
        }
    }
}
