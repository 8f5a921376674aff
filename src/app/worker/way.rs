//! The way to an upstream that a worker has: a line, and what keeps its pool full.

use std::rc::Rc;
use std::sync::Arc;

use tokio::task::{JoinHandle, spawn_local};
use tokio::time::sleep;

use super::DRAIN_TICK;
use super::kept::Deadline;
use crate::observe::Metrics;
use crate::proxy::byte_budget::ByteBudget;
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::pool::{Pool, Upstream};

/// A line to an upstream, and what keeps its pool full.
pub struct Way {
    /// Shared by the listeners that lead there.
    pub line: Rc<UpstreamClient>,
    keeper: JoinHandle<()>,
}

impl Way {
    /// The way to `upstream`, which opens its first connections at once.
    pub fn new(upstream: &Arc<Upstream>, metrics: &Arc<Metrics>, bodies: &Arc<ByteBudget>) -> Self {
        let pool = Pool::new(Arc::clone(upstream));
        let keeper = spawn_local(Pool::run(Rc::clone(&pool)));
        let (metrics, bodies) = (Arc::clone(metrics), Arc::clone(bodies));
        Self { line: Rc::new(UpstreamClient::new(pool, metrics, bodies)), keeper }
    }

    /// Whether it leads there.
    pub fn leads_to(&self, upstream: &Arc<Upstream>) -> bool {
        Arc::ptr_eq(self.line.pool.upstream(), upstream)
    }

    /// Lets what runs on it finish, and closes what is left at the deadline.
    pub async fn end(self, deadline: Deadline) {
        self.keeper.abort();
        let pool = Rc::clone(&self.line.pool);
        pool.retire();
        // Requests and watches have the line, the rest of answers have streams.
        while (Rc::strong_count(&self.line) > 1 || pool.streams() > 0) && !deadline.is_over() {
            sleep(DRAIN_TICK).await;
        }
        pool.close();
    }
}
