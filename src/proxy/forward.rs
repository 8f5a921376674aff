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
mod new_watch;
mod request;

use std::sync::Arc;

use h2::RecvStream;
use http::{Response, response};
use tokio::time::Instant;

use self::attempt::{FailedAttempt, HeldResponse};
pub use self::request::ForwardedRequest;
use super::hygiene;
use super::request_info::RequestKind;
use super::response_body::{FullBody, ResponseBody, StreamedBody};
use super::retry::{self, ATTEMPTS, ClientError, RetryDecision, Stage};
use super::status_error::StatusError;
use super::upstream_client::UpstreamResponse;
use super::watch::body::{self, AcceptedWatch, WatchBody};
use crate::observe::Outcome;
use crate::upstream::connection::ConnectionState;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::Unavailable;

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
        let mut asked_at = outcome.started();
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
                permit = Box::pin(self.hold(permit, outcome.started())).await;
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
            let reused = connection.stats.was_open(asked_at);
            outcome.sent_to(&connection.endpoint.label, reused);
            let result = self.attempt(permit, 1).await;
            if self.hedges.get() > 0 {
                outcome.hedged();
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
    /// Whether a watch may be sent to another endpoint than these, which answered 410.
    fn may_ask_besides(&self, too_old: &[Arc<Endpoint>]) -> bool {
        self.upstream.has_ready_besides(too_old)
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
        let body_is_held = self.body_is_held();
        let reason = &*failure.reason;
        match retry::client_error(self.info.kind, failure.stage, body_is_held, is_dead) {
            ClientError::WatchUnavailable => StatusError::no_upstream_for_watch(reason),
            ClientError::UnprocessedBodyNotHeld => StatusError::unprocessed(reason),
            ClientError::Unprocessed => StatusError::bad_gateway(format_args!(
                "the request was not processed and cannot be sent again: {reason}"
            )),
            ClientError::SafeRequestFailed => StatusError::bad_gateway(reason),
            ClientError::UnknownOutcome => StatusError::unknown_outcome(reason),
        }
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
        let UpstreamResponse { mut head, recv, first, mut permit, upload } = response;
        if self.hedges.get() > 0 {
            let connection = permit.connection();
            let reused = connection.stats.was_open(asked_at);
            outcome.answered_by(&connection.endpoint.label, reused);
        }
        hygiene::downstream_headers(&mut head.headers, false);
        outcome.answered(head.status.as_u16());
        if let Some(data) = first.as_ref().filter(|_| recv.is_end_stream()) {
            let data = data.clone();
            permit.finished();
            release_all(recv, data.len());
            return into_response(head, ResponseBody::Full(FullBody::new(data, outcome)));
        }
        let Self { upstream, class, proof, head: request, watch, drain, info, .. } = *self;
        let followed = watch.zip(drain).zip(body::encoding(&head));
        let followed = followed.filter(|_| retry::is_resumed(info.kind));
        let body = if let Some(((watch, drain), encoding)) = followed {
            let watch = AcceptedWatch {
                upstream,
                class,
                proof,
                head: request,
                request: watch,
                encoding,
                requested_at: asked_at,
                drain,
            };
            ResponseBody::Watch(Box::new(WatchBody::new(watch, &head, recv, permit, outcome)))
        } else {
            let expiry = proof.end().filter(|_| info.kind == RequestKind::Watch);
            let body = StreamedBody::new(recv, first, permit, outcome, upload, expiry);
            ResponseBody::Stream(Box::new(body))
        };
        into_response(head, body)
    }
}

/// Forwards a response that was held back.
fn pass_on((mut head, body): HeldResponse, mut outcome: Box<Outcome>) -> Response<ResponseBody> {
    hygiene::downstream_headers(&mut head.headers, false);
    outcome.answered(head.status.as_u16());
    into_response(head, ResponseBody::Full(FullBody::new(body, outcome)))
}

fn into_response(head: response::Parts, body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}

/// Releases the window of a response that has arrived completely. Its stream needs no more window, but
/// the connection does.
fn release_all(mut recv: RecvStream, bytes: usize) {
    let _ = recv.flow_control().release_capacity(bytes);
}
