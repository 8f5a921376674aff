//! What the demo's clients observed: counts for a period of the schedule, and the numbered events that
//! tell lost from late ones.

use crate::demo::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Number of watches on the busy object, and as many on the quiet one.
pub const WATCHES_OF_EACH: usize = 5;

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
    /// Heartbeats that failed or took too long although they began after the settling time of the fault.
    pub late_writes: u64,
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
    /// Sum of the delays that this machine caused; added to each limit.
    pub stalled: Duration,
    /// Description of the first failure.
    pub first_failure: Option<String>,
}

impl Counts {
    pub(super) fn fail(&mut self, what: &str, why: &dyn std::fmt::Display) {
        self.first_failure.get_or_insert_with(|| format!("{what}: {why}"));
    }
}

/// Counts of all clients.
pub struct Ledger {
    /// The current period: its start and its counts.
    period: Mutex<(Instant, Counts)>,
    /// Time after the start of a period after which a heartbeat must succeed, and within which.
    settled: Duration,
    pub(super) topics: [Topic; 2],
}

/// An object that is changed repeatedly; each change has a number.
pub(super) struct Topic {
    pub name: &'static str,
    /// When each number was written; 0 is the created object.
    pub written: Mutex<Vec<Instant>>,
    /// The last number that each watch received.
    pub seen: [AtomicU64; WATCHES_OF_EACH],
}

impl Topic {
    fn new(name: &'static str) -> Self {
        Self { name, written: Mutex::new(vec![Instant::now()]), seen: Default::default() }
    }

    /// The longest wait of a watch for its next event, and the number of events that all watches still
    /// miss.
    pub(super) fn backlog(&self) -> (Duration, u64) {
        let written = lock(&self.written);
        let backlogs = self.seen.iter().map(|seen| {
            let next = seen.load(Relaxed) as usize + 1;
            let waited = written.get(next).map_or(Duration::ZERO, Instant::elapsed);
            (waited, written.len().saturating_sub(next) as u64)
        });
        backlogs.fold((Duration::ZERO, 0), |all, one| (all.0.max(one.0), all.1 + one.1))
    }
}

impl Ledger {
    pub(super) fn new(settled: Duration) -> Self {
        let topics = [Topic::new("busy"), Topic::new("quiet")];
        Self { period: Mutex::new((Instant::now(), Counts::default())), settled, topics }
    }

    /// Starts a new period and returns the counts of the previous one.
    pub fn start_period(&self) -> Counts {
        let counts = self.so_far();
        *lock(&self.period) = (Instant::now(), Counts::default());
        counts
    }

    /// The counts of the current period, including events that are overdue.
    pub fn so_far(&self) -> Counts {
        let mut counts = lock(&self.period).1.clone();
        for topic in &self.topics {
            counts.silence = counts.silence.max(topic.backlog().0);
        }
        counts
    }

    /// The counts of the current period.
    pub(super) fn counts(&self) -> Counts {
        lock(&self.period).1.clone()
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut Counts)) {
        change(&mut lock(&self.period).1);
    }

    pub(super) fn add_read(&self, took: Duration, result: Result<(), String>) {
        self.update(|counts| {
            counts.reads += 1;
            counts.slowest_read = counts.slowest_read.max(took);
            if let Err(why) = result {
                counts.failed_reads += 1;
                counts.fail("read", &why);
            }
        });
    }

    pub(super) fn add_write(&self, began: Instant, result: Result<(), String>) {
        let took = began.elapsed();
        let mut period = lock(&self.period);
        let settled = self.settled + period.1.stalled;
        let late = began > period.0 + settled && (result.is_err() || took > settled);
        let counts = &mut period.1;
        counts.writes += 1;
        counts.slowest_write = counts.slowest_write.max(took);
        counts.late_writes += u64::from(late);
        if let Err(why) = result {
            counts.failed_writes += 1;
            counts.fail("heartbeat", &why);
        }
    }

    /// A watch of a topic received an event.
    pub(super) fn add_event(&self, topic: &Topic, watch: usize, number: u64) {
        let last = topic.seen[watch].fetch_max(number, Relaxed);
        let written = lock(&topic.written).get(number as usize).copied();
        self.update(|counts| {
            counts.events += 1;
            if number <= last {
                counts.duplicated += 1;
                return;
            }
            counts.lost += number - last - 1;
            let late = written.map_or(Duration::ZERO, |at| at.elapsed());
            counts.silence = counts.silence.max(late);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ledger_counts_lost_duplicated_and_late_events() {
        let ledger = Ledger::new(Duration::from_secs(1));
        let topic = &ledger.topics[0];
        let old = Instant::now().checked_sub(Duration::from_secs(2)).unwrap();
        *lock(&topic.written) = vec![old; 5];
        for number in [1, 2, 4, 4] {
            ledger.add_event(topic, 0, number);
        }
        let counts = ledger.start_period();
        assert_eq!((counts.events, counts.lost, counts.duplicated), (4, 1, 1));
        assert!(counts.silence >= Duration::from_secs(2));
        assert_eq!(topic.backlog().1, 4 * (WATCHES_OF_EACH as u64 - 1));
        assert_eq!(ledger.so_far().events, 0, "a new period");
    }

    #[test]
    fn ledger_counts_a_failed_heartbeat_as_late_only_after_the_settling_time() {
        let ledger = Ledger::new(Duration::from_millis(1));
        let began = Instant::now();
        ledger.start_period();
        ledger.add_write(began, Err("lost".into()));
        assert_eq!((ledger.so_far().failed_writes, ledger.so_far().late_writes), (1, 0));
        ledger.add_write(Instant::now() + Duration::from_millis(5), Err("lost".into()));
        assert_eq!((ledger.so_far().failed_writes, ledger.so_far().late_writes), (2, 1));
    }
}
