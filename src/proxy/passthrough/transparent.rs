//! Transparent listeners: nftables redirects connections to them, and the original destination
//! chooses the upstream.
//!
//! A direct connection is refused: a client that is configured with the listener's address does not
//! use the interception, so an error in the rules would stay unnoticed. A connection that this
//! process has opened is refused: forwarding it would loop.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;

use crate::config::Destination;
use crate::net::sockets::interception::{self, Interception};
use crate::upstream::Upstream;

/// The routing of a transparent listener by original destination.
#[derive(Debug)]
pub struct Transparent {
    /// Every address that this process listens on.
    listening: Arc<[SocketAddr]>,
    /// The first match counts.
    destinations: Vec<(Vec<Destination>, Arc<Upstream>)>,
}

/// Why a transparent listener refuses a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// It was not redirected.
    NotRedirected(SocketAddr),
    /// This process has opened it.
    Loop(SocketAddr),
    /// The client had closed it before it was examined.
    ClientClosed,
}

impl Refusal {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Self::NotRedirected(_) => "not_redirected",
            Self::Loop(_) => "loop",
            Self::ClientClosed => "client_reset",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRedirected(to) => write!(
                f,
                "direct connection to {to}; this transparent listener accepts only connections that \
                 nftables redirects (deploy/nftables); use a listener without `transparent` for \
                 direct connections"
            ),
            Self::Loop(to) => write!(
                f,
                "our own connection to {to} was redirected back; the nftables rules must not \
                 redirect packets with the mark of this process (`mark` in the configuration, \
                 own_mark in deploy/nftables)"
            ),
            Self::ClientClosed => f.write_str("closed by the client"),
        }
    }
}

impl Transparent {
    /// The routing of a listener in a process that listens on all of `listening`.
    pub fn new(
        listening: Arc<[SocketAddr]>,
        destinations: Vec<(Vec<Destination>, Arc<Upstream>)>,
    ) -> Self {
        Self { listening, destinations }
    }

    /// The upstream for the original destination of a connection, or `None` if none is configured for
    /// it. The connector of `own`, the upstream of the listener, knows the connections that this
    /// process has opened.
    ///
    /// # Errors
    /// The connection is refused.
    pub fn upstream_for(
        &self,
        stream: &TcpStream,
        from: SocketAddr,
        own: &Upstream,
    ) -> Result<Option<&Arc<Upstream>>, Refusal> {
        match interception::classify(stream, from, &self.listening, &own.outgoing()) {
            Err(_) => Err(Refusal::ClientClosed),
            Ok(Interception::Direct(to)) => Err(Refusal::NotRedirected(to)),
            Ok(Interception::Loop(to) | Interception::RedirectedToSelf(to)) => {
                Err(Refusal::Loop(to))
            }
            Ok(Interception::Redirected(to)) => Ok(first_match(&self.destinations, to)),
        }
    }
}

/// The upstream of the first entry that contains the destination.
fn first_match<T>(destinations: &[(Vec<Destination>, T)], to: SocketAddr) -> Option<&T> {
    let matches = |list: &[Destination]| list.iter().any(|destination| destination.contains(to));
    destinations.iter().find(|(list, _)| matches(list)).map(|(_, upstream)| upstream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_match_returns_the_first_entry_that_contains_the_destination() {
        let some = |texts: &[&str]| -> Vec<Destination> {
            texts.iter().map(|text| Destination::parse(text).unwrap()).collect()
        };
        let destinations = [
            (some(&["10.96.0.1:443", "[fd00::1]:443"]), "service"),
            (some(&["10.96.0.0/16", "10.0.0.5"]), "network"),
            (some(&["10.0.0.5:6443"]), "never"),
        ];
        for (to, upstream) in [
            ("10.96.0.1:443", Some("service")),
            ("[fd00::1]:443", Some("service")),
            ("[::ffff:10.96.0.1]:443", Some("service")),
            ("10.96.0.1:444", Some("network")),
            ("10.96.7.7:80", Some("network")),
            ("10.0.0.5:6443", Some("network")),
            ("10.97.0.1:443", None),
            ("[fd00::2]:443", None),
        ] {
            let found = first_match(&destinations, to.parse().unwrap());
            assert_eq!(found, upstream.as_ref(), "{to}");
        }
    }
}
