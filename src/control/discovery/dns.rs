//! The source of DNS names in `endpoints`: every A and AAAA address of a name is a candidate.
//!
//! Each name has a task of its own. The task looks the name up ([`jackstay_net::dns`]), and again when the TTL of
//! the response has passed, or when `/etc/hosts` or `/etc/resolv.conf` changes. A failed lookup, or one
//! without addresses, leaves the known addresses unchanged, and so does one that ends at another name of the search
//! list because a name server fails.
//!
//! A name server may return a different subset of the addresses each time (round robin with a
//! limit, or a response cut to fit a datagram). An address that a response omits is therefore kept
//! until three TTLs after the last response that had it, as long as its endpoint is usable; otherwise it
//! is removed at once. `/etc/hosts` holds all addresses of a name, so an address that it omits is
//! removed at once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use jackstay_core::backoff::Backoff;
use jackstay_core::discovery::address::{EndpointAddress, tls_name};
use jackstay_core::discovery::source::{
    Candidate, DiscoveredEndpoints, EndpointSource, SourceAnswer,
};
use jackstay_net::dns::{Found, LookupError, ResolverFiles, look_up};
use jackstay_sys::clock;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::panics;
use super::source_states::SourceStates;
use crate::control::file_watch::{FileWatch, poll_ticks};

/// Number of TTLs for which a usable address is kept that responses omit.
const OMITTED_TTLS: u32 = 3;
/// Bounds of the pause after a failure.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(30);
const RETRIES: Backoff = Backoff::new(RETRY_MIN, RETRY_MAX);

/// The known addresses of a name, and the error of its last lookup.
#[derive(Debug, Clone, Default)]
struct NameState {
    v4: Vec<NameAddress>,
    v6: Vec<NameAddress>,
    /// The name of the search list that had them ([`Found::name`]).
    name: Option<String>,
    error: Option<LookupError>,
}

impl NameState {
    fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.v4.iter().chain(&self.v6).map(|address| address.ip)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct NameAddress {
    ip: IpAddr,
    /// Until when the address is kept if responses omit it. `None`: it was known before this task
    /// started, and the first response sets the time.
    keep_until: Option<Instant>,
}

struct DnsSource {
    names: Vec<EndpointAddress>,
    name_states: RefCell<BTreeMap<String, NameState>>,
    system: ResolverFiles,
    states: Rc<SourceStates>,
    files_changed: Notify,
}

/// Looks `names` up repeatedly, until the future is dropped.
pub async fn follow(names: Vec<EndpointAddress>, system: ResolverFiles, states: Rc<SourceStates>) {
    let mut files = FileWatch::new(vec![system.hosts.clone(), system.resolv_conf.clone()]);
    let mut hosts: Vec<String> = names.iter().map(|name| name.host.clone()).collect();
    hosts.sort_unstable();
    hosts.dedup();
    let name_states = RefCell::new(known_addresses(&hosts, &states));
    let files_changed = Notify::new();
    let source = Rc::new(DnsSource { names, name_states, system, states, files_changed });
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
        panics::propagate(&mut tasks);
    }
}

/// The addresses of `hosts` in the last answer of the source. A reload that adds a name thus keeps the
/// addresses of the others, even while no name server answers.
fn known_addresses(hosts: &[String], states: &SourceStates) -> BTreeMap<String, NameState> {
    let state_of = |host: &String, answer: &SourceAnswer| {
        let of_host =
            answer.candidates.iter().filter(|c| c.server_name.as_deref() == Some(tls_name(host)));
        let mut ips: Vec<IpAddr> = of_host.filter_map(|c| c.address.host.parse().ok()).collect();
        // An address occurs once for each port of the name.
        ips.sort_unstable();
        ips.dedup();
        let addresses = ips.into_iter().map(|ip| NameAddress { ip, keep_until: None });
        let (v4, v6) = addresses.partition(|address| address.ip.is_ipv4());
        (host.clone(), NameState { v4, v6, ..NameState::default() })
    };
    states.read(|answers, _| {
        let answer = answers.get(&EndpointSource::Dns);
        answer.into_iter().flat_map(|answer| hosts.iter().map(|h| state_of(h, answer))).collect()
    })
}

impl DnsSource {
    async fn follow_name(self: Rc<Self>, host: String) {
        let mut backoff = RETRIES;
        loop {
            // Registered before the lookup, so that a change of the files during it causes another one.
            let mut files_changed = std::pin::pin!(self.files_changed.notified());
            files_changed.as_mut().enable();
            let result = look_up(&host, &self.system).await;
            let usable = |ip| self.is_usable(&host, ip);
            let pause = {
                let mut states = self.name_states.borrow_mut();
                let state = states.entry(host.clone()).or_default();
                apply_result(state, result, &mut backoff, &usable, clock::now())
            };
            self.publish();
            tokio::select! {
                () = sleep(pause.mul_f64(0.9 + fastrand::f64() / 5.0)) => {}
                () = files_changed => {}
            }
        }
    }

    /// Whether `ip`, with a port of `host`, is the address of a usable endpoint.
    fn is_usable(&self, host: &str, ip: IpAddr) -> bool {
        let ports: Vec<u16> =
            self.names.iter().filter(|name| name.host == host).map(|name| name.port).collect();
        let upstream = self.states.upstream();
        upstream.endpoints().iter().any(|endpoint| {
            ports.contains(&endpoint.address.port)
                && endpoint.address.host.parse() == Ok(ip)
                && upstream.serves_at(endpoint)
        })
    }

    /// Publishes the addresses and errors of all names as the answer of this source.
    fn publish(&self) {
        let states = self.name_states.borrow();
        let mut found = DiscoveredEndpoints::default();
        for name in &self.names {
            for ip in states.get(&name.host).into_iter().flat_map(NameState::addresses) {
                match EndpointAddress::parse(&SocketAddr::new(ip, name.port).to_string()) {
                    Ok(address) => {
                        let server_name = Some(name.tls_name().to_owned());
                        found.candidates.push(Candidate { address, server_name });
                    }
                    Err(why) => found.reject(format!("{}: {why}", name.host), 1),
                }
            }
        }
        let is_resolved = |name: &&EndpointAddress| {
            states.get(&name.host).is_some_and(|state| state.addresses().next().is_some())
        };
        let unresolved = self.names.iter().filter(|name| !is_resolved(name));
        let unresolved = unresolved.map(|name| name.tls_name().to_owned()).collect();
        let errors: Vec<_> = states
            .iter()
            .filter_map(|(host, state)| Some(format!("{host}: {}", state.error.as_ref()?)))
            .collect();
        let error = (!errors.is_empty()).then(|| errors.join("; "));
        if !found.candidates.is_empty() || found.rejected_count > 0 {
            self.states.update_partial(EndpointSource::Dns, found, unresolved, error.as_deref());
        } else if let Some(error) = error {
            self.states.fail(EndpointSource::Dns, &error);
        }
    }
}

/// Applies the result of a lookup and returns the pause before the next one. A family (A or AAAA) whose
/// query failed keeps its addresses. All stay if the lookup failed. `usable` says whether the endpoint of an address is
/// usable.
fn apply_result(
    state: &mut NameState,
    result: Result<Found, LookupError>,
    backoff: &mut Backoff,
    usable: &dyn Fn(IpAddr) -> bool,
    now: Instant,
) -> Duration {
    let is_other = |name: &Option<String>| state.name.is_some() && *name != state.name;
    let found = match result {
        Ok(Found { doubt: Some(why), name, .. }) if is_other(&name) => Err(why),
        result => result,
    };
    let found = match found {
        Ok(found) => found,
        Err(why) => {
            state.error = Some(why);
            return backoff.failed();
        }
    };
    let is_other = is_other(&found.name);
    let is_answered = found.v4.is_ok() && found.v6.is_ok();
    let keep_until = now + found.ttl * OMITTED_TTLS;
    let may_stay = |address: &NameAddress| !found.complete && usable(address.ip);
    state.error = None;
    for (family, found) in [(&mut state.v4, found.v4), (&mut state.v6, found.v6)] {
        match found {
            Ok(found) => replace(family, &found, keep_until, now, &may_stay),
            // They are addresses of another name.
            Err(_) if is_other => family.clear(),
            // Many name servers never answer for a family that a name does not have.
            Err(_) if family.is_empty() => {}
            Err(why) => state.error = Some(why),
        }
    }
    state.name = found.name;
    if is_answered {
        backoff.reset();
        return found.ttl;
    }
    found.ttl.min(backoff.failed())
}

/// Replaces the addresses of a family by `found`. An omitted address for which `may_stay` is true is kept
/// until its `keep_until`.
fn replace(
    family: &mut Vec<NameAddress>,
    found: &[IpAddr],
    keep_until: Instant,
    now: Instant,
    may_stay: &dyn Fn(&NameAddress) -> bool,
) {
    let omitted: Vec<NameAddress> = family
        .iter()
        .filter(|address| !found.contains(&address.ip))
        .map(|address| NameAddress {
            keep_until: address.keep_until.or(Some(keep_until)),
            ..*address
        })
        .filter(|address| address.keep_until > Some(now) && may_stay(address))
        .collect();
    let found = found.iter().map(|ip| NameAddress { ip: *ip, keep_until: Some(keep_until) });
    *family = found.chain(omitted).collect();
}

#[cfg(test)]
mod tests;
