//! Simulates 5,000 nodes and three apiservers. Each node decides independently; together they must not overload the
//! control plane.
//!
//! The simulation calls the pure functions of pool and watch: pick, slow start, rebalance, evacuation, backoff, and the
//! jitter of resumed watches. The simulated network has no delay and no loss.

use jackstay::upstream::endpoint::{EndpointReadiness, EndpointState, backoff};
use jackstay::upstream::evacuation::{START_JITTER, decide as decide_evacuation, due_moves};
use jackstay::upstream::rebalance::{EndpointLoad, RebalanceMove, decide};
use jackstay::upstream::watch_moves::MoveEligibility;
use jackstay_core::balance::{cost, pick, pick_by_share, slow_start};
use jackstay_core::watch::ResumeRound;
use std::time::Duration;

const NODES: usize = 5_000;
/// Watches of one kubelet: nodes, pods, services, classes, and a few for secrets and config maps.
const WATCHES: usize = 8;
const SERVERS: usize = 3;
/// Latency of an idle apiserver, in seconds.
const LATENCY: f64 = 0.001;

#[derive(Clone, Debug)]
struct Node {
    /// Watches on each server.
    watches: [usize; SERVERS],
    /// Random number of this node in 0..1, with which it rebalances.
    lot: f64,
}

struct Fleet {
    nodes: Vec<Node>,
    rng: fastrand::Rng,
}

impl Fleet {
    /// Nodes whose watches have each picked a server.
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let nodes = (0..NODES).map(|_| Node { watches: [0; SERVERS], lot: rng.f64() }).collect();
        let mut fleet = Self { nodes, rng };
        for index in 0..NODES {
            for _ in 0..WATCHES {
                let target = fleet.pick(index, None, [1.0; SERVERS]);
                fleet.nodes[index].watches[target] += 1;
            }
        }
        fleet
    }

    /// The server that a node picks, without the `dead` one. `shares` are the slow-start shares of the servers.
    fn pick(&mut self, node: usize, dead: Option<usize>, shares: [f64; SERVERS]) -> usize {
        let watches = self.nodes[node].watches;
        let candidates = (0..SERVERS).filter(|&server| Some(server) != dead);
        let cost = |&server: &usize| cost(watches[server], LATENCY);
        pick_by_share(candidates, &mut self.rng, cost, |&server| shares[server]).unwrap()
    }

    /// Moves the watches of a lost server. Returns the delay and the new server of each watch.
    fn lose(&mut self, dead: usize) -> Vec<(Duration, usize)> {
        let start = std::time::Instant::now();
        let mut moves = Vec::new();
        for node in 0..NODES {
            for _ in 0..std::mem::take(&mut self.nodes[node].watches[dead]) {
                let max_jitter = ResumeRound::begin(start, 0, true).start_attempt(start).unwrap();
                let delay = max_jitter.mul_f64(self.rng.f64());
                let target = self.pick(node, Some(dead), [1.0; SERVERS]);
                self.nodes[node].watches[target] += 1;
                moves.push((delay, target));
            }
        }
        moves
    }

    /// The watches on each server.
    fn totals(&self) -> [usize; SERVERS] {
        std::array::from_fn(|server| self.nodes.iter().map(|node| node.watches[server]).sum())
    }
}

/// The largest relative deviation from the mean.
fn spread(totals: [usize; SERVERS]) -> f64 {
    let mean = totals.iter().sum::<usize>() as f64 / SERVERS as f64;
    totals.iter().map(|&total| (total as f64 / mean - 1.0).abs()).fold(0.0, f64::max)
}

#[test]
fn lost_server_watches_spread_evenly_over_servers_and_time() {
    for seed in 0..3 {
        let mut fleet = Fleet::new(seed);
        let before = fleet.totals();
        assert!(spread(before) < 0.02, "{before:?}");
        let moves = fleet.lose(0);
        assert_eq!(moves.len(), before[0]);
        let mut to = [0_usize; SERVERS];
        // Moves in each 200 ms.
        let mut bins = [0_usize; 5];
        for (delay, target) in &moves {
            assert!(*delay <= Duration::from_secs(1));
            to[*target] += 1;
            bins[(delay.as_millis() as usize / 200).min(4)] += 1;
        }
        for &count in &to[1..] {
            let part = count as f64 / moves.len() as f64;
            assert!(part <= 0.6, "{to:?}");
        }
        // The jitter spreads the requests evenly over its range.
        assert!(bins.iter().all(|&bin| bin * 4 < moves.len()), "{bins:?}");
        println!("{} watches move to {to:?}, per 200 ms {bins:?}", moves.len());
    }
}

#[test]
fn rebalance_after_a_return_is_gradual_and_ends() {
    let mut fleet = Fleet::new(7);
    fleet.lose(0);
    let mut worst_second = 0;
    let mut even_after = None;
    // /readyz is probed every second and must succeed twice.
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
            let loads: [EndpointLoad; SERVERS] = std::array::from_fn(|server| EndpointLoad {
                watches: node.watches[server],
                share: if server == 0 { slow_start(since) } else { 1.0 },
                ready_for: if server == 0 { since } else { Duration::from_secs(86_400) },
            });
            let elapsed = Duration::from_secs(1);
            if let Some(RebalanceMove { from, to, count }) =
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
    assert_eq!(end.iter().sum::<usize>(), NODES * WATCHES, "no watch is lost");
    assert!(spread(end) <= 0.1, "{end:?}");
    // The moves of 5,000 nodes to a returned server are spread over time.
    assert!(worst_second < NODES * WATCHES / 100, "{worst_second} moves in one second");
    // A balanced node moves no watch.
    let churn: usize = (0..NODES)
        .filter(|&index| {
            let loads = fleet.nodes[index].watches.map(|watches| EndpointLoad {
                watches,
                share: 1.0,
                ready_for: Duration::from_secs(3600),
            });
            let lot = fleet.nodes[index].lot;
            decide(&loads, lot, Duration::from_secs(1), &mut fleet.rng).is_some()
        })
        .count();
    assert_eq!(churn, 0, "nodes that move watches after balancing");
}

/// The readiness probes of one node to a server that loses etcd. Times are in seconds. While probes fail, the node
/// repeats them every second.
struct ProbedServer {
    /// When the server loses etcd; `f64::MAX` for never.
    lost: f64,
    /// When the first probe after the loss begins.
    probe: f64,
}

impl ProbedServer {
    /// The readiness at `now`. `proof` is the time of a successful probe before the loss. With a probe timeout of one
    /// second, the probe counts as failing after half of it, and the second failure makes the server degraded.
    fn readiness(
        &self,
        zero: std::time::Instant,
        proof: Option<f64>,
        now: f64,
    ) -> EndpointReadiness {
        let at = |seconds| zero + Duration::from_secs_f64(seconds);
        let failing = self.probe.max(self.lost);
        let proof = proof.filter(|&proof| proof <= now && proof < self.lost);
        EndpointReadiness {
            state: if now >= failing + 2.2 {
                EndpointState::Degraded
            } else {
                EndpointState::Ready
            },
            probe_failing_since: (now >= failing + 0.5).then(|| at(failing + 0.5)),
            last_ready_probe: proof.map(at),
        }
    }
}

/// Calls `each` with the time and the target of each watch that one node moves when the servers lose etcd at the times
/// `lost`. On each server, three of the node's watches have delivered events and are silent now.
fn evacuate(
    fleet: &mut Fleet,
    node: usize,
    lost: [f64; SERVERS],
    first_probe: f64,
    mut each: impl FnMut(f64, usize),
) {
    const TICK: f64 = 0.2;
    let zero = std::time::Instant::now();
    let servers: [ProbedServer; SERVERS] = std::array::from_fn(|server| ProbedServer {
        lost: lost[server],
        probe: lost[server] + first_probe,
    });
    // The node probes the other servers as soon as the first probe fails. That proves a server ready only before it
    // loses etcd.
    let proof =
        (0..SERVERS).map(|at| servers[at].probe.max(lost[at])).fold(f64::MAX, f64::min) + 0.5;
    let proof = proof + 0.2 * fleet.rng.f64();
    let mut last_move = [None::<f64>; SERVERS];
    let mut silent = [3; SERVERS];
    let mut now = TICK * fleet.rng.f64();
    while now < 20.0 {
        let readiness: [EndpointReadiness; SERVERS] =
            std::array::from_fn(|at| servers[at].readiness(zero, Some(proof), now));
        for (from, eligibility, targets) in decide_evacuation(&readiness).collect::<Vec<_>>() {
            let Some(before) = last_move[from] else {
                last_move[from] = Some(now + START_JITTER.as_secs_f64() * fleet.rng.f64());
                continue;
            };
            if now <= before {
                continue;
            }
            last_move[from] = Some(now);
            let on_server = fleet.nodes[node].watches[from];
            let movable = if eligibility == MoveEligibility::All {
                on_server
            } else {
                silent[from].min(on_server)
            };
            for _ in 0..due_moves(on_server, Duration::from_secs_f64(now - before)).min(movable) {
                let watches = fleet.nodes[node].watches;
                let target = pick(targets.iter().copied(), &mut fleet.rng, |&server| {
                    cost(watches[server], LATENCY)
                })
                .unwrap();
                fleet.nodes[node].watches[from] -= 1;
                fleet.nodes[node].watches[target] += 1;
                silent[from] = silent[from].saturating_sub(1);
                each(now, target);
            }
        }
        now += TICK * (0.75 + fleet.rng.f64() / 2.0);
    }
}

#[test]
fn evacuation_of_a_server_without_etcd_is_spread_over_time() {
    // Probes every 10 s, and as the worst case all probes at the same time.
    for (spread, name) in [(10.0, "probed every 10 s"), (0.0, "all probe at the same time")] {
        let mut fleet = Fleet::new(11);
        let before = fleet.totals();
        let mut moves = Vec::new();
        for node in 0..NODES {
            let first_probe = fleet.rng.f64() * spread;
            let lost = [0.0, f64::MAX, f64::MAX];
            evacuate(&mut fleet, node, lost, first_probe, |at, target| moves.push((at, target)));
        }
        assert_eq!(fleet.totals()[0], 0, "every watch has left");
        assert_eq!(moves.len(), before[0], "no watch moved twice");
        let first = moves.iter().map(|(at, _)| *at).fold(f64::MAX, f64::min);
        for window in [1.0, 20.0] {
            let within = moves.iter().filter(|(at, _)| *at < first + window);
            let to = within.fold([0_usize; SERVERS], |mut to, (_, target)| {
                to[*target] += 1;
                to
            });
            let all: usize = to.iter().sum();
            println!("{name}: {all} watches move to {to:?} within {window} s");
            assert!(to.iter().all(|&count| count as f64 <= 0.6 * all as f64), "{to:?}");
        }
        let mut bins = vec![0_usize; 201];
        for (at, _) in &moves {
            bins[(at * 10.0) as usize] += 1;
        }
        let most = *bins.iter().max().unwrap();
        println!("{name}: at most {most} moves within 100 ms");
        // The loss of an apiserver moves all of them within 1 s.
        assert!(most * 3 < before[0], "{most}");
    }
}

#[test]
fn evacuation_with_etcd_lost_by_all_servers_moves_nothing() {
    for apart in [0.0, 0.1, 0.4] {
        let mut fleet = Fleet::new(12);
        let before = fleet.totals();
        for node in 0..NODES {
            let first_probe = fleet.rng.f64() * 10.0;
            let lost = [0.0, apart, apart / 2.0];
            evacuate(&mut fleet, node, lost, first_probe, |at, target| {
                panic!("a move to {target} at {at}, {apart} s apart");
            });
        }
        assert_eq!(fleet.totals(), before);
    }
}

#[test]
fn slow_start_after_a_return_limits_heartbeats() {
    let mut fleet = Fleet::new(9);
    fleet.lose(0);
    let mut before = 0.0;
    for step in 0..=6_u32 {
        let share = slow_start(Duration::from_secs(u64::from(step) * 5));
        // A heartbeat is a single request, which prefers the server with the fewest streams.
        let taken = (0..NODES).filter(|&node| fleet.pick(node, None, [share, 1.0, 1.0]) == 0);
        let part = taken.count() as f64 / NODES as f64;
        println!("{:>2} s: {:.1} % of all heartbeats", step * 5, part * 100.0);
        assert!(part > before, "{part} after {before}");
        assert!(part <= 0.7 * share + 0.02, "{part} with a share of {share}");
        before = part;
    }
}

/// Calls `each` with the times before `end` at which a node connects to a refusing server. `none_usable`: no
/// endpoint of the upstream is usable.
fn attempts(rng: &mut fastrand::Rng, none_usable: bool, end: f64, mut each: impl FnMut(f64)) {
    let mut now = rng.f64() * 0.05;
    for failures in 1.. {
        if now >= end {
            break;
        }
        each(now);
        now += backoff(failures, none_usable, rng.f64()).as_secs_f64();
    }
}

#[test]
fn backoff_spreads_connects_to_a_dead_server() {
    let mut rng = fastrand::Rng::with_seed(3);
    for (none_usable, steady_limit) in [(false, 0.5), (true, 2.5)] {
        let mut seconds = [0_usize; 60];
        let mut tenths = [0_usize; 600];
        for _ in 0..NODES {
            attempts(&mut rng, none_usable, 60.0, |at| {
                seconds[at as usize] += 1;
                tenths[(at * 10.0) as usize] += 1;
            });
        }
        let steady = &seconds[20..];
        let most = *steady.iter().max().unwrap();
        println!(
            "none usable: {none_usable}; connects a second: {:?} at first, then at most {most}",
            &seconds[..4]
        );
        assert!(seconds[0] <= NODES * 6, "{seconds:?}");
        assert!(most as f64 <= NODES as f64 * steady_limit, "{most} connects a second");
        // Nodes that lost the server at the same time do not retry at the same time.
        let mean = tenths[200..].iter().sum::<usize>() / tenths[200..].len();
        let peak = *tenths[200..].iter().max().unwrap();
        assert!(peak < 2 * mean, "{peak} within 100 ms, {mean} on average");
    }
}
