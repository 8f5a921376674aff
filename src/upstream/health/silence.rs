//! Evidence of life that is missing while a PING is outstanding, by duration.

use std::time::Duration;

use super::state::StateChangeReason;
use crate::net::sockets::tcp_info::TcpInfo;

/// Unanswered probes of a closed window in a row that show that the path is lost. At 5 % packet loss
/// each way, that many are lost once in a thousand.
const LOST_WINDOW_PROBES: u8 = 3;

/// What was not observed since a PING was sent, and for how long.
pub(super) struct Silence {
    /// Age of the PING.
    pub(super) age: Duration,
    /// No byte and no segment arrived.
    pub(super) inbound: Duration,
    /// Neither pending bytes were acknowledged nor a probe of a closed window answered.
    pub(super) outbound: Duration,
    /// No pending byte was acknowledged, whatever the reason.
    pub(super) unacknowledged: Duration,
    /// No frame arrived.
    pub(super) without_frame: Duration,
    /// No frame arrived and no upload made progress.
    pub(super) without_progress: Duration,
    /// Bytes wait to be acknowledged.
    pub(super) pending: bool,
    /// They wait for a closed window whose probes are answered.
    pub(super) window_answers: bool,
}

impl Silence {
    /// Whether the path has been lost for `time`, and in which direction.
    pub(super) fn lost_for(&self, time: Duration) -> Option<StateChangeReason> {
        if self.age < time || self.window_answers {
            None
        } else if self.inbound >= time {
            Some(StateChangeReason::NothingArrives)
        } else {
            (self.outbound >= time).then_some(StateChangeReason::NothingAcknowledged)
        }
    }

    /// Whether the PING is outstanding for `time`, with no frame received or nothing acknowledged
    /// meanwhile.
    pub(super) fn unanswered_for(&self, time: Duration) -> bool {
        self.age >= time && (self.without_frame >= time || self.unacknowledged >= time)
    }
}

/// Whether pending bytes wait because the peer's window is closed, and the peer's kernel answers the
/// window probes.
pub(super) fn window_answers_probes(tcp: &TcpInfo, dead_after: Duration) -> bool {
    match tcp.is_window_closed() {
        // It closed on bytes in flight, which serve as the probe: the answer acknowledges nothing.
        Some(true) if tcp.unacked > 0 => tcp.silent() < dead_after,
        Some(true) => tcp.probes < LOST_WINDOW_PROBES,
        // Before Linux 5.4: no bytes are in flight, so the window is closed, or the local netfilter
        // drops the bytes, and then no probe is answered.
        None => tcp.unacked == 0 && tcp.probes < LOST_WINDOW_PROBES,
        Some(false) => false,
    }
}
