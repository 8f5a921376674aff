//! The life of a connection: the handshake, keepalive probes, close, reset and failure.

use std::io;
use std::task::Waker;
use std::time::Duration;

use super::clock::Clock;
use super::event::NetEvent;
use super::ids::ConnectionId;
use super::log::Entry;
use super::network::Network;
use super::socket_state::SocketOptions;
use super::tcp::{Segment, Side};

/// Time until the first repetition of the answer to SYN; it doubles (Linux, `TCP_TIMEOUT_INIT`).
const SYN_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Repetitions of the answer to SYN (Linux, `tcp_synack_retries`).
const SYN_ANSWER_RETRIES: u8 = 5;

impl Network {
    /// A listener accepts the SYN of a connection.
    pub(super) fn answer_syn(&mut self, s: &mut Clock, id: ConnectionId, options: SocketOptions) {
        let end = self.connections[id].end(Side::Server);
        end.socket.set_options(options);
        if !std::mem::replace(&mut end.socket.answered, true) {
            end.socket.handshake_at = Some(s.now());
            let at = s.now() + SYN_ANSWER_TIMEOUT;
            s.queue(at, NetEvent::SynAnswerTimeout { id, retries: 1 });
        }
    }

    pub(super) fn syn_answer_times_out(&mut self, s: &mut Clock, id: ConnectionId, retries: u8) {
        let end = self.connections[id].end(Side::Server);
        if end.socket.accepted || end.closed {
            return self.forget_if_over(id);
        }
        if retries > SYN_ANSWER_RETRIES {
            end.closed = true;
            return self.forget_if_over(id);
        }
        end.socket.handshake_at = None;
        self.send_syn_answer(s, id);
        let pause = SYN_ANSWER_TIMEOUT * (1 << retries);
        s.queue(s.now() + pause, NetEvent::SynAnswerTimeout { id, retries: retries + 1 });
    }

    /// The answer to SYN has arrived.
    pub(super) fn complete_connect(&mut self, s: &mut Clock, id: ConnectionId) {
        let connection = &mut self.connections[id];
        let end = &mut connection.ends[0];
        if end.closed && !connection.established {
            // The process has given the connect up.
            return self.packet(s, id, Side::Client, 40, NetEvent::Reset { id, to: Side::Server });
        }
        if !std::mem::replace(&mut connection.established, true) {
            self.wakers.extend(end.socket.writer.take());
            s.record(Entry::ConnectEnded { connection: id, ok: true });
            // Linux counts SYN on the side that has sent it first.
            self.connections[id].end(Side::Client).bytes_acked += 1;
            self.complete_handshake(s, id, Side::Client);
        }
        self.packet(s, id, Side::Client, 40, NetEvent::Established { id });
    }

    /// An end has received the last packet of the handshake that it waits for: it knows the round-trip time, if no
    /// packet was repeated, and starts the keepalive timer, if it has one.
    pub(super) fn complete_handshake(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        if let Some(at) = end.socket.handshake_at {
            end.add_round_trip(s.now().saturating_duration_since(at));
        }
        let Some(keepalive) = end.socket.keepalive else { return };
        let at = s.now() + keepalive.idle;
        if end.socket.keepalive_at.replace(at).is_none() {
            s.queue(at, NetEvent::Keepalive { id, side });
        }
    }

    pub(super) fn keepalive_due(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        let (Some(at), Some(keepalive)) = (end.socket.keepalive_at, end.socket.keepalive) else {
            return end.socket.keepalive_at = None;
        };
        if end.closed {
            return end.socket.keepalive_at = None;
        }
        if at > s.now() {
            return s.queue(at, NetEvent::Keepalive { id, side });
        }
        let idle = s.now().saturating_duration_since(end.last_segment);
        let mut pause = keepalive.interval;
        if end.has_pending() {
            // Retransmissions show whether the peer is there.
            pause = keepalive.idle;
        } else if idle < keepalive.idle {
            pause = keepalive.idle.saturating_sub(idle);
        } else if end.probes >= keepalive.probes {
            return self.fail(s, id, side, io::ErrorKind::TimedOut);
        } else {
            self.probe(s, id, side);
        }
        let at = s.now() + pause;
        self.connections[id].end(side).socket.keepalive_at = Some(at);
        s.queue(at, NetEvent::Keepalive { id, side });
    }

    /// What `TCP_KEEPIDLE` does when it is set: a probe, if the connection has been idle for longer and nothing is
    /// unacknowledged.
    pub(super) fn probe_now(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        let Some(keepalive) = end.socket.keepalive else { return };
        let idle = s.now().saturating_duration_since(end.last_segment);
        if end.closed || end.has_pending() || idle < keepalive.idle {
            return;
        }
        if end.socket.keepalive_at.is_some() {
            end.socket.keepalive_at = Some(s.now() + keepalive.interval);
        }
        self.probe(s, id, side);
    }

    /// Sends FIN after what is queued.
    pub(super) fn end_stream(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        if !end.closed && !std::mem::replace(&mut end.socket.fin_queued, true) {
            self.wakers.extend(end.socket.writer.take());
            self.queue_segment(s, id, side, Segment::fin());
        }
    }

    /// The process closes a socket: with RST if bytes are unread or the option says so, otherwise with FIN. The kernel
    /// keeps what is queued until the peer has it.
    pub(super) fn close_socket(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        if !self.connections.contains(id) {
            return;
        }
        let connection = &mut self.connections[id];
        let is_connecting = side == Side::Client && !connection.established;
        let end = connection.end(side);
        if !std::mem::replace(&mut end.socket.owned, false) {
            return;
        }
        (end.socket.reader, end.socket.writer) = (None, None);
        if is_connecting {
            // The SYN is on its way; its timer forgets the connection.
            return end.closed = true;
        }
        if end.closed {
            return self.forget_if_over(id);
        }
        if end.socket.resets_when_closed || !end.unread.is_empty() {
            return self.reset_socket(s, id, side);
        }
        self.end_stream(s, id, side);
        let end = self.connections[id].end(side);
        // A shorter limit holds for what is still unacknowledged.
        end.closed = true;
        self.forget_if_over(id);
    }

    /// Sends RST and forgets what is queued.
    pub(super) fn reset_socket(&mut self, s: &mut Clock, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        end.closed = true;
        end.socket.reset = true;
        end.clear();
        s.record(Entry::Closed { connection: id, reset: true });
        self.packet(s, id, side, 40, NetEvent::Reset { id, to: side.other() });
        self.forget_if_over(id);
    }

    /// A connection fails for the process on this side. What has arrived can still be read.
    pub(super) fn fail(
        &mut self,
        s: &mut Clock,
        id: ConnectionId,
        side: Side,
        kind: io::ErrorKind,
    ) {
        let connection = &mut self.connections[id];
        let is_connecting = side == Side::Client && !connection.established;
        let end = connection.end(side);
        end.closed = true;
        end.socket.reset = true;
        end.socket.error = Some(kind);
        end.clear_sent();
        end.early.clear();
        end.socket.wake(&mut self.wakers);
        s.record(if is_connecting {
            Entry::ConnectEnded { connection: id, ok: false }
        } else {
            Entry::Closed { connection: id, reset: true }
        });
        self.forget_if_over(id);
    }

    pub(super) fn reset_arrives(&mut self, s: &mut Clock, id: ConnectionId, to: Side) {
        let connection = &mut self.connections[id];
        let is_connecting = to == Side::Client && !connection.established;
        let end = connection.end(to);
        end.last_segment = s.now();
        if end.closed {
            end.socket.reset = true;
            end.clear();
            return self.forget_if_over(id);
        }
        // As `tcp_reset` of Linux.
        let kind = if is_connecting {
            io::ErrorKind::ConnectionRefused
        } else if end.peer_ended {
            io::ErrorKind::BrokenPipe
        } else {
            io::ErrorKind::ConnectionReset
        };
        self.fail(s, id, to, kind);
    }

    /// A segment arrives for a socket that its process has closed. Data is lost, and the sender has to know that.
    pub(super) fn segment_for_closed_socket(
        &mut self,
        s: &mut Clock,
        id: ConnectionId,
        from: Side,
        number: u64,
    ) {
        let (sender, receiver) = self.connections[id].both(from);
        let is_fin = sender.is_fin(number);
        let is_known = number < receiver.next;
        if !receiver.socket.reset && (is_fin || is_known) {
            if number == receiver.next {
                receiver.next += 1;
                receiver.peer_ended = true;
            }
            self.send_ack(s, id, from.other());
            return self.forget_if_over(id);
        }
        receiver.socket.reset = true;
        receiver.clear();
        self.packet(s, id, from.other(), 40, NetEvent::Reset { id, to: from });
    }

    /// Wakes the task that waits until it may write.
    pub(super) fn may_be_writable(&mut self, id: ConnectionId, side: Side) {
        let end = self.connections[id].end(side);
        if end.socket.writer.is_some() && end.is_writable(true) {
            self.wakers.extend(end.socket.writer.take());
        }
    }

    /// Forgets a connection whose ends have no process and nothing to send, so that no packet of it is answered.
    pub(super) fn forget_if_over(&mut self, id: ConnectionId) {
        if !self.connections.contains(id) {
            return;
        }
        let [client, server] = &self.connections[id].ends;
        let (is_client_open, is_server_open) =
            (!client.closed || client.socket.owned, server.socket.owned);
        if is_client_open || is_server_open || client.has_pending() || server.has_pending() {
            return;
        }
        // A server's end that waits for the last packet of the handshake.
        if server.socket.answered && !server.socket.accepted && !server.closed {
            return;
        }
        self.connections.remove(id);
    }

    /// The tasks that have to be woken, in this order.
    pub(super) fn take_wakers(&mut self) -> Vec<Waker> {
        std::mem::take(&mut self.wakers)
    }
}
