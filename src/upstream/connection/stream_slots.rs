//! The slots for streams on a connection: their limit, and which are free.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A cancelled stream keeps its slot for this long, because the apiserver's handler may still run. Go
/// queues new streams behind it, and closes the connection with `ENHANCE_YOUR_CALM` when the queue is
/// four times its stream limit (`net/http2` `scheduleHandler`).
const CANCELLED_SLOT_HOLD: Duration = Duration::from_millis(500);

/// Share of the slots that streams with proven tokens must take before a connection serves proven tokens only.
/// Slots of requests that wait for a response are left out, so that a few that wait for long do not prevent it.
const PROVEN_SHARE: f64 = 0.5;
/// The same for all slots, so that requests without a response do not make the connection of a few others leave.
const MIN_PROVEN_SHARE: f64 = 0.125;

#[derive(Debug)]
pub(super) struct StreamSlots {
    /// `connections.max_streams` of the configuration.
    configured: usize,
    /// The lesser of the configured limit and the peer's.
    pub(super) limit: Cell<usize>,
    /// Number of pinned streams ([`super::Permit::set_pinned`]).
    pinned: Cell<usize>,
    /// Number of streams whose responses have proven a token.
    proven: Cell<usize>,
    /// When the slots of cancelled streams become free, in order.
    cancelled: RefCell<VecDeque<Instant>>,
    /// When the number of open streams last became zero.
    pub(super) idle_since: Cell<Instant>,
    /// The largest number of streams that were open at once.
    pub(super) peak: Cell<usize>,
}

impl StreamSlots {
    pub(super) fn new(configured: usize, peer: usize, now: Instant) -> Self {
        Self {
            configured,
            limit: Cell::new(configured.min(peer)),
            pinned: Cell::new(0),
            proven: Cell::new(0),
            cancelled: RefCell::default(),
            idle_since: Cell::new(now),
            peak: Cell::new(0),
        }
    }

    /// Sets the peer's limit. Returns whether the limit grew.
    pub(super) fn set_peer_limit(&self, peer: usize) -> bool {
        let limit = self.configured.min(peer);
        self.limit.replace(limit) < limit
    }

    /// Number of slots that are taken neither by one of the `open` streams nor by a cancelled one.
    pub(super) fn free(&self, open: usize, now: Instant) -> usize {
        let mut cancelled = self.cancelled.borrow_mut();
        while cancelled.front().is_some_and(|&until| until <= now) {
            cancelled.pop_front();
        }
        self.limit.get().saturating_sub(open + cancelled.len())
    }

    /// Keeps the slot of a cancelled stream for [`CANCELLED_SLOT_HOLD`].
    pub(super) fn hold_cancelled(&self, now: Instant) {
        self.cancelled.borrow_mut().push_back(now + CANCELLED_SLOT_HOLD);
    }

    /// Counts a stream that was pinned, or whose pin was removed.
    pub(super) fn count_pinned(&self, pinned: bool) {
        let count = self.pinned.get();
        self.pinned.set(if pinned { count + 1 } else { count.saturating_sub(1) });
    }

    /// Counts a stream whose response has proven a token, or its end.
    pub(super) fn count_proven(&self, proven: bool) {
        let count = self.proven.get();
        self.proven.set(if proven { count + 1 } else { count.saturating_sub(1) });
    }

    /// Whether such streams take [`PROVEN_SHARE`] of the slots, while `waiting` ones wait for a response.
    pub(super) fn are_mostly_proven(&self, waiting: usize) -> bool {
        let (proven, limit) = (self.proven.get() as f64, self.limit.get());
        proven >= limit.saturating_sub(waiting) as f64 * PROVEN_SHARE
            && proven >= limit as f64 * MIN_PROVEN_SHARE
    }

    pub(super) fn has_pinned(&self) -> bool {
        self.pinned.get() > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    #[test]
    fn mostly_proven_slots_are_half_of_those_that_do_not_wait_and_an_eighth_of_all() {
        for (proven, waiting, expected) in [
            (0, 0, false),
            (49, 0, false),
            (50, 0, true),
            (17, 64, false),
            (18, 64, true),
            (12, 88, false),
            (13, 87, true),
            (0, 100, false),
            (13, 120, true),
        ] {
            let slots = StreamSlots::new(200, 100, clock::now());
            (0..=proven).for_each(|_| slots.count_proven(true));
            slots.count_proven(false);
            assert_eq!(slots.are_mostly_proven(waiting), expected, "{proven} {waiting}");
        }
    }
}
