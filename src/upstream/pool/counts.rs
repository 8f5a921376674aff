//! Computes how many connections to an endpoint a class needs.

use std::cell::Cell;

/// Limit of concurrent connects of one class to one endpoint.
const MAX_PARALLEL_DIALS: usize = 4;

/// Counts of the connections of one class to one endpoint. Draining connections are not included, so
/// that they cannot block their replacements.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConnectionCounts {
    pub(super) live: usize,
    pub(super) suspect: usize,
    pub(super) dialing: usize,
    /// Free streams on live connections.
    pub(super) free_streams: usize,
    /// Limit of streams on one connection.
    pub(super) stream_limit: usize,
    /// Requests that wait for a stream of this endpoint.
    pub(super) waiters: usize,
}

impl ConnectionCounts {
    /// Number of connections to open. The number of connections that are wanted is the greatest of these:
    ///
    /// * the number of live connections that are missing from `min`; only one if more than half of the
    ///   connections are suspect,
    /// * one, if some connections are suspect and none is live,
    /// * one, if less than a tenth of a connection's streams is free,
    /// * the number of connections that the waiting requests need.
    pub(super) fn to_open(self, min: usize, max: usize) -> usize {
        let total = self.live + self.suspect;
        let mut want = min.saturating_sub(self.live);
        if self.suspect > 0 && self.live == 0 {
            want = want.max(1);
        }
        // If more than half are suspect, the cause is the endpoint rather than a single connection. Then one
        // connect at a time tests whether the endpoint is reachable.
        if self.suspect * 2 > total {
            want = want.min(1);
        }
        if self.live > 0 && self.free_streams * 10 < self.stream_limit {
            want = want.max(1);
        }
        if self.waiters > self.free_streams {
            want = want.max((self.waiters - self.free_streams).div_ceil(self.stream_limit));
        }
        want.saturating_sub(self.dialing)
            .min(MAX_PARALLEL_DIALS.saturating_sub(self.dialing))
            .min(max.saturating_sub(total + self.dialing))
    }
}

/// Adds one to a counter until it is dropped.
pub(super) struct CountGuard<'a>(&'a Cell<usize>);

impl<'a> CountGuard<'a> {
    pub(super) fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for CountGuard<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
