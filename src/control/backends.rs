//! Finds the apiservers behind the addresses of an upstream, and makes each an endpoint of its own, as
//! [`jackstay_core::backends`] decides.
//!
//! Flows (L4) cannot see which apiserver they have reached, so an upstream that serves flows is not examined.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use jackstay_config::EndpointKind;
use jackstay_core::backends::{
    Kind, KnownBackends, MAX_ADDRESSES, MOST, Member, MemberChange, MemberCondition, SURVEY,
    next_change,
};
use jackstay_core::backoff::Backoff;
use jackstay_core::discovery::source::EndpointIdentity;
use jackstay_sys::clock;
use tokio::time::sleep;

use super::endpoint_set::{EndpointSetWriter, identity};
use crate::upstream::Upstream;
use crate::upstream::address_backends::BalancerStatus;
use crate::upstream::backends::{observe, token};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::dial::dial_h2;
use crate::upstream::endpoint::{ConnectTimeout, Endpoint, EndpointState};

/// How often the endpoints are looked at.
const INTERVAL: Duration = Duration::from_millis(500);
/// Time limit of one connect of a survey.
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
/// The pauses between surveys while a backend is missing.
const SEARCH: Backoff =
    Backoff::new(Duration::from_secs(1), Duration::from_secs(300)).with_factors(0.8, 1.2);
/// The mean pause between surveys otherwise.
const REFRESH: Duration = Duration::from_secs(600);
/// Number of addresses that are examined with `kind: balancer`.
const MAX_BALANCERS: usize = 8;

/// What is known of one address.
#[derive(Debug, Default)]
struct Address {
    known: KnownBackends,
    /// When the next survey is due; `None` at once.
    next_survey: Option<Instant>,
    /// Surveys in a row that have not found what was missing.
    searches: u32,
}

/// Examines the addresses of an upstream until the future is dropped.
pub async fn run(upstream: Arc<Upstream>, writer: Rc<EndpointSetWriter>) {
    let mut addresses: HashMap<EndpointIdentity, Address> = HashMap::new();
    loop {
        let examined = examined(&upstream, &writer);
        addresses.retain(|address, _| examined.contains(address));
        for address in writer.addresses() {
            if !examined.contains(&address) && !writer.members(&address).is_empty() {
                writer.set_members(&address, Vec::new());
            }
        }
        upstream
            .backends
            .retain(|label| examined.iter().any(|one| one.address.to_string() == label));
        for name in examined {
            let address = addresses.entry(name.clone()).or_default();
            step(&upstream, &writer, &name, address).await;
        }
        sleep(INTERVAL).await;
    }
}

/// The addresses that are examined.
fn examined(upstream: &Upstream, writer: &EndpointSetWriter) -> Vec<EndpointIdentity> {
    let config = upstream.config();
    let addresses = writer.addresses();
    let most = match config.kind {
        EndpointKind::Apiserver => 0,
        EndpointKind::Auto => MAX_ADDRESSES,
        EndpointKind::Balancer => MAX_BALANCERS,
    };
    let is_for_requests = config.used_by.terminate && !config.used_by.passthrough;
    if is_for_requests && addresses.len() <= most { addresses } else { Vec::new() }
}

/// Makes the changes that are due at one address.
async fn step(
    upstream: &Arc<Upstream>,
    writer: &EndpointSetWriter,
    name: &EndpointIdentity,
    address: &mut Address,
) {
    let is_due = address.next_survey.is_none_or(|at| clock::now() >= at);
    // A new address is examined when it serves, so that it serves first.
    let serves = endpoints_of(upstream, name).iter().any(|one| one.state() == EndpointState::Ready);
    let is_split = !writer.members(name).is_empty();
    if is_due && (serves || is_split || address.next_survey.is_some()) {
        let has_reached_any = survey(upstream, name, address).await;
        let pause = REFRESH.mul_f64(0.8 + 0.4 * fastrand::f64());
        address.next_survey = Some(
            clock::now() + if has_reached_any { pause } else { search_pause(address.searches) },
        );
        // The set or the configuration may have changed meanwhile.
        if !examined(upstream, writer).contains(name) {
            return;
        }
    }
    for _ in 0..=MOST {
        let members = members(upstream, writer, name);
        let before = || members.iter().map(|member| member.backend.clone());
        match next_change(&address.known, &members, clock::now()) {
            None => {
                address.searches = 0;
                break;
            }
            Some(MemberChange::Survey) => {
                // While none serves, all clients wait for one.
                let serve = members.iter().any(Member::serves);
                let due = clock::now() + search_pause(if serve { address.searches } else { 0 });
                if is_due {
                    address.searches = address.searches.saturating_add(1);
                }
                address.next_survey = address.next_survey.map(|at| at.min(due));
                break;
            }
            Some(MemberChange::Add(new)) => {
                address.searches = 0;
                writer.set_members(name, before().chain([new]).collect());
            }
            Some(MemberChange::Remove(old)) => {
                writer.set_members(name, before().filter(|member| *member != old).collect());
            }
        }
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
    let member = |backend: jackstay_core::backends::Backend| {
        let endpoint = endpoints.iter().find(|one| one.backend.as_ref() == Some(&backend));
        Member { backend, condition: condition(endpoint, clock::now()) }
    };
    writer.members(name).into_iter().map(member).collect()
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

/// Opens connections, and reads which backends they have reached. Returns whether they have reached any.
async fn survey(upstream: &Arc<Upstream>, name: &EndpointIdentity, address: &mut Address) -> bool {
    let Some(endpoint) = endpoints_of(upstream, name).into_iter().next() else { return false };
    let Some(tls) = upstream.credentials.tls(CredentialClass::Probe) else { return false };
    let credential = token(upstream, CredentialClass::Probe, &tls);
    let (began, connector) = (clock::now(), upstream.connector());
    let one = || async {
        let limit = ConnectTimeout::fixed(CONNECT_LIMIT);
        let mut dialed = dial_h2(&connector, &endpoint, &tls, limit, 1).await.ok()?;
        Some(observe(&mut dialed, &endpoint, &credential).await)
    };
    let observed: Vec<_> =
        join_all((0..SURVEY).map(|_| one())).await.into_iter().flatten().collect();
    if observed.is_empty() {
        return false;
    }
    address.known.begin_survey(began);
    for observed in observed {
        address.known.observe(observed, clock::now());
    }
    report(upstream, name, &address.known);
    true
}

fn report(upstream: &Upstream, name: &EndpointIdentity, known: &KnownBackends) {
    let (kind, label) = (known.kind(), name.address.to_string());
    let backends: Vec<_> = known.present().into_iter().map(|one| one.name.into_string()).collect();
    let apiservers = backends.join(", ");
    let is_new = upstream.backends.set(BalancerStatus::new(label.clone(), kind, backends));
    let upstream = &*upstream.name;
    match kind {
        Kind::Several(_) if is_new => {
            tracing::info!(
                upstream,
                endpoint = label,
                apiservers,
                "endpoint leads to several apiservers"
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
