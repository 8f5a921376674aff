//! Closes connections whose client stopped reading: it would keep memory and an upstream stream.
//!
//! A client that reads a byte within each limit is only slow, and keeps its connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A connection whose writes fail once they have made no progress for `limit`.
pub struct StallTimeout<T> {
    inner: T,
    limit: Option<Duration>,
    /// Runs while a write is blocked.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<T> StallTimeout<T> {
    /// Limits the writes of `inner`.
    pub fn new(inner: T, limit: Duration) -> Self {
        Self { inner, limit: Some(limit), timer: None }
    }

    /// Removes the limit. A tunnel may carry a terminal whose user reads nothing for hours.
    pub fn disable(&mut self) {
        self.limit = None;
        self.timer = None;
    }

    fn limit_pending<R>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.timer = None;
            return result;
        }
        let Some(limit) = self.limit else { return result };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer
            .as_mut()
            .poll(cx)
            .map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes no bytes")))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StallTimeout<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for StallTimeout<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.limit_pending(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.limit_pending(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(cx);
        self.limit_pending(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.limit_pending(cx, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test(start_paused = true)]
    async fn write_without_progress_fails_after_limit() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut stalled = StallTimeout::new(ours, Duration::from_secs(60));
        let start = tokio::time::Instant::now();
        let error = stalled.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(start.elapsed().as_secs(), 60);
    }

    #[tokio::test(start_paused = true)]
    async fn write_after_disable_waits_without_limit() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut stalled = StallTimeout::new(ours, Duration::from_secs(60));
        stalled.disable();
        let day = Duration::from_secs(86_400);
        assert!(tokio::time::timeout(day, stalled.write_all(&[0; 64])).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn write_to_slow_reader_succeeds() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut stalled = StallTimeout::new(ours, Duration::from_secs(60));
        let reader = tokio::spawn(async move {
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_secs(59)).await;
                theirs.read_exact(&mut [0; 16]).await.unwrap();
            }
        });
        stalled.write_all(&[0; 64]).await.unwrap();
        reader.await.unwrap();
    }
}
