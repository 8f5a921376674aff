//! A degraded apiserver: its connections work, but requests or `/readyz` fail. If another endpoint is ready, the
//! watches move there before clients give them up.

use crate::support::figures::check_figure;
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{
    CONFIGMAPS, Proxy, TestCluster, join_all, pause, soon, until, without_suspicion,
};
use jackstay::config::Config;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The promised limit for the time without events on a watch whose apiserver loses etcd.
const WATCH_SILENCE: Duration = Duration::from_millis(2_500);
const WATCHES: u64 = 12;

struct Setup {
    cluster: TestCluster,
    proxy: Proxy,
    client: Client,
    watches: Vec<WatchRecorder>,
    /// The resource version from which the watches start.
    version: u64,
    writes: u64,
}

impl Setup {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut Config)) -> Self {
        let cluster = TestCluster::new(3);
        let change = |config: &mut Config| {
            // Without rebalancing only the fault moves watches.
            config.upstreams[0].rebalance = false;
            change(config);
        };
        let proxy = cluster.start_with(change).await;
        let client = proxy.client().await;
        let version = cluster.state.version();
        let watches = cluster.start_watches(&client, WATCHES).await;
        Self { cluster, proxy, client, watches, version, writes: 0 }
    }

    fn write(&mut self) {
        self.cluster.create_config_map(&format!("w{}", self.writes));
        self.writes += 1;
    }

    /// Writes until each watch has delivered `count` more events. Returns the longest time in which one of the
    /// watches delivered none.
    async fn write_and_measure_silence(&mut self, count: usize) -> Duration {
        let start = Instant::now();
        // The number of events of each watch, and the time of the last one.
        let mut seen: Vec<_> = self.watches.iter().map(|w| (w.events().len(), start)).collect();
        let wanted: Vec<_> = seen.iter().map(|(events, _)| events + count).collect();
        let mut longest = Duration::ZERO;
        let mut last_write = start;
        let all = async {
            while seen.iter().zip(&wanted).any(|((events, _), wanted)| events < wanted) {
                if last_write.elapsed() >= Duration::from_millis(50) {
                    last_write = Instant::now();
                    self.write();
                }
                for (watch, (events, last_event)) in self.watches.iter().zip(&mut seen) {
                    assert_eq!(watch.end(), None, "a watch ended");
                    let now = watch.events().len();
                    longest = longest.max(last_event.elapsed());
                    if now > *events {
                        (*events, *last_event) = (now, Instant::now());
                    }
                }
                pause(Duration::from_millis(5)).await;
            }
        };
        soon("events on every watch", all).await;
        longest
    }

    /// Asserts that every watch has delivered every event once and in order, and has not ended.
    async fn expect_all_events(&self) {
        let expected: Vec<_> = (self.version + 1..=self.cluster.state.version()).collect();
        for watch in &self.watches {
            watch.expect_versions(&expected).await;
        }
    }

    /// Writes until the prober has asked this server twice about a version.
    async fn write_until_asked_twice(&mut self, at: usize) {
        let server = self.cluster.servers[at].name().to_owned();
        until("the endpoint is asked for two versions", async || {
            self.write();
            let is_question = |path: &str| path.contains("jackstay-version-check");
            let audit = self.cluster.state.audit();
            audit.select(|request| request.server == server && is_question(&request.path)).len()
                >= 2
        })
        .await;
    }

    async fn moved(&self) -> u64 {
        self.proxy.resumes("moved").await as u64
    }

    async fn state(&self, at: usize) -> String {
        let endpoint = self.proxy.endpoint(self.cluster.servers[at].addr).await;
        endpoint["state"].as_str().unwrap().to_owned()
    }

    /// A server without etcd sends no responses and no events, but answers PINGs.
    fn lose_etcd(&self, at: usize, lost: bool) {
        self.cluster.servers[at].set_faults(|faults| faults.hang = lost);
        self.cluster.servers[at].set_faults(|faults| faults.hold_watches = lost);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn quiet_watches_move_when_readyz_fails() {
    let mut setup = Setup::new().await;
    let degraded = (0..3).max_by_key(|&at| setup.cluster.watches(at)).unwrap();
    let on_degraded = setup.cluster.watches(degraded);
    setup.cluster.servers[degraded].set_faults(|faults| faults.unready = true);
    until("all watches have moved", async || setup.cluster.watches(degraded) == 0).await;
    assert_eq!(setup.state(degraded).await, "degraded");
    assert!(setup.moved().await >= on_degraded);
    setup.write_and_measure_silence(3).await;
    setup.expect_all_events().await;
}

/// No request shows the fault, `/readyz` does not, and it is probed every ten minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_that_fall_silent_trigger_a_probe_of_livez() {
    let change =
        |config: &mut Config| config.upstreams[0].health.readyz.interval = Duration::from_secs(600);
    let mut setup = Setup::with(change).await;
    setup.write_and_measure_silence(40).await;
    let degraded = (0..3).max_by_key(|&at| setup.cluster.watches(at)).unwrap();
    setup.cluster.servers[degraded].set_faults(|faults| faults.dead = true);
    setup.cluster.servers[degraded].set_faults(|faults| faults.hold_watches = true);
    let silence = setup.write_and_measure_silence(20).await;
    check_figure("an endpoint whose /livez fails: silence of its watches", silence, WATCH_SILENCE);
    until("the endpoint is degraded", async || setup.state(degraded).await == "degraded").await;
    let endpoint = setup.proxy.endpoint(setup.cluster.servers[degraded].addr).await;
    assert_eq!(endpoint["reason"], "/livez answers 500: etcd");
    setup.cluster.servers[degraded].set_faults(|faults| faults.hold_watches = false);
    setup.cluster.servers[degraded].set_faults(|faults| faults.dead = false);
    setup.proxy.wait_connected(3).await;
    setup.expect_all_events().await;
}

/// Health checks are ok, and the watch cache stands still.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lagging_watch_cache_degrades_its_endpoint_until_it_has_caught_up() {
    let mut setup = Setup::new().await;
    setup.write_and_measure_silence(5).await;
    let lagging = (0..3).max_by_key(|&at| setup.cluster.watches(at)).unwrap();
    let version = setup.cluster.state.version();
    setup.cluster.servers[lagging].set_faults(|faults| faults.hold_watches = true);
    setup.cluster.servers[lagging].set_faults(|faults| faults.cache_version = Some(version));
    setup.write_and_measure_silence(20).await;
    until("the endpoint is degraded", async || setup.state(lagging).await == "degraded").await;
    let endpoint = setup.proxy.endpoint(setup.cluster.servers[lagging].addr).await;
    let reason = endpoint["reason"].as_str().unwrap();
    assert!(
        reason
            .starts_with(&format!("watch cache lags: version {version} of configmaps, 127.0.0.1:")),
        "{reason}"
    );
    until("all watches have moved", async || setup.cluster.watches(lagging) == 0).await;
    assert_eq!(setup.proxy.endpoint(setup.cluster.servers[lagging].addr).await["readiness"], "ok");
    setup.cluster.servers[lagging].set_faults(|faults| faults.hold_watches = false);
    setup.cluster.servers[lagging].set_faults(|faults| faults.cache_version = None);
    until("the cache has caught up", async || setup.state(lagging).await == "ready").await;
    setup.expect_all_events().await;
}

/// A node may not read `ConfigMap`s of others: without an answer the endpoint keeps its watches, which lose no event.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn lag_of_a_resource_that_the_prober_may_not_read_degrades_no_endpoint() {
    let mut setup = Setup::with(without_suspicion).await;
    for server in &setup.cluster.servers {
        let refuse: RequestHook = Arc::new(|request| {
            let is_question = request.uri.path().contains("jackstay-version-check");
            is_question.then(|| ScriptedResponse::status(403, "Forbidden", "not a node's"))
        });
        server.set_faults(|faults| faults.on_request = Some(refuse));
    }
    setup.write_and_measure_silence(5).await;
    let lagging = (0..3).max_by_key(|&at| setup.cluster.watches(at)).unwrap();
    let version = setup.cluster.state.version();
    setup.cluster.servers[lagging].set_faults(|faults| faults.hold_watches = true);
    setup.cluster.servers[lagging].set_faults(|faults| faults.cache_version = Some(version));
    setup.write_until_asked_twice(lagging).await;
    assert_eq!(setup.state(lagging).await, "ready");
    setup.cluster.servers[lagging].set_faults(|faults| faults.hold_watches = false);
    setup.cluster.servers[lagging].set_faults(|faults| faults.cache_version = None);
    setup.expect_all_events().await;
}

/// Selectors may hide events from the watches of an endpoint, so that it shows no new version.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endpoint_without_events_whose_cache_has_reached_their_version_stays_ready() {
    // Silent watches leave an endpoint that is suspected or whose probe is late.
    let mut setup = Setup::with(without_suspicion).await;
    setup.write_and_measure_silence(5).await;
    let quiet = (0..3).max_by_key(|&at| setup.cluster.watches(at)).unwrap();
    setup.cluster.servers[quiet].set_faults(|faults| faults.hold_watches = true);
    setup.write_until_asked_twice(quiet).await;
    assert_eq!(setup.state(quiet).await, "ready");
    assert_eq!(setup.moved().await, 0);
    setup.cluster.servers[quiet].set_faults(|faults| faults.hold_watches = false);
    setup.expect_all_events().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_stay_when_every_apiserver_has_lost_etcd() {
    let mut setup = Setup::new().await;
    setup.write_and_measure_silence(20).await;
    let before: Vec<_> = (0..3).map(|at| setup.cluster.watches(at)).collect();
    (0..3).for_each(|at| setup.lose_etcd(at, true));
    for at in 0..3 {
        until("the endpoint is degraded", async || setup.state(at).await == "degraded").await;
    }
    // A move would take less time than two more probes of each server.
    let audit = setup.cluster.state.audit();
    for server in &setup.cluster.servers {
        let probes = || audit.select(|r| r.server == server.name() && r.path == "/readyz").len();
        let before = probes();
        until("the server is probed twice more", async || probes() >= before + 2).await;
    }
    assert_eq!(setup.moved().await, 0);
    assert_eq!((0..3).map(|at| setup.cluster.watches(at)).collect::<Vec<_>>(), before);
    (0..3).for_each(|at| setup.lose_etcd(at, false));
    setup.proxy.wait_connected(3).await;
    setup.write_and_measure_silence(5).await;
    assert_eq!(setup.client.get(CONFIGMAPS).await.unwrap().status, 200);
    setup.expect_all_events().await;
}

/// The regular interval of the probes is ten minutes, so any probe during the test is one that a failing
/// response has triggered.
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
    // `/readyz` fails and reads succeed, which triggers no probe.
    one.set_faults(|faults| faults.unready = true);
    for _ in 0..10 {
        assert_eq!(soon("a read", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    }
    assert_eq!(state(&proxy, 0).await, "ready");
    // A series of 500s triggers a probe. The other server answers late, so that the load prefers this one.
    two.set_faults(|faults| faults.delay = Duration::from_millis(100));
    let failure = ScriptedResponse::status(500, "InternalError", "etcd");
    one.set_faults(|faults| faults.fail_next = Some((1000, failure)));
    until("a series of errors triggers a probe", async || {
        soon("a read", client.get(CONFIGMAPS)).await.unwrap();
        state(&proxy, 0).await == "degraded"
    })
    .await;
    one.set_faults(|faults| faults.fail_next = None);
    one.set_faults(|faults| faults.unready = false);
    two.set_faults(|faults| faults.delay = Duration::ZERO);
    proxy.wait_connected(2).await;
    // Missing response heads trigger a probe too, and the reads are hedged. A second jackstay is used, because slow
    // responses on a busy machine may have lengthened the time for which the first one waits for a head.
    let (proxy, client) = start().await;
    two.set_faults(|faults| faults.hang = true);
    let reads = (0..8).map(|_| client.get(CONFIGMAPS));
    for reply in soon("reads without a response", join_all(reads)).await {
        assert_eq!(reply.unwrap().status, 200);
    }
    until("missing heads trigger a probe", async || state(&proxy, 1).await == "degraded").await;
    two.set_faults(|faults| faults.hang = false);
}
