//! One HTTP/2 connection to an apiserver: the only owner of its state.
//!
//! The shell polls h2, reports what has happened to a [`ConnectionMachine`], and executes the [`Effects`] that it
//! returns. The machine sends nothing and reads no clock.
//!
//! | state | entered when | effect | left when |
//! |---|---|---|---|
//! | live | the first PONG arrived | takes new streams | a row below applies |
//! | suspect | a PING is outstanding for longer than max(4·srtt + 4·rttvar, 100 ms), and in that time no frame was received or no pending byte was acknowledged | no new streams; safe requests are repeated on another connection | a PONG arrives: live |
//! | draining | GOAWAY, removed endpoint or replaced certificate; or the process is stopped: no PONG, no frame and no upload progress for 5 s while the kernel answers | no new streams; requests that wait for a response head and must not be sent twice fail 7 s after the PING if the process is stopped | its last stream ends: dead |
//! | unresponsive | the path is lost and a stream is pinned | no new streams; requests that wait for a response head fail, and streams that can move leave | a PONG arrives: draining; the last pinned stream ends: dead |
//! | dead | the path is lost and no stream is pinned; or the path has been lost for `tunnel_dead_after`; or no frame arrived for 20 s, whatever TCP shows (`tunnel_dead_after` if that is longer and a stream is pinned) | the connection is closed | never |
//!
//! A stream is pinned while the rest of its response cannot be requested from another connection.
//! Examples are a log that is followed, a response whose body has begun, and a watch that can be neither
//! resumed nor ended cleanly. `health` says when a path is lost.
//!
//! # Decisions
//!
//! The cells name the next state; a dash means that the input changes nothing. `leave` means that the streams that can
//! move leave at once ([`DrainUrgency::Immediate`]).
//!
//! | input | live | suspect | draining | unresponsive | dead |
//! |---|---|---|---|---|---|
//! | PONG ([`pong`]) | – | live | – | draining, leave | – |
//! | [`check`]: PING is late | suspect | – | leave | – | – |
//! | `check`: the process is stopped | draining, leave | draining, leave | leave | – | – |
//! | `check`: path lost, a stream is pinned | unresponsive | unresponsive | unresponsive | – | – |
//! | `check`: path lost and no stream pinned, or for `tunnel_dead_after`; no frames or a closed window for 20 s | dead | dead | dead | dead | – |
//! | [`refused`]: GOAWAY, or an error | draining | draining | – | – | – |
//! | [`drain`] | draining | draining | streams leave, if the reason demands it | – | – |
//! | [`endpoint_degraded`] | – | – | leave | – | – |
//! | [`end_if_due`] after [`close`] | dead | dead | dead | dead | – |
//! | `end_if_due` without open streams | – | – | dead | dead | – |
//! | [`ended`] | dead | dead | dead | dead | – |
//!
//! A drain that has begun since the PING takes precedence over its PONG, because only a suspect or unresponsive
//! connection changes its state then. A GOAWAY on the prober's connection means that the apiserver shuts down, unless
//! the end of the connection was expected: clients of other connections get one now and then (`--goaway-chance`).
//! If a GOAWAY complains of PINGs ([`ping_limit`]), the endpoint gets fewer of them.
//!
//! [`pong`]: ConnectionMachine::pong
//! [`check`]: ConnectionMachine::check
//! [`refused`]: ConnectionMachine::refused
//! [`drain`]: ConnectionMachine::drain
//! [`endpoint_degraded`]: ConnectionMachine::endpoint_degraded
//! [`end_if_due`]: ConnectionMachine::end_if_due
//! [`close`]: ConnectionMachine::close
//! [`ended`]: ConnectionMachine::ended

mod drain;
mod effects;
mod health;
pub mod ping_limit;
mod slots;
mod state;
mod stream;
mod waits;

use std::time::{Duration, Instant};

pub use self::drain::{DrainReason, DrainUrgency};
pub use self::effects::{
    ChangeReason, ConnectionTransition, Effects, H2End, H2Refusal, ResponsivenessChange,
    Significance,
};
use self::health::silence::Silence;
pub use self::health::thresholds::{Thresholds, WRITE_PATIENCE};
use self::health::{Check, Health, needs_probe};
use self::slots::StreamSlots;
use self::state::State;
pub use self::state::{ConnectionState, Responsiveness, StateChangeReason};
pub use self::stream::Stream;
use self::stream::StreamPhase;
use self::waits::ResponseWaits;
use crate::balance;
use crate::tcp_info::TcpInfo;

/// What is known of a connection when it is taken into use.
#[derive(Debug, Clone, Copy)]
pub struct Established {
    /// The configured thresholds.
    pub thresholds: Thresholds,
    /// The round-trip time of the first PING.
    pub first_rtt: Duration,
    /// The time from which the times of its PINGs are counted ([`Thresholds::next_ping`]).
    pub ping_grid: Instant,
    /// `connections.max_streams` of the configuration.
    pub max_streams: usize,
    /// The peer's limit.
    pub peer_streams: usize,
    /// Whether the prober alone uses it.
    pub is_probe: bool,
}

/// One connection.
#[derive(Debug)]
pub struct ConnectionMachine {
    state: State,
    health: Health,
    slots: StreamSlots,
    waits: ResponseWaits,
    opened: Instant,
    is_probe: bool,
    /// Whether the PINGs are answered, as the last check has found or the last PONG has shown.
    responsiveness: Responsiveness,
    /// Requests that wait for a response head and must not be sent twice fail: the path is lost, or the
    /// process has been stopped for 7 s.
    fails_unsafe_requests: bool,
    /// Why it drains. That its apiserver is not ready counts most.
    drain_reason: Option<DrainReason>,
    /// See [`Self::set_end_expected`].
    end_expected: bool,
    /// When the last wrong suspicion ended.
    recovered_at: Option<Instant>,
    close_requested: Option<DrainReason>,
}

/// Why the state changes, as far as its significance depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    OrderlyEnd,
    ServerShutdown,
    /// All streams have failed.
    Failure,
    Other,
}

/// Inputs.
impl ConnectionMachine {
    /// A live connection, taken into use.
    pub fn new(established: Established, now: Instant) -> Self {
        let Established { thresholds, first_rtt, ping_grid, max_streams, peer_streams, is_probe } =
            established;
        Self {
            state: State::Live,
            health: Health::new(thresholds, first_rtt, ping_grid, now),
            slots: StreamSlots::new(max_streams, peer_streams, now),
            waits: ResponseWaits::new(now),
            opened: now,
            is_probe,
            responsiveness: Responsiveness::default(),
            fails_unsafe_requests: false,
            drain_reason: None,
            end_expected: false,
            recovered_at: None,
            close_requested: None,
        }
    }

    /// Bytes have arrived. They may contain a new `peer_streams` limit.
    pub fn received(&mut self, peer_streams: usize, now: Instant) -> Effects {
        self.health.received(now);
        Effects { notify_pool: self.slots.set_peer_limit(peer_streams), ..Effects::default() }
    }

    /// The PONG of the outstanding PING has arrived. Its bytes must have been reported ([`Self::received`]).
    pub fn pong(&mut self, now: Instant) -> Effects {
        let mut effects = Effects { round_trip: self.health.pong(now), ..Effects::default() };
        self.set_findings(Responsiveness::Responds, false, &mut effects);
        let to = match self.state() {
            ConnectionState::Suspect => {
                self.recovered_at = Some(now);
                ConnectionState::Live
            }
            // Streams have left it.
            ConnectionState::Unresponsive => ConnectionState::Draining,
            ConnectionState::Live | ConnectionState::Draining | ConnectionState::Dead => {
                return effects;
            }
        };
        self.enter_by_evidence(to, StateChangeReason::Pong, now, &mut effects);
        effects
    }

    /// A check is due ([`Self::wake_at`]). `tcp` has the kernel's statistics, if they can be read. All bytes that have
    /// arrived must have been reported.
    pub fn check(&mut self, tcp: Option<&TcpInfo>, now: Instant) -> Effects {
        let notify_requests = self.waits.take_notification(now);
        let mut effects = Effects { notify_requests, ..Effects::default() };
        match self.health.check(tcp, self.waits.waiting_since(), now) {
            Check::NotDue => {}
            Check::ProbeDue => effects.probe_kernel = true,
            Check::PingDue { request_waits } => {
                effects.send_ping = true;
                effects.ask_others = request_waits;
                effects.notify_pool = request_waits;
            }
            Check::Outstanding { silence, verdict } => {
                if verdict {
                    self.judge(&silence, now, &mut effects);
                }
                // The kernel resets a connection after 127 unanswered probes, and an unresponsive
                // connection may stay open for longer than that takes.
                effects.probe_kernel = needs_probe(&silence)
                    && !matches!(self.state, State::Unresponsive { .. } | State::Dead { .. });
            }
        }
        effects
    }

    /// h2 opens no more streams.
    pub fn refused(&mut self, refusal: H2Refusal, now: Instant) -> Effects {
        let mut effects = Effects::default();
        if !self.state().is_in_service() {
            return effects;
        }
        effects.shutdown_announced = self.goaway_means_shutdown();
        let cause = match refusal {
            H2Refusal::GracefulGoaway => Cause::ServerShutdown,
            H2Refusal::Goaway | H2Refusal::OwnGoaway => Cause::Other,
            // h2 ends the streams before the connection.
            H2Refusal::Failure => Cause::Failure,
        };
        self.enter(self.state.draining(None, now), ChangeReason::Error, cause, &mut effects);
        effects
    }

    /// h2 has ended the connection. `refusal` is present if it opens no more streams.
    pub fn ended(&mut self, end: H2End, refusal: Option<H2Refusal>) -> Effects {
        let mut effects = Effects::default();
        let by_goaway = matches!(refusal, Some(H2Refusal::GracefulGoaway | H2Refusal::Goaway));
        // h2 ends a connection without streams in the same poll in which the GOAWAY arrives. The prober's
        // connection has no streams between two probes.
        effects.shutdown_announced =
            by_goaway && self.state().is_in_service() && self.goaway_means_shutdown();
        let unused = self.slots.open() == 0;
        let (reason, orderly) = match end {
            // The slots that are taken are those of responses that are complete, and of requests that the GOAWAY
            // excludes, which are sent again.
            H2End::Finished => (ChangeReason::ClosedByApiserver, true),
            H2End::Closed => (ChangeReason::ClosedByApiserver, unused),
            // What is written after the GOAWAY, a PING or the GOAWAY of h2, may meet a closed socket.
            H2End::Failed if unused && refusal == Some(H2Refusal::GracefulGoaway) => {
                (ChangeReason::ClosedByApiserver, true)
            }
            H2End::Failed | H2End::FrameLimit => (ChangeReason::Error, false),
        };
        let cause = if orderly { Cause::OrderlyEnd } else { Cause::Other };
        self.enter(self.state.dead(), reason, cause, &mut effects);
        effects
    }

    /// No more streams are opened. The connection ends with the last one.
    pub fn drain(&mut self, reason: DrainReason, now: Instant) -> Effects {
        let mut effects = Effects::default();
        let wanted = reason.urgency();
        if self.drain_reason != Some(DrainReason::NotReady) {
            self.drain_reason = Some(reason);
        }
        match &mut self.state {
            State::Live | State::Suspect { .. } => {
                if matches!(self.state, State::Live) && reason == DrainReason::Idle {
                    // Nothing has failed.
                    self.end_expected = true;
                }
                let next = self.state.draining(wanted, now);
                self.enter(next, ChangeReason::Drain(reason), Cause::Other, &mut effects);
                effects.wake_driver = true;
            }
            // It drains for a reason for which streams may stay, such as a GOAWAY.
            State::Draining { urgency: urgency @ None, .. } if wanted.is_some() => {
                *urgency = wanted;
                effects.notify_requests = true;
            }
            State::Draining { .. } | State::Unresponsive { .. } | State::Dead { .. } => {}
        }
        effects
    }

    /// The connection ends at the next [`Self::end_if_due`]. Open streams fail.
    pub fn close(&mut self, reason: DrainReason) -> Effects {
        self.close_requested = Some(reason);
        Effects { wake_driver: true, ..Effects::default() }
    }

    /// Sets whether the end of the connection is expected. Such an end is no event, and a GOAWAY does not mean that the
    /// apiserver shuts down.
    pub fn set_end_expected(&mut self, expected: bool) {
        self.end_expected = expected;
    }

    /// The endpoint limits PINGs to one in `interval` ([`ping_limit`]).
    pub fn limit_pings(&mut self, interval: Duration) {
        self.health.limit_pings(interval);
    }

    /// Answers may be late by `line_delay` ([`crate::line_delay`]).
    pub fn expect_delay(&mut self, line_delay: Duration) {
        self.health.expect_delay(line_delay);
    }

    /// The latest `/readyz` of the endpoint failed or is overdue. Requests may start a second attempt, and if PINGs are
    /// limited, one is due.
    pub fn endpoint_suspected(&mut self, now: Instant) -> Effects {
        let wake_driver = self.health.suspect_endpoint(now);
        Effects { notify_requests: true, wake_driver, ..Effects::default() }
    }

    /// A watch on another connection has shown an event that a watch on this one should show, too. If it does not, a PING
    /// is due.
    pub fn event_expected(&mut self, now: Instant) -> Effects {
        let wake_driver = self.health.expect_event(now);
        Effects { wake_driver, ..Effects::default() }
    }

    /// A request has waited on another connection ([`Effects::ask_others`]).
    pub fn ask(&mut self, now: Instant) -> Effects {
        Effects { wake_driver: self.health.ask(now), ..Effects::default() }
    }

    /// The endpoint is degraded. Requests may start a second attempt, and the streams of a draining connection move.
    pub fn endpoint_degraded(&mut self) -> Effects {
        if let State::Draining { urgency, .. } = &mut self.state {
            *urgency = Some(DrainUrgency::Immediate);
        }
        Effects { notify_requests: true, ..Effects::default() }
    }

    /// Ends the connection if that is due.
    pub fn end_if_due(&mut self) -> Effects {
        let mut effects = Effects::default();
        if let Some((reason, cause)) = self.due_end() {
            self.enter(self.state.dead(), reason, cause, &mut effects);
        }
        effects
    }
}

/// Inputs from streams.
impl ConnectionMachine {
    /// Reserves a slot for one stream. The caller has checked [`Self::free_streams`].
    pub fn reserve(&mut self, long_running: bool, now: Instant) -> Stream {
        self.slots.take(long_running);
        Stream::new(long_running, now)
    }

    /// The request head was sent.
    pub fn opened(&mut self, stream: &mut Stream) {
        stream.phase = StreamPhase::Open;
        stream.awaits_head = true;
        self.waits.request_sent(stream.reserved_at);
        if !stream.long_running {
            stream.round = self.waits.enter_round();
        }
    }

    /// The response head has arrived. Its latency is a sample, except for a watch, whose head may wait for the first
    /// event.
    pub fn head_arrived(&mut self, stream: &mut Stream, now: Instant) {
        if self.end_wait(stream) && !stream.long_running {
            let latency = now.saturating_duration_since(stream.reserved_at);
            self.waits.observe_latency(latency, now);
        }
    }

    /// A response head arrived that says nothing about the load of the apiserver.
    pub fn head_arrived_without_sample(&mut self, stream: &mut Stream) {
        self.end_wait(stream);
    }

    /// A request whose response head may be late at `at` is notified then, as all that wait are: it needs no timer of its own,
    /// which would be set and cancelled for each request.
    pub fn notify_at(&mut self, at: Instant) -> Effects {
        Effects { wake_driver: self.waits.ask_notification(at), ..Effects::default() }
    }

    /// Pins an open stream, or removes the pin.
    pub fn set_pinned(&mut self, stream: &mut Stream, pinned: bool) {
        let (from, to) = if pinned {
            (StreamPhase::Open, StreamPhase::Pinned)
        } else {
            (StreamPhase::Pinned, StreamPhase::Open)
        };
        if stream.phase == from {
            stream.phase = to;
            self.slots.count_pinned(pinned);
        }
    }

    /// The response has proven the token of the request. The pool hands a connection with many such streams over
    /// ([`Self::is_mostly_proven`]).
    pub fn token_proven(&mut self, stream: &mut Stream) -> Effects {
        if std::mem::replace(&mut stream.proven, true) {
            return Effects::default();
        }
        self.slots.count_proven(true);
        Effects { notify_pool: self.is_mostly_proven(), ..Effects::default() }
    }

    /// The peer has ended the stream. Its slot is free as soon as it is given back.
    pub fn finished(&mut self, stream: &mut Stream) {
        self.set_pinned(stream, false);
        stream.phase = StreamPhase::Finished;
    }

    /// Gives the slot of a stream back. A second call has no effect.
    pub fn release(&mut self, stream: &mut Stream, now: Instant) -> Effects {
        let mut effects = Effects::default();
        if stream.phase == StreamPhase::Released {
            return effects;
        }
        self.set_pinned(stream, false);
        self.end_wait(stream);
        if std::mem::take(&mut stream.proven) {
            self.slots.count_proven(false);
        }
        let cancelled =
            stream.phase == StreamPhase::Open && !matches!(self.state, State::Dead { .. });
        stream.phase = StreamPhase::Released;
        // If the connection was full, requests may wait for this slot.
        effects.notify_pool = self.slots.give_back(stream.long_running, cancelled, now);
        effects.wake_driver = self.slots.open() == 0
            && matches!(self.state, State::Draining { .. } | State::Unresponsive { .. });
        effects
    }

    /// Ends the wait for a response head. Returns whether the request was waiting.
    fn end_wait(&mut self, stream: &mut Stream) -> bool {
        if !std::mem::take(&mut stream.awaits_head) {
            return false;
        }
        self.waits.wait_ended();
        if !stream.long_running {
            self.waits.leave_round(stream.round);
        }
        true
    }

    /// Begins a round of the search for slow response heads, an `interval` after the previous one. Returns whether a
    /// request has waited for its head for a whole number of intervals that is four times as long as a response
    /// usually takes, or for five. Each request counts once.
    pub fn has_slow_response_heads(&mut self, interval: Duration, now: Instant) -> bool {
        self.waits.has_slow_heads(interval, now)
    }
}

/// Queries.
impl ConnectionMachine {
    /// The present state.
    pub fn state(&self) -> ConnectionState {
        self.state.discriminant()
    }

    /// When it was taken into use.
    pub fn opened_at(&self) -> Instant {
        self.opened
    }

    /// When it last became suspect; also after it has left that state to drain or die. `None` while it is live, and if
    /// it has never been suspect.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.state.suspect_since()
    }

    /// Whether it was suspect and has become live again within `period`.
    pub fn has_recovered_within(&self, period: Duration, now: Instant) -> bool {
        self.recovered_at.is_some_and(|at| now.saturating_duration_since(at) < period)
    }

    /// When it began to drain. `None` once it is dead.
    pub fn draining_since(&self) -> Option<Instant> {
        self.state.draining_since()
    }

    /// How urgently streams that can move should leave; `None` if they may stay.
    pub fn drain_urgency(&self) -> Option<DrainUrgency> {
        self.state.urgency()
    }

    /// Whether its PINGs are answered.
    pub fn responsiveness(&self) -> Responsiveness {
        self.responsiveness
    }

    /// Why no response head can be expected: the path is lost, the apiserver is not ready, or the process has been stopped
    /// for too long. The second reason applies only to `safe` requests, which are sent elsewhere; the third one only to
    /// requests that must not be sent twice, because a safe one gets a second attempt on another connection before.
    pub fn no_response_reason(&self, safe: bool) -> Option<StateChangeReason> {
        match self.state {
            State::Unresponsive { reason, .. } => Some(reason),
            State::Draining { .. } if safe && self.drain_reason == Some(DrainReason::NotReady) => {
                Some(StateChangeReason::NotReady)
            }
            _ => (!safe && self.fails_unsafe_requests).then_some(StateChangeReason::ProcessStopped),
        }
    }

    /// When the next [`Self::check`] is due.
    pub fn wake_at(&self) -> Instant {
        let check_at = self.health.wake_at(self.waits.waiting_since());
        self.waits.notify_at().map_or(check_at, |at| at.min(check_at))
    }

    /// Whether the connection ends at the next [`Self::end_if_due`]: jackstay has closed it, or no stream is left and it
    /// takes no new ones.
    pub fn is_end_due(&self) -> bool {
        self.due_end().is_some()
    }

    /// Whether a PONG is expected.
    pub fn ping_outstanding(&self) -> bool {
        self.health.ping_outstanding()
    }

    /// The interval between two PINGs while the connection is idle.
    pub fn ping_interval(&self) -> Duration {
        self.health.ping_interval()
    }

    /// The smoothed round-trip time of PINGs.
    pub fn rtt(&self) -> Duration {
        self.health.rtt()
    }

    /// When bytes last arrived.
    pub fn last_received(&self) -> Instant {
        self.health.last_received()
    }

    /// Number of streams that can be opened now.
    pub fn free_streams(&self, now: Instant) -> usize {
        self.slots.free(now)
    }

    /// The lesser of the configured limit and the peer's.
    pub fn stream_limit(&self) -> usize {
        self.slots.limit()
    }

    /// Number of open streams.
    pub fn streams(&self) -> usize {
        self.slots.open()
    }

    /// Number of open streams that are watches.
    pub fn watches(&self) -> usize {
        self.slots.watches()
    }

    /// The largest number of streams that were open at once.
    pub fn peak_streams(&self) -> usize {
        self.slots.peak()
    }

    /// When the last open stream ended; `None` while a stream is open.
    pub fn idle_since(&self) -> Option<Instant> {
        self.slots.idle_since()
    }

    /// Whether most of its streams, without those that wait for a response, have had one that proves the token of
    /// the client.
    pub fn is_mostly_proven(&self) -> bool {
        self.slots.are_mostly_proven(self.waits.waiting())
    }

    /// Load for [`balance::pick_by_share`]: lower is better.
    pub fn cost(&self, now: Instant) -> f64 {
        balance::cost(self.slots.open(), self.waits.latency(now))
    }

    /// Whether a request has waited here for 50 ms without a byte arriving.
    pub fn has_waiting_request(&self, now: Instant) -> bool {
        self.waits.has_warning(self.last_received(), now)
    }

    fn due_end(&self) -> Option<(ChangeReason, Cause)> {
        match (self.state, self.close_requested) {
            (State::Dead { .. }, _) | (State::Live | State::Suspect { .. }, None) => None,
            (_, Some(reason)) => Some((ChangeReason::Drain(reason), Cause::Other)),
            _ if self.slots.open() > 0 => None,
            (State::Draining { .. }, None) => Some((ChangeReason::Drained, Cause::OrderlyEnd)),
            (State::Unresponsive { reason, .. }, None) => {
                Some((ChangeReason::Health(reason), Cause::Other))
            }
        }
    }

    fn goaway_means_shutdown(&self) -> bool {
        self.is_probe && !self.end_expected
    }

    fn significance(&self, to: ConnectionState, cause: Cause) -> Significance {
        // If jackstay closes the connection, nothing has failed.
        let failed = self.close_requested.is_none()
            && matches!(to, ConnectionState::Unresponsive | ConnectionState::Dead);
        match cause {
            _ if self.end_expected => Significance::Expected,
            Cause::OrderlyEnd => Significance::OrderlyEnd,
            Cause::ServerShutdown => Significance::ServerShutdown,
            Cause::Failure => Significance::Fault,
            Cause::Other if failed => Significance::Fault,
            Cause::Other => Significance::Notable,
        }
    }
}

/// Steps that the inputs have in common.
impl ConnectionMachine {
    /// Applies the verdict and the findings of a check.
    fn judge(&mut self, silence: &Silence, now: Instant, effects: &mut Effects) {
        let before = self.state();
        let verdict = self.health.verdict(before, silence, self.slots.has_pinned());
        let next = verdict.map_or(before, |(state, _)| state);
        let fails =
            next == ConnectionState::Unresponsive || self.health.process_is_stopped(silence);
        self.set_findings(self.health.responsiveness(silence), fails, effects);
        if let Some((to, reason)) = verdict {
            self.enter_by_evidence(to, reason, now, effects);
        }
        if let State::Draining { urgency, .. } = &mut self.state
            && self.health.is_late(silence)
            && urgency.replace(DrainUrgency::Immediate) != Some(DrainUrgency::Immediate)
        {
            effects.notify_requests = true;
        }
    }

    fn set_findings(&mut self, to: Responsiveness, fails_unsafe: bool, effects: &mut Effects) {
        let from = std::mem::replace(&mut self.responsiveness, to);
        if from != to && self.state().is_in_service() {
            effects.responsiveness = Some(ResponsivenessChange { from, to });
        }
        let became_silent = from != to && to == Responsiveness::Silent;
        let failed_before = std::mem::replace(&mut self.fails_unsafe_requests, fails_unsafe);
        effects.notify_requests |= became_silent || failed_before != fails_unsafe;
    }

    fn enter_by_evidence(
        &mut self,
        to: ConnectionState,
        reason: StateChangeReason,
        now: Instant,
        effects: &mut Effects,
    ) {
        let next = self.state.by_evidence(to, reason, now);
        self.enter(next, ChangeReason::Health(reason), Cause::Other, effects);
    }

    fn enter(&mut self, next: State, reason: ChangeReason, cause: Cause, effects: &mut Effects) {
        let (from, to) = (self.state(), next.discriminant());
        if from == ConnectionState::Dead {
            return;
        }
        self.state = next;
        let significance = self.significance(to, cause);
        effects.transition = Some(ConnectionTransition { from, to, reason, significance });
        effects.notify_requests = true;
        effects.notify_pool = true;
    }
}

#[cfg(test)]
mod tests;
