//! How long requests on a connection wait for their response heads.
//!
//! Slow heads are found in rounds of a fixed interval. A request other than a watch is counted in the
//! round in which it is sent. If it still waits when the next round ends, it has waited for a whole
//! interval. Only the last few rounds need a count, so the search need not visit each waiting request.

use std::cell::Cell;
use std::time::{Duration, Instant};

use jackstay_core::balance::PeakEwma;

/// A request that has waited this long without a byte arriving on the connection makes new requests
/// prefer another one.
const WARNING_AFTER: Duration = Duration::from_millis(50);

/// Number of whole rounds after which a waiting request is slow, however long responses usually take.
const MAX_ROUNDS: u32 = 5;
/// Number of counted rounds: those in which requests have waited for up to [`MAX_ROUNDS`] whole rounds, and the current
/// one and the one before it.
const COUNTED_ROUNDS: usize = MAX_ROUNDS as usize + 2;

/// Requests that wait for their response head, and the latency of the heads that arrived.
#[derive(Debug)]
pub(super) struct ResponseWaits {
    latency: Cell<PeakEwma>,
    /// Number of requests that wait for a response head.
    waiting: Cell<usize>,
    /// Since when at least one request waits.
    pub(super) waiting_since: Cell<Option<Instant>>,
    /// When bytes last arrived.
    pub(super) last_received: Cell<Instant>,
    /// Number of the current round.
    round: Cell<u32>,
    /// Number of waiting requests other than watches, by their round modulo [`COUNTED_ROUNDS`].
    by_round: [Cell<u32>; COUNTED_ROUNDS],
}

impl ResponseWaits {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            latency: Cell::new(PeakEwma::new(now)),
            waiting: Cell::new(0),
            waiting_since: Cell::new(None),
            last_received: Cell::new(now),
            // Earlier rounds are looked for, too.
            round: Cell::new(COUNTED_ROUNDS as u32),
            by_round: Default::default(),
        }
    }

    /// Number of requests that wait for a response head.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.get()
    }

    /// Records that a request was sent.
    pub(super) fn request_sent(&self, at: Instant) {
        let waiting = self.waiting.get();
        if waiting == 0 {
            self.waiting_since.set(Some(at));
        }
        self.waiting.set(waiting + 1);
    }

    /// Records that the head of a request arrived, or that the request was cancelled.
    pub(super) fn wait_ended(&self) {
        let waiting = self.waiting.get().saturating_sub(1);
        self.waiting.set(waiting);
        if waiting == 0 {
            self.waiting_since.set(None);
        }
    }

    /// Records the latency of a response head.
    pub(super) fn observe_latency(&self, latency: Duration, now: Instant) {
        let mut average = self.latency.get();
        average.observe(latency, now);
        self.latency.set(average);
    }

    /// Smoothed latency in seconds.
    pub(super) fn latency(&self, now: Instant) -> f64 {
        self.latency.get().value(now)
    }

    /// Whether a request has waited for [`WARNING_AFTER`] without a byte arriving.
    pub(super) fn has_warning(&self, now: Instant) -> bool {
        let since = self.waiting_since.get();
        since.is_some_and(|since| now >= since.max(self.last_received.get()) + WARNING_AFTER)
    }

    fn count_of(&self, round: u32) -> &Cell<u32> {
        &self.by_round[round as usize % COUNTED_ROUNDS]
    }

    /// Counts a request in the current round. Returns the number of the round.
    pub(super) fn enter_round(&self) -> u32 {
        let round = self.round.get();
        let count = self.count_of(round);
        count.set(count.get() + 1);
        round
    }

    /// Removes a request from the round in which it was sent, if that round is still counted.
    pub(super) fn leave_round(&self, round: u32) {
        if (self.round.get().wrapping_sub(round) as usize) < COUNTED_ROUNDS {
            let count = self.count_of(round);
            count.set(count.get().saturating_sub(1));
        }
    }

    /// Begins a round, an `interval` after the previous one. Returns whether a request has waited for a whole number
    /// of rounds that is four times as long as a response usually takes, or for [`MAX_ROUNDS`]. Each request counts
    /// once.
    pub(super) fn has_slow_heads(&self, interval: Duration, now: Instant) -> bool {
        let round = self.round.get().wrapping_add(1);
        self.round.set(round);
        let usual = self.latency(now) * 4.0 / interval.as_secs_f64();
        let least = (usual.ceil() as u32).clamp(1, MAX_ROUNDS);
        let waited = |rounds: u32| self.count_of(round.wrapping_sub(rounds + 1)).take();
        (least..=MAX_ROUNDS).fold(0, |slow, rounds| slow + waited(rounds)) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    #[test]
    fn has_slow_heads_reports_a_request_once_after_a_whole_round() {
        let start = clock::now();
        let interval = Duration::from_millis(200);
        let waits = ResponseWaits::new(start);
        let answered = waits.enter_round();
        waits.leave_round(answered);
        waits.enter_round();
        assert!(!waits.has_slow_heads(interval, start), "sent in this round");
        assert!(waits.has_slow_heads(interval, start));
        assert!(!waits.has_slow_heads(interval, start), "reported already");
        waits.observe_latency(Duration::from_millis(60), start);
        waits.enter_round();
        for _ in 0..2 {
            assert!(!waits.has_slow_heads(interval, start), "a latency of 60 ms is usual here");
        }
        assert!(waits.has_slow_heads(interval, start), "400 ms are not");
        waits.observe_latency(Duration::from_secs(9), start);
        let answered = waits.enter_round();
        waits.enter_round();
        for _ in 0..MAX_ROUNDS {
            assert!(!waits.has_slow_heads(interval, start));
        }
        waits.leave_round(answered);
        assert!(waits.has_slow_heads(interval, start), "1 s is slow in any case");
        for _ in 0..3 * COUNTED_ROUNDS {
            assert!(!waits.has_slow_heads(interval, start), "reported already");
        }
    }
}
