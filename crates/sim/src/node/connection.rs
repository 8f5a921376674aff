//! An upstream connection. `ConnectionMachine` of the core decides; this file reports what arrives, and carries out its
//! effects on the network. The handshake is that of the program: TCP, TLS, SETTINGS, and the first PING.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use jackstay_core::connect::ConnectFailureKind;
use jackstay_core::connection::{
    ChangeReason, ConnectionMachine, ConnectionState, Effects, Established, H2End, Refusal,
    Responsiveness, Stream, Transition,
};
use jackstay_core::endpoint_health::Observation;
use jackstay_core::pool::EndpointKey;
use jackstay_core::request::attempts::ConnectionFacts;

use super::reachability::HANDSHAKE_TIMEOUT;
use super::request::{Loss, NodeRequest, RequestId};
use super::{Io, Node, NodeTimer};
use crate::http2::{Frame, Request, ResetCode, StreamId};
use crate::net::{Arrival, ConnectionId, Side};
use crate::trace::Entry;

/// For whom a connect was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DialFor {
    Requests,
    Prober,
    /// Whether a new connection works while that of the prober is suspect.
    Examination,
}

/// A connect in progress.
#[derive(Debug)]
pub(super) struct Dial {
    pub(super) endpoint: usize,
    pub(super) dialed_for: DialFor,
    peer_streams: usize,
    /// When the first PING was sent, after TCP and TLS.
    ping_sent: Option<Instant>,
}

/// An open stream; request 0 is the prober's.
#[derive(Debug)]
struct OpenStream {
    request: RequestId,
    slot: Stream,
}

/// An established connection.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) endpoint: usize,
    /// It belongs to the prober.
    pub(super) is_probe: bool,
    pub(super) machine: ConnectionMachine,
    streams: BTreeMap<StreamId, OpenStream>,
    next_stream: StreamId,
    peer_streams: usize,
    /// Why no more streams can be opened.
    refusal: Option<Refusal>,
    pings: u32,
    /// For when a timer was started.
    armed_for: Option<Instant>,
}

impl Upstream {
    pub(super) fn is_silent(&self) -> bool {
        self.machine.responsiveness() == Responsiveness::Silent
    }

    pub(super) fn is_live(&self) -> bool {
        self.machine.state() == ConnectionState::Live
    }

    /// Open streams of requests by the account of this file.
    pub(super) fn request_streams(&self) -> usize {
        self.streams.values().filter(|stream| stream.request != 0).count()
    }

    /// Slots that the machine counts as taken although no stream is open.
    pub(super) fn slots_without_stream(&self, now: Instant) -> usize {
        let limit = self.machine.stream_limit();
        limit.saturating_sub(self.machine.free_streams(now)).saturating_sub(self.streams.len())
    }
}

impl Node {
    /// Starts a connect to an endpoint.
    pub(super) fn dial(
        &mut self,
        io: &mut Io<'_>,
        endpoint: usize,
        dialed_for: DialFor,
    ) -> ConnectionId {
        let id = io.net.connect(io.s, self.process, self.endpoints[endpoint].server, true);
        let backoff = &self.endpoints[endpoint].backoff;
        let limit = match dialed_for {
            DialFor::Examination => HANDSHAKE_TIMEOUT,
            _ => backoff.timeout(self.settings.connect_timeout).limit(),
        };
        self.start_timer(io.s, io.s.now + limit, NodeTimer::Dial(id));
        self.dials.insert(id, Dial { endpoint, dialed_for, peer_streams: 0, ping_sent: None });
        id
    }

    pub(super) fn dial_timed_out(&mut self, io: &mut Io<'_>, id: ConnectionId) {
        self.dial_failed(io, id, ConnectFailureKind::Timeout);
    }

    fn dial_failed(&mut self, io: &mut Io<'_>, id: ConnectionId, kind: ConnectFailureKind) {
        let Some(dial) = self.dials.remove(&id) else { return };
        io.net.abort(io.s, id, Side::Client);
        io.s.record(Entry::ConnectEnded { connection: id, ok: false });
        if dial.dialed_for == DialFor::Examination {
            return self.handshake_failed(io, dial.endpoint, kind);
        }
        self.connect_failed(io, dial.endpoint, kind);
        self.checks.connect_failed(dial.endpoint, io.s.now);
        self.changed = true;
        match dial.dialed_for {
            DialFor::Requests => self.class.connect_ended(EndpointKey(dial.endpoint)),
            _ => self.probe_connection_ended(io, dial.endpoint, false),
        }
    }

    /// Cancels a connect.
    pub(super) fn abandon_dial(&mut self, io: &mut Io<'_>, id: ConnectionId) {
        if self.dials.remove(&id).is_some() {
            io.net.abort(io.s, id, Side::Client);
        }
    }

    pub(super) fn dial_arrived(&mut self, io: &mut Io<'_>, id: ConnectionId, what: &Arrival) {
        let Some(dial) = self.dials.get_mut(&id) else { return };
        match what {
            Arrival::Connected => {
                let window = self.settings.windows().stream;
                io.net.send(io.s, id, Side::Client, Frame::Hello { window });
            }
            Arrival::Ended | Arrival::Lost => {
                self.dial_failed(io, id, ConnectFailureKind::Failed);
            }
            Arrival::Frame(Frame::Settings { max_streams }) => {
                dial.peer_streams = *max_streams;
                dial.ping_sent = Some(io.s.now);
                io.net.send(io.s, id, Side::Client, Frame::Ping(0));
            }
            Arrival::Frame(Frame::Pong(_)) => self.established(io, id),
            Arrival::Frame(_) => {}
        }
    }

    fn established(&mut self, io: &mut Io<'_>, id: ConnectionId) {
        let now = io.s.now;
        let Some(dial) = self.dials.remove(&id) else { return };
        let Dial { endpoint, dialed_for, peer_streams, ping_sent } = dial;
        let is_probe = dialed_for != DialFor::Requests;
        let established = Established {
            thresholds: self.settings.health,
            first_rtt: ping_sent.map_or_else(Default::default, |sent| now - sent),
            ping_grid: self.endpoints[endpoint].ping_grid,
            max_streams: self.settings.max_streams,
            peer_streams,
            is_probe,
        };
        let upstream = Upstream {
            endpoint,
            is_probe,
            machine: ConnectionMachine::new(established, now),
            streams: BTreeMap::new(),
            next_stream: 1,
            peer_streams,
            refusal: None,
            pings: 0,
            armed_for: None,
        };
        self.upstreams.insert(id, upstream);
        self.record_state(io, id, ConnectionState::Live, "established");
        self.endpoints[endpoint].backoff.succeeded();
        self.checks.connect_succeeded(endpoint);
        let at = io.s.now;
        self.observe(io, endpoint, Observation::ConnectionOpened { at });
        self.changed = true;
        self.arm_check(io, id);
        match dialed_for {
            DialFor::Requests => self.class.connect_ended(EndpointKey(endpoint)),
            DialFor::Prober => self.replace_prober_connection(io, endpoint, id),
            DialFor::Examination => self.handshake_succeeded(io, endpoint, id),
        }
    }

    pub(super) fn upstream_arrived(&mut self, io: &mut Io<'_>, id: ConnectionId, what: Arrival) {
        let Some(upstream) = self.upstreams.get_mut(&id) else { return };
        let frame = match what {
            Arrival::Connected => return,
            Arrival::Ended | Arrival::Lost => {
                let lost = matches!(what, Arrival::Lost);
                let end = if lost { H2End::Failed } else { H2End::Closed };
                let refusal = upstream.refusal;
                return self.input(io, id, |machine| machine.ended(end, refusal));
            }
            Arrival::Frame(frame) => frame,
        };
        if let Frame::Settings { max_streams } = frame {
            upstream.peer_streams = max_streams;
        }
        let (now, peer_streams) = (io.s.now, upstream.peer_streams);
        self.driver_input(io, id, |machine| machine.received(peer_streams, now));
        self.frame_arrived(io, id, frame);
        self.arm_check(io, id);
    }

    fn frame_arrived(&mut self, io: &mut Io<'_>, id: ConnectionId, frame: Frame) {
        let now = io.s.now;
        match frame {
            Frame::Pong(_) => self.pong(io, id),
            Frame::Goaway { last } => self.goaway(io, id, last),
            Frame::Head(stream, head) => {
                let Some(upstream) = self.upstreams.get_mut(&id) else { return };
                let Some(open) = upstream.streams.get_mut(&stream) else { return };
                match open.request {
                    0 => {
                        upstream.machine.head_arrived(&mut open.slot, now);
                        self.probe_answered(io, id, head.status);
                    }
                    request => self.head_arrived(io, request, (id, stream), head),
                }
            }
            Frame::Response(stream, head, data) => {
                self.frame_arrived(io, id, Frame::Head(stream, head));
                if let Some(data) = data {
                    self.frame_arrived(io, id, Frame::Data(stream, data));
                }
                self.frame_arrived(io, id, Frame::End(stream));
            }
            Frame::Data(stream, data) => {
                if let Some(request) = self.request_of(id, stream) {
                    self.data_arrived(io, request, (id, stream), data);
                }
            }
            Frame::End(stream) => {
                if let Some(request) = self.finish_stream(io, id, stream) {
                    self.stream_ended(io, request, (id, stream));
                }
            }
            Frame::Reset(stream, code) => {
                let loss = match code {
                    ResetCode::Refused => Loss::Unprocessed("REFUSED_STREAM"),
                    ResetCode::Cancel | ResetCode::Internal => Loss::Lost("stream reset"),
                };
                // As in the program, only a stream that has ended gives its slot back at once.
                if let Some(request) = self.release(io, id, stream) {
                    self.stream_lost(io, request, (id, stream), loss);
                }
            }
            Frame::Hello { .. }
            | Frame::Settings { .. }
            | Frame::Request(..)
            | Frame::WindowUpdate(..)
            | Frame::Ping(_) => {}
        }
    }

    /// A request does not wait for its response head any more, which has arrived at this time.
    pub(super) fn head_taken(
        &mut self,
        (connection, stream): (ConnectionId, StreamId),
        at: Instant,
    ) {
        let Some(upstream) = self.upstreams.get_mut(&connection) else { return };
        if let Some(open) = upstream.streams.get_mut(&stream) {
            upstream.machine.head_arrived(&mut open.slot, at);
        }
    }

    fn pong(&mut self, io: &mut Io<'_>, id: ConnectionId) {
        let now = io.s.now;
        if self.upstreams.get(&id).is_some_and(|upstream| upstream.machine.ping_outstanding()) {
            self.driver_input(io, id, |machine| machine.pong(now));
        }
    }

    fn goaway(&mut self, io: &mut Io<'_>, id: ConnectionId, last: StreamId) {
        let now = io.s.now;
        let Some(upstream) = self.upstreams.get_mut(&id) else { return };
        upstream.refusal = Some(Refusal::GracefulGoaway);
        let unprocessed: Vec<_> = upstream.streams.range(last + 1..).map(|(&id, _)| id).collect();
        self.driver_input(io, id, |machine| machine.refused(Refusal::GracefulGoaway, now));
        for stream in unprocessed {
            if let Some(request) = self.release(io, id, stream) {
                self.stream_lost(io, request, (id, stream), Loss::Unprocessed("GOAWAY"));
            }
        }
    }

    /// Checks the health of a connection, if that is due.
    pub(super) fn check(&mut self, io: &mut Io<'_>, id: ConnectionId) {
        let now = io.s.now;
        let Some(upstream) = self.upstreams.get_mut(&id) else { return };
        if upstream.armed_for != Some(now) {
            // A timer for an earlier check was started since.
            return;
        }
        upstream.armed_for = None;
        if upstream.machine.wake_at() <= now {
            self.update_pins(id);
            let tcp = io.net.tcp_info(id, Side::Client, now);
            self.driver_input(io, id, |machine| machine.check(Some(&tcp), now));
        }
        self.arm_check(io, id);
    }

    /// Tells the machine which streams no other connection can continue. Only its checks read that.
    fn update_pins(&mut self, id: ConnectionId) {
        let Some(upstream) = self.upstreams.get_mut(&id) else { return };
        for open in upstream.streams.values_mut() {
            let pinned = self.requests.get(&open.request).is_some_and(NodeRequest::pinned);
            upstream.machine.set_pinned(&mut open.slot, pinned);
        }
    }

    /// An input of the task that reads the socket, which then ends the connection if that is due.
    fn driver_input(
        &mut self,
        io: &mut Io<'_>,
        id: ConnectionId,
        input: impl FnOnce(&mut ConnectionMachine) -> Effects,
    ) {
        self.input(io, id, input);
        if self.upstreams.get(&id).is_some_and(|upstream| upstream.machine.is_end_due()) {
            self.input(io, id, ConnectionMachine::end_if_due);
        }
    }

    /// Gives the machine an input and executes its effects.
    pub(super) fn input(
        &mut self,
        io: &mut Io<'_>,
        id: ConnectionId,
        input: impl FnOnce(&mut ConnectionMachine) -> Effects,
    ) {
        let Some(upstream) = self.upstreams.get_mut(&id) else { return };
        let effects = input(&mut upstream.machine);
        self.execute_on_connection(io, id, effects);
    }

    fn execute_on_connection(&mut self, io: &mut Io<'_>, id: ConnectionId, effects: Effects) {
        let Some(upstream) = self.upstreams.get_mut(&id) else { return };
        let endpoint = upstream.endpoint;
        if effects.probe_kernel {
            io.net.probe(io.s, id, Side::Client);
        }
        if effects.send_ping {
            upstream.pings += 1;
            io.net.send(io.s, id, Side::Client, Frame::Ping(upstream.pings));
        }
        if effects.shutdown_announced {
            self.observe(io, endpoint, Observation::GoawayReceived);
        }
        if let Some(change) = effects.responsiveness {
            let (from, to) = (change.from, change.to);
            self.observe(io, endpoint, Observation::ResponsivenessChanged { from, to });
        }
        if effects.notify_requests {
            self.notified.push(id);
        }
        self.changed |= effects.notify_pool;
        if let Some(transition) = effects.transition {
            self.transition(io, id, transition);
        }
        if effects.wake_driver {
            self.input(io, id, ConnectionMachine::end_if_due);
        }
    }

    fn transition(&mut self, io: &mut Io<'_>, id: ConnectionId, transition: Transition) {
        let reason = match transition.reason {
            ChangeReason::Health(reason) => reason.as_str(),
            ChangeReason::Drain(reason) => reason.as_str(),
            ChangeReason::Drained => "drained",
            ChangeReason::ClosedByApiserver => "closed by the apiserver",
            ChangeReason::Error => "error or GOAWAY",
        };
        self.record_state(io, id, transition.to, reason);
        let Some(upstream) = self.upstreams.get(&id) else { return };
        let (endpoint, is_probe) = (upstream.endpoint, upstream.is_probe);
        let responsiveness = upstream.machine.responsiveness();
        if transition.leaves_service() {
            let at = io.s.now;
            let closed = Observation::ConnectionClosed { responsiveness, reason, at };
            self.observe(io, endpoint, closed);
        }
        if transition.to == ConnectionState::Dead {
            self.connection_ended(io, id, reason);
        } else if is_probe && transition.leaves_service() {
            self.probe_connection_drains(io, endpoint, id);
        }
        if self.endpoints[endpoint].is_probed_on(id) && transition.to == ConnectionState::Suspect {
            self.begin_examination(io, endpoint, id);
        }
        if is_probe {
            self.examine(io, endpoint);
        }
    }

    /// A connection is dead: its streams fail.
    fn connection_ended(&mut self, io: &mut Io<'_>, id: ConnectionId, reason: &'static str) {
        let facts = self.connection_facts(id);
        let Some(upstream) = self.upstreams.remove(&id) else { return };
        let endpoint = upstream.endpoint;
        self.ended.insert(id, (endpoint, ConnectionFacts { is_dead: true, ..facts }));
        io.net.abort(io.s, id, Side::Client);
        self.changed = true;
        for (stream, open) in upstream.streams {
            if open.request != 0 {
                self.stream_lost(io, open.request, (id, stream), Loss::Lost(reason));
            }
        }
        if self.endpoints[endpoint].is_probed_on(id) {
            self.probe_connection_ended(io, endpoint, true);
        }
    }

    /// The facts about a connection by which a retry is decided.
    pub(super) fn connection_facts(&self, id: ConnectionId) -> ConnectionFacts {
        let live = self.upstreams.get(&id).map(|upstream| ConnectionFacts {
            is_silent: upstream.is_silent(),
            is_dead: upstream.machine.state() == ConnectionState::Dead,
            suspect_since: upstream.machine.suspect_since(),
        });
        live.or(self.ended.get(&id).map(|ended| ended.1)).unwrap_or_default()
    }

    /// The endpoint of a connection, also of one that has ended.
    pub(super) fn endpoint_of(&self, id: ConnectionId) -> usize {
        let live = self.upstreams.get(&id).map(|upstream| upstream.endpoint);
        live.or(self.ended.get(&id).map(|ended| ended.0)).unwrap_or_default()
    }

    /// Opens a stream for a request; 0 is the prober.
    pub(super) fn open_stream(
        &mut self,
        io: &mut Io<'_>,
        id: ConnectionId,
        request: RequestId,
        sent: &Rc<Request>,
    ) -> StreamId {
        let Some(upstream) = self.upstreams.get_mut(&id) else { return 0 };
        let stream = upstream.next_stream;
        upstream.next_stream += 2;
        let mut slot = upstream.machine.reserve(sent.info.long_running(), io.s.now);
        upstream.machine.opened(&mut slot);
        upstream.streams.insert(stream, OpenStream { request, slot });
        io.net.send(io.s, id, Side::Client, Frame::Request(stream, Rc::clone(sent)));
        self.arm_check(io, id);
        stream
    }

    /// Cancels a stream. The machine keeps its slot for a while.
    pub(super) fn cancel_stream(
        &mut self,
        io: &mut Io<'_>,
        (id, stream): (ConnectionId, StreamId),
    ) {
        if self.request_of(id, stream).is_some() {
            io.net.send(io.s, id, Side::Client, Frame::Reset(stream, ResetCode::Cancel));
            self.release(io, id, stream);
        }
    }

    /// The peer has ended a stream. Returns its request, if it is not the prober's.
    fn finish_stream(
        &mut self,
        io: &mut Io<'_>,
        id: ConnectionId,
        stream: StreamId,
    ) -> Option<RequestId> {
        let upstream = self.upstreams.get_mut(&id)?;
        let open = upstream.streams.get_mut(&stream)?;
        upstream.machine.finished(&mut open.slot);
        self.release(io, id, stream)
    }

    /// Gives the slot of a stream back. Returns its request, if it is not the prober's.
    fn release(
        &mut self,
        io: &mut Io<'_>,
        id: ConnectionId,
        stream: StreamId,
    ) -> Option<RequestId> {
        let now = io.s.now;
        let mut open = self.upstreams.get_mut(&id)?.streams.remove(&stream)?;
        self.input(io, id, |machine| machine.release(&mut open.slot, now));
        (open.request != 0).then_some(open.request)
    }

    fn request_of(&self, id: ConnectionId, stream: StreamId) -> Option<RequestId> {
        Some(self.upstreams.get(&id)?.streams.get(&stream)?.request)
    }

    /// Starts a timer for the next check, unless an earlier one runs.
    fn arm_check(&mut self, io: &mut Io<'_>, id: ConnectionId) {
        let Some(upstream) = self.upstreams.get_mut(&id) else { return };
        let at = upstream.machine.wake_at().max(io.s.now);
        if upstream.armed_for.is_none_or(|armed| at < armed) {
            upstream.armed_for = Some(at);
            self.start_timer(io.s, at, NodeTimer::Check(id));
        }
    }

    fn record_state(
        &self,
        io: &mut Io<'_>,
        connection: ConnectionId,
        state: ConnectionState,
        reason: &'static str,
    ) {
        let Some(upstream) = self.upstreams.get(&connection) else { return };
        let (node, endpoint) = (self.index, upstream.endpoint as u8);
        io.s.record(Entry::Connection { node, connection, endpoint, state, reason });
    }
}
