//! Lines that become slow.

use std::time::Duration;

use super::common::{MS, READS, SECOND, clients, start};
use crate::faults::FaultKind;
use crate::invariants::Promises;
use crate::scenario::Scenario;

/// The scenarios.
pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "line-fills",
        about: "something else fills the queue of the node's line within four seconds, and it stays full for ten",
        sim: |seed| {
            // Latency of a direction: round trips take up to 4 s.
            let at = start(seed);
            let steps = (0..16).map(|step| (at + step * SECOND / 4, MS * 125 * (step + 1)));
            steps.fold(clients(seed), |sim, (begins, latency)| {
                let ends =
                    if latency == 2 * SECOND { at + 14 * SECOND } else { begins + SECOND / 4 };
                (0..3).fold(sim, |sim, server| {
                    sim.fault(server, FaultKind::Latency(latency)).at(begins).until(ends)
                })
            })
        },
        time: Duration::from_secs(24),
        promises: Promises {
            // A round trip, and the time until the line shows how late it is.
            slowest_read: Duration::from_millis(5_500),
            failed_writes: 0,
            slowest_write: Duration::from_millis(5_500),
            silence: Duration::from_secs(3),
            // kubelet renews it 10.4 s after the last time.
            lease: Duration::from_secs(15),
            ..READS
        },
    },
    Scenario {
        name: "late-and-lost",
        about: "the packets of an apiserver take a second for ten, and after six seconds those of another one are dropped",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            let late = FaultKind::Latency(SECOND);
            let sim = clients(seed).fault(server, late).at(at).until(at + 10 * SECOND);
            sim.blackhole((server + 1) % 3).at(at + 6 * SECOND)
        },
        time: Duration::from_secs(18),
        promises: Promises {
            // A read may be sent to the late one.
            slowest_read: Duration::from_millis(2_500),
            lease: Duration::from_secs(15),
            ..READS
        },
    },
];
