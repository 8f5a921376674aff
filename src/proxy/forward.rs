//! Sends a request upstream and brings its answer back: on another connection where the first one
//! fails and the table allows it, and beside the first one where that is suspected.
//!
//! ```text
//! acquire a stream -> open it -> wait for the head -> answer
//!        ^                            | suspected: a second attempt beside it (hedge)
//!        |                            | lost: retry::decide
//!        +------------- again --------+
//! ```

mod new_watch;

use std::cell::Cell;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use h2::RecvStream;
use h2::client::ResponseFuture;
use http::{Request, Response, StatusCode, response};
use tokio::time::Instant;

use super::body_prefix::{beginning, is_awaited};
use super::client_certificate::IdentityProof;
use super::drain::DrainWatcher;
use super::hygiene;
use super::request_body::{RequestBody, UploadTask};
use super::request_info::{RequestInfo, RequestKind};
use super::respond::{self, StatusError};
use super::response_body::{FullBody, ResponseBody, StreamedBody};
use super::retry::{self, RetryDecision, Stage};
use super::upstream_client::{
    Answer, UpstreamClient, is_better_elsewhere, still_troubled, troubled,
};
use super::watch::body::{self, AcceptedWatch, WatchBody};
use super::watch::request::WatchRequest;
use crate::observe::Outcome;
use crate::upstream::connection::ConnectionState;
use crate::upstream::connection::{Connection, Permit, describe_h2_error};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::{ClassPool, PreviousFailure, StreamRequirements, Unavailable};

/// Attempts at one request, the first included. Each failure is another connection lost; more of
/// them within one request is an outage, and the client should hear of it.
const ATTEMPTS: u32 = 5;

/// Attempts side by side, the first included.
const LEGS: u32 = 4;

/// A request on its way: everything that is needed to send it again.
pub struct ForwardedRequest {
    /// The line it takes.
    pub upstream: Rc<UpstreamClient>,
    /// The connections it may use.
    pub class: Rc<ClassPool>,
    /// What entitles it to them.
    pub proof: IdentityProof,
    /// Its head as it goes upstream.
    pub head: Request<()>,
    /// Its body, if it has one.
    pub body: Option<Rc<RequestBody>>,
    /// What it is.
    pub info: RequestInfo,
    /// What a watch asked for, if it is one whose frames can be followed.
    pub watch: Option<WatchRequest>,
    /// When a watch is to end.
    pub drain: Option<DrainWatcher>,
    /// Second attempts beside a first one so far.
    pub hedges: Cell<u32>,
}

/// An attempt under way.
struct Leg {
    permit: Permit,
    response: ResponseFuture,
    upload: Option<UploadTask>,
}

/// A failed attempt.
pub struct Failure {
    stage: Stage,
    why: String,
    connection: Option<Rc<Connection>>,
    /// What the server said where it said that it did nothing: the client's, if nobody else takes
    /// the request.
    answer: Option<Box<ShortAnswer>>,
    /// It said that its history does not reach back to where a watch begins: others' may.
    too_old: bool,
}

/// A short answer that is held back.
type ShortAnswer = (response::Parts, Bytes);

impl Failure {
    fn after(&self) -> Option<PreviousFailure<'_>> {
        let connection = self.connection.as_ref()?;
        Some(match self.stage {
            Stage::Unprocessed => PreviousFailure::Refusal(connection),
            Stage::NotSent | Stage::Sent | Stage::Head | Stage::Body => {
                PreviousFailure::Silence(connection)
            }
        })
    }
}

impl ForwardedRequest {
    /// Forwards the request until there is an answer or nothing more may be tried.
    ///
    /// # Errors
    /// What the client is told instead, with the outcome to record it in.
    pub async fn forward(
        self: Box<Self>,
        mut outcome: Box<Outcome>,
    ) -> Result<Response<ResponseBody>, (StatusError, Box<Outcome>)> {
        self.upstream.earn();
        let mut asked_at = outcome.started();
        let mut failed: Option<Failure> = None;
        // Those that have answered a watch with 410, and what the last of them said.
        let mut too_old: Vec<Arc<Endpoint>> = Vec::new();
        let mut said: Option<Box<ShortAnswer>> = None;
        for attempt in 1..=ATTEMPTS {
            let after = failed.as_ref().and_then(Failure::after);
            let mut permit =
                self.upstream.pool.acquire(&self.class, self.need(after, &too_old)).await;
            if let Err(Unavailable::Unreachable(_)) = permit
                && self.is_watch()
                && said.is_none()
            {
                // Boxed, so that no other request carries room for it.
                permit = Box::pin(self.hold(permit, outcome.started())).await;
                asked_at = Instant::now();
            }
            let permit = match permit {
                Ok(permit) => permit,
                Err(unavailable) => {
                    return match said {
                        Some(answer) => Ok(pass_on(*answer, outcome)),
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
                Ok(answer) => return Ok(self.respond(answer, outcome, asked_at)),
                Err(failure) => failure,
            };
            let again = match retry::decide(self.info.kind, failure.stage) {
                RetryDecision::Again => self.body.as_ref().is_none_or(|body| body.is_held()),
                RetryDecision::Fail
                | RetryDecision::Forward
                | RetryDecision::Reset
                | RetryDecision::Resume => false,
            };
            let again = again
                && match failure.connection.as_ref().filter(|_| failure.too_old) {
                    None => true,
                    Some(connection) => {
                        too_old.push(Arc::clone(&connection.endpoint));
                        self.upstream.has_ready_besides(&too_old)
                            && attempt < ATTEMPTS
                            && self.upstream.watches.may_retry_too_old(&self.upstream.metrics)
                    }
                };
            let last = !again || attempt == ATTEMPTS;
            said = failure.answer.take().filter(|_| last || failure.too_old).or(said);
            if last {
                return match said {
                    Some(answer) => Ok(pass_on(*answer, outcome)),
                    None => Err((self.give_up(&failure), outcome)),
                };
            }
            self.upstream.metrics.retried(match failure.stage {
                _ if failure.too_old => "too_old",
                Stage::NotSent => "not_sent",
                Stage::Unprocessed => "unprocessed",
                Stage::Sent | Stage::Head | Stage::Body => "lost",
            });
            tracing::debug!(reason = failure.why, verb = self.info.verb.as_str(), "sending again");
            failed = Some(failure);
        }
        unreachable!("the last attempt returns")
    }

    fn need<'a>(
        &'a self,
        after: Option<PreviousFailure<'a>>,
        shun: &'a [Arc<Endpoint>],
    ) -> StreamRequirements<'a> {
        let watch = self.info.long_running();
        let without = after.as_ref().and_then(PreviousFailure::suspect_since);
        let (held, proven) = (self.is_watch(), self.proof.subject());
        StreamRequirements {
            watch,
            held,
            previous_failure: after,
            excluded_endpoints: shun,
            without_connection_since: without,
            live_only: false,
            client_subject: proven,
        }
    }

    fn is_watch(&self) -> bool {
        self.info.kind == RequestKind::Watch
    }

    fn give_up(&self, failure: &Failure) -> StatusError {
        if self.body.as_ref().is_some_and(|body| body.is_broken()) {
            // Upstream it was reset: no handler has had the whole of it.
            return StatusError::bad_request("the request's body was malformed or broke off");
        }
        let allowed = retry::decide(self.info.kind, failure.stage) == RetryDecision::Again;
        let held = self.body.as_ref().is_none_or(|body| body.is_held());
        self.upstream.metrics.retry_refused(match (allowed, held) {
            (false, _) => "unsafe",
            (true, false) => "not_held",
            (true, true) => "attempts",
        });
        // One that a live apiserver breaks off again and again must make its client list: asking for
        // the same again would never end.
        let unreached = match failure.stage {
            Stage::NotSent | Stage::Unprocessed => true,
            Stage::Sent | Stage::Head | Stage::Body => {
                failure.connection.as_ref().is_some_and(|c| c.state() == ConnectionState::Dead)
            }
        };
        if self.is_watch() && unreached {
            return StatusError::no_upstream_for_watch(&failure.why);
        }
        let safe = retry::may_hedge(self.info.kind);
        match failure.stage {
            Stage::NotSent | Stage::Unprocessed if !held => StatusError::unprocessed(&failure.why),
            Stage::NotSent | Stage::Unprocessed => StatusError::bad_gateway(&format!(
                "the request was not processed and cannot be sent again: {}",
                failure.why
            )),
            _ if safe => StatusError::bad_gateway(&failure.why),
            _ => StatusError::unknown_fate(&failure.why),
        }
    }

    /// One attempt, and another one beside it if its connection is suspected meanwhile; that one
    /// may be suspected too, since a switch that forgets flows forgets them all.
    async fn attempt(&self, permit: Permit, depth: u32) -> Result<Answer, Failure> {
        let connection = Rc::clone(permit.connection());
        let leg = self.launch(permit)?;
        let mut first = pin!(self.answer(leg));
        tokio::select! {
            biased;
            result = &mut first => return result,
            () = troubled(&connection, &self.upstream) => {}
        }
        // Boxed, as it is rare.
        Box::pin(self.attempt_in_trouble(first, connection, depth)).await
    }

    /// The rest of an attempt whose connection is in trouble.
    async fn attempt_in_trouble(
        &self,
        first: Pin<&mut impl Future<Output = Result<Answer, Failure>>>,
        connection: Rc<Connection>,
        depth: u32,
    ) -> Result<Answer, Failure> {
        let safe = retry::may_hedge(self.info.kind);
        let mut first = pin!(until_given_up(first, &connection, safe));
        let sent = self.body.as_ref().is_none_or(|body| body.is_complete());
        if depth == LEGS || !safe || !sent {
            return first.await;
        }
        connection.endpoint.request_probe();
        let made = self.hedges.get();
        let (answer, winner) = loop {
            if !self.upstream.hedges.take() {
                self.upstream.metrics.hedged("over_budget");
                return first.await;
            }
            let mut second = self.hedge(Rc::clone(&connection), depth + 1);
            tokio::select! {
                biased;
                result = &mut first => match result {
                    Ok(answer) => break (Ok(answer), "original"),
                    Err(failure) => break match second.await {
                        Some(answer) => (Ok(answer), "hedge"),
                        None => (Err(failure), "failed"),
                    },
                },
                result = &mut second => if let Some(answer) = result {
                    break (Ok(answer), "hedge");
                },
            }
            // There was nobody, or it failed too. A stopped process is waited for 20 s, and another
            // may be back sooner. Boxed, as it is rare.
            tokio::select! {
                biased;
                result = &mut first => break (result, "original"),
                () = Box::pin(still_troubled(&connection, &self.upstream)) => {}
            }
        };
        if self.hedges.get() > made {
            self.upstream.metrics.hedged(winner);
        }
        answer
    }

    /// Boxed: it is rare, and without it every request would carry the room for it.
    fn hedge(
        &self,
        connection: Rc<Connection>,
        depth: u32,
    ) -> Pin<Box<dyn Future<Output = Option<Answer>> + '_>> {
        Box::pin(async move {
            // The other flows of an endpoint that is unwell are no better.
            let unwell = is_better_elsewhere(&connection, &self.upstream);
            let shun = unwell.then(|| Arc::clone(&connection.endpoint));
            let need = self.need(Some(PreviousFailure::Silence(&connection)), shun.as_slice());
            let need = StreamRequirements { live_only: true, ..need };
            let Ok(permit) = self.upstream.pool.acquire(&self.class, need).await else {
                self.upstream.hedges.give_back();
                self.upstream.metrics.hedged("nobody");
                return None;
            };
            self.hedges.set(self.hedges.get() + 1);
            self.attempt(permit, depth).await.ok()
        })
    }

    /// Opens the stream and starts to send.
    fn launch(&self, mut permit: Permit) -> Result<Leg, Failure> {
        match permit.open(self.head.clone(), self.body.is_none()) {
            Ok((response, stream)) => {
                let upload = self.body.as_ref().map(|body| body.send(stream));
                Ok(Leg { permit, response, upload })
            }
            Err(error) => Err(Failure {
                stage: Stage::NotSent,
                why: error.to_string(),
                connection: Some(Rc::clone(permit.connection())),
                answer: None,
                too_old: false,
            }),
        }
    }

    /// Waits for the head, and for those that may be sent again also for the beginning of the body:
    /// until then nothing is forwarded, and a loss is no loss.
    async fn answer(&self, leg: Leg) -> Result<Answer, Failure> {
        let Leg { mut permit, response, upload } = leg;
        let connection = Rc::clone(permit.connection());
        let failure = |stage, why: String| Failure {
            stage,
            why: format!("{} on the connection to {}", why, connection.endpoint.label),
            connection: Some(Rc::clone(&connection)),
            answer: None,
            too_old: false,
        };
        let (head, mut recv) = match response.await {
            Ok(response) => response.into_parts(),
            Err(error) => return Err(failure(retry::stage_of(&error), describe_h2_error(&error))),
        };
        let arrived = Instant::now();
        if !is_awaited(self.info.kind) {
            permit.head_arrived(arrived);
        }
        connection.endpoint.response_received(head.status.as_u16());
        // History is per server: one that has just started knows none.
        let gone = self.info.kind == RequestKind::Watch
            && head.status == StatusCode::GONE
            && respond::is_short(&head.headers);
        if gone || respond::may_be_shutting_down(head.status, &head.headers) {
            // Boxed, so that no other answer carries room for it.
            let body =
                Box::pin(short_body(&mut recv)).await.map_err(|e| failure(Stage::Head, e))?;
            let too_old = gone && body.len() <= respond::REJECTION_MAX_BODY;
            if too_old || respond::shutting_down_rejection(head.status, &head.headers, &body) {
                permit.finished();
                let why = if too_old {
                    "its history is too short"
                } else {
                    "the apiserver is shutting down"
                };
                let refused = failure(Stage::Unprocessed, why.to_owned());
                return Err(Failure { answer: Some(Box::new((head, body))), too_old, ..refused });
            }
            permit.head_arrived(arrived);
            return Ok(Answer { head, recv, first: Some(body), permit, upload });
        }
        let first = beginning(self.info.kind, &mut recv, &connection)
            .await
            .map_err(|error| failure(Stage::Head, describe_h2_error(&error)))?;
        permit.head_arrived(arrived);
        Ok(Answer { head, recv, first, permit, upload })
    }

    fn respond(
        self: Box<Self>,
        answer: Answer,
        mut outcome: Box<Outcome>,
        asked_at: Instant,
    ) -> Response<ResponseBody> {
        if let Some(body) = &self.body {
            body.forget();
        }
        let Answer { mut head, recv, first, permit, upload } = answer;
        if self.hedges.get() > 0 {
            let connection = permit.connection();
            let reused = connection.stats.was_open(asked_at);
            outcome.answered_by(&connection.endpoint.label, reused);
        }
        hygiene::downstream_response_headers(&mut head.headers);
        outcome.answered(head.status.as_u16());
        let whole = recv.is_end_stream();
        if let Some(data) = first.as_ref().filter(|_| whole) {
            let data = data.clone();
            let mut permit = permit;
            permit.finished();
            release_all(recv, data.len());
            return into_response(head, ResponseBody::Full(FullBody::new(data, outcome)));
        }
        let Self { upstream, class, proof, head: request, watch, drain, info, .. } = *self;
        let body = if let (Some(watch), Some(drain), Some(encoding)) =
            (watch, drain, body::encoding(&head))
        {
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
            let end = proof.end().filter(|_| info.kind == RequestKind::Watch);
            ResponseBody::Stream(Box::new(
                StreamedBody::new(recv, first, permit, outcome, upload).until(end),
            ))
        };
        into_response(head, body)
    }
}

/// Waits for an answer as long as its connection is worth waiting for.
async fn until_given_up(
    answer: Pin<&mut impl Future<Output = Result<Answer, Failure>>>,
    connection: &Rc<Connection>,
    safe: bool,
) -> Result<Answer, Failure> {
    tokio::select! {
        biased;
        result = answer => result,
        why = connection.no_response_expected(safe) => Err(Failure {
            stage: Stage::Sent,
            why: format!("{why} on the connection to {}", connection.endpoint.label),
            connection: Some(Rc::clone(connection)),
            answer: None,
            too_old: false,
        }),
    }
}

/// Forwards an answer that was held back.
fn pass_on((mut head, body): ShortAnswer, mut outcome: Box<Outcome>) -> Response<ResponseBody> {
    hygiene::downstream_response_headers(&mut head.headers);
    outcome.answered(head.status.as_u16());
    into_response(head, ResponseBody::Full(FullBody::new(body, outcome)))
}

fn into_response(head: response::Parts, body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    response
}

/// An answer that is all here has no further use of window; the connection has.
fn release_all(mut recv: RecvStream, bytes: usize) {
    let _ = recv.flow_control().release_capacity(bytes);
}

/// Reads an answer that is short by its own account.
async fn short_body(recv: &mut RecvStream) -> Result<Bytes, String> {
    let mut body = BytesMut::new();
    while let Some(data) = recv.data().await {
        let data = data.map_err(|error| describe_h2_error(&error))?;
        let _ = recv.flow_control().release_capacity(data.len());
        body.extend_from_slice(&data);
        if body.len() > respond::REJECTION_MAX_BODY {
            break;
        }
    }
    Ok(body.freeze())
}
