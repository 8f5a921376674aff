//! Sends a request upstream and returns its response, or an error for the client.
//!
//! ```text
//! acquire a permit for a stream -> attempt -> response
//!        ^                            | connection in trouble: a second attempt in parallel (hedge)
//!        |                            | failed: retry
//!        +----------------------------+
//! ```
//!
//! [`jackstay_core::request::attempts`] decides. [`ForwardedRequest::forward`] executes the common case, a response
//! from the first attempt, and [`execution`] any other.

mod execution;
mod facts;
mod groups;
mod settlement;
mod slots;
mod versions;

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use fastrand::Rng;
use futures_util::future::LocalBoxFuture;
use http::{HeaderMap, Request, Response, StatusCode, header};
use jackstay_core::admission::ByteAccount;
use jackstay_core::request::attempts::{AttemptEffect, Refused};
use jackstay_core::request::info::{RequestInfo, RequestKind};
use jackstay_core::request::retry::Stage;
use jackstay_core::request::{hygiene, retry};
use jackstay_core::watch::codec::Encoding;
use jackstay_core::watch::gzip::ContentCoding;
use jackstay_core::watch::relay::Relay;
use jackstay_core::watch::request::WatchRequest;
use jackstay_sys::clock;
use tokio::task::spawn_local;

use self::slots::{FirstResponse, Response as PendingResponse};
use super::admission::unproven_requests::UnprovenRequest;
use super::attempt::{Attempt, AttemptInput, Attempts, Expected, FailedAttempt, failed};
use super::client_certificate::IdentityProof;
use super::consistent_reads::RequestVersions;
use super::consistent_reads::learner::Learned;
use super::drain::DrainWatcher;
use super::group_request::GroupRequest;
use super::heartbeat::Heartbeat;
use super::request_body::{RequestBody, UploadTask};
use super::response_body::{ForwardResult, FullBody, ResponseBody, StreamedBody};
use super::upstream_client::{
    Concern, UpstreamClient, UpstreamResponse, release_window, until_concern,
};
use super::watch::body::{ResumeContext, WatchBody};
use crate::observe::Outcome;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::pool::{
    ClassPool, Lane, PreviousFailure, StreamRequest, StreamRequirements, Unavailable,
};
use crate::upstream::resource_versions::ResourceRecord;
use crate::upstream::version_preference::PreferredVersions;

/// A request to forward.
pub struct ForwardedRequest {
    /// The client of the upstream to which the request is sent.
    pub upstream: Rc<UpstreamClient>,
    /// The connections that the request may use.
    pub class: Rc<ClassPool>,
    /// Proves that the request may use these connections.
    pub proof: IdentityProof,
    /// The head that is sent upstream.
    pub head: Request<()>,
    /// The body; `None` if the request has none.
    pub body: Option<Rc<RequestBody>>,
    /// The request in Kubernetes terms.
    pub info: RequestInfo,
    /// A heartbeat is ended early if its apiserver is not healthy, and settled ([`super::heartbeat`]).
    pub heartbeat: Option<Box<Heartbeat>>,
    /// The failure of another request, whose outcome this one settles.
    pub previous_failure: Option<PreviousFailure>,
    /// The parameters of a watch; `None` if its frames cannot be followed, and for any other request.
    pub watch: Option<WatchRequest>,
    /// What the client may hold of the frames of its watches; `Some` if there is a `watch`.
    pub frames: Option<ByteAccount>,
    /// The drain of the listener; `Some` for every watch.
    pub drain: Option<DrainWatcher>,
    /// The request among those in progress whose tokens are not proven, if it is one.
    pub unproven: Option<Rc<UnprovenRequest>>,
    /// The resource versions that the request asks for and shows; `None` if they mean nothing for its client.
    pub resource_versions: Option<Box<RequestVersions>>,
    /// The client of a watch receives gzip if the apiserver compresses it.
    pub gzip_for_client: bool,
    /// `None` if it is not one of an API group.
    pub group: Option<Box<GroupRequest>>,
    /// The versions of apiservers that it prefers.
    pub versions: PreferredVersions,
}

/// A request in progress.
struct Progress<'a> {
    attempts: Attempts,
    /// The record of the client's request; `None` for another one on its behalf.
    outcome: Option<&'a mut Outcome>,
    /// When the request arrived, or the hold of a new watch ended.
    requested_at: Instant,
}

impl Progress<'_> {
    /// Records the connection of the first attempt of a round.
    fn sent_to(&mut self, connection: &Connection) {
        let reused = connection.was_open(self.requested_at);
        if let Some(outcome) = &mut self.outcome {
            outcome.sent_to(&connection.endpoint.label, reused);
        }
    }
}

impl ForwardedRequest {
    /// Forwards the request until there is a response or [`retry::decide`] refuses another attempt.
    ///
    /// # Errors
    /// See [`ForwardResult`].
    pub fn forward(
        self: Box<Self>,
        mut outcome: Box<Outcome>,
    ) -> impl Future<Output = ForwardResult> {
        self.upstream.deposit();
        self.deposit_for_group();
        async move {
            let requested_at = outcome.started;
            let timeout = self.watch.as_ref().and_then(|watch| watch.timeout);
            let read = self.resource_versions.as_ref().map(|versions| versions.read());
            let (kind, arrival) = (self.info.kind, (requested_at, timeout));
            let attempts = Attempts::new(kind, self.heartbeat.is_some(), arrival, read);
            let mut progress = Progress { attempts, outcome: Some(&mut outcome), requested_at };
            let result = self.response(&mut progress).await;
            let Progress { attempts, requested_at, .. } = progress;
            outcome.hedged |= self.is_answered_by_another(&attempts);
            match result {
                Ok(response) => Ok(self.respond(response, &attempts, outcome, requested_at)),
                Err(refused) => self.refuse(*refused, outcome),
            }
        }
    }

    /// Waits for the response. Only the first attempt is made here, on a connection without trouble. What may follow is
    /// boxed, so that the futures of other requests do not grow by its size.
    async fn response(
        &self,
        progress: &mut Progress<'_>,
    ) -> Result<UpstreamResponse, Box<Refused>> {
        let permit = match self.acquire(&progress.attempts).await {
            Ok(permit) if self.heartbeat.is_none() => permit,
            acquired => return self.execute_or_settle(progress, acquired).await,
        };
        let connection = Rc::clone(permit.connection());
        progress.sent_to(&connection);
        let sent_at = clock::now();
        self.step(progress, AttemptInput::Granted { attempt: 0 }, sent_at);
        let attempt = match self.open(0, permit, &mut progress.attempts, sent_at) {
            Ok(attempt) => attempt,
            Err(failure) => {
                return self.execute(progress, None, self.failed(0, failure)).await;
            }
        };
        let response = attempt.response(self.expected(0));
        let mut response = FirstResponse(pin!(Some(response)));
        let input = tokio::select! {
            biased;
            result = &mut response => {
                match result.and_then(|response| self.compare(response, &mut progress.attempts)) {
                    Ok(response) => {
                        self.record_response(&response, progress, 0);
                        self.step(progress, AttemptInput::Responded { attempt: 0 }, clock::now());
                        return Ok(response);
                    }
                    Err(failure) => self.failed(0, failure),
                }
            }
            concern = until_concern(&connection, &self.upstream, self.late_at(sent_at)) => {
                match concern {
                    Concern::Troubled => AttemptInput::Troubled { attempt: 0 },
                    Concern::Late => AttemptInput::Slow { attempt: 0 },
                }
            }
        };
        let first = Some((connection, Box::pin(response) as PendingResponse<'_>));
        self.execute(progress, first, input).await
    }

    fn execute_or_settle<'a>(
        &'a self,
        progress: &'a mut Progress<'_>,
        acquired: Result<Permit, Unavailable>,
    ) -> LocalBoxFuture<'a, Result<UpstreamResponse, Box<Refused>>> {
        match self.heartbeat.as_deref().filter(|heartbeat| heartbeat.object.is_some()) {
            Some(heartbeat) => self.settle(progress, acquired, heartbeat),
            None => self.execute_acquired(progress, acquired),
        }
    }

    /// Reports an input of the first attempt to the state machine. The caller executes the effect.
    fn step(&self, progress: &mut Progress<'_>, input: AttemptInput, now: Instant) {
        let mut rng = Rng::new();
        let effect = progress.attempts.step(input, &self.facts(None), now, &mut rng);
        debug_assert!(matches!(effect, AttemptEffect::Send { .. } | AttemptEffect::Respond { .. }));
    }

    /// Takes a stream for the first attempt of a round.
    async fn acquire(&self, attempts: &Attempts) -> Result<Permit, Unavailable> {
        let (version, mut required) = (self.wanted_version(attempts), attempts.requirements());
        required.previous_failure = required.previous_failure.or(self.previous_failure);
        let request = self.stream_request(version, required, true);
        self.upstream.pool.acquire(&self.class, request).await
    }

    /// Opens the stream of an attempt, at `now`.
    fn open(
        &self,
        attempt: usize,
        permit: Permit,
        attempts: &mut Attempts,
        now: Instant,
    ) -> Result<Attempt, FailedAttempt> {
        let connection = Rc::clone(permit.connection());
        let head = self.head_for(&connection.endpoint, attempts);
        let opened = Attempt::open(permit, head, self.body.as_ref()).map_err(|error| {
            FailedAttempt { reason: error.to_string(), ..failed(Stage::NotSent, "", &connection) }
        })?;
        if let Some(unproven) = &self.unproven {
            unproven.sent();
        }
        if let Some(heartbeat) = &self.heartbeat {
            let sent = PreviousFailure::Silence(connection.key(), connection.endpoint.key());
            heartbeat.last.connection.set(Some(sent));
        }
        self.sent_to_group(attempt, &connection.endpoint, now);
        Ok(opened)
    }

    /// What the response to an attempt may be.
    fn expected(&self, attempt: usize) -> Expected<'_> {
        Expected {
            attempt,
            kind: self.info.kind,
            has_versions: self.resource_versions.is_some(),
            group: self.group.as_deref(),
        }
    }

    /// The request for a stream with these requirements, to which it adds those of the kind of the request. `may_probe`: the
    /// attempt may show whether its API group works again at an endpoint.
    fn stream_request<'a>(
        &'a self,
        resource_version: Option<(&'a Arc<ResourceRecord>, u64)>,
        required: StreamRequirements,
        may_probe: bool,
    ) -> StreamRequest<'a> {
        StreamRequest {
            required: StreamRequirements {
                long_running: self.info.long_running(),
                lane: self.lane(),
                may_be_held: self.info.kind == RequestKind::Watch,
                ..required
            },
            resource_version,
            avoided: self.avoided(may_probe),
            authorization: self.head.headers().get(header::AUTHORIZATION),
            client_subject: self.proof.subject(),
            versions: self.versions,
        }
    }

    fn lane(&self) -> Lane {
        let is_heartbeat = self.heartbeat.is_some() || Heartbeat::depends_on(&self.info);
        if is_heartbeat { Lane::Heartbeats } else { Lane::Requests }
    }

    /// The response may be that of another request than the first one.
    fn is_answered_by_another(&self, attempts: &Attempts) -> bool {
        let is_settled = self.heartbeat.as_ref().is_some_and(|one| one.is_settled.get());
        attempts.hedges_sent() > 0 || is_settled
    }

    /// Answers the client without a response of an attempt.
    fn refuse(&self, refused: Refused, mut outcome: Box<Outcome>) -> ForwardResult {
        if let Some(body) = &self.body {
            spawn_local(Rc::clone(body).discard_rest());
        }
        match refused {
            Refused::Error(error, refusal) => {
                if error.code == StatusCode::INTERNAL_SERVER_ERROR {
                    let (upstream, verb) = (&self.upstream, self.info.verb.as_str());
                    let name = &upstream.pool.upstream().name;
                    let line =
                        format!("upstream {name}: request refused because of a defect of jackstay");
                    upstream.warnings.warn(&line, format_args!("{verb}: {}", error.message));
                }
                if let Some(refusal) = refusal {
                    self.upstream.metrics.retry_refused(refusal.as_str());
                }
                Err((error, outcome))
            }
            Refused::Rejection(rejection) => {
                let (mut head, body) = *rejection;
                hygiene::downstream_headers(&mut head.headers, false);
                outcome.code = Some(head.status.as_u16());
                Ok(ResponseBody::Full(FullBody::new(body, outcome)).with_head(head))
            }
        }
    }

    /// The response for the client. Its body streams the part that has not arrived yet.
    fn respond(
        self: Box<Self>,
        response: UpstreamResponse,
        attempts: &Attempts,
        mut outcome: Box<Outcome>,
        requested_at: Instant,
    ) -> Response<ResponseBody> {
        if let Some(body) = &self.body {
            body.stop_holding();
        }
        let mut learner = self.learner(&response, attempts);
        let UpstreamResponse { mut head, mut recv, prefix, mut permit, upload } = response;
        let upload = upload.and_then(UploadTask::answered);
        if outcome.hedged {
            let connection = permit.connection();
            let reused = connection.was_open(requested_at);
            outcome.answered_by(&connection.endpoint.label, reused);
        }
        hygiene::downstream_headers(&mut head.headers, false);
        outcome.code = Some(head.status.as_u16());
        if let Some(data) = prefix.as_ref().filter(|_| recv.is_end_stream()) {
            let data = data.clone();
            // A whole body was compared with the floor before.
            if let Some(learner) = &mut learner
                && learner.read(&data) == Learned::Unknown
            {
                learner.end();
            }
            permit.finished();
            // The stream needs no more window, but the window of the connection must be released.
            release_window(&mut recv, &mut data.len());
            return ResponseBody::Full(FullBody::new(data, outcome)).with_head(head);
        }
        let Self {
            upstream,
            class,
            proof,
            head: request,
            watch,
            frames,
            drain,
            info,
            resource_versions,
            gzip_for_client,
            ..
        } = *self;
        let body = if retry::is_resumed(info.kind)
            && let Some(((watch, frames), drain)) = watch.zip(frames).zip(drain)
            && let Some(encoding) = Encoding::of_response(&head)
            && let Some(coding) = ContentCoding::of(&head.headers)
        {
            let with_gzip = adapt_watch_headers(&mut head.headers, coding, gzip_for_client);
            let relay = Relay::new(encoding, watch, requested_at, frames);
            let endpoint = &permit.connection().endpoint;
            let versions = resource_versions.zip(attempts.read()).and_then(|(versions, read)| {
                versions.of_watch(read, &info, upstream.pool.upstream(), endpoint)
            });
            let context =
                ResumeContext::new((upstream, class), proof, drain, request, &head, versions);
            let recv = (recv, coding);
            let body = WatchBody::new(context, relay, recv, permit, outcome, with_gzip);
            ResponseBody::Watch(Box::new(body))
        } else {
            let expiry = proof.expiry().filter(|_| info.kind == RequestKind::Watch);
            let body = StreamedBody::new(recv, prefix, permit, outcome, (upload, learner), expiry);
            ResponseBody::Stream(Box::new(body))
        };
        body.with_head(head)
    }
}

/// Removes what the headers say about the body of the apiserver and is not true of the client's, and returns whether
/// that is compressed.
fn adapt_watch_headers(headers: &mut HeaderMap, coding: ContentCoding, wanted: bool) -> bool {
    let with_gzip = wanted && coding == ContentCoding::Gzip;
    // A watch has none, but another server might send it, and events are left out and added.
    headers.remove(header::CONTENT_LENGTH);
    if !with_gzip {
        headers.remove(header::CONTENT_ENCODING);
    }
    with_gzip
}
