//! What one tunnel holds of the [memory budget](jackstay_core::admission).

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use jackstay_core::admission::{MemoryCharge, MemoryKind, SourceMemory};
use jackstay_core::credential_class::ClientRank;
use jackstay_sys::sockets::stream::SocketRef;
use jackstay_sys::sockets::tcp_options::MAX_UNSENT_OF_FLOW;

use super::socket_memory::{Peer, SocketMemory};

/// Bytes of a tunnel: TLS and its buffers on both sides, and the buffers of both directions.
const TUNNEL_COST: usize = 96 << 10;

/// The memory of a tunnel, or of another response on a connection of its own, charged until this is dropped.
#[derive(Debug)]
pub struct TunnelMemory {
    upstream: Option<SocketMemory>,
    rank: Rc<Cell<ClientRank>>,
    charge: MemoryCharge,
}

impl TunnelMemory {
    /// Charges a tunnel of a client that has proven `rank`; `None` if it does not fit.
    pub fn new(source: &Arc<SourceMemory>, rank: Rc<Cell<ClientRank>>) -> Option<Self> {
        let charge = source.try_charge(MemoryKind::Tunnels, TUNNEL_COST, rank.get())?;
        Some(Self { upstream: None, rank, charge })
    }

    /// Charges the upstream's socket too. It is always taken for unread, because its reads are not recorded.
    pub fn set_upstream(&mut self, socket: SocketRef) {
        let memory =
            SocketMemory::new(socket, Arc::clone(self.charge.source()), MAX_UNSENT_OF_FLOW);
        memory.follow_rank(Rc::clone(&self.rank));
        memory.record_read(Peer::Client, true);
        self.upstream = Some(memory);
    }
}
