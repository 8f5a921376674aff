//! Faults of apiservers, of their hosts and of the paths to them.

use std::time::Duration;

use super::common::{BOOKMARKS, MS, OUTAGE_OF_TEN_SECONDS, READS, SECOND, clients, start};
use crate::faults::FaultKind;
use crate::invariants::{GroupPromises, Promises};
use crate::scenario::{Role, Scenario, Sim};

/// The scenarios.
pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "blackhole",
        about: "all packets of one of three apiservers are dropped",
        sim: |seed| clients(seed).blackhole((seed % 3) as usize).at(start(seed)),
        time: Duration::from_secs(10),
        promises: READS,
    },
    Scenario {
        name: "blackhole-returns",
        about: "all packets of one of three apiservers are dropped for 0.5 to 2.5 s",
        sim: |seed| {
            let (at, lasts) = (start(seed), MS * (500 + seed.wrapping_mul(6_151) % 2_000) as u32);
            clients(seed).blackhole((seed % 3) as usize).at(at).until(at + lasts)
        },
        time: Duration::from_secs(10),
        // The apiserver's kernel sends again 0.2, 0.6, 1.4 and 3 s after the first time, each with up to a tenth more.
        promises: Promises { silence: Duration::from_millis(3_400), ..READS },
    },
    Scenario {
        name: "blackhole-one-way",
        about: "the packets to one of three apiservers are dropped",
        sim: |seed| {
            clients(seed).fault((seed % 3) as usize, FaultKind::BlackholeOneWay).at(start(seed))
        },
        time: Duration::from_secs(10),
        promises: READS,
    },
    Scenario {
        name: "forgotten-flows",
        about: "the packets of every established flow are dropped, and new flows work",
        sim: |seed| {
            let mut sim = clients(seed);
            let dropped = [[true, true], [true, false], [false, true]][(seed / 3 % 3) as usize];
            for server in 0..3 {
                sim = sim.fault(server, FaultKind::ForgetFlows { dropped }).at(start(seed));
            }
            sim
        },
        time: Duration::from_secs(10),
        promises: Promises { failed_writes: 16, ..READS },
    },
    Scenario {
        name: "kill",
        about: "SIGKILL of one of three apiservers, and a restart",
        sim: |seed| {
            let at = start(seed);
            clients(seed).fault((seed % 3) as usize, FaultKind::Kill).at(at).until(at + 3 * SECOND)
        },
        time: Duration::from_secs(10),
        promises: Promises {
            slowest_read: Duration::from_millis(300),
            silence: SECOND,
            watches_ended: 0,
            ..READS
        },
    },
    Scenario {
        name: "stop",
        about: "SIGSTOP of one of three apiservers",
        sim: |seed| clients(seed).fault((seed % 3) as usize, FaultKind::Stop).at(start(seed)),
        time: Duration::from_secs(16),
        // 5 s from the PING, which is due at most 250 ms after the last byte, and 200 ms of jitter.
        promises: Promises { silence: Duration::from_secs(6), ..READS },
    },
    Scenario {
        name: "refused",
        about: "a load balancer forgets every established flow and resets it when a packet passes",
        sim: |seed| {
            let forget = FaultKind::ForgetFlows { dropped: [false; 2] };
            let sim =
                clients(seed).fault(0, forget).at(start(seed)).fault(1, forget).at(start(seed));
            sim.fault(2, forget).at(start(seed))
        },
        time: Duration::from_secs(10),
        // A response whose head has passed when its flow is forgotten is not asked for again.
        promises: Promises { silence: SECOND, failed_reads: 1, failed_writes: 8, ..READS },
    },
    Scenario {
        name: "hang",
        about: "the requests of one of three apiservers hang, and its /readyz fails",
        sim: |seed| clients(seed).fault((seed % 3) as usize, FaultKind::Hang).at(start(seed)),
        time: Duration::from_secs(12),
        promises: Promises {
            slowest_read: Duration::from_millis(250),
            failed_writes: 4,
            slowest_write: Duration::from_secs(30),
            ..READS
        },
    },
    Scenario {
        name: "loss",
        about: "5 % of the packets to and from every apiserver are lost",
        sim: |seed| {
            let loss = FaultKind::Loss(0.05);
            clients(seed)
                .fault(0, loss)
                .at(SECOND)
                .fault(1, loss)
                .at(SECOND)
                .fault(2, loss)
                .at(SECOND)
        },
        time: Duration::from_secs(15),
        promises: Promises {
            // The PING before the silence may be lost, too.
            silence: Duration::from_millis(3_100),
            // A response whose head has arrived is not hedged, and the rest of a list waits for its server's
            // retransmissions, whose pauses double: above 1 s for one read in 50,000.
            slowest_read: Duration::from_secs(2),
            failed_writes: 1,
            slowest_write: Duration::from_secs(3),
            ..READS
        },
    },
    Scenario {
        name: "rolling-restart",
        about: "each apiserver shuts down and starts again, one after the other",
        sim: |seed| {
            let mut sim = clients(seed);
            for (server, at) in (0..).zip([2, 7, 12]) {
                let at = start(seed) + at * SECOND;
                sim = sim.fault(server, FaultKind::ShutDown).at(at).until(at + 3 * SECOND);
            }
            sim
        },
        time: Duration::from_secs(22),
        promises: Promises {
            slowest_read: SECOND,
            silence: Duration::from_secs(3), // A quiet watch whose last bookmark is older than the start of every apiserver gets 410.
            relists: 4,
            ..READS
        },
    },
    Scenario {
        name: "outage",
        about: "every apiserver is stopped for 10 s",
        sim: |seed| {
            let (mut sim, at) = (clients(seed), start(seed));
            for server in 0..3 {
                sim = sim.fault(server, FaultKind::Stop).at(at).until(at + 10 * SECOND);
            }
            sim
        },
        time: Duration::from_secs(25),
        promises: Promises {
            failed_reads: u64::MAX,
            slowest_read: Duration::from_millis(1_500),
            failed_writes: u64::MAX,
            silence: Duration::from_secs(16),
            lease: Duration::from_secs(20),
            failed_leases: u64::MAX,
            ..READS
        },
    },
    Scenario {
        name: "outage-killed",
        about: "every apiserver is killed and starts again after 10 s",
        sim: |seed| {
            let (mut sim, at) = (clients(seed), start(seed));
            for server in 0..3 {
                sim = sim.fault(server, FaultKind::Kill).at(at).until(at + 10 * SECOND);
            }
            sim
        },
        time: Duration::from_secs(30),
        promises: OUTAGE_OF_TEN_SECONDS,
    },
    Scenario {
        name: "goaway",
        about: "each apiserver ends connections by GOAWAY at random",
        sim: |seed| {
            let goaway = FaultKind::Goaway(0.02);
            clients(seed).fault(0, goaway).fault(1, goaway).fault(2, goaway)
        },
        time: Duration::from_secs(10),
        promises: Promises {
            slowest_read: Duration::from_millis(100),
            failed_writes: 0,
            slowest_write: Duration::from_millis(100),
            silence: Duration::from_millis(100),
            ..READS
        },
    },
    Scenario {
        name: "bulk",
        about: "clients list 1.5 MB in pages, whole and slowly, over lines of 1 Gbit/s; no fault",
        sim: |seed| clients(seed).clients(Role::Bulk, 3).latency(MS, MS / 5).rate(125_000_000),
        time: Duration::from_secs(5),
        // A list has at most the window of its stream in front of others, 2 ms of such a line.
        promises: Promises {
            slowest_read: Duration::from_millis(30),
            slowest_list: Duration::from_secs(4),
            failed_writes: 0,
            slowest_write: Duration::from_millis(30),
            silence: Duration::from_millis(30),
            // kubelet renews it every 10 s plus up to 4 %.
            lease: Duration::from_millis(10_450),
            ..READS
        },
    },
    Scenario {
        name: "hostile",
        about: "a client opens many requests at once and cancels a half, and the apiservers allow 20 streams",
        sim: |seed| clients(seed).clients(Role::Hostile, 1).max_streams(20),
        time: Duration::from_secs(6),
        promises: Promises { failed_reads: u64::MAX, failed_writes: u64::MAX, ..READS },
    },
    Scenario {
        name: "overload",
        about: "one of three apiservers answers every request with 429",
        sim: |seed| clients(seed).fault((seed % 3) as usize, FaultKind::Overload).at(start(seed)),
        time: Duration::from_secs(8),
        promises: Promises { failed_reads: u64::MAX, failed_writes: u64::MAX, ..READS },
    },
    Scenario {
        name: "lag",
        about: "the watch cache of one of three apiservers lags by two seconds, and its watches with it",
        sim: |seed| {
            clients(seed).fault((seed % 3) as usize, FaultKind::Lag(2 * SECOND)).at(start(seed))
        },
        time: Duration::from_secs(10),
        // A most-recent list waits until the cache has caught up, for at most 3 s (apiserver, `cacher/watch_cache.go`,
        // `blockTimeout`).
        promises: Promises {
            slowest_read: Duration::from_millis(3_100),
            silence: Duration::from_millis(3_100),
            ..READS
        },
    },
    Scenario {
        name: "random",
        about: "one to four random faults, which may overlap; only what must hold always is promised",
        sim: |seed| {
            let latency = MS.mul_f64(0.1) * (1 + seed % 30) as u32;
            let count = 1 + (seed % 4) as usize;
            let sim = clients(seed).latency(latency, latency / 2).bookmark_interval(BOOKMARKS);
            sim.random_faults(count, (SECOND, 15 * SECOND))
        },
        time: Duration::from_secs(20),
        promises: Promises {
            failed_reads: u64::MAX,
            slowest_read: Duration::from_secs(16),
            failed_lists: u64::MAX,
            slowest_list: Duration::MAX,
            failed_writes: u64::MAX,
            slowest_write: Duration::MAX,
            silence: Duration::from_secs(25),
            relists: 40,
            watches_broken: 0,
            watches_ended: u64::MAX,
            lease: Duration::from_secs(40),
            failed_leases: u64::MAX,
            connects: u64::MAX,
            group: GroupPromises::NONE,
        },
    },
    Scenario {
        name: "one-stream",
        about: "requests share one stream, and only its release lets the next one go on",
        sim: |seed| {
            Sim::seed(seed)
                .endpoints(1)
                .max_streams(1)
                .max_connections(1)
                .clients(Role::Readers, 8)
                .clients(Role::Writers, 4)
        },
        time: Duration::from_secs(4),
        promises: Promises {
            slowest_read: Duration::from_millis(60),
            failed_writes: 0,
            slowest_write: Duration::from_millis(60),
            ..READS
        },
    },
    Scenario {
        name: "removed",
        about: "connections to an apiserver that becomes slow drain after GOAWAY, and then it is removed from the set",
        sim: |seed| {
            let at = start(seed);
            Sim::seed(seed)
                .clients(Role::Readers, 10)
                .fault(0, FaultKind::Slow(400 * MS))
                .at(at)
                .until(at + 800 * MS)
                .fault(0, FaultKind::Slow(5 * SECOND))
                .at(at + 800 * MS)
                .until(at + 2 * SECOND)
                .fault(0, FaultKind::Goaway(1.0))
                .at(at)
                .until(at + 2 * SECOND)
                .fault(0, FaultKind::Remove)
                .at(at + 1_200 * MS)
        },
        time: Duration::from_secs(8),
        // A response takes 800 ms before the apiserver becomes slower.
        promises: Promises { slowest_read: SECOND, ..READS },
    },
    Scenario {
        name: "drained-blackhole",
        about: "all watches are on connections that drain after GOAWAY, and then the packets of one apiserver are dropped",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            let sim = clients(seed).blackhole(server).at(at);
            (0..3).fold(sim, |sim, server| sim.fault(server, FaultKind::Goaway(1.0)).until(at))
        },
        time: Duration::from_secs(8),
        // The PING is due 250 ms after the last byte and late 100 ms later; the move has 200 ms of jitter.
        promises: Promises { silence: Duration::from_millis(900), failed_writes: 6, ..READS },
    },
    Scenario {
        name: "too-old",
        about: "an apiserver has no history, and another one is killed",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            // Without writers, the cursors of watches are as old as their last bookmarks.
            Sim::seed(seed)
                .clients(Role::Informers, 12)
                .clients(Role::Readers, 2)
                .clients(Role::Leaders, 2)
                .fault(server, FaultKind::Kill)
                .at(at)
                .until(at + SECOND)
                .fault(server, FaultKind::Compact)
                .at(at + 3 * SECOND)
                .fault((server + 1) % 3, FaultKind::Kill)
                .at(at + 3 * SECOND)
        },
        time: Duration::from_secs(10),
        promises: READS,
    },
    Scenario {
        name: "started",
        about: "every apiserver is killed, and after its start refuses everybody for a second",
        sim: |seed| {
            let at = start(seed);
            let sim = Sim::seed(seed).clients(Role::Informers, 4).clients(Role::Readers, 2);
            (0..3).fold(sim, |sim, server| {
                let up = at + 8 * SECOND;
                let sim = sim.fault(server, FaultKind::Kill).at(at).until(up);
                sim.fault(server, FaultKind::Forbid).at(up).until(up + 1_100 * MS)
            })
        },
        time: Duration::from_secs(25),
        promises: Promises {
            failed_reads: u64::MAX,
            slowest_read: Duration::from_millis(1_500),
            ..READS
        },
    },
    Scenario {
        name: "starting",
        about: "each apiserver is killed in turn, and after its start refuses everybody until its RBAC is filled",
        sim: |seed| {
            let refuses = 500 * MS + MS * (seed.wrapping_mul(3_571) % 4_000) as u32;
            (0..3).fold(clients(seed), |sim, server| {
                let at = start(seed) + 8 * SECOND * server as u32;
                let up = at + 2 * SECOND;
                let sim = sim.fault(server, FaultKind::Kill).at(at).until(up);
                sim.fault(server, FaultKind::Forbid).at(up).until(up + refuses)
            })
        },
        time: Duration::from_secs(30),
        // A watch cache that has just started has no history for the cursor of a quiet watch.
        promises: Promises { slowest_read: SECOND, silence: SECOND, relists: 4, ..READS },
    },
    Scenario {
        name: "many-hedges",
        about: "two of three slow apiservers are lost with more requests than may be hedged at once",
        sim: |seed| {
            let at = start(seed);
            let sim = Sim::seed(seed).clients(Role::Readers, 60);
            let slow = |sim: Sim, server| {
                sim.fault(server, FaultKind::Slow(500 * MS)).at(at).until(at + 2 * SECOND)
            };
            let sim = (0..3).fold(sim, slow);
            sim.blackhole(0).at(at + SECOND).blackhole(1).at(at + SECOND)
        },
        // Until the requests have ended that a hedge to the other lost apiserver did not help: only then are their hedges
        // counted.
        time: Duration::from_secs(9),
        promises: Promises { slowest_read: Duration::from_secs(4), ..READS },
    },
    Scenario {
        name: "broken-bodies",
        about: "an apiserver whose packets are lost is killed while it sends responses",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            Sim::seed(seed)
                .clients(Role::Readers, 12)
                .clients(Role::Writers, 2)
                .clients(Role::Bulk, 4)
                .fault(server, FaultKind::Loss(0.3))
                .at(at)
                .until(at + SECOND)
                .fault(server, FaultKind::Kill)
                .at(at + SECOND)
        },
        time: Duration::from_secs(7),
        // A response whose body has begun is not asked for again.
        promises: Promises {
            failed_reads: 12,
            slowest_read: Duration::from_secs(3),
            failed_lists: 4,
            ..READS
        },
    },
    Scenario {
        name: "pool-ends",
        about: "a reload replaces the upstream, whose pool ends while requests wait for a stream",
        sim: |seed| {
            Sim::seed(seed)
                .endpoints(1)
                .max_streams(1)
                .max_connections(1)
                .clients(Role::Readers, 6)
                .fault(0, FaultKind::Slow(200 * MS))
                .at(SECOND)
                .until(8 * SECOND)
                .drain_timeout(300 * MS)
                .fault(0, FaultKind::ReplaceUpstream)
                .at(start(seed))
        },
        time: Duration::from_secs(9),
        promises: Promises {
            failed_reads: u64::MAX,
            // Clients send the request again after a Retry-After.
            slowest_read: Duration::from_secs(9),
            ..READS
        },
    },
    Scenario {
        name: "many-watches",
        about: "sixteen watches and one of two apiservers, which is killed, and later both",
        sim: |seed| {
            let (server, at) = ((seed % 2) as usize, start(seed));
            let kill = FaultKind::Kill;
            Sim::seed(seed)
                .endpoints(2)
                .clients(Role::Informers, 16)
                .clients(Role::Writers, 2)
                .bookmark_interval(BOOKMARKS)
                .fault(server, kill)
                .at(at)
                .until(at + 2 * SECOND)
                .fault(server, kill)
                .at(at + 7 * SECOND)
                .until(at + 12 * SECOND)
                .fault(1 - server, kill)
                .at(at + 7 * SECOND)
                .until(at + 12 * SECOND)
        },
        time: Duration::from_secs(25),
        promises: Promises {
            failed_reads: u64::MAX,
            failed_writes: u64::MAX,
            silence: Duration::from_secs(14),
            // The watch caches have no history after the start.
            relists: 32,
            ..READS
        },
    },
    Scenario {
        name: "reset-after-restart",
        about: "an apiserver is killed and returns, and its connections are reset again and again",
        sim: |seed| {
            let (server, at) = ((seed % 2) as usize, start(seed));
            let kill = Sim::seed(seed)
                .endpoints(2)
                .clients(Role::Readers, 6)
                .fault(server, FaultKind::Kill)
                .at(at)
                .until(at + 1_500 * MS);
            (0..8).fold(kill, |sim, number| {
                let at = at + 1_600 * MS + 500 * MS * number;
                sim.fault(server, FaultKind::ForgetFlows { dropped: [false; 2] }).at(at)
            })
        },
        time: Duration::from_secs(12),
        promises: Promises { failed_reads: 1, slowest_read: Duration::from_millis(300), ..READS },
    },
    Scenario {
        name: "uploads",
        about: "large objects are written and watched, and each third upload is abandoned; no fault",
        sim: |seed| {
            Sim::seed(seed)
                .clients(Role::Uploaders, 2)
                .clients(Role::Informers, 2)
                .clients(Role::Writers, 1)
                .clients(Role::Readers, 1)
        },
        time: Duration::from_secs(5),
        promises: Promises {
            slowest_read: Duration::from_millis(100),
            failed_writes: 0,
            slowest_write: Duration::from_millis(200),
            silence: Duration::from_millis(100),
            ..READS
        },
    },
    Scenario {
        name: "short-watches",
        about: "watches that last a few seconds, and every apiserver is killed for 10 s",
        sim: |seed| {
            let at = start(seed);
            let sim = Sim::seed(seed)
                .clients(Role::ShortWatches, 4)
                .clients(Role::Writers, 2)
                .clients(Role::Readers, 1);
            (0..3).fold(sim, |sim, server| {
                sim.fault(server, FaultKind::Kill).at(at).until(at + 10 * SECOND)
            })
        },
        time: Duration::from_secs(22),
        promises: Promises {
            failed_reads: u64::MAX,
            slowest_read: Duration::from_millis(1_500),
            failed_writes: u64::MAX,
            silence: Duration::from_secs(25),
            relists: 16,
            ..READS
        },
    },
    Scenario {
        name: "removed-and-lost",
        about: "an apiserver is removed from the set, and five seconds later its packets are dropped",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            let sim = clients(seed).fault(server, FaultKind::Remove).at(at);
            sim.blackhole(server).at(at + 5 * SECOND)
        },
        time: Duration::from_secs(12),
        // By then, everything has moved to the other ones.
        promises: Promises {
            slowest_read: Duration::from_millis(100),
            failed_writes: 0,
            slowest_write: Duration::from_millis(100),
            silence: Duration::from_millis(300),
            watches_ended: 0,
            // kubelet renews it every 10 s plus up to 4 %.
            lease: Duration::from_millis(10_450),
            ..READS
        },
    },
    Scenario {
        name: "unready-and-lost",
        about: "/readyz of an apiserver fails, and 13 s later its packets are dropped",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            let sim = clients(seed).fault(server, FaultKind::Unready).at(at);
            // It is asked every 10 s, and its watches have moved to the other ones some time after the second failure.
            sim.blackhole(server).at(at + 13 * SECOND)
        },
        time: Duration::from_secs(20),
        promises: Promises {
            slowest_read: Duration::from_millis(200),
            failed_writes: 0,
            slowest_write: Duration::from_millis(100),
            silence: Duration::from_millis(300),
            lease: Duration::from_millis(10_450),
            ..READS
        },
    },
    Scenario {
        name: "moved-and-lagging",
        about: "the watches of an apiserver continue on others, and then its watch cache lags",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            // The process stays the same: what it has shown counts.
            let sim = clients(seed).blackhole(server).at(at).until(at + 3 * SECOND);
            sim.fault(server, FaultKind::Lag(SECOND)).at(at + 7 * SECOND)
        },
        time: Duration::from_secs(15),
        promises: Promises {
            slowest_read: Duration::from_millis(3_100),
            silence: Duration::from_millis(3_100),
            relists: 4,
            ..READS
        },
    },
    Scenario {
        name: "unready",
        about: "the /readyz of one of three apiservers fails for ten seconds",
        sim: |seed| {
            let at = start(seed);
            let server = (seed % 3) as usize;
            clients(seed).fault(server, FaultKind::Unready).at(at).until(at + 10 * SECOND)
        },
        time: Duration::from_secs(16),
        promises: Promises {
            slowest_read: Duration::from_millis(100),
            failed_writes: 0,
            slowest_write: Duration::from_millis(100),
            silence: Duration::from_millis(300),
            ..READS
        },
    },
    Scenario {
        name: "unready-after-outage",
        about: "every apiserver is killed, and after its start is not ready and refuses everybody for five seconds",
        sim: |seed| {
            let (at, up) = (start(seed), start(seed) + 8 * SECOND);
            let sim = Sim::seed(seed).clients(Role::Informers, 4).clients(Role::Readers, 2);
            (0..3).fold(sim, |sim, server| {
                let ready = up + 5 * SECOND;
                let sim = sim.fault(server, FaultKind::Kill).at(at).until(up);
                let sim = sim.fault(server, FaultKind::Unready).at(at).until(ready);
                sim.fault(server, FaultKind::Forbid).at(at).until(ready)
            })
        },
        time: Duration::from_secs(28),
        promises: Promises {
            failed_reads: u64::MAX,
            slowest_read: Duration::from_secs(3),
            ..READS
        },
    },
    Scenario {
        name: "hang-few-streams",
        about: "the requests of one of three apiservers hang, and the streams of the others are used up",
        sim: |seed| {
            let (server, at) = ((seed % 3) as usize, start(seed));
            let sim = Sim::seed(seed).max_streams(3).max_connections(2).clients(Role::Readers, 6);
            let sim = sim.fault(server, FaultKind::Hang).at(at);
            [1, 2].into_iter().fold(sim, |sim, other| {
                let slow = sim.fault((server + other) % 3, FaultKind::Slow(200 * MS));
                slow.at(at).until(at + 5 * SECOND)
            })
        },
        time: Duration::from_secs(14),
        // The others are slow for 5 s, and a read may wait as long for one of their streams.
        promises: Promises { slowest_read: Duration::from_millis(5_500), ..READS },
    },
    Scenario {
        name: "goaway-far",
        about: "distant apiservers end connections by GOAWAY at random, while more requests are on their way",
        sim: |seed| {
            let goaway = FaultKind::Goaway(0.05);
            let sim = Sim::seed(seed).clients(Role::Readers, 2).clients(Role::Writers, 8);
            let sim = sim.latency(5 * MS, MS);
            (0..3).fold(sim, |sim, server| sim.fault(server, goaway))
        },
        time: Duration::from_secs(6),
        // A round trip takes 12 ms, and a handshake three.
        promises: Promises {
            slowest_read: Duration::from_millis(150),
            failed_writes: 0,
            slowest_write: Duration::from_millis(150),
            ..READS
        },
    },
];
