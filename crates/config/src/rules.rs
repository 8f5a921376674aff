//! The rules between values: names and addresses that must be unique, and names that must exist.

use std::net::SocketAddr;

use jackstay_core::discovery::address::{EndpointAddress, quote};

use super::address::{addresses_of, collide, reaches};
use super::report::{Located, Report};

/// The valid values that the rules compare, with their key paths.
#[derive(Debug, Default)]
pub(super) struct References {
    /// Whether the list of upstreams has items, valid or not. If it is empty, only that is reported,
    /// and not each unknown upstream.
    pub(super) has_upstreams: bool,
    pub(super) upstream_names: Vec<Located<String>>,
    pub(super) listener_names: Vec<Located<String>>,
    /// The listening addresses, that of the admin endpoint first.
    pub(super) binds: Vec<Located<SocketAddr>>,
    /// The endpoints of each upstream.
    pub(super) endpoints: Vec<Vec<Located<EndpointAddress>>>,
    /// The upstreams that listeners name.
    pub(super) upstreams: Vec<Located<String>>,
    /// The upstreams that listeners in mode `terminate` name.
    pub(super) terminated: Vec<String>,
    pub(super) without_ca: Vec<UpstreamWithoutCa>,
    /// The upstreams with an authority, and the path of that key.
    pub(super) with_authority: Vec<Located<String>>,
}

/// The warning for an authority that not every request carries.
const PASSED_THROUGH_HOST: &str = "clients in mode passthrough send the host that they connect to, which a server that \
    routes by host answers with 404 or 421: use mode terminate, in which jackstay sends this authority";

/// An upstream without a CA bundle.
#[derive(Debug)]
pub(super) struct UpstreamWithoutCa {
    pub(super) upstream: String,
    /// The path of its `ca_file` key.
    pub(super) path: String,
    /// Whether its probes or its discovery send a credential.
    pub(super) credential: bool,
}

/// Reports every violation.
pub(super) fn check(references: &References, report: &Report) {
    unique_names(&references.upstream_names, "upstream", report);
    unique_names(&references.listener_names, "listener", report);
    unique_binds(&references.binds, report);
    for endpoints in &references.endpoints {
        unique_endpoints(endpoints, report);
        no_loops(endpoints, &references.binds, report);
    }
    upstreams_exist(references, report);
    servers_are_verified(references, report);
    authority_is_sent(references, report);
}

/// Clients whose connections are passed through write the host themselves.
fn authority_is_sent(references: &References, report: &Report) {
    for (path, upstream) in &references.with_authority {
        let uses = references.upstreams.iter().filter(|(_, name)| name == upstream).count();
        let terminated = references.terminated.iter().filter(|name| *name == upstream).count();
        if uses > terminated {
            report.warn(path, PASSED_THROUGH_HOST);
        }
    }
}

/// Requests and credentials go to verified servers only. A listener in mode `passthrough` sends
/// neither; its clients verify the server themselves.
fn servers_are_verified(references: &References, report: &Report) {
    for without in &references.without_ca {
        let is_used = references.upstreams.iter().any(|(_, name)| *name == without.upstream);
        if references.terminated.contains(&without.upstream) || !is_used {
            report.error(&without.path, "is required: the path of a file");
        } else if without.credential {
            let message = "is required with a credential for readyz or discovery: an \
                           unverified server must not receive it";
            report.error(&without.path, message);
        }
    }
}

/// Each item that equals an earlier one, with the first such item.
fn repeated<T>(
    items: &[Located<T>],
    is_same: impl Fn(&T, &T) -> bool,
) -> impl Iterator<Item = (&Located<T>, &Located<T>)> {
    items.iter().enumerate().filter_map(move |(i, item)| {
        let first = items[..i].iter().find(|earlier| is_same(&earlier.1, &item.1))?;
        Some((item, first))
    })
}

fn unique_names(names: &[Located<String>], kind: &str, report: &Report) {
    for ((path, name), (first, _)) in repeated(names, |a, b| a == b) {
        report.error(path, format!("the {kind} name {} is already used at {first}", quote(name)));
    }
}

fn unique_binds(binds: &[Located<SocketAddr>], report: &Report) {
    for ((path, bind), (first, other)) in repeated(binds, |a, b| collide(*a, *b)) {
        let message = if other == bind {
            format!("{bind} is already bound at {first}")
        } else {
            format!("{bind} collides with {other}, bound at {first}")
        };
        report.error(path, message);
    }
}

fn unique_endpoints(endpoints: &[Located<EndpointAddress>], report: &Report) {
    let is_same = |a: &EndpointAddress, b: &EndpointAddress| {
        let is_same_ip = || {
            a.zone() == b.zone()
                && addresses_of(a).iter().any(|address| addresses_of(b).contains(address))
        };
        a.is_same(b) || is_same_ip()
    };
    for ((path, endpoint), (first, other)) in repeated(endpoints, is_same) {
        let message = if other == endpoint {
            format!("{endpoint} is already an endpoint at {first}")
        } else {
            format!("{endpoint} is the same as {other} at {first}")
        };
        report.error(path, message);
    }
}

fn no_loops(
    endpoints: &[Located<EndpointAddress>],
    binds: &[Located<SocketAddr>],
    report: &Report,
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

fn upstreams_exist(references: &References, report: &Report) {
    let known: Vec<&str> =
        references.upstream_names.iter().map(|(_, name)| name.as_str()).collect();
    for (path, name) in &references.upstreams {
        if !known.contains(&name.as_str()) && references.has_upstreams {
            let message = match known.as_slice() {
                [] => format!("there is no upstream {}", quote(name)),
                known => {
                    format!("there is no upstream {}; there is {}", quote(name), known.join(", "))
                }
            };
            report.error(path, message);
        }
    }
    for (path, name) in &references.upstream_names {
        if !references.upstreams.iter().any(|(_, used)| used == name) {
            report.warn(path, format!("no listener uses the upstream {}", quote(name)));
        }
    }
}
