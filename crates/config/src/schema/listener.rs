//! The schema of a listener.
//!
//! A key of the other mode is an error with a reason: a client CA on a listener that sees no
//! certificate would suggest a protection that does not exist.

use std::convert::Infallible;
use std::time::Duration;

use jackstay_core::discovery::address::{is_dns_name, quote};

use crate::address::parse_bind;
use crate::destination::Destination;
use crate::heartbeat::HeartbeatResource;
use crate::listener::{
    CertPaths, DestinationRoute, FlowSettings, IdentitySource, KubeconfigUser, Limits, Listener,
    Mode, PassedThrough, Passthrough, RequestLimits, Route, SOURCE_PREFIX_V6, ServingCert,
    Terminate, TerminateLimits,
};
use crate::node::{Fields, Node};
use crate::report::Located;
use crate::rules::References;
use crate::units::{HOUR, MINUTE, MS, SECOND};
use crate::value_error::ValueError;

/// The error for a TLS key in mode `passthrough`.
const NO_TLS: &str =
    "has no meaning in mode passthrough: TLS is between the client and the apiserver";
/// The error for a limit of requests in mode `passthrough`.
const NO_REQUESTS: &str = "has no meaning in mode passthrough: no request is seen here";
/// The error for a key that earlier versions had.
const NO_RESUME_GROUPS: &str = "was removed: watches of every API group are resumed; list exceptions in \
                                never_resume_groups";
/// The error for a key of mode `passthrough` in mode `terminate`.
const NO_FLOWS: &str = "has no meaning in mode terminate: it forwards requests, not connections";
/// The error for a setting of flows in mode `terminate`.
const NO_PASSED_THROUGH: &str = "has no meaning in mode terminate without passthrough_server_names: it forwards \
                                 requests, not connections";
/// The error for `passthrough_server_names` in mode `passthrough`.
const ALL_PASSED_THROUGH: &str = "has no meaning in mode passthrough: every connection is passed through, and routes select its upstream by name";

pub(super) fn read(node: &Node<'_>, references: &mut References) -> Listener {
    let mut fields = node.fields();
    let name = fields.name(&mut references.listener_names);

    let (mut bind, mut wildcards) = (Vec::new(), Vec::new());
    for item in fields.required_items("bind", "at least one address") {
        let wanted = "text: an address such as 127.0.0.1:7443";
        if let Some(address) = item.require(wanted, parse_bind) {
            bind.push(address);
            references.binds.push((item.path.clone(), address));
            if address.ip().is_unspecified() {
                wildcards.push((item, address));
            }
        }
    }

    let freebind = fields.get("freebind").flag(false);
    let mode_node = fields.get("mode");
    let mode = mode_node.parse("text: terminate or passthrough", |text| match text {
        "terminate" => Ok(true),
        "passthrough" => Ok(false),
        _ => Err(ValueError::not(text, "one of terminate, passthrough")),
    });
    // `None`: the mode is invalid, so it is unknown which other keys are allowed.
    let terminate = if mode_node.is_given() { mode } else { Some(true) };

    let upstream = upstream(&mut fields, terminate, references);
    let node = fields.get("transparent");
    let transparent = node.flag(false);
    if transparent && terminate == Some(true) {
        node.error(
            "needs mode passthrough: jackstay has no certificate for the original destination",
        );
    }
    let mode = if terminate == Some(false) {
        Mode::Passthrough(passthrough(&mut fields, transparent, references))
    } else {
        Mode::Terminate(self::terminate(&mut fields, terminate.is_some()))
    };
    fields.finish();
    if let Mode::Terminate(terminate) = &mode
        && !terminate.identities.is_empty()
    {
        for (item, address) in wildcards {
            item.warn(format!(
                "{address} accepts clients from every network of this host: each can send requests to the \
                 apiservers with a token of its own or as system:anonymous; an identity serves only clients \
                 that prove its subject. Bind a loopback address unless other hosts are clients"
            ));
        }
    }
    Listener { name, bind, freebind, transparent, upstream, mode }
}

/// The name of an upstream, empty if it is invalid. `terminate` is the mode of the listener.
fn upstream(
    fields: &mut Fields<'_>,
    terminate: Option<bool>,
    references: &mut References,
) -> String {
    let node = fields.get("upstream");
    let wanted = "text: the name of an upstream";
    let read = |text: &str| Ok::<_, Infallible>(text.to_owned());
    let Some(name) = node.require(wanted, read) else { return String::new() };
    references.upstreams.push((node.path, name.clone()));
    if terminate != Some(false) {
        references.terminated.push(name.clone());
    }
    name
}

fn limits(fields: &mut Fields<'_>) -> Limits {
    let max_connections = fields.get("max_connections").number(4096, 1..=1_000_000);
    let source_prefix = fields.get("source_prefix_v6");
    let wanted = "a whole number: the prefix length of an IPv6 network";
    let handshake = fields.get("handshake_timeout");
    Limits {
        max_connections: max_connections as usize,
        source_prefix_v6: source_prefix.number_as(wanted, SOURCE_PREFIX_V6.into(), 32..=128) as u8,
        handshake_timeout: handshake.duration(10 * SECOND, 100 * MS..=MINUTE),
    }
}

/// Reads the keys of mode `terminate`. Reports missing keys and keys of the other mode only if
/// `mode_is_known`.
fn terminate(fields: &mut Fields<'_>, mode_is_known: bool) -> Terminate {
    let mut nested = fields.section("limits");
    let limits =
        TerminateLimits { connections: limits(&mut nested), requests: request_limits(&mut nested) };
    nested.finish();
    for key in ["destinations", "routes"] {
        if mode_is_known {
            fields.refuse(key, NO_FLOWS);
        } else {
            let _ = fields.get(key);
        }
    }
    let passed_through = passed_through(fields, mode_is_known);

    let mut tls = fields.section("tls");
    let (_, paths) = cert_paths(&mut tls, mode_is_known);
    let issuer = issuer(&mut tls, &paths);
    tls.finish();

    let ca_node = fields.get("client_ca_file");
    let client_ca_file = ca_node.file();
    let identities = identities(&fields.get("identities"));
    if !identities.is_empty() && !ca_node.is_given() && mode_is_known {
        let message =
            "is required beside identities: without it no client certificate can be verified";
        ca_node.error(message);
    }
    fields.refuse("resume_groups", NO_RESUME_GROUPS);
    let never_resume_groups = api_groups(&fields.get("never_resume_groups"));
    let tls = ServingCert { paths, issuer };
    let heartbeats = heartbeats(&fields.get("heartbeats"));
    Terminate {
        tls,
        client_ca_file,
        identities,
        never_resume_groups,
        heartbeats,
        passed_through,
        limits,
    }
}

/// The connections that a listener in mode `terminate` passes through. Reports settings of flows without names only if
/// `mode_is_known`.
fn passed_through(fields: &mut Fields<'_>, mode_is_known: bool) -> Option<Box<PassedThrough>> {
    let items = fields.get("passthrough_server_names").items();
    let server_names = server_names(&items, &mut Vec::new(), ValueError::PassedThroughIp);
    if !items.is_empty() || !mode_is_known {
        let flows = flow_settings(fields);
        return (!server_names.is_empty()).then(|| Box::new(PassedThrough { server_names, flows }));
    }
    for key in FLOW_KEYS {
        fields.refuse(key, NO_PASSED_THROUGH);
    }
    None
}

/// The keys that [`flow_settings`] reads.
const FLOW_KEYS: [&str; 3] = ["idle_timeout", "leave_timeout", "rebalance"];

fn flow_settings(fields: &mut Fields<'_>) -> FlowSettings {
    let default = FlowSettings::default();
    let idle = fields.get("idle_timeout");
    let idle_timeout = idle.duration(Duration::ZERO, Duration::ZERO..=30 * 24 * HOUR);
    if !idle_timeout.is_zero() && idle_timeout < SECOND {
        idle.error("is shorter than 1s; 0s disables it");
    }
    let leave = fields.get("leave_timeout");
    FlowSettings {
        idle_timeout: Some(idle_timeout).filter(|timeout| !timeout.is_zero()),
        leave_timeout: leave.duration(default.leave_timeout, Duration::ZERO..=30 * 24 * HOUR),
        rebalance: fields.get("rebalance").flag(default.rebalance),
    }
}

fn passthrough(
    fields: &mut Fields<'_>,
    transparent: bool,
    references: &mut References,
) -> Passthrough {
    for key in [
        "tls",
        "client_ca_file",
        "identities",
        "never_resume_groups",
        "resume_groups",
        "heartbeats",
    ] {
        fields.refuse(key, NO_TLS);
    }
    let mut nested = fields.section("limits");
    let limits = limits(&mut nested);
    for key in ["max_streams", "max_header_bytes", "header_timeout", "stall_timeout"] {
        nested.refuse(key, NO_REQUESTS);
    }
    nested.finish();
    let list = fields.get("destinations");
    let destinations = destinations(&list, references);
    if !transparent && !destinations.is_empty() {
        list.error(
            "needs `transparent: true`: only a redirected connection has an original destination",
        );
    }
    let routes = routes(&fields.get("routes"), references);
    fields.refuse("passthrough_server_names", ALL_PASSED_THROUGH);
    Passthrough { destinations, routes, flows: flow_settings(fields), limits }
}

fn destinations(node: &Node<'_>, references: &mut References) -> Vec<DestinationRoute> {
    let mut destinations = Vec::new();
    for item in node.items() {
        let mut fields = item.fields();
        let items = fields.required_items("to", "at least one address");
        let wanted = "text: an address or a network such as 10.0.0.5:6443 or 10.0.0.0/24";
        let read = |item: &Node<'_>| item.require(wanted, Destination::parse);
        let to = items.iter().filter_map(read).collect();
        let upstream = upstream(&mut fields, Some(false), references);
        fields.finish();
        destinations.push(DestinationRoute { to, upstream });
    }
    destinations
}

fn routes(node: &Node<'_>, references: &mut References) -> Vec<Route> {
    let mut known: Vec<Located<String>> = Vec::new();
    let mut routes = Vec::new();
    for item in node.items() {
        let mut fields = item.fields();
        let items = fields.required_items("server_names", "at least one name");
        let server_names = server_names(&items, &mut known, ValueError::RouteOfIp);
        let upstream = upstream(&mut fields, Some(false), references);
        fields.finish();
        routes.push(Route { server_names, upstream });
    }
    routes
}

/// The server names in a list. `known` has those of earlier lists, and no name may appear twice. `of_ip` is the error
/// for an IP address.
fn server_names(
    items: &[Node<'_>],
    known: &mut Vec<Located<String>>,
    of_ip: fn(String) -> ValueError,
) -> Vec<String> {
    let mut names = Vec::new();
    for item in items {
        let wanted = "text: a name such as a.example.com or *.example.com";
        let Some(name) = item.require(wanted, |text| server_name(text, of_ip)) else { continue };
        if let Some((first, _)) = known.iter().find(|(_, other)| *other == name) {
            item.error(format!("{} is already at {first}", quote(&name)));
        }
        known.push((item.path.clone(), name.clone()));
        names.push(name);
    }
    names
}

/// A server name (RFC 6066 section 3: a DNS name). The prefix `*.` stands for one label.
fn server_name(text: &str, of_ip: fn(String) -> ValueError) -> Result<String, ValueError> {
    let name = text.strip_prefix("*.").unwrap_or(text);
    if text.parse::<std::net::IpAddr>().is_ok() {
        return Err(of_ip(text.to_owned()));
    }
    if !is_dns_name(name) {
        return Err(ValueError::not(text, "a name such as a.example.com or *.example.com"));
    }
    Ok(text.to_ascii_lowercase())
}

fn identities(node: &Node<'_>) -> Vec<IdentitySource> {
    let mut known: Vec<Located<IdentitySource>> = Vec::new();
    let mut identities = Vec::new();
    for item in node.items() {
        let mut fields = item.fields();
        let (at, source) = identity(&mut fields);
        fields.finish();
        let is_same = |other: &IdentitySource| match (other, &source) {
            (IdentitySource::Files(other), IdentitySource::Files(paths)) => {
                other.cert_file == paths.cert_file
            }
            (other, source) => other == source,
        };
        let same = known.iter().find(|(_, other)| is_same(other));
        if let Some((first, _)) = same.filter(|_| !source.file().as_os_str().is_empty()) {
            at.error(format!("the same certificate as {first}"));
        }
        known.push((at.path, source.clone()));
        identities.push(source);
    }
    identities
}

/// The source of an identity, and the node that names it: `cert_file` and `key_file`, or `kubeconfig` and `user`.
fn identity<'a>(fields: &mut Fields<'a>) -> (Node<'a>, IdentitySource) {
    if !fields.has("kubeconfig") {
        fields.refuse("user", "needs kubeconfig, whose user it names");
        let (cert, paths) = cert_paths(fields, true);
        return (cert, paths.into());
    }
    for key in ["cert_file", "key_file"] {
        fields
            .refuse(key, "is not possible beside kubeconfig, which holds or names the certificate");
    }
    let (kubeconfig, user) = (fields.get("kubeconfig"), fields.get("user"));
    let file = kubeconfig.required_file().unwrap_or_default();
    let user = user.parse("text: the name of a user", |text| Ok::<_, Infallible>(text.to_owned()));
    let user = user.filter(|user| !user.is_empty());
    (kubeconfig, IdentitySource::Kubeconfig(KubeconfigUser { kubeconfig: file, user }))
}

/// The local CA that renews the serving certificate.
fn issuer(tls: &mut Fields<'_>, serving: &CertPaths) -> Option<CertPaths> {
    let mut fields = tls.section("issuer");
    let (cert, issuer) = fields.cert_pair();
    if issuer.is_some() && serving.cert_file != serving.key_file {
        let message = "needs tls.cert_file and tls.key_file to be one file: it is replaced in one \
                       step when it is renewed";
        cert.error(message);
    }
    fields.finish();
    issuer
}

/// A certificate with its key, and the node of `cert_file`.
fn cert_paths<'a>(fields: &mut Fields<'a>, required: bool) -> (Node<'a>, CertPaths) {
    let (cert, key) = (fields.get("cert_file"), fields.get("key_file"));
    let file = |node: &Node<'_>| {
        let file = if required { node.required_file() } else { node.file() };
        file.unwrap_or_default()
    };
    let paths = CertPaths { cert_file: file(&cert), key_file: file(&key) };
    (cert, paths)
}

fn api_groups(node: &Node<'_>) -> Vec<String> {
    let mut groups: Vec<String> = Vec::new();
    for item in node.items() {
        let group = item.require("text: an API group such as example.com", |text| {
            if !is_dns_name(text) || text.chars().any(|c| c.is_ascii_uppercase()) {
                return Err(ValueError::not(text, "an API group such as example.com"));
            }
            if groups.iter().any(|known| known == text) {
                return Err(ValueError::Duplicate(text.to_owned()));
            }
            Ok(text.to_owned())
        });
        groups.extend(group);
    }
    groups
}

fn heartbeats(node: &Node<'_>) -> Vec<HeartbeatResource> {
    let mut heartbeats: Vec<HeartbeatResource> = Vec::new();
    for item in node.items() {
        let heartbeat = item.require("text: a resource such as configmaps", |text| {
            let heartbeat = HeartbeatResource::parse(text)?;
            if heartbeats.contains(&heartbeat) {
                return Err(ValueError::Duplicate(text.to_owned()));
            }
            Ok(heartbeat)
        });
        heartbeats.extend(heartbeat);
    }
    heartbeats
}

fn request_limits(fields: &mut Fields<'_>) -> RequestLimits {
    RequestLimits {
        max_streams: fields.get("max_streams").number(1000, 1..=100_000),
        max_header_bytes: fields.get("max_header_bytes").size(64 << 10, 4 << 10..=1 << 20),
        header_timeout: fields.get("header_timeout").duration(10 * SECOND, 100 * MS..=MINUTE),
        stall_timeout: fields.get("stall_timeout").duration(5 * MINUTE, SECOND..=24 * HOUR),
    }
}
