//! Listening sockets.

use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use jackstay_sys::sockets::virtual_network::{VirtualListener, VirtualStream};

use super::network::SocketNetwork;
use super::state::{ListenerPlace, address_of};
use super::stream::Stream;
use crate::net::{ConnectionId, ProcessId, Side, SocketOptions};

impl SocketNetwork {
    /// Binds and listens, as [`Self::listen_with`] with [`SocketOptions::accepted`].
    ///
    /// # Errors
    /// As [`Self::listen_with`].
    pub fn listen(&self, process: ProcessId, port: u16) -> io::Result<Box<dyn VirtualListener>> {
        self.listen_with(process, port, SocketOptions::accepted())
    }

    /// Binds and listens. Accepted sockets have these options. Port 0 is a free one.
    ///
    /// # Errors
    /// `AddrInUse` if another socket of the host listens on the port.
    pub fn listen_with(
        &self,
        process: ProcessId,
        port: u16,
        options: SocketOptions,
    ) -> io::Result<Box<dyn VirtualListener>> {
        let place = self.with(|state| state.listen(process, port, options))?;
        Ok(Box::new(Listener { network: self.clone(), place }))
    }
}

/// A listening socket.
#[derive(Debug)]
struct Listener {
    network: SocketNetwork,
    place: ListenerPlace,
}

impl Listener {
    fn accepted(&self, id: ConnectionId) -> (Box<dyn VirtualStream>, SocketAddr) {
        let stream = Stream::new(self.network.clone(), id, Side::Server);
        let from = stream.peer_addr();
        (Box::new(stream), from)
    }
}

impl VirtualListener for Listener {
    fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(address_of(self.place.host), self.place.port)
    }

    fn poll_accept(
        &self,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<(Box<dyn VirtualStream>, SocketAddr)>> {
        let budget = std::task::ready!(tokio::task::coop::poll_proceed(cx));
        let accepted = self.network.with(|state| state.accept(self.place, cx.waker()));
        let Some(id) = accepted else { return Poll::Pending };
        budget.made_progress();
        Poll::Ready(Ok(self.accepted(id)))
    }

    fn close_and_accept_queued(self: Box<Self>) -> Vec<(Box<dyn VirtualStream>, SocketAddr)> {
        let backlog = self.network.with(|state| state.close_listener(self.place));
        backlog.into_iter().map(|id| self.accepted(id)).collect()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.network.with(|state| {
            let backlog = state.close_listener(self.place);
            state.reset_backlog(backlog);
        });
    }
}
