//! The drain of a listener, of one of its sockets, or of its watches on one upstream. One
//! [`DrainTrigger`] starts the drain, and any number of [`DrainWatcher`]s wait for it.
//!
//! | stage ([`DrainStage`]) | connections | watches |
//! |---|---|---|
//! | open | are accepted and served | continue |
//! | draining | are accepted only from the socket's queue; open ones are closed after their last request, over HTTP/2 with a GOAWAY | end cleanly at a random moment within the spread; a watch that its client could not resume without a new list continues |
//! | forced | are closed at once, with their requests | are closed with their connection |

use std::time::Duration;

use jackstay_core::drain::DrainStage;
use jackstay_sys::clock;
use tokio::sync::watch;
use tokio::time::sleep_until;

/// Creates a drain that has not started.
pub fn channel() -> (DrainTrigger, DrainWatcher) {
    let (sender, receiver) = watch::channel(DrainStage::Open);
    (DrainTrigger(sender), DrainWatcher(receiver))
}

/// Starts and forces a drain. When it is dropped, every wait of a [`DrainWatcher`] ends.
#[derive(Debug)]
pub struct DrainTrigger(watch::Sender<DrainStage>);

/// Waits for the stages of a drain.
#[derive(Debug, Clone)]
pub struct DrainWatcher(watch::Receiver<DrainStage>);

impl DrainTrigger {
    /// Starts the drain, in which watches end within `spread`. A second call has no effect.
    pub fn start(&self, spread: Duration) {
        self.0.send_if_modified(|stage| stage.start(spread, clock::now()));
    }

    /// Forces the drain: open connections are closed at once.
    pub fn force(&self) {
        self.0.send_replace(DrainStage::Forced);
    }

    /// Waits until all watchers are dropped, as an accept loop does when it has closed its socket.
    pub async fn unwatched(&self) {
        self.0.closed().await;
    }
}

impl DrainWatcher {
    /// Waits until the drain starts or the trigger is dropped.
    pub async fn started(&mut self) {
        // `wait_for` returns an error when the trigger is dropped.
        let _ = self.0.wait_for(|stage| *stage != DrainStage::Open).await;
    }

    /// Whether the drain is forced. Dropping the trigger does not force it.
    pub fn is_forced(&self) -> bool {
        *self.0.borrow() == DrainStage::Forced
    }

    /// Waits until the drain is forced or the trigger is dropped.
    pub async fn forced(&mut self) {
        let _ = self.0.wait_for(|stage| *stage == DrainStage::Forced).await;
    }

    /// Waits until one watch should end: at a random moment within the spread of the drain. Returns at once
    /// if the drain is forced or the trigger is dropped.
    pub async fn staggered_end(&mut self) {
        // The future of `wait_for` would be 24 bytes larger, and each watch waits here.
        while *self.0.borrow_and_update() == DrainStage::Open {
            if self.0.changed().await.is_err() {
                return;
            }
        }
        let Some(end) = self.0.borrow().watch_end(fastrand::f64()) else { return };
        // Boxed for the same reason: a drain begins once in the life of a listener.
        Box::pin(async {
            tokio::select! {
                () = sleep_until(end.into()) => {}
                () = self.forced() => {}
            }
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn staggered_end_spreads_watches_over_the_given_time() {
        let (trigger, watcher) = channel();
        let start = clock::now();
        let tasks: Vec<_> = (0..200)
            .map(|_| {
                let mut watcher = watcher.clone();
                tokio::spawn(async move {
                    watcher.staggered_end().await;
                    clock::elapsed(start)
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
            let within = ends.iter().filter(|end| end.as_secs() == second);
            assert!(within.count() > 20, "too few watches end in second {second}: {ends:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn force_and_drop_end_every_wait_at_once() {
        let (trigger, mut watcher) = channel();
        trigger.start(Duration::from_secs(3600));
        trigger.start(Duration::ZERO);
        watcher.started().await;
        let start = clock::now();
        let mut waiting = watcher.clone();
        let waiting = tokio::spawn(async move { waiting.staggered_end().await });
        tokio::task::yield_now().await;
        trigger.force();
        waiting.await.unwrap();
        watcher.forced().await;
        drop(trigger);
        watcher.staggered_end().await;
        assert!(clock::elapsed(start) < Duration::from_secs(1));
    }
}
