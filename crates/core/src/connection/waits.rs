//! How long requests on a connection wait for their response heads.
//!
//! Slow heads are found in rounds of a fixed interval. A request other than a watch is counted in the
//! round in which it is sent. If it still waits when the next round ends, it has waited for a whole
//! interval. Only the last few rounds need a count, so the search need not visit each waiting request.

use std::time::{Duration, Instant};

use crate::balance::PeakEwma;

/// The shortest time between two notifications. Each wakes all requests and watches of the connection.
const NOTIFICATION_PAUSE: Duration = Duration::from_millis(10);

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
    latency: PeakEwma,
    /// Number of requests that wait for a response head.
    waiting: usize,
    /// Since when at least one request waits.
    waiting_since: Option<Instant>,
    /// When the requests are notified next; `None` if none of those that wait has asked for it.
    notify_at: Option<Instant>,
    /// When they were last notified.
    notified_at: Option<Instant>,
    /// Number of the current round.
    round: u32,
    /// Number of waiting requests other than watches, by their round modulo [`COUNTED_ROUNDS`].
    by_round: [u32; COUNTED_ROUNDS],
}

impl ResponseWaits {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            latency: PeakEwma::new(now),
            waiting: 0,
            waiting_since: None,
            notify_at: None,
            notified_at: None,
            // Earlier rounds are looked for, too.
            round: COUNTED_ROUNDS as u32,
            by_round: [0; COUNTED_ROUNDS],
        }
    }

    /// Number of requests that wait for a response head.
    pub(super) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Since when at least one request waits.
    pub(super) fn waiting_since(&self) -> Option<Instant> {
        self.waiting_since
    }

    /// Records that a request was sent.
    pub(super) fn request_sent(&mut self, at: Instant) {
        if self.waiting == 0 {
            self.waiting_since = Some(at);
        }
        self.waiting += 1;
    }

    /// Records that the head of a request arrived, or that the request was cancelled.
    pub(super) fn wait_ended(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
        if self.waiting == 0 {
            self.waiting_since = None;
            self.notify_at = None;
        }
    }

    /// When the requests are notified next.
    pub(super) fn notify_at(&self) -> Option<Instant> {
        self.notify_at
    }

    /// A request that waits asks to be notified at `at`. Returns whether that is earlier than planned.
    pub(super) fn ask_notification(&mut self, at: Instant) -> bool {
        let at = self.notified_at.map_or(at, |last| at.max(last + NOTIFICATION_PAUSE));
        let is_earlier = self.notify_at.is_none_or(|planned| at < planned);
        if is_earlier {
            self.notify_at = Some(at);
        }
        is_earlier
    }

    /// Whether the requests are to be notified now. Each time once.
    pub(super) fn take_notification(&mut self, now: Instant) -> bool {
        let is_due = self.notify_at.is_some_and(|at| at <= now);
        if is_due {
            self.notify_at = None;
            self.notified_at = Some(now);
        }
        is_due
    }

    /// Records the latency of a response head.
    pub(super) fn observe_latency(&mut self, latency: Duration, now: Instant) {
        self.latency.observe(latency, now);
    }

    /// Smoothed latency in seconds.
    pub(super) fn latency(&self, now: Instant) -> f64 {
        self.latency.value(now)
    }

    /// Whether a request has waited for [`WARNING_AFTER`] without a byte arriving.
    pub(super) fn has_warning(&self, last_received: Instant, now: Instant) -> bool {
        let since = self.waiting_since;
        since.is_some_and(|since| now >= since.max(last_received) + WARNING_AFTER)
    }

    fn count_of(&mut self, round: u32) -> &mut u32 {
        &mut self.by_round[round as usize % COUNTED_ROUNDS]
    }

    /// Counts a request in the current round. Returns the number of the round.
    pub(super) fn enter_round(&mut self) -> u32 {
        *self.count_of(self.round) += 1;
        self.round
    }

    /// Removes a request from the round in which it was sent, if that round is still counted.
    pub(super) fn leave_round(&mut self, round: u32) {
        if (self.round.wrapping_sub(round) as usize) < COUNTED_ROUNDS {
            let count = self.count_of(round);
            *count = count.saturating_sub(1);
        }
    }

    /// Begins a round, an `interval` after the previous one. Returns whether a request has waited for a whole number
    /// of rounds that is four times as long as a response usually takes, or for [`MAX_ROUNDS`]. Each request counts
    /// once.
    pub(super) fn has_slow_heads(&mut self, interval: Duration, now: Instant) -> bool {
        self.round = self.round.wrapping_add(1);
        let round = self.round;
        let usual = self.latency(now) * 4.0 / interval.as_secs_f64();
        let least = (usual.ceil() as u32).clamp(1, MAX_ROUNDS);
        let mut waited =
            |rounds: u32| std::mem::take(self.count_of(round.wrapping_sub(rounds + 1)));
        (least..=MAX_ROUNDS).fold(0, |slow, rounds| slow + waited(rounds)) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn waiting_requests_are_notified_at_the_earliest_time_that_one_has_asked_for() {
        let start = Instant::now();
        let mut waits = ResponseWaits::new(start);
        waits.request_sent(start);
        for (at, is_earlier) in [(150, true), (175, false), (150, false), (120, true)] {
            assert_eq!(waits.ask_notification(start + at * MS), is_earlier, "{at}");
        }
        assert_eq!(waits.notify_at(), Some(start + 120 * MS));
        for (at, is_due) in [(119, false), (120, true), (121, false), (500, false)] {
            assert_eq!(waits.take_notification(start + at * MS), is_due, "{at}");
        }
    }

    #[test]
    fn nobody_is_notified_when_no_request_waits() {
        let start = Instant::now();
        let mut waits = ResponseWaits::new(start);
        (0..2).for_each(|_| waits.request_sent(start));
        waits.ask_notification(start);
        waits.wait_ended();
        assert_eq!(waits.notify_at(), Some(start));
        waits.wait_ended();
        assert_eq!(waits.notify_at(), None);
    }

    #[test]
    fn notifications_have_a_pause() {
        let start = Instant::now();
        let mut waits = ResponseWaits::new(start);
        waits.request_sent(start);
        for (asked, expected) in [(0, 0), (1, 10), (12, 20), (40, 40), (40, 50)] {
            assert!(waits.ask_notification(start + asked * MS), "{asked}");
            let at = start + expected * MS;
            assert_eq!(waits.notify_at(), Some(at), "{asked}");
            assert!(!waits.ask_notification(start + asked * MS), "{asked}: it is planned");
            assert!(waits.take_notification(at), "{asked}");
        }
    }

    #[test]
    fn has_slow_heads_reports_a_request_once_after_a_whole_round() {
        let start = Instant::now();
        let interval = Duration::from_millis(200);
        let mut waits = ResponseWaits::new(start);
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
