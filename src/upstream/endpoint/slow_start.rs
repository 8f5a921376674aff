//! How long an endpoint has been ready, and whether it is in slow start.
//!
//! The values are atomic, because they are read for every candidate of a pick.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use jackstay_core::balance;

#[derive(Debug)]
pub(super) struct SlowStart {
    /// Origin of [`Self::ready_at`].
    created: Instant,
    /// Milliseconds from `created` until the endpoint became ready, plus one. 0 while it is not ready.
    ready_at: AtomicU64,
    in_progress: AtomicBool,
}

impl SlowStart {
    pub(super) fn new(now: Instant) -> Self {
        Self { created: now, ready_at: AtomicU64::new(0), in_progress: AtomicBool::new(false) }
    }

    /// Records that the endpoint became ready. `Some(true)` begins a slow start, `Some(false)` ends it, and
    /// `None` leaves it unchanged.
    pub(super) fn ready(&self, slow_start: Option<bool>, now: Instant) {
        let since = now.saturating_duration_since(self.created);
        self.ready_at.store(since.as_millis() as u64 + 1, Ordering::Relaxed);
        if let Some(slow_start) = slow_start {
            self.in_progress.store(slow_start, Ordering::Relaxed);
        }
    }

    /// Records that the endpoint is not ready.
    pub(super) fn not_ready(&self) {
        self.ready_at.store(0, Ordering::Relaxed);
    }

    pub(super) fn ready_for(&self, now: Instant) -> Option<Duration> {
        let at = self.ready_at.load(Ordering::Relaxed).checked_sub(1)?;
        Some(now.saturating_duration_since(self.created + Duration::from_millis(at)))
    }

    /// Share of its usual picks that the endpoint gets, in 0..=1.
    pub(super) fn share(&self, now: Instant) -> f64 {
        if !self.in_progress.load(Ordering::Relaxed) {
            return 1.0;
        }
        let share = self.ready_for(now).map_or(1.0, balance::slow_start);
        if share >= 1.0 {
            self.in_progress.store(false, Ordering::Relaxed);
        }
        share
    }
}
