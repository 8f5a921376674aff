//! The schema of an upstream.

use http::uri::Authority;
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::request::hygiene;
use jackstay_core::request::path_prefix::PathPrefix;

use crate::model::{
    Compression, Connections, ConsistentReads, Discovery, EndpointKind, EndpointPreference, Health,
    Readyz, Upstream, UpstreamTls, UsedBy, VersionPreference,
};
use crate::node::{Fields, Node};
use crate::report::Located;
use crate::rules::{References, UpstreamWithoutCa};
use crate::units::{HOUR, MINUTE, MS, Percent, SECOND};
use crate::value_error::ValueError;

/// The error for discovery in an upstream below a path.
const DISCOVERY_BELOW_PATH: &str = "has no meaning with path_prefix: the apiservers that the cluster names do not serve \
    the path; name the servers that do in endpoints or endpoints_file";

pub(super) fn read(node: &Node<'_>, references: &mut References) -> Upstream {
    let mut fields = node.fields();
    let name = fields.name(&mut references.upstream_names);
    let (path_prefix, authority) = api_root(&mut fields, &name, references);
    let endpoints_file = fields.get("endpoints_file").file();
    let endpoints = endpoints(&mut fields, endpoints_file.is_none(), references);
    let discovery = discovery(fields.section("discovery"), &path_prefix);

    let mut tls = fields.section("tls");
    let ca = tls.get("ca_file");
    let ca_file = ca.file();
    let ca_missing = !tls.is_malformed && (!ca.is_given() || ca.text() == Some(""));
    let server_name = tls.get("server_name").parse("text: a name", server_name);
    tls.finish();

    let mut limits = fields.section("connections");
    let (min_node, max_node) = (limits.get("min"), limits.get("max"));
    let (min, max) = (min_node.number(1, 0..=1024), max_node.number(64, 1..=1024));
    if min > max {
        min_node.error(format!("{min} is more than max, which is {max}"));
    }
    let max_streams = limits.get("max_streams").number(100, 1..=10_000) as usize;
    limits.finish();
    let connections = Connections { min: min as usize, max: max as usize, max_streams };

    let compression = fields.get("compression").one_of(Compression::Auto);
    let consistent_reads = fields.get("consistent_reads").one_of(ConsistentReads::Floor);
    let kind = fields.get("kind").one_of(EndpointKind::Auto);
    let prefer = fields.get("prefer").one_of(EndpointPreference::None);
    let rebalance = fields.get("rebalance").flag(true);
    let version_preference = fields.get("version_preference").one_of(VersionPreference::None);
    let canary = fields.get("canary").percent(Percent::ZERO);
    let health = health(fields.section("health"), &path_prefix);
    fields.finish();
    if ca_missing {
        let readyz = &health.readyz;
        let credential =
            readyz.cert.is_some() || readyz.token_file.is_some() || discovery.kubeconfig.is_some();
        let upstream = name.clone();
        references.without_ca.push(UpstreamWithoutCa { upstream, path: ca.path, credential });
    }
    Upstream {
        name,
        path_prefix,
        authority,
        endpoints,
        endpoints_file,
        discovery,
        tls: UpstreamTls { ca_file, server_name: server_name.flatten() },
        used_by: UsedBy::default(),
        connections,
        compression,
        consistent_reads,
        kind,
        prefer,
        rebalance,
        version_preference,
        canary,
        health,
    }
}

/// Where the API begins.
fn api_root(
    fields: &mut Fields<'_>,
    upstream: &str,
    references: &mut References,
) -> (PathPrefix, Option<Authority>) {
    let path_prefix = fields.get("path_prefix").parse("text: a path", path_prefix);
    let node = fields.get("authority");
    let authority = node.parse("text: a host with an optional port", authority).flatten();
    if authority.is_some() {
        references.with_authority.push((node.path, upstream.to_owned()));
    }
    (path_prefix.unwrap_or_default(), authority)
}

fn discovery(mut section: Fields<'_>, prefix: &PathPrefix) -> Discovery {
    let kubeconfig = section.get("kubeconfig");
    let discovery = Discovery { kubeconfig: kubeconfig.file() };
    if discovery.kubeconfig.is_some() && !prefix.is_empty() {
        kubeconfig.error(DISCOVERY_BELOW_PATH);
    }
    section.finish();
    discovery
}

/// The static endpoints. At least one is `required` unless a file lists endpoints: discovery queries
/// known apiservers, so it cannot find the first one.
fn endpoints(
    fields: &mut Fields<'_>,
    required: bool,
    references: &mut References,
) -> Vec<EndpointAddress> {
    let items = if required {
        fields.required_items("endpoints", "at least one address")
    } else {
        fields.get("endpoints").items()
    };
    let wanted = "text: an address such as 10.0.0.11:6443";
    let parse = |item: Node<'_>| Some((item.require(wanted, EndpointAddress::parse)?, item.path));
    let located: Vec<Located<EndpointAddress>> =
        items.into_iter().filter_map(parse).map(|(endpoint, path)| (path, endpoint)).collect();
    let endpoints = located.iter().map(|(_, endpoint)| endpoint.clone()).collect();
    references.endpoints.push(located);
    endpoints
}

fn health(mut fields: Fields<'_>, prefix: &PathPrefix) -> Health {
    let ping = fields.get("ping_interval");
    let ping_interval = ping.duration(SECOND, 100 * MS..=MINUTE);
    let suspect = fields.get("suspect_after");
    let suspect_after = match suspect.text() {
        Some("adaptive") => None,
        _ if !suspect.is_given() => None,
        _ => Some(suspect.duration(MS, MS..=MINUTE)),
    };
    let dead_after = fields.get("dead_after").duration(2 * SECOND, 200 * MS..=MINUTE);
    if ping_interval >= dead_after {
        ping.error("must be shorter than dead_after, which is the age of an unanswered PING");
    }
    let tunnel = fields.get("tunnel_dead_after");
    let default = dead_after.max(20 * SECOND);
    let tunnel_dead_after = tunnel.duration(default, 200 * MS..=MINUTE);
    if tunnel_dead_after < dead_after {
        tunnel.error("must not be shorter than dead_after");
    }
    if suspect_after.is_some_and(|suspect_after| suspect_after >= dead_after) {
        suspect.error("must be shorter than dead_after");
    }
    let connect_timeout = fields.get("connect_timeout").duration(3 * SECOND, 100 * MS..=MINUTE);
    let readyz = readyz(fields.section("readyz"), prefix);
    fields.finish();
    Health { ping_interval, suspect_after, dead_after, tunnel_dead_after, connect_timeout, readyz }
}

fn readyz(mut fields: Fields<'_>, prefix: &PathPrefix) -> Readyz {
    let path = fields.get("path").parse("text: a path such as /readyz", |text| {
        let visible = text.bytes().all(|b| b.is_ascii_graphic() && b != b'#');
        if text.starts_with('/') && visible {
            Ok(text.to_owned())
        } else {
            Err(ValueError::not(text, "a path such as /readyz"))
        }
    });
    let interval = fields.get("interval").duration(10 * SECOND, SECOND..=HOUR);
    let node = fields.get("timeout");
    let timeout = node.duration(SECOND, 10 * MS..=MINUTE);
    if timeout > interval {
        node.error("must not be longer than interval");
    }
    let rise = fields.get("rise").number(2, 1..=100);
    let fall = fields.get("fall").number(2, 1..=100);
    let (_, cert) = fields.cert_pair();
    let token = fields.get("token_file");
    let token_file = token.file();
    if cert.is_some() && token_file.is_some() {
        token.error("has no effect beside cert_file: an apiserver prefers the certificate");
    }
    fields.finish();
    // The path may be written with the prefix, as clients of the server write it.
    let below = |path: String| match path.strip_prefix(prefix.encoded()) {
        Some(rest) if rest.starts_with('/') => rest.to_owned(),
        _ => path,
    };
    let path = path.map_or_else(|| "/readyz".to_owned(), below);
    Readyz { path, interval, timeout, rise, fall, cert, token_file }
}

fn path_prefix(text: &str) -> Result<PathPrefix, ValueError> {
    PathPrefix::parse(text).map_err(|error| ValueError::PathPrefix(text.to_owned(), error))
}

/// `""` is the authority that the client sends.
fn authority(text: &str) -> Result<Option<Authority>, ValueError> {
    if text.is_empty() {
        return Ok(None);
    }
    match Authority::try_from(text) {
        Ok(authority)
            if hygiene::is_host_and_port(&authority)
                && !authority.host().is_empty()
                && (authority.as_str() == authority.host()
                    || authority.port_u16().is_some_and(|port| port != 0)) =>
        {
            Ok(Some(authority))
        }
        _ => Err(ValueError::not(
            text,
            "a host with an optional port, such as rancher.example.com:443",
        )),
    }
}

fn server_name(text: &str) -> Result<Option<String>, ValueError> {
    if text.is_empty() {
        return Ok(None);
    }
    match rustls::pki_types::ServerName::try_from(text) {
        Ok(_) => Ok(Some(text.to_owned())),
        Err(_) => Err(ValueError::InvalidServerName(text.to_owned())),
    }
}
