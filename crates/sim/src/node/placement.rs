//! On which apiservers the watches of a node are: `Rebalancer` and `ActiveEvacuations` of the core decide which moves the
//! connections offer to their watches.

use std::collections::BTreeMap;
use std::time::Instant;

use jackstay_core::placement::MoveEligibility;
use jackstay_core::placement::evacuation::{
    self, ActiveEvacuations, DueEvacuation, EvacuationEffect,
};
use jackstay_core::placement::rebalance::{Rebalancer, WatchRow};
use jackstay_core::pool::EndpointKey;

use super::{Io, Node};
use crate::net::ConnectionId;

/// The moves that a connection offers.
#[derive(Debug)]
struct Offer {
    eligible: MoveEligibility,
    targets: Vec<usize>,
    /// Number of moves that are left, at least 1.
    count: usize,
}

/// The decisions of the class, and what is offered.
#[derive(Debug)]
pub(super) struct Placement {
    rebalancer: Rebalancer,
    evacuations: ActiveEvacuations,
    offers: BTreeMap<ConnectionId, Offer>,
    /// The connection that got an offer in the last round of the rebalancer.
    offered: Option<ConnectionId>,
}

impl Placement {
    pub(super) fn new(now: Instant, rng: fastrand::Rng) -> Self {
        Self {
            rebalancer: Rebalancer::new(now, rng),
            evacuations: ActiveEvacuations::default(),
            offers: BTreeMap::new(),
            offered: None,
        }
    }

    /// Which watches of a connection may take a move.
    pub(super) fn offered(&self, connection: ConnectionId) -> Option<MoveEligibility> {
        self.offers.get(&connection).map(|offer| offer.eligible)
    }

    /// Takes a move. Returns the endpoints to which it goes.
    pub(super) fn take(&mut self, connection: ConnectionId) -> Option<Vec<usize>> {
        let offer = self.offers.get_mut(&connection)?;
        let targets = offer.targets.clone();
        offer.count -= 1;
        if offer.count == 0 {
            self.offers.remove(&connection);
        }
        Some(targets)
    }
}

impl Node {
    /// Offers moves, as the maintenance of the program's pool does.
    pub(super) fn place_watches(&mut self, io: &mut Io<'_>) {
        let upstreams = &self.upstreams;
        self.placement.offers.retain(|connection, _| upstreams.contains_key(connection));
        self.rebalance(io.s.now);
        self.evacuate(io);
    }

    fn rebalance(&mut self, now: Instant) {
        let Some(elapsed) = self.placement.rebalancer.begin_round(now) else { return };
        if let Some(offered) = self.placement.offered.take() {
            let left = self.placement.offers.remove(&offered).is_some();
            self.placement.rebalancer.offer_ended(left);
        }
        let live = self.upstreams.iter().filter(|(_, one)| !one.is_probe && one.is_live());
        let (ids, rows): (Vec<_>, Vec<_>) = live
            .map(|(&id, upstream)| {
                let endpoint = &self.endpoints[upstream.endpoint];
                let row = WatchRow {
                    endpoint: EndpointKey(upstream.endpoint),
                    label: &endpoint.label,
                    watches: upstream.machine.watches(),
                    share: endpoint.slow_start_share(now),
                    ready_for: endpoint.ready_for(now),
                    is_fallback: false,
                    version: None,
                };
                (id, row)
            })
            .unzip();
        let Some(offer) = self.placement.rebalancer.plan(elapsed, &rows, false, now) else {
            return;
        };
        let (connection, target) = (ids[offer.connection], rows[offer.target].endpoint.0);
        self.placement.offered = Some(connection);
        self.offer_moves(connection, MoveEligibility::Settled, vec![target], offer.count);
    }

    fn evacuate(&mut self, io: &mut Io<'_>) {
        let readiness: Vec<_> = self.endpoints.iter().map(super::Endpoint::readiness).collect();
        let due: Vec<_> = evacuation::decide(&readiness).collect();
        if due.is_empty() && self.placement.evacuations.is_empty() {
            return;
        }
        let of_class = self.upstreams.iter().filter(|(_, upstream)| !upstream.is_probe);
        let (ids, rows): (Vec<_>, Vec<_>) = of_class
            .map(|(&id, one)| (id, (EndpointKey(one.endpoint), one.machine.watches())))
            .unzip();
        let keys = due.iter().map(|&(endpoint, eligible, _)| DueEvacuation {
            endpoint: EndpointKey(endpoint),
            eligible,
        });
        let keys: Vec<_> = keys.collect();
        for effect in self.placement.evacuations.tick(&rows, &keys, io.s.now, &mut io.s.rng) {
            match effect {
                EvacuationEffect::Withdraw(endpoint) => {
                    let of_endpoint = ids.iter().zip(&rows).filter(|(_, row)| row.0 == endpoint);
                    for (id, _) in of_endpoint {
                        self.placement.offers.remove(id);
                    }
                }
                EvacuationEffect::Begun { .. } => {}
                EvacuationEffect::Offer { connection, evacuation, count } => {
                    let (_, eligible, targets) = &due[evacuation];
                    self.offer_moves(ids[connection], *eligible, targets.clone(), count);
                }
            }
        }
    }

    /// Offers moves in place of an earlier offer, and notifies the watches.
    fn offer_moves(
        &mut self,
        connection: ConnectionId,
        eligible: MoveEligibility,
        targets: Vec<usize>,
        count: usize,
    ) {
        self.placement.offers.remove(&connection);
        if count > 0 {
            self.placement.offers.insert(connection, Offer { eligible, targets, count });
        }
        self.notified.push(connection);
    }
}
