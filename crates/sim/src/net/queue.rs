//! The queue of future events. Events of the same time leave it in the order in which they were added, so a run depends
//! on nothing but its seed.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::time::Instant;

/// Future events in the order of their times.
#[derive(Debug)]
pub struct Queue<E> {
    heap: BinaryHeap<Entry<E>>,
    added: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Instant,
    number: u64,
    event: E,
}

impl<E> Queue<E> {
    /// Adds an event.
    pub fn push(&mut self, at: Instant, event: E) {
        self.added += 1;
        self.heap.push(Entry { at, number: self.added, event });
    }

    /// Removes the first event, if it is not later than `until`.
    pub fn pop(&mut self, until: Instant) -> Option<(Instant, E)> {
        if self.heap.peek()?.at > until {
            return None;
        }
        self.heap.pop().map(|entry| (entry.at, entry.event))
    }

    /// When the first event is due.
    pub fn next_at(&self) -> Option<Instant> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// Number of events that were added so far.
    pub fn added(&self) -> u64 {
        self.added
    }
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { heap: BinaryHeap::with_capacity(256), added: 0 }
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    /// The greatest element of a heap leaves it first, so the order is reversed.
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at, other.number).cmp(&(self.at, self.number))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn pop_returns_events_by_time_and_then_by_order_of_push() {
        #[allow(clippy::disallowed_methods)]
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut queue = Queue::default();
        for (ms, event) in [(5, 'c'), (1, 'a'), (5, 'd'), (3, 'b'), (9, 'e')] {
            queue.push(at(ms), event);
        }
        let popped: String =
            std::iter::from_fn(|| queue.pop(at(5))).map(|(_, event)| event).collect();
        assert_eq!(popped, "abcd", "e is later");
    }
}
