//! Two hundred reloads in a row under load: nothing fails, and nothing is left of them. Alone in
//! its process, since it counts what the process holds.

#![cfg(feature = "demo")]

#[path = "../reload/setup.rs"]
mod setup;
#[path = "../support/mod.rs"]
mod support;

use crate::setup::{Setup, Traffic, Watching};
use crate::support::{PATIENCE, TestCluster, config_map, pause, terminate_mode, wait};
use jackstay::config::{AccessLog, CertPaths, Config};
use jackstay::demo::apiserver::kinds::ObjectRef;
use jackstay::demo::client::Client;
use jackstay::demo::pki::Pki;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt;
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Counts what is allocated and not freed. Every task, connection and socket of ours has memory of
/// its own: what leaks, leaks some.
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
/// What one of the last events holds at most: allocations, and bytes. Its reason (512 bytes) is in its
/// key too, and that is kept once more where repeats are counted.
const EVENT: (isize, isize) = (12, 2560);
/// Reloads that a watch lives through. It may change its apiserver twelve times a minute; the changes
/// of so many reloads that make it do so are fewer.
const WATCHED: usize = 25;
/// What may come and go by itself for each reload: allocations and bytes. A task, a pool or a
/// listener that is left behind has more.
const SLACK: (isize, isize) = (8, 1024);
/// What may be under way when it is counted, a probe or a dial: tasks, of which a leak would have one
/// for each reload at least.
const TASKS_UNDER_WAY: isize = 20;
/// Descriptors of the same: five connections, of which both ends are here. What a reload leaves behind
/// is left by fourteen of them at least.
const DESCRIPTORS_UNDER_WAY: usize = 10;
/// Changes that the servers remember: those of many seconds.
const HISTORY: usize = 2000;

/// The configuration of the `n`th reload: everything that a reload can change comes and goes, at
/// different paces.
fn nth(n: usize, base: &Config, cluster: &TestCluster) -> Config {
    let mut config = base.clone();
    let path = |name: &str| cluster.certs.path().join(name);
    config.log.access = if n.is_multiple_of(2) { AccessLog::Off } else { AccessLog::Errors };
    config.listeners[0].limits.max_connections = 500 + n % 3;
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

/// What the process holds when nothing is under way.
#[derive(Clone, Copy)]
struct Held {
    allocations: isize,
    bytes: isize,
    tasks: isize,
    descriptors: usize,
    resident: usize,
}

impl fmt::Display for Held {
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

fn held() -> Held {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    Held {
        allocations: LIVE.load(Relaxed),
        bytes: BYTES.load(Relaxed),
        tasks: TASKS.load(Relaxed),
        descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        resident: pages * 4096,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_reloads_under_load() {
    let mut setup = Setup::new(3).await;
    let node = setup.cluster.certs.pki.client(&jackstay::demo::pki::Subject::node("n1")).unwrap();
    node.write_to(setup.cluster.certs.path(), "node").unwrap();
    let both =
        format!("{}{}", setup.cluster.certs.pki.ca_pem(), Pki::new("next").unwrap().ca_pem());
    std::fs::write(setup.cluster.certs.path().join("bundle.crt"), both).unwrap();
    // What the servers remember is bounded and full before anything is counted.
    setup.cluster.state.audit().set_enabled(false);
    setup.cluster.state.set_bookmark_interval(Duration::from_millis(500));
    setup.cluster.state.set_history(HISTORY);
    setup.write_config_map();
    let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
    let place = ObjectRef { kind, namespace: "default", name: "m0" };
    for number in 0..HISTORY + 10 {
        let next = config_map("m0", &number.to_string());
        setup.cluster.state.modify(place, false, |_| Ok(next)).unwrap();
    }
    let base = setup.config.clone();
    let client = setup.client().await;
    // Everything has been there, and most of what is bounded is full, before it is counted.
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
    let resumes = async |outcome: &str| {
        setup.proxy.metric(&format!("jackstay_watch_resumes_total{{outcome=\"{outcome}\"}}")).await
    };
    println!("{} resumes", resumes("resumed").await);
    assert!(resumes("gave_up").await < 0.5);
}

/// Reloads in a row under load. The last configuration is the base.
async fn round(setup: &mut Setup, base: &Config, client: &Client) -> (f64, Duration) {
    let traffic = Traffic::start(setup, 500).await;
    let mut watches = watch(setup, client).await;
    let began = Instant::now();
    for n in 1..RELOADS {
        setup.config = nth(n, base, &setup.cluster);
        setup.change(|_| {}).await;
        if n.is_multiple_of(WATCHED) {
            are_whole(setup, &watches).await;
            watches = watch(setup, client).await;
        }
    }
    setup.config = base.clone();
    setup.change(|_| {}).await;
    let took = began.elapsed();
    traffic.goes_on().await;
    are_whole(setup, &watches).await;
    (traffic.end().await, took)
}

async fn watch(setup: &Setup, client: &Client) -> Vec<Watching> {
    let mut watches = Vec::new();
    for _ in 0..WATCHES {
        watches.push(setup.watch(client).await);
    }
    watches
}

async fn are_whole(setup: &Setup, watches: &[Watching]) {
    for watch in watches {
        watch.is_complete(setup).await;
    }
}

/// How many of the last events are kept.
async fn events(setup: &Setup) -> isize {
    let page = setup.proxy.page("/events").await;
    let body = page.split_once("\r\n\r\n").map_or(page.as_str(), |(_, body)| body);
    let all: serde_json::Value = serde_json::from_str(body).expect("JSON");
    all["events"].as_array().expect("events").len().cast_signed()
}

/// Waits until what goes is gone: about as many descriptors and as much memory as before.
async fn settled(setup: &Setup, before: Option<(Held, isize)>) -> Held {
    setup.proxy.wait_connected(3).await;
    let Some((before, told)) = before else {
        // Drains take two seconds at most here; what is counted is compared later, not now.
        let mut last = held();
        loop {
            pause(Duration::from_secs(3)).await;
            let now = held();
            if now.descriptors >= last.descriptors && now.allocations >= last.allocations - 50 {
                return now;
            }
            last = now;
        }
    };
    // The last events are bounded, and may not have been full before: like ones are one.
    let more = (events(setup).await - told).max(0);
    wait::until_ok(PATIENCE * 2, "all is as it was", async || {
        let now = held();
        if now.descriptors <= before.descriptors + DESCRIPTORS_UNDER_WAY
            && now.allocations
                < before.allocations + SLACK.0 * RELOADS.cast_signed() + EVENT.0 * more
            && now.bytes < before.bytes + SLACK.1 * RELOADS.cast_signed() + EVENT.1 * more
            && now.tasks < before.tasks + TASKS_UNDER_WAY
        {
            return Ok(now);
        }
        Err(format!("{before} -> {now}"))
    })
    .await
}
