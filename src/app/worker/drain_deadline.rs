//! How long a drain may take.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

/// Longest time over which watches end. Clients reconnect within a second, so the spread keeps a
/// node with a thousand watches from reconnecting all of them at once.
const MAX_SPREAD: Duration = Duration::from_secs(5);

/// The deadline of a drain: a timeout, or the signal to close everything at once.
#[derive(Debug, Clone)]
pub struct DrainDeadline {
    start: Instant,
    timeout: Duration,
    force: watch::Receiver<bool>,
}

impl DrainDeadline {
    /// A drain that starts now. It is over early if `force` turns true.
    pub fn new(timeout: Duration, force: watch::Receiver<bool>) -> Self {
        Self { start: Instant::now(), timeout, force }
    }

    /// The time since the start.
    pub fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// How long the drain may take.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Whether the drain must end now.
    pub fn is_over(&self) -> bool {
        self.is_forced() || Instant::now() >= self.start + self.timeout
    }

    /// Whether the drain was ended before its timeout.
    pub fn is_forced(&self) -> bool {
        *self.force.borrow()
    }

    /// Waits until the drain must end.
    pub async fn over(mut self) {
        let forced = async {
            if self.force.wait_for(|force| *force).await.is_err() {
                // The sender is gone, so the drain cannot be forced any more.
                std::future::pending::<()>().await;
            }
        };
        tokio::select! {
            () = sleep_until(self.start + self.timeout) => {}
            () = forced => {}
        }
    }

    /// The time over which watches end.
    pub fn spread(&self) -> Duration {
        MAX_SPREAD.min(self.timeout / 4)
    }
}
