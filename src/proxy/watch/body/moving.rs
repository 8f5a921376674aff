//! Moves a watch to another connection while its stream works.
//!
//! Its endpoint has more watches than others ([`crate::upstream::rebalance`]) or is degraded
//! ([`crate::upstream::evacuation`]), or its connection drains. The new stream is opened at the cursor
//! before the old one is reset, and from then on nothing more is read from the old one: what it delivers
//! comes again on the new one. So events wait for one round trip and [`FIRST_FRAME`], at most for
//! [`TIMEOUT`] while the old stream delivers. If the new endpoint does not take the watch, the body
//! reads on from the old stream.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use http::Request;
use tokio::time::{Instant, timeout};

use super::attempt::{MoveAttempt, send};
use super::context::ResumeContext;
use super::stream::{LeaveReason, UpstreamStream};
use super::{Source, WatchBody};
use crate::observe::utc::wall_clock;
use crate::proxy::upstream_client::UpstreamResponse as Response;
use crate::proxy::watch::relay::Relay;
use crate::proxy::watch::session::{Input, MoveReason, Session};
use crate::upstream::connection::{Permit, describe_h2_error};
use crate::upstream::pool::StreamRequirements;
use crate::upstream::watch_moves::MoveEligibility;

/// How long events may wait for the response head of the new stream while the old stream delivers.
const TIMEOUT: Duration = Duration::from_millis(250);
/// The same if the old endpoint is degraded or the connection drains: the old stream is likely to be
/// silent.
const TIMEOUT_UNRESPONSIVE: Duration = Duration::from_secs(1);
/// How long a move waits for the first frame of the new stream. An apiserver whose history does not reach
/// back to the cursor answers 200 and sends an ERROR event at once.
const FIRST_FRAME: Duration = Duration::from_millis(50);

impl WatchBody {
    /// The connection has notified its watches: once a minute each checks its bookmarks, and some may
    /// be asked to move.
    pub(super) fn notified(&mut self) {
        let Source::Stream(stream) = &mut self.source else { return };
        stream.await_event(&self.context.drain);
        let connection = Rc::clone(stream.permit.connection());
        if stream.is_check_due() && self.relay.session_mut().has_gone_stale() {
            connection.endpoint.metrics.watch_stale();
        }
        let session = self.relay.session();
        if let Some((reason, permit)) = accept_offer(session, stream, &self.context) {
            self.start_move(permit, reason);
        }
    }

    /// A stream on another connection was found, or none, for a watch whose connection drains.
    pub(super) fn leave_draining(&mut self, permit: Option<Permit>) {
        let Source::Stream(stream) = &mut self.source else { return };
        let session = self.relay.session();
        if !session.is_resumable() {
            return stream.defer(LeaveReason::Drain, &self.context.drain);
        }
        if permit.is_none()
            || !self.context.proof.is_current(wall_clock())
            || !session.can_move(MoveReason::Drain, Instant::now())
        {
            return stream.find_permit_later(&self.context);
        }
        self.start_move(permit, MoveReason::Drain);
    }

    /// Opens the new stream. An attempt without a permit counts as well.
    fn start_move(&mut self, permit: Option<Permit>, reason: MoveReason) {
        let now = Instant::now();
        self.relay.session_mut().step(Input::MoveStarted(reason), now);
        let Some(permit) = permit else {
            self.relay.session_mut().step(Input::MoveEnded { moved: false }, now);
            return;
        };
        let session = self.relay.session();
        let head = self.context.head(session, now);
        let attempt = start(&self.context, permit, head, reason);
        self.source = match std::mem::replace(&mut self.source, Source::Ended(None)) {
            Source::Stream(stream) => Source::Moving(Box::new((stream, attempt))),
            other => other,
        };
    }

    /// An attempt to move is over.
    pub(super) fn moved(&mut self, result: Result<Response, String>) {
        let ended = Source::Ended(None);
        let Source::Moving(moving) = std::mem::replace(&mut self.source, ended) else { return };
        let (mut old, _) = *moving;
        match check(result, &self.relay, &self.context) {
            Ok(mut response) => {
                self.relay.moved(Instant::now());
                self.context.note_confirmed();
                let first = response.first.take();
                // Dropping the old stream resets it.
                self.switch_to(response, "moved");
                if let Some(first) = first {
                    self.receive(&first);
                }
            }
            Err(why) => {
                self.context.upstream.metrics.watch_resumed("not_moved");
                tracing::debug!(reason = why, "watch not moved");
                let stays = Input::MoveEnded { moved: false };
                self.relay.session_mut().step(stays, Instant::now());
                if old.permit.connection().should_drain() {
                    old.find_permit_later(&self.context);
                }
                self.source = Source::Stream(old);
            }
        }
    }
}

/// Takes one of the moves that the connection offers to its watches, if this watch may move. The permit
/// is `None` if no connection to the offered endpoints has a free stream.
fn accept_offer(
    session: &Session,
    stream: &UpstreamStream,
    context: &ResumeContext,
) -> Option<(MoveReason, Option<Permit>)> {
    let now = Instant::now();
    let connection = stream.permit.connection();
    let reason = match connection.moves.eligibility()? {
        MoveEligibility::Silent if !stream.pace.has_fallen_silent(now) => return None,
        MoveEligibility::Settled => MoveReason::Rebalance,
        MoveEligibility::Silent | MoveEligibility::All => MoveReason::Evacuate,
    };
    if !session.can_move(reason, now) || !context.proof.is_current(wall_clock()) {
        return None;
    }
    let targets = connection.moves.take()?;
    let pool = &context.upstream.pool;
    let mut others = pool.upstream().endpoints().to_vec();
    others.retain(|other| !targets.iter().any(|target| Arc::ptr_eq(other, target)));
    let requirements = StreamRequirements {
        watch: true,
        excluded_endpoints: &others,
        ..StreamRequirements::for_client(context.proof.subject())
    };
    Some((reason, pool.try_acquire(&context.class, requirements)))
}

/// Sends the request on a stream of another connection, and waits for the response head and, for
/// [`FIRST_FRAME`], for the first frame.
fn start(
    context: &ResumeContext,
    permit: Permit,
    head: Request<()>,
    reason: MoveReason,
) -> MoveAttempt {
    let upstream = Rc::clone(&context.upstream);
    let limit = if reason == MoveReason::Rebalance { TIMEOUT } else { TIMEOUT_UNRESPONSIVE };
    Box::pin(async move {
        let sent = send(&upstream, permit, head, Instant::now() + limit).await;
        let mut response = sent.map_err(|error| error.reason)?;
        match timeout(FIRST_FRAME, response.recv.data()).await {
            Err(_) => Ok(response),
            Ok(Some(Ok(first))) => {
                response.first = Some(first);
                Ok(response)
            }
            Ok(Some(Err(error))) => Err(describe_h2_error(&error)),
            Ok(None) => Err("it ended at once".to_owned()),
        }
    })
}

/// Returns the response if the new endpoint takes the watch, and otherwise the reason for the log.
fn check(
    result: Result<Response, String>,
    relay: &Relay,
    context: &ResumeContext,
) -> Result<Response, String> {
    let response = result?;
    if !context.result(&response.head).is_accepted() {
        return Err(format!("{} there", response.head.status.as_u16()));
    }
    match &response.first {
        Some(first) if relay.begins_with_error(first) => Err("its history is too short".to_owned()),
        _ => Ok(response),
    }
}
