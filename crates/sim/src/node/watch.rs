//! A watch: its stream, and how it continues on another connection. `watch::relay` and `watch::session` of the core
//! decide on each chunk and on each loss.

mod moves;

use std::time::{Duration, Instant};

use bytes::Bytes;
use jackstay_core::admission::ByteAccount;
use jackstay_core::connection::{ConnectionState, DrainUrgency};
use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::pool::{EndpointKey, PreviousFailure, Refusal, Requirements};
use jackstay_core::watch::codec::Encoding;
use jackstay_core::watch::relay::Relay;
use jackstay_core::watch::request::WatchRequest;
use jackstay_core::watch::session::{
    AttemptResult, Candidates, Effect, Ending, Exclusion, Input, MoveReason, NotResumable,
};

use super::pool::{Previous, Purpose};
use super::request::RequestId;
use super::{Io, Node, NodeTimer};
use crate::http2::{Data, Head, StreamId};
use crate::net::ConnectionId;
use crate::trace::Entry;

/// Bytes that a watch may buffer.
const BUFFER: usize = 4 * 1024 * 1024;
/// Pause of a held watch if an apiserver can be reached; ±50 %.
pub(super) const NO_CONNECTION_PAUSE: Duration = Duration::from_secs(1);
/// Jitter of the first search for another connection.
const MOVE_JITTER: Duration = Duration::from_millis(200);
/// Pause after a failed search; it doubles.
const SEARCH_PAUSE: Duration = Duration::from_secs(2);
/// A watch delivers if its last two chunks were at most this far apart …
const MAX_INTERVAL: Duration = Duration::from_secs(2);
/// … and the last one is at most this old.
const MAX_SILENCE: Duration = Duration::from_secs(8);

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
    excluded: Vec<usize>,
    paused: Vec<(usize, Instant)>,
    failed_searches: u32,
    last_chunk: Instant,
    interval: Option<Duration>,
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
            excluded: Vec::new(),
            paused: Vec::new(),
            failed_searches: 0,
            last_chunk: now,
            interval: None,
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
        let delivers = self.interval.is_some_and(|interval| interval <= MAX_INTERVAL)
            && now.saturating_duration_since(self.last_chunk) <= MAX_SILENCE;
        self.relay.session().is_ordered() && !delivers
    }

    fn exclude(&mut self, previous: Previous, result: AttemptResult, now: Instant) {
        self.last = Some(previous);
        let once = self.relay.session().withholds_error();
        match result.exclusion() {
            Some(Exclusion::For(pause)) if !once => {
                self.paused.retain(|paused| paused.0 != previous.endpoint);
                self.paused.push((previous.endpoint, now + pause));
            }
            _ => self.excluded.push(previous.endpoint),
        }
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
        let Data::Frames(chunk) = data else { return };
        if watch.stream != Some(stream) {
            return;
        }
        watch.interval = Some(now.saturating_duration_since(watch.last_chunk));
        watch.last_chunk = now;
        let mut out = Vec::new();
        let pushed = watch.relay.push(&chunk, now, |bytes| out.push(bytes));
        if pushed.effect == Effect::None && watch.relay.session().is_confirmed() {
            watch.excluded.clear();
        }
        for bytes in out {
            self.send_to_client(io, id, Data::Frames(bytes));
        }
        match pushed.effect {
            Effect::None => {}
            Effect::NextEndpoint | Effect::Withhold => {
                self.leave_streams(io, id);
                let Some(watch) = self.watch_mut(id) else { return };
                let previous = Previous { connection: stream.0, endpoint, refused: true };
                watch.last = Some(previous);
                watch.excluded.push(endpoint);
                let (error_event, candidates) = (pushed.error_event, self.candidates(id, now));
                self.watch_step(io, id, Input::Rejected { error_event, candidates });
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
        watch.excluded.clear();
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
            watch.exclude(previous, result, now);
            let candidates = self.candidates(id, now);
            return self.watch_step(io, id, Input::AttemptEnded { result, candidates });
        }
        io.s.record(Entry::WatchResumed { node, request: id, connection: stream.0 });
        let left = watch.stream.replace(stream);
        let is_move = watch.phase == Phase::Moving;
        watch.enter(Phase::Streaming);
        watch.failed_searches = 0;
        (watch.last_chunk, watch.interval) = (now, None);
        if is_move {
            watch.relay.move_ended(now);
        } else {
            watch.last = None;
            let candidates = Candidates::default();
            self.watch_step(io, id, Input::AttemptEnded { result, candidates });
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
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        if watch.phase == Phase::Moving {
            return self.move_failed(io, id);
        }
        watch.last = previous.or(watch.last);
        let candidates = self.candidates(id, now);
        self.watch_step(
            io,
            id,
            Input::AttemptEnded { result: AttemptResult::NoHead { outage }, candidates },
        );
    }

    fn move_failed(&mut self, io: &mut Io<'_>, id: RequestId) {
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        if watch.phase == Phase::Moving {
            watch.relay.session_mut().step(Input::MoveEnded { moved: false }, now);
        }
        watch.enter(Phase::Streaming);
        watch.failed_searches += 1;
        let connections: Vec<_> = watch.streams().map(|stream| stream.0).collect();
        self.notified.extend(connections);
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
                let pause = NO_CONNECTION_PAUSE.mul_f64(0.5 + io.s.rng.f64());
                let Some(watch) = self.watch_mut(id) else { return };
                watch.excluded.clear();
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
                let paused =
                    watch.paused.iter().filter(|paused| paused.1 > now).map(|paused| paused.0);
                let excluded = watch.excluded.iter().copied().chain(paused);
                let excluded = excluded.map(EndpointKey).collect();
                let required = Requirements {
                    watch: true,
                    held: true,
                    previous_failure: watch.last.map(PreviousFailure::from),
                    excluded,
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
                    watch: true,
                    held: true,
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
                    self.enter_with_timer(io, id, Phase::Held(since), now + NO_CONNECTION_PAUSE);
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
        let phase = match (purpose, watch.phase) {
            (Purpose::Move, Phase::Searching(reason)) => {
                let is_same = watch.stream.is_some_and(|stream| stream.0 == connection);
                if is_same || !watch.relay.session().can_move(reason, now) {
                    return self.move_failed(io, id);
                }
                watch.relay.session_mut().step(Input::MoveStarted(reason), now);
                Phase::Moving
            }
            (Purpose::Resume, Phase::Acquiring) => Phase::Requesting,
            _ => return,
        };
        let session = watch.relay.session();
        let limit = if phase == Phase::Moving { MAX_SILENCE } else { session.attempt_timeout() };
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
        let now = io.s.now;
        let Some(watch) = self.watch_mut(id) else { return };
        let (stream, next, phase) = (watch.stream, watch.next, watch.phase);
        let (can_lose, searches) = (watch.can_lose_stream(), watch.failed_searches);
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
        if upstream.machine.state() == ConnectionState::Unresponsive && can_lose {
            return self.watch_stream_lost(io, id, stream, "the connection does not respond");
        }
        if upstream.machine.drain_urgency() != Some(DrainUrgency::Immediate) {
            return self.take_offered_move(io, id);
        }
        let reason = MoveReason::Drain;
        let Some(watch) = self.watch_mut(id) else { return };
        if phase == Phase::Streaming && watch.relay.session().can_move(reason, now) {
            let pause = match searches {
                0 => io.s.random_part(MOVE_JITTER),
                failed => SEARCH_PAUSE.saturating_mul(1 << (failed - 1).min(5)),
            };
            self.enter_with_timer(io, id, Phase::PausingToMove(reason), now + pause);
        }
    }

    /// Which endpoints may be asked in this round.
    fn candidates(&mut self, id: RequestId, now: Instant) -> Candidates {
        let Some(watch) = self.watch_mut(id) else { return Candidates::default() };
        let (excluded, paused) = (watch.excluded.clone(), watch.paused.clone());
        let last = watch.last.map(|last| last.endpoint);
        let is_usable = |at: usize| {
            use EndpointState::{Ejected, Leaving, NoH2};
            !matches!(self.endpoints[at].state, Ejected | NoH2 | Leaving) && !excluded.contains(&at)
        };
        let usable = || (0..self.endpoints.len()).filter(|&at| is_usable(at));
        let pause = |at: usize| {
            let paused = paused.iter().find(|paused| paused.0 == at);
            paused.map_or(Duration::ZERO, |paused| paused.1.saturating_duration_since(now))
        };
        Candidates {
            any: (0..self.endpoints.len()).any(|at| !excluded.contains(&at)),
            usable: usable().any(|at| Some(at) != last),
            ready: self.has_ready_besides(&excluded),
            retry_after: usable().map(pause).min().unwrap_or_default(),
        }
    }
}
