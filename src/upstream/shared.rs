//! What all workers share of one upstream: who is in it, what we show it, how it is used.
//!
//! Everything here is read on the path of requests and reendpoints_changed whole from beside it, so that no
//! reader waits and none sees half a change.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tokio::sync::Notify;

use super::connection::Settings;
use super::credentials::{CredentialClass, Credentials};
use super::endpoint::Endpoint;
use super::endpoint_sources::Sources;
use super::health::Thresholds;
use crate::config;
use crate::net::sockets::connector::Connector;
use crate::observe::Metrics;

/// What all workers share of one upstream.
#[derive(Debug)]
pub struct Upstream {
    /// Its name.
    pub name: Arc<str>,
    endpoints: ArcSwap<Vec<Arc<Endpoint>>>,
    /// What we show it.
    pub credentials: Credentials,
    /// Limits and thresholds. Reendpoints_changed whole by a reload; see [`Self::config`].
    pub config: ArcSwap<config::Upstream>,
    /// What the sources of its endpoints last said.
    pub sources: Sources,
    /// Where things are counted.
    pub metrics: Arc<Metrics>,
    /// How connections to its endpoints leave.
    pub outgoing: ArcSwap<Connector>,
    /// Told when [`Self::config`] was swapped: whoever decides on the set of endpoints listens.
    pub reconfigured: Notify,
    /// Told when the set of endpoints was swapped: whoever connects to them listens.
    pub endpoints_changed: Notify,
}

impl Upstream {
    /// An upstream without endpoints; [`Self::set_endpoints`] gives it some. Nobody intercepts its
    /// connections, unless [`Self::outgoing`] is set.
    pub fn new(config: config::Upstream, credentials: Credentials, metrics: &Arc<Metrics>) -> Self {
        let name: Arc<str> = config.name.as_str().into();
        Self {
            sources: Sources::new(&name, metrics),
            name,
            endpoints: ArcSwap::default(),
            credentials,
            config: ArcSwap::from_pointee(config),
            metrics: Arc::clone(metrics),
            outgoing: ArcSwap::default(),
            reconfigured: Notify::new(),
            endpoints_changed: Notify::new(),
        }
    }

    /// Swaps the set of endpoints and wakes who connects to them. There is one caller, the writer
    /// in the control plane: it alone knows whom to leave.
    pub fn set_endpoints(&self, endpoints: Vec<Arc<Endpoint>>) {
        self.endpoints.store(Arc::new(endpoints));
        self.endpoints_changed.notify_waiters();
    }

    /// Swaps limits, thresholds and sources, and wakes who decides on the set of endpoints.
    pub fn reconfigure(&self, config: config::Upstream) {
        self.config.store(Arc::new(config));
        self.reconfigured.notify_one();
    }

    /// A snapshot of the endpoints. Load it once for each decision: the control plane may replace
    /// the set in between.
    pub fn endpoints(&self) -> Guard<Arc<Vec<Arc<Endpoint>>>> {
        self.endpoints.load()
    }

    /// How a connection that is opened now leaves.
    pub fn outgoing(&self) -> Arc<Connector> {
        self.outgoing.load_full()
    }

    /// Limits and thresholds now. Load it once for each decision: a reload may swap it in between.
    pub fn config(&self) -> Guard<Arc<config::Upstream>> {
        self.config.load()
    }

    /// Thresholds of its connections.
    pub fn settings(&self) -> Settings {
        let config = self.config();
        Settings {
            thresholds: Thresholds {
                ping_interval: config.health.ping_interval,
                suspect_after: config.health.suspect_after,
                dead_after: config.health.dead_after,
                tunnel_dead_after: config.health.tunnel_dead_after,
            },
            max_streams: config.connections.max_streams,
        }
    }

    /// Whether `/readyz` is asked with a credential.
    pub fn has_probe_credential(&self) -> bool {
        self.credentials.probe_token().is_some_and(|token| token.header().is_some())
            || self
                .credentials
                .tls(CredentialClass::Probe)
                .is_some_and(|tls| tls.certificate.is_some())
    }

    /// Whether any endpoint is usable.
    pub fn is_usable(&self) -> bool {
        self.endpoints().iter().any(|endpoint| endpoint.is_usable())
    }
}
