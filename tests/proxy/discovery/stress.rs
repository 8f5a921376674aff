//! Endpoint updates during drains, reloads and faults: each is applied, and no thread hangs.
//!
//! ```text
//! JACKSTAY_LONG=1 cargo test --test proxy updates_reloads_and_faults -- --nocapture       60 s
//! JACKSTAY_LONG=1 cargo test --test proxy updates_are_applied -- --nocapture              20 min
//! ```
//!
//! There is no loom or shuttle model: threads share only `arc-swap` pointers, channels, tokio's `Notify`
//! and `watch`, atomics, and mutexes that are held for a few statements without an await and without
//! another lock. shuttle cannot schedule these crates, and loom can schedule tokio only from within, so a
//! model would check a copy of the code. These tests run the code itself on its own threads. Only an
//! endpoint's count and state must agree between threads; both are under one mutex.

use crate::discovery::traffic::{endpoint_addresses, wait_for_set};
use crate::reload::setup::Setup;
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    CONFIGMAPS, PATIENCE, long_form, pause, soon, until, write_config, write_lines,
};
use jackstay::app::reload::ReloadOutcome;
use jackstay_config::{AccessLog, Config};
use jackstay_core::discovery::address::EndpointAddress;
use std::time::{Duration, Instant};

/// Promised time from an update of the configuration to the new set: the debounce window of 1 s, and
/// 0.5 s.
const UPDATE: Duration = Duration::from_millis(1500);

/// 100 watches that can neither move nor end keep a removed endpoint draining. A unit test makes 1,000
/// updates on a paused clock; this test makes a few with real watches.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn updates_are_applied_during_an_endless_drain() {
    let mut setup = Setup::new(2).await;
    let endpoints = setup.config.upstreams[0].endpoints.clone();
    setup.change(|config| config.upstreams[0].endpoints.truncate(1)).await;
    wait_for_set(&setup.proxy, &[endpoints[0].to_string()]).await;
    // A watch without a version is never resumed in its initial phase.
    let kind = &jackstay_apiserver::kinds::CONFIG_MAPS;
    let create = |name: &str| {
        let map = crate::support::config_map(name, "1");
        setup.cluster.state.create(kind, "default", map, false).unwrap();
    };
    create("a");
    let client = setup.client().await;
    let mut watches = Vec::new();
    for _ in 0..100 {
        let mut watch = client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap();
        assert_eq!(watch.next().await.unwrap().unwrap()["type"], "ADDED");
        watches.push(watch);
    }
    let mut config = setup.config.clone();
    config.upstreams[0].endpoints = endpoints[1..].to_vec();
    write_config(&setup.file, &config);
    assert!(matches!(setup.reload_file().await, ReloadOutcome::Ok { .. }));
    wait_for_set(&setup.proxy, &[endpoints[1].to_string()]).await;

    let updates = if long_form() { 1000 } else { 12 };
    let mut took = Vec::new();
    for update in 0..updates {
        let added = EndpointAddress { host: format!("127.2.0.{}", update % 200 + 1), port: 9 };
        config.upstreams[0].endpoints = vec![endpoints[1].clone(), added.clone()];
        write_config(&setup.file, &config);
        let start = Stopwatch::start();
        assert!(matches!(setup.reload_file().await, ReloadOutcome::Ok { .. }));
        let added = added.to_string();
        until("the update is applied", async || {
            let set = endpoint_addresses(&setup.proxy).await;
            set.len() == 2 && set.contains(&added)
        })
        .await;
        took.push(start.elapsed());
    }
    took.sort_unstable();
    let (median, slowest) = (took[updates / 2], took[updates - 1]);
    println!("{updates} updates: median {median:?}, slowest {slowest:?} (promised: {UPDATE:?})");
    assert!(slowest < 2 * UPDATE, "{slowest:?}");
    let running = setup.proxy.metric("jackstay_watches").await;
    assert!((99.5..100.5).contains(&running), "the endpoint still drains: {running}");
    create("b");
    for mut watch in watches {
        let event = soon("an event", watch.next()).await.unwrap().unwrap();
        assert_eq!(event["type"], "ADDED", "the watches still run");
    }
}

/// The configuration of the `n`th reload. Each setting changes with a period of its own.
fn nth_config(n: usize, base: &Config) -> Config {
    let mut config = base.clone();
    let upstream = &mut config.upstreams[0];
    upstream.connections.max = 32 + n % 3;
    if n % 3 == 1 {
        upstream.endpoints.pop();
    }
    if n % 4 == 2 {
        // Another server name replaces every endpoint and its connections.
        upstream.tls.server_name = Some("localhost".into());
    }
    if n % 7 == 5 {
        upstream.endpoints_file = None;
    }
    config.log.access = if n.is_multiple_of(2) { AccessLog::Off } else { AccessLog::Errors };
    if n % 6 >= 3 {
        let mut spare = config.upstreams[0].clone();
        spare.name = "spare".into();
        config.upstreams.push(spare);
    }
    if n % 6 == 4 {
        let mut spare = config.listeners[0].clone();
        (spare.name, spare.upstream) = ("spare".into(), "spare".into());
        config.listeners.push(spare);
    }
    config
}

/// After endpoint updates, connects, ejections, resets and reloads at the same time, the set is the
/// configured one, and every thread ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_reloads_and_faults_at_once_hang_no_request_and_no_thread() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("endpoints");
    let setup = Setup::with(3, |config| {
        config.workers = 2;
        config.upstreams[0].endpoints_file = Some(path.clone());
        config.state_dir = Some(dir.path().join("state"));
    })
    .await;
    let (cluster, proxy) = (&setup.cluster, &setup.proxy);
    let addresses: Vec<_> = cluster.addresses().iter().map(ToString::to_string).collect();
    write_lines(&path, &addresses);
    proxy.wait_connected(3).await;
    let time = Duration::from_secs(if long_form() { 60 } else { 5 });
    let mut clients = Vec::new();
    for _ in 0..4 {
        let client = proxy.client().await;
        clients.push(tokio::spawn(async move {
            let (start, mut served) = (Instant::now(), 0);
            while start.elapsed() < time {
                // Requests may fail, because servers are killed, but must not hang.
                let reply = soon("a response or an error", client.get(CONFIGMAPS)).await;
                served += usize::from(reply.is_ok_and(|reply| reply.status == 200));
                pause(Duration::from_millis(2)).await;
            }
            served
        }));
    }
    let start = Instant::now();
    let inject_faults = async {
        let mut step = 0_usize;
        while start.elapsed() < time {
            let server = &cluster.servers[step % 3];
            match step % 7 {
                0 => server.kill(),
                1 => cluster.servers[(step - 1) % 3].restart().unwrap(),
                2 => server.reset_connections(),
                3 => server.goaway(),
                4 => write_lines(&path, &addresses[step % 3..]),
                5 => write_lines(
                    &path,
                    &[format!("127.3.0.{}:9", step % 250 + 1), addresses[0].clone()],
                ),
                _ => {
                    proxy.status().await;
                }
            }
            step += 1;
            pause(Duration::from_millis(30)).await;
        }
        step
    };
    let reload = async {
        let mut reloads = 0;
        while start.elapsed() < time {
            write_config(&setup.file, &nth_config(reloads, &setup.config));
            let outcome = setup.reload_file().await;
            assert!(matches!(outcome, ReloadOutcome::Ok { .. }), "{outcome:?}");
            reloads += 1;
            pause(Duration::from_millis(70)).await;
        }
        reloads
    };
    let (steps, reloads) = tokio::join!(inject_faults, reload);
    let mut responses = 0;
    for client in clients {
        let served = client.await.expect("no request hangs");
        assert!(served > 0);
        responses += served;
    }
    for server in cluster.servers.iter().filter(|server| !server.is_running()) {
        server.restart().unwrap();
    }
    write_lines(&path, &addresses);
    write_config(&setup.file, &setup.config);
    assert!(matches!(setup.reload_file().await, ReloadOutcome::Ok { .. }));
    wait_for_set(proxy, &addresses).await;
    proxy.wait_connected(3).await;
    println!("{steps} faults, {reloads} reloads, {responses} responses in {:?}", start.elapsed());
    let ready = proxy.page("/readyz").await;
    assert!(
        ready.starts_with("HTTP/1.1 200") && !ready.contains("control loop stalled"),
        "{ready}"
    );
    let live = proxy.page("/livez").await;
    assert!(live.starts_with("HTTP/1.1 200"), "{live}");
    // Every thread ends.
    let running = setup.proxy.running;
    let end = tokio::task::spawn_blocking(move || running.stop());
    let healthy = tokio::time::timeout(PATIENCE, end).await.expect("no thread hangs").unwrap();
    assert!(healthy, "no worker panicked");
}
