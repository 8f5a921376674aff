//! The hold of a watch, of a new one and of one that has lost its apiserver: what ends it.
//!
//! If watches ended in a total outage, all clients of all nodes would list again as soon as the control plane returns,
//! and overload it. So a watch is held until an apiserver can be reached or its deadline passes. A held watch has no
//! stream and opens no connection: the pool connects once for all watches and notifies them.
//!
//! | watch | deadline | after it | during |
//! |---|---|---|---|
//! | new (`core/request/attempts`) | its `timeoutSeconds`, at most 30 s | 429 | the outage, the jitter and the wait for a stream |
//! | running (`core/watch/session`) | that of the watch | it ends cleanly | the outage; the attempts after it have limits of their own |

use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::OptionFuture;
use jackstay_core::watch::session::no_connection_pause;
use jackstay_sys::clock;
use tokio::time::{sleep, sleep_until};

use crate::proxy::drain::DrainWatcher;
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::pool::ClassPool;

/// Why a hold ends before an apiserver can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HoldEnd {
    /// The deadline has passed.
    Deadline,
    /// The listener drains, and it is the turn of this watch.
    Drain,
}

/// Waits until a hold must end. Without a deadline and a drain it never does.
pub async fn hold_end(deadline: Option<Instant>, drain: Option<DrainWatcher>) -> HoldEnd {
    let passed = OptionFuture::from(deadline.map(|at| sleep_until(at.into())));
    let drained = OptionFuture::from(drain.map(async |mut drain| drain.staggered_end().await));
    tokio::select! {
        Some(()) = passed => HoldEnd::Deadline,
        Some(()) = drained => HoldEnd::Drain,
        else => std::future::pending().await,
    }
}

/// Waits until a held watch should ask for a stream again, and returns the duration of the wait.
///
/// In a total outage that is its end. Otherwise the class has no connection although an apiserver can be
/// reached, and the wait is a pause ([`no_connection_pause`]).
pub async fn outage_ended(client: &UpstreamClient, class: &Rc<ClassPool>) -> Duration {
    let began = clock::now();
    let _held = client.pool.hold_watch(class);
    if client.pool.is_total_outage() {
        client.pool.outage_ended().await;
    } else {
        sleep(no_connection_pause(&mut fastrand::Rng::new())).await;
    }
    clock::elapsed(began)
}
