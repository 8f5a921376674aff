//! The path of each request of a client connection, from the head to the response.
//!
//! ```text
//! classify (request::info) -> refuse invalid heads (request::hygiene) -> select the credential
//!     -> remove headers (request::hygiene) -> forward or upgrade -> response or error
//! ```
//!
//! The [`Outcome`] of a request records it exactly once, even if the request is cancelled.

use std::borrow::Cow;
use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;

use http::request::Parts;
use http::uri::{Authority, Scheme};
use http::{HeaderName, HeaderValue, Request, Response, StatusCode, Uri, Version, header};
use hyper::body::Incoming;
use jackstay_config::api_root::default_authority;
use jackstay_core::admission::Refusal;
use jackstay_core::admission::fair_queue::Ended;
use jackstay_core::credential_class::ClientRank;
use jackstay_core::request::hygiene;
use jackstay_core::request::hygiene::ForwardedFor;
use jackstay_core::request::info::{RequestInfo, RequestKind};
use jackstay_core::request::status_error::StatusError;
use jackstay_core::watch::request::{
    GzipPreference, WatchRequest, accept_gzip, upstream_headers, upstream_query, with_query,
};
use jackstay_sys::clock;
use jackstay_sys::utc::wall_clock;

use super::admission::client_memory::{ClientMemory, StreamMemory};
use super::admission::connection_slots::ConnectionSlot;
use super::admission::proven_tokens::LastToken;
use super::admission::unproven_requests::{ConnectionRecord, UnprovenRequest};
use super::body_progress::BodyProgress;
use super::client_certificate::{ClientCertificate, IdentityProof};
use super::compact;
use super::consistent_reads::client::LastClient;
use super::consistent_reads::{RequestClient, RequestVersions};
use super::credential_selector::{SelectedCredential, TokenProof};
use super::forward::ForwardedRequest;
use super::group_request::GroupRequest;
use super::heartbeat::Heartbeat;
use super::listener_service::{CurrentService, ListenerService};
use super::request_body::RequestBody;
use super::response_body::{FullBody, ResponseBody};
use super::status_response;
use super::upgrade::Upgrade;
use crate::observe::Outcome;
use crate::upstream::Upstream;
use crate::upstream::credentials::CredentialClass;
use crate::upstream::version_preference::preferred_versions;

/// The `Priority` of a heartbeat: before all other streams of its connection (RFC 9218, sections 4.1 and 5).
const PRIORITY: HeaderName = HeaderName::from_static("priority");
const MOST_URGENT: HeaderValue = HeaderValue::from_static("u=0");

/// A client connection.
pub struct ClientConnection {
    /// The service of the listener that accepted the connection.
    pub service: CurrentService,
    /// The client certificate of the TLS handshake.
    pub certificate: Option<Rc<ClientCertificate>>,
    /// The client's address, for the access log.
    pub address: IpAddr,
    /// Whether the client is on the same host, where compression saves nothing.
    pub is_local: bool,
    /// The slot of the connection, which also has its source.
    pub slot: Rc<ConnectionSlot>,
    /// The client's address, for `X-Forwarded-For`.
    pub forwarded_for: ForwardedFor,
    /// The memory of the connection.
    pub memory: Rc<ClientMemory>,
    /// The last token of the client that the apiserver has accepted.
    pub token: LastToken,
    /// The client of the last request.
    pub client: LastClient,
    /// The requests that prove nothing.
    pub unproven: Rc<ConnectionRecord>,
}

/// A request that has been checked and can be sent upstream.
enum PreparedRequest {
    Forward(Box<ForwardedRequest>),
    Upgrade(Box<Upgrade>),
}

type Prepared = Result<(PreparedRequest, SelectedCredential), StatusError>;

impl ClientConnection {
    /// Serves one request. An error is answered with a response, too.
    ///
    /// The future is boxed, because hyper and tokio move it several times, and because a part of it stays
    /// in memory as long as the response body. `progress` is that of the response.
    pub fn serve(
        self: Rc<Self>,
        request: Request<Incoming>,
        progress: Rc<BodyProgress>,
    ) -> Pin<Box<impl Future<Output = Result<Response<ResponseBody>, Infallible>>>> {
        Box::pin(async move {
            let accept = request.headers().get(header::ACCEPT).cloned();
            let service = self.service.now();
            if let Some(certificate) = &self.certificate
                && certificate.validity(wall_clock()).is_none()
            {
                // Boxed, so that the futures of other requests do not grow by its size. `prepare` reads
                // the result.
                Box::pin(certificate.verified()).await;
            }
            let (outcome, prepared) = self.begin(&service, request);
            let (prepared, unproven) = if is_unproven(&prepared) {
                // Boxed, so that the futures of other requests do not grow by its size.
                Box::pin(self.admit(&service, prepared)).await
            } else {
                (prepared, None)
            };
            let prepared = prepared.and_then(|prepared| {
                progress.memory().charge_response()?;
                Ok(prepared)
            });
            drop(progress);
            let (mut result, credential) = match prepared {
                Ok((PreparedRequest::Forward(request), credential)) => {
                    (request.forward(outcome).await, Some(credential))
                }
                // Boxed, so that the futures of other requests do not grow by its size.
                Ok((PreparedRequest::Upgrade(upgrade), credential)) => {
                    (Box::pin(upgrade.serve(outcome)).await, Some(credential))
                }
                Err(error) => (Err((error, outcome)), None),
            };
            if let (Ok(response), Some(credential)) = (&mut result, credential) {
                self.learn(&service, response, credential, unproven);
            }
            Ok(result
                .unwrap_or_else(|(error, outcome)| error_response(error, outcome, accept.as_ref())))
        })
    }

    /// Charges a request to the memory of the connection; `None` if it does not fit.
    pub fn charge<B: http_body::Body>(&self, request: &Request<B>) -> Option<StreamMemory> {
        let service = self.service.now();
        self.memory.begin(request, &service.upstream.pool.upstream().path_prefix)
    }

    /// The response to an HTTP/1.1 request for which there is no memory. Its connection ends, because its body is
    /// not read.
    #[cold]
    pub fn refuse_for_memory(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let (parts, _body) = request.into_parts();
        let service = self.service.now();
        let (metrics, access_log) = (&service.metrics, service.access_log);
        let mut outcome = Box::new(Outcome::begin(metrics, access_log, self.address, &parts));
        outcome.source = self.slot.source();
        let info = RequestInfo::new(&parts, &service.upstream.pool.upstream().path_prefix);
        outcome.classified(info.verb.as_str(), info.long_running());
        let error = StatusError::from(Refusal::RequestMemory);
        error_response(error.closing_connection(), outcome, parts.headers.get(header::ACCEPT))
    }

    /// Waits until a request may be sent that has proven nothing.
    async fn admit(
        &self,
        service: &ListenerService,
        prepared: Prepared,
    ) -> (Prepared, Option<Rc<UnprovenRequest>>) {
        let Ok((mut request, mut credential)) = prepared else { return (prepared, None) };
        let requests = match &request {
            PreparedRequest::Forward(request) => &request.upstream.unproven_requests,
            PreparedRequest::Upgrade(upgrade) => &upgrade.upstream.unproven_upgrades,
        };
        let requests = Rc::clone(requests);
        let admitted = requests.admit(self.slot.source(), &self.unproven, credential.token).await;
        let unproven = match admitted {
            Ok(unproven) => unproven,
            Err(error) => return (Err(error), None),
        };
        let is_proven = credential
            .token
            .is_some_and(|token| service.credentials.tokens.contains(token, self.slot.source()));
        if is_proven {
            credential.class = CredentialClass::Token;
        } else if credential.class == CredentialClass::UnprovenToken
            && unproven.as_ref().is_some_and(|unproven| unproven.is_often_rejected)
        {
            credential.class = CredentialClass::SlowedToken;
        }
        let unproven = unproven.filter(|_| !is_proven);
        match &mut request {
            PreparedRequest::Forward(request) => {
                request.class = request.upstream.pool.class(credential.class);
                request.unproven.clone_from(&unproven);
            }
            PreparedRequest::Upgrade(upgrade) => upgrade.class = credential.class,
        }
        (Ok((request, credential)), unproven)
    }

    /// Records what the head of a response shows about the token of its client.
    fn learn(
        &self,
        service: &ListenerService,
        response: &mut Response<ResponseBody>,
        credential: SelectedCredential,
        unproven: Option<Rc<UnprovenRequest>>,
    ) {
        let status = response.status();
        let proof = service.credentials.learn(credential, self.slot.source(), status);
        if proof != TokenProof::Missing {
            // The response may last for minutes.
            response.body_mut().token_proven();
            self.set_rank(ClientRank::Token);
        }
        let Some(request) = unproven else { return };
        let is_anonymous = credential.class == CredentialClass::Anonymous;
        let is_rejected = status == StatusCode::UNAUTHORIZED
            || is_anonymous && status != StatusCode::SWITCHING_PROTOCOLS;
        request.ended(match credential.token {
            Some(token) if proof == TokenProof::First => {
                service.upstream.unproven_requests.proven(token);
                service.upstream.unproven_upgrades.proven(token);
                Ended::Accepted
            }
            _ if is_rejected => Ended::Rejected,
            _ => Ended::Unknown,
        });
    }

    /// Begins the outcome and prepares the request. It is a function so that the future of
    /// [`Self::serve`] does not keep space for the head and the body.
    fn begin(
        &self,
        service: &ListenerService,
        request: Request<Incoming>,
    ) -> (Box<Outcome>, Prepared) {
        let (mut parts, body) = request.into_parts();
        let info = RequestInfo::new(&parts, &service.upstream.pool.upstream().path_prefix);
        // h2 copies each value itself, but not the target.
        if info.long_running() || parts.version != Version::HTTP_2 {
            compact::own_head(&mut parts);
        }
        let (metrics, access_log) = (&service.metrics, service.access_log);
        let mut outcome = Box::new(Outcome::begin(metrics, access_log, self.address, &parts));
        outcome.source = self.slot.source();
        let prepared = self.prepare(service, (parts, info), body, &mut outcome);
        (outcome, prepared)
    }

    /// Checks a request, selects its credential and rewrites its head for the upstream.
    fn prepare(
        &self,
        service: &ListenerService,
        (mut parts, info): (Parts, RequestInfo),
        body: Incoming,
        outcome: &mut Outcome,
    ) -> Prepared {
        outcome.classified(info.verb.as_str(), info.long_running());

        hygiene::check_request(&parts)?;
        // hyper reads heads that are larger, so that the client gets the reason.
        hygiene::check_size(&parts, service.request_limits.max_header_bytes as usize)?;

        let certificate = self.certificate.as_ref();
        let credential = service.credentials.select(
            certificate.map(Rc::as_ref),
            (&self.token, self.slot.source()),
            &parts.headers,
            info.upgrade,
        )?;
        let class = credential.class;
        outcome.class = Some(class);
        self.set_rank(class.rank());
        let proof = IdentityProof::new(class, certificate);

        hygiene::upstream_headers(&mut parts.headers, &self.forwarded_for, info.upgrade);
        if info.upgrade {
            let upgrade = self.upgrade(service, &info, (parts, body), (class, proof))?;
            return Ok((PreparedRequest::Upgrade(Box::new(upgrade)), credential));
        }
        let is_watch = info.kind == RequestKind::Watch;
        let watch = is_watch.then(|| watch_request(&info, &parts, service)).flatten();
        let subject = proof.subject();
        let upstream = service.upstream.pool.upstream();
        let client = (&self.client, credential, subject, &parts.headers);
        let resource_versions = self.resource_versions(&info, client, service);
        let version = parts.version;
        let versions = preferred_versions(upstream, parts.headers.get(header::USER_AGENT));
        let has_body = !http_body::Body::is_end_stream(&body);
        let heartbeat = Heartbeat::of(&info, &service.heartbeats);
        let mut head = upstream_head(parts, watch.as_ref(), upstream)?;
        if heartbeat.is_some() {
            head.headers_mut().insert(PRIORITY, MOST_URGENT);
        }
        let request = ForwardedRequest {
            upstream: Rc::clone(&service.upstream),
            class: service.upstream.pool.class(class),
            proof,
            gzip_for_client: self.wants_gzip(watch.as_ref()),
            head,
            body: has_body.then(|| {
                RequestBody::new(body, version, self.memory.account(&service.upstream.body_budget))
            }),
            frames: watch
                .as_ref()
                .map(|_| self.memory.account(service.upstream.watches.partial_frames())),
            drain: is_watch.then(|| service.drain.clone()),
            heartbeat,
            previous_failure: None,
            group: GroupRequest::of(&info),
            info,
            watch,
            unproven: None,
            resource_versions,
            versions,
        };
        Ok((PreparedRequest::Forward(Box::new(request)), credential))
    }
}

impl ClientConnection {
    fn upgrade(
        &self,
        service: &ListenerService,
        info: &RequestInfo,
        (mut parts, body): (Parts, Incoming),
        (class, proof): (CredentialClass, IdentityProof),
    ) -> Result<Upgrade, StatusError> {
        let memory = self.memory.charge_tunnel()?;
        if let Some(authority) = &service.upstream.pool.upstream().config().authority {
            set_host(&mut parts, authority);
        }
        Ok(Upgrade {
            memory,
            watch_drain: info.is_tunnelled_watch().then(|| service.drain.clone()),
            upstream: Rc::clone(&service.upstream),
            class,
            proof,
            request: Request::from_parts(parts, body),
            tunnels: service.tunnels.of_request(self.slot.begin_request()),
        })
    }

    fn resource_versions(
        &self,
        info: &RequestInfo,
        client: RequestClient<'_>,
        service: &ListenerService,
    ) -> Option<Box<RequestVersions>> {
        let gzip_state = || self.memory.account(service.upstream.watches.gzip_states());
        RequestVersions::new(info, client, service.upstream.pool.upstream(), gzip_state)
    }

    /// Whether the client of a watch receives gzip if its apiserver compresses.
    fn wants_gzip(&self, watch: Option<&WatchRequest>) -> bool {
        !self.is_local && watch.is_some_and(|watch| watch.gzip == GzipPreference::Accepted)
    }

    /// Records what the client has proven with its last request.
    fn set_rank(&self, rank: ClientRank) {
        self.memory.raise_rank(rank);
        self.slot.set_rank(rank);
    }
}

/// Whether the request waits for its turn among those that prove nothing.
fn is_unproven(prepared: &Prepared) -> bool {
    match prepared {
        Ok((_, credential)) if credential.class == CredentialClass::UnprovenToken => true,
        Ok((PreparedRequest::Upgrade(_), credential)) => {
            credential.class == CredentialClass::Anonymous
        }
        _ => false,
    }
}

/// The parameters of a watch; `None` if its frames cannot be followed.
fn watch_request(
    info: &RequestInfo,
    parts: &Parts,
    service: &ListenerService,
) -> Option<WatchRequest> {
    let (verb, path, query) = (info.verb.as_str(), info.path(), info.query());
    let unordered = &service.upstream.pool.upstream().unordered_groups;
    let is_unordered = |group: &str| unordered.contains(group);
    WatchRequest::new(verb, path, query, &parts.headers, &service.never_resume_groups, is_unordered)
}

/// Sets the authority of an upgrade, which is an HTTP/1.1 request upstream.
fn set_host(parts: &mut Parts, authority: &Authority) {
    // An authority is a valid value.
    if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
        parts.headers.insert(header::HOST, host);
    }
}

/// The head that is sent upstream. HTTP/2 needs a scheme and an authority, and a watch is changed so that
/// its frames can be followed.
fn upstream_head(
    parts: Parts,
    watch: Option<&WatchRequest>,
    upstream: &Upstream,
) -> Result<Request<()>, StatusError> {
    let Parts { method, uri, mut headers, .. } = parts;
    let host = headers.remove(header::HOST);
    let mut target = uri.into_parts();
    if let Some(authority) = &upstream.config().authority {
        target.authority = Some(authority.clone());
    } else if target.authority.is_none() {
        let authority = host
            .as_ref()
            .and_then(|host| Authority::try_from(host.as_bytes()).ok())
            // HTTP/1.0 needs no Host, and the apiserver ignores it.
            .unwrap_or_else(default_authority);
        target.authority = Some(authority);
    }
    target.scheme = Some(Scheme::HTTPS);
    let mut uri = Uri::from_parts(target).map_err(|error| {
        StatusError::bad_request(format_args!("the request target is invalid: {error}"))
    })?;
    if let Some(watch) = watch {
        upstream_headers(&mut headers);
        if watch.asks_for_gzip() && upstream.asks_for_gzip(clock::now()) {
            accept_gzip(&mut headers);
        }
        let query = uri.query().unwrap_or_default();
        if let Cow::Owned(query) = upstream_query(query, watch) {
            uri = with_query(&uri, &query);
        }
    }
    let mut request = Request::new(());
    *request.method_mut() = method;
    *request.uri_mut() = uri;
    *request.headers_mut() = headers;
    Ok(request)
}

#[cold]
fn error_response(
    error: StatusError,
    mut outcome: Box<Outcome>,
    accept: Option<&HeaderValue>,
) -> Response<ResponseBody> {
    let response = status_response::response(&error, accept);
    outcome.own_error(error.code.as_u16(), error.label, error.message);
    response.map(|body| ResponseBody::Full(FullBody::new(body, outcome)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_boxed<A, B, C, F>(_: fn(A, B, C) -> Pin<Box<F>>) -> usize {
        size_of::<F>()
    }

    /// Every request allocates this future. The limit is a size class of the allocator, which also holds
    /// each size from 1,537 bytes.
    #[test]
    fn serve_future_fits_its_allocator_size_class() {
        let size = size_of_boxed(ClientConnection::serve);
        assert!(size <= 1_792, "{size}");
    }
}
