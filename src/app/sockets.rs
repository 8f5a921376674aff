//! The listening sockets, found by the address that the configuration names.
//!
//! A socket outlives the listener that it was bound for: one that is renamed, or turned from one
//! mode into the other, takes it over with every connection in its queue. Each is held here for as
//! long as it is configured, and workers get copies of the descriptor. It may also be older than the
//! process: what was inherited is used before anything is bound.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use socket2::SockRef;

use super::StartError;
use crate::config;
use crate::net::process::inherited_sockets::InheritedSockets;
use crate::net::sockets::listening::{self, ListenOptions};

static NEXT: AtomicU64 = AtomicU64::new(0);

/// An address that is listened on: one socket for each worker, or as many as were inherited.
#[derive(Debug)]
pub struct Place {
    /// Tells it from every other one, also from one on the same address later.
    pub id: u64,
    /// What the configuration says.
    pub wanted: SocketAddr,
    /// What it is: the port may have been left to the kernel.
    pub address: SocketAddr,
    options: ListenOptions,
    /// What its sockets may still be.
    were: ListenOptions,
    /// Whether somebody else may have them too: whoever gave them to us.
    inherited: bool,
    sockets: Vec<TcpListener>,
}

impl Place {
    /// Listens on an address: every socket on the same port even where that was left to the kernel.
    /// `ours` are sockets in its way that will be closed.
    fn bind(
        wanted: SocketAddr,
        options: ListenOptions,
        workers: usize,
        ours: &[&TcpListener],
    ) -> io::Result<Self> {
        let mut address = wanted;
        let mut sockets = Vec::new();
        for _ in 0..workers {
            let socket = listening::listen_alongside(address, &options, ours)?;
            address = socket.local_addr()?;
            sockets.push(socket);
        }
        Ok(Self::new(wanted, address, options, sockets, false))
    }

    fn new(
        wanted: SocketAddr,
        address: SocketAddr,
        options: ListenOptions,
        sockets: Vec<TcpListener>,
        inherited: bool,
    ) -> Self {
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        Self { id, wanted, address, options, were: options, inherited, sockets }
    }

    /// Takes sockets into use that were open before us.
    fn inherit(wanted: SocketAddr, options: ListenOptions, sockets: Vec<TcpListener>) -> Self {
        Self::new(wanted, wanted, options, sockets, true)
    }

    /// The same place, whose sockets are to be something else: [`Self::change`] makes them so.
    fn with(&self, options: ListenOptions) -> io::Result<Self> {
        listening::check_options(self.address, &options)?;
        let sockets = self.sockets.iter().map(TcpListener::try_clone).collect::<Result<_, _>>()?;
        let Self { id, wanted, address, options: were, inherited, .. } = *self;
        Ok(Self { id, wanted, address, options, were, inherited, sockets })
    }

    /// Makes its sockets what the configuration that is followed from now on wants of them.
    pub fn change(&self) {
        for socket in &self.sockets {
            let changed = listening::change_options(
                &SockRef::from(socket),
                self.address,
                &self.were,
                &self.options,
            );
            if let Err(error) = changed {
                tracing::error!(address = %self.address, %error, "the socket stays as it was");
            }
        }
    }

    /// Leaves who connects from now on to another socket on the port, before these are closed. What
    /// was inherited stays as it is: it would be hidden from its giver too.
    pub fn hide(&self) {
        for socket in self.sockets.iter().filter(|_| !self.inherited) {
            hide(socket);
        }
    }

    /// Copies of the descriptors that one of so many workers accepts on. Whatever their numbers, each
    /// worker has one and each socket has a worker: a queue that nobody empties would be a trap.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn sockets(&self, worker: usize, workers: usize) -> io::Result<Vec<TcpListener>> {
        let count = self.sockets.len();
        shares(worker, workers, count).map(|index| self.sockets[index].try_clone()).collect()
    }

    /// Copies of all descriptors, to be given to another process.
    ///
    /// # Errors
    /// There are no more descriptors.
    pub fn copies(&self) -> impl Iterator<Item = io::Result<OwnedFd>> {
        self.sockets.iter().map(|socket| socket.as_fd().try_clone_to_owned())
    }
}

/// Hides a socket that goes. One that cannot be is closed as it is: whoever connects in the moment of
/// the close is reset.
pub fn hide(socket: &TcpListener) {
    if let Err(error) = listening::divert_new_connections(socket) {
        tracing::debug!(address = ?socket.local_addr().ok(), %error, "a socket cannot be hidden");
    }
}

/// Which of `count` sockets one of so many workers accepts on: each n-th, or one with others.
fn shares(worker: usize, workers: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).filter(move |index| {
        if worker < count { index % workers == worker } else { *index == worker % count }
    })
}

/// Gives listeners their places: the ones they have, then what others have given up, then what was
/// inherited, then new ones.
pub struct Places<'a> {
    known: Vec<(&'a str, &'a Arc<Place>)>,
    inherited: &'a mut InheritedSockets,
    workers: usize,
}

impl<'a> Places<'a> {
    /// Starts from the places that are held now, each with the name of its listener, and from the
    /// sockets that were open before us.
    pub fn new(
        known: Vec<(&'a str, &'a Arc<Place>)>,
        inherited: &'a mut InheritedSockets,
        workers: usize,
    ) -> Self {
        Self { known, inherited, workers }
    }

    /// The places of each listener. An address whose family this host lacks is left out, as long as
    /// its listener has another one.
    ///
    /// # Errors
    /// The first address that cannot be bound. What was bound for nothing is closed again.
    pub fn of(
        &mut self,
        listeners: &[config::Listener],
    ) -> Result<Vec<Vec<Arc<Place>>>, StartError> {
        let mut places: Vec<Vec<Option<Arc<Place>>>> = Vec::new();
        let mut moves = Vec::new();
        for (index, listener) in listeners.iter().enumerate() {
            let options = self.options(listener);
            let mut found = Vec::new();
            let mut skipped = None;
            for &wanted in &listener.bind {
                if let Some(place) = self.take(&listener.name, wanted) {
                    let changed = (place.options != options).then(|| place.with(options));
                    let changed = changed.transpose();
                    let changed = changed.map_err(|error| failed(listener, wanted, error))?;
                    found.push(Some(changed.map_or(place, Arc::new)));
                    continue;
                }
                let inherited = self.inherited.take(wanted, options.transparent);
                if !inherited.is_empty() {
                    found.push(Some(Arc::new(Place::inherit(wanted, options, inherited))));
                    continue;
                }
                if !options.shared && self.inherited.is_at(wanted) {
                    // It would be in its own way.
                    return Err(StartError::OtherKind {
                        listener: listener.name.clone(),
                        address: wanted,
                        transparent: options.transparent,
                    });
                }
                if !self.in_the_way(wanted).is_empty() {
                    // Last: it may be given connections at once, and must not be closed again.
                    moves.push((index, found.len(), wanted));
                    found.push(None);
                    continue;
                }
                match Place::bind(wanted, options, self.workers, &[]) {
                    Ok(place) => found.push(Some(Arc::new(place))),
                    Err(error) if listening::is_address_family_missing(wanted, &error) => {
                        tracing::warn!(
                            listener = listener.name,
                            address = %wanted,
                            %error,
                            "not listening there: this host has no such address family"
                        );
                        skipped = Some((wanted, error));
                    }
                    Err(error) => return Err(failed(listener, wanted, error)),
                }
            }
            if let Some((address, error)) = skipped.filter(|_| found.is_empty()) {
                return Err(failed(listener, address, error));
            }
            places.push(found);
        }
        for (index, at, wanted) in moves {
            let listener = &listeners[index];
            let ours = self.in_the_way(wanted);
            let place = Place::bind(wanted, self.options(listener), self.workers, &ours);
            let place = place.map_err(|error| failed(listener, wanted, error))?;
            places[index][at] = Some(Arc::new(place));
        }
        Ok(places.into_iter().map(|found| found.into_iter().flatten().collect()).collect())
    }

    fn options(&self, listener: &config::Listener) -> ListenOptions {
        ListenOptions {
            shared: self.workers > 1,
            freebind: listener.freebind,
            transparent: listener.is_transparent(),
        }
    }

    /// The sockets that we have where `wanted` would be: with a configuration in which no two
    /// addresses collide, places that nobody wants any more.
    fn in_the_way(&self, wanted: SocketAddr) -> Vec<&'a TcpListener> {
        let known = self.known.iter().map(|(_, place)| *place);
        let moves =
            known.filter(|place| place.address != wanted && config::collide(place.address, wanted));
        moves.flat_map(|place| &place.sockets).collect()
    }

    fn take(&mut self, name: &str, wanted: SocketAddr) -> Option<Arc<Place>> {
        // A port that the kernel has given may be named from then on.
        let fits = |place: &Place| place.wanted == wanted || place.address == wanted;
        let own = self.known.iter().position(|(owner, place)| *owner == name && fits(place));
        // With port 0, the port is the listener's own: another one asked for another port.
        let other = || self.known.iter().position(|(_, place)| wanted.port() != 0 && fits(place));
        let index = own.or_else(other)?;
        Some(Arc::clone(self.known.swap_remove(index).1))
    }
}

fn failed(listener: &config::Listener, address: SocketAddr, error: io::Error) -> StartError {
    // A port below 1024 may be what is not permitted.
    if listener.is_transparent() && error.kind() == io::ErrorKind::PermissionDenied {
        let (listener, what) = (listener.name.clone(), "listen for others (IP_TRANSPARENT)");
        return StartError::Capability { listener, what, error };
    }
    StartError::Bind { what: format!("listener `{}`", listener.name), address, error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_socket_has_a_worker_and_every_worker_a_socket() {
        for workers in 1..=9 {
            for count in 1..=9 {
                let mut accepted = vec![0; count];
                for worker in 0..workers {
                    let own: Vec<_> = shares(worker, workers, count).collect();
                    assert!(!own.is_empty(), "worker {worker} of {workers} has none of {count}");
                    for index in own {
                        accepted[index] += 1;
                    }
                }
                assert!(accepted.iter().all(|n| *n >= 1), "{workers} workers: {accepted:?}");
                let most = workers.div_ceil(count);
                assert!(accepted.iter().all(|n| *n <= most), "{workers} workers: {accepted:?}");
            }
        }
    }

    #[test]
    fn what_was_inherited_comes_before_what_is_bound() {
        let bound = listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = bound.local_addr().unwrap();
        let mut inherited = InheritedSockets::default();
        inherited.add(bound.as_fd().try_clone_to_owned().unwrap()).unwrap();
        let options = ListenOptions { shared: true, ..ListenOptions::default() };
        let sockets = inherited.take(address, options.transparent);
        let place = Place::inherit(address, options, sockets);
        let connected = std::net::TcpStream::connect(address).unwrap();
        // One socket of a process with one worker, for two.
        let first = place.sockets(0, 2).unwrap().remove(0);
        let second = place.sockets(1, 2).unwrap().remove(0);
        assert_eq!(first.local_addr().unwrap(), second.local_addr().unwrap());
        let (_, from) = second.accept().unwrap();
        assert_eq!(from, connected.local_addr().unwrap());
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(place.copies().count(), 1);
    }

    #[test]
    fn a_socket_of_the_other_kind_is_not_fought_for() {
        let bound = listening::listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let address = bound.local_addr().unwrap();
        let mut inherited = InheritedSockets::default();
        inherited.add(bound.into()).unwrap();
        let text = format!(
            "upstreams: [{{name: u, endpoints: ['127.0.0.1:1']}}]\nlisteners: [{{name: l, mode: \
             passthrough, transparent: true, bind: ['{address}'], upstream: u}}]\n"
        );
        let config = config::validate_text("test.yaml".as_ref(), &text).unwrap().config;
        let places = Places::new(Vec::new(), &mut inherited, 1).of(&config.listeners);
        let why = places.unwrap_err().to_string();
        assert!(why.contains("`transparent: true`") && why.contains("SIGHUP"), "{why}");
        assert_eq!(inherited.len(), 1, "nothing has happened to it");
    }
}
