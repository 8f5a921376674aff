//! Suppresses repeated log lines and counts them.
//!
//! An endpoint that changes its state ten times a second yields one line every few seconds with the
//! number of repetitions. The caller passes the time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use jackstay_core::open_streams::OpenStreams;

/// Maximum number of distinct lines remembered. The oldest is dropped first, and may then be logged again.
const MAX_LINES: usize = 256;

/// The repetitions of a line that were not logged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Suppressed {
    /// Number of repetitions.
    pub times: u64,
    /// Sum of the streams that the repetitions report.
    pub open: OpenStreams,
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    written: Instant,
    suppressed: Suppressed,
}

/// Suppresses lines that were logged less than a window ago.
#[derive(Debug)]
pub struct RepeatFilter {
    window: Duration,
    seen: HashMap<String, Seen>,
}

impl RepeatFilter {
    /// Admits each distinct line at most once per `window`.
    pub fn new(window: Duration) -> Self {
        Self { window, seen: HashMap::new() }
    }

    /// Returns `None` if `line` must be suppressed now, and counts it. Otherwise returns the number of
    /// repetitions suppressed since the line was last logged.
    pub fn admit(&mut self, line: &str, now: Instant) -> Option<u64> {
        self.admit_with(line, OpenStreams::default(), now).map(|suppressed| suppressed.times)
    }

    /// [`Self::admit`] of a line about a connection with `open` streams, which are summed while the line is
    /// suppressed.
    pub fn admit_with(
        &mut self,
        line: &str,
        open: OpenStreams,
        now: Instant,
    ) -> Option<Suppressed> {
        let first = Seen { written: now, suppressed: Suppressed::default() };
        if let Some(seen) = self.seen.get_mut(line) {
            if now.saturating_duration_since(seen.written) < self.window {
                seen.suppressed.times += 1;
                seen.suppressed.open += open;
                return None;
            }
            return Some(std::mem::replace(seen, first).suppressed);
        }
        if self.seen.len() >= MAX_LINES {
            self.drop_oldest();
        }
        self.seen.insert(line.to_owned(), first);
        Some(Suppressed::default())
    }

    /// Forgets the lines whose window is over and returns those with suppressed repetitions. Must be called
    /// regularly, or the end of a burst is not logged.
    pub fn flush(&mut self, now: Instant) -> Vec<(String, Suppressed)> {
        let window = self.window;
        self.seen
            .extract_if(|_, seen| now.saturating_duration_since(seen.written) >= window)
            .filter(|(_, seen)| seen.suppressed.times > 0)
            .map(|(line, seen)| (line, seen.suppressed))
            .collect()
    }

    /// Whether no line is remembered.
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    fn drop_oldest(&mut self) {
        let oldest =
            self.seen.iter().min_by_key(|(_, seen)| seen.written).map(|(line, _)| line.clone());
        if let Some(line) = oldest {
            self.seen.remove(&line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    const WINDOW: Duration = Duration::from_secs(5);

    #[test]
    fn admit_suppresses_and_counts_repetitions() {
        let (mut repeats, start) = (RepeatFilter::new(WINDOW), clock::now());
        let at = |ms| start + Duration::from_millis(ms);
        assert_eq!(repeats.admit("a ejected", at(0)), Some(0));
        for i in 1..=40 {
            assert_eq!(repeats.admit("a ejected", at(i * 100)), None);
        }
        assert_eq!(repeats.admit("b ejected", at(4000)), Some(0), "another line is not suppressed");
        assert_eq!(repeats.admit("a ejected", at(5000)), Some(40));
        assert_eq!(repeats.admit("a ejected", at(5001)), None);
        assert_eq!(repeats.flush(at(5002)), vec![]);
        let once = Suppressed { times: 1, ..Suppressed::default() };
        assert_eq!(repeats.flush(at(10_000)), vec![("a ejected".to_owned(), once)]);
        assert_eq!(repeats.flush(at(20_000)), vec![]);
        assert_eq!(repeats.admit("a ejected", at(20_001)), Some(0));
    }

    #[test]
    fn admit_with_sums_the_streams_of_suppressed_lines() {
        let (mut repeats, start) = (RepeatFilter::new(WINDOW), clock::now());
        let open = |requests, watches| OpenStreams { requests, watches, flows: 0 };
        assert_eq!(repeats.admit_with("a", open(9, 9), start), Some(Suppressed::default()));
        for _ in 0..3 {
            assert_eq!(repeats.admit_with("a", open(1, 7), start), None);
        }
        let sum = Suppressed { times: 3, open: open(3, 21) };
        assert_eq!(repeats.admit_with("a", open(1, 1), start + WINDOW), Some(sum));
    }

    #[test]
    fn admit_remembers_a_bounded_number_of_lines() {
        let (mut repeats, start) = (RepeatFilter::new(WINDOW), clock::now());
        for i in 0..10_000_u64 {
            assert_eq!(repeats.admit(&i.to_string(), start + Duration::from_micros(i)), Some(0));
        }
        assert!(repeats.seen.len() <= MAX_LINES);
        assert_eq!(repeats.admit("9999", start + Duration::from_millis(11)), None);
    }
}
