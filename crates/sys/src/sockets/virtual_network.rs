//! What a simulated network implements, so that code on [`super::stream`] runs on it without the kernel.
//!
//! A simulation gives its network to [`super::connector::Connector::over`] and its listeners to the workers. Everything
//! above the sockets is then the code that runs on the kernel's.

use std::fmt::Debug;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use jackstay_core::tcp_info::TcpInfo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::queue_memory::QueueMemory;

/// A connect in progress. Dropping it gives the connect up.
pub type Connecting<'a> =
    Pin<Box<dyn Future<Output = io::Result<Box<dyn VirtualStream>>> + Send + 'a>>;

/// The network as one process sees it.
pub trait VirtualNetwork: Debug + Send + Sync {
    /// Connects to an address. Fails as connect(2) does.
    fn connect(&self, to: SocketAddr) -> Connecting<'_>;
}

/// A listening socket.
pub trait VirtualListener: Debug + Send {
    /// The address that it listens on.
    fn local_addr(&self) -> SocketAddr;

    /// Takes a connection from the accept queue. The task is woken when there is one.
    fn poll_accept(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<(Box<dyn VirtualStream>, SocketAddr)>>;

    /// Closes the socket and returns the connections in its accept queue.
    fn close_and_accept_queued(self: Box<Self>) -> Vec<(Box<dyn VirtualStream>, SocketAddr)>;
}

/// An established connection. Dropping it closes the socket, with RST if bytes are unread or
/// [`Self::reset_when_closed`] was called (as `SO_LINGER` of zero, socket(7)).
pub trait VirtualStream: AsyncRead + AsyncWrite + Debug + Send + Unpin {
    /// The address of this end.
    fn local_addr(&self) -> SocketAddr;

    /// The address of the other end.
    fn peer_addr(&self) -> SocketAddr;

    /// The user of the client, if it is a process of the same host.
    fn peer_uid(&self) -> Option<u32> {
        None
    }

    /// Reads without taking the bytes (`MSG_PEEK`, recv(2)). Returns their number, which is 0 at the end.
    fn poll_peek(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<usize>>;

    /// Reads what has arrived. `WouldBlock` if nothing has.
    fn try_read(&self, buf: &mut [u8]) -> io::Result<usize>;

    /// Sends FIN after what was written (`SHUT_WR`, shutdown(2)). `NotConnected` if the connection was reset.
    fn shutdown_write(&self) -> io::Result<()>;

    /// Makes the close send RST instead of FIN.
    fn reset_when_closed(&self);

    /// The state of the socket, also when TLS or HTTP own the stream.
    fn socket(&self) -> Arc<dyn VirtualSocket>;
}

/// The state and the options of a connection's socket. It does not keep the socket open.
pub trait VirtualSocket: Debug + Send + Sync {
    /// See [`super::tcp_info::read`].
    fn tcp_info(&self) -> io::Result<TcpInfo>;

    /// See [`super::queue_memory::read`].
    fn queue_memory(&self) -> io::Result<QueueMemory>;

    /// See [`super::tcp_options::send_keepalive_probe`].
    fn send_keepalive_probe(&self) -> io::Result<()>;

    /// See [`super::tcp_options::disable_keepalives`].
    fn disable_keepalives(&self) -> io::Result<()>;

    /// See [`super::tcp_options::bound_unsent`].
    fn bound_unsent(&self, bytes: u32) -> io::Result<()>;

    /// See [`super::tcp_options::bound_received`].
    fn bound_received(&self, bytes: Option<usize>) -> io::Result<()>;
}
