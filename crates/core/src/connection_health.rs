//! The health of one connection: a pure state machine over evidence and time.
//!
//! A wrong suspicion costs little, but a wrong verdict closes a working connection. So suspicion and death
//! have thresholds of their own. A third threshold applies to streams that no other connection can
//! continue:
//!
//! | state | entered when | effect | left when |
//! |---|---|---|---|
//! | live | the first PONG arrived | takes new streams | a row below applies |
//! | suspect | a PING is outstanding for longer than max(4·srtt + 4·rttvar, 100 ms), and in that time no frame was received or no pending byte was acknowledged | no new streams; safe requests are repeated on another connection | a PONG arrives: live |
//! | draining | GOAWAY, removed endpoint or replaced certificate; or the process is stopped: no PONG, no frame and no upload progress for 5 s while the kernel answers | no new streams; requests that wait for a response head and must not be sent twice fail 7 s after the PING if the process is stopped | its last stream ends: dead |
//! | unresponsive | the path is lost (below) and a stream is pinned | no new streams; requests that wait for a response head fail, and streams that can move leave | a PONG arrives: draining; the last pinned stream ends: dead |
//! | dead | the path is lost and no stream is pinned; or the path has been lost for `tunnel_dead_after`; or no frame arrived for 20 s, whatever TCP shows (`tunnel_dead_after` if that is longer and a stream is pinned) | the connection is closed | never |
//!
//! A stream is pinned while the rest of its response cannot be requested from another connection.
//! Examples are a log that is followed, a response whose body has begun, and a watch that can be neither
//! resumed nor ended cleanly.
//!
//! The path is lost when a PING is outstanding for `dead_after` without evidence of life in one of the two
//! directions. Inbound evidence is any byte or any segment (`tcpi_last_ack_recv`). Outbound evidence is an
//! acknowledgement of sent bytes (`tcpi_bytes_acked`). A peer whose window is closed acknowledges no bytes.
//! Then the answers to the kernel's window probes are the evidence for both directions, and the path is
//! lost when three probes in a row are unanswered (`tcpi_probes`). When the window opens, the time without
//! an acknowledgement starts again, because bytes that could not be sent could not be acknowledged. A peer
//! whose window stays closed for 20 s is dead.
//!
//! A check that runs late withholds all verdicts for 300 ms, once for each PING, so that a process without
//! CPU time or a paused machine does not declare its peers dead. Later verdicts count even if the checks
//! are late: the driver reads the socket until it is empty before each check, and the kernel counts
//! silence whether or not the process is scheduled.
//!
//! This module sends nothing and reads no clock. The driver of the connection supplies the evidence and carries
//! out the decisions.

mod rtt;
mod silence;
mod state;
mod thresholds;

use std::time::{Duration, Instant};

pub use self::rtt::Rtt;
use self::silence::{Silence, window_answers_probes};
pub use self::state::{ConnectionState, Responsiveness, StateChangeReason};
use self::thresholds::{
    CHECK_INTERVAL, LATE_CHECK, PING_AFTER_SILENCE, PROBE_AFTER, SILENT_AFTER, SILENT_DEATH,
    STOPPED_AFTER, VERDICT_PAUSE,
};
pub use self::thresholds::{HEAD_WAIT, Thresholds, WRITE_PATIENCE};
use crate::tcp_info::TcpInfo;

/// The state that a connection enters, and the reason.
pub type StateChange = (ConnectionState, StateChangeReason);

/// The input of a check.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evidence {
    /// The kernel's TCP statistics, if they can be read.
    pub tcp: Option<TcpInfo>,
    /// Since when at least one request waits for its response head.
    pub waiting_since: Option<Instant>,
    /// Whether a stream is pinned.
    pub pinned: bool,
}

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Send a PING now.
    pub ping: bool,
    /// Request a keepalive probe from the kernel now.
    pub probe: bool,
    /// Move the streams that can move: the path is lost, or the connection drains and its PING is late.
    pub move_streams: bool,
    /// The new state and the reason, if the state has changed.
    pub change: Option<StateChange>,
    /// When to check again at the latest.
    pub wake_at: Instant,
}

/// The health of one connection.
#[derive(Debug)]
pub struct ConnectionHealth {
    limits: Thresholds,
    grid: Instant,
    state: ConnectionState,
    rtt: Rtt,
    /// When the outstanding PING was sent.
    ping_sent: Option<Instant>,
    next_ping: Instant,
    /// When bytes last arrived.
    last_received: Instant,
    /// Bytes arrived since the last PING was sent or its PONG arrived.
    delivering: bool,
    /// The last known `tcpi_bytes_acked`, and when it last grew or no byte was pending.
    acked: u64,
    acked_at: Instant,
    /// When the peer's window was last closed with no probe unanswered.
    window_answered_at: Instant,
    /// When `acked` last grew while more bytes were pending: an upload makes progress.
    progress_at: Instant,
    /// When the next check is due.
    wake_at: Instant,
    /// Verdicts are withheld until then, because a check was late.
    withhold_until: Instant,
    /// Whether a check was late since the outstanding PING was sent.
    was_late: bool,
    findings: ConnectionFindings,
}

/// Findings about a connection in addition to its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConnectionFindings {
    /// Whether its PINGs are answered.
    pub responsiveness: Responsiveness,
    /// Requests that wait for a response head and must not be sent twice fail: the path is lost, or the
    /// process has been stopped for more than [`STOPPED_AFTER`] and [`WRITE_PATIENCE`].
    pub fails_unsafe_requests: bool,
}

impl ConnectionHealth {
    /// The health of a live connection. `first_rtt` is the round-trip time of its first PING. `grid` is the
    /// time from which the times of its PINGs are counted ([`Thresholds::next_ping`]).
    pub fn new(limits: Thresholds, first_rtt: Duration, grid: Instant, now: Instant) -> Self {
        let mut rtt = Rtt::default();
        let is_doubtful = rtt.sample(first_rtt);
        let next_ping = if is_doubtful { now } else { limits.next_ping(grid, now) };
        Self {
            limits,
            grid,
            state: ConnectionState::Live,
            rtt,
            ping_sent: None,
            next_ping,
            last_received: now,
            delivering: false,
            acked: 0,
            acked_at: now,
            window_answered_at: now,
            progress_at: now,
            wake_at: next_ping,
            withhold_until: now,
            was_late: false,
            findings: ConnectionFindings::default(),
        }
    }

    /// Whether a PING is outstanding; h2 allows one at a time.
    pub fn ping_outstanding(&self) -> bool {
        self.ping_sent.is_some()
    }

    /// What the last check has found in addition to the state.
    pub fn findings(&self) -> ConnectionFindings {
        self.findings
    }

    /// The smoothed round-trip time.
    pub fn rtt(&self) -> Duration {
        self.rtt.smoothed().unwrap_or_default()
    }

    /// Records that bytes arrived. Returns when to check at the latest.
    pub fn received(&mut self, now: Instant) -> Instant {
        self.last_received = now;
        self.delivering = true;
        self.wake_at.min(now + PING_AFTER_SILENCE)
    }

    /// Records that the PONG of the outstanding PING arrived. Returns the round-trip time and the change of
    /// state: a suspect connection is live again, and an unresponsive one drains, because streams have
    /// left it.
    pub fn pong(&mut self, now: Instant) -> (Option<Duration>, Option<StateChange>) {
        let rtt = self.ping_sent.take().map(|sent| now.saturating_duration_since(sent));
        let is_doubtful = rtt.is_some_and(|rtt| self.rtt.sample(rtt));
        self.last_received = now;
        self.findings = ConnectionFindings::default();
        self.delivering = false;
        self.next_ping = if is_doubtful { now } else { self.limits.next_ping(self.grid, now) };
        let next = match self.state {
            ConnectionState::Suspect => Some(ConnectionState::Live),
            ConnectionState::Unresponsive => Some(ConnectionState::Draining),
            ConnectionState::Live | ConnectionState::Draining | ConnectionState::Dead => None,
        };
        (rtt, next.map(|state| self.enter(state, StateChangeReason::Pong)))
    }

    /// Records that a drain has begun (GOAWAY, endpoint removed, certificate rotated).
    pub fn drain(&mut self) {
        if self.state.is_in_service() {
            self.state = ConnectionState::Draining;
        }
    }

    /// Weighs the evidence and decides.
    pub fn check(&mut self, evidence: Evidence, now: Instant) -> Decision {
        let mut decision =
            Decision { ping: false, probe: false, move_streams: false, change: None, wake_at: now };
        match self.ping_sent {
            None => {
                let due = self.ping_due(&evidence);
                if now >= due {
                    decision.ping = true;
                    self.ping_sent = Some(now);
                    self.delivering = false;
                    self.was_late = false;
                    self.acked_at = now;
                    if let Some(tcp) = evidence.tcp {
                        self.acked = tcp.bytes_acked;
                    }
                    decision.wake_at = now + self.suspect_after();
                } else {
                    decision.wake_at = due;
                }
            }
            Some(sent) => {
                let late = now.saturating_duration_since(self.wake_at) >= LATE_CHECK;
                if late && !std::mem::replace(&mut self.was_late, true) {
                    self.withhold_until = now + VERDICT_PAUSE;
                }
                let silence = self.weigh(sent, evidence.tcp.as_ref(), now);
                if now >= self.withhold_until {
                    decision.change = self.derive(&silence, evidence.pinned);
                    self.findings = self.derive_findings(&silence);
                    decision.move_streams = match self.state {
                        ConnectionState::Unresponsive => true,
                        ConnectionState::Draining => self.is_late(&silence),
                        _ => false,
                    };
                }
                // The kernel resets a connection after 127 unanswered probes, and an unresponsive
                // connection may stay open for longer than that takes.
                decision.probe = !silence.pending
                    && silence.ping_age >= PROBE_AFTER
                    && !matches!(self.state, ConnectionState::Unresponsive | ConnectionState::Dead);
                let suspect_at = sent + self.suspect_after();
                decision.wake_at = if now < suspect_at { suspect_at } else { now + CHECK_INTERVAL };
            }
        }
        self.wake_at = decision.wake_at;
        decision
    }

    fn suspect_after(&self) -> Duration {
        // A connection must be suspect before it is dead.
        let adaptive = || self.rtt.suspect_after().min(self.limits.dead_after / 2);
        self.limits.suspect_after.unwrap_or_else(adaptive)
    }

    /// When the next PING is due.
    fn ping_due(&self, evidence: &Evidence) -> Instant {
        let mut due = self.next_ping;
        if self.delivering {
            due = due.min(self.last_received + PING_AFTER_SILENCE);
        }
        if let Some(since) = evidence.waiting_since {
            due = due.min(since.max(self.last_received) + HEAD_WAIT);
        }
        due
    }

    /// Measures for how long which evidence of life has been missing.
    fn weigh(&mut self, sent: Instant, tcp: Option<&TcpInfo>, now: Instant) -> Silence {
        let since = |then| now.saturating_duration_since(then);
        let mut inbound = since(self.last_received);
        let (mut pending, mut window_answers) = (false, false);
        if let Some(tcp) = tcp {
            inbound = inbound.min(tcp.silent());
            pending = tcp.has_pending();
            let grew = tcp.bytes_acked > self.acked;
            if grew || !pending {
                self.acked = tcp.bytes_acked;
                self.acked_at = now;
            }
            if grew && pending {
                self.progress_at = now;
            }
            window_answers = pending && window_answers_probes(tcp, self.limits.dead_after);
            if window_answers && tcp.probes == 0 {
                self.window_answered_at = now;
            }
        }
        let ping_age = since(sent);
        let without_frame = ping_age.min(since(self.last_received));
        Silence {
            ping_age,
            inbound,
            outbound: since(self.acked_at.max(self.window_answered_at)),
            unacknowledged: since(self.acked_at),
            without_frame,
            without_progress: without_frame.min(since(self.progress_at)),
            pending,
            window_answers,
        }
    }

    /// Derives the state; returns the change, if there is one.
    fn derive(&mut self, silence: &Silence, pinned: bool) -> Option<StateChange> {
        if self.state == ConnectionState::Dead {
            return None;
        }
        let Thresholds { dead_after, tunnel_dead_after, .. } = self.limits;
        if let Some(reason) = silence.lost_for(dead_after) {
            if !pinned || silence.lost_for(tunnel_dead_after).is_some() {
                return Some(self.enter(ConnectionState::Dead, reason));
            }
            if self.state != ConnectionState::Unresponsive {
                return Some(self.enter(ConnectionState::Unresponsive, reason));
            }
        }
        let silent_death = if pinned { SILENT_DEATH.max(tunnel_dead_after) } else { SILENT_DEATH };
        if silence.without_progress >= silent_death {
            return Some(self.enter(ConnectionState::Dead, StateChangeReason::NoFrames));
        }
        if silence.window_answers && silence.ping_age.min(silence.unacknowledged) >= silent_death {
            return Some(self.enter(ConnectionState::Dead, StateChangeReason::WindowClosed));
        }
        if self.state.is_in_service() && silence.without_progress >= STOPPED_AFTER {
            return Some(self.enter(ConnectionState::Draining, StateChangeReason::ProcessStopped));
        }
        if self.state == ConnectionState::Live && self.is_late(silence) {
            return Some(self.enter(ConnectionState::Suspect, StateChangeReason::PingLate));
        }
        None
    }

    /// Whether the PING is late.
    fn is_late(&self, silence: &Silence) -> bool {
        silence.unanswered_for(self.suspect_after())
    }

    fn derive_findings(&self, silence: &Silence) -> ConnectionFindings {
        let quiet = silence.ping_age.min(silence.inbound.max(silence.outbound));
        let silent_after = SILENT_AFTER.min(self.limits.dead_after / 2);
        let path_silent = !silence.window_answers && quiet >= silent_after;
        let responsiveness = if path_silent || silence.without_progress >= silent_after {
            Responsiveness::Silent
        } else if silence.unanswered_for(PROBE_AFTER) {
            Responsiveness::Unanswered
        } else {
            Responsiveness::Responds
        };
        ConnectionFindings {
            responsiveness,
            fails_unsafe_requests: self.state == ConnectionState::Unresponsive
                || silence.without_progress >= STOPPED_AFTER + WRITE_PATIENCE,
        }
    }

    fn enter(&mut self, state: ConnectionState, reason: StateChangeReason) -> StateChange {
        self.state = state;
        (state, reason)
    }
}

#[cfg(test)]
mod tests;
