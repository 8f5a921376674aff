//! The limits that all watches of one worker to one upstream share.

use std::cell::Cell;
use std::sync::Arc;

use jackstay_core::admission::{ByteBudget, MemoryKind};
use jackstay_core::request::retry_budget::RetryBudget;
use metrics::Gauge;

use crate::observe::Metrics;

/// Maximum bytes of frames that one worker buffers for one upstream. The buffer of a frame counts until the
/// frame is sent or dropped.
const MAX_PARTIAL_FRAME_BYTES: usize = 32 << 20;
/// Number of held watches, per worker and upstream, above which a new request is not held. A held request
/// costs a few KiB.
const MAX_HELD_WATCHES: usize = 10_000;

pub struct WatchLimits {
    /// Bounds the requests that are sent to other endpoints after a 410.
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
            partial_frames: ByteBudget::new(MemoryKind::WatchFrames, MAX_PARTIAL_FRAME_BYTES),
        }
    }

    /// Adds the share of one client request, of any verb, to the budget of retries after a 410.
    pub fn earn(&self) {
        self.too_old_retries.earn();
    }

    /// Takes one retry after a 410 from the budget. If the budget is empty, counts `over_budget` and returns
    /// false.
    pub fn may_retry_too_old(&self, metrics: &Metrics) -> bool {
        let is_allowed = self.too_old_retries.take();
        if !is_allowed {
            metrics.watch_resumed("over_budget");
        }
        is_allowed
    }

    /// Counts a watch as held until the guard is dropped.
    pub fn hold(&self) -> HeldWatch<'_> {
        self.held.set(self.held.get() + 1);
        self.held_gauge.increment(1);
        HeldWatch(self)
    }

    /// Whether a watch whose client has no response yet may be held. The limit does not apply to a running
    /// watch that loses its stream.
    pub fn may_hold_new(&self) -> bool {
        self.held.get() < MAX_HELD_WATCHES
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
