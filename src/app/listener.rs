//! A configured listener with its resources: sockets, upstreams, TLS, identities and metrics.
//!
//! Three types represent a listener: [`config::Listener`] is its configuration, [`BoundListener`] adds its
//! resources and bound sockets, and each worker serves it with a `WorkerListener`.

use std::net::SocketAddr;
use std::sync::Arc;

use jackstay_config as config;
use jackstay_net::tls::serving::ServingTls;

use super::sockets::SocketId;
use crate::observe::ListenerMetrics;
use crate::proxy::identity_lane::LaneConnections;
use crate::upstream::Upstream;
use crate::upstream::credentials::IdentitySlot;

/// A bound listener, which all workers share. [`ActiveConfig`](super::active::ActiveConfig) owns its sockets.
#[derive(Debug)]
pub struct BoundListener {
    /// Its settings, with the connections that the descriptors suffice for.
    pub config: config::Listener,
    /// The sockets, with their bound addresses.
    pub sockets: Vec<(SocketId, SocketAddr)>,
    /// Its series, also those of an earlier listener with its name.
    pub metrics: Arc<ListenerMetrics>,
    /// The upstream of requests, and of flows that no route or destination matches.
    pub upstream: Arc<Upstream>,
    /// What it does with connections.
    pub mode: ListenerMode,
    /// The connections on the identity lane.
    pub lane_connections: LaneConnections,
}

impl BoundListener {
    /// The name in the configuration.
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// The bound addresses, with the port that the kernel chose for a configured port 0.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.sockets.iter().map(|(_, address)| *address).collect()
    }

    /// Whether `other` is this listener in another configuration: same name, same mode. A listener that changes
    /// its mode is replaced, not updated.
    pub fn is_same_listener(&self, other: &Self) -> bool {
        self.name() == other.name() && self.mode.tls().is_some() == other.mode.tls().is_some()
    }
}

/// The resources of a listener that depend on its mode.
#[derive(Debug)]
pub enum ListenerMode {
    /// L7: TLS is terminated here.
    Terminate {
        /// The settings of this mode.
        config: config::Terminate,
        /// The serving certificate and the client CAs.
        tls: Arc<ServingTls>,
        /// The client certificates that the listener may use towards endpoints.
        identities: Vec<Arc<IdentitySlot>>,
    },
    /// L4: connections are passed through.
    Passthrough {
        /// The settings of this mode.
        config: config::Passthrough,
        /// The upstream of each route of `config`.
        routes: Vec<Arc<Upstream>>,
        /// The upstreams of connections that a transparent listener intercepts.
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

/// Upstreams by original destination; the first match applies.
pub type Destinations = Vec<(Vec<config::Destination>, Arc<Upstream>)>;
