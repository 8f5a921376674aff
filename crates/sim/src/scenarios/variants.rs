//! Several clusters, compressed responses, and limits of clients.

use std::time::Duration;

use super::common::{BOOKMARKS, READS, SECOND, clients, start};
use crate::faults::FaultKind;
use crate::invariants::Promises;
use crate::scenario::{Role, Scenario, Sim};

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
            let sim = clients(seed).clients(Role::Readers, 3).clusters(&[2, 2]);
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
                .until(at + 2 * SECOND)
                .fault((server + 1) % 3, FaultKind::Kill)
                .at(at + 4 * SECOND)
                .until(at + 5 * SECOND)
        },
        time: Duration::from_secs(10),
        promises: Promises { failed_lists: 4, ..READS },
    },
    Scenario {
        name: "never-reads",
        about: "64 clients of another user, beyond its share of connections, read nothing of what they ask for",
        sim: |seed| {
            clients(seed)
                .clients(Role::NeverReads, 64)
                .configured(|config| config.listeners[0].limits_mut().max_connections = 64)
        },
        time: Duration::from_secs(8),
        promises: Promises {
            slowest_read: Duration::from_millis(50),
            failed_writes: 0,
            slowest_write: Duration::from_millis(50),
            silence: Duration::from_millis(50),
            watches_ended: 0,
            ..READS
        },
    },
];
