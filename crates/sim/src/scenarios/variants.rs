//! Several clusters, and compressed responses.

use std::time::Duration;

use super::common::{BOOKMARKS, READS, SECOND, clients, start};
use crate::faults::FaultKind;
use crate::invariants::Promises;
use crate::scenario::{Role, Scenario, Sim};

/// The cluster whose apiservers fail together for 4 s.
const SECOND_CLUSTER: Promises = Promises {
    failed_reads: 120,
    slowest_read: Duration::from_secs(7),
    slowest_list: Duration::MAX,
    failed_writes: 40,
    slowest_write: Duration::from_secs(8),
    silence: Duration::from_secs(8),
    lease: Duration::from_secs(20),
    failed_leases: u64::MAX,
    ..READS
};

/// The scenarios.
pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "two-clusters",
        about: "nodes with an upstream and a listener for each of two clusters, of which the second one fails",
        sim: |seed| {
            let (at, kinds) = (
                start(seed),
                [FaultKind::Blackhole, FaultKind::Kill, FaultKind::Hang, FaultKind::Stop],
            );
            let kind = kinds[(seed % 4) as usize];
            let sim = clients(seed).clusters(&[2, 2], SECOND_CLUSTER);
            (2..4).fold(sim, |sim, server| sim.fault(server, kind).at(at).until(at + 4 * SECOND))
        },
        time: Duration::from_secs(12),
        promises: Promises {
            slowest_read: Duration::from_millis(20),
            failed_writes: 0,
            slowest_write: Duration::from_millis(20),
            silence: Duration::from_millis(20),
            watches_ended: 0,
            lease: Duration::from_millis(10_450),
            ..READS
        },
    },
    Scenario {
        name: "compressed",
        about: "lists and watches are compressed; an apiserver is lost and later another one is killed",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            // Each event of a large object is compressed for each watch, which takes most of the time of a run.
            Sim::seed(seed)
                .clients(Role::WatchLists, 3)
                .clients(Role::Informers, 1)
                .clients(Role::Readers, 2)
                .clients(Role::Writers, 1)
                .clients(Role::Uploaders, 1)
                .clients(Role::Bulk, 1)
                .compressed()
                .bookmark_interval(BOOKMARKS)
                .blackhole(server)
                .at(at)
                .until(at + 3 * SECOND)
                .fault((server + 1) % 3, FaultKind::Kill)
                .at(at + 4 * SECOND)
                .until(at + 5 * SECOND)
        },
        time: Duration::from_secs(10),
        promises: Promises { failed_lists: 4, slowest_list: Duration::from_secs(3), ..READS },
    },
];
