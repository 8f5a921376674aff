//! Verifies one chain at a time. The sources of the waiting chains take turns, and no source has more than half of
//! the free places in the queue, so the chains of one source do not displace those of another.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// A queue of chains of which one is verified at a time, for the whole process.
#[derive(Debug)]
pub(super) struct Lane {
    state: Mutex<LaneState>,
    /// Number of chains that may wait.
    max_waiting: usize,
    /// The lane pauses for this multiple of the preceding verification.
    pub(super) pause_factor: u32,
}

#[derive(Debug)]
struct LaneState {
    running: bool,
    waiting: usize,
    /// The waiting chains; no source has none.
    sources: BTreeMap<u128, VecDeque<oneshot::Sender<LanePermit>>>,
    /// The sources with waiting chains, in the order of their turns.
    order: VecDeque<u128>,
}

/// The permission to verify one chain. The drop admits the next chain of the lane.
#[derive(Debug)]
pub(super) struct LanePermit(&'static Lane);

impl Lane {
    pub(super) const fn new(max_waiting: usize, pause_factor: u32) -> Self {
        let state = LaneState {
            running: false,
            waiting: 0,
            sources: BTreeMap::new(),
            order: VecDeque::new(),
        };
        Self { state: Mutex::new(state), max_waiting, pause_factor }
    }

    /// Waits for the lane; `None` if the source has its share of the queue.
    pub(super) async fn acquire(&'static self, source: u128) -> Option<LanePermit> {
        let turn = {
            let mut state = self.state();
            if !std::mem::replace(&mut state.running, true) {
                return Some(LanePermit(self));
            }
            let count = state.sources.get(&source).map_or(0, VecDeque::len);
            if count >= self.max_waiting - state.waiting {
                return None;
            }
            state.wait(source)
        };
        turn.await.ok()
    }

    fn state(&self) -> MutexGuard<'_, LaneState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of chains that wait.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.state().waiting
    }

    /// Whether a chain is being verified.
    #[cfg(test)]
    pub(super) fn is_running(&self) -> bool {
        self.state().running
    }
}

impl LaneState {
    fn wait(&mut self, source: u128) -> oneshot::Receiver<LanePermit> {
        let (sender, turn) = oneshot::channel();
        let queue = self.sources.entry(source).or_default();
        if queue.is_empty() {
            self.order.push_back(source);
        }
        queue.push_back(sender);
        self.waiting += 1;
        turn
    }

    /// The next chain that still waits.
    fn next(&mut self) -> Option<oneshot::Sender<LanePermit>> {
        while let Some(source) = self.order.pop_front() {
            let Some(queue) = self.sources.get_mut(&source) else { continue };
            let next = queue.pop_front();
            if queue.is_empty() {
                self.sources.remove(&source);
            } else {
                self.order.push_back(source);
            }
            let Some(next) = next else { continue };
            self.waiting -= 1;
            if !next.is_closed() {
                return Some(next);
            }
        }
        None
    }
}

impl Drop for LanePermit {
    fn drop(&mut self) {
        let next = {
            let mut state = self.0.state();
            let next = state.next();
            state.running = next.is_some();
            next
        };
        if let Some(next) = next {
            // If the chain no longer waits, the drop of the permit admits the next one.
            drop(next.send(Self(self.0)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: u128 = 1;
    const B: u128 = 2;

    fn lane(max_waiting: usize) -> &'static Lane {
        Box::leak(Box::new(Lane::new(max_waiting, 0)))
    }

    /// Starts to wait, and fails if the permit is granted or refused at once.
    async fn wait(
        lane: &'static Lane,
        source: u128,
    ) -> tokio::task::JoinHandle<Option<LanePermit>> {
        let before = lane.waiting();
        let waiting = tokio::spawn(lane.acquire(source));
        while lane.waiting() == before {
            assert!(!waiting.is_finished(), "it does not wait");
            tokio::task::yield_now().await;
        }
        waiting
    }

    #[tokio::test(start_paused = true)]
    async fn acquire_gives_a_source_half_of_the_free_places() {
        let lane = lane(16);
        let running = lane.acquire(A).await.unwrap();
        let mut waiting = Vec::new();
        for (source, share) in [(A, 8), (B, 4), (3, 2)] {
            for _ in 0..share {
                waiting.push(wait(lane, source).await);
            }
            assert!(lane.acquire(source).await.is_none(), "source {source}");
        }
        drop(running);
        let mut ended = tokio::task::JoinSet::new();
        for waiting in waiting {
            ended.spawn(async move { waiting.await.unwrap().is_some() });
        }
        assert_eq!(ended.join_all().await, [true; 14]);
        assert!(!lane.is_running());
        assert_eq!(lane.waiting(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn sources_take_turns_and_cancelled_chains_are_skipped() {
        let lane = lane(16);
        let mut permit = lane.acquire(A).await.unwrap();
        let mut of_a = Vec::new();
        for _ in 0..4 {
            of_a.push(wait(lane, A).await);
        }
        let of_b = [wait(lane, B).await, wait(lane, B).await];
        let cancelled = of_a.remove(1);
        cancelled.abort();
        assert!(cancelled.await.is_err());
        let [b1, b2] = of_b;
        let mut of_a = of_a.into_iter();
        let (a1, a3, a4) = (of_a.next().unwrap(), of_a.next().unwrap(), of_a.next().unwrap());
        for turn in [a1, b1, b2, a3, a4] {
            drop(permit);
            permit = turn.await.unwrap().unwrap();
        }
        drop(permit);
        assert!(!lane.is_running());
    }
}
