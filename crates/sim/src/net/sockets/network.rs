//! The network as all processes share it.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Instant;

use jackstay_sys::clock::now;

use super::state::{Connect, State, address_of};
use crate::net::balancer::{self, Balancer};
use crate::net::log::Log;
use crate::net::{HostId, Link, ProcessId, ProcessState};

/// A network of hosts, processes and byte sockets. Clones share it.
#[derive(Clone, Debug)]
pub struct SocketNetwork(Arc<Mutex<State>>);

impl SocketNetwork {
    /// A network of this number of hosts, of which the first ones are servers. A host reaches itself and the servers.
    /// `start` is the present.
    pub fn new(seed: u64, start: Instant, hosts: usize, servers: usize) -> Self {
        Self(Arc::new(Mutex::new(State::new(seed, start, hosts, servers))))
    }

    /// Adds a process to a host.
    pub fn add_process(&self, host: HostId) -> ProcessId {
        self.lock().net.add_process(host)
    }

    /// Adds a process of a user to a host. The others' users are not known to the server of a connection.
    pub fn add_process_of(&self, host: HostId, user: u32) -> ProcessId {
        let mut state = self.lock();
        let process = state.net.add_process(host);
        state.users.insert(process, user);
        process
    }

    /// The address of a host: 10.0.0.1 of the first one. 127.0.0.0/8 is the host of the process that connects.
    pub fn address_of(host: HostId) -> IpAddr {
        address_of(host)
    }

    /// The address of the balancer, if there is one.
    pub fn balancer_address() -> IpAddr {
        balancer::ADDRESS
    }

    /// Adds a balancer: new connections to [`Self::balancer_address`] lead to one of these hosts, those of one client
    /// (`is_sticky`) to the same one.
    pub fn add_balancer(&self, hosts: &[HostId], is_sticky: bool, seed: u64) {
        self.lock().balancer = Some(Balancer::new(hosts, is_sticky, seed));
    }

    /// Sets whether the balancer leads new connections to a host.
    pub fn set_backend(&self, host: HostId, is_in: bool) {
        if let Some(balancer) = &mut self.lock().balancer {
            balancer.set_backend(host, is_in);
        }
    }

    /// When the next event is due, which is never earlier than the present.
    pub fn next_event_at(&self) -> Option<Instant> {
        self.lock().clock.next_event_at().map(|at| at.max(now()))
    }

    /// Handles all events that are due until `until` in their order, each at its own time, and wakes the tasks
    /// concerned.
    pub fn run_until(&self, until: Instant) {
        let wakers = {
            let mut state = self.lock();
            state.run_until(until);
            state.take_wakers()
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The task to wake when an event is queued that is earlier than all others. [`Self::run_until`] wakes it for none
    /// of the events that it queues.
    pub fn set_driver(&self, waker: Waker) {
        self.lock().driver = Some(waker);
    }

    /// Changes all links to and from a server's host.
    pub fn change_links(&self, host: HostId, change: impl Fn(&mut Link)) {
        self.lock().net.change_links(host, change);
    }

    /// Changes the links to a server's host, and leaves those from it as they are.
    pub fn change_links_to(&self, host: HostId, change: impl Fn(&mut Link)) {
        self.lock().net.change_links_to(host, change);
    }

    /// Changes the links from a server's host, and leaves those to it as they are.
    pub fn change_links_from(&self, host: HostId, change: impl Fn(&mut Link)) {
        self.lock().net.change_links_from(host, change);
    }

    /// Changes all links between hosts.
    pub fn change_all_links(&self, change: impl Fn(&mut Link)) {
        self.lock().net.change_all_links(change);
    }

    /// A device on the path forgets the established connections to a host. It drops the packets of clients and of the
    /// server as `dropped` says, or, if it drops neither, resets a connection when a packet passes. New connections
    /// work.
    pub fn forget_flows(&self, host: HostId, dropped: [bool; 2]) {
        self.lock().net.forget_flows(host, dropped);
    }

    /// The device on the path knows the connections to a host again, and forwards their packets.
    pub fn remember_flows(&self, host: HostId) {
        self.lock().net.remember_flows(host);
    }

    /// Stops a process (SIGSTOP), lets it continue, kills (SIGKILL) or restarts it. The kernel of a killed process
    /// closes its sockets, and their streams and listeners do nothing from then on.
    pub fn set_process(&self, process: ProcessId, process_state: ProcessState) {
        self.with(|state| state.set_process(process, process_state));
    }

    /// The SYNs that have arrived at a server.
    pub fn connects(&self, host: HostId) -> u64 {
        self.lock().net.connects.get(usize::from(host)).copied().unwrap_or(0)
    }

    /// The connects of a process, in the order in which they began.
    pub fn connects_of(&self, process: ProcessId) -> Vec<Connect> {
        let state = self.lock();
        let connects = state.connects.iter().filter(|connect| connect.process == process);
        connects.copied().collect()
    }

    /// A number that differs if the connects, closes, retransmissions or their times, the number of packets or that of
    /// bytes differ. The content of the bytes has no part in it, because ciphertext differs between runs.
    pub fn hash(&self) -> u64 {
        let state = self.lock();
        state.clock.hash(state.net.packets, state.net.bytes)
    }

    /// Packets that were sent.
    pub fn packets(&self) -> u64 {
        self.lock().net.packets
    }

    /// Events of the network so far.
    pub fn events(&self) -> u64 {
        self.lock().clock.events()
    }

    /// Keeps the log from now on, for [`Self::log`]. The hash does not need it.
    pub fn set_tracing(&self, is_on: bool) {
        self.lock().clock.log = is_on.then(Log::default);
    }

    /// The log, a line for each entry with its time in seconds since the start.
    pub fn log(&self) -> String {
        self.lock().clock.log.as_ref().map(Log::to_string).unwrap_or_default()
    }

    /// Connections that an end still has, for the search of what is left over.
    pub fn connections(&self) -> usize {
        self.lock().net.connections.iter_mut().count()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out an operation of a task at the present, and wakes the tasks concerned.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        let (result, wakers) = {
            let mut state = self.lock();
            state.clock.now = now();
            let result = act(&mut state);
            (result, state.take_wakers())
        };
        wakers.into_iter().for_each(Waker::wake);
        result
    }
}
