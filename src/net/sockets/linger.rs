//! Closes a client connection so that the client still reads the last frames.
//!
//! A socket that is closed with unread bytes sends RST. An RST that arrives before the last frames turns a
//! graceful GOAWAY into `connection reset by peer`, after which no client may retry a write. So the FIN is
//! sent first, and further data are read and discarded until the client closes, for a limited time
//! (RFC 9112 section 9.6 recommends the same for HTTP/1.1).

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::spawn_local;
use tokio::time::timeout;

/// How long to wait for the client to close.
const LIMIT: Duration = Duration::from_secs(1);

thread_local! {
    static LINGERING: Cell<usize> = const { Cell::new(0) };
}

/// Connections of this thread that are still closing.
pub fn lingering_connections() -> usize {
    LINGERING.get()
}

/// A connection that lingers when it is dropped. Must be dropped within a `LocalSet`.
#[derive(Debug)]
pub struct Linger {
    /// Taken on drop.
    stream: Option<TcpStream>,
    /// The client has closed, or the connection has failed.
    finished: bool,
}

impl Linger {
    /// Wraps `stream`.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream: Some(stream), finished: false }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn record_error<T>(&mut self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(result, Poll::Ready(Err(_))) {
            self.finished = true;
        }
        result
    }
}

impl Drop for Linger {
    fn drop(&mut self) {
        let Some(mut stream) = self.stream.take().filter(|_| !self.finished) else { return };
        if socket2::SockRef::from(&stream).shutdown(std::net::Shutdown::Write).is_err() {
            return;
        }
        let lingering = Lingering::new();
        spawn_local(async move {
            let _lingering = lingering;
            let mut rest = [0; 4096];
            let _ = timeout(LIMIT, async {
                while matches!(stream.read(&mut rest).await, Ok(n) if n > 0) {}
            })
            .await;
        });
    }
}

struct Lingering;

impl Lingering {
    fn new() -> Self {
        LINGERING.set(LINGERING.get() + 1);
        Self
    }
}

impl Drop for Lingering {
    fn drop(&mut self) {
        LINGERING.set(LINGERING.get() - 1);
    }
}

impl AsyncRead for Linger {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = self.stream()?.poll_read(cx, buf);
        if matches!(result, Poll::Ready(Ok(()))) && buf.filled().len() == before {
            self.finished = true;
        }
        self.record_error(result)
    }
}

impl AsyncWrite for Linger {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = self.stream()?.poll_write(cx, buf);
        self.record_error(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = self.stream()?.poll_write_vectored(cx, bufs);
        self.record_error(result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;
    use tokio::task::LocalSet;

    #[tokio::test]
    async fn drop_with_unread_bytes_still_delivers_the_last_data() {
        LocalSet::new()
            .run_until(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                let (accepted, _) = listener.accept().await.unwrap();
                let mut ours = Linger::new(accepted);
                // Unread at the close: without lingering this causes RST.
                client.write_all(&[1; 1000]).await.unwrap();
                ours.write_all(b"GOAWAY").await.unwrap();
                drop(ours);
                assert_eq!(lingering_connections(), 1);
                client.write_all(&[1; 1000]).await.unwrap();
                let mut received = Vec::new();
                client.read_to_end(&mut received).await.unwrap();
                assert_eq!(received, b"GOAWAY");
                drop(client);
                while lingering_connections() > 0 {
                    tokio::task::yield_now().await;
                }
            })
            .await;
    }
}
