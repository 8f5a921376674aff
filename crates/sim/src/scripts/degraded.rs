//! A degraded apiserver: its connections work, but requests or health checks fail, or its watches stand still. If
//! another endpoint is ready, the watches move there before clients give them up.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_apiserver::audit::Record;
use jackstay_apiserver::{RequestHook, ScriptedResponse};
use jackstay_config::Config;
use jackstay_sys::clock;
use tokio::time::sleep;

use super::objects::CONFIG_MAPS;
use super::requests::{Watch, create, get};
use super::testbed::{Proxy, Testbed, all, until};
use crate::faults::FaultKind;
use crate::peers::transport::Client;

/// The promise for the time without events on a busy watch.
const SILENCE: Duration = Duration::from_millis(2_500);
/// The pause between two writes.
const PAUSE: Duration = Duration::from_millis(50);
const WATCHES: usize = 12;

/// Watches of a client, and writes that each of them has to deliver.
struct Watching<'a> {
    testbed: &'a Testbed,
    proxy: Proxy,
    client: Client,
    watches: Vec<Watch>,
    /// The version from which the watches start.
    version: u64,
    writes: Cell<u64>,
}

/// Only the fault moves watches, and `/readyz` is probed each second.
fn probed_each_second(config: &mut Config) {
    let upstream = &mut config.upstreams[0];
    upstream.rebalance = false;
    upstream.health.readyz.interval = Duration::from_secs(1);
}

/// Only a suspicion makes the prober probe.
fn probed_on_suspicion(config: &mut Config) {
    let upstream = &mut config.upstreams[0];
    upstream.rebalance = false;
    upstream.health.readyz.interval = Duration::from_secs(600);
}

impl<'a> Watching<'a> {
    async fn start(testbed: &'a Testbed, change: fn(&mut Config)) -> Self {
        let proxy = testbed.start_connected(change).await;
        let (client, path) = (testbed.client(&proxy), testbed.watch_path());
        let version = testbed.cluster().version();
        let watches = all((0..WATCHES).map(|_| Watch::start(&client, &path))).await;
        Self { testbed, proxy, client, watches, version, writes: Cell::new(0) }
    }

    /// Writes until each watch has delivered `count` more events. Returns the longest time in which one of the watches
    /// delivered none.
    async fn write(&self, count: usize) -> Duration {
        let began = clock::now();
        let before: Vec<_> = self.watches.iter().map(Watch::count).collect();
        let has_all = || {
            let pairs = self.watches.iter().zip(&before);
            pairs.into_iter().all(|(watch, before)| watch.count() >= before + count)
        };
        while !has_all() {
            assert!(clock::elapsed(began) < Duration::from_secs(60), "a watch lacks events");
            self.write_one();
            sleep(PAUSE).await;
        }
        let silences = self.watches.iter().zip(&before).map(|(watch, before)| {
            let times = watch.events()[*before..].iter().map(|event| event.at).collect::<Vec<_>>();
            let starts = std::iter::once(began).chain(times.iter().copied());
            let silences = starts.zip(&times).map(|(from, to)| to.saturating_duration_since(from));
            silences.max().unwrap_or_default()
        });
        silences.max().unwrap_or_default()
    }

    fn write_one(&self) {
        self.testbed.create(&format!("w{}", self.writes.replace(self.writes.get() + 1)));
    }

    /// Writes until the prober has asked an apiserver twice for the version of its cache.
    async fn write_until_asked_twice(&self, server: usize) {
        let name = format!("apiserver-{server}");
        let is_question =
            |r: &Record| r.server == name && r.path.contains("jackstay-version-check");
        let before = self.testbed.received(is_question).len();
        while self.testbed.received(is_question).len() < before + 2 {
            self.write_one();
            sleep(PAUSE).await;
        }
    }

    /// Every watch has delivered every event once and in order, and has not ended.
    async fn expect_all_events(&self) {
        let versions: Vec<_> = (self.version + 1..=self.testbed.cluster().version()).collect();
        for watch in &self.watches {
            watch.expect_versions(&versions).await;
        }
    }

    async fn until_moved_from(&self, server: usize) {
        until("all watches have moved", || self.testbed.watches(server) == 0).await;
    }

    fn moved(&self) -> u64 {
        self.proxy.resumes("moved")
    }
}

/// `/readyz` fails: watches without events move, and no new request is sent there. When it fails everywhere, all
/// endpoints are used.
pub async fn unready(testbed: Rc<Testbed>) {
    let watching = Watching::start(&testbed, probed_each_second).await;
    let degraded = testbed.with_most_watches();
    let there = testbed.watches(degraded);
    testbed.begin(degraded, FaultKind::Unready);
    watching.proxy.until_state(degraded, "degraded").await;
    testbed.cluster().audit().clear();
    for number in 0..40 {
        assert_eq!(get(&watching.client, CONFIG_MAPS).await.status, 200);
        if number == 20 {
            assert_eq!(create(&watching.client, "a").await.status, 201);
        }
    }
    let name = format!("apiserver-{degraded}");
    let sent =
        testbed.received(|r| r.server == name && r.forwarded_for.is_some() && r.verb != "watch");
    assert!(sent.is_empty(), "requests were sent to the degraded apiserver: {sent:?}");
    watching.until_moved_from(degraded).await;
    assert!(watching.moved() >= there);
    watching.write(3).await;
    (0..testbed.servers())
        .filter(|at| *at != degraded)
        .for_each(|at| testbed.begin(at, FaultKind::Unready));
    for server in 0..testbed.servers() {
        watching.proxy.until_state(server, "degraded").await;
    }
    for _ in 0..10 {
        assert_eq!(get(&watching.client, CONFIG_MAPS).await.status, 200);
    }
    testbed.end_all(FaultKind::Unready);
    watching.proxy.until_connected(testbed.servers()).await;
    watching.expect_all_events().await;
}

/// The connections to the ready endpoints end by GOAWAY, again and again: requests wait for the next ones, and none is
/// sent to the degraded endpoint, whose connections stay.
pub async fn goaway(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(probed_each_second).await;
    let client = testbed.client(&proxy);
    testbed.begin(0, FaultKind::Unready);
    proxy.until_state(0, "degraded").await;
    testbed.cluster().audit().clear();
    for number in 0..40 {
        for server in 1..testbed.servers() {
            proxy.until_state(server, "ready").await;
        }
        (1..testbed.servers()).for_each(|server| testbed.server(server).goaway());
        sleep(Duration::from_micros(100 * number)).await;
        let name = format!("g{number}");
        let (read, write) = tokio::join!(get(&client, CONFIG_MAPS), create(&client, &name));
        assert_eq!((read.status, write.status), (200, 201));
    }
    let sent = testbed.received(|r| r.server == "apiserver-0" && r.forwarded_for.is_some());
    assert!(sent.is_empty(), "{} requests were sent to the degraded apiserver", sent.len());
    testbed.end(0, FaultKind::Unready);
    proxy.until_connected(testbed.servers()).await;
}

/// No request shows the fault, and `/readyz` is not probed: watches that fall silent make the prober ask `/livez`.
pub async fn dead(testbed: Rc<Testbed>) {
    let watching = Watching::start(&testbed, probed_on_suspicion).await;
    watching.write(40).await;
    let dead = testbed.with_most_watches();
    testbed.set_faults(dead, |faults| (faults.dead, faults.hold_watches) = (true, true));
    let silence = watching.write(20).await;
    testbed.check("silence of the watches whose /livez fails", silence, SILENCE);
    watching.proxy.until_state(dead, "degraded").await;
    assert_eq!(watching.proxy.reason(dead), "/livez answers 500: etcd");
    testbed.set_faults(dead, |faults| (faults.dead, faults.hold_watches) = (false, false));
    watching.proxy.until_connected(testbed.servers()).await;
    watching.expect_all_events().await;
}

/// Health checks succeed, and the watch cache stands still: the endpoint is degraded until it has caught up.
pub async fn lagging(testbed: Rc<Testbed>) {
    let watching = Watching::start(&testbed, probed_each_second).await;
    watching.write(5).await;
    let lagging = testbed.with_most_watches();
    let fault = FaultKind::Lag(Duration::from_secs(3600));
    testbed.begin(lagging, fault);
    let version = testbed.server(lagging).cached_version();
    watching.write(20).await;
    watching.proxy.until_state(lagging, "degraded").await;
    let reason = watching.proxy.reason(lagging);
    let expected = format!("watch cache lags: version {version} of configmaps, 10.0.0.");
    assert!(reason.starts_with(&expected), "{reason}, not {expected}");
    watching.until_moved_from(lagging).await;
    assert_eq!(watching.proxy.endpoint(lagging)["readiness"], "ok");
    testbed.end(lagging, fault);
    watching.proxy.until_state(lagging, "ready").await;
    watching.expect_all_events().await;
}

/// A node may not read config maps of others: without an answer the endpoint keeps its watches, which lose no event.
pub async fn unreadable(testbed: Rc<Testbed>) {
    let watching = Watching::start(&testbed, probed_each_second).await;
    for server in 0..testbed.servers() {
        let refuse: RequestHook = Arc::new(|request| {
            let is_question = request.uri.path().contains("jackstay-version-check");
            is_question.then(|| ScriptedResponse::status(403, "Forbidden", "not a node's"))
        });
        testbed.set_faults(server, |faults| faults.on_request = Some(refuse));
    }
    watching.write(5).await;
    let lagging = testbed.with_most_watches();
    let fault = FaultKind::Lag(Duration::from_secs(3600));
    testbed.begin(lagging, fault);
    watching.write_until_asked_twice(lagging).await;
    assert_eq!((watching.proxy.state(lagging), watching.moved()), ("ready", 0));
    testbed.end(lagging, fault);
    watching.expect_all_events().await;
}

/// Selectors may hide events from the watches of an endpoint, so that it shows no new version. It stays ready if its
/// cache has reached them.
pub async fn quiet(testbed: Rc<Testbed>) {
    let watching = Watching::start(&testbed, probed_each_second).await;
    watching.write(5).await;
    let quiet = testbed.with_most_watches();
    testbed.set_faults(quiet, |faults| faults.hold_watches = true);
    watching.write_until_asked_twice(quiet).await;
    assert_eq!((watching.proxy.state(quiet), watching.moved()), ("ready", 0));
    testbed.set_faults(quiet, |faults| faults.hold_watches = false);
    watching.expect_all_events().await;
}

/// Every apiserver has lost etcd, and answers PINGs only: no watch moves.
pub async fn everywhere(testbed: Rc<Testbed>) {
    let watching = Watching::start(&testbed, probed_each_second).await;
    watching.write(20).await;
    let before = testbed.all_watches();
    let lose_etcd = |lost| {
        for server in 0..testbed.servers() {
            testbed.set_faults(server, |faults| (faults.hang, faults.hold_watches) = (lost, lost));
        }
    };
    lose_etcd(true);
    for server in 0..testbed.servers() {
        watching.proxy.until_state(server, "degraded").await;
    }
    sleep(Duration::from_secs(10)).await;
    assert_eq!((watching.moved(), testbed.all_watches()), (0, before));
    lose_etcd(false);
    watching.proxy.until_connected(testbed.servers()).await;
    watching.write(5).await;
    assert_eq!(get(&watching.client, CONFIG_MAPS).await.status, 200);
    watching.expect_all_events().await;
}

/// The interval of the probes is ten minutes, so failing or missing responses have made the prober probe.
pub async fn failing_responses(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(probed_on_suspicion).await;
    let client = testbed.client(&proxy);
    // `/readyz` fails and reads succeed.
    testbed.begin(0, FaultKind::Unready);
    for _ in 0..10 {
        assert_eq!(get(&client, CONFIG_MAPS).await.status, 200);
    }
    assert_eq!(proxy.state(0), "ready");
    // The other server answers late, so that the load prefers this one.
    testbed.set_faults(1, |faults| faults.delay = Duration::from_millis(100));
    let failure = ScriptedResponse::status(500, "InternalError", "etcd");
    testbed.set_faults(0, |faults| faults.fail_next = Some((1_000, failure)));
    let began = clock::now();
    while proxy.state(0) != "degraded" {
        get(&client, CONFIG_MAPS).await;
        assert!(clock::elapsed(began) < Duration::from_secs(60), "no probe");
    }
    testbed.set_faults(0, |faults| faults.fail_next = None);
    testbed.end(0, FaultKind::Unready);
    testbed.set_faults(1, |faults| faults.delay = Duration::ZERO);
    proxy.until_connected(2).await;
    testbed.set_faults(1, |faults| faults.hang = true);
    for reply in all((0..8).map(|_| get(&client, CONFIG_MAPS))).await {
        assert_eq!(reply.status, 200);
    }
    proxy.until_state(1, "degraded").await;
    testbed.set_faults(1, |faults| faults.hang = false);
    proxy.until_connected(2).await;
}
