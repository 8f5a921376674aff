//! Five thousand nodes before three apiservers, in simulated time: what every node decides for
//! itself must add up to something that a control plane can bear.
//!
//! Only the pure parts run here (the picker, slow start, the mover, backoff and the jitter of
//! resumed watches); the network is perfect and takes no time.

use jackstay::proxy::watch::resume::Round;
use jackstay::upstream::balance::{cost, handicap, pick, slow_start};
use jackstay::upstream::endpoint::backoff;
use jackstay::upstream::rebalance::{Load, Move, decide};
use std::time::{Duration, Instant};

const NODES: usize = 5_000;
/// A kubelet's: nodes, pods, services, classes, and some for secrets and config maps.
const WATCHES: usize = 8;
const SERVERS: usize = 3;
/// Latency of an apiserver that has nothing to do.
const LATENCY: f64 = 0.001;

#[derive(Clone, Debug)]
struct Node {
    watches: [usize; SERVERS],
    lot: f64,
}

struct Fleet {
    nodes: Vec<Node>,
    rng: fastrand::Rng,
}

impl Fleet {
    /// Nodes that have placed their watches.
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let nodes = (0..NODES).map(|_| Node { watches: [0; SERVERS], lot: rng.f64() }).collect();
        let mut fleet = Self { nodes, rng };
        for index in 0..NODES {
            for _ in 0..WATCHES {
                let there = fleet.pick(index, None, [1.0; SERVERS]);
                fleet.nodes[index].watches[there] += 1;
            }
        }
        fleet
    }

    fn pick(&mut self, node: usize, dead: Option<usize>, shares: [f64; SERVERS]) -> usize {
        let watches = self.nodes[node].watches;
        let lot = self.rng.f64();
        let candidates = (0..SERVERS).filter(|&server| Some(server) != dead);
        pick(candidates, &mut self.rng, |&server| {
            cost(watches[server], LATENCY) * handicap(shares[server], lot)
        })
        .unwrap()
    }

    /// The server is gone; what it carried goes on elsewhere. When each watch asks, and whom.
    fn lose(&mut self, dead: usize) -> Vec<(Duration, usize)> {
        let start = Instant::now();
        let mut moves = Vec::new();
        for node in 0..NODES {
            for _ in 0..std::mem::take(&mut self.nodes[node].watches[dead]) {
                let delay = Round::begin(start, 0).next(start, self.rng.u64(..)).unwrap();
                let there = self.pick(node, Some(dead), [1.0; SERVERS]);
                self.nodes[node].watches[there] += 1;
                moves.push((delay, there));
            }
        }
        moves
    }

    fn totals(&self) -> [usize; SERVERS] {
        std::array::from_fn(|server| self.nodes.iter().map(|node| node.watches[server]).sum())
    }
}

/// How far the load furthest from the mean is from it.
fn spread(totals: [usize; SERVERS]) -> f64 {
    let mean = totals.iter().sum::<usize>() as f64 / SERVERS as f64;
    totals.iter().map(|&total| (total as f64 / mean - 1.0).abs()).fold(0.0, f64::max)
}

#[test]
fn after_the_loss_of_one_the_survivors_share_evenly() {
    for seed in 0..3 {
        let mut fleet = Fleet::new(seed);
        let before = fleet.totals();
        assert!(spread(before) < 0.02, "{before:?}");
        let moves = fleet.lose(0);
        assert_eq!(moves.len(), before[0]);
        let mut to = [0_usize; SERVERS];
        let mut bins = [0_usize; 5];
        for (delay, there) in &moves {
            assert!(*delay < Duration::from_secs(1));
            to[*there] += 1;
            bins[(delay.as_millis() as usize / 10).min(4)] += 1;
        }
        for &count in &to[1..] {
            let part = count as f64 / moves.len() as f64;
            assert!(part <= 0.6, "{to:?}");
        }
        // No thundering herd: the jitter spreads them over its whole width.
        assert!(bins.iter().all(|&bin| bin * 4 < moves.len()), "{bins:?}");
        println!("{} watches move to {to:?}, per 10 ms {bins:?}", moves.len());
    }
}

#[test]
fn after_its_return_loads_even_out_slowly() {
    let mut fleet = Fleet::new(7);
    fleet.lose(0);
    let mut worst_second = 0;
    let mut even_after = None;
    // Its /readyz is asked every second and must be right twice.
    let ready_at: Vec<f64> = (0..NODES).map(|_| 1.0 + fleet.rng.f64()).collect();
    for second in 0..600_u32 {
        let mut moves = 0;
        for (node, ready_at) in fleet.nodes.iter_mut().zip(&ready_at) {
            let Some(since) = Duration::try_from_secs_f64(f64::from(second) - ready_at)
                .ok()
                .filter(|since| since.as_secs() >= 5)
            else {
                continue;
            };
            let loads: [Load; SERVERS] = std::array::from_fn(|server| Load {
                watches: node.watches[server],
                share: if server == 0 { slow_start(since) } else { 1.0 },
                ready_for: if server == 0 { since } else { Duration::from_secs(86_400) },
            });
            let elapsed = Duration::from_secs(1);
            if let Some(Move { from, to, count }) =
                decide(&loads, node.lot, elapsed, &mut fleet.rng)
            {
                node.watches[from] -= count;
                node.watches[to] += count;
                moves += count;
            }
        }
        worst_second = worst_second.max(moves);
        let now = fleet.totals();
        if spread(now) <= 0.1 {
            even_after.get_or_insert(second);
        }
        if second % 60 == 59 {
            println!("{:>2} min: {now:?}, spread {:.1} %", second / 60 + 1, spread(now) * 100.0);
        }
    }
    let end = fleet.totals();
    println!("within 10 % after {even_after:?} s; at most {worst_second} moves a second");
    assert_eq!(end.iter().sum::<usize>(), NODES * WATCHES, "none is lost");
    assert!(spread(end) <= 0.1, "{end:?}");
    // A server that has just come back sees the moves of 5,000 nodes as a trickle.
    assert!(worst_second < NODES * WATCHES / 100, "{worst_second} moves in one second");
    // And there it ends.
    let churn: usize = (0..NODES)
        .filter(|&index| {
            let loads = fleet.nodes[index].watches.map(|watches| Load {
                watches,
                share: 1.0,
                ready_for: Duration::from_secs(3600),
            });
            let lot = fleet.nodes[index].lot;
            decide(&loads, lot, Duration::from_secs(1), &mut fleet.rng).is_some()
        })
        .count();
    assert_eq!(churn, 0, "in quiet times nothing moves");
}

#[test]
fn heartbeats_come_back_gradually() {
    let mut fleet = Fleet::new(9);
    fleet.lose(0);
    let mut before = 0.0;
    for step in 0..=6_u32 {
        let share = slow_start(Duration::from_secs(u64::from(step) * 5));
        // A heartbeat finds the streams of watches and nothing else: the emptiest is preferred.
        let taken = (0..NODES).filter(|&node| fleet.pick(node, None, [share, 1.0, 1.0]) == 0);
        let part = taken.count() as f64 / NODES as f64;
        println!("{:>2} s: {:.1} % of all heartbeats", step * 5, part * 100.0);
        assert!(part > before, "{part} after {before}");
        assert!(part <= 0.7 * share + 0.02, "{part} with a share of {share}");
        before = part;
    }
}

/// When a node tries to reach a server that refuses, until `end`.
fn attempts(rng: &mut fastrand::Rng, alone: bool, end: f64, mut each: impl FnMut(f64)) {
    let mut now = rng.f64() * 0.05;
    for failures in 1.. {
        if now >= end {
            break;
        }
        each(now);
        now += backoff(failures, alone, rng.f64()).as_secs_f64();
    }
}

#[test]
fn a_dead_apiserver_is_not_stormed() {
    let mut rng = fastrand::Rng::with_seed(3);
    for (alone, steady_limit) in [(false, 0.5), (true, 2.5)] {
        let mut seconds = [0_usize; 60];
        let mut tenths = [0_usize; 600];
        for _ in 0..NODES {
            attempts(&mut rng, alone, 60.0, |at| {
                seconds[at as usize] += 1;
                tenths[(at * 10.0) as usize] += 1;
            });
        }
        let steady = &seconds[20..];
        let most = *steady.iter().max().unwrap();
        println!(
            "alone: {alone}; connects a second: {:?} at first, then at most {most}",
            &seconds[..4]
        );
        assert!(seconds[0] <= NODES * 6, "{seconds:?}");
        assert!(most as f64 <= NODES as f64 * steady_limit, "{most} connects a second");
        // Nodes that lost it at the same moment do not come back at the same moment.
        let mean = tenths[200..].iter().sum::<usize>() / tenths[200..].len();
        let peak = *tenths[200..].iter().max().unwrap();
        assert!(peak < 2 * mean, "{peak} within 100 ms, {mean} on average");
    }
}
