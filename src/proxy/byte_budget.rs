//! Bounds on bytes that are held in memory, all of one kind together: request bodies that may be
//! sent again ([`super::request_body`]) and frames of watches that have not arrived whole
//! ([`super::watch`]).
//!
//! It counts and shows; what becomes of that which finds no room is decided by those who ask.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics::Gauge;

/// Counts what is held.
///
/// Atomic even where one thread fills it: what is held may be let go of on another.
#[derive(Debug)]
pub struct ByteBudget {
    most: usize,
    held: AtomicUsize,
    gauge: Gauge,
}

impl ByteBudget {
    /// ByteBudget for `most` bytes, shown in a gauge that others may share: it is only ever incremented
    /// and decremented.
    pub fn new(most: usize, gauge: Gauge) -> Arc<Self> {
        Arc::new(Self { most, held: AtomicUsize::new(0), gauge })
    }

    /// For tests and fuzzing: shown nowhere.
    pub fn unmetered(most: usize) -> Arc<Self> {
        Self::new(most, Gauge::noop())
    }

    /// How many bytes more may be held.
    pub fn left(&self) -> usize {
        self.most.saturating_sub(self.held())
    }

    /// How many bytes are held.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Adds to what is held, in any case; whether all of it is within the bound.
    pub fn take(&self, bytes: usize) -> bool {
        self.gauge.increment(bytes as f64);
        self.held.fetch_add(bytes, Ordering::Relaxed) + bytes <= self.most
    }

    /// Bytes of it are no longer held.
    pub fn give_back(&self, bytes: usize) {
        self.gauge.decrement(bytes as f64);
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}
