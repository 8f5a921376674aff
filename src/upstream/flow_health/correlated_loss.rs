//! Flows of one endpoint that stall together.

use std::time::Duration;

use tokio::time::Instant;

/// Whether so many flows of an endpoint are stalled at once that its path is broken, rather than each
/// of them unlucky. At 5 % packet loss each way, one flow in a hundred is stalled at any time.
#[derive(Debug, Clone, Copy, Default)]
pub struct CorrelatedLoss {
    /// Flows that are stalled now.
    stalled: usize,
    broken_until: Option<Instant>,
}

impl CorrelatedLoss {
    /// The least number of stalled flows.
    const FLOWS: usize = 3;
    /// One flow in this many must be stalled.
    const ONE_IN: usize = 4;
    /// The first flows to die do not count as stalled any more, so the finding holds for this long.
    const HOLDS: Duration = Duration::from_secs(1);

    /// A flow became stalled, or recovered.
    pub fn changed(&mut self, was: bool, is: bool) {
        self.stalled = (self.stalled + usize::from(is)).saturating_sub(usize::from(was));
    }

    /// Whether the path to an endpoint with so many flows is broken.
    pub fn is_path_broken(&mut self, flows: usize, now: Instant) -> bool {
        if self.stalled >= Self::FLOWS && self.stalled * Self::ONE_IN >= flows {
            self.broken_until = Some(now + Self::HOLDS);
        }
        self.broken_until.is_some_and(|until| now < until)
    }
}
