//! A watch is held while no apiserver can be reached.
//!
//! Its client sees a quiet watch. It waits for a notification of its pool and for its own deadline,
//! and for nothing else: thousands of held watches cost no work. When an apiserver can be reached each
//! asks at its own moment ([`crate::proxy::watch::resume::return_jitter`]).

use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::{Leg, WatchBody};
use crate::proxy::watch::outage::hold;

/// Why a watch is held no longer.
pub(super) enum HoldEnd {
    /// An apiserver can be reached, after so long.
    Returned(Duration),
    /// Its own time is over.
    Deadline,
    /// Its listener ends, and this is its turn.
    Shutdown,
}

/// Ready when it is held no longer.
pub(super) type Hold = Pin<Box<dyn Future<Output = HoldEnd>>>;

impl WatchBody {
    /// No apiserver can be reached.
    pub(super) fn hold(&mut self) {
        self.again.line.metrics.watch_resumed("held");
        // What was known of them was known before the outage.
        self.again.lost = None;
        self.again.refused = false;
        self.again.shunned.clear();
        let (line, class) = (Rc::clone(&self.again.line), Rc::clone(&self.again.class));
        self.wait(async move { hold(line, class).await });
    }

    /// An apiserver can be reached again.
    pub(super) fn returned(&mut self, held: Duration) {
        let now = std::time::Instant::now();
        let random = fastrand::u64(..);
        match self.relay.state_mut().on_return(now, held, self.quiet, random) {
            Some(delay) => self.ask(delay),
            None => self.wait(std::future::pending()),
        }
    }

    /// It was held until its own deadline.
    pub(super) fn expired(&mut self) {
        self.again.line.metrics.watch_resumed("expired");
        let ending = self.relay.state().ending();
        self.finish(ending, "its time was over while no apiserver could be reached");
    }

    fn wait(&mut self, over: impl Future<Output = Duration> + 'static) {
        let deadline = self.relay.state().deadline().map(Instant::from_std);
        let mut drain = self.again.drain.clone();
        self.leg = Leg::Held(Box::pin(async move {
            let expired = async {
                match deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                held = over => HoldEnd::Returned(held),
                () = expired => HoldEnd::Deadline,
                () = drain.staggered_end() => HoldEnd::Shutdown,
            }
        }));
    }
}
