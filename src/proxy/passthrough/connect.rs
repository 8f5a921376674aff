//! Connects a client to an endpoint. The best endpoint is tried first; others are tried as well, until one
//! connection is established or every attempt has failed.
//!
//! | event | reaction |
//! |---|---|
//! | an attempt fails | the next candidate is tried at once |
//! | no connection after 250 ms | the next candidate is tried as well; the first connection wins |
//! | no endpoint is ready | the same, with shorter pauses if there are many candidates, so that each is tried |
//! | every candidate has failed | the client is reset at once |
//! | no connection within 900 ms, and no endpoint is ready | the client is reset |
//! | no connection within 900 ms, and an endpoint is ready | a SYN may have been lost: the attempts continue until `connect_timeout` |
//!
//! Linux repeats a lost SYN after 1.02 s. So an endpoint that is the only one in the best state is tried
//! a second time before the others.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use jackstay_core::balance;
use jackstay_sys::clock;
use jackstay_sys::process::resource_limits;
use jackstay_sys::sockets::connector::Connector;
use tokio::net::TcpStream;
use tokio::time::sleep_until;

use crate::upstream::Upstream;
use crate::upstream::connect_race;
use crate::upstream::endpoint::{Endpoint, EndpointState, ProbeTrigger};

/// Pause before the next candidate is tried as well.
const RACE_AFTER: Duration = Duration::from_millis(250);
/// Time limit while no endpoint is ready. Clients are then reset within a second.
const GIVE_UP_AFTER: Duration = Duration::from_millis(900);
/// While no endpoint is ready, every candidate is tried within this time; the last one has the rest of
/// [`GIVE_UP_AFTER`] to answer.
const TRY_ALL_WITHIN: Duration = Duration::from_millis(800);
/// Interval of the checks whether an endpoint is ready.
const STATE_CHECK: Duration = Duration::from_millis(50);

/// A connection and its endpoint.
pub type Connected = (TcpStream, Arc<Endpoint>);

/// Why there is no connection to an upstream: the failures of all attempts, of which the last ones are shown.
#[derive(Debug, thiserror::Error)]
#[error("{}", connect_race::joined(.0))]
pub struct Unreachable(Vec<AttemptFailure>);

/// Why one attempt failed, or all of them ended.
#[derive(Debug)]
enum AttemptFailure {
    /// The endpoint has no address.
    NoAddress,
    /// The last address of the endpoint cannot be connected to.
    Tcp(SocketAddr, io::Error),
    /// The time is over: no attempt succeeded within this.
    TooLate(Duration),
}

impl fmt::Display for AttemptFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAddress => Ok(()),
            Self::Tcp(address, error) => write!(f, "TCP to {address} failed: {error}"),
            Self::TooLate(waited) => write!(f, "no connection within {} ms", waited.as_millis()),
        }
    }
}

/// Connects to an endpoint of an upstream.
///
/// # Errors
/// Every attempt failed, or the time is over.
pub async fn connect(upstream: &Upstream) -> Result<Connected, Unreachable> {
    let start = clock::now();
    let candidates: Vec<Candidate> = upstream
        .endpoints()
        .iter()
        .map(|endpoint| Candidate {
            rank: (endpoint.state(), endpoint.is_fallback()),
            flows: endpoint.flows(),
            slow_start_share: endpoint.slow_start_share(start),
            endpoint: Arc::clone(endpoint),
        })
        .collect();
    let mut candidates = order(candidates, &mut fastrand::Rng::new()).into_iter();
    let pause_without_ready = RACE_AFTER.min(TRY_ALL_WITHIN / candidates.len().max(1) as u32);
    let any_ready = || upstream.endpoints().iter().any(|e| takes_flows(e.state()));
    let pause = || if any_ready() { RACE_AFTER } else { pause_without_ready };
    let next = |_: &[AttemptFailure]| Some(attempt(upstream.connector(), candidates.next()?));
    let give_up_with_ready = start + upstream.config().health.connect_timeout.max(GIVE_UP_AFTER);
    let too_late = async {
        loop {
            let limit = if any_ready() { give_up_with_ready } else { start + GIVE_UP_AFTER };
            if clock::now() >= limit {
                return;
            }
            sleep_until(limit.min(clock::now() + STATE_CHECK).into()).await;
        }
    };
    let mut failures = Vec::new();
    tokio::select! {
        biased;
        connected = connect_race::race(next, pause, &mut failures) => {
            if let Some(connected) = connected {
                return Ok(connected);
            }
        }
        () = too_late => {
            failures.push(AttemptFailure::TooLate(clock::elapsed(start)));
        }
    }
    Err(Unreachable(failures))
}

/// Whether an endpoint in this state is expected to accept connections. An unverified one answers.
fn takes_flows(state: EndpointState) -> bool {
    matches!(state, EndpointState::Ready | EndpointState::Unverified)
}

async fn attempt(
    connector: Arc<Connector>,
    endpoint: Arc<Endpoint>,
) -> Result<Connected, AttemptFailure> {
    let mut failure = AttemptFailure::NoAddress;
    let mut is_local = false;
    for address in endpoint.socket_addresses() {
        match connector.connect_by_kernel(address).await {
            Ok(stream) => {
                endpoint.metrics.dialled("ok");
                return Ok((stream, endpoint));
            }
            Err(error) => {
                is_local |= resource_limits::is_local_shortage(&error, address);
                failure = AttemptFailure::Tcp(address, error);
            }
        }
    }
    endpoint.metrics.dialled(if is_local { "local" } else { "failed" });
    if !is_local {
        endpoint.flow_evidence.refused();
        // The prober decides whether the endpoint is down.
        endpoint.probe.request(ProbeTrigger::PassiveEvidence);
    }
    Err(failure)
}

/// An endpoint to connect to.
#[derive(Debug)]
struct Candidate<T = Arc<Endpoint>> {
    /// Its state, and whether it is a fallback.
    rank: (EndpointState, bool),
    flows: usize,
    /// Less than 1 during slow start.
    slow_start_share: f64,
    endpoint: T,
}

/// The order in which the candidates are tried: by state, fallbacks last, and otherwise random. The first of the best
/// rank is the one with fewer flows of two random ones (power of two choices). If only one candidate has the best rank,
/// it comes twice.
fn order<T: Clone>(mut candidates: Vec<Candidate<T>>, rng: &mut fastrand::Rng) -> Vec<T> {
    candidates.retain(|candidate| candidate.rank.0 != EndpointState::Leaving);
    rng.shuffle(&mut candidates);
    candidates.sort_by_key(|candidate| candidate.rank);
    let Some(best) = candidates.first().map(|candidate| candidate.rank) else {
        return Vec::new();
    };
    let best_count = candidates.iter().filter(|candidate| candidate.rank == best).count();
    let cost = |index: &usize| balance::cost(candidates[*index].flows, 1.0);
    let share = |index: &usize| candidates[*index].slow_start_share;
    if let Some(first) = balance::pick_by_share(0..best_count, rng, cost, share) {
        candidates.swap(0, first);
    }
    let mut order: Vec<T> = candidates.iter().map(|candidate| candidate.endpoint.clone()).collect();
    if best_count == 1 {
        order.insert(1, order[0].clone());
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(
        state: EndpointState,
        flows: usize,
        name: &'static str,
    ) -> Candidate<&'static str> {
        Candidate { rank: (state, false), flows, slow_start_share: 1.0, endpoint: name }
    }

    #[test]
    fn order_tries_fallbacks_after_others_of_the_same_state() {
        use EndpointState::{Degraded, Ready};
        let fallback =
            |state, flows, name| Candidate { rank: (state, true), ..candidate(state, flows, name) };
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let candidates = vec![
                candidate(Degraded, 0, "degraded"),
                fallback(Ready, 0, "free fallback"),
                candidate(Ready, 9, "local"),
            ];
            let order = order(candidates, &mut rng);
            assert_eq!(order, ["local", "local", "free fallback", "degraded"]);
        }
    }

    #[test]
    fn order_sorts_by_state_then_by_load() {
        use EndpointState::{Degraded, Ejected, Leaving, Ready};
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..200 {
            let order = order(
                vec![
                    candidate(Ejected, 0, "ejected"),
                    candidate(Ready, 7, "busy"),
                    candidate(Leaving, 0, "leaving"),
                    candidate(Degraded, 0, "degraded"),
                    candidate(Ready, 2, "free"),
                ],
                &mut rng,
            );
            assert_eq!(order, ["free", "busy", "degraded", "ejected"]);
        }
    }

    #[test]
    fn order_repeats_the_only_candidate_of_the_best_state() {
        use EndpointState::{Degraded, Ejected, Ready};
        let mut rng = fastrand::Rng::with_seed(1);
        let candidates = vec![candidate(Degraded, 0, "degraded"), candidate(Ready, 9, "ready")];
        assert_eq!(order(candidates, &mut rng), ["ready", "ready", "degraded"]);
        let candidates = vec![candidate(Ejected, 0, "ejected")];
        assert_eq!(order(candidates, &mut rng), ["ejected", "ejected"]);
        assert_eq!(order::<&str>(vec![], &mut rng), [""; 0]);
    }

    #[test]
    fn order_spreads_flows_and_limits_those_of_an_endpoint_in_slow_start() {
        let mut rng = fastrand::Rng::with_seed(42);
        let mut spread = |mut flows: [usize; 3], new_flows, third_share| {
            for _ in 0..new_flows {
                let candidates = (0..3)
                    .map(|i| Candidate {
                        rank: (EndpointState::Ready, false),
                        flows: flows[i],
                        slow_start_share: if i == 2 { third_share } else { 1.0 },
                        endpoint: i,
                    })
                    .collect();
                flows[order(candidates, &mut rng)[0]] += 1;
            }
            flows
        };
        let flows = spread([0, 0, 0], 3000, 1.0);
        assert!(flows.iter().all(|n| (990..=1010).contains(n)), "{flows:?}");
        let flows = spread([500, 500, 0], 300, 0.1);
        assert!((5..60).contains(&flows[2]), "{flows:?}");
    }
}
