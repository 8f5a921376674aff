//! Makes the GOAWAY of a server name the last stream that has arrived, as Go's server does (`x/net/http2`, `server.go`,
//! `startGracefulShutdown`): later streams are not processed. hyper first sends one that allows all streams. Two
//! limits: header blocks of later streams do not enter the table of the HPACK decoder, so a client must not refer to
//! them in trailers, and the bytes of their bodies do not return to the window of the connection.
//!
//! After the last response, the connection stays open for [`LINGER`] or until the client closes it, and what the client sends
//! is read (`goAwayTimeout` there): the kernel resets a connection that is closed with unread bytes, and then the response
//! does not arrive as a whole.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const GOAWAY: u8 = 7;
/// What a client sends before its first frame (RFC 9113, section 3.4).
const PREFACE: usize = 24;
/// Bytes that are read at once.
const CHUNK: usize = 16 << 10;
/// How long a connection stays open after its last response.
const LINGER: Duration = Duration::from_secs(1);

/// The bytes of an HTTP/2 connection under its frames.
pub(super) struct LastStream<S> {
    inner: S,
    incoming: Frames,
    outgoing: Frames,
    /// The highest stream that has arrived.
    last: u32,
    /// After the GOAWAY: frames of later streams are dropped.
    is_ending: bool,
    received: Vec<u8>,
    unwritten: Vec<u8>,
    linger: Option<Pin<Box<Sleep>>>,
}

/// Finds the frames of one direction.
#[derive(Default)]
struct Frames {
    /// The header of the next frame, as far as it has passed.
    header: Vec<u8>,
    /// Bytes left of the present frame.
    left: usize,
    /// The stream identifier in the payload of a GOAWAY that is to be replaced: its bytes that are left.
    replaced: Vec<u8>,
    is_dropped: bool,
}

impl Frames {
    /// Passes bytes to `out`. `on_header` gets type and stream of each frame, and returns whether it is dropped and the
    /// bytes that its payload begins with instead.
    fn pass(
        &mut self,
        mut bytes: &[u8],
        out: &mut Vec<u8>,
        mut on_header: impl FnMut(u8, u32) -> (bool, Option<u32>),
    ) {
        while !bytes.is_empty() {
            if self.left > 0 {
                let (payload, rest) = bytes.split_at(self.left.min(bytes.len()));
                (self.left, bytes) = (self.left - payload.len(), rest);
                if !self.is_dropped {
                    let replaced: Vec<_> =
                        self.replaced.drain(..self.replaced.len().min(payload.len())).collect();
                    out.extend_from_slice(&replaced);
                    out.extend_from_slice(&payload[replaced.len()..]);
                }
                continue;
            }
            let missing = FRAME_HEADER - self.header.len();
            let (header, rest) = bytes.split_at(missing.min(bytes.len()));
            self.header.extend_from_slice(header);
            bytes = rest;
            if let &[a, b, c, kind, _, d, e, f, g] = &*self.header {
                self.left = u32::from_be_bytes([0, a, b, c]) as usize;
                let stream = u32::from_be_bytes([d, e, f, g]) & (u32::MAX >> 1);
                let replaced;
                (self.is_dropped, replaced) = on_header(kind, stream);
                self.replaced = replaced.map(|id| id.to_be_bytes().to_vec()).unwrap_or_default();
                if !self.is_dropped {
                    out.extend_from_slice(&self.header);
                }
                self.header.clear();
            }
        }
    }
}

impl<S> LastStream<S> {
    /// The bytes of a connection that begins.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            incoming: Frames { left: PREFACE, ..Frames::default() },
            outgoing: Frames::default(),
            last: 0,
            is_ending: false,
            received: Vec::new(),
            unwritten: Vec::new(),
            linger: None,
        }
    }

    fn receive(&mut self, bytes: &[u8]) {
        let Self { incoming, received, last, is_ending, .. } = self;
        incoming.pass(bytes, received, |kind, stream| {
            let is_late = *is_ending && stream > *last;
            if kind == HEADERS && !is_late {
                *last = (*last).max(stream);
            }
            (is_late, None)
        });
    }

    fn send(&mut self, bytes: &[u8]) {
        let Self { outgoing, unwritten, last, is_ending, .. } = self;
        outgoing.pass(bytes, unwritten, |kind, _| {
            *is_ending |= kind == GOAWAY;
            (false, (kind == GOAWAY).then_some(*last))
        });
    }
}

impl<S: AsyncWrite + Unpin> LastStream<S> {
    fn poll_unwritten(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unwritten.is_empty() {
            let written = ready!(Pin::new(&mut self.inner).poll_write(cx, &self.unwritten))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.unwritten.drain(..written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + Unpin> LastStream<S> {
    /// Reads until the client has closed the connection, or the time is over.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let timer = self.linger.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        loop {
            let mut chunk = [0; CHUNK];
            let mut chunk = ReadBuf::new(&mut chunk);
            match Pin::new(&mut self.inner).poll_read(cx, &mut chunk) {
                Poll::Ready(Ok(())) if !chunk.filled().is_empty() => {}
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending => return timer.as_mut().poll(cx),
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LastStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.received.is_empty() {
            let mut chunk = [0; CHUNK];
            let mut chunk = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut self.inner).poll_read(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            self.receive(chunk.filled());
        }
        let count = self.received.len().min(buffer.remaining());
        buffer.put_slice(&self.received[..count]);
        self.received.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for LastStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_unwritten(cx))?;
        self.send(bytes);
        // What the socket does not take now is written by the next call.
        if let Poll::Ready(Err(error)) = self.poll_unwritten(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_unwritten(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_unwritten(cx))?;
        if self.is_ending {
            ready!(self.poll_linger(cx));
        }
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        let head = [&length[1..], &[kind, 0], &stream.to_be_bytes()].concat();
        [head, payload.to_vec()].concat()
    }

    #[test]
    fn goaway_names_the_last_stream_and_later_ones_are_dropped() {
        for piece in [1, 5, 100] {
            let mut connection = LastStream::new(());
            let before = [vec![b'P'; PREFACE], frame(HEADERS, 1, b"a"), frame(HEADERS, 3, b"bc")];
            for bytes in before.concat().chunks(piece) {
                connection.receive(bytes);
            }
            assert_eq!(connection.received, before.concat());
            connection.received.clear();
            let goaway = |last: u32| frame(GOAWAY, 0, &[&last.to_be_bytes()[..], &[0; 4]].concat());
            for bytes in goaway(u32::MAX >> 1).chunks(piece) {
                connection.send(bytes);
            }
            assert_eq!(connection.unwritten, goaway(3));
            let after = [frame(0, 3, b"data"), frame(HEADERS, 5, b"late"), frame(6, 0, &[0; 8])];
            for bytes in after.concat().chunks(piece) {
                connection.receive(bytes);
            }
            assert_eq!(connection.received, [&*after[0], &*after[2]].concat());
        }
    }
}
