//! A gauge of a number of things: changed by one atomic addition, exported at a scrape.
//!
//! A gauge of the registry is a float behind a compare-and-swap and cannot be read back. This one is an
//! integer that `/status` reads too; [`CountGauge::publish`] copies it into the registry's gauge.

use std::sync::atomic::{AtomicI64, Ordering};

use metrics::Gauge;

/// How many of something exist now.
#[derive(Debug)]
pub struct CountGauge {
    value: AtomicI64,
    gauge: Gauge,
}

impl CountGauge {
    /// Zero, exported as `gauge`.
    pub(super) fn new(gauge: Gauge) -> Self {
        gauge.set(0);
        Self { value: AtomicI64::new(0), gauge }
    }

    /// Adds `count`.
    pub fn increment(&self, count: i64) {
        self.value.fetch_add(count, Ordering::Relaxed);
    }

    /// Subtracts `count`.
    pub fn decrement(&self, count: i64) {
        self.value.fetch_sub(count, Ordering::Relaxed);
    }

    /// The present number.
    pub fn get(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Copies the number into the registry's gauge.
    pub(super) fn publish(&self) {
        self.gauge.set(self.get() as f64);
    }
}
