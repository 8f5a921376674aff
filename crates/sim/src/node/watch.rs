//! A watch: its stream, and how it continues on another connection. `watch::relay` and `watch::session` of the core
//! decide on each chunk and on each loss.

mod moves;

use std::time::{Duration, Instant};

use bytes::Bytes;
use jackstay_core::admission::ByteAccount;
use jackstay_core::connection::DrainUrgency;
use jackstay_core::pool::{EndpointKey, PreviousFailure, Refusal, Requirements};
use jackstay_core::watch::codec::Encoding;
use jackstay_core::watch::pace::DeliveryPace;
use jackstay_core::watch::relay::Relay;
use jackstay_core::watch::request::WatchRequest;
use jackstay_core::watch::session::{
    AfterSearch, AttemptResult, Effect, Ending, Input, Leave, LeaveReason, MoveReason,
    NotResumable, Searches, no_connection_pause,
};

use super::pool::{Previous, Purpose};
use super::request::RequestId;
use super::{Io, Node, NodeTimer};
use crate::http2::{Data, Head, StreamId};
use crate::net::ConnectionId;
use crate::trace::Entry;

/// Bytes that a watch may buffer.
const BUFFER: usize = 4 * 1024 * 1024;
/// How often a held watch looks whether the outage is over.
const OUTAGE_CHECK: Duration = Duration::from_secs(1);

type Stream = (ConnectionId, StreamId);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The stream delivers.
    Streaming,
    /// A pause before the next attempt to resume.
    Pausing,
    /// The pool looks for a stream to resume on.
    Acquiring,
    /// The request to resume was sent.
    Requesting,
    /// There is a total outage.
    Held(Instant),
    /// A pause before a move.
    PausingToMove(MoveReason),
    /// The pool looks for a stream to move to.
    Searching(MoveReason),
    /// The request to move was sent.
    Moving,
}

/// A watch.
#[derive(Debug)]
pub(super) struct Watch {
    relay: Relay,
    phase: Phase,
    stream: Option<Stream>,
    /// The stream of an attempt to resume or to move.
    next: Option<Stream>,
    /// Counts changes of the phase, so that old timers have no effect.
    number: u32,
    last: Option<Previous>,
    searches: Searches,
    pace: DeliveryPace,
    /// What has arrived on the stream since the request to move was sent: the program does not read it meanwhile.
    unread: Vec<Data>,
}

impl Watch {
    pub(super) fn new(
        request: WatchRequest,
        requested_at: Instant,
        stream: Stream,
        now: Instant,
    ) -> Self {
        let account = ByteAccount::unmetered(BUFFER);
        Self {
            relay: Relay::new(Encoding::Json, request, requested_at, account),
            phase: Phase::Streaming,
            stream: Some(stream),
            next: None,
            number: 0,
            last: None,
            searches: Searches::default(),
            pace: DeliveryPace::new(now),
            unread: Vec::new(),
        }
    }

    pub(super) fn streams(&self) -> impl Iterator<Item = Stream> {
        self.stream.into_iter().chain(self.next)
    }

    pub(super) fn can_lose_stream(&self) -> bool {
        self.relay.session().can_lose_stream()
    }

    fn enter(&mut self, phase: Phase) -> u32 {
        self.phase = phase;
        self.number += 1;
        self.number
    }

    fn is_quiet(&self, now: Instant) -> bool {
        self.relay.session().is_ordered() && self.pace.is_quiet(now)
    }
}

impl Node {
    /// A chunk of a watch.
    pub(super) fn watch_data(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        stream: Stream,
        data: Data,
    ) {
        let (now, endpoint) = (io.s.now, self.endpoint_of(stream.0));
        let Some(watch) = self.watch_mut(id) else { return };
        if watch.stream != Some(stream) {
            return;
        }
        if watch.phase == Phase::Moving {
            return watch.unread.push(data);
        }
        let Data::Frames(chunk) = data else { return };
        watch.pace.delivered(now);
        let mut out = Vec::new();
        let pushed = watch.relay.push(&chunk, now, |bytes| out.push(bytes));
        for bytes in out {
            self.send_to_client(io, id, Data::Frames(bytes));
        }
        match pushed.effect {
            // A watch that could not leave its connection may be able to now.
            Effect::None => self.look_at_watch(io, id, true),
            Effect::NextEndpoint | Effect::Withhold => {
                self.leave_streams(io, id);
                let Some(watch) = self.watch_mut(id) else { return };
                watch.last = Some(Previous { connection: stream.0, endpoint, refused: true });
                let (error_event, endpoint) = (pushed.error_event, EndpointKey(endpoint));
                let endpoints = &self.endpoint_conditions(io.s.now);
                self.watch_step(io, id, Input::Rejected { error_event, endpoint, endpoints });
            }
            effect => {
                self.leave_streams(io, id);
                self.execute(io, id, effect);
            }
        }
    }

    /// The server has ended a stream of a watch.
    pub(super) fn watch_ended(&mut self, io: &mut Io<'_>, id: RequestId, stream: Stream) {
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        if watch.stream != Some(stream) {
            return self.watch_stream_lost(io, id, stream, "ended without events");
        }
        let rest = watch.relay.server_ended(now);
        if !rest.is_empty() {
            self.send_to_client(io, id, Data::Frames(rest));
        }
        self.end_request(io, id, true);
    }

    /// A stream of a watch was lost.
    pub(super) fn watch_stream_lost(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        stream: Stream,
        reason: &'static str,
    ) {
        let (now, node) = (io.s.now, self.index);
        let previous =
            Previous { connection: stream.0, endpoint: self.endpoint_of(stream.0), refused: false };
        let Some(watch) = self.watch_mut(id) else { return };
        if watch.next == Some(stream) {
            watch.next = None;
            return self.attempt_lost(io, id, Some(previous), false);
        }
        if watch.stream != Some(stream) {
            return;
        }
        io.s.record(Entry::WatchLost { node, request: id, reason });
        let quiet = watch.is_quiet(now);
        watch.last = Some(previous);
        let effect = watch.relay.stream_lost(quiet, now);
        self.leave_streams(io, id);
        self.execute(io, id, effect);
    }

    /// The head of the response to an attempt to resume or to move.
    pub(super) fn watch_head(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        stream: Stream,
        head: Head,
    ) {
        let (now, node, endpoint) = (io.s.now, self.index, self.endpoint_of(stream.0));
        let Some(watch) = self.watch_mut(id).filter(|watch| watch.next == Some(stream)) else {
            return;
        };
        let retry_after = head.retry_after.map(Duration::from_secs);
        let result =
            AttemptResult::Head { status: head.status, same_content_type: true, retry_after };
        watch.next = None;
        if !result.is_accepted() {
            self.cancel_stream(io, stream);
            let previous = Previous { connection: stream.0, endpoint, refused: true };
            let Some(watch) = self.watch_mut(id) else { return };
            if watch.phase == Phase::Moving {
                return self.move_failed(io, id);
            }
            watch.last = Some(previous);
            return self.attempt_failed(io, id, result, Some(endpoint));
        }
        let is_move = watch.phase == Phase::Moving;
        let connection = stream.0;
        io.s.record(Entry::WatchResumed { node, request: id, connection, moved: is_move });
        let left = watch.stream.replace(stream);
        watch.enter(Phase::Streaming);
        (watch.searches, watch.pace) = (Searches::default(), DeliveryPace::new(now));
        watch.unread.clear();
        if is_move {
            watch.relay.move_ended(now);
        } else {
            watch.last = None;
            self.watch_step(io, id, Input::Accepted);
        }
        // The connection may have begun to drain meanwhile.
        self.notified.push(stream.0);
        if let Some(left) = left {
            self.cancel_stream(io, left);
        }
    }

    /// An attempt has got no head.
    fn attempt_lost(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        previous: Option<Previous>,
        outage: bool,
    ) {
        let Some(watch) = self.watch_mut(id) else { return };
        if watch.phase == Phase::Moving {
            return self.move_failed(io, id);
        }
        watch.last = previous.or(watch.last);
        let endpoint = previous.map(|previous| previous.endpoint);
        self.attempt_failed(io, id, AttemptResult::NoHead { outage }, endpoint);
    }

    fn attempt_failed(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        result: AttemptResult,
        endpoint: Option<usize>,
    ) {
        let endpoint = endpoint.map(EndpointKey);
        let endpoints = &self.endpoint_conditions(io.s.now);
        self.watch_step(io, id, Input::AttemptFailed { result, endpoint, endpoints });
    }

    fn move_failed(&mut self, io: &mut Io<'_>, id: RequestId) {
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        if watch.phase == Phase::Moving {
            watch.relay.session_mut().step(Input::MoveEnded { moved: false }, now);
        }
        watch.enter(Phase::Streaming);
        watch.searches.failed();
        let connections: Vec<_> = watch.streams().map(|stream| stream.0).collect();
        let (stream, unread) = (watch.stream, std::mem::take(&mut watch.unread));
        self.notified.extend(connections);
        let Some(stream) = stream else { return };
        for data in unread {
            self.watch_data(io, id, stream, data);
        }
    }

    fn watch_step(&mut self, io: &mut Io<'_>, id: RequestId, input: Input<'_>) {
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        let effect = watch.relay.session_mut().step(input, now);
        self.execute(io, id, effect);
    }

    fn execute(&mut self, io: &mut Io<'_>, id: RequestId, effect: Effect) {
        let (now, node) = (io.s.now, self.index);
        match effect {
            Effect::Request { max_jitter, pause } => {
                let delay = io.s.random_part(max_jitter).max(pause);
                let Some(watch) = self.watch_mut(id) else { return };
                let withholds = watch.relay.session().withholds_error();
                if withholds && !self.too_old_budget.take() {
                    return self.watch_step(io, id, Input::Stop(NotResumable::OverBudget));
                }
                self.enter_with_timer(io, id, Phase::Pausing, now + delay);
            }
            Effect::Hold | Effect::HoldUntilDeadline => {
                io.s.record(Entry::WatchHeld { node, request: id });
                let pause = no_connection_pause(&mut io.s.rng);
                let Some(watch) = self.watch_mut(id) else { return };
                watch.last = None;
                self.enter_with_timer(io, id, Phase::Held(now), now + pause);
            }
            Effect::End(ending, reason) => self.end_watch(io, id, ending, reason),
            _ => {}
        }
    }

    fn end_watch(&mut self, io: &mut Io<'_>, id: RequestId, ending: Ending, reason: NotResumable) {
        io.s.record(Entry::WatchEnded { node: self.index, request: id, reason: reason.as_str() });
        let Some(watch) = self.watch_mut(id) else { return };
        if ending == Ending::Withheld {
            let event = watch.relay.session_mut().take_error_event().unwrap_or(Bytes::new());
            self.send_to_client(io, id, Data::Frames(event));
        }
        self.end_request(io, id, ending != Ending::Reset);
    }

    fn enter_with_timer(&mut self, io: &mut Io<'_>, id: RequestId, phase: Phase, at: Instant) {
        let Some(watch) = self.watch_mut(id) else { return };
        let number = watch.enter(phase);
        self.start_timer(io.s, at, NodeTimer::Watch(id, number));
    }

    /// Cancels every stream and search of a watch.
    fn leave_streams(&mut self, io: &mut Io<'_>, id: RequestId) {
        self.forget_waits(id, |_| true);
        let Some(watch) = self.watch_mut(id) else { return };
        let streams: Vec<_> = watch.streams().collect();
        (watch.stream, watch.next) = (None, None);
        watch.unread.clear();
        for stream in streams {
            self.cancel_stream(io, stream);
        }
    }

    /// The pause of a watch or the time of its attempt is over.
    pub(super) fn watch_timer(&mut self, io: &mut Io<'_>, id: RequestId, number: u32) {
        let now = io.s.now;
        let is_outage = self.pool.is_total_outage();
        let Some(watch) = self.watch_mut(id).filter(|watch| watch.number == number) else { return };
        match watch.phase {
            Phase::Pausing => {
                watch.enter(Phase::Acquiring);
                let session = watch.relay.session();
                let refused = session.last_refused();
                let last = watch.last.map(|last| Previous { refused, ..last });
                let required = Requirements {
                    long_running: true,
                    may_be_held: true,
                    previous_failure: last.map(PreviousFailure::from),
                    excluded: session.excluded_at(now),
                    ..Requirements::default()
                };
                self.acquire(io, id, Purpose::Resume, required);
            }
            Phase::PausingToMove(reason) => {
                watch.enter(Phase::Searching(reason));
                let stream = watch.stream;
                let endpoint = stream.map(|stream| self.endpoint_of(stream.0));
                let previous = stream.zip(endpoint).map(|(stream, endpoint)| Previous {
                    connection: stream.0,
                    endpoint,
                    refused: false,
                });
                let evacuates = reason == MoveReason::Evacuate;
                let excluded = endpoint.filter(|_| evacuates).map(EndpointKey);
                let required = Requirements {
                    long_running: true,
                    may_be_held: true,
                    previous_failure: previous.map(PreviousFailure::from),
                    excluded: excluded.into_iter().collect(),
                    live_only: true,
                    ..Requirements::default()
                };
                self.acquire(io, id, Purpose::Move, required);
            }
            Phase::Requesting | Phase::Moving => {
                let Some(next) = watch.next.take() else { return };
                self.cancel_stream(io, next);
                let endpoint = self.endpoint_of(next.0);
                let previous = Previous { connection: next.0, endpoint, refused: false };
                self.attempt_lost(io, id, Some(previous), false);
            }
            Phase::Held(since) => {
                let deadline = watch.relay.session().deadline();
                if deadline.is_some_and(|deadline| now >= deadline) {
                    self.watch_step(io, id, Input::Stop(NotResumable::Expired));
                } else if is_outage {
                    self.enter_with_timer(io, id, Phase::Held(since), now + OUTAGE_CHECK);
                } else {
                    self.watch_step(io, id, Input::OutageEnded { held: now - since });
                }
            }
            Phase::Streaming | Phase::Acquiring | Phase::Searching(_) => {}
        }
    }

    /// A total outage is over.
    pub(super) fn outage_ended(&mut self, io: &mut Io<'_>) {
        let ids: Vec<_> = self.requests.keys().copied().collect();
        for id in ids {
            if let Some(Phase::Held(since)) = self.watch_mut(id).map(|watch| watch.phase) {
                let held = io.s.now - since;
                self.watch_step(io, id, Input::OutageEnded { held });
            }
            self.hold_outage_ended(io, id);
        }
    }

    /// The pool has a stream for a watch.
    pub(super) fn watch_granted(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        purpose: Purpose,
        connection: ConnectionId,
    ) {
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        let (phase, limit) = match (purpose, watch.phase) {
            (Purpose::Move, Phase::Searching(reason)) => {
                let found = watch.stream.is_none_or(|stream| stream.0 != connection);
                match watch.relay.session().after_search(found, reason, now) {
                    AfterSearch::Move => {}
                    AfterSearch::SearchAgain => return self.move_failed(io, id),
                    AfterSearch::Stay => {
                        watch.enter(Phase::Streaming);
                        return;
                    }
                }
                watch.relay.session_mut().step(Input::MoveStarted(reason), now);
                (Phase::Moving, reason.head_timeout())
            }
            (Purpose::Resume, Phase::Acquiring) => {
                (Phase::Requesting, watch.relay.session().attempt_timeout())
            }
            _ => return,
        };
        self.request_stream(io, id, (connection, phase), limit);
    }

    /// Requests the rest of a watch on another connection.
    fn request_stream(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        (connection, phase): (ConnectionId, Phase),
        limit: Duration,
    ) {
        let (now, query) = (io.s.now, self.first_query(id));
        let Some(watch) = self.watch_mut(id) else { return };
        let query = watch.relay.session().resume_query(&query, now);
        let Some(request) = self.request_with_query(id, &query) else { return };
        let stream = self.open_stream(io, connection, id, &request);
        if let Some(watch) = self.watch_mut(id) {
            watch.next = Some((connection, stream));
        }
        self.enter_with_timer(io, id, phase, now + limit);
    }

    /// The pool has no stream for a watch.
    pub(super) fn watch_unavailable(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        purpose: Purpose,
        why: Refusal,
    ) {
        match purpose {
            Purpose::Move => self.move_failed(io, id),
            _ => self.attempt_lost(io, id, None, why == Refusal::Unreachable),
        }
    }

    /// Looks whether a watch has to leave its stream or to give an attempt up.
    pub(super) fn check_watch(&mut self, io: &mut Io<'_>, id: RequestId) {
        self.look_at_watch(io, id, false);
    }

    /// Offers are taken only when the connection notifies, not `after_chunk`.
    fn look_at_watch(&mut self, io: &mut Io<'_>, id: RequestId, after_chunk: bool) {
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        let (stream, next, phase) = (watch.stream, watch.next, watch.phase);
        if let Some(next) = next
            && phase == Phase::Requesting
            && self.is_troubled(next.0)
        {
            if let Some(watch) = self.watch_mut(id) {
                watch.next = None;
            }
            self.cancel_stream(io, next);
            let endpoint = self.endpoint_of(next.0);
            let previous = Previous { connection: next.0, endpoint, refused: false };
            return self.attempt_lost(io, id, Some(previous), false);
        }
        let Some((upstream, stream)) = stream.and_then(|s| Some((self.upstreams.get(&s.0)?, s)))
        else {
            return;
        };
        let urgency = upstream.machine.drain_urgency();
        let leave = LeaveReason::of_connection(upstream.machine.state(), urgency);
        let Some(watch) = self.watch_mut(id) else { return };
        let (session, searches) = (watch.relay.session(), watch.searches);
        match leave.map(|reason| session.leave(reason, now)) {
            Some(Leave::Search) => {}
            Some(Leave::Lose) => {
                let reason = "the connection does not respond";
                return self.watch_stream_lost(io, id, stream, reason);
            }
            Some(Leave::End | Leave::Stay) => return,
            None if after_chunk => return,
            None => return self.take_offered_move(io, id),
        }
        if phase == Phase::Streaming {
            let immediate = urgency == Some(DrainUrgency::Immediate);
            let pause = searches.pause(immediate, &mut io.s.rng);
            let reason = MoveReason::Drain;
            self.enter_with_timer(io, id, Phase::PausingToMove(reason), now + pause);
        }
    }
}
