//! Verifies one chain at a time. The sources of the waiting chains take turns, and no source has more than half of
//! the free places in the queue, so the chains of one source do not displace those of another.

use std::sync::{Mutex, MutexGuard, PoisonError};

use jackstay_core::admission::turns::{Cap, KeyCap, Next, Order, Pacing, Rules, Turns};
use jackstay_sys::clock;
use tokio::sync::oneshot;

/// A queue of chains of which one is verified at a time, for the whole process.
#[derive(Debug)]
pub(super) struct VerificationQueue {
    turns: Mutex<Turns<u128, oneshot::Sender<VerificationPermit>>>,
    /// The queue pauses for this multiple of the preceding verification.
    pub(super) pause_factor: u32,
}

/// The permission to verify one chain. The drop admits the next chain of the queue.
#[derive(Debug)]
pub(super) struct VerificationPermit(Place);

/// A chain that waits or is verified.
#[derive(Debug, Clone, Copy)]
struct Place {
    queue: &'static VerificationQueue,
    source: u128,
    id: u64,
}

/// The chain no longer waits when this is dropped.
struct Waiting(Place);

impl VerificationQueue {
    /// A queue in which this number of chains may wait.
    pub(super) const fn new(max_waiting: usize, pause_factor: u32) -> Self {
        let rules = Rules {
            waiting: Cap { total: max_waiting, key: KeyCap::FewerThanFree, floor: 0 },
            in_progress: Cap { total: 1, key: KeyCap::AtMost(1), floor: 0 },
            order: Order::OldestFirst,
            pacing: Pacing::Never,
            evict_after: None,
            max_keys: usize::MAX,
        };
        Self { turns: Mutex::new(Turns::new(rules)), pause_factor }
    }

    /// Waits for the queue; `None` if the source has its share of the queue.
    pub(super) async fn acquire(&'static self, source: u128) -> Option<VerificationPermit> {
        let (sender, turn) = oneshot::channel();
        let id = self.turns().wait(source, 0, sender, clock::now()).ok()?.id;
        let _waiting = Waiting(Place { queue: self, source, id });
        self.start_next();
        turn.await.ok()
    }

    /// Gives the permit to the next chain, unless another one has it.
    fn start_next(&'static self) {
        let next = self.turns().next(clock::now());
        if let Next::Start(started) = next {
            let place = Place { queue: self, source: started.key, id: started.id };
            // If the chain no longer waits, the drop of the permit admits the next one.
            drop(started.item.send(VerificationPermit(place)));
        }
    }

    fn turns(&self) -> MutexGuard<'_, Turns<u128, oneshot::Sender<VerificationPermit>>> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of chains that wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.turns().waiting()
    }

    /// Whether a chain is being verified.
    #[cfg(test)]
    pub(super) fn is_running(&self) -> bool {
        self.turns().in_progress() > 0
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Place { queue, source, id } = self.0;
        queue.turns().cancel(source, id);
    }
}

impl Drop for VerificationPermit {
    fn drop(&mut self) {
        let Place { queue, source, id } = self.0;
        queue.turns().end(source, id);
        queue.start_next();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u128 = 1;
    const B: u128 = 2;

    fn queue(max_waiting: usize) -> &'static VerificationQueue {
        Box::leak(Box::new(VerificationQueue::new(max_waiting, 0)))
    }

    /// Starts to wait, and fails if the permit is granted or refused at once.
    async fn wait(
        queue: &'static VerificationQueue,
        source: u128,
    ) -> tokio::task::JoinHandle<Option<VerificationPermit>> {
        let before = queue.waiting();
        let waiting = tokio::spawn(queue.acquire(source));
        while queue.waiting() == before {
            assert!(!waiting.is_finished(), "it does not wait");
            tokio::task::yield_now().await;
        }
        waiting
    }

    #[tokio::test(start_paused = true)]
    async fn acquire_gives_a_source_half_of_the_free_places() {
        let queue = queue(16);
        let running = queue.acquire(A).await.unwrap();
        let mut waiting = Vec::new();
        for (source, share) in [(A, 8), (B, 4), (3, 2)] {
            for _ in 0..share {
                waiting.push(wait(queue, source).await);
            }
            assert!(queue.acquire(source).await.is_none(), "source {source}");
        }
        drop(running);
        let mut ended = tokio::task::JoinSet::new();
        for waiting in waiting {
            ended.spawn(async move { waiting.await.unwrap().is_some() });
        }
        assert_eq!(ended.join_all().await, [true; 14]);
        assert!(!queue.is_running());
        assert_eq!(queue.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn sources_take_turns_and_cancelled_chains_are_skipped() {
        let queue = queue(16);
        let mut permit = queue.acquire(A).await.unwrap();
        let mut of_a = Vec::new();
        for _ in 0..4 {
            of_a.push(wait(queue, A).await);
        }
        let of_b = [wait(queue, B).await, wait(queue, B).await];
        let cancelled = of_a.remove(1);
        cancelled.abort();
        assert!(cancelled.await.is_err());
        let [b1, b2] = of_b;
        let mut of_a = of_a.into_iter();
        let (a1, a3, a4) = (of_a.next().unwrap(), of_a.next().unwrap(), of_a.next().unwrap());
        for turn in [a1, b1, a3, b2, a4] {
            drop(permit);
            permit = turn.await.unwrap().unwrap();
        }
        drop(permit);
        assert!(!queue.is_running());
    }
}
