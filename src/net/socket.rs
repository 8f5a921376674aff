//! Sockets with the options that their place needs: listening, and connecting upstream.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpSocket, TcpStream};

/// Connections that the kernel completes before we accept them. A control-plane event makes every
/// client on a node reconnect at once; the kernel lowers this to `net.core.somaxconn`.
const BACKLOG: i32 = 1024;

/// Opens a listening socket, ready for a runtime to take over.
///
/// `shared` sets `SO_REUSEPORT`, so that each worker has a queue of its own. It stays off with one
/// worker: it would let a second process start silently beside this one.
///
/// # Errors
/// What the kernel says; see [`family_is_missing`].
pub fn listen(address: SocketAddr, shared: bool) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A restart must not wait for connections in TIME_WAIT.
    socket.set_reuse_address(true)?;
    if shared {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        // Each family is bound by name: `[::]` does not take IPv4 too.
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Whether binding failed because this host lacks the address family: a warning where several
/// addresses are bound, since the other ones do the work.
///
/// With IPv6 disabled by sysctl the family exists, but its loopback address does not.
pub fn family_is_missing(address: SocketAddr, error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(libc::EAFNOSUPPORT) => true,
        Some(libc::EADDRNOTAVAIL) => {
            address.is_ipv6() && (address.ip().is_loopback() || address.ip().is_unspecified())
        }
        _ => false,
    }
}

/// Options of an accepted client connection: no Nagle delay, and keepalives so that a client that
/// vanished without a word is noticed by the kernel.
///
/// # Errors
/// What the kernel says.
pub fn prepare_accepted(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10));
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Idle time before the first keepalive probe on an upstream connection, and the pause between
/// probes: a stopped process answers no PING, but its kernel answers these, which tells it from a
/// dead path.
const PROBE_IDLE: Duration = Duration::from_secs(1);

/// Unanswered probes before the kernel itself gives up: never first, the verdict is ours.
const PROBE_COUNT: u32 = 127;

/// Connects to an endpoint with the options that make loss cheap and death visible.
///
/// # Errors
/// What the kernel says: refused, unreachable, no such address family.
pub async fn connect(address: SocketAddr) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(PROBE_IDLE)
        .with_interval(PROBE_IDLE)
        .with_retries(PROBE_COUNT);
    SockRef::from(&socket).set_tcp_keepalive(&keepalive)?;
    set_thin_linear_timeouts(&socket)?;
    socket.connect(address).await
}

/// Sends a keepalive probe now, if the connection has been idle for longer than a second and
/// nothing of ours is unacknowledged: Linux does so when `TCP_KEEPIDLE` is set anew.
///
/// # Errors
/// What the kernel says.
pub fn probe_now(stream: &impl AsRawFd) -> io::Result<()> {
    set_tcp_option(stream, libc::TCP_KEEPIDLE, PROBE_IDLE.as_secs() as libc::c_int)
}

/// Bounds the pause between retransmissions and between probes of a closed window to a second
/// (`TCP_RTO_MAX_MS`, Linux 6.15). Without it they double without end, and a peer that was paused
/// for minutes and then lost is asked again only after minutes. Older kernels do without.
pub fn keep_asking(stream: &TcpStream) {
    /// `linux/tcp.h`; the libc crate has no constant for it.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let _ = set_tcp_option(stream, TCP_RTO_MAX_MS, 1000);
}

/// Makes the close of a connection a reset, which its peer cannot miss: with `SO_LINGER` at zero
/// close(2) sends RST instead of FIN (socket(7)).
pub fn reset(stream: TcpStream) {
    let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    drop(stream);
}

/// Keeps retransmissions of a thin stream at one RTO instead of doubling it
/// (`TCP_THIN_LINEAR_TIMEOUTS`, tcp(7)): the second, third and fourth chance of a PING come within
/// a second.
fn set_thin_linear_timeouts(socket: &impl AsRawFd) -> io::Result<()> {
    /// `linux/tcp.h`; the libc crate has no constant for it.
    const TCP_THIN_LINEAR_TIMEOUTS: libc::c_int = 16;
    set_tcp_option(socket, TCP_THIN_LINEAR_TIMEOUTS, 1)
}

fn set_tcp_option(
    socket: &impl AsRawFd,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<c_int>()` bytes at a pointer to a live c_int.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            option,
            (&raw const value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_carries_the_options() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let stream = connect(listener.local_addr().unwrap()).await.unwrap();
        assert!(stream.nodelay().unwrap());
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_IDLE);
        probe_now(&stream).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        prepare_accepted(&accepted).unwrap();
        assert!(accepted.nodelay().unwrap());
    }

    #[tokio::test]
    async fn a_second_process_cannot_bind_beside_one_worker() {
        let first = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let again = listen(first.local_addr().unwrap(), false).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        assert!(!family_is_missing(first.local_addr().unwrap(), &again));
    }

    #[tokio::test]
    async fn workers_share_a_port() {
        let first = listen("127.0.0.1:0".parse().unwrap(), true).unwrap();
        listen(first.local_addr().unwrap(), true).unwrap();
    }

    #[tokio::test]
    async fn nobody_there_is_refused() {
        let address = {
            let listener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
            listener.local_addr().unwrap()
        };
        let error = connect(address).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
