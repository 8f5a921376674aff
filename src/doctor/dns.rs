//! Names: `/etc/hosts`, and each name server of `/etc/resolv.conf` by itself, so that the silent
//! one among several is named. Asks by UDP, as libc's resolver does; never through it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout};

use super::observations::{Dns, Ms, NameServer, Resolved, percentile};

/// Bound on one question; resolv.conf's default is 5 s, and who waits so long has lost already.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// Questions to each server before it counts as silent: one packet may be lost.
const TRIES: u32 = 2;

/// `/etc/resolv.conf` (resolv.conf(5)).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvConf {
    /// Its name servers, at most three count.
    pub servers: Vec<SocketAddr>,
    /// Domains that are tried behind a short name.
    pub search: Vec<String>,
    /// A name with fewer dots is short.
    pub ndots: usize,
}

impl ResolvConf {
    /// Reads it.
    pub fn parse(text: &str) -> Self {
        let mut conf = Self { servers: Vec::new(), search: Vec::new(), ndots: 1 };
        for line in text.lines() {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => {
                    let ip = words.next().and_then(|word| word.parse::<IpAddr>().ok());
                    if let Some(ip) = ip.filter(|_| conf.servers.len() < 3) {
                        conf.servers.push(SocketAddr::new(ip, 53));
                    }
                }
                Some("search" | "domain") => conf.search = words.map(ToOwned::to_owned).collect(),
                Some("options") => {
                    let ndots = words.filter_map(|word| word.strip_prefix("ndots:"));
                    conf.ndots = ndots
                        .reduce(|_, last| last)
                        .and_then(|n| n.parse().ok())
                        .unwrap_or(conf.ndots);
                }
                _ => {}
            }
        }
        conf
    }

    /// The names to ask for, in order.
    pub fn candidates(&self, name: &str) -> Vec<String> {
        if let Some(absolute) = name.strip_suffix('.') {
            return vec![absolute.to_owned()];
        }
        let mut all: Vec<String> = self.search.iter().map(|s| format!("{name}.{s}")).collect();
        let short = name.matches('.').count() < self.ndots;
        let at = if short { all.len() } else { 0 };
        all.insert(at, name.to_owned());
        all
    }
}

/// The addresses that `/etc/hosts` has for a name.
pub fn in_hosts(hosts: &str, name: &str) -> Vec<IpAddr> {
    let name = name.trim_end_matches('.');
    hosts
        .lines()
        .filter_map(|line| {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let ip = words.next()?.parse().ok()?;
            words.any(|word| word.eq_ignore_ascii_case(name)).then_some(ip)
        })
        .collect()
}

/// Resolves names, and remembers how each server did.
pub struct Resolver {
    conf: ResolvConf,
    hosts: String,
    servers: Vec<(NameServer, Vec<f64>)>,
    problem: Option<String>,
    needed: bool,
}

impl Resolver {
    /// With this system's files.
    pub fn of_system() -> Self {
        let text = std::fs::read_to_string("/etc/resolv.conf");
        let hosts = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
        Self::new(text.as_deref().map_err(ToString::to_string), hosts)
    }

    /// With the text of resolv.conf, or why there is none, and that of hosts.
    pub fn new(resolv_conf: Result<&str, String>, hosts: String) -> Self {
        let (conf, problem) = match resolv_conf {
            Ok(text) => (ResolvConf::parse(text), None),
            Err(error) => {
                (ResolvConf::parse(""), Some(format!("cannot read /etc/resolv.conf: {error}")))
            }
        };
        let problem = problem.or_else(|| {
            conf.servers.is_empty().then(|| "/etc/resolv.conf names no name server".to_owned())
        });
        Self::with_servers(conf, hosts, problem)
    }

    /// With these name servers and nothing else.
    pub fn of_servers(servers: Vec<SocketAddr>) -> Self {
        let conf = ResolvConf { servers, search: Vec::new(), ndots: 1 };
        Self::with_servers(conf, String::new(), None)
    }

    fn with_servers(conf: ResolvConf, hosts: String, problem: Option<String>) -> Self {
        let server = |&address: &SocketAddr| {
            let server = NameServer { address, asked: 0, answered: 0, p50_ms: None, error: None };
            (server, Vec::new())
        };
        let servers = conf.servers.iter().map(server).collect();
        Self { conf, hosts, servers, problem, needed: false }
    }

    /// The addresses of a host; an IP address is its own, and `localhost` needs nobody.
    pub async fn resolve(&mut self, host: &str) -> Resolved {
        if let Ok(ip) = host.parse::<IpAddr>() {
            return Resolved::Addresses(vec![ip]);
        }
        if host.trim_end_matches('.').eq_ignore_ascii_case("localhost") {
            let both = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
            return Resolved::Addresses(both.to_vec());
        }
        let known = in_hosts(&self.hosts, host);
        if !known.is_empty() {
            return Resolved::Addresses(known);
        }
        self.needed = true;
        let mut denied = false;
        for name in self.conf.candidates(host) {
            match self.ask_all(&name).await {
                Some(addresses) if !addresses.is_empty() => {
                    return Resolved::Addresses(addresses);
                }
                Some(_) => denied = true,
                // Nobody answers: another name will not change that.
                None => break,
            }
        }
        if denied {
            Resolved::NoSuchName
        } else {
            let silent = "no name server answers".to_owned();
            Resolved::NoAnswer(self.problem.clone().unwrap_or(silent))
        }
    }

    /// Asks every server, all at once: the addresses, none if the name does not exist, `None` if
    /// nobody answered.
    async fn ask_all(&mut self, name: &str) -> Option<Vec<IpAddr>> {
        let mut answers = Vec::new();
        for (server, _) in &self.servers {
            let (address, name) = (server.address, name.to_owned());
            answers.push(tokio::task::spawn_local(async move { ask_one(address, &name).await }));
        }
        let mut found: Option<Vec<IpAddr>> = None;
        for ((server, times), answer) in self.servers.iter_mut().zip(answers) {
            let Ok(answer) = answer.await else { continue };
            server.asked += answer.asked;
            server.answered += answer.answered;
            times.extend(answer.times);
            if answer.error.is_some() {
                server.error = answer.error;
            }
            if let Some(addresses) = answer.addresses {
                let all = found.get_or_insert_default();
                all.extend(
                    addresses.into_iter().filter(|ip| !all.contains(ip)).collect::<Vec<_>>(),
                );
            }
        }
        found
    }

    /// How the servers did; `None` if no name had to be resolved.
    pub fn observed(&self) -> Option<Dns> {
        if !self.needed {
            return None;
        }
        let servers: Vec<NameServer> = self
            .servers
            .iter()
            .map(|(server, times)| {
                let mut times = times.clone();
                times.sort_by(f64::total_cmp);
                NameServer { p50_ms: percentile(&times, 0.5).map(Ms), ..server.clone() }
            })
            .collect();
        Some(Dns { resolv_conf: self.problem.clone(), servers })
    }
}

#[derive(Default)]
struct Answer {
    asked: u32,
    answered: u32,
    times: Vec<f64>,
    /// Addresses; none where the server says that there are none.
    addresses: Option<Vec<IpAddr>>,
    error: Option<String>,
}

async fn ask_one(server: SocketAddr, name: &str) -> Answer {
    let mut answer = Answer::default();
    for kind in [RecordType::A, RecordType::AAAA] {
        for _ in 0..TRIES {
            answer.asked += 1;
            let asked = Instant::now();
            let result = timeout(TIMEOUT, exchange(server, name, kind)).await;
            match result {
                Ok(Ok(addresses)) => {
                    answer.answered += 1;
                    answer.times.push(Ms::from(asked.elapsed()).0);
                    answer.addresses.get_or_insert_default().extend(addresses);
                    break;
                }
                Ok(Err(error)) => answer.error = Some(error),
                Err(_) => answer.error = Some(format!("nothing within {TIMEOUT:?}")),
            }
        }
        // It has not answered one question twice: it will not answer the next.
        if answer.answered == 0 {
            break;
        }
    }
    answer
}

async fn exchange(server: SocketAddr, name: &str, kind: RecordType) -> Result<Vec<IpAddr>, String> {
    let any: SocketAddr = if server.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let mut question = Message::query();
    question.metadata.recursion_desired = true;
    let mut name = Name::from_ascii(name).map_err(|e| e.to_string())?;
    name.set_fqdn(true);
    question.add_query(Query::query(name, kind));
    let bytes = question.to_vec().map_err(|e| e.to_string())?;
    let socket = UdpSocket::bind(any).await.map_err(|e| e.to_string())?;
    // Connected: only its answers arrive, and an ICMP error is one.
    socket.connect(server).await.map_err(|e| e.to_string())?;
    socket.send(&bytes).await.map_err(|e| e.to_string())?;
    let mut buffer = [0; 4096];
    loop {
        let length = socket.recv(&mut buffer).await.map_err(|e| e.to_string())?;
        let Ok(answer) = Message::from_vec(&buffer[..length]) else { continue };
        if answer.metadata.id != question.metadata.id {
            continue;
        }
        return match answer.metadata.response_code {
            ResponseCode::NoError | ResponseCode::NXDomain => {
                Ok(answer.answers.iter().filter_map(|record| address(&record.data)).collect())
            }
            other => Err(format!("it answers {other}")),
        };
    }
}

fn address(data: &RData) -> Option<IpAddr> {
    match data {
        RData::A(a) => Some(IpAddr::V4(a.0)),
        RData::AAAA(a) => Some(IpAddr::V6(a.0)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_proto::op::OpCode;
    use hickory_proto::rr::Record;
    use hickory_proto::rr::rdata::A;
    use tokio::task::LocalSet;

    #[test]
    fn files() {
        let conf = ResolvConf::parse(
            "# comment\nnameserver 10.0.0.1\nnameserver fd00::1\nnameserver nonsense\n\
             search a.example b.example\noptions timeout:1 ndots:2\n",
        );
        assert_eq!(conf.servers, ["10.0.0.1:53", "[fd00::1]:53"].map(|s| s.parse().unwrap()));
        assert_eq!(conf.candidates("lb.x"), ["lb.x.a.example", "lb.x.b.example", "lb.x"]);
        assert_eq!(conf.candidates("a.b.c")[0], "a.b.c");
        assert_eq!(conf.candidates("lb."), ["lb"]);
        let hosts = "127.0.0.1 localhost\n10.0.0.9 lb LB.example # comment lb2\nx y\n";
        assert_eq!(in_hosts(hosts, "lb.EXAMPLE."), ["10.0.0.9".parse::<IpAddr>().unwrap()]);
        assert_eq!(in_hosts(hosts, "lb2"), [] as [IpAddr; 0]);
    }

    /// A name server that knows one name.
    async fn server() -> SocketAddr {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        tokio::task::spawn_local(async move {
            let mut buffer = [0; 512];
            loop {
                let (length, peer) = socket.recv_from(&mut buffer).await.unwrap();
                let question = Message::from_vec(&buffer[..length]).unwrap();
                let query = question.queries[0].clone();
                let mut answer = Message::response(question.metadata.id, OpCode::Query);
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
    async fn answers_denials_and_silence() {
        let test = async {
            // A socket that is read by nobody answers nothing.
            let silent = UdpSocket::bind("127.0.0.1:0").await.unwrap();
            let both = vec![silent.local_addr().unwrap(), server().await];
            let mut resolver = Resolver::of_servers(both);
            let found = resolver.resolve("lb.example").await;
            assert_eq!(found, Resolved::Addresses(vec!["10.0.0.7".parse().unwrap()]));
            assert_eq!(resolver.resolve("none.example").await, Resolved::NoSuchName);
            let seen = resolver.observed().unwrap().servers;
            assert_eq!((seen[0].answered, seen[0].asked), (0, 4));
            assert_eq!((seen[1].answered, seen[1].asked), (4, 4));
            assert!(seen[0].error.is_some() && seen[1].p50_ms.is_some());
        };
        LocalSet::new().run_until(test).await;
    }

    #[tokio::test(start_paused = true)]
    async fn what_needs_no_server_asks_none() {
        let mut resolver = Resolver::new(Err("gone".into()), "10.0.0.9 lb\n".into());
        for name in ["10.0.0.1", "localhost", "lb"] {
            assert!(matches!(resolver.resolve(name).await, Resolved::Addresses(_)), "{name}");
        }
        let answer = resolver.resolve("other").await;
        assert_eq!(answer, Resolved::NoAnswer("cannot read /etc/resolv.conf: gone".into()));
    }
}
