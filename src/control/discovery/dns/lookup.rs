//! Looks a name up in `/etc/hosts`, then at the name servers of `/etc/resolv.conf`.
//!
//! Names below `localhost` are never sent to a name server (RFC 6761 section 6.3). Without configured
//! name servers a lookup fails; there is no fallback to public ones.

use std::error::Error;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::config::{ResolveHosts, ResolverConfig};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::ProtoError;
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::system_conf::parse_resolv_conf;
use hickory_resolver::{Hosts, TokioResolver};
use jackstay_sys::{clock, files};
use tokio::time::timeout;

/// Bounds of the time between two lookups of a name: a TTL of 0 must not cause a flood of queries,
/// and a TTL of a day must not hide a change for a day.
pub(super) const TTL_MIN: Duration = Duration::from_secs(5);
pub(super) const TTL_MAX: Duration = Duration::from_secs(300);
/// Longest time for one attempt of one query. With the resolver's default, a lost packet would cost 5 s.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// Shortest time for one attempt, even if `options timeout:` is shorter. glibc raises 0 to 1 s as well.
const ATTEMPT_MIN: Duration = Duration::from_secs(1);
/// Limit for a lookup with all attempts, name servers and search domains.
pub(super) const LOOKUP_TIMEOUT: Duration = Duration::from_secs(20);
/// Largest system file that is read, in bytes. `/etc/hosts` files that block advertisements have a
/// few MiB.
const MAX_FILE: u64 = 16 << 20;

/// The system files that lookups read, and the port of the name servers.
#[derive(Debug, Clone)]
pub struct ResolverFiles {
    /// `/etc/hosts`.
    pub hosts: PathBuf,
    /// `/etc/resolv.conf`.
    pub resolv_conf: PathBuf,
    /// 53, except in tests.
    pub port: u16,
}

impl Default for ResolverFiles {
    fn default() -> Self {
        Self { hosts: "/etc/hosts".into(), resolv_conf: "/etc/resolv.conf".into(), port: 53 }
    }
}

/// Why a lookup, or the query of one family, failed.
#[derive(Debug, Clone)]
pub(super) enum LookupError {
    /// The configuration of the resolver, in this file, cannot be used.
    ResolverFile(PathBuf, Arc<dyn Error + Send + Sync>),
    /// The text is not a name that can be looked up.
    InvalidName(ProtoError),
    /// The lookup was not complete within [`LOOKUP_TIMEOUT`].
    TimedOut,
    /// There is no such name.
    NoSuchName,
    /// The name has no address.
    NoAddress,
    /// The query failed.
    Query(NetError),
}

impl fmt::Display for LookupError {
    /// The resolver's own text for name servers that do not answer is `no connections available`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ResolverFile(file, error) => write!(f, "{}: {error}", file.display()),
            Self::InvalidName(error) => error.fmt(f),
            Self::TimedOut => {
                write!(f, "no name server answers within {} s", LOOKUP_TIMEOUT.as_secs())
            }
            Self::NoSuchName => f.write_str("there is no such name"),
            Self::NoAddress => f.write_str("it has no address"),
            Self::Query(NetError::NoConnections) => f.write_str("no name server answers"),
            Self::Query(NetError::Timeout) => f.write_str("no name server answers in time"),
            Self::Query(NetError::Io(error)) => write!(f, "no name server answers: {error}"),
            Self::Query(other) => other.fmt(f),
        }
    }
}

/// The result of a lookup: for each family its addresses, or why its query failed.
#[derive(Debug)]
pub(super) struct LookupResult {
    pub(super) v4: Result<Vec<IpAddr>, LookupError>,
    pub(super) v6: Result<Vec<IpAddr>, LookupError>,
    pub(super) ttl: Duration,
    /// The result has all addresses of the name, and not a subset of them.
    pub(super) complete: bool,
}

/// Looks up the addresses of both families of `host`.
pub(super) async fn look_up(host: &str, system: &ResolverFiles) -> LookupResult {
    if host.ends_with(".localhost") {
        let (v4, v6) = (Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
        return LookupResult { v4: Ok(vec![v4]), v6: Ok(vec![v6]), ttl: TTL_MAX, complete: true };
    }
    if let Some((v4, v6)) = in_hosts_file(host, system) {
        return LookupResult { v4: Ok(v4), v6: Ok(v6), ttl: TTL_MAX, complete: true };
    }
    let failed = |why: LookupError| LookupResult {
        v4: Err(why.clone()),
        v6: Err(why),
        ttl: TTL_MIN,
        complete: false,
    };
    let resolver = match resolver(system) {
        Ok(resolver) => resolver,
        Err(why) => return failed(why),
    };
    let name = match Name::from_ascii(host) {
        Ok(name) => name,
        Err(error) => return failed(LookupError::InvalidName(error)),
    };
    let lookups = async {
        tokio::join!(
            resolver.lookup(name.clone(), RecordType::A),
            resolver.lookup(name.clone(), RecordType::AAAA)
        )
    };
    let Ok((v4, v6)) = timeout(LOOKUP_TIMEOUT, lookups).await else {
        return failed(LookupError::TimedOut);
    };
    let mut ttl = TTL_MAX;
    let mut family = |response: Result<Lookup, NetError>| match response {
        Ok(lookup) => {
            let left = lookup.valid_until().saturating_duration_since(clock::now());
            ttl = ttl.min(left);
            Ok(lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect())
        }
        Err(error) if error.is_nx_domain() => Err(LookupError::NoSuchName),
        Err(error) if error.is_no_records_found() => Ok(Vec::new()),
        Err(error) => Err(LookupError::Query(error)),
    };
    let (v4, v6) = (family(v4), family(v6));
    LookupResult { v4, v6, ttl, complete: false }
}

/// The addresses of `host` in `/etc/hosts`; `None` if it has none, or the file does not exist.
fn in_hosts_file(host: &str, system: &ResolverFiles) -> Option<(Vec<IpAddr>, Vec<IpAddr>)> {
    let file = files::read(&system.hosts, MAX_FILE).ok()?;
    let mut hosts = Hosts::default();
    // Names are ASCII; comments may have any encoding.
    hosts.read_hosts_conf(String::from_utf8_lossy(&file).as_bytes()).ok()?;
    let name = Name::from_ascii(host).ok()?;
    let find = |kind| -> Vec<IpAddr> {
        let found = hosts.lookup_static_host(&Query::query(name.clone(), kind));
        let records = found.map(|lookup| lookup.answers().to_vec()).unwrap_or_default();
        records.iter().filter_map(|record| record.data.ip_addr()).collect()
    };
    let (v4, v6) = (find(RecordType::A), find(RecordType::AAAA));
    (!v4.is_empty() || !v6.is_empty()).then_some((v4, v6))
}

/// Makes a resolver for the name servers that are configured now. Lookups are rare, so each makes its own
/// resolver, and neither a configuration nor a cache can be stale.
fn resolver(system: &ResolverFiles) -> Result<TokioResolver, LookupError> {
    let unusable = |error| LookupError::ResolverFile(system.resolv_conf.clone(), error);
    let text = files::read(&system.resolv_conf, MAX_FILE);
    let text = text.map_err(|error| unusable(Arc::new(error)))?;
    let (config, mut options) =
        parse_resolv_conf(text).map_err(|error| unusable(Arc::new(error)))?;
    let (domain, search, mut servers) = config.into_parts();
    for connection in servers.iter_mut().flat_map(|server| &mut server.connections) {
        connection.port = system.port;
    }
    let config = ResolverConfig::from_parts(domain, search, servers);
    options.timeout = options.timeout.clamp(ATTEMPT_MIN, ATTEMPT_MAX);
    options.attempts = options.attempts.max(2);
    options.cache_size = 0;
    // `look_up` has already read the hosts file.
    options.use_hosts_file = ResolveHosts::Never;
    TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        .with_options(options)
        .build()
        .map_err(|error| unusable(Arc::new(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lookup_error_of_an_unreachable_name_server_names_the_name_server() {
        let refused = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        for (error, expected) in [
            (NetError::NoConnections, "no name server answers"),
            (NetError::Timeout, "no name server answers in time"),
            (refused.into(), "no name server answers: connection refused"),
        ] {
            assert_eq!(LookupError::Query(error).to_string(), expected);
        }
    }
}
