//! How our own connections leave: with a mark that the rules of an interception let pass, and
//! remembered for a while, so that one that is caught all the same is known when it comes back.
//!
//! An interception (nftables REDIRECT or TPROXY) catches whatever goes to an address, and what we
//! send there ourselves as well, unless the rules can tell it apart. The mark (`SO_MARK`,
//! socket(7)) is how. Rules without that exception would send every connection of ours back to us,
//! for ever: [`Connector::is_own_connection`] breaks the circle.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;

use super::tcp_options;

/// How long a connection of ours is remembered. One that is caught comes back at once; a loop that
/// is missed here is caught at its next turn.
const REMEMBERED: Duration = Duration::from_secs(5);

/// Most connections remembered; the oldest go first. More than a busy node opens in that time.
const MOST_REMEMBERED: usize = 4096;

/// Opens connections to endpoints.
#[derive(Debug, Default)]
pub struct Connector {
    mark: Option<NonZeroU32>,
    recent: Option<Mutex<VecDeque<OwnConnection>>>,
}

/// A connection that we began.
#[derive(Debug)]
struct OwnConnection {
    begun: Instant,
    from: SocketAddr,
    to: SocketAddr,
}

impl Connector {
    /// Connections that nobody intercepts: no mark, nothing to remember.
    pub fn unmarked() -> Self {
        Self::default()
    }

    /// Connections that carry `mark`, and are remembered. A mark of 0 is none: the rules tell our
    /// connections apart by something else (`meta skuid`).
    ///
    /// # Errors
    /// `PermissionDenied` when this process may not set marks: `CAP_NET_ADMIN` is missing.
    pub fn marked(mark: u32) -> io::Result<Self> {
        let mark = NonZeroU32::new(mark);
        if let Some(mark) = mark {
            // Learn it now, not at the first connection.
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
            socket.set_mark(mark.get())?;
        }
        Ok(Self { mark, recent: Some(Mutex::default()) })
    }

    /// Connects to an endpoint with the options of [`tcp_options::new_upstream_socket`] and the mark.
    ///
    /// # Errors
    /// What the kernel says: refused, unreachable, no such address family.
    pub async fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let socket = tcp_options::new_upstream_socket(to)?;
        if let Some(mark) = self.mark {
            socket.set_mark(mark.get())?;
        }
        {
            // On loopback the handshake is over when connect(2) returns, and another thread may have
            // accepted it: who asks whether it is ours waits until it is remembered.
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

    /// Whether a connection that was accepted here is one that we ourselves began lately: the same
    /// two addresses, so the same connection.
    pub fn is_own_connection(&self, from: SocketAddr, to: SocketAddr) -> bool {
        let Some(recent) = &self.recent else { return false };
        lock(recent).iter().rev().any(|ours| ours.from == from && ours.to == to)
    }
}

fn lock(recent: &Mutex<VecDeque<OwnConnection>>) -> MutexGuard<'_, VecDeque<OwnConnection>> {
    recent.lock().unwrap_or_else(PoisonError::into_inner)
}

fn remember(recent: &mut VecDeque<OwnConnection>, from: SocketAddr, to: SocketAddr) {
    let begun = Instant::now();
    let old = |ours: &OwnConnection| begun.duration_since(ours.begun) > REMEMBERED;
    while recent.front().is_some_and(old) || recent.len() >= MOST_REMEMBERED {
        recent.pop_front();
    }
    recent.push_back(OwnConnection { begun, from, to });
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
    async fn a_connection_of_ours_is_known_by_both_its_addresses() {
        let (listener, to) = listener();
        let outgoing = Connector::marked(0).unwrap();
        let stream = outgoing.connect(to).await.unwrap();
        let (_, from) = listener.accept().unwrap();
        assert_eq!(from, stream.local_addr().unwrap());
        assert!(outgoing.is_own_connection(from, to));
        let elsewhere = SocketAddr::new(to.ip(), to.port() ^ 1);
        assert!(!outgoing.is_own_connection(from, elsewhere), "another connection from that port");
        assert!(!outgoing.is_own_connection(elsewhere, to), "somebody else's");
        assert!(!Connector::unmarked().is_own_connection(from, to));
    }

    /// With workers each in a thread of its own.
    #[tokio::test]
    async fn it_is_known_to_whoever_accepts_it_first() {
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
    async fn a_refused_connection_is_an_error() {
        let to = listener().1; // closed again
        let error = Connector::unmarked().connect(to).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_short_and_bounded() {
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
    async fn ipv6_works_where_it_exists() {
        let Ok(listener) = std::net::TcpListener::bind("[::1]:0") else { return };
        let to = listener.local_addr().unwrap();
        let stream = Connector::unmarked().connect(to).await.unwrap();
        assert_eq!(stream.peer_addr().unwrap(), to);
    }
}
