//! The schema of an upstream.

use crate::config::address::{EndpointAddress, parse_endpoint};
use crate::config::errors::quote;
use crate::config::model::{Connections, Discovery, Health, Readyz, Upstream, UpstreamTls, UsedBy};
use crate::config::node::{Fields, Node};
use crate::config::report::{Located, Report};
use crate::config::rules::{References, UpstreamWithoutCa};
use crate::config::units::{HOUR, MINUTE, MS, SECOND};

pub(super) fn read(node: &Node<'_>, references: &mut References, report: &mut Report) -> Upstream {
    let mut fields = node.fields(report);
    let name = fields.name(report, &mut references.upstream_names);
    let endpoints_file = fields.get(report, "endpoints_file").file(report);
    let endpoints = endpoints(&mut fields, endpoints_file.is_none(), references, report);
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
    let (min_node, max_node) = (limits.get(report, "min"), limits.get(report, "max"));
    let (min, max) = (min_node.number(report, 1, 0..=1024), max_node.number(report, 64, 1..=1024));
    if min > max {
        min_node.error(report, format!("{min} is more than max, which is {max}"));
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
        let upstream = name.clone();
        references.without_ca.push(UpstreamWithoutCa { upstream, path: ca.path, credential });
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

/// The static endpoints. At least one is `required` unless a file names endpoints: discovery asks
/// the known apiservers, so it cannot find the first one.
fn endpoints(
    fields: &mut Fields<'_>,
    required: bool,
    references: &mut References,
    report: &mut Report,
) -> Vec<EndpointAddress> {
    let items = if required {
        fields.required_items(report, "endpoints", "at least one address")
    } else {
        fields.get(report, "endpoints").items(report)
    };
    let mut located: Vec<Located<EndpointAddress>> = Vec::new();
    for item in items {
        let wanted = "text: an address such as 10.0.0.11:6443";
        if let Some(endpoint) = item.require(report, wanted, parse_endpoint) {
            located.push((item.path, endpoint));
        }
    }
    let endpoints = located.iter().map(|(_, endpoint)| endpoint.clone()).collect();
    references.endpoints.push(located);
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
        ping.error(report, "must be shorter than dead_after, or no PING is pending when it ends");
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
    let (_, cert) = fields.cert_pair(report);
    let token = fields.get(report, "token_file");
    let token_file = token.file(report);
    if cert.is_some() && token_file.is_some() {
        token.error(report, "has no effect beside cert_file: an apiserver prefers the certificate");
    }
    fields.finish(report);
    let path = path.unwrap_or_else(|| "/readyz".to_owned());
    Readyz { path, interval, timeout, rise, fall, cert, token_file }
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
