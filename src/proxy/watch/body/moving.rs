//! Moves a watch to another connection while its stream works.
//!
//! A watch is moved because its endpoint has more watches than others ([`crate::upstream::rebalance`]) or is
//! degraded ([`crate::upstream::evacuation`]), because its API group fails there ([`crate::upstream::group_failures`]), or
//! because its connection drains. The body requests the new
//! stream at the cursor before it resets the old one. Meanwhile it does not read the old stream: the new one
//! delivers the same events. So events are delayed until the response head and the first frame of the new
//! stream arrive, at most by [`MoveReason::head_timeout`], plus [`FIRST_FRAME_TIMEOUT`].
//! If the new endpoint does not accept the watch, the body continues to read the old stream.

use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use jackstay_core::admission::ByteAccount;
use jackstay_core::watch::gzip::{ContentCoding, GzipDecoder, GzipError};
use jackstay_core::watch::relay::Relay;
use jackstay_core::watch::session::{
    AfterSearch, FIRST_FRAME_TIMEOUT, LeaveReason, MoveReason, Session, SessionInput, offered_move,
};
use jackstay_net::http2_error::describe_h2_error;
use jackstay_sys::clock;
use tokio::time::timeout;

use super::attempt::{MoveAttempt, send};
use super::context::ResumeContext;
use super::stream::UpstreamStream;
use super::{Source, WatchBody};
use crate::proxy::upstream_client::UpstreamResponse as Response;
use crate::upstream::connection::Permit;
use crate::upstream::endpoint::Endpoint;

impl WatchBody {
    /// Called when the connection has notified its watches, because some of them should move, or because its state has
    /// changed.
    pub(super) fn notified(&mut self) {
        let Source::Stream(stream) = &mut self.source else { return };
        stream.await_event(&self.context.drain);
        if let Some(reason) = stream.group_leave_reason(&self.context) {
            stream.deferred = Some(reason);
            return self.leave_if_possible();
        }
        self.suspicion_changed();
        if self.shadow.is_some() {
            return;
        }
        let Source::Stream(stream) = &self.source else { return };
        let session = self.relay.session();
        if let Some((reason, permit)) = take_move_offer(session, stream, &self.context) {
            self.start_move(permit, reason);
        }
    }

    /// Called when the search for a stream on another connection has ended, for a watch whose connection
    /// drains.
    pub(super) fn search_ended(&mut self, permit: Option<Permit>) {
        let Source::Stream(stream) = &mut self.source else { return };
        let connection = stream.permit.connection();
        let must_leave = connection.should_drain()
            || self.context.group_fails_at(&connection.endpoint).is_some();
        if !must_leave {
            return stream.await_event(&self.context.drain);
        }
        let session = self.relay.session();
        let found = permit.is_some() && self.context.permits_moves();
        match session.after_search(found, MoveReason::Drain, clock::now()) {
            AfterSearch::Move => self.start_move(permit, MoveReason::Drain),
            AfterSearch::SearchAgain => stream.search_stream_later(&self.context, session),
            AfterSearch::Stay => stream.defer(LeaveReason::Drain, &self.context.drain),
        }
    }

    /// Requests the new stream. A missing permit counts as a failed attempt.
    fn start_move(&mut self, permit: Option<Permit>, reason: MoveReason) {
        let now = clock::now();
        self.relay.session_mut().step(SessionInput::MoveStarted(reason), now);
        let Some(permit) = permit else {
            self.relay.session_mut().step(SessionInput::MoveEnded { moved: false }, now);
            return;
        };
        let session = self.relay.session();
        let head = self.context.head(session, now);
        let attempt = request_move(&self.context, permit, head, reason);
        self.source = match std::mem::replace(&mut self.source, Source::Ended(None)) {
            Source::Stream(stream) => Source::Moving(Box::new((stream, attempt))),
            other => other,
        };
    }

    pub(super) fn move_ended(&mut self, result: Result<Response, String>) {
        let ended = Source::Ended(None);
        let Source::Moving(moving) = std::mem::replace(&mut self.source, ended) else { return };
        let (mut old, _) = *moving;
        if let Ok(response) = &result {
            self.context.record_move_answer(response);
        }
        match check_response(result, &self.relay, &self.context) {
            Ok(response) => {
                self.relay.move_ended(clock::now());
                // Dropping the old stream resets it.
                self.switch_to(response, "moved");
            }
            Err(cause) => {
                self.context.upstream.metrics.watch_resumed("not_moved");
                tracing::debug!(reason = cause, "watch not moved");
                let stays = SessionInput::MoveEnded { moved: false };
                self.relay.session_mut().step(stays, clock::now());
                let connection = old.permit.connection();
                if connection.should_drain()
                    || self.context.group_fails_at(&connection.endpoint).is_some()
                {
                    old.search_stream_later(&self.context, self.relay.session());
                } else {
                    old.await_event(&self.context.drain);
                }
                self.source = Source::Stream(old);
                self.suspicion_changed();
            }
        }
    }
}

/// Takes one of the moves that the connection offers to its watches, if this watch may be moved. The permit
/// is `None` if no connection to the offered endpoints has a free stream.
fn take_move_offer(
    session: &Session,
    stream: &UpstreamStream,
    context: &ResumeContext,
) -> Option<(MoveReason, Option<Permit>)> {
    let now = clock::now();
    let connection = stream.permit.connection();
    let reason = offered_move(connection.moves.eligibility()?, &stream.pace, now)?;
    if !session.can_move(reason, now) || !context.permits_moves() {
        return None;
    }
    let suitable = context.suitable_endpoints(session);
    let mut excluded = context.excluded_from_moves();
    suitable.exclude_others(&mut excluded);
    let targets = connection.moves.take_unless(|target| excluded.contains(&target.key()))?;
    let pool = &context.upstream.pool;
    let endpoints = pool.upstream().endpoints();
    let is_target = |other: &Arc<Endpoint>| targets.iter().any(|one| Arc::ptr_eq(one, other));
    let others = endpoints.iter().filter(|other| !is_target(other));
    excluded.extend(others.map(|other| other.key()));
    let stream = suitable.stream_request(excluded, None, &context.proof);
    Some((reason, pool.try_acquire(&context.class, &stream)))
}

/// Sends the request on a stream of another connection, and waits for the response head and for the first
/// frame. A watch without events has no first frame, so its absence is no failure.
fn request_move(
    context: &ResumeContext,
    permit: Permit,
    head: Request<()>,
    reason: MoveReason,
) -> MoveAttempt {
    let upstream = Rc::clone(&context.upstream);
    let limit = reason.head_timeout();
    Box::pin(async move {
        let sent = send(&upstream, permit, head, clock::now() + limit).await;
        let mut response = sent.map_err(|error| error.reason)?;
        match timeout(FIRST_FRAME_TIMEOUT, response.recv.data()).await {
            Err(_) => Ok(response),
            Ok(Some(Ok(first))) => {
                response.prefix = Some(first);
                Ok(response)
            }
            Ok(Some(Err(error))) => Err(describe_h2_error(&error)),
            Ok(None) => Err("the new stream ended before its first frame".to_owned()),
        }
    })
}

/// The beginning of the events of a response, as far as it has arrived.
fn first_piece(response: &Response, account: ByteAccount) -> Result<Option<Bytes>, GzipError> {
    let Some(first) = &response.prefix else { return Ok(None) };
    if ContentCoding::of(&response.head.headers) != Some(ContentCoding::Gzip) {
        return Ok(Some(first.clone()));
    }
    let mut gzip = GzipDecoder::new(account);
    gzip.push(first.clone());
    gzip.next_piece()
}

/// Returns the response if the new endpoint accepts the watch, and otherwise the reason for the log.
fn check_response(
    result: Result<Response, String>,
    relay: &Relay,
    context: &ResumeContext,
) -> Result<Response, String> {
    let response = result?;
    if !context.attempt_result(&response).is_accepted() {
        return Err(context.describe_refusal(&response));
    }
    let account = context.upstream.watches.gzip_state(relay.account());
    let first = first_piece(&response, account).map_err(|error| {
        context.gzip_failed(&response.permit.connection().endpoint, error);
        error.as_str().to_owned()
    })?;
    if first.is_some_and(|first| relay.begins_with_error(&first)) {
        return Err("the endpoint's history does not reach back to the cursor".to_owned());
    }
    Ok(response)
}
