//! One attempt to open a new upstream stream for a running watch.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::proxy::client_certificate::IdentityProof;
use crate::proxy::upstream_client::{Answer, UpstreamClient, problem, troubled};
use crate::upstream::connection::{Connection, Permit, describe_h2_error};
use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::{ClassPool, PreviousFailure, StreamRequirements, Unavailable};

/// Why an attempt got no response head.
pub struct AttemptError {
    /// The reason, for the log.
    pub reason: String,
    /// The connection that did not answer, if a stream was opened.
    pub connection: Option<Rc<Connection>>,
    /// Whether no apiserver can be reached at all.
    pub outage: bool,
}

/// Takes a stream from the pool, sends the request of a watch on it and waits for the response head,
/// all within `limit`.
///
/// # Errors
/// There was no stream, or the connection was lost before the head, or no head came in time.
pub async fn send_on_new_stream(
    client: &UpstreamClient,
    (class, proof): (&Rc<ClassPool>, &IdentityProof),
    head: Request<()>,
    after: Option<PreviousFailure<'_>>,
    excluded: &[Arc<Endpoint>],
    limit: Duration,
) -> Result<Answer, AttemptError> {
    let need = StreamRequirements {
        watch: true,
        held: true,
        previous_failure: after,
        excluded_endpoints: excluded,
        ..StreamRequirements::for_client(proof.subject())
    };
    let deadline = Instant::now() + limit;
    let no_stream = |reason, outage| AttemptError { reason, connection: None, outage };
    let permit = match timeout_at(deadline, client.pool.acquire(class, need)).await {
        Ok(Ok(permit)) => permit,
        Ok(Err(unavailable)) => {
            let outage = matches!(unavailable, Unavailable::Unreachable(_));
            return Err(no_stream(problem(&unavailable).to_string(), outage));
        }
        Err(_) => return Err(no_stream("no stream in time".to_owned(), false)),
    };
    send(client, permit, head, deadline).await
}

/// Sends the request of a watch on this stream and waits for the response head until `deadline`.
///
/// # Errors
/// The connection was lost or suspected before the head, or no head came in time.
pub async fn send(
    client: &UpstreamClient,
    mut permit: Permit,
    head: Request<()>,
    deadline: Instant,
) -> Result<Answer, AttemptError> {
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
        () = troubled(&connection, client) => {
            return Err(failed("suspected before it answered".to_owned()));
        }
        () = sleep_until(deadline) => return Err(failed("no answer".to_owned())),
    };
    permit.head_arrived(Instant::now());
    let (head, recv) = response.into_parts();
    Ok(Answer { head, recv, first: None, permit, upload: None })
}
