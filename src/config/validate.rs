//! The schema: every key with its type, its bounds and its default, as one walk over the merged
//! tree.
//!
//! A value that is wrong is reported and replaced by a stand-in, and the walk goes on. Keys of
//! later versions are known here and refused unless they are off, so that nobody relies on
//! something that does nothing.

use std::num::NonZero;
use std::time::Duration;

use super::address::{parse_bind, parse_endpoint};
use super::errors::quote;
use super::listener::listener;
use super::model::{
    AccessLog, Admin, CertPaths, Config, Connections, Discovery, EndpointAddress, Health, Level,
    Listener, Log, LogFormat, Readyz, Shutdown, Upstream, UpstreamTls, UsedBy,
};
use super::node::{Fields, Node, Report};
use super::rules::{Needs, Placed, Seen};

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const MINUTE: Duration = Duration::from_secs(60);
pub(super) const HOUR: Duration = Duration::from_secs(3600);

/// Reads the whole tree. The configuration is only good if `report` has no errors.
pub(super) fn walk(root: &Node<'_>, report: &mut Report) -> (Config, Seen) {
    let mut seen = Seen::default();
    let mut top = root.fields(report);

    let mut fields = top.section(report, "admin");
    let node = fields.get(report, "bind");
    let bind = node.parse(report, "text: an address such as 127.0.0.1:9643", parse_bind);
    if let Some(bind) = bind {
        if !bind.ip().is_loopback() {
            let message = "not a loopback address: whoever reaches it can read status and metrics";
            report.warn(&node.path, message);
        }
        seen.binds.push((node.path, bind));
    }
    let socket = fields.get(report, "socket").file(report);
    let admin = Admin { bind: bind.unwrap_or(([127, 0, 0, 1], 0).into()), socket };
    fields.finish(report);

    let state_dir = top.get(report, "state_dir").file(report);
    let workers = workers(&top.get(report, "workers"), report);
    let mark = mark(&top.get(report, "mark"), report);
    let log = log(top.section(report, "log"), report);

    let mut fields = top.section(report, "shutdown");
    let drain_timeout =
        fields.get(report, "drain_timeout").duration(report, 20 * SECOND, Duration::ZERO..=HOUR);
    fields.finish(report);

    let node = top.get(report, "upstreams");
    let items = required_items(&node, "at least one upstream", report);
    seen.upstreams_readable = !items.is_empty();
    let mut upstreams: Vec<Upstream> =
        items.iter().map(|node| upstream(node, &mut seen, report)).collect();

    let node = top.get(report, "listeners");
    let items = required_items(&node, "at least one listener", report);
    let listeners: Vec<Listener> =
        items.iter().map(|node| listener(node, &mut seen, report)).collect();
    top.finish(report);
    for upstream in &mut upstreams {
        upstream.used_by = used_by(&upstream.name, &listeners);
    }

    let shutdown = Shutdown { drain_timeout };
    (Config { admin, state_dir, workers, mark, log, shutdown, upstreams, listeners }, seen)
}

fn used_by(upstream: &str, listeners: &[Listener]) -> UsedBy {
    let mut used_by = UsedBy::default();
    for listener in listeners.iter().filter(|l| l.upstreams().any(|name| name == upstream)) {
        used_by.terminate |= listener.terminate().is_some();
        used_by.passthrough |= listener.passthrough().is_some();
    }
    used_by
}

/// In hexadecimal as nftables shows marks, or not.
fn mark(node: &Node<'_>, report: &mut Report) -> u32 {
    let hexadecimal = |text: &str| {
        let digits = text.strip_prefix("0x").unwrap_or_default();
        u32::from_str_radix(digits, 16).map_err(|error| error.to_string())
    };
    let mut probe = Report::default();
    if let Some(mark) = node.parse(&mut probe, "", hexadecimal) {
        return mark;
    }
    node.number_as(report, "a whole number such as 0x306a", 0, 0..=u32::MAX)
}

fn workers(node: &Node<'_>, report: &mut Report) -> usize {
    let mut probe = Report::default();
    if node.parse(&mut probe, "", |text| Ok(text == "auto")) == Some(true) {
        return std::thread::available_parallelism().map_or(1, NonZero::get);
    }
    node.number_as(report, "a whole number or auto", 1, 1..=256) as usize
}

fn log(mut fields: Fields<'_>, report: &mut Report) -> Log {
    let level = fields.get(report, "level").word(report, &Level::WORDS, Level::Info);
    let format = fields.get(report, "format").word(report, &LogFormat::WORDS, LogFormat::Text);
    let access = fields.get(report, "access").word(report, &AccessLog::WORDS, AccessLog::Errors);
    fields.finish(report);
    Log { level, format, access }
}

fn upstream(node: &Node<'_>, seen: &mut Seen, report: &mut Report) -> Upstream {
    let mut fields = node.fields(report);
    let name = name(&mut fields, &mut seen.upstream_names, report);
    let endpoints_file = fields.get(report, "endpoints_file").file(report);
    let endpoints = endpoints(&mut fields, endpoints_file.is_none(), seen, report);
    let mut section = fields.section(report, "discovery");
    let discovery = Discovery { kubeconfig: section.get(report, "kubeconfig").file(report) };
    section.finish(report);

    let mut tls = fields.section(report, "tls");
    let ca = tls.get(report, "ca_file");
    let before = report.errors.len();
    let ca_file = ca.file(report);
    let ca_missing = ca_file.is_none() && !tls.broken && report.errors.len() == before;
    let server_name = tls.get(report, "server_name").parse(report, "text: a name", server_name);
    tls.finish(report);

    let mut limits = fields.section(report, "connections");
    let (least, most) = (limits.get(report, "min"), limits.get(report, "max"));
    let (min, max) = (least.number(report, 1, 0..=1024), most.number(report, 64, 1..=1024));
    if min > max {
        least.error(report, format!("{min} is more than max, which is {max}"));
    }
    let max_streams = limits.get(report, "max_streams").number(report, 100, 1..=10_000) as usize;
    limits.finish(report);
    let connections = Connections { min: min as usize, max: max as usize, max_streams };

    let rebalance = fields.get(report, "rebalance").flag(report, true);
    let health = health(fields.section(report, "health"), report);
    fields.finish(report);
    if ca_missing {
        let readyz = &health.readyz;
        let credential =
            readyz.cert.is_some() || readyz.token_file.is_some() || discovery.kubeconfig.is_some();
        let needs = Needs { upstream: name.clone(), path: ca.path, credential };
        seen.without_ca.push(needs);
    }
    let tls = UpstreamTls { ca_file, server_name: server_name.flatten() };
    let used_by = UsedBy::default();
    Upstream {
        name,
        endpoints,
        endpoints_file,
        discovery,
        tls,
        used_by,
        connections,
        rebalance,
        health,
    }
}

/// The seeds. Without a file that names more there must be one: discovery asks the apiservers, so
/// it cannot find the first.
fn endpoints(
    fields: &mut Fields<'_>,
    required: bool,
    seen: &mut Seen,
    report: &mut Report,
) -> Vec<EndpointAddress> {
    let node = fields.get(report, "endpoints");
    let items = match (fields.broken, required) {
        (true, _) => vec![],
        (false, true) => required_items(&node, "at least one address", report),
        (false, false) => node.items(report),
    };
    let mut placed: Vec<Placed<EndpointAddress>> = Vec::new();
    for item in items {
        let wanted = "text: an address such as 10.0.0.11:6443";
        if let Some(endpoint) = item.require(report, wanted, parse_endpoint) {
            placed.push((item.path, endpoint));
        }
    }
    let endpoints = placed.iter().map(|(_, endpoint)| endpoint.clone()).collect();
    seen.endpoints.push(placed);
    endpoints
}

fn health(mut fields: Fields<'_>, report: &mut Report) -> Health {
    let ping = fields.get(report, "ping_interval");
    let ping_interval = ping.duration(report, SECOND, 100 * MS..=MINUTE);
    let suspect = fields.get(report, "suspect_after");
    let adaptive = suspect.parse(&mut Report::default(), "", |text| Ok(text == "adaptive"));
    let suspect_after = match adaptive {
        Some(true) => None,
        _ if !suspect.is_given() => None,
        _ => Some(suspect.duration(report, MS, MS..=MINUTE)),
    };
    let dead_after =
        fields.get(report, "dead_after").duration(report, 2 * SECOND, 200 * MS..=MINUTE);
    if ping_interval >= dead_after {
        ping.error(report, "must be shorter than dead_after, or no PING is out when it counts");
    }
    let tunnel = fields.get(report, "tunnel_dead_after");
    let default = dead_after.max(20 * SECOND);
    let tunnel_dead_after = tunnel.duration(report, default, 200 * MS..=MINUTE);
    if tunnel_dead_after < dead_after {
        tunnel.error(report, "must not be shorter than dead_after");
    }
    if suspect_after.is_some_and(|suspect_after| suspect_after >= dead_after) {
        suspect.error(report, "must be shorter than dead_after");
    }
    let connect_timeout =
        fields.get(report, "connect_timeout").duration(report, 3 * SECOND, 100 * MS..=MINUTE);
    let readyz = readyz(fields.section(report, "readyz"), report);
    fields.finish(report);
    Health { ping_interval, suspect_after, dead_after, tunnel_dead_after, connect_timeout, readyz }
}

fn readyz(mut fields: Fields<'_>, report: &mut Report) -> Readyz {
    let path = fields.get(report, "path").parse(report, "text: a path such as /readyz", |text| {
        let visible = text.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
        if text.starts_with('/') && visible {
            Ok(text.to_owned())
        } else {
            Err(format!("{} is not a path such as /readyz", quote(text)))
        }
    });
    let interval = fields.get(report, "interval").duration(report, 10 * SECOND, SECOND..=HOUR);
    let node = fields.get(report, "timeout");
    let timeout = node.duration(report, SECOND, 10 * MS..=MINUTE);
    if timeout > interval {
        node.error(report, "must not be longer than interval");
    }
    let rise = fields.get(report, "rise").number(report, 2, 1..=100);
    let fall = fields.get(report, "fall").number(report, 2, 1..=100);
    let (_, cert) = cert_pair(&mut fields, report);
    let token = fields.get(report, "token_file");
    let token_file = token.file(report);
    if cert.is_some() && token_file.is_some() {
        token.error(report, "has no effect beside cert_file: an apiserver prefers the certificate");
    }
    fields.finish(report);
    let path = path.unwrap_or_else(|| "/readyz".to_owned());
    Readyz { path, interval, timeout, rise, fall, cert, token_file }
}

/// A certificate that may be left out, but not without its key; and the node of `cert_file`.
pub(super) fn cert_pair<'a>(
    fields: &mut Fields<'a>,
    report: &mut Report,
) -> (Node<'a>, Option<CertPaths>) {
    let (cert, key) = (fields.get(report, "cert_file"), fields.get(report, "key_file"));
    let paths = match (cert.file(report), key.file(report)) {
        (Some(cert_file), Some(key_file)) => Some(CertPaths { cert_file, key_file }),
        (Some(_), None) => {
            key.error(report, "is required beside cert_file");
            None
        }
        (None, Some(_)) => {
            cert.error(report, "is required beside key_file");
            None
        }
        (None, None) => None,
    };
    (cert, paths)
}

/// The items of a list that must have some; reports it otherwise.
pub(super) fn required_items<'a>(
    node: &Node<'a>,
    what: &str,
    report: &mut Report,
) -> Vec<Node<'a>> {
    let before = report.errors.len();
    let items = node.items(report);
    if items.is_empty() && report.errors.len() == before {
        node.error(report, format!("is required: {what}"));
    }
    items
}

/// A name that can be a label in metrics: like a Kubernetes object's.
pub(super) fn name(
    fields: &mut Fields<'_>,
    seen: &mut Vec<Placed<String>>,
    report: &mut Report,
) -> String {
    let node = fields.get(report, "name");
    if fields.broken {
        return String::new();
    }
    let name = node.require(report, "text: a name of its own", |text| {
        let alphanumeric = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        let bytes = text.as_bytes();
        let ends =
            bytes.first().is_some_and(alphanumeric) && bytes.last().is_some_and(alphanumeric);
        if ends && bytes.len() <= 63 && bytes.iter().all(|b| alphanumeric(b) || *b == b'-') {
            return Ok(text.to_owned());
        }
        Err(format!(
            "{} is not a name: up to 63 of a-z, 0-9 and -, not starting or ending with -",
            quote(text)
        ))
    });
    seen.extend(name.clone().map(|name| (node.path, name)));
    name.unwrap_or_default()
}

fn server_name(text: &str) -> Result<Option<String>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    match rustls::pki_types::ServerName::try_from(text) {
        Ok(_) => Ok(Some(text.to_owned())),
        Err(_) => Err(format!("{} is neither a DNS name nor an IP address", quote(text))),
    }
}
