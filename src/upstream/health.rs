//! Judges the life of one connection, as a pure function of evidence and time.
//!
//! Two thresholds, because a wrong suspicion is cheap and a wrong death is not; and a third one for
//! what no other connection can go on with:
//!
//! | state | enters when | meanwhile | left when |
//! |---|---|---|---|
//! | live | the first PONG came | takes new streams | |
//! | suspect | a PING is out longer than max(4·srtt + 4·rttvar, 100 ms), with nothing heard or nothing of ours acknowledged meanwhile | no new streams; reads are sent a second time elsewhere | a PONG comes: live |
//! | draining | GOAWAY; or no PONG, no frame and no progress for 5 s while the kernel answers: a stopped process | no new streams; 7 s after the PING, requests end that wait for a response head and must not be sent twice | its last stream ends: dead |
//! | unresponsive | the path is lost (below) and streams are pinned | no new streams; requests that wait for a response head end, everything that can move moves | a PONG comes: draining; nothing is pinned any more: dead |
//! | dead | the path is lost and no stream is pinned; or it has been lost for `tunnel_dead_after`; or 20 s without any frame, whatever TCP says | closed | never |
//!
//! A stream is pinned while its response is under way and cannot be asked for elsewhere: a log that
//! is followed, a long answer in its midst, a watch that can neither be resumed nor end cleanly.
//!
//! The path is lost when a PING is out for `dead_after` without evidence of life in one of the two
//! directions. Evidence inbound is any byte or any segment (`tcpi_last_ack_recv`); outbound it is
//! our bytes being acknowledged (`tcpi_bytes_acked`). A peer whose window is closed acknowledges no
//! bytes, so there the kernel's window probes are the evidence, for both directions: it lives unless
//! three in a row stay unanswered (`tcpi_probes`). When the window opens, the time without an
//! acknowledgement begins anew: what could not be sent could not be acknowledged. If it stays closed
//! for 20 s, the peer is dead.
//!
//! A look that comes late withholds all verdicts for 300 ms, so that a process that was starved of
//! CPU, or a machine that was paused, does not blame its peers: once for each PING. PreviousFailure that the
//! verdicts count, however late the looks are. The driver reads the socket until it is empty before
//! each look, and the kernel counts its silence whether or not we are scheduled.
//!
//! This module sends nothing and reads no clock. [`super::connection`] feeds it and does what it
//! says.

mod rtt;
mod silence;
mod state;

use std::time::Duration;

use tokio::time::Instant;

pub use self::rtt::Rtt;
use self::silence::{Silence, window_answers_probes};
pub use self::state::{ConnectionState, Reason};
use crate::net::sockets::tcp_info::TcpInfo;

/// A request that waited this long without a byte arriving on its connection is worth a PING.
pub const HEAD_WAIT: Duration = Duration::from_millis(100);
/// A connection that was delivering and fell silent for this long is worth a PING.
const SILENCE: Duration = Duration::from_millis(400);
/// How often the evidence is looked at while a PING is out.
const LOOK: Duration = Duration::from_millis(100);
/// Without a sign of life in one direction for this long, or half of `dead_after`, nothing more is
/// sent there for want of anything better: five retransmissions of a thin stream are out by then.
const DARK_AFTER: Duration = Duration::from_secs(1);
/// From here on the kernel is asked to probe the path while a PING is out and all is acknowledged,
/// and the endpoint hears that this connection does not answer. Three transmissions of a PING are
/// out by then: where one packet in twenty is lost each way, all are lost once in a thousand PINGs.
const PROBE_AFTER: Duration = Duration::from_millis(500);
/// Without PONG and frames for this long, while its kernel answers, a process is stopped.
const STOPPED_AFTER: Duration = Duration::from_secs(5);
/// So long after that, requests end that must not be sent twice: kubelet gives a lease update up
/// after 10 s, leader election after 10 s.
pub const WRITE_PATIENCE: Duration = Duration::from_secs(2);
/// Without PONG and frames for this long a connection is dead even if something acknowledges: a
/// TCP load balancer does so for a dead apiserver.
const SILENT_DEATH: Duration = Duration::from_secs(20);
/// A timer that fires this late says that we were not scheduled.
const LATE: Duration = Duration::from_millis(100);
/// How long verdicts are withheld after that, so that what waits in our sockets is read first.
const GRACE: Duration = Duration::from_millis(300);

/// What the configuration says about the life of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// A PING goes out at least this often.
    pub ping_interval: Duration,
    /// Fixed time after which a PING is late; `None` adapts to the RTT.
    pub suspect_after: Option<Duration>,
    /// A PING out this long without evidence of life is death.
    pub dead_after: Duration,
    /// The same for a connection with pinned streams.
    pub tunnel_dead_after: Duration,
}

/// What is known at the moment of a look.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evidence {
    /// The kernel's knowledge.
    pub tcp: Option<TcpInfo>,
    /// Since when a request waits for its response head, if one does.
    pub waiting_since: Option<Instant>,
    /// A stream on it is pinned.
    pub pinned: bool,
}

/// What to do after a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Send a PING now.
    pub ping: bool,
    /// Ask the kernel for a keepalive probe now.
    pub probe: bool,
    /// It takes no new streams, and now its PING is late too, its process stopped or its path
    /// lost: what can go on elsewhere should.
    pub leave: bool,
    /// The state has changed to this, for this reason.
    pub change: Option<(ConnectionState, Reason)>,
    /// Look again at the latest then.
    pub wake_at: Instant,
}

/// The judge of one connection.
#[derive(Debug)]
pub struct ConnectionHealth {
    limits: Thresholds,
    life: ConnectionState,
    rtt: Rtt,
    /// When the outstanding PING went out.
    ping: Option<Instant>,
    next_ping: Instant,
    /// When bytes last arrived.
    heard: Instant,
    /// Bytes other than a PONG arrived since the last PING.
    delivering: bool,
    /// Bytes of ours that were acknowledged, and when that number last grew or nothing was pending.
    acked: u64,
    acked_at: Instant,
    /// When the peer's window was last seen closed with every probe of it answered.
    window_answered: Instant,
    /// When it last grew while more was pending: an upload goes on.
    progress: Instant,
    /// When the caller promised to look next.
    wake_at: Instant,
    /// No verdict before this: our own timers ran late.
    distrust_until: Instant,
    /// They did so while this PING was out.
    distrusted: bool,
    outlook: Outlook,
}

/// What is known of a connection beside its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outlook {
    /// There has been no sign of life in one of the two directions for so long that it will hardly
    /// come back. No verdict: its state says nothing of it.
    pub dark: bool,
    /// A PING has been out for 500 ms without a sign of life. Lost packets alone seldom make it so.
    pub unanswered: bool,
    /// Requests that wait here for a response head, and must not be sent twice, have waited long
    /// enough: the path is lost, or the process was stopped and did not come back.
    pub ends_writes: bool,
}

impl ConnectionHealth {
    /// Starts with the RTT of the first PING, which made the connection live.
    pub fn new(limits: Thresholds, first_rtt: Duration, now: Instant) -> Self {
        let mut rtt = Rtt::default();
        rtt.sample(first_rtt);
        Self {
            limits,
            life: ConnectionState::Live,
            rtt,
            ping: None,
            next_ping: now + limits.ping_interval,
            heard: now,
            delivering: false,
            acked: 0,
            acked_at: now,
            window_answered: now,
            progress: now,
            wake_at: now + limits.ping_interval,
            distrust_until: now,
            distrusted: false,
            outlook: Outlook::default(),
        }
    }

    /// The state.
    pub fn state(&self) -> ConnectionState {
        self.life
    }

    /// Whether a PING is out; HTTP/2 stacks allow one at a time.
    pub fn ping_out(&self) -> bool {
        self.ping.is_some()
    }

    /// What is known of it beside its state.
    pub fn outlook(&self) -> Outlook {
        self.outlook
    }

    /// The smoothed round-trip time.
    pub fn rtt(&self) -> Duration {
        self.rtt.smoothed().unwrap_or_default()
    }

    /// Bytes arrived. Returns when to look at the latest.
    pub fn heard(&mut self, now: Instant) -> Instant {
        self.heard = now;
        self.delivering = true;
        self.wake_at.min(now + SILENCE)
    }

    /// The PONG of the outstanding PING arrived. Returns the change: a suspect connection is live
    /// again; one that was unresponsive has been left by what could leave it, and drains.
    pub fn pong(&mut self, now: Instant) -> (Option<Duration>, Option<(ConnectionState, Reason)>) {
        let rtt = self.ping.take().map(|sent| now.saturating_duration_since(sent));
        if let Some(rtt) = rtt {
            // A PONG that was held up by a stopped process or by loss says little about the path:
            // taken whole, three seconds once would hide the next death for a minute.
            self.rtt.sample(rtt.min(self.suspect_after() * 2));
        }
        self.heard = now;
        self.outlook = Outlook::default();
        self.delivering = false;
        self.next_ping = now + self.limits.ping_interval;
        let change = match self.life {
            ConnectionState::Suspect => Some(self.enter(ConnectionState::Live, Reason::Pong)),
            ConnectionState::Unresponsive => {
                Some(self.enter(ConnectionState::Draining, Reason::Pong))
            }
            ConnectionState::Live | ConnectionState::Draining | ConnectionState::Dead => None,
        };
        (rtt, change)
    }

    /// The connection is to take no new streams (GOAWAY, endpoint removed, certificate rotated).
    pub fn drain(&mut self) {
        if matches!(self.life, ConnectionState::Live | ConnectionState::Suspect) {
            self.life = ConnectionState::Draining;
        }
    }

    /// Looks at the evidence, decides, and says when to look again.
    pub fn look(&mut self, evidence: Evidence, now: Instant) -> Decision {
        let mut decision =
            Decision { ping: false, probe: false, leave: false, change: None, wake_at: now };
        match self.ping {
            None => {
                let due = self.ping_due(&evidence);
                if now >= due {
                    decision.ping = true;
                    self.ping = Some(now);
                    self.delivering = false;
                    self.distrusted = false;
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
                if late && !std::mem::replace(&mut self.distrusted, late) {
                    self.distrust_until = now + GRACE;
                }
                let silence = self.weigh(sent, evidence.tcp.as_ref(), now);
                if now >= self.distrust_until {
                    decision.change = self.judge(&silence, evidence.pinned);
                    self.outlook = self.look_ahead(&silence);
                    decision.leave = match self.life {
                        ConnectionState::Draining => self.is_late(&silence),
                        life => life == ConnectionState::Unresponsive,
                    };
                }
                // The kernel gives a connection up after 127 probes: not before we do.
                decision.probe = !silence.pending
                    && silence.out >= PROBE_AFTER
                    && !matches!(self.life, ConnectionState::Unresponsive | ConnectionState::Dead);
                let suspect_at = sent + self.suspect_after();
                decision.wake_at = if now < suspect_at { suspect_at } else { now + LOOK };
            }
        }
        self.wake_at = decision.wake_at;
        decision
    }

    fn suspect_after(&self) -> Duration {
        // A suspicion that is no earlier than death is none.
        let adaptive = || self.rtt.suspect_after().min(self.limits.dead_after / 2);
        self.limits.suspect_after.unwrap_or_else(adaptive)
    }

    fn ping_due(&self, evidence: &Evidence) -> Instant {
        let mut due = self.next_ping;
        if self.delivering {
            due = due.min(self.heard + SILENCE);
        }
        if let Some(since) = evidence.waiting_since {
            due = due.min(since.max(self.heard) + HEAD_WAIT);
        }
        due
    }

    fn weigh(&mut self, sent: Instant, tcp: Option<&TcpInfo>, now: Instant) -> Silence {
        let since = |then| now.saturating_duration_since(then);
        let mut inbound = since(self.heard);
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
        let out = since(sent);
        let frames = out.min(since(self.heard));
        Silence {
            out,
            inbound,
            outbound: since(self.acked_at.max(self.window_answered)),
            unacknowledged: since(self.acked_at),
            frames,
            stopped: frames.min(since(self.progress)),
            pending,
            window_answers,
        }
    }

    fn judge(&mut self, silence: &Silence, pinned: bool) -> Option<(ConnectionState, Reason)> {
        if self.life == ConnectionState::Dead {
            return None;
        }
        let Thresholds { dead_after, tunnel_dead_after, .. } = self.limits;
        if let Some(reason) = silence.lost_for(dead_after) {
            if !pinned || silence.lost_for(tunnel_dead_after).is_some() {
                return Some(self.enter(ConnectionState::Dead, reason));
            }
            if self.life != ConnectionState::Unresponsive {
                return Some(self.enter(ConnectionState::Unresponsive, reason));
            }
        }
        let last = if pinned { SILENT_DEATH.max(tunnel_dead_after) } else { SILENT_DEATH };
        if silence.stopped >= last {
            return Some(self.enter(ConnectionState::Dead, Reason::NoFrames));
        }
        if silence.window_answers && silence.out.min(silence.unacknowledged) >= last {
            return Some(self.enter(ConnectionState::Dead, Reason::WindowClosed));
        }
        let takes_streams = matches!(self.life, ConnectionState::Live | ConnectionState::Suspect);
        if takes_streams && silence.stopped >= STOPPED_AFTER {
            return Some(self.enter(ConnectionState::Draining, Reason::ProcessStopped));
        }
        if self.life == ConnectionState::Live && self.is_late(silence) {
            return Some(self.enter(ConnectionState::Suspect, Reason::PingLate));
        }
        None
    }

    /// Whether the PING is late, and nothing else shows life in both directions.
    fn is_late(&self, silence: &Silence) -> bool {
        silence.unanswered_for(self.suspect_after())
    }

    fn look_ahead(&self, silence: &Silence) -> Outlook {
        let quiet = silence.out.min(silence.inbound.max(silence.outbound));
        let dark_after = DARK_AFTER.min(self.limits.dead_after / 2);
        Outlook {
            dark: !silence.window_answers && quiet >= dark_after,
            unanswered: silence.unanswered_for(PROBE_AFTER),
            ends_writes: self.life == ConnectionState::Unresponsive
                || silence.stopped >= STOPPED_AFTER + WRITE_PATIENCE,
        }
    }

    fn enter(&mut self, life: ConnectionState, reason: Reason) -> (ConnectionState, Reason) {
        self.life = life;
        (life, reason)
    }
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;
