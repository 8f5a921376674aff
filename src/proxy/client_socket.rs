//! The socket of an L7 client: its kernel memory is charged, and it is closed so that the client still receives the
//! last frames ([`super::lingering`]).

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use jackstay_core::admission::{Refusal, SourceMemory};
use jackstay_sys::delegate_async_write;
use jackstay_sys::sockets::stream::{DetachedStream, TcpStream};
use jackstay_sys::sockets::tcp_options::{MAX_UNSENT, MAX_UNSENT_OF_FLOW};
use tokio::io::{AsyncRead, ReadBuf};

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
        let memory = SocketMemory::new(stream.socket(), Arc::clone(&source), MAX_UNSENT);
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
    /// What `setsockopt(2)` returns, or the socket is simulated.
    pub fn into_flow_socket(mut self) -> io::Result<tokio::net::TcpStream> {
        let (stream, memory) = self.stream.take().expect(ATTACHED).into_parts();
        memory.end_bounds();
        stream.socket().bound_unsent(MAX_UNSENT_OF_FLOW)?;
        stream.into_kernel()
    }

    /// Takes the socket from the event loop of this thread, so that another thread can [`Self::attach`] it. Its memory
    /// is measured anew there: the bounds for short memory end here, because nothing else would end them.
    ///
    /// # Errors
    /// The event loop does not return the socket, or the connection must be reset for lack of memory. It is then closed.
    pub fn detach(&mut self) -> io::Result<DetachedStream> {
        let (stream, memory) = self.stream.take().ok_or(io::ErrorKind::NotConnected)?.into_parts();
        if memory.is_shed() {
            drop(memory);
            stream.close_with_reset();
            return Err(io::Error::new(io::ErrorKind::TimedOut, Refusal::StalledReader.reason()));
        }
        memory.end_bounds();
        stream.detach()
    }

    /// Registers a detached socket with the event loop of this thread.
    ///
    /// # Errors
    /// The event loop does not accept the socket.
    pub fn attach(&mut self, socket: DetachedStream) -> io::Result<()> {
        *self = Self::new(socket.attach()?, Arc::clone(&self.source));
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

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_core::admission::{MemoryBudget, MemoryKind};
    use jackstay_sys::sockets::tcp_options::MIN_UNSENT;
    use socket2::SockRef;
    use std::os::fd::AsFd;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::task::{LocalSet, spawn_local};

    use crate::proxy::admission::socket_memory;

    #[tokio::test]
    async fn move_to_another_thread_ends_the_bounds_for_short_memory() {
        LocalSet::new()
            .run_until(async {
                let _measuring = spawn_local(socket_memory::run());
                let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
                let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
                let (accepted, _) = listener.accept().await.unwrap();
                let budget = MemoryBudget::new(1 << 20);
                let duplicate = accepted.as_fd().try_clone_to_owned().unwrap();
                let mut ours = ClientSocket::new(accepted.into(), budget.source(1));
                let unsent = || SockRef::from(&duplicate).tcp_notsent_lowat().unwrap();
                // Memory is short, and the socket has unread bytes.
                let _other = budget.source(1).charge(MemoryKind::Flows, 300 << 10);
                client.write_all(b"x").await.unwrap();
                assert!(ours.has_bytes().await.unwrap());
                while unsent() != MIN_UNSENT {
                    tokio::task::yield_now().await;
                }
                let socket = ours.detach().unwrap();
                ours.attach(socket).unwrap();
                assert_eq!(unsent(), MAX_UNSENT);
            })
            .await;
    }
}
