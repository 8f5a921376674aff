//! A number that goes up and down: counted with one atomic addition, exported when somebody asks.
//!
//! A gauge of the registry is a float behind a compare-and-swap, and cannot be read back. This one is
//! an integer that `/status` reads too; [`Level::publish`] copies it into the gauge before a scrape.

use std::sync::atomic::{AtomicI64, Ordering};

use metrics::Gauge;

/// A count of what exists now.
pub struct Level {
    value: AtomicI64,
    gauge: Gauge,
}

impl std::fmt::Debug for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Level").field(&self.get()).finish()
    }
}

impl Level {
    /// Zero, exported as `gauge`.
    pub(super) fn new(gauge: Gauge) -> Self {
        gauge.set(0);
        Self { value: AtomicI64::new(0), gauge }
    }

    /// `count` more.
    pub fn increment(&self, count: i64) {
        self.value.fetch_add(count, Ordering::Relaxed);
    }

    /// `count` fewer.
    pub fn decrement(&self, count: i64) {
        self.value.fetch_sub(count, Ordering::Relaxed);
    }

    /// How many there are.
    pub fn get(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Copies the value into the gauge.
    pub(super) fn publish(&self) {
        self.gauge.set(self.get() as f64);
    }
}
