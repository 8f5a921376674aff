//! Connects to an endpoint: to the best one first, then to others beside it, until one connection is
//! established or all have failed.
//!
//! | event | reaction |
//! |---|---|
//! | an attempt fails | the next candidate is tried at once |
//! | no answer after 250 ms | the next candidate is tried as well; the first connection wins |
//! | no endpoint is ready | the same, with shorter pauses if there are many candidates, so that each is tried |
//! | every candidate has failed | the client is reset at once |
//! | no answer within 900 ms, and no endpoint is ready | the client is reset |
//! | no answer within 900 ms, and an endpoint is ready | a SYN was lost; attempts continue until `connect_timeout` |
//!
//! Linux repeats a lost SYN after 1.02 s. So an endpoint that is the only one in the best state is tried
//! a second time before the others.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::net::process::resource_limits;
use crate::net::sockets::connector::Connector;
use crate::upstream::Upstream;
use crate::upstream::balance;
use crate::upstream::endpoint::{Endpoint, EndpointState, ProbeTrigger};

/// When the next candidate is tried beside one that has not answered.
const RACE_AFTER: Duration = Duration::from_millis(250);
/// How long a client waits while no endpoint is ready: it is reset within a second.
const GIVE_UP_AFTER: Duration = Duration::from_millis(900);
/// While no endpoint is ready, every candidate is tried within this time; the last one has the rest of
/// [`GIVE_UP_AFTER`] to answer.
const TRY_ALL_WITHIN: Duration = Duration::from_millis(800);
/// How often endpoint states are checked once all candidates were tried.
const STATE_CHECK: Duration = Duration::from_millis(50);
/// Most failures that an error lists.
const MAX_REASONS: usize = 5;

/// A connection and its endpoint.
pub type Connected = (TcpStream, Arc<Endpoint>);

/// Connects to the best endpoint of an upstream that accepts a connection.
///
/// # Errors
/// The failures of the last attempts.
pub async fn connect(upstream: &Upstream) -> Result<Connected, String> {
    let start = Instant::now();
    let known: Vec<Candidate> = upstream
        .endpoints()
        .iter()
        .map(|endpoint| Candidate {
            state: endpoint.state(),
            flows: endpoint.flows(),
            slow_start_share: endpoint.slow_start_share(start),
            endpoint: Arc::clone(endpoint),
        })
        .collect();
    let mut candidates = order(known, &mut fastrand::Rng::new()).into_iter();
    let pause_without_ready = RACE_AFTER.min(TRY_ALL_WITHIN / candidates.len().max(1) as u32);
    let give_up_with_ready = start + upstream.config().health.connect_timeout.max(GIVE_UP_AFTER);
    let mut next = start;
    let mut attempts = JoinSet::new();
    let mut reasons = Vec::new();
    loop {
        let now = Instant::now();
        let any_ready = upstream.endpoints().iter().any(|e| e.state() == EndpointState::Ready);
        if now >= next
            && let Some(endpoint) = candidates.next()
        {
            attempts.spawn_local(attempt(upstream.connector(), endpoint));
            next = now + if any_ready { RACE_AFTER } else { pause_without_ready };
            continue;
        }
        if attempts.is_empty() && candidates.len() == 0 {
            break;
        }
        let limit = if any_ready { give_up_with_ready } else { start + GIVE_UP_AFTER };
        if now >= limit {
            reasons.push(format!("no connection within {} ms", (now - start).as_millis()));
            break;
        }
        let wake_at = if candidates.len() > 0 { next } else { now + STATE_CHECK };
        tokio::select! {
            Some(done) = attempts.join_next() => match done {
                Ok(Ok(connected)) => return Ok(connected),
                Ok(Err(why)) => {
                    reasons.push(why);
                    next = now;
                }
                Err(error) => reasons.push(error.to_string()),
            },
            () = sleep_until(wake_at.min(limit)) => {}
        }
    }
    if reasons.is_empty() {
        reasons.push("there is no endpoint".to_owned());
    }
    // The last reason concerns all attempts, so the first ones are dropped.
    reasons.drain(..reasons.len().saturating_sub(MAX_REASONS));
    Err(reasons.join("; "))
}

async fn attempt(connector: Arc<Connector>, endpoint: Arc<Endpoint>) -> Result<Connected, String> {
    let mut why = String::new();
    let mut is_local = false;
    for address in endpoint.socket_addresses() {
        match connector.connect(address).await {
            Ok(stream) => {
                endpoint.metrics.dialled("ok");
                return Ok((stream, endpoint));
            }
            Err(error) => {
                is_local |= resource_limits::is_local_shortage(&error, address);
                why = format!("TCP to {address} failed: {error}");
            }
        }
    }
    endpoint.metrics.dialled(if is_local { "local" } else { "failed" });
    if !is_local {
        // The prober decides whether the endpoint is down.
        endpoint.probe.request(ProbeTrigger::PassiveEvidence);
    }
    Err(why)
}

/// An endpoint to connect to.
#[derive(Debug)]
struct Candidate<T = Arc<Endpoint>> {
    state: EndpointState,
    flows: usize,
    /// Less than 1 during slow start.
    slow_start_share: f64,
    endpoint: T,
}

/// The candidates in the order in which they are tried: by state; first among the best state the one
/// with fewer flows of two random ones. A single candidate of the best state comes twice.
fn order<T: Clone>(mut known: Vec<Candidate<T>>, rng: &mut fastrand::Rng) -> Vec<T> {
    known.retain(|candidate| candidate.state != EndpointState::Leaving);
    rng.shuffle(&mut known);
    known.sort_by_key(|candidate| candidate.state);
    let Some(best) = known.first().map(|candidate| candidate.state) else { return Vec::new() };
    let best_count = known.iter().filter(|candidate| candidate.state == best).count();
    let random = rng.f64();
    let cost = |index: &usize| {
        let candidate = &known[*index];
        balance::cost(candidate.flows, 1.0)
            * balance::slow_start_factor(candidate.slow_start_share, random)
    };
    if let Some(first) = balance::pick(0..best_count, rng, cost) {
        known.swap(0, first);
    }
    let mut order: Vec<T> = known.iter().map(|candidate| candidate.endpoint.clone()).collect();
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
        Candidate { state, flows, slow_start_share: 1.0, endpoint: name }
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
        let known = vec![candidate(Degraded, 0, "degraded"), candidate(Ready, 9, "ready")];
        assert_eq!(order(known, &mut rng), ["ready", "ready", "degraded"]);
        let known = vec![candidate(Ejected, 0, "ejected")];
        assert_eq!(order(known, &mut rng), ["ejected", "ejected"]);
        assert_eq!(order::<&str>(vec![], &mut rng), [""; 0]);
    }

    /// 3,000 connections to three endpoints spread evenly; an endpoint in slow start gets few.
    #[test]
    fn order_spreads_connections_and_respects_slow_start() {
        let mut rng = fastrand::Rng::with_seed(42);
        let mut flows = [0_usize; 3];
        for _ in 0..3000 {
            let known = (0..3)
                .map(|i| Candidate {
                    state: EndpointState::Ready,
                    flows: flows[i],
                    slow_start_share: 1.0,
                    endpoint: i,
                })
                .collect();
            flows[order(known, &mut rng)[0]] += 1;
        }
        assert!(flows.iter().all(|n| (990..=1010).contains(n)), "{flows:?}");
        let mut flows = [500_usize, 500, 0];
        for _ in 0..300 {
            let known = (0..3)
                .map(|i| Candidate {
                    state: EndpointState::Ready,
                    flows: flows[i],
                    slow_start_share: if i == 2 { 0.1 } else { 1.0 },
                    endpoint: i,
                })
                .collect();
            flows[order(known, &mut rng)[0]] += 1;
        }
        assert!((5..60).contains(&flows[2]), "slow start limits new flows: {flows:?}");
    }
}
