//! A request of a client: its streams, its response, and its end. `Attempts` of the core decides on its attempts, hedges
//! and retries; `attempts` executes the effects.

mod attempts;
mod body;

use std::rc::Rc;
use std::time::Instant;

use http::{HeaderMap, Response, header};
use jackstay_core::connection::{ConnectionState, Responsiveness};
use jackstay_core::endpoint_condition::{self, has_ready_besides};
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::attempts::{
    Attempts, Awaited, Failure, HeldResponse, Input, MAX_PARALLEL, MissedVersion, Refused,
};
use jackstay_core::request::head_hold::{Evidence, HeadHold, prefix_size};
use jackstay_core::request::info::{RequestKind, Verb};
use jackstay_core::request::retry::{self, Stage};
use jackstay_core::watch::request::{WatchRequest, upstream_query, with_query};

use self::attempts::return_tokens;
use self::body::Body;
use super::watch::Watch;
use super::{Io, Node};
use crate::http2::{Data, Frame, Head, Request, ResetCode, StreamId};
use crate::net::{ConnectionId, Side};
use crate::trace::Entry;

/// A request. 0 is the prober; numbers are not used again.
pub(super) type RequestId = u32;
type Stream = (ConnectionId, StreamId);
type AttemptInput = Input<usize, ConnectionId>;

/// Why a stream has ended without a response.
#[derive(Debug, Clone, Copy)]
pub(super) enum Loss {
    Unprocessed(&'static str),
    Lost(&'static str),
}

/// One of the parallel attempts.
#[derive(Debug, Clone, Copy, Default)]
enum Slot {
    #[default]
    Ended,
    /// A hedge waits for a stream.
    Acquiring,
    /// Its connection has a free stream.
    Granted(ConnectionId),
    Sent {
        stream: Stream,
        head: Option<HeldHead>,
    },
}

/// A head that is held until the body begins.
#[derive(Debug, Clone, Copy)]
struct HeldHead {
    head: Head,
    arrived: Instant,
    hold: HeadHold,
}

/// The hold of a new watch.
#[derive(Debug, Clone, Copy)]
struct Hold {
    until: Instant,
    began: Instant,
    next: HoldStep,
}

/// What a held watch waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HoldStep {
    /// The end of the outage.
    Outage,
    /// A pause, because there is no outage.
    NoConnection(Instant),
    /// The jitter after the outage.
    Jitter(Instant),
    /// A stream.
    Stream,
}

#[derive(Debug)]
pub(super) enum State {
    /// No response yet.
    Pending,
    /// The body is forwarded.
    Streaming(Body),
    /// A watch.
    Watching(Box<Watch>),
}

/// A request.
#[derive(Debug)]
pub(super) struct NodeRequest {
    client: (ConnectionId, StreamId),
    request: Rc<Request>,
    kind: RequestKind,
    watch: Option<WatchRequest>,
    requested_at: Instant,
    attempts: Attempts<usize, ConnectionId>,
    /// Number of rounds, for the log.
    rounds: u32,
    slots: [Slot; MAX_PARALLEL],
    hold: Option<Hold>,
    /// For when a timer was started.
    timer_at: Option<Instant>,
    /// Hedges that were sent, and the endpoint that the next one must avoid.
    hedges: u32,
    avoided: Option<usize>,
    pub(super) state: State,
}

impl NodeRequest {
    /// Whether the rest of the response cannot be requested from another connection.
    pub(super) fn pinned(&self) -> bool {
        match &self.state {
            State::Pending => false,
            State::Streaming(_) => true,
            State::Watching(watch) => !watch.can_lose_stream(),
        }
    }

    /// The connection of a watch that has a stream.
    pub(super) fn watch_connection(&self) -> Option<ConnectionId> {
        match &self.state {
            State::Watching(watch) => watch.streams().next().map(|stream| stream.0),
            _ => None,
        }
    }

    /// Whether one of its streams is on one of these connections.
    fn is_on(&self, connections: &[ConnectionId]) -> bool {
        match &self.state {
            State::Pending => self.slots.iter().any(
                |slot| matches!(slot, Slot::Sent { stream, .. } if connections.contains(&stream.0)),
            ),
            State::Streaming(_) => false,
            State::Watching(watch) => watch.streams().any(|stream| connections.contains(&stream.0)),
        }
    }

    fn connection_of(&self, attempt: usize) -> Option<ConnectionId> {
        match self.slots.get(attempt)? {
            Slot::Sent { stream, .. } => Some(stream.0),
            _ => None,
        }
    }

    fn attempt_on(&self, on: Stream) -> Option<usize> {
        self.slots
            .iter()
            .position(|slot| matches!(slot, Slot::Sent { stream, .. } if *stream == on))
    }

    /// When the next event of the request is due that nothing but time causes.
    fn due_at(&self, now: Instant) -> Option<Instant> {
        if let Some(hold) = self.hold {
            let next = match hold.next {
                HoldStep::NoConnection(at) | HoldStep::Jitter(at) => at,
                HoldStep::Outage | HoldStep::Stream => hold.until,
            };
            return Some(next.min(hold.until));
        }
        let awaited = (0..MAX_PARALLEL).filter_map(|attempt| self.attempts.awaited(attempt));
        let times = awaited.flat_map(|awaited| match awaited {
            Awaited::Loss { silence_from, hedge_from } => [silence_from, hedge_from],
            Awaited::Stream | Awaited::Trouble => [None, None],
        });
        let holds = self.slots.iter().filter_map(|slot| match slot {
            Slot::Sent { head, .. } => head.as_ref().map(|held| held.hold.due()),
            _ => None,
        });
        let later = times.flatten().chain(holds).filter(|&at| at > now);
        later.chain(self.attempts.heartbeat_due()).min()
    }
}

impl Node {
    /// A client has sent a request.
    pub(super) fn begin_request(
        &mut self,
        io: &mut Io<'_>,
        client: (ConnectionId, StreamId),
        sent: Rc<Request>,
    ) {
        self.checks.requested();
        self.hedge_budget.deposit();
        self.too_old_budget.deposit();
        self.rejected_budget.deposit();
        let id = self.next_request;
        self.next_request += 1;
        let info = &sent.info;
        let kind = info.kind;
        let (query, headers) = (info.query(), HeaderMap::new());
        let watch =
            WatchRequest::new(info.verb.as_str(), info.path(), query, &headers, &[], |_| false);
        let is_heartbeat = kind == RequestKind::Write
            && matches!(info.verb, Verb::Update | Verb::Patch)
            && info.is_about("coordination.k8s.io", "leases", "");
        let request = match &watch {
            Some(watch) => with_new_query(&sent, &upstream_query(query, watch)),
            None => sent,
        };
        let timeout = watch.as_ref().and_then(|watch| watch.timeout);
        let request = NodeRequest {
            client,
            request,
            kind,
            watch,
            requested_at: io.s.now,
            attempts: Attempts::new(kind, is_heartbeat, io.s.now, timeout),
            rounds: 1,
            slots: [Slot::Ended; MAX_PARALLEL],
            hold: None,
            timer_at: None,
            hedges: 0,
            avoided: None,
            state: State::Pending,
        };
        self.requests.insert(id, request);
        self.acquire_first(io, id);
    }

    /// Whether a request should not rely on this connection alone.
    pub(super) fn is_troubled(&self, connection: ConnectionId) -> bool {
        self.upstreams.get(&connection).is_none_or(|upstream| {
            let machine = &upstream.machine;
            let has_better = || self.has_better_endpoint(upstream.endpoint);
            endpoint_condition::is_troubled(machine.state(), machine.drain_urgency(), has_better)
        })
    }

    /// The head of a response.
    pub(super) fn head_arrived(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        on: Stream,
        arrived: Head,
    ) {
        let is_starting = self.endpoints[self.endpoint_of(on.0)].is_starting(io.s.now);
        let Some(request) = self.requests.get_mut(&id) else { return };
        if matches!(request.state, State::Watching(_)) {
            self.head_taken(on, io.s.now);
            return self.watch_head(io, id, on, arrived);
        }
        let (kind, Some(attempt)) = (request.kind, request.attempt_on(on)) else { return };
        let stage = retry::stage_of_rejection(kind, arrived.status);
        if let Some(stage) = stage.filter(|&stage| stage != Stage::Starting || is_starting) {
            request.slots[attempt] = Slot::Ended;
            self.head_taken(on, io.s.now);
            self.cancel_stream(io, on);
            let response = held_response(arrived);
            let input = self.failed(io, id, attempt, on, stage, "rejected", response);
            return self.attempts_step(io, id, input);
        }
        if let Slot::Sent { head, .. } = &mut request.slots[attempt] {
            let (now, hold) = (io.s.now, HeadHold::new(io.s.now));
            *head = Some(HeldHead { head: arrived, arrived: now, hold });
        }
        if prefix_size(kind).is_none() {
            self.head_taken(on, io.s.now);
        } else {
            self.arm_request(io, id);
        }
        let Some(request) = self.requests.get_mut(&id) else { return };
        if let Some(watch) = request.watch.clone().filter(|_| arrived.status == 200) {
            self.accept(io, id, on);
            let Some(request) = self.requests.get_mut(&id) else { return };
            let watch = Watch::new(watch, request.requested_at, on, io.s.now);
            request.state = State::Watching(Box::new(watch));
        }
    }

    /// An attempt has won: its response is forwarded, and the other attempts are cancelled.
    fn accept(&mut self, io: &mut Io<'_>, id: RequestId, on: Stream) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let Some(attempt) = request.attempt_on(on) else { return };
        let Slot::Sent { head, .. } = std::mem::take(&mut request.slots[attempt]) else { return };
        let client = request.client;
        if let Some(held) = head.filter(|_| prefix_size(request.kind).is_some()) {
            self.head_taken(on, held.arrived);
        }
        let Some(request) = self.requests.get_mut(&id) else { return };
        let head = head.map_or(Head::status(200), |held| held.head);
        let window = self.clients.get(&client.0).map_or(0, |client| client.window);
        request.state = State::Streaming(Body::new(on, window, self.settings.windows().stream));
        let status = head.status;
        io.s.record(Entry::Answered { node: self.index, request: id, status });
        io.net.send(io.s, client.0, Side::Server, Frame::Head(client.1, head));
        self.attempts_step(io, id, Input::Responded { attempt });
    }

    /// Forwards the heads whose hold is over.
    fn check_holds(&mut self, io: &mut Io<'_>, id: RequestId) {
        for attempt in 0..MAX_PARALLEL {
            let Some(request) = self.requests.get_mut(&id) else { return };
            let Slot::Sent { stream, head: Some(held) } = &mut request.slots[attempt] else {
                continue;
            };
            let Some(upstream) = self.upstreams.get(&stream.0) else { continue };
            let machine = &upstream.machine;
            let evidence = Evidence {
                is_suspect: machine.state() == ConnectionState::Suspect
                    || machine.responsiveness() != Responsiveness::Responds,
                last_received: machine.last_received(),
            };
            if held.hold.check(evidence, io.s.now) {
                let stream = *stream;
                return self.accept(io, id, stream);
            }
        }
    }

    /// A piece of a body.
    pub(super) fn data_arrived(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        stream: Stream,
        data: Data,
    ) {
        let Some(request) = self.requests.get(&id) else { return };
        match request.state {
            State::Watching(_) => return self.watch_data(io, id, stream, data),
            State::Pending => self.accept(io, id, stream),
            State::Streaming(_) => {}
        }
        self.forward_body(io, id, data);
    }

    /// The end of a body.
    pub(super) fn stream_ended(&mut self, io: &mut Io<'_>, id: RequestId, stream: Stream) {
        let Some(request) = self.requests.get(&id) else { return };
        match request.state {
            State::Watching(_) => return self.watch_ended(io, id, stream),
            State::Pending => self.accept(io, id, stream),
            State::Streaming(_) => {}
        }
        self.body_ended(io, id);
    }

    /// A stream was lost before its end.
    pub(super) fn stream_lost(
        &mut self,
        io: &mut Io<'_>,
        id: RequestId,
        stream: Stream,
        loss: Loss,
    ) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        let reason = match loss {
            Loss::Unprocessed(reason) | Loss::Lost(reason) => reason,
        };
        match &request.state {
            State::Watching(_) => self.watch_stream_lost(io, id, stream, reason),
            State::Pending => {
                let Some(attempt) = request.attempt_on(stream) else { return };
                let slot = std::mem::take(&mut request.slots[attempt]);
                let stage = match (loss, slot) {
                    (Loss::Unprocessed(_), _) => Stage::Unprocessed,
                    (Loss::Lost(_), Slot::Sent { head: Some(_), .. }) => Stage::HeadHeld,
                    (Loss::Lost(_), _) => Stage::NoHead,
                };
                let input = self.failed(io, id, attempt, stream, stage, reason, None);
                self.attempts_step(io, id, input);
            }
            State::Streaming(_) => self.end_request(io, id, false),
        }
    }

    /// The input for an attempt that has failed and whose stream is closed.
    #[allow(clippy::too_many_arguments)] // what is known of a failure
    fn failed(
        &self,
        io: &mut Io<'_>,
        request: RequestId,
        attempt: usize,
        (connection, _): Stream,
        stage: Stage,
        reason: &'static str,
        response: Option<Box<HeldResponse>>,
    ) -> AttemptInput {
        io.s.record(Entry::AttemptEnded { node: self.index, request, connection, reason });
        let is_given_up = self.connection_facts(connection).is_silent && !self.has_live();
        let failure = Failure {
            stage,
            reason: reason.to_owned(),
            connection,
            endpoint: self.endpoint_of(connection),
            response,
            version: MissedVersion::default(),
        };
        Input::Failed { attempt, failure, is_given_up }
    }

    /// Whether a ready endpoint is left besides the excluded ones.
    pub(super) fn has_ready_besides(&self, excluded: &[usize]) -> bool {
        let excluded: Vec<_> = excluded.iter().copied().map(EndpointKey).collect();
        let conditions = (0..self.endpoints.len()).map(|at| self.endpoint_condition(at));
        has_ready_besides(conditions, &excluded)
    }

    fn refuse(&mut self, io: &mut Io<'_>, id: RequestId, refused: &Refused) {
        let head = match refused {
            Refused::Rejection(held) => {
                let text = held.0.headers.get(header::RETRY_AFTER);
                let retry_after = text.and_then(|text| text.to_str().ok()?.parse().ok());
                Head { retry_after, ..Head::status(held.0.status.as_u16()) }
            }
            Refused::Error(error, _) => {
                let retry_after = error.retry_after.map(u64::from);
                Head { retry_after, ..Head::status(error.code.as_u16()) }
            }
        };
        let Some(request) = self.requests.get(&id) else { return };
        let client = request.client;
        io.s.record(Entry::Answered { node: self.index, request: id, status: head.status });
        io.net.send(io.s, client.0, Side::Server, Frame::Head(client.1, head));
        self.end_request(io, id, true);
    }

    /// Sends a piece of a body to the client.
    pub(super) fn send_to_client(&self, io: &mut Io<'_>, id: RequestId, data: Data) {
        if let Some(request) = self.requests.get(&id) {
            let (connection, stream) = request.client;
            io.net.send(io.s, connection, Side::Server, Frame::Data(stream, data));
        }
    }

    /// Ends the response of a request: cleanly, or by a reset.
    pub(super) fn end_request(&mut self, io: &mut Io<'_>, id: RequestId, cleanly: bool) {
        let Some(request) = self.requests.get(&id) else { return };
        let (connection, stream) = request.client;
        let frame =
            if cleanly { Frame::End(stream) } else { Frame::Reset(stream, ResetCode::Internal) };
        io.net.send(io.s, connection, Side::Server, frame);
        if let Some(client) = self.clients.get_mut(&connection) {
            client.streams.remove(&stream);
        }
        self.cancel_request(io, id);
    }

    /// Forgets a request and cancels its streams.
    pub(super) fn cancel_request(&mut self, io: &mut Io<'_>, id: RequestId) {
        self.forget_waits(id, |_| true);
        let Some(mut request) = self.requests.remove(&id) else { return };
        request.attempts.cancel();
        return_tokens(&mut request.attempts, &self.hedge_budget);
        self.checks.hedges_counted(request.hedges, request.attempts.hedges_sent());
        for slot in request.slots {
            if let Slot::Sent { stream, .. } = slot {
                self.cancel_stream(io, stream);
            }
        }
        match request.state {
            State::Streaming(body) => self.cancel_stream(io, body.stream()),
            State::Watching(watch) => {
                for stream in watch.streams() {
                    self.cancel_stream(io, stream);
                }
            }
            State::Pending => {}
        }
    }

    pub(super) fn watch_mut(&mut self, id: RequestId) -> Option<&mut Watch> {
        match &mut self.requests.get_mut(&id)?.state {
            State::Watching(watch) => Some(watch),
            _ => None,
        }
    }

    /// The request that continues a watch, with this query.
    pub(super) fn request_with_query(&self, id: RequestId, query: &str) -> Option<Rc<Request>> {
        Some(with_new_query(&self.requests.get(&id)?.request, query))
    }

    /// The query of the first request upstream.
    pub(super) fn first_query(&self, id: RequestId) -> String {
        self.requests
            .get(&id)
            .map_or(String::new(), |request| request.request.info.query().to_owned())
    }
}

fn with_new_query(request: &Request, query: &str) -> Rc<Request> {
    let target = with_query(&request.parts.uri, query);
    Request::new(request.parts.method.clone(), &target.to_string(), None)
}

/// A rejection as the machine keeps it.
fn held_response(head: Head) -> Option<Box<HeldResponse>> {
    let mut response = Response::builder().status(head.status);
    if let Some(seconds) = head.retry_after {
        response = response.header(header::RETRY_AFTER, seconds);
    }
    let (head, ()) = response.body(()).ok()?.into_parts();
    Some(Box::new((head, bytes::Bytes::new())))
}
