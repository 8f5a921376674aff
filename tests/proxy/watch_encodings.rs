//! A watch keeps its encoding when it continues on another apiserver, although apiservers may serve different ones: CBOR
//! depends on a feature gate, which does not change on all of them at the same moment.

use crate::scripted_peer::{Action, FIRST, Reply, SECOND, lines, setup_with};
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, Proxy, TestCluster, read_body, soon, wait, without_suspicion};
use http::Method;
use jackstay_apiserver::client::Client;
use std::time::{Duration, Instant};

/// The limit of the wait for a move: an endpoint is degraded when several probes have failed.
const MOVE_TIMEOUT: Duration = Duration::from_secs(60);
const CBOR_OR_JSON: &str = "application/cbor, application/json;q=0.9";

/// Three servers behind jackstay, and a client.
struct Setup {
    cluster: TestCluster,
    proxy: Proxy,
    client: Client,
    from: u64,
}

impl Setup {
    async fn new() -> Self {
        let cluster = TestCluster::new(3);
        let proxy = cluster
            .start_with(|config| {
                without_suspicion(config);
                config.upstreams[0].rebalance = false;
            })
            .await;
        let client = proxy.client().await;
        let from = cluster.state.version();
        Self { cluster, proxy, client, from }
    }

    /// Switches the feature gate of a server.
    fn serve_cbor(&self, server: usize, enabled: bool) {
        self.cluster.servers[server].set_faults(|faults| faults.cbor_disabled = !enabled);
    }

    /// Starts a watch. Returns it and the server that has it.
    async fn watch(&self, accept: &str) -> (WatchRecorder, usize) {
        let path = format!("{CONFIGMAPS}?watch=1&resourceVersion={}", self.from);
        let watch = WatchRecorder::accepting(&self.client, &path, accept).await;
        self.write();
        self.expect_all_events(&watch).await;
        let server = (0..3).find(|&at| self.cluster.watches(at) == 1);
        (watch, server.expect("a server has the watch"))
    }

    fn write(&self) {
        self.cluster.create_config_map(&format!("m{}", self.cluster.state.version()));
    }

    /// The recorder reads only the encoding with which the watch began.
    async fn expect_all_events(&self, watch: &WatchRecorder) {
        let expected: Vec<_> = (self.from + 1..=self.cluster.state.version()).collect();
        watch.expect_versions(&expected).await;
    }

    /// The number of requests that were answered with 406.
    fn not_acceptable(&self) -> usize {
        let records = self.cluster.state.audit().records();
        records.iter().filter(|record| record.status == Some(406)).count()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn cbor_watch_continues_where_cbor_is_served_after_a_kill_and_on_a_move() {
    let setup = Setup::new().await;
    let (watch, first) = setup.watch(CBOR_OR_JSON).await;
    let (second, third) = ((first + 1) % 3, (first + 2) % 3);
    // Only the second one can continue the watch when its server is killed.
    setup.serve_cbor(third, false);
    setup.cluster.servers[first].kill();
    setup.write();
    setup.expect_all_events(&watch).await;
    assert_eq!(setup.cluster.watches(second), 1);

    // It moves back to the first one, when that runs again. The third one may be asked before.
    setup.cluster.servers[first].restart().unwrap();
    setup.proxy.wait_connected(3).await;
    setup.cluster.servers[second].set_faults(|faults| faults.unready = true);
    let has_moved = async || {
        let counts = (setup.cluster.watches(first), setup.cluster.watches(second));
        if counts == (1, 0) { Ok(()) } else { Err(format!("{:?}", setup.proxy.status().await)) }
    };
    wait::until_ok(MOVE_TIMEOUT, "the watch has moved", has_moved).await;
    setup.write();
    setup.expect_all_events(&watch).await;
    assert!(setup.not_acceptable() <= 2, "asked on the resume and once for the move");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn cbor_watch_ends_cleanly_when_no_running_server_serves_cbor() {
    for is_killed in [false, true] {
        let setup = Setup::new().await;
        let (watch, first) = setup.watch(CBOR_OR_JSON).await;
        let asked = (0..3).filter(|&at| !(is_killed && at == first));
        asked.clone().for_each(|at| setup.serve_cbor(at, false));
        let began = Instant::now();
        if is_killed {
            setup.cluster.servers[first].kill();
        } else {
            setup.cluster.servers[first].reset_connections();
        }
        assert_eq!(watch.wait_end().await, Ok(()));
        // The jitter of a quiet watch is up to 200 ms before the first attempt and up to two seconds before later ones.
        assert!(began.elapsed() < Duration::from_secs(7), "{:?}", began.elapsed());
        assert_eq!(setup.not_acceptable(), asked.count(), "JSON was not requested");
        let expected: Vec<_> = (setup.from + 1..=setup.cluster.state.version()).collect();
        assert_eq!(watch.versions(), expected);
        assert!((setup.proxy.resumes("gave_up").await - 1.0).abs() < f64::EPSILON);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn json_watch_stays_json_when_cbor_is_enabled() {
    let setup = Setup::new().await;
    (0..3).for_each(|at| setup.serve_cbor(at, false));
    let (watch, first) = setup.watch(CBOR_OR_JSON).await;
    (0..3).for_each(|at| setup.serve_cbor(at, true));
    setup.cluster.servers[first].kill();
    setup.write();
    setup.expect_all_events(&watch).await;
    assert_eq!(setup.not_acceptable(), 0);
}

/// A server that ignores `Accept` answers 200 in another encoding.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn response_in_another_encoding_is_refused_and_another_server_asked() {
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let (first, second) = (lines(&[FIRST]), lines(&[SECOND]));
    let other =
        || Reply { headers: vec![("content-type", "application/cbor-seq")], ..Reply::ok(&second) };
    for (replies, expected, requests) in [
        (vec![other()], [first.clone(), second.clone()].concat(), 3..=3),
        (vec![other(), other(), other()], first.clone(), 3..=4),
    ] {
        let (peers, _proxy, client) = setup_with(3, without_suspicion).await;
        peers.set_default(Reply::ok(&second));
        let first = Action::PartialThenClose(Reply::ok(&first));
        peers.set_actions(std::iter::once(first).chain(replies.into_iter().map(Action::Answer)));
        let response = soon("a head", client.send(Method::GET, &path, &[], "")).await.unwrap();
        let (received, end) = soon("the end", read_body(response.into_body())).await;
        assert!(end.is_ok(), "the end is not clean");
        assert_eq!(String::from_utf8(received).unwrap(), expected);
        let count = peers.requests().len();
        assert!(requests.contains(&count), "{count} requests");
    }
}
