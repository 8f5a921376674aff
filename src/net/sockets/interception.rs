//! The original destination of connections that nftables redirected to a transparent listener.
//!
//! REDIRECT rewrites the destination; the kernel's connection tracking remembers the original one
//! (`SO_ORIGINAL_DST`, `linux/netfilter_ipv4.h`). TPROXY rewrites nothing: the accepted socket's
//! own address is the original destination (`Documentation/networking/tproxy.rst`).

use std::io;
use std::net::SocketAddr;

use socket2::SockRef;
use tokio::net::TcpStream;

use super::connector::Connector;

/// How a connection reached a transparent listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interception {
    /// Redirected; the client connected to this address.
    Redirected(SocketAddr),
    /// Not redirected: the client connected to the listener.
    Direct(SocketAddr),
    /// Redirected from another address of the listener.
    RedirectedToSelf(SocketAddr),
    /// Opened by this process to this address: the rules do not exclude jackstay's own connections.
    Loop(SocketAddr),
}

/// Classifies a connection that a transparent listener accepted from `peer`.
///
/// # Errors
/// The connection is closed and has no local address.
pub fn classify(
    stream: &TcpStream,
    peer: SocketAddr,
    listening: &[SocketAddr],
    outgoing: &Connector,
) -> io::Result<Interception> {
    let local = stream.local_addr()?;
    let original = original_destination(stream, local).unwrap_or(local);
    let is_own = outgoing.is_own_connection(peer, original);
    Ok(classify_addresses(local, original, listening, is_own))
}

/// | original destination | local address | result |
/// |---|---|---|
/// | any | any, opened by this process | loop |
/// | an address of the listener | the same | direct |
/// | an address of the listener | another | redirected to self |
/// | any other | any | redirected |
fn classify_addresses(
    local: SocketAddr,
    original: SocketAddr,
    listening: &[SocketAddr],
    is_own: bool,
) -> Interception {
    let listened = listening.iter().any(|bind| {
        // A wildcard matches every address on its port, so with TPROXY the intercepted port must differ.
        bind.port() == original.port()
            && bind.is_ipv4() == original.is_ipv4()
            && (bind.ip() == original.ip() || bind.ip().is_unspecified())
    });
    if is_own {
        Interception::Loop(original)
    } else if listened && original == local {
        Interception::Direct(original)
    } else if listened {
        Interception::RedirectedToSelf(original)
    } else {
        Interception::Redirected(original)
    }
}

/// The destination in connection tracking; `None` without an entry, as with TPROXY.
fn original_destination(stream: &TcpStream, local: SocketAddr) -> Option<SocketAddr> {
    let socket = SockRef::from(stream);
    let known = if local.is_ipv4() { socket.original_dst_v4() } else { socket.original_dst_v6() };
    known.ok()?.as_socket()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> SocketAddr {
        address.parse().unwrap()
    }

    #[test]
    fn classify_addresses_tells_redirected_direct_and_loop() {
        let binds = [at("127.0.0.1:7443"), at("[::]:7443"), at("0.0.0.0:8443")];
        let lb = "10.0.0.5:6443";
        for (local, original, is_own, expected) in [
            ("127.0.0.1:7443", lb, false, Interception::Redirected(at(lb))),
            (lb, lb, false, Interception::Redirected(at(lb))),
            ("[::1]:7443", "[fd00::5]:6443", false, Interception::Redirected(at("[fd00::5]:6443"))),
            (lb, lb, true, Interception::Loop(at(lb))),
            ("127.0.0.1:7443", "127.0.0.1:7443", false, Interception::Direct(at("127.0.0.1:7443"))),
            ("[fd00::9]:7443", "[fd00::9]:7443", false, Interception::Direct(at("[fd00::9]:7443"))),
            ("10.0.0.9:8443", "10.0.0.9:8443", false, Interception::Direct(at("10.0.0.9:8443"))),
            (
                "127.0.0.1:7443",
                "10.0.0.9:8443",
                false,
                Interception::RedirectedToSelf(at("10.0.0.9:8443")),
            ),
            // The same port of another address matches only a wildcard.
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
