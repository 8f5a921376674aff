//! An apiserver that answers PINGs and health checks, but not reads of objects, as at first without etcd: another one is asked,
//! and further requests avoid it.

use crate::support::{CONFIGMAPS, Proxy, TestCluster, join_all, soon, until, without_suspicion};
use http::Method;
use jackstay_apiserver::ScriptedResponse;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::faulty_relay::Direction;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{sleep_until, timeout};

const OBJECT: &str = "/api/v1/namespaces/default/configmaps/settings";
const BUILT_IN: &str = "(built-in)";
/// Promised are 250 ms.
const SLOWEST_READ: Duration = Duration::from_secs(1);
/// Both ways take longer than the wait for an object.
const DISTANCE: Duration = Duration::from_millis(100);

struct Rig {
    cluster: TestCluster,
    proxy: Proxy,
    client: Client,
}

impl Rig {
    async fn start(servers: usize) -> Self {
        let cluster = TestCluster::new(servers);
        cluster.create_config_map("settings");
        let proxy = cluster.start_with(without_suspicion).await;
        let client = proxy.client().await;
        Self { cluster, proxy, client }
    }

    /// The first server answers no requests for objects and lists.
    fn hang(&self, hangs: bool) {
        let paths: &[&str] = if hangs { &[OBJECT, CONFIGMAPS] } else { &[] };
        self.cluster.servers[0].set_faults(|faults| faults.hang_paths = paths);
    }

    async fn read(&self, path: &str) -> Duration {
        let start = Instant::now();
        let reply = soon("a read", self.client.request(Method::GET, path, &[], "")).await.unwrap();
        assert_eq!(reply.status, 200);
        start.elapsed()
    }

    async fn read_at_once(&self, path: &str, reads: usize) -> Duration {
        let times = join_all((0..reads).map(|_| self.read(path))).await;
        times.into_iter().max().unwrap()
    }

    async fn hedges_of(&self, outcome: &str) -> f64 {
        self.proxy.metric(&format!("jackstay_hedges_total{{outcome=\"{outcome}\"}}")).await
    }

    async fn hedges(&self) -> f64 {
        self.hedges_of("hedge").await + self.hedges_of("original").await
    }

    async fn failing_groups(&self) -> Vec<serde_json::Value> {
        self.proxy.status().await["upstreams"][0]["failing_groups"].as_array().unwrap().clone()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reads_do_not_wait_for_an_apiserver_that_answers_no_object_and_writes_avoid_it() {
    let rig = Rig::start(3).await;
    rig.hang(true);
    let slowest = rig.read_at_once(OBJECT, 12).await;
    assert!(slowest < SLOWEST_READ, "{slowest:?}");
    let before = rig.hedges().await;
    assert!(before >= 1.0, "no read was sent to the apiserver");
    for number in 0..60 {
        let object = format!(r#"{{"metadata":{{"name":"new-{number}"}}}}"#);
        let create = rig.client.request(Method::POST, CONFIGMAPS, &[], object);
        assert_eq!(soon("a write", create).await.unwrap().status, 201);
        assert!(rig.read(OBJECT).await < SLOWEST_READ);
    }
    // Only the first read after each pause of 1 s, 2 s, … asks it.
    let hedged = rig.hedges().await - before;
    assert!(hedged <= 6.0, "{hedged} of 60");
    until("a probe fails", async || {
        rig.read(OBJECT).await;
        rig.failing_groups().await.iter().any(|failing| failing["group"] == BUILT_IN)
    })
    .await;
    assert_eq!(rig.proxy.endpoint(rig.cluster.servers[0].addr).await["state"], "ready");
    rig.hang(false);
    until("the apiserver answers the probe", async || {
        rig.read(OBJECT).await;
        rig.failing_groups().await.is_empty()
    })
    .await;
    assert!(rig.cluster.spread(&rig.client, "later", 90).await[0] > 0);
}

/// Its watch cache answers lists of any version without etcd, and it answers at once that a resource does not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn answers_that_need_no_etcd_do_not_end_the_suspicion() {
    let rig = Rig::start(3).await;
    let first = &rig.cluster.servers[0];
    first.set_faults(|faults| faults.hang_paths = &[OBJECT]);
    let is_suspected = async || {
        let failing = rig.failing_groups().await;
        failing.iter().find(|failing| failing["group"] == BUILT_IN).cloned()
    };
    until("a probe fails", async || {
        rig.read(OBJECT).await;
        is_suspected().await.is_some()
    })
    .await;
    until("the next probe may be sent", async || {
        is_suspected().await.is_some_and(|failing| failing["probe_in_s"] == 0.0)
    })
    .await;
    let before = rig.hedges().await;
    let get = async |path: &str| {
        let get = rig.client.request(Method::GET, path, &[], "");
        soon("a request that needs no etcd", get).await.unwrap().status
    };
    for _ in 0..12 {
        assert_eq!(get(&format!("{CONFIGMAPS}?resourceVersion=0")).await, 200);
        assert_eq!(get("/apis/policy/v1beta1/podsecuritypolicies/restricted").await, 404);
        assert!(is_suspected().await.is_some());
    }
    let slowest = rig.read_at_once(OBJECT, 12).await;
    assert!(slowest < SLOWEST_READ, "{slowest:?}");
    let hedged = rig.hedges().await - before;
    assert!(hedged <= 1.0, "{hedged} reads were sent there beside the probe");
    rig.hang(false);
    until("the apiserver answers the probe", async || {
        rig.read(OBJECT).await;
        is_suspected().await.is_none()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lists_do_not_wait_for_an_apiserver_that_answers_none() {
    let rig = Rig::start(3).await;
    rig.hang(true);
    let slowest = rig.read_at_once(CONFIGMAPS, 12).await;
    assert!(slowest < SLOWEST_READ, "{slowest:?}");
    assert!(rig.hedges().await >= 1.0, "no list was sent to the apiserver");
}

/// The slow answers come from etcd, which all apiservers share.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn apiservers_that_are_slow_together_get_few_reads_twice() {
    for (path, at_once, most) in
        [(OBJECT, 200, 64 + 10), (CONFIGMAPS, 200, 16 + 10), (OBJECT, 1, 3)]
    {
        let rig = Rig::start(2).await;
        for server in &rig.cluster.servers {
            server.set_faults(|faults| faults.delay = Duration::from_millis(700));
        }
        let rounds = if at_once == 1 { 6 } else { 1 };
        for _ in 0..rounds {
            rig.read_at_once(path, at_once).await;
        }
        let hedged = rig.hedges().await;
        println!("{path}, {at_once} at once: {hedged} were asked twice");
        assert!(hedged >= 1.0 && hedged <= f64::from(most), "{path}: {hedged}");
        // Neither is suspected.
        assert!(rig.failing_groups().await.is_empty());
    }
}

/// The connection may be lost, which its PINGs show, and which says nothing about the apiserver.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reads_on_a_silent_connection_are_not_late() {
    let cluster = TestCluster::new(2);
    cluster.create_config_map("settings");
    let (relays, proxy) = cluster.start_behind_relays(without_suspicion).await;
    let client = proxy.client().await;
    let rig = Rig { cluster, proxy, client };
    assert!(relays[0].silence_all(Direction::Both) > 0);
    let mut reads = pin!(rig.read_at_once(OBJECT, 12));
    assert!(timeout(2 * SLOWEST_READ, &mut reads).await.is_err(), "no read was sent there");
    assert!(rig.hedges().await < 1.0);
    relays[0].clear_faults();
    soon("the responses that were held", reads).await;
    assert!(rig.hedges().await < 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reads_at_a_distance_are_late_later_by_the_round_trip_time() {
    let cluster = TestCluster::new(2);
    cluster.create_config_map("settings");
    let addresses = join_all(cluster.addresses().into_iter().map(at_a_distance)).await;
    let mut config = cluster.certs.config(&addresses);
    without_suspicion(&mut config);
    let proxy = cluster.certs.start(config);
    proxy.wait_connected(2).await;
    let client = proxy.client().await;
    let rig = Rig { cluster, proxy, client };
    for path in [OBJECT, CONFIGMAPS] {
        let slowest = rig.read_at_once(path, 12).await;
        assert!(slowest >= 2 * DISTANCE, "{path}: {slowest:?}");
        assert!(rig.hedges().await < 1.0, "{path}");
    }
}

/// Returns an address from which bytes take [`DISTANCE`] to the server, and back.
async fn at_a_distance(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let Ok(far) = TcpStream::connect(server).await else { return };
            let ((near_read, near_write), (far_read, far_write)) =
                (near.into_split(), far.into_split());
            tokio::spawn(carry(near_read, far_write));
            tokio::spawn(carry(far_read, near_write));
        }
    });
    address
}

async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let (sender, mut on_the_way) = mpsc::unbounded_channel::<(Instant, Vec<u8>)>();
    let arrive = async move {
        while let Some((at, bytes)) = on_the_way.recv().await {
            sleep_until(at.into()).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    let depart = async move {
        let mut bytes = Vec::with_capacity(1 << 16);
        while matches!(from.read_buf(&mut bytes).await, Ok(1..)) {
            let _ = sender.send((Instant::now() + DISTANCE, std::mem::take(&mut bytes)));
        }
    };
    tokio::join!(arrive, depart);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn late_reads_are_not_asked_of_an_apiserver_that_rejects_for_overload() {
    let rig = Rig::start(2).await;
    let rejected = Arc::new(AtomicU64::new(0));
    let [slow, overloaded] = &rig.cluster.servers[..] else { unreachable!("two servers") };
    slow.set_faults(|faults| faults.delay = Duration::from_millis(700));
    let count = Arc::clone(&rejected);
    overloaded.set_faults(|faults| {
        faults.on_request = Some(Arc::new(move |request| {
            (request.uri.path() == OBJECT).then(|| {
                count.fetch_add(1, Relaxed);
                ScriptedResponse::text(429, "Too many requests, please try again later.\n")
                    .header("retry-after", "30")
            })
        }));
    });
    rig.read_at_once(OBJECT, 12).await;
    assert!(rejected.load(Relaxed) >= 1, "no read was sent there");
    assert!(rig.hedges().await + rig.hedges_of("failed").await < 1.0);
}

/// The watch cache of the other apiserver may lag behind the version that they wait for.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silence_about_lists_of_a_version_shows_nothing_of_etcd() {
    let rig = Rig::start(2).await;
    rig.hang(true);
    let path = format!("{CONFIGMAPS}?resourceVersion=1");
    let slowest = rig.read_at_once(&path, 12).await;
    assert!(slowest < SLOWEST_READ, "{slowest:?}");
    assert!(rig.hedges().await >= 1.0, "no list was sent to the apiserver");
    rig.hang(false);
    let spread = rig.cluster.spread(&rig.client, "later", 200).await;
    assert!(spread[0] >= 1, "it is avoided: {spread:?}");
}

/// Its response head may wait for the watch cache, for 3 s with Kubernetes 1.36.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_that_waits_for_its_response_head_is_not_late() {
    let rig = Rig::start(2).await;
    rig.hang(true);
    let path = format!("{CONFIGMAPS}?watch=1");
    let watches = join_all((0..12).map(|_| rig.client.watch(&path)));
    assert!(timeout(SLOWEST_READ, watches).await.is_err(), "no watch was sent there");
    assert!(rig.hedges().await < 1.0);
}
