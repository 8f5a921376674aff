//! The probes of an endpoint.

use std::rc::Rc;
use std::sync::Arc;

use http::HeaderValue;
use jackstay_config::Readyz;
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};

use super::refusals::judge;
use crate::upstream::Upstream;
use crate::upstream::connection::Connection;
use crate::upstream::endpoint::{Endpoint, ProbeCredential, ProbeTrigger};
use crate::upstream::readyz::ReadyzCheck;
use crate::upstream::readyz_question::{OnSuspicion, ReadyzResult, ask};

/// Sends a probe on `connection`, with `token` if there is one, and records its result for `/status`. With
/// `with_livez` the endpoint must also answer `/livez`.
pub async fn send_probe(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    config: &Readyz,
    (credential, token): (ProbeCredential, Option<HeaderValue>),
    with_livez: bool,
) -> ReadyzResult {
    let (at, started) = (Utc(wall_clock()).seconds(), clock::now());
    let is_examined = upstream.examines(&connection.endpoint);
    let on_suspicion = if is_examined { OnSuspicion::Wait } else { OnSuspicion::GiveUp };
    let (code, result) = ask(connection, config, token, with_livez, on_suspicion).await;
    let result = judge((upstream, &connection.endpoint), credential, (&config.path, code), result);
    let error = match &result {
        ReadyzResult::Ready | ReadyzResult::Refused => None,
        ReadyzResult::Starting(why) | ReadyzResult::NotReady(why) => Some(why.clone()),
        ReadyzResult::ConnectionLost => Some("connection lost".to_owned()),
    };
    let duration_ms = clock::elapsed(started).as_micros() as f64 / 1000.0;
    connection.endpoint.record_check(ReadyzCheck { at, duration_ms, code, error });
    result
}

/// Records that a probe of `endpoint` failed or is overdue. If the probe before it was successful, also
/// requests a probe of every other endpoint, because watches may soon have to move to one of them. If the connections to
/// the endpoint reach different apiservers, requests a probe of each connection.
pub fn request_probes_of_others(upstream: &Upstream, endpoint: &Arc<Endpoint>) {
    if endpoint.is_indistinct() {
        return upstream.backends.probe_all();
    }
    if !endpoint.note_probe_failing(clock::now()) {
        return;
    }
    for other in upstream.endpoints().iter().filter(|other| !Arc::ptr_eq(other, endpoint)) {
        other.probe.request(ProbeTrigger::Confirmation);
    }
}
