//! Rules that look at more than one value: names and addresses that must be unique or must exist.

use std::net::SocketAddr;

use super::address::{addresses_of, collide, reaches};
use super::errors::quote;
use super::model::EndpointAddress;
use super::node::Report;

/// A valid value and where it stands.
pub(super) type Placed<T> = (String, T);

/// What the walk met, valid values only.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// Where upstreams are expected, if any were found; false keeps us from saying that all are
    /// missing when what is there is broken.
    pub(super) upstreams_readable: bool,
    pub(super) upstream_names: Vec<Placed<String>>,
    pub(super) listener_names: Vec<Placed<String>>,
    /// The admin endpoint first.
    pub(super) binds: Vec<Placed<SocketAddr>>,
    /// Of each upstream.
    pub(super) endpoints: Vec<Vec<Placed<EndpointAddress>>>,
    /// The upstreams that listeners name.
    pub(super) references: Vec<Placed<String>>,
    /// The upstreams among them that a listener names that terminates TLS.
    pub(super) terminated: Vec<String>,
    /// The upstreams without a CA bundle.
    pub(super) without_ca: Vec<Needs>,
}

/// An upstream that may need a CA bundle.
#[derive(Debug)]
pub(super) struct Needs {
    pub(super) upstream: String,
    /// Where the bundle would stand.
    pub(super) path: String,
    /// Its `/readyz` is asked with a credential.
    pub(super) credential: bool,
}

/// Reports every rule that is broken.
pub(super) fn check(seen: &Seen, report: &mut Report) {
    unique_names(&seen.upstream_names, "upstream", report);
    unique_names(&seen.listener_names, "listener", report);
    unique_binds(&seen.binds, report);
    for endpoints in &seen.endpoints {
        unique_endpoints(endpoints, report);
        no_loops(endpoints, &seen.binds, report);
    }
    references_exist(seen, report);
    servers_are_verified(seen, report);
}

/// Requests and credentials go to servers that were verified, and to no others. A passthrough
/// listener sends neither: its clients verify for themselves.
fn servers_are_verified(seen: &Seen, report: &mut Report) {
    for needs in &seen.without_ca {
        let passed = seen.references.iter().any(|(_, name)| *name == needs.upstream);
        if seen.terminated.contains(&needs.upstream) || !passed {
            report.error(&needs.path, "is required: the path of a file");
        } else if needs.credential {
            let message = "is required beside a credential for readyz or discovery: without it \
                           nobody verifies whom that is shown to";
            report.error(&needs.path, message);
        }
    }
}

fn unique_names(names: &[Placed<String>], what: &str, report: &mut Report) {
    for (i, (path, name)) in names.iter().enumerate() {
        if let Some((first, _)) = names[..i].iter().find(|(_, other)| other == name) {
            report
                .error(path, format!("the {what} name {} is already used at {first}", quote(name)));
        }
    }
}

fn unique_binds(binds: &[Placed<SocketAddr>], report: &mut Report) {
    for (i, (path, bind)) in binds.iter().enumerate() {
        if let Some((first, other)) = binds[..i].iter().find(|(_, other)| collide(*other, *bind)) {
            let message = if other == bind {
                format!("{bind} is already bound at {first}")
            } else {
                format!("{bind} collides with {other}, bound at {first}")
            };
            report.error(path, message);
        }
    }
}

fn unique_endpoints(endpoints: &[Placed<EndpointAddress>], report: &mut Report) {
    for (i, (path, endpoint)) in endpoints.iter().enumerate() {
        let mine = addresses_of(endpoint);
        let same = |other: &EndpointAddress| {
            other == endpoint || addresses_of(other).iter().any(|a| mine.contains(a))
        };
        if let Some((first, other)) = endpoints[..i].iter().find(|(_, other)| same(other)) {
            let message = if other == endpoint {
                format!("{endpoint} is already an endpoint at {first}")
            } else {
                format!("{endpoint} is the same as {other} at {first}")
            };
            report.error(path, message);
        }
    }
}

fn no_loops(
    endpoints: &[Placed<EndpointAddress>],
    binds: &[Placed<SocketAddr>],
    report: &mut Report,
) {
    for (path, endpoint) in endpoints {
        let targets = addresses_of(endpoint);
        let loops = |bind: SocketAddr| targets.iter().any(|target| reaches(*target, bind));
        if let Some((at, _)) = binds.iter().find(|(_, bind)| loops(*bind)) {
            let message =
                format!("{endpoint} is jackstay's own address ({at}): requests would loop");
            report.error(path, message);
        }
    }
}

fn references_exist(seen: &Seen, report: &mut Report) {
    let known: Vec<&str> = seen.upstream_names.iter().map(|(_, name)| name.as_str()).collect();
    for (path, name) in &seen.references {
        if !known.contains(&name.as_str()) && seen.upstreams_readable {
            let message = match known.as_slice() {
                [] => format!("there is no upstream {}", quote(name)),
                known => {
                    format!("there is no upstream {}; there is {}", quote(name), known.join(", "))
                }
            };
            report.error(path, message);
        }
    }
    for (path, name) in &seen.upstream_names {
        if !seen.references.iter().any(|(_, used)| used == name) {
            report.warn(path, format!("no listener uses the upstream {}", quote(name)));
        }
    }
}
