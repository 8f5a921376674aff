//! The smallest simulated network: connections without delay to one listener.

use jackstay_core::tcp_info::TcpInfo;
use jackstay_sys::sockets::queue_memory::QueueMemory;
use jackstay_sys::sockets::virtual_network::{VirtualListener, VirtualSocket, VirtualStream};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// The address of the listener.
pub const ADDR: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)), 6443);
const CLIENT: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2)), 40_000);

/// A listener and the network that connects to it.
pub fn network() -> (Network, MemoryListener) {
    let (sender, receiver) = unbounded_channel();
    (Network(sender), MemoryListener(Mutex::new(receiver)))
}

/// Connects to the listener.
pub struct Network(UnboundedSender<MemoryStream>);

impl Network {
    /// The client's end of a new connection; `None` if the listener is closed.
    pub fn connect(&self) -> Option<MemoryStream> {
        let (client, server) = tokio::io::duplex(64 << 10);
        self.0.send(MemoryStream::new(server, ADDR, CLIENT)).ok()?;
        Some(MemoryStream::new(client, CLIENT, ADDR))
    }
}

#[derive(Debug)]
pub struct MemoryListener(Mutex<UnboundedReceiver<MemoryStream>>);

impl VirtualListener for MemoryListener {
    fn local_addr(&self) -> SocketAddr {
        ADDR
    }

    fn poll_accept(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<(Box<dyn VirtualStream>, SocketAddr)>> {
        match ready!(self.0.lock().unwrap().poll_recv(cx)) {
            Some(stream) => Poll::Ready(Ok((Box::new(stream), CLIENT))),
            None => Poll::Pending,
        }
    }

    fn close_and_accept_queued(self: Box<Self>) -> Vec<(Box<dyn VirtualStream>, SocketAddr)> {
        Vec::new()
    }
}

/// The bytes that one end of a connection has read and written.
#[derive(Debug, Clone, Default)]
pub struct Bytes(Arc<[AtomicUsize; 2]>);

impl Bytes {
    pub fn sum(&self) -> [usize; 2] {
        [self.0[0].load(Relaxed), self.0[1].load(Relaxed)]
    }
}

#[derive(Debug)]
pub struct MemoryStream {
    io: DuplexStream,
    local: SocketAddr,
    peer: SocketAddr,
    bytes: Bytes,
}

impl MemoryStream {
    fn new(io: DuplexStream, local: SocketAddr, peer: SocketAddr) -> Self {
        Self { io, local, peer, bytes: Bytes::default() }
    }

    pub fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }
}

impl AsyncRead for MemoryStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buf))?;
        self.bytes.0[0].fetch_add(buf.filled().len() - before, Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for MemoryStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.io).poll_write(cx, buf))?;
        self.bytes.0[1].fetch_add(written, Relaxed);
        Poll::Ready(Ok(written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl VirtualStream for MemoryStream {
    fn local_addr(&self) -> SocketAddr {
        self.local
    }

    fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    fn poll_peek(&self, _: &mut Context<'_>, _: &mut ReadBuf<'_>) -> Poll<io::Result<usize>> {
        Poll::Ready(Err(io::ErrorKind::Unsupported.into()))
    }

    fn try_read(&self, _: &mut [u8]) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn shutdown_write(&self) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn reset_when_closed(&self) {}

    fn socket(&self) -> Arc<dyn VirtualSocket> {
        Arc::new(MemorySocket)
    }
}

#[derive(Debug)]
struct MemorySocket;

impl VirtualSocket for MemorySocket {
    fn tcp_info(&self) -> io::Result<TcpInfo> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn queue_memory(&self) -> io::Result<QueueMemory> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn send_keepalive_probe(&self) -> io::Result<()> {
        Ok(())
    }

    fn disable_keepalives(&self) -> io::Result<()> {
        Ok(())
    }

    fn bound_unsent(&self, _: u32) -> io::Result<()> {
        Ok(())
    }

    fn bound_received(&self, _: Option<usize>) -> io::Result<()> {
        Ok(())
    }
}
