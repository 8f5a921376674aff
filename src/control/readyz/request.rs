//! One `/readyz` request and the meaning of its response.

use std::ops::ControlFlow;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use http::{HeaderValue, Request, StatusCode, header};
use jackstay_config::Readyz;
use jackstay_config::api_root::ApiRoot;
use jackstay_core::request::start_up::is_refusal;
use jackstay_net::readyz::{failed_checks, not_served};
use jackstay_sys::clock;
use jackstay_sys::utc::{Utc, wall_clock};
use tokio::time::timeout;

use super::refusals::judge;
use super::result::ReadyzResult;
use crate::upstream::Upstream;
use crate::upstream::connection::{Connection, ConnectionState};
use crate::upstream::endpoint::{Endpoint, ProbeCredential, ProbeTrigger};
use crate::upstream::question;
use crate::upstream::readyz::ReadyzCheck;

/// Size in bytes at which no more of a response body is stored. The failed checks are looked for in the
/// stored part.
const MAX_BODY: usize = 16 * 1024;

/// The path whose checks include etcd. Since Kubernetes 1.36, `/readyz` has no check of etcd: an apiserver without
/// etcd keeps answering it with 200, while `/livez` gets 500 after the 2 s of `--etcd-healthcheck-timeout`.
const LIVEZ: &str = "/livez";

/// Sends a probe on `connection`, with `token` if there is one, and records its result for `/status`. With
/// `with_livez` the endpoint must also answer [`LIVEZ`].
pub async fn send_probe(
    upstream: &Upstream,
    connection: &Rc<Connection>,
    config: &Readyz,
    (credential, token): (ProbeCredential, Option<HeaderValue>),
    with_livez: bool,
) -> ReadyzResult {
    let (at, started) = (Utc(wall_clock()).seconds(), clock::now());
    let (code, result) = if with_livez && config.path != LIVEZ {
        let (ready, live) = tokio::join!(
            ask(connection, &config.path, config.timeout, token.clone()),
            ask(connection, LIVEZ, config.timeout, token)
        );
        match live {
            // Kubernetes before 1.16 has no such path.
            (Some(404), _) | (_, ReadyzResult::Ready | ReadyzResult::Refused) => ready,
            _ if ready.1 != ReadyzResult::Ready => ready,
            _ => live,
        }
    } else {
        ask(connection, &config.path, config.timeout, token).await
    };
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
/// requests a probe of every other endpoint, because watches may soon have to move to one of them.
pub fn request_probes_of_others(upstream: &Upstream, endpoint: &Arc<Endpoint>) {
    if !endpoint.note_probe_failing(clock::now()) {
        return;
    }
    for other in upstream.endpoints().iter().filter(|other| !Arc::ptr_eq(other, endpoint)) {
        other.probe.request(ProbeTrigger::Confirmation);
    }
}

/// Asks one path. Returns the status code, if there is a response, and its meaning.
async fn ask(
    connection: &Rc<Connection>,
    path: &str,
    limit: Duration,
    token: Option<HeaderValue>,
) -> (Option<u16>, ReadyzResult) {
    match timeout(limit, exchange(connection, path, token)).await {
        Ok(Ok((status, result))) => (Some(status.as_u16()), result),
        // Without a response in time the apiserver is not ready, if the connection is live. Otherwise
        // the connection is lost.
        Err(_) if connection.state() == ConnectionState::Live => {
            let why = format!("{path} not answered within {} ms", limit.as_millis());
            (None, ReadyzResult::NotReady(why))
        }
        Ok(Err(_)) | Err(_) => (None, ReadyzResult::ConnectionLost),
    }
}

async fn exchange(
    connection: &Rc<Connection>,
    path: &str,
    token: Option<HeaderValue>,
) -> Result<(StatusCode, ReadyzResult), h2::Error> {
    let (status, body) = fetch(connection, path, token).await?;
    let root = Arc::clone(&connection.endpoint.api_root());
    Ok((status, interpret(status, &String::from_utf8_lossy(&body), (path, &root))))
}

/// Gets `target`, a path with a query. Returns the status and the beginning of the body.
///
/// # Errors
/// The stream or its connection was lost.
pub async fn fetch(
    connection: &Rc<Connection>,
    target: &str,
    token: Option<HeaderValue>,
) -> Result<(StatusCode, BytesMut), h2::Error> {
    fetch_body(connection, question::get(&connection.endpoint, target, token)).await
}

/// [`fetch`] with an `Accept` header.
pub async fn fetch_accepting(
    connection: &Rc<Connection>,
    target: &str,
    token: Option<HeaderValue>,
    accept: &'static str,
) -> Result<(StatusCode, BytesMut), h2::Error> {
    let mut request = question::get(&connection.endpoint, target, token);
    request.headers_mut().insert(header::ACCEPT, HeaderValue::from_static(accept));
    fetch_body(connection, request).await
}

async fn fetch_body(
    connection: &Rc<Connection>,
    request: Request<()>,
) -> Result<(StatusCode, BytesMut), h2::Error> {
    let mut body = BytesMut::new();
    let store = |piece: &[u8]| {
        if body.len() < MAX_BODY {
            body.extend_from_slice(piece);
        }
        ControlFlow::Continue(())
    };
    let status = question::ask(connection, request, store).await?;
    Ok((status, body))
}

/// Gets `target` and passes the body to `read` piece by piece, until it breaks off. Returns the status.
///
/// # Errors
/// The stream or its connection was lost.
pub async fn fetch_pieces(
    connection: &Rc<Connection>,
    target: &str,
    token: Option<HeaderValue>,
    read: impl FnMut(&[u8]) -> ControlFlow<()>,
) -> Result<StatusCode, h2::Error> {
    let request = question::get(&connection.endpoint, target, token);
    question::ask(connection, request, read).await
}

/// The meaning of a response. [`judge`] decides what a refusal means.
fn interpret(status: StatusCode, body: &str, (path, root): (&str, &ApiRoot)) -> ReadyzResult {
    match status {
        StatusCode::OK => ReadyzResult::Ready,
        _ if is_refusal(status.as_u16()) => ReadyzResult::Refused,
        _ => {
            let (path, code) = (root.path(path), status.as_u16());
            let detail = failed_checks(body) + &not_served(code, root);
            ReadyzResult::NotReady(format!("{path} answers {code}{detail}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpret_status_code_decides_and_failed_checks_are_named() {
        let root = ApiRoot::default();
        let interpret = |code: u16, body: &str| {
            interpret(StatusCode::from_u16(code).unwrap(), body, ("/readyz", &root))
        };
        assert_eq!(interpret(200, "ok"), ReadyzResult::Ready);
        assert_eq!(interpret(401, ""), ReadyzResult::Refused);
        assert_eq!(interpret(403, ""), ReadyzResult::Refused);
        assert_eq!(
            interpret(500, "[+]ping ok\n[-]etcd failed: reason withheld\nreadyz check failed"),
            ReadyzResult::NotReady("/readyz answers 500: etcd".into())
        );
        assert_eq!(interpret(503, "no"), ReadyzResult::NotReady("/readyz answers 503".into()));
        let misrouted = "/readyz answers 404: no apiserver for the host kubernetes.default.svc at this path: check \
                         authority and path_prefix of the upstream";
        assert_eq!(interpret(404, "no"), ReadyzResult::NotReady(misrouted.into()));
    }
}
