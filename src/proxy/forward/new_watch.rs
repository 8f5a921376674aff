//! A new watch while no apiserver can be reached: jackstay holds it for a while.
//!
//! If the outage lasts longer, the client gets a 429, after which client-go does not list.

use std::rc::Rc;

use tokio::time::{Instant, sleep, sleep_until};

use super::request::ForwardedRequest;
use crate::proxy::status_error::StatusError;
use crate::proxy::watch::outage::{NEW_WATCH, hold};
use crate::proxy::watch::session::return_jitter;
use crate::upstream::connection::Permit;
use crate::upstream::pool::Unavailable;

impl ForwardedRequest {
    /// Holds a new watch until the outage is over, until its time since `asked_at` has passed, or until
    /// its listener drains. `unavailable` is the result of the last try, and is returned if there is no
    /// permit in time.
    pub(super) async fn hold(
        &self,
        unavailable: Result<Permit, Unavailable>,
        asked_at: Instant,
    ) -> Result<Permit, Unavailable> {
        if !self.upstream.watches.held().has_room() {
            return unavailable;
        }
        let timeout = self.watch.as_ref().and_then(|watch| watch.timeout);
        let deadline = asked_at + timeout.map_or(NEW_WATCH, |timeout| timeout.min(NEW_WATCH));
        let permit = async {
            loop {
                let held = hold(Rc::clone(&self.upstream), Rc::clone(&self.class)).await;
                sleep(return_jitter(held, false, fastrand::u64(..))).await;
                // If the certificate has expired meanwhile, the client's next request gets the 401.
                self.proof.confirmed().await;
                match self.upstream.pool.acquire(&self.class, self.need(None, &[])).await {
                    Err(Unavailable::Unreachable(_)) => {}
                    permit => return permit,
                }
            }
        };
        let drained = async {
            match self.drain.clone() {
                Some(mut drain) => drain.staggered_end().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            permit = permit => permit,
            () = sleep_until(deadline) => unavailable,
            () = drained => unavailable,
        }
    }

    /// The error for the client if the request gets no permit.
    pub(super) fn unavailable(&self, unavailable: &Unavailable) -> StatusError {
        match unavailable {
            Unavailable::Unreachable(reasons) if self.is_watch() => {
                StatusError::no_upstream_for_watch(reasons)
            }
            _ => StatusError::unavailable(unavailable),
        }
    }
}
