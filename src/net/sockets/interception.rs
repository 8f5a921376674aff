//! Connections that nftables redirected to us: where they were meant to go, and whether they are
//! redirected at all.
//!
//! REDIRECT rewrites the destination; the kernel's connection tracking remembers the original one
//! (`SO_ORIGINAL_DST`, `linux/netfilter_ipv4.h`). TPROXY rewrites nothing: the accepted socket's
//! own address is the original destination (`Documentation/networking/tproxy.rst`).

use std::io;
use std::net::SocketAddr;

use socket2::SockRef;
use tokio::net::TcpStream;

use super::connector::Connector;

/// What an accepted connection of a transparent listener is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interception {
    /// It was meant for this address.
    Redirected(SocketAddr),
    /// Nobody redirected it: somebody connected to us.
    Direct(SocketAddr),
    /// It was redirected, but from another address of ours.
    RedirectedToSelf(SocketAddr),
    /// We began it ourselves, to this address: the rules do not let our own connections pass.
    Loop(SocketAddr),
}

/// Tells what a connection is that a transparent listener accepted from `peer`.
///
/// # Errors
/// The connection has no local address: it is gone.
pub fn classify(
    stream: &TcpStream,
    peer: SocketAddr,
    listening: &[SocketAddr],
    outgoing: &Connector,
) -> io::Result<Interception> {
    let local = stream.local_addr()?;
    let meant = original_destination(stream, local).unwrap_or(local);
    let ours = outgoing.is_own_connection(peer, meant);
    Ok(classify_addresses(local, meant, listening, ours))
}

/// | meant for | arrived at | it is |
/// |---|---|---|
/// | whatever | whatever, begun by us | a loop |
/// | an address we listen on | the same | direct |
/// | an address we listen on | another | redirected from us to us |
/// | anything else | anything | redirected |
fn classify_addresses(
    local: SocketAddr,
    meant: SocketAddr,
    listening: &[SocketAddr],
    ours: bool,
) -> Interception {
    let listened = listening.iter().any(|bind| {
        // A wildcard takes every address of this host on its port, so with TPROXY the port that is
        // intercepted has to be another one.
        bind.port() == meant.port()
            && bind.is_ipv4() == meant.is_ipv4()
            && (bind.ip() == meant.ip() || bind.ip().is_unspecified())
    });
    if ours {
        Interception::Loop(meant)
    } else if listened && meant == local {
        Interception::Direct(meant)
    } else if listened {
        Interception::RedirectedToSelf(meant)
    } else {
        Interception::Redirected(meant)
    }
}

/// What connection tracking knows; `None` where it knows nothing, as with TPROXY it may.
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
    fn every_kind_of_arrival() {
        let binds = [at("127.0.0.1:7443"), at("[::]:7443"), at("0.0.0.0:8443")];
        let lb = "10.0.0.5:6443";
        for (local, meant, ours, expected) in [
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
            // The same port of a foreign address is not ours, unless all addresses are.
            (
                "127.0.0.1:7443",
                "10.0.0.5:7443",
                false,
                Interception::Redirected(at("10.0.0.5:7443")),
            ),
        ] {
            assert_eq!(
                classify_addresses(at(local), at(meant), &binds, ours),
                expected,
                "{local} {meant}"
            );
        }
    }

    #[tokio::test]
    async fn nobody_redirected_a_plain_connection() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let bind = listener.local_addr().unwrap();
        let _client = TcpStream::connect(bind).await.unwrap();
        let (stream, peer) = listener.accept().await.unwrap();
        let found = classify(&stream, peer, &[bind], &Connector::unmarked()).unwrap();
        assert_eq!(found, Interception::Direct(bind));
    }
}
