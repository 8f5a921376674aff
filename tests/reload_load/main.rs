//! Two hundred reloads under load: nothing fails, and nothing leaks. The test has its own process,
//! since it counts the resources of the process.

#![cfg(feature = "demo")]

#[path = "../reload/setup.rs"]
mod setup;
#[path = "../support/mod.rs"]
mod support;

use crate::setup::{CheckedWatch, Setup, Traffic};
use crate::support::{PATIENCE, TestCluster, config_map, pause, terminate_mode, wait};
use jackstay::config::{AccessLog, CertPaths, Config};
use jackstay::demo::apiserver::kinds::{CONFIG_MAPS, ObjectRef};
use jackstay::demo::client::Client;
use jackstay::demo::pki::Pki;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counts live allocations. Every task, connection and socket allocates memory, so every leak is
/// counted.
struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
static BYTES: AtomicIsize = AtomicIsize::new(0);
static TASKS: AtomicIsize = AtomicIsize::new(0);

/// Whether this is a task of tokio: nothing else here is aligned to two cache lines.
fn is_task(layout: Layout) -> isize {
    isize::from(layout.align() == 128)
}

// SAFETY: the system allocator does the work; counting allocates nothing.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(1, Relaxed);
        BYTES.fetch_add(layout.size().cast_signed(), Relaxed);
        TASKS.fetch_add(is_task(layout), Relaxed);
        // SAFETY: as our caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(1, Relaxed);
        BYTES.fetch_sub(layout.size().cast_signed(), Relaxed);
        TASKS.fetch_sub(is_task(layout), Relaxed);
        // SAFETY: as our caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const RELOADS: usize = 200;
const WATCHES: usize = 20;
/// The most that a recorded event holds: allocations and bytes. Its reason (512 bytes) is also in
/// its key, which is stored once more where repetitions are counted.
const EVENT: (isize, isize) = (12, 2560);
/// Reloads per watch. A watch may be resumed twelve times a minute; so many reloads resume it less
/// often.
const RELOADS_PER_WATCH: usize = 25;
/// The variation per reload that is no leak: allocations and bytes. A leaked task, pool or listener
/// has more.
const SLACK: (isize, isize) = (8, 1024);
/// Tasks that may run when the resources are counted, for example a probe. A leak would have at
/// least one task per reload.
const RUNNING_TASKS: isize = 20;
/// Descriptors of such tasks: five connections with both ends in this process. A leak would have at
/// least fourteen.
const RUNNING_DESCRIPTORS: usize = 10;
/// The history of the servers: changes of many seconds.
const HISTORY: usize = 2000;

/// The configuration of the `n`th reload: everything that can change does, in different rhythms.
fn nth_config(n: usize, base: &Config, cluster: &TestCluster) -> Config {
    let mut config = base.clone();
    let path = |name: &str| cluster.certs.path().join(name);
    config.log.access = if n.is_multiple_of(2) { AccessLog::Off } else { AccessLog::Errors };
    config.listeners[0].limits_mut().max_connections = 500 + n % 3;
    config.upstreams[0].health.dead_after = Duration::from_millis(2000 + 100 * (n as u64 % 3));
    if n % 3 == 1 {
        let pair = CertPaths { cert_file: path("node.crt"), key_file: path("node.key") };
        terminate_mode(&mut config).identities.push(pair);
    }
    if n % 8 == 2 {
        config.upstreams[0].endpoints.pop();
    }
    if n % 10 == 3 {
        config.upstreams[0].tls.ca_file = Some(path("bundle.crt"));
    }
    if n % 6 >= 4 {
        let mut spare = config.upstreams[0].clone();
        spare.name = "spare".into();
        config.upstreams.push(spare);
    }
    if n % 6 == 4 {
        let mut spare = config.listeners[0].clone();
        spare.name = "spare".into();
        spare.upstream = "spare".into();
        config.listeners.push(spare);
    }
    if n % 14 == 5 {
        config.upstreams[0].tls.server_name = Some("localhost".into());
    }
    config
}

/// Resources of the process.
#[derive(Clone, Copy)]
struct Resources {
    allocations: isize,
    bytes: isize,
    tasks: isize,
    descriptors: usize,
    resident: usize,
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} allocations ({} KiB), {} tasks, {} descriptors, {} KiB resident",
            self.allocations,
            self.bytes / 1024,
            self.tasks,
            self.descriptors,
            self.resident / 1024
        )
    }
}

fn resources() -> Resources {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    Resources {
        allocations: LIVE.load(Relaxed),
        bytes: BYTES.load(Relaxed),
        tasks: TASKS.load(Relaxed),
        descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        resident: pages * 4096,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_reloads_under_load_leak_nothing() {
    let mut setup = Setup::new(3).await;
    let node = setup.cluster.certs.pki.client(&jackstay::demo::pki::Subject::node("n1")).unwrap();
    node.write_to(setup.cluster.certs.path(), "node").unwrap();
    let both =
        format!("{}{}", setup.cluster.certs.pki.ca_pem(), Pki::new("next").unwrap().ca_pem());
    std::fs::write(setup.cluster.certs.path().join("bundle.crt"), both).unwrap();
    // The history of the servers is full before the resources are counted.
    setup.cluster.state.audit().set_enabled(false);
    setup.cluster.state.set_bookmark_interval(Duration::from_millis(500));
    setup.cluster.state.set_history_limit(HISTORY);
    setup.write_config_map();
    let place = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m0" };
    for number in 0..HISTORY + 10 {
        let next = config_map("m0", &number.to_string());
        setup.cluster.state.modify(place, false, |_| Ok(next)).unwrap();
    }
    let base = setup.config.clone();
    let client = setup.client().await;
    // The first round fills all caches before the resources are counted.
    round(&mut setup, &base, &client).await;
    let before = (settled(&setup, None).await, events(&setup).await);
    let (rate, took) = round(&mut setup, &base, &client).await;
    let after = settled(&setup, Some(before)).await;
    println!(
        "{RELOADS} reloads in {took:?} under {rate:.0} requests a second and {WATCHES} watches: \
         {} -> {after}",
        before.0
    );
    assert_eq!(setup.proxy.status().await["config"]["reloads"]["failed"], 0);
    println!("{} resumes", setup.proxy.resumes("resumed").await);
    assert!(setup.proxy.resumes("gave_up").await < 0.5);
}

/// Reloads under load. The last configuration is the base.
async fn round(setup: &mut Setup, base: &Config, client: &Client) -> (f64, Duration) {
    let traffic = Traffic::start(setup, 500).await;
    let mut watches = watch(setup, client).await;
    let began = Instant::now();
    for n in 1..RELOADS {
        setup.config = nth_config(n, base, &setup.cluster);
        setup.change(|_| {}).await;
        if n.is_multiple_of(RELOADS_PER_WATCH) {
            are_complete(setup, &watches).await;
            watches = watch(setup, client).await;
        }
    }
    setup.config = base.clone();
    setup.change(|_| {}).await;
    let took = began.elapsed();
    traffic.expect_progress().await;
    are_complete(setup, &watches).await;
    (traffic.end().await, took)
}

async fn watch(setup: &Setup, client: &Client) -> Vec<CheckedWatch> {
    let mut watches = Vec::new();
    for _ in 0..WATCHES {
        watches.push(setup.watch(client).await);
    }
    watches
}

async fn are_complete(setup: &Setup, watches: &[CheckedWatch]) {
    for watch in watches {
        watch.expect_complete(setup).await;
    }
}

/// The number of recorded events.
async fn events(setup: &Setup) -> isize {
    setup.proxy.events().await.len().cast_signed()
}

/// Waits until the process has about as many resources as before.
async fn settled(setup: &Setup, before: Option<(Resources, isize)>) -> Resources {
    setup.proxy.wait_connected(3).await;
    let Some((before, events_before)) = before else {
        // Drains take at most two seconds here; the result is compared later.
        let mut last = resources();
        loop {
            pause(Duration::from_secs(3)).await;
            let now = resources();
            if now.descriptors >= last.descriptors && now.allocations >= last.allocations - 50 {
                return now;
            }
            last = now;
        }
    };
    // The list of events may not have been full before; equal events are one entry.
    let more = (events(setup).await - events_before).max(0);
    wait::until_ok(PATIENCE * 2, "the resources are as before", async || {
        let now = resources();
        if now.descriptors <= before.descriptors + RUNNING_DESCRIPTORS
            && now.allocations
                < before.allocations + SLACK.0 * RELOADS.cast_signed() + EVENT.0 * more
            && now.bytes < before.bytes + SLACK.1 * RELOADS.cast_signed() + EVENT.1 * more
            && now.tasks < before.tasks + RUNNING_TASKS
        {
            return Ok(now);
        }
        Err(format!("{before} -> {now}"))
    })
    .await
}
