//! The original destination of connections that nftables redirected to a transparent listener.
//!
//! REDIRECT rewrites the destination; the kernel's connection tracking stores the original one
//! (`SO_ORIGINAL_DST`, `linux/netfilter_ipv4.h`). TPROXY does not rewrite it: the local address of the
//! accepted socket is the original destination (`Documentation/networking/tproxy.rst`).

use std::io;
use std::net::SocketAddr;

use socket2::SockRef;
use tokio::net::TcpStream;

use super::connector::Connector;

/// How a connection reached a transparent listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interception {
    /// Redirected from this address, to which the client connected.
    Redirected(SocketAddr),
    /// Not redirected: the client connected to this address of the listener.
    Direct(SocketAddr),
    /// Redirected from this address of the listener to another one of it.
    RedirectedToSelf(SocketAddr),
    /// Opened by this process to this address, since the rules do not exclude jackstay's own connections.
    Loop(SocketAddr),
}

/// Classifies a connection that a transparent listener accepted from `peer`. `listening` are the addresses
/// that this process listens on; `connector` opens its own connections.
///
/// # Errors
/// The connection is closed and has no local address.
pub fn classify(
    stream: &TcpStream,
    peer: SocketAddr,
    listening: &[SocketAddr],
    connector: &Connector,
) -> io::Result<Interception> {
    let local = stream.local_addr()?;
    let original = original_destination(stream, local).unwrap_or(local);
    let is_own = connector.is_own_connection(peer, original);
    Ok(classify_addresses(local, original, listening, is_own))
}

/// The first row that applies decides.
///
/// | opened by this process | original destination | local address | result |
/// |---|---|---|---|
/// | yes | any | any | loop |
/// | no | a listening address | the same | direct |
/// | no | a listening address | another | redirected to self |
/// | no | any other | any | redirected |
fn classify_addresses(
    local: SocketAddr,
    original: SocketAddr,
    listening: &[SocketAddr],
    is_own: bool,
) -> Interception {
    let is_listening = listening.iter().any(|bind| {
        // A wildcard address matches every original destination on its port. TPROXY rules must therefore
        // intercept another port than that of a wildcard listener.
        bind.port() == original.port()
            && bind.is_ipv4() == original.is_ipv4()
            && (bind.ip() == original.ip() || bind.ip().is_unspecified())
    });
    if is_own {
        Interception::Loop(original)
    } else if is_listening && original == local {
        Interception::Direct(original)
    } else if is_listening {
        Interception::RedirectedToSelf(original)
    } else {
        Interception::Redirected(original)
    }
}

/// The destination in connection tracking; `None` without an entry, as with TPROXY.
fn original_destination(stream: &TcpStream, local: SocketAddr) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let original =
        if local.is_ipv4() { socket.original_dst_v4() } else { socket.original_dst_v6() };
    original.ok()?.as_socket()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn classify_addresses_follows_its_table() {
        let binds = [at("127.0.0.1:7443"), at("[::]:7443"), at("0.0.0.0:8443")];
        let intercepted = "10.0.0.5:6443";
        for (local, original, is_own, expected) in [
            ("127.0.0.1:7443", intercepted, false, Interception::Redirected(at(intercepted))),
            (intercepted, intercepted, false, Interception::Redirected(at(intercepted))),
            ("[::1]:7443", "[fd00::5]:6443", false, Interception::Redirected(at("[fd00::5]:6443"))),
            (intercepted, intercepted, true, Interception::Loop(at(intercepted))),
            ("127.0.0.1:7443", "127.0.0.1:7443", false, Interception::Direct(at("127.0.0.1:7443"))),
            ("[fd00::9]:7443", "[fd00::9]:7443", false, Interception::Direct(at("[fd00::9]:7443"))),
            ("10.0.0.9:8443", "10.0.0.9:8443", false, Interception::Direct(at("10.0.0.9:8443"))),
            (
                "127.0.0.1:7443",
                "10.0.0.9:8443",
                false,
                Interception::RedirectedToSelf(at("10.0.0.9:8443")),
            ),
            // 127.0.0.1:7443 does not match other addresses on its port.
            (
                "127.0.0.1:7443",
                "10.0.0.5:7443",
                false,
                Interception::Redirected(at("10.0.0.5:7443")),
            ),
        ] {
            assert_eq!(
                classify_addresses(at(local), at(original), &binds, is_own),
                expected,
                "{local} {original}"
            );
        }
    }

    #[tokio::test]
    async fn classify_of_plain_connection_is_direct() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bind = listener.local_addr().unwrap();
        let _client = TcpStream::connect(bind).await.unwrap();
        let (stream, peer) = listener.accept().await.unwrap();
        let found = classify(&stream, peer, &[bind], &Connector::unmarked()).unwrap();
        assert_eq!(found, Interception::Direct(bind));
    }
}
