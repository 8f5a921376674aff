//! The health of one connection: a pure function of evidence and time.
//!
//! A wrong suspicion costs little; a wrong verdict closes a working connection. So each has a threshold
//! of its own, and a third one applies to streams that no other connection can continue:
//!
//! | state | entered when | meanwhile | left when |
//! |---|---|---|---|
//! | live | the first PONG arrived | takes new streams | |
//! | suspect | a PING is outstanding for longer than max(4·srtt + 4·rttvar, 100 ms), and meanwhile nothing was received or nothing sent was acknowledged | no new streams; safe requests are repeated on another connection | a PONG arrives: live |
//! | draining | GOAWAY; or no PONG, no frame and no progress for 5 s while the kernel answers: the process is stopped | no new streams; 7 s after the PING, requests fail that wait for a response head and must not be sent twice | its last stream ends: dead |
//! | unresponsive | the path is lost (below) and streams are pinned | no new streams; requests that wait for a response head fail, streams that can move do | a PONG arrives: draining; no stream is pinned any more: dead |
//! | dead | the path is lost and no stream is pinned; or it has been lost for `tunnel_dead_after`; or no frame for 20 s, whatever TCP shows | closed | never |
//!
//! A stream is pinned while the rest of its response cannot be requested from another connection: a
//! log that is followed, a long response in the middle, a watch that can be neither resumed nor
//! ended cleanly.
//!
//! The path is lost when a PING is outstanding for `dead_after` without evidence of life in one of
//! the two directions. Inbound evidence is any byte or any segment (`tcpi_last_ack_recv`). Outbound
//! evidence is an acknowledgement of sent bytes (`tcpi_bytes_acked`). A peer whose window is closed
//! acknowledges no bytes; there the kernel's window probes are the evidence for both directions, and
//! the path is lost when three in a row are unanswered (`tcpi_probes`). When the window opens, the
//! time without an acknowledgement starts again, since bytes that could not be sent could not be
//! acknowledged. A peer whose window stays closed for 20 s is dead.
//!
//! A check that runs late withholds all verdicts for 300 ms, once for each PING, so that a process
//! without CPU or a paused machine does not blame its peers. After that the verdicts count, however
//! late the checks are: the driver reads the socket until it is empty before each check, and the
//! kernel counts silence whether or not the process is scheduled.
//!
//! This module sends nothing and reads no clock. [`super::connection`] supplies evidence and executes
//! decisions.

mod rtt;
mod silence;
mod state;

use std::time::Duration;

use tokio::time::Instant;

pub use self::rtt::Rtt;
use self::silence::{Silence, window_answers_probes};
pub use self::state::{ConnectionState, StateChangeReason};
use crate::config;
use crate::net::sockets::tcp_info::TcpInfo;

/// A request that waits this long without a byte arriving on its connection triggers a PING.
pub const HEAD_WAIT: Duration = Duration::from_millis(100);
/// A connection that received bytes and then none for this long triggers a PING.
const PING_AFTER_SILENCE: Duration = Duration::from_millis(400);
/// Pause between two checks while a PING is outstanding.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Without evidence of life in one direction for this long, or half of `dead_after`, a connection is
/// not used even where no other is left: five retransmissions of a thin stream are out by then.
const PATH_UNRESPONSIVE_AFTER: Duration = Duration::from_secs(1);
/// From this age of a PING on the kernel is asked to probe the path if everything sent is
/// acknowledged, and the endpoint counts the connection as unanswered. Three transmissions of the
/// PING are out by then: at 5 % packet loss each way, all are lost once in a thousand PINGs.
const PROBE_AFTER: Duration = Duration::from_millis(500);
/// A process is stopped if its kernel answers, but no PONG and no frame arrives for this long.
const STOPPED_AFTER: Duration = Duration::from_secs(5);
/// This long after that, requests fail that must not be sent twice: the lease updates of kubelet and
/// of leader election have a timeout of 10 s.
pub const WRITE_PATIENCE: Duration = Duration::from_secs(2);
/// Without PONG and frames for this long a connection is dead even if its bytes are acknowledged: a
/// TCP load balancer acknowledges on behalf of a dead apiserver.
const SILENT_DEATH: Duration = Duration::from_secs(20);
/// A timer that fires this late shows that the process was not scheduled.
const LATE: Duration = Duration::from_millis(100);
/// How long verdicts are withheld after that, so that received bytes are read first.
const GRACE: Duration = Duration::from_millis(300);

/// The state that a connection enters, and the reason.
pub type StateChange = (ConnectionState, StateChangeReason);

/// Configured thresholds of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Longest pause between two PINGs.
    pub ping_interval: Duration,
    /// Fixed time after which a PING is late; `None` adapts to the RTT.
    pub suspect_after: Option<Duration>,
    /// A PING outstanding this long without evidence of life means that the path is lost.
    pub dead_after: Duration,
    /// A connection with pinned streams is closed once its path is lost for this long.
    pub tunnel_dead_after: Duration,
}

impl Thresholds {
    /// Those of a configuration.
    pub fn of(config: &config::Health) -> Self {
        Self {
            ping_interval: config.ping_interval,
            suspect_after: config.suspect_after,
            dead_after: config.dead_after,
            tunnel_dead_after: config.tunnel_dead_after,
        }
    }
}

/// Input of a check.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evidence {
    /// The kernel's view of the TCP connection, if it is known.
    pub tcp: Option<TcpInfo>,
    /// Since when a request waits for its response head, if any does.
    pub waiting_since: Option<Instant>,
    /// A stream on it is pinned.
    pub pinned: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Send a PING now.
    pub ping: bool,
    /// Ask the kernel for a keepalive probe now.
    pub probe: bool,
    /// Streams that can move should leave now: the connection takes no new streams, and its PING is
    /// late, its process stopped or its path lost.
    pub leave: bool,
    /// The state has changed to this, for this reason.
    pub change: Option<StateChange>,
    /// When to check again at the latest.
    pub wake_at: Instant,
}

#[derive(Debug)]
pub struct ConnectionHealth {
    limits: Thresholds,
    state: ConnectionState,
    rtt: Rtt,
    /// When the outstanding PING was sent.
    ping_sent: Option<Instant>,
    next_ping: Instant,
    /// When bytes last arrived.
    last_received: Instant,
    /// Bytes other than a PONG arrived since the last PING.
    delivering: bool,
    /// Acknowledged bytes, and when that number last grew or nothing was pending.
    acked: u64,
    acked_at: Instant,
    /// When the peer's window was last closed with every probe answered.
    window_answered: Instant,
    /// When `acked` last grew while more was pending: an upload makes progress.
    progress: Instant,
    /// When the next check is due.
    wake_at: Instant,
    /// Verdicts are withheld until then, since a check was late.
    withhold_until: Instant,
    /// A check was late since the outstanding PING was sent.
    withheld: bool,
    findings: ConnectionFindings,
}

/// Findings about a connection in addition to its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConnectionFindings {
    /// One of the two directions has shown no evidence of life for so long that a request sent now would
    /// most likely be lost.
    pub path_unresponsive: bool,
    /// A PING is outstanding for 500 ms without evidence of life. Packet loss alone rarely causes it.
    pub ping_unanswered: bool,
    /// Requests that wait for a response head and must not be sent twice fail: the path is lost, or the
    /// process has been stopped for more than [`STOPPED_AFTER`] and [`WRITE_PATIENCE`].
    pub fails_unsafe_requests: bool,
}

impl ConnectionHealth {
    /// A live connection with the round-trip time of its first PING.
    pub fn new(limits: Thresholds, first_rtt: Duration, now: Instant) -> Self {
        let mut rtt = Rtt::default();
        rtt.sample(first_rtt);
        Self {
            limits,
            state: ConnectionState::Live,
            rtt,
            ping_sent: None,
            next_ping: now + limits.ping_interval,
            last_received: now,
            delivering: false,
            acked: 0,
            acked_at: now,
            window_answered: now,
            progress: now,
            wake_at: now + limits.ping_interval,
            withhold_until: now,
            withheld: false,
            findings: ConnectionFindings::default(),
        }
    }

    /// Whether a PING is outstanding; h2 allows one at a time.
    pub fn ping_outstanding(&self) -> bool {
        self.ping_sent.is_some()
    }

    pub fn findings(&self) -> ConnectionFindings {
        self.findings
    }

    /// The smoothed round-trip time.
    pub fn rtt(&self) -> Duration {
        self.rtt.smoothed().unwrap_or_default()
    }

    /// Bytes arrived. Returns when to check at the latest.
    pub fn received(&mut self, now: Instant) -> Instant {
        self.last_received = now;
        self.delivering = true;
        self.wake_at.min(now + PING_AFTER_SILENCE)
    }

    /// The PONG of the outstanding PING arrived. Returns its round-trip time and the change of state:
    /// a suspect connection is live again; an unresponsive one drains, since its streams have moved.
    pub fn pong(&mut self, now: Instant) -> (Option<Duration>, Option<StateChange>) {
        let rtt = self.ping_sent.take().map(|sent| now.saturating_duration_since(sent));
        if let Some(rtt) = rtt {
            // A PONG delayed by a stopped process or by loss says little about the path: taken
            // whole, one sample of 3 s would delay the next suspicion for a minute.
            self.rtt.sample(rtt.min(self.suspect_after() * 2));
        }
        self.last_received = now;
        self.findings = ConnectionFindings::default();
        self.delivering = false;
        self.next_ping = now + self.limits.ping_interval;
        let change = match self.state {
            ConnectionState::Suspect => {
                Some(self.enter(ConnectionState::Live, StateChangeReason::Pong))
            }
            ConnectionState::Unresponsive => {
                Some(self.enter(ConnectionState::Draining, StateChangeReason::Pong))
            }
            ConnectionState::Live | ConnectionState::Draining | ConnectionState::Dead => None,
        };
        (rtt, change)
    }

    /// The connection takes no new streams (GOAWAY, endpoint removed, certificate rotated).
    pub fn drain(&mut self) {
        if matches!(self.state, ConnectionState::Live | ConnectionState::Suspect) {
            self.state = ConnectionState::Draining;
        }
    }

    /// Weighs the evidence and decides.
    pub fn check(&mut self, evidence: Evidence, now: Instant) -> Decision {
        let mut decision =
            Decision { ping: false, probe: false, leave: false, change: None, wake_at: now };
        match self.ping_sent {
            None => {
                let due = self.ping_due(&evidence);
                if now >= due {
                    decision.ping = true;
                    self.ping_sent = Some(now);
                    self.delivering = false;
                    self.withheld = false;
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
                let late = now.saturating_duration_since(self.wake_at) >= LATE;
                if late && !std::mem::replace(&mut self.withheld, late) {
                    self.withhold_until = now + GRACE;
                }
                let silence = self.weigh(sent, evidence.tcp.as_ref(), now);
                if now >= self.withhold_until {
                    decision.change = self.derive(&silence, evidence.pinned);
                    self.findings = self.derive_findings(&silence);
                    decision.leave = match self.state {
                        ConnectionState::Draining => self.is_late(&silence),
                        state => state == ConnectionState::Unresponsive,
                    };
                }
                // The kernel resets a connection after 127 unanswered probes; `unresponsive` may last
                // longer.
                decision.probe = !silence.pending
                    && silence.age >= PROBE_AFTER
                    && !matches!(self.state, ConnectionState::Unresponsive | ConnectionState::Dead);
                let suspect_at = sent + self.suspect_after();
                decision.wake_at = if now < suspect_at { suspect_at } else { now + CHECK_INTERVAL };
            }
        }
        self.wake_at = decision.wake_at;
        decision
    }

    fn suspect_after(&self) -> Duration {
        // A suspicion must precede the verdict.
        let adaptive = || self.rtt.suspect_after().min(self.limits.dead_after / 2);
        self.limits.suspect_after.unwrap_or_else(adaptive)
    }

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
                self.progress = now;
            }
            window_answers = pending && window_answers_probes(tcp, self.limits.dead_after);
            if window_answers && tcp.probes == 0 {
                self.window_answered = now;
            }
        }
        let age = since(sent);
        let without_frame = age.min(since(self.last_received));
        Silence {
            age,
            inbound,
            outbound: since(self.acked_at.max(self.window_answered)),
            unacknowledged: since(self.acked_at),
            without_frame,
            without_progress: without_frame.min(since(self.progress)),
            pending,
            window_answers,
        }
    }

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
        let last = if pinned { SILENT_DEATH.max(tunnel_dead_after) } else { SILENT_DEATH };
        if silence.without_progress >= last {
            return Some(self.enter(ConnectionState::Dead, StateChangeReason::NoFrames));
        }
        if silence.window_answers && silence.age.min(silence.unacknowledged) >= last {
            return Some(self.enter(ConnectionState::Dead, StateChangeReason::WindowClosed));
        }
        let takes_streams = matches!(self.state, ConnectionState::Live | ConnectionState::Suspect);
        if takes_streams && silence.without_progress >= STOPPED_AFTER {
            return Some(self.enter(ConnectionState::Draining, StateChangeReason::ProcessStopped));
        }
        if self.state == ConnectionState::Live && self.is_late(silence) {
            return Some(self.enter(ConnectionState::Suspect, StateChangeReason::PingLate));
        }
        None
    }

    /// Whether the PING is late without evidence of life in both directions.
    fn is_late(&self, silence: &Silence) -> bool {
        silence.unanswered_for(self.suspect_after())
    }

    fn derive_findings(&self, silence: &Silence) -> ConnectionFindings {
        let quiet = silence.age.min(silence.inbound.max(silence.outbound));
        let unresponsive_after = PATH_UNRESPONSIVE_AFTER.min(self.limits.dead_after / 2);
        ConnectionFindings {
            path_unresponsive: !silence.window_answers && quiet >= unresponsive_after,
            ping_unanswered: silence.unanswered_for(PROBE_AFTER),
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
#[path = "health_tests.rs"]
mod tests;
