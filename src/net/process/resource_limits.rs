//! What this process may run out of: descriptors above all, of which a passed connection takes two.
//!
//! Many places start a process with a limit of 1024 (`RLIMIT_NOFILE`, soft), for the sake of old
//! programs that use select(2), and let it raise that itself up to the hard limit. When all are
//! used a connection that waits in the queue of a listener is told so, rather than left there; and
//! a connect that fails for it says nothing about the endpoint that it was meant for.
//!
//! The last few are not for connections: whoever asks what is the matter is to be answered, and a
//! certificate or a configuration is to be read, just then ([`is_reserved`]).

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{Domain, SockRef, Socket, Type};
use tokio::net::TcpListener;

/// Raises the limit on descriptors as far as this process may. Returns what it is then.
///
/// # Errors
/// What the kernel says.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let mut limit = limit()?;
    if limit.rlim_cur == limit.rlim_max {
        // Not asked for what is there: a service manager's filter may forbid the call.
        return Ok(limit.rlim_cur);
    }
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: the kernel reads one `rlimit` at a pointer to a live one.
    #[allow(unsafe_code)]
    let set = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    if set == 0 { Ok(limit.rlim_cur) } else { Err(io::Error::last_os_error()) }
}

fn limit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the kernel writes one `rlimit` at a pointer to a live one.
    #[allow(unsafe_code)]
    let read = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    if read == 0 { Ok(limit) } else { Err(io::Error::last_os_error()) }
}

/// How many descriptors of so many are kept back.
fn kept_back(limit: u64) -> u64 {
    (limit / 16).clamp(4, 32)
}

/// Whether a descriptor that has just been opened is one of those that are kept back from clients
/// and for clients. A new one has the lowest number that is free (accept(2), POSIX), so all below it
/// are used.
pub fn is_reserved(socket: &impl AsRawFd) -> bool {
    let Ok(number) = u64::try_from(socket.as_raw_fd()) else { return false };
    let limit = limit().map(|limit| limit.rlim_cur);
    limit.is_ok_and(|limit| number >= limit.saturating_sub(kept_back(limit)))
}

/// The error of a socket that may not be opened for want of descriptors.
pub fn out_of_descriptors() -> io::Error {
    io::Error::from_raw_os_error(libc::EMFILE)
}

/// Whether a connect to `to` failed for want of something of ours: descriptors, memory, ports. The
/// endpoint has no part in it.
pub fn is_local_shortage(error: &io::Error, to: SocketAddr) -> bool {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => true,
        // All ports to that address are used (ip(7)). For IPv6 it is also what a host says that
        // has that family without an address.
        Some(libc::EADDRNOTAVAIL) => to.is_ipv4(),
        _ => false,
    }
}

/// A descriptor that is kept for the time when there are none: with it a connection can be taken
/// out of a queue, to be refused.
#[derive(Debug)]
pub struct SpareDescriptor(Option<Socket>);

impl SpareDescriptor {
    /// Keeps one.
    pub fn open() -> Self {
        Self(Socket::new(Domain::UNIX, Type::STREAM, None).ok())
    }

    /// Resets the connection that has waited longest.
    ///
    /// # Errors
    /// `WouldBlock` when none waits; what accept(2) says, when another thread was faster to take
    /// the descriptor.
    pub fn reset_oldest_waiting(&mut self, listener: &TcpListener) -> io::Result<()> {
        self.0 = None;
        let refused = SockRef::from(listener)
            .accept()
            .and_then(|(stream, _)| stream.set_linger(Some(Duration::ZERO)));
        *self = Self::open();
        refused
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio::net::TcpStream;

    struct Number(i32);

    impl AsRawFd for Number {
        fn as_raw_fd(&self) -> i32 {
            self.0
        }
    }

    #[test]
    fn the_limit_is_raised_to_the_hard_one_and_stays_there() {
        let limit = raise_descriptor_limit().unwrap();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap();
        let line = limits.lines().find(|line| line.starts_with("Max open files")).unwrap();
        let (soft, hard) = (line.split_whitespace().nth(3), line.split_whitespace().nth(4));
        assert_eq!(soft, hard);
        assert_eq!(soft, Some(limit.to_string().as_str()));
        assert_eq!(raise_descriptor_limit().unwrap(), limit);
    }

    #[test]
    fn the_last_ones_are_kept_back() {
        for (limit, kept) in [(64, 4), (100, 6), (1024, 32), (1 << 20, 32)] {
            assert_eq!(kept_back(limit), kept);
        }
        let most = limit().unwrap().rlim_cur;
        let first = i32::try_from(most - kept_back(most)).unwrap();
        assert!(is_reserved(&Number(first)) && !is_reserved(&Number(first - 1)));
        assert!(!is_reserved(&Number(-1)) && !is_reserved(&Number(0)));
        assert!(is_local_shortage(&out_of_descriptors(), "[::1]:1".parse().unwrap()));
    }

    #[test]
    fn what_is_ours_and_what_is_theirs() {
        let (v4, v6) = ("10.0.0.1:6443".parse().unwrap(), "[::1]:6443".parse().unwrap());
        for ours in [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM] {
            let error = io::Error::from_raw_os_error(ours);
            assert!(is_local_shortage(&error, v4) && is_local_shortage(&error, v6), "{error}");
        }
        for theirs in [libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ENETUNREACH, libc::ETIMEDOUT] {
            assert!(!is_local_shortage(&io::Error::from_raw_os_error(theirs), v4));
        }
        let no_address = io::Error::from_raw_os_error(libc::EADDRNOTAVAIL);
        assert!(is_local_shortage(&no_address, v4) && !is_local_shortage(&no_address, v6));
        assert!(!is_local_shortage(&io::Error::other("tls"), v4));
    }

    #[tokio::test]
    async fn who_waits_is_reset_and_who_does_not_is_not_missed() {
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
