//! Probes one endpoint: requests its `/readyz` on a connection that only the prober uses.
//!
//! An apiserver that has lost its etcd still accepts connections and answers PINGs, but its `/readyz`
//! fails, or since Kubernetes 1.36 its `/livez`. A probe that a signal has brought forward asks both, as do the
//! probes of an endpoint that fails. The prober has its own connection, so that a full pool cannot delay a probe, and a
//! probe cannot delay a request. The prober also reconnects to ejected endpoints. Without a credential for `/readyz`,
//! an endpoint counts as ready while the prober's connection is live, unless anonymous probes fail ([`anonymous`]).

mod anonymous;
mod capabilities;
mod connection;
mod further_connections;
mod lag;
mod reachability;
mod refusals;
mod request;
mod restore;
mod succession;
mod version;

use std::pin::pin;
use std::sync::Arc;

use jackstay_config::Readyz;
use jackstay_core::probe::prober::{Prober, Response, Rules};
use jackstay_sys::clock;
use tokio::time::{sleep, sleep_until};

use self::anonymous::AnonymousProber;
use self::capabilities::CapabilityReader;
use self::connection::{ProbeConnection, connect, is_usable};
use self::lag::LagCheck;
use self::reachability::ReachabilityCheck;
use self::refusals::AnswerRecorder;
use self::request::{request_probes_of_others, send_probe};
use self::restore::RestoreCheck;
use self::succession::Succession;
use self::version::VersionReader;
use crate::upstream::Upstream;
use crate::upstream::connection::{ConnectionState, DrainReason};
use crate::upstream::connection_probe::is_other_ready;
use crate::upstream::endpoint::{
    Endpoint, EndpointState, Observation, ProbeCredential, ProbeTrigger,
};
use crate::upstream::readyz_question::ReadyzResult;

/// What else asks the endpoint on the connection of the prober.
struct ConnectionUsers<'a> {
    lag: &'a LagCheck,
    capabilities: &'a CapabilityReader,
    restore: &'a RestoreCheck,
}

/// Probes `endpoint` until it is removed from the set.
pub async fn probe(upstream: Arc<Upstream>, endpoint: Arc<Endpoint>) {
    let reachability = ReachabilityCheck::default();
    let lag = LagCheck::default();
    let capabilities = CapabilityReader::default();
    let restore = RestoreCheck::default();
    let succession = Succession::default();
    let users = ConnectionUsers { lag: &lag, capabilities: &capabilities, restore: &restore };
    tokio::select! {
        () = endpoint.removed() => {}
        () = lag.run(&upstream, &endpoint) => {}
        () = capabilities.run(&upstream, &endpoint) => {}
        () = restore.run(&upstream, &endpoint) => {}
        () = succession.run(&upstream, &endpoint, &reachability) => {}
        () = probe_repeatedly(&upstream, &endpoint, (&reachability, &succession), &users) => {}
        () = reachability.run(&upstream, &endpoint) => {}
    }
}

/// Connects and probes in a loop, as [`Prober`] decides.
async fn probe_repeatedly(
    upstream: &Arc<Upstream>,
    endpoint: &Arc<Endpoint>,
    (reachability, succession): (&ReachabilityCheck, &Succession),
    users: &ConnectionUsers<'_>,
) {
    let mut prober = Prober::new(clock::now());
    let mut anonymous = AnonymousProber::new(clock::now());
    let mut version = VersionReader::default();
    let mut answers = AnswerRecorder::new(endpoint);
    let mut connection: Option<ProbeConnection> = None;
    while endpoint.state() != EndpointState::Leaving {
        let sources = (reachability, succession);
        let open = open_connection(upstream, connection.take(), sources, &answers);
        let current = if let Some(current) = open {
            current
        } else {
            let question = users.capabilities.connection_lost(upstream, endpoint);
            let probe = prober.connect_at(endpoint.is_usable(), clock::now());
            // Watches may wait for what is read on the connection.
            sleep_until(question.map_or(probe, |question| question.min(probe)).into()).await;
            prober.connected();
            anonymous.reset();
            version.reset();
            answers.connected();
            let Some(new) = connect(upstream, endpoint, reachability).await else {
                answers.lost();
                continue;
            };
            new
        };
        reachability.set_connection(&current);
        let has_credential = upstream.has_probe_credential();
        answers.use_credential(has_credential.then_some(current.generation));
        if !has_credential {
            let left = anonymous.run(upstream, endpoint, reachability, current).await;
            answers.used(&left);
            connection = Some(left);
            prober.probe_now(clock::now());
            continue;
        }
        users.lag.set_connection(&current);
        users.restore.set_connection(&current);
        users.capabilities.set_connection(&current, endpoint);
        tokio::select! {
            () = sleep_until(prober.next_at().into()) => {}
            () = current.until_unusable() => {
                answers.used(&current);
                continue;
            }
        }
        let config = Arc::clone(&upstream.config());
        let config = &config.health.readyz;
        if probe_now(upstream, endpoint, &current, config, (&mut prober, &mut version)).await {
            wait_for_next((upstream, endpoint), &current, config, &mut prober).await;
            if upstream.examines(endpoint) {
                // The examination opens another one, and its verdict needs what arrives late on this one.
                current.while_suspect().await;
            }
            answers.used(&current);
            connection = Some(current);
        } else {
            answers.lost();
        }
    }
}

/// The connection to go on with, if one is usable: the successor of `current`, itself, or the one that an examination
/// has opened.
fn open_connection(
    upstream: &Upstream,
    current: Option<ProbeConnection>,
    (reachability, succession): (&ReachabilityCheck, &Succession),
    answers: &AnswerRecorder<'_>,
) -> Option<ProbeConnection> {
    let open = if let Some(successor) = succession.take() {
        answers.connected();
        if let Some(previous) = current {
            previous.drain(DrainReason::CertificateRotated);
        }
        Some(successor)
    } else {
        let replacement = || reachability.take_replacement().map(ProbeConnection);
        current.or_else(|| replacement().inspect(|_| answers.connected()))
    };
    open.filter(|connection| is_usable(upstream, connection))
}

/// Sends a probe and applies its result. Returns whether the connection was kept.
async fn probe_now(
    upstream: &Upstream,
    endpoint: &Arc<Endpoint>,
    connection: &ProbeConnection,
    config: &Readyz,
    (prober, version): (&mut Prober, &mut VersionReader),
) -> bool {
    let sent_at = clock::now();
    let token = upstream.credentials.probe_token().and_then(|token| token.header());
    let with_livez = prober.sent(sent_at);
    let (result, ()) = tokio::join!(
        probe_once(upstream, endpoint, connection, config, with_livez),
        version.read_if_due(endpoint, connection, token, config.timeout / 2),
    );
    let is_of_connection = endpoint.is_indistinct()
        && matches!(result, ReadyzResult::Starting(_) | ReadyzResult::NotReady(_))
        && is_other_ready(upstream, connection, sent_at).await;
    // Another connection to this endpoint reaches an apiserver that is ready.
    let result = if is_of_connection { ReadyzResult::ConnectionLost } else { result };
    let response = match &result {
        ReadyzResult::Ready => {
            upstream.backends.note_ready(connection.key());
            endpoint.note_probe_ok(sent_at);
            Response::Ready
        }
        ReadyzResult::Refused => {
            endpoint.note_probe_ok(sent_at);
            Response::Refused
        }
        ReadyzResult::Starting(_) => {
            request_probes_of_others(upstream, endpoint);
            Response::Starting
        }
        ReadyzResult::NotReady(_) => {
            request_probes_of_others(upstream, endpoint);
            Response::NotReady
        }
        ReadyzResult::ConnectionLost => {
            connection.close(DrainReason::ProbeFailed);
            Response::ConnectionLost
        }
    };
    if prober.received(response, rules(config)) {
        endpoint.observe(match &result {
            ReadyzResult::Starting(why) | ReadyzResult::NotReady(why) => {
                Observation::ReadyzFailing(why)
            }
            ReadyzResult::Ready | ReadyzResult::Refused | ReadyzResult::ConnectionLost => {
                Observation::ReadyzOk
            }
        });
    }
    let is_ready = endpoint.state() == EndpointState::Ready;
    prober.plan(response, is_ready, rules(config), fastrand::f64());
    response != Response::ConnectionLost
}

/// Waits until the next probe is due or the connection takes no more streams.
async fn wait_for_next(
    (upstream, endpoint): (&Upstream, &Endpoint),
    connection: &ProbeConnection,
    config: &Readyz,
    prober: &mut Prober,
) {
    loop {
        tokio::select! {
            () = sleep_until(prober.next_at().into()) => return,
            trigger = endpoint.probe.requested() => prober.requested(trigger, rules(config)),
            () = upstream.backends.round_begun() => {
                prober.requested(ProbeTrigger::Confirmation, rules(config));
            }
            () = connection.until_unusable() => {
                if connection.state() == ConnectionState::Dead {
                    prober.connection_lost(rules(config));
                }
                return;
            }
        }
    }
}

fn rules(config: &Readyz) -> Rules {
    Rules { interval: config.interval, rise: config.rise, fall: config.fall }
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
    let credential = (ProbeCredential::Configured, token);
    let mut response = pin!(send_probe(upstream, connection, config, credential, with_livez));
    tokio::select! {
        // Both may be due after this process was suspended; then the response counts.
        biased;
        result = &mut response => result,
        () = sleep(config.timeout / 2 + endpoint.line_delay(clock::now())) => {
            request_probes_of_others(upstream, endpoint);
            response.await
        }
    }
}
