//! A new watch in a total outage: it is held, and then answered with the one error after which its
//! client need not list.

use std::rc::Rc;

use tokio::time::{Instant, sleep, sleep_until};

use super::ForwardedRequest;
use crate::proxy::respond::StatusError;
use crate::proxy::upstream_client::problem;
use crate::proxy::watch::outage::{NEW_WATCH, hold};
use crate::proxy::watch::session::return_jitter;
use crate::upstream::connection::Permit;
use crate::upstream::pool::Unavailable;

impl ForwardedRequest {
    /// A new watch that has got no stream, `none`, waits for the end of an outage, and then for its
    /// turn. Its time counts from `asked_at`.
    pub(super) async fn hold(
        &self,
        none: Result<Permit, Unavailable>,
        asked_at: Instant,
    ) -> Result<Permit, Unavailable> {
        if !self.upstream.watches.held().has_room() {
            return none;
        }
        let timeout = self.watch.as_ref().and_then(|asked| asked.timeout);
        let end = asked_at + timeout.map_or(NEW_WATCH, |own| own.min(NEW_WATCH));
        let stream = async {
            loop {
                let held = hold(Rc::clone(&self.upstream), Rc::clone(&self.class)).await;
                sleep(return_jitter(held, false, fastrand::u64(..))).await;
                // If the proof has ended meanwhile, the client's next request gets the 401.
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
            permit = stream => permit,
            () = sleep_until(end) => none,
            () = drained => none,
        }
    }

    /// The answer to the client when there is no stream.
    pub(super) fn unavailable(&self, unavailable: &Unavailable) -> StatusError {
        match unavailable {
            Unavailable::Unreachable(reasons) if self.is_watch() => {
                StatusError::no_upstream_for_watch(reasons)
            }
            _ => problem(unavailable),
        }
    }
}
