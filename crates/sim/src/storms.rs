//! Storms: fleets whose nodes decide independently, and what they do together to three apiservers. Bounds are those of
//! a node, so that they hold for a fleet of any size.

use std::io;
use std::time::Duration;

use crate::faults::FaultKind;
use crate::fleet::Load;
use crate::scenario::{Role, Sim};
use crate::shell::{self, FleetRun, ShellRun};

const SECOND: Duration = Duration::from_secs(1);

/// Nodes of a fleet whose longest storm takes a minute of one processor, and that of the plots.
pub const NODES: usize = 60;
/// Watches of a node: those of one kubelet.
pub const WATCHES: usize = 8;
/// When the first fault begins, in seconds: the fleet has started before.
pub const START: usize = 20;

/// A storm.
#[derive(Debug, Clone, Copy)]
pub struct Storm {
    /// The name.
    pub name: &'static str,
    /// What happens.
    pub about: &'static str,
    /// The time of the run.
    pub seconds: usize,
    /// When the last fault ends, in seconds; [`START`] if it does not end.
    pub ends: usize,
    faults: fn(Sim) -> Sim,
    /// What is asserted.
    pub bounds: Bounds,
}

/// Upper bounds.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Connects in a second at one apiserver, for each node.
    pub connects: f64,
    /// Lists in a second at one apiserver, for each node.
    pub lists: f64,
    /// Watches that begin in a second at one apiserver, for each node, those of shadows included.
    pub watches: f64,
    /// The share of the watches that one apiserver has at the end, in 0..=1. Small fleets may have more
    /// ([`tolerance`]).
    pub share: f64,
    /// Seconds from the end of the faults until the watches of all apiservers are within [`tolerance`] of their mean;
    /// `None` if an apiserver is missing at the end.
    pub even_after: Option<usize>,
    /// Seconds from the fault until the apiserver has no watch; `None` if it keeps or regains some.
    pub left_after: Option<usize>,
    /// Time between two renewals of a node's lease.
    pub lease: Duration,
}

/// What a storm has shown.
#[derive(Debug)]
pub struct StormRun {
    /// What the apiservers bore.
    pub load: Load,
    /// What every run shows.
    pub run: ShellRun,
    /// The bounds that are exceeded.
    pub broken: Vec<String>,
    /// The figures that have bounds.
    pub summary: String,
}

/// Every storm.
pub const ALL: &[Storm] = &[
    Storm {
        name: "crash",
        about: "SIGKILL of one of three apiservers",
        seconds: 60,
        ends: START,
        faults: |sim| sim.fault(0, FaultKind::Kill).at(SECOND * START as u32),
        bounds: Bounds {
            connects: 6.0,
            lists: 0.0,
            watches: 2.0,
            share: 0.55,
            even_after: None,
            left_after: Some(1),
            lease: Duration::from_secs(13),
        },
    },
    Storm {
        name: "partition",
        about: "all packets of one of three apiservers are dropped",
        seconds: 50,
        ends: START,
        faults: |sim| sim.blackhole(0).at(SECOND * START as u32),
        bounds: Bounds {
            connects: 1.0,
            lists: 0.0,
            watches: 2.0,
            share: 0.55,
            even_after: None,
            left_after: Some(5),
            lease: Duration::from_secs(15),
        },
    },
    Storm {
        name: "blip",
        about: "all packets of one of three apiservers are dropped for 300 ms, again and again",
        seconds: 60,
        ends: START + 21,
        faults: |mut sim| {
            for at in (0..=20).step_by(2) {
                let at = SECOND * (START as u32 + at);
                sim = sim.blackhole(0).at(at).until(at + SECOND * 3 / 10);
            }
            sim
        },
        bounds: Bounds {
            connects: 1.0,
            lists: 0.0,
            watches: 1.0,
            share: 0.55,
            even_after: None,
            left_after: None,
            lease: Duration::from_secs(13),
        },
    },
    Storm {
        name: "etcd-lost",
        about: "requests to one of three apiservers hang and its /readyz fails, as without etcd",
        seconds: 60,
        ends: START,
        faults: |sim| sim.fault(0, FaultKind::Hang).at(SECOND * START as u32),
        bounds: Bounds {
            connects: 1.0,
            lists: 0.0,
            watches: 1.0,
            share: 0.55,
            even_after: None,
            // A probe is due after at most 12 s and fails after 1 s, as the next one, which follows within 1.2 s.
            left_after: Some(16),
            lease: Duration::from_secs(22),
        },
    },
    Storm {
        name: "rolling-restart",
        about: "each of three apiservers shuts down and starts again 5 s later, one after the other",
        seconds: 360,
        ends: START + 65,
        faults: |mut sim| {
            for (server, at) in (0..3).zip([0, 30, 60]) {
                let at = SECOND * (START as u32 + at);
                sim = sim.fault(server, FaultKind::ShutDown).at(at).until(at + 5 * SECOND);
            }
            sim
        },
        bounds: Bounds {
            connects: 6.0,
            // A watch whose last bookmark is older than the start of every apiserver gets 410; a node has about three
            // on one.
            lists: 3.0,
            watches: 8.0,
            share: 0.37,
            even_after: Some(240),
            left_after: None,
            lease: Duration::from_secs(13),
        },
    },
    Storm {
        name: "return",
        about: "one of three apiservers returns after all its packets were dropped for ten minutes",
        seconds: START + 600 + 240,
        ends: START + 600,
        faults: |sim| {
            let at = SECOND * START as u32;
            sim.blackhole(0).at(at).until(at + 600 * SECOND)
        },
        bounds: Bounds {
            connects: 2.0,
            lists: 0.0,
            watches: 2.0,
            share: 0.37,
            even_after: Some(180),
            left_after: None,
            lease: Duration::from_secs(25),
        },
    },
];

impl Storm {
    /// Runs a seed with this number of nodes and compares it with the bounds. A process makes one run.
    ///
    /// # Errors
    /// A process of the run cannot be started.
    pub fn run(&self, seed: u64, nodes: usize) -> io::Result<StormRun> {
        let sim = Sim::seed(seed).nodes(nodes);
        let sim = sim.clients(Role::Informers, WATCHES).clients(Role::Kubelets, 1);
        let FleetRun { load, run } = shell::run_fleet(&(self.faults)(sim), self.seconds)?;
        let connects = load.peak(START, |second| &second.connects) as f64 / nodes as f64;
        let lists = load.peak(START, |second| &second.lists) as f64 / nodes as f64;
        let watches = load.peak(START, |second| &second.accepted) as f64 / nodes as f64;
        let share = load.largest_share(self.seconds - 1);
        let even_after =
            load.even_from(tolerance(nodes)).map(|second| second.saturating_sub(self.ends));
        let left_after = left_from(&load).map(|second| second.saturating_sub(START));
        let lease = run.findings.longest_lease;
        let bounds = &self.bounds;
        let mut broken = run.findings.violations.clone();
        let mut check = |holds: bool, text: String| {
            if !holds {
                broken.push(text);
            }
        };
        check(
            connects <= bounds.connects,
            format!("{connects:.2} connects a second for each node"),
        );
        check(lists <= bounds.lists, format!("{lists:.2} lists a second for each node"));
        check(
            watches <= bounds.watches,
            format!("{watches:.2} watches begin in a second for each node"),
        );
        check(
            share <= bounds.share + (tolerance(nodes) - 0.1) / 3.0,
            format!("a share of {share:.2} of the watches"),
        );
        for (name, found, bound) in
            [("even", even_after, bounds.even_after), ("left", left_after, bounds.left_after)]
        {
            let holds = bound.is_none_or(|bound| found.is_some_and(|found| found <= bound));
            check(holds, format!("{name} after {found:?} s"));
        }
        check(lease <= bounds.lease, format!("a lease renewed after {lease:.1?}"));
        let summary = format!(
            "{} nodes; for each node at most {connects:.2} connects, {lists:.2} lists and {watches:.2} begun watches a second at one \
             apiserver; \
             largest share {share:.3}; even {} after the faults, left {} after the first; leases {lease:.1?} apart",
            nodes,
            even_after.map_or("never".to_owned(), |after| format!("{after} s")),
            left_after.map_or("never".to_owned(), |after| format!("{after} s")),
        );
        Ok(StormRun { load, run, broken, summary })
    }
}

/// How far the watches of an apiserver may be from the mean of three, as a share of it: 10 %, and more in fleets of
/// fewer than 144 nodes, whose counts chance decides. The rebalance leaves a node with three, three and two watches,
/// and each watch ends after 5 to 10 minutes and may begin again at another apiserver, from which the rebalance moves
/// it back in a minute. The counts had a standard deviation of 4 % of the mean with 60 nodes, which is 0.3/√n; four of
/// them are permitted.
fn tolerance(nodes: usize) -> f64 {
    (1.2 / (nodes as f64).sqrt()).max(0.1)
}

/// The second from whose end on the first apiserver has no watch.
fn left_from(load: &Load) -> Option<usize> {
    let has_some = load.seconds.iter().rposition(|second| second.watches[0] > 0);
    has_some.map_or(Some(0), |last| Some(last + 1)).filter(|&from| from < load.seconds.len())
}
