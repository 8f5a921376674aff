//! Resolves names as the discovery of endpoints does: by hickory-resolver, from the hosts file and
//! the name servers of this system, never by libc.
//!
//! Each name server is queried by a resolver of its own, so that a single silent server is noticed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use hickory_resolver::config::NameServerConfig;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::rr::{Name, RecordType};
use jackstay_core::discovery::address::split_zone;
use jackstay_net::dns::{ResolverSettings, in_hosts_file};
use jackstay_sys::{clock, files};
use tokio::time::timeout;

use super::observations::{Dns, Ms, NameServer, Resolution, percentile};

/// Limit of one query. The default of resolv.conf(5), 5 s, is too long for a client that waits for the response to its
/// request.
const QUERY_LIMIT: Duration = Duration::from_millis(1500);
/// Number of queries to a name server before it counts as silent. One packet may be lost.
const TRIES: u32 = 2;
/// Largest system file that is read, as in the discovery of endpoints.
const MAX_FILE: u64 = 16 << 20;

/// Resolves names, and counts and times the answers of each name server.
pub struct Resolver {
    hosts_file: Vec<u8>,
    settings: Option<ResolverSettings>,
    servers: Vec<ServerRecord>,
    /// Why resolv.conf names no server.
    problem: Option<String>,
    /// Whether a name was resolved that needs a name server.
    used: bool,
}

/// A name server, and its answers so far.
struct ServerRecord {
    config: NameServerConfig,
    stats: NameServer,
    /// Milliseconds of each answered query.
    times: Vec<f64>,
}

impl ServerRecord {
    fn new(config: &NameServerConfig) -> Self {
        let port = config.connections.first().map_or(53, |connection| connection.port);
        let address = SocketAddr::new(config.ip, port);
        let stats = NameServer { address, asked: 0, answered: 0, p50_ms: None, error: None };
        Self { config: config.clone(), stats, times: Vec::new() }
    }
}

impl Resolver {
    /// A resolver with the files of this system, `/etc/hosts` and `/etc/resolv.conf`.
    pub fn of_system() -> Self {
        let read = |path: &str| {
            files::read(Path::new(path), MAX_FILE)
                .map_err(|error| format!("cannot read {path}: {error}"))
        };
        Self::from_files(read("/etc/resolv.conf"), read("/etc/hosts").unwrap_or_default())
    }

    /// A resolver with the content of resolv.conf (or why it cannot be read) and of the hosts file.
    pub fn from_files(resolv_conf: Result<Vec<u8>, String>, hosts_file: Vec<u8>) -> Self {
        let parsed = resolv_conf.and_then(|text| {
            let none = || "/etc/resolv.conf: it names no name server".to_owned();
            ResolverSettings::parse(&text, 53).ok_or_else(none)
        });
        let (settings, problem) = match parsed {
            Ok(settings) => (Some(settings), None),
            Err(problem) => (None, Some(problem)),
        };
        Self { hosts_file, problem, ..Self::with(settings) }
    }

    /// A resolver with these name servers, no search domain and no hosts file.
    pub fn of_servers(servers: &[SocketAddr]) -> Self {
        Self::with(Some(ResolverSettings::of_servers(servers)))
    }

    fn with(settings: Option<ResolverSettings>) -> Self {
        let servers = settings.iter().flat_map(|settings| &settings.servers);
        let servers = servers.map(ServerRecord::new).collect();
        Self { hosts_file: Vec::new(), settings, servers, problem: None, used: false }
    }

    /// The addresses of a host. An IP address, `localhost` (RFC 6761 section 6.3) and a name in the
    /// hosts file need no name server.
    pub async fn resolve(&mut self, host: &str) -> Resolution {
        if let Ok(ip) = split_zone(host).0.parse::<IpAddr>() {
            return Resolution::Addresses(vec![ip]);
        }
        if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") {
            let both = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
            return Resolution::Addresses(both.to_vec());
        }
        if let Some((mut found, v6)) = in_hosts_file(&self.hosts_file, host) {
            found.extend(v6);
            return Resolution::Addresses(found);
        }
        self.used = true;
        match self.query_all(host).await {
            Some(addresses) if !addresses.is_empty() => Resolution::Addresses(addresses),
            Some(_) => Resolution::NoSuchName,
            None => {
                let silent = || "no name server answers".to_owned();
                Resolution::NoAnswer(self.problem.clone().unwrap_or_else(silent))
            }
        }
    }

    /// Queries all servers concurrently. Returns the addresses, an empty list if the name has none, or
    /// `None` if no server answered.
    async fn query_all(&mut self, name: &str) -> Option<Vec<IpAddr>> {
        let settings = self.settings.as_ref()?;
        let queries = self.servers.iter().map(|server| query(&server.config, settings, name));
        let outcomes = join_all(queries).await;
        let mut found: Option<Vec<IpAddr>> = None;
        for (server, outcome) in self.servers.iter_mut().zip(outcomes) {
            server.stats.asked += outcome.asked;
            server.stats.answered += outcome.answered;
            server.times.extend(outcome.times);
            server.stats.error = outcome.error.or(server.stats.error.take());
            if let Some(addresses) = outcome.addresses {
                let found = found.get_or_insert_default();
                for address in addresses {
                    if !found.contains(&address) {
                        found.push(address);
                    }
                }
            }
        }
        found
    }

    /// The answers of the name servers; `None` if no name needed one.
    pub fn into_observations(self) -> Option<Dns> {
        if !self.used {
            return None;
        }
        let stats = |mut server: ServerRecord| {
            server.times.sort_by(f64::total_cmp);
            NameServer { p50_ms: percentile(&server.times, 0.5).map(Ms), ..server.stats }
        };
        let servers = self.servers.into_iter().map(stats).collect();
        Some(Dns { resolv_conf: self.problem, servers })
    }
}

/// The answers of one name server to the queries for a name.
#[derive(Default)]
struct QueryOutcome {
    asked: u32,
    answered: u32,
    /// Milliseconds of each answered query.
    times: Vec<f64>,
    /// The addresses; an empty list if the server answered that the name has none.
    addresses: Option<Vec<IpAddr>>,
    error: Option<String>,
}

/// Queries one name server for both record types of a host, by the names of its search list.
async fn query(server: &NameServerConfig, settings: &ResolverSettings, host: &str) -> QueryOutcome {
    let mut outcome = QueryOutcome::default();
    for name in settings.search.names(host) {
        query_name(server, settings, &name, &mut outcome).await;
        // A server that is silent for one name is not queried for the others.
        if outcome.answered == 0 || outcome.addresses.as_ref().is_some_and(|all| !all.is_empty()) {
            break;
        }
    }
    outcome
}

/// Queries one name server for both record types of a fully qualified name.
async fn query_name(
    server: &NameServerConfig,
    settings: &ResolverSettings,
    name: &str,
    outcome: &mut QueryOutcome,
) {
    let kinds = [RecordType::A, RecordType::AAAA];
    for kind in kinds.into_iter().take(if settings.with_aaaa { 2 } else { 1 }) {
        for _ in 0..TRIES {
            outcome.asked += 1;
            let started = clock::now();
            match timeout(QUERY_LIMIT, look_up(server, settings, name, kind)).await {
                Ok(Ok(addresses)) => {
                    outcome.answered += 1;
                    outcome.times.push(Ms::from(clock::elapsed(started)).0);
                    outcome.addresses.get_or_insert_default().extend(addresses);
                    break;
                }
                Ok(Err(error)) => outcome.error = Some(error),
                Err(_) => outcome.error = Some(format!("no answer within {QUERY_LIMIT:?}")),
            }
        }
        // A server that is silent for one record type is not queried for the other.
        if outcome.answered == 0 {
            break;
        }
    }
}

/// One lookup by a new resolver, which has no state of earlier lookups.
async fn look_up(
    server: &NameServerConfig,
    settings: &ResolverSettings,
    name: &str,
    kind: RecordType,
) -> Result<Vec<IpAddr>, String> {
    // `query_name` repeats queries itself in order to count them.
    let resolver = settings.resolver_of(server.clone(), QUERY_LIMIT);
    let resolver = resolver.map_err(|error| error.to_string())?;
    let name = Name::from_ascii(name).map_err(|error| error.to_string())?;
    match resolver.lookup(name, kind).await {
        Ok(lookup) => {
            Ok(lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect())
        }
        // NXDOMAIN, or no record of this type.
        Err(error) if error.is_no_records_found() => Ok(Vec::new()),
        Err(NetError::Timeout | NetError::NoConnections) => {
            Err(format!("no answer within {QUERY_LIMIT:?}"))
        }
        Err(NetError::Dns(DnsError::ResponseCode(code))) => Err(format!("it answers {code}")),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use jackstay_testkit::name_server::{NameServer as TestServer, Reply};

    use super::*;
    use std::net::UdpSocket;

    #[test]
    fn from_files_reads_name_servers() {
        let resolv_conf = "# comment\nnameserver 10.0.0.1\nnameserver fd00::1\n\
                           search a.example b.example\noptions timeout:1 ndots:2\n";
        let resolver = Resolver::from_files(Ok(resolv_conf.into()), Vec::new());
        let addresses: Vec<_> =
            resolver.servers.iter().map(|server| server.stats.address.to_string()).collect();
        assert_eq!(addresses, ["10.0.0.1:53", "[fd00::1]:53"]);
    }

    #[tokio::test]
    async fn resolve_counts_answers_of_each_server() {
        // A socket that is never read stands for a silent name server.
        let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
        let server = TestServer::start();
        server.set_addresses("lb.example", &["10.0.0.7"], 5);
        let servers = [silent.local_addr().unwrap(), server.address()];
        let mut resolver = Resolver::of_servers(&servers);
        let found = resolver.resolve("lb.example").await;
        assert_eq!(found, Resolution::Addresses(vec!["10.0.0.7".parse().unwrap()]));
        assert_eq!(resolver.resolve("none.example").await, Resolution::NoSuchName);
        let servers = resolver.into_observations().unwrap().servers;
        assert_eq!((servers[0].answered, servers[0].asked), (0, 4), "{servers:#?}");
        assert_eq!((servers[1].answered, servers[1].asked), (4, 4), "{servers:#?}");
        assert!(servers[0].error.is_some() && servers[1].p50_ms.is_some());
    }

    /// A name server of a search domain may have another address for each name below it.
    #[tokio::test]
    async fn resolve_ends_at_the_first_name_with_an_address() {
        let server = TestServer::start();
        server.set_addresses("lb.example", &["10.0.0.7"], 5);
        server.set_domain("corp.example", Reply::Addresses(vec!["fd00::bad".parse().unwrap()], 5));
        let mut resolver = Resolver::of_servers(&[server.address()]);
        resolver.settings.as_mut().unwrap().search.domains = vec!["corp.example".into()];
        resolver.settings.as_mut().unwrap().search.ndots = 1;
        let found = resolver.resolve("lb.example").await;
        assert_eq!(found, Resolution::Addresses(vec!["10.0.0.7".parse().unwrap()]));
    }

    #[tokio::test(start_paused = true)]
    async fn resolve_address_localhost_and_hosts_file_queries_no_server() {
        let hosts = b"127.0.0.1 localhost\n10.0.0.9 lb LB.example # caf\xe9 lb2\nx y\n";
        let mut resolver = Resolver::from_files(Err("gone".into()), hosts.to_vec());
        for name in ["10.0.0.1", "localhost", "lb", "lb.EXAMPLE."] {
            assert!(matches!(resolver.resolve(name).await, Resolution::Addresses(_)), "{name}");
        }
        assert!(!resolver.used);
        for name in ["other", "lb2"] {
            assert_eq!(resolver.resolve(name).await, Resolution::NoAnswer("gone".into()));
        }
        let mut resolver = Resolver::from_files(Ok(b"options ndots:1\n".to_vec()), Vec::new());
        let resolution = resolver.resolve("other").await;
        assert!(
            matches!(&resolution, Resolution::NoAnswer(why) if why.starts_with("/etc/resolv.conf: ")),
            "{resolution:?}"
        );
    }
}
