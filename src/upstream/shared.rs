//! The state of one upstream that all workers share: its endpoints, credentials and configuration.
//!
//! Workers read it for each request. The control plane replaces each part as a whole, so a reader never
//! waits and never sees half of a change.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use arc_swap::{ArcSwap, Guard};
use jackstay_config as config;
use jackstay_config::api_root::ApiRoot;
use jackstay_core::admission::MemoryBudget;
use jackstay_core::outage::report::Usability;
use jackstay_core::request::path_prefix::PathPrefix;
use jackstay_sys::sockets::connector::Connector;
use tokio::sync::Notify;

use super::address_backends::AddressBackends;
use super::canary::Canary;
use super::capabilities::CapabilityDemand;
use super::compression::Compression;
use super::credentials::{CredentialClass, Credentials};
use super::endpoint::{Endpoint, EndpointState, HostLine};
use super::endpoint_sources::Sources;
use super::group_failures::GroupFailures;
use super::resource_versions::ResourceVersions;
use super::restores::Restores;
use super::shared_address::mark_shared;
use super::succession::Successions;
use super::unordered_groups::UnorderedGroups;
use super::version_floors::VersionFloors;
use crate::observe::{Metrics, Reporter};

/// The state of one upstream that all workers share.
#[derive(Debug)]
pub struct Upstream {
    /// The name in the configuration.
    pub name: Arc<str>,
    /// The path below which its servers have the API. Another path is another cluster, and another upstream.
    pub path_prefix: PathPrefix,
    endpoints: ArcSwap<Vec<Arc<Endpoint>>>,
    /// The credentials that jackstay shows its apiservers.
    pub credentials: Credentials,
    config: ArcSwap<config::Upstream>,
    /// The results of its sources of endpoints.
    pub sources: Sources,
    /// The versions that the watch caches of its endpoints have shown.
    pub resource_versions: ResourceVersions,
    /// The classes whose connections wait for the new credential to be accepted.
    pub successions: Successions,
    /// Whether its etcd was restored from a backup.
    pub restores: Restores,
    /// The versions that clients have seen.
    pub version_floors: VersionFloors,
    /// The share of requests for the newest version.
    pub canary: Canary,
    /// The metrics of the process.
    pub metrics: Arc<Metrics>,
    /// The account of the process, for what connections to apiservers hold.
    pub memory: Arc<MemoryBudget>,
    /// The API groups whose watches are not resumed because their versions are not ordered.
    pub unordered_groups: UnorderedGroups,
    /// The apiservers behind its addresses.
    pub backends: AddressBackends,
    /// The API groups that fail at some of its endpoints.
    pub group_failures: Arc<GroupFailures>,
    /// The line of this host, which its endpoints have in common.
    pub line: Arc<HostLine>,
    /// Whether watches ask for gzip.
    pub compression: Compression,
    /// Which capabilities of apiservers are read.
    pub capabilities: CapabilityDemand,
    connector: ArcSwap<Connector>,
    reconfigured: Notify,
    endpoints_changed: Notify,
    held_watches: AtomicUsize,
}

/// Counts a held watch of an upstream until it is dropped.
#[derive(Debug)]
pub struct HeldWatch<'a>(&'a Upstream);

impl Drop for HeldWatch<'_> {
    fn drop(&mut self) {
        self.0.held_watches.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.held_watches().decrement(1);
    }
}

/// Sets where jackstay's own requests to the endpoints go.
fn set_api_root(endpoints: &[Arc<Endpoint>], config: &config::Upstream) {
    let root = Arc::new(ApiRoot::from(config));
    for endpoint in endpoints {
        endpoint.set_api_root(&root);
    }
}

impl Upstream {
    /// An upstream without endpoints and with the default [`Connector`].
    pub fn new(
        config: config::Upstream,
        credentials: Credentials,
        metrics: &Arc<Metrics>,
        memory: &Arc<MemoryBudget>,
    ) -> Self {
        let name: Arc<str> = config.name.as_str().into();
        metrics.upstream_configured(&name);
        Self {
            sources: Sources::new(&name, metrics),
            resource_versions: ResourceVersions::default(),
            successions: Successions::default(),
            restores: Restores::default(),
            version_floors: VersionFloors::default(),
            name,
            path_prefix: config.path_prefix.clone(),
            endpoints: ArcSwap::default(),
            credentials,
            config: ArcSwap::from_pointee(config),
            canary: Canary::default(),
            metrics: Arc::clone(metrics),
            memory: Arc::clone(memory),
            unordered_groups: UnorderedGroups::default(),
            backends: AddressBackends::default(),
            group_failures: Arc::default(),
            line: Arc::default(),
            compression: Compression::default(),
            capabilities: CapabilityDemand::default(),
            connector: ArcSwap::default(),
            reconfigured: Notify::new(),
            endpoints_changed: Notify::new(),
            held_watches: AtomicUsize::new(0),
        }
    }

    /// An upstream of a test, without endpoints.
    #[cfg(test)]
    pub(crate) fn load(
        config: config::Upstream,
        identities: &[config::IdentitySource],
        metrics: &Arc<Metrics>,
    ) -> Arc<Self> {
        let files = &mut jackstay_net::loaded_files::LoadedFiles::default();
        let credentials = Credentials::load(&config, identities, files).unwrap();
        let memory = MemoryBudget::new(jackstay_core::admission::DEFAULT_LIMIT);
        Arc::new(Self::new(config, credentials, metrics, &memory))
    }

    /// Replaces the set of endpoints and notifies pools. The control plane is the only caller. It also
    /// calls [`Endpoint::remove`] for each endpoint that leaves the set.
    pub fn set_endpoints(&self, endpoints: Vec<Arc<Endpoint>>) {
        set_api_root(&endpoints, &self.config());
        mark_shared(&endpoints, |address| self.backends.kind(address).is_some());
        self.endpoints.store(Arc::new(endpoints));
        self.endpoints_changed.notify_waiters();
    }

    /// Sets which addresses are examined.
    pub fn set_examined<'a>(&self, addresses: impl Iterator<Item = &'a str>) {
        self.backends.set_examined(addresses);
        mark_shared(&self.endpoints(), |address| self.backends.kind(address).is_some());
    }

    /// Replaces the configuration and notifies the control plane.
    pub fn reconfigure(&self, config: config::Upstream) {
        set_api_root(&self.endpoints(), &config);
        self.config.store(Arc::new(config));
        self.reconfigured.notify_one();
    }

    /// Whether watches ask for gzip.
    pub fn asks_for_gzip(&self, now: Instant) -> bool {
        self.config().compression == config::Compression::Auto && !self.compression.is_paused(now)
    }

    /// A snapshot of the endpoints. Load it once for each decision, because the control plane may replace
    /// the set at any time.
    pub fn endpoints(&self) -> Guard<Arc<Vec<Arc<Endpoint>>>> {
        self.endpoints.load()
    }

    /// The endpoint of the current set with the address and the verified name of `other`.
    pub fn endpoint_like(&self, other: &Endpoint) -> Option<Arc<Endpoint>> {
        let endpoints = self.endpoints();
        let is_like = |endpoint: &&Arc<Endpoint>| {
            endpoint.address == other.address
                && endpoint.server_name == other.server_name
                && endpoint.backend == other.backend
        };
        endpoints.iter().find(is_like).cloned()
    }

    /// Waits until the set of endpoints is replaced.
    pub async fn endpoints_changed(&self) {
        self.endpoints_changed.notified().await;
    }

    /// Waits until [`Self::reconfigure`] is called. Only the control plane waits.
    pub async fn reconfigured(&self) {
        self.reconfigured.notified().await;
    }

    /// Opens TCP connections to the endpoints.
    pub fn connector(&self) -> Arc<Connector> {
        self.connector.load_full()
    }

    /// Replaces the connector for new connections.
    pub fn set_connector(&self, connector: Arc<Connector>) {
        self.connector.store(connector);
    }

    /// A snapshot of the configuration. Load it once for each decision, because a reload may replace it
    /// at any time.
    pub fn config(&self) -> Guard<Arc<config::Upstream>> {
        self.config.load()
    }

    /// Whether jackstay has a credential for `/readyz` requests.
    pub fn has_probe_credential(&self) -> bool {
        self.credentials.probe_token().is_some_and(|token| token.header().is_some())
            || self
                .credentials
                .tls(CredentialClass::Probe)
                .is_some_and(|tls| tls.certificate.is_some())
    }

    /// Where changes of its groups are counted and reported.
    pub fn reporter(&self) -> Reporter<'_> {
        Reporter { upstream: &self.name, metrics: &self.metrics }
    }

    /// Whether any endpoint is usable.
    pub fn is_usable(&self) -> bool {
        self.endpoints().iter().any(|endpoint| endpoint.is_usable())
    }

    /// Whether the apiserver behind a suspect connection of the prober is examined, for the flows to the endpoint.
    pub fn examines(&self, endpoint: &Endpoint) -> bool {
        // Flows may outlast the last listener that passes connections through.
        let has_flows = endpoint.flows() > 0 || endpoint.tunnelled_watches() > 0;
        self.config().used_by.passthrough || has_flows
    }

    /// Whether an endpoint serves the clients of this upstream. Of an upstream that only listeners in mode
    /// `passthrough` use, these are clients of flows.
    pub fn serves_at(&self, endpoint: &Endpoint) -> bool {
        if self.config().used_by.terminate {
            endpoint.is_usable()
        } else {
            endpoint.forwards_flows()
        }
    }

    /// Whether any endpoint serves the clients of this upstream.
    pub fn is_serving(&self) -> bool {
        self.endpoints().iter().any(|endpoint| self.serves_at(endpoint))
    }

    /// Whether clients of flows are served.
    pub fn forwards_flows(&self) -> bool {
        self.endpoints().iter().any(|endpoint| endpoint.forwards_flows())
    }

    /// Whether clients can be served, for the report of an outage.
    pub fn usability(&self) -> Usability {
        let endpoints = self.endpoints();
        if self.is_serving() {
            return Usability::Usable;
        }
        let tried = if endpoints.is_empty() {
            let reports = self.sources.reports();
            reports.values().all(|report| report.current_error().is_some())
        } else {
            endpoints.iter().all(|endpoint| {
                endpoint.last_failure().is_some() || endpoint.state() > EndpointState::Connecting
            })
        };
        if tried { Usability::Unusable } else { Usability::Untried }
    }

    /// Counts a held watch, also in the metric. [`super::pool::Pool::hold_watch`] is the only caller.
    pub(super) fn count_held_watch(&self) -> HeldWatch<'_> {
        self.held_watches.fetch_add(1, Ordering::Relaxed);
        self.metrics.held_watches().increment(1);
        HeldWatch(self)
    }

    /// Number of watches that wait while no endpoint is usable: those without a stream, which all workers hold, and
    /// those whose stream is on a connection that does not respond.
    pub fn waiting_watches(&self) -> usize {
        let on_streams = self.endpoints().iter().map(|endpoint| endpoint.watches()).sum::<usize>();
        self.held_watches.load(Ordering::Relaxed) + on_streams
    }

    /// The endpoints that are not usable for requests, at most `max`, each with state and reason.
    pub fn unusable_endpoints(&self, max: usize) -> String {
        let endpoints = self.endpoints();
        let unusable = endpoints.iter().filter(|endpoint| !endpoint.is_usable()).take(max);
        unusable.map(|endpoint| endpoint.description()).collect::<Vec<_>>().join("; ")
    }
}
