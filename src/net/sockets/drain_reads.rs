//! A stream that is read to its end although its peer accepts no more writes.
//!
//! A process in a pod may end while the client still sends standard input. The apiserver then sends the
//! remaining output and the exit status and closes with unread bytes, which resets the connection. A tunnel
//! that ended at the first failed write would lose that output.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Discards writes after the first failed one. Reading reports how the stream ended.
#[derive(Debug)]
pub struct DrainReads<'a, T> {
    inner: &'a mut T,
    write_failed: bool,
}

impl<'a, T> DrainReads<'a, T> {
    /// Wraps `inner`.
    pub fn new(inner: &'a mut T) -> Self {
        Self { inner, write_failed: false }
    }

    /// Turns the failure of a closed peer into success with `done`.
    fn unless_peer_closed<R>(&mut self, end: Poll<io::Result<R>>, done: R) -> Poll<io::Result<R>> {
        match end {
            Poll::Ready(Err(error))
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
            {
                self.write_failed = true;
                Poll::Ready(Ok(done))
            }
            end => end,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for DrainReads<'_, T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for DrainReads<'_, T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.write_failed {
            return Poll::Ready(Ok(buf.len()));
        }
        let end = Pin::new(&mut *self.inner).poll_write(cx, buf);
        self.unless_peer_closed(end, buf.len())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_failed {
            return Poll::Ready(Ok(()));
        }
        let end = Pin::new(&mut *self.inner).poll_flush(cx);
        self.unless_peer_closed(end, ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.write_failed {
            return Poll::Ready(Ok(()));
        }
        let end = Pin::new(&mut *self.inner).poll_shutdown(cx);
        self.unless_peer_closed(end, ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional, duplex};

    /// Refuses writes, and sends data only after the first attempt; then ends or fails.
    struct Gone {
        tried: Option<ErrorKind>,
        left: &'static [u8],
        end: Option<ErrorKind>,
        how: ErrorKind,
    }

    impl AsyncRead for Gone {
        fn poll_read(
            mut self: Pin<&mut Self>,
            cx: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.tried.is_none() {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            let left = std::mem::take(&mut self.left);
            buf.put_slice(left);
            match self.end {
                Some(kind) if left.is_empty() => Poll::Ready(Err(kind.into())),
                _ => Poll::Ready(Ok(())),
            }
        }
    }

    impl AsyncWrite for Gone {
        fn poll_write(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            _: &[u8],
        ) -> Poll<io::Result<usize>> {
            assert!(self.tried.is_none() || self.how == ErrorKind::Other, "asked again");
            self.tried = Some(self.how);
            Poll::Ready(Err(self.how.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    /// What a client that continues to write receives, and how the copy ended.
    async fn copy_through(
        how: ErrorKind,
        end: Option<ErrorKind>,
    ) -> (String, io::Result<(u64, u64)>) {
        let mut gone = Gone { tried: None, left: b"exit status 0", end, how };
        let (mut theirs, mut ours) = duplex(64);
        let client = async move {
            theirs.write_all(b"more of its input").await.unwrap();
            let mut received = String::new();
            theirs.read_to_string(&mut received).await.unwrap();
            received
        };
        let copy = async move {
            let end = copy_bidirectional(&mut ours, &mut DrainReads::new(&mut gone)).await;
            drop(ours);
            end
        };
        tokio::join!(client, copy)
    }

    #[tokio::test(start_paused = true)]
    async fn read_after_failed_write_returns_the_last_data() {
        for how in [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset] {
            let (received, end) = copy_through(how, None).await;
            assert_eq!(received, "exit status 0");
            assert_eq!(end.unwrap(), (17, 13));
        }
        let (received, end) =
            copy_through(ErrorKind::BrokenPipe, Some(ErrorKind::ConnectionReset)).await;
        assert_eq!(
            (received.as_str(), end.unwrap_err().kind()),
            ("exit status 0", ErrorKind::ConnectionReset)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn write_with_another_error_fails() {
        let (received, end) = copy_through(ErrorKind::Other, None).await;
        assert_eq!((received.as_str(), end.unwrap_err().kind()), ("", ErrorKind::Other));
    }
}
