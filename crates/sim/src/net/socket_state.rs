//! What an end of a connection has besides, if its payload is read: the state of a socket.

use std::io;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Bytes that a receiver's kernel holds for its process.
pub(super) const RECEIVE_BUFFER: u32 = 256 * 1024;
/// The shortest retransmission timeout (Linux, `TCP_RTO_MIN`).
pub(super) const MIN_RTO: Duration = Duration::from_millis(200);

/// Keepalive probes (`TCP_KEEPIDLE`, `TCP_KEEPINTVL` and `TCP_KEEPCNT`, tcp(7)).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Time without a segment from the peer before the first probe.
    pub idle: Duration,
    /// Time between probes.
    pub interval: Duration,
    /// Unanswered probes after which the kernel closes the connection.
    pub probes: u8,
}

/// The options of a new socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketOptions {
    /// `TCP_THIN_LINEAR_TIMEOUTS`: the timeout of a stream with few packets in flight does not double at once.
    pub thin: bool,
    /// `SO_KEEPALIVE`.
    pub keepalive: Option<Keepalive>,
    /// `TCP_NOTSENT_LOWAT`, in bytes; `u32::MAX` for no bound.
    pub max_unsent: u32,
}

/// The smoothed round-trip time (RFC 6298).
#[derive(Debug, Clone, Copy)]
pub(super) struct RoundTrip {
    pub(super) smoothed: Duration,
    pub(super) deviation: Duration,
    /// More than an hour before the first sample, as in `TCP_INFO`.
    pub(super) min: Duration,
    has_sample: bool,
}

impl RoundTrip {
    fn none() -> Self {
        let min = Duration::from_micros(u64::from(u32::MAX));
        Self { smoothed: Duration::ZERO, deviation: Duration::ZERO, min, has_sample: false }
    }

    /// Adds a sample.
    pub(super) fn add(&mut self, sample: Duration) {
        self.min = self.min.min(sample);
        if !std::mem::replace(&mut self.has_sample, true) {
            (self.smoothed, self.deviation) = (sample, sample / 2);
            return;
        }
        self.deviation = self.deviation * 3 / 4 + self.smoothed.abs_diff(sample) / 4;
        self.smoothed = self.smoothed * 7 / 8 + sample / 8;
    }

    /// The retransmission timeout. Linux bounds the part for the deviation by `TCP_RTO_MIN`.
    pub(super) fn timeout(&self) -> Duration {
        self.smoothed + (self.deviation * 4).max(MIN_RTO)
    }
}

/// The state of a socket.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub(super) struct SocketState {
    /// The process has the socket, or will accept it. Otherwise the kernel keeps it until the connection is over.
    pub(super) owned: bool,
    /// FIN follows the bytes that are queued, or was sent.
    pub(super) fin_queued: bool,
    /// The connection was reset by either end: all later segments are answered with RST.
    pub(super) reset: bool,
    /// The close sends RST (`SO_LINGER` of zero).
    pub(super) resets_when_closed: bool,
    /// The server's end has sent the answer to SYN.
    pub(super) answered: bool,
    /// The server's end is in the accept queue or was accepted.
    pub(super) accepted: bool,
    /// When the packet of the handshake was sent that is answered next, unless it was repeated.
    pub(super) handshake_at: Option<Instant>,
    /// What the next operation returns.
    pub(super) error: Option<io::ErrorKind>,
    pub(super) reader: Option<Waker>,
    pub(super) writer: Option<Waker>,
    pub(super) receive_buffer: u32,
    pub(super) max_unsent: u32,
    /// The kernel has taken no bytes from the process, and has not yet reported that it takes some again.
    pub(super) refused: bool,
    /// The window that the peer knows of, in bytes.
    pub(super) advertised: u32,
    /// Data has followed data of the peer so soon that acknowledgements are delayed (Linux, pingpong mode).
    pub(super) is_interactive: bool,
    /// When the delayed acknowledgement is sent, if there is one.
    pub(super) ack_at: Option<Instant>,
    /// Bytes since the last acknowledgement.
    pub(super) unacknowledged: u32,
    /// The last acknowledgement that was sent.
    pub(super) acknowledged: u64,
    /// The time stamp of the peer that is answered.
    pub(super) time_stamp: Option<Instant>,
    pub(super) round_trip: RoundTrip,
    /// When the first segment was sent that has no answer, once its timeout has passed.
    pub(super) stalled_since: Option<Instant>,
    /// A tail loss probe was sent since the last acknowledgement of new data.
    pub(super) tail_probe_sent: bool,
    /// How often the time between probes of a closed window has doubled.
    pub(super) window_backoff: u8,
    pub(super) data_segments_out: u32,
    pub(super) keepalive: Option<Keepalive>,
    /// When the keepalive timer ends.
    pub(super) keepalive_at: Option<Instant>,
}

impl SocketState {
    /// Takes in the time stamp of a segment with this number. A segment behind a lost one is not answered (RFC 7323, section
    /// 4.3).
    pub(super) fn note_time_stamp(&mut self, number: u64, sent_at: Instant) {
        if number <= self.acknowledged {
            self.time_stamp = self.time_stamp.max(Some(sent_at));
        }
    }

    pub(super) fn wake(&mut self, wakers: &mut Vec<Waker>) {
        wakers.extend(self.reader.take());
        wakers.extend(self.writer.take());
    }

    pub(super) fn set_options(&mut self, options: SocketOptions) {
        (self.keepalive, self.max_unsent) = (options.keepalive, options.max_unsent);
    }
}

impl Default for SocketState {
    fn default() -> Self {
        Self {
            owned: false,
            fin_queued: false,
            reset: false,
            resets_when_closed: false,
            answered: false,
            accepted: false,
            handshake_at: None,
            error: None,
            reader: None,
            writer: None,
            receive_buffer: RECEIVE_BUFFER,
            max_unsent: u32::MAX,
            refused: false,
            advertised: RECEIVE_BUFFER,
            is_interactive: false,
            ack_at: None,
            unacknowledged: 0,
            acknowledged: 0,
            time_stamp: None,
            round_trip: RoundTrip::none(),
            stalled_since: None,
            tail_probe_sent: false,
            window_backoff: 0,
            data_segments_out: 0,
            keepalive: None,
            keepalive_at: None,
        }
    }
}
