//! Questions whether an apiserver is ready, and what the answers mean.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, StatusCode};
use jackstay_config::Readyz;
use jackstay_config::api_root::ApiRoot;
use jackstay_core::request::start_up::is_refusal;
use jackstay_net::readyz::{failed_checks, not_served};
use jackstay_sys::clock;
use tokio::time::timeout_at;

use super::connection::{Connection, ConnectionState};
use super::question::fetch;

/// The path whose checks include etcd. Since Kubernetes 1.36, `/readyz` has no check of etcd: an apiserver without
/// etcd keeps answering it with 200, while `/livez` gets 500 after the 2 s of `--etcd-healthcheck-timeout`.
pub(super) const LIVEZ: &str = "/livez";

/// The result of a probe.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadyzResult {
    /// The endpoint is ready.
    Ready,
    /// The endpoint works and refuses this client (401, 403), so it is not avoided.
    Refused,
    /// The endpoint refuses this client because it is starting, with the reason.
    Starting(String),
    /// The endpoint is not ready, with the reason.
    NotReady(String),
    /// The connection was lost before the response was complete; the readiness is unknown.
    ConnectionLost,
}

/// What becomes of a question whose connection is suspect when its time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnSuspicion {
    /// The connection counts as lost.
    GiveUp,
    /// The question waits: a verdict on the connection follows, and a new one is opened meanwhile.
    Wait,
}

/// Asks on `connection` whether its apiserver is ready, with `token` if there is one. Returns the status code, if there is a
/// response, and its meaning. With `with_livez` the apiserver must also answer [`LIVEZ`].
pub async fn ask(
    connection: &Rc<Connection>,
    config: &Readyz,
    token: Option<HeaderValue>,
    with_livez: bool,
    on_suspicion: OnSuspicion,
) -> (Option<u16>, ReadyzResult) {
    let limit = (config.timeout, on_suspicion);
    if !with_livez || config.path == LIVEZ {
        return ask_path(connection, &config.path, limit, token).await;
    }
    let (ready, live) = tokio::join!(
        ask_path(connection, &config.path, limit, token.clone()),
        ask_path(connection, LIVEZ, limit, token)
    );
    match live {
        // Kubernetes before 1.16 has no such path.
        (Some(404), _) | (_, ReadyzResult::Ready | ReadyzResult::Refused) => ready,
        _ if ready.1 != ReadyzResult::Ready => ready,
        _ => live,
    }
}

/// Asks one path. Returns the status code, if there is a response, and its meaning.
async fn ask_path(
    connection: &Rc<Connection>,
    path: &str,
    (limit, on_suspicion): (Duration, OnSuspicion),
    token: Option<HeaderValue>,
) -> (Option<u16>, ReadyzResult) {
    let limit = || limit + connection.endpoint.line_delay(clock::now());
    let mut response = pin!(exchange(connection, path, token));
    let mut deadline = clock::now() + limit();
    let asked = clock::now();
    loop {
        match timeout_at(deadline.into(), &mut response).await {
            Ok(Ok((status, result))) => return (Some(status.as_u16()), result),
            Ok(Err(_)) => return (None, ReadyzResult::ConnectionLost),
            Err(_) => {}
        }
        let (limit, state) = (limit(), connection.state());
        if deadline < asked + limit {
            // The queue of the line has become longer.
            deadline = asked + limit;
        } else if state == ConnectionState::Suspect && on_suspicion == OnSuspicion::Wait {
            deadline = clock::now() + limit;
        } else if state == ConnectionState::Live {
            // Without a response in time the apiserver is not ready. On other connections, the connection is lost.
            let why = format!("{path} not answered within {} ms", limit.as_millis());
            return (None, ReadyzResult::NotReady(why));
        } else {
            return (None, ReadyzResult::ConnectionLost);
        }
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

/// The meaning of a response. What a refusal means depends on other answers.
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
