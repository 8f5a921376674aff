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

use crate::upstream::endpoint::Endpoint;
use crate::upstream::pool::Upstream;
use crate::upstream::rebalance::{Load, decide};

/// Pause between two rounds, ±50 %.
const ROUND: Duration = Duration::from_secs(1);
/// An endpoint takes part when it has been ready for this long.
const SETTLED: Duration = Duration::from_secs(5);
/// A connection is quiet when nothing has moved on it for this long.
pub const QUIET: Duration = Duration::from_secs(2);

/// Decides for one worker when connections are ended, and how many.
#[derive(Debug)]
pub struct Mover {
    lot: f64,
    rng: fastrand::Rng,
    last: Instant,
    next: Instant,
}

impl Mover {
    /// A mover that begins now.
    pub fn new(now: Instant) -> Self {
        let mut rng = fastrand::Rng::new();
        Self { lot: rng.f64(), rng, last: now, next: now + ROUND }
    }

    /// Whether it is time for a round, and the time since the last one.
    pub fn is_due(&mut self, now: Instant) -> Option<Duration> {
        if now < self.next {
            return None;
        }
        let elapsed = now.saturating_duration_since(self.last).min(ROUND * 2);
        self.last = now;
        self.next = now + ROUND.mul_f64(0.5 + self.rng.f64());
        Some(elapsed)
    }

    /// From where connections should be ended, and how many; `count` says how many an endpoint has.
    pub fn decide(
        &mut self,
        upstream: &Upstream,
        count: impl Fn(&Arc<Endpoint>) -> usize,
        elapsed: Duration,
        now: Instant,
    ) -> Option<(Arc<Endpoint>, usize)> {
        let endpoints = upstream.endpoints.load();
        let settled: Vec<_> = endpoints
            .iter()
            .filter_map(|endpoint| {
                let ready_for = endpoint.ready_for(now).filter(|&since| since >= SETTLED)?;
                let load = Load { watches: count(endpoint), share: endpoint.share(now), ready_for };
                Some((endpoint, load))
            })
            .collect();
        if settled.len() < 2 {
            return None;
        }
        let loads: Vec<_> = settled.iter().map(|(_, load)| *load).collect();
        let found = decide(&loads, self.lot, elapsed, &mut self.rng)?;
        Some((Arc::clone(settled[found.from].0), found.count))
    }
}
