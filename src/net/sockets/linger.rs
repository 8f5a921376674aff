//! Closes a client's connection so that the client reads what we said last.
//!
//! A socket that is closed with bytes unread answers with RST, and an RST that overtakes our last
//! frames turns a graceful GOAWAY into `connection reset by peer`, which no client may retry a write
//! on. So the end is sent first, and the rest is read and thrown away until the client's own end
//! comes, for a bounded time (RFC 9112 section 9.6 says the same of HTTP/1.1).

use std::cell::Cell;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::spawn_local;
use tokio::time::timeout;

/// How long the client's end is waited for.
const LIMIT: Duration = Duration::from_secs(1);

thread_local! {
    static LINGERING: Cell<usize> = const { Cell::new(0) };
}

/// Connections of this thread whose end is under way.
pub fn lingering_connections() -> usize {
    LINGERING.get()
}

/// A connection that lingers when it is dropped. Must live on a `LocalSet`.
#[derive(Debug)]
pub struct Linger {
    /// Taken on drop.
    stream: Option<TcpStream>,
    /// The client's end has been read, or the connection is broken: nothing to wait for.
    over: bool,
}

impl Linger {
    /// Lets `stream` linger.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream: Some(stream), over: false }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn note<T>(&mut self, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if matches!(result, Poll::Ready(Err(_))) {
            self.over = true;
        }
        result
    }
}

impl Drop for Linger {
    fn drop(&mut self) {
        let Some(mut stream) = self.stream.take().filter(|_| !self.over) else { return };
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
            self.over = true;
        }
        self.note(result)
    }
}

impl AsyncWrite for Linger {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = self.stream()?.poll_write(cx, buf);
        self.note(result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = self.stream()?.poll_write_vectored(cx, bufs);
        self.note(result)
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
    async fn what_was_said_last_is_read_although_the_peer_went_on_talking() {
        LocalSet::new()
            .run_until(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                let (accepted, _) = listener.accept().await.unwrap();
                let mut ours = Linger::new(accepted);
                // Unread when we close: without lingering this is an RST.
                client.write_all(&[1; 1000]).await.unwrap();
                ours.write_all(b"goodbye").await.unwrap();
                drop(ours);
                assert_eq!(lingering_connections(), 1);
                client.write_all(&[1; 1000]).await.unwrap();
                let mut said = Vec::new();
                client.read_to_end(&mut said).await.unwrap();
                assert_eq!(said, b"goodbye");
                drop(client);
                while lingering_connections() > 0 {
                    tokio::task::yield_now().await;
                }
            })
            .await;
    }
}
