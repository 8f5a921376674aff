//! Packets, segments of data, their acknowledgements and their timers.

use std::io;
use std::time::{Duration, Instant};

use super::clock::Clock;
use super::event::NetEvent;
use super::ids::ConnectionId;
use super::log::Entry;
use super::network::Network;
use super::tcp::{Acknowledgement, Content, End, MSS, Segment, Side};

/// The delay of an acknowledgement: the shortest one of Linux (`TCP_DELACK_MIN`, with 250 ticks a second). After a
/// pause it may grow up to a longer round trip, at most to 200 ms.
const DELAYED_ACK: Duration = Duration::from_millis(40);

impl Network {
    /// Sends a packet, unless it is lost. Packets of one direction do not overtake each other.
    pub(super) fn packet(
        &mut self,
        s: &mut Clock,
        id: ConnectionId,
        from: Side,
        bytes: u32,
        event: NetEvent,
    ) {
        self.packets += 1;
        self.bytes += u64::from(bytes);
        let connection = &mut self.connections[id];
        let (sender, receiver) = connection.both(from);
        let (sends, receives) = (sender.host, receiver.host);
        if connection.dropped[from as usize] {
            return;
        }
        if connection.forgotten && !matches!(event, NetEvent::Reset { .. }) {
            // The device answers in place of the peer.
            return s.queue(s.now(), NetEvent::Reset { id, to: from });
        }
        let Some(at) = self.link(sends, receives).arrival(bytes, s.now(), s.rng()) else { return };
        let end = self.connections[id].end(from);
        end.last_arrival = at.max(end.last_arrival);
        let at = end.last_arrival;
        s.queue(at, event);
    }

    pub(super) fn queue_segment(
        &mut self,
        s: &mut Clock,
        id: ConnectionId,
        side: Side,
        segment: Segment,
    ) {
        let end = self.connections[id].end(side);
        if end.closed {
            return;
        }
        end.unsent_bytes += segment.bytes;
        end.unsent.push_back(segment);
        self.send_queued(s, id, side);
    }

    /// Sends what the window allows.
    pub(super) fn send_queued(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        loop {
            let end = self.connections[id].end(side);
            let Some(segment) = end.next_segment() else { break };
            let number = end.first + end.in_flight.len() as u64;
            end.bytes_in_flight += segment.bytes;
            end.in_flight.push_back(segment);
            if end.may_probe_tail() {
                // The probe follows the last segment.
                end.timer_at = None;
            }
            self.transmit(s, id, side, number);
        }
        self.arm_timer(s, id, side);
    }

    fn transmit(&mut self, s: &mut Clock, id: ConnectionId, from: Side, number: u64) {
        let end = self.connections[id].end(from);
        end.segments_out += 1;
        if !end.is_fin(number) {
            end.socket.data_segments_out += 1;
            let has_just_received = s.now() < end.last_data + DELAYED_ACK;
            end.socket.is_interactive |= end.data_segments_in > 0 && has_just_received;
        }
        let segment = &mut end.in_flight[(number - end.first) as usize];
        segment.sent_at = Some(s.now());
        let bytes = segment.bytes;
        let ack = end.acknowledge(s.now());
        self.packet(s, id, from, bytes, NetEvent::Segment { id, from, number, ack });
    }

    /// Starts the retransmission timer if something waits for an acknowledgement or for the window.
    pub(super) fn arm_timer(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let connection = &mut self.connections[id];
        if connection.local {
            return;
        }
        let end = connection.end(side);
        if end.in_flight.is_empty() && end.unsent.is_empty() {
            end.timer_at = None;
            return;
        }
        let from_now = end.timer_from(s.now());
        let at = *end.timer_at.get_or_insert(from_now);
        if end.timer_queued.is_none_or(|queued| at < queued) {
            end.timer_queued = Some(at);
            s.queue(at, NetEvent::Timeout { id, side });
        }
    }

    pub(super) fn timeout(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        if end.timer_queued != Some(s.now()) {
            // An earlier event has taken its place.
            return;
        }
        end.timer_queued = None;
        let Some(at) = end.timer_at else { return };
        if at > s.now() {
            return self.arm_timer(s, id, side);
        }
        if end.may_probe_tail() {
            return self.probe_tail(s, id, side);
        }
        if end.gives_up(s.now()) {
            return self.fail(s, id, side, io::ErrorKind::TimedOut);
        }
        end.timer_at = None;
        if end.in_flight.is_empty() {
            // Probes of a closed window are not retransmissions.
            end.socket.window_backoff = end.socket.window_backoff.saturating_add(1);
        } else {
            end.timed_out();
        }
        if let Some(first) = end.in_flight.front_mut() {
            first.repeated = true;
            end.retransmitted += 1;
            let (number, count) = (end.first, end.retransmits);
            s.record(Entry::Retransmit { connection: id, count });
            self.transmit(s, id, side, number);
        } else {
            // The window is closed.
            self.probe(s, id, side);
        }
        self.arm_timer(s, id, side);
    }

    /// Sends the last segment again, so that its acknowledgement shows which ones are lost.
    fn probe_tail(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        end.timer_at = None;
        end.socket.tail_probe_sent = true;
        end.retransmitted += 1;
        let number = end.first + end.in_flight.len() as u64 - 1;
        if let Some(last) = end.in_flight.back_mut() {
            last.repeated = true;
        }
        s.record(Entry::Retransmit { connection: id, count: 0 });
        self.transmit(s, id, side, number);
        self.arm_timer(s, id, side);
    }

    pub(super) fn segment_arrives(
        &mut self,
        s: &mut Clock,
        id: ConnectionId,
        from: Side,
        (number, ack): (u64, Acknowledgement),
    ) {
        if !self.connections[id].local {
            self.acknowledged(s, id, from.other(), ack);
        }
        let connection = &mut self.connections[id];
        let local = connection.local;
        let (sender, receiver) = connection.both(from);
        receiver.socket.note_time_stamp(number, ack.sent_at);
        receiver.segments_in += 1;
        receiver.last_segment = s.now();
        // A segment with data acknowledges, too.
        receiver.answered();
        if receiver.closed {
            return self.segment_for_closed_socket(s, id, from, number);
        }
        if !local && receiver.is_full() && !sender.is_fin(number) {
            // The window was made smaller after the peer had sent this.
            return self.send_ack(s, id, from.other());
        }
        receiver.data_segments_in += u32::from(!sender.is_fin(number));
        let unread = receiver.unread_bytes;
        if number > receiver.next {
            receiver.out_of_order += 1;
            if let Err(at) = receiver.early.binary_search(&number) {
                receiver.early.insert(at, number);
            }
        } else if number == receiver.next {
            receiver.last_data = s.now();
            if Self::receive_in_order(sender, receiver) {
                s.record(Entry::Closed { connection: id, reset: false });
            }
        }
        let bytes = receiver.unread_bytes - unread;
        if local {
            sender.acknowledged(receiver.next, None, s.now());
            sender.last_segment = s.now();
            sender.window = receiver.advertise();
            self.wake_reader(id, from.other());
            self.send_queued(s, id, from);
            return self.may_be_writable(id, from);
        }
        self.wake_reader(id, from.other());
        self.send_ack_later(s, id, from.other(), bytes);
    }

    /// Acknowledges data that has arrived in order, later if it is as little as a request: the response then carries
    /// the acknowledgement. A second segment is acknowledged at once; Linux waits until the process has read both
    /// (`tcp_cleanup_rbuf`).
    fn send_ack_later(&mut self, s: &mut Clock, id: ConnectionId, from: Side, bytes: u32) {
        let end = self.connections[id].end(from);
        end.socket.unacknowledged += bytes;
        let is_whole = bytes > 0 && end.early.is_empty() && !end.peer_ended;
        let is_large = end.socket.unacknowledged > MSS;
        let is_second = end.socket.ack_at.is_some();
        if !is_whole || !end.socket.is_interactive || is_large || is_second {
            return self.send_ack(s, id, from);
        }
        let at = s.now() + DELAYED_ACK;
        end.socket.ack_at = Some(at);
        s.queue(at, NetEvent::DelayedAck { id, from });
    }

    pub(super) fn delayed_ack_due(&mut self, s: &mut Clock, id: ConnectionId, from: Side) {
        let socket = &mut self.connections[id].end(from).socket;
        if socket.ack_at == Some(s.now()) {
            // No response has followed in time (`tcp_delack_timer_handler` leaves pingpong mode).
            socket.is_interactive = false;
            self.send_ack(s, id, from);
        }
    }

    /// Takes what has arrived in order. Returns whether the end has arrived.
    fn receive_in_order(sender: &mut End, receiver: &mut End) -> bool {
        loop {
            let Some((bytes, content)) = sender.take(receiver.next) else { return false };
            receiver.next += 1;
            match content {
                Content::Fin => {
                    receiver.peer_ended = true;
                    return true;
                }
                content => {
                    receiver.unread_bytes += bytes;
                    receiver.socket.advertised = receiver.socket.advertised.saturating_sub(bytes);
                    receiver.unread.push_back((bytes, content));
                }
            }
            if receiver.early.first() != Some(&receiver.next) {
                return false;
            }
            receiver.early.remove(0);
        }
    }

    pub(super) fn send_ack(&mut self, s: &mut Clock, id: ConnectionId, from: Side) {
        let end = self.connections[id].end(from);
        end.segments_out += 1;
        let (to, ack) = (from.other(), end.acknowledge(s.now()));
        self.packet(s, id, from, 40, NetEvent::Ack { id, to, ack });
    }

    pub(super) fn ack_arrives(
        &mut self,
        s: &mut Clock,
        id: ConnectionId,
        to: Side,
        ack: Acknowledgement,
    ) {
        let end = self.connections[id].end(to);
        end.segments_in += 1;
        end.last_segment = s.now();
        end.answered();
        self.acknowledged(s, id, to, ack);
        self.forget_if_over(id);
    }

    /// A packet has arrived that says what the peer has received.
    fn acknowledged(&mut self, s: &mut Clock, id: ConnectionId, to: Side, ack: Acknowledgement) {
        let Acknowledgement { next, gap, window, echo, .. } = ack;
        let end = self.connections[id].end(to);
        end.window = window;
        let is_new = end.acknowledged(next, echo, s.now());
        // Probes of a closed window go on.
        let is_idle = !end.has_pending() || end.may_send();
        if is_new || end.in_flight.is_empty() && is_idle {
            end.path_works();
            end.timer_at = None;
        }
        // A later segment has arrived, so the first one is lost (RACK).
        if gap
            && end.first == next
            && let Some(first) = end.in_flight.front_mut()
            && !std::mem::replace(&mut first.repeated, true)
        {
            end.retransmitted += 1;
            let number = end.first;
            self.transmit(s, id, to, number);
        }
        self.send_queued(s, id, to);
        self.may_be_writable(id, to);
    }

    /// The task that waits for what has arrived is woken.
    fn wake_reader(&mut self, id: ConnectionId, side: Side) {
        self.wakers.extend(self.connections[id].end(side).socket.reader.take());
    }
}

impl End {
    /// What a packet says that is sent now. A delayed acknowledgement goes with it.
    fn acknowledge(&mut self, now: Instant) -> Acknowledgement {
        (self.socket.ack_at, self.socket.unacknowledged) = (None, 0);
        self.socket.acknowledged = self.next;
        Acknowledgement {
            next: self.next,
            gap: !self.early.is_empty(),
            window: self.advertise(),
            sent_at: now,
            echo: self.socket.time_stamp,
        }
    }
}
