//! Socket options of accepted and of upstream TCP connections.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use jackstay_core::line_pacing::QueueBounds;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpStream;

use crate::process::resource_limits;

/// Bytes of a send queue that were not sent yet, above which a socket accepts no more (`TCP_NOTSENT_LOWAT`, tcp(7)). It
/// bounds what a client that does not read makes the kernel hold, and unlike `SO_SNDBUF` it does not limit the bytes on
/// their way, which a fast line at a distance needs.
///
/// In L7, 128 KiB cost no throughput (200 MB to a client at 20 ms: 1.5 s with and without), but 2 to 5 % of the processor
/// time of bulk on loopback, because a connection is woken more often.
pub const MAX_UNSENT: u32 = 256 << 10;
/// The same for the sockets of a flow, and for upstream sockets. In L4, 200 MB at 20 ms took 1.7 s with 128 KiB, 1.56 s
/// with 1 MiB and 1.54 s without, since the queue must last until the next acknowledgements arrive.
pub const MAX_UNSENT_OF_FLOW: u32 = 1 << 20;
/// The same while memory is short.
pub const MIN_UNSENT: u32 = 16 << 10;
/// Sets the options of client connections on their listening socket, from which Linux copies them to each accepted
/// one: no Nagle delay, a bound on unsent bytes, and keepalive probes. The kernel closes the connection of a client that has disappeared after
/// two minutes (30 s + 9 × 10 s), so a few lost packets do not close it.
///
/// # Errors
/// What `setsockopt(2)` returns.
pub fn configure_accepted_by<S: AsFd + AsRawFd>(listener: &S, max_unsent: u32) -> io::Result<()> {
    bound_unsent(listener, max_unsent)?;
    let listener = SockRef::from(listener);
    listener.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(30))
        .with_interval(Duration::from_secs(10))
        .with_retries(9);
    listener.set_tcp_keepalive(&keepalive)
}

/// Idle time before the first keepalive probe on an upstream connection, and the time between probes.
/// Probes distinguish a stopped process from a dead path: of a stopped process, the kernel still answers
/// probes.
const PROBE_INTERVAL: Duration = Duration::from_secs(1);

/// Unanswered probes before the kernel closes an upstream connection. The maximum of Linux, so that the
/// health check closes it first.
const MAX_PROBES: u32 = 127;

/// An unconnected, non-blocking socket for an endpoint, with options that limit the delay of packet loss
/// and detect a dead path. [`super::connector::Connector`] connects it.
///
/// # Errors
/// The host lacks the address family, or `EMFILE` if no unreserved descriptor is left
/// ([`resource_limits::is_reserved`]).
pub fn new_upstream_socket(address: SocketAddr) -> io::Result<Socket> {
    let kind = Type::STREAM.nonblocking();
    let socket = Socket::new(Domain::for_address(address), kind, Some(Protocol::TCP))?;
    if resource_limits::is_reserved(&socket) {
        return Err(resource_limits::out_of_descriptors());
    }
    socket.set_tcp_nodelay(true)?;
    bound_unsent(&socket, MAX_UNSENT_OF_FLOW)?;
    let keepalive = TcpKeepalive::new()
        .with_time(PROBE_INTERVAL)
        .with_interval(PROBE_INTERVAL)
        .with_retries(MAX_PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    // Retransmissions of a stream with few packets in flight do not double the timeout (tcp(7)): a lost
    // PING is sent again up to three times within a second.
    socket.set_tcp_thin_linear_timeouts(true)?;
    Ok(socket)
}

/// Makes the kernel send a keepalive probe now, if the connection has been idle for more than a second
/// and has no unacknowledged data. Linux does so when `TCP_KEEPIDLE` is set, even to the same value.
///
/// # Errors
/// What `setsockopt(2)` returns.
pub fn send_keepalive_probe(stream: &impl AsRawFd) -> io::Result<()> {
    set_option(
        stream,
        (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
        PROBE_INTERVAL.as_secs() as libc::c_int,
    )
}

/// Stops keepalive probes, for a measurement that needs a connection without any traffic.
///
/// # Errors
/// What `setsockopt(2)` returns.
pub fn disable_keepalives(stream: &impl AsRawFd) -> io::Result<()> {
    set_option(stream, (libc::SOL_SOCKET, libc::SO_KEEPALIVE), 0)
}

/// Limits the time between retransmissions and between zero-window probes to one second
/// (`TCP_RTO_MAX_MS`, Linux 6.15). By default the time doubles up to two minutes, so a peer that disappears
/// while it is paused is detected only after minutes. Older kernels keep the default.
pub fn bound_retransmission_timeout(stream: &TcpStream) {
    /// From `linux/tcp.h`; libc, socket2 and rustix lack it.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    let _ = set_option(stream, (libc::IPPROTO_TCP, TCP_RTO_MAX_MS), 1000);
}

/// Bounds the unsent bytes of a socket; of a listening socket, those of each accepted one, too.
///
/// # Errors
/// What `setsockopt(2)` returns.
pub fn bound_unsent(socket: &impl AsRawFd, bytes: u32) -> io::Result<()> {
    set_option(socket, (libc::IPPROTO_TCP, libc::TCP_NOTSENT_LOWAT), bytes.cast_signed())
}

/// Makes the kernel drop received packets while the socket holds more than `bytes`. The peer sends them again. `None`
/// lets the kernel choose the size again, from Linux 5.15 on; on older kernels the socket keeps its bound.
///
/// # Errors
/// What `setsockopt(2)` returns.
pub fn bound_received(socket: &impl AsRawFd, bytes: Option<usize>) -> io::Result<()> {
    let Some(bytes) = bytes else {
        return set_option(socket, (libc::SOL_SOCKET, libc::SO_BUF_LOCK), 0);
    };
    // The kernel stores twice the value (socket(7)).
    let value = libc::c_int::try_from(bytes / 2).unwrap_or(libc::c_int::MAX);
    set_option(socket, (libc::SOL_SOCKET, libc::SO_RCVBUF), value)
}

/// The largest window (RFC 7323, 2.3).
const LARGEST_WINDOW: u32 = 65_535 << 14;

/// Bounds the bytes in flight of a connection: those that are sent by the size of the queue, those that are received by
/// the window. `None` lets the kernel choose.
///
/// # Errors
/// What `setsockopt(2)` returns. Before Linux 5.15, on which the kernel would never choose again, nothing is bounded.
pub fn bound_in_flight(socket: &impl AsRawFd, bounds: QueueBounds) -> io::Result<()> {
    set_option(socket, (libc::SOL_SOCKET, libc::SO_BUF_LOCK), 0)?;
    if let Some(bytes) = bounds.send {
        // The kernel stores twice the value, because about half of a queue is payload (socket(7)).
        set_option(socket, (libc::SOL_SOCKET, libc::SO_SNDBUF), bytes.cast_signed())?;
    }
    // A smaller receive queue would drop bytes for which the window has already made room. The clamp bounds only what is
    // offered from now on.
    let clamp = bounds.receive.unwrap_or(LARGEST_WINDOW);
    set_option(socket, (libc::IPPROTO_TCP, libc::TCP_WINDOW_CLAMP), clamp.cast_signed())?;
    Ok(())
}

/// Sets an integer option for which socket2 has no function, or only one with more system calls: it sets
/// keepalive parameters together with `SO_KEEPALIVE`.
fn set_option(
    socket: &impl AsRawFd,
    (level, option): (libc::c_int, libc::c_int),
    value: libc::c_int,
) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<c_int>()` bytes of `value`. A wrong descriptor is an error, not undefined
    // behaviour.
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

/// Keeps the kernel from sending anything more on a connection: it is bound to an interface that does not exist, so that no
/// route is found (`SO_BINDTOIFINDEX`, Linux 5.7 without privileges).
///
/// # Errors
/// What `setsockopt(2)` returns. Then the connection sends as before.
pub fn forbid_sending(socket: &impl AsRawFd) -> io::Result<()> {
    /// From `asm-generic/socket.h`.
    const SO_BINDTOIFINDEX: libc::c_int = 62;
    /// Interfaces are numbered from 1 on.
    const NONE: libc::c_int = 0x7fff_fff0;
    set_option(socket, (libc::SOL_SOCKET, SO_BINDTOIFINDEX), NONE)
}

/// Closes a connection with RST instead of FIN (`SO_LINGER` of zero, socket(7)), so that the peer
/// does not take it for the end of complete data.
pub fn close_with_reset(stream: TcpStream) {
    reset_when_closed(&stream);
    drop(stream);
}

/// Makes the close of a connection send RST instead of FIN.
pub fn reset_when_closed(stream: &TcpStream) {
    let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sockets::connector::Connector;
    use crate::sockets::listening::listen;

    #[tokio::test]
    async fn upstream_and_accepted_sockets_have_their_options() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let to = listener.local_addr().unwrap();
        let stream = Connector::unmarked().connect_by_kernel(to).await.unwrap();
        assert!(stream.nodelay().unwrap());
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_INTERVAL);
        assert!(socket.tcp_thin_linear_timeouts().unwrap());
        send_keepalive_probe(&stream).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(accepted.nodelay().unwrap());
        let socket = SockRef::from(&accepted);
        let interval = socket.tcp_keepalive_interval().unwrap();
        let probing = interval * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(socket.tcp_keepalive_time().unwrap() + probing, Duration::from_secs(120));
    }

    #[test]
    fn bound_in_flight_limits_each_direction_until_it_is_taken_back() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut accepted, _) = listener.accept().unwrap();
        accepted.set_nonblocking(true).unwrap();
        let socket = SockRef::from(&stream);
        let sizes = || (socket.send_buffer_size().unwrap(), socket.recv_buffer_size().unwrap());
        let before = sizes();
        let bound = |send, receive| {
            bound_in_flight(&stream, QueueBounds { send, receive }).unwrap();
            sizes()
        };
        // The receive queue keeps its size, so that nothing is dropped that is in flight.
        assert_eq!(bound(Some(12_000), Some(9_000)), (24_000, before.1));
        // The kernel chooses again: the window grows as far as the peer sends.
        bound(None, None);
        let mut sent = 0;
        while let Ok(bytes) = std::io::Write::write(&mut accepted, &[0; 4096]) {
            sent += bytes;
        }
        assert!(sent > 100_000, "{sent}");
        let mut read = vec![0; sent];
        std::io::Read::read_exact(&mut &stream, &mut read).unwrap();
        assert!(bound_in_flight(&std::io::stderr(), QueueBounds::default()).is_err());
    }
}
