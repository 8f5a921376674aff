//! Moves watches, a few at a time, to the apiservers that have too few of them.
//!
//! A watch lives for minutes, and a resumed one for as long as its client. Without moves the last
//! apiserver to return from a rolling restart would carry almost no watches. A watch that can be
//! resumed can be moved without its client noticing. No invariant depends on a move: a watch that
//! cannot move, or is refused by the target, stays where it is.
//!
//! [`decide`] is pure and memoryless, so that thousands of nodes spread their moves without
//! coordination:
//!
//! | rule | reason |
//! |---|---|
//! | only endpoints that have been ready for 5 s, and only to those with a connection | a flapping apiserver gets no watches |
//! | each second 2 % of the excess moves, rounded at random | half of it in 35 s, all in minutes, whether a node has three watches or three thousand |
//! | an endpoint in slow start gets only its share | its caches are cold |
//! | the remainder of a division goes to an endpoint chosen by the node's own random number | of 8 watches on 3 servers, the server with 2 must not be the same one on every node |
//! | an endpoint with one watch keeps it | a move would only change which endpoint has none |
//! | later than 15 minutes after the last endpoint became ready: only from endpoints with over 10 % plus one too many | clients come and go, and following each would be churn |
//!
//! Once a minute the rebalancer also requests a self-check of every watch, which finds missing
//! bookmarks without a timer for each watch ([`super::watch_moves`]).

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::connection::Connection;
use super::endpoint::Endpoint;
use super::health::ConnectionState;
use super::watch_moves::MoveEligibility;

/// Part of the excess that moves in a second.
const RATE: f64 = 0.02;
/// Pause between two rounds, ±50 %.
const ROUND: Duration = Duration::from_secs(1);
/// An endpoint takes part when it has been ready for this long.
const SETTLED: Duration = Duration::from_secs(5);
/// For this long after the last endpoint became ready, loads are evened out to the last watch.
const EVEN_OUT: Duration = Duration::from_secs(15 * 60);
/// After that, an endpoint may have this multiple of the mean, plus one, before watches move away.
const TOLERANCE: f64 = 1.1;
/// Longest pause, in rounds, while no watch takes an offered move.
const MAX_PAUSE: u32 = 64;
/// Pause between two self-checks of all watches, ±10 %.
const SELF_CHECK_PAUSE: Duration = Duration::from_secs(60);
/// Moves are logged at most this often.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// An endpoint that takes part.
#[derive(Debug, Clone, Copy)]
pub struct EndpointLoad {
    /// Its watches.
    pub watches: usize,
    /// Its share ([`super::balance::slow_start`]): 1 unless it has recovered just now.
    pub share: f64,
    /// How long it has been ready.
    pub ready_for: Duration,
}

impl EndpointLoad {
    /// The load of an endpoint with this many watches or flows; `None` if it does not take part.
    pub fn of(endpoint: &Endpoint, watches: usize, now: Instant) -> Option<Self> {
        let ready_for = endpoint.ready_for(now).filter(|&since| since >= SETTLED)?;
        Some(Self { watches, share: endpoint.slow_start_share(now), ready_for })
    }
}

/// The moves that are due, with indices into the argument of [`decide`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RebalanceMove {
    /// The endpoint with too many.
    pub from: usize,
    /// The endpoint with too few.
    pub to: usize,
    /// How many.
    pub count: usize,
}

/// How many watches each endpoint should have: its part, rounded so that over all nodes no endpoint
/// is favoured (systematic sampling). `lot` is in 0..1 and constant on a node.
fn parts(loads: &[EndpointLoad], lot: f64) -> impl Iterator<Item = f64> {
    let total: usize = loads.iter().map(|load| load.watches).sum();
    let shares: f64 = loads.iter().map(|load| load.share).sum();
    let mut sum = 0.0;
    let mut before = lot.floor();
    loads.iter().map(move |load| {
        sum += load.share;
        let upto = (total as f64 * sum / shares + lot + 1e-9).floor();
        upto - std::mem::replace(&mut before, upto)
    })
}

/// The moves that are due now. `lot` is constant on a node; `elapsed` is the time since the last
/// round.
pub fn decide(
    loads: &[EndpointLoad],
    lot: f64,
    elapsed: Duration,
    rng: &mut fastrand::Rng,
) -> Option<RebalanceMove> {
    let latest = loads.iter().map(|load| load.ready_for).min()?;
    let mean = loads.iter().map(|load| load.watches as f64).sum::<f64>() / loads.len() as f64;
    let most = if latest < EVEN_OUT { 0.0 } else { mean * TOLERANCE + 1.0 };
    let mut excess = 0.0;
    let mut from: Option<(usize, f64)> = None;
    let mut to: Option<(usize, f64)> = None;
    for (index, (load, part)) in loads.iter().zip(parts(loads, lot)).enumerate() {
        let over = load.watches as f64 - part;
        // An endpoint in slow start keeps what it has above its share: it is owed that soon.
        if over > 0.0 && load.watches > 1 && load.share >= 1.0 && load.watches as f64 > most {
            excess += over;
            if from.is_none_or(|(_, known)| over > known) {
                from = Some((index, over));
            }
        }
        if -over > to.map_or(0.0, |(_, known)| known) {
            to = Some((index, -over));
        }
    }
    let ((from, over), (to, under)) = (from?, to?);
    let wanted = excess * RATE * elapsed.as_secs_f64();
    let count = (wanted + rng.f64()).floor().min(over).min(under);
    (count >= 1.0).then_some(RebalanceMove { from, to, count: count as usize })
}

/// The times of the rounds, and the random numbers of a node.
#[derive(Debug)]
pub struct RebalanceSchedule {
    lot: f64,
    rng: fastrand::Rng,
    last: Instant,
    next: Instant,
}

impl RebalanceSchedule {
    /// A schedule that begins now.
    pub fn new(now: Instant) -> Self {
        let mut rng = fastrand::Rng::new();
        Self { lot: rng.f64(), rng, last: now, next: now + ROUND }
    }

    /// The time since the last round, at most two rounds, if a round is due.
    pub fn is_due(&mut self, now: Instant) -> Option<Duration> {
        if now < self.next {
            return None;
        }
        let elapsed = now.saturating_duration_since(self.last).min(ROUND * 2);
        self.last = now;
        self.rest(1, now);
        Some(elapsed)
    }

    /// Schedules the next round this many rounds from now.
    fn rest(&mut self, rounds: u32, now: Instant) {
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
    /// The connection that was offered moves in the last round: moves that are left show that no watch
    /// there can move.
    offered: Option<Rc<Connection>>,
    pause: u32,
    logged_at: Option<Instant>,
}

impl Rebalancer {
    /// A rebalancer that begins now.
    pub fn new(now: Instant) -> Self {
        let mut schedule = RebalanceSchedule::new(now);
        let self_check_at = now + SELF_CHECK_PAUSE.mul_f64(schedule.rng.f64());
        Self { schedule, self_check_at, offered: None, pause: 1, logged_at: None }
    }

    /// Offers moves if a round is due, and requests self-checks once a minute. Cheap between rounds.
    pub fn tick(&mut self, connections: &[Rc<Connection>], enabled: bool, now: Instant) {
        let Some(elapsed) = self.schedule.is_due(now) else { return };
        if now >= self.self_check_at {
            self.self_check_at =
                now + SELF_CHECK_PAUSE.mul_f64(0.9 + self.schedule.rng.f64() / 5.0);
            for connection in connections {
                connection.request_self_check();
            }
        }
        if let Some(offered) = self.offered.take() {
            self.pause = if offered.moves.withdraw() { (self.pause * 2).min(MAX_PAUSE) } else { 1 };
        }
        self.schedule.rest(self.pause, now);
        if enabled {
            self.round(connections, elapsed, now);
        }
    }

    fn round(&mut self, connections: &[Rc<Connection>], elapsed: Duration, now: Instant) {
        let live =
            || connections.iter().filter(|connection| connection.state() == ConnectionState::Live);
        let mut endpoints: Vec<(&Arc<Endpoint>, EndpointLoad)> = Vec::new();
        for connection in live() {
            let endpoint = &connection.endpoint;
            if let Some((_, load)) = endpoints.iter_mut().find(|(e, _)| Arc::ptr_eq(e, endpoint)) {
                load.watches += connection.watches();
            } else if let Some(load) = EndpointLoad::of(endpoint, connection.watches(), now) {
                endpoints.push((endpoint, load));
            }
        }
        if endpoints.len() < 2 {
            return;
        }
        // The same random number must mean the same server, whichever connection was opened first.
        endpoints.sort_by(|(a, _), (b, _)| a.label.cmp(&b.label));
        let loads: Vec<_> = endpoints.iter().map(|(_, load)| *load).collect();
        let Some(RebalanceMove { from, to, count }) = self.schedule.decide(&loads, elapsed) else {
            return;
        };
        let (source, target) = (endpoints[from].0, endpoints[to].0);
        // One of its connections, at random by watches.
        let mut chosen = self.schedule.rng.usize(..loads[from].watches);
        let Some(connection) = live().filter(|c| Arc::ptr_eq(&c.endpoint, source)).find(|c| {
            let here = chosen < c.watches();
            chosen = chosen.saturating_sub(c.watches());
            here
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
                class = connection.class.as_str(),
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
    fn parts_add_up_and_favour_no_endpoint() {
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
                let parts: Vec<f64> = parts(&loads, f64::from(node) / 1000.0).collect();
                assert!((parts.iter().sum::<f64>() - total as f64).abs() < 1e-9, "{parts:?}");
                assert!(parts.iter().all(|&part| part >= 0.0), "{parts:?}");
                sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
            }
            for (sum, load) in sums.iter().zip(&loads) {
                let fair = total as f64 * load.share / shares;
                assert!((sum / 1000.0 - fair).abs() < 0.02, "{sum} of {fair}");
            }
        }
    }

    #[test]
    fn decide_moves_from_the_fullest_to_the_emptiest() {
        let mut rng = fastrand::Rng::with_seed(1);
        let loads = loads(&[500, 400, 0], Duration::from_secs(60));
        let found = decide(&loads, 0.5, ROUND, &mut rng).unwrap();
        assert_eq!((found.from, found.to), (0, 2));
        assert!((6..=7).contains(&found.count), "2 % of 300: {}", found.count);
    }

    #[test]
    fn decide_within_tolerance_moves_nothing() {
        let mut rng = fastrand::Rng::with_seed(1);
        for (watches, ready_for) in [
            (&[][..], HOUR),
            (&[900], HOUR),
            (&[0, 0, 0], HOUR),
            (&[7, 7, 7], Duration::from_secs(60)),
            // Within the tolerance of quiet times.
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
    fn decide_moves_no_lone_watch() {
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
        let found = (0..1000).find_map(|_| decide(&two, 0.3, ROUND, &mut rng));
        assert_eq!(found, Some(RebalanceMove { from: 0, to: 1, count: 1 }));
    }

    #[test]
    fn decide_in_slow_start_gives_an_endpoint_its_share_and_takes_nothing() {
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
