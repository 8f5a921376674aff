//! Stores the `EndpointSlice` or `Endpoints` objects of a watch, and reads the endpoints from them.
//!
//! | event | effect on the store |
//! |---|---|
//! | list | replaces all objects, even by older ones: etcd may have been restored from a backup |
//! | event at or before the version at which the watch started | none: a replay |
//! | object older than the stored one of the same name | none: a replay |
//! | deletion older than the stored object of the same name | none: the object has been created again |
//! | object older than the stored deletion of the same name | none: a replay |
//! | object or deletion with the version of the stored one | none: it is applied already |
//! | any other event | applied |
//!
//! resourceVersions of one resource are compared as decimal numbers of any length (KEP-5504). An event
//! whose version is no such number is applied.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::merge::DISCOVERED_SERVER_NAME;
use jackstay_core::discovery::source::{Candidate, DiscoveredEndpoints};
use serde_json::Value;

/// Maximum number of stored objects. The Service `kubernetes` normally has one.
const MAX_OBJECTS: usize = 256;
/// Maximum number of endpoints of all objects.
const MAX_CANDIDATES: usize = 5_000;

/// The Service whose endpoints are the apiservers.
pub const SERVICE: &str = "kubernetes";
/// The label of an `EndpointSlice` that names its Service.
pub const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// The resource that is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WatchedResource {
    /// `discovery.k8s.io/v1`.
    SlicesV1,
    /// `discovery.k8s.io/v1beta1`, for Kubernetes before 1.21.
    SlicesV1Beta1,
    /// `Endpoints` of the core group.
    Endpoints,
}

impl WatchedResource {
    /// All resources, the preferred one first.
    pub const ALL: [Self; 3] = [Self::SlicesV1, Self::SlicesV1Beta1, Self::Endpoints];

    /// Path and query of the objects of [`SERVICE`].
    pub const fn target(self) -> &'static str {
        match self {
            Self::SlicesV1 => {
                "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices\
                 ?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes"
            }
            Self::SlicesV1Beta1 => {
                "/apis/discovery.k8s.io/v1beta1/namespaces/default/endpointslices\
                 ?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes"
            }
            Self::Endpoints => {
                "/api/v1/namespaces/default/endpoints?fieldSelector=metadata.name%3Dkubernetes"
            }
        }
    }
}

impl fmt::Display for WatchedResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SlicesV1 => "discovery.k8s.io/v1 EndpointSlices",
            Self::SlicesV1Beta1 => "discovery.k8s.io/v1beta1 EndpointSlices",
            Self::Endpoints => "v1 Endpoints",
        })
    }
}

#[derive(Debug, Clone)]
struct StoredObject {
    version: String,
    /// The content; `None` once the object is deleted.
    content: Option<Value>,
}

/// The objects of a watch, by name.
#[derive(Debug)]
pub struct ObjectStore {
    resource: WatchedResource,
    objects: BTreeMap<String, StoredObject>,
    /// The version of the list. A watch delivers events after it, so an event at or before it is a replay, also that of
    /// an object that is not stored.
    listed: String,
}

impl ObjectStore {
    /// The objects of a list that is complete, and its version.
    pub fn new(resource: WatchedResource, list: Vec<Value>, version: &str) -> Self {
        let mut objects = BTreeMap::new();
        for (name, stored) in list.into_iter().filter_map(|object| read_object(object, false)) {
            insert_bounded(&mut objects, name, stored);
        }
        Self { resource, objects, listed: version.to_owned() }
    }

    /// Applies an object that was added, modified or deleted. Returns whether the endpoints may have changed.
    pub fn apply(&mut self, object: Value, deleted: bool) -> bool {
        let Some((name, new)) = read_object(object, deleted) else { return false };
        if compare_versions(&new.version, &self.listed).is_some_and(Ordering::is_le) {
            return false;
        }
        if let Some(stored) = self.objects.get(&name) {
            // A DELETED event may have the version of the object that it deletes.
            let deletes_stored = new.content.is_none() && stored.content.is_some();
            match compare_versions(&new.version, &stored.version) {
                Some(Ordering::Less) => return false,
                Some(Ordering::Equal) if !deletes_stored => return false,
                _ => {}
            }
        }
        insert_bounded(&mut self.objects, name, new)
    }

    /// The endpoints that the stored objects contain.
    pub fn endpoints(&self) -> DiscoveredEndpoints {
        let mut found = DiscoveredEndpoints::default();
        for content in self.objects.values().filter_map(|object| object.content.as_ref()) {
            match self.resource {
                WatchedResource::SlicesV1 | WatchedResource::SlicesV1Beta1 => {
                    read_slice(content, &mut found);
                }
                WatchedResource::Endpoints => read_endpoints(content, &mut found),
            }
        }
        // While the controller moves an endpoint to another slice, both may contain it.
        let mut seen = HashSet::new();
        found.candidates.retain(|candidate| seen.insert(candidate.address.clone()));
        found
    }
}

/// Inserts an object. If there are [`MAX_OBJECTS`], it takes the place of a deletion. Returns false if no
/// deletion is stored.
fn insert_bounded(
    objects: &mut BTreeMap<String, StoredObject>,
    name: String,
    new: StoredObject,
) -> bool {
    if objects.len() >= MAX_OBJECTS && !objects.contains_key(&name) {
        let deleted = objects.iter().find(|(_, object)| object.content.is_none());
        let Some(deleted) = deleted.map(|(name, _)| name.clone()) else { return false };
        objects.remove(&deleted);
    }
    objects.insert(name, new);
    true
}

/// Name, version and content of an object; `None` if it does not belong to [`SERVICE`] in the namespace
/// `default`. The watch selects the objects of that Service, so only a faulty server sends others.
fn read_object(mut object: Value, deleted: bool) -> Option<(String, StoredObject)> {
    let metadata = object.as_object_mut()?.remove("metadata")?;
    let name = metadata["name"].as_str()?.to_owned();
    let service = metadata["labels"][SERVICE_LABEL].as_str();
    let is_of_service = service.map_or(name == SERVICE, |service| service == SERVICE);
    let is_elsewhere =
        metadata["namespace"].as_str().is_some_and(|namespace| namespace != "default");
    if !is_of_service || is_elsewhere {
        return None;
    }
    let version = metadata["resourceVersion"].as_str().unwrap_or_default().to_owned();
    Some((name, StoredObject { version, content: (!deleted).then_some(object) }))
}

/// Compares two resourceVersions; `None` unless both are decimal numbers.
fn compare_versions(a: &str, b: &str) -> Option<Ordering> {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let (a, b) = (number(a).then_some(a)?, number(b).then_some(b)?);
    let (a, b) = (a.trim_start_matches('0'), b.trim_start_matches('0'));
    Some(a.len().cmp(&b.len()).then_with(|| a.cmp(b)))
}

/// Adds the endpoints of an `EndpointSlice`. An absent `conditions.ready` means ready (`discovery.k8s.io/v1`).
fn read_slice(slice: &Value, found: &mut DiscoveredEndpoints) {
    let address_type = slice["addressType"].as_str().unwrap_or("none");
    let Some(port) = tcp_port(&slice["ports"]) else {
        return found.reject("a slice without a TCP port".into(), 1);
    };
    for endpoint in items(&slice["endpoints"]) {
        let addresses = items(&endpoint["addresses"]);
        if endpoint["conditions"]["ready"] == Value::Bool(false) {
            found.not_ready += addresses.len();
            continue;
        }
        for address in addresses {
            if matches!(address_type, "IPv4" | "IPv6") {
                add_candidate(found, address, port);
            } else {
                found.reject(format!("{} of address type {address_type}", quote(address)), 1);
            }
        }
    }
}

/// Adds the endpoints of an `Endpoints` object.
fn read_endpoints(object: &Value, found: &mut DiscoveredEndpoints) {
    for subset in items(&object["subsets"]) {
        let addresses = items(&subset["addresses"]);
        found.not_ready += items(&subset["notReadyAddresses"]).len();
        match tcp_port(&subset["ports"]) {
            Some(port) => {
                for address in addresses {
                    add_candidate(found, &address["ip"], port);
                }
            }
            None => found.reject("a subset without a TCP port".into(), addresses.len()),
        }
    }
}

fn add_candidate(found: &mut DiscoveredEndpoints, ip: &Value, port: u16) {
    let Ok(parsed) = ip.as_str().unwrap_or_default().parse::<IpAddr>() else {
        return found.reject(format!("{} is not an IP address", quote(ip)), 1);
    };
    if found.candidates.len() >= MAX_CANDIDATES {
        return found.reject(format!("more than {MAX_CANDIDATES} endpoints"), 1);
    }
    let server_name = Some(DISCOVERED_SERVER_NAME.to_owned());
    match EndpointAddress::parse(&SocketAddr::new(parsed, port).to_string()) {
        Ok(address) => found.candidates.push(Candidate { address, server_name }),
        Err(why) => found.reject(why.to_string(), 1),
    }
}

/// The TCP port named `https`, or else the first TCP port.
fn tcp_port(ports: &Value) -> Option<u16> {
    let tcp = |port: &&Value| port["protocol"].as_str().is_none_or(|protocol| protocol == "TCP");
    let named = items(ports).iter().filter(tcp).find(|port| port["name"] == "https");
    let port = named.or_else(|| items(ports).iter().find(tcp))?["port"].as_u64()?;
    u16::try_from(port).ok().filter(|port| *port != 0)
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Quotes at most 64 characters of a value from the server, for a log line.
fn quote(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let mut short: String = text.chars().take(64).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

#[cfg(test)]
mod tests;
