//! The watch cache of a server, which follows the store with the lag [`crate::Faults::cache_lag`].
//!
//! The history of the store knows when each change was committed, so the state of the cache is the version of the store
//! that is as old as the lag.

use crate::state::ServerState;
use jackstay_sys::clock;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use tokio::time::Instant;

/// How long kube-apiserver waits for its cache (`storage/cacher/watch_cache.go`, `blockTimeout`).
const BLOCK_TIMEOUT: Duration = Duration::from_secs(3);

impl ServerState {
    /// The version that the cache has reached; that of the store without a lag. It does not go back while the server
    /// runs.
    pub fn cached_version(&self) -> u64 {
        let stored = self.cluster.version();
        let lag = self.faults.borrow().cache_lag;
        let reached = lag.map_or(stored, |lag| self.cluster.version_before(clock::now(), lag));
        let before = self.cached.fetch_max(reached, Relaxed);
        // The version of a restored store is lower.
        before.max(reached).min(stored)
    }

    /// When the cache gets, or got, the first change after `version`; `None` without a lag or such a change.
    pub fn cached_at(&self, version: u64) -> Option<Instant> {
        let lag = self.faults.borrow().cache_lag?;
        let committed = self.cluster.committed_after(version)?;
        Some(Instant::from_std(committed + lag))
    }

    /// Waits until the cache has reached `version`, and returns the version that it has then.
    ///
    /// # Errors
    /// The version that it has reached after [`BLOCK_TIMEOUT`].
    pub async fn wait_until_cached(&self, version: u64) -> Result<u64, u64> {
        let deadline = Instant::now() + BLOCK_TIMEOUT;
        let mut changes = self.cluster.changes();
        let mut faults = self.faults.subscribe();
        loop {
            let cached = self.cached_version();
            if cached >= version {
                return Ok(cached);
            }
            if Instant::now() >= deadline {
                return Err(cached);
            }
            let next = self.cached_at(cached).map_or(deadline, |next| next.min(deadline));
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                _ = changes.changed() => {}
                _ = faults.changed() => {}
            }
        }
    }
}

/// Waits until a time, if there is one.
pub(super) async fn sleep_until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
