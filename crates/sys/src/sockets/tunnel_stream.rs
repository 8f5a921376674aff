//! One side of a tunnel: a connection after its 101 response.
//!
//! Its reads first return the bytes that were received together with the HTTP head. It counts the bytes read
//! and stores its first error, so that the caller of a bidirectional copy knows which side failed.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// One side of a tunnel.
#[derive(Debug)]
pub struct TunnelStream<T> {
    /// Bytes that were received with the HTTP head and not read yet.
    prefix: Bytes,
    inner: T,
    bytes_read: u64,
    error: Option<String>,
    /// See [`Self::discard_writes_after_close`].
    discards_writes_after_close: bool,
    /// Writes are discarded, since the peer has closed.
    discards_writes: bool,
}

impl<T> TunnelStream<T> {
    /// A stream whose reads return `prefix` before the bytes of `inner`.
    pub fn new(prefix: Bytes, inner: T) -> Self {
        Self {
            prefix,
            inner,
            bytes_read: 0,
            error: None,
            discards_writes_after_close: false,
            discards_writes: false,
        }
    }

    /// Discards writes after the peer has closed, instead of failing them, so that a bidirectional copy reads
    /// this side to its end.
    ///
    /// A process in a pod may exit while the client still sends standard input. The apiserver then sends the
    /// remaining output and the exit status, and closes with unread bytes, which resets the connection. A
    /// tunnel that ended at the first failed write would lose that output.
    #[must_use]
    pub fn discard_writes_after_close(self) -> Self {
        Self { discards_writes_after_close: true, ..self }
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// The first error of this side, if any.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    fn record_error<R>(&mut self, result: Poll<io::Result<R>>) -> Poll<io::Result<R>> {
        if let Poll::Ready(Err(error)) = &result
            && self.error.is_none()
        {
            self.error = Some(error.to_string());
        }
        result
    }
}

impl<T: AsyncWrite + Unpin> TunnelStream<T> {
    /// Calls `write` on the inner stream. The result of a discarded write is `discarded`.
    fn write<R>(
        &mut self,
        discarded: R,
        write: impl FnOnce(Pin<&mut T>) -> Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if self.discards_writes {
            return Poll::Ready(Ok(discarded));
        }
        let result = write(Pin::new(&mut self.inner));
        let result = self.record_error(result);
        if self.discards_writes_after_close
            && let Poll::Ready(Err(error)) = &result
            && matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset)
        {
            self.discards_writes = true;
            return Poll::Ready(Ok(discarded));
        }
        result
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for TunnelStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        if self.prefix.has_remaining() {
            let n = self.prefix.len().min(buf.remaining());
            buf.put_slice(&self.prefix.split_to(n));
        } else {
            let result = Pin::new(&mut self.inner).poll_read(cx, buf);
            ready!(self.record_error(result))?;
        }
        self.bytes_read += (buf.filled().len() - before) as u64;
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for TunnelStream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.write(buf.len(), |inner| inner.poll_write(cx, buf))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write((), |inner| inner.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.write((), |inner| inner.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional, duplex};

    #[tokio::test(start_paused = true)]
    async fn read_returns_the_prefix_first_and_counts_it() {
        let (ours, mut theirs) = duplex(64);
        theirs.write_all(b"world").await.unwrap();
        drop(theirs);
        let mut stream = TunnelStream::new(Bytes::from_static(b"hello "), ours);
        let mut small = [0; 4];
        stream.read_exact(&mut small).await.unwrap();
        let mut rest = String::new();
        stream.read_to_string(&mut rest).await.unwrap();
        assert_eq!((&small, rest.as_str()), (b"hell", "o world"));
        assert_eq!(stream.bytes_read(), 11);
        assert!(stream.error().is_none());
        stream.write_all(b"x").await.unwrap_err();
        assert!(stream.error().is_some());
    }

    /// A peer that has closed: writes fail with `write_error`. After the first failed write, reads return
    /// `output`, and then the end of the stream or `read_error`.
    struct ClosedPeer {
        has_written: bool,
        output: &'static [u8],
        read_error: Option<ErrorKind>,
        write_error: ErrorKind,
    }

    impl AsyncRead for ClosedPeer {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if !self.has_written {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let output = std::mem::take(&mut self.output);
            buf.put_slice(output);
            match self.read_error {
                Some(kind) if output.is_empty() => Poll::Ready(Err(kind.into())),
                _ => Poll::Ready(Ok(())),
            }
        }
    }

    impl AsyncWrite for ClosedPeer {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            assert!(!self.has_written || self.write_error == ErrorKind::Other, "second write");
            self.has_written = true;
            Poll::Ready(Err(self.write_error.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// Copies between a client that writes and a closed upstream. Returns the bytes that the client receives
    /// and the result of the copy.
    async fn copy_to_closed_upstream(
        write_error: ErrorKind,
        read_error: Option<ErrorKind>,
    ) -> (String, io::Result<(u64, u64)>) {
        let output = b"exit status 0";
        let closed = ClosedPeer { has_written: false, output, read_error, write_error };
        let (mut theirs, mut ours) = duplex(64);
        let client = async move {
            theirs.write_all(b"more of its input").await.unwrap();
            let mut received = String::new();
            theirs.read_to_string(&mut received).await.unwrap();
            received
        };
        let copy = async move {
            let mut upstream = TunnelStream::new(Bytes::new(), closed).discard_writes_after_close();
            let result = copy_bidirectional(&mut ours, &mut upstream).await;
            drop(ours);
            result
        };
        tokio::join!(client, copy)
    }

    #[tokio::test(start_paused = true)]
    async fn write_to_closed_peer_is_discarded_and_the_last_data_are_read() {
        for write_error in [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset] {
            let (received, result) = copy_to_closed_upstream(write_error, None).await;
            assert_eq!(received, "exit status 0");
            assert_eq!(result.unwrap(), (17, 13));
        }
        let reset = ErrorKind::ConnectionReset;
        let (received, result) = copy_to_closed_upstream(ErrorKind::BrokenPipe, Some(reset)).await;
        assert_eq!((received.as_str(), result.unwrap_err().kind()), ("exit status 0", reset));
    }

    #[tokio::test(start_paused = true)]
    async fn write_with_another_error_fails() {
        let (received, result) = copy_to_closed_upstream(ErrorKind::Other, None).await;
        assert_eq!((received.as_str(), result.unwrap_err().kind()), ("", ErrorKind::Other));
    }
}
