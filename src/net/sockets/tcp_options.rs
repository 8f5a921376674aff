//! Socket options of accepted and of upstream TCP connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpStream;

use crate::net::process::resource_limits;

/// Unanswered probes before a client is taken for gone: two minutes after its last sign of life, and
/// not for a few lost packets.
const CLIENT_PROBE_COUNT: u32 = 9;

/// Options of an accepted client connection: no Nagle delay, and keepalives so that a client that
/// vanished without a word is noticed by the kernel, within two minutes on every host.
///
/// # Errors
/// What the kernel says.
pub fn configure_accepted(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(CLIENT_PROBE_COUNT);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}

/// Idle time before the first keepalive probe on an upstream connection, and the pause between
/// probes: a stopped process answers no PING, but its kernel answers these, which tells it from a
/// dead path.
const PROBE_IDLE: Duration = Duration::from_secs(1);

/// Unanswered probes before the kernel itself gives up: never first, the verdict is ours.
const PROBE_COUNT: u32 = 127;

/// A socket for connecting to an endpoint, not yet connected, with the options that make loss cheap
/// and death visible. [`crate::net::sockets::connector::Connector`] connects it.
///
/// # Errors
/// What the kernel says: no such address family, too many open files; the last few are kept back.
pub fn new_upstream_socket(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if resource_limits::is_reserved(&socket) {
        return Err(resource_limits::out_of_descriptors());
    }
    socket.set_nonblocking(true)?;
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(PROBE_IDLE)
        .with_interval(PROBE_IDLE)
        .with_retries(PROBE_COUNT);
    socket.set_tcp_keepalive(&keepalive)?;
    set_thin_linear_timeouts(&socket)?;
    Ok(socket)
}

/// Sends a keepalive probe now, if the connection has been idle for longer than a second and
/// nothing of ours is unacknowledged: Linux does so when `TCP_KEEPIDLE` is set anew.
///
/// # Errors
/// What the kernel says.
pub fn send_keepalive_probe(stream: &impl AsRawFd) -> io::Result<()> {
    set_tcp_option(stream, libc::TCP_KEEPIDLE, PROBE_IDLE.as_secs() as libc::c_int)
}

/// Sends no keepalive probes any more: for a connection that is to be idle on the wire.
///
/// # Errors
/// What the kernel says.
pub fn disable_keepalives(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).set_keepalive(false)
}

/// Bounds the pause between retransmissions and between probes of a closed window to a second
/// (`TCP_RTO_MAX_MS`, Linux 6.15). Without it they double without end, and a peer that was paused
/// for minutes and then lost is asked again only after minutes. Older kernels do without.
pub fn bound_retransmission_timeout(stream: &TcpStream) {
    /// `linux/tcp.h`; the libc crate has no constant for it.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let _ = set_tcp_option(stream, TCP_RTO_MAX_MS, 1000);
}

/// Makes the close of a connection a reset, which its peer cannot miss: with `SO_LINGER` at zero
/// close(2) sends RST instead of FIN (socket(7)).
pub fn close_with_reset(stream: TcpStream) {
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
    set_option(socket, libc::IPPROTO_TCP, option, value)
}

pub(super) fn set_option(
    socket: &impl AsRawFd,
    level: libc::c_int,
    option: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<c_int>()` bytes at a pointer to a live c_int.
    #[allow(unsafe_code)]
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
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
    use crate::net::sockets::connector::Connector;
    use crate::net::sockets::listening::listen;

    #[tokio::test]
    async fn a_connection_carries_the_options() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let to = listener.local_addr().unwrap();
        let stream = Connector::unmarked().connect(to).await.unwrap();
        assert!(stream.nodelay().unwrap());
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_IDLE);
        assert!(socket.tcp_thin_linear_timeouts().unwrap());
        send_keepalive_probe(&stream).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        configure_accepted(&accepted).unwrap();
        assert!(accepted.nodelay().unwrap());
        let socket = SockRef::from(&accepted);
        let (idle, pause) =
            (socket.tcp_keepalive_time().unwrap(), socket.tcp_keepalive_interval().unwrap());
        let gone = idle + pause * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(gone, Duration::from_secs(120));
    }
}
