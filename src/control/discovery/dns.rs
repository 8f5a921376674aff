//! The source of DNS names in `endpoints`: every A and AAAA address of a name is a candidate.
//!
//! Each name has a task of its own. It looks the name up ([`lookup`]), again when the TTL of the
//! response is over, and at once when `/etc/hosts` or `/etc/resolv.conf` changes. The addresses of a
//! name stay until a response has other ones; a failure, and a response without addresses, change
//! nothing.
//!
//! A name server may return a different subset of the addresses each time (round robin with a
//! limit, or a response cut to fit a datagram). An address that a response omits therefore stays
//! for three TTLs after the last response that had it, if its endpoint is usable; otherwise it
//! leaves at once. `/etc/hosts` holds all addresses of a name, so what it omits leaves at once.

mod lookup;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

pub use self::lookup::ResolverFiles;
use self::lookup::{LookupResult, TTL_MAX, TTL_MIN, look_up};
use super::source_states::{Candidate, DiscoveredEndpoints, SourceAnswer, SourceStates};
use crate::config::EndpointAddress;
use crate::control::file_watch::{FileWatch, poll_ticks};
use crate::upstream::endpoint_sources::EndpointSource;

/// TTLs for which a usable address stays that responses omit.
const OMITTED_TTLS: u32 = 3;
/// Bounds of the pause after a failure.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);

/// The addresses of a name.
#[derive(Debug, Clone, Default)]
struct NameState {
    v4: Vec<NameAddress>,
    v6: Vec<NameAddress>,
    error: Option<String>,
}

impl NameState {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.v4.iter().chain(&self.v6).map(|address| address.ip)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NameAddress {
    ip: IpAddr,
    /// How long the address stays if responses omit it. `None`: it was known before this task
    /// started, and the first response sets the time.
    until: Option<Instant>,
}

struct DnsSource {
    names: Vec<EndpointAddress>,
    known: RefCell<BTreeMap<String, NameState>>,
    system: ResolverFiles,
    states: Rc<SourceStates>,
    files_changed: Notify,
}

/// Looks `names` up, again and again, until the future is dropped.
pub async fn follow(names: Vec<EndpointAddress>, system: ResolverFiles, states: Rc<SourceStates>) {
    let mut files = FileWatch::new(vec![system.hosts.clone(), system.resolv_conf.clone()]);
    let mut hosts: Vec<String> = names.iter().map(|name| name.host.clone()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let known = RefCell::new(known_addresses(&hosts, &states));
    let files_changed = Notify::new();
    let source = Rc::new(DnsSource { names, known, system, states, files_changed });
    let mut tasks = JoinSet::new();
    for host in hosts {
        tasks.spawn_local(Rc::clone(&source).follow_name(host));
    }
    let mut ticks = poll_ticks();
    loop {
        ticks.tick().await;
        if files.changed() {
            source.files_changed.notify_waiters();
        }
    }
}

/// The addresses of `hosts` in the last answer. A reload that adds a name keeps the addresses of
/// the others, even if no name server answers at the moment.
fn known_addresses(hosts: &[String], states: &SourceStates) -> BTreeMap<String, NameState> {
    let state_of = |host: &String, answer: &SourceAnswer| {
        let of_host = answer.candidates.iter().filter(|c| c.server_name.as_ref() == Some(host));
        let mut ips: Vec<IpAddr> = of_host.filter_map(|c| c.address.host.parse().ok()).collect();
        // An address occurs once for each port of the name.
        ips.sort_unstable();
        ips.dedup();
        let addresses = ips.into_iter().map(|ip| NameAddress { ip, until: None });
        let (v4, v6) = addresses.partition(|address| address.ip.is_ipv4());
        (host.clone(), NameState { v4, v6, error: None })
    };
    states.read(|answers, _| {
        let answer = answers.get(&EndpointSource::Dns);
        answer.into_iter().flat_map(|answer| hosts.iter().map(|h| state_of(h, answer))).collect()
    })
}

impl DnsSource {
    async fn follow_name(self: Rc<Self>, host: String) {
        let mut failures = 0;
        loop {
            // Registered before the lookup: a change of the files during it requires another one.
            let mut files_changed = std::pin::pin!(self.files_changed.notified());
            files_changed.as_mut().enable();
            let result = look_up(&host, &self.system).await;
            let mut known = self.known.borrow().get(&host).cloned().unwrap_or_default();
            let usable = |ip| self.is_usable(&host, ip);
            let pause = update(&mut known, result, &mut failures, &usable, Instant::now());
            self.known.borrow_mut().insert(host.clone(), known);
            self.publish();
            tokio::select! {
                () = sleep(pause.mul_f64(0.9 + fastrand::f64() / 5.0)) => {}
                () = files_changed => {}
            }
        }
    }

    /// Whether `ip` is the address of a usable endpoint that came from `host`.
    fn is_usable(&self, host: &str, ip: IpAddr) -> bool {
        let ports: Vec<u16> =
            self.names.iter().filter(|name| name.host == host).map(|name| name.port).collect();
        self.states.upstream().endpoints().iter().any(|endpoint| {
            ports.contains(&endpoint.address.port)
                && endpoint.address.host.parse() == Ok(ip)
                && endpoint.is_usable()
        })
    }

    /// Passes the addresses and errors of all names on.
    fn publish(&self) {
        let known = self.known.borrow();
        let mut found = DiscoveredEndpoints::default();
        for name in &self.names {
            for ip in known.get(&name.host).into_iter().flat_map(NameState::addresses) {
                match EndpointAddress::parse(&SocketAddr::new(ip, name.port).to_string()) {
                    Ok(address) => {
                        let server_name = Some(name.host.clone());
                        found.candidates.push(Candidate { address, server_name });
                    }
                    Err(why) => found.reject(format!("{}: {why}", name.host), 1),
                }
            }
        }
        let is_resolved = |name: &EndpointAddress| {
            known.get(&name.host).is_some_and(|known| known.addresses().next().is_some())
        };
        let complete = self.names.iter().all(is_resolved);
        let errors: Vec<_> = known
            .iter()
            .filter_map(|(host, known)| Some(format!("{host}: {}", known.error.as_ref()?)))
            .collect();
        let error = (!errors.is_empty()).then(|| errors.join("; "));
        if !found.candidates.is_empty() || found.rejected_count > 0 {
            self.states.update_partial(EndpointSource::Dns, found, complete, error.as_deref());
        } else if let Some(error) = error {
            self.states.fail(EndpointSource::Dns, &error);
        }
    }
}

/// Applies the result of a lookup and returns the time until the next one. A family (A or AAAA)
/// whose query failed keeps its addresses; both do if the result has no address at all. `usable`
/// says whether the endpoint of an address is usable.
fn update(
    known: &mut NameState,
    result: LookupResult,
    failures: &mut u32,
    usable: &dyn Fn(IpAddr) -> bool,
    now: Instant,
) -> Duration {
    let ttl = result.ttl.clamp(TTL_MIN, TTL_MAX);
    let empty = |family: &Result<Vec<IpAddr>, String>| family.as_ref().is_ok_and(Vec::is_empty);
    known.error = match (&result.v4, &result.v6) {
        (Err(why), _) | (_, Err(why)) => Some(why.clone()),
        (v4, v6) if empty(v4) && empty(v6) => Some("it has no address".to_owned()),
        _ => None,
    };
    let any = [&result.v4, &result.v6].iter().any(|f| f.as_ref().is_ok_and(|f| !f.is_empty()));
    if any {
        let until = now + ttl * OMITTED_TTLS;
        let stays = |address: &NameAddress| !result.complete && usable(address.ip);
        for (family, found) in [(&mut known.v4, result.v4), (&mut known.v6, result.v6)] {
            if let Ok(found) = found {
                replace(family, &found, until, now, &stays);
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

/// Replaces the addresses of a family by `found`. Omitted addresses for which `stays` is true remain
/// until their time is over.
fn replace(
    family: &mut Vec<NameAddress>,
    found: &[IpAddr],
    until: Instant,
    now: Instant,
    stays: &dyn Fn(&NameAddress) -> bool,
) {
    let omitted: Vec<NameAddress> = family
        .iter()
        .map(|known| NameAddress { until: known.until.or(Some(until)), ..*known })
        .filter(|known| !found.contains(&known.ip) && known.until > Some(now) && stays(known))
        .collect();
    let found = found.iter().map(|ip| NameAddress { ip: *ip, until: Some(until) });
    *family = found.chain(omitted).collect();
}

#[cfg(test)]
mod tests;
