//! An apiserver that is alive and not well: its watches go on elsewhere before anybody misses them,
//! if there is an elsewhere.

use crate::hostile::join_all;
use crate::support::figures::within;
use crate::support::{MAPS, Proxy, World, map, pass, patient, soon, until};
use crate::watches::Follower;
use jackstay::config::Config;
use jackstay::demo::apiserver::ScriptedResponse;
use jackstay::demo::client::Client;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Promised: watches that were delivering are silent for no longer.
const BUSY: Duration = Duration::from_millis(2_500);
/// Promised: no read waits longer.
const READ: Duration = Duration::from_millis(3_500);
const WATCHES: u64 = 12;

struct Scene {
    world: World,
    proxy: Proxy,
    client: Client,
    followers: Vec<Follower>,
    version: u64,
    writes: u64,
}

impl Scene {
    async fn new() -> Self {
        let world = World::new(3);
        // What moves here moves for the reason of the test.
        let proxy = world.start_with(|config| config.upstreams[0].rebalance = false).await;
        let client = proxy.client(&world.certs.credentials()).await;
        let version = world.cluster.version();
        let mut followers = Vec::new();
        for _ in 0..WATCHES {
            let path = format!("{MAPS}?watch=1&resourceVersion={version}");
            followers.push(Follower::start(&client, &path, "application/json").await);
        }
        let scene = Self { world, proxy, client, followers, version, writes: 0 };
        until("all watches run", async || (0..3).map(|at| scene.on(at)).sum::<u64>() == WATCHES)
            .await;
        scene
    }

    /// Watches on a server.
    fn on(&self, at: usize) -> u64 {
        self.world.servers[at].counters().watches.load(Relaxed)
    }

    fn write(&mut self) {
        let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
        let name = format!("w{}", self.writes);
        self.writes += 1;
        self.world.cluster.create(kind, "default", map(&name, "1"), false).unwrap();
    }

    /// Writes until each watch has had `count` events more; the longest silence of any of them.
    async fn deliver(&mut self, count: usize) -> Duration {
        let now = Instant::now();
        let mut seen: Vec<_> = self.followers.iter().map(|f| (f.events().len(), now)).collect();
        let enough: Vec<_> = seen.iter().map(|(events, _)| events + count).collect();
        let mut longest = Duration::ZERO;
        let mut write_at = now;
        let all = async {
            while seen.iter().zip(&enough).any(|((events, _), enough)| events < enough) {
                if write_at.elapsed() >= Duration::from_millis(50) {
                    write_at = Instant::now();
                    self.write();
                }
                for (follower, (events, since)) in self.followers.iter().zip(&mut seen) {
                    assert_eq!(follower.end(), None, "a watch ended");
                    let now = follower.events().len();
                    longest = longest.max(since.elapsed());
                    if now > *events {
                        (*events, *since) = (now, Instant::now());
                    }
                }
                pass(Duration::from_millis(5)).await;
            }
        };
        soon("events on every watch", all).await;
        longest
    }

    /// Every event once, in order, and no end.
    async fn judge(&self) {
        let last = self.world.cluster.version();
        for follower in &self.followers {
            until("the last event", async || {
                follower.events().last().is_some_and(|event| event.2 == last.to_string())
            })
            .await;
            let versions: Vec<u64> =
                follower.events().iter().map(|event| event.2.parse().unwrap()).collect();
            assert!(versions.windows(2).all(|pair| pair[0] < pair[1]), "{versions:?}");
            assert_eq!(versions.len() as u64, last - self.version, "lost or invented");
            assert_eq!(follower.end(), None);
        }
    }

    async fn moved(&self) -> u64 {
        let page = self.proxy.page("/metrics").await;
        page.lines()
            .filter(|l| l.starts_with("jackstay_watch_resumes_total") && l.contains("\"moved\""))
            .filter_map(|l| l.rsplit_once(' ')?.1.parse::<u64>().ok())
            .sum()
    }

    async fn state(&self, at: usize) -> String {
        let address = self.world.servers[at].addr.to_string();
        let endpoints = self.proxy.endpoints().await;
        let here = endpoints.iter().find(|e| e["address"] == *address).unwrap();
        here["state"].as_str().unwrap().to_owned()
    }

    /// As without its etcd: no answers, no events; PINGs are answered.
    fn lose_etcd(&self, at: usize, lost: bool) {
        self.world.servers[at].hang(lost);
        self.world.servers[at].hold_watches(lost);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_leave_an_apiserver_that_has_lost_its_etcd() {
    let mut scene = Scene::new().await;
    let stop = Arc::new(AtomicBool::new(false));
    let reader = {
        let client = scene.proxy.client(&scene.world.certs.credentials()).await;
        let stop = stop.clone();
        tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            while !stop.load(Relaxed) {
                let start = Instant::now();
                assert_eq!(client.get(MAPS).await.unwrap().status, 200);
                slowest = slowest.max(start.elapsed());
                pass(Duration::from_millis(20)).await;
            }
            slowest
        })
    };
    scene.deliver(20).await;
    let sick = (0..3).max_by_key(|&at| scene.on(at)).unwrap();
    let there = scene.on(sick);
    assert!(there > 0);
    scene.lose_etcd(sick, true);
    let silence = scene.deliver(20).await;
    until("none is left there", async || scene.on(sick) == 0).await;
    until("it is degraded", async || scene.state(sick).await == "degraded").await;
    stop.store(true, Relaxed);
    let slowest = soon("the reader", reader).await.unwrap();
    println!("{there} watches left");
    within("an endpoint without etcd: silence of its watches", silence, BUSY);
    within("an endpoint without etcd: slowest read", slowest, READ);
    scene.lose_etcd(sick, false);
    scene.proxy.ready(3).await;
    scene.deliver(5).await;
    scene.judge().await;
}

/// Its `/readyz` fails, and all else is as ever: quiet watches go too, once that is sure.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn quiet_watches_leave_a_degraded_apiserver() {
    let mut scene = Scene::new().await;
    let sick = (0..3).max_by_key(|&at| scene.on(at)).unwrap();
    let there = scene.on(sick);
    scene.world.servers[sick].set_ready(false);
    until("none is left there", async || scene.on(sick) == 0).await;
    assert_eq!(scene.state(sick).await, "degraded");
    assert!(scene.moved().await >= there);
    scene.deliver(3).await;
    scene.judge().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn where_all_have_lost_it_nothing_moves() {
    let mut scene = Scene::new().await;
    scene.deliver(20).await;
    let before: Vec<_> = (0..3).map(|at| scene.on(at)).collect();
    (0..3).for_each(|at| scene.lose_etcd(at, true));
    for at in 0..3 {
        until("it is degraded", async || scene.state(at).await == "degraded").await;
    }
    // Longer than anybody needs to notice and to go: two more probes of each.
    let audit = scene.world.cluster.audit();
    for server in &scene.world.servers {
        let probes = || audit.select(|r| r.server == server.name() && r.path == "/readyz").len();
        let asked = probes();
        until("it is asked twice more", async || probes() >= asked + 2).await;
    }
    assert_eq!(scene.moved().await, 0);
    assert_eq!((0..3).map(|at| scene.on(at)).collect::<Vec<_>>(), before);
    (0..3).for_each(|at| scene.lose_etcd(at, false));
    scene.proxy.ready(3).await;
    scene.deliver(5).await;
    assert_eq!(scene.client.get(MAPS).await.unwrap().status, 200);
    scene.judge().await;
}

/// `/readyz` is asked every ten minutes here, and at once where answers say that it should be.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn evidence_asks_at_once() {
    let world = World::new(2);
    let start = async || {
        let change = |config: &mut Config| {
            *config = patient(config.clone());
            let readyz = &mut config.upstreams[0].health.readyz;
            (readyz.interval, readyz.timeout) = (Duration::from_secs(600), Duration::from_secs(1));
        };
        let proxy = world.start_with(change).await;
        let client = proxy.client(&world.certs.credentials()).await;
        (proxy, client)
    };
    let state = async |proxy: &Proxy, at: usize| proxy.endpoints().await[at]["state"].clone();
    let (proxy, client) = start().await;
    let [one, two] = &world.servers[..] else { panic!("two servers") };
    // Nothing but this says so: reads go on.
    one.set_ready(false);
    for _ in 0..10 {
        assert_eq!(soon("a read", client.get(MAPS)).await.unwrap().status, 200);
    }
    assert_eq!(state(&proxy, 0).await, "ready");
    // A streak of 500s does.
    one.fail_next(1000, ScriptedResponse::status(500, "InternalError", "etcd"));
    until("a streak of errors has it asked", async || {
        soon("a read", client.get(MAPS)).await.unwrap();
        state(&proxy, 0).await == "degraded"
    })
    .await;
    one.fail_next(0, ScriptedResponse::status(500, "InternalError", "etcd"));
    one.set_ready(true);
    proxy.ready(2).await;
    // So do heads that stay away: the reads that wait for them are asked for elsewhere. By one that
    // has seen no answer take long, as they do on a busy machine: there, a head may stay away for long.
    let (proxy, client) = start().await;
    two.hang(true);
    let reads = (0..8).map(|_| client.get(MAPS));
    for reply in soon("reads that meet silence", join_all(reads)).await {
        assert_eq!(reply.unwrap().status, 200);
    }
    assert_eq!(state(&proxy, 1).await, "degraded");
    two.hang(false);
}
