//! Finds the apiservers behind the addresses of an upstream, and makes each an endpoint of its own, as
//! [`jackstay_core::backends`] decides.
//!
//! Flows (L4) cannot see which apiserver they have reached, so an upstream that serves flows is not examined.

use std::mem;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use jackstay_config::EndpointKind;
use jackstay_core::backends::{
    Backend, Kind, KnownBackends, MAX_ADDRESSES, MOST, Member, MemberChange, MemberCondition,
    ObservedBackend, SURVEY, keeps_whole, next_change,
};
use jackstay_core::backoff::Backoff;
use jackstay_core::discovery::source::EndpointIdentity;
use jackstay_sys::clock;
use tokio::time::sleep;

use super::endpoint_set::{AddressMembers, EndpointSetWriter, identity};
use crate::upstream::Upstream;
use crate::upstream::address_backends::BalancerStatus;
use crate::upstream::backends::{observe, question_credential};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::dial::dial_h2;
use crate::upstream::endpoint::{ConnectFailure, ConnectTimeout, Endpoint, EndpointState};

/// How often the endpoints are looked at.
const INTERVAL: Duration = Duration::from_millis(250);
/// The same while no address is examined, or each leads to one apiserver.
const IDLE_INTERVAL: Duration = Duration::from_secs(2);
/// Time limit of one connect of a survey.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// The pauses between surveys while a backend is missing.
const SEARCH: Backoff =
    Backoff::new(Duration::from_secs(1), Duration::from_secs(300)).with_factors(0.8, 1.2);
/// The mean pause between surveys otherwise.
const REFRESH: Duration = Duration::from_secs(600);
/// The pauses at an address at which all connections have reached one apiserver, as at most that are no balancer. They grow:
/// others may still be starting.
const RARE_REFRESH: Backoff =
    Backoff::new(Duration::from_secs(60), Duration::from_secs(3600)).with_factors(0.8, 1.2);
/// How long an address counts that has left the set.
const RECENT: Duration = Duration::from_secs(3600);
/// How long after the start an address is examined at once.
const START: Duration = Duration::from_secs(10);
/// The longest pause before an address is examined that joins later.
const JOIN_PAUSE: Duration = Duration::from_secs(120);
/// Maximum number of addresses that are examined.
const MAX_BALANCERS: usize = 8;

/// What is known of one address.
#[derive(Debug)]
struct Address {
    name: EndpointIdentity,
    /// The address as text.
    label: String,
    known: KnownBackends,
    /// When the next survey is due.
    next_survey: Instant,
    /// Surveys in a row that have not found what was missing.
    searches: u32,
    /// Surveys in a row whose connections have all reached one apiserver.
    alike: u32,
    /// Surveys in a row of which no connection has reached an apiserver.
    unreachable: u32,
}

impl Address {
    /// An address that is first examined after `pause`, and when it serves.
    fn new(name: EndpointIdentity, pause: Duration) -> Self {
        Self {
            label: name.address.to_string(),
            name,
            known: KnownBackends::default(),
            next_survey: clock::now() + pause,
            searches: 0,
            alike: 0,
            unreachable: 0,
        }
    }

    /// A backend is missing: plans the next survey. The first one is due at once. `is_due`: one has just been made.
    fn search(&mut self, is_due: bool) {
        let is_first = self.searches == 0;
        let pause = if is_first { Duration::ZERO } else { search_pause(self.searches) };
        self.next_survey = self.next_survey.min(clock::now() + pause);
        if is_due || is_first {
            self.searches = self.searches.saturating_add(1);
        }
    }

    /// The pause after a survey that has reached apiservers, and others perhaps not.
    fn refresh(&mut self, has_failures: bool) -> Duration {
        if self.known.kind() != Kind::One {
            self.alike = 0;
            return REFRESH.mul_f64(0.8 + 0.4 * fastrand::f64());
        }
        let backoff = if has_failures { &SEARCH } else { &RARE_REFRESH };
        self.alike = self.alike.saturating_add(1);
        backoff.after(self.alike).random_pause(&mut fastrand::Rng::new())
    }
}

/// Examines the addresses of an upstream until the future is dropped.
pub async fn run(upstream: Arc<Upstream>, writer: Rc<EndpointSetWriter>) {
    let mut addresses: Vec<Address> = Vec::new();
    let mut recent = RecentAddresses { seen: Vec::new(), started: clock::now() };
    loop {
        let examined = recent.examined(&upstream, &writer);
        let is_changed = !addresses.iter().map(|address| &address.name).eq(&examined);
        for left in addresses.extract_if(.., |address| !examined.contains(&address.name)) {
            writer.join(&left.name);
        }
        for name in examined {
            if addresses.iter().all(|address| address.name != name) {
                addresses.push(Address::new(name, recent.pause(&upstream)));
            }
        }
        if is_changed {
            upstream.set_examined(addresses.iter().map(|address| &*address.label));
        }
        let steps = addresses.iter_mut().map(|address| step(&upstream, &writer, &recent, address));
        join_all(steps).await;
        // A split address of which one apiserver is left is looked at as often as before.
        let leads_to_one = |address: &Address| {
            address.known.kind() == Kind::One && writer.members(&address.name).backends.is_empty()
        };
        let is_idle = addresses.iter().all(leads_to_one);
        sleep(if is_idle { IDLE_INTERVAL } else { INTERVAL }).await;
    }
}

/// The addresses of the last hour. When one of three apiservers leaves for its upgrade, the other two are not taken for load
/// balancers.
struct RecentAddresses {
    seen: Vec<(EndpointIdentity, Instant)>,
    started: Instant,
}

impl RecentAddresses {
    /// The addresses that are examined. One whose apiservers are endpoints of their own stays so when others join.
    fn examined(
        &mut self,
        upstream: &Upstream,
        writer: &EndpointSetWriter,
    ) -> Vec<EndpointIdentity> {
        let now = clock::now();
        let addresses = writer.addresses();
        self.seen.retain(|(address, at)| now < *at + RECENT && !addresses.contains(address));
        self.seen.extend(addresses.into_iter().map(|address| (address, now)));
        self.of_kind(upstream, writer)
    }

    fn of_kind(&self, upstream: &Upstream, writer: &EndpointSetWriter) -> Vec<EndpointIdentity> {
        let config = upstream.config();
        if !config.used_by.terminate || config.used_by.passthrough {
            return Vec::new();
        }
        let mut addresses = writer.addresses();
        match config.kind {
            EndpointKind::Apiserver => addresses.clear(),
            EndpointKind::Auto if self.seen.len() > MAX_ADDRESSES => {
                addresses.retain(|address| !writer.members(address).backends.is_empty());
            }
            EndpointKind::Auto | EndpointKind::Balancer => {}
        }
        addresses.truncate(MAX_BALANCERS);
        addresses
    }

    /// The pause before the first survey of an address. All nodes see one that joins later at once, so it is random then.
    fn pause(&self, upstream: &Upstream) -> Duration {
        let is_start = clock::elapsed(self.started) < START;
        if is_start || upstream.config().kind == EndpointKind::Balancer {
            return Duration::ZERO;
        }
        JOIN_PAUSE.mul_f64(fastrand::f64())
    }
}

/// Makes the changes that are due at one address.
async fn step(
    upstream: &Arc<Upstream>,
    writer: &EndpointSetWriter,
    recent: &RecentAddresses,
    address: &mut Address,
) {
    let name = &address.name.clone();
    address.known.expect_several(upstream.config().kind == EndpointKind::Balancer);
    let is_due = clock::now() >= address.next_survey;
    // One address is examined when it serves, so that it serves first, and is not asked more often while it fails.
    let serves = endpoints_of(upstream, name).iter().any(|one| one.state() == EndpointState::Ready);
    let is_split = !writer.members(name).backends.is_empty();
    if is_due && (serves || is_split) {
        let pause = match survey(upstream, address).await {
            Survey::Reached { has_failures } => address.refresh(has_failures),
            Survey::Unreachable => search_pause(address.unreachable),
        };
        address.next_survey = clock::now() + pause;
        // The set or the configuration may have changed meanwhile.
        if !recent.of_kind(upstream, writer).contains(name) {
            return;
        }
    }
    let before = writer.members(name);
    let mut backends = before.backends.clone();
    for _ in 0..=MOST {
        match next_change(&address.known, &members(upstream, name, &backends), clock::now()) {
            None => {
                address.searches = 0;
                break;
            }
            Some(MemberChange::Survey) => {
                address.search(is_due);
                break;
            }
            Some(MemberChange::Add(new)) => {
                address.searches = 0;
                backends.push(new);
            }
            Some(MemberChange::Remove(old)) => backends.retain(|backend| *backend != old),
        }
    }
    let members = members(upstream, name, &backends);
    let is_whole = keeps_whole(before.is_whole, &members, clock::now());
    let after = AddressMembers { backends, is_whole };
    if after != before {
        writer.set_members(name, after);
    }
}

/// The pause after this number of surveys in a row that have not found what was missing.
fn search_pause(searches: u32) -> Duration {
    SEARCH.after(searches).random_pause(&mut fastrand::Rng::new())
}

/// The endpoints of an address.
fn endpoints_of(upstream: &Upstream, name: &EndpointIdentity) -> Vec<Arc<Endpoint>> {
    upstream.endpoints().iter().filter(|one| identity(one) == *name).cloned().collect()
}

/// The backends that are endpoints.
fn members(upstream: &Upstream, name: &EndpointIdentity, backends: &[Backend]) -> Vec<Member> {
    let endpoints = endpoints_of(upstream, name);
    let member = |backend: &Backend| {
        let endpoint = endpoints.iter().find(|one| one.backend.as_ref() == Some(backend));
        Member { backend: backend.clone(), condition: condition(endpoint, clock::now()) }
    };
    backends.iter().map(member).collect()
}

/// Whether an endpoint serves.
fn condition(endpoint: Option<&Arc<Endpoint>>, now: Instant) -> MemberCondition {
    let Some(endpoint) = endpoint else { return MemberCondition::Fails(now) };
    let served = endpoint.ready_for(now).map(|time| now.checked_sub(time).unwrap_or(now));
    match (served, endpoint.failing_since()) {
        (Some(since), None) => MemberCondition::Serves(since),
        (None, None) => MemberCondition::Serves(now),
        (_, Some(since)) => MemberCondition::Fails(since),
    }
}

/// What the connections of a survey have reached.
enum Survey {
    /// At least one has reached an apiserver.
    Reached { has_failures: bool },
    /// None has.
    Unreachable,
}

/// Opens connections, and reads which backends they have reached.
async fn survey(upstream: &Arc<Upstream>, address: &mut Address) -> Survey {
    let name = &address.name;
    let Some(endpoint) = endpoints_of(upstream, name).into_iter().next() else {
        return Survey::Unreachable;
    };
    let Some(tls) = upstream.credentials.tls(CredentialClass::Probe) else {
        return Survey::Unreachable;
    };
    let credential = question_credential(upstream, CredentialClass::Probe, &tls);
    let (began, connector) = (clock::now(), upstream.connector());
    let one = || async {
        let limit = ConnectTimeout::fixed(CONNECT_LIMIT);
        let mut dialed = dial_h2(&connector, &endpoint, &tls, limit, 1).await?;
        Ok(observe(&mut dialed, &endpoint, &credential).await)
    };
    let results: Vec<Result<ObservedBackend, ConnectFailure>> =
        join_all((0..SURVEY).map(|_| one())).await;
    let mut failure = None;
    let reached = |result: Result<_, _>| result.map_err(|error| failure = Some(error)).ok();
    let observed: Vec<_> = results.into_iter().filter_map(reached).collect();
    if observed.is_empty() {
        report_unreachable(upstream, address, failure.as_ref());
        return Survey::Unreachable;
    }
    address.known.begin_survey(began);
    for observed in observed {
        address.known.observe(observed, clock::now());
    }
    report(upstream, address);
    Survey::Reached { has_failures: failure.is_some() }
}

/// Reports the first survey in a row that has reached nothing.
fn report_unreachable(
    upstream: &Upstream,
    address: &mut Address,
    failure: Option<&ConnectFailure>,
) {
    address.unreachable = address.unreachable.saturating_add(1);
    if address.unreachable > 1 {
        return;
    }
    let reason = failure.map_or("", |failure| &failure.reason);
    upstream.backends.set_unreachable(&address.label);
    tracing::warn!(
        upstream = &*upstream.name,
        endpoint = address.label,
        reason,
        "no connection to the endpoint reaches an apiserver; it is tried again until one does"
    );
}

fn report(upstream: &Upstream, address: &mut Address) {
    let (kind, label) = (address.known.kind(), &*address.label);
    let recognised = address.known.present().into_iter().filter(|one| !one.is_indistinct());
    let backends: Vec<_> = recognised.map(|one| one.name.into_string()).collect();
    let apiservers = backends.join(", ");
    let is_new = upstream.backends.set(BalancerStatus::new(label.to_owned(), kind, backends));
    let upstream = &*upstream.name;
    if mem::take(&mut address.unreachable) > 0 {
        tracing::info!(upstream, endpoint = label, "connections to the endpoint reach apiservers");
    }
    match kind {
        Kind::Several(_) if is_new => {
            tracing::info!(
                upstream,
                endpoint = label,
                apiservers,
                "endpoint leads to several apiservers"
            );
        }
        Kind::Indistinct if is_new => {
            tracing::info!(
                upstream,
                endpoint = label,
                "all connections to the endpoint show the same certificate and address; each is judged by its own /readyz"
            );
        }
        Kind::Unreliable if is_new => {
            tracing::warn!(
                upstream,
                endpoint = label,
                "each connection to the endpoint shows another certificate; its apiservers are not told apart"
            );
        }
        _ => {}
    }
}
