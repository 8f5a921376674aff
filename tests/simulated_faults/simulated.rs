//! The simulated side: runs a scenario with many seeds, and reads the timelines from their logs.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jackstay_sim::faults::FaultKind;
use jackstay_sim::scenario::{Role, Run, Scenario};
use jackstay_sim::trace;

use crate::timeline::{Entry, Fault, Figures, Kind, Timeline, figures};

/// Time in which all connections are established. Events before do not count, even if a fault begins at once.
const WARM_UP: Duration = Duration::from_secs(1);

/// The figures of seeds `0..count`.
pub fn runs(scenario: &Scenario, count: u64) -> Vec<Figures> {
    let run = |seed| {
        let sim = (scenario.sim)(seed);
        let roles: Vec<_> = sim.roles().collect();
        let fault = fault(scenario, seed);
        figures(&timeline(&sim.run(scenario.time), &roles, scenario.time), &fault)
    };
    (0..count).map(run).collect()
}

/// The fault of a seed.
pub fn fault(scenario: &Scenario, seed: u64) -> Fault {
    let sim = (scenario.sim)(seed);
    let faults = sim.faults();
    Fault {
        begins: faults.iter().map(|fault| fault.at).min().expect("a fault").max(WARM_UP),
        ends: faults.iter().filter_map(|fault| fault.until).max(),
        endpoints: faults.iter().map(|fault| fault.server).collect(),
        // A watch without events gets 410 if its last bookmark is older than the watch cache of a restarted apiserver.
        relists: u32::from(faults.iter().any(|fault| fault.kind == FaultKind::ShutDown)),
    }
}

/// What is known of the open requests.
#[derive(Default)]
struct Open {
    /// When each request of a client was sent.
    sent: BTreeMap<(u16, u64), Duration>,
    /// Requests of nodes that were hedged.
    hedged: BTreeSet<u32>,
    /// When each revision was written.
    commits: BTreeMap<u64, Duration>,
}

fn timeline(run: &Run, roles: &[Role], time: Duration) -> Timeline {
    let mut open = Open::default();
    let mut timeline = Timeline::new();
    for &(at, entry) in run.trace.entries().iter().take_while(|(at, _)| *at <= time) {
        timeline.extend(open.translate(at, entry, roles).map(|entry| (at, entry)));
    }
    // The log does not tell a broken watch from a failed list.
    let broken = usize::try_from(run.findings.watches_broken).unwrap_or(usize::MAX);
    timeline.extend(std::iter::repeat_n((time, Entry::WatchBroken), broken));
    timeline
}

impl Open {
    fn translate(&mut self, at: Duration, entry: trace::Entry, roles: &[Role]) -> Option<Entry> {
        Some(match entry {
            trace::Entry::Connection { connection, endpoint, state, .. } => {
                Entry::Connection { endpoint: endpoint.into(), number: connection, state }
            }
            trace::Entry::Endpoint { endpoint, state, .. } => {
                Entry::Endpoint { endpoint: endpoint.into(), state }
            }
            trace::Entry::WatchResumed { moved: true, .. } => Entry::WatchMoved,
            trace::Entry::WatchResumed { .. } => Entry::WatchResumed,
            trace::Entry::Attempt { request, hedge: true, .. } => {
                self.hedged.insert(request);
                return None;
            }
            trace::Entry::Answered { request, .. } if self.hedged.remove(&request) => {
                Entry::HedgedReadAnswered
            }
            trace::Entry::Commit { revision, .. } => {
                self.commits.insert(revision, at);
                return None;
            }
            trace::Entry::Delivered { revision, .. } => {
                Entry::Delivered { after: at.saturating_sub(*self.commits.get(&revision)?) }
            }
            trace::Entry::Relist { .. } => Entry::Relist,
            trace::Entry::Sent { client, request } => {
                self.sent.insert((client, request), at);
                return None;
            }
            trace::Entry::Reply { client, request, status } => {
                return self.ended((client, request), Some(status), at, roles);
            }
            trace::Entry::Failed { client, request, .. } => {
                return self.ended((client, request), None, at, roles);
            }
            _ => return None,
        })
    }

    fn ended(
        &mut self,
        key: (u16, u64),
        status: Option<u16>,
        at: Duration,
        roles: &[Role],
    ) -> Option<Entry> {
        let took = at.saturating_sub(self.sent.remove(&key)?);
        let client = usize::from(key.0);
        match roles[client] {
            Role::Readers => Some(Entry::Ended { kind: Kind::Read, took, ok: status == Some(200) }),
            Role::Writers => {
                let ok = matches!(status, Some(200 | 201 | 404 | 409));
                Some(Entry::Ended { kind: Kind::Write, took, ok })
            }
            // The first renewal follows a read of a lease that does not exist.
            Role::Kubelets | Role::Leaders => {
                matches!(status, Some(200 | 201)).then_some(Entry::Renewed { client })
            }
            Role::Informers | Role::Bulk | Role::Hostile => None,
        }
    }
}
