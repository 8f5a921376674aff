//! One client connection: its requests in, its answers out, and the phases between them.
//!
//! `clean -> classify -> identify -> (upgrade | forward) -> answer`, each request recorded once by
//! its [`Outcome`], whatever happens to it.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use http::request::Parts;
use http::uri::{Authority, Scheme};
use http::{HeaderValue, Request, Response, Uri, header};
use hyper::body::Incoming;

use super::client_certificate::{ClientCertificate, IdentityProof};
use super::credential_selector::{self, CredentialSelector, LastToken};
use super::drain::DrainWatcher;
use super::forward::ForwardedRequest;
use super::hygiene::{self, ForwardedFor};
use super::request_body::RequestBody;
use super::request_info::{RequestInfo, RequestKind};
use super::respond::StatusError;
use super::response_body::{FullBody, ResponseBody};
use super::upgrade;
use super::upstream_client::UpstreamClient;
use super::watch::request::{self as watch_request, WatchRequest, with_query};
use crate::config::{AccessLog, Limits, RequestLimits};
use crate::observe::{ListenerMetrics, Outcome, UserClass};
use crate::upstream::credentials::CredentialClass;

/// What the connections of one listener share, on one worker. A reload replaces it whole: each
/// request is served by the one that it found.
pub struct ListenerService {
    /// Where their requests go.
    pub upstream: Rc<UpstreamClient>,
    /// Whose credential may go with them.
    pub credentials: CredentialSelector,
    /// Where they are counted.
    pub metrics: Arc<ListenerMetrics>,
    /// Which of them are logged.
    pub access_log: AccessLog,
    /// API groups beyond the built-in ones whose watches may be resumed.
    pub resume_groups: Vec<String>,
    /// Bounds on connections.
    pub limits: Limits,
    /// Bounds on requests. A connection keeps to those that it found.
    pub request_limits: RequestLimits,
    /// Upgraded connections, which a drain counts too.
    pub tunnels: upgrade::Tunnels,
    /// When its watches are to end.
    pub drain: DrainWatcher,
}

/// The service of a listener as it is now.
#[derive(Clone)]
pub struct CurrentService(Rc<RefCell<Rc<ListenerService>>>);

impl CurrentService {
    /// Begins with this one.
    pub fn new(service: Rc<ListenerService>) -> Self {
        Self(Rc::new(RefCell::new(service)))
    }

    /// The one for a request that begins now.
    pub fn now(&self) -> Rc<ListenerService> {
        Rc::clone(&self.0.borrow())
    }

    /// Serves the next requests with another one, and returns the one before.
    pub fn replace(&self, service: Rc<ListenerService>) -> Rc<ListenerService> {
        self.0.replace(service)
    }
}

/// A client connection.
pub struct ClientConnection {
    /// What serves it.
    pub serving: CurrentService,
    /// What it has shown in TLS, if anything.
    pub peer: Option<Rc<ClientCertificate>>,
    /// Where it comes from.
    pub address: IpAddr,
    /// The same for the apiserver.
    pub forwarded_for: ForwardedFor,
    /// The token that it used last.
    pub token: LastToken,
}

impl ClientConnection {
    /// Answers one request. There is always an answer, if only an error of ours.
    ///
    /// Boxed: hyper and tokio move a request's future several times, and what is left of it stays
    /// with its body for as long as that lasts.
    pub fn handle(
        self: Rc<Self>,
        request: Request<Incoming>,
    ) -> Pin<Box<impl Future<Output = Result<Response<ResponseBody>, Infallible>>>> {
        Box::pin(async move {
            let accept = request.headers().get(header::ACCEPT).cloned();
            let service = self.serving.now();
            if let Some(peer) = &self.peer
                && peer.proven(SystemTime::now()).is_none()
            {
                // Boxed, so that no other request carries room for it. What comes of it is seen below.
                Box::pin(peer.verified()).await;
            }
            let result = match self.start(&service, request) {
                Ok(Begun::Forward(outgoing, outcome, token)) => {
                    let result = outgoing.forward(outcome).await;
                    if let (Ok(response), Some((token, class))) = (&result, token) {
                        service.credentials.learn(token.as_bytes(), class, response.status());
                    }
                    result
                }
                Ok(Begun::Upgrade(serving, token)) => {
                    let result = serving.await;
                    if let (Ok(response), Some((token, class))) = (&result, token) {
                        service.credentials.learn(&token, class, response.status());
                    }
                    result
                }
                Err(failed) => Err(failed),
            };
            Ok(result.unwrap_or_else(|failed| refusal(failed, accept.as_ref())))
        })
    }

    /// Everything that needs no waiting.
    fn start<'a>(
        &self,
        service: &'a ListenerService,
        request: Request<Incoming>,
    ) -> Result<Begun<'a>, Failed> {
        let (parts, body) = request.into_parts();
        let mut outcome =
            Box::new(Outcome::begin(&service.metrics, service.access_log, self.address, &parts));
        match self.prepare(service, &parts, &mut outcome) {
            Ok((info, class)) => self.begin(service, parts, body, info, class, outcome),
            Err(problem) => Err((problem, outcome)),
        }
    }

    /// What the request is, and whose.
    fn prepare(
        &self,
        service: &ListenerService,
        parts: &Parts,
        outcome: &mut Outcome,
    ) -> Result<(RequestInfo, CredentialClass), StatusError> {
        let info = RequestInfo::from_parts(parts);
        outcome.classified(info.verb.as_str(), info.long_running());
        hygiene::check_request(parts)?;
        if parts.version < http::Version::HTTP_2 {
            // hyper bounds its buffer, which may hold nearly twice as much by then; on HTTP/2 it
            // counts the fields themselves.
            hygiene::check_size(parts, service.request_limits.max_header_bytes as usize)?;
        }
        let peer = self.peer.as_deref();
        let class =
            service.credentials.identify(peer, &self.token, &parts.headers, info.upgrade)?;
        outcome.user(match class {
            CredentialClass::Identity(_) => UserClass::Identity,
            CredentialClass::Token | CredentialClass::UnprovenToken => UserClass::Token,
            CredentialClass::Anonymous | CredentialClass::Probe | CredentialClass::Discovery => {
                UserClass::Anonymous
            }
        });
        Ok((info, class))
    }

    fn begin<'a>(
        &self,
        service: &'a ListenerService,
        mut parts: Parts,
        body: Incoming,
        info: RequestInfo,
        class: CredentialClass,
        outcome: Box<Outcome>,
    ) -> Result<Begun<'a>, Failed> {
        let proof = IdentityProof::new(class, self.peer.as_ref());
        if info.upgrade {
            let token = credential_selector::bearer(&parts.headers, true)
                .filter(|_| {
                    matches!(class, CredentialClass::Token | CredentialClass::UnprovenToken)
                })
                .map(|token| (token.to_vec(), class));
            hygiene::upstream_upgrade_headers(&mut parts.headers, &self.forwarded_for);
            let request = Request::from_parts(parts, body);
            let tunnels = &service.tunnels;
            let served =
                upgrade::serve(&service.upstream, (class, proof), request, outcome, tunnels);
            return Ok(Begun::Upgrade(Box::pin(served), token));
        }
        hygiene::upstream_request_headers(&mut parts.headers, &self.forwarded_for);
        let watch = (info.kind == RequestKind::Watch)
            .then(|| {
                WatchRequest::new(
                    info.verb.as_str(),
                    info.path(),
                    info.query(),
                    &parts.headers,
                    &service.resume_groups,
                )
            })
            .flatten();
        let version = parts.version;
        let head = match upstream_head(parts, watch.as_ref()) {
            Ok(head) => head,
            Err(problem) => return Err((problem, outcome)),
        };
        let token = matches!(class, CredentialClass::Token | CredentialClass::UnprovenToken)
            .then(|| head.headers().get(header::AUTHORIZATION).cloned())
            .flatten();
        let outgoing = Box::new(ForwardedRequest {
            upstream: Rc::clone(&service.upstream),
            class: service.upstream.pool.class(class),
            proof,
            head,
            body: (!http_body::Body::is_end_stream(&body))
                .then(|| RequestBody::new(body, version, &service.upstream.bodies)),
            drain: (info.kind == RequestKind::Watch).then(|| service.drain.clone()),
            info,
            watch,
            hedges: Cell::new(0),
        });
        Ok(Begun::Forward(outgoing, outcome, token.map(|token| (token, class))))
    }
}

/// What the client is told instead, and where that is recorded.
type Failed = (StatusError, Box<Outcome>);

/// A request whose head is checked, and how it goes on.
enum Begun<'a> {
    /// To an apiserver; with the token to learn about from the answer.
    Forward(Box<ForwardedRequest>, Box<Outcome>, Option<(HeaderValue, CredentialClass)>),
    /// Out of HTTP; likewise.
    Upgrade(
        Pin<Box<dyn Future<Output = Result<Response<ResponseBody>, Failed>> + 'a>>,
        Option<(Vec<u8>, CredentialClass)>,
    ),
}

#[cold]
fn refusal((problem, mut outcome): Failed, accept: Option<&HeaderValue>) -> Response<ResponseBody> {
    outcome.own_error(problem.code.as_u16(), problem.cause, problem.to_string());
    problem.into_response(accept).map(|body| ResponseBody::Full(FullBody::new(body, outcome)))
}

/// The head as it goes upstream: HTTP/2 names its scheme and authority, and a watch is asked for so
/// that it can be followed.
fn upstream_head(parts: Parts, watch: Option<&WatchRequest>) -> Result<Request<()>, StatusError> {
    let Parts { method, uri, mut headers, .. } = parts;
    let host = headers.remove(header::HOST);
    let mut target = uri.into_parts();
    if target.authority.is_none() {
        let authority = host
            .as_ref()
            .and_then(|host| Authority::try_from(host.as_bytes()).ok())
            // HTTP/1.0 needs no Host; the apiserver does not look at it.
            .unwrap_or_else(|| Authority::from_static("kubernetes.default.svc"));
        target.authority = Some(authority);
    }
    target.scheme = Some(Scheme::HTTPS);
    let mut uri = Uri::from_parts(target).map_err(|error| {
        StatusError::bad_request(&format!("the request target is not one: {error}"))
    })?;
    if let Some(asked) = watch {
        watch_request::upstream_headers(&mut headers);
        let query = uri.query().unwrap_or_default();
        if let std::borrow::Cow::Owned(query) = watch_request::upstream_query(query, asked) {
            uri = with_query(&uri, &query);
        }
    }
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    Ok(request)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_boxed<A, B, F>(_: fn(A, B) -> Pin<Box<F>>) -> usize {
        size_of::<F>()
    }

    /// Every request has one of these, and what is large is slow to make. The bound is a size class of
    /// the allocator: 1,537 bytes take no less.
    #[test]
    fn a_request_is_small() {
        let size = size_of_boxed(ClientConnection::handle);
        assert!(size <= 1_792, "{size}");
    }
}
