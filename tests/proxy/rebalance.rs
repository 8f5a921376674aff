//! Watches move to an apiserver that has come back, and no client sees it.

use crate::support::{MAPS, Proxy, World, map, pass, until};
use crate::watches::Follower;
use jackstay::config::Config;
use jackstay::demo::apiserver::ScriptedResponse;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Many, so that moves come soon: two in a hundred of what is too many go in a second.
const WATCHES: usize = 180;
/// So many watches on it, and the server counts as back.
const BACK: u64 = 10;
/// What a `/readyz` may take.
const PROBE: Duration = Duration::from_secs(5);
/// Slow start and the pace of the mover: it takes some 20 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Three servers, of which the first goes away for a moment: when it is back it carries no watch.
struct Scene {
    world: World,
    proxy: Proxy,
    version: u64,
    followers: Vec<Follower>,
}

impl Scene {
    /// The first is away.
    async fn new(watches: usize) -> Self {
        let world = World::new(3);
        // A probe that is late on a busy machine would move watches too.
        let patient = |config: &mut Config| config.upstreams[0].health.readyz.timeout = PROBE;
        let proxy = world.start_with(patient).await;
        let client = proxy.client(&world.certs.credentials()).await;
        let version = world.cluster.version();
        let path = format!("{MAPS}?watch=1&resourceVersion={version}");
        let mut followers = Vec::new();
        for _ in 0..watches {
            followers.push(Follower::start(&client, &path, "application/json").await);
        }
        let scene = Self { world, proxy, version, followers };
        scene.write(5);
        scene.world.servers[0].kill();
        scene.write(5);
        until("the others carry all watches", async || {
            scene.on(1) + scene.on(2) == scene.followers.len() as u64
        })
        .await;
        scene
    }

    async fn first_is_back(&self) {
        self.world.servers[0].restart().unwrap();
        self.proxy.ready(3).await;
    }

    /// How many watches a server has.
    fn on(&self, server: usize) -> u64 {
        self.world.servers[server].counters().watches.load(Ordering::Relaxed)
    }

    fn write(&self, count: usize) {
        let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
        for _ in 0..count {
            let name = format!("m{}", self.world.cluster.version());
            self.world.cluster.create(kind, "default", map(&name, "1"), false).unwrap();
        }
    }

    async fn resumes(&self, outcome: &str) -> f64 {
        let name = format!("jackstay_watch_resumes_total{{outcome=\"{outcome}\"");
        self.proxy.metric(&name).await
    }

    /// Writes a little all the time, so that moves meet events, until there is enough.
    async fn write_until(&self, what: &str, mut enough: impl AsyncFnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !enough().await {
            assert!(start.elapsed() < 3 * PATIENCE, "waited in vain until {what}");
            self.write(1);
            pass(Duration::from_millis(50)).await;
        }
        start.elapsed()
    }

    /// Every client has every event once, in order, and no end.
    async fn judge(&self) {
        self.write(5);
        let (first, last) = (self.version, self.world.cluster.version());
        for follower in &self.followers {
            until("the last event", async || {
                follower.events().last().is_some_and(|event| event.2 == last.to_string())
            })
            .await;
            assert_eq!(follower.end(), None);
            let got = follower.events().into_iter().map(|event| event.2.parse().unwrap());
            assert_eq!(got.collect::<Vec<u64>>(), (first + 1..=last).collect::<Vec<_>>());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_move_to_the_apiserver_that_is_back() {
    let scene = Scene::new(WATCHES).await;
    scene.first_is_back().await;
    let before = scene.resumes("resumed").await;
    // The server counts a watch before jackstay does, and also one whose move comes too late.
    let back = async || {
        let moved = scene.resumes("moved").await;
        // A machine so busy that a connection is given up resumes some of them there.
        let resumed = scene.resumes("resumed").await - before;
        scene.on(0) >= BACK && moved + resumed >= BACK as f64
    };
    let took = scene.write_until("watches are back", back).await;
    let moved = scene.resumes("moved").await;
    println!("{moved} of {WATCHES} watches moved within {took:?}");
    assert!(moved > 0.0);
    scene.judge().await;
    // What has moved is a watch like any other: it survives the next loss.
    scene.world.servers[0].kill();
    scene.judge().await;
}

/// A server that is ready and takes no watches: they stay where they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_move_that_is_refused_changes_nothing() {
    let scene = Scene::new(WATCHES).await;
    scene.world.servers[0].on_request(Some(Arc::new(|request| {
        let watch = request.uri.query().is_some_and(|query| query.contains("watch=1"));
        watch.then(|| ScriptedResponse::status(503, "ServiceUnavailable", "no"))
    })));
    // Until the first is back and settled, the other two are evened out between them.
    let uneven = scene.on(1).abs_diff(scene.on(2)) / 2;
    let before = scene.resumes("moved").await;
    scene.first_is_back().await;
    let refused = async || scene.resumes("not_moved").await >= 3.0;
    scene.write_until("moves are refused", refused).await;
    let moved = scene.resumes("moved").await - before;
    assert!(moved <= uneven as f64, "{moved} moved, {uneven} to even out");
    assert_eq!(scene.on(0), 0);
    let others = async || scene.on(1) + scene.on(2) == WATCHES as u64; // in the midst of a move, one more
    until("the others carry all watches", others).await;
    scene.judge().await;
}
