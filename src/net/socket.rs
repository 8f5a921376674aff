//! Sockets with the options that their place needs: listening, and connecting upstream.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::TcpStream;

use super::shortage;

/// Connections that the kernel completes before we accept them. A control-plane event makes every
/// client on a node reconnect at once; the kernel lowers this to `net.core.somaxconn`.
pub const BACKLOG: i32 = 1024;

/// Closes a listening socket and takes what waits in its queue, which would be reset with it. A
/// connection that is complete between the last look and the close still is, unless the socket is
/// hidden ([`hide`]).
pub fn close_and_take_queue(listener: tokio::net::TcpListener) -> Vec<(TcpStream, SocketAddr)> {
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let mut queue = Vec::new();
    for _ in 0..BACKLOG {
        let Ok((stream, from)) = listener.accept() else { break };
        queue.push((stream, from));
    }
    drop(listener);
    let ready = |(stream, from): (std::net::TcpStream, SocketAddr)| {
        stream.set_nonblocking(true).ok()?;
        Some((TcpStream::from_std(stream).ok()?, from))
    };
    queue.into_iter().filter_map(ready).collect()
}

/// Opens a listening socket, ready for a runtime to take over.
///
/// `shared` sets `SO_REUSEPORT`, so that each worker has a queue of its own. It stays off with one
/// worker: it would let a second process start silently beside this one.
///
/// # Errors
/// What the kernel says; see [`family_is_missing`].
pub fn listen(address: SocketAddr, shared: bool) -> io::Result<std::net::TcpListener> {
    listen_as(address, &Listening { shared, ..Listening::default() })
}

/// What a listening socket may do beyond the usual.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Listening {
    /// `SO_REUSEPORT`: one of several on this address, all of this process.
    pub shared: bool,
    /// `IP_FREEBIND` (ip(7)): the address may be one that this host does not have yet.
    pub freebind: bool,
    /// `IP_TRANSPARENT` (ip(7)): takes what TPROXY sends, whatever its destination. Needs
    /// `CAP_NET_ADMIN`.
    pub transparent: bool,
}

/// Opens a listening socket as [`listen`] does, with more options.
///
/// # Errors
/// What the kernel says; `PermissionDenied` for `transparent` without the capability.
pub fn listen_as(address: SocketAddr, options: &Listening) -> io::Result<std::net::TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A restart must not wait for connections in TIME_WAIT.
    socket.set_reuse_address(true)?;
    if options.shared {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        // Each family is bound by name: `[::]` does not take IPv4 too.
        socket.set_only_v6(true)?;
    }
    let plain = Listening { shared: options.shared, ..Listening::default() };
    change(&SockRef::from(&socket), address, &plain, options)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Makes a socket that listens what another configuration wants of it, with its address, its queue
/// and its connections: `freebind` counts when it is bound and `transparent` for each packet, so
/// both may be set at any time. All copies of the descriptor see it.
///
/// # Errors
/// `PermissionDenied` for `transparent` without the capability.
pub fn change(
    socket: &SockRef<'_>,
    address: SocketAddr,
    from: &Listening,
    to: &Listening,
) -> io::Result<()> {
    if from.freebind != to.freebind {
        match address {
            SocketAddr::V4(_) => socket.set_freebind_v4(to.freebind)?,
            SocketAddr::V6(_) => socket.set_freebind_v6(to.freebind)?,
        }
    }
    if from.transparent != to.transparent {
        match address {
            SocketAddr::V4(_) => socket.set_ip_transparent_v4(to.transparent)?,
            SocketAddr::V6(_) => socket.set_ip_transparent_v6(to.transparent)?,
        }
    }
    Ok(())
}

/// Whether a socket for an address may have these options: tried on one that is closed again.
///
/// # Errors
/// `PermissionDenied` for `transparent` without the capability.
pub fn may_be(address: SocketAddr, options: &Listening) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    change(&SockRef::from(&socket), address, &Listening::default(), options)
}

/// Opens a listening socket as [`listen_as`] does, also where `ours` are in its way: sockets of this
/// process on the same port, of which one has a wildcard address, that are closed once this one is in
/// use. Until then the kernel gives a connection to the more specific address; nobody is refused.
///
/// Linux lets the two be bound if both have `SO_REUSEPORT` at that moment (socket(7)). Afterwards
/// each has it if it had it before: a second process without that option is refused as ever.
///
/// # Errors
/// What the kernel says: `AddrInUse` where somebody else is in the way too.
pub fn listen_beside(
    address: SocketAddr,
    options: &Listening,
    ours: &[&std::net::TcpListener],
) -> io::Result<std::net::TcpListener> {
    if ours.is_empty() {
        // The kernel remembers the option of the first bind for the port: it must not be a rule.
        return listen_as(address, options);
    }
    let mut before = Vec::new();
    for socket in ours {
        let socket = SockRef::from(*socket);
        before.push(socket.reuse_port()?);
        socket.set_reuse_port(true)?;
    }
    let opened = listen_as(address, &Listening { shared: true, ..*options });
    for (socket, shared) in ours.iter().zip(before) {
        SockRef::from(*socket).set_reuse_port(shared)?;
    }
    let opened = opened?;
    SockRef::from(&opened).set_reuse_port(options.shared)?;
    Ok(opened)
}

/// Hides a listening socket from whoever connects from now on: the kernel gives them to another one on
/// the port, or refuses them. It keeps its queue, and its connections are as others.
///
/// A listening socket that is bound to an interface is found only by what arrives there
/// (`SO_BINDTODEVICE`, socket(7)), and no interface has the number that it is bound to here. That is
/// for good, for every copy of the descriptor: taking it back needs `CAP_NET_RAW`.
///
/// # Errors
/// What the kernel says: Linux before 5.7 wants `CAP_NET_RAW`.
pub fn hide(socket: &std::net::TcpListener) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, libc::c_int::MAX)
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

/// Unanswered probes before a client is taken for gone: two minutes after its last sign of life, and
/// not for a few lost packets.
const CLIENT_PROBE_COUNT: u32 = 9;

/// Options of an accepted client connection: no Nagle delay, and keepalives so that a client that
/// vanished without a word is noticed by the kernel, within two minutes on every host.
///
/// # Errors
/// What the kernel says.
pub fn prepare_accepted(stream: &TcpStream) -> io::Result<()> {
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
/// and death visible. [`super::outgoing::Outgoing`] connects it.
///
/// # Errors
/// What the kernel says: no such address family, too many open files; the last few are kept back.
pub fn connecting(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if shortage::is_kept_back(&socket) {
        return Err(shortage::no_descriptors());
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
pub fn probe_now(stream: &impl AsRawFd) -> io::Result<()> {
    set_tcp_option(stream, libc::TCP_KEEPIDLE, PROBE_IDLE.as_secs() as libc::c_int)
}

/// Sends no keepalive probes any more: for a connection that is to be idle on the wire.
///
/// # Errors
/// What the kernel says.
pub fn stop_keepalives(stream: &TcpStream) -> io::Result<()> {
    SockRef::from(stream).set_keepalive(false)
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
    set_option(socket, libc::IPPROTO_TCP, option, value)
}

fn set_option(
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
    use super::super::outgoing::Outgoing;
    use super::*;
    use std::io::Read as _;
    use tokio::io::AsyncWriteExt as _;

    #[tokio::test]
    async fn a_connection_carries_the_options() {
        let listener = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let to = listener.local_addr().unwrap();
        let stream = Outgoing::plain().connect(to).await.unwrap();
        assert!(stream.nodelay().unwrap());
        let socket = SockRef::from(&stream);
        assert!(socket.keepalive().unwrap());
        assert_eq!(socket.tcp_keepalive_time().unwrap(), PROBE_IDLE);
        assert!(socket.tcp_thin_linear_timeouts().unwrap());
        probe_now(&stream).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        prepare_accepted(&accepted).unwrap();
        assert!(accepted.nodelay().unwrap());
        let socket = SockRef::from(&accepted);
        let (idle, pause) =
            (socket.tcp_keepalive_time().unwrap(), socket.tcp_keepalive_interval().unwrap());
        let gone = idle + pause * socket.tcp_keepalive_retries().unwrap();
        assert_eq!(gone, Duration::from_secs(120));
    }

    #[tokio::test]
    async fn a_second_process_cannot_bind_beside_one_worker() {
        let first = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let again = listen(first.local_addr().unwrap(), false).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        assert!(!family_is_missing(first.local_addr().unwrap(), &again));
    }

    #[test]
    fn an_address_becomes_a_wildcard_and_back_without_a_gap() {
        let plain = Listening::default();
        let narrow = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let at = narrow.local_addr().unwrap();
        let wildcard = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), at.port());
        let in_use = |result: io::Result<std::net::TcpListener>| {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        };
        in_use(listen(wildcard, false));
        // With nothing of ours in the way, nobody can come in beside it, nor it beside others.
        let alone = listen_beside("127.0.0.1:0".parse().unwrap(), &plain, &[]).unwrap();
        in_use(listen(alone.local_addr().unwrap(), true));
        in_use(listen_beside(at, &plain, &[]));
        // Somebody else's address is in the way of a wildcard, ours or not.
        let mut others = at;
        others.set_ip("127.0.0.9".parse().unwrap());
        let other = listen(others, false).unwrap();
        in_use(listen_beside(wildcard, &plain, &[&narrow]));
        drop(other);
        let wide = listen_beside(wildcard, &plain, &[&narrow]).unwrap();
        in_use(listen(wildcard, false));
        // A connection that is made while both listen is the old one's; there is always one.
        let first = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(narrow.accept().unwrap().1, first.local_addr().unwrap());
        drop(narrow);
        let second = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(wide.accept().unwrap().1, second.local_addr().unwrap());
        let narrow = listen_beside(at, &plain, &[&wide]).unwrap();
        drop(wide);
        in_use(listen(at, false));
        let third = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(narrow.accept().unwrap().1, third.local_addr().unwrap());
    }

    #[test]
    fn a_hidden_socket_leaves_new_connections_to_another_one() {
        for (narrow, wide) in [("127.0.0.1", "0.0.0.0"), ("::1", "::")] {
            let at = SocketAddr::new(narrow.parse().unwrap(), 0);
            let narrow = match listen(at, false) {
                Err(error) if family_is_missing(at, &error) => continue,
                narrow => narrow.unwrap(),
            };
            let at = narrow.local_addr().unwrap();
            let wide = SocketAddr::new(wide.parse().unwrap(), at.port());
            let wide = listen_beside(wide, &Listening::default(), &[&narrow]).unwrap();
            let mut waits = std::net::TcpStream::connect(at).unwrap();
            hide(&narrow).unwrap();
            let comes = std::net::TcpStream::connect(at).unwrap();
            assert_eq!(wide.accept().unwrap().1, comes.local_addr().unwrap());
            let (kept, from) = narrow.accept().unwrap();
            assert_eq!(from, waits.local_addr().unwrap());
            assert_eq!(narrow.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            drop((narrow, wide));
            // It is as others, also when nobody listens there any more.
            drop(kept);
            assert_eq!(waits.read(&mut [0]).unwrap(), 0);
            let refused = std::net::TcpStream::connect(at).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        }
    }

    #[tokio::test]
    async fn a_socket_that_is_closed_leaves_nobody_in_its_queue() {
        let socket = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let at = socket.local_addr().unwrap();
        let mut clients: Vec<_> =
            (0..20).map(|_| std::net::TcpStream::connect(at).unwrap()).collect();
        let queue = close_and_take_queue(tokio::net::TcpListener::from_std(socket).unwrap());
        let gone = std::net::TcpStream::connect(at).unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(queue.len(), clients.len());
        for ((mut stream, from), client) in queue.into_iter().zip(&mut clients) {
            assert_eq!(from, client.local_addr().unwrap());
            // A runtime can wait on it, and it still carries bytes.
            stream.write_all(b"hello").await.unwrap();
            let mut told = [0; 5];
            client.read_exact(&mut told).unwrap();
            assert_eq!(&told, b"hello");
        }
    }

    #[tokio::test]
    async fn workers_share_a_port() {
        let first = listen("127.0.0.1:0".parse().unwrap(), true).unwrap();
        listen(first.local_addr().unwrap(), true).unwrap();
    }

    #[test]
    fn an_open_socket_is_changed_and_its_queue_stays() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(socket) = listen(address.parse().unwrap(), false) else { continue };
            let address = socket.local_addr().unwrap();
            let client = std::net::TcpStream::connect(address).unwrap();
            let plain = Listening::default();
            let early = Listening { freebind: true, ..plain };
            may_be(address, &early).unwrap();
            let option = SockRef::from(&socket);
            change(&option, address, &plain, &early).unwrap();
            let is_free = || {
                if address.is_ipv4() { option.freebind_v4() } else { option.freebind_v6() }.unwrap()
            };
            assert!(is_free());
            change(&option, address, &early, &plain).unwrap();
            assert!(!is_free());
            assert_eq!(socket.accept().unwrap().1, client.local_addr().unwrap());
        }
    }

    #[test]
    fn an_address_that_this_host_does_not_have() {
        // TEST-NET-1 and the documentation prefix: RFC 5737, RFC 3849.
        for address in ["192.0.2.1:0", "[2001:db8::1]:0"] {
            let address: SocketAddr = address.parse().unwrap();
            let plain = listen(address, false).unwrap_err();
            if plain.raw_os_error() == Some(libc::EAFNOSUPPORT) {
                continue;
            }
            assert_eq!(plain.raw_os_error(), Some(libc::EADDRNOTAVAIL));
            let options = Listening { freebind: true, ..Listening::default() };
            let early = listen_as(address, &options).unwrap();
            assert_eq!(early.local_addr().unwrap().ip(), address.ip());
        }
    }
}
