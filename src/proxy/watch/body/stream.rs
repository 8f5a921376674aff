//! The upstream stream of a watch: the received data, and the reasons to leave the stream.
//!
//! While its connection drains, a watch searches a stream on another connection and continues to read the
//! current one ([`UpstreamStream::search_stream`]). It leaves the current stream when another endpoint or
//! connection has accepted the watch.

use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::LocalBoxFuture;
use h2::RecvStream;
use jackstay_core::admission::ByteAccount;
use jackstay_core::credential_class::ClientRank;
use jackstay_core::group_health::HEAD_WAIT;
use jackstay_core::watch::gzip::{ContentCoding, GzipDecoder, GzipError};
use jackstay_core::watch::pace::DeliveryPace;
use jackstay_core::watch::session::{LeaveReason, SEARCH_TIMEOUT, Searches, Session};
use jackstay_net::http2_error::describe_h2_error;
use jackstay_sys::clock;
use tokio::time::{sleep, timeout};

use super::context::ResumeContext;
use crate::observe::GzipBytes;
use crate::proxy::drain::DrainWatcher;
use crate::proxy::upstream_client::{poll_turn, release_window};
use crate::upstream::connection::{Connection, DrainUrgency, Permit};
use crate::upstream::pool::PreviousFailure;

/// What inflating a piece counts in [`poll_turn`]: it takes 20 to 40 µs.
const INFLATE_POLLS: u16 = 64;

/// An upstream stream that the body reads from.
pub(super) struct UpstreamStream {
    pub(super) recv: RecvStream,
    /// Received bytes whose flow-control window is released when the client asks for more.
    pub(super) unreleased: usize,
    /// Decodes a compressed body.
    gzip: Option<Box<GzipDecoder>>,
    /// See [`poll_turn`].
    polls: u16,
    pub(super) pace: DeliveryPace,
    pub(super) permit: Permit,
    /// A reason to leave for which the watch cannot leave yet.
    pub(super) deferred: Option<LeaveReason>,
    searches: Searches,
    /// The next event of the connection, of the listener or of the search.
    next_event: LocalBoxFuture<'static, StreamEvent>,
}

/// An event of a stream or of its connection.
pub(super) enum StreamEvent {
    /// A chunk has arrived.
    Data(Bytes),
    /// The server has ended the response.
    End,
    /// The stream was lost, for this reason.
    Lost(String),
    /// The compressed body of the stream could not be decoded.
    Undecodable(GzipError),
    /// There is a reason to leave the stream, although it has not failed.
    Leave(LeaveReason),
    /// The search for a stream on another connection has ended; `None` if it found none.
    SearchEnded(Option<Permit>),
    /// The connection has notified its watches, has become suspect, or live again.
    Notified,
}

impl UpstreamStream {
    /// A stream with this coding. `account` bounds what a decoder holds.
    pub(super) fn new(
        (mut recv, coding): (RecvStream, ContentCoding),
        mut permit: Permit,
        drain: &DrainWatcher,
        account: ByteAccount,
    ) -> Self {
        permit.receives(&mut recv);
        let connection = permit.connection();
        Self {
            pace: DeliveryPace::new(connection.last_received()),
            next_event: next_event(&permit, drain),
            recv,
            unreleased: 0,
            gzip: (coding == ContentCoding::Gzip).then(|| Box::new(GzipDecoder::new(account))),
            polls: 0,
            permit,
            deferred: None,
            searches: Searches::default(),
        }
    }

    pub(super) fn poll(
        &mut self,
        cx: &mut Context<'_>,
        gzip_bytes: &GzipBytes,
    ) -> Poll<StreamEvent> {
        loop {
            ready!(poll_turn(&mut self.polls, cx));
            if let Some(event) = self.next_inflated(gzip_bytes) {
                return Poll::Ready(event);
            }
            // After the last piece of a chunk, because its window is that of the compressed bytes.
            release_window(&mut self.recv, &mut self.unreleased);
            let Poll::Ready(data) = self.recv.poll_data(cx) else {
                return self.next_event.as_mut().poll(cx);
            };
            return Poll::Ready(match data {
                Some(Ok(data)) => {
                    self.pace.delivered(self.received_at());
                    match self.decode(data) {
                        Some(data) => StreamEvent::Data(data),
                        None => continue,
                    }
                }
                Some(Err(error)) => StreamEvent::Lost(describe_h2_error(&error)),
                None if self.recv.is_end_stream() => self.end(),
                None => StreamEvent::Lost("the stream was reset".to_owned()),
            });
        }
    }

    /// The client has proven this, by which the state of a decoder is limited.
    pub(super) fn raise_rank(&mut self, rank: ClientRank) {
        if let Some(gzip) = &mut self.gzip {
            gzip.raise_rank(rank);
        }
    }

    /// Returns data that are not compressed. Others are decoded piece by piece.
    pub(super) fn decode(&mut self, data: Bytes) -> Option<Bytes> {
        let Some(gzip) = &mut self.gzip else { return Some(data) };
        gzip.push(data);
        None
    }

    /// The next piece of the compressed chunk, whose window is released after the last one.
    fn next_inflated(&mut self, gzip_bytes: &GzipBytes) -> Option<StreamEvent> {
        let gzip = self.gzip.as_mut().filter(|gzip| gzip.has_chunk())?;
        self.polls = self.polls.saturating_add(INFLATE_POLLS);
        match gzip.next_piece() {
            Ok(Some(piece)) => {
                gzip_bytes.inflated.increment(piece.len() as u64);
                Some(StreamEvent::Data(piece))
            }
            Ok(None) => {
                let decoded = gzip.take_chunk();
                gzip_bytes.received.increment(decoded as u64);
                self.unreleased += decoded;
                None
            }
            Err(error) => Some(StreamEvent::Undecodable(error)),
        }
    }

    fn end(&self) -> StreamEvent {
        match &self.gzip {
            Some(gzip) if !gzip.is_between_members() => {
                let reason = "the response ends within a gzip member";
                StreamEvent::Undecodable(GzipError::Invalid(reason))
            }
            _ => StreamEvent::End,
        }
    }

    /// Called when the client has taken `forwarded` bytes of a chunk; `absorbed` ones are not for it.
    pub(super) fn forwarded(&mut self, forwarded: usize, mut absorbed: usize) {
        if self.gzip.is_none() {
            release_window(&mut self.recv, &mut absorbed);
            self.unreleased += forwarded;
        }
    }

    /// When the connection last read from its socket. For a chunk that has just arrived that is the current
    /// time, without a system call.
    pub(super) fn received_at(&self) -> Instant {
        self.permit.connection().last_received()
    }

    /// Waits for the next notification or reason to leave.
    pub(super) fn await_event(&mut self, drain: &DrainWatcher) {
        self.next_event = next_event(&self.permit, drain);
    }

    /// Called when the watch cannot leave yet. The body tries again after each chunk; until then only a more
    /// urgent reason is reported.
    pub(super) fn defer(&mut self, reason: LeaveReason, drain: &DrainWatcher) {
        self.deferred = Some(reason);
        let mut drain = drain.clone();
        let connection = Rc::clone(self.permit.connection());
        self.next_event = Box::pin(async move {
            if reason == LeaveReason::Shutdown {
                return std::future::pending().await;
            }
            tokio::select! {
                () = connection.became_unresponsive(), if reason == LeaveReason::Drain => {
                    StreamEvent::Leave(LeaveReason::Unresponsive)
                }
                () = drain.staggered_end() => StreamEvent::Leave(LeaveReason::Shutdown),
            }
        });
    }

    /// Why the watch should leave this stream because of its API group; `None` if it should not.
    pub(super) fn group_leave_reason(&self, context: &ResumeContext) -> Option<LeaveReason> {
        let is_silent = context.group_fails_at(&self.permit.connection().endpoint)?;
        let hears_nothing = is_silent && self.pace.silence(clock::now()) >= HEAD_WAIT;
        Some(if hears_nothing { LeaveReason::GroupSilent } else { LeaveReason::GroupFailed })
    }

    /// Searches a stream on another connection while this one works. Failed searches delay the next one.
    pub(super) fn search_stream(&mut self, context: &ResumeContext, session: &Session) {
        self.deferred = None;
        let connection = Rc::clone(self.permit.connection());
        let immediate = connection.drain_urgency() == Some(DrainUrgency::Immediate)
            || context.group_fails_at(&connection.endpoint).is_some();
        let pause = self.searches.pause(immediate, &mut fastrand::Rng::new());
        let search = self.search(context, session, pause, immediate);
        let mut drain = context.drain.clone();
        self.next_event = Box::pin(async move {
            tokio::select! {
                permit = search => StreamEvent::SearchEnded(permit),
                () = connection.became_unresponsive() => StreamEvent::Leave(LeaveReason::Unresponsive),
                () = drain.staggered_end() => StreamEvent::Leave(LeaveReason::Shutdown),
            }
        });
    }

    /// After `pause`, takes a stream for the watch on another connection; `None` if there is none. `immediate`: this
    /// connection must be left at once, and another endpoint is preferred to another connection to it.
    pub(super) fn search(
        &self,
        context: &ResumeContext,
        session: &Session,
        pause: Duration,
        immediate: bool,
    ) -> impl Future<Output = Option<Permit>> + 'static {
        let connection = self.permit.connection();
        let previous = PreviousFailure::Silence(connection.key(), connection.endpoint.key());
        let (upstream, class) = (Rc::clone(&context.upstream), Rc::clone(&context.class));
        let (proof, wanted) = (context.proof.clone(), context.wanted_version());
        let suitable = context.suitable_endpoints(session);
        let mut excluded = context.excluded_from_moves();
        async move {
            sleep(pause).await;
            // If the identity is no longer proven, the body ends the watch.
            proof.confirmed().await;
            suitable.exclude_others(&mut excluded);
            let mut stream = suitable.stream_request(excluded, wanted.as_ref(), &proof);
            stream.required.may_be_held = true;
            stream.required.live_only = true;
            stream.required.previous_failure = immediate.then_some(previous);
            let acquired = upstream.pool.acquire(&class, stream);
            let permit = timeout(SEARCH_TIMEOUT, acquired).await.ok()?.ok()?;
            suitable.honours_parameters(&permit.connection().endpoint).then_some(permit)
        }
    }

    /// Searches again after a pause, because the search or the attempt to move has failed.
    pub(super) fn search_stream_later(&mut self, context: &ResumeContext, session: &Session) {
        self.searches.failed();
        self.search_stream(context, session);
    }
}

/// Waits for a notification or for a reason to leave the stream.
fn next_event(permit: &Permit, drain: &DrainWatcher) -> LocalBoxFuture<'static, StreamEvent> {
    Box::pin(connection_event(Rc::clone(permit.connection()), drain.clone()))
}

fn connection_event(
    connection: Rc<Connection>,
    mut drain: DrainWatcher,
) -> impl Future<Output = StreamEvent> {
    let seen = connection.watched();
    async move {
        tokio::select! {
            () = connection.drain_or_change(seen) => {
                let (state, urgency) = (connection.state(), connection.drain_urgency());
                let reason = LeaveReason::of_connection(state, urgency);
                reason.map_or(StreamEvent::Notified, StreamEvent::Leave)
            }
            () = drain.staggered_end() => StreamEvent::Leave(LeaveReason::Shutdown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size_of_output<A, B, F>(_: fn(A, B) -> F) -> usize {
        size_of::<F>()
    }

    /// Every running watch waits in one of these. The limit is a size class of the allocator; the next one is 384.
    #[test]
    fn connection_event_is_small() {
        let size = size_of_output(connection_event);
        assert!(size <= 320, "{size}");
    }
}
