//! The listening sockets of the process, which are identified by their configured addresses.
//!
//! A socket may outlive the listener that it was bound for: a listener that is renamed or changes its mode
//! keeps the socket, with the connections in its accept queue. A socket may also be older than the process:
//! inherited sockets are used before new ones are bound. The control thread owns the sockets while they are
//! configured, and workers accept on duplicates of the descriptors.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jackstay_config as config;
use jackstay_sys::process::inherited_sockets::InheritedSockets;
use jackstay_sys::sockets::listening;
use jackstay_sys::sockets::listening::ListenOptions;
use jackstay_sys::sockets::stream::DetachedListener;
use socket2::SockRef;

use super::shared_sockets::OtherOwners;
use super::start_error::StartError;

static NEXT_ID: AtomicU64 = AtomicU64::new(0);

/// Identifies a [`BoundSocket`]. It is never used again, also not for a later socket on the same address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SocketId(u64);

/// For each worker, the sockets that it does not have yet.
pub type NewSockets = Vec<HashMap<SocketId, Vec<DetachedListener>>>;

/// A bound address, with one socket for each worker or as many sockets as were inherited.
#[derive(Debug)]
pub struct BoundSocket {
    id: SocketId,
    /// The address in the configuration.
    configured: SocketAddr,
    /// The bound address. Its port is the one that the kernel chose if the configured port is 0.
    address: SocketAddr,
    options: ListenOptions,
    /// The options before [`Self::apply_options`].
    previous_options: ListenOptions,
    other_owners: OtherOwners,
    sockets: Vec<TcpListener>,
}

impl BoundSocket {
    /// Binds one socket for each worker, all to the same port. The `conflicting` sockets of this process on
    /// that port are closed later.
    fn bind(
        configured: SocketAddr,
        options: ListenOptions,
        workers: usize,
        conflicting: &[&TcpListener],
    ) -> io::Result<Self> {
        let mut address = configured;
        let mut sockets = Vec::new();
        for _ in 0..workers {
            let socket = listening::listen_alongside(address, &options, conflicting)?;
            address = socket.local_addr()?;
            sockets.push(socket);
        }
        Ok(Self::new(configured, address, options, sockets, false))
    }

    /// An address on which the sockets of the workers are opened by the caller of [`DesiredState`].
    ///
    /// [`DesiredState`]: super::worker::DesiredState
    pub fn elsewhere(address: SocketAddr) -> Self {
        Self::new(address, address, ListenOptions::default(), Vec::new(), false)
    }

    fn inherit(address: SocketAddr, options: ListenOptions, sockets: Vec<TcpListener>) -> Self {
        Self::new(address, address, options, sockets, true)
    }

    /// Sockets that an earlier process has stored in the service manager, which does not accept on them.
    fn restore(
        address: SocketAddr,
        options: ListenOptions,
        sockets: Vec<TcpListener>,
    ) -> io::Result<Self> {
        // The configuration may have changed since.
        let other = ListenOptions { transparent: !options.transparent, ..options };
        for socket in &sockets {
            listening::change_options(&SockRef::from(socket), address, &other, &options)?;
        }
        Ok(Self::new(address, address, options, sockets, false))
    }

    fn new(
        configured: SocketAddr,
        address: SocketAddr,
        options: ListenOptions,
        sockets: Vec<TcpListener>,
        inherited: bool,
    ) -> Self {
        let id = SocketId(NEXT_ID.fetch_add(1, Ordering::Relaxed));
        Self {
            id,
            configured,
            address,
            options,
            previous_options: options,
            other_owners: OtherOwners::new(inherited),
            sockets,
        }
    }

    /// The same sockets with other options. [`Self::apply_options`] sets them later.
    fn with_options(&self, options: ListenOptions) -> io::Result<Self> {
        listening::check_options(self.address, &options)?;
        let sockets = self.sockets.iter().map(TcpListener::try_clone).collect::<Result<_, _>>()?;
        let Self { id, configured, address, options: previous_options, .. } = *self;
        Ok(Self {
            id,
            configured,
            address,
            options,
            previous_options,
            other_owners: self.other_owners.clone(),
            sockets,
        })
    }

    pub fn id(&self) -> SocketId {
        self.id
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the configured options on the sockets.
    pub fn apply_options(&self) {
        for socket in &self.sockets {
            let (from, to) = (&self.previous_options, &self.options);
            if let Err(error) =
                listening::change_options(&SockRef::from(socket), self.address, from, to)
            {
                tracing::error!(address = %self.address, %error, "cannot change socket options");
            }
        }
    }

    /// Makes the kernel give new connections to another socket on the port, or refuse them, before these are closed.
    /// Sockets that another process may use are not changed. Returns whether TCP handshakes that have started must
    /// be waited for.
    pub fn divert_new_connections(&self) -> bool {
        let own = self.sockets.iter().filter(|_| !self.other_owners.exist());
        own.filter(|socket| divert_new_connections(socket)).count() > 0
    }

    /// Duplicates of the sockets that one worker accepts on. Every worker has at least one socket, and every
    /// socket has at least one worker: otherwise the connections in its queue would not be accepted.
    pub fn for_worker(&self, worker: usize, workers: usize) -> io::Result<Vec<DetachedListener>> {
        let count = self.sockets.len();
        assigned_sockets(worker, workers, count)
            .map(|index| self.sockets[index].try_clone().map(DetachedListener::from))
            .collect()
    }

    /// The other processes that may have the sockets.
    pub fn other_owners(&self) -> &OtherOwners {
        &self.other_owners
    }

    /// All sockets.
    pub fn descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.sockets.iter().map(TcpListener::as_fd)
    }

    /// Duplicates of all sockets, for another process.
    pub fn duplicates(&self) -> impl Iterator<Item = io::Result<OwnedFd>> {
        self.sockets.iter().map(|socket| socket.as_fd().try_clone_to_owned())
    }
}

/// See [`listening::divert_new_connections`]. Without it, a connection that arrives at the moment of the close
/// is reset. Returns whether the kernel has done it.
pub(super) fn divert_new_connections(socket: &TcpListener) -> bool {
    let diverted = listening::divert_new_connections(socket);
    if let Err(error) = &diverted {
        let address = socket.local_addr().ok();
        tracing::debug!(?address, %error, "cannot exclude a socket from new connections");
    }
    diverted.is_ok()
}

/// The indices of the sockets, of `count`, that a worker accepts on: every `workers`-th, or one that it shares
/// if there are fewer sockets than workers.
fn assigned_sockets(worker: usize, workers: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).filter(move |index| {
        if worker < count { index % workers == worker } else { *index == worker % count }
    })
}

/// Finds or binds the sockets of all listeners. For an address it uses the socket of the listener itself, or
/// else of another listener, or else an inherited socket, or else it binds a new one.
pub struct SocketBinder<'a> {
    /// The sockets in use that are not assigned yet, each with the name of its listener.
    current: Vec<(&'a str, &'a Arc<BoundSocket>)>,
    inherited: &'a mut InheritedSockets,
    workers: usize,
    /// Whether the process starts. Then no other socket may listen on an address, also none that would share it.
    starts: bool,
}

impl<'a> SocketBinder<'a> {
    /// A binder that may use the `current` sockets, each with the name of its listener, and the inherited
    /// ones.
    pub fn new(
        current: Vec<(&'a str, &'a Arc<BoundSocket>)>,
        inherited: &'a mut InheritedSockets,
        workers: usize,
    ) -> Self {
        let starts = current.is_empty();
        Self { current, inherited, workers, starts }
    }

    /// The sockets of each listener, in the order of `listeners`. An address whose family this host
    /// lacks is left out if its listener has another address.
    ///
    /// # Errors
    /// The first address that cannot be bound. The sockets that were bound before are closed.
    pub fn bind(
        mut self,
        listeners: &[config::Listener],
    ) -> Result<Vec<Vec<Arc<BoundSocket>>>, StartError> {
        let mut bound: Vec<Vec<Option<Arc<BoundSocket>>>> = Vec::new();
        let mut conflicting = Vec::new();
        for (index, listener) in listeners.iter().enumerate() {
            let mut found = Vec::new();
            let mut skipped = None;
            for &address in &listener.bind {
                if let Some(socket) = self.find(listener, address)? {
                    found.push(Some(socket));
                } else if !self.conflicting(address).is_empty() {
                    // Bound after all others: it may receive connections at once, which a later failure
                    // of another bind would reset.
                    conflicting.push((index, found.len(), address));
                    found.push(None);
                } else {
                    match self.bind_new(address, self.options(listener)) {
                        Ok(socket) => found.push(Some(Arc::new(socket))),
                        Err(error) if listening::is_address_family_missing(address, &error) => {
                            tracing::warn!(
                                listener = listener.name,
                                %address,
                                %error,
                                "address skipped: this host lacks its address family"
                            );
                            skipped = Some((address, error));
                        }
                        Err(error) => return Err(bind_error(listener, address, &error)),
                    }
                }
            }
            if let Some((address, error)) = skipped.filter(|_| found.is_empty()) {
                return Err(bind_error(listener, address, &error));
            }
            bound.push(found);
        }
        for (index, position, address) in conflicting {
            let listener = &listeners[index];
            let others = self.conflicting(address);
            let socket = BoundSocket::bind(address, self.options(listener), self.workers, &others);
            let socket = socket.map_err(|error| bind_error(listener, address, &error))?;
            bound[index][position] = Some(Arc::new(socket));
        }
        Ok(bound.into_iter().map(|found| found.into_iter().flatten().collect()).collect())
    }

    /// The socket in use for an address, or an inherited one.
    fn find(
        &mut self,
        listener: &config::Listener,
        address: SocketAddr,
    ) -> Result<Option<Arc<BoundSocket>>, StartError> {
        let options = self.options(listener);
        if let Some(socket) = self.take_current(&listener.name, address) {
            if socket.options == options {
                return Ok(Some(socket));
            }
            let changed = socket.with_options(options);
            let changed = changed.map_err(|error| bind_error(listener, address, &error))?;
            return Ok(Some(Arc::new(changed)));
        }
        let stored = self.inherited.take_stored(address);
        if !stored.is_empty() {
            let socket = BoundSocket::restore(address, options, stored);
            let socket = socket.map_err(|error| bind_error(listener, address, &error))?;
            return Ok(Some(Arc::new(socket)));
        }
        let inherited = self.inherited.take(address, options.transparent);
        if !inherited.is_empty() {
            return Ok(Some(Arc::new(BoundSocket::inherit(address, options, inherited))));
        }
        if !options.shared && self.inherited.contains(address) {
            // The inherited socket has the address without SO_REUSEPORT, so a bind would fail.
            let transparent = options.transparent;
            return Err(StartError::transparency_mismatch(&listener.name, address, transparent));
        }
        Ok(None)
    }

    fn bind_new(&self, address: SocketAddr, options: ListenOptions) -> io::Result<BoundSocket> {
        if self.starts && options.shared {
            listening::ensure_unused(address, &options)?;
        }
        BoundSocket::bind(address, options, self.workers, &[])
    }

    fn options(&self, listener: &config::Listener) -> ListenOptions {
        ListenOptions {
            shared: self.workers > 1,
            freebind: listener.freebind,
            transparent: listener.transparent,
        }
    }

    /// The sockets of this process that prevent a bind of `address`. The new configuration removes their
    /// addresses, since validation refuses a configuration in which addresses collide.
    fn conflicting(&self, address: SocketAddr) -> Vec<&'a TcpListener> {
        let current = self.current.iter().map(|(_, socket)| *socket);
        let conflicting = current
            .filter(|socket| socket.address != address && config::collide(socket.address, address));
        conflicting.flat_map(|socket| &socket.sockets).collect()
    }

    /// Takes the socket in use for an address, preferably one of the listener `name`.
    fn take_current(&mut self, name: &str, address: SocketAddr) -> Option<Arc<BoundSocket>> {
        // A port that the kernel chose may be configured explicitly later.
        let is_at =
            |socket: &BoundSocket| socket.configured == address || socket.address == address;
        let own = self.current.iter().position(|(owner, socket)| *owner == name && is_at(socket));
        // Each listener with port 0 gets a port of its own, never the socket of another listener.
        let of_other =
            || self.current.iter().position(|(_, socket)| address.port() != 0 && is_at(socket));
        let index = own.or_else(of_other)?;
        Some(Arc::clone(self.current.swap_remove(index).1))
    }
}

fn bind_error(listener: &config::Listener, address: SocketAddr, error: &io::Error) -> StartError {
    // IP_TRANSPARENT without CAP_NET_ADMIN fails with EPERM (ip(7)); a port below 1024 without
    // CAP_NET_BIND_SERVICE fails with EACCES (bind(2)).
    if listener.transparent && error.raw_os_error() == Some(libc::EPERM) {
        return StartError::capability(&listener.name, "set IP_TRANSPARENT on its socket", error);
    }
    StartError::bind(&format!("listener `{}`", listener.name), address, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assigned_sockets_gives_every_worker_a_socket_and_every_socket_a_worker() {
        for workers in 1..=9 {
            for count in 1..=9 {
                let mut accepted = vec![0; count];
                for worker in 0..workers {
                    let own: Vec<_> = assigned_sockets(worker, workers, count).collect();
                    assert!(!own.is_empty(), "worker {worker} of {workers}, {count} sockets");
                    for index in own {
                        accepted[index] += 1;
                    }
                }
                assert!(accepted.iter().all(|n| *n >= 1), "{workers} workers: {accepted:?}");
                let max = workers.div_ceil(count);
                assert!(accepted.iter().all(|n| *n <= max), "{workers} workers: {accepted:?}");
            }
        }
    }

    #[test]
    fn for_worker_with_one_inherited_socket_shares_it_between_two_workers() {
        let bound = listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = bound.local_addr().unwrap();
        let mut inherited = InheritedSockets::default();
        inherited.add(bound.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let options = ListenOptions { shared: true, ..ListenOptions::default() };
        let sockets = inherited.take(address, options.transparent);
        let bound = BoundSocket::inherit(address, options, sockets);
        let connected = std::net::TcpStream::connect(address).unwrap();
        let socket = |worker| bound.for_worker(worker, 2).unwrap().remove(0).into_kernel().unwrap();
        let (first, second) = (socket(0), socket(1));
        assert_eq!(first.local_addr().unwrap(), second.local_addr().unwrap());
        let (_, from) = second.accept().unwrap();
        assert_eq!(from, connected.local_addr().unwrap());
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(bound.duplicates().count(), 1);
    }

    #[test]
    fn bind_refuses_inherited_socket_without_the_configured_transparency() {
        let bound = listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = bound.local_addr().unwrap();
        let mut inherited = InheritedSockets::default();
        inherited.add(bound.into()).unwrap();
        let text = format!(
            "upstreams: [{{name: u, endpoints: ['127.0.0.1:1']}}]\nlisteners: [{{name: l, mode: \
             passthrough, transparent: true, bind: ['{address}'], upstream: u}}]\n"
        );
        let config = config::validate_text("test.yaml".as_ref(), &text).unwrap().config;
        let sockets = SocketBinder::new(Vec::new(), &mut inherited, 1).bind(&config.listeners);
        let why = sockets.unwrap_err().to_string();
        assert!(why.contains("`transparent: true`") && why.contains("SIGHUP"), "{why}");
        assert_eq!(inherited.len(), 1, "the inherited socket stays open");
    }
}
