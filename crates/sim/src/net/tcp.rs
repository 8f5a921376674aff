//! The state of a TCP connection: two ends, each with what it sends and receives.
//!
//! A message is one segment, however long it is: segmentation offload sends it in one piece, and it is lost as a whole.
//! The network keeps the order of packets. Each end knows at once what it could learn from SACK.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use jackstay_core::tcp_info::TcpInfo;

use super::{HostId, ProcessId};
use crate::http2::Frame;

/// Bytes that a receiver's kernel holds for its process.
pub(super) const RECEIVE_BUFFER: u32 = 256 * 1024;
/// Bytes that a sender has in flight at most, in place of congestion control.
pub(super) const MAX_IN_FLIGHT: u32 = 256 * 1024;
/// The shortest retransmission timeout (Linux, `TCP_RTO_MIN`).
pub(super) const MIN_RTO: Duration = Duration::from_millis(200);
/// The longest retransmission timeout (Linux, `TCP_RTO_MAX`).
const MAX_RTO: Duration = Duration::from_secs(120);
/// Retransmissions of a thin stream whose timeout does not double (Linux, `TCP_THIN_LINEAR_RETRIES`).
const LINEAR_RETRIES: u8 = 6;
/// A smaller receive window counts as closed.
pub(super) const MIN_WINDOW: u32 = MSS;
const MSS: u32 = 1448;

/// One of the two ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Side {
    /// The end that has connected.
    Client,
    /// The end that has accepted.
    Server,
}

impl Side {
    /// The other end.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// What a segment contains. The receiver takes it, so that later copies of the segment are empty.
#[derive(Debug)]
pub(super) enum Content {
    Message(Frame),
    Fin,
    Reset,
    Taken,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub(super) bytes: u32,
    pub(super) content: Content,
    /// It was sent again and may still arrive.
    pub(super) repeated: bool,
}

/// One end of a connection.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub(super) struct End {
    pub(super) host: HostId,
    pub(super) process: ProcessId,
    /// The process has closed its socket, or knows that it was reset.
    pub(super) closed: bool,
    /// The peer has sent FIN.
    pub(super) peer_ended: bool,
    /// `TCP_THIN_LINEAR_TIMEOUTS`.
    pub(super) thin: bool,
    pub(super) unsent: VecDeque<Segment>,
    pub(super) in_flight: VecDeque<Segment>,
    /// Number of the first segment in flight.
    pub(super) first: u64,
    pub(super) bytes_in_flight: u32,
    pub(super) bytes_acked: u64,
    pub(super) window: u32,
    pub(super) retransmits: u8,
    pub(super) probes: u8,
    /// When a coarse network lost a packet from this end.
    pub(super) lost_since: Option<Instant>,
    pub(super) timer_at: Option<Instant>,
    pub(super) timer_queued: bool,
    base_rto: Duration,
    pub(super) rto: Duration,
    pub(super) segments_out: u32,
    pub(super) retransmitted: u32,
    /// Number of the next segment that is expected.
    pub(super) next: u64,
    /// The segments that arrived after a lost one.
    pub(super) early: Vec<u64>,
    pub(super) unread: VecDeque<(u32, Content)>,
    pub(super) unread_bytes: u32,
    pub(super) segments_in: u32,
    pub(super) data_segments_in: u32,
    pub(super) out_of_order: u32,
    pub(super) last_segment: Instant,
    pub(super) last_data: Instant,
    /// When the last packet from this end arrives; later ones do not overtake it.
    pub(super) last_arrival: Instant,
}

impl End {
    pub(super) fn new(
        host: HostId,
        process: ProcessId,
        thin: bool,
        rtt: Duration,
        now: Instant,
    ) -> Self {
        let rto = MIN_RTO.max(rtt + MIN_RTO / 2);
        Self {
            host,
            process,
            closed: false,
            peer_ended: false,
            thin,
            unsent: VecDeque::new(),
            in_flight: VecDeque::new(),
            first: 0,
            bytes_in_flight: 0,
            bytes_acked: 0,
            window: RECEIVE_BUFFER,
            retransmits: 0,
            probes: 0,
            lost_since: None,
            timer_at: None,
            timer_queued: false,
            base_rto: rto,
            rto,
            segments_out: 0,
            retransmitted: 0,
            next: 0,
            early: Vec::new(),
            unread: VecDeque::new(),
            unread_bytes: 0,
            segments_in: 0,
            data_segments_in: 0,
            out_of_order: 0,
            last_segment: now,
            last_data: now,
            last_arrival: now,
        }
    }

    /// Whether the next segment may be sent now. After a retransmission timeout the congestion window is one segment
    /// (RFC 5681, section 3.1), which is the one in flight.
    pub(super) fn may_send(&self) -> bool {
        let Some(segment) = self.unsent.front() else { return false };
        if self.retransmits > 0 && !self.in_flight.is_empty() {
            return false;
        }
        let bytes = self.bytes_in_flight + segment.bytes;
        self.in_flight.is_empty() && self.window >= segment.bytes.min(MSS)
            || bytes <= MAX_IN_FLIGHT.min(self.window)
    }

    /// Removes what the peer has received before the segment `next`. Returns whether that is new.
    pub(super) fn acknowledged(&mut self, next: u64) -> bool {
        let before = self.first;
        while self.first < next
            && let Some(segment) = self.in_flight.pop_front()
        {
            self.first += 1;
            self.bytes_in_flight -= segment.bytes;
            self.bytes_acked += u64::from(segment.bytes);
        }
        self.first > before
    }

    /// The retransmission timer starts again, because the path works.
    pub(super) fn path_works(&mut self) {
        self.retransmits = 0;
        self.rto = self.base_rto;
    }

    /// A retransmission timeout has passed.
    pub(super) fn timed_out(&mut self) {
        self.retransmits = self.retransmits.saturating_add(1);
        if !(self.thin && self.in_flight.len() < 4 && self.retransmits <= LINEAR_RETRIES) {
            self.rto = (self.rto * 2).min(MAX_RTO);
        }
    }

    /// The segment that arrives, if its sender still has it.
    pub(super) fn take(&mut self, number: u64) -> Option<(u32, Content)> {
        let segment = self.in_flight.get_mut(number.checked_sub(self.first)? as usize)?;
        Some((segment.bytes, std::mem::replace(&mut segment.content, Content::Taken)))
    }

    /// What the receiver may send.
    pub(super) fn receive_window(&self) -> u32 {
        RECEIVE_BUFFER.saturating_sub(self.unread_bytes)
    }

    /// Forgets everything that waits.
    pub(super) fn clear(&mut self) {
        self.unsent.clear();
        self.first += self.in_flight.len() as u64;
        self.in_flight.clear();
        self.unread.clear();
        self.early.clear();
        (self.bytes_in_flight, self.unread_bytes, self.timer_at) = (0, 0, None);
    }

    pub(super) fn info(&self, now: Instant) -> TcpInfo {
        let segments = |bytes: u32| bytes.div_ceil(MSS);
        TcpInfo {
            closed: self.closed,
            ended: self.peer_ended,
            retransmits: self.retransmits,
            probes: self.probes,
            rto: self.rto,
            send_mss: MSS,
            unacked: segments(self.bytes_in_flight),
            retransmitted: self.retransmitted,
            segments_out: self.segments_out,
            segments_in: self.segments_in,
            data_segments_in: self.data_segments_in,
            out_of_order: self.out_of_order,
            last_ack_recv: now.saturating_duration_since(self.last_segment),
            last_data_recv: now.saturating_duration_since(self.last_data),
            bytes_acked: self.bytes_acked,
            notsent_bytes: self.unsent.iter().map(|segment| segment.bytes).sum(),
            data_segments_sent: self.segments_out,
            send_window: Some(self.window),
            ..TcpInfo::default()
        }
    }
}

/// A connection.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) ends: [End; 2],
    /// Both ends are on one host: nothing is lost, and acknowledgements take no time.
    pub(super) local: bool,
    pub(super) established: bool,
    /// A device on the path drops the packets from the client, and from the server.
    pub(super) dropped: [bool; 2],
    /// A device on the path has forgotten the flow and resets it when a packet passes.
    pub(super) forgotten: bool,
}

impl Connection {
    pub(super) fn end(&mut self, side: Side) -> &mut End {
        &mut self.ends[side as usize]
    }

    /// An end, and the other one.
    pub(super) fn both(&mut self, side: Side) -> (&mut End, &mut End) {
        let [client, server] = &mut self.ends;
        match side {
            Side::Client => (client, server),
            Side::Server => (server, client),
        }
    }
}
