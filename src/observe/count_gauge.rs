//! A gauge with an integer value.
//!
//! The registry's gauge is a float, which takes a compare-and-swap loop to change and cannot be read back.
//! A [`CountGauge`] takes one atomic addition, and `/status` can read it. [`CountGauge::publish`] copies
//! its value into the registry's gauge before each scrape.

use std::sync::atomic::{AtomicI64, Ordering};

use metrics::Gauge;

/// Counts the objects of one kind that exist now, such as open connections.
#[derive(Debug)]
pub struct CountGauge {
    value: AtomicI64,
    gauge: Gauge,
}

impl CountGauge {
    /// Starts at zero; `gauge` exports the count.
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

    /// The current count.
    pub fn get(&self) -> i64 {
        self.value.load(Ordering::Relaxed)
    }

    /// Copies the count into the registry's gauge.
    pub(super) fn publish(&self) {
        self.gauge.set(self.get() as f64);
    }
}
