//! A stream adapter that reads from the socket in large pieces and returns the bytes in small ones.
//!
//! rustls reads at most 4 KiB per system call, so a burst of responses would need a dozen calls. Each thread
//! has a spare buffer, which a read borrows. A connection keeps the buffer only while it contains unread
//! bytes, so an idle connection holds none.
//!
//! rustls and tokio-rustls read until there is plaintext or the socket is empty, and a record costs a decryption even if
//! it carries nothing. So that a peer that always has more records does not delay others, whatever protocol they carry,
//! reading ends after a [`Turn`] and goes on when the task is polled again.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use jackstay_core::tls_records::RecordScanner;
use tokio::io::{AsyncRead, ReadBuf};

/// Size of a buffer, which limits one read: the bytes that a socket typically contains after a burst.
const BUFFER_SIZE: usize = 64 * 1024;

/// While a handshake reads, tokio-rustls reads once more after the end of a turn in the same poll of its task, if it has
/// read something before (`MidHandshake::poll`, `Stream::handshake`).
const REPORTS_IN_HANDSHAKE: usize = 2;

thread_local! {
    /// The buffer that no connection uses; empty while a connection keeps it.
    static SPARE_BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// What a connection reads before other tasks run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Turn {
    /// Bytes on the wire.
    pub bytes: usize,
    /// TLS records.
    pub records: usize,
}

impl Turn {
    /// The turn of a client. A new connection waits for the turns of others several times.
    pub const CLIENT: Self = Self { bytes: BUFFER_SIZE, records: 32 };
    /// The turn of an apiserver, whose responses are larger than requests.
    pub const SERVER: Self = Self { bytes: 2 * BUFFER_SIZE, records: 256 };
}

/// A stream whose reads are buffered.
#[derive(Debug)]
pub struct ReadAhead<T> {
    inner: T,
    records: RecordScanner,
    limit: Turn,
    /// What is left of the present turn.
    turn: Turn,
    /// How often the end of a turn is reported.
    reports: usize,
    /// How often the end of the present turn has been reported.
    reported: usize,
    /// Contains the unread bytes, between `start` and `end`; empty if there are none.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<T> ReadAhead<T> {
    /// Buffers the reads of `inner`, which carries TLS.
    pub fn new(inner: T, turn: Turn) -> Self {
        Self::with_unread(inner, Vec::new(), turn)
    }

    /// Returns the bytes of `unread` before it reads from `inner`.
    pub fn with_unread(inner: T, unread: Vec<u8>, turn: Turn) -> Self {
        Self {
            inner,
            records: RecordScanner::default(),
            limit: turn,
            turn,
            reports: REPORTS_IN_HANDSHAKE,
            reported: 0,
            start: 0,
            end: unread.len(),
            buffer: unread,
        }
    }

    /// The handshake is complete.
    pub fn established(&mut self) {
        self.reports = 1;
    }

    /// Whether the turn is over. The task is then polled again.
    fn poll_turn(&mut self, cx: &Context<'_>) -> Poll<()> {
        if self.turn.bytes > 0 && self.turn.records > 0 {
            return Poll::Ready(());
        }
        self.reported += 1;
        if self.reported >= self.reports {
            self.begin_turn();
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn begin_turn(&mut self) {
        (self.turn, self.reported) = (self.limit, 0);
    }

    /// The wrapped stream.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The wrapped stream.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Moves unread bytes of this turn to `buf`. Returns the buffer to the thread when all are moved.
    fn move_unread_to(&mut self, buf: &mut ReadBuf<'_>) {
        if self.buffer.is_empty() {
            return;
        }
        let end = self.end.min(self.start + buf.remaining());
        let scanned = self.records.scan(&self.buffer[self.start..end], self.turn.records);
        let end = self.start + scanned.bytes;
        self.turn.bytes = self.turn.bytes.saturating_sub(scanned.bytes);
        self.turn.records -= scanned.records;
        buf.put_slice(&self.buffer[self.start..end]);
        self.start = end;
        if self.start == self.end {
            let buffer = std::mem::take(&mut self.buffer);
            // That of `with_unread` is smaller.
            if buffer.len() == BUFFER_SIZE {
                SPARE_BUFFER.set(buffer);
            }
        }
    }
}

impl<T: AsyncRead + Unpin> ReadAhead<T> {
    /// Waits for unread bytes and returns them without consuming them. The result is empty at the end of the
    /// stream.
    ///
    /// # Errors
    /// Those of reading.
    pub async fn peek(&mut self) -> io::Result<&[u8]> {
        poll_fn(|cx| self.poll_fill_buffer(cx)).await?;
        Ok(self.buffer.get(self.start..self.end).unwrap_or_default())
    }

    /// Reads from the stream if no unread bytes are left.
    fn poll_fill_buffer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.buffer.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let mut spare = SPARE_BUFFER.take();
        spare.resize(BUFFER_SIZE, 0); // allocates only if the thread has no spare buffer
        let mut large = ReadBuf::new(&mut spare);
        let result = Pin::new(&mut self.inner).poll_read(cx, &mut large);
        let end = large.filled().len();
        if !matches!(result, Poll::Ready(Ok(()))) || end == 0 {
            SPARE_BUFFER.set(spare);
            return result;
        }
        (self.buffer, self.start, self.end) = (spare, 0, end);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for ReadAhead<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_turn(cx));
        let filled = self.poll_fill_buffer(cx);
        if filled.is_pending() {
            self.begin_turn();
        }
        ready!(filled)?;
        self.move_unread_to(buf);
        Poll::Ready(Ok(()))
    }
}

delegate_async_write!(ReadAhead<T>, |this| &mut this.inner);

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn unread_bytes_precede_those_of_the_stream() {
        let (local, mut peer) = tokio::io::duplex(64);
        peer.write_all(b" world").await.unwrap();
        drop(peer);
        let mut reader = ReadAhead::with_unread(local, b"hello".to_vec(), Turn::CLIENT);
        assert_eq!(reader.peek().await.unwrap(), b"hello");
        let mut text = String::new();
        reader.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello world");
        assert_eq!(SPARE_BUFFER.take().len(), BUFFER_SIZE);
    }

    #[tokio::test(start_paused = true)]
    async fn read_small_pieces_returns_every_byte_and_the_end() {
        let (local, mut peer) = tokio::io::duplex(1 << 20);
        let sent: Vec<u8> = (0..3 * BUFFER_SIZE + 5).map(|i| (i % 251) as u8).collect();
        peer.write_all(&sent).await.unwrap();
        drop(peer);
        let mut reader = ReadAhead::new(local, Turn::CLIENT);
        assert_eq!(reader.peek().await.unwrap()[..5], sent[..5]);
        assert_eq!(reader.peek().await.unwrap().len(), BUFFER_SIZE, "peek does not read again");
        let mut received = Vec::new();
        let mut piece = [0; 1000];
        loop {
            match reader.read(&mut piece).await.unwrap() {
                0 => break,
                n => received.extend_from_slice(&piece[..n]),
            }
        }
        assert!(received == sent);
        assert!(reader.peek().await.unwrap().is_empty(), "end of stream");
        assert!(reader.buffer.is_empty(), "an idle connection holds no buffer");
        assert_eq!(SPARE_BUFFER.take().len(), BUFFER_SIZE, "the buffer was returned to the thread");
    }

    /// Small records that never end.
    struct Flood;

    /// A record with a payload of 18 bytes, as one of a byte is with TLS 1.3.
    const SMALL: [u8; 23] = {
        let mut record = [0; 23];
        record[4] = 18;
        record
    };

    impl AsyncRead for Flood {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            while buf.remaining() >= SMALL.len() {
                buf.put_slice(&SMALL);
            }
            Poll::Ready(Ok(()))
        }
    }

    /// Bytes that are read until the next `Pending`.
    fn bytes_of_turn(reader: &mut ReadAhead<Flood>) -> usize {
        let mut cx = Context::from_waker(std::task::Waker::noop());
        let (mut piece, mut bytes) = ([0; 4096], 0);
        loop {
            let mut buf = ReadBuf::new(&mut piece);
            match Pin::new(&mut *reader).poll_read(&mut cx, &mut buf) {
                Poll::Ready(result) => result.unwrap(),
                Poll::Pending => return bytes,
            }
            bytes += buf.filled().len();
        }
    }

    #[test]
    fn reading_pauses_after_the_records_of_a_turn() {
        let mut reader = ReadAhead::new(Flood, Turn::CLIENT);
        reader.established();
        for _ in 0..100 {
            assert_eq!(bytes_of_turn(&mut reader), Turn::CLIENT.records * SMALL.len());
        }
    }

    #[test]
    fn reading_pauses_twice_during_a_handshake() {
        let mut reader = ReadAhead::new(Flood, Turn::CLIENT);
        let turn = Turn::CLIENT.records * SMALL.len();
        let turns: Vec<_> = (0..5).map(|_| bytes_of_turn(&mut reader)).collect();
        assert_eq!(turns, [turn, 0, turn, 0, turn]);
    }

    #[test]
    fn reading_pauses_after_the_bytes_of_a_turn() {
        let turn = Turn { bytes: 10_000, records: usize::MAX };
        let mut reader = ReadAhead::new(Flood, turn);
        reader.established();
        for _ in 0..100 {
            assert!((10_000..10_000 + 4_096).contains(&bytes_of_turn(&mut reader)));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn turn_begins_anew_when_the_socket_is_empty() {
        let (local, mut peer) = tokio::io::duplex(1 << 20);
        let mut reader = ReadAhead::new(local, Turn { bytes: 1 << 20, records: 2 });
        reader.established();
        for _ in 0..10 {
            peer.write_all(&SMALL).await.unwrap();
            let mut cx = Context::from_waker(std::task::Waker::noop());
            let mut piece = [0; 64];
            let mut buf = ReadBuf::new(&mut piece);
            assert!(Pin::new(&mut reader).poll_read(&mut cx, &mut buf).is_ready());
            assert!(Pin::new(&mut reader).poll_read(&mut cx, &mut buf).is_pending());
            assert_eq!(reader.turn, reader.limit);
        }
    }
}
