//! Finds an endpoint that takes a connection: the best one first, the next one raced after a
//! moment, until one is up or all have failed.
//!
//! | what happens | what is done |
//! |---|---|
//! | an attempt fails | the next candidate at once |
//! | no answer after 250 ms | the next candidate as well; the first that is up wins |
//! | none is known to be well | the same, sooner if they are many: each is tried before the client is told |
//! | every candidate has failed | the client is told at once |
//! | no answer within 900 ms and no endpoint that is known to be well | the client is told |
//! | the same, but one is known to be well | it was a lost SYN: up to `connect_timeout` |
//!
//! One lost SYN costs 1.02 s on Linux, so an endpoint that is the only good one is tried a second
//! time before one that is not well.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::net::process::resource_limits;
use crate::net::sockets::connector::Connector;
use crate::upstream::Upstream;
use crate::upstream::balance;
use crate::upstream::endpoint::{Endpoint, EndpointState};

/// When the next candidate is tried beside one that has not answered.
const RACE_AFTER: Duration = Duration::from_millis(250);
/// How long a client waits while nothing is known to be well. The bound is a second.
const GIVE_UP_AFTER: Duration = Duration::from_millis(900);
/// In which time every candidate has been tried then, so that the last one has a moment to answer.
const ALL_WITHIN: Duration = Duration::from_millis(800);
/// How often it is looked whether anybody is still known to be well, once all were tried.
const LOOK: Duration = Duration::from_millis(50);
/// Failures that a refusal names.
const REASONS: usize = 5;

/// A connection, and where it leads.
pub type Connected = (TcpStream, Arc<Endpoint>);

/// Connects to the best endpoint of an upstream that takes a connection.
///
/// # Errors
/// Why there is none, after every candidate was tried.
pub async fn connect(upstream: &Upstream) -> Result<Connected, String> {
    let start = Instant::now();
    let known: Vec<Candidate> = upstream
        .endpoints()
        .iter()
        .map(|endpoint| Candidate {
            state: endpoint.state(),
            flows: endpoint.flows(),
            share: endpoint.slow_start_share(start),
            endpoint: Arc::clone(endpoint),
        })
        .collect();
    let mut candidates = order(known, &mut fastrand::Rng::new()).into_iter();
    let hurried = RACE_AFTER.min(ALL_WITHIN / candidates.len().max(1) as u32);
    let patience = start + upstream.config().health.connect_timeout.max(GIVE_UP_AFTER);
    let mut next = start;
    let mut attempts = JoinSet::new();
    let mut reasons = Vec::new();
    loop {
        let now = Instant::now();
        let well = upstream.endpoints().iter().any(|e| e.state() == EndpointState::Ready);
        if now >= next
            && let Some(endpoint) = candidates.next()
        {
            attempts.spawn_local(attempt(upstream.outgoing(), endpoint));
            next = now + if well { RACE_AFTER } else { hurried };
            continue;
        }
        if attempts.is_empty() && candidates.len() == 0 {
            break;
        }
        let limit = if well { patience } else { start + GIVE_UP_AFTER };
        if now >= limit {
            reasons.push(format!("no connection within {} ms", (now - start).as_millis()));
            break;
        }
        let look = if candidates.len() > 0 { next } else { now + LOOK };
        tokio::select! {
            Some(done) = attempts.join_next() => match done {
                Ok(Ok(connected)) => return Ok(connected),
                Ok(Err(why)) => {
                    reasons.push(why);
                    next = now;
                }
                Err(error) => reasons.push(error.to_string()),
            },
            () = sleep_until(look.min(limit)) => {}
        }
    }
    if reasons.is_empty() {
        reasons.push("there is no endpoint".to_owned());
    }
    // The last one is about all of them.
    reasons.drain(..reasons.len().saturating_sub(REASONS));
    Err(reasons.join("; "))
}

async fn attempt(outgoing: Arc<Connector>, endpoint: Arc<Endpoint>) -> Result<Connected, String> {
    let mut why = String::new();
    let mut ours = false;
    for address in endpoint.socket_addresses() {
        match outgoing.connect(address).await {
            Ok(stream) => {
                endpoint.metrics.dialled("ok");
                return Ok((stream, endpoint));
            }
            Err(error) => {
                ours |= resource_limits::is_local_shortage(&error, address);
                why = format!("TCP to {address} failed: {error}");
            }
        }
    }
    endpoint.metrics.dialled(if ours { "local" } else { "failed" });
    if !ours {
        // Its prober looks at once whether that was all of it.
        endpoint.request_probe();
    }
    Err(why)
}

/// What is known of an endpoint when a connection is to be placed.
#[derive(Debug)]
struct Candidate<T = Arc<Endpoint>> {
    state: EndpointState,
    flows: usize,
    /// Less than 1 for a while after it has recovered.
    share: f64,
    endpoint: T,
}

/// The candidates in the order in which they are tried: by state, and within the best state first
/// the one with fewer connections of two that are drawn. An only good one comes twice.
fn order<T: Clone>(mut known: Vec<Candidate<T>>, rng: &mut fastrand::Rng) -> Vec<T> {
    known.retain(|candidate| candidate.state != EndpointState::Leaving);
    rng.shuffle(&mut known);
    known.sort_by_key(|candidate| candidate.state);
    let Some(best) = known.first().map(|candidate| candidate.state) else { return Vec::new() };
    let good = known.iter().filter(|candidate| candidate.state == best).count();
    let lot = rng.f64();
    let cost = |index: &usize| {
        let candidate = &known[*index];
        balance::cost(candidate.flows, 1.0) * balance::handicap(candidate.share, lot)
    };
    if let Some(first) = balance::pick(0..good, rng, cost) {
        known.swap(0, first);
    }
    let mut order: Vec<T> = known.iter().map(|candidate| candidate.endpoint.clone()).collect();
    if good == 1 {
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
        Candidate { state, flows, share: 1.0, endpoint: name }
    }

    #[test]
    fn by_state_and_then_by_load() {
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
    fn an_only_good_one_is_tried_twice_before_a_bad_one() {
        use EndpointState::{Degraded, Ejected, Ready};
        let mut rng = fastrand::Rng::with_seed(1);
        let known = vec![candidate(Degraded, 0, "degraded"), candidate(Ready, 9, "ready")];
        assert_eq!(order(known, &mut rng), ["ready", "ready", "degraded"]);
        let known = vec![candidate(Ejected, 0, "ejected")];
        assert_eq!(order(known, &mut rng), ["ejected", "ejected"]);
        assert_eq!(order::<&str>(vec![], &mut rng), [""; 0]);
    }

    /// 3,000 connections on three servers: even, and one that recovers takes its share slowly.
    #[test]
    fn simulated_connections_spread() {
        let mut rng = fastrand::Rng::with_seed(42);
        let mut flows = [0_usize; 3];
        for _ in 0..3000 {
            let known = (0..3)
                .map(|i| Candidate {
                    state: EndpointState::Ready,
                    flows: flows[i],
                    share: 1.0,
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
                    share: if i == 2 { 0.1 } else { 1.0 },
                    endpoint: i,
                })
                .collect();
            flows[order(known, &mut rng)[0]] += 1;
        }
        assert!((5..60).contains(&flows[2]), "no herd to the empty one: {flows:?}");
    }
}
