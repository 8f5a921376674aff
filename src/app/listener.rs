//! A configured listener with everything it needs resolved: upstreams, TLS, identities, metrics.
//!
//! A listener goes through three types: [`config::Listener`] is the configuration,
//! [`BoundListener`] is the same with its resources and its bound sockets, and each worker runs a
//! `WorkerListener` that follows it.

use std::net::SocketAddr;
use std::sync::Arc;

use super::sockets::SocketId;
use crate::config;
use crate::net::tls::serving::ServingTls;
use crate::observe::ListenerMetrics;
use crate::upstream::Upstream;
use crate::upstream::credentials::IdentitySlot;

/// A listener that is bound. Workers share it; its sockets belong to
/// [`ActiveConfig`](super::active::ActiveConfig).
#[derive(Debug)]
pub struct BoundListener {
    pub config: config::Listener,
    /// The bound addresses, with the sockets on them.
    pub sockets: Vec<(SocketId, SocketAddr)>,
    pub metrics: Arc<ListenerMetrics>,
    /// The default upstream.
    pub upstream: Arc<Upstream>,
    pub mode: ListenerMode,
}

impl BoundListener {
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The addresses that are bound; a port 0 of the configuration is resolved.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.sockets.iter().map(|(_, address)| *address).collect()
    }

    /// Whether `other` is a later configuration of this listener. A listener that changes its mode
    /// is replaced, not updated.
    pub fn is_same_listener(&self, other: &Self) -> bool {
        self.name() == other.name() && self.mode.tls().is_some() == other.mode.tls().is_some()
    }
}

/// The resources of a listener that depend on its mode.
#[derive(Debug)]
pub enum ListenerMode {
    /// L7: TLS is terminated here.
    Terminate {
        config: config::Terminate,
        /// The serving certificate and the client CAs.
        tls: Arc<ServingTls>,
        /// The client certificates that the listener may use upstream.
        identities: Vec<Arc<IdentitySlot>>,
    },
    /// L4: connections are passed through.
    Passthrough {
        config: config::Passthrough,
        /// The upstreams of the routes, in their order.
        routes: Vec<Arc<Upstream>>,
        /// The upstreams by original destination, in their order.
        destinations: Destinations,
    },
}

impl ListenerMode {
    /// The TLS of a listener that terminates it.
    pub fn tls(&self) -> Option<&Arc<ServingTls>> {
        match self {
            Self::Terminate { tls, .. } => Some(tls),
            Self::Passthrough { .. } => None,
        }
    }

    /// The client certificates of a listener that terminates TLS.
    pub fn identities(&self) -> &[Arc<IdentitySlot>] {
        match self {
            Self::Terminate { identities, .. } => identities,
            Self::Passthrough { .. } => &[],
        }
    }
}

/// Upstreams by original destination; the first match counts.
pub type Destinations = Vec<(Vec<config::Destination>, Arc<Upstream>)>;
