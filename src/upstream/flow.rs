//! Tells a dead flow from a quiet one where no PING can be sent: in a tunnel and in a passed
//! connection the bytes are not ours, and the kernel is the only witness.
//!
//! | what waits to be acknowledged | dead when |
//! |---|---|
//! | bytes that were sent | none of them acknowledged for 2.5 s, in which four retransmissions or six segments went out |
//! | bytes that were not sent, although the peer has room: our own netfilter drops them | the same, with three probes |
//! | bytes that were not sent, since the peer has no room | six probes in a row unanswered, and no segment for 2.5 s |
//! | nothing | no segment for 2.75 s, or 4.5 s where packets are being lost, and eight keepalives unanswered |
//!
//! While nothing waits the kernel sends a keepalive after each second without a segment. The first
//! one that stays unanswered for 200 ms makes us ask for a new one every 150 ms. Linux answers such
//! probes only twice a second (`tcp_invalid_ratelimit`), so 2.75 s hold four answers. Where one
//! packet in twenty is lost each way, all four are lost once in 150,000 seconds of a quiet flow:
//! too often for a thousand flows. There an answer that comes after all, a refuted suspicion, is
//! seen all the time; whoever has seen some lately waits for seven answers.
//!
//! A peer whose window is closed is alive, only full: the kernel asks it at growing intervals, so
//! its silence alone says nothing, and each of its answers sets the count of probes back to zero.
//! A stopped process is alive as well: its kernel answers, as it would without us.
//!
//! A look that comes late says more about us than about the flow: it gives no verdict.
//!
//! This module sends nothing and reads no clock: time is an argument.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::net::tcp_info::TcpInfo;
use crate::net::tracked::Observer;

/// How the life of one side of a flow is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rules {
    /// No acknowledgement for this long while something waits for one.
    stuck_after: Duration,
    /// Retransmissions that must have gone out meanwhile, or half as many segments again.
    retransmits: u8,
    /// No segment for this long while nothing waits, and [`UNANSWERED`] keepalives; `None` leaves
    /// that to the kernel's own keepalives.
    idle_after: Option<Duration>,
}

/// The apiserver's side: it is what clients wait for. Retransmissions of a thin stream are 200 ms
/// apart; those of a full one, doubling, are four after 2.4 s on kernels that bound the pause
/// (`TCP_RTO_MAX_MS`) and after 3 s on others.
pub const SERVER: Rules = Rules {
    stuck_after: Duration::from_millis(2_500),
    retransmits: 4,
    idle_after: Some(Duration::from_millis(2_750)),
};

/// The same where [`LOSSY`] suspicions were refuted lately.
pub const LOSSY_SERVER: Rules = Rules { idle_after: Some(Duration::from_millis(4_500)), ..SERVER };

/// Refuted suspicions within a minute or two that show that packets are being lost.
pub const LOSSY: u32 = 3;

/// The client's side: nobody waits for a client, and most are on the same machine. One that has
/// vanished from the network must only not stay for ever.
pub const CLIENT: Rules =
    Rules { stuck_after: Duration::from_secs(30), retransmits: 6, idle_after: None };

/// Keepalives in a row without an answer.
const UNANSWERED: u8 = 8;
/// Probes for what was not sent although there is room for it: at 200 ms, doubling, the third is
/// out after 1.4 s.
const UNSENT_PROBES: u8 = 3;
/// Probes of a closed window in a row without an answer.
const WINDOW_PROBES: u8 = 6;
/// The same on a kernel that does not tell an open window from a closed one.
const BLIND_PROBES: u8 = 4;
/// A keepalive of the kernel is out after a second; its answer is late after this.
const LATE_ANSWER: Duration = Duration::from_millis(1_200);
/// From then on a new one is asked for this often.
const ASK_AGAIN: Duration = Duration::from_millis(150);
/// How often a flow is looked at on which something waits.
const WAITING: Duration = Duration::from_millis(250);
/// A look that is later than this says more about us than about the flow.
const LATE: Duration = Duration::from_millis(250);
/// How long verdicts are withheld after that.
const GRACE: Duration = Duration::from_millis(300);
/// How often the kernel is asked about a client: there is no hurry.
const SELDOM: Duration = Duration::from_secs(5);
/// No pause between two looks is longer.
pub const LONGEST: Duration = SELDOM;

/// What killed a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// What was sent is not acknowledged.
    Unacknowledged,
    /// Probes are not answered.
    Unanswered,
}

impl Death {
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
pub enum Look {
    /// It is dead.
    Dead(Death),
    /// Look again then; with `probe`, ask the kernel for a keepalive now.
    Again {
        /// After this time.
        after: Duration,
        /// [`crate::net::socket::probe_now`].
        probe: bool,
    },
}

/// Remembers since when something of ours waits for its acknowledgement.
#[derive(Debug, Clone, Copy)]
pub struct Judge {
    /// Bytes that were acknowledged, and segments sent, when that began.
    acked: u64,
    segments: u32,
    waiting_since: Option<Instant>,
    /// Probes were asked for, and none was answered yet.
    suspects: bool,
    refuted: bool,
    /// When the next look was promised.
    due: Instant,
}

impl Judge {
    /// Of a connection that has just been made; look at it at once.
    pub fn new(now: Instant) -> Self {
        Self {
            acked: 0,
            segments: 0,
            waiting_since: None,
            suspects: false,
            refuted: false,
            due: now,
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
    pub fn look(&mut self, info: &TcpInfo, rules: &Rules, now: Instant) -> Look {
        let late = now.saturating_duration_since(self.due) > LATE;
        if !info.has_pending() {
            self.waiting_since = None;
        } else if info.bytes_acked != self.acked || self.waiting_since.is_none() {
            self.waiting_since = Some(now);
            self.segments = info.data_segments_sent;
        }
        self.acked = info.bytes_acked;
        let look = if late {
            Look::Again { after: GRACE, probe: false }
        } else if let Some(since) = self.waiting_since {
            let segments = info.data_segments_sent.wrapping_sub(self.segments);
            waiting(info, rules, now.saturating_duration_since(since), segments)
        } else {
            idle(info, rules)
        };
        if self.suspects && info.silent() < LATE_ANSWER {
            self.suspects = false;
            self.refuted = true;
        }
        if let Look::Again { after, probe } = look {
            self.suspects |= probe;
            self.due = now + after;
        }
        look
    }

    /// Whether a suspicion was refuted since this was last asked: a packet was lost that proved
    /// nothing.
    pub fn was_refuted(&mut self) -> bool {
        std::mem::take(&mut self.refuted)
    }
}

/// Something waits, and none of it was acknowledged for `stuck`, while `segments` were sent.
fn waiting(info: &TcpInfo, rules: &Rules, stuck: Duration, segments: u32) -> Look {
    let dead = stuck >= rules.stuck_after
        && match info.is_window_closed() {
            Some(true) => info.silent() >= rules.stuck_after && info.probes >= WINDOW_PROBES,
            Some(false) if info.unacked == 0 => info.probes >= UNSENT_PROBES,
            None if info.unacked == 0 => {
                info.silent() >= rules.stuck_after && info.probes >= BLIND_PROBES
            }
            Some(false) | None => {
                let enough = u32::from(rules.retransmits) * 3 / 2;
                info.retransmits >= rules.retransmits || segments >= enough
            }
        };
    if dead {
        return Look::Dead(Death::Unacknowledged);
    }
    // The verdict is due when the time is up, not at the first look after it.
    let rest = rules.stuck_after.saturating_sub(stuck);
    let after = if rest.is_zero() { ASK_AGAIN } else { rest.min(WAITING) };
    Look::Again { after, probe: false }
}

/// Nothing waits.
fn idle(info: &TcpInfo, rules: &Rules) -> Look {
    let Some(idle_after) = rules.idle_after else {
        return Look::Again { after: SELDOM, probe: false };
    };
    let silent = info.silent();
    if silent >= idle_after && info.probes >= UNANSWERED {
        return Look::Dead(Death::Unanswered);
    }
    if silent >= LATE_ANSWER {
        return Look::Again { after: ASK_AGAIN, probe: true };
    }
    // Just after the answer to its next keepalive is late.
    let after = LATE_ANSWER.saturating_sub(silent) + Duration::from_millis(20);
    Look::Again { after, probe: false }
}

/// Waits until a tunnel's flow is dead, and says why.
pub async fn died(observer: &Observer) -> &'static str {
    let mut judge = Judge::new(Instant::now());
    let mut refuted = 0;
    loop {
        refuted += u32::from(judge.was_refuted());
        let rules = if refuted >= LOSSY { &LOSSY_SERVER } else { &SERVER };
        let pause = match observer.tcp_info() {
            // Without evidence (a kernel before 4.6) there is no verdict.
            Err(_) => SELDOM,
            Ok(info) => match judge.look(&info, rules, Instant::now()) {
                Look::Dead(death) => return death.as_str(),
                Look::Again { after, probe } => {
                    if probe {
                        let _ = observer.probe_now();
                    }
                    after
                }
            },
        };
        sleep(pause).await;
    }
}

#[cfg(test)]
#[path = "flow_tests.rs"]
mod tests;
