//! The streams that a connection may carry.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// A cancelled stream keeps its slot for this long. The apiserver's handler may still run: Go
/// queues new streams behind it and closes the connection with `ENHANCE_YOUR_CALM` when the queue
/// is four times its stream limit (`net/http2` `scheduleHandler`).
const CANCELLED_HOLDS: Duration = Duration::from_millis(500);

#[derive(Debug)]
pub(super) struct StreamSlots {
    /// The configured limit.
    configured: usize,
    /// The lesser of the configured limit and the peer's.
    pub(super) limit: Cell<usize>,
    /// Streams that cannot move to another connection.
    pinned: Cell<usize>,
    /// When the slots of cancelled streams become free, in order.
    cancelled: RefCell<VecDeque<Instant>>,
    /// When the last stream ended.
    pub(super) idle_since: Cell<Instant>,
}

impl StreamSlots {
    pub(super) fn new(configured: usize, peer: usize, now: Instant) -> Self {
        Self {
            configured,
            limit: Cell::new(configured.min(peer)),
            pinned: Cell::new(0),
            cancelled: RefCell::default(),
            idle_since: Cell::new(now),
        }
    }

    /// Takes in the peer's limit; returns whether the limit grew.
    pub(super) fn set_peer_limit(&self, peer: usize) -> bool {
        let limit = self.configured.min(peer);
        self.limit.replace(limit) < limit
    }

    /// Slots that `open` streams and the cancelled ones leave free.
    pub(super) fn free(&self, open: usize, now: Instant) -> usize {
        let mut cancelled = self.cancelled.borrow_mut();
        while cancelled.front().is_some_and(|&until| until <= now) {
            cancelled.pop_front();
        }
        self.limit.get().saturating_sub(open + cancelled.len())
    }

    pub(super) fn cancelled(&self, now: Instant) {
        self.cancelled.borrow_mut().push_back(now + CANCELLED_HOLDS);
    }

    pub(super) fn pin(&self, pinned: bool) {
        let count = self.pinned.get();
        self.pinned.set(if pinned { count + 1 } else { count.saturating_sub(1) });
    }

    pub(super) fn has_pinned(&self) -> bool {
        self.pinned.get() > 0
    }
}
