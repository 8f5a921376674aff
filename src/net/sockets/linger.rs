//! Closes a client connection so that the client still reads the last frames.
//!
//! A socket that is closed with unread bytes sends RST. An RST that arrives before the last frames turns a
//! graceful GOAWAY into `connection reset by peer`, after which no client may retry a write. So the FIN is
//! sent first, and further data are read and discarded until the client closes, for a limited time
//! (RFC 9112 section 9.6 recommends the same for HTTP/1.1).

use std::cell::Cell;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
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
}

impl Linger {
    /// Wraps `stream`.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream: Some(stream) }
    }

    fn stream(&mut self) -> &mut TcpStream {
        self.stream.as_mut().expect("the stream is taken on drop only")
    }
}

impl AsyncRead for Linger {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(self.stream()).poll_read(cx, buf)
    }
}

delegate_async_write!(Linger, |this| this.stream());

impl Drop for Linger {
    fn drop(&mut self) {
        let Some(mut stream) = self.stream.take() else { return };
        // An error means that the client has reset the connection.
        if SockRef::from(&stream).shutdown(Shutdown::Write).is_err() || is_at_end(&stream) {
            return;
        }
        let lingering = LingeringCount::new();
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

/// Whether the client has closed or the connection has failed.
fn is_at_end(stream: &TcpStream) -> bool {
    match stream.try_read(&mut [0; 4096]) {
        Ok(n) => n == 0,
        Err(error) => error.kind() != io::ErrorKind::WouldBlock,
    }
}

/// Counts one connection until it is dropped.
struct LingeringCount;

impl LingeringCount {
    fn new() -> Self {
        LINGERING.set(LINGERING.get() + 1);
        Self
    }
}

impl Drop for LingeringCount {
    fn drop(&mut self) {
        LINGERING.set(LINGERING.get() - 1);
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
