//! Moves watches, a few at a time, to the apiservers that have too few of them.
//!
//! A watch lives for minutes, and a resumed one for as long as its client. Without moves, the apiserver
//! that returns last from a rolling restart would have almost no watches. The client of a watch that can
//! be resumed does not notice a move. No invariant depends on a move: a watch that cannot move, or that the
//! target refuses, stays where it is.
//!
//! [`decide`] depends only on the current loads, so thousands of nodes spread their moves without
//! coordination:
//!
//! | rule | reason |
//! |---|---|
//! | Watches move only between endpoints that have a connection and have been ready for 5 s. | A flapping apiserver gets no watches. |
//! | Each second 2 % of the excess moves, rounded at random. | Half of the excess moves in 35 s and all of it in minutes, whether a node has three watches or three thousand. |
//! | An endpoint in slow start gets only its share. | Its caches are cold. |
//! | The remainder of a division goes to an endpoint that the node's own random number selects. | If each node has 8 watches on 3 servers, the server with 2 must not be the same on all nodes. |
//! | An endpoint with one watch keeps it. | A move would only change which endpoint has none. |
//! | No watch moves to an apiserver of an older version, and none to a newer one while there is a `canary`. | [`super::version_preference`] |
//! | When 15 minutes have passed since the last endpoint became ready, watches move only from an endpoint that has more than 110 % of the mean plus one. | Clients come and go, and there would be a move for each of them. |
//!
//! Once a minute the rebalancer also requests a self-check of every watch. The self-check finds missing
//! bookmarks without a timer for each watch ([`super::watch_moves`]).

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::connection_health::ConnectionState;

use super::connection::Connection;
use super::endpoint::Endpoint;
use super::version_preference::may_rebalance;
use super::watch_moves::MoveEligibility;
use crate::config::{self, Percent};

/// Share of the excess that moves in a second.
const RATE: f64 = 0.02;
/// Mean pause between two rounds; each is ±50 %.
const ROUND: Duration = Duration::from_secs(1);
/// An endpoint takes part after it has been ready for this long.
const READY_FOR: Duration = Duration::from_secs(5);
/// For this long after the last endpoint became ready, loads are evened out without a tolerance.
const EVEN_OUT: Duration = Duration::from_secs(15 * 60);
/// Later, watches move only from an endpoint that has more than this multiple of the mean, plus one.
const TOLERANCE: f64 = 1.1;
/// Longest pause, in rounds, while no watch takes an offered move.
const MAX_PAUSE_ROUNDS: u32 = 64;
/// Pause between two self-checks of all watches, ±10 %.
const SELF_CHECK_PAUSE: Duration = Duration::from_secs(60);
/// Shortest pause between two log lines about moves.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// The load of an endpoint that takes part.
#[derive(Debug, Clone, Copy)]
pub struct EndpointLoad {
    /// Number of watches or flows.
    pub watches: usize,
    /// Share of the load in slow start ([`super::balance::slow_start`]), otherwise 1.
    pub share: f64,
    /// How long the endpoint has been ready.
    pub ready_for: Duration,
}

impl EndpointLoad {
    /// The load of an endpoint with this many watches or flows; `None` if it does not take part.
    pub fn of(endpoint: &Endpoint, watches: usize, now: Instant) -> Option<Self> {
        let ready_for = endpoint.ready_for(now).filter(|&since| since >= READY_FOR)?;
        Some(Self { watches, share: endpoint.slow_start_share(now), ready_for })
    }
}

/// Moves that are due. Endpoints are indices into the argument of [`decide`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RebalanceMove {
    /// The endpoint with the most watches too many.
    pub from: usize,
    /// The endpoint with the most watches too few.
    pub to: usize,
    /// Number of watches to move.
    pub count: usize,
}

/// The number of watches that each endpoint should have. The rounding favours no endpoint on average over
/// all nodes (systematic sampling). `lot` is a random number in 0..1 that is constant on a node.
fn fair_watches(loads: &[EndpointLoad], lot: f64) -> impl Iterator<Item = f64> {
    let total: usize = loads.iter().map(|load| load.watches).sum();
    let shares: f64 = loads.iter().map(|load| load.share).sum();
    let mut share_sum = 0.0;
    let mut assigned = lot.floor();
    loads.iter().map(move |load| {
        share_sum += load.share;
        let upper = (total as f64 * share_sum / shares + lot + 1e-9).floor();
        upper - std::mem::replace(&mut assigned, upper)
    })
}

/// Decides by the table of this module which moves are due. `lot` is a random number in 0..1 that is
/// constant on a node, and `elapsed` is the time since the last round.
pub fn decide(
    loads: &[EndpointLoad],
    lot: f64,
    elapsed: Duration,
    rng: &mut fastrand::Rng,
) -> Option<RebalanceMove> {
    let latest_ready_for = loads.iter().map(|load| load.ready_for).min()?;
    let mean = loads.iter().map(|load| load.watches as f64).sum::<f64>() / loads.len() as f64;
    let tolerated = if latest_ready_for < EVEN_OUT { 0.0 } else { mean * TOLERANCE + 1.0 };
    let mut total_surplus = 0.0;
    let mut from = (0, 0.0);
    let mut to = (0, 0.0);
    for (index, (load, fair)) in loads.iter().zip(fair_watches(loads, lot)).enumerate() {
        let surplus = load.watches as f64 - fair;
        // An endpoint in slow start keeps its surplus, because its share grows.
        let gives = load.watches > 1 && load.share >= 1.0 && load.watches as f64 > tolerated;
        if gives && surplus > 0.0 {
            total_surplus += surplus;
            if surplus > from.1 {
                from = (index, surplus);
            }
        }
        if -surplus > to.1 {
            to = (index, -surplus);
        }
    }
    let ((from, surplus), (to, deficit)) = (from, to);
    let due = total_surplus * RATE * elapsed.as_secs_f64();
    let count = (due + rng.f64()).floor().min(surplus).min(deficit);
    (count >= 1.0).then_some(RebalanceMove { from, to, count: count as usize })
}

/// The times of the rounds and the random numbers of a node.
#[derive(Debug)]
pub struct RebalanceSchedule {
    lot: f64,
    rng: fastrand::Rng,
    last: Instant,
    next: Instant,
}

impl RebalanceSchedule {
    /// A schedule that begins at `now`.
    pub fn new(now: Instant) -> Self {
        let mut rng = fastrand::Rng::new();
        Self { lot: rng.f64(), rng, last: now, next: now + ROUND }
    }

    /// If a round is due, returns the time since the previous one, at most two rounds, and schedules the next
    /// one.
    pub fn begin_round(&mut self, now: Instant) -> Option<Duration> {
        if now < self.next {
            return None;
        }
        let elapsed = now.saturating_duration_since(self.last).min(ROUND * 2);
        self.last = now;
        self.schedule_next(1, now);
        Some(elapsed)
    }

    /// Schedules the next round after a pause of this number of rounds.
    fn schedule_next(&mut self, rounds: u32, now: Instant) {
        self.next = now + ROUND.mul_f64(0.5 + self.rng.f64()) * rounds;
    }

    /// [`decide`] with the random numbers of the node.
    pub fn decide(&mut self, loads: &[EndpointLoad], elapsed: Duration) -> Option<RebalanceMove> {
        decide(loads, self.lot, elapsed, &mut self.rng)
    }
}

/// Moves the watches of one class of a pool.
#[derive(Debug)]
pub struct Rebalancer {
    schedule: RebalanceSchedule,
    self_check_at: Instant,
    /// The connection to whose watches moves were offered in the last round. If moves are left in the next
    /// round, no watch there can move.
    offered: Option<Rc<Connection>>,
    pause_rounds: u32,
    logged_at: Option<Instant>,
}

impl Rebalancer {
    /// A rebalancer that begins at `now`.
    pub fn new(now: Instant) -> Self {
        let mut schedule = RebalanceSchedule::new(now);
        let self_check_at = now + SELF_CHECK_PAUSE.mul_f64(schedule.rng.f64());
        Self { schedule, self_check_at, offered: None, pause_rounds: 1, logged_at: None }
    }

    /// Offers moves if a round is due, and requests self-checks once a minute. Cheap between rounds.
    pub fn tick(
        &mut self,
        connections: &[Rc<Connection>],
        config: &config::Upstream,
        now: Instant,
    ) {
        let Some(elapsed) = self.schedule.begin_round(now) else { return };
        if now >= self.self_check_at {
            self.self_check_at =
                now + SELF_CHECK_PAUSE.mul_f64(0.9 + self.schedule.rng.f64() / 5.0);
            for connection in connections {
                connection.request_self_check();
            }
        }
        if let Some(offered) = self.offered.take() {
            let left = offered.moves.withdraw();
            self.pause_rounds =
                if left { (self.pause_rounds * 2).min(MAX_PAUSE_ROUNDS) } else { 1 };
        }
        self.schedule.schedule_next(self.pause_rounds, now);
        if config.rebalance {
            self.round(connections, config.canary != Percent::ZERO, elapsed, now);
        }
    }

    /// Counts the watches of each endpoint, and offers the moves that are due.
    fn round(
        &mut self,
        connections: &[Rc<Connection>],
        has_canary: bool,
        elapsed: Duration,
        now: Instant,
    ) {
        let live = || connections.iter().filter(|c| c.state() == ConnectionState::Live);
        let mut endpoints: Vec<(&Arc<Endpoint>, EndpointLoad)> = Vec::new();
        for connection in live() {
            let endpoint = &connection.endpoint;
            if let Some((_, load)) = endpoints.iter_mut().find(|(e, _)| connection.is_to(e)) {
                load.watches += connection.watches();
            } else if let Some(load) = EndpointLoad::of(endpoint, connection.watches(), now) {
                endpoints.push((endpoint, load));
            }
        }
        if endpoints.len() < 2 {
            return;
        }
        // The order must not depend on the connections, because `lot` selects endpoints by it.
        endpoints.sort_by(|(a, _), (b, _)| a.label.cmp(&b.label));
        let loads: Vec<_> = endpoints.iter().map(|(_, load)| *load).collect();
        let Some(RebalanceMove { from, to, count }) = self.schedule.decide(&loads, elapsed) else {
            return;
        };
        let (source, target) = (endpoints[from].0, endpoints[to].0);
        if !may_rebalance(source.minor_version(), target.minor_version(), has_canary) {
            return;
        }
        // A random watch of the source selects the connection.
        let mut chosen = self.schedule.rng.usize(..loads[from].watches);
        let Some(connection) = live().filter(|c| c.is_to(source)).find(|c| {
            let is_here = chosen < c.watches();
            chosen = chosen.saturating_sub(c.watches());
            is_here
        }) else {
            return;
        };
        if self.logged_at.is_none_or(|logged| now >= logged + LOG_PAUSE) {
            self.logged_at = Some(now);
            tracing::info!(
                upstream = &*source.upstream,
                from = %source.label,
                has = loads[from].watches,
                to = %target.label,
                target_has = loads[to].watches,
                class = connection.class().as_str(),
                "watches rebalanced"
            );
        }
        connection.offer_moves(MoveEligibility::Settled, &Rc::from([Arc::clone(target)]), count);
        self.offered = Some(Rc::clone(connection));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn loads(watches: &[usize], ready_for: Duration) -> Vec<EndpointLoad> {
        watches.iter().map(|&watches| EndpointLoad { watches, share: 1.0, ready_for }).collect()
    }

    #[test]
    fn fair_watches_sum_to_the_total_and_favour_no_endpoint() {
        let uneven = |watches: &[usize], shares: &[f64]| -> Vec<EndpointLoad> {
            let mut loads = loads(watches, HOUR);
            loads.iter_mut().zip(shares).for_each(|(load, &share)| load.share = share);
            loads
        };
        for loads in [
            uneven(&[4, 4, 0], &[1.0, 1.0, 1.0]),
            uneven(&[0, 0, 1], &[1.0, 1.0, 1.0]),
            uneven(&[50, 51, 3], &[1.0, 1.0, 0.3]),
            uneven(&[0, 0], &[1.0, 0.1]),
        ] {
            let total: usize = loads.iter().map(|load| load.watches).sum();
            let shares: f64 = loads.iter().map(|load| load.share).sum();
            let mut sums = vec![0.0; loads.len()];
            for node in 0..1000 {
                let fair: Vec<f64> = fair_watches(&loads, f64::from(node) / 1000.0).collect();
                assert!((fair.iter().sum::<f64>() - total as f64).abs() < 1e-9, "{fair:?}");
                assert!(fair.iter().all(|&watches| watches >= 0.0), "{fair:?}");
                sums.iter_mut().zip(fair).for_each(|(sum, watches)| *sum += watches);
            }
            for (sum, load) in sums.iter().zip(&loads) {
                let exact = total as f64 * load.share / shares;
                assert!((sum / 1000.0 - exact).abs() < 0.02, "{sum} of {exact}");
            }
        }
    }

    #[test]
    fn decide_moves_from_the_fullest_to_the_emptiest() {
        let mut rng = fastrand::Rng::with_seed(1);
        let loads = loads(&[500, 400, 0], Duration::from_secs(60));
        let moves = decide(&loads, 0.5, ROUND, &mut rng).unwrap();
        assert_eq!((moves.from, moves.to), (0, 2));
        assert!((6..=7).contains(&moves.count), "2 % of 300: {}", moves.count);
    }

    #[test]
    fn decide_within_tolerance_moves_nothing() {
        let mut rng = fastrand::Rng::with_seed(1);
        for (watches, ready_for) in [
            (&[][..], HOUR),
            (&[900], HOUR),
            (&[0, 0, 0], HOUR),
            (&[7, 7, 7], Duration::from_secs(60)),
            // Within the tolerance.
            (&[109, 100, 91], HOUR),
            (&[2, 0, 1], HOUR),
        ] {
            let loads = loads(watches, ready_for);
            for _ in 0..1000 {
                assert_eq!(decide(&loads, 0.3, ROUND * 2, &mut rng), None, "{watches:?}");
            }
        }
    }

    #[test]
    fn decide_moves_no_single_watch() {
        let mut rng = fastrand::Rng::with_seed(1);
        for watches in [&[1, 0][..], &[0, 1, 0], &[1, 1, 0]] {
            let loads = loads(watches, Duration::from_secs(60));
            for lot in 0..100 {
                let moves = (0..100)
                    .find_map(|_| decide(&loads, f64::from(lot) / 100.0, ROUND * 2, &mut rng));
                assert_eq!(moves, None, "{watches:?}");
            }
        }
        let two = loads(&[2, 0], Duration::from_secs(60));
        let moves = (0..1000).find_map(|_| decide(&two, 0.3, ROUND, &mut rng));
        assert_eq!(moves, Some(RebalanceMove { from: 0, to: 1, count: 1 }));
    }

    #[test]
    fn decide_gives_an_endpoint_in_slow_start_its_share_and_takes_nothing() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut loads = loads(&[45, 45, 10], Duration::from_secs(6));
        loads[2].share = 0.2;
        for _ in 0..1000 {
            assert_eq!(decide(&loads, 0.3, ROUND, &mut rng), None);
        }
        loads[2].share = 0.5;
        assert!((0..1000).any(|_| decide(&loads, 0.3, ROUND, &mut rng).is_some()));
    }
}
