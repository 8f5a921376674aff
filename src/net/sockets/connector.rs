//! Opens upstream connections, with a mark that excludes them from interception, and detects those that
//! were intercepted nevertheless.
//!
//! An interception (nftables REDIRECT or TPROXY) redirects every connection to an address, jackstay's own
//! ones included, unless the rules exclude them by their mark (`SO_MARK`, socket(7)). Rules without that
//! exclusion would redirect each connection of jackstay to itself in an endless loop;
//! [`Connector::is_own_connection`] ends the loop.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;

use super::tcp_options;

/// How long a connection is remembered. An intercepted connection returns at once; a loop that is missed
/// is detected at its next iteration.
const REMEMBERED: Duration = Duration::from_secs(5);

/// Maximum of connections remembered, more than a busy node opens in that time. The oldest is dropped.
const MOST_REMEMBERED: usize = 4096;

/// Opens connections to endpoints.
#[derive(Debug, Default)]
pub struct Connector {
    mark: Option<NonZeroU32>,
    recent: Option<Mutex<VecDeque<OwnConnection>>>,
}

/// A connection that this process opened.
#[derive(Debug)]
struct OwnConnection {
    opened: Instant,
    from: SocketAddr,
    to: SocketAddr,
}

impl Connector {
    /// Without a mark and without loop detection: no listener is transparent.
    pub fn unmarked() -> Self {
        Self::default()
    }

    /// With `mark` and loop detection. A mark of 0 sets none: the rules exclude jackstay's connections by
    /// another property (`meta skuid`).
    ///
    /// # Errors
    /// `PermissionDenied` when this process may not set marks: `CAP_NET_ADMIN` is missing.
    pub fn marked(mark: u32) -> io::Result<Self> {
        let mark = NonZeroU32::new(mark);
        if let Some(mark) = mark {
            // Fails at startup rather than at the first connection.
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.set_mark(mark.get())?;
        }
        Ok(Self { mark, recent: Some(Mutex::default()) })
    }

    /// Connects to an endpoint with the options of [`tcp_options::new_upstream_socket`] and the mark.
    ///
    /// # Errors
    /// What connect(2) returns: refused, unreachable, no such address family.
    pub async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = tcp_options::new_upstream_socket(to)?;
        if let Some(mark) = self.mark {
            socket.set_mark(mark.get())?;
        }
        {
            // On loopback the handshake is complete when connect(2) returns, and another thread may
            // accept the connection at once. The lock makes its query wait until this one is recorded.
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
        let stream = TcpStream::from_std(socket.into())?;
        stream.writable().await?;
        match stream.take_error()? {
            Some(error) => Err(error),
            None => Ok(stream),
        }
    }

    /// Whether an accepted connection is one that this process opened recently: both addresses are equal.
    pub fn is_own_connection(&self, from: SocketAddr, to: SocketAddr) -> bool {
        let Some(recent) = &self.recent else { return false };
        lock(recent).iter().rev().any(|own| own.from == from && own.to == to)
    }
}

fn lock(recent: &Mutex<VecDeque<OwnConnection>>) -> MutexGuard<'_, VecDeque<OwnConnection>> {
    recent.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember(recent: &mut VecDeque<OwnConnection>, from: SocketAddr, to: SocketAddr) {
    let opened = Instant::now();
    let old = |own: &OwnConnection| opened.duration_since(own.opened) > REMEMBERED;
    while recent.front().is_some_and(old) || recent.len() >= MOST_REMEMBERED {
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
        let outgoing = Connector::marked(0).unwrap();
        let stream = outgoing.connect(to).await.unwrap();
        let (_, from) = listener.accept().unwrap();
        assert_eq!(from, stream.local_addr().unwrap());
        assert!(outgoing.is_own_connection(from, to));
        let elsewhere = SocketAddr::new(to.ip(), to.port() ^ 1);
        assert!(!outgoing.is_own_connection(from, elsewhere), "another connection from that port");
        assert!(!outgoing.is_own_connection(elsewhere, to), "a connection of another process");
        assert!(!Connector::unmarked().is_own_connection(from, to));
    }

    #[tokio::test]
    async fn is_own_connection_holds_for_a_concurrent_accept() {
        const CONNECTIONS: usize = 1_000;
        let (listener, to) = listener();
        let outgoing = Arc::new(Connector::marked(0).unwrap());
        let known = Arc::clone(&outgoing);
        let accepting = std::thread::spawn(move || {
            (0..CONNECTIONS)
                .filter(|_| known.is_own_connection(listener.accept().unwrap().1, to))
                .count()
        });
        for _ in 0..CONNECTIONS {
            outgoing.connect(to).await.unwrap();
        }
        assert_eq!(accepting.join().unwrap(), CONNECTIONS);
    }

    #[tokio::test]
    async fn connect_to_closed_port_returns_connection_refused() {
        let to = listener().1; // closed again
        let error = Connector::unmarked().connect(to).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test(start_paused = true)]
    async fn remembered_connections_expire_and_are_bounded() {
        let (_listener, to) = listener();
        let outgoing = Connector::marked(0).unwrap();
        let first = outgoing.connect(to).await.unwrap().local_addr().unwrap();
        tokio::time::advance(REMEMBERED * 2).await;
        let stream = outgoing.connect(to).await.unwrap();
        assert!(!outgoing.is_own_connection(first, to));
        let mut recent = outgoing.recent.as_ref().unwrap().lock().unwrap();
        for _ in 0..2 * MOST_REMEMBERED {
            remember(&mut recent, stream.local_addr().unwrap(), to);
        }
        assert_eq!(recent.len(), MOST_REMEMBERED);
    }

    #[tokio::test]
    async fn connect_over_ipv6_where_the_host_has_it() {
        let Ok(listener) = std::net::TcpListener::bind("[::1]:0") else { return };
        let to = listener.local_addr().unwrap();
        let stream = Connector::unmarked().connect(to).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), to);
    }
}
