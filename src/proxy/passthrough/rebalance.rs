//! Slow rebalancing of flows, for listeners with `rebalance: true`. After an endpoint has recovered,
//! flows to the other endpoints are ended a few at a time, so that their clients reconnect and reach
//! the endpoint that has fewer.
//!
//! A flow cannot be moved, only reset, and requests on it then fail. So rebalancing is off by
//! default and slow: each second it ends 2 % of the surplus, as for watches. It ends only idle
//! flows, those that have been idle longest first.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::upstream::Upstream;
use crate::upstream::endpoint::Endpoint;
use crate::upstream::rebalance::{EndpointLoad, RebalanceSchedule};

/// A flow is idle when no bytes have moved for this long.
pub const IDLE_FOR: Duration = Duration::from_secs(2);

/// The endpoint whose flows are to be ended, and how many. `count` returns the flows of an endpoint,
/// `elapsed` is the time since the last round.
pub fn decide(
    schedule: &mut RebalanceSchedule,
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
    let found = schedule.decide(&loads, elapsed)?;
    Some((Arc::clone(settled[found.from]), found.count))
}
