//! Counts what the demo's clients observe in a period of the schedule. Events have numbers, by which lost
//! events differ from late ones.

use crate::demo::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Number of watches of each topic.
pub const WATCHES_PER_TOPIC: usize = 5;

/// What clients observed in one period.
#[derive(Debug, Clone, Default)]
pub struct Counts {
    /// Reads that finished.
    pub reads: u64,
    /// Reads that failed.
    pub failed_reads: u64,
    /// The slowest read.
    pub slowest_read: Duration,
    /// Heartbeats that finished.
    pub writes: u64,
    /// Heartbeats that failed.
    pub failed_writes: u64,
    /// The slowest heartbeat.
    pub slowest_write: Duration,
    /// Watches that ended with an error.
    pub broken: u64,
    /// Watches that ended cleanly.
    pub ended: u64,
    /// Events received.
    pub events: u64,
    /// Events that were not received.
    pub lost: u64,
    /// Events received twice or out of order.
    pub duplicated: u64,
    /// The longest delay of an event.
    pub silence: Duration,
    /// Sum of the delays that this machine caused; it is added to each time limit.
    pub stalled: Duration,
    /// Description of the first failure.
    pub first_failure: Option<String>,
}

impl Counts {
    /// Records the first failure of a period.
    pub(super) fn fail(&mut self, operation: &str, error: &dyn std::fmt::Display) {
        self.first_failure.get_or_insert_with(|| format!("{operation}: {error}"));
    }
}

/// Counts of all clients.
pub struct Ledger {
    /// The counts of the current period.
    period: Mutex<Counts>,
    pub(super) topics: [Topic; 2],
}

/// An object that is changed repeatedly. Each change has a number and is an event for its watches.
pub(super) struct Topic {
    pub name: &'static str,
    /// The time at which each number was written; number 0 is the creation of the object.
    pub written: Mutex<Vec<Instant>>,
    /// The last number that each watch received.
    pub received: [AtomicU64; WATCHES_PER_TOPIC],
}

impl Topic {
    fn new(name: &'static str) -> Self {
        Self { name, written: Mutex::new(vec![Instant::now()]), received: Default::default() }
    }

    /// For each watch, the time since its next event was written and the number of events that it has not
    /// received. The time is zero if there is no such event.
    fn backlogs(&self) -> [(Duration, u64); WATCHES_PER_TOPIC] {
        let written = lock(&self.written);
        self.received.each_ref().map(|received| {
            let next = received.load(Relaxed) as usize + 1;
            let overdue = written.get(next).map_or(Duration::ZERO, Instant::elapsed);
            (overdue, written.len().saturating_sub(next) as u64)
        })
    }
}

impl Ledger {
    pub(super) fn new() -> Self {
        Self { period: Mutex::default(), topics: [Topic::new("busy"), Topic::new("quiet")] }
    }

    /// Starts a new period and returns the counts of the previous one.
    pub fn start_period(&self) -> Counts {
        let counts = self.counts();
        *lock(&self.period) = Counts::default();
        counts
    }

    /// The counts of the current period; `silence` includes events that are not received yet.
    pub fn counts(&self) -> Counts {
        let mut counts = lock(&self.period).clone();
        for (overdue, _) in self.topics.iter().flat_map(Topic::backlogs) {
            counts.silence = counts.silence.max(overdue);
        }
        counts
    }

    /// Number of events that watches have not received yet.
    pub(super) fn undelivered(&self) -> u64 {
        self.topics.iter().flat_map(Topic::backlogs).map(|(_, missing)| missing).sum()
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut lock(&self.period));
    }

    pub(super) fn add_read(&self, duration: Duration, result: Result<(), String>) {
        self.update(|counts| {
            counts.reads += 1;
            counts.slowest_read = counts.slowest_read.max(duration);
            if let Err(error) = result {
                counts.failed_reads += 1;
                counts.fail("read", &error);
            }
        });
    }

    pub(super) fn add_write(&self, duration: Duration, result: Result<(), String>) {
        self.update(|counts| {
            counts.writes += 1;
            counts.slowest_write = counts.slowest_write.max(duration);
            if let Err(error) = result {
                counts.failed_writes += 1;
                counts.fail("heartbeat", &error);
            }
        });
    }

    /// Counts an event that a watch of a topic received.
    pub(super) fn add_event(&self, topic: &Topic, watch: usize, number: u64) {
        let last = topic.received[watch].fetch_max(number, Relaxed);
        let written = lock(&topic.written).get(number as usize).copied();
        self.update(|counts| {
            counts.events += 1;
            if number <= last {
                counts.duplicated += 1;
                return;
            }
            counts.lost += number - last - 1;
            let delay = written.map_or(Duration::ZERO, |written| written.elapsed());
            counts.silence = counts.silence.max(delay);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledger_counts_lost_duplicated_and_late_events() {
        let ledger = Ledger::new();
        let topic = &ledger.topics[0];
        let two_seconds_ago = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
        *lock(&topic.written) = vec![two_seconds_ago; 5];
        for number in [1, 2, 4, 4] {
            ledger.add_event(topic, 0, number);
        }
        let counts = ledger.start_period();
        assert_eq!((counts.events, counts.lost, counts.duplicated), (4, 1, 1));
        assert!(counts.silence >= Duration::from_secs(2));
        assert_eq!(ledger.undelivered(), 4 * (WATCHES_PER_TOPIC as u64 - 1));
        assert_eq!(ledger.counts().events, 0, "a new period");
    }
}
