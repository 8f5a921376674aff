//! The health of a flow: a TCP connection whose bytes jackstay forwards unchanged, so that it cannot
//! send a PING of its own. The only evidence is the kernel's TCP statistics.
//!
//! | bytes that wait for an acknowledgement | the flow is dead when |
//! |---|---|
//! | sent | no byte was acknowledged for 2.25 s, and in that time segments were sent often ([`Sent::is_often`]: at six times, or six at four times) or six retransmissions were; or no byte was acknowledged for 2.5 s and four retransmissions were sent; or no new segment was received for 2.7 s, and in that time segments were sent at eight times, or eight at four times |
//! | sent, and the kernel does not report the window (before Linux 5.4) | the same, but segments that were sent often count only if nothing was received for 2.25 s |
//! | not sent although the peer's window is open: the local netfilter drops them | no byte was acknowledged for 2.25 s, and three probes are unanswered or segments were sent often |
//! | not sent, and the kernel does not report the window (before Linux 5.4) | nothing was received for 2.25 s and four probes are unanswered |
//! | not sent because the peer's window is closed, or sent into a window that the peer has withdrawn | four window probes or retransmissions in a row are unanswered (six on a lossy path, two on correlated loss), nothing was received for as many seconds, and the last of them was sent 250 ms ago |
//! | none | no new segment was received for 2.7 s and eight keepalives are unanswered (4.5 s and eight on a lossy path, 2.15 s and five on correlated loss) |
//!
//! While no bytes wait, the kernel sends a keepalive after each second without a segment. When one has been
//! unanswered for 200 ms, jackstay requests a keepalive every 100 ms. Linux answers such probes only twice
//! a second (`tcp_invalid_ratelimit`), so at most four answers arrive within 2.7 s: at 1.0, 1.5, 2.1 and
//! 2.6 s. At 5 % packet loss each way an idle flow loses all four once in 80,000 s, which is too often for
//! a thousand flows. But such a path also loses single answers: the flow becomes suspect, and a late answer
//! refutes the suspicion. After [`LOSSY_AFTER`] refuted suspicions the path of the endpoint counts as lossy
//! ([`LossyPath`]), and seven answers must be missing.
//!
//! The times of the table are those of an endpoint whose answers take at most 200 ms. On a longer path each
//! missing answer takes longer to be missed, so [`FlowThresholds::at_distance`] adds to them. How long answers
//! take follows from the round-trip times that the kernel has measured on the flow ([`TcpInfo::answer_time`]).
//!
//! Segments that are sent together are lost together, for example because the path is interrupted for a second.
//! So a burst counts as one attempt, however many segments it has.
//!
//! Independent packet loss rarely affects several flows at once. The path of an endpoint is broken if three
//! of its flows, and at least a quarter of them, miss two answers each at the same time
//! ([`CorrelatedLoss`]).
//!
//! Data that the peer retransmits shows only that packets from the peer arrive. The packets to the peer may
//! be lost, so it does not receive acknowledgements. Only new data and pure acknowledgements are evidence
//! of life. Retransmitted data also delays the kernel's keepalives, so two unanswered ones suffice then.
//!
//! A peer whose window is closed is alive but accepts no data. The kernel probes the window at growing
//! intervals, and each answer resets its count of probes. The loss of such a peer is detected only after
//! 3.3 to 4.5 s, because Linux cannot probe it sooner: while bytes are in the send queue it sends no
//! keepalives (`tcp_keepalive_timer`); window probes are at least a second apart (`TCP_RTO_MAX_MS`, Linux
//! 6.15; before that up to two minutes); `TCP_USER_TIMEOUT` also closes connections to peers that answer;
//! and `TCP_REPAIR` needs `CAP_NET_ADMIN`. Only two window probes fit into 3 s, and at 5 % packet loss
//! each way two in a row are lost every two minutes. A stopped process counts as alive, because its kernel
//! answers. A peer without memory withdraws a window that was used already: the kernel then repeats the
//! unacknowledged bytes instead of probes, and counts neither (`tcp_retransmit_timer`), so the segments
//! that were sent into the silence are counted.
//!
//! A late check returns no verdict, but only once in each period of silence, so that a paused machine does
//! not declare its peers dead. Later checks return verdicts even if they are late, because the kernel
//! counts whether or not the process is scheduled.
//!
//! The table applies to flows that can be replaced. The tunnel of an exec, attach, port-forward or cp
//! cannot be replaced, and is dead after `tunnel_dead_after` ([`FlowThresholds::tunnel`]). Tunnels are
//! recognised only in mode `terminate`; in mode `passthrough` a tunnel is treated like any other flow.
//!
//! This module sends nothing and reads no clock: the caller passes `TCP_INFO` and the time.

mod correlated_loss;
mod lossy_path;
mod thresholds;

use std::time::{Duration, Instant};

pub use self::correlated_loss::CorrelatedLoss;
pub use self::lossy_path::{LOSSY_AFTER, LossyPath};
pub use self::thresholds::{CLIENT, CORRELATED_LOSS_SERVER, FlowThresholds, LOSSY_SERVER, SERVER};
use crate::tcp_info::TcpInfo;

/// Time for the peer to answer the last retransmission or window probe. The pauses between these grow, so
/// waiting for another one would take longer.
const LAST_PROBE_TIMEOUT: Duration = Duration::from_millis(250);
/// Number of unanswered probes that show that a flow is dead whose bytes were not sent although the window
/// is open. The first is sent after 200 ms and the pause doubles, so the third is sent after 1.4 s.
const UNSENT_PROBES: u8 = 3;
/// The same number on a kernel that does not report the window.
const PROBES_WITHOUT_WINDOW: u8 = 4;
/// Retransmitted data of the peer resets the kernel's count of unanswered keepalives. Then the flow is dead
/// if this number of segments (acknowledgements and keepalives) was sent since new data arrived, and
/// [`PROBES_AFTER_RETRANSMISSION`] keepalives since the last retransmission.
const RETRANSMISSION_SEGMENTS: u32 = 5;
const PROBES_AFTER_RETRANSMISSION: u8 = 2;
/// Silence after which the answer to the first keepalive is late on a path whose answers take no longer than 200 ms.
/// The kernel sends that keepalive after 1 s.
const ANSWER_LATE_AFTER: Duration = Duration::from_millis(1_200);
/// Time for an answer that the thresholds include.
const USUAL_ANSWER_TIME: Duration = Duration::from_millis(200);
/// What an answer may take longer than the path: clock ticks of both kernels, and a busy peer.
const ANSWER_SLACK: Duration = Duration::from_millis(50);
/// The longest additional time for an answer.
const MAX_DISTANCE: Duration = Duration::from_secs(1);
/// Pause between two requested keepalives while an answer is late.
const PROBE_INTERVAL: Duration = Duration::from_millis(100);
/// Silence after which a flow is stalled: two answers are missing, or seven retransmissions are unanswered.
const STALLED_AFTER: Duration = Duration::from_millis(1_900);
/// Pause between two checks of a flow with unacknowledged bytes.
const PENDING_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// A check is late if it runs this long after it was due: the process may not have been scheduled.
const LATE_CHECK: Duration = Duration::from_millis(250);
/// Time without a verdict after a late check, so that the kernel counts received segments first.
const VERDICT_PAUSE: Duration = Duration::from_millis(150);
/// Largest error of a difference of two kernel times, each rounded to a tick of at most 10 ms.
const ROUNDING: Duration = Duration::from_millis(20);
/// Pause between two checks of an idle client.
pub const IDLE_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// The longest pause between two checks.
pub const MAX_CHECK_INTERVAL: Duration = IDLE_CHECK_INTERVAL;

/// Why a flow is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowDeath {
    /// Bytes wait, and the peer acknowledges none.
    Unacknowledged,
    /// No bytes wait, and the peer does not answer keepalives.
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

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowDecision {
    /// The flow is dead.
    Dead(FlowDeath),
    /// The flow is not known to be dead.
    CheckAgain {
        /// Pause until the next check.
        after: Duration,
        /// Whether the caller must request a keepalive now
        /// (a segment without data that the peer acknowledges).
        probe: bool,
    },
}

/// The health of one side of a flow.
#[derive(Debug, Clone, Copy)]
pub struct FlowHealth {
    /// When bytes began to wait, or the last of them was acknowledged; `None` while no bytes wait.
    waiting_since: Option<Instant>,
    /// [`TcpInfo::bytes_acked`] at the last check.
    bytes_acked: u64,
    /// The segments with data that were sent since the last check at which no bytes waited or some were acknowledged. They
    /// contain bytes that wait.
    sent_data: Sent,
    /// When the last segment arrived that was no retransmission.
    last_segment: Instant,
    /// [`TcpInfo::fresh_segments`] at the last check.
    fresh_segments: u32,
    /// The segments that were sent since the check that found `last_segment`; `None` before the first check.
    sent: Option<Sent>,
    /// An answer is late, and no segment has arrived since then.
    is_suspect: bool,
    /// A segment has refuted a suspicion since the last [`Self::take_refuted_suspicion`].
    refuted: bool,
    /// See [`Self::is_stalled`].
    stalled: bool,
    /// When the next check is due.
    due: Instant,
    /// The start of the period of silence in which a check was late.
    late_check_in: Option<Instant>,
}

impl FlowHealth {
    /// The health of a new connection. Its first check is due at once.
    pub fn new(now: Instant) -> Self {
        Self {
            waiting_since: None,
            bytes_acked: 0,
            sent_data: Sent::since(0, now),
            last_segment: now,
            fresh_segments: 0,
            sent: None,
            is_suspect: false,
            refuted: false,
            stalled: false,
            due: now,
            late_check_in: None,
        }
    }

    /// Records that bytes were written. Returns when the next check is due.
    pub fn record_write(&mut self, now: Instant) -> Instant {
        if self.waiting_since.is_none() {
            self.waiting_since = Some(now);
            self.due = self.due.min(now + PENDING_CHECK_INTERVAL);
        }
        self.due
    }

    /// Decides from the kernel's statistics whether the flow is dead.
    pub fn check(
        &mut self,
        info: &TcpInfo,
        thresholds: &FlowThresholds,
        now: Instant,
    ) -> FlowDecision {
        let is_late = now.saturating_duration_since(self.due) > LATE_CHECK;
        let distance = additional_time(info.answer_time());
        let thresholds = &thresholds.at_distance(distance);
        let answer_late_after = ANSWER_LATE_AFTER + distance;
        let sent = self.record_segment(info, now);
        let is_acknowledged = info.bytes_acked != self.bytes_acked;
        if !info.has_pending() {
            self.waiting_since = None;
            self.sent_data = Sent::since(info.data_segments_sent, now);
        } else if is_acknowledged || self.waiting_since.is_none() {
            self.waiting_since = Some(now);
            self.sent_data = Sent::since(info.data_segments_sent, now);
        }
        self.sent_data.record(info.data_segments_sent, now);
        self.bytes_acked = info.bytes_acked;
        let silent_for = now.saturating_duration_since(self.last_segment);
        let unacked_for = self.waiting_since.map(|since| now.saturating_duration_since(since));
        // The start of the current period of silence identifies it.
        let silence = self.waiting_since.or(Some(self.last_segment));
        let decision = if is_late && std::mem::replace(&mut self.late_check_in, silence) != silence
        {
            FlowDecision::CheckAgain { after: VERDICT_PAUSE, probe: false }
        } else {
            let silence = Silence { silent_for, sent, distance, answer_late_after, now };
            match unacked_for {
                Some(unacked_for) => {
                    decide_pending(info, thresholds, (unacked_for, &self.sent_data), &silence)
                }
                None => decide_idle(info, thresholds, &silence),
            }
        };
        self.stalled = match unacked_for {
            Some(unacked_for) => {
                unacked_for >= STALLED_AFTER + distance && info.is_window_closed() == Some(false)
            }
            None => silent_for >= STALLED_AFTER + 2 * distance,
        };
        if self.is_suspect && silent_for < answer_late_after {
            self.is_suspect = false;
            self.refuted = true;
        }
        if let FlowDecision::CheckAgain { after, probe } = decision {
            let answer_late = silent_for >= answer_late_after && info.probes > 1;
            self.is_suspect |= probe || (answer_late && info.is_window_closed() == Some(true));
            self.due = now + after;
        }
        decision
    }

    /// Updates `last_segment` if a segment arrived that was no retransmission. Returns what was sent since then.
    fn record_segment(&mut self, info: &TcpInfo, now: Instant) -> Sent {
        let fresh = info.fresh_segments();
        let has_fresh = fresh != self.fresh_segments;
        let silent_for = if has_fresh { info.silent() } else { info.last_data_recv };
        self.fresh_segments = fresh;
        // Because of rounding, the same segment may seem newer than at the last check.
        let arrived = now.checked_sub(silent_for);
        let newer = arrived.filter(|at| *at > self.last_segment + ROUNDING);
        if let Some(arrived) = newer {
            self.last_segment = arrived;
        }
        let mut sent = match self.sent {
            Some(sent) if !has_fresh && newer.is_none() => sent,
            _ => Sent::since(info.segments_out, now),
        };
        sent.record(info.segments_out, now);
        *self.sent.insert(sent)
    }

    /// Whether a suspicion was refuted since the last call, because a packet was lost on a working path.
    pub fn take_refuted_suspicion(&mut self) -> bool {
        std::mem::take(&mut self.refuted)
    }

    /// Whether the flow has been silent, or its bytes unacknowledged, for [`STALLED_AFTER`]. Independent packet
    /// loss rarely explains this. A flow with waiting bytes is not stalled while its window is closed or
    /// unknown.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }
}

/// The segments that were sent since a check.
#[derive(Debug, Clone, Copy)]
struct Sent {
    /// The kernel's count at that check, and at the last one. It wraps.
    counts: (u32, u32),
    /// The number of checks that found further segments. The checks of a flow with waiting bytes are 100 ms apart.
    times: u32,
    /// The time of the last of these checks.
    last: Instant,
}

impl Sent {
    /// Nothing was sent since the check at `now`, at which the kernel's count is `count`.
    fn since(count: u32, now: Instant) -> Self {
        Self { counts: (count, count), times: 0, last: now }
    }

    fn record(&mut self, count: u32, now: Instant) {
        if count != self.counts.1 {
            *self = Self { counts: (self.counts.0, count), times: self.times + 1, last: now };
        }
    }

    fn segments(&self) -> u32 {
        self.counts.1.wrapping_sub(self.counts.0)
    }

    /// Whether segments were sent at `many` times; or as many of them at `few` times, and the last can be answered.
    fn is_often(&self, (many, few): (u32, u8), silence: &Silence) -> bool {
        self.times >= many
            || (self.segments() >= many
                && self.times >= few.into()
                && silence.age(self) >= LAST_PROBE_TIMEOUT + silence.distance)
    }
}

/// The time since the last new segment was received.
struct Silence {
    silent_for: Duration,
    /// What was sent in that time: keepalives, data, retransmissions and acknowledgements.
    sent: Sent,
    /// How much longer than usual an answer takes.
    distance: Duration,
    /// Silence after which an answer is late.
    answer_late_after: Duration,
    now: Instant,
}

impl Silence {
    /// Time since the last of these segments.
    fn age(&self, sent: &Sent) -> Duration {
        self.now.saturating_duration_since(sent.last)
    }
}

/// Decides about a flow with bytes that wait. No byte was acknowledged for `unacked_for`, and in that time segments with
/// data were sent.
fn decide_pending(
    info: &TcpInfo,
    thresholds: &FlowThresholds,
    (unacked_for, sent_data): (Duration, &Sent),
    silence: &Silence,
) -> FlowDecision {
    let retransmits = thresholds.retransmits;
    let enough = u32::from(retransmits) * 3 / 2;
    let window = info.is_window_closed();
    let is_often = sent_data.is_often((enough, retransmits), silence);
    let dead = unacked_for >= thresholds.unacked_after
        && match window {
            Some(true) => is_lost_behind_window(info, thresholds, silence),
            Some(false) if info.unacked == 0 => info.probes >= UNSENT_PROBES || is_often,
            None if info.unacked == 0 => {
                info.silent() >= thresholds.unacked_after && info.probes >= PROBES_WITHOUT_WINDOW
            }
            Some(false) | None => {
                // The peer may have withdrawn an unknown window. Then the kernel counts no retransmissions.
                let may_count = window.is_some() || info.silent() >= thresholds.unacked_after;
                (may_count && is_often)
                    || u32::from(info.retransmits) >= enough
                    || (info.retransmits >= retransmits
                        && unacked_for >= thresholds.unacked_after + LAST_PROBE_TIMEOUT
                        && silence.age(sent_data) >= silence.distance)
            }
        };
    if dead || is_silent(info, thresholds, silence) {
        return FlowDecision::Dead(FlowDeath::Unacknowledged);
    }
    FlowDecision::CheckAgain {
        after: next_check(
            thresholds.unacked_after.saturating_sub(unacked_for),
            PENDING_CHECK_INTERVAL,
        ),
        probe: false,
    }
}

/// Whether probes of a closed window, or retransmissions into one that was withdrawn, are unanswered.
fn is_lost_behind_window(info: &TcpInfo, thresholds: &FlowThresholds, silence: &Silence) -> bool {
    let one_second_each = Duration::from_secs(thresholds.window_probes.into());
    let probes = if info.unacked > 0 { silence.sent.segments() } else { info.probes.into() };
    let enough = u32::from(thresholds.window_probes);
    info.silent() >= thresholds.unacked_after.max(one_second_each)
        && (probes >= enough * 3 / 2
            || (probes >= enough && silence.age(&silence.sent) >= LAST_PROBE_TIMEOUT))
}

/// Whether a flow whose sent bytes wait has been silent for as long as a dead flow without any, so that a write before
/// the end of a silence does not delay its verdict.
fn is_silent(info: &TcpInfo, thresholds: &FlowThresholds, silence: &Silence) -> bool {
    info.unacked > 0
        && info.is_window_closed() != Some(true)
        && thresholds.idle_after.is_some_and(|after| silence.silent_for >= after)
        && silence.sent.is_often((thresholds.unanswered.into(), thresholds.retransmits), silence)
}

/// Decides about a flow without bytes that wait.
fn decide_idle(info: &TcpInfo, thresholds: &FlowThresholds, silence: &Silence) -> FlowDecision {
    let &Silence { silent_for, answer_late_after, .. } = silence;
    let Some(idle_after) = thresholds.idle_after else {
        return FlowDecision::CheckAgain { after: IDLE_CHECK_INTERVAL, probe: false };
    };
    if silent_for >= idle_after {
        let segments = silence.sent.segments();
        let peer_retransmits = segments > info.probes.into();
        if info.probes >= thresholds.unanswered
            || (peer_retransmits
                && segments >= RETRANSMISSION_SEGMENTS
                && info.probes >= PROBES_AFTER_RETRANSMISSION)
        {
            return FlowDecision::Dead(FlowDeath::Unanswered);
        }
    }
    if silent_for >= answer_late_after {
        let after = next_check(idle_after.saturating_sub(silent_for), PROBE_INTERVAL);
        return FlowDecision::CheckAgain { after, probe: thresholds.requests_probes };
    }
    // The next check is due when the answer to the next keepalive is late.
    let after = answer_late_after.saturating_sub(silent_for) + Duration::from_millis(20);
    FlowDecision::CheckAgain { after, probe: false }
}

/// How much longer than usual answers take on a path on which they take `answer_time`.
fn additional_time(answer_time: Duration) -> Duration {
    (answer_time + ANSWER_SLACK).saturating_sub(USUAL_ANSWER_TIME).min(MAX_DISTANCE)
}

/// Pause until the next check: `pause`, or the `remaining` time to the threshold if that is shorter, but at
/// least 20 ms.
fn next_check(remaining: Duration, pause: Duration) -> Duration {
    if remaining.is_zero() { pause } else { remaining.min(pause).max(Duration::from_millis(20)) }
}

#[cfg(test)]
mod histories;
#[cfg(test)]
mod tests;
