//! Whether the apiserver behind a suspect connection of the prober still answers: a new handshake races the verdict of
//! `SilenceDetector` of the core. The program examines only endpoints to which it passes connections through.

use std::time::{Duration, Instant};

use jackstay_core::connect::ConnectFailureKind;
use jackstay_core::connection::{ConnectionState, DrainReason};
use jackstay_core::endpoint_health::Observation;
use jackstay_core::probe::silence::SilenceDetector;

use super::connection::DialFor;
use super::{Io, Node, NodeTimer};
use crate::net::ConnectionId;

/// Limit of one handshake of an examination.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(3);
/// Pause after a refused handshake.
const HANDSHAKE_PAUSE: Duration = Duration::from_millis(200);

/// An examination of an endpoint.
#[derive(Debug)]
pub(super) struct Examination {
    suspect: ConnectionId,
    detector: SilenceDetector,
    last_received: Instant,
    /// The endpoint was reported.
    reported: bool,
    handshake: Option<ConnectionId>,
    /// When the next handshake begins, if none is in progress.
    handshake_at: Instant,
    /// For when a timer was started.
    armed_for: Option<Instant>,
}

impl Node {
    /// The prober's connection is suspect.
    pub(super) fn begin_examination(&mut self, io: &mut Io<'_>, at: usize, suspect: ConnectionId) {
        let now = io.s.now;
        if !self.settings.passthrough || self.endpoints[at].examination.is_some() {
            return;
        }
        self.endpoints[at].examination = Some(Examination {
            suspect,
            detector: SilenceDetector::new(now),
            last_received: now,
            reported: false,
            handshake: None,
            handshake_at: now,
            armed_for: None,
        });
        self.examine(io, at);
    }

    /// Looks at the suspect connection, and begins a handshake if none is in progress.
    pub(super) fn examine(&mut self, io: &mut Io<'_>, at: usize) {
        let now = io.s.now;
        let Some(examination) = &mut self.endpoints[at].examination else { return };
        let suspect = examination.suspect;
        let connection = self.upstreams.get(&suspect);
        if let Some(connection) = connection {
            examination.last_received = connection.machine.last_received();
        }
        let state = connection.map_or(ConnectionState::Dead, |one| one.machine.state());
        let is_reported = examination.reported;
        if state == ConnectionState::Live {
            self.end_examination(io, at);
            return self.observe(io, at, Observation::Responsive);
        }
        let endpoint = &mut self.endpoints[at];
        let is_replaced = endpoint.has_other_prober_connection(suspect);
        if is_replaced || is_reported && state == ConnectionState::Dead {
            return self.end_examination(io, at);
        }
        let Some(examination) = &mut endpoint.examination else { return };
        if now >= examination.detector.check_at {
            let is_dead = examination.detector.is_dead(examination.last_received, now);
            examination.reported |= is_dead;
            if is_dead && !is_reported {
                self.observe(io, at, Observation::Unresponsive("no PONG and no new handshake"));
            }
        }
        self.begin_handshake(io, at);
        if let Some(examination) = &mut self.endpoints[at].examination {
            let check_at = examination.detector.check_at;
            if examination.armed_for.replace(check_at) != Some(check_at) {
                self.start_timer(io.s, check_at, NodeTimer::Examine(at));
            }
        }
    }

    fn begin_handshake(&mut self, io: &mut Io<'_>, at: usize) {
        let Some(examination) = &self.endpoints[at].examination else { return };
        if examination.handshake.is_none() && io.s.now >= examination.handshake_at {
            let handshake = self.dial(io, at, DialFor::Examination);
            if let Some(examination) = &mut self.endpoints[at].examination {
                examination.handshake = Some(handshake);
            }
        }
    }

    /// A handshake has failed. After a pause the next one begins, with the next check.
    pub(super) fn handshake_failed(
        &mut self,
        io: &mut Io<'_>,
        at: usize,
        kind: ConnectFailureKind,
    ) {
        if let Some(examination) = &mut self.endpoints[at].examination {
            let is_timeout = kind == ConnectFailureKind::Timeout;
            let pause = if is_timeout { Duration::ZERO } else { HANDSHAKE_PAUSE };
            examination.handshake = None;
            examination.handshake_at = io.s.now + pause;
        }
    }

    /// The handshake has succeeded: the suspect connection is closed, and the new one takes its place.
    pub(super) fn handshake_succeeded(&mut self, io: &mut Io<'_>, at: usize, new: ConnectionId) {
        let Some(examination) = self.endpoints[at].examination.take() else {
            return self.input(io, new, |machine| machine.close(DrainReason::ProbingEnded));
        };
        self.input(io, examination.suspect, |machine| machine.close(DrainReason::Superseded));
        self.replace_prober_connection(io, at, new);
    }

    fn end_examination(&mut self, io: &mut Io<'_>, at: usize) {
        let ended = self.endpoints[at].examination.take();
        if let Some(handshake) = ended.and_then(|examination| examination.handshake) {
            self.abandon_dial(io, handshake);
        }
    }
}
