//! Futures that the body polls: an attempt to open another upstream stream for a watch, and the hold in a total outage.

use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::LocalBoxFuture;
use http::Request;
use jackstay_core::request::status_error::StatusError;
use jackstay_core::watch::session::{NotResumable, Session, SessionInput};
use jackstay_net::http2_error::describe_h2_error;
use jackstay_sys::clock;
use tokio::time::{sleep, sleep_until, timeout_at};

use super::context::ResumeContext;
use super::suitable::{NoneSuitable, PROCESS_CHANGED};
use crate::proxy::attempt::Attempt;
use crate::proxy::upstream_client::{UpstreamClient, UpstreamResponse as Response, until_troubled};
use crate::proxy::watch::hold::{HoldEnd, hold_end, outage_ended};
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::pool::{PreviousFailure, Unavailable};

/// An attempt to resume a watch; `None` if the listener drains.
pub(super) type ResumeAttempt = LocalBoxFuture<'static, Option<Result<Response, AttemptError>>>;

/// An attempt to move a watch; the error is the reason for the log.
pub(super) type MoveAttempt = LocalBoxFuture<'static, Result<Response, String>>;

/// The wait of a held watch. It returns the input for the session, and the reason for the log.
pub(super) type Hold = LocalBoxFuture<'static, (SessionInput<'static>, &'static str)>;

/// Why an attempt received no response head.
pub(super) struct AttemptError {
    /// For the log.
    pub(super) reason: String,
    /// The connection that did not answer, if a stream was opened.
    pub(super) connection: Option<Rc<Connection>>,
    /// What it says about the endpoints.
    pub(super) kind: AttemptErrorKind,
}

/// What an attempt without a response head says about the endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AttemptErrorKind {
    /// Another attempt may succeed.
    Transient,
    /// The pool can reach no apiserver.
    Outage,
    /// None is known to honour the parameters of the watch.
    Parameter,
}

impl AttemptErrorKind {
    fn of(unavailable: &Unavailable) -> Self {
        match unavailable {
            Unavailable::Unreachable(_) => Self::Outage,
            _ => Self::Transient,
        }
    }
}

impl From<NoneSuitable> for AttemptErrorKind {
    fn from(none: NoneSuitable) -> Self {
        match none {
            NoneSuitable::Outage => Self::Outage,
            NoneSuitable::NotNow => Self::Transient,
            NoneSuitable::Parameter => Self::Parameter,
        }
    }
}

/// How the last attempt, on this connection, has ended.
fn previous(session: &Session, last: &Connection) -> PreviousFailure {
    if session.last_refused() {
        PreviousFailure::Refusal(last.key(), last.endpoint.key())
    } else {
        PreviousFailure::Silence(last.key(), last.endpoint.key())
    }
}

/// After `delay`, takes a stream from the pool and sends the request on it. The attempt fails if there is no
/// response head within the limit of the session.
pub(super) fn resume(
    context: &ResumeContext,
    session: &Session,
    head: Request<()>,
    delay: Duration,
) -> ResumeAttempt {
    let (upstream, class) = (Rc::clone(&context.upstream), Rc::clone(&context.class));
    let proof = context.proof.clone();
    let previous_failure = context.last_connection().map(|last| previous(session, last));
    let limit = session.attempt_timeout();
    let mut excluded = session.excluded_at(clock::now() + delay);
    let (suitable, wanted) = (context.suitable_endpoints(session), context.wanted_version());
    let start_floor = context.start_floor();
    let mut drain = context.drain.clone();
    let no_stream = |reason, kind| AttemptError { reason, connection: None, kind };
    Box::pin(async move {
        let attempt = async {
            sleep(delay).await;
            // If the identity is no longer proven, the body ends the watch.
            proof.confirmed().await;
            if let Err(none) = suitable.wait_for_parameters(&excluded).await {
                let reason = "no endpoint is known to honour the parameters of the watch";
                return Err(no_stream(reason.to_owned(), none.into()));
            }
            suitable.exclude_others(&mut excluded);
            let mut stream = suitable.stream_request(excluded, wanted.as_ref(), &proof);
            stream.required.may_be_held = true;
            stream.required.previous_failure = previous_failure;
            let deadline = clock::now() + limit;
            let permit = upstream.pool.acquire(&class, stream);
            match timeout_at(deadline.into(), permit).await {
                Ok(Ok(permit)) if suitable.honours_parameters(&permit.connection().endpoint) => {
                    let floor = start_floor.as_ref();
                    let endpoint = &permit.connection().endpoint;
                    let with_floor = floor.and_then(|floor| floor.head(&head, endpoint));
                    if with_floor.is_some() {
                        upstream.metrics.version_floor("applied");
                    }
                    send(&upstream, permit, with_floor.unwrap_or(head), deadline).await
                }
                Ok(Ok(_)) => {
                    Err(no_stream(PROCESS_CHANGED.to_owned(), AttemptErrorKind::Transient))
                }
                Ok(Err(unavailable)) => {
                    let reason = StatusError::from(&unavailable).message;
                    Err(no_stream(reason, AttemptErrorKind::of(&unavailable)))
                }
                Err(_) => {
                    let reason = "no stream within the time limit".to_owned();
                    Err(no_stream(reason, AttemptErrorKind::Transient))
                }
            }
        };
        tokio::select! {
            result = attempt => Some(result),
            () = drain.staggered_end() => None,
        }
    })
}

/// Holds a watch until its deadline, or, with `until_reachable`, until an apiserver can be reached before.
pub(super) fn hold(
    context: &ResumeContext,
    deadline: Option<Instant>,
    until_reachable: bool,
) -> Hold {
    let (upstream, class) = (Rc::clone(&context.upstream), Rc::clone(&context.class));
    let end = hold_end(deadline, Some(context.drain.clone()));
    Box::pin(async move {
        tokio::select! {
            held = outage_ended(&upstream, &class), if until_reachable => {
                (SessionInput::OutageEnded { held }, "an apiserver can be reached")
            }
            end = end => match end {
                HoldEnd::Deadline => {
                    let cause = "the deadline passed while no apiserver could be reached";
                    (SessionInput::Stop(NotResumable::Expired), cause)
                }
                HoldEnd::Drain => (SessionInput::Stop(NotResumable::Shutdown), "shutdown"),
            },
        }
    })
}

/// Sends the request and waits for the response head until `deadline`, or until the connection is
/// suspected.
pub(super) async fn send(
    upstream: &UpstreamClient,
    permit: Permit,
    head: Request<()>,
    deadline: Instant,
) -> Result<Response, AttemptError> {
    let connection = Rc::clone(permit.connection());
    let failed = |reason: String| AttemptError {
        reason,
        connection: Some(Rc::clone(&connection)),
        kind: AttemptErrorKind::Transient,
    };
    let mut attempt =
        Attempt::open(permit, head, None).map_err(|error| failed(describe_h2_error(&error)))?;
    let head = tokio::select! {
        head = attempt.head() => head.map_err(|error| failed(describe_h2_error(&error)))?,
        () = until_troubled(&connection, upstream) => {
            return Err(failed("connection suspected before the response head".to_owned()));
        }
        () = sleep_until(deadline.into()) => {
            return Err(failed("no response head within the time limit".to_owned()));
        }
    };
    Ok(attempt.watch_response(head))
}
