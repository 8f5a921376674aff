//! Holds watches while no apiserver can be reached.
//!
//! A watch that ends or fails in a total outage makes its client list again when the control plane
//! returns: all clients of all nodes at once, when it can bear that least. So a running watch waits for
//! an apiserver until its own deadline, and a new one for up to [`NEW_WATCH`].
//!
//! A held watch waits for one notification of its pool ([`super::line::Line::hold`]). It has no stream,
//! no timer but its deadline, and dials nothing: the pool dials once for all of them.

use std::cell::Cell;
use std::time::Duration;

use metrics::Gauge;

/// How long a new watch is held before it is answered with 429.
pub const NEW_WATCH: Duration = Duration::from_secs(30);
/// New watches are held as long as there are fewer watches held than this, on one line of a worker:
/// a request costs some KiB.
const MOST: usize = 10_000;
/// Pause of a watch that gets no connection although an apiserver can be reached, ±50 %.
pub const PAUSE: Duration = Duration::from_secs(1);

/// Counts the watches that are held on one line.
#[derive(Debug)]
pub struct Holding {
    count: Cell<usize>,
    gauge: Gauge,
}

impl Holding {
    /// None is held; shown in a gauge that others share.
    pub fn new(gauge: Gauge) -> Self {
        Self { count: Cell::new(0), gauge }
    }

    /// Counts one more watch, until it is dropped.
    pub fn add(&self) -> HeldWatch<'_> {
        self.count.set(self.count.get() + 1);
        self.gauge.increment(1);
        HeldWatch(self)
    }

    /// Whether a new watch may be held too.
    pub fn has_room(&self) -> bool {
        self.count.get() < MOST
    }
}

/// A held watch.
#[derive(Debug)]
pub struct HeldWatch<'a>(&'a Holding);

impl Drop for HeldWatch<'_> {
    fn drop(&mut self) {
        self.0.count.set(self.0.count.get() - 1);
        self.0.gauge.decrement(1);
    }
}
