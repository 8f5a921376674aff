//! Recognises which apiserver behind an address a connection has reached ([`jackstay_core::backends`]).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

use bytes::BytesMut;
use http::{HeaderValue, Request, StatusCode};
use jackstay_config::EndpointKind;
use jackstay_core::backends::{BackendId, Kind, MAX_TRIES, ObservedBackend, advertised_address};
use jackstay_core::credential_class::CredentialClass;
use jackstay_sys::clock;
use jackstay_sys::sockets::tracked_stream::StreamObserver;
use tokio::time::timeout;

use super::connect_race::race;
use super::credentials::ClientTls;
use super::dial::{DialedConnection, UpstreamStream, certificate_hash, dial_h2, dial_http1};
use super::endpoint::{ConnectFailure, ConnectFailureKind, ConnectTimeout, Endpoint};
use super::question;
use super::readyz_question::LIVEZ;
use super::shared::Upstream;

/// How long an apiserver may take to answer on a new connection.
const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// How long a connect may take until a further one races it.
const RACE_AFTER: Duration = Duration::from_millis(500);
/// Connects of a search that may fail, as those to an apiserver that is down. All others have reached other apiservers.
const MAX_FAILURES: usize = 4;
/// Maximum number of connects that race each other.
const MAX_RACING: usize = 3;
/// Number of connections to apiservers that are not ready after which a further one is taken, if they cannot be told apart.
const MAX_UNREADY: usize = 2;
/// Maximum length of the body of an answer on a new connection, in bytes.
const MAX_ANSWER: usize = 16 * 1024;

/// The credential of a question on a new connection.
#[derive(Debug, Clone)]
pub enum QuestionCredential {
    /// The certificate of the connection.
    Certificate,
    /// The configured token.
    Token(HeaderValue),
    /// The token of a client whose request waits for the connection.
    Client(HeaderValue),
    /// Only requests wait whose token was refused.
    RefusedClient,
    /// None: the apiserver would end the connection after an anonymous question.
    None,
}

impl QuestionCredential {
    /// The token to send, if any; `None` if nothing may be asked.
    #[expect(clippy::option_option, reason = "the certificate is a credential without a token")]
    pub fn token(&self) -> Option<Option<HeaderValue>> {
        match self {
            Self::Certificate => Some(None),
            Self::Token(token) | Self::Client(token) => Some(Some(token.clone())),
            Self::RefusedClient | Self::None => None,
        }
    }
}

/// The credential of questions on a connection of this class.
pub fn question_credential(
    upstream: &Upstream,
    class: CredentialClass,
    tls: &ClientTls,
) -> QuestionCredential {
    let token = || upstream.credentials.probe_token()?.header();
    match class {
        _ if tls.certificate.is_some() => QuestionCredential::Certificate,
        CredentialClass::Anonymous => QuestionCredential::None,
        _ => token().map_or(QuestionCredential::None, QuestionCredential::Token),
    }
}

/// What a new connection has reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reached {
    /// The backend of its endpoint.
    Wanted,
    /// Another one.
    Other,
    /// That cannot be asked. The connection is judged by what its requests show.
    Unknown,
    /// The credential was refused, after which the apiserver ends the connection.
    Refused,
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
    credential: &QuestionCredential,
) -> Result<DialedConnection, ConnectFailure> {
    let (connector, config) = (upstream.connector(), upstream.config());
    // They stay open until the search ends: a balancer that prefers the apiserver with the fewest connections (`leastconn`)
    // would otherwise choose the same one again.
    let others = RefCell::new(Vec::new());
    let paths = asked_paths(upstream, endpoint, &config.health.readyz.path);
    search(upstream, endpoint, limit, async |limit| {
        let mut dialed = dial_h2(&connector, endpoint, tls, limit, max_streams).await?;
        match Box::pin(reached(&mut dialed, (endpoint, &paths), credential)).await {
            Reached::Wanted => return Ok(Some(dialed)),
            // When none is ready, one that is not is better than none.
            Reached::Other if endpoint.is_indistinct() && others.borrow().len() >= MAX_UNREADY => {
                return Ok(Some(dialed));
            }
            Reached::Other => {
                others.borrow_mut().push(dialed);
                return Ok(None);
            }
            Reached::Unknown => {
                dialed.for_one_request = matches!(credential, QuestionCredential::RefusedClient);
            }
            Reached::Refused => {
                dialed = dial_h2(&connector, endpoint, tls, limit, max_streams).await?;
                dialed.for_one_request = matches!(credential, QuestionCredential::Client(_));
            }
        }
        Ok(Some(dialed))
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
    let (connector, others) = (upstream.connector(), RefCell::new(Vec::new()));
    search(upstream, endpoint, limit, async |limit| {
        let (stream, observer) = dial_http1(&connector, endpoint, tls, limit).await?;
        let observed = ObservedBackend { certificate: certificate_hash(&stream), address: None };
        let backend = endpoint.backend.as_ref();
        let is_other = backend.and_then(|backend| backend.id.is(&observed)) == Some(false);
        if is_other {
            others.borrow_mut().push(stream);
            return Ok(None);
        }
        Ok(Some((stream, observer)))
    })
    .await
}

/// Connects until a connection has reached the backend of the endpoint. A connect that fails may have reached another one,
/// and so may one that takes long: then a further one races it.
async fn search<T>(
    upstream: &Upstream,
    endpoint: &Endpoint,
    limit: ConnectTimeout,
    connect: impl AsyncFn(ConnectTimeout) -> Result<Option<T>, ConnectFailure>,
) -> Result<T, ConnectFailure> {
    // An address that may be one apiserver is not asked more often when that is overloaded.
    let is_several = || {
        let kind = upstream.backends.kind(&endpoint.address.to_string());
        upstream.config().kind == EndpointKind::Balancer || kind.is_some_and(Kind::is_several)
    };
    if endpoint.backend.is_none() && !is_several() {
        return connect(limit).await?.ok_or_else(|| reached_others(endpoint, 1));
    }
    let deadline = clock::now() + limit.limit();
    let (mut tries, mut failures, others_reached) = (0, Vec::new(), Cell::new(0));
    let next = |failures: &[ConnectFailure]| {
        let left = deadline.saturating_duration_since(clock::now());
        let may_follow = || {
            tries < MAX_TRIES
                && tries - failures.len() < MAX_RACING
                && failures.len() - others_reached.get() < MAX_FAILURES
                && !left.is_zero()
                && !failures.iter().any(is_short)
                && upstream.backends.may_search(&endpoint.label)
        };
        if tries > 0 && !may_follow() {
            return None;
        }
        let limit = if tries == 0 { limit } else { ConnectTimeout::fixed(left) };
        tries += 1;
        let (connect, others) = (&connect, &others_reached);
        Some(async move {
            connect(limit).await?.ok_or_else(|| {
                others.set(others.get() + 1);
                reached_others(endpoint, others.get())
            })
        })
    };
    // An overloaded apiserver gets more time with each failure in a row.
    let pause = || RACE_AFTER.max(limit.limit() / 6);
    if let Some(connected) = race(next, pause, &mut failures).await {
        return Ok(connected);
    }
    let shortage = failures.iter().position(is_short);
    match shortage {
        None if others_reached.get() > 0 => Err(reached_others(endpoint, others_reached.get())),
        _ => Err(failures.swap_remove(shortage.unwrap_or_default())),
    }
}

/// Whether a connect has failed by a shortage of this host.
fn is_short(failure: &ConnectFailure) -> bool {
    failure.kind == ConnectFailureKind::LocalShortage
}

fn reached_others(endpoint: &Endpoint, tries: usize) -> ConnectFailure {
    let reason =
        format!("no connection of {tries} to {} has reached this apiserver", endpoint.address);
    ConnectFailure::new(ConnectFailureKind::Failed, reason)
}

/// What a new connection is asked, by the feature by which the backend of its endpoint is recognised. While an apiserver
/// is not ready, one that cannot be told apart from it is also asked [`LIVEZ`], whose checks include etcd.
fn asked_paths<'a>(upstream: &Upstream, endpoint: &Endpoint, readyz_path: &'a str) -> Vec<&'a str> {
    match endpoint.backend.as_ref().map(|backend| &backend.id) {
        None | Some(BackendId::Certificate(_)) => Vec::new(),
        Some(BackendId::Address(_)) => vec!["/api"],
        Some(BackendId::Indistinct(_)) if upstream.backends.was_one_left() => {
            vec![readyz_path, LIVEZ]
        }
        Some(BackendId::Indistinct(_)) => vec![readyz_path],
    }
}

/// What a new connection has reached, by its answers for these paths.
async fn reached(
    dialed: &mut DialedConnection,
    (endpoint, paths): (&Endpoint, &[&str]),
    credential: &QuestionCredential,
) -> Reached {
    let Some(backend) = &endpoint.backend else { return Reached::Wanted };
    if let BackendId::Certificate(certificate) = backend.id {
        return if certificate == dialed.certificate { Reached::Wanted } else { Reached::Other };
    }
    for path in paths {
        let Some(token) = credential.token() else { return Reached::Unknown };
        // One that does not answer is not taken.
        let Some(answer) = ask(dialed, question::get(endpoint, path, token)).await else {
            return Reached::Other;
        };
        let is_wanted = match (answer.0, &backend.id) {
            (StatusCode::UNAUTHORIZED, _) => return Reached::Refused,
            (StatusCode::FORBIDDEN, _) => return Reached::Unknown,
            (_, BackendId::Address(address)) => address_in(answer).as_ref() == Some(address),
            // Kubernetes before 1.16 has no such path.
            (status, _) => {
                status == StatusCode::OK || status == StatusCode::NOT_FOUND && *path == LIVEZ
            }
        };
        if !is_wanted {
            return Reached::Other;
        }
    }
    Reached::Wanted
}

/// The address that the apiserver advertises in this answer.
fn address_in((status, body): (StatusCode, BytesMut)) -> Option<Box<str>> {
    (status == StatusCode::OK).then(|| advertised_address(&body))?
}

/// What a new connection shows of its backend.
pub async fn observe(
    dialed: &mut DialedConnection,
    endpoint: &Endpoint,
    credential: &QuestionCredential,
) -> ObservedBackend {
    let certificate = dialed.certificate;
    let Some(token) = credential.token() else {
        return ObservedBackend { certificate, address: None };
    };
    let answer = ask(dialed, question::get(endpoint, "/api", token)).await;
    ObservedBackend { certificate, address: answer.and_then(address_in) }
}

/// Sends a request on a connection that nothing else drives yet. Returns the answer, if it comes in time.
async fn ask(
    dialed: &mut DialedConnection,
    request: Request<()>,
) -> Option<(StatusCode, BytesMut)> {
    timeout(ANSWER_LIMIT, exchange(dialed, request)).await.ok()?
}

async fn exchange(
    dialed: &mut DialedConnection,
    request: Request<()>,
) -> Option<(StatusCode, BytesMut)> {
    let DialedConnection { send, h2, uncork, .. } = dialed;
    let mut send = send.clone();
    let mut exchange = pin!(async move {
        let (response, _) = send.send_request(request, true).ok()?;
        let response = response.await.ok()?;
        let status = response.status();
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
        Some((status, body))
    });
    poll_fn(|cx| {
        if let Poll::Ready(answer) = exchange.as_mut().poll(cx) {
            return Poll::Ready(answer);
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
