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
/// The same while no address is examined.
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
/// Maximum number of addresses that are examined.
const MAX_BALANCERS: usize = 8;

/// What is known of one address.
#[derive(Debug)]
struct Address {
    name: EndpointIdentity,
    /// The address as text.
    label: String,
    known: KnownBackends,
    /// When the next survey is due; `None` at once.
    next_survey: Option<Instant>,
    /// Surveys in a row that have not found what was missing.
    searches: u32,
    /// Surveys in a row whose connections have all reached one apiserver.
    alike: u32,
    /// No connection of the last survey has reached an apiserver.
    is_dark: bool,
}

impl Address {
    fn new(name: EndpointIdentity) -> Self {
        let label = name.address.to_string();
        let known = KnownBackends::default();
        Self { name, label, known, next_survey: None, searches: 0, alike: 0, is_dark: false }
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
    loop {
        let examined = examined(&upstream, &writer);
        for left in addresses.extract_if(.., |address| !examined.contains(&address.name)) {
            writer.join(&left.name);
        }
        for name in examined {
            if addresses.iter().all(|address| address.name != name) {
                addresses.push(Address::new(name));
            }
        }
        upstream.backends.set_examined(addresses.iter().map(|address| &*address.label));
        join_all(addresses.iter_mut().map(|address| step(&upstream, &writer, address))).await;
        sleep(if addresses.is_empty() { IDLE_INTERVAL } else { INTERVAL }).await;
    }
}

/// The addresses that are examined. One whose apiservers are endpoints of their own stays so when others join.
fn examined(upstream: &Upstream, writer: &EndpointSetWriter) -> Vec<EndpointIdentity> {
    let config = upstream.config();
    if !config.used_by.terminate || config.used_by.passthrough {
        return Vec::new();
    }
    let mut addresses = writer.addresses();
    match config.kind {
        EndpointKind::Apiserver => addresses.clear(),
        EndpointKind::Auto if addresses.len() > MAX_ADDRESSES => {
            addresses.retain(|address| !writer.members(address).backends.is_empty());
        }
        EndpointKind::Auto | EndpointKind::Balancer => {}
    }
    addresses.truncate(MAX_BALANCERS);
    addresses
}

/// Makes the changes that are due at one address.
async fn step(upstream: &Arc<Upstream>, writer: &EndpointSetWriter, address: &mut Address) {
    let name = &address.name.clone();
    address.known.expect_several(upstream.config().kind == EndpointKind::Balancer);
    let is_due = address.next_survey.is_none_or(|at| clock::now() >= at);
    // A new address is examined when it serves, so that it serves first.
    let serves = endpoints_of(upstream, name).iter().any(|one| one.state() == EndpointState::Ready);
    let is_split = !writer.members(name).backends.is_empty();
    if is_due && (serves || is_split || address.next_survey.is_some()) {
        let pause = match survey(upstream, address).await {
            Survey::Reached { has_failures } => address.refresh(has_failures),
            Survey::Dark => search_pause(address.searches),
        };
        address.next_survey = Some(clock::now() + pause);
        // The set or the configuration may have changed meanwhile.
        if !examined(upstream, writer).contains(name) {
            return;
        }
    }
    for _ in 0..=MOST {
        let members = members(upstream, writer, name);
        let before = || members.iter().map(|member| member.backend.clone());
        let set_backends = |backends: Vec<Backend>| {
            let is_whole = writer.members(name).is_whole;
            writer.set_members(name, AddressMembers { backends, is_whole });
        };
        match next_change(&address.known, &members, clock::now()) {
            None => {
                address.searches = 0;
                break;
            }
            Some(MemberChange::Survey) => {
                let is_first = address.searches == 0;
                let pause = || search_pause(address.searches);
                let due = clock::now() + if is_first { Duration::ZERO } else { pause() };
                if is_due || is_first {
                    address.searches = address.searches.saturating_add(1);
                }
                address.next_survey = address.next_survey.map(|at| at.min(due));
                break;
            }
            Some(MemberChange::Add(new)) => {
                address.searches = 0;
                set_backends(before().chain([new]).collect());
            }
            Some(MemberChange::Remove(old)) => {
                set_backends(before().filter(|member| *member != old).collect());
            }
        }
    }
    keep_whole(upstream, writer, name);
}

/// Makes the whole address an endpoint while none of its backends serves.
fn keep_whole(upstream: &Upstream, writer: &EndpointSetWriter, name: &EndpointIdentity) {
    let AddressMembers { backends, is_whole } = writer.members(name);
    let keeps = keeps_whole(is_whole, &members(upstream, writer, name), clock::now());
    if keeps != is_whole {
        writer.set_members(name, AddressMembers { backends, is_whole: keeps });
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
fn members(
    upstream: &Upstream,
    writer: &EndpointSetWriter,
    name: &EndpointIdentity,
) -> Vec<Member> {
    let endpoints = endpoints_of(upstream, name);
    let member = |backend: Backend| {
        let endpoint = endpoints.iter().find(|one| one.backend.as_ref() == Some(&backend));
        Member { backend, condition: condition(endpoint, clock::now()) }
    };
    writer.members(name).backends.into_iter().map(member).collect()
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
    Dark,
}

/// Opens connections, and reads which backends they have reached.
async fn survey(upstream: &Arc<Upstream>, address: &mut Address) -> Survey {
    let name = &address.name;
    let Some(endpoint) = endpoints_of(upstream, name).into_iter().next() else {
        return Survey::Dark;
    };
    let Some(tls) = upstream.credentials.tls(CredentialClass::Probe) else { return Survey::Dark };
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
        report_dark(upstream, address, failure.as_ref());
        return Survey::Dark;
    }
    address.known.begin_survey(began);
    for observed in observed {
        address.known.observe(observed, clock::now());
    }
    report(upstream, address);
    Survey::Reached { has_failures: failure.is_some() }
}

/// Reports the first survey in a row that has reached nothing.
fn report_dark(upstream: &Upstream, address: &mut Address, failure: Option<&ConnectFailure>) {
    if mem::replace(&mut address.is_dark, true) {
        return;
    }
    let reason = failure.map_or("", |failure| &failure.reason);
    upstream.backends.set_dark(&address.label);
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
    if mem::take(&mut address.is_dark) {
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
