//! A stream that is read to its end although it takes nothing more.
//!
//! A process in a pod ends while its standard input still comes: the apiserver sends what is left of
//! the output and the exit status, and closes with bytes unread, which its kernel tells by a reset.
//! Whoever ends the tunnel at the first write that fails throws away what had come before.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// See the module. What is written after the first refusal is thrown away; reading says how it ended.
#[derive(Debug)]
pub struct DrainReads<'a, T> {
    inner: &'a mut T,
    refuses: bool,
}

impl<'a, T> DrainReads<'a, T> {
    /// Hears `inner` out.
    pub fn new(inner: &'a mut T) -> Self {
        Self { inner, refuses: false }
    }

    /// What is made of the end of a write that would have brought `done`.
    fn unless_refused<R>(&mut self, end: Poll<io::Result<R>>, done: R) -> Poll<io::Result<R>> {
        match end {
            Poll::Ready(Err(error))
                if matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset) =>
            {
                self.refuses = true;
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
        if self.refuses {
            return Poll::Ready(Ok(buf.len()));
        }
        let end = Pin::new(&mut *self.inner).poll_write(cx, buf);
        self.unless_refused(end, buf.len())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.refuses {
            return Poll::Ready(Ok(()));
        }
        let end = Pin::new(&mut *self.inner).poll_flush(cx);
        self.unless_refused(end, ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.refuses {
            return Poll::Ready(Ok(()));
        }
        let end = Pin::new(&mut *self.inner).poll_shutdown(cx);
        self.unless_refused(end, ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional, duplex};

    /// Takes nothing, and speaks only when somebody has tried; then ends, or breaks.
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

    /// What a client hears that goes on talking, and how the copying ended.
    async fn heard(how: ErrorKind, end: Option<ErrorKind>) -> (String, io::Result<(u64, u64)>) {
        let mut gone = Gone { tried: None, left: b"exit status 0", end, how };
        let (mut client, mut ours) = duplex(64);
        let talk = async move {
            client.write_all(b"more of its input").await.unwrap();
            let mut heard = String::new();
            client.read_to_string(&mut heard).await.unwrap();
            heard
        };
        let copy = async move {
            let end = copy_bidirectional(&mut ours, &mut DrainReads::new(&mut gone)).await;
            drop(ours);
            end
        };
        tokio::join!(talk, copy)
    }

    #[tokio::test(start_paused = true)]
    async fn what_it_says_last_is_heard() {
        for how in [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset] {
            let (heard, end) = heard(how, None).await;
            assert_eq!(heard, "exit status 0");
            assert_eq!(end.unwrap(), (17, 13));
        }
        let (heard, end) = heard(ErrorKind::BrokenPipe, Some(ErrorKind::ConnectionReset)).await;
        assert_eq!(
            (heard.as_str(), end.unwrap_err().kind()),
            ("exit status 0", ErrorKind::ConnectionReset)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn another_error_is_one() {
        let (heard, end) = heard(ErrorKind::Other, None).await;
        assert_eq!((heard.as_str(), end.unwrap_err().kind()), ("", ErrorKind::Other));
    }
}
