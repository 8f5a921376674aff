//! A stream adapter that reads from the socket in large pieces and returns the bytes in small ones.
//!
//! rustls reads at most 4 KiB per system call, so a burst of responses would need a dozen calls. Each thread
//! has a spare buffer, which a read borrows. A connection keeps the buffer only while it contains unread
//! bytes, so an idle connection holds none.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// Size of a buffer, which limits one read: the bytes that a socket typically contains after a burst.
const BUFFER_SIZE: usize = 64 * 1024;

thread_local! {
    /// The buffer that no connection uses; empty while a connection keeps it.
    static SPARE_BUFFER: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A stream whose reads are buffered.
#[derive(Debug)]
pub struct ReadAhead<T> {
    inner: T,
    /// Contains the unread bytes, between `start` and `end`; empty if there are none.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
}

impl<T> ReadAhead<T> {
    /// Buffers the reads of `inner`.
    pub fn new(inner: T) -> Self {
        Self::with_unread(inner, Vec::new())
    }

    /// Returns the bytes of `unread` before it reads from `inner`.
    pub fn with_unread(inner: T, unread: Vec<u8>) -> Self {
        Self { inner, start: 0, end: unread.len(), buffer: unread }
    }

    /// The wrapped stream.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The wrapped stream.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// Moves unread bytes to `buf`. Returns the buffer to the thread when all are moved.
    fn move_unread_to(&mut self, buf: &mut ReadBuf<'_>) {
        if self.buffer.is_empty() {
            return;
        }
        let end = self.end.min(self.start + buf.remaining());
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
        ready!(self.poll_fill_buffer(cx))?;
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
        let mut reader = ReadAhead::with_unread(local, b"hello".to_vec());
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
        let mut reader = ReadAhead::new(local);
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
}
