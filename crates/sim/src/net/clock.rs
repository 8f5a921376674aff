//! The time, the events, the random numbers and the log of a network of sockets.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

use super::event::NetEvent;
use super::log::{Entry, Log};
use super::queue::Queue;

/// See the module.
#[derive(Debug)]
pub(super) struct Clock {
    pub(super) now: Instant,
    start: Instant,
    rng: fastrand::Rng,
    queue: Queue<NetEvent>,
    /// An event was queued that is earlier than all others.
    pub(super) has_earlier_event: bool,
    hasher: DefaultHasher,
    /// The log, if it is kept.
    pub(super) log: Option<Log>,
}

impl Clock {
    pub(super) fn new(seed: u64, start: Instant) -> Self {
        Self {
            now: start,
            start,
            rng: fastrand::Rng::with_seed(seed),
            queue: Queue::default(),
            has_earlier_event: false,
            hasher: DefaultHasher::new(),
            log: None,
        }
    }

    pub(super) fn next_event_at(&self) -> Option<Instant> {
        self.queue.next_at()
    }

    /// Goes on to the next event, if there is one until `until`.
    pub(super) fn next(&mut self, until: Instant) -> Option<NetEvent> {
        let (at, event) = self.queue.pop(until)?;
        self.now = at;
        Some(event)
    }

    pub(super) fn events(&self) -> u64 {
        self.queue.added()
    }

    pub(super) fn hash(&self, packets: u64, bytes: u64) -> u64 {
        let mut hasher = self.hasher.clone();
        (packets, bytes).hash(&mut hasher);
        hasher.finish()
    }

    /// The present.
    pub(super) fn now(&self) -> Instant {
        self.now
    }

    /// The random numbers.
    pub(super) fn rng(&mut self) -> &mut fastrand::Rng {
        &mut self.rng
    }

    /// Adds an event, which is handled at `at` but not before the present.
    pub(super) fn queue(&mut self, at: Instant, event: NetEvent) {
        let at = at.max(self.now);
        self.has_earlier_event |= self.queue.next_at().is_none_or(|next| at < next);
        self.queue.push(at, event);
    }

    /// Writes to the log and to its hash.
    pub(super) fn record(&mut self, entry: Entry) {
        let at = self.now.saturating_duration_since(self.start);
        (at, entry).hash(&mut self.hasher);
        if let Some(log) = &mut self.log {
            log.record(at, entry);
        }
    }
}
