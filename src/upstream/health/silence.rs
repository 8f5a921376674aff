//! For how long a PING has gone without which signs of life.

use std::time::Duration;

use super::state::Reason;
use crate::net::sockets::tcp_info::TcpInfo;

/// Unanswered probes of a closed window in a row that say that the path is lost. Where one packet in
/// twenty is lost each way, so many are lost once in a thousand.
const LOST_WINDOW_PROBES: u8 = 3;

/// What a PING that is out has shown so far.
pub(super) struct Silence {
    /// For how long it is out.
    pub(super) out: Duration,
    /// For how long nothing has arrived.
    pub(super) inbound: Duration,
    /// For how long neither anything that waits was acknowledged nor a probe of a closed window answered.
    pub(super) outbound: Duration,
    /// For how long nothing that waits was acknowledged, whatever the reason.
    pub(super) unacknowledged: Duration,
    /// For how long, since the PING, no frame has come.
    pub(super) frames: Duration,
    /// The same without progress of an upload either.
    pub(super) stopped: Duration,
    /// Something waits to be acknowledged.
    pub(super) pending: bool,
    /// It waits for a closed window, whose probes are answered.
    pub(super) window_answers: bool,
}

impl Silence {
    /// Whether the path has been lost for this long; in which direction.
    pub(super) fn lost_for(&self, time: Duration) -> Option<Reason> {
        if self.out < time || self.window_answers {
            None
        } else if self.inbound >= time {
            Some(Reason::NothingArrives)
        } else {
            (self.outbound >= time).then_some(Reason::NothingAcknowledged)
        }
    }

    /// Whether the PING is out for this long, with no frame or with nothing acknowledged meanwhile.
    pub(super) fn unanswered_for(&self, time: Duration) -> bool {
        self.out >= time && (self.frames >= time || self.unacknowledged >= time)
    }
}

/// Whether what waits does so because the peer's window is closed, and the peer's kernel answers
/// when ours asks whether it still is.
pub(super) fn window_answers_probes(tcp: &TcpInfo, dead_after: Duration) -> bool {
    match tcp.is_window_closed() {
        // It closed on what was under way, which serves as the probe: the answer acknowledges nothing.
        Some(true) if tcp.unacked > 0 => tcp.silent() < dead_after,
        Some(true) => tcp.probes < LOST_WINDOW_PROBES,
        // Before Linux 5.4: nothing is under way, so it is a closed window, or our own netfilter drops
        // it, and then no probe is answered.
        None => tcp.unacked == 0 && tcp.probes < LOST_WINDOW_PROBES,
        Some(false) => false,
    }
}
