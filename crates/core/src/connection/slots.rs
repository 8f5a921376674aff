//! The slots for streams on a connection: their limit, and which are free.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// A cancelled stream keeps its slot for this long, because the apiserver's handler may still run. Go
/// queues new streams behind it, and closes the connection with `ENHANCE_YOUR_CALM` when the queue is
/// four times its stream limit (`net/http2` `scheduleHandler`).
pub(super) const CANCELLED_SLOT_HOLD: Duration = Duration::from_millis(500);

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
    limit: usize,
    /// Number of open streams.
    open: usize,
    /// Number of those that are watches.
    watches: usize,
    /// Number of those that are pinned.
    pinned: usize,
    /// Number of those whose responses have proven a token.
    proven: usize,
    /// When the slots of cancelled streams become free, in order.
    cancelled: VecDeque<Instant>,
    /// When the number of open streams last became zero.
    idle_since: Instant,
    /// The largest number of streams that were open at once.
    peak: usize,
}

impl StreamSlots {
    pub(super) fn new(configured: usize, peer: usize, now: Instant) -> Self {
        Self {
            configured,
            limit: configured.min(peer),
            open: 0,
            watches: 0,
            pinned: 0,
            proven: 0,
            cancelled: VecDeque::new(),
            idle_since: now,
            peak: 0,
        }
    }

    /// Sets the peer's limit. Returns whether the limit grew.
    pub(super) fn set_peer_limit(&mut self, peer: usize) -> bool {
        let limit = self.configured.min(peer);
        std::mem::replace(&mut self.limit, limit) < limit
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Number of open streams.
    pub(super) fn open(&self) -> usize {
        self.open
    }

    /// Number of open streams that are watches.
    pub(super) fn watches(&self) -> usize {
        self.watches
    }

    pub(super) fn peak(&self) -> usize {
        self.peak
    }

    /// When the last open stream ended; `None` while a stream is open.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        (self.open == 0).then_some(self.idle_since)
    }

    /// Number of slots that are taken neither by an open stream nor by a cancelled one.
    pub(super) fn free(&self, now: Instant) -> usize {
        let free_again = self.cancelled.partition_point(|&until| until <= now);
        self.limit.saturating_sub(self.open + self.cancelled.len() - free_again)
    }

    /// Takes a slot.
    pub(super) fn take(&mut self, long_running: bool) {
        self.open += 1;
        self.watches += usize::from(long_running);
        self.peak = self.peak.max(self.open);
    }

    /// Gives a slot back. That of a `cancelled` stream becomes free after [`CANCELLED_SLOT_HOLD`]. Returns whether
    /// all slots were taken by open streams.
    pub(super) fn give_back(&mut self, long_running: bool, cancelled: bool, now: Instant) -> bool {
        let was_full = self.open >= self.limit;
        self.open = self.open.saturating_sub(1);
        self.watches = self.watches.saturating_sub(usize::from(long_running));
        if self.open == 0 {
            self.idle_since = now;
        }
        while self.cancelled.front().is_some_and(|&until| until <= now) {
            self.cancelled.pop_front();
        }
        if cancelled {
            self.cancelled.push_back(now + CANCELLED_SLOT_HOLD);
        }
        was_full
    }

    /// Counts a stream that was pinned, or whose pin was removed.
    pub(super) fn count_pinned(&mut self, pinned: bool) {
        count(&mut self.pinned, pinned);
    }

    /// Counts a stream whose response has proven a token, or its end.
    pub(super) fn count_proven(&mut self, proven: bool) {
        count(&mut self.proven, proven);
    }

    /// Whether such streams take [`PROVEN_SHARE`] of the slots, while `waiting` ones wait for a response.
    pub(super) fn are_mostly_proven(&self, waiting: usize) -> bool {
        let proven = self.proven as f64;
        proven >= self.limit.saturating_sub(waiting) as f64 * PROVEN_SHARE
            && proven >= self.limit as f64 * MIN_PROVEN_SHARE
    }

    pub(super) fn has_pinned(&self) -> bool {
        self.pinned > 0
    }
}

fn count(number: &mut usize, one_more: bool) {
    *number = if one_more { *number + 1 } else { number.saturating_sub(1) };
}

#[cfg(test)]
mod tests {
    use super::*;

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
            let mut slots = StreamSlots::new(200, 100, Instant::now());
            (0..=proven).for_each(|_| slots.count_proven(true));
            slots.count_proven(false);
            assert_eq!(slots.are_mostly_proven(waiting), expected, "{proven} {waiting}");
        }
    }
}
