//! What scenarios share: usual clients, times, and promises.

use std::time::Duration;

use crate::invariants::{GroupPromises, Promises};
use crate::scenario::{Role, Sim};

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SECOND: Duration = Duration::from_secs(1);

/// The time between two bookmarks of a watch in scenarios of some seconds whose faults meet bookmarks, too.
pub(super) const BOOKMARKS: Duration = Duration::from_secs(5);

/// Clients as in the table of the README, in smaller numbers. Half of the seeds have a bookmark each 5 s, so that
/// faults meet bookmarks; not the even ones, because remainders of the seed decide on faults.
pub(super) fn clients(seed: u64) -> Sim {
    let sim = Sim::seed(seed);
    let sim =
        if seed.count_ones().is_multiple_of(2) { sim.bookmark_interval(BOOKMARKS) } else { sim };
    sim.clients(Role::Informers, 4)
        .clients(Role::Readers, 3)
        .clients(Role::Writers, 2)
        .clients(Role::Kubelets, 1)
        .clients(Role::Leaders, 1)
}

/// A time at which a fault begins, different for each seed.
pub(super) fn start(seed: u64) -> Duration {
    3 * SECOND + MS * (seed.wrapping_mul(7_919) % 2_000) as u32
}

/// The longest silence of a watch after its path is lost. A PING is due at most 250 ms after the last byte of a busy
/// watch or after the PONG that followed it; the connection is dead 2 s later, and an attempt to resume has 50 ms of
/// jitter.
const SILENCE: Duration = Duration::from_millis(2_500);

pub(super) const READS: Promises = Promises {
    failed_reads: 0,
    slowest_read: Duration::from_millis(600),
    failed_lists: 0,
    slowest_list: Duration::MAX,
    failed_writes: 4,
    slowest_write: Duration::from_secs(8),
    silence: SILENCE,
    relists: 0,
    watches_broken: 0,
    watches_ended: u64::MAX,
    // kubelet renews its lease 10.4 s after the last time, and a lost renewal is settled.
    lease: Duration::from_secs(12),
    failed_leases: 0,
    connects: u64::MAX,
    group: GroupPromises::NONE,
};

/// While no apiserver runs for 10 s.
pub(super) const OUTAGE_OF_TEN_SECONDS: Promises = Promises {
    failed_reads: u64::MAX,
    slowest_read: Duration::from_millis(1_500),
    failed_writes: u64::MAX,
    silence: Duration::from_secs(20),
    // The watch caches have no history after the start, so a cursor that no apiserver has any more is answered with 410.
    relists: 8,
    lease: Duration::from_secs(25),
    failed_leases: u64::MAX,
    ..READS
};
