//! The health of a flow on which no PING can be sent. The bytes of a tunnel or a passed connection are
//! not jackstay's, so the kernel's TCP statistics are the only evidence.
//!
//! | bytes that wait to be acknowledged | dead when |
//! |---|---|
//! | sent | none was acknowledged for 2.25 s, in which six retransmissions or segments were sent; or for 2.5 s with four |
//! | not sent, although the peer's window is open: the local netfilter drops them | the same, with three probes |
//! | not sent, since the peer's window is closed | four window probes in a row are unanswered (six on a lossy path, two on correlated loss), one second for each and 250 ms more |
//! | none | nothing new was received for 2.7 s (4.5 s on a lossy path, 2.15 s on correlated loss), and eight keepalives are unanswered |
//!
//! While no bytes wait, the kernel sends a keepalive after each second without a segment. Once one is
//! unanswered for 200 ms, a new one is requested every 100 ms. Linux answers such probes only twice a
//! second (`tcp_invalid_ratelimit`), so 2.7 s have room for four answers: at 1.0, 1.5, 2.1 and 2.6 s. At
//! 5 % packet loss each way all four are lost once in 80,000 seconds of an idle flow, which is too often
//! for a thousand flows. A late answer refutes a suspicion; refuted suspicions are frequent on such a
//! path, and after [`LOSSY_AFTER`] of them seven answers must be missing.
//!
//! Packet loss hits flows independently. Several flows that miss two answers each at the same time, and
//! are a quarter of all flows of an endpoint, show that its path is broken ([`CorrelatedLoss`]).
//!
//! Data that the peer retransmits was not acknowledged: packets to the peer are lost, although those
//! from the peer arrive. So retransmitted data is no evidence of life; an acknowledgement alone and new
//! data are. But it delays the kernel's keepalives, so then two of these are enough.
//!
//! A peer whose window is closed is alive but full: the kernel probes it at growing intervals, and each
//! answer resets the count of probes. Its loss is detected late, after 3.3 to 4.5 s, since Linux has no
//! way to probe sooner: with bytes in the send queue it sends no keepalives (`tcp_keepalive_timer`);
//! window probes are at least a second apart (`TCP_RTO_MAX_MS`, Linux 6.15; before that up to two
//! minutes); `TCP_USER_TIMEOUT` also kills peers that answer; and `TCP_REPAIR` needs `CAP_NET_ADMIN`. Two
//! unanswered probes are all that 3 s have room for, and 5 % packet loss each way causes that every two
//! minutes. A stopped process counts as alive: its kernel answers.
//!
//! A check that runs late gives no verdict, once in each silence, so that a paused machine does not blame
//! its peers. After that the verdicts count, however late the checks are, since the kernel counts
//! whether or not the process is scheduled.
//!
//! The table is for a flow that can be replaced. The tunnel of an exec, an attach, a port-forward or a
//! copy cannot, and has `tunnel_dead_after` ([`FlowThresholds::tunnel`]). It is recognised only where TLS
//! ends at jackstay (`terminate`); in passthrough a tunnel is like any other flow.
//!
//! Except for [`FlowHealthCheck::died`], this module sends nothing and reads no clock.

mod thresholds;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, sleep};

pub use self::thresholds::{
    CLIENT, CORRELATED_LOSS_SERVER, FlowThresholds, LOSSY_AFTER, LOSSY_SERVER, SERVER,
};
use crate::net::sockets::tcp_info::TcpInfo;
use crate::net::sockets::tracked_stream::StreamObserver;

/// The pause between retransmissions of a full stream and between window probes grows: the last one
/// has this long to be answered.
const LAST_ANSWER: Duration = Duration::from_millis(250);
/// Probes for bytes that were not sent although the window is open: at 200 ms, doubling, the third is
/// out after 1.4 s.
const UNSENT_PROBES: u8 = 3;
/// The same on a kernel that does not tell an open window from a closed one.
const BLIND_PROBES: u8 = 4;
/// Retransmitted data resets the kernel's count of unanswered keepalives. Then this many segments
/// must have been sent since new data arrived (acknowledgements of the retransmissions, each of which
/// was lost as well, and keepalives), and [`LATEST_PROBES`] keepalives since the last retransmission.
const RETRANSMISSION_SEGMENTS: u32 = 5;
const LATEST_PROBES: u8 = 2;
/// The kernel sends a keepalive after a second of silence; its answer is late after this.
const LATE_ANSWER: Duration = Duration::from_millis(1_200);
/// From then on a new keepalive is requested this often.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// A flow is stalled after this: two answers are missing, or seven retransmissions unanswered.
const STALLED_AFTER: Duration = Duration::from_millis(1_900);
/// Pause between two checks of a flow on which bytes wait.
const PENDING_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// A check later than this may show that this process was not scheduled.
const LATE: Duration = Duration::from_millis(250);
/// How long verdicts are withheld after that, so that received segments are counted first.
const GRACE: Duration = Duration::from_millis(150);
/// The kernel's times are whole ticks of its clock, at most 10 ms long.
const ROUNDING: Duration = Duration::from_millis(20);
/// Pause between two checks of an idle client.
const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The longest pause between two checks.
pub const MAX_CHECK_INTERVAL: Duration = IDLE_CHECK_INTERVAL;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowDeath {
    /// Sent bytes are not acknowledged.
    Unacknowledged,
    /// Probes are not answered.
    Unanswered,
}

impl FlowDeath {
    /// Text for the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unacknowledged => "sent bytes are not acknowledged",
            Self::Unanswered => "keepalives are not answered",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowDecision {
    /// The flow is dead.
    Dead(FlowDeath),
    /// Check again later; with `probe`, ask the kernel for a keepalive now.
    Again {
        after: Duration,
        /// [`crate::net::sockets::tcp_options::send_keepalive_probe`].
        probe: bool,
    },
}

/// The health of one side of a flow.
#[derive(Debug, Clone, Copy)]
pub struct FlowHealth {
    /// Acknowledged bytes, and segments sent, at `waiting_since`.
    acked: u64,
    segments: u32,
    waiting_since: Option<Instant>,
    /// When the last segment arrived that was no retransmission.
    last_segment: Instant,
    /// [`TcpInfo::fresh_segments`], and segments sent, at that time.
    fresh: u32,
    sent: u32,
    /// The last value of [`TcpInfo::probes`], and when it changed.
    probes: (u8, Instant),
    /// Keepalives were requested, or the kernel's own were not answered in time, and none has been
    /// answered since.
    suspects: bool,
    refuted: bool,
    stalled: bool,
    /// When the next check is due.
    due: Instant,
    /// The start of the silence in which a check was late.
    late_check_in: Option<Instant>,
}

impl FlowHealth {
    /// The health of a new connection; to be checked at once.
    pub fn new(now: Instant) -> Self {
        Self {
            acked: 0,
            segments: 0,
            waiting_since: None,
            last_segment: now,
            fresh: 0,
            sent: 0,
            probes: (0, now),
            suspects: false,
            refuted: false,
            stalled: false,
            due: now,
            late_check_in: None,
        }
    }

    /// Bytes were written. Returns when to check at the latest.
    pub fn wrote(&mut self, now: Instant) -> Instant {
        if self.waiting_since.is_none() {
            self.waiting_since = Some(now);
            self.due = self.due.min(now + PENDING_CHECK_INTERVAL);
        }
        self.due
    }

    /// Weighs the kernel's statistics.
    pub fn check(&mut self, info: &TcpInfo, rules: &FlowThresholds, now: Instant) -> FlowDecision {
        let late = now.saturating_duration_since(self.due) > LATE;
        self.note_segment(info, now);
        if info.probes != self.probes.0 {
            self.probes = (info.probes, now);
        }
        if !info.has_pending() {
            self.waiting_since = None;
        } else if info.bytes_acked != self.acked || self.waiting_since.is_none() {
            self.waiting_since = Some(now);
            self.segments = info.data_segments_sent;
        }
        self.acked = info.bytes_acked;
        let silent = now.saturating_duration_since(self.last_segment);
        let stuck = self.waiting_since.map(|since| now.saturating_duration_since(since));
        let silence = self.waiting_since.or(Some(self.last_segment));
        let decision = if late && std::mem::replace(&mut self.late_check_in, silence) != silence {
            FlowDecision::Again { after: GRACE, probe: false }
        } else if let Some(stuck) = stuck {
            let segments = info.data_segments_sent.wrapping_sub(self.segments);
            let probed = now.saturating_duration_since(self.probes.1);
            decide_pending(info, rules, stuck, segments, probed)
        } else {
            decide_idle(info, rules, silent, info.segments_out.wrapping_sub(self.sent))
        };
        self.stalled = match stuck {
            Some(stuck) => stuck >= STALLED_AFTER && info.is_window_closed() == Some(false),
            None => silent >= STALLED_AFTER,
        };
        if self.suspects && silent < LATE_ANSWER {
            self.suspects = false;
            self.refuted = true;
        }
        if let FlowDecision::Again { after, probe } = decision {
            let late = silent >= LATE_ANSWER && info.probes > 1;
            self.suspects |= probe || (late && info.is_window_closed() == Some(true));
            self.due = now + after;
        }
        decision
    }

    /// Notes when a segment arrived that was no retransmission.
    fn note_segment(&mut self, info: &TcpInfo, now: Instant) {
        let fresh = info.fresh_segments();
        let silent = if fresh == self.fresh { info.last_data_recv } else { info.silent() };
        self.fresh = fresh;
        // The kernel rounds its times: the same segment may seem to be 20 ms newer.
        if let Some(arrived) =
            now.checked_sub(silent).filter(|at| *at > self.last_segment + ROUNDING)
        {
            self.last_segment = arrived;
            self.sent = info.segments_out;
        }
    }

    /// Whether a suspicion was refuted since the last call: a packet was lost on a working path.
    pub fn was_refuted(&mut self) -> bool {
        std::mem::take(&mut self.refuted)
    }

    /// Whether it has been stuck or silent for so long that independent packet loss seldom explains
    /// it. A peer whose window is closed does not count.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }
}

/// Bytes wait, none was acknowledged for `stuck` while `segments` were sent, and the last probe was
/// sent `probed` ago.
fn decide_pending(
    info: &TcpInfo,
    rules: &FlowThresholds,
    stuck: Duration,
    segments: u32,
    probed: Duration,
) -> FlowDecision {
    let enough = u32::from(rules.retransmits) * 3 / 2;
    let dead = stuck >= rules.stuck_after
        && match info.is_window_closed() {
            Some(true) => {
                let a_second_each = Duration::from_secs(rules.window_probes.into());
                info.silent() >= rules.stuck_after.max(a_second_each)
                    && info.probes >= rules.window_probes
                    && probed >= LAST_ANSWER
            }
            Some(false) if info.unacked == 0 => info.probes >= UNSENT_PROBES || segments >= enough,
            None if info.unacked == 0 => {
                info.silent() >= rules.stuck_after && info.probes >= BLIND_PROBES
            }
            Some(false) | None => {
                u32::from(info.retransmits).max(segments) >= enough
                    || (info.retransmits >= rules.retransmits
                        && stuck >= rules.stuck_after + LAST_ANSWER)
            }
        };
    if dead {
        return FlowDecision::Dead(FlowDeath::Unacknowledged);
    }
    FlowDecision::Again {
        after: next_check(rules.stuck_after.saturating_sub(stuck), PENDING_CHECK_INTERVAL),
        probe: false,
    }
}

/// No bytes wait, nothing new was received for `silent`, and `sent` segments were sent since.
fn decide_idle(
    info: &TcpInfo,
    rules: &FlowThresholds,
    silent: Duration,
    sent: u32,
) -> FlowDecision {
    let Some(idle_after) = rules.idle_after else {
        return FlowDecision::Again { after: IDLE_CHECK_INTERVAL, probe: false };
    };
    if silent >= idle_after {
        let again = sent > info.probes.into();
        if info.probes >= rules.unanswered
            || (again && sent >= RETRANSMISSION_SEGMENTS && info.probes >= LATEST_PROBES)
        {
            return FlowDecision::Dead(FlowDeath::Unanswered);
        }
    }
    if silent >= LATE_ANSWER {
        let after = next_check(idle_after.saturating_sub(silent), PROBE_INTERVAL);
        return FlowDecision::Again { after, probe: rules.requests_probes };
    }
    // Just after the answer to the next keepalive is late.
    let after = LATE_ANSWER.saturating_sub(silent) + Duration::from_millis(20);
    FlowDecision::Again { after, probe: false }
}

/// Pause until the next check: a verdict is due when its time is over, not at the first check after.
fn next_check(rest: Duration, pause: Duration) -> Duration {
    if rest.is_zero() { pause } else { rest.min(pause).max(Duration::from_millis(20)) }
}

/// Whether so many flows of an endpoint are stalled at once that its path is broken, rather than each
/// of them unlucky. At 5 % packet loss each way, one flow in a hundred is stalled at any time.
#[derive(Debug, Clone, Copy, Default)]
pub struct CorrelatedLoss {
    /// Flows that are stalled now.
    stalled: usize,
    broken_until: Option<Instant>,
}

impl CorrelatedLoss {
    /// The least number of stalled flows.
    const FLOWS: usize = 3;
    /// One flow in this many must be stalled.
    const ONE_IN: usize = 4;
    /// The first flows to die do not count as stalled any more, so the finding holds for this long.
    const HOLDS: Duration = Duration::from_secs(1);

    /// A flow became stalled, or recovered.
    pub fn changed(&mut self, was: bool, is: bool) {
        self.stalled = (self.stalled + usize::from(is)).saturating_sub(usize::from(was));
    }

    /// Whether the path to an endpoint with so many flows is broken.
    pub fn is_path_broken(&mut self, flows: usize, now: Instant) -> bool {
        if self.stalled >= Self::FLOWS && self.stalled * Self::ONE_IN >= flows {
            self.broken_until = Some(now + Self::HOLDS);
        }
        self.broken_until.is_some_and(|until| now < until)
    }
}

/// Detects that the TCP flow of an upgrade is dead.
#[derive(Debug, Clone)]
pub struct FlowHealthCheck {
    pub(super) observer: StreamObserver,
    /// Once the request is answered the flow is a tunnel and has `tunnel_dead_after`; before, it has
    /// the thresholds of other requests.
    pub(super) answered: Rc<Cell<bool>>,
    pub(super) tunnel_dead_after: Duration,
}

impl FlowHealthCheck {
    /// Waits until the flow is dead; returns the reason.
    pub async fn died(&self) -> &'static str {
        let mut health = FlowHealth::new(Instant::now());
        let mut refuted = 0;
        loop {
            refuted += u32::from(health.was_refuted());
            let rules = match self.answered.get() {
                true => FlowThresholds::tunnel(self.tunnel_dead_after),
                false if refuted >= LOSSY_AFTER => LOSSY_SERVER,
                false => SERVER,
            };
            let pause = match self.observer.tcp_info() {
                // Without evidence (a kernel before 4.6) there is no verdict.
                Err(_) => IDLE_CHECK_INTERVAL,
                Ok(info) => match health.check(&info, &rules, Instant::now()) {
                    FlowDecision::Dead(death) => return death.as_str(),
                    FlowDecision::Again { after, probe } => {
                        if probe {
                            let _ = self.observer.send_keepalive_probe();
                        }
                        after
                    }
                },
            };
            sleep(pause).await;
        }
    }
}

#[cfg(test)]
#[path = "flow_health_tests.rs"]
mod tests;
