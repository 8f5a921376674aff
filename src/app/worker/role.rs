//! The two kinds of workers: those that accept connections, and the identity lane.

use std::future::pending;

use tokio::sync::mpsc::UnboundedReceiver;

use crate::proxy::identity_lane::{HandedOver, IdentityLane};

/// The connections that a worker serves.
pub enum Role {
    /// All that it accepts, or those of clients without a configured identity if there is an identity lane.
    Accept(Option<IdentityLane>),
    /// Those that other workers hand over ([`crate::proxy::identity_lane`]).
    IdentityLane(UnboundedReceiver<HandedOver>),
}

impl Role {
    /// Receives a connection. Never returns if none can arrive any more.
    pub async fn handed_over(&mut self) -> HandedOver {
        let received = match self {
            Self::Accept(_) => None,
            Self::IdentityLane(connections) => connections.recv().await,
        };
        match received {
            Some(connection) => connection,
            None => pending().await,
        }
    }

    /// Receives no more connections, so that workers serve them, and returns those that are on their way.
    pub fn close(&mut self) -> Vec<HandedOver> {
        let Self::IdentityLane(connections) = self else { return Vec::new() };
        connections.close();
        std::iter::from_fn(|| connections.try_recv().ok()).collect()
    }
}
