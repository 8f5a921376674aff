//! A coarse network, for fleets: a message is one event. Acknowledgements take no time and no packets, and a connection that
//! has lost a packet never recovers. `TcpInfo` shows what it would show with segments: retransmissions after a loss, and
//! acknowledgements by the kernel of a stopped process.

use std::time::{Duration, Instant};

use jackstay_core::tcp_info::TcpInfo;

use super::tcp::{Content, MIN_RTO, Segment, Side};
use super::{ConnectionId, HostId, NetEvent, Network, Payload, Schedule};

impl<P: Payload> Network<P> {
    /// Sends a message or FIN.
    pub(super) fn send_message(
        &mut self,
        s: &mut impl Schedule,
        id: ConnectionId,
        from: Side,
        bytes: u32,
        content: Content<P>,
    ) {
        if !self.connections.contains(id) {
            return;
        }
        let (sender, receiver) = self.connections[id].both(from);
        let (sends, receives) = (sender.host, receiver.host);
        if sender.closed || sender.lost_since.is_some() {
            return;
        }
        let is_acknowledged = !self.link(receives, sends).blocked;
        let arrival = self.link(sends, receives).arrival(bytes, s.now(), s.rng());
        let sender = self.connections[id].end(from);
        sender.segments_out += 1;
        if is_acknowledged && arrival.is_some() {
            sender.segments_in += 1;
            sender.last_segment = s.now();
            sender.bytes_acked += u64::from(bytes);
        } else {
            sender.lost_since = Some(s.now());
        }
        let Some(at) = arrival else { return };
        let at = at.max(sender.last_arrival);
        sender.last_arrival = at;
        sender.in_flight.push_back(Segment::new(0, content));
        s.queue(at, NetEvent::Message { id, from });
    }

    pub(super) fn message_arrives(&mut self, s: &mut impl Schedule, id: ConnectionId, from: Side) {
        let (sender, receiver) = self.connections[id].both(from);
        let Some(segment) = sender.in_flight.pop_front() else { return };
        if receiver.closed {
            if !sender.closed {
                self.packet(s, id, from.other(), 40, NetEvent::Reset { id, to: from });
            }
            return;
        }
        receiver.segments_in += 1;
        receiver.data_segments_in += 1;
        (receiver.last_segment, receiver.last_data) = (s.now(), s.now());
        receiver.unread.push_back((0, segment.content));
        self.deliver(s, id, from.other());
    }

    pub(super) fn close_coarsely(&mut self, s: &mut impl Schedule, id: ConnectionId, side: Side) {
        self.send_message(s, id, side, 40, Content::Fin);
        if self.connections.contains(id) {
            let end = self.connections[id].end(side);
            end.closed = true;
            end.unread.clear();
            self.forget_if_closed(id);
        }
    }

    pub(super) fn probe_coarsely(&mut self, s: &impl Schedule, id: ConnectionId, side: Side) {
        if !self.connections.contains(id) {
            return;
        }
        let (sender, receiver) = self.connections[id].both(side);
        let (sends, receives) = (sender.host, receiver.host);
        let is_open = !self.link(sends, receives).blocked && !self.link(receives, sends).blocked;
        let end = self.connections[id].end(side);
        if is_open {
            (end.probes, end.last_segment) = (0, s.now());
            end.segments_in += 1;
        } else {
            end.probes = end.probes.saturating_add(1);
        }
    }

    pub(super) fn coarse_info(&self, id: ConnectionId, side: Side, now: Instant) -> TcpInfo {
        if !self.connections.contains(id) {
            return TcpInfo { closed: true, ..TcpInfo::default() };
        }
        let end = &self.connections[id].ends[side as usize];
        let mut info = end.info(now);
        if let Some(since) = end.lost_since {
            let mut timeout = MIN_RTO;
            let mut left = now.saturating_duration_since(since);
            while left >= timeout {
                left -= timeout;
                info.retransmits = info.retransmits.saturating_add(1);
                if !end.thin || info.retransmits > 6 {
                    timeout = (timeout * 2).min(Duration::from_secs(120));
                }
            }
            info.retransmitted += u32::from(info.retransmits);
            info.segments_out += u32::from(info.retransmits);
            info.unacked = 1;
        }
        info
    }

    /// The paths to a server work again: connections with a lost packet, and those of which only one end is closed, are
    /// reset.
    pub(crate) fn reset_lost(&mut self, s: &mut impl Schedule, host: HostId) {
        for id in self.connections.ids() {
            if !self.coarse || !self.connections.contains(id) {
                continue;
            }
            let connection = &self.connections[id];
            let ends = &connection.ends;
            let is_lost = ends.iter().any(|end| end.lost_since.is_some() || end.closed);
            if ends[1].host != host || !connection.established || !is_lost {
                continue;
            }
            for to in [Side::Client, Side::Server] {
                s.queue(s.now(), NetEvent::Reset { id, to });
            }
        }
    }

    /// A coarse network forgets a connection that both ends have closed.
    pub(super) fn forget_if_closed(&mut self, id: ConnectionId) {
        if !self.coarse || !self.connections.contains(id) {
            return;
        }
        let connection = &self.connections[id];
        let [client, server] = &connection.ends;
        if client.closed && (server.closed || !connection.established) {
            self.connections.remove(id);
        }
    }
}
