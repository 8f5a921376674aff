//! The requests of one class that wait for a stream: heartbeats, and then all others, in the order in which they came.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::time::Instant;

use super::{Lane, StreamRequirements};

/// The number of the first request that is no heartbeat. Those of heartbeats are lower.
const FIRST_ID: u64 = 1 << 63;

/// The waiting requests of one class. `W` is what the caller keeps for each.
#[derive(Debug)]
pub(super) struct Waiters<W> {
    queue: BTreeMap<u64, Waiter<W>>,
    next_heartbeat: u64,
    next_id: u64,
    /// Number of waiting requests that can use any stream.
    unrestricted: usize,
}

/// A request that waits for a stream.
#[derive(Debug)]
pub(super) struct Waiter<W> {
    pub(super) required: StreamRequirements,
    /// When the request began to wait.
    pub(super) start: Instant,
    pub(super) handle: W,
}

impl<W> Waiter<W> {
    /// Since when the request has no connection: the loss of its previous one, if that was before it began to wait.
    pub(super) fn without_since(&self) -> Instant {
        let lost_at = self.required.without_connection_since;
        lost_at.map_or(self.start, |lost_at| lost_at.min(self.start))
    }
}

impl<W> Waiters<W> {
    pub(super) fn new() -> Self {
        Self { queue: BTreeMap::new(), next_heartbeat: 0, next_id: FIRST_ID, unrestricted: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether a new request has to wait behind those that wait already. It need not if all of them wait for
    /// streams of a special kind.
    pub(super) fn block_newcomers(&self) -> bool {
        self.unrestricted > 0
    }

    /// Adds a request behind its like. Returns the number by which it is found.
    pub(super) fn add(&mut self, required: StreamRequirements, start: Instant, handle: W) -> u64 {
        let next = match required.lane {
            Lane::Heartbeats => &mut self.next_heartbeat,
            Lane::Requests => &mut self.next_id,
        };
        let id = *next;
        *next += 1;
        self.unrestricted += usize::from(required.is_unrestricted());
        self.queue.insert(id, Waiter { required, start, handle });
        id
    }

    /// Removes a request; `None` if it is not in the queue any more.
    pub(super) fn remove(&mut self, id: u64) -> Option<Waiter<W>> {
        let waiter = self.queue.remove(&id)?;
        self.unrestricted -= usize::from(waiter.required.is_unrestricted());
        Some(waiter)
    }

    /// Removes the first request.
    pub(super) fn remove_first(&mut self) -> Option<Waiter<W>> {
        let (id, _) = self.queue.first_key_value()?;
        self.remove(*id)
    }

    /// The requests behind the one with number `after`, or all of them, in order.
    pub(super) fn behind(&self, after: Option<u64>) -> impl Iterator<Item = (u64, &Waiter<W>)> {
        let after = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.queue.range((after, Bound::Unbounded)).map(|(id, waiter)| (*id, waiter))
    }
}
