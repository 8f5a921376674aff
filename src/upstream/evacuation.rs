//! Moves watches away from an apiserver whose `/readyz` fails while their streams still work, as
//! [`jackstay_core::placement::evacuation`] decides.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use jackstay_core::placement::evacuation::{self, DueEvacuation, EvacuationEffect};

use super::connection::{Connection, ConnectionState};
use super::endpoint::{Endpoint, EndpointState};
use super::watch_moves::MoveEligibility;

/// An endpoint to evacuate, the watches that leave it, and the endpoints that may take them.
#[derive(Debug)]
pub struct Evacuation {
    endpoint: Arc<Endpoint>,
    eligible: MoveEligibility,
    targets: Rc<[Arc<Endpoint>]>,
}

/// The evacuations that are due now. Allocates nothing while every probe is ok.
pub fn evacuations(endpoints: &[Arc<Endpoint>]) -> Vec<Evacuation> {
    let is_failing = |endpoint: &Arc<Endpoint>| {
        endpoint.probe.is_failing() || endpoint.state() == EndpointState::Degraded
    };
    if !endpoints.iter().any(is_failing) {
        return Vec::new();
    }
    let readiness: Vec<_> = endpoints.iter().map(|endpoint| endpoint.readiness()).collect();
    evacuation::decide(&readiness)
        .map(|(source, eligible, targets)| Evacuation {
            endpoint: Arc::clone(&endpoints[source]),
            eligible,
            targets: targets.into_iter().map(|target| Arc::clone(&endpoints[target])).collect(),
        })
        .collect()
}

/// The evacuations in progress of one class of a pool.
#[derive(Debug, Default)]
pub struct ActiveEvacuations {
    decisions: evacuation::ActiveEvacuations,
    rng: fastrand::Rng,
}

impl ActiveEvacuations {
    /// Starts, continues and ends evacuations, so that the active ones are those that are `due`. The pool
    /// calls it in each maintenance.
    pub fn tick(&mut self, connections: &[Rc<Connection>], due: &[Evacuation], now: Instant) {
        if due.is_empty() && self.decisions.is_empty() {
            return;
        }
        let row = |connection: &Rc<Connection>| {
            let is_dead = connection.state() == ConnectionState::Dead;
            (connection.endpoint.key(), if is_dead { 0 } else { connection.watches() })
        };
        let rows: Vec<_> = connections.iter().map(row).collect();
        let keys = due.iter().map(|evacuation| DueEvacuation {
            endpoint: evacuation.endpoint.key(),
            eligible: evacuation.eligible,
        });
        let keys: Vec<_> = keys.collect();
        for effect in self.decisions.tick(&rows, &keys, now, &mut self.rng) {
            match effect {
                EvacuationEffect::Withdraw(endpoint) => {
                    for connection in connections.iter().filter(|c| c.endpoint.key() == endpoint) {
                        connection.moves.withdraw();
                    }
                }
                EvacuationEffect::Begun { evacuation, watches } => due[evacuation].log(watches),
                EvacuationEffect::Offer { connection, evacuation, count } => {
                    let Evacuation { eligible, targets, .. } = &due[evacuation];
                    connections[connection].offer_moves(*eligible, targets, count);
                }
            }
        }
    }
}

impl Evacuation {
    fn log(&self, watches: usize) {
        if watches == 0 {
            return;
        }
        tracing::info!(
            upstream = &*self.endpoint.upstream,
            endpoint = &*self.endpoint.label,
            watches,
            eligible = if self.eligible == MoveEligibility::All { "all" } else { "silent" },
            targets = self.targets.len(),
            "endpoint evacuated: its /readyz fails or is overdue, or its watch cache lags"
        );
    }
}
