//! Reading, writing and the options of sockets.

use std::io::{self, IoSlice};
use std::task::Waker;

use bytes::{Buf, BytesMut};
use jackstay_core::tcp_info::TcpInfo;
use jackstay_sys::sockets::queue_memory::QueueMemory;
use tokio::io::ReadBuf;

use super::state::{State, set_waker};
use crate::net::socket_state::RECEIVE_BUFFER;
use crate::net::tcp::{Content, End, MAX_SEGMENT, SEND_BUFFER, Segment};
use crate::net::{ConnectionId, Side};

/// The smallest receive buffer, in bytes (Linux, `SOCK_MIN_RCVBUF`).
const MIN_RECEIVE_BUFFER: u32 = 2304;

/// What the process does with the bytes that have arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// It takes them.
    Take,
    /// It leaves them (`MSG_PEEK`).
    Peek,
}

impl State {
    /// The end of a connection, if its process still has the socket.
    fn socket(&mut self, id: ConnectionId, side: Side) -> Option<&mut End> {
        if !self.net.connections.contains(id) {
            return None;
        }
        Some(self.net.connections[id].end(side)).filter(|end| end.socket.owned)
    }

    /// Whether a connect has succeeded; `None` if it goes on, and then `waker` is woken.
    pub(super) fn is_connected(
        &mut self,
        id: ConnectionId,
        waker: &Waker,
    ) -> Option<io::Result<()>> {
        let Some(end) = self.socket(id, Side::Client) else { return Some(Err(not_connected())) };
        if let Some(kind) = end.socket.error.take() {
            return Some(Err(kind.into()));
        }
        set_waker(&mut end.socket.writer, waker);
        self.connects[id as usize].established = self.net.connections[id].established;
        self.net.connections[id].established.then_some(Ok(()))
    }

    /// Reads what has arrived; `None` if nothing has.
    pub(super) fn read(
        &mut self,
        (id, side): (ConnectionId, Side),
        reading: Reading,
        buf: &mut ReadBuf<'_>,
    ) -> Option<io::Result<usize>> {
        let Some(end) = self.socket(id, side) else { return Some(Err(not_connected())) };
        let before = buf.remaining();
        if before == 0 {
            return Some(Ok(0));
        }
        match reading {
            Reading::Take => take_unread(end, buf),
            Reading::Peek => peek_unread(end, buf),
        }
        let count = before - buf.remaining();
        if count > 0 {
            if reading == Reading::Take
                && !end.closed
                && !end.peer_ended
                && end.has_news_of_window()
            {
                self.net.send_ack(&mut self.clock, id, side);
            }
            return Some(Ok(count));
        }
        // As `tcp_recvmsg` of Linux: after FIN there is the end, whatever has happened since.
        if end.peer_ended {
            return Some(Ok(0));
        }
        match end.socket.error.take() {
            Some(kind) => Some(Err(kind.into())),
            None => end.closed.then_some(Ok(0)),
        }
    }

    /// `waker` is woken when bytes, the end or an error arrive.
    pub(super) fn wait_to_read(&mut self, id: ConnectionId, side: Side, waker: &Waker) {
        if let Some(end) = self.socket(id, side) {
            set_waker(&mut end.socket.reader, waker);
        }
    }

    /// Takes bytes to be sent; `None` if the send queue is full, and then `waker` is woken when it is not.
    pub(super) fn write(
        &mut self,
        (id, side): (ConnectionId, Side),
        bufs: &[IoSlice<'_>],
        waker: &Waker,
    ) -> Option<io::Result<usize>> {
        let Some(end) = self.socket(id, side) else {
            return Some(Err(io::ErrorKind::BrokenPipe.into()));
        };
        if let Some(kind) = end.socket.error.take() {
            return Some(Err(kind.into()));
        }
        if end.closed || end.socket.fin_queued {
            return Some(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if bufs.iter().all(|buf| buf.is_empty()) {
            return Some(Ok(0));
        }
        // After a refusal tokio waits for the kernel's event before it writes again.
        let is_refused = !end.is_writable(end.socket.refused);
        end.socket.refused = is_refused;
        if is_refused {
            set_waker(&mut end.socket.writer, waker);
            return None;
        }
        let mut written = 0;
        for buf in bufs {
            let count = self.write_buf(id, side, buf);
            written += count;
            if count < buf.len() {
                break;
            }
        }
        self.net.send_queued(&mut self.clock, id, side);
        Some(Ok(written))
    }

    /// Appends to the last segment that was not sent, and sends segments that are full.
    fn write_buf(&mut self, id: ConnectionId, side: Side, buf: &[u8]) -> usize {
        let mut rest = buf;
        while !rest.is_empty() {
            let end = self.net.connections[id].end(side);
            if !end.is_writable(false) {
                break;
            }
            let room = SEND_BUFFER - end.queued_bytes();
            let last = end.unsent.back_mut().filter(|last| last.bytes < MAX_SEGMENT);
            let space =
                room.min(last.as_ref().map_or(MAX_SEGMENT, |last| MAX_SEGMENT - last.bytes));
            let (now, later) = rest.split_at(rest.len().min(space as usize));
            rest = later;
            let count = now.len() as u32;
            end.unsent_bytes += count;
            if let Some(Segment { bytes, content: Content::Bytes(chunk), .. }) = last {
                chunk.extend_from_slice(now);
                *bytes += count;
            } else {
                let chunk = Content::Bytes(BytesMut::from(now));
                end.unsent.push_back(Segment::new(count, chunk));
            }
            if count == space {
                self.net.send_queued(&mut self.clock, id, side);
            }
        }
        buf.len() - rest.len()
    }

    pub(super) fn shutdown_write(&mut self, id: ConnectionId, side: Side) -> io::Result<()> {
        if self.socket(id, side).is_none_or(|end| end.closed) {
            return Err(not_connected());
        }
        self.net.end_stream(&mut self.clock, id, side);
        Ok(())
    }

    pub(super) fn reset_when_closed(&mut self, id: ConnectionId, side: Side) {
        if let Some(end) = self.socket(id, side) {
            end.socket.resets_when_closed = true;
        }
    }

    pub(super) fn close(&mut self, id: ConnectionId, side: Side) {
        if side == Side::Client {
            self.connects[id as usize].closed.get_or_insert(self.clock.now);
        }
        self.net.close_socket(&mut self.clock, id, side);
    }

    pub(super) fn tcp_info(&mut self, id: ConnectionId, side: Side) -> TcpInfo {
        let now = self.clock.now();
        match self.socket(id, side) {
            Some(end) => end.info(now),
            None => TcpInfo { closed: true, ..TcpInfo::default() },
        }
    }

    pub(super) fn queue_memory(&mut self, id: ConnectionId, side: Side) -> QueueMemory {
        self.socket(id, side).map_or_else(QueueMemory::default, |end| QueueMemory {
            received: end.unread_bytes as usize,
            sent: end.queued_bytes() as usize,
            reserved: 0,
        })
    }

    pub(super) fn send_keepalive_probe(&mut self, id: ConnectionId, side: Side) {
        if self.socket(id, side).is_some() {
            self.net.probe_now(&mut self.clock, id, side);
        }
    }

    pub(super) fn disable_keepalives(&mut self, id: ConnectionId, side: Side) {
        if let Some(end) = self.socket(id, side) {
            end.socket.keepalive = None;
        }
    }

    pub(super) fn bound_unsent(&mut self, id: ConnectionId, side: Side, bytes: u32) {
        if let Some(end) = self.socket(id, side) {
            // 0 stands for no bound (`tcp_notsent_lowat` of Linux).
            end.socket.max_unsent = if bytes == 0 { u32::MAX } else { bytes };
            self.net.may_be_writable(id, side);
        }
    }

    pub(super) fn bound_received(&mut self, id: ConnectionId, side: Side, bytes: Option<usize>) {
        if let Some(end) = self.socket(id, side) {
            let bytes = bytes.map_or(RECEIVE_BUFFER, |bytes| bytes.min(1 << 30) as u32);
            end.socket.receive_buffer = bytes.max(MIN_RECEIVE_BUFFER);
            if !end.closed && !end.peer_ended && end.has_news_of_window() {
                self.net.send_ack(&mut self.clock, id, side);
            }
        }
    }
}

fn not_connected() -> io::Error {
    io::ErrorKind::NotConnected.into()
}

fn take_unread(end: &mut End, buf: &mut ReadBuf<'_>) {
    while buf.remaining() > 0
        && let Some((bytes, Content::Bytes(chunk))) = end.unread.front_mut()
    {
        let count = chunk.len().min(buf.remaining());
        buf.put_slice(&chunk[..count]);
        chunk.advance(count);
        *bytes -= count as u32;
        end.unread_bytes -= count as u32;
        if *bytes == 0 {
            end.unread.pop_front();
        }
    }
}

fn peek_unread(end: &End, buf: &mut ReadBuf<'_>) {
    for (_, content) in &end.unread {
        let Content::Bytes(chunk) = content else { break };
        let count = chunk.len().min(buf.remaining());
        buf.put_slice(&chunk[..count]);
        if buf.remaining() == 0 {
            break;
        }
    }
}
