//! What one flow holds of the [memory budget](jackstay_core::admission).
//!
//! A flow whose receiver accepts no bytes holds what was last read from the sender, in a buffer or in a pipe of the
//! kernel, which belongs to the cgroup's memory too. When memory is short for the flow's source, the flow reads
//! smaller pieces and uses no pipe.

use std::cell::Cell;
use std::sync::Arc;

use jackstay_core::admission::{Level, MemoryKind, Refusal, SourceMemory};
use jackstay_core::credential_class::ClientRank;
use jackstay_sys::sockets::stream::SocketRef;
use jackstay_sys::sockets::tcp_options::MAX_UNSENT_OF_FLOW;

use super::socket_memory::{Peer, SocketMemory};

/// Bytes of a flow that holds nothing: its task, its entry in the flow table, and the kernel's memory for both sockets.
/// With the default limit, one source may have 15,000 flows.
const FLOW_COST: usize = 4 << 10;
/// No client of L4 proves an identity to this process.
const RANK: ClientRank = ClientRank::Unproven;

/// The memory of one flow, charged until this is dropped.
#[derive(Debug)]
pub struct FlowMemory {
    sockets: SocketMemory,
    held: Cell<usize>,
}

impl FlowMemory {
    /// Charges a flow of this source, whose client has the socket `client`; `None` if it does not fit.
    pub fn new(source: Arc<SourceMemory>, client: SocketRef) -> Option<Self> {
        if !source.try_add(MemoryKind::Flows, FLOW_COST, RANK) {
            source.budget().count(Refusal::ConnectionMemory);
            return None;
        }
        let sockets = SocketMemory::new(client, source, MAX_UNSENT_OF_FLOW);
        // Until the flow has an endpoint, nothing is read.
        sockets.record_read(Peer::Client, true);
        Some(Self { sockets, held: Cell::new(0) })
    }

    /// The kernel memory of its sockets.
    pub fn sockets(&self) -> &SocketMemory {
        &self.sockets
    }

    /// Charges the bytes that the flow holds now.
    pub fn set_held(&self, bytes: usize) {
        let before = self.held.replace(bytes);
        if bytes > before {
            self.sockets.source().add(MemoryKind::Flows, bytes - before);
        } else if bytes < before {
            self.sockets.source().subtract(MemoryKind::Flows, before - bytes);
        }
    }

    /// Whether the flow must hold little.
    pub fn is_short(&self) -> bool {
        self.sockets.level() >= Level::High
    }
}

impl Drop for FlowMemory {
    fn drop(&mut self) {
        self.sockets.source().subtract(MemoryKind::Flows, FLOW_COST + self.held.get());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_core::admission::{MemoryBudget, Shed};

    #[test]
    fn flows_are_charged_until_they_end_and_refused_when_the_share_is_used_up() {
        let budget = MemoryBudget::new(1 << 20);
        let flow = FlowMemory::new(budget.source(1), SocketRef::Kernel(-1)).unwrap();
        assert_eq!(budget.used_for(MemoryKind::Flows), FLOW_COST);
        flow.set_held(64 << 10);
        assert!(!flow.is_short());
        flow.set_held(256 << 10);
        assert!(flow.is_short());
        flow.set_held(10 << 10);
        assert_eq!(budget.used(), FLOW_COST + (10 << 10));
        assert!(!flow.is_short());
        let others: Vec<_> =
            std::iter::from_fn(|| FlowMemory::new(budget.source(1), SocketRef::Kernel(-1)))
                .collect();
        // Half of 5/8 of 1 MiB.
        assert_eq!(others.len(), ((320 << 10) - FLOW_COST - (10 << 10)) / FLOW_COST);
        assert!(
            FlowMemory::new(budget.source(2), SocketRef::Kernel(-1)).is_some(),
            "another source has its share"
        );
        assert_eq!(budget.shed(Shed::ConnectionRefused), 1);
        drop((flow, others));
        assert_eq!(budget.used(), 0);
    }
}
