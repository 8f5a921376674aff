//! What is open to an endpoint: connections, flows and handshakes.

use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::upstream::stats::{ConnectionStats, ConnectionStatus};

/// What is open to an endpoint, and how often its process died.
#[derive(Debug, Default)]
pub(super) struct EndpointStatistics {
    connections: Mutex<Vec<Weak<ConnectionStats>>>,
    /// Passthrough flows of all workers.
    pub(super) flows: AtomicUsize,
    /// Watches over WebSocket of all workers.
    pub(super) tunnelled_watches: AtomicUsize,
    /// Handshakes in progress: TCP is established, TLS or the first PONG is outstanding.
    pub(super) handshakes: AtomicUsize,
    /// How often the endpoint was ejected because its process died.
    pub(super) deaths: AtomicU64,
}

impl EndpointStatistics {
    /// Adds a connection to the list until its statistics are dropped.
    pub(super) fn add_connection(&self, stats: &Arc<ConnectionStats>) {
        let mut list = self.list();
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(stats));
    }

    /// The status of each connection whose statistics are still in use.
    pub(super) fn connections(&self) -> Vec<ConnectionStatus> {
        self.list().iter().filter_map(Weak::upgrade).map(|stats| stats.status()).collect()
    }

    /// Number of watches on these connections.
    pub(super) fn watches(&self) -> usize {
        let list = self.list();
        let open = list.iter().filter_map(Weak::upgrade);
        open.map(|stats| stats.watches()).sum()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Weak<ConnectionStats>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
