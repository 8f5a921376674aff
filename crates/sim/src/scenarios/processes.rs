//! Credentials, restores of etcd, and faults of jackstay itself.

use std::time::Duration;

use super::common::{BOOKMARKS, MS, READS, SECOND, clients, start};
use crate::credential::Credential;
use crate::faults::FaultKind;
use crate::invariants::Promises;
use crate::scenario::{Role, Scenario};

/// With a cache that lags by at most 2 s. A most-recent list waits until the cache has caught up, for at most 3 s
/// (apiserver, `cacher/watch_cache.go`, `blockTimeout`).
const LAGS: Promises = Promises {
    slowest_read: Duration::from_millis(3_100),
    silence: Duration::from_millis(3_100),
    ..READS
};

/// While jackstay does not run, connections are refused.
const RESTARTS: Promises = Promises {
    failed_reads: u64::MAX,
    slowest_read: Duration::from_millis(3_500),
    failed_writes: u64::MAX,
    silence: Duration::from_secs(10),
    lease: Duration::from_secs(20),
    failed_leases: u64::MAX,
    ..READS
};

const SERVICE: Credential = Credential::ServiceAccount(0);
/// Of clients with the certificate and with tokens; two clients have tokens of one service account.
const MIXED: [Credential; 5] = [
    Credential::Certificate,
    SERVICE,
    Credential::Opaque { user: 0, token: 0 },
    Credential::Opaque { user: 0, token: 1 },
    SERVICE,
];

/// The scenarios.
pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "tokens",
        about: "clients with a certificate, service accounts and opaque tokens, and one of three apiservers lags",
        sim: |seed| {
            let lag = FaultKind::Lag(2 * SECOND);
            clients(seed).credentials(&MIXED).fault((seed % 3) as usize, lag).at(start(seed))
        },
        time: Duration::from_secs(10),
        promises: LAGS,
    },
    Scenario {
        name: "tokens-revoked",
        about: "the tokens of service accounts are refused for 2 s, and then the clients have new ones",
        sim: |seed| {
            let (sim, at) = (clients(seed).credentials(&MIXED), start(seed));
            sim.fault(0, FaultKind::RevokeTokens).at(at).until(at + 2 * SECOND)
        },
        time: Duration::from_secs(12),
        // An apiserver that refuses a token ends the connection that it came on by GOAWAY, and with it the watches
        // there.
        promises: Promises { silence: Duration::from_secs(4), relists: 4, ..READS },
    },
    Scenario {
        name: "tokens-only",
        about: "jackstay has no certificate and probes without a credential; one of three apiservers is lost",
        sim: |seed| {
            let credentials =
                [SERVICE, Credential::ServiceAccount(1), Credential::Opaque { user: 0, token: 0 }];
            let sim = clients(seed).without_identities().credentials(&credentials);
            sim.blackhole((seed % 3) as usize).at(start(seed))
        },
        time: Duration::from_secs(10),
        promises: READS,
    },
    Scenario {
        name: "no-identity-lane",
        about: "workers serve the clients with a certificate themselves; one of three apiservers is killed and lags after its start",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            let sim = clients(seed).without_identity_lane().credentials(&MIXED);
            let sim = sim.fault(server, FaultKind::Kill).at(at).until(at + 2 * SECOND);
            sim.fault(server, FaultKind::Lag(SECOND)).at(at + 2 * SECOND)
        },
        time: Duration::from_secs(10),
        promises: LAGS,
    },
    Scenario {
        name: "restored-etcd",
        about: "every apiserver is killed, etcd is restored from a backup, and they start again",
        sim: |seed| {
            // Some 30 to 60 versions are lost. The new history passes them in as much time.
            let age = 3 * SECOND + MS * (seed.wrapping_mul(6_151) % 3_000) as u32;
            let backup = start(seed);
            let (killed, restored, up) =
                (backup + age, backup + age + SECOND, backup + age + 2 * SECOND);
            let sim = clients(seed).credentials(&MIXED).bookmark_interval(BOOKMARKS);
            let sim = sim.fault(0, FaultKind::BackUpEtcd).at(backup);
            let sim = sim.fault(0, FaultKind::RestoreEtcd).at(restored);
            (0..3).fold(sim, |sim, at| sim.fault(at, FaultKind::Kill).at(killed).until(up))
        },
        time: Duration::from_secs(22),
        promises: Promises {
            failed_reads: u64::MAX,
            // Until the restore is recognised, an apiserver waits for a lost version for 3 s, and then another one is
            // asked.
            slowest_read: Duration::from_secs(7),
            failed_writes: u64::MAX,
            silence: Duration::from_secs(12),
            relists: 12,
            lease: Duration::from_secs(20),
            failed_leases: u64::MAX,
            ..READS
        },
    },
    Scenario {
        name: "too-large-version",
        about: "the watch cache of one of three apiservers lags by six seconds, and readers name the versions that they have seen",
        sim: |seed| {
            let lag = FaultKind::Lag(6 * SECOND);
            let sim = clients(seed).clients(Role::VersionReaders, 3).credentials(&MIXED);
            sim.fault((seed % 3) as usize, lag).at(start(seed))
        },
        time: Duration::from_secs(14),
        // The lagging apiserver answers after 3 s that the version is too large, and then another one is asked.
        promises: Promises {
            slowest_read: Duration::from_millis(3_300),
            silence: Duration::from_millis(6_500),
            ..READS
        },
    },
    Scenario {
        name: "proxy-drained",
        about: "jackstay is drained and starts again, while one of three apiservers lags",
        sim: |seed| {
            let lag = FaultKind::Lag(2 * SECOND);
            // The clients of the other node write meanwhile.
            let sim = clients(seed).nodes(2).credentials(&MIXED);
            let sim = sim.fault((seed % 3) as usize, lag).at(SECOND);
            sim.fault(0, FaultKind::ProxyDrain).at(start(seed))
        },
        time: Duration::from_secs(20),
        promises: RESTARTS,
    },
    Scenario {
        name: "proxy-killed",
        about: "SIGKILL of jackstay, and a restart after a second",
        sim: |seed| {
            let at = start(seed);
            let sim = clients(seed).credentials(&MIXED);
            sim.fault(0, FaultKind::ProxyKill).at(at).until(at + SECOND)
        },
        time: Duration::from_secs(15),
        promises: Promises { watches_broken: u64::MAX, ..RESTARTS },
    },
    Scenario {
        name: "proxy-stopped",
        about: "SIGSTOP of jackstay for 3 s",
        sim: |seed| {
            let at = start(seed);
            let sim = clients(seed).credentials(&MIXED);
            sim.fault(0, FaultKind::ProxyStop).at(at).until(at + 3 * SECOND)
        },
        time: Duration::from_secs(12),
        promises: Promises {
            slowest_read: Duration::from_millis(3_500),
            slowest_write: Duration::from_millis(3_500),
            silence: Duration::from_millis(4_500),
            failed_writes: 0,
            ..READS
        },
    },
];
