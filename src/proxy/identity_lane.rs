//! The identity lane: a thread of its own for the connections of clients with a configured identity.
//!
//! Handshakes, tokens, anonymous requests and L4 flows cost time on the workers, and any process that can connect
//! causes them. A worker makes the handshake and waits until the client's certificate is verified. If the client
//! has proven a configured identity, the worker hands the connection over to the identity lane, which serves it
//! with upstream connections of its own. So what other clients do takes no time from the event loop that serves
//! the node's kubelet.
//!
//! A client whose certificate is not valid stays on its worker, also if its certificate becomes valid later.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jackstay_net::tls::client_chain::ChainVerdict;
use jackstay_sys::sockets::source::Source;
use jackstay_sys::sockets::stream::DetachedStream;
use tokio::sync::mpsc::UnboundedSender;

use super::client_stream::ClientStream;

/// A connection on its way from a worker to the identity lane.
pub struct HandedOver {
    /// The client and its certificate.
    pub client: LaneClient,
    stream: DetachedClient,
}

/// What a worker knows about the client of a connection.
pub struct LaneClient {
    /// The name of the listener that accepted the connection.
    pub listener: String,
    /// The client's address.
    pub from: SocketAddr,
    /// Who opened the connection.
    pub source: Source,
    /// The result of the verification of the client's certificate.
    pub verdict: Option<ChainVerdict>,
    /// Counts the connection.
    pub counted: CountedConnection,
}

impl HandedOver {
    /// The stream, on the event loop of the calling thread, and its client.
    ///
    /// # Errors
    /// The event loop cannot register the socket.
    pub fn attach(self) -> io::Result<(ClientStream, LaneClient)> {
        let DetachedClient { mut stream, socket } = self.stream;
        stream.get_mut().0.get_mut().get_mut().attach(socket)?;
        Ok((stream, self.client))
    }
}

/// A connection with TLS that belongs to no event loop.
struct DetachedClient {
    /// The state of TLS, and the bytes that were read ahead. Has no socket.
    stream: ClientStream,
    socket: DetachedStream,
}

/// The number of connections of a listener on the identity lane.
#[derive(Debug, Clone, Default)]
pub struct LaneConnections(Arc<AtomicUsize>);

impl LaneConnections {
    /// The current number.
    pub fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    /// Counts a connection until the result is dropped.
    pub fn count(&self) -> CountedConnection {
        self.0.fetch_add(1, Ordering::Relaxed);
        CountedConnection(Arc::clone(&self.0))
    }
}

/// A connection that counts in [`LaneConnections`].
#[derive(Debug)]
pub struct CountedConnection(Arc<AtomicUsize>);

impl Drop for CountedConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The way from a worker to the identity lane.
#[derive(Debug, Clone)]
pub struct IdentityLane(UnboundedSender<HandedOver>);

impl IdentityLane {
    /// Hands connections over to the receiver of `sender`.
    pub fn new(sender: UnboundedSender<HandedOver>) -> Self {
        Self(sender)
    }

    /// Hands a connection over. If the lane has ended, the stream is returned.
    ///
    /// # Errors
    /// The socket cannot be taken from this event loop, or not be returned to it.
    pub fn hand_over(
        &self,
        mut stream: ClientStream,
        client: LaneClient,
    ) -> io::Result<Option<ClientStream>> {
        let timeout = stream.get_mut().0.get_mut();
        timeout.stop_timer();
        let socket = timeout.get_mut().detach()?;
        let stream = DetachedClient { stream, socket };
        match self.0.send(HandedOver { client, stream }) {
            Ok(()) => Ok(None),
            Err(refused) => refused.0.attach().map(|(stream, _)| Some(stream)),
        }
    }
}
