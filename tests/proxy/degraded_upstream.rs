//! An apiserver that is connected and degraded: its watches move to another endpoint before clients
//! notice, if there is one.

use crate::support::figures::check_figure;
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{
    CONFIGMAPS, Proxy, TestCluster, join_all, pause, soon, until, without_suspicion,
};
use jackstay::config::Config;
use jackstay::demo::apiserver::ScriptedResponse;
use jackstay::demo::client::Client;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The longest silence of a watch that was delivering.
const WATCH_SILENCE: Duration = Duration::from_millis(2_500);
/// The longest time of a read.
const READ_TIME: Duration = Duration::from_millis(3_500);
const WATCHES: u64 = 12;

struct Setup {
    cluster: TestCluster,
    proxy: Proxy,
    client: Client,
    watches: Vec<WatchRecorder>,
    version: u64,
    writes: u64,
}

impl Setup {
    async fn new() -> Self {
        let cluster = TestCluster::new(3);
        // Only the fault of the test may move watches.
        let proxy = cluster.start_with(|config| config.upstreams[0].rebalance = false).await;
        let client = proxy.client().await;
        let version = cluster.state.version();
        let path = cluster.watch_path();
        let mut watches = Vec::new();
        for _ in 0..WATCHES {
            watches.push(WatchRecorder::start(&client, &path).await);
        }
        let setup = Self { cluster, proxy, client, watches, version, writes: 0 };
        until("all watches run", async || {
            (0..3).map(|at| setup.cluster.watches(at)).sum::<u64>() == WATCHES
        })
        .await;
        setup
    }

    fn write(&mut self) {
        self.cluster.create_config_map(&format!("w{}", self.writes));
        self.writes += 1;
    }

    /// Writes until each watch has seen `count` more events. Returns the longest silence of any of
    /// them.
    async fn deliver(&mut self, count: usize) -> Duration {
        let now = Instant::now();
        let mut seen: Vec<_> = self.watches.iter().map(|f| (f.events().len(), now)).collect();
        let enough: Vec<_> = seen.iter().map(|(events, _)| events + count).collect();
        let mut longest = Duration::ZERO;
        let mut write_at = now;
        let all = async {
            while seen.iter().zip(&enough).any(|((events, _), enough)| events < enough) {
                if write_at.elapsed() >= Duration::from_millis(50) {
                    write_at = Instant::now();
                    self.write();
                }
                for (watch, (events, since)) in self.watches.iter().zip(&mut seen) {
                    assert_eq!(watch.end(), None, "a watch ended");
                    let now = watch.events().len();
                    longest = longest.max(since.elapsed());
                    if now > *events {
                        (*events, *since) = (now, Instant::now());
                    }
                }
                pause(Duration::from_millis(5)).await;
            }
        };
        soon("events on every watch", all).await;
        longest
    }

    /// Expects every event once, in order, and no end.
    async fn expect_all_events(&self) {
        let expected: Vec<_> = (self.version + 1..=self.cluster.state.version()).collect();
        for watch in &self.watches {
            watch.expect_versions(&expected).await;
        }
    }

    async fn moved(&self) -> u64 {
        self.proxy.resumes("moved").await as u64
    }

    async fn state(&self, at: usize) -> String {
        let endpoint = self.proxy.endpoint(self.cluster.servers[at].addr).await;
        endpoint["state"].as_str().unwrap().to_owned()
    }

    /// Without etcd a server sends no responses and no events, and answers PINGs.
    fn lose_etcd(&self, at: usize, lost: bool) {
        self.cluster.servers[at].hang(lost);
        self.cluster.servers[at].hold_watches(lost);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_move_from_an_apiserver_without_etcd() {
    let mut setup = Setup::new().await;
    let stop = Arc::new(AtomicBool::new(false));
    let reader = {
        let client = setup.proxy.client().await;
        let stop = stop.clone();
        tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            while !stop.load(Relaxed) {
                let start = Instant::now();
                assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
                slowest = slowest.max(start.elapsed());
                pause(Duration::from_millis(20)).await;
            }
            slowest
        })
    };
    setup.deliver(20).await;
    let degraded = (0..3).max_by_key(|&at| setup.cluster.watches(at)).unwrap();
    let on_degraded = setup.cluster.watches(degraded);
    assert!(on_degraded > 0);
    setup.lose_etcd(degraded, true);
    let silence = setup.deliver(20).await;
    until("all watches have moved", async || setup.cluster.watches(degraded) == 0).await;
    until("the endpoint is degraded", async || setup.state(degraded).await == "degraded").await;
    stop.store(true, Relaxed);
    let slowest = soon("the reader", reader).await.unwrap();
    println!("{on_degraded} watches moved");
    check_figure("an endpoint without etcd: silence of its watches", silence, WATCH_SILENCE);
    check_figure("an endpoint without etcd: slowest read", slowest, READ_TIME);
    setup.lose_etcd(degraded, false);
    setup.proxy.wait_connected(3).await;
    setup.deliver(5).await;
    setup.expect_all_events().await;
}

/// Only `/readyz` fails: quiet watches move too, once the endpoint is degraded.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn quiet_watches_move_from_a_degraded_apiserver() {
    let mut setup = Setup::new().await;
    let degraded = (0..3).max_by_key(|&at| setup.cluster.watches(at)).unwrap();
    let on_degraded = setup.cluster.watches(degraded);
    setup.cluster.servers[degraded].set_ready(false);
    until("all watches have moved", async || setup.cluster.watches(degraded) == 0).await;
    assert_eq!(setup.state(degraded).await, "degraded");
    assert!(setup.moved().await >= on_degraded);
    setup.deliver(3).await;
    setup.expect_all_events().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_stay_when_every_apiserver_has_lost_etcd() {
    let mut setup = Setup::new().await;
    setup.deliver(20).await;
    let before: Vec<_> = (0..3).map(|at| setup.cluster.watches(at)).collect();
    (0..3).for_each(|at| setup.lose_etcd(at, true));
    for at in 0..3 {
        until("the endpoint is degraded", async || setup.state(at).await == "degraded").await;
    }
    // Two more probes of each server take longer than a move.
    let audit = setup.cluster.state.audit();
    for server in &setup.cluster.servers {
        let probes = || audit.select(|r| r.server == server.name() && r.path == "/readyz").len();
        let before = probes();
        until("it is probed twice more", async || probes() >= before + 2).await;
    }
    assert_eq!(setup.moved().await, 0);
    assert_eq!((0..3).map(|at| setup.cluster.watches(at)).collect::<Vec<_>>(), before);
    (0..3).for_each(|at| setup.lose_etcd(at, false));
    setup.proxy.wait_connected(3).await;
    setup.deliver(5).await;
    assert_eq!(setup.client.get(CONFIGMAPS).await.unwrap().status, 200);
    setup.expect_all_events().await;
}

/// `/readyz` is probed every ten minutes here, and immediately after suspicious responses.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn failing_responses_trigger_a_probe_immediately() {
    let cluster = TestCluster::new(2);
    let start = async || {
        let change = |config: &mut Config| {
            without_suspicion(config);
            let readyz = &mut config.upstreams[0].health.readyz;
            (readyz.interval, readyz.timeout) = (Duration::from_secs(600), Duration::from_secs(1));
        };
        let proxy = cluster.start_with(change).await;
        let client = proxy.client().await;
        (proxy, client)
    };
    let state = async |proxy: &Proxy, at: usize| proxy.endpoints().await[at]["state"].clone();
    let (proxy, client) = start().await;
    let [one, two] = &cluster.servers[..] else { panic!("two servers") };
    // Only `/readyz` fails: reads succeed.
    one.set_ready(false);
    for _ in 0..10 {
        assert_eq!(soon("a read", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    }
    assert_eq!(state(&proxy, 0).await, "ready");
    // A series of 500s triggers a probe.
    one.fail_next(1000, ScriptedResponse::status(500, "InternalError", "etcd"));
    until("a series of errors triggers a probe", async || {
        soon("a read", client.get(CONFIGMAPS)).await.unwrap();
        state(&proxy, 0).await == "degraded"
    })
    .await;
    one.fail_next(0, ScriptedResponse::status(500, "InternalError", "etcd"));
    one.set_ready(true);
    proxy.wait_connected(2).await;
    // Missing response heads trigger one too: the reads are hedged. This needs a jackstay that has
    // seen no slow responses, as on a busy machine: those make it wait longer for a head.
    let (proxy, client) = start().await;
    two.hang(true);
    let reads = (0..8).map(|_| client.get(CONFIGMAPS));
    for reply in soon("reads without a response", join_all(reads)).await {
        assert_eq!(reply.unwrap().status, 200);
    }
    assert_eq!(state(&proxy, 1).await, "degraded");
    two.hang(false);
}
