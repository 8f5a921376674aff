//! Chooses the upstream of a connection: by original destination, by server name, or the upstream of the
//! listener.
//!
//! nftables redirects connections to a transparent listener, and the original destination chooses the
//! upstream. A direct connection to such a listener is refused: a client that is configured with the
//! listener's address does not use the interception, and errors in the nftables rules would stay unnoticed. A
//! connection that this process has opened is refused as well, because forwarding it would loop.

use std::cell::RefCell;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use jackstay_config::{Destination, FlowSettings, Limits, server_name_matches};
use jackstay_sys::sockets::interception;
use jackstay_sys::sockets::interception::Interception;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::client_hello::{self, ClientHello};
use crate::upstream::Upstream;

/// Bytes for which there is room at first, which is enough for most clients: one with post-quantum keys sends 1.7 KiB.
const USUAL_CLIENT_HELLO: usize = 2 << 10;

/// The name of a listener, and its routing, which a reload replaces.
pub struct ListenerRouting {
    name: String,
    current: RefCell<Rc<Routing>>,
}

impl ListenerRouting {
    /// The routing of the listener `name`.
    pub fn new(name: String, routing: Routing) -> Self {
        Self { name, current: RefCell::new(Rc::new(routing)) }
    }

    /// The name of the listener.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The current routing. A connection keeps the routing that is current when it is accepted.
    pub fn current(&self) -> Rc<Routing> {
        Rc::clone(&self.current.borrow())
    }

    /// Replaces the routing.
    pub fn replace(&self, routing: Routing) {
        self.current.replace(Rc::new(routing));
    }
}

/// How a listener routes its connections.
pub struct Routing {
    /// The upstream of connections that no route matches.
    pub upstream: Arc<Upstream>,
    /// The upstreams by server name. The first match counts.
    pub routes: Vec<(Vec<String>, Arc<Upstream>)>,
    /// Present if the listener is transparent.
    pub transparent: Option<Transparent>,
    /// When flows end.
    pub flows: FlowSettings,
    /// Limits on connections.
    pub limits: Limits,
}

/// The upstream of a connection, and the bytes that were read from its client to choose it.
pub type RoutedTo = (Arc<Upstream>, Vec<u8>);

/// The routing of a transparent listener by original destination.
pub struct Transparent {
    /// Every address that this process listens on.
    pub listening: Arc<[SocketAddr]>,
    /// The upstreams by destination. The first match counts.
    pub destinations: Vec<(Vec<Destination>, Arc<Upstream>)>,
}

/// Why a connection is closed before it has an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteError {
    /// The listener is transparent, and the connection was not redirected.
    NotRedirected(SocketAddr),
    /// The listener is transparent, and this process has opened the connection or listens on its original
    /// destination.
    Loop(SocketAddr),
    /// The client closed it.
    ClientClosed,
    /// The client did not send its `ClientHello` within `handshake_timeout`.
    Timeout,
}

impl RouteError {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Self::NotRedirected(_) => "not_redirected",
            Self::Loop(_) => "loop",
            Self::ClientClosed => "client_reset",
            Self::Timeout => "handshake_timeout",
        }
    }

    /// Whether the client or the nftables rules are configured wrongly.
    pub fn is_misconfiguration(self) -> bool {
        matches!(self, Self::NotRedirected(_) | Self::Loop(_))
    }
}

impl fmt::Display for RouteError {
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
                "forwarding to {to} would loop: jackstay has opened the connection or listens on this \
                 address; the nftables rules must not redirect packets with the mark of this process \
                 (`mark` in the configuration, own_mark in deploy/nftables)"
            ),
            Self::ClientClosed => f.write_str("closed by the client"),
            Self::Timeout => f.write_str("no ClientHello within handshake_timeout"),
        }
    }
}

impl Routing {
    /// The upstream of a connection, and the bytes that were read to choose it. The original destination
    /// takes precedence over the server name. A connection that matches neither, or has no TLS, goes to the
    /// upstream of the listener.
    ///
    /// # Errors
    /// The connection must be closed.
    pub async fn route(
        &self,
        client: &mut TcpStream,
        from: SocketAddr,
    ) -> Result<RoutedTo, RouteError> {
        let mut read = Vec::new();
        if let Some(upstream) = self.by_original_destination(client, from)? {
            return Ok((Arc::clone(upstream), read));
        }
        if self.routes.is_empty() {
            return Ok((Arc::clone(&self.upstream), read));
        }
        let by_server_name = self.by_server_name(client, &mut read);
        let upstream = timeout(self.limits.handshake_timeout, by_server_name).await;
        let upstream = upstream.unwrap_or(Err(RouteError::Timeout))?;
        Ok((Arc::clone(upstream.unwrap_or(&self.upstream)), read))
    }

    /// Reads from a client until its server name is known, appends the bytes to `read`, and returns the upstream of the
    /// name. `None` if no route has it. The caller limits the time.
    ///
    /// # Errors
    /// The client has closed the connection.
    pub async fn by_server_name(
        &self,
        client: &mut (impl AsyncRead + Unpin),
        read: &mut Vec<u8>,
    ) -> Result<Option<&Arc<Upstream>>, RouteError> {
        read.reserve(USUAL_CLIENT_HELLO);
        loop {
            match client.read_buf(read).await {
                Ok(n) if n > 0 => {}
                _ => return Err(RouteError::ClientClosed),
            }
            match client_hello::read(read) {
                ClientHello::Incomplete => {}
                ClientHello::ServerName(name) => return Ok(self.route_of(&name)),
                ClientHello::NoServerName | ClientHello::Unreadable => return Ok(None),
            }
        }
    }

    /// The upstream of the original destination; `None` if none is configured for it. The connector of the
    /// listener's own upstream recognizes the connections that this process has opened.
    fn by_original_destination(
        &self,
        client: &TcpStream,
        from: SocketAddr,
    ) -> Result<Option<&Arc<Upstream>>, RouteError> {
        let Some(Transparent { listening, destinations }) = &self.transparent else {
            return Ok(None);
        };
        match interception::classify(client, from, listening, &self.upstream.connector()) {
            Err(_) => Err(RouteError::ClientClosed),
            Ok(Interception::Direct(to)) => Err(RouteError::NotRedirected(to)),
            Ok(Interception::Loop(to) | Interception::RedirectedToSelf(to)) => {
                Err(RouteError::Loop(to))
            }
            Ok(Interception::Redirected(to)) => Ok(first_match(destinations, to)),
        }
    }

    fn route_of(&self, name: &str) -> Option<&Arc<Upstream>> {
        let matches = |names: &[String]| names.iter().any(|p| server_name_matches(p, name));
        self.routes.iter().find(|(names, _)| matches(names)).map(|(_, upstream)| upstream)
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
