//! `TCP_INFO`: what the kernel knows of a TCP connection.
//!
//! The peer's process answers an HTTP/2 PING; the peer's kernel acknowledges a TCP segment. The two together
//! distinguish a dead path, a stopped process and packet loss.

use std::time::Duration;

/// How much longer than twice the shortest round trip an acknowledgement takes at most.
const MAX_JITTER: Duration = Duration::from_millis(100);

/// The fields of `struct tcp_info` (`linux/tcp.h`) from which the health of a connection is judged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TcpInfo {
    /// The connection is closed in both directions: reset by the peer, aborted by this kernel after a
    /// timeout, or closed by both sides.
    pub closed: bool,
    /// The peer has sent FIN.
    pub ended: bool,
    /// Consecutive retransmission timeouts without an acknowledgement.
    pub retransmits: u8,
    /// Keepalive and window probes sent since the last segment that carried an ACK.
    pub probes: u8,
    /// The current retransmission timeout.
    pub rto: Duration,
    /// The smoothed round-trip time, and its mean deviation (RFC 6298 SRTT and RTTVAR).
    pub rtt: Duration,
    /// See [`Self::rtt`].
    pub rtt_deviation: Duration,
    /// The shortest round-trip time of the last five minutes (Linux 4.6); more than an hour before the first one.
    pub min_rtt: Duration,
    /// Maximum segment size of this side, in bytes.
    pub send_mss: u32,
    /// Segments sent and not yet acknowledged.
    pub unacked: u32,
    /// Segments retransmitted, in total.
    pub retransmitted: u32,
    /// Segments sent, in total.
    pub segments_out: u32,
    /// Segments received, in total (RFC 4898 tcpEStatsPerfSegsIn).
    pub segments_in: u32,
    /// Received segments with data, repeated ones included (RFC 4898 tcpEStatsPerfDataSegsIn).
    pub data_segments_in: u32,
    /// Segments with data received out of order; 0 on kernels before Linux 5.4.
    pub out_of_order: u32,
    /// Time since the last segment that carried an ACK, as every segment of an established connection does.
    pub last_ack_recv: Duration,
    /// Time since the last segment with new data in order.
    pub last_data_recv: Duration,
    /// Bytes that the peer has acknowledged (RFC 4898 tcpEStatsAppHCThruOctetsAcked).
    pub bytes_acked: u64,
    /// Bytes received in order (RFC 4898 tcpEStatsAppHCThruOctetsReceived).
    pub bytes_received: u64,
    /// The round trip of received bytes: from an acknowledgement to the bytes for which it made room. Zero before the
    /// first one.
    pub receive_rtt: Duration,
    /// Bytes in the send queue that were never sent. The bytes of a packet that netfilter's output hook
    /// dropped count here, not in [`Self::unacked`].
    pub notsent_bytes: u32,
    /// Bytes that were handed to the network, each once; `None` on kernels before Linux 4.19.
    pub handed_over: Option<u64>,
    /// Segments with data sent, repeated ones included (RFC 4898 tcpEStatsPerfDataSegsOut, Linux 4.6);
    /// 0 on older kernels.
    pub data_segments_sent: u32,
    /// The peer's receive window in bytes; `None` on kernels before Linux 5.4.
    pub send_window: Option<u32>,
}

impl TcpInfo {
    /// Whether bytes are unacknowledged or not yet sent.
    pub fn has_pending(&self) -> bool {
        self.unacked > 0 || self.notsent_bytes > 0
    }

    /// Time since the last segment of any kind arrived.
    pub fn silent(&self) -> Duration {
        self.last_ack_recv.min(self.last_data_recv)
    }

    /// Received segments that prove a working path and do not show in [`Self::last_data_recv`]: segments
    /// without data, such as responses to keepalive probes, and data out of order. Data in order and
    /// retransmitted data are not counted.
    pub fn fresh_segments(&self) -> u32 {
        self.segments_in.wrapping_sub(self.data_segments_in).wrapping_add(self.out_of_order)
    }

    /// Whether bytes wait for the peer to open its receive window: the window is smaller than the next segment, which
    /// TCP therefore holds back (RFC 9293 section 3.8.6.2.1), or the peer has withdrawn a window that was used already.
    /// `None` if the kernel does not report the window.
    pub fn is_window_closed(&self) -> Option<bool> {
        let window = self.send_window?;
        Some(self.has_pending() && window < self.send_mss.min(self.notsent_bytes).max(1))
    }

    /// How long an acknowledgement takes at most, apart from the time that a lost packet takes. A single late
    /// acknowledgement raises the smoothed time until many others have followed, which an idle connection does not
    /// receive. So the shortest time bounds it.
    pub fn answer_time(&self) -> Duration {
        (self.rtt + 4 * self.rtt_deviation).min(2 * self.min_rtt + MAX_JITTER)
    }
}
