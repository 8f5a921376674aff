//! One address, that of a load balancer, in front of three apiservers.

use std::time::Duration;

use super::common::{MS, OUTAGE_OF_TEN_SECONDS, READS, SECOND, clients, start};
use crate::balancer::{Balancer, Distinction};
use crate::faults::FaultKind;
use crate::invariants::Promises;
use crate::scenario::{Scenario, Sim};

/// The usual clients behind a balancer, with this fault of one backend.
fn faulty(seed: u64, balancer: Balancer, kind: FaultKind) -> Sim {
    clients(seed).behind(balancer).fault((seed % 3) as usize, kind).at(start(seed))
}

/// The connects of a node within 10 s when one backend is lost: each class and the prober search for it until their
/// budget is used up, and then with growing pauses.
const SEARCHES: u64 = 120;
/// The same while no apiserver is reached. With three addresses they are 60.
const OUTAGE: u64 = 250;
/// The same when no backend is lost: a survey, and connects until each class has reached both endpoints.
const STARTS: u64 = 60;

/// Promises while one backend is killed, whose connections end at once.
const KILLED: Promises = Promises {
    slowest_read: Duration::from_millis(300),
    silence: SECOND,
    watches_ended: 0,
    connects: SEARCHES,
    ..READS
};

/// The scenarios.
pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "balancer-blackhole",
        about: "all packets of one of three apiservers behind a balancer without health checks are dropped",
        sim: |seed| faulty(seed, Balancer::UNCHECKED, FaultKind::Blackhole),
        time: Duration::from_secs(20),
        promises: Promises { connects: SEARCHES, ..READS },
    },
    Scenario {
        name: "balancer-stop",
        about: "SIGSTOP of one of three apiservers behind a balancer without health checks",
        sim: |seed| faulty(seed, Balancer::UNCHECKED, FaultKind::Stop),
        time: Duration::from_secs(20),
        // 5 s from the PING, which is due at most 250 ms after the last byte, and 200 ms of jitter.
        promises: Promises { silence: Duration::from_secs(6), connects: SEARCHES, ..READS },
    },
    Scenario {
        name: "balancer-kill",
        about: "SIGKILL of one of three apiservers behind a balancer without health checks, which refuses connects from then on",
        sim: |seed| faulty(seed, Balancer::UNCHECKED, FaultKind::Kill),
        time: Duration::from_secs(20),
        promises: KILLED,
    },
    Scenario {
        name: "balancer-hang",
        about: "one of three apiservers behind a balancer without health checks is cut off from etcd",
        sim: |seed| faulty(seed, Balancer::UNCHECKED, FaultKind::Hang),
        time: Duration::from_secs(25),
        promises: Promises {
            slowest_read: Duration::from_millis(300),
            failed_writes: 4,
            slowest_write: Duration::from_secs(30),
            connects: SEARCHES,
            ..READS
        },
    },
    Scenario {
        name: "balancer-lag",
        about: "the watch cache of one of three apiservers behind a balancer lags by two seconds",
        sim: |seed| faulty(seed, Balancer::UNCHECKED, FaultKind::Lag(2 * SECOND)),
        time: Duration::from_secs(12),
        // A most-recent list waits until the cache has caught up (apiserver, `cacher/watch_cache.go`, `blockTimeout`).
        promises: Promises {
            slowest_read: Duration::from_millis(3_100),
            failed_writes: 0,
            silence: Duration::from_millis(3_100),
            connects: STARTS,
            ..READS
        },
    },
    Scenario {
        name: "balancer-forgotten-flows",
        about: "the packets of every established flow through a balancer are dropped, and new flows work",
        sim: |seed| {
            let dropped = [[true, true], [true, false], [false, true]][(seed / 3 % 3) as usize];
            (0..3).fold(clients(seed).behind(Balancer::UNCHECKED), |sim, server| {
                sim.fault(server, FaultKind::ForgetFlows { dropped }).at(start(seed))
            })
        },
        time: Duration::from_secs(12),
        promises: Promises { failed_writes: 16, connects: SEARCHES, ..READS },
    },
    Scenario {
        name: "balancer-checked-kill",
        about: "SIGKILL of one of three apiservers behind a balancer with health checks, and a restart after 12 s",
        sim: |seed| {
            let sim = faulty(seed, Balancer::CHECKED, FaultKind::Kill);
            sim.until(start(seed) + 12 * SECOND)
        },
        time: Duration::from_secs(30),
        promises: KILLED,
    },
    Scenario {
        name: "balancer-shared-certificate",
        about: "three apiservers with one certificate behind a balancer, of which one is lost or killed",
        sim: |seed| {
            let kind = [FaultKind::Blackhole, FaultKind::Kill][(seed / 3 % 2) as usize];
            let balancer = Balancer { distinction: Distinction::Address, ..Balancer::UNCHECKED };
            faulty(seed, balancer, kind)
        },
        time: Duration::from_secs(20),
        promises: Promises { connects: SEARCHES, ..READS },
    },
    Scenario {
        name: "balancer-indistinct",
        about: "three apiservers behind a balancer cannot be told apart, and one is lost, killed, or cut off from etcd",
        sim: |seed| {
            let kinds = [FaultKind::Blackhole, FaultKind::Kill, FaultKind::Hang];
            let balancer = Balancer { distinction: Distinction::Nothing, ..Balancer::UNCHECKED };
            faulty(seed, balancer, kinds[(seed / 3 % 3) as usize])
        },
        time: Duration::from_secs(25),
        promises: Promises {
            // All connections of a class may have reached the same one.
            slowest_read: Duration::from_secs(3),
            failed_writes: 16,
            slowest_write: Duration::from_secs(30),
            connects: STARTS,
            ..READS
        },
    },
    Scenario {
        name: "balancer-two-lost",
        about: "the packets of one of three apiservers behind a balancer are dropped, and 8 s later another one is killed",
        sim: |seed| {
            let sim = faulty(seed, Balancer::UNCHECKED, FaultKind::Blackhole);
            let other = ((seed + 1) % 3) as usize;
            sim.fault(other, FaultKind::Kill).at(start(seed) + 8 * SECOND)
        },
        time: Duration::from_secs(22),
        // By then, the third one is an endpoint.
        promises: Promises { connects: 2 * SEARCHES, ..READS },
    },
    Scenario {
        name: "balancer-flapping",
        about: "each second another one of three apiservers behind a balancer is killed, for 300 to 900 ms",
        sim: |seed| {
            let lasts = MS * (300 + seed.wrapping_mul(6_151) % 600) as u32;
            (0..12).fold(clients(seed).behind(Balancer::UNCHECKED), |sim, turn| {
                let at = start(seed) + turn * SECOND;
                let server = ((seed + u64::from(turn)) % 3) as usize;
                sim.fault(server, FaultKind::Kill).at(at).until(at + lasts)
            })
        },
        time: Duration::from_secs(22),
        // A process has one or two seconds to be found again, with a connect a second that leads to any backend.
        promises: Promises {
            // At most 29 in 120 runs: all requests of a second in which no connect has led to a process that runs.
            failed_reads: 40,
            slowest_read: Duration::from_millis(1_500),
            failed_writes: 20,
            silence: Duration::from_secs(12),
            // The watch caches have no history after a start.
            relists: 8,
            connects: OUTAGE,
            ..READS
        },
    },
    Scenario {
        name: "balancer-renewed",
        about: "three apiservers behind a balancer have new certificates, one after the other",
        sim: |seed| {
            let pause = MS * (500 + seed.wrapping_mul(6_151) % 4_000) as u32;
            (0..3).fold(clients(seed).behind(Balancer::UNCHECKED), |sim, server| {
                let at = start(seed) + server as u32 * pause;
                sim.fault(server, FaultKind::RenewCertificate).at(at)
            })
        },
        time: Duration::from_secs(22),
        // Connections stay, and lead to the same process.
        promises: Promises {
            slowest_read: Duration::from_millis(100),
            failed_writes: 0,
            slowest_write: Duration::from_millis(100),
            silence: Duration::from_millis(100),
            watches_ended: 0,
            lease: Duration::from_millis(10_450),
            connects: STARTS,
            ..READS
        },
    },
    Scenario {
        name: "balancer-renewed-restart",
        about: "three apiservers behind a balancer restart with new certificates, one after the other",
        sim: |seed| {
            (0..3).fold(clients(seed).behind(Balancer::UNCHECKED), |sim, server| {
                let at = start(seed) + server as u32 * 7 * SECOND;
                let sim = sim.fault(server, FaultKind::RenewCertificate).at(at);
                sim.fault(server, FaultKind::ShutDown).at(at).until(at + 3 * SECOND)
            })
        },
        time: Duration::from_secs(30),
        // The endpoints are recognised by certificates that no apiserver has any more. Up to 1.5 s after the second one is
        // lost, the whole address is an endpoint.
        promises: Promises {
            failed_reads: 10,
            slowest_read: Duration::from_millis(1_500),
            failed_writes: 10,
            silence: Duration::from_secs(3),
            relists: 4,
            connects: 150,
            ..READS
        },
    },
    Scenario {
        name: "balancer-started-dark",
        about: "jackstay starts behind a balancer while all packets of one of three apiservers are dropped",
        sim: |seed| clients(seed).behind(Balancer::UNCHECKED).blackhole((seed % 3) as usize),
        time: Duration::from_secs(20),
        // A connect that leads to the lost backend is raced by another one after 500 ms, and that one by a third.
        // Four in a row may lead there before the first one has led elsewhere.
        promises: Promises {
            failed_reads: 12,
            slowest_read: Duration::from_millis(1_300),
            failed_writes: 6,
            connects: SEARCHES,
            ..READS
        },
    },
    Scenario {
        name: "balancer-outage",
        about: "every apiserver behind a balancer is killed for 10 s, and after its start refuses everybody for two seconds",
        sim: |seed| {
            let (at, up) = (start(seed), start(seed) + 10 * SECOND);
            (0..3).fold(clients(seed).behind(Balancer::UNCHECKED), |sim, server| {
                let sim = sim.fault(server, FaultKind::Kill).at(at).until(up);
                sim.fault(server, FaultKind::Forbid).at(up).until(up + 2 * SECOND)
            })
        },
        time: Duration::from_secs(30),
        promises: Promises { connects: OUTAGE, ..OUTAGE_OF_TEN_SECONDS },
    },
    Scenario {
        name: "balancer-sticky",
        about: "all connections of a node through a balancer with health checks lead to one apiserver, which is killed",
        sim: |seed| {
            let balancer = Balancer { is_sticky: true, ..Balancer::CHECKED };
            let sim = clients(seed).behind(balancer).fault(0, FaultKind::Kill).at(start(seed));
            sim.until(start(seed) + 12 * SECOND)
        },
        time: Duration::from_secs(30),
        // No connection leads anywhere for 6 s, and then the watches continue within 5 s.
        promises: Promises {
            failed_reads: 220,
            slowest_read: SECOND,
            failed_writes: 80,
            silence: Duration::from_secs(12),
            failed_leases: 8,
            connects: OUTAGE,
            ..READS
        },
    },
];
