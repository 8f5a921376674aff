//! Recognises which apiserver behind an address a connection has reached ([`jackstay_core::backends`]).

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use http::{HeaderValue, Request, StatusCode};
use jackstay_core::backends::{BackendId, MAX_TRIES, ObservedBackend, advertised_address};
use jackstay_core::credential_class::CredentialClass;
use jackstay_sys::clock;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use tokio::time::timeout;

use super::credentials::ClientTls;
use super::dial::{DialedConnection, UpstreamStream, certificate_hash, dial_h2, dial_http1};
use super::endpoint::{ConnectFailure, ConnectFailureKind, ConnectTimeout, Endpoint};
use super::question;
use super::shared::Upstream;

/// How long an apiserver may take to say at which address it is reached.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How long one of several connects may take.
const TRY_LIMIT: Duration = Duration::from_secs(1);
/// Maximum length of that answer, in bytes.
const MAX_ANSWER: usize = 16 * 1024;

/// The credential of a question on a new connection.
#[derive(Debug, Clone)]
pub enum QuestionCredential {
    /// The certificate of the connection.
    Certificate,
    /// The configured token.
    Token(HeaderValue),
    /// None: the apiserver would end the connection after an anonymous question.
    None,
}

/// The credential of questions on a new connection of this class.
pub fn token(upstream: &Upstream, class: CredentialClass, tls: &ClientTls) -> QuestionCredential {
    let token = || upstream.credentials.probe_token()?.header();
    match class {
        _ if tls.certificate.is_some() => QuestionCredential::Certificate,
        CredentialClass::Anonymous => QuestionCredential::None,
        _ => token().map_or(QuestionCredential::None, QuestionCredential::Token),
    }
}

/// Opens an HTTP/2 connection that has reached the backend of the endpoint, if it is one of several behind its address.
///
/// # Errors
/// No connection was opened, or those that were have reached others.
pub async fn dial_backend(
    upstream: &Upstream,
    (endpoint, tls): (&Endpoint, &ClientTls),
    limit: ConnectTimeout,
    max_streams: usize,
    credential: QuestionCredential,
) -> Result<DialedConnection, ConnectFailure> {
    let connector = upstream.connector();
    search(upstream, endpoint, limit, async |limit| {
        let mut dialed = dial_h2(&connector, endpoint, tls, limit, max_streams).await?;
        let has_reached = Box::pin(has_reached(&mut dialed, endpoint, &credential)).await;
        Ok(has_reached.then_some(dialed))
    })
    .await
}

/// [`dial_backend`] for one upgrade. Only a backend that is recognised by its certificate is, because a question would be a
/// request on the connection.
///
/// # Errors
/// As those of [`dial_backend`].
pub async fn dial_backend_http1(
    upstream: &Upstream,
    (endpoint, tls): (&Endpoint, &ClientTls),
    limit: ConnectTimeout,
) -> Result<(UpstreamStream, StreamObserver), ConnectFailure> {
    let connector = upstream.connector();
    search(upstream, endpoint, limit, async |limit| {
        let (stream, observer) = dial_http1(&connector, endpoint, tls, limit).await?;
        let observed = ObservedBackend { certificate: certificate_hash(&stream), address: None };
        let backend = endpoint.backend.as_ref();
        let is_other = backend.and_then(|backend| backend.id.is(&observed)) == Some(false);
        Ok((!is_other).then_some((stream, observer)))
    })
    .await
}

/// Connects until a connection has reached the backend of the endpoint. A connect that fails may have reached another one.
async fn search<T>(
    upstream: &Upstream,
    endpoint: &Endpoint,
    limit: ConnectTimeout,
    connect: impl AsyncFn(ConnectTimeout) -> Result<Option<T>, ConnectFailure>,
) -> Result<T, ConnectFailure> {
    if endpoint.backend.is_none() {
        let connected = connect(limit).await?;
        return connected.ok_or_else(|| reached_others(endpoint, 1));
    }
    let deadline = clock::now() + limit.limit();
    // An overloaded apiserver gets more time with each failure in a row.
    let try_limit = TRY_LIMIT.max(limit.limit() / 3);
    let mut failure = None;
    for tries in 1..=MAX_TRIES {
        // Without a usable endpoint, all clients wait for one.
        if tries > 1 && upstream.is_usable() && !upstream.backends.may_search(&endpoint.label) {
            break;
        }
        let left = deadline.saturating_duration_since(clock::now()).min(try_limit);
        match connect(ConnectTimeout::fixed(left)).await {
            Ok(Some(connected)) => return Ok(connected),
            Ok(None) => failure = Some(reached_others(endpoint, tries)),
            Err(failed) if failed.kind == ConnectFailureKind::LocalShortage => return Err(failed),
            Err(failed) => failure = failure.or(Some(failed)),
        }
        if clock::now() >= deadline {
            break;
        }
    }
    Err(failure.unwrap_or_else(|| reached_others(endpoint, 0)))
}

fn reached_others(endpoint: &Endpoint, tries: usize) -> ConnectFailure {
    let reason =
        format!("no connection of {tries} to {} has reached this apiserver", endpoint.address);
    ConnectFailure::new(ConnectFailureKind::Failed, reason)
}

/// Whether a new connection has reached the backend of its endpoint.
async fn has_reached(
    dialed: &mut DialedConnection,
    endpoint: &Endpoint,
    credential: &QuestionCredential,
) -> bool {
    let Some(backend) = &endpoint.backend else { return true };
    let credential = match backend.id {
        BackendId::Certificate(_) => &QuestionCredential::None,
        BackendId::Address(_) => credential,
    };
    let observed = observe(dialed, endpoint, credential).await;
    // Without a credential the connection is judged by what its requests show. One that does not answer is not taken.
    let is_asked = !matches!(credential, QuestionCredential::None);
    backend.id.is(&observed).unwrap_or(!is_asked)
}

/// What a new connection shows of its backend.
pub async fn observe(
    dialed: &mut DialedConnection,
    endpoint: &Endpoint,
    credential: &QuestionCredential,
) -> ObservedBackend {
    let certificate = dialed.certificate;
    let token = match credential {
        QuestionCredential::None => return ObservedBackend { certificate, address: None },
        QuestionCredential::Certificate => None,
        QuestionCredential::Token(token) => Some(token.clone()),
    };
    let request = question::get(endpoint, "/api", token);
    let answer = timeout(ANSWER_LIMIT, fetch(dialed, request)).await;
    let body = answer.ok().flatten();
    ObservedBackend { certificate, address: body.and_then(|body| advertised_address(&body)) }
}

/// Sends a request on a connection that nothing else drives yet. Returns the body of a 200.
async fn fetch(dialed: &mut DialedConnection, request: Request<()>) -> Option<BytesMut> {
    let DialedConnection { send, h2, uncork, .. } = dialed;
    let mut send = send.clone();
    let mut exchange = pin!(async move {
        let (response, _) = send.send_request(request, true).ok()?;
        let response = response.await.ok()?;
        let is_ok = response.status() == StatusCode::OK;
        let mut recv = response.into_body();
        let mut body = BytesMut::new();
        while let Some(data) = recv.data().await {
            let data = data.ok()?;
            let _ = recv.flow_control().release_capacity(data.len());
            body.extend_from_slice(&data);
            if body.len() > MAX_ANSWER {
                return None;
            }
        }
        is_ok.then_some(body)
    });
    poll_fn(|cx| {
        if let Poll::Ready(body) = exchange.as_mut().poll(cx) {
            return Poll::Ready(body);
        }
        if std::pin::Pin::new(&mut *h2).poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        if let Poll::Ready(Err(_)) = uncork.poll(cx) {
            return Poll::Ready(None);
        }
        // What has arrived may complete the answer.
        exchange.as_mut().poll(cx)
    })
    .await
}
