//! Watches move to an apiserver that has come back, without a visible change for clients.

use crate::support::watch_recorder::WatchRecorder;
use crate::support::{Proxy, TestCluster, pause, until};
use jackstay::config::Config;
use jackstay::demo::apiserver::{RequestHook, ScriptedResponse};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Many, so that moves start soon: each second two in a hundred of the excess move.
const WATCHES: usize = 180;
/// With this many watches the server counts as back.
const BACK: u64 = 10;
/// The timeout of a `/readyz` probe.
const PROBE: Duration = Duration::from_secs(5);
/// Slow start and the schedule of the rebalancer take some 20 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// Three servers, of which the first restarts: it has no watches afterwards.
struct Setup {
    cluster: TestCluster,
    proxy: Proxy,
    version: u64,
    watches: Vec<WatchRecorder>,
}

impl Setup {
    /// The first server is down.
    async fn new(watches: usize) -> Self {
        let cluster = TestCluster::new(3);
        // On a busy machine a late probe would move watches too.
        let slow_probes = |config: &mut Config| config.upstreams[0].health.readyz.timeout = PROBE;
        let proxy = cluster.start_with(slow_probes).await;
        let client = proxy.client().await;
        let (version, path) = (cluster.state.version(), cluster.watch_path());
        let mut recorders = Vec::new();
        for _ in 0..watches {
            recorders.push(WatchRecorder::start(&client, &path).await);
        }
        let setup = Self { cluster, proxy, version, watches: recorders };
        setup.write(5);
        setup.cluster.servers[0].kill();
        setup.write(5);
        until("the others have all watches", async || {
            setup.on_others() == setup.watches.len() as u64
        })
        .await;
        setup
    }

    async fn restart_first(&self) {
        self.cluster.servers[0].restart().unwrap();
        self.proxy.wait_connected(3).await;
    }

    /// The number of watches on the second and the third server.
    fn on_others(&self) -> u64 {
        self.cluster.watches(1) + self.cluster.watches(2)
    }

    fn write(&self, count: usize) {
        for _ in 0..count {
            let name = format!("m{}", self.cluster.state.version());
            self.cluster.create_config_map(&name);
        }
    }

    /// Writes at intervals, so that moves meet events, until the condition holds.
    async fn write_until(&self, what: &str, mut enough: impl AsyncFnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !enough().await {
            assert!(start.elapsed() < 3 * PATIENCE, "timed out waiting until {what}");
            self.write(1);
            pause(Duration::from_millis(50)).await;
        }
        start.elapsed()
    }

    /// Expects that every watch has seen every event once, in order, and has not ended.
    async fn expect_all_events(&self) {
        self.write(5);
        let expected: Vec<_> = (self.version + 1..=self.cluster.state.version()).collect();
        for watch in &self.watches {
            watch.expect_versions(&expected).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_move_to_an_apiserver_that_has_restarted() {
    let setup = Setup::new(WATCHES).await;
    setup.restart_first().await;
    let before = setup.proxy.resumes("resumed").await;
    // The server counts a watch before jackstay does, and counts also a watch whose move is
    // cancelled.
    let back = async || {
        let moved = setup.proxy.resumes("moved").await;
        // On a busy machine a connection may be given up, which resumes some of the watches there.
        let resumed = setup.proxy.resumes("resumed").await - before;
        setup.cluster.watches(0) >= BACK && moved + resumed >= BACK as f64
    };
    let took = setup.write_until("watches have moved", back).await;
    let moved = setup.proxy.resumes("moved").await;
    println!("{moved} of {WATCHES} watches moved within {took:?}");
    assert!(moved > 0.0);
    setup.expect_all_events().await;
    // A watch that has moved survives the next loss.
    setup.cluster.servers[0].kill();
    setup.expect_all_events().await;
}

/// The server is ready and refuses watches.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_stay_when_the_restarted_apiserver_refuses_them() {
    let setup = Setup::new(WATCHES).await;
    let refuse: RequestHook = Arc::new(|request| {
        let watch = request.uri.query().is_some_and(|query| query.contains("watch=1"));
        watch.then(|| ScriptedResponse::status(503, "ServiceUnavailable", "no"))
    });
    setup.cluster.servers[0].set_faults(|faults| faults.on_request = Some(refuse));
    // Until the first server has settled, the other two may be evened out.
    let uneven = setup.cluster.watches(1).abs_diff(setup.cluster.watches(2)) / 2;
    let before = setup.proxy.resumes("moved").await;
    setup.restart_first().await;
    let refused = async || setup.proxy.resumes("not_moved").await >= 3.0;
    setup.write_until("moves are refused", refused).await;
    let moved = setup.proxy.resumes("moved").await - before;
    assert!(moved <= uneven as f64, "{moved} moved, {uneven} to even out");
    assert_eq!(setup.cluster.watches(0), 0);
    // One more while a watch is being moved.
    until("the others have all watches", async || setup.on_others() == WATCHES as u64).await;
    setup.expect_all_events().await;
}
