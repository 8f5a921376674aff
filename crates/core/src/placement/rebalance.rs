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
//! | Watches leave fallbacks, all of them at that rate, while another endpoint takes part. | They went there only while no other endpoint was usable. |
//! | An endpoint with one watch keeps it. | A move would only change which endpoint has none. |
//! | No watch moves to an apiserver of an older version, and none to a newer one while there is a `canary`. | An old apiserver does not know the fields of a new one, and the canary limits what the newest one gets. |
//! | When 15 minutes have passed since the last endpoint became ready, watches move only from an endpoint that has more than 110 % of the mean plus one. | Clients come and go, and there would be a move for each of them. |

use std::time::{Duration, Instant};

use crate::kubernetes_version::MinorVersion;
use crate::pool::EndpointKey;

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
/// Shortest pause between two log lines about moves.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// The load of an endpoint that takes part.
#[derive(Debug, Clone, Copy)]
pub struct EndpointLoad {
    /// Number of watches or flows.
    pub watches: usize,
    /// Share of the load in slow start ([`crate::balance::slow_start`]), otherwise 1.
    pub share: f64,
    /// How long the endpoint has been ready.
    pub ready_for: Duration,
    /// Whether it is a fallback: it has watches only while no other endpoint takes part.
    pub is_fallback: bool,
}

impl EndpointLoad {
    /// The load of an endpoint with this many watches or flows, which has been ready for so long and is in slow start
    /// or not; `None` if it does not take part.
    pub fn new(
        watches: usize,
        share: f64,
        ready_for: Option<Duration>,
        is_fallback: bool,
    ) -> Option<Self> {
        let ready_for = ready_for.filter(|&since| since >= READY_FOR)?;
        Some(Self { watches, share, ready_for, is_fallback })
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
/// all nodes (systematic sampling). `random_start` is a random number in 0..1 that is constant on a node.
fn fair_watches(loads: &[EndpointLoad], random_start: f64) -> impl Iterator<Item = f64> {
    let total: usize = loads.iter().map(|load| load.watches).sum();
    let shares: f64 = loads.iter().map(|load| load.share).sum();
    let mut share_sum = 0.0;
    let mut assigned = random_start.floor();
    loads.iter().map(move |load| {
        share_sum += load.share;
        let upper = (total as f64 * share_sum / shares + random_start + 1e-9).floor();
        upper - std::mem::replace(&mut assigned, upper)
    })
}

/// Decides by the table of this module which moves are due. `random_start` is a random number in 0..1 that is
/// constant on a node, and `elapsed` is the time since the last round.
pub fn decide(
    loads: &[EndpointLoad],
    random_start: f64,
    elapsed: Duration,
    rng: &mut fastrand::Rng,
) -> Option<RebalanceMove> {
    let latest_ready_for = loads.iter().map(|load| load.ready_for).min()?;
    let mean = loads.iter().map(|load| load.watches as f64).sum::<f64>() / loads.len() as f64;
    let tolerated = if latest_ready_for < EVEN_OUT { 0.0 } else { mean * TOLERANCE + 1.0 };
    let has_preferred = loads.iter().any(|load| !load.is_fallback);
    let is_left = |load: &EndpointLoad| has_preferred && load.is_fallback;
    let wanted = |load: &EndpointLoad| EndpointLoad {
        share: if is_left(load) { 0.0 } else { load.share },
        ..*load
    };
    let wanted: Vec<EndpointLoad> = loads.iter().map(wanted).collect();
    let mut total_surplus = 0.0;
    let mut from = (0, 0.0);
    let mut to = (0, 0.0);
    let fair = fair_watches(&wanted, random_start);
    for (index, (load, fair)) in loads.iter().zip(fair).enumerate() {
        let surplus = load.watches as f64 - fair;
        // An endpoint in slow start keeps its surplus, because its share grows.
        let gives = load.watches > 1 && load.share >= 1.0 && load.watches as f64 > tolerated;
        if (gives || is_left(load)) && surplus > 0.0 {
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
    random_start: f64,
    rng: fastrand::Rng,
    last: Instant,
    next: Instant,
    /// The number of rounds for which the current pause stands.
    rounds: u32,
}

impl RebalanceSchedule {
    /// A schedule that begins at `now`.
    pub fn new(now: Instant, mut rng: fastrand::Rng) -> Self {
        Self { random_start: rng.f64(), rng, last: now, next: now + ROUND, rounds: 1 }
    }

    /// If a round is due, returns the time since the previous one, at most twice the mean pause, and schedules the next
    /// one. A longer pause offers as many moves as the rounds for which it stands: a node with few watches would
    /// otherwise move one of them in many minutes.
    pub fn begin_round(&mut self, now: Instant) -> Option<Duration> {
        if now < self.next {
            return None;
        }
        let elapsed = now.saturating_duration_since(self.last).min(ROUND * 2 * self.rounds);
        self.last = now;
        self.schedule_next(1, now);
        Some(elapsed)
    }

    /// Schedules the next round after a pause of this number of rounds.
    fn schedule_next(&mut self, rounds: u32, now: Instant) {
        self.rounds = rounds;
        self.next = now + ROUND.mul_f64(0.5 + self.rng.f64()) * rounds;
    }

    /// [`decide`] with the random numbers of the node.
    pub fn decide(&mut self, loads: &[EndpointLoad], elapsed: Duration) -> Option<RebalanceMove> {
        decide(loads, self.random_start, elapsed, &mut self.rng)
    }
}

/// A live connection of a class.
#[derive(Debug, Clone, Copy)]
pub struct WatchRow<'a> {
    /// Its endpoint.
    pub endpoint: EndpointKey,
    /// The name of its endpoint, which orders endpoints independently of the connections.
    pub label: &'a str,
    /// Number of its watches.
    pub watches: usize,
    /// Share of the load in slow start, otherwise 1.
    pub share: f64,
    /// How long its endpoint has been ready; `None` while it is not.
    pub ready_for: Option<Duration>,
    /// Whether its endpoint is a fallback.
    pub is_fallback: bool,
    /// The version of its endpoint, if it is known.
    pub version: Option<MinorVersion>,
}

impl WatchRow<'_> {
    /// The load of the connection alone; `None` if its endpoint does not take part.
    fn load(&self) -> Option<EndpointLoad> {
        EndpointLoad::new(self.watches, self.share, self.ready_for, self.is_fallback)
    }
}

/// Moves to offer. Connections are indices into the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MoveOffer {
    /// The connection whose watches may move.
    pub connection: usize,
    /// A connection to the endpoint to which they may move.
    pub target: usize,
    /// Number of watches that may move.
    pub count: usize,
    /// Watches of the endpoint from which they move.
    pub source_watches: usize,
    /// Watches of the endpoint to which they move.
    pub target_watches: usize,
    /// Whether a line is logged: at most one in a minute.
    pub is_logged: bool,
}

/// Decides when which watches of one class of a pool move.
#[derive(Debug)]
pub struct Rebalancer {
    schedule: RebalanceSchedule,
    pause_rounds: u32,
    logged_at: Option<Instant>,
}

impl Rebalancer {
    /// A rebalancer that begins at `now`.
    pub fn new(now: Instant, rng: fastrand::Rng) -> Self {
        Self { schedule: RebalanceSchedule::new(now, rng), pause_rounds: 1, logged_at: None }
    }

    /// Begins a round if one is due, and returns the time since the previous one. [`Self::offer_ended`] follows if moves
    /// were offered in the last one, and then [`Self::plan`].
    pub fn begin_round(&mut self, now: Instant) -> Option<Duration> {
        self.schedule.begin_round(now)
    }

    /// The offer of the last round is withdrawn. If moves were left, no watch there can move, and the pause between
    /// rounds grows.
    pub fn offer_ended(&mut self, moves_left: bool) {
        self.pause_rounds =
            if moves_left { (self.pause_rounds * 2).min(MAX_PAUSE_ROUNDS) } else { 1 };
    }

    /// Decides which moves to offer in a round that begins after `elapsed`, and schedules the next one. `rows` are the live connections, or none
    /// if watches are not rebalanced.
    pub fn plan(
        &mut self,
        elapsed: Duration,
        rows: &[WatchRow<'_>],
        has_canary: bool,
        now: Instant,
    ) -> Option<MoveOffer> {
        self.schedule.schedule_next(self.pause_rounds, now);
        // The first connection to each endpoint, with the load of the endpoint.
        let mut endpoints: Vec<(usize, EndpointLoad)> = Vec::new();
        for (index, row) in rows.iter().enumerate() {
            let is_same = |(first, _): &&mut (usize, _)| rows[*first].endpoint == row.endpoint;
            if let Some((_, load)) = endpoints.iter_mut().find(is_same) {
                load.watches += row.watches;
            } else if let Some(load) = row.load() {
                endpoints.push((index, load));
            }
        }
        if endpoints.len() < 2 {
            return None;
        }
        // The order must not depend on the connections, because `random_start` selects endpoints by it.
        endpoints.sort_by_key(|(first, _)| rows[*first].label);
        let loads: Vec<_> = endpoints.iter().map(|(_, load)| *load).collect();
        let RebalanceMove { from, to, count } = self.schedule.decide(&loads, elapsed)?;
        let (source, target) = (&rows[endpoints[from].0], endpoints[to].0);
        if !may_rebalance(source.version, rows[target].version, has_canary) {
            return None;
        }
        // A random watch of the source selects the connection.
        let mut chosen = self.schedule.rng.usize(..loads[from].watches);
        let connection = (0..rows.len()).find(|&index| {
            let row = &rows[index];
            let is_here = row.endpoint == source.endpoint && chosen < row.watches;
            if row.endpoint == source.endpoint {
                chosen = chosen.saturating_sub(row.watches);
            }
            is_here
        })?;
        let is_logged = self.logged_at.is_none_or(|logged| now >= logged + LOG_PAUSE);
        if is_logged {
            self.logged_at = Some(now);
        }
        Some(MoveOffer {
            connection,
            target,
            count,
            source_watches: loads[from].watches,
            target_watches: loads[to].watches,
            is_logged,
        })
    }
}

/// Whether watches may move from an endpoint to another to balance load: never to an older version, and while there is a
/// canary share not to a newer one.
fn may_rebalance(from: Option<MinorVersion>, to: Option<MinorVersion>, has_canary: bool) -> bool {
    match (from, to) {
        (Some(from), Some(to)) => from == to || (from < to && !has_canary),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn loads(watches: &[usize], ready_for: Duration) -> Vec<EndpointLoad> {
        watches
            .iter()
            .map(|&watches| EndpointLoad { watches, share: 1.0, ready_for, is_fallback: false })
            .collect()
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
    fn decide_moves_every_watch_from_fallbacks_while_another_endpoint_takes_part() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut loads = loads(&[0, 30, 30], HOUR);
        loads[1].is_fallback = true;
        loads[2].is_fallback = true;
        for _ in 0..1_000 {
            let Some(moves) = decide(&loads, 0.5, ROUND, &mut rng) else { continue };
            assert_eq!(moves.to, 0);
            loads[moves.from].watches -= moves.count;
            loads[moves.to].watches += moves.count;
        }
        let watches = |loads: &[EndpointLoad]| [0, 1, 2].map(|index: usize| loads[index].watches);
        assert_eq!(watches(&loads), [60, 0, 0]);
        // Without another endpoint, fallbacks share the load as any endpoints do.
        let mut alone = vec![loads[1], EndpointLoad { watches: 100, ..loads[2] }];
        for load in &mut alone {
            load.ready_for = READY_FOR;
        }
        assert_eq!(decide(&alone, 0.5, ROUND, &mut rng).unwrap().to, 0);
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
            for random_start in 0..100 {
                let moves = (0..100).find_map(|_| {
                    decide(&loads, f64::from(random_start) / 100.0, ROUND * 2, &mut rng)
                });
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

    #[test]
    fn watches_are_not_rebalanced_to_older_versions_nor_past_a_canary() {
        let known = |minor| MinorVersion::new(1, minor);
        for (from, to, has_canary, expected) in [
            (known(36), known(36), true, true),
            (known(36), known(37), false, true),
            (known(36), known(37), true, false),
            (known(37), known(36), false, false),
            (known(37), known(36), true, false),
            (None, known(36), true, true),
            (known(37), None, true, true),
        ] {
            assert_eq!(
                may_rebalance(from, to, has_canary),
                expected,
                "{from:?} {to:?} {has_canary}"
            );
        }
    }

    fn row(endpoint: usize, label: &str, watches: usize) -> WatchRow<'_> {
        WatchRow {
            endpoint: EndpointKey(endpoint),
            label,
            watches,
            share: 1.0,
            ready_for: Some(Duration::from_secs(60)),
            is_fallback: false,
            version: None,
        }
    }

    /// The first offer within a number of rounds, with the time of each round.
    fn first_offer(rows: &[WatchRow<'_>], rounds: u32) -> Option<MoveOffer> {
        let start = Instant::now();
        let mut rebalancer = Rebalancer::new(start, fastrand::Rng::with_seed(3));
        (1..=rounds).find_map(|number| {
            let now = start + ROUND * 2 * number;
            let round = rebalancer.begin_round(now)?;
            rebalancer.plan(round, rows, false, now)
        })
    }

    #[test]
    fn plan_offers_moves_on_a_connection_of_the_endpoint_with_too_many_watches() {
        let rows = [row(1, "b", 0), row(0, "a", 0), row(0, "a", 500), row(1, "b", 100)];
        let offer = first_offer(&rows, 1).unwrap();
        assert_eq!((offer.connection, offer.target), (2, 0));
        assert_eq!((offer.source_watches, offer.target_watches), (500, 100));
        assert!(offer.count >= 1 && offer.is_logged, "{offer:?}");
        // An endpoint that is not ready takes no part, and one alone has nowhere to move watches.
        let unready = WatchRow { ready_for: None, ..row(1, "b", 0) };
        assert_eq!(first_offer(&[row(0, "a", 500), unready], 50), None);
        assert_eq!(first_offer(&[], 50), None);
    }

    /// A restarted apiserver has no history at first, so it refuses watches whose last event is from before.
    #[test]
    fn few_watches_that_a_target_refuses_at_first_move_soon_after_it_takes_them() {
        for seed in 0..50 {
            let start = Instant::now();
            let mut rebalancer = Rebalancer::new(start, fastrand::Rng::with_seed(seed));
            let (mut here, mut elsewhere, mut offered) = (0, 5, None);
            let mut now = start;
            while elsewhere > 0 && now < start + HOUR {
                now += Duration::from_millis(100);
                let Some(elapsed) = rebalancer.begin_round(now) else { continue };
                if let Some(count) = offered.take() {
                    let is_taken = now > start + Duration::from_secs(120);
                    if is_taken {
                        (here, elsewhere) = (here + count, elsewhere - count);
                    }
                    rebalancer.offer_ended(!is_taken);
                }
                let fallback = WatchRow { is_fallback: true, ..row(1, "b", elsewhere) };
                let rows = [row(0, "a", here), fallback];
                offered = rebalancer.plan(elapsed, &rows, false, now).map(|offer| offer.count);
            }
            let took = now - start;
            assert!(took < Duration::from_secs(420), "seed {seed}: {took:?}");
        }
    }

    #[test]
    fn pause_grows_while_offered_moves_are_left_and_is_reset_when_one_is_taken() {
        let start = Instant::now();
        let mut rebalancer = Rebalancer::new(start, fastrand::Rng::with_seed(3));
        let mut now = start;
        let mut pause_after = |moves_left: bool| {
            let begun = now;
            let round = loop {
                now += Duration::from_millis(10);
                if let Some(round) = rebalancer.begin_round(now) {
                    break round;
                }
            };
            rebalancer.offer_ended(moves_left);
            rebalancer.plan(round, &[], false, now);
            now - begun
        };
        pause_after(true);
        let pauses: Vec<_> = (1..10).map(|_| pause_after(true)).collect();
        for (rounds, pause) in [2, 4, 8, 16, 32, 64, 64, 64, 64].into_iter().zip(pauses) {
            let (least, most) = (ROUND.mul_f64(0.5) * rounds, ROUND.mul_f64(1.5) * rounds);
            assert!(
                pause >= least && pause <= most + Duration::from_millis(10),
                "{rounds}: {pause:?}"
            );
        }
        pause_after(false);
        assert!(pause_after(false) <= ROUND.mul_f64(1.5) + Duration::from_millis(10));
    }
}
