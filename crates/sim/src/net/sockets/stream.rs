//! Streams of connections, and references to their sockets.

use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use jackstay_core::tcp_info::TcpInfo;
use jackstay_sys::sockets::queue_memory::QueueMemory;
use jackstay_sys::sockets::virtual_network::{VirtualSocket, VirtualStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop;

use super::network::SocketNetwork;
use super::socket_io::Reading;
use crate::net::{ConnectionId, Side};

/// A connection. Dropping it closes the socket.
#[derive(Debug)]
pub(super) struct Stream(Socket);

/// The socket of a connection, which this does not keep open.
#[derive(Debug, Clone)]
struct Socket {
    network: SocketNetwork,
    id: ConnectionId,
    side: Side,
}

impl Stream {
    pub(super) fn new(network: SocketNetwork, id: ConnectionId, side: Side) -> Self {
        Self(Socket { network, id, side })
    }

    /// Waits for the end of the handshake.
    pub(super) async fn connected(&self) -> io::Result<()> {
        let Socket { network, id, .. } = &self.0;
        poll_fn(|cx| {
            let result = network.with(|state| state.is_connected(*id, cx.waker()));
            result.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    fn poll(
        &self,
        cx: &mut Context<'_>,
        reading: Reading,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<usize>> {
        let budget = ready!(coop::poll_proceed(cx));
        let Socket { network, id, side } = &self.0;
        let result = network.with(|state| {
            let result = state.read((*id, *side), reading, buf);
            if result.is_none() {
                state.wait_to_read(*id, *side, cx.waker());
            }
            result
        });
        let Some(result) = result else { return Poll::Pending };
        budget.made_progress();
        Poll::Ready(result)
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll(cx, Reading::Take, buf).map_ok(drop)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let budget = ready!(coop::poll_proceed(cx));
        let Socket { network, id, side } = &self.0;
        let result = network.with(|state| state.write((*id, *side), bufs, cx.waker()));
        let Some(result) = result else { return Poll::Pending };
        budget.made_progress();
        Poll::Ready(result)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // As the stream of tokio, which takes a connection that was reset for one that has ended.
        Poll::Ready(match self.shutdown_write() {
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
            result => result,
        })
    }
}

impl VirtualStream for Stream {
    fn local_addr(&self) -> SocketAddr {
        self.0.network.lock().address(self.0.id, self.0.side)
    }

    fn peer_addr(&self) -> SocketAddr {
        self.0.network.lock().address(self.0.id, self.0.side.other())
    }

    fn peer_uid(&self) -> Option<u32> {
        self.0.network.lock().peer_user(self.0.id, self.0.side)
    }

    fn poll_peek(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<usize>> {
        self.poll(cx, Reading::Peek, buf)
    }

    fn try_read(&self, buf: &mut [u8]) -> io::Result<usize> {
        let Socket { network, id, side } = &self.0;
        let mut buf = ReadBuf::new(buf);
        network
            .with(|state| state.read((*id, *side), Reading::Take, &mut buf))
            .unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    fn shutdown_write(&self) -> io::Result<()> {
        self.0.network.with(|state| state.shutdown_write(self.0.id, self.0.side))
    }

    fn reset_when_closed(&self) {
        self.0.network.with(|state| state.reset_when_closed(self.0.id, self.0.side));
    }

    fn socket(&self) -> Arc<dyn VirtualSocket> {
        Arc::new(self.0.clone())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.network.with(|state| state.close(self.0.id, self.0.side));
    }
}

impl VirtualSocket for Socket {
    fn tcp_info(&self) -> io::Result<TcpInfo> {
        Ok(self.network.with(|state| state.tcp_info(self.id, self.side)))
    }

    fn queue_memory(&self) -> io::Result<QueueMemory> {
        Ok(self.network.with(|state| state.queue_memory(self.id, self.side)))
    }

    fn send_keepalive_probe(&self) -> io::Result<()> {
        self.network.with(|state| state.send_keepalive_probe(self.id, self.side));
        Ok(())
    }

    fn disable_keepalives(&self) -> io::Result<()> {
        self.network.with(|state| state.disable_keepalives(self.id, self.side));
        Ok(())
    }

    fn bound_unsent(&self, bytes: u32) -> io::Result<()> {
        self.network.with(|state| state.bound_unsent(self.id, self.side, bytes));
        Ok(())
    }

    fn bound_received(&self, bytes: Option<usize>) -> io::Result<()> {
        self.network.with(|state| state.bound_received(self.id, self.side, bytes));
        Ok(())
    }
}
