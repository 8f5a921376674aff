//! ListenOptions TCP sockets: opening, changing and closing them.

use std::io;
use std::net::SocketAddr;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::TcpStream;

use super::tcp_options;

/// Connections that the kernel completes before we accept them. A control-plane event makes every
/// client on a node reconnect at once; the kernel lowers this to `net.core.somaxconn`.
pub const BACKLOG: i32 = 1024;

/// Closes a listening socket and takes what waits in its queue, which would be reset with it. A
/// connection that is complete between the last look and the close still is, unless the socket is
/// hidden ([`divert_new_connections`]).
pub fn close_and_accept_queued(listener: tokio::net::TcpListener) -> Vec<(TcpStream, SocketAddr)> {
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
/// What the kernel says; see [`is_address_family_missing`].
pub fn listen(address: SocketAddr, shared: bool) -> io::Result<std::net::TcpListener> {
    listen_with(address, &ListenOptions { shared, ..ListenOptions::default() })
}

/// What a listening socket may do beyond the usual.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ListenOptions {
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
pub fn listen_with(
    address: SocketAddr,
    options: &ListenOptions,
) -> io::Result<std::net::TcpListener> {
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
    let plain = ListenOptions { shared: options.shared, ..ListenOptions::default() };
    change_options(&SockRef::from(&socket), address, &plain, options)?;
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
pub fn change_options(
    socket: &SockRef<'_>,
    address: SocketAddr,
    from: &ListenOptions,
    to: &ListenOptions,
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
pub fn check_options(address: SocketAddr, options: &ListenOptions) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    change_options(&SockRef::from(&socket), address, &ListenOptions::default(), options)
}

/// Opens a listening socket as [`listen_with`] does, also where `ours` are in its way: sockets of this
/// process on the same port, of which one has a wildcard address, that are closed once this one is in
/// use. Until then the kernel gives a connection to the more specific address; nobody is refused.
///
/// Linux lets the two be bound if both have `SO_REUSEPORT` at that moment (socket(7)). Afterwards
/// each has it if it had it before: a second process without that option is refused as ever.
///
/// # Errors
/// What the kernel says: `AddrInUse` where somebody else is in the way too.
pub fn listen_alongside(
    address: SocketAddr,
    options: &ListenOptions,
    ours: &[&std::net::TcpListener],
) -> io::Result<std::net::TcpListener> {
    if ours.is_empty() {
        // The kernel remembers the option of the first bind for the port: it must not be a rule.
        return listen_with(address, options);
    }
    let mut before = Vec::new();
    for socket in ours {
        let socket = SockRef::from(*socket);
        before.push(socket.reuse_port()?);
        socket.set_reuse_port(true)?;
    }
    let opened = listen_with(address, &ListenOptions { shared: true, ..*options });
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
pub fn divert_new_connections(socket: &std::net::TcpListener) -> io::Result<()> {
    tcp_options::set_option(socket, libc::SOL_SOCKET, libc::SO_BINDTOIFINDEX, libc::c_int::MAX)
}

/// Whether binding failed because this host lacks the address family: a warning where several
/// addresses are bound, since the other ones do the work.
///
/// With IPv6 disabled by sysctl the family exists, but its loopback address does not.
pub fn is_address_family_missing(address: SocketAddr, error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(libc::EAFNOSUPPORT) => true,
        Some(libc::EADDRNOTAVAIL) => {
            address.is_ipv6() && (address.ip().is_loopback() || address.ip().is_unspecified())
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use tokio::io::AsyncWriteExt as _;

    #[tokio::test]
    async fn a_second_process_cannot_bind_beside_one_worker() {
        let first = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let again = listen(first.local_addr().unwrap(), false).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::AddrInUse);
        assert!(!is_address_family_missing(first.local_addr().unwrap(), &again));
    }

    #[test]
    fn an_address_becomes_a_wildcard_and_back_without_a_gap() {
        let plain = ListenOptions::default();
        let narrow = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let at = narrow.local_addr().unwrap();
        let wildcard = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), at.port());
        let in_use = |result: io::Result<std::net::TcpListener>| {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        };
        in_use(listen(wildcard, false));
        // With nothing of ours in the way, nobody can come in beside it, nor it beside others.
        let alone = listen_alongside("127.0.0.1:0".parse().unwrap(), &plain, &[]).unwrap();
        in_use(listen(alone.local_addr().unwrap(), true));
        in_use(listen_alongside(at, &plain, &[]));
        // Somebody else's address is in the way of a wildcard, ours or not.
        let mut others = at;
        others.set_ip("127.0.0.9".parse().unwrap());
        let other = listen(others, false).unwrap();
        in_use(listen_alongside(wildcard, &plain, &[&narrow]));
        drop(other);
        let wide = listen_alongside(wildcard, &plain, &[&narrow]).unwrap();
        in_use(listen(wildcard, false));
        // A connection that is made while both listen is the old one's; there is always one.
        let first = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(narrow.accept().unwrap().1, first.local_addr().unwrap());
        drop(narrow);
        let second = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(wide.accept().unwrap().1, second.local_addr().unwrap());
        let narrow = listen_alongside(at, &plain, &[&wide]).unwrap();
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
                Err(error) if is_address_family_missing(at, &error) => continue,
                narrow => narrow.unwrap(),
            };
            let at = narrow.local_addr().unwrap();
            let wide = SocketAddr::new(wide.parse().unwrap(), at.port());
            let wide = listen_alongside(wide, &ListenOptions::default(), &[&narrow]).unwrap();
            let mut waits = std::net::TcpStream::connect(at).unwrap();
            divert_new_connections(&narrow).unwrap();
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
        let queue = close_and_accept_queued(tokio::net::TcpListener::from_std(socket).unwrap());
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
            let plain = ListenOptions::default();
            let early = ListenOptions { freebind: true, ..plain };
            check_options(address, &early).unwrap();
            let option = SockRef::from(&socket);
            change_options(&option, address, &plain, &early).unwrap();
            let is_free = || {
                if address.is_ipv4() { option.freebind_v4() } else { option.freebind_v6() }.unwrap()
            };
            assert!(is_free());
            change_options(&option, address, &early, &plain).unwrap();
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
            let options = ListenOptions { freebind: true, ..ListenOptions::default() };
            let early = listen_with(address, &options).unwrap();
            assert_eq!(early.local_addr().unwrap().ip(), address.ip());
        }
    }
}
