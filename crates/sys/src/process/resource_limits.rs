//! The limit on open descriptors, and how the process behaves when it is reached.
//!
//! Many systems start a process with a soft limit (`RLIMIT_NOFILE`) of 1024, for old programs that use
//! select(2), and let it raise the soft limit to the hard one. A client connection needs at least one
//! descriptor, a passthrough flow needs two.
//!
//! * The last descriptors below the limit are reserved ([`is_reserved`]) for the admin endpoint, certificate
//!   files and the configuration file, which must stay accessible when connections use up all others.
//! * A client that waits in the accept queue is reset when no descriptor is left, rather than kept waiting
//!   ([`SpareDescriptor`]).
//! * A failed connect does not count against the endpoint if the cause is local ([`is_local_shortage`]).

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::TcpListener;

use crate::simulation;

/// The limit that [`raise_descriptor_limit`] has returned; 0 before.
static RAISED_LIMIT: AtomicU64 = AtomicU64::new(0);

/// Raises the soft limit on descriptors to the hard limit and returns it.
///
/// # Errors
/// What `setrlimit(2)` returns.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let limit = getrlimit(Resource::Nofile);
    // A service manager's seccomp filter may forbid the call, so it is made only if it is needed.
    if limit.current != limit.maximum {
        setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit })?;
    }
    let limit = limit.maximum.unwrap_or(u64::MAX);
    RAISED_LIMIT.store(limit, Relaxed);
    Ok(limit)
}

/// The soft limit on descriptors; `u64::MAX` if there is none. Once it is raised it takes no system call, since each
/// connection asks for it. A limit that another process changes later is not noticed.
fn descriptor_limit() -> u64 {
    if simulation::is_running() {
        return u64::MAX;
    }
    match RAISED_LIMIT.load(Relaxed) {
        0 => getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
        raised => raised,
    }
}

/// How many descriptors below this limit are reserved.
fn reserve(limit: u64) -> u64 {
    (limit / 16).clamp(4, 32)
}

/// The number of descriptors that connections may use.
pub fn for_connections() -> usize {
    let limit = descriptor_limit();
    usize::try_from(limit.saturating_sub(reserve(limit))).unwrap_or(usize::MAX)
}

/// Whether a descriptor that was just opened is a reserved one, which a connection may not use. A new
/// descriptor has the lowest free number (POSIX, open), so all descriptors below it are in use.
pub fn is_reserved(socket: &impl AsRawFd) -> bool {
    let Ok(number) = u64::try_from(socket.as_raw_fd()) else { return false };
    let limit = descriptor_limit();
    number >= limit.saturating_sub(reserve(limit))
}

/// The error of a connection that could only use a reserved descriptor.
pub fn out_of_descriptors() -> io::Error {
    io::Error::from_raw_os_error(libc::EMFILE)
}

/// Whether a connect to `to` failed for lack of a local resource (descriptors, memory, ports) and so gives
/// no information about the endpoint.
pub fn is_local_shortage(error: &io::Error, to: SocketAddr) -> bool {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => true,
        // With IPv4, all local ports to that address are in use (ip(7)). With IPv6, the host may also
        // have the address family but no address.
        Some(libc::EADDRNOTAVAIL) => to.is_ipv4(),
        _ => false,
    }
}

/// A descriptor that stays open until no other is left. Closing it makes one accept possible, so that the
/// accepted connection can be reset.
#[derive(Debug)]
pub struct SpareDescriptor(Option<Socket>);

impl SpareDescriptor {
    /// Opens a spare descriptor, if there is one left.
    pub fn open() -> Self {
        Self(Socket::new(Domain::UNIX, Type::STREAM, None).ok())
    }

    /// No descriptor.
    pub fn none() -> Self {
        Self(None)
    }

    /// Resets the connection that has waited longest in the accept queue.
    ///
    /// # Errors
    /// `WouldBlock` when the queue is empty; `EMFILE` when another thread has used the descriptor first.
    pub fn reset_oldest_waiting(&mut self, listener: &TcpListener) -> io::Result<()> {
        self.0 = None;
        let reset = SockRef::from(listener)
            .accept()
            .and_then(|(stream, _)| stream.set_linger(Some(Duration::ZERO)));
        *self = Self::open();
        reset
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpStream;

    /// A descriptor number that no socket has.
    struct Number(i32);

    impl AsRawFd for Number {
        fn as_raw_fd(&self) -> i32 {
            self.0
        }
    }

    #[test]
    fn raise_descriptor_limit_sets_soft_limit_to_hard_limit() {
        let limit = raise_descriptor_limit().unwrap();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let (soft, hard) = (line.split_whitespace().nth(3), line.split_whitespace().nth(4));
        assert_eq!(soft, hard);
        assert_eq!(soft, Some(limit.to_string().as_str()));
        assert_eq!(raise_descriptor_limit().unwrap(), limit);
    }

    #[test]
    fn is_reserved_is_true_for_the_last_descriptors_only() {
        for (limit, reserved) in [(64, 4), (100, 6), (1024, 32), (1 << 20, 32)] {
            assert_eq!(reserve(limit), reserved);
        }
        let limit = descriptor_limit();
        let first = i32::try_from(limit - reserve(limit)).unwrap();
        assert!(is_reserved(&Number(first)) && !is_reserved(&Number(first - 1)));
        assert!(!is_reserved(&Number(-1)) && !is_reserved(&Number(0)));
    }

    #[test]
    fn is_local_shortage_is_true_for_local_errors_only() {
        let (v4, v6) = ("10.0.0.1:6443".parse().unwrap(), "[::1]:6443".parse().unwrap());
        assert!(is_local_shortage(&out_of_descriptors(), v6));
        for local in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            let error = io::Error::from_raw_os_error(local);
            assert!(is_local_shortage(&error, v4) && is_local_shortage(&error, v6), "{error}");
        }
        for remote in [libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ENETUNREACH, libc::ETIMEDOUT] {
            assert!(!is_local_shortage(&io::Error::from_raw_os_error(remote), v4));
        }
        let no_address = io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
        assert!(is_local_shortage(&no_address, v4) && !is_local_shortage(&no_address, v6));
        assert!(!is_local_shortage(&io::Error::other("tls"), v4));
    }

    #[tokio::test]
    async fn reset_oldest_waiting_resets_one_connection_and_reopens_the_spare_descriptor() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut spare = SpareDescriptor::open();
        assert_eq!(
            spare.reset_oldest_waiting(&listener).unwrap_err().kind(),
            io::ErrorKind::WouldBlock
        );
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        spare.reset_oldest_waiting(&listener).unwrap();
        let error = client.read_u8().await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
        assert!(spare.0.is_some());
    }
}
