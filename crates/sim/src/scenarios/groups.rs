//! The aggregated group fails at one apiserver, or at all of them, and the rest of the API works.

use std::time::Duration;

use jackstay_apiserver::aggregated::{self, LOST_AFTER};
use jackstay_config::Mode;

use super::common::{BOOKMARKS, MS, READS, SECOND, start};
use crate::faults::FaultKind;
use crate::invariants::{GroupPromises, Promises};
use crate::scenario::{Role, Scenario, Sim};

/// Clients of the group and others.
fn clients(seed: u64) -> Sim {
    Sim::seed(seed)
        .bookmark_interval(BOOKMARKS)
        .clients(Role::Informers, 2)
        .clients(Role::Readers, 2)
        .clients(Role::Writers, 1)
        .clients(Role::Kubelets, 1)
        .clients(Role::GroupReaders, 3)
        .clients(Role::GroupWriters, 2)
        .clients(Role::GroupInformers, 2)
}

/// Nothing changes for other groups, and no read of this one fails.
const PROMISES: Promises = Promises {
    slowest_read: Duration::from_millis(20),
    failed_writes: 0,
    slowest_write: Duration::from_millis(20),
    silence: Duration::from_millis(20),
    watches_ended: 0,
    // kubelet renews it every 10 s plus up to 4 %.
    lease: Duration::from_millis(10_450),
    group: GroupPromises {
        failed_reads: 0,
        slowest_read: SECOND,
        // Those that were sent before the apiserver was known to fail.
        failed_writes: 4,
        slowest_write: SECOND,
        silence: SECOND,
    },
    ..READS
};

/// How long a path is dark that returns before its connection is lost. A write on its way there waits so long, and so does
/// a watch that is there if no read is: an apiserver that has more open streams than the others gets few of them.
const DARK: Duration = Duration::from_secs(9);

/// The scenarios.
pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "group-refused",
        about: "one of three apiservers cannot connect to the aggregated server, for 10 s",
        sim: |seed| {
            let at = start(seed);
            let fault = FaultKind::GroupRefused;
            clients(seed).fault((seed % 3) as usize, fault).at(at).until(at + 10 * SECOND)
        },
        time: Duration::from_secs(20),
        promises: PROMISES,
    },
    Scenario {
        name: "group-dark",
        about: "the packets of one of three apiservers to the aggregated server are dropped, for 8 s or 50 s",
        sim: |seed| {
            let (at, seconds) = (start(seed), [8, 50][(seed / 3 % 2) as usize]);
            let sim = clients(seed).fault((seed % 3) as usize, FaultKind::GroupDark);
            sim.at(at).until(at + seconds * SECOND)
        },
        time: Duration::from_secs(60),
        promises: Promises {
            group: GroupPromises {
                slowest_read: Duration::from_millis(2_500),
                // A write on its way there waits as long as its client does.
                failed_writes: 8,
                slowest_write: Duration::from_secs(30),
                silence: LOST_AFTER.saturating_add(SECOND),
                ..PROMISES.group
            },
            ..PROMISES
        },
    },
    Scenario {
        name: "group-never-resumed",
        about: "the packets of one path are dropped for 9 s, and the watches of the group may not be resumed",
        sim: |seed| {
            let at = start(seed);
            let sim = clients(seed).configured(|config| {
                for listener in &mut config.listeners {
                    if let Mode::Terminate(terminate) = &mut listener.mode {
                        terminate.never_resume_groups = vec![aggregated::GROUP.to_owned()];
                    }
                }
            });
            sim.fault((seed % 3) as usize, FaultKind::GroupDark).at(at).until(at + DARK)
        },
        time: Duration::from_secs(18),
        promises: Promises {
            // jackstay ends them, and their informers watch elsewhere.
            watches_ended: 2,
            group: GroupPromises {
                slowest_read: Duration::from_millis(2_500),
                failed_writes: 0,
                slowest_write: DARK.saturating_add(SECOND),
                silence: DARK.saturating_add(SECOND),
                ..PROMISES.group
            },
            ..PROMISES
        },
    },
    Scenario {
        name: "group-down",
        about: "no apiserver can connect to the aggregated server, for 8 s",
        sim: |seed| {
            let at = start(seed);
            (0..3).fold(clients(seed), |sim, server| {
                sim.fault(server, FaultKind::GroupRefused).at(at).until(at + 8 * SECOND)
            })
        },
        time: Duration::from_secs(16),
        promises: Promises {
            group: GroupPromises {
                // 30 reads and 10 writes a second; none fails later.
                failed_reads: 243,
                failed_writes: 82,
                ..PROMISES.group
            },
            ..PROMISES
        },
    },
    Scenario {
        name: "group-flaps",
        about: "one of three apiservers cannot connect, and thrice all answer that the group is unavailable",
        sim: |seed| {
            let (at, lasts) = (start(seed), MS * (50 + seed.wrapping_mul(7_919) % 51) as u32);
            let refused = clients(seed).fault((seed % 3) as usize, FaultKind::GroupRefused);
            let refused = refused.at(at).until(at + 12 * SECOND);
            let flaps = [2, 5, 9].into_iter().flat_map(|after| (0..3).map(move |one| (after, one)));
            flaps.fold(refused, |sim, (after, server)| {
                let at = at + after * SECOND;
                sim.fault(server, FaultKind::GroupUnavailable).at(at).until(at + lasts)
            })
        },
        time: Duration::from_secs(20),
        promises: Promises {
            group: GroupPromises { failed_writes: 12, ..PROMISES.group },
            ..PROMISES
        },
    },
];
