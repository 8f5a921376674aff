//! The memory of TLS handshakes in progress.
//!
//! It is charged to no rank of clients, because a client proves its identity only in the handshake. So that
//! handshakes leave room for the connections of identities, a worker starts no more than its share of
//! [`MAX_IN_PROGRESS`], and they may use half of what identities may hold beyond the limit.

use std::sync::Arc;

use jackstay_core::admission::{MemoryCharge, MemoryKind, Refusal, SourceMemory};
use jackstay_core::credential_class::ClientRank;
use jackstay_net::tls::client_chain;

/// Bytes of a handshake in progress: a client's chain as received and as parsed, and the buffers of TLS.
pub const HANDSHAKE_COST: usize = 2 * client_chain::MAX_BYTES + (32 << 10);
/// Handshakes of the process in progress at a time, beyond one of each source on each worker. They hold 12 MiB.
pub const MAX_IN_PROGRESS: usize = 128;
/// The least share of a worker, of which one source has half.
const MIN_IN_PROGRESS: usize = 4;

/// The share of [`MAX_IN_PROGRESS`] of one of `workers`.
pub fn max_in_progress(workers: usize) -> usize {
    (MAX_IN_PROGRESS / workers.max(1)).max(MIN_IN_PROGRESS)
}

/// Charges a handshake to its source; `None` if it does not fit.
pub fn charge(source: &Arc<SourceMemory>) -> Option<MemoryCharge> {
    let charge = source.try_charge(MemoryKind::Handshakes, HANDSHAKE_COST, ClientRank::Identity);
    let budget = source.budget();
    let charge = charge.filter(|_| source.left(ClientRank::Identity) >= budget.limit() / 16);
    if charge.is_none() {
        budget.count(Refusal::ConnectionMemory);
    }
    charge
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::admission::client_memory::ClientMemory;
    use jackstay_core::admission::{MemoryBudget, Shed};

    #[test]
    fn workers_share_the_handshakes_in_progress() {
        let shares = [0, 1, 2, 16, 32, 64].map(max_in_progress);
        assert_eq!(shares, [128, 128, 64, 8, 4, 4]);
    }

    #[test]
    fn handshakes_of_many_sources_leave_room_for_an_identity() {
        let limit = 32 << 20;
        let budget = MemoryBudget::new(limit);
        let clients = budget.source(0).charge(MemoryKind::Streams, limit / 4 * 3);
        let sources = (1..).map(|uid| budget.source(uid));
        let handshakes: Vec<_> = sources.map_while(|source| charge(&source)).collect();
        assert!(handshakes.len() > 80, "{}", handshakes.len());
        assert!(budget.used() <= limit + limit / 16, "{}", budget.used());
        assert_eq!(budget.shed(Shed::ConnectionRefused), 1);
        assert!(ClientMemory::of_local_client(budget.source(1), ClientRank::Identity).is_some());
        drop((clients, handshakes));
        assert_eq!(budget.used(), 0);
    }
}
