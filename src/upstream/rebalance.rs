//! Moves watches, a few at a time, to the apiservers that have too few of them, as
//! [`jackstay_core::placement::rebalance`] decides.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use jackstay_config::{self as config, Percent};
use jackstay_core::connection::ConnectionState;
use jackstay_core::placement::rebalance::{self, MoveOffer, WatchRow};
pub use jackstay_core::placement::rebalance::{EndpointLoad, RebalanceSchedule};

use super::connection::Connection;
use super::endpoint::Endpoint;
use super::watch_moves::MoveEligibility;

/// The load of an endpoint with this many watches or flows; `None` if it does not take part.
pub fn load_of(endpoint: &Endpoint, watches: usize, now: Instant) -> Option<EndpointLoad> {
    let (share, ready_for) = (endpoint.slow_start_share(now), endpoint.ready_for(now));
    EndpointLoad::new(watches, share, ready_for, endpoint.is_fallback())
}

/// Moves the watches of one class of a pool.
#[derive(Debug)]
pub struct Rebalancer {
    decisions: rebalance::Rebalancer,
    /// The connection to whose watches moves were offered in the last round.
    offered: Option<Rc<Connection>>,
}

impl Rebalancer {
    /// A rebalancer that begins at `now`.
    pub fn new(now: Instant) -> Self {
        let decisions = rebalance::Rebalancer::new(now, fastrand::Rng::new());
        Self { decisions, offered: None }
    }

    /// Offers moves if a round is due. Cheap between rounds.
    pub fn tick(
        &mut self,
        connections: &[Rc<Connection>],
        config: &config::Upstream,
        now: Instant,
    ) {
        let Some(elapsed) = self.decisions.begin_round(now) else { return };
        if let Some(offered) = self.offered.take() {
            self.decisions.offer_ended(offered.moves.withdraw());
        }
        let live: Vec<_> = connections
            .iter()
            .filter(|c| config.rebalance && c.state() == ConnectionState::Live)
            .collect();
        let rows: Vec<_> = live.iter().map(|connection| row(connection, now)).collect();
        let has_canary = config.canary != Percent::ZERO;
        if let Some(offer) = self.decisions.plan(elapsed, &rows, has_canary, now) {
            self.offer(live[offer.connection], &live[offer.target].endpoint, &offer);
        }
    }

    fn offer(&mut self, connection: &Rc<Connection>, target: &Arc<Endpoint>, offer: &MoveOffer) {
        if offer.is_logged {
            tracing::info!(
                upstream = &*target.upstream,
                from = %connection.endpoint.label,
                has = offer.source_watches,
                to = %target.label,
                target_has = offer.target_watches,
                class = connection.class().as_str(),
                "watches rebalanced"
            );
        }
        let targets = Rc::from([Arc::clone(target)]);
        connection.offer_moves(MoveEligibility::Settled, &targets, offer.count);
        self.offered = Some(Rc::clone(connection));
    }
}

fn row(connection: &Connection, now: Instant) -> WatchRow<'_> {
    let endpoint = &connection.endpoint;
    WatchRow {
        endpoint: endpoint.key(),
        label: &endpoint.label,
        watches: connection.watches(),
        share: endpoint.slow_start_share(now),
        ready_for: endpoint.ready_for(now),
        is_fallback: endpoint.is_fallback(),
        version: endpoint.minor_version(),
    }
}
