//! Chooses the upstream of a connection.

use std::cell::RefCell;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::client_hello::{self, ClientHello};
use super::transparent::{Refusal, Transparent};
use crate::config::{Limits, Passthrough, Route};
use crate::upstream::Upstream;

/// The name of a listener, and its routing, which a reload replaces.
pub struct ListenerRouting {
    name: String,
    current: RefCell<Rc<Routing>>,
}

impl ListenerRouting {
    /// The routing of the listener of that name.
    pub fn new(name: String, routing: Routing) -> Self {
        Self { name, current: RefCell::new(Rc::new(routing)) }
    }

    /// The name of the listener.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The current routing. A connection is routed by the one that is current when it is accepted.
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
    /// The upstreams of the configured routes, in their order.
    pub routes: Vec<Arc<Upstream>>,
    /// Present if the listener is transparent.
    pub transparent: Option<Transparent>,
    /// The configuration of the passthrough mode.
    pub config: Passthrough,
    /// Limits on connections.
    pub limits: Limits,
}

/// Why a connection is closed before it has an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RouteError {
    /// A transparent listener refuses it.
    Refused(Refusal),
    /// The client closed it.
    ClientClosed,
    /// The client did not send its `ClientHello` within `handshake_timeout`.
    Timeout,
}

impl RouteError {
    /// The metric label.
    pub fn label(self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.label(),
            Self::ClientClosed => "client_reset",
            Self::Timeout => "handshake_timeout",
        }
    }
}

impl fmt::Display for RouteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(f),
            Self::ClientClosed => f.write_str("closed by the client"),
            Self::Timeout => f.write_str("no ClientHello within handshake_timeout"),
        }
    }
}

impl Routing {
    /// The upstream of a connection, and the bytes that were read to find it. The original
    /// destination takes precedence over the server name. A connection without either, or without TLS,
    /// goes to the upstream of the listener.
    ///
    /// # Errors
    /// Why the connection has no upstream.
    pub async fn route(
        &self,
        client: &mut TcpStream,
        from: SocketAddr,
    ) -> Result<(Arc<Upstream>, Vec<u8>), RouteError> {
        let mut read = Vec::new();
        if let Some(transparent) = &self.transparent {
            let found = transparent.upstream_for(client, from, &self.upstream);
            if let Some(upstream) = found.map_err(RouteError::Refused)? {
                return Ok((Arc::clone(upstream), read));
            }
        }
        if self.routes.is_empty() {
            return Ok((Arc::clone(&self.upstream), read));
        }
        let by_server_name = async {
            loop {
                match client.read_buf(&mut read).await {
                    Ok(n) if n > 0 => {}
                    _ => return Err(RouteError::ClientClosed),
                }
                match client_hello::read(&read) {
                    ClientHello::Incomplete => {}
                    ClientHello::ServerName(name) => return Ok(self.by_server_name(&name)),
                    ClientHello::NoServerName | ClientHello::Unreadable => {
                        return Ok(&self.upstream);
                    }
                }
            }
        };
        match timeout(self.limits.handshake_timeout, by_server_name).await {
            Ok(upstream) => upstream.map(|upstream| (Arc::clone(upstream), read)),
            Err(_) => Err(RouteError::Timeout),
        }
    }

    fn by_server_name(&self, name: &str) -> &Arc<Upstream> {
        let matches =
            |route: &Route| route.server_names.iter().any(|p| client_hello::matches(p, name));
        let index = self.config.routes.iter().position(matches);
        index.and_then(|index| self.routes.get(index)).unwrap_or(&self.upstream)
    }
}
