//! Closes a client connection so that the client still receives the last frames.
//!
//! Linux sends RST when a socket with unread bytes is closed. A client that receives RST may discard data that
//! it has not read yet: it then sees `connection reset by peer` instead of GOAWAY, and must not retry a write.
//! So FIN is sent first, and data that arrive are discarded until the client closes too, for at most one second
//! (RFC 9112 section 9.6 recommends the same for HTTP/1.1).

use std::io;
use std::net::{self, Shutdown};
use std::pin::Pin;
use std::rc::Rc;
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
    /// Each connection that waits for its client to close has a clone.
    static LINGERING: Rc<()> = Rc::new(());
}

/// How many connections of this thread wait for their clients to close.
pub fn lingering_connections() -> usize {
    LINGERING.with(Rc::strong_count) - 1
}

/// A connection whose drop sends FIN and then waits for the client to close. Must be dropped within a
/// `LocalSet`.
#[derive(Debug)]
pub struct Linger {
    /// `None` during the drop, and while the connection moves to another thread.
    stream: Option<TcpStream>,
}

impl Linger {
    /// Lingers when `stream` is closed.
    pub fn new(stream: TcpStream) -> Self {
        Self { stream: Some(stream) }
    }

    /// Takes the socket from the event loop of this thread, so that another thread can [`Self::attach`] it.
    ///
    /// # Errors
    /// The event loop does not return the socket. The connection is then closed.
    pub fn detach(&mut self) -> io::Result<net::TcpStream> {
        self.stream.take().ok_or(io::ErrorKind::NotConnected)?.into_std()
    }

    /// Registers a detached socket with the event loop of this thread.
    ///
    /// # Errors
    /// The event loop does not accept the socket.
    pub fn attach(&mut self, socket: net::TcpStream) -> io::Result<()> {
        self.stream = Some(TcpStream::from_std(socket)?);
        Ok(())
    }

    fn stream(&mut self) -> &mut TcpStream {
        self.stream.as_mut().expect("a detached connection is not used")
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
        // `shutdown` fails if the client has reset the connection.
        if SockRef::from(&stream).shutdown(Shutdown::Write).is_err() || is_at_end(&stream) {
            return;
        }
        let lingering = LINGERING.with(Rc::clone);
        spawn_local(async move {
            let mut discarded = [0; 4096];
            let client_closes =
                async { while matches!(stream.read(&mut discarded).await, Ok(n) if n > 0) {} };
            let _ = timeout(LIMIT, client_closes).await;
            drop(lingering);
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;
    use tokio::task::LocalSet;

    #[tokio::test]
    async fn drop_with_unread_bytes_delivers_the_last_data() {
        LocalSet::new()
            .run_until(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                let (accepted, _) = listener.accept().await.unwrap();
                let mut ours = Linger::new(accepted);
                // These bytes are unread at the close, which would therefore send RST.
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
