//! What all workers share of one upstream: its endpoints, credentials and configuration.
//!
//! Workers read it on the path of requests. The control plane replaces each part as a whole, so that no
//! reader waits and none sees half a change.

use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tokio::sync::Notify;

use super::credentials::{CredentialClass, Credentials};
use super::endpoint::Endpoint;
use super::endpoint_sources::Sources;
use crate::config;
use crate::net::sockets::connector::Connector;
use crate::observe::Metrics;

/// What all workers share of one upstream.
#[derive(Debug)]
pub struct Upstream {
    /// Its name.
    pub name: Arc<str>,
    endpoints: ArcSwap<Vec<Arc<Endpoint>>>,
    /// The credentials that it is shown.
    pub credentials: Credentials,
    config: ArcSwap<config::Upstream>,
    /// The results of its sources of endpoints.
    pub sources: Sources,
    /// The metrics of the process.
    pub metrics: Arc<Metrics>,
    connector: ArcSwap<Connector>,
    reconfigured: Notify,
    endpoints_changed: Notify,
}

impl Upstream {
    /// An upstream without endpoints, whose connections are not intercepted on this host.
    pub fn new(config: config::Upstream, credentials: Credentials, metrics: &Arc<Metrics>) -> Self {
        let name: Arc<str> = config.name.as_str().into();
        Self {
            sources: Sources::new(&name, metrics),
            name,
            endpoints: ArcSwap::default(),
            credentials,
            config: ArcSwap::from_pointee(config),
            metrics: Arc::clone(metrics),
            connector: ArcSwap::default(),
            reconfigured: Notify::new(),
            endpoints_changed: Notify::new(),
        }
    }

    /// Replaces the set of endpoints and notifies pools. The control plane is the only caller: it also
    /// removes the endpoints that leave the set.
    pub fn set_endpoints(&self, endpoints: Vec<Arc<Endpoint>>) {
        self.endpoints.store(Arc::new(endpoints));
        self.endpoints_changed.notify_waiters();
    }

    /// Replaces limits, thresholds and sources, and notifies the control plane.
    pub fn reconfigure(&self, config: config::Upstream) {
        self.config.store(Arc::new(config));
        self.reconfigured.notify_one();
    }

    /// A snapshot of the endpoints. Load it once for each decision: the control plane may replace
    /// the set in between.
    pub fn endpoints(&self) -> Guard<Arc<Vec<Arc<Endpoint>>>> {
        self.endpoints.load()
    }

    /// Waits until the set of endpoints is replaced.
    pub async fn endpoints_changed(&self) {
        self.endpoints_changed.notified().await;
    }

    /// Waits until [`Self::reconfigure`] is called. Only the control plane waits.
    pub async fn reconfigured(&self) {
        self.reconfigured.notified().await;
    }

    /// How a connection is opened now.
    pub fn connector(&self) -> Arc<Connector> {
        self.connector.load_full()
    }

    /// Changes how connections are opened from now on.
    pub fn set_connector(&self, connector: Arc<Connector>) {
        self.connector.store(connector);
    }

    /// Limits and thresholds now. Load it once for each decision: a reload may swap it in between.
    pub fn config(&self) -> Guard<Arc<config::Upstream>> {
        self.config.load()
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
