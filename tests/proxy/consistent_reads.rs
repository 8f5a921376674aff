//! Reads of any version do not go back in time, although the watch caches of the apiservers differ.
//!
//! Each server answers reads and watches from a cache whose version the test sets: a read of any version is answered
//! from it, and a read that is not older than a higher version gets a 504, as from kube-apiserver after 3 s.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::versioned_client::{OBJECT, VersionedClient, get, list};
use crate::support::wait::until_within;
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{
    CONFIGMAPS, PATIENCE, Proxy, TestCluster, config_map, until, without_suspicion,
};
use http::request::Parts;
use http::{Method, StatusCode};
use jackstay::control::saved_floors;
use jackstay_apiserver::ScriptedResponse;
use jackstay_apiserver::kinds::{CONFIG_MAPS, ObjectRef};
use jackstay_config::{Config, ConsistentReads};
use serde_json::json;

/// The watch cache of one server.
#[derive(Default)]
struct Cache {
    /// The version at which it stands still; 0 while it follows the cluster.
    version: AtomicU64,
    /// The path and query of each read.
    reads: Mutex<Vec<String>>,
}

impl Cache {
    /// Answers a read from a cache that stands still.
    fn answer(&self, request: &Parts) -> Option<ScriptedResponse> {
        let target = request.uri.path_and_query()?.as_str();
        if request.method != Method::GET || !target.starts_with(CONFIGMAPS) {
            return None;
        }
        // What the prober asks is no read of a client.
        if request.headers.get("user-agent").is_none_or(|agent| agent != "jackstay-readyz") {
            self.reads.lock().unwrap().push(target.to_owned());
        }
        let current = self.version.load(Ordering::Relaxed);
        let query = request.uri.query().unwrap_or_default();
        let wanted = query.split('&').find_map(|pair| pair.strip_prefix("resourceVersion="));
        // A read without a version is most recent.
        let wanted: u64 = wanted.filter(|_| current > 0)?.parse().ok()?;
        let is_exact = query.contains("resourceVersionMatch=Exact");
        let current = if is_exact { wanted } else { current };
        if wanted > current {
            let message =
                format!("Timeout: Too large resource version: {wanted}, current: {current}");
            return Some(ScriptedResponse::status(504, "Timeout", &message));
        }
        if query.contains("watch=1") {
            return None;
        }
        let meta =
            json!({ "name": "m", "namespace": "default", "resourceVersion": current.to_string() });
        let body = if request.uri.path() == OBJECT {
            json!({ "kind": "ConfigMap", "apiVersion": "v1", "metadata": meta })
        } else {
            let meta = json!({ "resourceVersion": current.to_string() });
            json!({ "kind": "ConfigMapList", "apiVersion": "v1", "metadata": meta, "items": [] })
        };
        let mut response = ScriptedResponse::status(200, "", "");
        response.body = body.to_string().into();
        Some(response)
    }
}

struct Setup {
    cluster: TestCluster,
    caches: Vec<Arc<Cache>>,
    proxy: Proxy,
    client: VersionedClient,
}

impl Setup {
    async fn new(consistent_reads: ConsistentReads) -> Self {
        Self::with(|config| config.upstreams[0].consistent_reads = consistent_reads).await
    }

    async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::new(3);
        let change = |config: &mut Config| {
            // A hedged read is read twice, and a suspected server is not asked.
            without_suspicion(config);
            change(config);
        };
        let proxy = cluster.start_with(change).await;
        let client = proxy.client().await;
        let caches: Vec<Arc<Cache>> = cluster.servers.iter().map(|_| Arc::default()).collect();
        for (server, cache) in cluster.servers.iter().zip(&caches) {
            let cache = Arc::clone(cache);
            server.set_faults(|faults| {
                faults.on_request = Some(Arc::new(move |request| cache.answer(request)));
            });
        }
        let client = VersionedClient::create(client).await;
        Self { cluster, caches, proxy, client }
    }

    /// The caches of these servers stand still at the present version of the cluster.
    fn freeze(&self, servers: &[usize]) -> u64 {
        let version = self.cluster.state.version();
        for &server in servers {
            self.caches[server].version.store(version, Ordering::Relaxed);
        }
        version
    }

    /// Only these servers answer late, so that the load makes jackstay use the others: without that, one slow response
    /// could keep the load of a server above that of the others for a minute.
    fn delay(&self, servers: &[usize]) {
        for (at, server) in self.cluster.servers.iter().enumerate() {
            let delay = Duration::from_millis(if servers.contains(&at) { 100 } else { 0 });
            server.set_faults(|faults| faults.delay = delay);
        }
    }

    /// The number of reads that are older than the one before.
    async fn count_back(&self, target: &str, reads: usize) -> usize {
        let (mut last, mut back) = (0, 0);
        for _ in 0..reads {
            let version = self.client.read(target).await;
            back += usize::from(version < last);
            last = version;
        }
        back
    }

    /// The reads that a server has got since the last call.
    fn take_reads(&self, server: usize) -> Vec<String> {
        std::mem::take(&mut self.caches[server].reads.lock().unwrap())
    }

    async fn floors(&self, outcome: &str) -> u64 {
        let name = format!("jackstay_version_floors_total{{outcome=\"{outcome}\"");
        self.proxy.metric(&name).await as u64
    }
}

#[tokio::test]
async fn reads_with_one_lagging_cache_never_go_back() {
    let mut setup = Setup::new(ConsistentReads::Floor).await;
    for target in [list(), get()] {
        setup.freeze(&[0]);
        setup.client.write().await;
        assert_eq!(setup.count_back(&target, 100).await, 0, "{target}");
    }
    let reads = setup.take_reads(0);
    let with_floor = reads.iter().filter(|read| !read.ends_with("resourceVersion=0")).count();
    println!("{} reads at the lagging server, {with_floor} of them with a floor", reads.len());
    assert_eq!(setup.floors("fallen_back").await, 0);
    assert_eq!(setup.floors("reset").await, 0);
}

#[tokio::test]
async fn reads_with_a_lagging_cache_go_back_without_floors() {
    let mut setup = Setup::new(ConsistentReads::Off).await;
    for target in [list(), get()] {
        setup.freeze(&[0]);
        let written = setup.client.write().await;
        setup.delay(&[0]);
        until_within(6 * PATIENCE, "a read is answered by another cache", async || {
            setup.client.read(&target).await == written
        })
        .await;
        setup.delay(&[1, 2]);
        until_within(6 * PATIENCE, "a read goes back", async || {
            setup.client.read(&target).await < written
        })
        .await;
    }
}

#[tokio::test]
async fn floor_of_a_client_counts_on_its_next_connection() {
    let mut setup = Setup::new(ConsistentReads::Floor).await;
    setup.freeze(&[0, 1]);
    let written = setup.client.write().await;
    for _ in 0..20 {
        setup.client = VersionedClient::new(setup.proxy.client().await);
        assert_eq!(setup.client.read(&get()).await, written);
    }
}

#[tokio::test]
async fn floor_of_a_client_counts_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("state");
    let change = |config: &mut Config| {
        without_suspicion(config);
        config.state_dir = Some(state_dir.clone());
    };
    let mut setup = Setup::with(change).await;
    let file = saved_floors::path(&state_dir, "control-plane");
    // Until the file was read and written at the start, no client has a key.
    until("clients have keys", async || file.exists()).await;
    setup.freeze(&[0, 1]);
    let written = setup.client.write().await;
    let Setup { cluster, caches, proxy, client } = setup;
    drop(client);
    // The drain writes the file.
    tokio::task::spawn_blocking(move || proxy.running.stop()).await.unwrap();
    until("the floors are saved", async || {
        fs::read_to_string(&file).is_ok_and(|text| text.contains("configmaps"))
    })
    .await;
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let proxy = cluster.start_with(change).await;
    let client = VersionedClient::new(proxy.client().await);
    let setup = Setup { cluster, caches, proxy, client };
    for _ in 0..20 {
        assert_eq!(setup.client.read(&get()).await, written);
    }
}

#[tokio::test]
async fn rewritten_reads_keep_what_the_client_asked_for() {
    let mut setup = Setup::new(ConsistentReads::Floor).await;
    let written = setup.client.write().await;
    let target = format!("{CONFIGMAPS}?limit=500&resourceVersion=0&labelSelector=a");
    setup.client.read(&target).await;
    let all: Vec<_> = (0..3).flat_map(|server| setup.take_reads(server)).collect();
    let expected = format!(
        "{CONFIGMAPS}?limit=500&resourceVersion={written}&labelSelector=a&resourceVersionMatch=NotOlderThan"
    );
    assert_eq!(all, [expected], "the answer to the write shows nothing about any cache");
    assert_eq!(setup.floors("applied").await, 1);
    // The endpoint that answered is known to have reached the floor now.
    setup.client.read(&target).await;
    let all: Vec<_> = (0..3).flat_map(|server| setup.take_reads(server)).collect();
    assert_eq!(all, [target]);
    // A list of etcd may have a version that a cache reaches only later.
    let most_recent = setup.client.read(CONFIGMAPS).await;
    assert!(most_recent >= written);
}

#[tokio::test]
async fn floor_that_no_server_has_reached_is_lowered_once() {
    let mut setup = Setup::new(ConsistentReads::Floor).await;
    let old = setup.freeze(&[0, 1, 2]);
    let seen = setup.client.write().await;
    assert!(seen > old);
    assert_eq!(setup.client.read(&list()).await, old, "all servers went back");
    let counts = [setup.floors("fallen_back").await, setup.floors("reset").await];
    assert_eq!(counts, [1, 1]);
    let before: usize = (0..3).map(|server| setup.take_reads(server).len()).sum();
    assert_eq!(before, 4, "each server is asked once, and then one gets the original request");
    for _ in 0..10 {
        assert_eq!(setup.client.read(&list()).await, old);
    }
    let after: usize = (0..3).map(|server| setup.take_reads(server).len()).sum();
    assert_eq!(after, 10);
    assert_eq!(setup.floors("reset").await, 1);
}

#[tokio::test]
async fn explicit_version_that_a_server_has_not_reached_is_asked_of_one_other() {
    let mut setup = Setup::new(ConsistentReads::Floor).await;
    for (frozen, status, most) in [(&[0][..], 200, 2), (&[0, 1, 2], 504, 2)] {
        setup.freeze(frozen);
        let written = setup.client.write().await;
        for target in [
            format!("{CONFIGMAPS}?resourceVersion={written}"),
            format!("{OBJECT}?resourceVersion={written}"),
        ] {
            for _ in 0..10 {
                let reply = setup.client.get(&target).await.unwrap();
                assert_eq!(reply.status, status, "{target}: {:?}", reply.body);
                let reads: Vec<_> = (0..3).flat_map(|server| setup.take_reads(server)).collect();
                assert!((1..=most).contains(&reads.len()), "{reads:?}");
                assert!(reads.iter().all(|read| *read == target), "{reads:?}");
            }
        }
    }
}

/// The client has neither read nor written the version of the event, so only the event can have raised its floor.
#[tokio::test]
async fn events_of_a_watch_raise_the_floor_of_its_client() {
    for (target, with_floor) in [(get(), ""), (list(), "&resourceVersionMatch=NotOlderThan")] {
        let setup = Setup::new(ConsistentReads::Floor).await;
        let cluster = &setup.cluster;
        let watch = WatchRecorder::start(&setup.client, &cluster.watch_path()).await;
        until("the watch runs", async || (0..3).any(|server| cluster.watches(server) > 0)).await;
        let serving = (0..3).find(|&server| cluster.watches(server) > 0).unwrap();
        let object = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m" };
        let change = |_: &_| Ok(config_map("m", "of another client"));
        let seen = cluster.state.modify(object, false, change).unwrap().version;
        watch.expect_versions(&[seen]).await;
        drop(watch);
        // No other endpoint is known to have reached the version.
        cluster.servers[serving].kill();
        until("the endpoint is not ready", async || {
            setup.proxy.endpoint(cluster.servers[serving].addr).await["state"] != "ready"
        })
        .await;
        (0..3).for_each(|server| drop(setup.take_reads(server)));
        assert_eq!(setup.client.read(&target).await, seen, "{target}");
        let reads: Vec<_> = (0..3).flat_map(|server| setup.take_reads(server)).collect();
        let path = target.split_once('?').unwrap().0;
        assert_eq!(reads, [format!("{path}?resourceVersion={seen}{with_floor}")]);
    }
}

/// An apiserver may read most-recent lists from etcd while its cache is older.
#[tokio::test]
async fn version_of_a_most_recent_list_says_nothing_about_the_cache() {
    let setup = Setup::new(ConsistentReads::Floor).await;
    setup.freeze(&[0, 1, 2]);
    let object = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m" };
    let change = |_: &_| Ok(config_map("m", "of another client"));
    let written = setup.cluster.state.modify(object, false, change).unwrap().version;
    assert_eq!(setup.client.read(CONFIGMAPS).await, written);
    for read in 0..10 {
        assert_eq!(setup.client.read(&list()).await, written, "list {read}");
    }
    assert_eq!(setup.client.read(&get()).await, written);
}

/// When the caches of all ready endpoints have the events of a most-recent list, nothing is asked of etcd any more,
/// although other objects change before each list.
#[tokio::test]
async fn lists_come_from_caches_again_some_seconds_after_a_most_recent_list() {
    let setup = Setup::new(ConsistentReads::Floor).await;
    setup.freeze(&[0, 1, 2]);
    let object = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m" };
    let write = |number: usize| {
        let change = |_: &_| Ok(config_map("m", &format!("write {number} of another client")));
        setup.cluster.state.modify(object, false, change).unwrap().version
    };
    let mut last = write(0);
    assert_eq!(setup.client.read(CONFIGMAPS).await, last);
    let (begun, mut from_etcd) = (Instant::now(), 0);
    until_within(2 * PATIENCE, "lists come from a cache", async || {
        (0..3).for_each(|server| drop(setup.take_reads(server)));
        write(from_etcd + 1);
        let version = setup.client.read(&list()).await;
        let reads: Vec<_> = (0..3).flat_map(|server| setup.take_reads(server)).collect();
        let from_cache =
            reads.iter().all(|read| read.contains("resourceVersion=") && !read.contains("Exact"));
        from_etcd += usize::from(!from_cache);
        assert!(from_cache || version >= last, "{version} after {last}");
        last = version;
        from_cache
    })
    .await;
    assert!(begun.elapsed() > Duration::from_secs(4), "a cache that lags is found after 4 s");
    assert!(from_etcd > 3, "{from_etcd}");
}

/// The only apiserver reads most-recent lists from etcd, and its cache is older: that is no reason to lower a floor.
#[tokio::test]
async fn list_is_most_recent_when_the_only_cache_is_older_than_a_list() {
    let setup = Setup::new(ConsistentReads::Floor).await;
    for server in &setup.cluster.servers[1..] {
        server.kill();
    }
    until("one endpoint is ready", async || {
        let status = setup.proxy.status().await;
        let endpoints = status["upstreams"][0]["endpoints"].as_array().unwrap().clone();
        endpoints.iter().filter(|endpoint| endpoint["state"] == "ready").count() == 1
    })
    .await;
    setup.freeze(&[0]);
    let object = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m" };
    let change = |_: &_| Ok(config_map("m", "of another client"));
    let written = setup.cluster.state.modify(object, false, change).unwrap().version;
    assert_eq!(setup.client.read(CONFIGMAPS).await, written);
    setup.take_reads(0);
    for read in 0..5 {
        assert_eq!(setup.client.read(&list()).await, written, "list {read}");
    }
    let unchanged = setup.take_reads(0).iter().filter(|read| **read == list()).count();
    assert_eq!((unchanged, setup.floors("reset").await), (1, 0));
}

/// The version of a custom list may come only at its end. So it cannot be compared with a floor before it is forwarded,
/// and the list is not sent unchanged to an endpoint whose cache may be older.
#[tokio::test]
async fn list_after_a_most_recent_list_is_sent_unchanged_only_if_it_can_be_compared() {
    const THINGS: &str = "/apis/example.com/v1/namespaces/default/things";
    for (path, unchanged) in [(CONFIGMAPS, true), (THINGS, false)] {
        let cluster = TestCluster::new(1);
        let proxy = cluster.start_with(without_suspicion).await;
        let client = proxy.client().await;
        let seen = Arc::<Mutex<Vec<String>>>::default();
        let reads = Arc::clone(&seen);
        cluster.servers[0].set_faults(|faults| {
            faults.on_request = Some(Arc::new(move |request| {
                let target = request.uri.path_and_query()?.as_str();
                if !target.starts_with(path) {
                    return None;
                }
                // Not a question of the prober about a version.
                if request.uri.path() == path {
                    reads.lock().unwrap().push(target.to_owned());
                }
                let mut list = ScriptedResponse::status(200, "", "");
                let meta = json!({ "resourceVersion": "700" });
                list.body =
                    json!({ "kind": "List", "metadata": meta, "items": [] }).to_string().into();
                Some(list)
            }));
        });
        let cached = format!("{path}?resourceVersion=0");
        for target in [path, &cached, &cached] {
            assert_eq!(client.get(target).await.unwrap().status, StatusCode::OK, "{target}");
        }
        // The most-recent list shows that lists of the endpoint have reached the floor.
        let then = if unchanged { &*cached } else { path };
        assert_eq!(*seen.lock().unwrap(), [path, then, then]);
    }
}

#[tokio::test]
async fn watch_list_starts_with_the_floor_or_where_it_is_known_to_be_reached() {
    let mut setup = Setup::new(ConsistentReads::Floor).await;
    setup.freeze(&[0, 1]);
    let written = setup.client.write().await;
    let target = format!(
        "{CONFIGMAPS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
         &allowWatchBookmarks=true&resourceVersion=0"
    );
    let with_floor = target.replace("resourceVersion=0", &format!("resourceVersion={written}"));
    for start in 0..10 {
        let watch = WatchRecorder::start(&setup.client, &target).await;
        watch.expect_versions(&[written]).await;
        let [first, second, third] = [0, 1, 2].map(|server| setup.take_reads(server));
        // The initial events of the first watch show how far its endpoint has come.
        let expected = if start == 0 { &with_floor } else { &target };
        assert_eq!(third, [expected.as_str()], "start {start}");
        let lagging = [first, second].concat();
        assert!(lagging.iter().all(|read| *read == with_floor), "start {start}: {lagging:?}");
        assert!(start == 0 || lagging.is_empty(), "start {start}: {lagging:?}");
    }
}

/// The first endpoint is known to have reached the floor, and is lost before it has sent an event.
#[tokio::test]
async fn watch_list_that_is_started_again_keeps_its_floor() {
    let mut setup = Setup::new(ConsistentReads::Floor).await;
    setup.freeze(&[0, 1]);
    let written = setup.client.write().await;
    let target = format!(
        "{CONFIGMAPS}?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
         &allowWatchBookmarks=true&resourceVersion=0"
    );
    let first = WatchRecorder::start(&setup.client, &target).await;
    first.expect_versions(&[written]).await;
    drop(first);
    let serving = &setup.cluster.servers[2];
    until("the first watch has ended", async || setup.cluster.watches(2) == 0).await;
    serving.set_faults(|faults| faults.hold_watches = true);
    let watch = WatchRecorder::start(&setup.client, &target).await;
    until("the watch waits for its events", async || setup.cluster.watches(2) == 1).await;
    let _ = [0, 1, 2].map(|server| setup.take_reads(server));
    serving.kill();
    let mut lagging = Vec::new();
    until("another endpoint is asked", async || {
        lagging.extend([0, 1].map(|server| setup.take_reads(server)).concat());
        !lagging.is_empty()
    })
    .await;
    let with_floor = format!("resourceVersion={written}");
    assert!(lagging.iter().all(|read| read.contains(&with_floor)), "{lagging:?}");
    assert_eq!(watch.versions(), [0; 0]);
    for cache in &setup.caches {
        cache.version.store(0, Ordering::Relaxed);
    }
    watch.expect_versions(&[written]).await;
    assert_eq!(watch.end(), None);
}

/// Without the preference, each of at least 80 watches would continue on the endpoint without watches with a
/// probability of 10 %: it has the fewest streams, but has just started.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lost_watches_continue_on_an_endpoint_that_is_known_to_have_reached_their_cursor() {
    const WATCHES: u64 = 160;
    let cluster = TestCluster::new(3);
    // All watches fit on one connection.
    for server in &cluster.servers {
        server.set_faults(|faults| faults.max_streams = Some(1_000));
    }
    let proxy = cluster
        .start_with(|config| {
            without_suspicion(config);
            config.upstreams[0].rebalance = false;
            config.upstreams[0].connections.max_streams = 1_000;
        })
        .await;
    let client = proxy.client().await;
    let unknown = &cluster.servers[2];
    unknown.kill();
    until("the endpoint is not ready", async || {
        proxy.endpoint(unknown.addr).await["state"] != "ready"
    })
    .await;
    let from = cluster.state.version();
    let watches = cluster.start_watches(&client, WATCHES).await;
    let count = |server: usize| cluster.watches(server);
    let (lost, other) = if count(0) > count(1) { (0, 1) } else { (1, 0) };
    unknown.restart().unwrap();
    proxy.wait_connected(3).await;
    let expected: Vec<_> = ["a", "b"].map(|name| cluster.create_config_map(name)).to_vec();
    assert!(expected[0] > from);
    for watch in &watches {
        watch.expect_versions(&expected).await;
    }
    // The pool prefers a connection that has received bytes recently, so both others receive some. One slow response
    // could keep an endpoint's load above that of the others for a while.
    until_within(6 * PATIENCE, "both others have answered", async || {
        let spread = cluster.spread(&client, "other", 10).await;
        spread[other] > 0 && spread[2] > 0
    })
    .await;
    cluster.servers[lost].kill();
    until("all watches run again", async || count(other) + count(2) == WATCHES).await;
    assert_eq!(count(2), 0, "watches on the endpoint that has shown no version");
}
