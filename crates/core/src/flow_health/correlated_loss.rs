//! Detects that the path of an endpoint is broken.

use std::time::{Duration, Instant};

/// Detects from the number of stalled flows that the path of an endpoint is broken. At 5 % packet loss each
/// way, independent loss stalls one flow in a hundred at any time.
#[derive(Debug, Clone, Copy, Default)]
pub struct CorrelatedLoss {
    stalled_flows: usize,
    broken_until: Option<Instant>,
}

impl CorrelatedLoss {
    /// Smallest number of stalled flows on a broken path.
    const MIN_STALLED: usize = 3;
    /// On a broken path at least one of this number of flows is stalled.
    const ONE_IN: usize = 4;
    /// How long the path counts as broken. The first flows that die no longer count as stalled, so without
    /// this time their deaths would end the finding.
    const BROKEN_FOR: Duration = Duration::from_secs(1);

    /// Records whether a flow was stalled at its previous check and is stalled now.
    pub fn record_change(&mut self, was_stalled: bool, is_stalled: bool) {
        self.stalled_flows =
            (self.stalled_flows + usize::from(is_stalled)).saturating_sub(usize::from(was_stalled));
    }

    /// Whether the path to an endpoint with this many `flows` is broken.
    pub fn is_path_broken(&mut self, flows: usize, now: Instant) -> bool {
        if self.stalled_flows >= Self::MIN_STALLED && self.stalled_flows * Self::ONE_IN >= flows {
            self.broken_until = Some(now + Self::BROKEN_FOR);
        }
        self.broken_until.is_some_and(|until| now < until)
    }
}
