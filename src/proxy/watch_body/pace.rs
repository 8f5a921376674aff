//! How a watch delivers: whether it has fallen silent.
//!
//! Silence alone says nothing: most watches are silent most of the time. It is news where pieces
//! came in short order, and then for several times as long none.

use std::time::Duration;

use tokio::time::Instant;

/// A watch delivers if its last two pieces were not further apart.
const DELIVERING: Duration = Duration::from_secs(2);
/// Longest silence of a watch that delivers before the loss of its connection is known: a stopped
/// process is left after 5 s.
const LOST_FOR: Duration = Duration::from_secs(8);
/// Least silence of one that was delivering that is news.
const SILENT: Duration = Duration::from_millis(800);
/// And so many times the pause between its last two pieces.
const TIMES: u32 = 3;

/// When pieces came.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pace {
    last: Instant,
    /// Between the last two.
    pause: Option<Duration>,
}

impl Pace {
    /// None has come yet.
    pub(super) fn new(now: Instant) -> Self {
        Self { last: now, pause: None }
    }

    /// One has come.
    pub(super) fn delivered(&mut self, now: Instant) {
        self.pause = Some(now.saturating_duration_since(self.last));
        self.last = now;
    }

    /// Whether its client would hardly notice a second of silence more: its pieces come further apart
    /// than those of a watch that delivers, or none has come for longer than a lost connection can
    /// explain.
    pub(super) fn is_quiet(&self, now: Instant) -> bool {
        let delivers = self.pause.is_some_and(|pause| pause <= DELIVERING)
            && now.saturating_duration_since(self.last) <= LOST_FOR;
        !delivers
    }

    /// Whether it was delivering and is silent now.
    pub(super) fn has_fallen_silent(&self, now: Instant) -> bool {
        self.pause.is_some_and(|pause| {
            let silence = now.saturating_duration_since(self.last);
            pause <= DELIVERING && silence >= SILENT.max(pause * TIMES)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn watch_without_a_rhythm_is_quiet() {
        // Milliseconds: pieces, the moment of the question, and whether it is quiet.
        for (pieces, at, quiet) in [
            (&[][..], 0, true),
            (&[100][..], 200, false),
            (&[100, 1_100], 1_200, false),
            (&[100, 1_100], 4_000, false),
            (&[100, 1_100], 10_000, true),
            (&[100, 5_000], 5_100, true),
        ] {
            let zero = Instant::now();
            let mut pace = Pace::new(zero);
            for &ms in pieces {
                pace.delivered(zero + Duration::from_millis(ms));
            }
            assert_eq!(pace.is_quiet(zero + Duration::from_millis(at)), quiet, "{pieces:?} {at}");
        }
    }

    #[test]
    fn silence_is_news_where_there_was_a_rhythm() {
        // Milliseconds: pieces, the moment of the question, and whether it has fallen silent.
        for (pieces, at, silent) in [
            (&[][..], 60_000, false),
            (&[100, 200, 300], 400, false),
            (&[100, 200, 300], 1_099, false),
            (&[100, 200, 300], 1_100, true),
            (&[100, 200, 300], 60_000, true),
            // Every second: three of them must stay away.
            (&[1_000, 2_000], 4_900, false),
            (&[1_000, 2_000], 5_000, true),
            // A piece now and then is no rhythm.
            (&[3_000, 6_000], 60_000, false),
            (&[100, 200, 60_000], 120_000, false),
        ] {
            let zero = Instant::now();
            let mut pace = Pace::new(zero);
            for &ms in pieces {
                pace.delivered(zero + Duration::from_millis(ms));
            }
            let now = zero + Duration::from_millis(at);
            assert_eq!(pace.has_fallen_silent(now), silent, "{pieces:?} at {at}");
        }
    }
}
