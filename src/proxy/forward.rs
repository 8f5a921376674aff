//! Sends a request upstream and returns its response, or an error for the client.
//!
//! ```text
//! acquire a permit for a stream -> attempt -> response
//!        ^                            | connection in trouble: a second attempt in parallel (hedge)
//!        |                            | failed: retry::decide
//!        +----------- retry ----------+
//! ```

mod attempt;
mod hedge;
mod versions;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Request, Response};
use jackstay_core::admission::ByteAccount;
use jackstay_core::request::info::{RequestInfo, RequestKind};
use jackstay_core::request::retry::{ATTEMPTS, RetryDecision, Stage};
use jackstay_core::request::status_error::StatusError;
use jackstay_core::request::{hygiene, overload_rejection, retry};
use jackstay_core::watch::codec::Encoding;
use jackstay_core::watch::relay::Relay;
use jackstay_core::watch::request::WatchRequest;
use jackstay_core::watch::session::max_outage_jitter;
use jackstay_sys::clock;
use tokio::task::spawn_local;
use tokio::time::{sleep, sleep_until};

use self::attempt::{FailedAttempt, HeldResponse};
use super::client_certificate::IdentityProof;
use super::consistent_reads::RequestVersions;
use super::drain::DrainWatcher;
use super::heartbeat;
use super::request_body::{RequestBody, UploadTask};
use super::response_body::{ForwardResult, FullBody, ResponseBody, StreamedBody};
use super::unproven_requests::UnprovenRequest;
use super::upstream_client::{UpstreamClient, UpstreamResponse, release_window};
use super::watch::body::{ResumeContext, WatchBody, outage_ended};
use crate::observe::Outcome;
use crate::upstream::connection::{ConnectionState, Permit};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::{ClassPool, PreviousFailure, StreamRequirements, Unavailable};
use crate::upstream::version_preference::PreferredVersions;

/// How long a new watch is held at most during an outage, before it is answered with 429.
const MAX_NEW_WATCH_HOLD: Duration = Duration::from_secs(30);

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
    /// Whether the request is ended early if its apiserver is not healthy ([`super::heartbeat`]).
    pub is_heartbeat: bool,
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
    /// The versions of apiservers that it prefers.
    pub versions: PreferredVersions,
    /// Number of hedges sent so far.
    pub hedges_sent: Cell<u32>,
}

impl ForwardedRequest {
    /// Forwards the request until there is a response or [`retry::decide`] refuses another attempt.
    ///
    /// # Errors
    /// See [`ForwardResult`].
    pub async fn forward(self: Box<Self>, mut outcome: Box<Outcome>) -> ForwardResult {
        self.upstream.earn();
        let mut requested_at = outcome.started;
        let mut failed: Option<FailedAttempt> = None;
        // The endpoints that do not have the requested version, any more or yet, or that reject requests.
        let mut excluded: Vec<Arc<Endpoint>> = Vec::new();
        // The client gets this rejection if no other endpoint accepts the request.
        let mut rejection: Option<Box<HeldResponse>> = None;
        for attempt in 1..=ATTEMPTS {
            let previous_failure = failed.as_ref().map(FailedAttempt::previous_failure);
            let requirements = self.stream_requirements(previous_failure, &excluded);
            let mut permit = self.upstream.pool.acquire(&self.class, requirements).await;
            if let Err(Unavailable::Unreachable(_)) = permit
                && self.is_watch()
                && rejection.is_none()
            {
                // Boxed, so that the futures of other requests do not grow by its size.
                permit = Box::pin(self.hold_new_watch(permit, outcome.started)).await;
                requested_at = clock::now();
            }
            let permit = match permit {
                Ok(permit) => permit,
                Err(unavailable) => {
                    let error = || self.unavailable_error(&unavailable);
                    return self.fail(rejection, error, outcome);
                }
            };
            let connection = permit.connection();
            let reused = connection.was_open(requested_at);
            outcome.sent_to(&connection.endpoint.label, reused);
            let result = if self.is_heartbeat {
                // Boxed, so that the futures of other requests do not grow by its size.
                Box::pin(self.heartbeat_attempt(permit)).await
            } else {
                self.attempt(permit, 1).await
            };
            if self.hedges_sent.get() > 0 {
                outcome.hedged = true;
            }
            let mut failure = match result {
                Ok(response) => return Ok(self.respond(response, outcome, requested_at)),
                Err(failure) => failure,
            };
            let (kind, stage) = (self.info.kind, failure.stage);
            let decision = retry::decide(kind, stage, self.body_is_held(), attempt);
            let is_retried = match decision {
                RetryDecision::Retry => true,
                RetryDecision::RetryAtOtherEndpoint if stage == Stage::Rejected => {
                    self.may_ask_one_other(&failure, &mut excluded, rejection.is_none())
                }
                RetryDecision::RetryAtOtherEndpoint => {
                    excluded.push(Arc::clone(&failure.connection.endpoint));
                    match stage {
                        Stage::NotReached => {
                            self.may_ask_for_version(&failure, &mut excluded, attempt)
                        }
                        _ => self.may_retry_besides(&excluded),
                    }
                }
                RetryDecision::Refuse(_) => false,
            };
            // The first rejection for overload is kept, and the last 410 or 504 of a version that the client asks for,
            // while other endpoints are tried; any other rejection only if it is the last.
            let is_kept = match stage {
                Stage::TooOld => true,
                Stage::NotReached => !self.has_floor(),
                _ => false,
            };
            if stage == Stage::Rejected {
                rejection = rejection.or(failure.response.take());
            } else if is_kept || !is_retried {
                rejection = failure.response.take().or(rejection);
            }
            if !is_retried {
                let error = || self.failure_error(&failure, decision);
                return self.fail(rejection, error, outcome);
            }
            self.upstream.metrics.retried(failure.stage.retry_reason());
            let verb = self.info.verb.as_str();
            tracing::debug!(reason = failure.reason, verb, "request is sent again");
            failed = Some(failure);
        }
        unreachable!("the last attempt returns")
    }

    /// Makes an attempt at a heartbeat. The stream is reset if it should end without a response.
    async fn heartbeat_attempt(&self, permit: Permit) -> Result<UpstreamResponse, FailedAttempt> {
        let connection = Rc::clone(permit.connection());
        tokio::select! {
            biased;
            result = self.attempt(permit, 1) => result,
            reason = heartbeat::until_hopeless(&connection) => {
                Err(FailedAttempt::new(Stage::Unanswered, &reason, &connection))
            }
        }
    }

    fn is_watch(&self) -> bool {
        self.info.kind == RequestKind::Watch
    }

    /// Whether the body can be sent again from its beginning.
    fn body_is_held(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.is_held())
    }

    /// The requirements by which the pool chooses a connection for the next attempt.
    fn stream_requirements<'a>(
        &'a self,
        previous_failure: Option<PreviousFailure<'a>>,
        excluded_endpoints: &'a [Arc<Endpoint>],
    ) -> StreamRequirements<'a> {
        let suspect_since = previous_failure.as_ref().and_then(PreviousFailure::suspect_since);
        // The request has waited on one connection without a response. Another suspect one would probably not
        // answer either.
        let live_only = previous_failure.as_ref().is_some_and(PreviousFailure::was_silent);
        StreamRequirements {
            watch: self.info.long_running(),
            held: self.is_watch(),
            previous_failure,
            excluded_endpoints,
            without_connection_since: suspect_since,
            live_only,
            resource_version: self.wanted_version(),
            client_subject: self.proof.subject(),
            versions: self.versions,
        }
    }

    /// Holds a new watch while no apiserver is reachable, and returns a permit when the outage is over.
    ///
    /// Returns `unavailable`, the result of the last acquire, if the watch may not be held, if the outage
    /// lasts too long after `requested_at`, or if the listener drains. The client then gets a 429, after
    /// which client-go does not list again.
    async fn hold_new_watch(
        &self,
        unavailable: Result<Permit, Unavailable>,
        requested_at: Instant,
    ) -> Result<Permit, Unavailable> {
        if !self.upstream.pool.may_hold_new_watch() {
            return unavailable;
        }
        let timeout = self.watch.as_ref().and_then(|watch| watch.timeout);
        let max_hold = timeout.unwrap_or(MAX_NEW_WATCH_HOLD).min(MAX_NEW_WATCH_HOLD);
        let permit = async {
            loop {
                let held = outage_ended(&self.upstream, &self.class).await;
                sleep(max_outage_jitter(held, false).mul_f64(fastrand::f64())).await;
                // If the client certificate has expired meanwhile, the watch is held until the deadline,
                // and the client's next request gets a 401.
                self.proof.confirmed().await;
                let requirements = self.stream_requirements(None, &[]);
                match self.upstream.pool.acquire(&self.class, requirements).await {
                    Err(Unavailable::Unreachable(_)) => {}
                    permit => return permit,
                }
            }
        };
        let drained = async {
            match self.drain.clone() {
                Some(mut drain) => drain.staggered_end().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            permit = permit => permit,
            () = sleep_until((requested_at + max_hold).into()) => unavailable,
            () = drained => unavailable,
        }
    }

    /// The error for the client if the request gets no permit.
    fn unavailable_error(&self, unavailable: &Unavailable) -> StatusError {
        match unavailable {
            Unavailable::Unreachable(reasons) if self.is_watch() => {
                StatusError::no_upstream_for_watch(reasons)
            }
            _ => StatusError::from(unavailable),
        }
    }

    /// Whether a watch may be sent to an endpoint besides those that answered 410.
    fn may_retry_besides(&self, too_old: &[Arc<Endpoint>]) -> bool {
        self.upstream.has_ready_endpoint_besides(too_old)
            && self.upstream.watches.may_retry_too_old(&self.upstream.metrics)
    }

    /// Records that the endpoint rejects requests, and returns whether the request may be sent to one that does not.
    /// `first`: no endpoint has rejected it before.
    fn may_ask_one_other(
        &self,
        failure: &FailedAttempt,
        excluded: &mut Vec<Arc<Endpoint>>,
        first: bool,
    ) -> bool {
        let headers = failure.response.as_ref().map(|response| &response.0.headers);
        let pause = headers.map_or(Duration::ZERO, overload_rejection::pause);
        excluded.extend(self.upstream.record_rejection(&failure.connection.endpoint, pause));
        first
            && self.upstream.has_ready_endpoint_besides(excluded)
            && self.upstream.rejected_budget.take()
    }

    /// The error for the client after a failed attempt that is not repeated.
    fn failure_error(&self, failure: &FailedAttempt, decision: RetryDecision) -> StatusError {
        if self.body.as_ref().is_some_and(|body| body.is_aborted()) {
            // The upstream stream was reset, so no handler got a complete body.
            return StatusError::bad_request("the request's body was malformed or broke off");
        }
        if let RetryDecision::Refuse(refusal) = decision {
            self.upstream.metrics.retry_refused(refusal.as_str());
        }
        let is_dead = failure.connection.state() == ConnectionState::Dead;
        let (kind, held) = (self.info.kind, self.body_is_held());
        retry::client_error(kind, failure.stage, held, is_dead, &failure.reason)
    }

    /// Forwards a rejection that was held back. Without one, returns `error`.
    fn fail(
        &self,
        rejection: Option<Box<HeldResponse>>,
        error: impl FnOnce() -> StatusError,
        mut outcome: Box<Outcome>,
    ) -> ForwardResult {
        if let Some(body) = &self.body {
            spawn_local(Rc::clone(body).discard_rest());
        }
        let Some(rejection) = rejection else { return Err((error(), outcome)) };
        let (mut head, body) = *rejection;
        hygiene::downstream_headers(&mut head.headers, false);
        outcome.code = Some(head.status.as_u16());
        Ok(ResponseBody::Full(FullBody::new(body, outcome)).with_head(head))
    }

    /// The response for the client. Its body streams the part that has not arrived yet.
    fn respond(
        self: Box<Self>,
        response: UpstreamResponse,
        mut outcome: Box<Outcome>,
        requested_at: Instant,
    ) -> Response<ResponseBody> {
        if let Some(body) = &self.body {
            body.stop_holding();
        }
        let UpstreamResponse { mut head, mut recv, prefix, mut permit, upload } = response;
        let upload = upload.and_then(UploadTask::answered);
        if self.hedges_sent.get() > 0 {
            let connection = permit.connection();
            let reused = connection.was_open(requested_at);
            outcome.answered_by(&connection.endpoint.label, reused);
        }
        hygiene::downstream_headers(&mut head.headers, false);
        outcome.code = Some(head.status.as_u16());
        let mut learner = self.learner(&head, &permit);
        if let Some(data) = prefix.as_ref().filter(|_| recv.is_end_stream()) {
            let data = data.clone();
            if let Some(learner) = &mut learner {
                learner.read_whole(&data);
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
            ..
        } = *self;
        let body = if retry::is_resumed(info.kind)
            && let Some(((watch, frames), drain)) = watch.zip(frames).zip(drain)
            && let Some(encoding) = Encoding::of_response(&head)
        {
            let relay = Relay::new(encoding, watch, requested_at, frames);
            let endpoint = &permit.connection().endpoint;
            let with_floor =
                resource_versions.as_ref().and_then(|versions| versions.head(&request, endpoint));
            let request = with_floor.unwrap_or(request);
            let versions = resource_versions
                .and_then(|versions| versions.of_watch(&info, upstream.pool.upstream(), endpoint));
            let context =
                ResumeContext::new((upstream, class), proof, drain, request, &head, versions);
            let body = WatchBody::new(context, relay, recv, permit, outcome);
            ResponseBody::Watch(Box::new(body))
        } else {
            let expiry = proof.expiry().filter(|_| info.kind == RequestKind::Watch);
            let body = StreamedBody::new(recv, prefix, permit, outcome, (upload, learner), expiry);
            ResponseBody::Stream(Box::new(body))
        };
        body.with_head(head)
    }
}
