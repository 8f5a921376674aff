//! Probes the apiserver of one connection, if the apiservers behind its address cannot be told apart
//! ([`jackstay_core::backends`]): then the `/readyz` of another connection says nothing about this one.
//!
//! | result | effect |
//! |---|---|
//! | overdue, or the first failure | the connection has a warning sign: requests on it may start a second attempt, and all other such connections are probed |
//! | the answer that the apiserver is not ready, or `fall` failures in a row, if another one was ready in the last interval | the connection drains, and its watches move |
//! | no answer, if another one has answered meanwhile | the same |
//! | any failure, if no other one is ready | none: a new connection would be no better |
//! | refused | none, as at an endpoint |
//!
//! All such connections together are probed once in an interval, so that an apiserver is not asked more often than by
//! nodes that know the addresses of all apiservers. A connection whose class has no credential for questions is not probed.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderValue;
use jackstay_config::Readyz;
use jackstay_core::probe::prober::{Prober, Response, Rules};
use jackstay_core::probe::schedule::ProbeTrigger;
use jackstay_sys::clock;
use tokio::time::{sleep, sleep_until};

use super::backends::{QuestionCredential, question_credential};
use super::connection::{Connection, DrainReason};
use super::credentials::ClientTls;
use super::endpoint::ProbeSignals;
use super::readyz_question::{ReadyzResult, ask};
use super::shared::Upstream;

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
    loop {
        tokio::select! {
            () = sleep_until(prober.next_at().into()) => {}
            trigger = signals.requested() => {
                prober.requested(trigger, rules(upstream));
                continue;
            }
            () = upstream.backends.alarmed() => {
                prober.requested(ProbeTrigger::Confirmation, rules(upstream));
                continue;
            }
            () = connection.until_unusable() => return,
        }
        let sent_at = clock::now();
        let with_livez = prober.sent(sent_at);
        let (code, result) = probe(upstream, connection, tls, signals, with_livez).await;
        let response = match &result {
            ReadyzResult::Ready => Response::Ready,
            ReadyzResult::Refused => Response::Refused,
            ReadyzResult::ConnectionLost => return,
            ReadyzResult::Starting(_) | ReadyzResult::NotReady(_) => Response::NotReady,
        };
        let counts = prober.received(response, rules(upstream)) || code.is_some();
        if let ReadyzResult::Starting(reason) | ReadyzResult::NotReady(reason) = &result {
            warn(upstream, connection, signals);
            let is_proven = counts && others_are_ready(upstream, sent_at);
            if is_proven || upstream.backends.has_ready_since(sent_at) {
                return leave(connection, reason);
            }
        } else {
            signals.set_failing(false);
            upstream.backends.note_ready();
        }
        prober.plan(response, true, rules(upstream), fastrand::f64());
    }
}

/// The apiserver of the connection is not ready, and another one is.
fn leave(connection: &Connection, reason: &str) {
    let (upstream, endpoint) = (&*connection.endpoint.upstream, &*connection.endpoint.label);
    let (class, watches) = (connection.class().as_str(), connection.watches());
    tracing::warn!(
        upstream,
        endpoint,
        class,
        reason,
        watches,
        "connection left: the apiserver that it has reached is not ready"
    );
    connection.drain(DrainReason::NotReady);
}

/// Sends one probe. After half of its timeout it counts as overdue.
async fn probe(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    tls: &ClientTls,
    signals: &ProbeSignals,
    with_livez: bool,
) -> (Option<u16>, ReadyzResult) {
    let config = Arc::clone(&upstream.config());
    let config: &Readyz = &config.health.readyz;
    let token: Option<HeaderValue> =
        question_credential(upstream, connection.class(), tls).token().flatten();
    let mut response = pin!(ask(connection, config, token, with_livez));
    tokio::select! {
        // Both may be due after this process was suspended; then the response counts.
        biased;
        answer = &mut response => answer,
        () = sleep(config.timeout / 2) => {
            warn(upstream, connection, signals);
            response.await
        }
    }
}

/// Whether another apiserver behind an indistinct endpoint was ready in the interval before a probe that has failed.
pub fn others_are_ready(upstream: &Upstream, sent_at: Instant) -> bool {
    let interval = upstream.config().health.readyz.interval;
    upstream.backends.has_ready_since(sent_at.checked_sub(interval).unwrap_or(sent_at))
}

/// The probe has failed or is overdue.
fn warn(upstream: &Upstream, connection: &Connection, signals: &ProbeSignals) {
    if !signals.set_failing(true) {
        upstream.backends.raise_alarm();
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
