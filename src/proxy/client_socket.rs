//! The socket of an L7 client: its kernel memory is charged, and it is closed so that the client still receives the
//! last frames ([`super::lingering`]).

use std::io;
use std::net::{self, SocketAddr};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use jackstay_core::admission::SourceMemory;
use jackstay_sys::delegate_async_write;
use jackstay_sys::sockets::tcp_options;
use jackstay_sys::sockets::tcp_options::{MAX_UNSENT, MAX_UNSENT_OF_FLOW};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;

use super::accounted_stream::AccountedStream;
use super::admission::socket_memory::{Peer, SocketMemory};
use super::lingering;

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
        if let Some((stream, memory)) = self.stream.take().map(AccountedStream::into_parts) {
            lingering::close(stream, memory);
        }
    }
}
