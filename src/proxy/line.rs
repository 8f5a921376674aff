//! A worker's line to one upstream, and what crosses it: requests are opened here, their heads
//! awaited, and trouble noticed while they wait.
//!
//! What is sent again, and when, is decided by those who use it: [`super::forward`] for requests,
//! [`super::watch_body`] for watches that go on elsewhere.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use http::{Request, response};
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use super::hold::{Holding, PAUSE};
use super::peer::Proof;
use super::respond::Problem;
use super::retry::Budget;
use super::room::Room;
use super::upload::Upload;
use super::watch::held;
use crate::observe::Metrics;
use crate::upstream::connection::{Connection, Permit, in_words};
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::health::Life;
use crate::upstream::pool::{After, ClassPool, Need, Pool, Unavailable};

/// Pause before a second attempt is tried again that found no connection, or failed. Within a second
/// of the return of an apiserver traffic flows.
const HEDGE_AGAIN: Duration = Duration::from_secs(1);

/// What forwarding needs beside the request: the worker's line to one upstream.
pub struct Line {
    /// Its connections.
    pub pool: Rc<Pool>,
    /// Bounds second attempts.
    pub hedges: Budget,
    /// Bounds what others are asked after a 410.
    pub opinions: Budget,
    /// The watches that are held while no apiserver can be reached.
    pub holding: Holding,
    /// Bounds what is held of frames that are not whole.
    pub frames: Arc<Room>,
    /// Where retries and hedges are counted.
    pub metrics: Arc<Metrics>,
    /// Bounds what is held of bodies, on all lines of all workers.
    pub bodies: Arc<Room>,
}

impl Line {
    /// A line without any request on it yet.
    pub fn new(pool: Rc<Pool>, metrics: Arc<Metrics>, bodies: Arc<Room>) -> Self {
        Self {
            hedges: Budget::hedges(pool.upstream().config().connections.max_streams),
            pool,
            opinions: Budget::opinions(),
            holding: Holding::new(metrics.held_watches()),
            frames: Room::new(held::ROOM, metrics.held_frame_bytes()),
            metrics,
            bodies,
        }
    }

    /// A request was made.
    pub fn earn(&self) {
        self.hedges.earn();
        self.opinions.earn();
    }

    /// Holds a watch until it is worth asking for a stream again: until the outage is over, or for a
    /// moment where there is none and the class has no connection all the same. Returns how long it
    /// took.
    pub async fn hold(self: Rc<Self>, class: Rc<ClassPool>) -> Duration {
        let began = Instant::now();
        let _held = self.holding.add();
        if self.pool.is_out() {
            self.pool.wait_for_return(&class).await;
        } else {
            sleep(PAUSE.mul_f64(0.5 + fastrand::f64())).await;
        }
        began.elapsed()
    }

    /// Whether another endpoint may be asked for a watch that was answered with 410; counted where
    /// not.
    pub fn may_ask_another(&self) -> bool {
        let may = self.opinions.take();
        if !may {
            self.metrics.watch_resumed("over_budget");
        }
        may
    }

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

/// Waits until the request should not rely on this connection alone: it is suspected, its path is
/// lost, or it drains because its process is stopped, or its endpoint is unwell.
pub async fn troubled(connection: &Rc<Connection>, line: &Line) {
    loop {
        connection.changed().await;
        if is_troubled(connection, line) {
            return;
        }
    }
}

/// Waits a while, and then until the request should still not rely on this connection alone.
pub async fn still_troubled(connection: &Rc<Connection>, line: &Line) {
    sleep(HEDGE_AGAIN).await;
    while !is_troubled(connection, line) {
        connection.changed().await;
    }
}

fn is_troubled(connection: &Connection, line: &Line) -> bool {
    connection.life() == Life::Suspect
        || connection.is_to_be_left()
        || is_better_elsewhere(connection, line)
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

/// Why an attempt came to nothing.
pub struct Unanswered {
    /// For the log.
    pub why: String,
    /// Whose answer was awaited.
    pub by: Option<Rc<Connection>>,
    /// No apiserver can be reached.
    pub outage: bool,
}

/// Sends the request of a watch once more and waits for the head for so long: an attempt at going on.
///
/// # Errors
/// No stream, or the connection was lost before the head, or it did not come.
pub async fn reissue(
    line: &Line,
    (class, proof): (&Rc<ClassPool>, &Proof),
    head: Request<()>,
    after: Option<After<'_>>,
    shun: &[Arc<Endpoint>],
    patience: Duration,
) -> Result<Answer, Unanswered> {
    let need = Need { watch: true, held: true, after, shun, ..Need::of(proof.subject()) };
    let end = Instant::now() + patience;
    let none = |why, outage| Unanswered { why, by: None, outage };
    let permit = match timeout_at(end, line.pool.acquire(class, need)).await {
        Ok(Ok(permit)) => permit,
        Ok(Err(unavailable)) => {
            let outage = matches!(unavailable, Unavailable::Unreachable(_));
            return Err(none(problem(&unavailable).to_string(), outage));
        }
        Err(_) => return Err(none("no stream in time".to_owned(), false)),
    };
    open(line, permit, head, end).await
}

/// Sends the request of a watch on this stream and waits for the head until then.
///
/// # Errors
/// The connection was lost or suspected before the head, or it did not come.
pub async fn open(
    line: &Line,
    mut permit: Permit,
    head: Request<()>,
    end: Instant,
) -> Result<Answer, Unanswered> {
    let connection = Rc::clone(permit.connection());
    let failed = |why: String| Unanswered { why, by: Some(Rc::clone(&connection)), outage: false };
    let (response, _) = permit.open(head, true).map_err(|error| failed(in_words(&error)))?;
    let response = tokio::select! {
        response = response => response.map_err(|error| failed(in_words(&error)))?,
        () = troubled(&connection, line) => {
            return Err(failed("suspected before it answered".to_owned()));
        }
        () = sleep_until(end) => return Err(failed("no answer".to_owned())),
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
