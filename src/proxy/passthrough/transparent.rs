//! A transparent listener: connections were meant for somebody else, and nftables redirected them
//! here. Where they were meant to go picks the upstream; what was meant for us is refused.
//!
//! A direct connection is refused because it would hide a mistake: whoever connects here by name
//! needs no interception, and finds none when the rules are gone. A connection of our own that came
//! back is refused because passing it on would send it round for ever.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::TcpStream;

use crate::config::Destination;
use crate::net::sockets::interception::{self, Interception};
use crate::upstream::Upstream;

/// What a transparent listener knows beside a plain one.
#[derive(Debug)]
pub struct Transparent {
    /// Every address that this process listens on.
    listening: Arc<[SocketAddr]>,
    /// Upstreams by original destination; the first match counts.
    destinations: Vec<(Vec<Destination>, Arc<Upstream>)>,
}

/// Why a connection is not passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Nobody redirected it.
    NotRedirected(SocketAddr),
    /// It came back to us.
    Loop(SocketAddr),
    /// It was gone before we looked.
    Gone,
}

impl Refusal {
    /// As the metric names it.
    pub fn reason(self) -> &'static str {
        match self {
            Self::NotRedirected(_) => "not_redirected",
            Self::Loop(_) => "loop",
            Self::Gone => "client_reset",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotRedirected(to) => write!(
                f,
                "somebody connected to {to} itself, and this listener is transparent: it takes only \
                 what nftables redirects (deploy/nftables); use a listener without `transparent` \
                 for direct connections"
            ),
            Self::Loop(to) => write!(
                f,
                "our own connection to {to} came back: the rules of the interception must let pass \
                 what carries our mark (`mark` here, own_mark in deploy/nftables)"
            ),
            Self::Gone => f.write_str("the client has gone"),
        }
    }
}

impl Transparent {
    /// For a listener of a process that listens on all of `listening`.
    pub fn new(
        listening: Arc<[SocketAddr]>,
        destinations: Vec<(Vec<Destination>, Arc<Upstream>)>,
    ) -> Self {
        Self { listening, destinations }
    }

    /// The upstream that a connection's original destination asks for; `None` leaves it to the
    /// listener. `own` is the listener's upstream: it knows what we have begun ourselves.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn place(
        &self,
        stream: &TcpStream,
        from: SocketAddr,
        own: &Upstream,
    ) -> Result<Option<&Arc<Upstream>>, Refusal> {
        match interception::classify(stream, from, &self.listening, &own.outgoing()) {
            Err(_) => Err(Refusal::Gone),
            Ok(Interception::Direct(to)) => Err(Refusal::NotRedirected(to)),
            Ok(Interception::Loop(to) | Interception::RedirectedToSelf(to)) => {
                Err(Refusal::Loop(to))
            }
            Ok(Interception::Redirected(to)) => Ok(wanted(&self.destinations, to)),
        }
    }
}

/// What the first of these that was meant leads to.
fn wanted<T>(destinations: &[(Vec<Destination>, T)], to: SocketAddr) -> Option<&T> {
    let meant = |some: &[Destination]| some.iter().any(|destination| destination.contains(to));
    destinations.iter().find(|(some, _)| meant(some)).map(|(_, upstream)| upstream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_that_was_meant_decides() {
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
            let found = wanted(&destinations, to.parse().unwrap());
            assert_eq!(found, upstream.as_ref(), "{to}");
        }
    }
}
