//! Upgrades (exec, attach, port-forward, cp): `SPDY/3.1` and `websocket`, each on an upstream
//! HTTP/1.1 connection of its own.
//!
//! * Bytes are tunnelled after a 101 to what was asked for, and never otherwise: an answer taken
//!   for an upgrade that it is not would leave the client alone with an authenticated connection
//!   (CVE-2018-1002105). Anything else is relayed as an answer, and both connections close. A
//!   redirect is such an answer.
//! * A request is tried elsewhere until it is sent, and not once after: a command may have run. It
//!   waits for its answer as long as any write does where its path is lost or its process stopped.
//! * Both directions end on their own, as TCP's do. Whatever breaks one side breaks the other.
//! * A tunnel ends when the proof of its client does ([`super::client_certificate`]).
//! * There is no timeout. A flow that is dead for `tunnel_dead_after` is ended
//!   ([`crate::upstream::flow_health`]): nothing can take its place, and a path may come back. A quiet one is
//!   left alone, and a client that reads no bytes may be a person paging through `kubectl exec … | less`.
//!
//! `Sec-WebSocket-Protocol` may hold a bearer token, so no header is ever logged here.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;

use http::header::{CONNECTION, TRAILER, TRANSFER_ENCODING, UPGRADE};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version, response};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, copy_bidirectional_with_sizes};
use tokio::sync::Notify;
use tokio::task::spawn_local;

use super::client_certificate::IdentityProof;
use super::client_stream::ClientStream;
use super::hygiene;
use super::respond::StatusError;
use super::response_body::{Http1Body, ResponseBody};
use super::upstream_client::{self, UpstreamClient};
use crate::net::sockets::drain_reads::DrainReads;
use crate::net::sockets::prefixed_stream::PrefixedStream;
use crate::observe::{Outcome, Side};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::http1::{self, Http1Driver};

/// Bytes held in each direction of a tunnel: one TLS record.
const BUFFER: usize = 16 * 1024;

/// Serves a request that wants to leave HTTP, on a connection of this class, for as long as the proof
/// holds. Its headers are clean already.
///
/// # Errors
/// What the client is told instead, with the outcome to record it in.
pub async fn serve(
    line: &Rc<UpstreamClient>,
    (class, proof): (CredentialClass, IdentityProof),
    mut request: Request<Incoming>,
    mut outcome: Box<Outcome>,
    tunnels: &Tunnels,
) -> Result<Response<ResponseBody>, (StatusError, Box<Outcome>)> {
    let client = hyper::upgrade::on(&mut request);
    let (endpoint, answer) = match ask(line, (class, &proof), request, &mut outcome, tunnels).await
    {
        Ok(answer) => answer,
        Err(problem) => {
            spawn_local(farewell(client));
            return Err((problem, outcome));
        }
    };
    let (mut head, body, driver) = answer;
    outcome.answered(head.status.as_u16());
    let body = if head.status == StatusCode::SWITCHING_PROTOCOLS {
        hygiene::downstream_upgrade_headers(&mut head.headers);
        outcome.upgraded();
        // Counted before the client's connection is no longer one of the listener's.
        let open = tunnels.enter(&endpoint.label);
        spawn_local(tunnel(client, driver, (open, proof), outcome));
        ResponseBody::Empty
    } else {
        hygiene::downstream_response_headers(&mut head.headers);
        head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
        spawn_local(farewell(client));
        ResponseBody::Http1(Box::new(Http1Body::new(body, driver, outcome)))
    };
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    Ok(response)
}

type Answer = (response::Parts, Incoming, Http1Driver);

/// Asks an apiserver and waits for the head of its answer.
async fn ask(
    line: &Rc<UpstreamClient>,
    (class, proof): (CredentialClass, &IdentityProof),
    mut request: Request<Incoming>,
    outcome: &mut Outcome,
    tunnels: &Tunnels,
) -> Result<(Arc<Endpoint>, Answer), StatusError> {
    let wanted: Vec<HeaderValue> = request.headers().get_all(UPGRADE).iter().cloned().collect();
    frame(&mut request);
    let upstream = line.pool.upstream();
    let connection = http1::open(upstream, class, proof.subject(), |label| tunnels.to(label))
        .await
        .map_err(|unavailable| upstream_client::problem(&unavailable))?;
    let endpoint = Arc::clone(&connection.endpoint);
    outcome.sent_to(&endpoint.label, false);
    let (response, driver) = connection.send(request).await.map_err(|why| {
        line.metrics.retry_refused("unsafe");
        StatusError::unknown_fate(&format!("{why} on the connection to {}", endpoint.label))
    })?;
    let (head, body) = response.into_parts();
    endpoint.response_received(head.status.as_u16());
    if head.status == StatusCode::SWITCHING_PROTOCOLS && !is_among(&wanted, &head.headers) {
        let why = "the apiserver switched to a protocol that was not asked for";
        return Err(StatusError::bad_gateway(why));
    }
    Ok((endpoint, (head, body, driver)))
}

/// Closes the client's connection after an answer that was no 101. hyper hands it over all the
/// same once it is done with it, and dropping it would end TLS without a word.
async fn farewell(client: OnUpgrade) {
    if let Ok(upgraded) = client.await {
        // It fails when the client was faster.
        let _ = TokioIo::new(upgraded).shutdown().await;
    }
}

/// Names the framing of a body whose length is not known: without it hyper sends none with a GET.
/// Trailers stay here; no upgrade has them, and an identity could hide in one.
fn frame(request: &mut Request<Incoming>) {
    *request.version_mut() = Version::HTTP_11;
    let unknown = !request.body().is_end_stream() && request.body().size_hint().exact().is_none();
    let headers = request.headers_mut();
    headers.remove(TRAILER);
    if unknown {
        headers.insert(TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
    }
}

/// Whether a 101 switches to one of the protocols asked for.
fn is_among(wanted: &[HeaderValue], headers: &HeaderMap) -> bool {
    let Some(got) = headers.get(UPGRADE) else { return false };
    wanted
        .iter()
        .flat_map(|value| value.as_bytes().split(|&byte| byte == b','))
        .any(|protocol| protocol.trim_ascii().eq_ignore_ascii_case(got.as_bytes().trim_ascii()))
}

/// Runs one tunnel to its end and says who ended it.
async fn tunnel(
    client: OnUpgrade,
    driver: Http1Driver,
    (open, proof): (Open, IdentityProof),
    mut outcome: Box<Outcome>,
) {
    let mut received = 0;
    let end = tokio::select! {
        end = carry(client, driver, &mut received) => end,
        () = open.tunnels.ended() => Err((Side::Jackstay, "shutdown".to_owned())),
        why = proof.followed_to_its_end() => Err((Side::Jackstay, why)),
    };
    outcome.add_bytes(received);
    match end {
        Ok(()) => outcome.complete(),
        Err((side, why)) => outcome.cut(side, why),
    }
}

/// Carries bytes both ways until both directions have ended, or one side is broken. `received`
/// counts what came from upstream.
async fn carry(
    client: OnUpgrade,
    driver: Http1Driver,
    received: &mut usize,
) -> Result<(), (Side, String)> {
    let (mut client, (mut upstream, flow)) = tokio::try_join!(
        async { unstalled(client.await.map_err(|error| (Side::Client, error.to_string()))?) },
        async { driver.reclaim().await.map_err(|why| (Side::Upstream, why)) },
    )?;
    let result = tokio::select! {
        result = both_ways(&mut client, &mut upstream) => {
            result.map(drop).map_err(|error| match upstream.error() {
                Some(why) => (Side::Upstream, why.to_owned()),
                None => (Side::Client, error.to_string()),
            })
        }
        why = flow.died() => Err((Side::Upstream, why.to_owned())),
    };
    *received = usize::try_from(upstream.bytes_read()).unwrap_or(usize::MAX);
    result
}

/// Copies both ways. An upstream that takes nothing more is read to its end first: its last words are
/// the exit status.
async fn both_ways(
    client: &mut (impl AsyncRead + AsyncWrite + Unpin),
    upstream: &mut (impl AsyncRead + AsyncWrite + Unpin),
) -> io::Result<(u64, u64)> {
    copy_bidirectional_with_sizes(client, &mut DrainReads::new(upstream), BUFFER, BUFFER).await
}

/// The client's connection, on which from now on no write is ever overdue.
fn unstalled(upgraded: Upgraded) -> Result<PrefixedStream<ClientStream>, (Side, String)> {
    let parts = upgraded
        .downcast::<TokioIo<ClientStream>>()
        .map_err(|_| (Side::Jackstay, "not a connection of a listener".to_owned()))?;
    let mut stream = parts.io.into_inner();
    stream.get_mut().0.get_mut().forgive();
    Ok(PrefixedStream::new(parts.read_buf, stream))
}

/// The tunnels of one worker: a drain counts them, waits for them and, in the end, ends them.
#[derive(Debug, Clone, Default)]
pub struct Tunnels(Rc<Registry>);

#[derive(Debug, Default)]
struct Registry {
    /// How many lead to each endpoint.
    open: RefCell<HashMap<Arc<str>, usize>>,
    ending: Cell<bool>,
    changed: Notify,
}

impl Tunnels {
    /// How many are open.
    pub fn open(&self) -> usize {
        self.0.open.borrow().values().sum()
    }

    /// Waits until none is open.
    pub async fn closed(&self) {
        self.0.wait(|| self.open() == 0).await;
    }

    /// Ends those that are open, and any that opens from now on.
    pub fn end(&self) {
        self.0.ending.set(true);
        self.0.changed.notify_waiters();
    }

    async fn ended(&self) {
        self.0.wait(|| self.0.ending.get()).await;
    }

    fn to(&self, endpoint: &Arc<str>) -> usize {
        self.0.open.borrow().get(endpoint).copied().unwrap_or(0)
    }

    fn enter(&self, endpoint: &Arc<str>) -> Open {
        *self.0.open.borrow_mut().entry(Arc::clone(endpoint)).or_default() += 1;
        Open { tunnels: self.clone(), endpoint: Arc::clone(endpoint) }
    }
}

impl Registry {
    async fn wait(&self, done: impl Fn() -> bool) {
        loop {
            // Registered before the look, so that no change falls between look and wait.
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if done() {
                return;
            }
            changed.await;
        }
    }
}

/// Counts a tunnel for as long as it is open.
struct Open {
    tunnels: Tunnels,
    endpoint: Arc<str>,
}

impl Drop for Open {
    fn drop(&mut self) {
        let registry = &self.tunnels.0;
        let mut open = registry.open.borrow_mut();
        if let Some(count) = open.get_mut(&self.endpoint) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.endpoint);
            }
        }
        // Nobody but a drain waits for this, and the tunnels themselves look only at `ending`.
        if open.is_empty() {
            registry.changed.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn only_what_was_asked_for_is_an_upgrade() {
        let value = HeaderValue::from_static;
        let answer = |protocol| HeaderMap::from_iter([(UPGRADE, value(protocol))]);
        let spdy = [value("SPDY/3.1")];
        assert!(is_among(&spdy, &answer("SPDY/3.1")));
        assert!(is_among(&spdy, &answer("spdy/3.1")));
        assert!(is_among(&[value("foo, websocket")], &answer("websocket")));
        assert!(!is_among(&spdy, &answer("websocket")));
        assert!(!is_among(&spdy, &HeaderMap::new()));
    }

    #[test]
    fn a_drain_waits_for_the_last_tunnel() {
        let tunnels = Tunnels::default();
        let (here, there) = (Arc::from("here"), Arc::from("there"));
        let open = [tunnels.enter(&here), tunnels.enter(&here), tunnels.enter(&there)];
        assert_eq!((tunnels.open(), tunnels.to(&here), tunnels.to(&there)), (3, 2, 1));
        let mut cx = Context::from_waker(Waker::noop());
        let mut closed = pin!(tunnels.closed());
        let mut ended = pin!(tunnels.ended());
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Pending);
        assert_eq!(ended.as_mut().poll(&mut cx), Poll::Pending);
        tunnels.end();
        assert_eq!(ended.as_mut().poll(&mut cx), Poll::Ready(()));
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Pending);
        drop(open);
        assert_eq!(closed.as_mut().poll(&mut cx), Poll::Ready(()));
        assert_eq!(tunnels.open(), 0);
    }
}
