//! How much longer than usual everything takes at present, because a queue in front of a slow line is long.
//!
//! A transfer that begins, or one that jackstay does not carry (a node that pulls an image), can fill the queue of the
//! host's line for seconds. Then each PONG and each acknowledgement is as late as on a path that is lost. But the bytes
//! that are acknowledged meanwhile show it: their round trips take long, too. On a lost path, or while a process is
//! stopped, no round trip is measured that is longer than usual, and the deadlines stay as they are.
//! [`crate::round_trips`] tells them from the one that may be measured when a path works again.
//!
//! The queue of the host's line delays all endpoints, and one further away only those behind it. So what an endpoint shows
//! counts for itself, and for others as follows:
//!
//! | another endpoint has meanwhile shown | for others |
//! |---|---|
//! | nothing: it is silent, or there is none | the delay counts |
//! | a long queue | the delay counts |
//! | only round trips shorter than [`SHORT_QUEUE`], the last one after the delay began | it does not: bytes pass the line |
//!
//! An apiserver that acknowledges late, whatever the reason, thus delays verdicts about itself only, while another one is
//! quick. An endpoint on this host, or behind another line, is always quick, so beside it each endpoint counts for itself.
//!
//! The kernel sends bytes again whose round trip is longer than its retransmission timeout. It then knows how long they took
//! from TCP time stamps only (RFC 7323, section 4; the default of Linux). Without them, deadlines stay as they are.

use std::time::{Duration, Instant};

use crate::pool::EndpointKey;

/// Round trips until a new connection is in use: TCP, TLS 1.3, and the first PING.
const HANDSHAKE_ROUND_TRIPS: u32 = 3;
/// A shorter queue is within the deadlines.
pub(crate) const LONG_QUEUE: Duration = Duration::from_millis(500);
/// A queue that refutes a long one. Estimates of the same queue may differ by a factor of 2.
const SHORT_QUEUE: Duration = Duration::from_millis(250);
/// A longer one is not waited for: requests of kubelet and leader election have a timeout of 10 s.
const MAX_DELAY: Duration = Duration::from_secs(6);
/// How long a delay counts at least, and half of how long at most.
const MEMORY: Duration = Duration::from_secs(5);

/// By how much a new connection may be late.
pub fn handshake_delay(line_delay: Duration) -> Duration {
    HANDSHAKE_ROUND_TRIPS * line_delay
}

/// What round trips to the endpoints of an upstream have shown of the lines to them.
#[derive(Debug, Default)]
pub struct LineDelays(Vec<(EndpointKey, Shown)>);

impl LineDelays {
    /// A round trip to `endpoint` has just taken longer than the shortest one, by `queue`.
    pub fn record(&mut self, endpoint: EndpointKey, queue: Duration, now: Instant) {
        self.forget(now);
        let known = self.0.iter().position(|(key, _)| *key == endpoint);
        let at = known.unwrap_or_else(|| {
            self.0.push((endpoint, Shown::new(now)));
            self.0.len() - 1
        });
        self.0[at].1.record(queue, now);
    }

    /// By how much answers of `endpoint` may be late.
    pub fn get(&mut self, endpoint: EndpointKey, now: Instant) -> Duration {
        self.forget(now);
        let counts = |key| key == endpoint || !self.is_refuted(key);
        let delays =
            self.0.iter().filter(|(key, _)| counts(*key)).map(|(_, shown)| shown.longest());
        let longest = delays.max().unwrap_or_default();
        if longest < LONG_QUEUE { Duration::ZERO } else { longest.min(MAX_DELAY) }
    }

    /// Whether bytes to another endpoint have passed the host's line since this one began to be late.
    fn is_refuted(&self, endpoint: EndpointKey) -> bool {
        let mut shown = self.0.iter().filter(|(key, _)| *key == endpoint);
        let Some(late_since) = shown.find_map(|(_, shown)| shown.late_since()) else {
            return false;
        };
        let mut others = self.0.iter().filter(|(key, _)| *key != endpoint);
        others.any(|(_, other)| {
            other.late_since().is_none() && other.short_at.is_some_and(|at| at > late_since)
        })
    }

    fn forget(&mut self, now: Instant) {
        self.0.retain_mut(|(_, shown)| shown.forget(now));
    }
}

/// What round trips to an endpoint have shown.
#[derive(Debug)]
struct Shown {
    /// The last round trip.
    at: Instant,
    /// The last one without a queue.
    short_at: Option<Instant>,
    /// When the present period began.
    since: Instant,
    current: Period,
    before: Period,
}

/// What round trips have shown within [`MEMORY`].
#[derive(Debug, Clone, Copy, Default)]
struct Period {
    longest: Duration,
    /// The first one with a long queue.
    late_since: Option<Instant>,
}

impl Shown {
    fn new(now: Instant) -> Self {
        let (current, before) = Default::default();
        Self { at: now, short_at: None, since: now, current, before }
    }

    fn record(&mut self, queue: Duration, now: Instant) {
        self.at = now;
        self.current.longest = self.current.longest.max(queue);
        if queue >= LONG_QUEUE {
            self.current.late_since.get_or_insert(now);
        } else if queue < SHORT_QUEUE {
            self.short_at = Some(now);
        }
    }

    fn longest(&self) -> Duration {
        self.current.longest.max(self.before.longest)
    }

    fn late_since(&self) -> Option<Instant> {
        self.before.late_since.or(self.current.late_since)
    }

    /// Returns whether anything is left.
    fn forget(&mut self, now: Instant) -> bool {
        if now >= self.since + MEMORY {
            (self.since, self.before) = (self.since + MEMORY, self.current);
            self.current = Period::default();
        }
        if now >= self.since + MEMORY {
            (self.since, self.before) = (now, Period::default());
        }
        now < self.at + 2 * MEMORY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const S: Duration = Duration::from_secs(1);
    const A: EndpointKey = EndpointKey(0);
    const B: EndpointKey = EndpointKey(1);
    const C: EndpointKey = EndpointKey(2);

    #[test]
    fn the_longest_delay_counts_for_five_to_ten_seconds() {
        let start = Instant::now();
        let mut delays = LineDelays::default();
        assert_eq!(delays.get(A, start), Duration::ZERO);
        for (at, queue, expected) in [
            (Duration::ZERO, Duration::ZERO, Duration::ZERO),
            (100 * MS, 499 * MS, Duration::ZERO),
            (200 * MS, 700 * MS, 700 * MS),
            (300 * MS, 20 * MS, 700 * MS),
            (4_900 * MS, 3 * S, 3 * S),
            (9_000 * MS, 10 * MS, 3 * S),
            (10_200 * MS, 10 * MS, Duration::ZERO),
            (10_300 * MS, 60 * S, MAX_DELAY),
            // Nothing was looked at for long.
            (30 * S, 10 * MS, Duration::ZERO),
        ] {
            delays.record(A, queue, start + at);
            assert_eq!(delays.get(A, start + at), expected, "{at:?}");
        }
    }

    /// Its endpoint, its time, and the queue.
    type RoundTrip = (EndpointKey, Duration, Duration);

    /// Round trips, and by how much answers of A, B and C may be late after them, at the last time.
    #[test]
    fn a_delay_counts_for_others_unless_one_of_them_is_passed_meanwhile() {
        let zero = Duration::ZERO;
        let table: &[(&str, &[RoundTrip], [Duration; 3])] = &[
            ("one endpoint, the others are silent", &[(A, S, 2 * S)], [2 * S; 3]),
            (
                "others were quick before the queue",
                &[(B, 900 * MS, zero), (C, 950 * MS, zero), (A, S, 2 * S)],
                [2 * S; 3],
            ),
            ("all wait", &[(A, S, 2 * S), (B, S, 3 * S), (C, S, S)], [3 * S; 3]),
            ("one is quick meanwhile", &[(A, S, 2 * S), (B, 2 * S, zero)], [2 * S, zero, zero]),
            (
                "one apiserver is late all the time",
                &[(A, S, 5 * S), (B, 2 * S, zero), (A, 3 * S, 5 * S), (A, 9 * S, 5 * S)],
                [5 * S, zero, zero],
            ),
            (
                "two are late all the time",
                &[(A, S, 5 * S), (B, S, 4 * S), (C, 2 * S, zero), (A, 3 * S, S), (B, 3 * S, S)],
                [5 * S, 4 * S, zero],
            ),
            (
                "the queue drains and fills",
                &[(A, S, 2 * S), (B, 1_500 * MS, 2 * S), (B, 4 * S, zero), (A, 4 * S, zero)],
                [2 * S; 3],
            ),
            (
                "an estimate between long and short proves nothing",
                &[(A, S, 600 * MS), (B, 1_100 * MS, 300 * MS)],
                [600 * MS; 3],
            ),
            (
                "the quick one has been silent for long",
                &[(A, S, S), (B, 2 * S, zero), (A, 6 * S, S), (A, 10 * S, S), (A, 13 * S, S)],
                [S; 3],
            ),
            (
                "the quick one waits, too, now",
                &[(A, S, 2 * S), (B, 2 * S, zero), (B, 3 * S, 2 * S), (A, 3 * S, 2 * S)],
                [2 * S; 3],
            ),
        ];
        for (case, round_trips, expected) in table {
            let start = Instant::now();
            let (mut delays, mut last) = (LineDelays::default(), start);
            for (endpoint, at, queue) in *round_trips {
                last = start + *at;
                delays.record(*endpoint, *queue, last);
            }
            assert_eq!([A, B, C].map(|endpoint| delays.get(endpoint, last)), *expected, "{case}");
        }
    }
}
