//! `EndpointSlices` and `Endpoints` as they come from a watch: a store that follows the rules of
//! resourceVersion, and what the objects in it say.
//!
//! | what comes | what the store does |
//! |---|---|
//! | a list | takes its place, whatever was known: it is the truth, also after a restore from a backup |
//! | an event at or before the version that the watch began at | nothing: history is being replayed |
//! | an object older than the one known by that name | nothing: the same |
//! | a deletion older than the object known by that name | nothing: another life of it ended |
//! | an object older than the deletion of that name | nothing |
//! | the same again | nothing |
//! | anything else | takes it in the order in which it came |
//!
//! A version is an opaque text to a client but for one thing: two versions of one resource may be
//! compared as decimal numbers of any length (KEP-5504). Those that are no numbers are taken in
//! order.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;

use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use serde_json::Value;

use super::merge::{Candidate, DISCOVERED_NAME};
use super::watch_start::WatchStartVersion;
use crate::config::EndpointAddress;

/// Most objects that are kept. The Service `kubernetes` has one.
const MOST_OBJECTS: usize = 256;
/// Most entries that are read from all of them, and most refusals that are remembered.
const MOST_ENTRIES: usize = 5_000;
const MOST_REFUSED: usize = 20;

/// The Service whose endpoints are the apiservers.
pub const SERVICE: &str = "kubernetes";
/// The label that names the Service of a slice.
pub const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// What is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    /// `discovery.k8s.io/v1`.
    SlicesV1,
    /// `discovery.k8s.io/v1beta1`, before Kubernetes 1.21.
    SlicesV1Beta1,
    /// `Endpoints` of the core group, the oldest form.
    Endpoints,
}

impl Resource {
    /// Best first.
    pub const ALL: [Self; 3] = [Self::SlicesV1, Self::SlicesV1Beta1, Self::Endpoints];
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::SlicesV1 => "discovery.k8s.io/v1 EndpointSlices",
            Self::SlicesV1Beta1 => "discovery.k8s.io/v1beta1 EndpointSlices",
            Self::Endpoints => "v1 Endpoints",
        })
    }
}

/// What the objects say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiscoveredEndpoints {
    /// Endpoints that are ready.
    pub entries: Vec<Candidate>,
    /// How many are there and not ready.
    pub not_ready: usize,
    /// What cannot be an endpoint, and why; the first of them.
    pub refused: Vec<String>,
    /// How many those are.
    pub refused_count: usize,
}

#[derive(Debug, Clone)]
struct Known {
    version: String,
    /// `None` once it was deleted.
    object: Option<Value>,
}

/// The objects, by name.
#[derive(Debug)]
pub struct Store {
    resource: Resource,
    known: BTreeMap<String, Known>,
    /// A list that is not complete yet.
    list: Option<BTreeMap<String, Known>>,
    synced: bool,
    horizon: WatchStartVersion,
}

impl Store {
    /// An empty store for a resource; `horizon` says where the watch began.
    pub fn new(resource: Resource, horizon: WatchStartVersion) -> Self {
        Self { resource, known: BTreeMap::new(), list: None, synced: false, horizon }
    }

    /// Takes an event in; true if what the objects say may have changed.
    pub fn feed(&mut self, event: Event<DynamicObject>) -> bool {
        match event {
            Event::Init => {
                self.list = Some(BTreeMap::new());
                false
            }
            Event::InitApply(object) => {
                if let (Some(list), Some((name, known))) = (&mut self.list, read(object, false)) {
                    put(list, name, known);
                }
                false
            }
            Event::InitDone => {
                self.known = self.list.take().unwrap_or_default();
                self.synced = true;
                true
            }
            Event::Apply(object) => self.take(read(object, false)),
            Event::Delete(object) => self.take(read(object, true)),
        }
    }

    fn take(&mut self, read: Option<(String, Known)>) -> bool {
        let Some((name, new)) = read else { return false };
        let begun = self.horizon.version();
        if begun.is_some_and(|v| compare(&new.version, &v).is_some_and(Ordering::is_le)) {
            return false;
        }
        if let Some(known) = self.known.get(&name) {
            // A deletion may carry the version of the object that it ends.
            let ends_it = new.object.is_none() && known.object.is_some();
            match compare(&new.version, &known.version) {
                Some(Ordering::Less) => return false,
                Some(Ordering::Equal) if !ends_it => return false,
                _ => {}
            }
        }
        put(&mut self.known, name, new) && self.synced
    }

    /// What the objects say now.
    pub fn said(&self) -> DiscoveredEndpoints {
        let mut said = DiscoveredEndpoints::default();
        for object in self.known.values().filter_map(|known| known.object.as_ref()) {
            match self.resource {
                Resource::SlicesV1 | Resource::SlicesV1Beta1 => slice(object, &mut said),
                Resource::Endpoints => endpoints(object, &mut said),
            }
        }
        // An endpoint may be in two slices for a moment, ready in one of them.
        let mut seen = std::collections::HashSet::new();
        said.entries.retain(|entry| seen.insert(entry.address.clone()));
        said
    }
}

fn put(objects: &mut BTreeMap<String, Known>, name: String, known: Known) -> bool {
    if objects.len() >= MOST_OBJECTS && !objects.contains_key(&name) {
        // The oldest deletions are what can be forgotten.
        let Some(gone) = objects.iter().find(|(_, k)| k.object.is_none()) else { return false };
        let gone = gone.0.clone();
        objects.remove(&gone);
    }
    objects.insert(name, known);
    true
}

/// Name, version and content of an object; `None` if it is none of ours.
fn read(object: DynamicObject, deleted: bool) -> Option<(String, Known)> {
    let name = object.metadata.name.clone()?;
    let labels = object.metadata.labels.as_ref();
    let service = labels.and_then(|labels| labels.get(SERVICE_LABEL));
    let ours = service.map_or(name == SERVICE, |service| service == SERVICE);
    // The server was asked for ours alone; one that sends others is not believed.
    if !ours || object.metadata.namespace.as_deref().is_some_and(|n| n != "default") {
        return None;
    }
    let version = object.metadata.resource_version.unwrap_or_default();
    Some((name, Known { version, object: (!deleted).then_some(object.data) }))
}

/// Which of two versions is newer, if both are numbers.
pub fn compare(a: &str, b: &str) -> Option<Ordering> {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let (a, b) = (number(a).then_some(a)?, number(b).then_some(b)?);
    let (a, b) = (a.trim_start_matches('0'), b.trim_start_matches('0'));
    Some(a.len().cmp(&b.len()).then_with(|| a.cmp(b)))
}

/// What an `EndpointSlice` says. `conditions.ready` that is absent means ready, by its API.
fn slice(object: &Value, said: &mut DiscoveredEndpoints) {
    let kind = object["addressType"].as_str().unwrap_or("none");
    let Some(port) = port(&object["ports"]) else {
        return said.refuse("a slice without a TCP port".into(), 1);
    };
    for endpoint in list(&object["endpoints"]) {
        let addresses = list(&endpoint["addresses"]);
        if endpoint["conditions"]["ready"] == Value::Bool(false) {
            said.not_ready += addresses.len();
            continue;
        }
        for address in addresses {
            if kind == "IPv4" || kind == "IPv6" {
                said.offer(address, port);
            } else {
                said.refuse(format!("{} of address type {kind}", brief(address)), 1);
            }
        }
    }
}

/// What an `Endpoints` object says.
fn endpoints(object: &Value, said: &mut DiscoveredEndpoints) {
    for subset in list(&object["subsets"]) {
        let addresses = list(&subset["addresses"]);
        said.not_ready += list(&subset["notReadyAddresses"]).len();
        match port(&subset["ports"]) {
            Some(port) => addresses.iter().for_each(|address| said.offer(&address["ip"], port)),
            None => said.refuse("a subset without a TCP port".into(), addresses.len()),
        }
    }
}

/// The port called `https`, or the first TCP port.
fn port(ports: &Value) -> Option<u16> {
    let tcp = |port: &&Value| port["protocol"].as_str().is_none_or(|protocol| protocol == "TCP");
    let named = list(ports).iter().filter(tcp).find(|port| port["name"] == "https");
    let port = named.or_else(|| list(ports).iter().find(tcp))?["port"].as_u64()?;
    u16::try_from(port).ok().filter(|port| *port != 0)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A value of a stranger in a log line.
fn brief(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let mut short: String = text.chars().take(64).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

impl DiscoveredEndpoints {
    fn offer(&mut self, ip: &Value, port: u16) {
        let text = ip.as_str().unwrap_or_default();
        let Ok(parsed) = text.parse::<std::net::IpAddr>() else {
            return self.refuse(format!("{} is not an IP address", brief(ip)), 1);
        };
        if self.entries.len() >= MOST_ENTRIES {
            return self.refuse("more entries than can be read".into(), 1);
        }
        let text = std::net::SocketAddr::new(parsed, port).to_string();
        match EndpointAddress::parse(&text) {
            Ok(address) => {
                self.entries
                    .push(Candidate { address, server_name: Some(DISCOVERED_NAME.to_owned()) });
            }
            Err(why) => self.refuse(why, 1),
        }
    }

    fn refuse(&mut self, why: String, count: usize) {
        self.refused_count += count;
        if self.refused.len() < MOST_REFUSED {
            self.refused.push(why);
        }
    }
}

#[cfg(test)]
mod tests;
