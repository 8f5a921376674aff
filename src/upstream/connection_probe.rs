//! Probes the apiserver of one connection, if the apiservers behind its address cannot be told apart
//! ([`jackstay_core::backends`]): then the `/readyz` of another connection says nothing about this one.
//!
//! | result | effect |
//! |---|---|
//! | overdue, or the first failure | the connection has a warning sign: requests on it may start a second attempt, and all other such connections are probed |
//! | failure, and another connection has an answer that its apiserver is ready, which came after this probe was sent | the connection drains, and its watches move |
//! | failure, without such an answer within a second | none: a new connection would be no better |
//! | refused | none, as at an endpoint |
//! | no answer, and the connection is suspect | none: the connection has failed, not its apiserver. If it recovers, it is probed again |
//!
//! All such connections together are probed once in an interval, so that an apiserver is not asked more often than by
//! nodes that know the addresses of all apiservers. A new one is probed at once if another was left in the last minute. A
//! connection whose class has no credential for questions is not probed.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::poll;
use http::HeaderValue;
use jackstay_config::Readyz;
use jackstay_core::probe::prober::{Prober, Response, Rules};
use jackstay_core::probe::schedule::ProbeTrigger;
use jackstay_sys::clock;
use tokio::time::{sleep, sleep_until, timeout};

use super::backends::{QuestionCredential, question_credential};
use super::connection::{Connection, DrainReason};
use super::credentials::ClientTls;
use super::endpoint::ProbeSignals;
use super::readyz_question::{OnSuspicion, ReadyzResult, ask};
use super::shared::Upstream;

/// How long the answer of another connection is waited for. All are probed when one fails.
const PROOF_LIMIT: Duration = Duration::from_secs(1);

/// Starts to probe a new connection, if its endpoint does not say which apiserver it has reached.
pub(super) fn start(upstream: &Arc<Upstream>, connection: &Rc<Connection>, tls: &Arc<ClientTls>) {
    let credential = question_credential(upstream, connection.class(), tls);
    if !connection.endpoint.is_indistinct() || matches!(credential, QuestionCredential::None) {
        return;
    }
    let signals = connection.probe_itself();
    let (upstream, connection, tls) =
        (Arc::clone(upstream), Rc::clone(connection), Arc::clone(tls));
    tokio::task::spawn_local(async move { run(&upstream, &connection, &tls, &signals).await });
}

/// Probes until the connection takes no more streams.
async fn run(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    tls: &ClientTls,
    signals: &ProbeSignals,
) {
    let _counted = upstream.backends.count_probed_connection();
    let mut prober = Prober::new(clock::now());
    // The connection was opened after an answer to `/readyz`.
    prober.received(Response::Ready, rules(upstream));
    prober.plan(Response::Ready, true, rules(upstream), fastrand::f64());
    if upstream.backends.was_one_left() {
        // It may have reached the same apiserver, and was taken because no other was found.
        prober.requested(ProbeTrigger::Confirmation, rules(upstream));
    }
    loop {
        tokio::select! {
            () = sleep_until(prober.next_at().into()) => {}
            trigger = signals.requested() => {
                prober.requested(trigger, rules(upstream));
                continue;
            }
            () = upstream.backends.round_begun() => {
                prober.requested(ProbeTrigger::Confirmation, rules(upstream));
                continue;
            }
            () = connection.until_unusable() => return,
        }
        let sent_at = clock::now();
        let with_livez = prober.sent(sent_at);
        let result = probe(upstream, connection, tls, signals, with_livez).await;
        let response = match &result {
            ReadyzResult::Ready => Response::Ready,
            ReadyzResult::Refused => Response::Refused,
            ReadyzResult::ConnectionLost => Response::ConnectionLost,
            ReadyzResult::Starting(_) | ReadyzResult::NotReady(_) => Response::NotReady,
        };
        prober.received(response, rules(upstream));
        match &result {
            ReadyzResult::Starting(reason) | ReadyzResult::NotReady(reason) => {
                warn(upstream, connection, signals);
                if is_other_ready(upstream, connection, sent_at).await {
                    return leave(upstream, connection, reason);
                }
            }
            ReadyzResult::Ready | ReadyzResult::Refused => {
                signals.set_failing(false);
                upstream.backends.note_ready(connection.key());
            }
            ReadyzResult::ConnectionLost => {}
        }
        prober.plan(response, true, rules(upstream), fastrand::f64());
    }
}

/// The apiserver of the connection is not ready, and another one is.
fn leave(upstream: &Upstream, connection: &Connection, reason: &str) {
    const LINE: &str = "connection left: the apiserver that it has reached is not ready";
    let is_first = upstream.backends.note_left();
    let (upstream, endpoint) = (&*connection.endpoint.upstream, &*connection.endpoint.label);
    let (class, watches) = (connection.class().as_str(), connection.watches());
    if is_first {
        tracing::warn!(upstream, endpoint, class, reason, watches, "{LINE}");
    } else {
        tracing::info!(upstream, endpoint, class, reason, watches, "{LINE}");
    }
    connection.drain(DrainReason::NotReady);
}

/// Sends one probe. After half of its timeout it counts as overdue.
async fn probe(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    tls: &ClientTls,
    signals: &ProbeSignals,
    with_livez: bool,
) -> ReadyzResult {
    let config = Arc::clone(&upstream.config());
    let config: &Readyz = &config.health.readyz;
    let token: Option<HeaderValue> =
        question_credential(upstream, connection.class(), tls).token().flatten();
    let mut response = pin!(ask(connection, config, token, with_livez, OnSuspicion::GiveUp));
    let (_, result) = tokio::select! {
        // Both may be due after this process was suspended; then the response counts.
        biased;
        answer = &mut response => answer,
        () = sleep(config.timeout / 2 + connection.endpoint.line_delay(clock::now())) => {
            warn(upstream, connection, signals);
            response.await
        }
    };
    result
}

/// Whether another connection has an answer that its apiserver is ready, to a probe that was sent after this one, or has one
/// soon.
pub async fn is_other_ready(upstream: &Upstream, connection: &Connection, since: Instant) -> bool {
    let backends = &upstream.backends;
    let proven = async {
        loop {
            let mut noted = pin!(backends.ready_noted());
            // Polled before the check, so that no answer is missed.
            let _ = poll!(&mut noted);
            if backends.is_other_ready(connection.key(), since) {
                return;
            }
            noted.await;
        }
    };
    timeout(PROOF_LIMIT, proven).await.is_ok()
}

/// The probe has failed or is overdue.
fn warn(upstream: &Upstream, connection: &Connection, signals: &ProbeSignals) {
    if !signals.set_failing(true) {
        upstream.backends.probe_all();
        connection.endpoint_suspected();
    }
}

/// The rules of the probes of one of all probed connections.
fn rules(upstream: &Upstream) -> Rules {
    let config = upstream.config();
    let readyz = &config.health.readyz;
    let interval: Duration = readyz.interval * upstream.backends.probed_connections().max(1);
    Rules { interval, rise: readyz.rise, fall: readyz.fall }
}
