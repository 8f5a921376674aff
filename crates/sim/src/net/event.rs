//! What happens in the network at a time: packets arrive, and timers end.

use std::time::Instant;

use super::ids::ConnectionId;
use super::tcp::{Acknowledgement, Side};

/// An event of the network.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)] // packets and timers, named as in TCP
pub enum NetEvent {
    Syn { id: ConnectionId, sent_at: Instant },
    SynTimeout { id: ConnectionId, retries: u8 },
    SynAnswer { id: ConnectionId, echo: Option<Instant> },
    SynAnswerTimeout { id: ConnectionId, retries: u8 },
    Established { id: ConnectionId },
    Segment { id: ConnectionId, from: Side, number: u64, ack: Acknowledgement },
    Ack { id: ConnectionId, to: Side, ack: Acknowledgement },
    DelayedAck { id: ConnectionId, from: Side },
    Timeout { id: ConnectionId, side: Side },
    Probe { id: ConnectionId, from: Side },
    Keepalive { id: ConnectionId, side: Side },
    Reset { id: ConnectionId, to: Side },
}

impl NetEvent {
    pub(super) fn connection(self) -> ConnectionId {
        match self {
            Self::Syn { id, .. }
            | Self::SynTimeout { id, .. }
            | Self::SynAnswer { id, .. }
            | Self::SynAnswerTimeout { id, .. }
            | Self::Established { id }
            | Self::Segment { id, .. }
            | Self::Ack { id, .. }
            | Self::DelayedAck { id, .. }
            | Self::Timeout { id, .. }
            | Self::Probe { id, .. }
            | Self::Keepalive { id, .. }
            | Self::Reset { id, .. } => id,
        }
    }
}
