//! The state of a TCP connection: two ends, each with what it sends and receives.
//!
//! Bytes are cut to segments of at most [`MAX_SEGMENT`], which are lost as a whole. The network keeps the order of
//! packets. Each end knows at once what it could learn from SACK.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use jackstay_core::tcp_info::TcpInfo;

use super::ids::{HostId, ProcessId};
use super::socket_state::{MIN_RTO, RECEIVE_BUFFER, SocketState};
use bytes::BytesMut;

/// Bytes that a sender has in flight at most, in place of congestion control.
pub(super) const MAX_IN_FLIGHT: u32 = 256 * 1024;
/// Bytes of a socket that are one segment at most. Segmentation offload sends up to 64 KiB in one piece; a quarter of
/// it keeps the effect of a lost packet small, and a bulk transfer is not thousands of events.
pub(super) const MAX_SEGMENT: u32 = 16 * 1024;
/// Bytes of a socket that are unsent or unacknowledged at most (`net.ipv4.tcp_wmem` lets them grow to 4 MiB).
pub(super) const SEND_BUFFER: u32 = 256 * 1024;
/// The longest retransmission timeout (Linux, `TCP_RTO_MAX`).
pub(super) const MAX_RTO: Duration = Duration::from_secs(120);
/// Retransmissions of a thin stream whose timeout does not double (Linux, `TCP_THIN_LINEAR_RETRIES`).
const LINEAR_RETRIES: u8 = 6;
pub(super) const MSS: u32 = 1448;
/// Time without an acknowledgement after which the kernel closes a connection (Linux, `tcp_retries2` of 15), and one
/// whose socket the process has closed (8 retransmissions). Linux compares times, too (`retransmits_timed_out`).
const MAX_STALL: Duration = Duration::from_millis(924_600);
const MAX_STALL_OF_CLOSED: Duration = Duration::from_millis(102_200);

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

/// What a packet of an end says of what it has received.
#[derive(Debug, Clone, Copy)]
pub struct Acknowledgement {
    /// Number of the next segment that it expects.
    pub(super) next: u64,
    /// Whether later ones have arrived.
    pub(super) gap: bool,
    /// Bytes that it takes.
    pub(super) window: u32,
    /// When the packet was sent, and which such time of the peer it answers (RFC 7323, section 4.3).
    pub(super) sent_at: Instant,
    pub(super) echo: Option<Instant>,
}

/// What a segment contains. The receiver takes it, so that later copies of the segment are empty.
#[derive(Debug)]
pub(super) enum Content {
    Bytes(BytesMut),
    Fin,
    Taken,
}

#[derive(Debug)]
pub(super) struct Segment {
    pub(super) bytes: u32,
    pub(super) content: Content,
    /// It was sent again and may still arrive.
    pub(super) repeated: bool,
    pub(super) sent_at: Option<Instant>,
}

impl Segment {
    pub(super) fn new(bytes: u32, content: Content) -> Self {
        Self { bytes, content, repeated: false, sent_at: None }
    }

    pub(super) fn fin() -> Self {
        Self::new(1, Content::Fin)
    }
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
    pub(super) timer_at: Option<Instant>,
    /// The time of the event that is queued for the timer.
    pub(super) timer_queued: Option<Instant>,
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
    pub(super) unsent_bytes: u32,
    pub(super) socket: SocketState,
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
            timer_at: None,
            timer_queued: None,
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
            unsent_bytes: 0,
            socket: SocketState::default(),
        }
    }

    /// Whether the next segment may be sent now. After a retransmission timeout the congestion window is one segment
    /// (RFC 5681, section 3.1), which is the one in flight.
    pub(super) fn may_send(&self) -> bool {
        let Some(segment) = self.unsent.front() else { return false };
        if self.retransmits > 0 && !self.in_flight.is_empty() {
            return false;
        }
        self.sendable(segment.bytes) > 0
    }

    /// The bytes of the next segment that may be sent. Part of it is sent only if that is a full packet or all that the
    /// window lets through (RFC 9293, section 3.8.6.2.1).
    fn sendable(&self, bytes: u32) -> u32 {
        let room = MAX_IN_FLIGHT.min(self.window).saturating_sub(self.bytes_in_flight);
        if bytes <= room {
            bytes
        } else if room >= MSS {
            room - room % MSS
        } else if self.in_flight.is_empty() {
            room
        } else {
            0
        }
    }

    /// The next segment, if it may be sent now.
    pub(super) fn next_segment(&mut self) -> Option<Segment> {
        if !self.may_send() {
            return None;
        }
        let bytes = self.unsent.front()?.bytes;
        let sendable = self.sendable(bytes);
        self.unsent_bytes -= sendable;
        if let Some(first) = self.unsent.front_mut()
            && sendable < bytes
            && let Content::Bytes(rest) = &mut first.content
        {
            first.bytes -= sendable;
            let bytes = rest.split_to(sendable as usize);
            return Some(Segment::new(sendable, Content::Bytes(bytes)));
        }
        self.unsent.pop_front()
    }

    /// Removes what the peer has received before the segment `next`, and whose answer has the time stamp `echo`. Returns whether
    /// that is new.
    pub(super) fn acknowledged(&mut self, next: u64, echo: Option<Instant>, now: Instant) -> bool {
        let before = self.first;
        let (mut sample, mut has_repeated) = (None, false);
        while self.first < next
            && let Some(segment) = self.in_flight.pop_front()
        {
            self.first += 1;
            self.bytes_in_flight -= segment.bytes;
            self.bytes_acked += u64::from(segment.bytes);
            has_repeated |= segment.repeated;
            sample = segment.sent_at;
        }
        // The time of a repeated segment is ambiguous (RFC 6298, section 3), and those behind it waited for it. The time
        // stamp is that of the first copy that has arrived.
        if has_repeated {
            sample = echo.filter(|_| self.first > before);
        }
        if let Some(sent_at) = sample {
            self.add_round_trip(now.saturating_duration_since(sent_at));
        }
        self.first > before
    }

    /// Adds a sample of the round-trip time, from which the timeout follows.
    pub(super) fn add_round_trip(&mut self, sample: Duration) {
        self.socket.round_trip.add(sample);
        self.base_rto = self.socket.round_trip.timeout();
        if self.retransmits == 0 {
            self.rto = self.base_rto;
        }
    }

    /// Whether the kernel gives the connection up, because the peer has acknowledged nothing for too long.
    pub(super) fn gives_up(&mut self, now: Instant) -> bool {
        let rto = self.rto;
        let since =
            *self.socket.stalled_since.get_or_insert_with(|| now.checked_sub(rto).unwrap_or(now));
        let limit = if self.closed { MAX_STALL_OF_CLOSED } else { MAX_STALL };
        now.saturating_duration_since(since) >= limit
    }

    /// The retransmission timer starts again, because the path works.
    pub(super) fn path_works(&mut self) {
        self.retransmits = 0;
        self.rto = self.base_rto;
        (self.socket.tail_probe_sent, self.socket.window_backoff) = (false, 0);
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
        let buffer = self.socket.receive_buffer;
        let free = buffer.saturating_sub(self.unread_bytes);
        // A small window would lead to small segments (RFC 9293, section 3.8.6.2.2).
        if free < MSS.min(buffer / 2) { 0 } else { free }
    }

    /// The window of an acknowledgement that is sent now.
    pub(super) fn advertise(&mut self) -> u32 {
        self.socket.advertised = self.receive_window();
        self.socket.advertised
    }

    /// Whether the peer has to hear that the window has opened: it is twice what the peer knows of, and that is at most
    /// half of the buffer (Linux, `__tcp_cleanup_rbuf`).
    pub(super) fn has_news_of_window(&self) -> bool {
        let known = self.socket.advertised;
        let window = self.receive_window();
        2 * known <= self.socket.receive_buffer && window > 0 && window >= 2 * known
    }

    /// Whether the receive buffer has no room.
    pub(super) fn is_full(&self) -> bool {
        self.unread_bytes >= self.socket.receive_buffer
    }

    /// Whether the segment in flight with this number is FIN.
    pub(super) fn is_fin(&self, number: u64) -> bool {
        self.socket.fin_queued
            && self.unsent.is_empty()
            && number + 1 == self.first + self.in_flight.len() as u64
    }

    /// A segment with an acknowledgement has arrived.
    pub(super) fn answered(&mut self) {
        self.probes = 0;
        self.socket.stalled_since = None;
    }

    /// Whether the kernel takes bytes from the process. `again`: after it has taken none, so that a task is not woken
    /// for every acknowledgement (Linux, `sk_stream_is_writeable`).
    pub(super) fn is_writable(&self, again: bool) -> bool {
        let queued = self.queued_bytes();
        let limit = if again { SEND_BUFFER - SEND_BUFFER / 3 } else { SEND_BUFFER - 1 };
        queued <= limit && self.unsent_bytes < self.socket.max_unsent
    }

    /// Forgets everything that waits.
    pub(super) fn clear(&mut self) {
        self.clear_sent();
        self.clear_unread();
        self.early.clear();
    }

    /// Forgets what was not acknowledged.
    pub(super) fn clear_sent(&mut self) {
        self.unsent.clear();
        self.first += self.in_flight.len() as u64;
        self.in_flight.clear();
        (self.bytes_in_flight, self.unsent_bytes, self.timer_at) = (0, 0, None);
    }

    /// Forgets what was not read.
    pub(super) fn clear_unread(&mut self) {
        self.unread.clear();
        self.unread_bytes = 0;
    }

    /// Whether bytes or FIN wait to be sent or acknowledged.
    pub(super) fn has_pending(&self) -> bool {
        !self.unsent.is_empty() || !self.in_flight.is_empty()
    }

    /// The bytes that wait to be sent or acknowledged.
    pub(super) fn queued_bytes(&self) -> u32 {
        self.unsent_bytes + self.bytes_in_flight
    }

    pub(super) fn info(&self, now: Instant) -> TcpInfo {
        let (socket, has_ended) = (&self.socket, self.socket.fin_queued && !self.has_pending());
        TcpInfo {
            closed: self.closed || self.peer_ended && has_ended,
            rtt: socket.round_trip.smoothed,
            rtt_deviation: socket.round_trip.deviation,
            min_rtt: socket.round_trip.min,
            ended: self.peer_ended,
            retransmits: self.retransmits,
            probes: self.probes,
            rto: self.rto,
            send_mss: MSS,
            unacked: self.bytes_in_flight.div_ceil(MSS).max(self.in_flight.len() as u32),
            retransmitted: self.retransmitted,
            segments_out: self.segments_out,
            segments_in: self.segments_in,
            data_segments_in: self.data_segments_in,
            out_of_order: self.out_of_order,
            last_ack_recv: now.saturating_duration_since(self.last_segment),
            last_data_recv: now.saturating_duration_since(self.last_data),
            bytes_acked: self.bytes_acked,
            bytes_received: 0,
            receive_rtt: Duration::ZERO,
            handed_over: None,
            notsent_bytes: self.unsent_bytes,
            data_segments_sent: socket.data_segments_out,
            send_window: Some(self.window),
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
