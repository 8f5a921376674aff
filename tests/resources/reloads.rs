//! Two hundred reloads under load: no request fails, and nothing leaks.

#[path = "../proxy/reload/setup.rs"]
mod setup;

use crate::allocator::{ALLOCATIONS, BYTES, TASKS};
use crate::reloads::setup::{CheckedWatch, Setup, Traffic};
use crate::support::{PATIENCE, TestCluster, config_map, pause, terminate_mode, wait};
use jackstay_apiserver::client::Client;
use jackstay_apiserver::kinds::{CONFIG_MAPS, ObjectRef};
use jackstay_apiserver::pki::Pki;
use jackstay_config::{AccessLog, CertPaths, Config};
use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const RELOADS: usize = 200;
const WATCHES: usize = 20;
/// Maximum of allocations and bytes of a recorded event. Its reason (512 bytes) is also in its key, which is
/// stored a second time for counting repetitions.
const PER_EVENT: (isize, isize) = (12, 2560);
/// Reloads after which the watches are replaced. A watch may be resumed only twelve times a minute, and 25
/// reloads resume it less often.
const RELOADS_PER_WATCH: usize = 25;
/// Allocations and bytes per reload that do not indicate a leak. A leaked task, pool or listener has more. Each thread
/// may hold one more read buffer of 64 KiB than before.
const SLACK_PER_RELOAD: (isize, isize) = (8, 2048);
/// Tasks that may run at the moment of counting, such as probes. A leak has at least one task per reload.
const RUNNING_TASKS: isize = 20;
/// Descriptors of such tasks: five connections with both ends in this process. A leak has at least fourteen.
const RUNNING_DESCRIPTORS: usize = 10;
/// Length of the servers' history, in changes: it covers many seconds.
const HISTORY: usize = 2000;

/// The configuration of the `n`th reload. Each setting that can change does so with its own period.
fn nth_config(n: usize, base: &Config, cluster: &TestCluster) -> Config {
    let mut config = base.clone();
    let path = |name: &str| cluster.certs.path().join(name);
    config.log.access = if n.is_multiple_of(2) { AccessLog::Off } else { AccessLog::Errors };
    config.listeners[0].limits_mut().max_connections = 500 + n % 3;
    config.upstreams[0].health.dead_after = Duration::from_millis(2000 + 100 * (n as u64 % 3));
    if n % 3 == 1 {
        let pair = CertPaths { cert_file: path("node.crt"), key_file: path("node.key") };
        terminate_mode(&mut config).identities.push(pair.into());
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

/// The resources of the process.
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
        allocations: ALLOCATIONS.load(Relaxed),
        bytes: BYTES.load(Relaxed),
        tasks: TASKS.load(Relaxed),
        descriptors: std::fs::read_dir("/proc/self/fd").unwrap().count(),
        resident: pages * 4096,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_reloads_under_load_leak_nothing() {
    let _alone = crate::alone().await;
    let mut setup = Setup::new(3).await;
    let node =
        setup.cluster.certs.pki.client(&jackstay_apiserver::pki::Subject::node("n1")).unwrap();
    node.write_to(setup.cluster.certs.path(), "node").unwrap();
    let both =
        format!("{}{}", setup.cluster.certs.pki.ca_pem(), Pki::new("next").unwrap().ca_pem());
    std::fs::write(setup.cluster.certs.path().join("bundle.crt"), both).unwrap();
    // Fill the history of the servers before the resources are counted.
    setup.cluster.state.audit().set_enabled(false);
    setup.cluster.state.set_bookmark_interval(Duration::from_millis(500));
    setup.cluster.state.set_history_limit(HISTORY);
    setup.write_config_map();
    let object_ref = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m0" };
    for number in 0..HISTORY + 10 {
        let object = config_map("m0", &number.to_string());
        setup.cluster.state.modify(object_ref, false, |_| Ok(object)).unwrap();
    }
    let base = setup.config.clone();
    let client = setup.client().await;
    // A first round fills all caches before the resources are counted.
    run_reloads(&mut setup, &base, &client).await;
    let (before, events) = (wait_until_drained(&setup).await, event_count(&setup).await);
    let (rate, duration) = run_reloads(&mut setup, &base, &client).await;
    let after = wait_until_as_before(&setup, before, events).await;
    println!(
        "{RELOADS} reloads in {duration:?} under {rate:.0} requests a second and {WATCHES} watches: \
         {before} -> {after}"
    );
    assert_eq!(setup.proxy.status().await["config"]["reloads"]["failed"], 0);
    println!("{} resumes", setup.proxy.resumes("resumed").await);
    assert!(setup.proxy.resumes("gave_up").await < 0.5);
}

/// Reloads under load, at last the base configuration. Returns the rate of requests and the duration.
async fn run_reloads(setup: &mut Setup, base: &Config, client: &Client) -> (f64, Duration) {
    let traffic = Traffic::start(setup, 500).await;
    let mut watches = start_watches(setup, client).await;
    let start = Instant::now();
    for n in 1..RELOADS {
        setup.config = nth_config(n, base, &setup.cluster);
        setup.change(|_| {}).await;
        if n.is_multiple_of(RELOADS_PER_WATCH) {
            expect_complete(setup, &watches).await;
            watches = start_watches(setup, client).await;
        }
    }
    setup.config = base.clone();
    setup.change(|_| {}).await;
    let duration = start.elapsed();
    traffic.expect_progress().await;
    expect_complete(setup, &watches).await;
    (traffic.end().await, duration)
}

async fn start_watches(setup: &Setup, client: &Client) -> Vec<CheckedWatch> {
    let mut watches = Vec::new();
    for _ in 0..WATCHES {
        watches.push(setup.watch(client).await);
    }
    watches
}

async fn expect_complete(setup: &Setup, watches: &[CheckedWatch]) {
    for watch in watches {
        watch.expect_complete(setup).await;
    }
}

/// The number of recorded events.
async fn event_count(setup: &Setup) -> isize {
    setup.proxy.events().await.len().cast_signed()
}

/// Waits until all drains have ended, which take at most two seconds here: the resources do not shrink any more.
async fn wait_until_drained(setup: &Setup) -> Resources {
    setup.proxy.wait_connected(3).await;
    let mut previous = resources();
    loop {
        pause(Duration::from_secs(3)).await;
        let now = resources();
        if now.descriptors >= previous.descriptors && now.allocations >= previous.allocations - 50 {
            return now;
        }
        previous = now;
    }
}

/// Waits until the process has no more resources than `before`, when it had recorded `events`, apart from
/// accepted variations.
async fn wait_until_as_before(setup: &Setup, before: Resources, events: isize) -> Resources {
    setup.proxy.wait_connected(3).await;
    let (reloads, new_events) = (RELOADS.cast_signed(), (event_count(setup).await - events).max(0));
    wait::until_ok(PATIENCE * 2, "the resources are as before", async || {
        let now = resources();
        if now.descriptors <= before.descriptors + RUNNING_DESCRIPTORS
            && now.allocations
                < before.allocations + SLACK_PER_RELOAD.0 * reloads + PER_EVENT.0 * new_events
            && now.bytes < before.bytes + SLACK_PER_RELOAD.1 * reloads + PER_EVENT.1 * new_events
            && now.tasks < before.tasks + RUNNING_TASKS
        {
            return Ok(now);
        }
        Err(format!("{before} -> {now}"))
    })
    .await
}
