//! Probes one endpoint: requests its `/readyz` on a connection that only the prober uses.
//!
//! An apiserver that has lost its etcd still accepts connections and answers PINGs, but its `/readyz`
//! fails, or since Kubernetes 1.36 its `/livez`. A probe that a signal has brought forward asks both, as do the
//! probes of an endpoint that fails. The prober has its own connection, so that a full pool cannot delay a probe, and a probe
//! cannot delay a request. The prober also reconnects to ejected endpoints. Without a credential for
//! `/readyz`, an endpoint counts as ready while the prober's connection is live, unless anonymous
//! probes fail ([`anonymous`]).

mod anonymous;
mod connection;
mod lag;
mod reachability;
mod request;
mod version;

use std::pin::pin;
use std::sync::Arc;

use jackstay_core::probe::schedule::{FAILING_INTERVAL, ProbeResult, ProbeSchedule, ResultStreak};
use jackstay_sys::clock;
use tokio::time::{sleep, sleep_until};

use self::anonymous::AnonymousProber;
use self::connection::{ProbeConnection, connect, is_current, until_unusable};
use self::lag::LagCheck;
use self::reachability::ReachabilityCheck;
use self::request::{ReadyzResult, request_probes_of_others, send_probe};
use self::version::VersionReader;
use crate::config::Readyz;
use crate::upstream::Upstream;
use crate::upstream::connection::{ConnectionState, DrainReason};
use crate::upstream::endpoint::{Endpoint, EndpointState, Observation, ProbeTrigger};

/// Probes `endpoint` until it is removed from the set.
pub async fn probe(upstream: Arc<Upstream>, endpoint: Arc<Endpoint>) {
    let reachability = ReachabilityCheck::default();
    let lag = LagCheck::default();
    tokio::select! {
        () = endpoint.removed() => {}
        () = lag.run(&upstream, &endpoint) => {}
        () = probe_repeatedly(&upstream, &endpoint, &reachability, &lag) => {}
        () = reachability.run(&upstream, &endpoint) => {}
    }
}

/// Connects and probes in a loop. A lost connection brings the next probe forward to
/// [`FAILING_INTERVAL`] after the last one, and not further: otherwise thousands of nodes would probe a
/// restarted apiserver at once.
async fn probe_repeatedly(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    reachability: &ReachabilityCheck,
    lag: &LagCheck,
) {
    let mut streak = ResultStreak::default();
    let mut anonymous = AnonymousProber::new(clock::now());
    let mut connection: Option<ProbeConnection> = None;
    let mut next_probe = clock::now();
    // The trigger that brought the next probe forward, if one did.
    let mut early_trigger = None;
    let mut schedule = ProbeSchedule::default();
    let mut version = VersionReader::default();
    while endpoint.state() != EndpointState::Leaving {
        let config = Arc::clone(&upstream.config());
        let config = &config.health.readyz;
        let replacement = || reachability.take_replacement().map(ProbeConnection);
        let reusable = connection.take().or_else(replacement).filter(|c| is_current(upstream, c));
        let current = if let Some(current) = reusable {
            current
        } else {
            // The prober of a usable endpoint connects when the next probe is due. That of any other
            // endpoint connects at once, because its connection can make the endpoint usable.
            if endpoint.is_usable() {
                sleep_until(next_probe.into()).await;
            }
            streak = ResultStreak::default();
            anonymous.reset();
            version.reset();
            let Some(new) = connect(upstream, endpoint, reachability).await else { continue };
            new
        };
        reachability.set_connection(&current);
        if !upstream.has_probe_credential() {
            connection = Some(anonymous.run(upstream, endpoint, reachability, current).await);
            next_probe = clock::now();
            continue;
        }
        lag.set_connection(&current);
        tokio::select! {
            () = sleep_until(next_probe.into()) => {}
            () = until_unusable(&current) => continue,
        }
        let sent_at = clock::now();
        let token = upstream.credentials.probe_token().and_then(|token| token.header());
        let trigger = early_trigger.take();
        let with_livez = trigger.is_some() || schedule.is_failing();
        let (result, ()) = tokio::join!(
            probe_once(upstream, endpoint, &current, config, with_livez),
            version.read_if_due(endpoint, &current, token, config.timeout / 2),
        );
        let on_evidence = trigger == Some(ProbeTrigger::PassiveEvidence);
        let probe_result = match &result {
            ReadyzResult::ConnectionLost => {
                current.close(DrainReason::ProbeFailed);
                ProbeResult::Failing
            }
            ReadyzResult::Ready => {
                endpoint.note_probe_ok(sent_at);
                if streak.record(true, config.rise, config.fall) {
                    endpoint.observe(Observation::ReadyzOk);
                }
                match endpoint.state() {
                    EndpointState::Ready => ProbeResult::Ready,
                    _ => ProbeResult::Recovering,
                }
            }
            ReadyzResult::NotReady(why) => {
                request_probes_of_others(upstream, endpoint);
                if streak.record(false, config.rise, config.fall) {
                    endpoint.observe(Observation::ReadyzFailing(why));
                }
                ProbeResult::Failing
            }
        };
        schedule.record(probe_result, on_evidence, config.interval);
        next_probe = sent_at + schedule.pause(config.interval, fastrand::f64());
        if result == ReadyzResult::ConnectionLost {
            continue;
        }
        loop {
            tokio::select! {
                () = sleep_until(next_probe.into()) => break,
                trigger = endpoint.probe.requested() => {
                    let early = sent_at + schedule.early_pause(trigger, config.interval);
                    if early < next_probe {
                        (next_probe, early_trigger) = (early, Some(trigger));
                    }
                }
                () = until_unusable(&current) => {
                    if current.state() == ConnectionState::Dead {
                        // The connection was lost rather than drained after a GOAWAY. The apiserver
                        // may have been restarted, so it is probed soon.
                        schedule.reset();
                        let soon = sent_at + FAILING_INTERVAL.min(config.interval);
                        next_probe = next_probe.min(soon);
                    }
                    break;
                }
            }
        }
        connection = Some(current);
    }
}

/// Sends one probe. After half of its timeout it counts as overdue.
async fn probe_once(
    upstream: &Upstream,
    endpoint: &Arc<Endpoint>,
    connection: &ProbeConnection,
    config: &Readyz,
    with_livez: bool,
) -> ReadyzResult {
    let token = upstream.credentials.probe_token().and_then(|token| token.header());
    let mut response = pin!(send_probe(connection, config, token, with_livez));
    tokio::select! {
        // Both may be due after this process was suspended; then the response counts.
        biased;
        result = &mut response => result,
        () = sleep(config.timeout / 2) => {
            request_probes_of_others(upstream, endpoint);
            response.await
        }
    }
}
