//! The settings of lookups: the hosts file and resolv.conf(5). They are read for each lookup, so that no setting is
//! stale.

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hickory_resolver::config::{NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::{Hosts, TokioResolver};
use jackstay_core::discovery::search_list::SearchList;
use jackstay_sys::files;

use super::lookup_error::LookupError;

/// Longest time for one attempt of one query. With the default of resolv.conf(5), a lost packet would cost 5 s.
const ATTEMPT_MAX: Duration = Duration::from_secs(2);
/// Shortest time for one attempt, even if `options timeout:` is shorter. glibc raises 0 to 1 s as well.
const ATTEMPT_MIN: Duration = Duration::from_secs(1);
/// Bounds of the number of rounds over all name servers: one packet may be lost, and servers that refuse at once must
/// not be asked without end. glibc has the same maximum (`RES_MAXRETRY`).
const ATTEMPTS: RangeInclusive<usize> = 2..=5;
/// Number of name servers that are asked; the others are ignored, as by glibc (`MAXNS`) and by Go.
const MAX_SERVERS: usize = 3;
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

impl ResolverFiles {
    /// The addresses of `host` in the hosts file, of IPv4 and of IPv6; `None` if it has none, or the file does not
    /// exist.
    pub fn in_hosts_file(&self, host: &str) -> Option<(Vec<IpAddr>, Vec<IpAddr>)> {
        in_hosts_file(&files::read(&self.hosts, MAX_FILE).ok()?, host)
    }

    /// Reads resolv.conf.
    ///
    /// # Errors
    /// It cannot be read, or names no name server.
    pub fn settings(&self) -> Result<ResolverSettings, LookupError> {
        let unusable = |error: Arc<dyn Error + Send + Sync>| {
            LookupError::ResolverFile(self.resolv_conf.clone(), error)
        };
        let text = files::read(&self.resolv_conf, MAX_FILE);
        let text = text.map_err(|error| unusable(Arc::new(error)))?;
        ResolverSettings::parse(&text, self.port)
            .ok_or_else(|| unusable(Arc::from(Box::from("it names no name server"))))
    }
}

/// The addresses of `host` in the text of a hosts file. A final dot of the name is ignored, as by Go.
pub fn in_hosts_file(text: &[u8], host: &str) -> Option<(Vec<IpAddr>, Vec<IpAddr>)> {
    let mut hosts = Hosts::default();
    // Names are ASCII; comments may have any encoding.
    hosts.read_hosts_conf(String::from_utf8_lossy(text).as_bytes()).ok()?;
    let name = Name::from_ascii(host).ok()?;
    let find = |kind| -> Vec<IpAddr> {
        let found = hosts.lookup_static_host(&Query::query(name.clone(), kind));
        let records = found.map(|lookup| lookup.answers().to_vec()).unwrap_or_default();
        records.iter().filter_map(|record| record.data.ip_addr()).collect()
    };
    let (v4, v6) = (find(RecordType::A), find(RecordType::AAAA));
    (!v4.is_empty() || !v6.is_empty()).then_some((v4, v6))
}

/// What resolv.conf says.
#[derive(Debug, Clone)]
pub struct ResolverSettings {
    /// The name servers in the order in which they are asked, one to three.
    pub servers: Vec<NameServerConfig>,
    /// The names that are asked for.
    pub search: SearchList,
    /// AAAA records are asked for, too.
    pub with_aaaa: bool,
    /// Number of rounds over all name servers.
    pub attempts: usize,
    /// Each lookup begins at a random name server.
    rotate: bool,
    options: ResolverOpts,
}

impl ResolverSettings {
    /// Reads the text of resolv.conf; lines and options that are unknown or wrong are skipped, as by glibc. `None` if
    /// it names no name server.
    pub fn parse(text: &[u8], port: u16) -> Option<Self> {
        let (parsed, _) = resolv_conf::Config::parse_with_errors(text);
        let server = |ip: IpAddr| {
            let mut server = if parsed.use_vc {
                NameServerConfig::tcp(ip)
            } else {
                NameServerConfig::udp_and_tcp(ip)
            };
            for connection in &mut server.connections {
                connection.port = port;
            }
            server
        };
        let servers = parsed.nameservers.iter().map(|ip| server(ip.into()));
        let servers: Vec<_> = servers.take(MAX_SERVERS).collect();
        if servers.is_empty() {
            return None;
        }
        let mut domains: Vec<String> = parsed.get_last_search_or_domain().cloned().collect();
        if parsed.get_search().is_none() && parsed.get_domain().is_none() {
            domains.extend(parsed.get_system_domain());
        }
        let mut options = ResolverOpts::default();
        options.timeout =
            Duration::from_secs(parsed.timeout.into()).clamp(ATTEMPT_MIN, ATTEMPT_MAX);
        options.edns0 = parsed.edns0;
        Some(Self {
            servers,
            search: SearchList { domains, ndots: parsed.ndots as usize },
            with_aaaa: !parsed.no_aaaa,
            attempts: (parsed.attempts as usize).clamp(*ATTEMPTS.start(), *ATTEMPTS.end()),
            rotate: parsed.rotate,
            options,
        })
    }

    /// The settings with these name servers, and no search list.
    pub fn of_servers(servers: &[SocketAddr]) -> Self {
        let server = |address: &SocketAddr| {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            for connection in &mut server.connections {
                connection.port = address.port();
            }
            server
        };
        Self {
            servers: servers.iter().map(server).collect(),
            search: SearchList::default(),
            with_aaaa: true,
            attempts: *ATTEMPTS.start(),
            rotate: false,
            options: ResolverOpts::default(),
        }
    }

    /// A resolver for each name server, which asks it once for fully qualified names, in the order of this lookup. A
    /// resolver for all of them would ask two at a time and take the first answer, also a denial or a failure.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn resolvers(&self) -> Result<Vec<TokioResolver>, NetError> {
        let mut servers = self.servers.clone();
        if self.rotate {
            let first = fastrand::usize(..servers.len());
            servers.rotate_left(first);
        }
        servers.into_iter().map(|server| self.resolver_of(server, self.options.timeout)).collect()
    }

    /// A resolver that asks one name server once, for at most `limit`. It has no cache.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn resolver_of(
        &self,
        server: NameServerConfig,
        limit: Duration,
    ) -> Result<TokioResolver, NetError> {
        let mut options = self.options.clone();
        options.timeout = limit;
        options.attempts = 0;
        options.cache_size = 0;
        options.use_hosts_file = ResolveHosts::Never;
        let config = ResolverConfig::from_parts(None, Vec::new(), vec![server]);
        TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
            .with_options(options)
            .build()
    }
}
