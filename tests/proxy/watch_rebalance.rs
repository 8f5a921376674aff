//! Rebalancing: watches move to an apiserver that has restarted, and clients notice nothing.

use crate::support::watch_recorder::WatchRecorder;
use crate::support::{Proxy, TestCluster, pause, until};
use std::time::{Duration, Instant};

use jackstay_config::Config;

/// Enough watches for moves to start soon: each second 2 % of the excess moves.
const WATCHES: u64 = 180;
/// The number of watches on the restarted server for which the test waits.
const RETURNED: u64 = 10;
/// The timeout of a `/readyz` probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// The limit of a wait for moves, which begin only after some 20 s: slow start and the schedule of the rebalancer
/// delay them.
const MOVE_TIMEOUT: Duration = Duration::from_secs(180);

/// Three servers, of which the first one is down and all watches are on the others.
struct Setup {
    cluster: TestCluster,
    proxy: Proxy,
    /// The resource version from which the watches start.
    version: u64,
    watches: Vec<WatchRecorder>,
}

impl Setup {
    async fn new() -> Self {
        let cluster = TestCluster::new(3);
        // On a busy machine, a probe that times out would move watches too.
        let long_timeout =
            |config: &mut Config| config.upstreams[0].health.readyz.timeout = PROBE_TIMEOUT;
        let proxy = cluster.start_with(long_timeout).await;
        let client = proxy.client().await;
        let version = cluster.state.version();
        let watches = cluster.start_watches(&client, WATCHES).await;
        let setup = Self { cluster, proxy, version, watches };
        setup.write(5);
        setup.cluster.servers[0].kill();
        setup.write(5);
        until("the other servers have all watches", async || setup.on_others() == WATCHES).await;
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

    /// Writes at intervals until the condition holds, so that events occur during moves. Returns the time.
    async fn write_until(&self, what: &str, mut condition: impl AsyncFnMut() -> bool) -> Duration {
        let start = Instant::now();
        while !condition().await {
            assert!(start.elapsed() < MOVE_TIMEOUT, "timed out waiting until {what}");
            self.write(1);
            pause(Duration::from_millis(50)).await;
        }
        start.elapsed()
    }

    /// Asserts that every watch has delivered every event once and in order, and has not ended.
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
    let setup = Setup::new().await;
    setup.restart_first().await;
    let before = setup.proxy.resumes("resumed").await;
    // The count of the server does not suffice: it includes moves that jackstay has not completed or cancels.
    let returned = async || {
        let moved = setup.proxy.resumes("moved").await;
        // On a busy machine jackstay may give up a connection, and some of its watches resume on this server.
        let resumed = setup.proxy.resumes("resumed").await - before;
        setup.cluster.watches(0) >= RETURNED && moved + resumed >= RETURNED as f64
    };
    let duration = setup.write_until("watches have moved", returned).await;
    let moved = setup.proxy.resumes("moved").await;
    println!("{moved} of {WATCHES} watches moved within {duration:?}");
    assert!(moved > 0.0);
    setup.expect_all_events().await;
    // A watch that has moved is resumed when its new server is killed.
    setup.cluster.servers[0].kill();
    setup.expect_all_events().await;
}
