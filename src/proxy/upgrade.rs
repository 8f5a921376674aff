//! Upgrades to `SPDY/3.1` and `websocket` (exec, attach, port-forward, cp). Each has a separate HTTP/1.1
//! connection upstream.
//!
//! * Bytes are tunnelled only after a 101 that switches to a requested protocol. If jackstay took another
//!   response for an upgrade, the client would have an authenticated connection to the apiserver
//!   (CVE-2018-1002105). Any other response, redirects included, is forwarded, and both connections are
//!   closed.
//! * jackstay connects to further endpoints if one cannot be reached, but never sends the request twice,
//!   because its command may have run. If the connection is lost or the apiserver is stopped, the request
//!   waits as long as a write does.
//! * Each direction ends separately, as in TCP. An error on one side ends both directions.
//! * A tunnel ends when the certificate of its client is no longer valid
//!   ([`super::client_certificate`]).
//! * A watch over WebSocket is a tunnel, too: its frames are not followed, so it cannot be resumed. Its client continues it
//!   when it ends, so it ends as soon as an ordinary watch would leave: when its path or its apiserver is dead
//!   ([`TunnelledWatchGuard::died`]), within [`LEAVE_SPREAD`] after its endpoint was removed, and at its moment of a drain.
//!   The client's connection is closed without a close frame, which is an abnormal end (1006) to each client: bytes are
//!   copied as they come, and a close frame within another frame would be part of that. fabric8's `WatcherWebSocketListener`
//!   reconnects after an error as after a close frame.
//! * There is no idle timeout: a client that reads nothing may be a person who pages through
//!   `kubectl exec … | less`. A tunnel whose path is dead for `tunnel_dead_after` is closed
//!   ([`jackstay_core::flow_health`]).
//!
//! `Sec-WebSocket-Protocol` may contain a bearer token, so this module logs no headers.

use std::future::pending;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONNECTION, TRAILER, TRANSFER_ENCODING, UPGRADE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, StatusCode, Version, response};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use jackstay_core::request::hygiene;
use jackstay_core::request::retry::RetryRefusal;
use jackstay_core::request::status_error::StatusError;
use jackstay_core::watch::request::group;
use tokio::io::{AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::admission::tunnel_memory::TunnelMemory;
use super::client_certificate::IdentityProof;
use super::client_stream;
use super::drain::DrainWatcher;
use super::response_body::{ForwardResult, Http1Body, ResponseBody};
use super::tunnels::{OpenTunnel, Tunnels};
use super::upstream_client::UpstreamClient;
use crate::observe::{Outcome, Side};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::{Endpoint, TunnelledWatchGuard};
use crate::upstream::http1::{self, Http1Driver, Http1Response};
use crate::upstream::version_preference::preferred_versions;

/// Buffer of each direction of a tunnel, in bytes: one TLS record.
const BUFFER_SIZE: usize = 16 * 1024;

/// Time in which the watches over WebSocket of an endpoint end that was removed from the set.
const LEAVE_SPREAD: Duration = Duration::from_secs(5);

/// A watch over WebSocket, and the drain of its listener.
type OpenWatch = (TunnelledWatchGuard, DrainWatcher);

/// A request that asks for an upgrade.
pub struct Upgrade {
    /// The client of the upstream to which the request is sent.
    pub upstream: Rc<UpstreamClient>,
    /// The credential with which the request is sent.
    pub class: CredentialClass,
    /// Proves that the request may use this credential. The tunnel ends when the proof does.
    pub proof: IdentityProof,
    /// The request, with the headers that are sent upstream.
    pub request: Request<Incoming>,
    /// The tunnels of the listener, in which a tunnel is counted.
    pub tunnels: Tunnels,
    /// The memory of the tunnel.
    pub memory: TunnelMemory,
    /// The drain of the listener; `Some` for a watch.
    pub watch_drain: Option<DrainWatcher>,
}

/// A response on an HTTP/1.1 connection to an apiserver.
struct UpgradeResponse {
    endpoint: Arc<Endpoint>,
    head: response::Parts,
    body: Incoming,
    driver: Http1Driver,
    /// `Some` for a watch.
    watch: Option<TunnelledWatchGuard>,
}

impl Upgrade {
    /// Sends the request, and starts the tunnel if the apiserver accepts the upgrade.
    ///
    /// # Errors
    /// See [`ForwardResult`].
    pub async fn serve(self: Box<Self>, mut outcome: Box<Outcome>) -> ForwardResult {
        let Self { upstream, class, proof, mut request, tunnels, mut memory, watch_drain } = *self;
        let client = hyper::upgrade::on(&mut request);
        let open_to = |label: &Arc<str>| tunnels.open_to(label);
        let request = (request, watch_drain.is_some());
        let sent = send(&upstream, (class, &proof), request, &mut outcome, open_to).await;
        let UpgradeResponse { endpoint, mut head, body, driver, watch } = match sent {
            Ok(response) => response,
            Err(error) => {
                spawn_local(close_client(client));
                return Err((error, outcome));
            }
        };
        memory.set_upstream(driver.socket());
        outcome.code = Some(head.status.as_u16());
        let is_upgrade = head.status == StatusCode::SWITCHING_PROTOCOLS;
        hygiene::downstream_headers(&mut head.headers, is_upgrade);
        let body = if is_upgrade {
            outcome.upgraded();
            // Registered before the listener stops counting the client's connection.
            let open = tunnels.register(&endpoint.label);
            let watch = watch.zip(watch_drain);
            spawn_local(run_tunnel(client, driver, (open, proof, memory, watch), outcome));
            ResponseBody::Empty
        } else {
            head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
            spawn_local(close_client(client));
            ResponseBody::Http1(Box::new(Http1Body::new(body, (driver, memory), outcome)))
        };
        Ok(body.with_head(head))
    }
}

/// Sends the request on a new connection and waits for the response head. `open_to` returns the number of
/// tunnels to an endpoint; the endpoint with the fewest is tried first.
async fn send(
    client: &UpstreamClient,
    (class, proof): (CredentialClass, &IdentityProof),
    (mut request, is_watch): (Request<Incoming>, bool),
    outcome: &mut Outcome,
    open_to: impl Fn(&Arc<str>) -> usize,
) -> Result<UpgradeResponse, StatusError> {
    let requested: Vec<HeaderValue> = request.headers().get_all(UPGRADE).iter().cloned().collect();
    set_framing(&mut request);
    let upstream = client.pool.upstream();
    let versions = preferred_versions(upstream, request.headers().get(USER_AGENT));
    let path = upstream.path_prefix.strip_sent(request.uri().path());
    let group = path.as_deref().and_then(group).unwrap_or_default();
    let mut connection = http1::open(upstream, class, proof.subject(), (versions, group), open_to)
        .await
        .map_err(|unavailable| StatusError::from(&unavailable))?;
    let endpoint = Arc::clone(&connection.endpoint);
    outcome.sent_to(&endpoint.label, false);
    if is_watch {
        connection.is_for_watch();
    }
    let Http1Response { response, driver, watch } =
        connection.send(request).await.map_err(|error| {
            // `retry::decide` refuses to repeat a tunnel in every stage but `NotSent`.
            client.metrics.retry_refused(RetryRefusal::Unsafe.as_str());
            StatusError::unknown_outcome(format_args!(
                "{error} on the connection to {}",
                endpoint.label
            ))
        })?;
    let (head, body) = response.into_parts();
    endpoint.response_received(head.status.as_u16());
    if head.status == StatusCode::SWITCHING_PROTOCOLS && !is_requested(&requested, &head.headers) {
        let reason = "the apiserver switched to a protocol that was not requested";
        return Err(StatusError::bad_gateway(reason));
    }
    Ok(UpgradeResponse { endpoint, head, body, driver, watch })
}

/// Closes the client's connection after any response but a 101. hyper hands over the connection after such
/// a response too, and dropping it would end TLS without `close_notify`.
async fn close_client(client: OnUpgrade) {
    if let Ok(upgraded) = client.await {
        // An error means that the client has already closed the connection.
        let _ = TokioIo::new(upgraded).shutdown().await;
    }
}

/// Sets chunked framing for a body of unknown length, because hyper otherwise sends no body with a GET.
/// Removes the announcement of trailers, which no upgrade has and which could contain an identity.
fn set_framing(request: &mut Request<Incoming>) {
    *request.version_mut() = Version::HTTP_11;
    let body = request.body();
    let is_length_unknown = !body.is_end_stream() && body.size_hint().exact().is_none();
    let headers = request.headers_mut();
    headers.remove(TRAILER);
    if is_length_unknown {
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
}

/// Whether a 101 with these headers switches to one of the requested protocols.
fn is_requested(requested: &[HeaderValue], headers: &HeaderMap) -> bool {
    let Some(switched_to) = headers.get(UPGRADE) else { return false };
    let switched_to = switched_to.as_bytes().trim_ascii();
    hygiene::list_items(requested).any(|protocol| protocol.eq_ignore_ascii_case(switched_to))
}

/// Runs one tunnel until it ends, and records which side ended it.
async fn run_tunnel(
    client: OnUpgrade,
    driver: Http1Driver,
    (open, proof, _memory, watch): (OpenTunnel, IdentityProof, TunnelMemory, Option<OpenWatch>),
    mut outcome: Box<Outcome>,
) {
    let mut received = 0;
    let end = tokio::select! {
        end = copy_bytes(client, driver, &mut received) => end,
        () = open.closing() => Err((Side::Jackstay, "shutdown".to_owned())),
        reason = proof.follow_until_expiry() => Err((Side::Jackstay, reason)),
        end = watch_end(watch) => Err(end),
    };
    outcome.bytes += received as u64;
    match end {
        Ok(()) => outcome.complete(),
        Err((side, reason)) => outcome.cut(side, reason),
    }
}

/// Waits until a watch should end before its client or its apiserver ends it.
async fn watch_end(watch: Option<OpenWatch>) -> (Side, String) {
    let Some((watch, mut drain)) = watch else { return pending().await };
    let left = async {
        watch.removed().await;
        sleep(LEAVE_SPREAD.mul_f64(fastrand::f64())).await;
    };
    tokio::select! {
        reason = watch.died() => (Side::Upstream, reason),
        () = left => (Side::Jackstay, "the endpoint was removed from the set".to_owned()),
        () = drain.staggered_end() => (Side::Jackstay, "shutdown".to_owned()),
    }
}

/// Copies bytes until both directions have ended or one side fails. Sets `received` to the number of bytes
/// from upstream.
async fn copy_bytes(
    client: OnUpgrade,
    driver: Http1Driver,
    received: &mut usize,
) -> Result<(), (Side, String)> {
    let (mut client, (mut upstream, flow)) = tokio::try_join!(
        async {
            let upgraded = client.await.map_err(|error| (Side::Client, error.to_string()))?;
            client_stream::into_tunnel_stream(upgraded)
                .map_err(|reason| (Side::Jackstay, reason.to_owned()))
        },
        async { driver.reclaim().await.map_err(|error| (Side::Upstream, error.to_string())) },
    )?;
    let result = tokio::select! {
        // After a failed write to the upstream, `upstream` still returns the bytes that have arrived from
        // it, because the last ones are the exit status of the command.
        result = copy_bidirectional_with_sizes(&mut client, &mut upstream, BUFFER_SIZE, BUFFER_SIZE) => {
            result.map(drop).map_err(|error| match upstream.error() {
                Some(reason) => (Side::Upstream, reason.to_owned()),
                None => (Side::Client, error.to_string()),
            })
        }
        reason = flow.wait_until_dead() => Err((Side::Upstream, reason.to_owned())),
    };
    *received = usize::try_from(upstream.bytes_read()).unwrap_or(usize::MAX);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_requested_accepts_only_requested_protocols() {
        let value = HeaderValue::from_static;
        let response = |protocol| HeaderMap::from_iter([(UPGRADE, value(protocol))]);
        let spdy = [value("SPDY/3.1")];
        assert!(is_requested(&spdy, &response("SPDY/3.1")));
        assert!(is_requested(&spdy, &response("spdy/3.1")));
        assert!(is_requested(&[value("foo, websocket")], &response("websocket")));
        assert!(!is_requested(&spdy, &response("websocket")));
        assert!(!is_requested(&spdy, &HeaderMap::new()));
    }
}
