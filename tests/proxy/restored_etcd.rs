//! An etcd that is restored from a backup: the versions of all apiservers go back. Clients must list again, and no
//! apiserver lags because of what it, or another one, had shown before.

use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, Proxy, TestCluster, config_map, pause, read_body, until};
use http::Method;
use jackstay::control::saved_floors;
use jackstay::upstream::restores::LOOK_INTERVAL;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use jackstay_config::Config;
use jackstay_testkit::wait::within;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

struct Setup {
    cluster: TestCluster,
    proxy: Proxy,
    client: Client,
}

impl Setup {
    async fn new(servers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::new(servers);
        for server in &cluster.servers {
            server.set_version("v1.36.2");
        }
        let proxy = cluster.start_with(change).await;
        let client = proxy.client().await;
        Self { cluster, proxy, client }
    }

    fn create(&self, name: &str, group: usize) {
        let mut object = config_map(name, "x");
        object["metadata"]["labels"]["group"] = group.to_string().into();
        let kind = &jackstay_apiserver::kinds::CONFIG_MAPS;
        self.cluster.state.create(kind, "default", object, false).unwrap();
    }

    /// Watches with different selectors, so that the endpoints have shown different versions at last.
    async fn start_watches(&self, accept: &str) -> Vec<WatchRecorder> {
        let version = self.cluster.state.version();
        let mut watches = Vec::new();
        for group in 0..6 {
            let path = format!(
                "{CONFIGMAPS}?watch=1&resourceVersion={version}&labelSelector=group%3D{group}"
            );
            watches.push(WatchRecorder::accepting(&self.client, &path, accept).await);
        }
        watches
    }

    /// How often the prober has read the revision of etcd at this server.
    fn reads_of_revision(&self, server: &str) -> usize {
        let is_read = |path: &str| path == "/api/v1/services?limit=1";
        let audit = self.cluster.state.audit();
        audit.select(|request| request.server == server && is_read(&request.path)).len()
    }

    /// How often it has read it at all servers.
    fn reads_of_all(&self) -> usize {
        self.cluster.servers.iter().map(|server| self.reads_of_revision(server.name())).sum()
    }

    async fn restore_status(&self) -> Value {
        self.proxy.status().await["upstreams"][0]["restore"].clone()
    }

    async fn restores_in_log(&self) -> usize {
        let events = self.proxy.events().await;
        events.iter().filter(|event| event["to"] == "etcd_restored").count()
    }

    async fn degraded(&self) -> usize {
        let endpoints = self.proxy.endpoints().await;
        endpoints.iter().filter(|endpoint| endpoint["state"] == "degraded").count()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn restored_etcd_ends_watches_with_410_and_degrades_no_endpoint_for_long() {
    for accept in [
        "application/json",
        "application/vnd.kubernetes.protobuf;stream=watch",
        "application/cbor-seq, application/cbor",
    ] {
        let setup = Setup::new(3, |_| {}).await;
        let watches = setup.start_watches(accept).await;
        let backup = setup.cluster.state.snapshot();
        let before = setup.cluster.state.version();
        for number in 0..300 {
            // Each group gets its last event at another version.
            setup.create(&format!("c{number}"), (number / 50).min(5));
        }
        let all_seen = || watches.iter().all(|watch| !watch.events().is_empty());
        until("each watch has events", async || all_seen()).await;
        until("the last event", async || watches[5].has_seen("c299")).await;
        let at_version = setup.cluster.state.version();

        setup.cluster.kill_all();
        setup.cluster.state.restore(backup);
        for server in &setup.cluster.servers {
            server.restart().unwrap();
        }
        until("the restore is recognised", async || !setup.restore_status().await.is_null()).await;
        for watch in &watches {
            watch.wait_end().await.unwrap();
            assert_eq!(watch.events().last().unwrap().kind, "ERROR", "{accept}");
        }
        setup.proxy.wait_all("ready").await;
        let status = setup.restore_status().await;
        assert_eq!(status["revision"], before, "{status}");
        assert!(status["before"].as_u64().unwrap() > before, "{status}");

        // What a client has from the lost history: the new history has not this version.
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={at_version}");
        let late = WatchRecorder::accepting(&setup.client, &path, accept).await;
        late.wait_end().await.unwrap();
        assert_eq!(late.events().last().unwrap().kind, "ERROR", "{accept}");

        // After a list, watches and reads work, and no endpoint lags.
        let watches = setup.start_watches(accept).await;
        for number in 0..60 {
            setup.create(&format!("d{number}"), number % 6);
        }
        for (group, watch) in watches.iter().enumerate() {
            let last = format!("d{}", 54 + group);
            until("the events after the restore", async || watch.has_seen(&last)).await;
            assert_eq!(watch.end(), None);
        }
        // A lag would be proven within this time.
        pause(Duration::from_secs(2)).await;
        assert_eq!(setup.degraded().await, 0);
        assert_eq!(setup.restores_in_log().await, 1);
    }
}

/// The prober has the rights of a node: it may list services, and not read the resource of the watches.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn restored_etcd_is_recognised_although_the_prober_may_not_read_the_resource() {
    let setup = Setup::new(3, |_| {}).await;
    for server in &setup.cluster.servers {
        let refuse: RequestHook = Arc::new(|request| {
            let agent = request.headers.get("user-agent")?;
            let is_refused = agent == "jackstay-readyz" && request.uri.path().contains("configmap");
            is_refused.then(|| ScriptedResponse::status(403, "Forbidden", "not a node's"))
        });
        server.set_faults(|faults| faults.on_request = Some(refuse));
    }
    let backup = setup.cluster.state.snapshot();
    let watches = setup.start_watches("application/json").await;
    let mut created = 0;
    let mut create = async |count: usize| {
        let numbers = created..created + count;
        created += count;
        numbers.for_each(|number| setup.create(&format!("c{number}"), number % 6));
        let last = created - 1;
        let has_last = || watches[last % 6].has_seen(&format!("c{last}"));
        until("the last event", async || has_last()).await;
        created
    };
    let mut read_up_to = create(60).await;
    until("a first read", async || setup.reads_of_all() >= 1).await;
    // Each new version is read about until ConfigMaps are known to be stored in the same etcd. A read that was sent has
    // not been answered yet, or another endpoint has sent it before the version was seen.
    let mut reads = 0;
    while within(LOOK_INTERVAL * 3, async || setup.reads_of_all() > reads).await {
        reads = setup.reads_of_all();
        assert!(reads < 30, "ConfigMaps never become known");
        read_up_to = create(60).await;
    }
    let all = create(180).await;
    assert_eq!(setup.reads_of_all(), reads, "nothing is read for known resources");

    setup.cluster.kill_all();
    setup.cluster.state.restore(backup);
    // More versions than were read before the restore: only those of ConfigMaps show that some are lost.
    let restored = read_up_to + 30;
    assert!(restored < all);
    (0..restored).for_each(|number| setup.create(&format!("d{number}"), number % 6));
    for server in &setup.cluster.servers {
        server.restart().unwrap();
    }
    for watch in &watches {
        watch.wait_end().await.unwrap();
        assert_eq!(watch.events().last().unwrap().kind, "ERROR");
    }
    setup.proxy.wait_all("ready").await;
    let status = setup.restore_status().await;
    assert_eq!(status["resource"], "configmaps", "{status}");
    assert_eq!(setup.restores_in_log().await, 1);
}

/// With one apiserver there is no other to compare with.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn restored_etcd_of_one_apiserver_ends_its_watches_and_lowers_saved_floors() {
    let dir = tempfile::tempdir().unwrap();
    let state_dir = dir.path().join("state");
    let setup = Setup::new(1, |config| config.state_dir = Some(state_dir.clone())).await;
    let backup = setup.cluster.state.snapshot();
    let watches = setup.start_watches("application/json").await;
    (0..60).for_each(|number| setup.create(&format!("c{number}"), number % 6));
    until("events", async || watches[5].has_seen("c59")).await;
    let lost = setup.cluster.state.version();
    setup.cluster.kill_all();
    setup.cluster.state.restore(backup);
    // An apiserver that starts refuses users whose rights it has not read yet.
    let refusals = AtomicUsize::new(0);
    let refuse: RequestHook = Arc::new(move |request| {
        let path = request.uri.path();
        let is_question = path.contains("jackstay-version-check") || path.ends_with("/services");
        let is_early = is_question && refusals.fetch_add(1, Ordering::Relaxed) < 2;
        is_early.then(|| ScriptedResponse::status(403, "Forbidden", "not yet"))
    });
    setup.cluster.servers[0].set_faults(|faults| faults.on_request = Some(refuse));
    setup.cluster.servers[0].restart().unwrap();
    for watch in &watches {
        watch.wait_end().await.unwrap();
        assert_eq!(watch.events().last().unwrap().kind, "ERROR");
    }
    let file = saved_floors::path(&state_dir, "control-plane");
    until("the saved floors are lowered", async || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        let floors = saved_floors::parse(&text, "control-plane").map(|saved| saved.floors);
        let is_low = |floors: Vec<_>| {
            floors.iter().all(|floor: &jackstay::upstream::version_floors::NamedFloor| {
                floor.versions.highest() < lost
            })
        };
        floors.is_ok_and(is_low)
    })
    .await;
    let path = format!("{CONFIGMAPS}?resourceVersion=0");
    let response = setup.client.send(Method::GET, &path, &[], "").await.unwrap();
    assert_eq!(response.status(), 200);
    read_body(response.into_body()).await.1.unwrap();
}

/// The process is another one, and its cache is older than before: it lags, and etcd has what the others have shown.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn apiserver_that_restarts_with_an_old_cache_is_no_restore() {
    let setup = Setup::new(3, |_| {}).await;
    let watches = setup.cluster.start_watches(&setup.client, 6).await;
    let old = setup.cluster.state.version();
    (0..60).for_each(|number| setup.create(&format!("c{number}"), 0));
    for watch in &watches {
        until("events", async || watch.has_seen("c59")).await;
    }
    let server = &setup.cluster.servers[0];
    let name = server.name().to_owned();
    server.kill();
    let before = setup.reads_of_revision(&name);
    server.set_faults(|faults| faults.hold_watches = true);
    server.set_faults(|faults| faults.cache_version = Some(old));
    server.restart().unwrap();
    until("its etcd was asked", async || setup.reads_of_revision(&name) > before).await;
    (60..90).for_each(|number| setup.create(&format!("c{number}"), 0));
    for watch in &watches {
        until("events", async || watch.has_seen("c89")).await;
        assert_eq!(watch.end(), None);
    }
    assert!(setup.restore_status().await.is_null());
    assert_eq!(setup.restores_in_log().await, 0);
}
