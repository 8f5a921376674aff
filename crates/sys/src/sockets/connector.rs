//! Opens upstream connections, with a mark that excludes them from interception, and detects those that
//! were intercepted nevertheless.
//!
//! nftables rules (REDIRECT or TPROXY) intercept every connection to an address, including jackstay's own,
//! unless they exclude connections with its mark (`SO_MARK`, socket(7)). Without that exclusion, jackstay
//! would accept each connection that it opens, open another one for it, and so on without end. The listener
//! ends the loop: it closes a connection that [`Connector::is_own_connection`] recognises.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::stream::TcpStream;
use super::tcp_options;
use super::virtual_network::VirtualNetwork;
use crate::clock;

/// How long a connection is remembered. An intercepted connection arrives at the listener at once. If one is
/// missed, the next connection of the loop is detected.
const REMEMBERED: Duration = Duration::from_secs(5);

/// Maximum of remembered connections, above which the oldest is dropped. It exceeds what a busy node opens in
/// [`REMEMBERED`].
const MAX_REMEMBERED: usize = 4096;

/// Opens connections to endpoints.
#[derive(Debug, Default)]
pub struct Connector {
    mark: Option<NonZeroU32>,
    /// The connections opened recently, oldest first; `None` without loop detection.
    recent: Option<Mutex<VecDeque<OwnConnection>>>,
    /// A simulated network in place of the kernel's.
    network: Option<Arc<dyn VirtualNetwork>>,
}

/// A connection that this process opened.
#[derive(Debug)]
struct OwnConnection {
    opened: Instant,
    from: SocketAddr,
    to: SocketAddr,
}

impl Connector {
    /// Without a mark and without loop detection, for a process without a transparent listener.
    pub fn unmarked() -> Self {
        Self::default()
    }

    /// With `mark` and loop detection. With a mark of 0 none is set, for rules that exclude jackstay's
    /// connections by another property (`meta skuid`).
    ///
    /// # Errors
    /// `PermissionDenied` without `CAP_NET_ADMIN`.
    pub fn marked(mark: u32) -> io::Result<Self> {
        let mark = NonZeroU32::new(mark);
        if let Some(mark) = mark {
            // Fails at startup rather than at the first connection.
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.set_mark(mark.get())?;
        }
        Ok(Self { mark, recent: Some(Mutex::default()), network: None })
    }

    /// Opens connections of a simulated network.
    pub fn over(network: Arc<dyn VirtualNetwork>) -> Self {
        Self { network: Some(network), ..Self::default() }
    }

    /// Connects to an endpoint with the options of [`tcp_options::new_upstream_socket`] and the mark.
    ///
    /// # Errors
    /// What connect(2) returns: refused, unreachable, no such address family.
    pub async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        match &self.network {
            Some(network) => network.connect(to).await.map(TcpStream::Virtual),
            None => self.connect_by_kernel(to).await.map(TcpStream::Kernel),
        }
    }

    /// The same, on the kernel's sockets in any case, for code that splices.
    ///
    /// # Errors
    /// As [`Self::connect`].
    pub async fn connect_by_kernel(&self, to: SocketAddr) -> io::Result<tokio::net::TcpStream> {
        let socket = tcp_options::new_upstream_socket(to)?;
        if let Some(mark) = self.mark {
            socket.set_mark(mark.get())?;
        }
        {
            // On loopback the handshake is complete when connect(2) returns, so another thread may accept
            // the connection before it is recorded. Its `is_own_connection` waits for this lock.
            let mut recent = self.recent.as_ref().map(lock);
            match socket.connect(&to.into()) {
                Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
                _ => {}
            }
            if let (Some(recent), Ok(from)) = (&mut recent, socket.local_addr())
                && let Some(from) = from.as_socket()
            {
                remember(recent, from, to);
            }
        }
        let stream = tokio::net::TcpStream::from_std(socket.into())?;
        stream.writable().await?;
        match stream.take_error()? {
            Some(error) => Err(error),
            None => Ok(stream),
        }
    }

    /// Whether this process recently opened a connection with these two addresses.
    pub fn is_own_connection(&self, from: SocketAddr, to: SocketAddr) -> bool {
        let Some(recent) = &self.recent else { return false };
        lock(recent).iter().rev().any(|own| own.from == from && own.to == to)
    }
}

fn lock(recent: &Mutex<VecDeque<OwnConnection>>) -> MutexGuard<'_, VecDeque<OwnConnection>> {
    recent.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember(recent: &mut VecDeque<OwnConnection>, from: SocketAddr, to: SocketAddr) {
    let opened = clock::now();
    let is_expired = |own: &OwnConnection| opened.duration_since(own.opened) > REMEMBERED;
    while recent.front().is_some_and(is_expired) || recent.len() >= MAX_REMEMBERED {
        recent.pop_front();
    }
    recent.push_back(OwnConnection { opened, from, to });
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn listener() -> (std::net::TcpListener, SocketAddr) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    #[tokio::test]
    async fn is_own_connection_compares_both_addresses() {
        let (listener, to) = listener();
        let connector = Connector::marked(0).unwrap();
        let stream = connector.connect(to).await.unwrap();
        let (_, from) = listener.accept().unwrap();
        assert_eq!(from, stream.local_addr().unwrap());
        assert!(connector.is_own_connection(from, to));
        let other = SocketAddr::new(to.ip(), to.port() ^ 1);
        assert!(!connector.is_own_connection(from, other), "another destination");
        assert!(!connector.is_own_connection(other, to), "another source");
        assert!(!Connector::unmarked().is_own_connection(from, to));
    }

    #[tokio::test]
    async fn is_own_connection_recognises_every_connection_accepted_on_another_thread() {
        const CONNECTIONS: usize = 1_000;
        let (listener, to) = listener();
        let connector = Arc::new(Connector::marked(0).unwrap());
        let shared = Arc::clone(&connector);
        let accepting = std::thread::spawn(move || {
            (0..CONNECTIONS)
                .filter(|_| shared.is_own_connection(listener.accept().unwrap().1, to))
                .count()
        });
        for _ in 0..CONNECTIONS {
            connector.connect(to).await.unwrap();
        }
        assert_eq!(accepting.join().unwrap(), CONNECTIONS);
    }

    #[tokio::test]
    async fn connect_to_closed_port_returns_connection_refused() {
        let to = listener().1; // the listener is dropped
        let error = Connector::unmarked().connect(to).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test(start_paused = true)]
    async fn remembered_connections_expire_and_are_bounded() {
        let (_listener, to) = listener();
        let connector = Connector::marked(0).unwrap();
        let first = connector.connect(to).await.unwrap().local_addr().unwrap();
        tokio::time::advance(REMEMBERED * 2).await;
        let stream = connector.connect(to).await.unwrap();
        assert!(!connector.is_own_connection(first, to));
        let mut recent = connector.recent.as_ref().unwrap().lock().unwrap();
        for _ in 0..2 * MAX_REMEMBERED {
            remember(&mut recent, stream.local_addr().unwrap(), to);
        }
        assert_eq!(recent.len(), MAX_REMEMBERED);
    }

    #[tokio::test]
    async fn connect_over_ipv6_reaches_the_listener() {
        // The host may lack IPv6.
        let Ok(listener) = std::net::TcpListener::bind("[::1]:0") else { return };
        let to = listener.local_addr().unwrap();
        let stream = Connector::unmarked().connect(to).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), to);
    }
}
