//! For how long evidence of life has been missing while a PING is outstanding.

use std::time::Duration;

use crate::connection::state::StateChangeReason;
use crate::tcp_info::TcpInfo;

/// Number of unanswered probes of a closed window in a row that show that the path is lost. At 5 % packet
/// loss each way, three in a row are lost once in a thousand times.
const LOST_WINDOW_PROBES: u8 = 3;

/// For how long which evidence of life has been missing.
#[derive(Debug, Clone, Copy)]
pub struct Silence {
    /// Time since the PING was sent.
    pub ping_age: Duration,
    /// Time without a received byte or segment.
    pub inbound: Duration,
    /// Time without an acknowledgement of pending bytes or an answer to a probe of a closed window.
    pub outbound: Duration,
    /// Time without an acknowledgement of pending bytes, also while the window is closed.
    pub unacknowledged: Duration,
    /// Time without a received frame, at most `ping_age`.
    pub without_frame: Duration,
    /// Time without a received frame and without progress of an upload, at most `ping_age`.
    pub without_progress: Duration,
    /// Bytes wait to be acknowledged.
    pub pending: bool,
    /// The pending bytes wait for a closed window whose probes are answered.
    pub window_answers: bool,
}

impl Silence {
    /// Returns the direction in which the path has been lost for `time`, if it has.
    pub fn lost_for(&self, time: Duration) -> Option<StateChangeReason> {
        if self.ping_age < time || self.window_answers {
            None
        } else if self.inbound >= time {
            Some(StateChangeReason::NothingArrives)
        } else {
            (self.outbound >= time).then_some(StateChangeReason::NothingAcknowledged)
        }
    }

    /// Whether the PING has been outstanding for `time`, and in that time no frame was received or no
    /// pending byte was acknowledged.
    pub fn unanswered_for(&self, time: Duration) -> bool {
        self.ping_age >= time && (self.without_frame >= time || self.unacknowledged >= time)
    }
}

/// Whether pending bytes wait because the peer's window is closed, and the peer's kernel answers the
/// window probes.
pub fn window_answers_probes(tcp: &TcpInfo, dead_after: Duration) -> bool {
    match tcp.is_window_closed() {
        // The window closed while bytes were in flight. The kernel retransmits them instead of sending
        // window probes, and the answers acknowledge nothing.
        Some(true) if tcp.unacked > 0 => tcp.silent() < dead_after,
        Some(true) => tcp.probes < LOST_WINDOW_PROBES,
        // Before Linux 5.4 the kernel does not report the window. If no bytes are in flight, the window is
        // closed, or the local netfilter drops the bytes and no probe is answered.
        None => tcp.unacked == 0 && tcp.probes < LOST_WINDOW_PROBES,
        Some(false) => false,
    }
}
