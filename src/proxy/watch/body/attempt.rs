//! Attempts to open another upstream stream for a watch, and the wait for an apiserver that can be
//! reached. All of them are futures that the body polls.

use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::context::ResumeContext;
use crate::proxy::client_certificate::IdentityProof;
use crate::proxy::status_error::StatusError;
use crate::proxy::upstream_client::{UpstreamClient, UpstreamResponse as Response, troubled};
use crate::proxy::watch::outage;
use crate::upstream::connection::{Connection, Permit, describe_h2_error};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::{ClassPool, PreviousFailure, StreamRequirements, Unavailable};

/// An attempt to resume; `None`: the listener drains.
pub(super) type Attempt = Pin<Box<dyn Future<Output = Option<Result<Response, AttemptError>>>>>;

/// An attempt to move a watch while its stream works.
pub(super) type MoveAttempt = Pin<Box<dyn Future<Output = Result<Response, AttemptError>>>>;

/// Waits while no apiserver can be reached.
pub(super) type Hold = Pin<Box<dyn Future<Output = HoldEnd>>>;

/// Why an attempt got no response head.
pub(super) struct AttemptError {
    /// The reason, for the log.
    pub(super) reason: String,
    /// The connection that did not answer, if a stream was opened.
    pub(super) connection: Option<Rc<Connection>>,
    /// Whether no apiserver can be reached at all.
    pub(super) outage: bool,
}

/// Why a watch is no longer held.
pub(super) enum HoldEnd {
    /// An apiserver can be reached; the watch was held for this time.
    Returned(Duration),
    /// The deadline of the watch has passed.
    Deadline,
    /// The listener drains.
    Shutdown,
}

/// After `delay`, takes a stream from the pool and sends the request on it. The stream and the response
/// head must come within `limit`.
pub(super) fn resume(
    context: &ResumeContext,
    head: Request<()>,
    delay: Duration,
    limit: Duration,
) -> Attempt {
    let (upstream, class) = (Rc::clone(&context.upstream), Rc::clone(&context.class));
    let proof = context.proof.clone();
    let lost = context.lost().cloned();
    let refused = context.was_refused();
    let excluded = context.excluded_at(Instant::now() + delay);
    let mut drain = context.drain.clone();
    Box::pin(async move {
        let attempt = async {
            sleep(delay).await;
            // If the identity is no longer proven, the body ends the watch.
            proof.confirmed().await;
            let failure = if refused { PreviousFailure::Refusal } else { PreviousFailure::Silence };
            let previous = lost.as_ref().map(failure);
            send_on_new_stream(&upstream, (&class, &proof), head, previous, &excluded, limit).await
        };
        tokio::select! {
            result = attempt => Some(result),
            () = drain.staggered_end() => None,
        }
    })
}

/// Holds a watch until its deadline, and, if `until_return`, until an apiserver can be reached.
pub(super) fn hold(context: &ResumeContext, deadline: Option<Instant>, until_return: bool) -> Hold {
    let (upstream, class) = (Rc::clone(&context.upstream), Rc::clone(&context.class));
    let mut drain = context.drain.clone();
    Box::pin(async move {
        let expired = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            held = outage::hold(upstream, class), if until_return => HoldEnd::Returned(held),
            () = expired => HoldEnd::Deadline,
            () = drain.staggered_end() => HoldEnd::Shutdown,
        }
    })
}

async fn send_on_new_stream(
    upstream: &UpstreamClient,
    (class, proof): (&Rc<ClassPool>, &IdentityProof),
    head: Request<()>,
    previous_failure: Option<PreviousFailure<'_>>,
    excluded: &[Arc<Endpoint>],
    limit: Duration,
) -> Result<Response, AttemptError> {
    let requirements = StreamRequirements {
        watch: true,
        held: true,
        previous_failure,
        excluded_endpoints: excluded,
        ..StreamRequirements::for_client(proof.subject())
    };
    let deadline = Instant::now() + limit;
    let no_stream = |reason, outage| AttemptError { reason, connection: None, outage };
    let permit = match timeout_at(deadline, upstream.pool.acquire(class, requirements)).await {
        Ok(Ok(permit)) => permit,
        Ok(Err(unavailable)) => {
            let outage = matches!(unavailable, Unavailable::Unreachable(_));
            return Err(no_stream(StatusError::unavailable(&unavailable).message, outage));
        }
        Err(_) => return Err(no_stream("no stream in time".to_owned(), false)),
    };
    send(upstream, permit, head, deadline).await
}

/// Sends the request and waits for the response head until `deadline`, or until the connection is
/// suspected.
pub(super) async fn send(
    upstream: &UpstreamClient,
    mut permit: Permit,
    head: Request<()>,
    deadline: Instant,
) -> Result<Response, AttemptError> {
    let connection = Rc::clone(permit.connection());
    let failed = |reason: String| AttemptError {
        reason,
        connection: Some(Rc::clone(&connection)),
        outage: false,
    };
    let (response, _) =
        permit.open(head, true).map_err(|error| failed(describe_h2_error(&error)))?;
    let response = tokio::select! {
        response = response => response.map_err(|error| failed(describe_h2_error(&error)))?,
        () = troubled(&connection, upstream) => {
            return Err(failed("suspected before it answered".to_owned()));
        }
        () = sleep_until(deadline) => return Err(failed("no answer".to_owned())),
    };
    permit.head_arrived(Instant::now());
    let (head, recv) = response.into_parts();
    Ok(Response { head, recv, first: None, permit, upload: None })
}
