//! The only writer of an upstream's endpoint set.
//!
//! An endpoint that stays keeps its object, and thus its connections, health and history. New endpoints
//! join and old ones leave in one swap. No function here waits for a connection, a drain or a disk.

use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use jackstay_config::{self as config, EndpointPreference};
use jackstay_core::backends::Backend;
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::merge;
use jackstay_core::discovery::source::{EndpointIdentity, EndpointSpec};
use rustls::pki_types::ServerName;

use crate::control::host_addresses::HostAddresses;
use crate::control::readyz;
use crate::upstream::Upstream;
use crate::upstream::endpoint::{Endpoint, label};

/// The changes that [`replace_endpoints`] has made.
#[derive(Debug, Default)]
pub struct EndpointSetChange {
    /// New endpoints.
    pub joined: Vec<Arc<Endpoint>>,
    /// Endpoints that have left the set; their connections drain.
    pub left: Vec<Arc<Endpoint>>,
    /// Each specification that cannot be an endpoint, with the reason.
    pub refused: Vec<String>,
}

impl EndpointSetChange {
    /// Whether the set is unchanged.
    pub fn is_empty(&self) -> bool {
        self.joined.is_empty() && self.left.is_empty()
    }
}

/// The endpoints in the configuration that are not DNS names. They need no discovery.
pub fn static_endpoints(config: &config::Upstream) -> Vec<EndpointSpec> {
    let server_name = &config.tls.server_name;
    let spec = |address: &EndpointAddress| EndpointSpec {
        address: address.clone(),
        server_name: server_name.clone(),
        fallback: false,
    };
    let mut endpoints: Vec<EndpointSpec> =
        config.endpoints.iter().filter(|address| !address.is_name()).map(spec).collect();
    if let Some(host) = preferred_host(config.prefer, HostAddresses::of_process()) {
        merge::prefer_local(&mut endpoints, &host);
    }
    endpoints
}

/// The addresses of this host, if its endpoints are preferred.
pub fn preferred_host(prefer: EndpointPreference, host: &HostAddresses) -> Option<Vec<IpAddr>> {
    match prefer {
        EndpointPreference::Local => host.get(),
        EndpointPreference::None => None,
    }
}

/// Replaces the endpoint set of `upstream`. An empty set is applied; callers that want to keep the
/// current set must not pass one.
pub fn replace_endpoints(upstream: &Upstream, wanted: &[EndpointSpec]) -> EndpointSetChange {
    replace_members(upstream, wanted, &BalancerMembers::default())
}

/// [`replace_endpoints`], with the apiservers behind addresses as endpoints of their own.
fn replace_members(
    upstream: &Upstream,
    wanted: &[EndpointSpec],
    members: &BalancerMembers,
) -> EndpointSetChange {
    let mut change = EndpointSetChange::default();
    let before = Arc::clone(&upstream.endpoints());
    let key = |endpoint: &Arc<Endpoint>| (identity(endpoint), endpoint.backend.clone());
    let mut old: HashMap<_, _> = before.iter().map(|e| (key(e), Arc::clone(e))).collect();
    let mut after: Vec<Arc<Endpoint>> = Vec::with_capacity(wanted.len());
    for (spec, backend, is_fallback) in members.of_all(wanted) {
        let name = spec.server_name.as_deref().unwrap_or(&spec.address.host);
        if ServerName::try_from(name).is_err() {
            change.refused.push(format!("{}: {name:?} cannot be verified", spec.address));
            continue;
        }
        if let Some(existing) = old.remove(&(spec.identity(), backend.cloned())) {
            existing.set_fallback(is_fallback);
            after.push(existing);
            continue;
        }
        let metrics = upstream.metrics.endpoint(&upstream.name, &label(&spec.address, backend));
        let at = (&spec.address, backend.cloned());
        match Endpoint::of_backend(&upstream.name, at, Some(name), metrics, &upstream.line) {
            Ok(new) if after.iter().any(|other| key(other) == key(&new)) => {}
            Ok(new) => {
                new.set_fallback(is_fallback);
                change.joined.push(Arc::clone(&new));
                after.push(new);
            }
            Err(why) => change.refused.push(format!("{}: {why}", spec.address)),
        }
    }
    change.left = before.iter().filter(|e| old.contains_key(&key(e))).cloned().collect();
    if !change.is_empty() {
        upstream.set_endpoints(after);
    }
    for endpoint in &change.left {
        endpoint.remove();
    }
    change
}

/// What makes an endpoint another one.
pub fn identity(endpoint: &Endpoint) -> EndpointIdentity {
    EndpointIdentity::new(&endpoint.address, &endpoint.server_name.to_str())
}

/// The specifications of the endpoints of an upstream. Those of several apiservers behind one address are one.
fn specs(upstream: &Upstream) -> Vec<EndpointSpec> {
    let mut specs: Vec<EndpointSpec> = Vec::new();
    for endpoint in upstream.endpoints().iter() {
        let name = endpoint.server_name.to_str();
        let spec = EndpointSpec {
            address: endpoint.address.clone(),
            server_name: (name != endpoint.address.host).then(|| name.into_owned()),
            fallback: endpoint.is_fallback(),
        };
        match specs.iter_mut().find(|other| other.identity() == spec.identity()) {
            Some(other) => other.fallback &= spec.fallback,
            None => specs.push(spec),
        }
    }
    specs
}

/// Applies changes of the set and starts a prober for each endpoint. Used on the `LocalSet` of the control
/// thread.
#[derive(Debug)]
pub struct EndpointSetWriter {
    upstream: Arc<Upstream>,
    /// The addresses of the set.
    wanted: RefCell<Vec<EndpointSpec>>,
    members: RefCell<BalancerMembers>,
}

/// The endpoints of one address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressMembers {
    /// The apiservers behind it that are endpoints of their own.
    pub backends: Vec<Backend>,
    /// Whether the whole address is an endpoint. Besides backends it is a fallback.
    pub is_whole: bool,
}

/// The addresses whose apiservers are endpoints of their own. Each other address is one endpoint.
#[derive(Debug, Default)]
struct BalancerMembers(HashMap<EndpointIdentity, AddressMembers>);

impl BalancerMembers {
    /// The endpoints of these addresses, and whether each is a fallback.
    fn of_all<'a>(
        &'a self,
        wanted: &'a [EndpointSpec],
    ) -> impl Iterator<Item = (&'a EndpointSpec, Option<&'a Backend>, bool)> {
        wanted.iter().flat_map(|spec| {
            let members = self.0.get(&spec.identity());
            let backends = members.map_or(&[][..], |members| &members.backends);
            let is_whole = members.is_none_or(|members| members.is_whole);
            let is_fallback = spec.fallback || !backends.is_empty();
            let whole = is_whole.then_some((spec, None, is_fallback));
            let backends = backends.iter().map(move |backend| (spec, Some(backend), spec.fallback));
            backends.chain(whole)
        })
    }
}

impl EndpointSetWriter {
    /// Starts a prober for each endpoint of the current set.
    pub fn new(upstream: Arc<Upstream>) -> Self {
        let wanted = RefCell::new(specs(&upstream));
        let this = Self { upstream, wanted, members: RefCell::default() };
        for endpoint in this.upstream.endpoints().iter() {
            this.start_prober(endpoint);
        }
        this
    }

    /// Replaces the set, logs and counts the changes, and starts a prober for each new endpoint.
    pub fn apply(&self, wanted: &[EndpointSpec]) {
        self.wanted.replace(wanted.to_vec());
        let is_wanted =
            |address: &EndpointIdentity| wanted.iter().any(|spec| spec.identity() == *address);
        self.members.borrow_mut().0.retain(|address, _| is_wanted(address));
        self.update();
    }

    /// Changes the endpoints of an address.
    pub fn set_members(&self, address: &EndpointIdentity, members: AddressMembers) {
        self.members.borrow_mut().0.insert(address.clone(), members);
        self.update();
    }

    /// Makes an address one endpoint.
    pub fn join(&self, address: &EndpointIdentity) {
        if self.members.borrow_mut().0.remove(address).is_some() {
            self.update();
        }
    }

    /// The endpoints of an address.
    pub fn members(&self, address: &EndpointIdentity) -> AddressMembers {
        let whole = || AddressMembers { backends: Vec::new(), is_whole: true };
        self.members.borrow().0.get(address).cloned().unwrap_or_else(whole)
    }

    /// The addresses of the set.
    pub fn addresses(&self) -> Vec<EndpointIdentity> {
        self.wanted.borrow().iter().map(EndpointSpec::identity).collect()
    }

    /// Replaces the set by the endpoints of all addresses.
    fn update(&self) {
        let wanted = self.wanted.borrow();
        let change = replace_members(&self.upstream, &wanted, &self.members.borrow());
        for endpoint in &change.joined {
            tracing::info!(
                upstream = &*self.upstream.name,
                endpoint = &*endpoint.label,
                server_name = &*endpoint.server_name.to_str(),
                "endpoint joined"
            );
            self.start_prober(endpoint);
        }
        let counts = [("joined", change.joined.len()), ("left", change.left.len())];
        for (kind, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            self.upstream.metrics.discovery_changed(&self.upstream.name, kind, count);
        }
        for endpoint in &change.left {
            tracing::info!(
                upstream = &*self.upstream.name,
                endpoint = &*endpoint.label,
                "endpoint left; its connections drain"
            );
        }
        for reason in &change.refused {
            tracing::warn!(upstream = &*self.upstream.name, reason, "endpoint refused");
        }
    }

    /// The specifications of the current set.
    pub fn current(&self) -> Vec<EndpointSpec> {
        specs(&self.upstream)
    }

    fn start_prober(&self, endpoint: &Arc<Endpoint>) {
        let (upstream, endpoint) = (Arc::clone(&self.upstream), Arc::clone(endpoint));
        tokio::task::spawn_local(readyz::probe(upstream, endpoint));
    }
}
