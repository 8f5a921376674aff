//! Slow rebalancing of passed connections, for listeners that ask for it: after an endpoint has
//! come back, connections to the others are ended a few at a time, so that their clients connect
//! anew and find the one that has fewer.
//!
//! A passed connection cannot be moved, only ended, and what runs on it then fails. So this is off
//! by default, it is slow (two in a hundred of what is too much, each second, as for watches), and
//! it takes only connections on which nothing has moved for a while, the longest quiet first.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::upstream::Upstream;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::rebalance::{EndpointLoad, RebalanceSchedule};

/// A connection is quiet when nothing has moved on it for this long.
pub const QUIET: Duration = Duration::from_secs(2);

/// From where connections should be ended, and how many; `count` says how many an endpoint has.
/// `elapsed` is the time since the last round.
pub fn decide(
    pace: &mut RebalanceSchedule,
    upstream: &Upstream,
    count: impl Fn(&Arc<Endpoint>) -> usize,
    elapsed: Duration,
    now: Instant,
) -> Option<(Arc<Endpoint>, usize)> {
    let endpoints = upstream.endpoints();
    let (settled, loads): (Vec<_>, Vec<_>) = endpoints
        .iter()
        .filter_map(|endpoint| Some((endpoint, EndpointLoad::of(endpoint, count(endpoint), now)?)))
        .unzip();
    if settled.len() < 2 {
        return None;
    }
    let found = pace.decide(&loads, elapsed)?;
    Some((Arc::clone(settled[found.from]), found.count))
}
