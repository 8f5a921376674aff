//! `SO_MEMINFO`: the kernel memory of a socket's queues.
//!
//! The kernel charges it to the cgroup of the process (`memory.stat: sock` of cgroup v2), and lets a socket whose peer
//! does not read grow to `net.ipv4.tcp_wmem[2]`, and one that this process does not read to `tcp_rmem[2]`. [`super::tcp_options`] bounds both.

use std::io;
use std::os::fd::AsRawFd;

/// Number of the values of `SO_MEMINFO` (`linux/sock_diag.h`).
const VALUES: usize = libc::SK_MEMINFO_DROPS as usize + 1;

/// The memory of a socket's queues, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueMemory {
    /// Received bytes that were not read, with the kernel's overhead for their packets.
    pub received: usize,
    /// Bytes that were not acknowledged by the peer, with the same overhead.
    pub sent: usize,
    /// What the kernel has reserved besides, in pages.
    pub reserved: usize,
}

impl QueueMemory {
    /// The sum.
    pub fn total(&self) -> usize {
        self.received + self.sent + self.reserved
    }
}

/// Reads the memory of a socket's queues.
///
/// # Errors
/// What `getsockopt(2)` returns: `ENOPROTOOPT` before Linux 4.12.
pub fn read(socket: &impl AsRawFd) -> io::Result<QueueMemory> {
    let mut values = [0_i32; VALUES];
    let mut len = size_of_val(&values) as libc::socklen_t;
    // SAFETY: `values` is valid for writes of `len` bytes, and the kernel writes at most as many. A wrong descriptor
    // is an error, not undefined behaviour.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MEMINFO,
            values.as_mut_ptr().cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    // The kernel's reserve is negative for a moment while it is refilled.
    let value = |index: libc::c_int| usize::try_from(values[index as usize]).unwrap_or(0);
    Ok(QueueMemory {
        received: value(libc::SK_MEMINFO_RMEM_ALLOC) + value(libc::SK_MEMINFO_BACKLOG),
        sent: value(libc::SK_MEMINFO_WMEM_QUEUED),
        reserved: value(libc::SK_MEMINFO_FWD_ALLOC),
    })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use super::*;
    use crate::sockets::listening::listen;
    use crate::sockets::tcp_options::{MAX_UNSENT, bound_received};

    /// A client that has a small receive buffer, and the accepted connection.
    fn pair() -> (TcpStream, TcpStream) {
        let listener: TcpListener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        listener.set_nonblocking(false).unwrap();
        let client = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
        let client = client.unwrap();
        client.set_recv_buffer_size(4096).unwrap();
        client.connect(&listener.local_addr().unwrap().into()).unwrap();
        let (accepted, _) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        (client.into(), accepted)
    }

    fn fill(mut socket: &TcpStream) -> usize {
        std::iter::from_fn(|| socket.write(&[0; 16 << 10]).ok()).sum()
    }

    #[test]
    fn accepted_socket_holds_little_for_a_client_that_does_not_read() {
        let (_client, accepted) = pair();
        let written = fill(&accepted);
        let memory = read(&accepted).unwrap();
        assert!(memory.sent >= written / 2, "{written} {memory:?}");
        // The overhead of packets on loopback is less than a half.
        assert!(memory.total() <= MAX_UNSENT as usize * 3 / 2, "{written} {memory:?}");
    }

    #[test]
    fn bound_received_stops_the_growth_of_the_receive_queue() {
        let (mut client, accepted) = pair();
        client.set_nonblocking(true).unwrap();
        client.write_all(&[0; 1000]).unwrap();
        bound_received(&accepted, Some(16 << 10)).unwrap();
        let written = fill(&client);
        let memory = read(&accepted).unwrap();
        assert!((1..=64 << 10).contains(&memory.received), "{written} {memory:?}");
    }

    #[test]
    fn read_of_a_non_socket_returns_error() {
        assert!(read(&std::io::stderr()).is_err());
        assert!(bound_received(&std::io::stderr(), Some(1)).is_err());
    }
}
