//! Where the most-recent lists of an upstream come from, for all threads.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use jackstay_core::reads::ListSource;

/// See [`jackstay_core::reads::list_source`].
#[derive(Debug, Default)]
pub struct SharedListSource(Mutex<ListSource>);

impl SharedListSource {
    /// See [`ListSource::found_in_etcd`].
    pub fn found_in_etcd(&self, now: Instant) {
        self.lock().found_in_etcd(now);
    }

    /// See [`ListSource::come_from_etcd`].
    pub fn come_from_etcd(&self, now: Instant) -> bool {
        self.lock().come_from_etcd(now)
    }

    fn lock(&self) -> MutexGuard<'_, ListSource> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
