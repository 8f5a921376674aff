//! Tells a dead flow from a quiet one where no PING can be sent: in a tunnel and in a passed
//! connection the bytes are not ours, and the kernel is the only witness.
//!
//! | what waits to be acknowledged | dead when |
//! |---|---|
//! | bytes that were sent | none of them acknowledged for 2.25 s, in which six retransmissions or segments went out; for 2.5 s with four |
//! | bytes that were not sent, although the peer has room: our own netfilter drops them | the same, with three probes |
//! | bytes that were not sent, since the peer has no room | four probes in a row unanswered (six where packets are being lost, two where many flows fell silent together), a second for each and 250 ms more |
//! | nothing | nothing new heard for 2.7 s (4.5 s where packets are being lost, 2.15 s where many flows fell silent together), and eight keepalives unanswered |
//!
//! While nothing waits the kernel sends a keepalive after each second without a segment. The first
//! one that stays unanswered for 200 ms makes us ask for a new one every 100 ms. Linux answers such
//! probes only twice a second (`tcp_invalid_ratelimit`), so 2.7 s hold four answers: at 1.0, 1.5,
//! 2.1 and 2.6 s. Where one packet in twenty is lost each way, all four are lost once in 80,000
//! seconds of a quiet flow: too often for a thousand flows. There an answer that comes after all, a
//! refuted suspicion, is seen all the time; whoever has seen some lately waits for seven answers.
//!
//! Loss strikes one flow here and one there. Several that have missed two answers each at the same
//! time, and a quarter of all that an endpoint has, are no accident but its path: these need no
//! further proof ([`CorrelatedLoss`]).
//!
//! What a server sends again was not acknowledged: our words are lost though its are heard. So the
//! same data again is no sign of life; an acknowledgement alone and new data are. But it puts the
//! kernel's keepalives off, so of these two are enough then.
//!
//! A peer whose window is closed is alive, only full: the kernel asks it at growing intervals, so
//! its silence alone says nothing, and each of its answers sets the count of probes back to zero.
//! That it is lost is seen late, after 3.3 to 4.5 s, since Linux lets nobody ask sooner: with
//! something in the send queue it sends no keepalives (`tcp_keepalive_timer`), its own probes come
//! a second apart at best (`TCP_RTO_MAX_MS`, Linux 6.15; before that ever more seldom, up to two
//! minutes), `TCP_USER_TIMEOUT` kills those that answer, and to ask by `TCP_REPAIR` takes
//! `CAP_NET_ADMIN`. Two unanswered probes are all that 3 s have room for, and one packet in twenty
//! lost each way makes them up every two minutes. A stopped process is alive as well: its kernel
//! answers, as it would without us.
//!
//! A look that comes late gives no verdict, so that a machine that was paused does not blame its
//! peers: once in each silence. PreviousFailure that the verdicts count, however late the looks are, since all
//! evidence is the kernel's, which counts whether or not we are scheduled.
//!
//! The table is for a flow that can be replaced. The tunnel of an exec, an attach, a port-forward or
//! a copy cannot: it has `tunnel_dead_after` ([`FlowThresholds::tunnel`]). That is known only where TLS ends
//! here (`terminate`). In passthrough a tunnel looks like any other flow, and dies like one.
//!
//! This module sends nothing and reads no clock: time is an argument.

use std::cell::Cell;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::net::sockets::tcp_info::TcpInfo;
use crate::net::sockets::tracked_stream::StreamObserver;

/// How the life of one side of a flow is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowThresholds {
    /// No acknowledgement for this long while something waits for one.
    stuck_after: Duration,
    /// Half as many segments again must have gone out meanwhile; or, a moment later, so many
    /// retransmissions.
    retransmits: u8,
    /// Nothing new heard for this long while nothing waits, and `unanswered` keepalives; `None`
    /// leaves that to the kernel's own keepalives.
    idle_after: Option<Duration>,
    /// Keepalives in a row without an answer.
    unanswered: u8,
    /// Probes of a closed window in a row without an answer, and as many seconds without a segment:
    /// the first of them are closer together than Linux answers.
    window_probes: u8,
    /// The kernel is asked for more keepalives than its own of each second.
    hurries: bool,
}

impl FlowThresholds {
    /// Of a tunnel, which nothing can take the place of: no sign of life for `dead_after`. The
    /// kernel gives a flow up after 127 unanswered keepalives, so it is not hurried for long.
    pub fn tunnel(dead_after: Duration) -> Self {
        Self {
            stuck_after: dead_after.max(SERVER.stuck_after),
            idle_after: SERVER.idle_after.max(Some(dead_after)),
            hurries: dead_after < HURRIED,
            ..SERVER
        }
    }
}

/// The apiserver's side: it is what clients wait for. Retransmissions of a thin stream are 200 ms
/// apart, eight in this time; those of a full one, doubling, are four after 2.4 s on kernels that
/// bound the pause (`TCP_RTO_MAX_MS`) and after 3 s on others.
pub const SERVER: FlowThresholds = FlowThresholds {
    stuck_after: Duration::from_millis(2_250),
    retransmits: 4,
    idle_after: Some(Duration::from_millis(2_700)),
    unanswered: 8,
    window_probes: 4,
    hurries: true,
};

/// The same where [`LOSSY_AFTER`] suspicions were refuted lately.
pub const LOSSY_SERVER: FlowThresholds =
    FlowThresholds { idle_after: Some(Duration::from_millis(4_500)), window_probes: 6, ..SERVER };

/// The same where many fell silent together: three answers are missing and three retransmissions.
pub const CORRELATED_LOSS_SERVER: FlowThresholds = FlowThresholds {
    stuck_after: Duration::from_millis(2_150),
    retransmits: 3,
    idle_after: Some(Duration::from_millis(2_150)),
    unanswered: 5,
    window_probes: 2,
    hurries: true,
};

/// Silence that is long enough for eight of the kernel's own keepalives, one each second.
const HURRIED: Duration = Duration::from_secs(10);

/// Refuted suspicions within a minute or two that show that packets are being lost.
pub const LOSSY_AFTER: u32 = 3;

/// The client's side: nobody waits for a client, and most are on the same machine. One that has
/// vanished from the network must only not stay for ever.
pub const CLIENT: FlowThresholds = FlowThresholds {
    stuck_after: Duration::from_secs(30),
    retransmits: 6,
    idle_after: None,
    unanswered: u8::MAX,
    window_probes: 6,
    hurries: false,
};

/// A full stream is sent again ever more seldom, and so are probes of a closed window: what was
/// sent last has this long to be answered.
const LAST_ANSWER: Duration = Duration::from_millis(250);
/// Probes for what was not sent although there is room for it: at 200 ms, doubling, the third is
/// out after 1.4 s.
const UNSENT_PROBES: u8 = 3;
/// The same on a kernel that does not tell an open window from a closed one.
const BLIND_PROBES: u8 = 4;
/// The same data again starts the kernel's count of unanswered keepalives anew: so many segments
/// must have gone out since something new was heard (acknowledgements of the same data, each of
/// which was lost as well, and keepalives), and so many keepalives since it came last.
const REPEATED: u32 = 5;
const LATEST_PROBES: u8 = 2;
/// A keepalive of the kernel is out after a second; its answer is late after this.
const LATE_ANSWER: Duration = Duration::from_millis(1_200);
/// From then on a new one is asked for this often.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// A flow is stalled after this: two answers are missing, or seven retransmissions.
const STALLED: Duration = Duration::from_millis(1_900);
/// How often a flow is looked at on which something waits.
const WAITING: Duration = Duration::from_millis(100);
/// A look that is later than this may say more about us than about the flow.
const LATE: Duration = Duration::from_millis(250);
/// How long verdicts are withheld after that: for what waits in the kernel to be heard.
const GRACE: Duration = Duration::from_millis(150);
/// The kernel's times are whole ticks of its clock, of 10 ms at most.
const ROUNDING: Duration = Duration::from_millis(20);
/// How often the kernel is asked about a client: there is no hurry.
const SELDOM: Duration = Duration::from_secs(5);
/// No pause between two looks is longer.
pub const MAX_CHECK_INTERVAL: Duration = SELDOM;

/// What killed a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowDeath {
    /// What was sent is not acknowledged.
    Unacknowledged,
    /// Probes are not answered.
    Unanswered,
}

impl FlowDeath {
    /// Words for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unacknowledged => "nothing is acknowledged any more",
            Self::Unanswered => "keepalives are not answered",
        }
    }
}

/// What to do after a look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FlowDecision {
    /// It is dead.
    Dead(FlowDeath),
    /// FlowDecision again then; with `probe`, ask the kernel for a keepalive now.
    Again {
        /// PreviousFailure this time.
        after: Duration,
        /// [`crate::net::sockets::tcp_options::send_keepalive_probe`].
        probe: bool,
    },
}

/// Remembers what was heard last, and since when something of ours waits for its acknowledgement.
#[derive(Debug, Clone, Copy)]
pub struct FlowHealth {
    /// Bytes that were acknowledged, and segments sent, when that began.
    acked: u64,
    segments: u32,
    waiting_since: Option<Instant>,
    /// When the last segment came that was not the same data again.
    heard: Instant,
    /// [`TcpInfo::fresh_segments`], and segments of ours, then.
    fresh: u32,
    sent: u32,
    /// [`TcpInfo::probes`] when it last changed, and when that was.
    probes: (u8, Instant),
    /// Probes were asked for, or the kernel's own were not answered in time, and none was answered
    /// yet.
    suspects: bool,
    refuted: bool,
    stalled: bool,
    /// When the next look was promised.
    due: Instant,
    /// When the silence began in which a look was late.
    distrusted: Option<Instant>,
}

impl FlowHealth {
    /// Of a connection that has just been made; look at it at once.
    pub fn new(now: Instant) -> Self {
        Self {
            acked: 0,
            segments: 0,
            waiting_since: None,
            heard: now,
            fresh: 0,
            sent: 0,
            probes: (0, now),
            suspects: false,
            refuted: false,
            stalled: false,
            due: now,
            distrusted: None,
        }
    }

    /// Bytes were written. Returns when to look at the latest.
    pub fn wrote(&mut self, now: Instant) -> Instant {
        if self.waiting_since.is_none() {
            self.waiting_since = Some(now);
            self.due = self.due.min(now + WAITING);
        }
        self.due
    }

    /// Looks at what the kernel knows.
    pub fn look(&mut self, info: &TcpInfo, rules: &FlowThresholds, now: Instant) -> FlowDecision {
        let late = now.saturating_duration_since(self.due) > LATE;
        self.hear(info, now);
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
        let silent = now.saturating_duration_since(self.heard);
        let stuck = self.waiting_since.map(|since| now.saturating_duration_since(since));
        let silence = self.waiting_since.or(Some(self.heard));
        let look = if late && std::mem::replace(&mut self.distrusted, silence) != silence {
            FlowDecision::Again { after: GRACE, probe: false }
        } else if let Some(stuck) = stuck {
            let segments = info.data_segments_sent.wrapping_sub(self.segments);
            waiting(info, rules, stuck, segments, now.saturating_duration_since(self.probes.1))
        } else {
            idle(info, rules, silent, info.segments_out.wrapping_sub(self.sent))
        };
        self.stalled = match stuck {
            Some(stuck) => stuck >= STALLED && info.is_window_closed() == Some(false),
            None => silent >= STALLED,
        };
        if self.suspects && silent < LATE_ANSWER {
            self.suspects = false;
            self.refuted = true;
        }
        if let FlowDecision::Again { after, probe } = look {
            let late = silent >= LATE_ANSWER && info.probes > 1;
            self.suspects |= probe || (late && info.is_window_closed() == Some(true));
            self.due = now + after;
        }
        look
    }

    /// Remembers when something was heard that was new.
    fn hear(&mut self, info: &TcpInfo, now: Instant) {
        let fresh = info.fresh_segments();
        let silent = if fresh == self.fresh { info.last_data_recv } else { info.silent() };
        self.fresh = fresh;
        // The kernel rounds: the same segment seen again is not another one.
        if let Some(heard) = now.checked_sub(silent).filter(|at| *at > self.heard + ROUNDING) {
            self.heard = heard;
            self.sent = info.segments_out;
        }
    }

    /// Whether a suspicion was refuted since this was last asked: a packet was lost that proved
    /// nothing.
    pub fn was_refuted(&mut self) -> bool {
        std::mem::take(&mut self.refuted)
    }

    /// Whether it has been stuck or silent for so long that few accidents explain it; a peer whose
    /// window is closed may be.
    pub fn is_stalled(&self) -> bool {
        self.stalled
    }
}

/// Whether so many of an endpoint's flows are stalled at once that its path is broken, rather than
/// each of them unlucky. One flow of a hundred is stalled at any time where one packet in twenty is
/// lost each way.
#[derive(Debug, Clone, Copy, Default)]
pub struct CorrelatedLoss {
    /// Flows that are stalled now.
    stalled: usize,
    until: Option<Instant>,
}

impl CorrelatedLoss {
    /// How many it takes at least, and of how many each one.
    const FLOWS: usize = 3;
    const ONE_IN: usize = 4;
    /// The first that die are no witnesses any more: what they have shown holds for this long.
    const HOLDS: Duration = Duration::from_secs(1);

    /// A flow became stalled, or is no longer.
    pub fn changed(&mut self, was: bool, is: bool) {
        self.stalled = (self.stalled + usize::from(is)).saturating_sub(usize::from(was));
    }

    /// Whether the path to an endpoint with so many flows is broken.
    pub fn is_path_broken(&mut self, flows: usize, now: Instant) -> bool {
        if self.stalled >= Self::FLOWS && self.stalled * Self::ONE_IN >= flows {
            self.until = Some(now + Self::HOLDS);
        }
        self.until.is_some_and(|until| now < until)
    }
}

/// Something waits, and none of it was acknowledged for `stuck`, while `segments` were sent; the
/// last probe went out `probed` ago.
fn waiting(
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
        after: soon(rules.stuck_after.saturating_sub(stuck), WAITING),
        probe: false,
    }
}

/// Nothing waits, nothing new was heard for `silent`, and `sent` segments went out since.
fn idle(info: &TcpInfo, rules: &FlowThresholds, silent: Duration, sent: u32) -> FlowDecision {
    let Some(idle_after) = rules.idle_after else {
        return FlowDecision::Again { after: SELDOM, probe: false };
    };
    if silent >= idle_after {
        let again = sent > info.probes.into();
        if info.probes >= rules.unanswered
            || (again && sent >= REPEATED && info.probes >= LATEST_PROBES)
        {
            return FlowDecision::Dead(FlowDeath::Unanswered);
        }
    }
    if silent >= LATE_ANSWER {
        let after = soon(idle_after.saturating_sub(silent), ASK_AGAIN);
        return FlowDecision::Again { after, probe: rules.hurries };
    }
    // Just after the answer to its next keepalive is late.
    let after = LATE_ANSWER.saturating_sub(silent) + Duration::from_millis(20);
    FlowDecision::Again { after, probe: false }
}

/// When to look again: a verdict is due when the time is up, not at the first look after it.
fn soon(rest: Duration, pause: Duration) -> Duration {
    if rest.is_zero() { pause } else { rest.min(pause).max(Duration::from_millis(20)) }
}

/// Waits until the flow of an upgraded connection, or of one that is to be, is dead, and says why.
/// Once `answered` it has `tunnel_dead_after`; before, its request is one like others.
pub async fn died(
    observer: &StreamObserver,
    answered: &Cell<bool>,
    tunnel_dead_after: Duration,
) -> &'static str {
    let mut judge = FlowHealth::new(Instant::now());
    let mut refuted = 0;
    loop {
        refuted += u32::from(judge.was_refuted());
        let rules = match answered.get() {
            true => FlowThresholds::tunnel(tunnel_dead_after),
            false if refuted >= LOSSY_AFTER => LOSSY_SERVER,
            false => SERVER,
        };
        let pause = match observer.tcp_info() {
            // Without evidence (a kernel before 4.6) there is no verdict.
            Err(_) => SELDOM,
            Ok(info) => match judge.look(&info, &rules, Instant::now()) {
                FlowDecision::Dead(death) => return death.as_str(),
                FlowDecision::Again { after, probe } => {
                    if probe {
                        let _ = observer.send_keepalive_probe();
                    }
                    after
                }
            },
        };
        sleep(pause).await;
    }
}

#[cfg(test)]
#[path = "flow_health_tests.rs"]
mod tests;
