//! The socket of an L7 client: its kernel memory is charged, and it is closed so that the client still receives the
//! last frames.
//!
//! Linux sends RST when a socket with unread bytes is closed. A client that receives RST may discard data that
//! it has not read yet: it then sees `connection reset by peer` instead of GOAWAY, and must not retry a write.
//! So FIN is sent first, and data that arrive are discarded until the client closes too, for at most one second
//! (RFC 9112 section 9.6 recommends the same for HTTP/1.1).
//!
//! The kernel holds bytes that the client has not acknowledged after the socket is closed, too, for about a minute.
//! So the socket stays open and charged until they are acknowledged, at most [`DELIVERY_LIMIT`] and only while memory is
//! not short, and is reset then. A connection that ends while the client accepts no bytes is reset at once.

use std::io;
use std::net::{self, Shutdown, SocketAddr};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use jackstay_core::admission::{Level, SourceMemory};
use jackstay_sys::clock;
use jackstay_sys::delegate_async_write;
use jackstay_sys::sockets::tcp_options::{MAX_UNSENT, MAX_UNSENT_OF_FLOW};
use jackstay_sys::sockets::{tcp_info, tcp_options};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::accounted_stream::AccountedStream;
use super::admission::socket_memory::{Peer, SocketMemory};

/// How long to wait for the client to close.
const LIMIT: Duration = Duration::from_secs(1);
/// How long to wait for the client to acknowledge the last bytes.
const DELIVERY_LIMIT: Duration = Duration::from_secs(30);
/// Interval of the checks whether it has.
const DELIVERY_CHECK: Duration = Duration::from_millis(500);

thread_local! {
    /// Each connection that waits for its client to close has a clone.
    static LINGERING: Rc<()> = Rc::new(());
}

/// How many connections of this thread wait for their clients to close.
pub fn lingering_connections() -> usize {
    LINGERING.with(Rc::strong_count) - 1
}

/// The socket of a client. Must be dropped within a `LocalSet`.
pub struct ClientSocket {
    /// `None` during the drop, and while the connection moves to another thread.
    stream: Option<AccountedStream>,
    source: Arc<SourceMemory>,
}

impl ClientSocket {
    /// The socket of a client that is charged to `source`.
    pub fn new(stream: TcpStream, source: Arc<SourceMemory>) -> Self {
        let memory = SocketMemory::new(stream.as_raw_fd(), Arc::clone(&source), MAX_UNSENT);
        Self { stream: Some(AccountedStream::new(stream, memory)), source }
    }

    /// The memory of the socket.
    pub fn memory(&self) -> &SocketMemory {
        self.stream.as_ref().expect(ATTACHED).memory()
    }

    /// The address on which the client was accepted.
    ///
    /// # Errors
    /// Those of `getsockname(2)`.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.stream.as_ref().expect(ATTACHED).get_ref().local_addr()
    }

    /// Waits until the client has sent something, and leaves it in the socket. False at the end of the stream.
    ///
    /// # Errors
    /// Those of reading.
    pub async fn has_bytes(&self) -> io::Result<bool> {
        let stream = self.stream.as_ref().expect(ATTACHED);
        let has_bytes = stream.get_ref().peek(&mut [0]).await? > 0;
        stream.memory().record_read(Peer::Client, has_bytes);
        Ok(has_bytes)
    }

    /// The socket without its memory, with the bound of a flow on its unsent bytes.
    ///
    /// # Errors
    /// What `setsockopt(2)` returns.
    pub fn into_flow_socket(mut self) -> io::Result<TcpStream> {
        let (stream, memory) = self.stream.take().expect(ATTACHED).into_parts();
        memory.end_bounds();
        tcp_options::bound_unsent(&stream, MAX_UNSENT_OF_FLOW)?;
        Ok(stream)
    }

    /// Takes the socket from the event loop of this thread, so that another thread can [`Self::attach`] it.
    ///
    /// # Errors
    /// The event loop does not return the socket. The connection is then closed.
    pub fn detach(&mut self) -> io::Result<net::TcpStream> {
        let (stream, _) = self.stream.take().ok_or(io::ErrorKind::NotConnected)?.into_parts();
        stream.into_std()
    }

    /// Registers a detached socket with the event loop of this thread.
    ///
    /// # Errors
    /// The event loop does not accept the socket.
    pub fn attach(&mut self, socket: net::TcpStream) -> io::Result<()> {
        *self = Self::new(TcpStream::from_std(socket)?, Arc::clone(&self.source));
        Ok(())
    }

    fn stream(&mut self) -> &mut AccountedStream {
        self.stream.as_mut().expect(ATTACHED)
    }
}

const ATTACHED: &str = "a detached connection is not used";

impl AsyncRead for ClientSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(self.stream()).poll_read(cx, buf)
    }
}

delegate_async_write!(ClientSocket, |this| this.stream());

impl Drop for ClientSocket {
    fn drop(&mut self) {
        let Some((stream, memory)) = self.stream.take().map(AccountedStream::into_parts) else {
            return;
        };
        if memory.is_client_blocked() {
            drop(memory);
            return tcp_options::close_with_reset(stream);
        }
        // `shutdown` fails if the client has reset the connection.
        if SockRef::from(&stream).shutdown(Shutdown::Write).is_err() || is_at_end(&stream) {
            return;
        }
        let lingering = LINGERING.with(Rc::clone);
        spawn_local(linger(stream, memory, lingering));
    }
}

/// Waits until the client has closed, or has acknowledged all bytes.
async fn linger(mut stream: TcpStream, memory: SocketMemory, lingering: Rc<()>) {
    let end = clock::now() + DELIVERY_LIMIT;
    let mut discarded = [0; 4096];
    let client_closes =
        async { while matches!(stream.read(&mut discarded).await, Ok(n) if n > 0) {} };
    let is_closed = timeout(LIMIT, client_closes).await.is_ok();
    drop(lingering);
    memory.record_read(Peer::Client, false);
    if is_closed {
        return;
    }
    while tcp_info::read(&stream).is_ok_and(|info| info.has_pending() && !info.closed) {
        if clock::now() >= end || memory.level() >= Level::High {
            drop(memory);
            return tcp_options::close_with_reset(stream);
        }
        sleep(DELIVERY_CHECK).await;
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

    use jackstay_core::admission::MemoryBudget;

    #[tokio::test]
    async fn drop_with_unread_bytes_delivers_the_last_data() {
        LocalSet::new()
            .run_until(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                let (accepted, _) = listener.accept().await.unwrap();
                let budget = MemoryBudget::new(1 << 20);
                let mut ours = ClientSocket::new(accepted, budget.source(1));
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

    #[tokio::test]
    async fn drop_while_the_client_accepts_no_bytes_resets_the_connection() {
        LocalSet::new()
            .run_until(async {
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                let (accepted, _) = listener.accept().await.unwrap();
                let budget = MemoryBudget::new(1 << 20);
                let mut ours = ClientSocket::new(accepted, budget.source(1));
                let blocked = timeout(Duration::from_millis(50), async {
                    loop {
                        ours.write_all(&[1; 16 << 10]).await.unwrap();
                    }
                });
                assert!(blocked.await.is_err());
                drop(ours);
                assert_eq!(lingering_connections(), 0);
                let error = client.read_to_end(&mut Vec::new()).await.unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
                assert_eq!(budget.used(), 0);
            })
            .await;
    }
}
