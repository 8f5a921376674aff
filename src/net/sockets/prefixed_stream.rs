//! A stream that first returns bytes that were read beyond an HTTP head, then reads on.
//!
//! It counts the bytes read and keeps its first error, so that the caller of a bidirectional copy knows
//! which side failed.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream with bytes before it.
#[derive(Debug)]
pub struct PrefixedStream<T> {
    first: Bytes,
    inner: T,
    bytes_read: u64,
    error: Option<String>,
}

impl<T> PrefixedStream<T> {
    /// Returns `first` before the bytes of `inner`.
    pub fn new(first: Bytes, inner: T) -> Self {
        Self { first, inner, bytes_read: 0, error: None }
    }

    /// Bytes read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// The first error of this stream, if any.
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

impl<T: AsyncRead + Unpin> AsyncRead for PrefixedStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        if self.first.has_remaining() {
            let n = self.first.len().min(buf.remaining());
            buf.put_slice(&self.first.split_to(n));
        } else {
            let result = Pin::new(&mut self.inner).poll_read(cx, buf);
            ready!(self.record_error(result))?;
        }
        self.bytes_read += (buf.filled().len() - before) as u64;
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for PrefixedStream<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.record_error(result)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(cx);
        self.record_error(result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.record_error(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn read_returns_the_prefix_first_and_counts_it() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        theirs.write_all(b"world").await.unwrap();
        drop(theirs);
        let mut stream = PrefixedStream::new(Bytes::from_static(b"hello "), ours);
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
}
