//! The endpoints of a pool: to which of them a class keeps connections, and what they mean for an outage.

use std::time::{Duration, Instant};

use super::EndpointKey;
use crate::endpoint_state::EndpointState;
use crate::outage::{READY_FOR, Reachability};

/// Number of endpoints to which a class other than a configured identity keeps connections. After the loss
/// of two, one is left.
pub const FANOUT: usize = 3;

/// An endpoint of the set.
#[derive(Debug, Clone, Copy)]
pub struct EndpointRow {
    /// The endpoint.
    pub key: EndpointKey,
    /// Its state.
    pub state: EndpointState,
    /// Whether it is ready, or probably will be with the next connection
    /// ([`crate::endpoint_health::EndpointHealth::is_ready_or_returns`]).
    pub is_ready_or_returns: bool,
    /// Whether it is a fallback: it is chosen only if there is no other of the same state.
    pub is_fallback: bool,
    /// A number that orders the endpoints of one state, differently in each pool.
    pub rank: u64,
    /// On which side of a version preference it is; `None` if there is none, or if it is not ready.
    pub version_side: Option<VersionSide>,
    /// Whether requests may be sent to it.
    pub is_usable: bool,
    /// How long it has been ready; `None` while it is not.
    pub ready_for: Option<Duration>,
    /// When the last connect failed, unless one has succeeded since.
    pub last_failure: Option<Instant>,
}

/// A side of a preference for some versions of apiservers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VersionSide {
    /// The newest version.
    Newest,
    /// An older version.
    Older,
}

/// The indices of the endpoints to which a class keeps connections: the best `fanout`, or all.
///
/// With a version preference, one of each side is among them, so that requests can follow the preference.
pub fn targets(endpoints: &[EndpointRow], fanout: Option<usize>) -> Vec<usize> {
    let mut targets: Vec<usize> = (0..endpoints.len())
        .filter(|&index| endpoints[index].state != EndpointState::Leaving)
        .collect();
    let Some(fanout) = fanout.filter(|&fanout| fanout < targets.len()) else { return targets };
    targets.sort_by_key(|&index| {
        let endpoint = &endpoints[index];
        (endpoint.state, endpoint.is_fallback, endpoint.rank)
    });
    for (side, from_end) in [(VersionSide::Newest, 1), (VersionSide::Older, 2)] {
        let is_of_side = |&index: &usize| endpoints[index].version_side == Some(side);
        if let Some(first) = targets.iter().position(is_of_side)
            && first >= fanout
            && let Some(last) = fanout.checked_sub(from_end)
        {
            targets.swap(first, last);
        }
    }
    targets.truncate(fanout);
    targets
}

/// What the endpoints mean for a total outage.
pub(super) fn reachability(endpoints: &[EndpointRow]) -> Reachability {
    let is_ready =
        |row: &EndpointRow| row.ready_for.is_some_and(|ready_for| ready_for >= READY_FOR);
    if !endpoints.iter().any(|row| row.is_usable) {
        Reachability::Unreachable
    } else if endpoints.iter().any(is_ready) {
        Reachability::Ready
    } else {
        Reachability::Unready
    }
}

/// Since when a connect to every endpoint has failed; `None` without endpoints, because discovery may find one at
/// any moment.
pub(super) fn all_failed_at(endpoints: &[EndpointRow]) -> Option<Instant> {
    let failures: Option<Vec<_>> = endpoints.iter().map(|row| row.last_failure).collect();
    failures?.into_iter().min()
}
