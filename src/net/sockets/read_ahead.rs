//! Reads from the socket in large pieces for a reader that asks for small ones.
//!
//! rustls reads 4 KiB per system call, a dozen calls for one burst of responses. The large buffer belongs
//! to the thread; a connection has one only while it contains unread bytes.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

/// Bytes per read: what a socket typically has after a burst.
const SIZE: usize = 64 * 1024;

thread_local! {
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// A stream that reads ahead.
#[derive(Debug)]
pub struct ReadAhead<T> {
    inner: T,
    /// Empty unless bytes are left between `start` and `end`.
    ahead: Vec<u8>,
    start: usize,
    end: usize,
}

impl<T> ReadAhead<T> {
    /// Wraps `inner`.
    pub fn new(inner: T) -> Self {
        Self { inner, ahead: Vec::new(), start: 0, end: 0 }
    }

    /// The stream below.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    fn fill_from_buffer(&mut self, buf: &mut ReadBuf<'_>) {
        if self.ahead.is_empty() {
            return;
        }
        let end = self.end.min(self.start + buf.remaining());
        buf.put_slice(&self.ahead[self.start..end]);
        self.start = end;
        if self.start == self.end {
            SPARE.set(std::mem::take(&mut self.ahead));
        }
    }
}

impl<T: AsyncRead + Unpin> ReadAhead<T> {
    /// Waits for the first bytes and returns them without consuming them; empty at the end of the stream. The
    /// connection keeps the buffer until they are read.
    ///
    /// # Errors
    /// Those of reading.
    pub async fn peek(&mut self) -> io::Result<&[u8]> {
        poll_fn(|cx| self.poll_fill(cx)).await?;
        Ok(self.ahead.get(self.start..self.end).unwrap_or_default())
    }

    /// Reads if no bytes of the last read are left.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.ahead.is_empty() {
            return Poll::Ready(Ok(()));
        }
        let mut spare = SPARE.take();
        spare.resize(SIZE, 0); // allocates the first time only
        let mut large = ReadBuf::new(&mut spare);
        let result = Pin::new(&mut self.inner).poll_read(cx, &mut large);
        let end = large.filled().len();
        if !matches!(result, Poll::Ready(Ok(()))) || end == 0 {
            SPARE.set(spare);
            return result;
        }
        (self.ahead, self.start, self.end) = (spare, 0, end);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for ReadAhead<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.poll_fill(cx))?;
        self.fill_from_buffer(buf);
        Poll::Ready(Ok(()))
    }
}

write_to_stream_below!(ReadAhead<T>, |this| &mut this.inner);

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn small_reads_return_every_byte_and_the_end() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let sent: Vec<u8> = (0..3 * SIZE + 5).map(|i| (i % 251) as u8).collect();
        theirs.write_all(&sent).await.unwrap();
        drop(theirs);
        let mut reader = ReadAhead::new(ours);
        assert_eq!(reader.peek().await.unwrap()[..5], sent[..5]);
        assert_eq!(reader.peek().await.unwrap().len(), SIZE, "peek does not read again");
        let mut got = Vec::new();
        let mut piece = [0; 1000];
        loop {
            match reader.read(&mut piece).await.unwrap() {
                0 => break,
                n => got.extend_from_slice(&piece[..n]),
            }
        }
        assert!(got == sent);
        assert!(reader.peek().await.unwrap().is_empty(), "end of stream");
        assert!(reader.ahead.is_empty(), "the thread has the buffer again");
        assert_eq!(SPARE.take().len(), SIZE, "the spare buffer");
    }
}
