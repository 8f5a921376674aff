//! Detects from the arrival times of chunks whether a watch is quiet or has fallen silent.
//!
//! Most watches have no events most of the time, so silence alone is no sign of a fault. It is one if the
//! chunks of the watch arrived in quick succession before, and the silence lasts several times their interval.

use std::time::{Duration, Instant};

/// A watch is delivering if the interval between its last two chunks is at most this.
const MAX_INTERVAL: Duration = Duration::from_secs(2);
/// After a longer silence a watch no longer counts as delivering. The loss of a connection is detected
/// earlier: a connection to a stopped process drains after 5 s.
const MAX_SILENCE: Duration = Duration::from_secs(8);
/// A watch that was delivering has fallen silent after at least this time.
const MIN_SILENCE: Duration = Duration::from_millis(800);
/// The silence must also last this many times the interval between the last two chunks.
const MIN_SILENT_INTERVALS: u32 = 3;

/// The arrival times of the last two chunks.
#[derive(Debug, Clone, Copy)]
pub struct DeliveryPace {
    last: Instant,
    /// The time between the last two chunks.
    interval: Option<Duration>,
}

impl DeliveryPace {
    /// The pace of a stream that begins at `now`.
    pub fn new(now: Instant) -> Self {
        Self { last: now, interval: None }
    }

    /// A chunk has arrived.
    pub fn delivered(&mut self, now: Instant) {
        self.interval = Some(now.saturating_duration_since(self.last));
        self.last = now;
    }

    /// Whether one more second of silence would hardly matter to the client: the watch was not delivering, or
    /// has been silent for longer than the detection of a lost connection takes.
    pub fn is_quiet(&self, now: Instant) -> bool {
        let delivers = self.interval.is_some_and(|interval| interval <= MAX_INTERVAL)
            && now.saturating_duration_since(self.last) <= MAX_SILENCE;
        !delivers
    }

    /// How long ago the last chunk arrived.
    pub fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last)
    }

    /// Whether the watch was delivering and has fallen silent.
    pub fn has_fallen_silent(&self, now: Instant) -> bool {
        self.interval.is_some_and(|interval| {
            let silence = now.saturating_duration_since(self.last);
            interval <= MAX_INTERVAL && silence >= MIN_SILENCE.max(interval * MIN_SILENT_INTERVALS)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_without_recent_chunks_is_quiet() {
        // Milliseconds: the chunks, the time of the question, and whether the watch is quiet.
        for (chunks, at, quiet) in [
            (&[][..], 0, true),
            (&[100][..], 200, false),
            (&[100, 1_100], 1_200, false),
            (&[100, 1_100], 4_000, false),
            (&[100, 1_100], 10_000, true),
            (&[100, 5_000], 5_100, true),
        ] {
            let zero = Instant::now();
            let mut pace = DeliveryPace::new(zero);
            for &ms in chunks {
                pace.delivered(zero + Duration::from_millis(ms));
            }
            assert_eq!(pace.is_quiet(zero + Duration::from_millis(at)), quiet, "{chunks:?} {at}");
        }
    }

    #[test]
    fn pace_falls_silent_only_after_delivering() {
        // Milliseconds: the chunks, the time of the question, and whether the watch has fallen silent.
        for (chunks, at, silent) in [
            (&[][..], 60_000, false),
            (&[100, 200, 300], 400, false),
            (&[100, 200, 300], 1_099, false),
            (&[100, 200, 300], 1_100, true),
            (&[100, 200, 300], 60_000, true),
            // One chunk a second: silent after three seconds without one.
            (&[1_000, 2_000], 4_900, false),
            (&[1_000, 2_000], 5_000, true),
            // Chunks more than 2 s apart: the watch was not delivering.
            (&[3_000, 6_000], 60_000, false),
            (&[100, 200, 60_000], 120_000, false),
        ] {
            let zero = Instant::now();
            let mut pace = DeliveryPace::new(zero);
            for &ms in chunks {
                pace.delivered(zero + Duration::from_millis(ms));
            }
            let now = zero + Duration::from_millis(at);
            assert_eq!(pace.has_fallen_silent(now), silent, "{chunks:?} at {at}");
        }
    }
}
