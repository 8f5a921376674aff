//! Listening sockets.

use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll};

use jackstay_sys::sockets::virtual_network::{VirtualListener, VirtualStream};

use super::SocketNetwork;
use super::state::ListenerPlace;
use super::stream::Stream;
use crate::net::{ConnectionId, Side};

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    network: SocketNetwork,
    place: ListenerPlace,
}

impl Listener {
    pub(super) fn new(network: SocketNetwork, place: ListenerPlace) -> Self {
        Self { network, place }
    }

    fn accepted(&self, id: ConnectionId) -> (Box<dyn VirtualStream>, SocketAddr) {
        let stream = Stream::new(self.network.clone(), id, Side::Server);
        let from = stream.peer_addr();
        (Box::new(stream), from)
    }
}

impl VirtualListener for Listener {
    fn local_addr(&self) -> SocketAddr {
        SocketAddr::new(SocketNetwork::address_of(self.place.host), self.place.port)
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
