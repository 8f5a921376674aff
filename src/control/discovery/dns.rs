//! DNS names among the endpoints: every A and AAAA of each is a candidate.
//!
//! `/etc/hosts` is asked before DNS, and `localhost` is never asked for (RFC 6761 section 6.3).
//! Nobody waits for an answer: each name has a task of its own, which asks again when the answer's
//! time to live is over, within bounds, and at once when `/etc/hosts` or `/etc/resolv.conf` change.
//! What was known stays for as long as there is no better answer; an answer without addresses is
//! none. There is no fallback to name servers that nobody configured.
//!
//! A name server may answer each question with another subset of the addresses (round robin with a
//! limit, an answer cut to fit a datagram). So an address that an answer leaves out stays for three
//! times its time to live after the last answer that named it, if it is usable; one that is not
//! usable leaves at once. `/etc/hosts` names all addresses: what it leaves out leaves at once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use hickory_resolver::config::{ResolveHosts, ResolverConfig};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::proto::op::Query;
use hickory_resolver::proto::rr::{Name, RecordType};
use hickory_resolver::system_conf::parse_resolv_conf;
use hickory_resolver::{Hosts, TokioResolver};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use super::merge::{Candidate, SourceAnswer};
use super::objects::DiscoveredEndpoints;
use super::source_states::SourceStates;
use crate::config::EndpointAddress;
use crate::control::certificates::ticks;
use crate::control::file_watch::FileWatch;
use crate::net::files::bounded_read;
use crate::upstream::endpoint_sources::EndpointSource;

/// Bounds of the time until a name is asked for again: a TTL of 0 must not become a flood, and one
/// of a day not a day of blindness.
const TTL_MIN: Duration = Duration::from_secs(5);
const TTL_MAX: Duration = Duration::from_secs(300);
/// Times to live for which a usable address stays that answers leave out.
const ABSENT_TTLS: u32 = 3;
/// Bounds of the pause after a failure.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// One attempt of one query: a lost packet costs this (the resolver's own default is 5 s).
const ATTEMPT: Duration = Duration::from_secs(2);
/// And what it takes at least, whatever `options timeout:` says: 0 would be no attempt at all, and
/// glibc takes it for this too.
const ATTEMPT_MIN: Duration = Duration::from_secs(1);
/// All attempts at all servers, with every search domain.
const LOOKUP: Duration = Duration::from_secs(20);
/// Largest file of the system read. Lists against advertisements in `/etc/hosts` have a few MiB.
const MAX_FILE: u64 = 16 << 20;

/// The files of the system, and the port of its name servers.
#[derive(Debug, Clone)]
pub struct ResolverFiles {
    /// `/etc/hosts`
    pub hosts: PathBuf,
    /// `/etc/resolv.conf`
    pub resolv_conf: PathBuf,
    /// 53, but for tests.
    pub port: u16,
}

impl Default for ResolverFiles {
    fn default() -> Self {
        Self { hosts: "/etc/hosts".into(), resolv_conf: "/etc/resolv.conf".into(), port: 53 }
    }
}

/// What is known of a name.
#[derive(Debug, Clone, Default)]
struct Known {
    v4: Vec<Address>,
    v6: Vec<Address>,
    error: Option<String>,
}

impl Known {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.v4.iter().chain(&self.v6).map(|address| address.ip)
    }
}

/// An address of a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Address {
    ip: IpAddr,
    /// How long it stays although answers leave it out; `None`: it was found before this task
    /// began, and the first answer sets the time.
    until: Option<Instant>,
}

struct Names {
    wanted: Vec<EndpointAddress>,
    known: RefCell<BTreeMap<String, Known>>,
    system: ResolverFiles,
    board: Rc<SourceStates>,
    /// A file of the system has changed.
    again: Notify,
}

/// Follows the names until it is dropped.
pub async fn follow(names: Vec<EndpointAddress>, system: ResolverFiles, board: Rc<SourceStates>) {
    let mut files = FileWatch::new(vec![system.hosts.clone(), system.resolv_conf.clone()]);
    let mut hosts: Vec<String> = names.iter().map(|name| name.host.clone()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let known = known_of(&hosts, &board);
    let names = Rc::new(Names {
        wanted: names,
        known: RefCell::new(known),
        system,
        board,
        again: Notify::new(),
    });
    let mut tasks = JoinSet::new();
    for host in hosts {
        tasks.spawn_local(Rc::clone(&names).follow(host));
    }
    let mut ticks = ticks();
    loop {
        ticks.tick().await;
        if files.changed() {
            names.again.notify_waiters();
        }
    }
}

/// What the board has of these names already: a reload that adds one takes nothing from the others,
/// of which no name server may answer just now.
fn known_of(hosts: &[String], board: &SourceStates) -> BTreeMap<String, Known> {
    let of = |host: &String, answer: &SourceAnswer| {
        let ours = answer.entries.iter().filter(|entry| entry.server_name.as_ref() == Some(host));
        let mut ips: Vec<IpAddr> = ours.filter_map(|e| e.address.host.parse().ok()).collect();
        // Once for each port.
        ips.sort_unstable();
        ips.dedup();
        let found = ips.into_iter().map(|ip| Address { ip, until: None });
        let (v4, v6) = found.partition(|address| address.ip.is_ipv4());
        (host.clone(), Known { v4, v6, error: None })
    };
    board.with(|answers, _| {
        let answer = answers.get(&EndpointSource::Dns);
        answer.into_iter().flat_map(|answer| hosts.iter().map(|h| of(h, answer))).collect()
    })
}

impl Names {
    async fn follow(self: Rc<Self>, host: String) {
        let mut failures = 0;
        loop {
            // Registered before the question: a change during it is a reason to ask again.
            let mut again = std::pin::pin!(self.again.notified());
            again.as_mut().enable();
            let found = look_up(&host, &self.system).await;
            let mut known = self.known.borrow().get(&host).cloned().unwrap_or_default();
            let usable = |ip| self.is_usable(&host, ip);
            let pause = take(&mut known, found, &mut failures, &usable, Instant::now());
            self.known.borrow_mut().insert(host.clone(), known);
            self.say();
            tokio::select! {
                () = sleep(pause.mul_f64(0.9 + fastrand::f64() / 5.0)) => {}
                () = again => {}
            }
        }
    }

    /// Whether an address of `host` is the address of an endpoint that serves now.
    fn is_usable(&self, host: &str, ip: IpAddr) -> bool {
        let ports: Vec<u16> =
            self.wanted.iter().filter(|name| name.host == host).map(|name| name.port).collect();
        self.board.upstream().endpoints().iter().any(|endpoint| {
            ports.contains(&endpoint.address.port)
                && endpoint.address.host.parse() == Ok(ip)
                && endpoint.is_usable()
        })
    }

    /// Tells the board all that is known.
    fn say(&self) {
        let known = self.known.borrow();
        let mut said = DiscoveredEndpoints::default();
        for name in &self.wanted {
            for ip in known.get(&name.host).into_iter().flat_map(Known::addresses) {
                match EndpointAddress::parse(&std::net::SocketAddr::new(ip, name.port).to_string())
                {
                    Ok(address) => {
                        said.entries
                            .push(Candidate { address, server_name: Some(name.host.clone()) });
                    }
                    Err(why) => {
                        said.refused_count += 1;
                        said.refused.push(format!("{}: {why}", name.host));
                    }
                }
            }
        }
        let answered = |name: &EndpointAddress| {
            known.get(&name.host).is_some_and(|known| known.addresses().next().is_some())
        };
        let complete = self.wanted.iter().all(answered);
        let errors: Vec<_> = known
            .iter()
            .filter_map(|(host, known)| Some(format!("{host}: {}", known.error.as_ref()?)))
            .collect();
        let wrong = (!errors.is_empty()).then(|| errors.join("; "));
        if !said.entries.is_empty() || said.refused_count > 0 {
            self.board.update_partial(EndpointSource::Dns, said, complete, wrong.as_deref());
        } else if let Some(wrong) = wrong {
            self.board.fail(EndpointSource::Dns, &wrong);
        }
    }
}

/// What one question found: for each family its addresses, or why there are none.
#[derive(Debug)]
struct Found {
    v4: Result<Vec<IpAddr>, String>,
    v6: Result<Vec<IpAddr>, String>,
    ttl: Duration,
    /// It names all addresses there are, not a subset of them.
    complete: bool,
}

/// Takes in what was found and says when to ask again. A family that could not be asked keeps what
/// it had; so do both if neither has an address. `usable` says which addresses serve now.
fn take(
    known: &mut Known,
    found: Found,
    failures: &mut u32,
    usable: &dyn Fn(IpAddr) -> bool,
    now: Instant,
) -> Duration {
    let ttl = found.ttl.clamp(TTL_MIN, TTL_MAX);
    let empty = |family: &Result<Vec<IpAddr>, String>| family.as_ref().is_ok_and(Vec::is_empty);
    known.error = match (&found.v4, &found.v6) {
        (Err(why), _) | (_, Err(why)) => Some(why.clone()),
        (v4, v6) if empty(v4) && empty(v6) => Some("it has no address".to_owned()),
        _ => None,
    };
    let any = [&found.v4, &found.v6].iter().any(|f| f.as_ref().is_ok_and(|f| !f.is_empty()));
    if any {
        let until = now + ttl * ABSENT_TTLS;
        let stays = |address: &Address| !found.complete && usable(address.ip);
        for (family, named) in [(&mut known.v4, found.v4), (&mut known.v6, found.v6)] {
            if let Ok(named) = named {
                replace(family, &named, until, now, &stays);
            }
        }
    }
    if known.error.is_none() {
        *failures = 0;
        return ttl;
    }
    *failures = failures.saturating_add(1);
    RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(8)).min(RETRY_MAX)
}

/// Puts the addresses that an answer names into a family, and leaves those in it that it leaves out
/// and that `stays` admits, until their time is over.
fn replace(
    family: &mut Vec<Address>,
    named: &[IpAddr],
    until: Instant,
    now: Instant,
    stays: &dyn Fn(&Address) -> bool,
) {
    let absent: Vec<Address> = family
        .iter()
        .map(|known| Address { until: known.until.or(Some(until)), ..*known })
        .filter(|known| !named.contains(&known.ip) && known.until > Some(now) && stays(known))
        .collect();
    let named = named.iter().map(|ip| Address { ip: *ip, until: Some(until) });
    *family = named.chain(absent).collect();
}

async fn look_up(host: &str, system: &ResolverFiles) -> Found {
    if host.ends_with(".localhost") {
        let (v4, v6) = (Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into());
        return Found { v4: Ok(vec![v4]), v6: Ok(vec![v6]), ttl: TTL_MAX, complete: true };
    }
    if let Some((v4, v6)) = in_hosts(host, system) {
        return Found { v4: Ok(v4), v6: Ok(v6), ttl: TTL_MAX, complete: true };
    }
    let failed =
        |why: String| Found { v4: Err(why.clone()), v6: Err(why), ttl: TTL_MIN, complete: false };
    let resolver = match resolver(system) {
        Ok(resolver) => resolver,
        Err(why) => return failed(why),
    };
    let both = async {
        tokio::join!(resolver.lookup(host, RecordType::A), resolver.lookup(host, RecordType::AAAA))
    };
    let Ok((v4, v6)) = timeout(LOOKUP, both).await else {
        return failed(format!("no answer from the name servers within {} s", LOOKUP.as_secs()));
    };
    let mut ttl = TTL_MAX;
    let mut family = |answer: Result<hickory_resolver::lookup::Lookup, NetError>| match answer {
        Ok(lookup) => {
            let left = Instant::from_std(lookup.valid_until()).duration_since(Instant::now());
            ttl = ttl.min(left);
            Ok(lookup.answers().iter().filter_map(|record| record.data.ip_addr()).collect())
        }
        Err(error) if error.is_nx_domain() => Err("there is no such name".to_owned()),
        Err(error) if error.is_no_records_found() => Ok(Vec::new()),
        Err(error) => Err(error.to_string()),
    };
    let (v4, v6) = (family(v4), family(v6));
    Found { v4, v6, ttl, complete: false }
}

/// The addresses in `/etc/hosts`, if it has any. A file that is not there has none.
fn in_hosts(host: &str, system: &ResolverFiles) -> Option<(Vec<IpAddr>, Vec<IpAddr>)> {
    let file = bounded_read::read(&system.hosts, MAX_FILE).ok()?;
    let mut hosts = Hosts::default();
    // Names are ASCII; a comment need not be UTF-8.
    hosts.read_hosts_conf(String::from_utf8_lossy(&file).as_bytes()).ok()?;
    let name = Name::from_utf8(host).ok()?;
    let look = |kind| -> Vec<IpAddr> {
        let found = hosts.lookup_static_host(&Query::query(name.clone(), kind));
        let records = found.map(|lookup| lookup.answers().to_vec()).unwrap_or_default();
        records.iter().filter_map(|record| record.data.ip_addr()).collect()
    };
    let (v4, v6) = (look(RecordType::A), look(RecordType::AAAA));
    (!v4.is_empty() || !v6.is_empty()).then_some((v4, v6))
}

/// A resolver for the name servers of the system as they are configured now. It is made for each
/// question: they are rare, and there is nothing that could go stale.
fn resolver(system: &ResolverFiles) -> Result<TokioResolver, String> {
    let file = system.resolv_conf.display();
    let text = bounded_read::read(&system.resolv_conf, MAX_FILE);
    let text = text.map_err(|error| format!("{file}: {error}"))?;
    let (config, mut options) =
        parse_resolv_conf(text).map_err(|error| format!("{file}: {error}"))?;
    let (domain, search, mut servers) = config.into_parts();
    for connection in servers.iter_mut().flat_map(|server| &mut server.connections) {
        connection.port = system.port;
    }
    let config = ResolverConfig::from_parts(domain, search, servers);
    options.timeout = options.timeout.clamp(ATTEMPT_MIN, ATTEMPT);
    options.attempts = options.attempts.max(2);
    options.cache_size = 0;
    // Asked before.
    options.use_hosts_file = ResolveHosts::Never;
    TokioResolver::builder_with_config(config, TokioRuntimeProvider::default())
        .with_options(options)
        .build()
        .map_err(|error| format!("{file}: {error}"))
}

#[cfg(test)]
mod tests;
