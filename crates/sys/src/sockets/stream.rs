//! TCP sockets of the kernel or of a simulated network ([`super::virtual_network`]). This is the only place where L7
//! code meets sockets, so a simulation runs that code as it is.

use std::future::poll_fn;
use std::io;
use std::net::{self, Shutdown, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use jackstay_core::line_pacing::QueueBounds;
use jackstay_core::tcp_info::TcpInfo;
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::queue_memory::QueueMemory;
use super::virtual_network::{VirtualListener, VirtualSocket, VirtualStream};
use super::{listening, queue_memory, tcp_info, tcp_options};
use crate::process::resource_limits;
use crate::process::resource_limits::SpareDescriptor;

/// An established connection.
#[derive(Debug)]
pub enum TcpStream {
    /// Of the kernel.
    Kernel(tokio::net::TcpStream),
    /// Of a simulation.
    Virtual(Box<dyn VirtualStream>),
}

/// A listening socket.
#[derive(Debug)]
pub enum TcpListener {
    /// Of the kernel.
    Kernel(tokio::net::TcpListener),
    /// Of a simulation.
    Virtual(Box<dyn VirtualListener>),
}

/// A connection that belongs to no event loop, on its way to another thread.
#[derive(Debug)]
pub enum DetachedStream {
    /// Of the kernel.
    Kernel(net::TcpStream),
    /// Of a simulation.
    Virtual(Box<dyn VirtualStream>),
}

/// A listening socket that belongs to no event loop.
#[derive(Debug)]
pub enum DetachedListener {
    /// Of the kernel.
    Kernel(net::TcpListener),
    /// Of a simulation.
    Virtual(Box<dyn VirtualListener>),
}

/// The socket of a connection whose stream is elsewhere. It does not keep the socket open.
#[derive(Debug, Clone)]
pub enum SocketRef {
    /// Of the kernel. Its owner drops it before the socket is closed.
    Kernel(RawFd),
    /// Of a simulation.
    Virtual(Arc<dyn VirtualSocket>),
}

impl TcpStream {
    /// The address of this end.
    ///
    /// # Errors
    /// What `getsockname(2)` returns.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Kernel(stream) => stream.local_addr(),
            Self::Virtual(stream) => Ok(stream.local_addr()),
        }
    }

    /// The address of the other end.
    ///
    /// # Errors
    /// What `getpeername(2)` returns.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Kernel(stream) => stream.peer_addr(),
            Self::Virtual(stream) => Ok(stream.peer_addr()),
        }
    }

    /// Whether the connection is of a simulation.
    pub(super) fn is_simulated(&self) -> bool {
        matches!(self, Self::Virtual(_))
    }

    /// The user of the client of a simulated connection, if it is known.
    pub(super) fn simulated_peer_uid(&self) -> Option<u32> {
        match self {
            Self::Kernel(_) => None,
            Self::Virtual(stream) => stream.peer_uid(),
        }
    }

    /// Whether the connection has one of the last descriptors, see [`resource_limits::is_reserved`].
    pub fn has_reserved_descriptor(&self) -> bool {
        match self {
            Self::Kernel(stream) => resource_limits::is_reserved(stream),
            Self::Virtual(_) => false,
        }
    }

    /// Waits for bytes and reads them without taking them. Returns their number, which is 0 at the end.
    ///
    /// # Errors
    /// Those of reading.
    pub async fn peek(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Kernel(stream) => stream.peek(buf).await,
            Self::Virtual(stream) => {
                poll_fn(|cx| stream.poll_peek(cx, &mut ReadBuf::new(buf))).await
            }
        }
    }

    /// Reads what has arrived.
    ///
    /// # Errors
    /// `WouldBlock` if nothing has, and those of reading.
    pub fn try_read(&self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Kernel(stream) => stream.try_read(buf),
            Self::Virtual(stream) => stream.try_read(buf),
        }
    }

    /// Sends FIN after what was written.
    ///
    /// # Errors
    /// What `shutdown(2)` returns: the connection was reset.
    pub fn shutdown_write(&self) -> io::Result<()> {
        match self {
            Self::Kernel(stream) => SockRef::from(stream).shutdown(Shutdown::Write),
            Self::Virtual(stream) => stream.shutdown_write(),
        }
    }

    /// Makes the close of the connection send RST instead of FIN.
    pub fn reset_when_closed(&self) {
        match self {
            Self::Kernel(stream) => tcp_options::reset_when_closed(stream),
            Self::Virtual(stream) => stream.reset_when_closed(),
        }
    }

    /// Closes the connection with RST, so that the peer does not take it for the end of complete data.
    pub fn close_with_reset(self) {
        self.reset_when_closed();
    }

    /// The socket.
    pub fn socket(&self) -> SocketRef {
        match self {
            Self::Kernel(stream) => SocketRef::Kernel(stream.as_raw_fd()),
            Self::Virtual(stream) => SocketRef::Virtual(stream.socket()),
        }
    }

    /// Reads `TCP_INFO`.
    ///
    /// # Errors
    /// See [`tcp_info::read`].
    pub fn tcp_info(&self) -> io::Result<TcpInfo> {
        self.socket().tcp_info()
    }

    /// The stream of the kernel, for code that splices.
    ///
    /// # Errors
    /// `Unsupported` for a simulated one.
    pub fn into_kernel(self) -> io::Result<tokio::net::TcpStream> {
        match self {
            Self::Kernel(stream) => Ok(stream),
            Self::Virtual(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Takes the connection from the event loop of this thread.
    ///
    /// # Errors
    /// The event loop does not return it.
    pub fn detach(self) -> io::Result<DetachedStream> {
        match self {
            Self::Kernel(stream) => stream.into_std().map(DetachedStream::Kernel),
            Self::Virtual(stream) => Ok(DetachedStream::Virtual(stream)),
        }
    }
}

impl From<net::TcpListener> for DetachedListener {
    fn from(listener: net::TcpListener) -> Self {
        Self::Kernel(listener)
    }
}

impl From<tokio::net::TcpListener> for TcpListener {
    fn from(listener: tokio::net::TcpListener) -> Self {
        Self::Kernel(listener)
    }
}

impl From<tokio::net::TcpStream> for TcpStream {
    fn from(stream: tokio::net::TcpStream) -> Self {
        Self::Kernel(stream)
    }
}

impl DetachedStream {
    /// Registers the connection with the event loop of this thread.
    ///
    /// # Errors
    /// The event loop does not accept it.
    pub fn attach(self) -> io::Result<TcpStream> {
        match self {
            Self::Kernel(stream) => tokio::net::TcpStream::from_std(stream).map(TcpStream::Kernel),
            Self::Virtual(stream) => Ok(TcpStream::Virtual(stream)),
        }
    }
}

impl AsyncRead for TcpStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Kernel(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Virtual(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for TcpStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Kernel(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Virtual(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Kernel(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Virtual(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Kernel(stream) => stream.is_write_vectored(),
            Self::Virtual(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Kernel(stream) => Pin::new(stream).poll_flush(cx),
            Self::Virtual(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Kernel(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Virtual(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

impl TcpListener {
    /// The address that it listens on.
    ///
    /// # Errors
    /// What `getsockname(2)` returns.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Kernel(listener) => listener.local_addr(),
            Self::Virtual(listener) => Ok(listener.local_addr()),
        }
    }

    /// Accepts a connection.
    ///
    /// # Errors
    /// Those of accept(2).
    pub async fn accept(&self) -> io::Result<(TcpStream, SocketAddr)> {
        match self {
            Self::Kernel(listener) => {
                listener.accept().await.map(|(stream, from)| (TcpStream::Kernel(stream), from))
            }
            Self::Virtual(listener) => {
                let (stream, from) = poll_fn(|cx| listener.poll_accept(cx)).await?;
                Ok((TcpStream::Virtual(stream), from))
            }
        }
    }

    /// See [`tcp_options::configure_accepted_by`]. A simulated network has no such options.
    ///
    /// # Errors
    /// What `setsockopt(2)` returns.
    pub fn configure_accepted(&self, max_unsent: u32) -> io::Result<()> {
        match self {
            Self::Kernel(listener) => tcp_options::configure_accepted_by(listener, max_unsent),
            Self::Virtual(_) => Ok(()),
        }
    }

    /// A descriptor for [`Self::reset_oldest_waiting`]. A simulated process has no limit on descriptors.
    pub fn spare_descriptor(&self) -> SpareDescriptor {
        match self {
            Self::Kernel(_) => SpareDescriptor::open(),
            Self::Virtual(_) => SpareDescriptor::none(),
        }
    }

    /// See [`SpareDescriptor::reset_oldest_waiting`].
    ///
    /// # Errors
    /// As there.
    pub fn reset_oldest_waiting(&self, spare: &mut SpareDescriptor) -> io::Result<()> {
        match self {
            Self::Kernel(listener) => spare.reset_oldest_waiting(listener),
            Self::Virtual(_) => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    /// See [`listening::close_and_accept_queued`].
    pub fn close_and_accept_queued(self) -> Vec<(TcpStream, SocketAddr)> {
        match self {
            Self::Kernel(listener) => listening::close_and_accept_queued(listener)
                .into_iter()
                .map(|(stream, from)| (TcpStream::Kernel(stream), from))
                .collect(),
            Self::Virtual(listener) => listener
                .close_and_accept_queued()
                .into_iter()
                .map(|(stream, from)| (TcpStream::Virtual(stream), from))
                .collect(),
        }
    }
}

impl DetachedListener {
    /// The address that it listens on.
    ///
    /// # Errors
    /// What `getsockname(2)` returns.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Kernel(listener) => listener.local_addr(),
            Self::Virtual(listener) => Ok(listener.local_addr()),
        }
    }

    /// The socket of the kernel.
    ///
    /// # Errors
    /// `Unsupported` for a simulated one.
    pub fn into_kernel(self) -> io::Result<net::TcpListener> {
        match self {
            Self::Kernel(listener) => Ok(listener),
            Self::Virtual(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Registers the socket with the event loop of this thread.
    ///
    /// # Errors
    /// The event loop does not accept it.
    pub fn attach(self) -> io::Result<TcpListener> {
        match self {
            Self::Kernel(listener) => {
                tokio::net::TcpListener::from_std(listener).map(TcpListener::Kernel)
            }
            Self::Virtual(listener) => Ok(TcpListener::Virtual(listener)),
        }
    }
}

impl SocketRef {
    /// The socket of the kernel with this descriptor.
    pub fn of(socket: &impl AsRawFd) -> Self {
        Self::Kernel(socket.as_raw_fd())
    }

    /// Reads `TCP_INFO`.
    ///
    /// # Errors
    /// See [`tcp_info::read`].
    pub fn tcp_info(&self) -> io::Result<TcpInfo> {
        match self {
            Self::Kernel(descriptor) => tcp_info::read(descriptor),
            Self::Virtual(socket) => socket.tcp_info(),
        }
    }

    /// Reads the memory of the queues.
    ///
    /// # Errors
    /// See [`queue_memory::read`].
    pub fn queue_memory(&self) -> io::Result<QueueMemory> {
        match self {
            Self::Kernel(descriptor) => queue_memory::read(descriptor),
            Self::Virtual(socket) => socket.queue_memory(),
        }
    }

    /// See [`tcp_options::send_keepalive_probe`].
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn send_keepalive_probe(&self) -> io::Result<()> {
        match self {
            Self::Kernel(descriptor) => tcp_options::send_keepalive_probe(descriptor),
            Self::Virtual(socket) => socket.send_keepalive_probe(),
        }
    }

    /// See [`tcp_options::disable_keepalives`].
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn disable_keepalives(&self) -> io::Result<()> {
        match self {
            Self::Kernel(descriptor) => tcp_options::disable_keepalives(descriptor),
            Self::Virtual(socket) => socket.disable_keepalives(),
        }
    }

    /// See [`tcp_options::bound_unsent`].
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn bound_unsent(&self, bytes: u32) -> io::Result<()> {
        match self {
            Self::Kernel(descriptor) => tcp_options::bound_unsent(descriptor, bytes),
            Self::Virtual(socket) => socket.bound_unsent(bytes),
        }
    }

    /// See [`tcp_options::forbid_sending`].
    ///
    /// # Errors
    /// What the kernel returns; `Unsupported` in a simulation.
    pub fn forbid_sending(&self) -> io::Result<()> {
        match self {
            Self::Kernel(descriptor) => tcp_options::forbid_sending(descriptor),
            Self::Virtual(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// See [`tcp_options::bound_in_flight`].
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn bound_in_flight(&self, bounds: QueueBounds) -> io::Result<()> {
        match self {
            Self::Kernel(descriptor) => tcp_options::bound_in_flight(descriptor, bounds),
            // Its network has no queues.
            Self::Virtual(_) => Ok(()),
        }
    }

    /// See [`tcp_options::bound_received`].
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn bound_received(&self, bytes: Option<usize>) -> io::Result<()> {
        match self {
            Self::Kernel(descriptor) => tcp_options::bound_received(descriptor, bytes),
            Self::Virtual(socket) => socket.bound_received(bytes),
        }
    }
}
