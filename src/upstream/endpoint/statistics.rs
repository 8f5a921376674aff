//! Counts of what is open to an endpoint: connections, passed flows, handshakes in progress, and
//! how often its process died.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::upstream::stats::{ConnectionStats, ConnectionStatus};

#[derive(Debug, Default)]
pub(super) struct EndpointStatistics {
    connections: Mutex<Vec<Weak<ConnectionStats>>>,
    /// Passed connections to it, of all workers.
    pub(super) flows: AtomicUsize,
    /// Handshakes in progress: TCP is established, TLS or the first PONG is outstanding.
    pub(super) handshakes: AtomicUsize,
    /// Transitions to ejected with connections that died.
    pub(super) deaths: AtomicU64,
}

impl EndpointStatistics {
    /// Lists a connection for as long as its statistics live.
    pub(super) fn add_connection(&self, stats: &Arc<ConnectionStats>) {
        let mut list = self.list();
        list.retain(|known| known.strong_count() > 0);
        list.push(Arc::downgrade(stats));
    }

    pub(super) fn connections(&self) -> Vec<ConnectionStatus> {
        self.list().iter().filter_map(Weak::upgrade).map(|stats| stats.status()).collect()
    }

    fn list(&self) -> MutexGuard<'_, Vec<Weak<ConnectionStats>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a handshake in progress until it is dropped.
#[derive(Debug)]
pub struct HandshakeGuard<'a>(&'a AtomicUsize);

impl<'a> HandshakeGuard<'a> {
    pub(super) fn new(handshakes: &'a AtomicUsize) -> Self {
        handshakes.fetch_add(1, Ordering::Relaxed);
        Self(handshakes)
    }
}

impl Drop for HandshakeGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
