//! Sends a request upstream and returns its response, or an error for the client.
//!
//! ```text
//! acquire a permit for a stream -> attempt -> response
//!        ^                            | connection in trouble: a second attempt beside it (hedge)
//!        |                            | failed: retry::decide
//!        +----------- retry ----------+
//! ```

mod attempt;
mod hedge;

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use tokio::time::{Instant, sleep, sleep_until};

use self::attempt::{FailedAttempt, HeldResponse};
use super::client_certificate::IdentityProof;
use super::drain::DrainWatcher;
use super::hygiene;
use super::request_body::RequestBody;
use super::request_info::{RequestInfo, RequestKind};
use super::response_body::{FullBody, ResponseBody, StreamedBody};
use super::retry::{self, ATTEMPTS, RetryDecision, Stage};
use super::status_error::StatusError;
use super::upstream_client::{UpstreamClient, UpstreamResponse, release_window};
use super::watch::body::{ResumeContext, WatchBody, outage_ended};
use super::watch::codec::Encoding;
use super::watch::relay::Relay;
use super::watch::request::WatchRequest;
use super::watch::session::max_outage_jitter;
use crate::observe::Outcome;
use crate::upstream::connection::{ConnectionState, Permit};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::{ClassPool, PreviousFailure, StreamRequirements, Unavailable};

/// How long a new watch is held before it is answered with 429.
const NEW_WATCH: Duration = Duration::from_secs(30);

/// A request that is forwarded.
pub struct ForwardedRequest {
    /// The client of the upstream that gets the request.
    pub upstream: Rc<UpstreamClient>,
    /// The connections that the request may use.
    pub class: Rc<ClassPool>,
    /// Proves that the request may use these connections.
    pub proof: IdentityProof,
    /// The head as it goes upstream.
    pub head: Request<()>,
    /// The body; `None` if the head ends the request.
    pub body: Option<Rc<RequestBody>>,
    /// The request in Kubernetes terms.
    pub info: RequestInfo,
    /// The parameters of a watch whose frames can be followed.
    pub watch: Option<WatchRequest>,
    /// The drain of the listener; `Some` for every watch.
    pub drain: Option<DrainWatcher>,
    /// How many hedges were sent so far.
    pub hedges_sent: Cell<u32>,
}

impl ForwardedRequest {
    /// Forwards the request until there is a response or [`retry::decide`] refuses another attempt.
    ///
    /// # Errors
    /// The error for the client, with the outcome to record it in.
    pub async fn forward(
        self: Box<Self>,
        mut outcome: Box<Outcome>,
    ) -> Result<Response<ResponseBody>, (StatusError, Box<Outcome>)> {
        self.upstream.earn();
        let mut asked_at = outcome.started;
        let mut failed: Option<FailedAttempt> = None;
        // The endpoints that answered a watch with 410, and the last response that was held back.
        let mut too_old: Vec<Arc<Endpoint>> = Vec::new();
        let mut held: Option<Box<HeldResponse>> = None;
        for attempt in 1..=ATTEMPTS {
            let after = failed.as_ref().map(FailedAttempt::after);
            let need = self.need(after, &too_old);
            let mut permit = self.upstream.pool.acquire(&self.class, need).await;
            if let Err(Unavailable::Unreachable(_)) = permit
                && self.is_watch()
                && held.is_none()
            {
                // Boxed, so that no other request carries room for it.
                permit = Box::pin(self.hold(permit, outcome.started)).await;
                asked_at = Instant::now();
            }
            let permit = match permit {
                Ok(permit) => permit,
                Err(unavailable) => {
                    return match held {
                        Some(response) => Ok(pass_on(*response, outcome)),
                        None => Err((self.unavailable(&unavailable), outcome)),
                    };
                }
            };
            let connection = permit.connection();
            let reused = connection.was_open(asked_at);
            outcome.sent_to(&connection.endpoint.label, reused);
            let result = self.attempt(permit, 1).await;
            if self.hedges_sent.get() > 0 {
                outcome.hedged = true;
            }
            let mut failure = match result {
                Ok(response) => return Ok(self.respond(response, outcome, asked_at)),
                Err(failure) => failure,
            };
            let (kind, stage) = (self.info.kind, failure.stage);
            let decision = retry::decide(kind, stage, self.body_is_held(), attempt);
            let retries = match decision {
                RetryDecision::Retry => true,
                RetryDecision::RetryAtOtherEndpoint => {
                    too_old.push(Arc::clone(&failure.connection.endpoint));
                    self.may_ask_besides(&too_old)
                }
                RetryDecision::Refuse(_) => false,
            };
            // A 410 is kept while other endpoints are asked, any other rejection only if it is the last.
            if stage == Stage::TooOld || !retries {
                held = failure.response.take().or(held);
            }
            if !retries {
                return match held {
                    Some(response) => Ok(pass_on(*response, outcome)),
                    None => Err((self.give_up(&failure, decision), outcome)),
                };
            }
            self.upstream.metrics.retried(failure.stage.retry_reason());
            let verb = self.info.verb.as_str();
            tracing::debug!(reason = failure.reason, verb, "request is sent again");
            failed = Some(failure);
        }
        unreachable!("the last attempt returns")
    }

    fn is_watch(&self) -> bool {
        self.info.kind == RequestKind::Watch
    }

    /// Whether the body can be sent again from its beginning.
    fn body_is_held(&self) -> bool {
        self.body.as_ref().is_none_or(|body| body.is_held())
    }

    /// What the pool needs to know to choose a connection: the attempt that failed before, and the
    /// endpoints that must not get this one.
    fn need<'a>(
        &'a self,
        after: Option<PreviousFailure<'a>>,
        excluded: &'a [Arc<Endpoint>],
    ) -> StreamRequirements<'a> {
        let without = after.as_ref().and_then(PreviousFailure::suspect_since);
        StreamRequirements {
            watch: self.info.long_running(),
            held: self.is_watch(),
            previous_failure: after,
            excluded_endpoints: excluded,
            without_connection_since: without,
            live_only: false,
            client_subject: self.proof.subject(),
        }
    }

    /// Holds a new watch while no apiserver can be reached: until the outage is over, until its time since
    /// `asked_at` has passed, or until its listener drains. `unavailable` is the result of the last try, and
    /// is returned if there is no permit in time: the client gets a 429, after which client-go does not list.
    async fn hold(
        &self,
        unavailable: Result<Permit, Unavailable>,
        asked_at: Instant,
    ) -> Result<Permit, Unavailable> {
        if !self.upstream.watches.may_hold_new() {
            return unavailable;
        }
        let timeout = self.watch.as_ref().and_then(|watch| watch.timeout);
        let deadline = asked_at + timeout.map_or(NEW_WATCH, |timeout| timeout.min(NEW_WATCH));
        let permit = async {
            loop {
                let held = outage_ended(&self.upstream, &self.class).await;
                sleep(max_outage_jitter(held, false).mul_f64(fastrand::f64())).await;
                // If the certificate has expired meanwhile, the client's next request gets the 401.
                self.proof.confirmed().await;
                match self.upstream.pool.acquire(&self.class, self.need(None, &[])).await {
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
            () = sleep_until(deadline) => unavailable,
            () = drained => unavailable,
        }
    }

    /// The error for the client if the request gets no permit.
    fn unavailable(&self, unavailable: &Unavailable) -> StatusError {
        match unavailable {
            Unavailable::Unreachable(reasons) if self.is_watch() => {
                StatusError::no_upstream_for_watch(reasons)
            }
            _ => StatusError::unavailable(unavailable),
        }
    }

    /// Whether a watch may be sent to another endpoint than these, which answered 410.
    fn may_ask_besides(&self, too_old: &[Arc<Endpoint>]) -> bool {
        self.upstream.has_ready_endpoint_besides(too_old)
            && self.upstream.watches.may_retry_too_old(&self.upstream.metrics)
    }

    /// The error for the client after a failed attempt that is not repeated.
    fn give_up(&self, failure: &FailedAttempt, decision: RetryDecision) -> StatusError {
        if self.body.as_ref().is_some_and(|body| body.is_broken()) {
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

    /// The response for the client, whose body streams what is still to come.
    fn respond(
        self: Box<Self>,
        response: UpstreamResponse,
        mut outcome: Box<Outcome>,
        asked_at: Instant,
    ) -> Response<ResponseBody> {
        if let Some(body) = &self.body {
            body.stop_holding();
        }
        let UpstreamResponse { mut head, mut recv, first, mut permit, upload } = response;
        if self.hedges_sent.get() > 0 {
            let connection = permit.connection();
            let reused = connection.was_open(asked_at);
            outcome.answered_by(&connection.endpoint.label, reused);
        }
        hygiene::downstream_headers(&mut head.headers, false);
        outcome.code = Some(head.status.as_u16());
        if let Some(data) = first.as_ref().filter(|_| recv.is_end_stream()) {
            let data = data.clone();
            permit.finished();
            // The stream needs no more window, but the connection does.
            release_window(&mut recv, &mut data.len());
            return ResponseBody::Full(FullBody::new(data, outcome)).with_head(head);
        }
        let Self { upstream, class, proof, head: request, watch, drain, info, .. } = *self;
        let body = if retry::is_resumed(info.kind)
            && let Some((watch, drain)) = watch.zip(drain)
            && let Some(encoding) = Encoding::of_response(&head)
        {
            let relay = Relay::new(encoding, watch, asked_at, upstream.watches.partial_frames());
            let context = ResumeContext::new((upstream, class), proof, drain, request, &head);
            ResponseBody::Watch(Box::new(WatchBody::new(context, relay, recv, permit, outcome)))
        } else {
            let expiry = proof.expiry().filter(|_| info.kind == RequestKind::Watch);
            let body = StreamedBody::new(recv, first, permit, outcome, upload, expiry);
            ResponseBody::Stream(Box::new(body))
        };
        body.with_head(head)
    }
}

/// Forwards a response that was held back.
fn pass_on((mut head, body): HeldResponse, mut outcome: Box<Outcome>) -> Response<ResponseBody> {
    hygiene::downstream_headers(&mut head.headers, false);
    outcome.code = Some(head.status.as_u16());
    ResponseBody::Full(FullBody::new(body, outcome)).with_head(head)
}
