//! What the apiservers of a fleet bear, second by second.

use crate::invariants::Findings;
use crate::world::World;

/// The result of the run of a fleet.
#[derive(Debug)]
pub struct FleetRun {
    /// What the apiservers bore.
    pub load: Load,
    /// What the clients found.
    pub findings: Findings,
    /// Events of the simulator.
    pub events: u64,
}

/// One second. Each has an element for each apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Second {
    /// Connects (SYNs) that arrived, also those that were refused.
    pub connects: Vec<u64>,
    /// Lists that were answered.
    pub lists: Vec<u64>,
    /// Watches at the end of the second, as the nodes see them.
    pub watches: Vec<u64>,
}

/// The load of the apiservers.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Load {
    /// Every second of the run.
    pub seconds: Vec<Second>,
    counted: [Vec<u64>; 2],
}

impl Load {
    pub(crate) fn sample(&mut self, world: &World) {
        let connects = world.net.connects.clone();
        let lists: Vec<_> = world.servers.iter().map(|server| server.lists).collect();
        let mut watches = vec![0; world.servers.len()];
        for node in &world.nodes {
            node.count_watches(&mut watches);
        }
        let [connects_before, lists_before] = &self.counted;
        self.seconds.push(Second {
            connects: since(&connects, connects_before),
            lists: since(&lists, lists_before),
            watches,
        });
        self.counted = [connects, lists];
    }

    /// The largest number within one second at one apiserver, from a second on.
    pub fn peak(&self, from: usize, of: impl Fn(&Second) -> &Vec<u64>) -> u64 {
        self.seconds[from..].iter().flat_map(|second| of(second).iter().copied()).max().unwrap_or(0)
    }

    /// The largest share of the watches that one apiserver has at the end of a second, in 0..=1.
    pub fn largest_share(&self, second: usize) -> f64 {
        let watches = &self.seconds[second].watches;
        let all: u64 = watches.iter().sum();
        watches.iter().max().map_or(0.0, |&most| most as f64 / all.max(1) as f64)
    }

    /// Seconds after which the watches of all apiservers stay within 10 % of their mean, if they do at the end.
    pub fn even_from(&self) -> Option<usize> {
        let is_uneven = |second: &Second| {
            let mean = second.watches.iter().sum::<u64>() as f64 / second.watches.len() as f64;
            second.watches.iter().any(|&watches| (watches as f64 - mean).abs() > 0.1 * mean)
        };
        let uneven = self.seconds.iter().rposition(is_uneven).map_or(0, |last| last + 1);
        (uneven < self.seconds.len()).then_some(uneven)
    }
}

fn since(now: &[u64], before: &[u64]) -> Vec<u64> {
    now.iter()
        .zip(before.iter().chain(std::iter::repeat(&0)))
        .map(|(now, before)| now - before)
        .collect()
}
