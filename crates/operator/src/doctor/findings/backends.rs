//! Rules for what is behind an address: several apiservers, or always the same one.

use super::finding::{Cause, Finding, note};
use crate::doctor::observations::{
    AddressBackends, EndpointObservation, EndpointSource, Observations,
};

/// What follows for jackstay if an address leads to several apiservers.
const OF_BALANCER: &str = "In mode terminate jackstay judges each of them by itself and uses two at \
                           a time. In mode passthrough it cannot see which one a flow has reached, so a sick one must be left out by \
                           the load balancer: name the apiservers themselves if this machine reaches them.";
/// What it means that all connections have reached one apiserver.
const OF_ONE: &str = "It is one apiserver, or a load balancer of several that show the same certificate and advertise the \
                      same address, or one with client IP affinity (session persistence), which sends all connections of \
                      this machine to one of them. If it is a load balancer, set kind: balancer in the upstream: then \
                      jackstay judges each connection by itself. One apiserver and affinity leave nothing that takes over \
                      while it is sick: name other apiservers as endpoints, or turn the affinity off.";

/// Says what is behind the addresses that were examined.
pub(super) fn behind(observations: &Observations, found: &mut Vec<Finding>) {
    let given = observations.endpoints.iter().filter(|e| e.source == EndpointSource::Given);
    let addresses: usize = given.clone().map(|endpoint| endpoint.resolved.addresses().len()).sum();
    for endpoint in given {
        for address in &endpoint.behind {
            found.extend(several(endpoint, address));
            found.extend(always_one(endpoint, address).filter(|_| addresses == 1));
        }
    }
}

fn several(endpoint: &EndpointObservation, address: &AddressBackends) -> Option<Finding> {
    let apiservers = address.several()?;
    let name = name(endpoint, address);
    let what = format!("{name} leads to several apiservers.");
    let because = format!("{} connections have reached {apiservers}", address.connections);
    Some(note(Cause::SeveralApiservers, what, because, OF_BALANCER).about(&endpoint.address))
}

fn always_one(endpoint: &EndpointObservation, address: &AddressBackends) -> Option<Finding> {
    if !address.is_always_one() {
        return None;
    }
    let what =
        format!("All connections to {} have reached the same apiserver.", name(endpoint, address));
    let because = format!("{} connections, {}", address.connections, address.backends.join(", "));
    Some(note(Cause::OneApiserver, what, because, OF_ONE).about(&endpoint.address))
}

/// The endpoint, with the address of its name.
fn name(endpoint: &EndpointObservation, address: &AddressBackends) -> String {
    let address = address.address.to_string();
    if endpoint.address == address {
        return address;
    }
    format!("{} ({address})", endpoint.address)
}
