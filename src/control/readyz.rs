//! Asks one endpoint for its own opinion of itself, on a connection of its own.
//!
//! Alive is not well: an apiserver that answers TCP and PING but has lost its etcd says so in
//! `/readyz`. The connection is of this module alone, so that a full pool cannot delay the
//! question and the question cannot delay a request; it is judged like every other one, and the
//! prober is what brings an ejected endpoint back. Without a credential to ask with, an endpoint is
//! ready while it lives ([`anonymous`]).

pub mod anonymous;
pub mod connection;
pub mod reachability;
pub mod request;
pub mod schedule;

use std::pin::pin;
use std::sync::Arc;

use tokio::time::{Instant, sleep, sleep_until};

use self::anonymous::AnonymousProber;
use self::connection::{ProbeConnection, connect, gone, is_current};
use self::reachability::ReachabilityCheck;
use self::request::{ReadyzResult, ask, doubt};
use self::schedule::{FAILING_INTERVAL, ProbeResult, ProbeSchedule, ResultStreak};
use crate::upstream::Upstream;
use crate::upstream::connection::{ConnectionState, DrainReason};
use crate::upstream::endpoint::{Endpoint, EndpointState, ProbeTrigger};

/// Probes one endpoint until it leaves.
///
/// However a connection ends, the question is not asked again before its time: 5,000 nodes that come
/// back at once would be a storm.
pub async fn probe(upstream: Arc<Upstream>, endpoint: Arc<Endpoint>) {
    let witness = ReachabilityCheck::default();
    tokio::select! {
        () = endpoint.removed() => {}
        () = ask_until_it_leaves(&upstream, &endpoint, &witness) => {}
        () = witness.watch(&upstream, &endpoint) => {}
    }
}

async fn ask_until_it_leaves(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    witness: &ReachabilityCheck,
) {
    let mut streak = ResultStreak::default();
    let mut unproven = AnonymousProber::new(Instant::now());
    let mut connection: Option<ProbeConnection> = None;
    let mut next = Instant::now();
    let mut wanted = None;
    let mut pace = ProbeSchedule::default();
    while endpoint.state() != EndpointState::Leaving {
        let config = upstream.config.load_full();
        let config = &config.health.readyz;
        let replaced = || witness.replacement().map(ProbeConnection);
        let kept = connection.take().or_else(replaced).filter(|c| is_current(upstream, c));
        let current = if let Some(current) = kept {
            current
        } else {
            // One that is well is not needed before the next question.
            if endpoint.is_usable() {
                sleep_until(next).await;
            }
            streak = ResultStreak::default();
            unproven.forget();
            let Some(fresh) = connect(upstream, endpoint, witness).await else { continue };
            ProbeConnection(fresh)
        };
        witness.listen_to(&current);
        if !upstream.has_probe_credential() {
            connection = Some(unproven.follow(upstream, endpoint, witness, current).await);
            next = Instant::now();
            continue;
        }
        tokio::select! {
            () = sleep_until(next) => {}
            () = gone(&current) => continue,
        }
        let asked_at = Instant::now();
        let finding = {
            let token = upstream.credentials.probe_token().and_then(|token| token.header());
            let mut answer = pin!(ask(&current, config, token));
            tokio::select! {
                // After a stop of this process both are due.
                biased;
                finding = &mut answer => finding,
                () = sleep(config.timeout / 2) => {
                    doubt(upstream, endpoint);
                    answer.await
                }
            }
        };
        let on_evidence = wanted.take() == Some(ProbeTrigger::PassiveEvidence);
        let answered = match &finding {
            ReadyzResult::Lost => {
                current.close(DrainReason::ProbeFailed);
                pace.answered(ProbeResult::Failing, on_evidence, config);
                next = asked_at + pace.pause(config, fastrand::f64());
                continue;
            }
            ReadyzResult::Ready => {
                endpoint.note_probe_ok(asked_at);
                if streak.add(true, config.rise, config.fall).is_some() {
                    endpoint.readyz_ok();
                }
                match endpoint.state() {
                    EndpointState::Ready => ProbeResult::Ready,
                    _ => ProbeResult::Recovering,
                }
            }
            ReadyzResult::NotReady(why) => {
                doubt(upstream, endpoint);
                if streak.add(false, config.rise, config.fall).is_some() {
                    endpoint.readyz_failing(why);
                }
                ProbeResult::Failing
            }
        };
        pace.answered(answered, on_evidence, config);
        next = asked_at + pace.pause(config, fastrand::f64());
        loop {
            tokio::select! {
                () = sleep_until(next) => break,
                why = endpoint.probe_requested() => {
                    let soon = asked_at + pace.soon(why, config);
                    if soon < next {
                        (next, wanted) = (soon, Some(why));
                    }
                }
                () = gone(&current) => {
                    if current.state() == ConnectionState::Dead {
                        // Not a GOAWAY after an answer: what comes back is asked again soon.
                        pace.restart();
                        next = (asked_at + FAILING_INTERVAL.min(config.interval)).min(next);
                    }
                    break;
                }
            }
        }
        connection = Some(current);
    }
}
