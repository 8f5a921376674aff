//! A worker's line to one upstream, and what crosses it: requests are opened here, their heads
//! awaited, and trouble noticed while they wait.
//!
//! What is sent again, and when, is decided by those who use it: [`super::forward`] for requests,
//! [`super::watch_body`] for watches that go on elsewhere.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use h2::RecvStream;
use http::{Request, response};
use tokio::time::Instant;

use super::respond::Problem;
use super::retry::HedgeBudget;
use super::upload::{Held, Upload};
use crate::observe::Metrics;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::health::Life;
use crate::upstream::pool::{After, ClassPool, Need, Pool, Unavailable};

/// What forwarding needs beside the request: the worker's line to one upstream.
pub struct Line {
    /// Its connections.
    pub pool: Rc<Pool>,
    /// Bounds second attempts.
    pub budget: HedgeBudget,
    /// Where retries and hedges are counted.
    pub metrics: Arc<Metrics>,
    /// What is held of bodies, on all lines of all workers.
    pub held: Arc<Held>,
}

impl Line {
    /// Whether there is a ready endpoint other than these.
    pub fn has_ready_besides(&self, others: &[Arc<Endpoint>]) -> bool {
        self.pool.upstream().endpoints.load().iter().any(|endpoint| {
            endpoint.state() == EndpointState::Ready
                && !others.iter().any(|other| Arc::ptr_eq(other, endpoint))
        })
    }
}

/// The head of an answer, and what comes after it.
pub struct Answer {
    /// The head.
    pub head: response::Parts,
    /// The body.
    pub recv: RecvStream,
    /// The first piece of the body, where the head was held back for it.
    pub first: Option<Bytes>,
    /// The place of its stream.
    pub permit: Permit,
    /// What is still sent of its request's body.
    pub upload: Option<Upload>,
}

/// Waits until the request should not rely on this connection alone: it is suspected, or drains
/// because its process is stopped, or its endpoint is unwell.
pub async fn troubled(connection: &Rc<Connection>, line: &Line) {
    loop {
        connection.changed().await;
        if connection.life() == Life::Suspect
            || connection.is_to_be_left()
            || is_better_elsewhere(connection, line)
        {
            return;
        }
    }
}

/// Whether its endpoint is unwell while another one is well. Where all are unwell, asking more of
/// them makes none of them better.
pub fn is_better_elsewhere(connection: &Connection, line: &Line) -> bool {
    connection.endpoint.state() == EndpointState::Degraded && line.has_ready_besides(&[])
}

/// What a client is told when there is no stream for its request.
pub fn problem(unavailable: &Unavailable) -> Problem {
    match unavailable {
        Unavailable::Unreachable(reasons) => Problem::no_upstream(reasons),
        Unavailable::Exhausted => Problem::too_many_requests(
            "every stream to the apiservers is taken: see connections.max and \
             connections.max_streams",
        ),
        Unavailable::NoCredential => {
            Problem::unauthorized("the credential for this identity is not loaded yet")
        }
    }
}

/// Sends the request of a watch once more and waits for the head: an attempt at going on.
///
/// # Errors
/// No stream, or the connection was lost before the head.
pub async fn reissue(
    line: &Line,
    class: &Rc<ClassPool>,
    head: Request<()>,
    after: Option<After<'_>>,
    shun: &[Arc<Endpoint>],
) -> Result<Answer, String> {
    let need = Need { watch: true, after, shun, without: None };
    let permit = line
        .pool
        .acquire(class, need)
        .await
        .map_err(|unavailable| problem(&unavailable).to_string())?;
    open(line, permit, head).await
}

/// Sends the request of a watch on this stream and waits for the head.
///
/// # Errors
/// The connection was lost or suspected before the head.
pub async fn open(line: &Line, mut permit: Permit, head: Request<()>) -> Result<Answer, String> {
    let (response, _) = permit.open(head, true).map_err(|error| error.to_string())?;
    let connection = Rc::clone(permit.connection());
    let response = tokio::select! {
        response = response => response.map_err(|error| error.to_string())?,
        () = troubled(&connection, line) => return Err("suspected before it answered".to_owned()),
    };
    permit.head_arrived(Instant::now());
    let (head, recv) = response.into_parts();
    Ok(Answer { head, recv, first: None, permit, upload: None })
}

/// Gives back the window of what the client has taken.
pub fn release(recv: &mut RecvStream, unreleased: &mut usize) {
    if *unreleased > 0 {
        // It fails only for more than was received, which cannot be.
        let _ = recv.flow_control().release_capacity(std::mem::take(unreleased));
    }
}
