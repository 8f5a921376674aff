//! Listening sockets: opening, changing and closing them.

use std::fs::{Permissions, set_permissions};
use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::TcpStream;

use super::tcp_options::{self, MAX_UNSENT};

/// Length of the accept queue: after a control-plane event, every client of a node reconnects at once. A hostile
/// client fills it at any time, and a client whose SYN finds it full tries again after a second. The kernel limits it
/// to `net.core.somaxconn`, which has this default.
pub const BACKLOG: i32 = 4096;

/// Options of a listening socket.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ListenOptions {
    /// `SO_REUSEPORT` (socket(7)): several sockets of this process may have the address.
    pub shared: bool,
    /// `IP_FREEBIND` (ip(7)): the host need not have the address when the socket is bound.
    pub freebind: bool,
    /// `IP_TRANSPARENT` (ip(7)): accepts connections that TPROXY delivers for any destination. Needs
    /// `CAP_NET_ADMIN`.
    pub transparent: bool,
}

/// Opens a non-blocking listening TCP socket.
///
/// `shared` sets `SO_REUSEPORT`, so that each of several workers has its own accept queue. It also lets other
/// processes of the same user listen on the address, so a single worker does not set it.
///
/// # Errors
/// What the kernel returns; see [`is_address_family_missing`].
pub fn listen(address: SocketAddr, shared: bool) -> io::Result<std::net::TcpListener> {
    listen_with(address, &ListenOptions { shared, ..ListenOptions::default() })
}

/// Opens a listening socket as [`listen`] does, with all options.
///
/// # Errors
/// What the kernel returns; `PermissionDenied` for `transparent` without the capability.
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
        // Each family is configured by its own address: `[::]` does not accept IPv4.
        socket.set_only_v6(true)?;
    }
    change_options(&SockRef::from(&socket), address, &ListenOptions::default(), options)?;
    socket.set_nonblocking(true)?;
    tcp_options::configure_accepted_by(&socket, MAX_UNSENT)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// Checks that no other socket listens on an address, also none that would share it by `SO_REUSEPORT`.
///
/// # Errors
/// `AddrInUse`, or what else the kernel returns for a bind.
pub fn ensure_unused(address: SocketAddr, options: &ListenOptions) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    change_options(&SockRef::from(&socket), address, &ListenOptions::default(), options)?;
    socket.bind(&address.into())
}

/// Changes `freebind` and `transparent` of a socket that has the options `from`; `shared` is not changed. A
/// listening socket keeps its address, its queue and its connections. The kernel reads `freebind` at bind and
/// `transparent` for each packet, so both may change at any time. The change affects all duplicates of the
/// descriptor.
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

/// Checks on a temporary socket that this process may set the options.
///
/// # Errors
/// `PermissionDenied` for `transparent` without the capability.
pub fn check_options(address: SocketAddr, options: &ListenOptions) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    change_options(&SockRef::from(&socket), address, &ListenOptions::default(), options)
}

/// Opens a listening socket that overlaps with the `conflicting` sockets of this process: one of them or the
/// new one has the wildcard address of the same port. The caller closes the conflicting sockets once the new
/// one is in use. Until then the kernel gives a connection to the most specific address, and refuses none.
///
/// Linux allows the bind if all of these sockets have `SO_REUSEPORT` at that moment (socket(7)). Afterwards
/// the option is restored, so that other processes cannot bind the address.
///
/// # Errors
/// What the kernel returns: `AddrInUse` if another socket conflicts too.
pub fn listen_alongside(
    address: SocketAddr,
    options: &ListenOptions,
    conflicting: &[&std::net::TcpListener],
) -> io::Result<std::net::TcpListener> {
    if conflicting.is_empty() {
        // The kernel stores SO_REUSEPORT of the first bind of a port, so it is set only if needed.
        return listen_with(address, options);
    }
    let mut before = Vec::new();
    for socket in conflicting {
        let socket = SockRef::from(*socket);
        before.push(socket.reuse_port()?);
        socket.set_reuse_port(true)?;
    }
    let opened = listen_with(address, &ListenOptions { shared: true, ..*options });
    for (socket, shared) in conflicting.iter().zip(before) {
        SockRef::from(*socket).set_reuse_port(shared)?;
    }
    let opened = opened?;
    SockRef::from(&opened).set_reuse_port(options.shared)?;
    Ok(opened)
}

/// An interface number that does not exist.
const NO_INTERFACE: NonZeroU32 = NonZeroU32::new(i32::MAX as u32).unwrap();

/// Excludes a listening socket from new connections. The kernel gives them to another socket on the port, or
/// refuses them. The socket keeps its accept queue, and accepted connections are not affected.
///
/// A listening socket that is bound to an interface receives only connections that arrive there
/// (`SO_BINDTOIFINDEX`, socket(7)); this function binds it to an interface number that does not exist. It
/// affects every duplicate of the descriptor and is permanent, since undoing it needs `CAP_NET_RAW`.
///
/// # Errors
/// What the kernel returns: Linux before 5.7 requires `CAP_NET_RAW`.
pub fn divert_new_connections(socket: &std::net::TcpListener) -> io::Result<()> {
    // On Linux the option is the same for IPv6.
    SockRef::from(socket).bind_device_by_index_v4(Some(NO_INTERFACE))
}

/// Whether [`divert_new_connections`] was called for the socket, by any process.
pub fn is_diverted(socket: &std::net::TcpListener) -> bool {
    SockRef::from(socket).device_index_v4().is_ok_and(|index| index == Some(NO_INTERFACE))
}

/// Closes a listening socket and returns the connections in its accept queue, which the close would reset. A
/// connection whose handshake completes between the last accept and the close is still reset, unless
/// [`divert_new_connections`] was called before, and the time of a TCP handshake has passed since.
pub fn close_and_accept_queued(listener: tokio::net::TcpListener) -> Vec<(TcpStream, SocketAddr)> {
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let accepted = std::iter::from_fn(|| listener.accept().ok());
    // Linux queues one connection more than the backlog (`sk_acceptq_is_full`).
    let queued: Vec<_> = accepted.take(BACKLOG as usize + 1).collect();
    drop(listener);
    let register = |(stream, from): (std::net::TcpStream, SocketAddr)| {
        stream.set_nonblocking(true).ok()?;
        Some((TcpStream::from_std(stream).ok()?, from))
    };
    queued.into_iter().filter_map(register).collect()
}

/// Whether a bind failed because the host lacks the address family. For a listener with several addresses
/// this is only a warning, since it can serve on the others.
///
/// While IPv6 is disabled by sysctl, the family exists but its loopback and wildcard addresses do not.
pub fn is_address_family_missing(address: SocketAddr, error: &io::Error) -> bool {
    match error.raw_os_error() {
        Some(libc::EAFNOSUPPORT) => true,
        Some(libc::EADDRNOTAVAIL) => {
            address.is_ipv6() && (address.ip().is_loopback() || address.ip().is_unspecified())
        }
        _ => false,
    }
}

/// Listens at `path`, which gets this mode, and replaces a socket that exists there. Creates a missing
/// directory. A client needs write permission to connect (unix(7)).
///
/// The socket is bound under a temporary name and renamed, so a client always reaches the old socket or the
/// new one.
///
/// # Errors
/// The directory cannot be written, or the path is too long for a Unix socket (108 bytes, unix(7)).
pub fn listen_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    // A rename to a path that is too long would succeed, but clients could not connect to it.
    std::os::unix::net::SocketAddr::from_pathname(path)?;
    let directory = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(directory)?;
    let new = tempfile::Builder::new().prefix(".jackstay.").make_in(directory, |new| {
        let listener = UnixListener::bind(new)?;
        set_permissions(new, Permissions::from_mode(mode))?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    })?;
    new.persist(path).map_err(|failed| failed.error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use tokio::io::AsyncWriteExt as _;

    #[tokio::test]
    async fn listen_on_unshared_address_in_use_fails() {
        let first = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let error = listen(first.local_addr().unwrap(), false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert!(!is_address_family_missing(first.local_addr().unwrap(), &error));
    }

    #[test]
    fn listen_alongside_replaces_address_by_wildcard_and_back_without_a_gap() {
        let plain = ListenOptions::default();
        let narrow = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let at = narrow.local_addr().unwrap();
        let wildcard = SocketAddr::new(std::net::Ipv4Addr::UNSPECIFIED.into(), at.port());
        let expect_in_use = |result: io::Result<std::net::TcpListener>| {
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::AddrInUse);
        };
        expect_in_use(listen(wildcard, false));
        // Without a conflicting socket of this process, SO_REUSEPORT is not set.
        let alone = listen_alongside("127.0.0.1:0".parse().unwrap(), &plain, &[]).unwrap();
        expect_in_use(listen(alone.local_addr().unwrap(), true));
        expect_in_use(listen_alongside(at, &plain, &[]));
        // A socket that is not listed still conflicts with the wildcard.
        let other = SocketAddr::new([127, 0, 0, 9].into(), at.port());
        let other = listen(other, false).unwrap();
        expect_in_use(listen_alongside(wildcard, &plain, &[&narrow]));
        drop(other);
        let wide = listen_alongside(wildcard, &plain, &[&narrow]).unwrap();
        expect_in_use(listen(wildcard, false));
        // While both listen, the kernel gives a connection to the more specific address.
        let first = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(narrow.accept().unwrap().1, first.local_addr().unwrap());
        drop(narrow);
        let second = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(wide.accept().unwrap().1, second.local_addr().unwrap());
        let narrow = listen_alongside(at, &plain, &[&wide]).unwrap();
        drop(wide);
        expect_in_use(listen(at, false));
        let third = std::net::TcpStream::connect(at).unwrap();
        assert_eq!(narrow.accept().unwrap().1, third.local_addr().unwrap());
    }

    #[test]
    fn divert_new_connections_gives_them_to_the_other_socket_of_the_port() {
        for (narrow, wide) in [("127.0.0.1", "0.0.0.0"), ("::1", "::")] {
            let at = SocketAddr::new(narrow.parse().unwrap(), 0);
            let narrow = match listen(at, false) {
                Err(error) if is_address_family_missing(at, &error) => continue,
                narrow => narrow.unwrap(),
            };
            let at = narrow.local_addr().unwrap();
            let wide = SocketAddr::new(wide.parse().unwrap(), at.port());
            let wide = listen_alongside(wide, &ListenOptions::default(), &[&narrow]).unwrap();
            let mut queued = std::net::TcpStream::connect(at).unwrap();
            divert_new_connections(&narrow).unwrap();
            let later = std::net::TcpStream::connect(at).unwrap();
            assert_eq!(wide.accept().unwrap().1, later.local_addr().unwrap());
            let (accepted, from) = narrow.accept().unwrap();
            assert_eq!(from, queued.local_addr().unwrap());
            assert_eq!(narrow.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
            drop((narrow, wide));
            // An accepted connection stays usable when no socket listens on the port any more.
            drop(accepted);
            assert_eq!(queued.read(&mut [0]).unwrap(), 0);
            let refused = std::net::TcpStream::connect(at).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        }
    }

    #[tokio::test]
    async fn close_and_accept_queued_returns_every_queued_connection() {
        let socket = listen("127.0.0.1:0".parse().unwrap(), false).unwrap();
        let at = socket.local_addr().unwrap();
        let mut clients: Vec<_> =
            (0..20).map(|_| std::net::TcpStream::connect(at).unwrap()).collect();
        let queued = close_and_accept_queued(tokio::net::TcpListener::from_std(socket).unwrap());
        let refused = std::net::TcpStream::connect(at).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
        assert_eq!(queued.len(), clients.len());
        for ((mut stream, from), client) in queued.into_iter().zip(&mut clients) {
            assert_eq!(from, client.local_addr().unwrap());
            // The connection is open and registered with the runtime.
            stream.write_all(b"hello").await.unwrap();
            let mut received = [0; 5];
            client.read_exact(&mut received).unwrap();
            assert_eq!(&received, b"hello");
        }
    }

    #[tokio::test]
    async fn listen_shared_twice_on_one_address_succeeds_and_ensure_unused_fails() {
        let first = listen("127.0.0.1:0".parse().unwrap(), true).unwrap();
        let address = first.local_addr().unwrap();
        let second = listen(address, true).unwrap();
        let in_use = ensure_unused(address, &ListenOptions::default()).unwrap_err();
        assert_eq!(in_use.kind(), io::ErrorKind::AddrInUse);
        // Not a connection that one of them has accepted.
        let _client = std::net::TcpStream::connect(address).unwrap();
        let accepted = first.accept().or_else(|_| second.accept()).unwrap();
        drop((first, second));
        ensure_unused(address, &ListenOptions::default()).unwrap();
        drop(accepted);
    }

    #[test]
    fn change_options_of_open_socket_keeps_its_queue() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(socket) = listen(address.parse().unwrap(), false) else { continue };
            let address = socket.local_addr().unwrap();
            let client = std::net::TcpStream::connect(address).unwrap();
            let plain = ListenOptions::default();
            let freebind = ListenOptions { freebind: true, ..plain };
            check_options(address, &freebind).unwrap();
            let option = SockRef::from(&socket);
            let has_freebind = || {
                if address.is_ipv4() { option.freebind_v4() } else { option.freebind_v6() }.unwrap()
            };
            change_options(&option, address, &plain, &freebind).unwrap();
            assert!(has_freebind());
            change_options(&option, address, &freebind, &plain).unwrap();
            assert!(!has_freebind());
            assert_eq!(socket.accept().unwrap().1, client.local_addr().unwrap());
        }
    }

    #[test]
    fn listen_with_freebind_accepts_an_address_that_the_host_lacks() {
        // TEST-NET-1 and the documentation prefix: RFC 5737, RFC 3849.
        for address in ["192.0.2.1:0", "[2001:db8::1]:0"] {
            let address: SocketAddr = address.parse().unwrap();
            let error = listen(address, false).unwrap_err();
            if error.raw_os_error() == Some(libc::EAFNOSUPPORT) {
                continue;
            }
            assert_eq!(error.raw_os_error(), Some(libc::EADDRNOTAVAIL));
            let options = ListenOptions { freebind: true, ..ListenOptions::default() };
            let socket = listen_with(address, &options).unwrap();
            assert_eq!(socket.local_addr().unwrap().ip(), address.ip());
        }
    }

    #[test]
    fn listen_unix_replaces_a_socket_and_sets_its_mode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run").join("admin.sock");
        let first = listen_unix(&path, 0o660).unwrap();
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(), 0o660);
        let second = listen_unix(&path, 0o600).unwrap();
        assert_eq!(mode(), 0o600);
        let _client = std::os::unix::net::UnixStream::connect(&path).unwrap();
        assert!(second.accept().is_ok());
        assert_eq!(first.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
