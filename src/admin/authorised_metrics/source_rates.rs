//! A rate for each source, in a table of bounded size. Pure: the time is an argument.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

/// Maximum of sources with a state of their own.
const MAX_SOURCES: usize = 1_024;

/// A burst at once, then one event in each interval.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    /// Events at once.
    pub burst: u32,
    /// Time for each further one.
    pub interval: Duration,
}

/// Limits the events of each source (generic cell rate algorithm).
#[derive(Debug)]
pub struct SourceRates<S> {
    rate: Rate,
    /// When the next event of the source would be due at the rate.
    due: HashMap<S, Instant>,
}

impl<S: Copy + Eq + Hash> SourceRates<S> {
    /// No source has had an event.
    pub fn new(rate: Rate) -> Self {
        Self { rate, due: HashMap::new() }
    }

    /// Whether an event of `source` is within its rate; counts it if it is.
    pub fn admit(&mut self, source: S, now: Instant) -> bool {
        let due = self.due.get(&source).map_or(now, |due| (*due).max(now));
        if due > now + self.rate.interval * self.rate.burst.saturating_sub(1) {
            return false;
        }
        if self.due.len() >= MAX_SOURCES && !self.due.contains_key(&source) {
            self.make_room(now);
        }
        self.due.insert(source, due + self.rate.interval);
        true
    }

    /// Drops sources whose burst is complete again, or else the one that is closest to it.
    fn make_room(&mut self, now: Instant) {
        self.due.retain(|_, due| *due > now);
        if self.due.len() >= MAX_SOURCES
            && let Some(source) = self.due.iter().min_by_key(|(_, due)| **due).map(|(s, _)| *s)
        {
            self.due.remove(&source);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    const RATE: Rate = Rate { burst: 3, interval: Duration::from_secs(1) };

    #[test]
    fn admit_limits_each_source_to_its_burst_and_rate() {
        let (mut rates, start) = (SourceRates::new(RATE), clock::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let admitted: Vec<bool> = (0..5).map(|_| rates.admit(1, start)).collect();
        assert_eq!(admitted, [true, true, true, false, false]);
        assert!(rates.admit(2, start), "another source");
        assert!(rates.admit(1, at(1)));
        assert!(!rates.admit(1, at(1)));
        let later: Vec<bool> = (0..4).map(|_| rates.admit(1, at(60))).collect();
        assert_eq!(later, [true, true, true, false], "the burst is complete again");
    }

    #[test]
    fn sources_beyond_the_maximum_replace_those_closest_to_a_full_burst() {
        let (mut rates, start) = (SourceRates::new(RATE), clock::now());
        for _ in 0..3 {
            assert!(rates.admit(usize::MAX, start));
        }
        for source in 0..MAX_SOURCES * 2 {
            assert!(rates.admit(source, start));
        }
        assert_eq!(rates.due.len(), MAX_SOURCES);
        assert!(!rates.admit(usize::MAX, start), "the busiest source is still limited");
    }
}
