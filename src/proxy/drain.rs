//! The drain of a listener, or of its client to an upstream: one [`DrainTrigger`] starts it, and
//! any number of [`DrainWatcher`]s follow it.
//!
//! | stage | connections | watches |
//! |---|---|---|
//! | open | are accepted and served | continue |
//! | draining | none is accepted; each open one gets a GOAWAY and ends with its last request | end cleanly, each at its own moment, if the client resumes them without a list |
//! | forced | are closed, with everything that runs on them | are closed with their connection |
//!
//! Watches end at random moments within the spread. If thousands of nodes, or a thousand watches of
//! one node, ended at once, all their clients would reconnect at the same time.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Open,
    Draining { since: Instant, spread: Duration },
    Forced,
}

/// Creates the two ends of a drain that has not started.
pub fn channel() -> (DrainTrigger, DrainWatcher) {
    let (sender, receiver) = watch::channel(Stage::Open);
    (DrainTrigger(sender), DrainWatcher(receiver))
}

/// Starts a drain. Dropping it releases every watcher that waits.
#[derive(Debug)]
pub struct DrainTrigger(watch::Sender<Stage>);

/// Waits for the stages of a drain.
#[derive(Debug, Clone)]
pub struct DrainWatcher(watch::Receiver<Stage>);

impl DrainTrigger {
    /// Starts the drain; watches end within `spread`. Does nothing if it has started already.
    pub fn start(&self, spread: Duration) {
        self.0.send_if_modified(|stage| {
            let is_first = *stage == Stage::Open;
            if is_first {
                *stage = Stage::Draining { since: Instant::now(), spread };
            }
            is_first
        });
    }

    /// Closes everything that is still open.
    pub fn force(&self) {
        self.0.send_replace(Stage::Forced);
    }
}

impl DrainWatcher {
    /// Waits until the drain starts.
    pub async fn started(&mut self) {
        // An error means that the trigger was dropped, which ends the wait as well.
        let _ = self.0.wait_for(|stage| *stage != Stage::Open).await;
    }

    /// Whether everything that is still open is to be closed now.
    pub fn is_forced(&self) -> bool {
        *self.0.borrow() == Stage::Forced
    }

    /// Waits until everything that is still open is to be closed.
    pub async fn forced(&mut self) {
        let _ = self.0.wait_for(|stage| *stage == Stage::Forced).await;
    }

    /// Waits until one watch is to end: at a random moment within the spread of the drain.
    pub async fn staggered_end(&mut self) {
        let end = match self.0.wait_for(|stage| *stage != Stage::Open).await.as_deref() {
            Ok(Stage::Draining { since, spread }) => *since + spread.mul_f64(fastrand::f64()),
            Ok(Stage::Open | Stage::Forced) | Err(_) => return,
        };
        tokio::select! {
            () = sleep_until(end) => {}
            () = self.forced() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn staggered_end_spreads_watches_over_the_given_time() {
        let (trigger, watcher) = channel();
        let start = Instant::now();
        let tasks: Vec<_> = (0..200)
            .map(|_| {
                let mut watcher = watcher.clone();
                tokio::spawn(async move {
                    watcher.staggered_end().await;
                    start.elapsed()
                })
            })
            .collect();
        trigger.start(Duration::from_secs(4));
        let mut ends = Vec::new();
        for task in tasks {
            ends.push(task.await.unwrap());
        }
        ends.sort();
        assert!(ends[199] <= Duration::from_secs(4), "{:?}", ends[199]);
        for second in 0..4 {
            let from = Duration::from_secs(second);
            let within =
                ends.iter().filter(|end| (from..from + Duration::from_secs(1)).contains(*end));
            assert!(within.count() > 20, "second {second} has too few of {ends:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn force_ends_every_wait_at_once() {
        let (trigger, mut watcher) = channel();
        trigger.start(Duration::from_secs(3600));
        trigger.start(Duration::ZERO);
        watcher.started().await;
        let start = Instant::now();
        let mut waiting = watcher.clone();
        let waiting = tokio::spawn(async move { waiting.staggered_end().await });
        tokio::task::yield_now().await;
        trigger.force();
        waiting.await.unwrap();
        watcher.forced().await;
        drop(trigger);
        watcher.staggered_end().await;
        assert!(start.elapsed() < Duration::from_secs(1));
    }
}
