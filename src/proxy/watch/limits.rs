//! The limits that all watches of one worker to one upstream share.

use std::cell::Cell;
use std::sync::Arc;

use metrics::Gauge;

use crate::observe::{ByteBudget, Metrics};
use crate::proxy::retry_budget::RetryBudget;

/// Maximum bytes of incomplete frames that one worker may buffer for one upstream.
const PARTIAL_FRAMES: usize = 32 << 20;
/// Maximum number of watches that one worker may hold for one upstream before it refuses to hold a new one. A held
/// request costs some KiB.
const MAX_HELD: usize = 10_000;

pub struct WatchLimits {
    /// Bounds the requests to other endpoints after a 410.
    too_old_retries: RetryBudget,
    held: Cell<usize>,
    held_gauge: Gauge,
    partial_frames: Arc<ByteBudget>,
}

impl WatchLimits {
    pub fn new(metrics: &Metrics) -> Self {
        Self {
            too_old_retries: RetryBudget::too_old(),
            held: Cell::new(0),
            held_gauge: metrics.held_watches(),
            partial_frames: ByteBudget::new(PARTIAL_FRAMES, metrics.held_frame_bytes()),
        }
    }

    /// Adds the share of one client request, of any kind, to the budget of retries after a 410.
    pub fn earn(&self) {
        self.too_old_retries.earn();
    }

    /// Takes one retry after a 410 from the budget. Counts an empty budget as `over_budget`.
    pub fn may_retry_too_old(&self, metrics: &Metrics) -> bool {
        let may = self.too_old_retries.take();
        if !may {
            metrics.watch_resumed("over_budget");
        }
        may
    }

    /// Counts one more watch as held until the guard is dropped.
    pub fn hold(&self) -> HeldWatch<'_> {
        self.held.set(self.held.get() + 1);
        self.held_gauge.increment(1);
        HeldWatch(self)
    }

    /// Whether a new watch may be held too. Running watches are always held.
    pub fn may_hold_new(&self) -> bool {
        self.held.get() < MAX_HELD
    }

    /// The byte budget of incomplete frames.
    pub fn partial_frames(&self) -> &Arc<ByteBudget> {
        &self.partial_frames
    }
}

/// A watch that counts as held until this guard is dropped.
pub struct HeldWatch<'a>(&'a WatchLimits);

impl Drop for HeldWatch<'_> {
    fn drop(&mut self) {
        self.0.held.set(self.0.held.get() - 1);
        self.0.held_gauge.decrement(1);
    }
}
