//! Which queue the round trips of one connection show.
//!
//! The kernel shows the smoothed round trip of sent bytes. From two of them follows that of the last acknowledgement
//! (RFC 6298, section 2.3: a sample changes the smoothed one by an eighth of the difference). If there may have been several,
//! it lies between two values; it is long only if both are, and short only if both are.
//!
//! When a path works again that was down, or a packet arrives that was lost several times, acknowledgements can also show
//! long round trips: the time for which nothing was acknowledged. So not each long one is a queue:
//!
//! | the last round trip | shows its queue |
//! |---|---|
//! | is shorter than [`LONG_QUEUE`] | yes |
//! | is longer, and meanwhile other bytes were acknowledged without a pause of half of it | yes: bytes moved all the time |
//! | is longer, and may have begun when an earlier long one ended, since which there was no shorter one | yes |
//! | is that of a handshake whose packets were sent once | yes |
//! | is longer otherwise | no |

use std::time::{Duration, Instant};

use crate::line_delay::LONG_QUEUE;
use crate::tcp_info::TcpInfo;

/// The share of a sample in the smoothed round trip.
const SHARE: f64 = 1.0 / 8.0;

/// The round trips of a connection.
#[derive(Debug, Default)]
pub(crate) struct RoundTrips {
    last: Option<Acknowledged>,
    /// The longest time without acknowledgements that may be half of a round trip that ends now, and its end.
    pause: (Duration, Option<Instant>),
    /// Since when all round trips are long.
    long_since: Option<Instant>,
}

/// What a look at the connection has shown.
#[derive(Debug, Clone, Copy)]
struct Acknowledged {
    at: Instant,
    bytes: u64,
    segments_in: u32,
    smoothed: Duration,
}

impl RoundTrips {
    /// Looks at the connection. `shortest` is the shortest round trip of its line. Returns the queue, if one is shown.
    pub(crate) fn look(
        &mut self,
        info: &TcpInfo,
        shortest: Duration,
        now: Instant,
    ) -> Option<Duration> {
        let TcpInfo { bytes_acked: bytes, segments_in, rtt: smoothed, .. } = *info;
        let next = Acknowledged { at: now, bytes, segments_in, smoothed };
        let last = match self.last {
            Some(last) if last.bytes == bytes => return None,
            last => last,
        };
        self.last = Some(next);
        let pause = last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last.at));
        if pause >= self.pause.0 || self.pause.1.is_none_or(|end| now >= end + 2 * self.pause.0) {
            self.pause = (pause, Some(now));
        }
        let (at_least, at_most) = match last {
            None => (smoothed, smoothed),
            // Without time stamps, an acknowledgement of bytes that were sent twice shows no round trip.
            Some(last) if last.smoothed == smoothed => return None,
            Some(last) => last.round_trip_until(&next, info.rtt_deviation),
        };
        let [queue, at_most] = [at_least, at_most].map(|time| time.saturating_sub(shortest));
        if at_most < LONG_QUEUE {
            self.long_since = None;
            return Some(at_most);
        }
        if queue < LONG_QUEUE {
            return None;
        }
        let round_trip = at_least;
        let is_flowing = match last {
            None => info.retransmitted == 0,
            Some(_) => !self.has_paused(round_trip, pause, now),
        };
        let is_another = self.long_since.is_some_and(|since| now >= since + round_trip / 4 * 3);
        self.long_since.get_or_insert(now);
        (is_flowing || is_another).then_some(queue)
    }

    /// Whether nothing was acknowledged for half of a round trip that ends now, and `last`, the last time without
    /// acknowledgements.
    fn has_paused(&self, round_trip: Duration, last: Duration, now: Instant) -> bool {
        let (longest, end) = self.pause;
        let was_meanwhile = end.is_some_and(|end| now < end + round_trip);
        2 * last > round_trip || was_meanwhile && 2 * longest > round_trip
    }
}

impl Acknowledged {
    /// The round trip of the acknowledgements between this one and `next`, at least and at most: there were at least one, and
    /// at most one in each received segment.
    fn round_trip_until(&self, next: &Self, deviation: Duration) -> (Duration, Duration) {
        let (before, after) = (self.smoothed.as_secs_f64(), next.smoothed.as_secs_f64());
        let of_samples = |count: u32| {
            let rest = (1.0 - SHARE).powi(count.clamp(1, 1_000).cast_signed());
            Duration::from_secs_f64(((after - before * rest) / (1.0 - rest)).max(0.0))
        };
        if after < before {
            return (of_samples(1), of_samples(next.segments_in.wrapping_sub(self.segments_in)));
        }
        // Several samples raise the smoothed round trip more than the deviation, which shows at most twice their length.
        let round_trip = of_samples(1).min(next.smoothed + 3 * deviation);
        (round_trip, round_trip)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A connection whose kernel measures round trips.
    struct Kernel {
        info: TcpInfo,
        start: Instant,
        round_trips: RoundTrips,
    }

    impl Kernel {
        fn new() -> Self {
            let (info, round_trips) = Default::default();
            Self { info, start: Instant::now(), round_trips }
        }

        /// Acknowledgements come, each of them after a round trip (RFC 6298, section 2). Looks then.
        fn acknowledge(&mut self, at: u64, round_trips: &[u64]) -> Option<u64> {
            for millis in round_trips {
                let sample = Duration::from_millis(*millis);
                let TcpInfo { rtt, rtt_deviation, .. } = self.info;
                (self.info.rtt_deviation, self.info.rtt) = if rtt.is_zero() {
                    (sample / 2, sample)
                } else {
                    ((3 * rtt_deviation + sample.abs_diff(rtt)) / 4, (7 * rtt + sample) / 8)
                };
                self.info.bytes_acked += 100;
                self.info.segments_in += 1;
            }
            let now = self.start + Duration::from_millis(at);
            let queue = self.round_trips.look(&self.info, MS, now)?;
            Some((queue + MS / 2).as_millis() as u64)
        }
    }

    /// Looks (time, round trips since the last one, the queue that is shown), all in milliseconds.
    #[test]
    fn queue_is_told_from_an_outage() {
        type Looks = &'static [(u64, &'static [u64], Option<u64>)];
        let table: &[(&str, Looks)] = &[
            (
                "a queue grows, and bytes move all the time",
                &[
                    (0, &[1], Some(0)),
                    (200, &[101], Some(89)),
                    (400, &[300], Some(299)),
                    (600, &[600], Some(599)),
                    (700, &[], None),
                    (800, &[900], Some(899)),
                    (1_000, &[700], Some(699)),
                    (1_100, &[11], Some(10)),
                ],
            ),
            (
                "the only bytes are a PING a second",
                &[(0, &[1], Some(0)), (1_500, &[1_501], None), (3_000, &[1_501], Some(1_500))],
            ),
            (
                "a path works again, and several packets arrive that were repeated",
                &[
                    (0, &[1], Some(0)),
                    (3_000, &[2_990], None),
                    (3_100, &[3_011], None),
                    (3_200, &[3_101], None),
                    (3_300, &[1, 1], Some(0)),
                    (6_000, &[2_600], None),
                ],
            ),
            ("a handshake", &[(0, &[1_501], Some(1_500)), (1_500, &[1_502], Some(1_501))]),
        ];
        for (case, looks) in table {
            let mut kernel = Kernel::new();
            for (at, round_trips, expected) in *looks {
                assert_eq!(kernel.acknowledge(*at, round_trips), *expected, "{case}, {at} ms");
            }
        }
    }

    #[test]
    fn handshake_whose_packets_were_repeated_needs_another_long_round_trip() {
        let mut kernel = Kernel::new();
        kernel.info.retransmitted = 1;
        assert_eq!(kernel.acknowledge(3_000, &[2_001]), None);
        assert_eq!(kernel.acknowledge(5_000, &[2_011]), Some(2_010));
    }

    /// Each received segment may be an acknowledgement, or none.
    #[test]
    fn short_round_trip_after_a_repeated_handshake_is_no_queue() {
        let mut kernel = Kernel::new();
        kernel.info.retransmitted = 2;
        assert_eq!(kernel.acknowledge(1_790, &[1_790]), None);
        kernel.info.segments_in += 1;
        assert_eq!(kernel.acknowledge(1_990, &[1]), None, "1 or 835 ms");
        assert_eq!(kernel.acknowledge(2_090, &[1]), Some(0));
    }

    #[test]
    fn longer_round_trips_count_as_at_most_about_twice_the_longest() {
        for count in [1, 2, 3, 5, 10, 50, 500] {
            for (before, after) in [(1, 220), (1, 1_000), (1_000, 2_000)] {
                let mut kernel = Kernel::new();
                kernel.acknowledge(0, &vec![before; 50]);
                let queue = kernel.acknowledge(10, &vec![after; count]).unwrap();
                let expected = after * 8 / 10..=after * 22 / 10;
                assert!(expected.contains(&queue), "{count}: {before}, {after}: {queue}");
            }
        }
    }

    #[test]
    fn shorter_round_trips_count_as_at_most_the_longest_before() {
        for count in [1, 2, 3, 5, 10, 50, 500] {
            for (before, after) in [(2_000, 1_000), (2_000, 5), (400, 5)] {
                let mut kernel = Kernel::new();
                kernel.acknowledge(0, &vec![before; 50]);
                let queue = kernel.acknowledge(10, &vec![after; count]);
                let is_certain = count == 1 || before < 500;
                assert!(queue.is_some() || !is_certain, "{count}: {before}, {after}");
                assert!(queue.is_none_or(|queue| queue <= before), "{count}: {before}, {after}");
            }
        }
    }
}
