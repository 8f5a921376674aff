//! Judges the life of one connection, as a pure function of evidence and time.
//!
//! Two thresholds, because a wrong suspicion is cheap and a wrong death is not:
//!
//! | state | enters when | left when |
//! |---|---|---|
//! | live | the first PONG came | |
//! | suspect | a PING is out longer than max(4·srtt + 4·rttvar, 100 ms), with nothing heard or nothing of ours acknowledged meanwhile | a PONG comes: live |
//! | draining | GOAWAY, or no PONG and no frame for 5 s while the kernel answers: a stopped process | never |
//! | dead | a PING is out for `dead_after` with no evidence of life in one direction; or 20 s without any frame whatever TCP says | never |
//!
//! Evidence of life inbound is any byte or any segment (`tcpi_last_ack_recv`); outbound it is our
//! bytes being acknowledged (`tcpi_bytes_acked`). A verdict reached while our own timers ran late
//! is not trusted: a process that was starved of CPU must not blame its peers.
//!
//! This module sends nothing and reads no clock. [`super::connection`] feeds it and does what it
//! says.

use std::time::Duration;

use tokio::time::Instant;

use crate::net::tcp_info::TcpInfo;

/// Least time before a PING counts as late, whatever the RTT: scheduling noise of a busy node.
const SUSPECT_FLOOR: Duration = Duration::from_millis(100);
/// A request that waited this long without a byte arriving on its connection is worth a PING.
pub const HEAD_WAIT: Duration = Duration::from_millis(100);
/// A connection that was delivering and fell silent for this long is worth a PING.
const SILENCE: Duration = Duration::from_millis(400);
/// How often the evidence is looked at while a PING is out.
const LOOK: Duration = Duration::from_millis(100);
/// Without a sign of life in one direction for this long, or half of `dead_after`, nothing more is
/// sent there for want of anything better: five retransmissions of a thin stream are out by then.
const DARK_AFTER: Duration = Duration::from_secs(1);
/// From here on the kernel is asked to probe the path while a PING is out and all is acknowledged.
const PROBE_AFTER: Duration = Duration::from_millis(500);
/// Without PONG and frames for this long, while its kernel answers, a process is stopped.
const STOPPED_AFTER: Duration = Duration::from_secs(5);
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
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Life {
    /// Takes streams.
    Live,
    /// Its PING is late: takes no new streams, what waits on it may be hedged.
    Suspect,
    /// Takes no new streams; running ones finish.
    Draining,
    /// Closed.
    Dead,
}

impl Life {
    /// Name in logs, metrics and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Dead => "dead",
        }
    }
}

/// Why a connection changed its state, for the log line and the status page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A PONG came.
    Pong,
    /// A PING is late.
    PingLate,
    /// Nothing at all arrives.
    NothingArrives,
    /// Nothing of ours is acknowledged.
    NothingAcknowledged,
    /// The kernel answers, the process does not.
    ProcessStopped,
    /// No frame for a long time, although something acknowledges.
    NoFrames,
}

impl Reason {
    /// Words for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pong => "PONG received",
            Self::PingLate => "PING is late",
            Self::NothingArrives => "PING unanswered and no packet arrives",
            Self::NothingAcknowledged => "PING unanswered and nothing we send is acknowledged",
            Self::ProcessStopped => "kernel answers but no PONG: the process is stopped",
            Self::NoFrames => "no HTTP/2 frame, although TCP is acknowledged",
        }
    }
}

/// What is known at the moment of a look.
#[derive(Debug, Clone, Copy, Default)]
pub struct Evidence {
    /// The kernel's knowledge.
    pub tcp: Option<TcpInfo>,
    /// Since when a request waits for its response head, if one does.
    pub waiting_since: Option<Instant>,
}

/// What to do after a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// Send a PING now.
    pub ping: bool,
    /// Ask the kernel for a keepalive probe now.
    pub probe: bool,
    /// It takes no new streams, and now its PING is late too or its process stopped: what can go
    /// on elsewhere should.
    pub leave: bool,
    /// The state has changed to this, for this reason.
    pub change: Option<(Life, Reason)>,
    /// Look again at the latest then.
    pub wake_at: Instant,
}

/// Smoothed round-trip time and its variance (RFC 6298 section 2).
#[derive(Debug, Clone, Copy, Default)]
pub struct Rtt {
    smoothed: Option<(f64, f64)>,
}

impl Rtt {
    /// Takes a measurement in.
    pub fn sample(&mut self, rtt: Duration) {
        let r = rtt.as_secs_f64();
        self.smoothed = Some(match self.smoothed {
            None => (r, r / 2.0),
            Some((srtt, var)) => (0.875 * srtt + 0.125 * r, 0.75 * var + 0.25 * (srtt - r).abs()),
        });
    }

    /// The smoothed value, once there is one.
    pub fn smoothed(&self) -> Option<Duration> {
        self.smoothed.map(|(srtt, _)| Duration::from_secs_f64(srtt))
    }

    /// max(4·srtt + 4·rttvar, 100 ms).
    pub fn suspect_after(&self) -> Duration {
        let (srtt, var) = self.smoothed.unwrap_or_default();
        Duration::from_secs_f64(4.0 * (srtt + var)).max(SUSPECT_FLOOR)
    }
}

/// The judge of one connection.
#[derive(Debug)]
pub struct ConnectionHealth {
    limits: Thresholds,
    life: Life,
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
    /// When the caller promised to look next.
    wake_at: Instant,
    /// No verdict before this: our own timers ran late.
    distrust_until: Instant,
    /// See [`Self::is_dark`].
    dark: bool,
}

impl ConnectionHealth {
    /// Starts with the RTT of the first PING, which made the connection live.
    pub fn new(limits: Thresholds, first_rtt: Duration, now: Instant) -> Self {
        let mut rtt = Rtt::default();
        rtt.sample(first_rtt);
        Self {
            limits,
            life: Life::Live,
            rtt,
            ping: None,
            next_ping: now + limits.ping_interval,
            heard: now,
            delivering: false,
            acked: 0,
            acked_at: now,
            wake_at: now + limits.ping_interval,
            distrust_until: now,
            dark: false,
        }
    }

    /// The state.
    pub fn life(&self) -> Life {
        self.life
    }

    /// Whether a PING is out; HTTP/2 stacks allow one at a time.
    pub fn ping_out(&self) -> bool {
        self.ping.is_some()
    }

    /// Whether there has been no sign of life in one of the two directions for so long that it will
    /// hardly come back. No verdict: its state says nothing of it.
    pub fn is_dark(&self) -> bool {
        self.dark
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

    /// The PONG of the outstanding PING arrived. Returns the change, if it makes a suspect live.
    pub fn pong(&mut self, now: Instant) -> (Option<Duration>, Option<(Life, Reason)>) {
        let rtt = self.ping.take().map(|sent| now.saturating_duration_since(sent));
        if let Some(rtt) = rtt {
            // A PONG that was held up by a stopped process or by loss says little about the path:
            // taken whole, three seconds once would hide the next death for a minute.
            self.rtt.sample(rtt.min(self.suspect_after() * 2));
        }
        self.heard = now;
        self.dark = false;
        self.delivering = false;
        self.next_ping = now + self.limits.ping_interval;
        let change = (self.life == Life::Suspect).then(|| self.enter(Life::Live, Reason::Pong));
        (rtt, change)
    }

    /// The connection is to take no new streams (GOAWAY, endpoint removed, certificate rotated).
    pub fn drain(&mut self) {
        if self.life != Life::Dead {
            self.life = Life::Draining;
        }
    }

    /// Looks at the evidence, decides, and says when to look again.
    pub fn look(&mut self, evidence: Evidence, now: Instant) -> Decision {
        if now.saturating_duration_since(self.wake_at) >= LATE {
            self.distrust_until = now + GRACE;
        }
        let mut decision =
            Decision { ping: false, probe: false, leave: false, change: None, wake_at: now };
        match self.ping {
            None => {
                let due = self.ping_due(&evidence);
                if now >= due {
                    decision.ping = true;
                    self.ping = Some(now);
                    self.delivering = false;
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
                let silent = self.weigh(evidence.tcp.as_ref(), now);
                decision.change = self.judge(sent, &silent, now);
                self.note_darkness(sent, &silent, now);
                decision.leave = self.life == Life::Draining && self.is_late(sent, &silent, now);
                decision.probe = !silent.pending
                    && now.saturating_duration_since(sent) >= PROBE_AFTER
                    && self.life != Life::Dead;
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

    fn weigh(&mut self, tcp: Option<&TcpInfo>, now: Instant) -> Silence {
        let mut inbound = now.saturating_duration_since(self.heard);
        let mut pending = false;
        if let Some(tcp) = tcp {
            inbound = inbound.min(tcp.last_ack_recv).min(tcp.last_data_recv);
            pending = tcp.has_pending();
            if tcp.bytes_acked > self.acked || !pending {
                self.acked = tcp.bytes_acked;
                self.acked_at = now;
            }
        }
        Silence { inbound, outbound: now.saturating_duration_since(self.acked_at), pending }
    }

    fn judge(&mut self, sent: Instant, silent: &Silence, now: Instant) -> Option<(Life, Reason)> {
        let out = now.saturating_duration_since(sent);
        if self.life == Life::Dead || now < self.distrust_until {
            return None;
        }
        let frames = out.min(now.saturating_duration_since(self.heard));
        let dead_after = self.limits.dead_after;
        if out >= dead_after && silent.inbound >= dead_after {
            return Some(self.enter(Life::Dead, Reason::NothingArrives));
        }
        if out >= dead_after && silent.outbound >= dead_after {
            return Some(self.enter(Life::Dead, Reason::NothingAcknowledged));
        }
        if frames >= SILENT_DEATH {
            return Some(self.enter(Life::Dead, Reason::NoFrames));
        }
        if frames >= STOPPED_AFTER && self.life != Life::Draining {
            return Some(self.enter(Life::Draining, Reason::ProcessStopped));
        }
        if self.life == Life::Live && self.is_late(sent, silent, now) {
            return Some(self.enter(Life::Suspect, Reason::PingLate));
        }
        None
    }

    /// Whether the PING is late, and nothing else shows life in both directions.
    fn is_late(&self, sent: Instant, silent: &Silence, now: Instant) -> bool {
        let late = self.suspect_after();
        let out = now.saturating_duration_since(sent);
        let frames = out.min(now.saturating_duration_since(self.heard));
        now >= self.distrust_until && out >= late && (frames >= late || silent.outbound >= late)
    }

    /// A look that came late leaves it as it was.
    fn note_darkness(&mut self, sent: Instant, silent: &Silence, now: Instant) {
        if now >= self.distrust_until {
            let out = now.saturating_duration_since(sent);
            let quiet = out.min(silent.inbound.max(silent.outbound));
            self.dark = quiet >= DARK_AFTER.min(self.limits.dead_after / 2);
        }
    }

    fn enter(&mut self, life: Life, reason: Reason) -> (Life, Reason) {
        self.life = life;
        (life, reason)
    }
}

/// For how long each direction has shown no life.
struct Silence {
    inbound: Duration,
    outbound: Duration,
    pending: bool,
}

#[cfg(test)]
#[path = "health_tests.rs"]
mod tests;
