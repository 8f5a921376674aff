//! Reads behind one address whose apiservers cannot be told apart: they have one certificate and advertise one address,
//! as those of a hosted control plane. Each connection reaches one of them, so what one connection has shown of a watch
//! cache says nothing about the next one.

use crate::support::balancer::Balancer;
use crate::support::versioned_client::{OBJECT, VersionedClient, get, list};
use crate::support::wait::until_within;
use crate::support::{
    CONFIGMAPS, PATIENCE, Proxy, TestCluster, config_map, join_all, pause, until, without_suspicion,
};
use jackstay_apiserver::kinds::{CONFIG_MAPS, ObjectRef};
use jackstay_apiserver::{ApiServerHandle, Options, RequestHook, ScriptedResponse};
use jackstay_config::{Config, EndpointKind};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// A cache that has this lag stands still.
const STANDS_STILL: Duration = Duration::from_secs(3600);

struct Rig {
    cluster: TestCluster,
    balancer: Balancer,
    proxy: Proxy,
    client: VersionedClient,
}

impl Rig {
    /// jackstay with a balancer as its only endpoint, in front of this number of servers with equal certificates. Their
    /// caches follow the store.
    async fn start(servers: usize, change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::with_one_certificate(servers, |options, _| Options {
            version: "v1.36.2".to_owned(),
            ..options
        });
        for server in &cluster.servers {
            server.set_faults(|faults| {
                faults.advertised_address = Some("10.0.0.1:6443");
                faults.cache_lag = Some(Duration::ZERO);
            });
        }
        let balancer = Balancer::start(&cluster.addresses());
        let proxy = cluster.start_behind(balancer.address, change).await;
        let client = VersionedClient::create(proxy.client().await).await;
        Self { cluster, balancer, proxy, client }
    }

    /// The server that the connection of the client's requests has reached.
    async fn serving(&self) -> &ApiServerHandle {
        let path = format!("{CONFIGMAPS}?probe={}", fastrand::u64(..));
        self.client.get(&path).await.unwrap();
        let records = self.cluster.state.audit().records();
        let record = records.iter().find(|record| record.path == path).unwrap();
        self.cluster.servers.iter().find(|server| server.name() == record.server).unwrap()
    }

    async fn floors(&self, outcome: &str) -> u64 {
        let name = format!("jackstay_version_floors_total{{outcome=\"{outcome}\"");
        self.proxy.metric(&name).await as u64
    }

    /// No floor was lowered, and no restore was reported.
    async fn expect_floors_kept(&self) {
        let lowered = [self.floors("fallen_back").await, self.floors("reset").await];
        assert_eq!(lowered, [0, 0]);
        let events = self.proxy.events().await;
        let restored: Vec<_> = events.iter().filter(|e| e["to"] == "etcd_restored").collect();
        assert!(restored.is_empty(), "{restored:?}");
    }
}

fn answer(body: &Value) -> ScriptedResponse {
    let mut response = ScriptedResponse::status(200, "", "");
    response.body = body.to_string().into();
    response
}

/// The cache that the requests reach stands still, as that of an apiserver which is cut off from etcd.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn floor_that_a_cache_has_not_reached_is_asked_of_another_connection() {
    for target in [get(), list()] {
        let mut rig = Rig::start(2, |_| {}).await;
        rig.client.read(&target).await;
        rig.serving().await.set_faults(|faults| faults.cache_lag = Some(STANDS_STILL));
        let written = rig.client.write().await;
        assert_eq!(rig.client.read(&target).await, written, "{target}");
        assert_eq!(rig.floors("redirected").await, 1, "{target}");
        rig.expect_floors_kept().await;
    }
}

/// The same with the version in the request.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn explicit_version_that_a_cache_has_not_reached_is_asked_of_another_connection() {
    let mut rig = Rig::start(2, |_| {}).await;
    rig.serving().await.set_faults(|faults| faults.cache_lag = Some(STANDS_STILL));
    let written = rig.client.write().await;
    assert_eq!(rig.client.read(&format!("{OBJECT}?resourceVersion={written}")).await, written);
    assert_eq!(rig.floors("redirected").await, 1);
}

/// No cache has reached the floor. The most recent state is not older, so nothing goes back.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn most_recent_state_is_read_when_no_cache_has_reached_the_floor() {
    let mut rig = Rig::start(3, |_| {}).await;
    for server in &rig.cluster.servers {
        server.set_faults(|faults| faults.cache_lag = Some(STANDS_STILL));
    }
    let written = rig.client.write().await;
    assert_eq!(rig.client.read(&get()).await, written);
    let asked = [rig.floors("redirected").await, rig.floors("most_recent").await];
    assert_eq!(asked, [1, 1]);
    rig.expect_floors_kept().await;
}

/// One cache is 200 ms behind the other one. Both connections are used.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn caches_that_differ_by_200_ms_neither_turn_back_a_read_nor_lower_a_floor() {
    let mut rig = Rig::start(2, |config| config.upstreams[0].connections.min = 4).await;
    rig.cluster.servers[1].set_faults(|faults| faults.cache_lag = Some(Duration::from_millis(200)));
    until("both servers are asked", async || {
        join_all((0..16).map(|_| rig.client.read(CONFIGMAPS))).await;
        let records = rig.cluster.state.audit().records();
        let asked = |server: &ApiServerHandle| {
            records.iter().any(|r| r.server == server.name() && r.path == CONFIGMAPS)
        };
        rig.cluster.servers.iter().all(asked)
    })
    .await;
    let mut back = Vec::new();
    for turn in 0..10 {
        let written = rig.client.write().await;
        rig.client.read(&list()).await;
        // At the same time, so that the load makes jackstay use both connections.
        let targets: Vec<_> = (0..16).map(|n| if n % 2 == 0 { get() } else { list() }).collect();
        let versions = join_all(targets.iter().map(|target| rig.client.read(target))).await;
        let older = targets.iter().zip(versions).filter(|(_, version)| *version < written);
        back.extend(older.map(|(target, version)| (turn, target.clone(), version, written)));
    }
    assert!(back.is_empty(), "{} of 160 reads went back: {back:?}", back.len());
    rig.expect_floors_kept().await;
}

/// The prober reaches an apiserver that answers a most-recent list with an old state. Another connection shows that
/// etcd was not restored.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn old_revision_on_one_connection_is_no_restore() {
    let mut rig = Rig::start(2, |_| {}).await;
    let is_asked = Arc::new(AtomicBool::new(false));
    let asked = Arc::clone(&is_asked);
    let old: RequestHook = Arc::new(move |request| {
        let is_revision = request.uri.path() == "/api/v1/services"
            && request.headers.get("user-agent").is_some_and(|agent| agent == "jackstay-readyz");
        asked.fetch_or(is_revision, Relaxed);
        let meta = json!({ "resourceVersion": "2" });
        is_revision.then(|| {
            answer(&json!({ "kind": "ServiceList", "apiVersion": "v1", "metadata": meta, "items": [] }))
        })
    });
    until_within(3 * PATIENCE, "the revision was read", async || {
        rig.client.write().await;
        rig.client.read(&list()).await;
        let records = rig.cluster.state.audit().records();
        records.iter().filter(|record| record.path == "/api/v1/services?limit=1").count() >= 2
    })
    .await;
    rig.cluster.servers[0].set_faults(|faults| faults.on_request = Some(old));
    // A process that may be a new one is asked, and then the suspicion is decided. Each reset moves one connection.
    let mut resets = (0..rig.cluster.servers.len()).cycle();
    until_within(3 * PATIENCE, "the old revision was read", async || {
        let next = resets.next().unwrap_or_default();
        if fastrand::bool() {
            // Otherwise the connection of the prober could reach the same server each time.
            drop(std::net::TcpStream::connect(rig.balancer.address));
        }
        rig.cluster.servers[next].reset_connections();
        pause(Duration::from_millis(600)).await;
        is_asked.load(Relaxed)
    })
    .await;
    pause(Duration::from_secs(2)).await;
    rig.expect_floors_kept().await;
    assert!(rig.proxy.status().await["upstreams"][0]["restore"].is_null());
}

/// Each apiserver behind the address is known, two of them are endpoints, and a third one has shown the floor.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn floor_that_no_member_has_reached_is_not_lowered() {
    let cluster = TestCluster::new(3);
    for server in &cluster.servers {
        server.set_faults(|faults| faults.cache_lag = Some(Duration::ZERO));
    }
    let balancer = Balancer::start(&cluster.addresses());
    let mut config = cluster.certs.config(&[balancer.address]);
    without_suspicion(&mut config);
    config.upstreams[0].kind = EndpointKind::Auto;
    let proxy = cluster.certs.start(config);
    until("two backends are ready", async || {
        let endpoints = proxy.endpoints().await;
        endpoints.len() == 2 && endpoints.iter().all(|one| one["state"] == "ready")
    })
    .await;
    let client = VersionedClient::create(proxy.client().await).await;
    let rig = Rig { cluster, balancer, proxy, client };
    for server in &rig.cluster.servers {
        server.set_faults(|faults| faults.cache_lag = Some(STANDS_STILL));
    }
    let object = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "m" };
    let change = |_: &_| Ok(config_map("m", "of another client"));
    let written = rig.cluster.state.modify(object, false, change).unwrap().version;
    assert_eq!(rig.client.read(OBJECT).await, written, "a most-recent read");
    for target in [get(), list()] {
        assert!(rig.client.read(&target).await >= written, "{target}");
    }
    rig.expect_floors_kept().await;
}
