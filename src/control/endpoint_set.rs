//! The one writer of an upstream's set of endpoints.
//!
//! Whoever knows of endpoints says what the set should be; this makes it so. What is unchanged
//! keeps its object, and with it its connections, its health and its history. What is new is in the
//! set before what is old leaves it, in one swap. Nothing here waits: not for a connection, not for
//! a drain, not for the disk.

use std::collections::HashMap;
use std::sync::Arc;

use rustls::pki_types::ServerName;

use crate::config::{self, EndpointAddress};
use crate::control::readyz;
use crate::upstream::Upstream;
use crate::upstream::endpoint::Endpoint;

/// One endpoint that the set should have. Two with the same address and server name are the same
/// endpoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct EndpointSpec {
    /// Where it is.
    pub address: EndpointAddress,
    /// Name sent as SNI and verified; `None` is the host of the address.
    pub server_name: Option<String>,
    /// For when nothing else will do; see [`Endpoint::is_fallback`].
    pub fallback: bool,
}

/// What a call of [`place`] has changed.
#[derive(Debug, Default)]
pub struct EndpointSetChange {
    /// Endpoints that are new.
    pub joined: Vec<Arc<Endpoint>>,
    /// Endpoints that are gone; their connections drain.
    pub left: Vec<Arc<Endpoint>>,
    /// EndpointSetWriter that cannot be endpoints, and why.
    pub refused: Vec<String>,
}

impl EndpointSetChange {
    /// Whether the set is what it was.
    pub fn is_empty(&self) -> bool {
        self.joined.is_empty() && self.left.is_empty()
    }
}

/// The endpoints that the configuration itself names, which need nobody to be asked.
pub fn static_endpoints(config: &config::Upstream) -> Vec<EndpointSpec> {
    let server_name = &config.tls.server_name;
    let member = |address: &EndpointAddress| EndpointSpec {
        address: address.clone(),
        server_name: server_name.clone(),
        fallback: false,
    };
    config.endpoints.iter().filter(|address| !address.is_name()).map(member).collect()
}

/// Makes the set of `upstream` what is wanted. An empty wish is one too: who must not lose all
/// endpoints does not ask for it.
pub fn replace_endpoints(upstream: &Upstream, wanted: &[EndpointSpec]) -> EndpointSetChange {
    let mut change = EndpointSetChange::default();
    let before = Arc::clone(&upstream.endpoints());
    let mut old: HashMap<_, _> = before.iter().map(|e| (key(e), Arc::clone(e))).collect();
    let mut after: Vec<Arc<Endpoint>> = Vec::with_capacity(wanted.len());
    for member in wanted {
        let name = member.server_name.as_deref().unwrap_or(&member.address.host);
        let Ok(verified) = ServerName::try_from(name.to_owned()) else {
            change.refused.push(format!("{}: {name:?} cannot be verified", member.address));
            continue;
        };
        if let Some(known) = old.remove(&(member.address.clone(), verified)) {
            known.set_fallback(member.fallback);
            after.push(known);
            continue;
        }
        let metrics = upstream.metrics.endpoint(&upstream.name, &member.address.to_string());
        match Endpoint::new(&upstream.name, &member.address, Some(name), metrics) {
            Ok(new) if after.iter().any(|other| key(other) == key(&new)) => {}
            Ok(new) => {
                new.set_fallback(member.fallback);
                change.joined.push(Arc::clone(&new));
                after.push(new);
            }
            Err(why) => change.refused.push(format!("{}: {why}", member.address)),
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

fn key(endpoint: &Endpoint) -> (EndpointAddress, ServerName<'static>) {
    (endpoint.address.clone(), endpoint.server_name.clone())
}

/// Keeps the set and a prober for each endpoint in it. Lives on the control thread's `LocalSet`.
#[derive(Debug)]
pub struct EndpointSetWriter {
    upstream: Arc<Upstream>,
}

impl EndpointSetWriter {
    /// Takes over the set as it is.
    pub fn new(upstream: Arc<Upstream>) -> Self {
        let this = Self { upstream };
        for endpoint in this.upstream.endpoints().iter() {
            this.probe(endpoint);
        }
        this
    }

    /// Makes the set what is wanted, tells what changed, and has the new ones probed.
    pub fn apply(&self, wanted: &[EndpointSpec]) -> EndpointSetChange {
        let change = replace_endpoints(&self.upstream, wanted);
        for endpoint in &change.joined {
            tracing::info!(
                upstream = &*self.upstream.name,
                endpoint = &*endpoint.label,
                server_name = &*endpoint.server_name.to_str(),
                "endpoint joined"
            );
            self.probe(endpoint);
        }
        let counts = [("joined", change.joined.len()), ("left", change.left.len())];
        for (what, count) in counts.into_iter().filter(|(_, count)| *count > 0) {
            self.upstream.metrics.discovery_changed(&self.upstream.name, what, count);
        }
        for endpoint in &change.left {
            tracing::info!(
                upstream = &*self.upstream.name,
                endpoint = &*endpoint.label,
                "endpoint left; its connections drain"
            );
        }
        for why in &change.refused {
            tracing::warn!(upstream = &*self.upstream.name, why, "endpoint refused");
        }
        change
    }

    /// The set as it is.
    pub fn placed(&self) -> Vec<EndpointSpec> {
        let member = |endpoint: &Arc<Endpoint>| {
            let name = endpoint.server_name.to_str();
            EndpointSpec {
                address: endpoint.address.clone(),
                server_name: (name != endpoint.address.host).then(|| name.into_owned()),
                fallback: endpoint.is_fallback(),
            }
        };
        self.upstream.endpoints().iter().map(member).collect()
    }

    /// The upstream whose set it keeps.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    fn probe(&self, endpoint: &Arc<Endpoint>) {
        let (upstream, endpoint) = (Arc::clone(&self.upstream), Arc::clone(endpoint));
        tokio::task::spawn_local(readyz::probe(upstream, endpoint));
    }
}
