//! Resolves names as the discovery of endpoints does: by hickory-resolver, from the hosts file and
//! the name servers of this system, never by libc.
//!
//! Each name server is queried by a resolver of its own, so that a single silent server is noticed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

use futures_util::future::join_all;
use hickory_resolver::config::{NameServerConfig, ResolveHosts, ResolverConfig, ResolverOpts};
use hickory_resolver::lookup::Lookup;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::system_conf::parse_resolv_conf;
use hickory_resolver::{Hosts, TokioResolver};
use jackstay_sys::{clock, files};
use tokio::time::timeout;

use super::observations::{Dns, Ms, NameServer, Resolution, percentile};

/// Limit of one query with all search domains. The default of resolv.conf(5), 5 s, is too long for a
/// client that waits for the response to its request.
const QUERY_LIMIT: Duration = Duration::from_millis(1500);
/// Number of queries to a name server before it counts as silent. One packet may be lost.
const TRIES: u32 = 2;
/// Largest system file that is read, as in the discovery of endpoints.
const MAX_FILE: u64 = 16 << 20;

/// Resolves names, and counts and times the answers of each name server.
pub struct Resolver {
    hosts: Hosts,
    servers: Vec<ServerRecord>,
    /// Why resolv.conf names no server.
    problem: Option<String>,
    /// Whether a name was resolved that needs a name server.
    used: bool,
}

/// A name server, the settings of its queries, and its answers so far.
struct ServerRecord {
    config: ResolverConfig,
    options: ResolverOpts,
    stats: NameServer,
    /// Milliseconds of each answered query.
    times: Vec<f64>,
}

impl ServerRecord {
    fn new(address: SocketAddr, config: ResolverConfig, options: &ResolverOpts) -> Self {
        let stats = NameServer { address, asked: 0, answered: 0, p50_ms: None, error: None };
        let mut options = options.clone();
        options.timeout = QUERY_LIMIT;
        // `query` repeats queries itself in order to count them.
        options.attempts = 0;
        options.cache_size = 0;
        options.use_hosts_file = ResolveHosts::Never;
        Self { config, options, stats, times: Vec::new() }
    }
}

impl Resolver {
    /// A resolver with the files of this system, `/etc/hosts` and `/etc/resolv.conf`.
    pub fn of_system() -> Self {
        let read = |path: &str| {
            files::read(Path::new(path), MAX_FILE)
                .map_err(|error| format!("cannot read {path}: {error}"))
        };
        Self::from_files(read("/etc/resolv.conf"), &read("/etc/hosts").unwrap_or_default())
    }

    /// A resolver with the content of resolv.conf (or why it cannot be read) and of the hosts file.
    pub fn from_files(resolv_conf: Result<Vec<u8>, String>, hosts_file: &[u8]) -> Self {
        let mut hosts = Hosts::default();
        // Comments that are not UTF-8 do not matter.
        let _ = hosts.read_hosts_conf(String::from_utf8_lossy(hosts_file).as_bytes());
        let parsed = resolv_conf.and_then(|text| {
            parse_resolv_conf(text).map_err(|error| format!("/etc/resolv.conf: {error}"))
        });
        let (servers, problem) = match parsed {
            Ok((config, options)) => {
                let (domain, search, servers) = config.into_parts();
                let record = |server: NameServerConfig| {
                    let port = server.connections.first().map_or(53, |connection| connection.port);
                    let address = SocketAddr::new(server.ip, port);
                    let config =
                        ResolverConfig::from_parts(domain.clone(), search.clone(), vec![server]);
                    ServerRecord::new(address, config, &options)
                };
                (servers.into_iter().map(record).collect(), None)
            }
            Err(problem) => (Vec::new(), Some(problem)),
        };
        Self { hosts, servers, problem, used: false }
    }

    /// A resolver with these name servers, no search domain and no hosts file.
    pub fn of_servers(servers: Vec<SocketAddr>) -> Self {
        let record = |address: SocketAddr| {
            let mut server = NameServerConfig::udp_and_tcp(address.ip());
            for connection in &mut server.connections {
                connection.port = address.port();
            }
            let config = ResolverConfig::from_name_servers(vec![server]);
            ServerRecord::new(address, config, &ResolverOpts::default())
        };
        let servers = servers.into_iter().map(record).collect();
        Self { hosts: Hosts::default(), servers, problem: None, used: false }
    }

    /// The addresses of a host. An IP address, `localhost` (RFC 6761 section 6.3) and a name in the
    /// hosts file need no name server.
    pub async fn resolve(&mut self, host: &str) -> Resolution {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Resolution::Addresses(vec![ip]);
        }
        if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") {
            let both = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
            return Resolution::Addresses(both.to_vec());
        }
        let in_hosts_file = self.look_up_in_hosts_file(host);
        if !in_hosts_file.is_empty() {
            return Resolution::Addresses(in_hosts_file);
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

    fn look_up_in_hosts_file(&self, host: &str) -> Vec<IpAddr> {
        let Ok(name) = Name::from_ascii(host) else { return Vec::new() };
        let mut found = Vec::new();
        for record_type in [RecordType::A, RecordType::AAAA] {
            let lookup = self.hosts.lookup_static_host(&Query::query(name.clone(), record_type));
            let records = lookup.iter().flat_map(Lookup::answers);
            found.extend(records.filter_map(|record| record.data.ip_addr()));
        }
        found
    }

    /// Queries all servers concurrently. Returns the addresses, an empty list if the name has none, or
    /// `None` if no server answered.
    async fn query_all(&mut self, name: &str) -> Option<Vec<IpAddr>> {
        let queries =
            self.servers.iter().map(|server| query(&server.config, &server.options, name));
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

/// Queries one name server for both record types of a name.
async fn query(config: &ResolverConfig, options: &ResolverOpts, name: &str) -> QueryOutcome {
    let mut outcome = QueryOutcome::default();
    for record_type in [RecordType::A, RecordType::AAAA] {
        for _ in 0..TRIES {
            outcome.asked += 1;
            let started = clock::now();
            let lookup = look_up(config.clone(), options.clone(), name, record_type);
            match timeout(QUERY_LIMIT, lookup).await {
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
    outcome
}

/// One lookup by a new resolver, which has no state of earlier lookups.
async fn look_up(
    config: ResolverConfig,
    options: ResolverOpts,
    name: &str,
    record_type: RecordType,
) -> Result<Vec<IpAddr>, String> {
    let resolver = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        .with_options(options)
        .build()
        .map_err(|error| error.to_string())?;
    let name = Name::from_ascii(name).map_err(|error| error.to_string())?;
    match resolver.lookup(name, record_type).await {
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
    use super::*;
    use hickory_resolver::proto::op::{Message, OpCode, ResponseCode};
    use hickory_resolver::proto::rr::rdata::A;
    use hickory_resolver::proto::rr::{RData, Record};
    use tokio::net::UdpSocket;
    use tokio::task::LocalSet;

    #[test]
    fn from_files_reads_name_servers_and_hosts() {
        let resolv_conf = "# comment\nnameserver 10.0.0.1\nnameserver fd00::1\n\
                           search a.example b.example\noptions timeout:1 ndots:2\n";
        let hosts = b"127.0.0.1 localhost\n10.0.0.9 lb LB.example # caf\xe9 lb2\nx y\n";
        let resolver = Resolver::from_files(Ok(resolv_conf.into()), hosts);
        let addresses: Vec<_> =
            resolver.servers.iter().map(|server| server.stats.address.to_string()).collect();
        assert_eq!(addresses, ["10.0.0.1:53", "[fd00::1]:53"]);
        let first = &resolver.servers[0];
        assert_eq!((first.config.search().len(), first.options.ndots), (2, 2));
        let found = resolver.look_up_in_hosts_file("lb.EXAMPLE.");
        assert_eq!(found, ["10.0.0.9".parse::<IpAddr>().unwrap()]);
        assert_eq!(resolver.look_up_in_hosts_file("lb2"), [] as [IpAddr; 0], "it is in a comment");
    }

    /// A name server that knows one name.
    async fn name_server() -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::task::spawn_local(async move {
            let mut buffer = [0; 512];
            loop {
                let (length, peer) = socket.recv_from(&mut buffer).await.unwrap();
                let question = Message::from_vec(&buffer[..length]).unwrap();
                let query = question.queries[0].clone();
                let mut answer = Message::response(question.metadata.id, OpCode::Query);
                answer.add_query(query.clone());
                if query.name.to_ascii() == "lb.example." {
                    if query.query_type == RecordType::A {
                        let data = RData::A(A::new(10, 0, 0, 7));
                        answer.answers.push(Record::from_rdata(query.name, 5, data));
                    }
                } else {
                    answer.metadata.response_code = ResponseCode::NXDomain;
                }
                socket.send_to(&answer.to_vec().unwrap(), peer).await.unwrap();
            }
        });
        address
    }

    #[tokio::test]
    async fn resolve_counts_answers_of_each_server() {
        let test = async {
            // A socket that is never read stands for a silent name server.
            let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            let servers = vec![silent.local_addr().unwrap(), name_server().await];
            let mut resolver = Resolver::of_servers(servers);
            let found = resolver.resolve("lb.example").await;
            assert_eq!(found, Resolution::Addresses(vec!["10.0.0.7".parse().unwrap()]));
            assert_eq!(resolver.resolve("none.example").await, Resolution::NoSuchName);
            let servers = resolver.into_observations().unwrap().servers;
            assert_eq!((servers[0].answered, servers[0].asked), (0, 4), "{servers:#?}");
            assert_eq!((servers[1].answered, servers[1].asked), (4, 4), "{servers:#?}");
            assert!(servers[0].error.is_some() && servers[1].p50_ms.is_some());
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test(start_paused = true)]
    async fn resolve_address_localhost_and_hosts_file_queries_no_server() {
        let mut resolver = Resolver::from_files(Err("gone".into()), b"10.0.0.9 lb\n");
        for name in ["10.0.0.1", "localhost", "lb"] {
            assert!(matches!(resolver.resolve(name).await, Resolution::Addresses(_)), "{name}");
        }
        assert!(!resolver.used);
        assert_eq!(resolver.resolve("other").await, Resolution::NoAnswer("gone".into()));
        let mut resolver = Resolver::from_files(Ok(b"options ndots:1\n".to_vec()), b"");
        let resolution = resolver.resolve("other").await;
        assert!(
            matches!(&resolution, Resolution::NoAnswer(why) if why.starts_with("/etc/resolv.conf: ")),
            "{resolution:?}"
        );
    }
}
