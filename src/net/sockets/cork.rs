//! Combines the frames that h2 writes during one poll of a connection into few large writes.
//!
//! h2 writes and flushes each DATA frame separately. With responses of 2 KiB, each of them would cost one TLS
//! record and one system call. [`Cork`] buffers the frames until the connection's task has polled all streams
//! and calls [`Uncork::poll`]. Frames are delayed by no more than that one poll. When [`LIMIT`] bytes are
//! buffered, the writer waits for the socket, as it would without a cork.

use std::cell::RefCell;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum of buffered bytes: two full TLS records.
const LIMIT: usize = 32 * 1024;
/// Writes of at least this size go to the stream directly while the buffer is empty.
const LARGE: usize = 8 * 1024;

/// The half that h2 reads and writes.
pub struct Cork<T>(Rc<RefCell<Inner<T>>>);

/// The half that flushes the buffer.
pub struct Uncork<T>(Rc<RefCell<Inner<T>>>);

struct Inner<T> {
    io: T,
    buffered: Vec<u8>,
    /// How many bytes of `buffered` are written to `io`.
    written: usize,
    /// Whether `io` may contain unflushed bytes.
    dirty: bool,
    /// Whether bytes were read since the last [`Uncork::received_since_last_call`].
    received: bool,
}

/// Splits a stream into its two halves, which belong to one task.
pub fn cork<T>(io: T) -> (Cork<T>, Uncork<T>) {
    let inner = Inner { io, buffered: Vec::new(), written: 0, dirty: false, received: false };
    let inner = Rc::new(RefCell::new(inner));
    (Cork(Rc::clone(&inner)), Uncork(inner))
}

impl<T: AsyncWrite + Unpin> Uncork<T> {
    /// Writes and flushes what is buffered. The connection's task calls it after each poll of the connection.
    ///
    /// # Errors
    /// Those of the stream.
    pub fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().flush(cx)
    }
}

impl<T> Uncork<T> {
    /// Whether bytes were read since the last call.
    pub fn received_since_last_call(&self) -> bool {
        std::mem::take(&mut self.0.borrow_mut().received)
    }
}

impl<T: AsyncWrite + Unpin> Inner<T> {
    fn drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.written < self.buffered.len() {
            let unwritten = &self.buffered[self.written..];
            match ready!(Pin::new(&mut self.io).poll_write(cx, unwritten))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                n => self.written += n,
            }
            self.dirty = true;
        }
        // An idle connection holds no buffer.
        self.buffered = Vec::new();
        self.written = 0;
        Poll::Ready(Ok(()))
    }

    fn flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.buffered.is_empty() {
            ready!(self.drain(cx))?;
        }
        if self.dirty {
            ready!(Pin::new(&mut self.io).poll_flush(cx))?;
            self.dirty = false;
        }
        Poll::Ready(Ok(()))
    }

    /// Makes room for a write of `len` bytes. Returns false if the caller should write to `io` directly.
    fn poll_buffer_space(&mut self, cx: &mut Context<'_>, len: usize) -> Poll<io::Result<bool>> {
        if self.buffered.len() + len > LIMIT {
            ready!(self.drain(cx))?;
        }
        if self.buffered.is_empty() && len >= LARGE {
            self.dirty = true;
            return Poll::Ready(Ok(false));
        }
        if self.buffered.capacity() == 0 {
            self.buffered.reserve_exact(LIMIT);
        }
        Poll::Ready(Ok(true))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Cork<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut inner = self.0.borrow_mut();
        let before = buf.filled().len();
        let result = Pin::new(&mut inner.io).poll_read(cx, buf);
        inner.received |= buf.filled().len() > before;
        result
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Cork<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.0.borrow_mut();
        if !ready!(inner.poll_buffer_space(cx, buf.len()))? {
            return Pin::new(&mut inner.io).poll_write(cx, buf);
        }
        inner.buffered.extend_from_slice(buf);
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut inner = self.0.borrow_mut();
        let len = bufs.iter().map(|buf| buf.len()).sum();
        if !ready!(inner.poll_buffer_space(cx, len))? {
            return Pin::new(&mut inner.io).poll_write_vectored(cx, bufs);
        }
        for buf in bufs {
            inner.buffered.extend_from_slice(buf);
        }
        Poll::Ready(Ok(len))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Deferred to [`Uncork::poll`].
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().dirty = true;
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut inner = self.0.borrow_mut();
        ready!(inner.flush(cx))?;
        Pin::new(&mut inner.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn uncork_poll_sends_buffered_writes_together_and_in_order() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 20);
        let (mut corked, uncork) = cork(ours);
        corked.write_all(b"one ").await.unwrap();
        corked.flush().await.unwrap();
        corked.write_all(b"two ").await.unwrap();
        let mut got = [0; 8];
        let early =
            tokio::time::timeout(std::time::Duration::from_millis(10), theirs.read(&mut got));
        assert!(early.await.is_err(), "nothing is sent before the poll");
        poll_fn(|cx| uncork.poll(cx)).await.unwrap();
        theirs.read_exact(&mut got).await.unwrap();
        assert_eq!(&got, b"one two ");

        corked.write_all(b"small").await.unwrap();
        corked.write_all(&vec![7; 3 * LIMIT]).await.unwrap();
        corked.shutdown().await.unwrap();
        let mut all = Vec::new();
        theirs.read_to_end(&mut all).await.unwrap();
        assert_eq!(&all[..5], b"small");
        assert_eq!(all.len(), 5 + 3 * LIMIT);
        assert!(all[5..].iter().all(|&byte| byte == 7));
    }

    #[tokio::test(start_paused = true)]
    async fn received_since_last_call_is_true_once_after_a_read() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let (mut corked, uncork) = cork(ours);
        assert!(!uncork.received_since_last_call());
        theirs.write_all(b"a").await.unwrap();
        corked.read_exact(&mut [0]).await.unwrap();
        assert!(uncork.received_since_last_call() && !uncork.received_since_last_call());
        drop(theirs);
        assert_eq!(corked.read(&mut [0]).await.unwrap(), 0);
        assert!(!uncork.received_since_last_call(), "the end of the stream is not data");
    }

    #[tokio::test(start_paused = true)]
    async fn write_beyond_limit_waits_for_the_reader() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let (mut corked, uncork) = cork(ours);
        let written = tokio::time::timeout(std::time::Duration::from_millis(50), async {
            for _ in 0..LIMIT {
                corked.write_all(&[0; 64]).await.unwrap();
            }
        });
        assert!(written.await.is_err());
        assert!(corked.0.borrow().buffered.len() <= LIMIT);
        let is_pending = poll_fn(|cx| Poll::Ready(uncork.poll(cx).is_pending())).await;
        assert!(is_pending);
    }
}
