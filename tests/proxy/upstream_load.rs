//! How jackstay limits the load on apiservers: an endpoint that has recovered gets requests gradually, and
//! anonymous probes, each of which costs a connection, are rare.

use crate::scripted_peer::{Action, Peers};
use crate::support::{CONFIGMAPS, TestCluster, pause, terminate_mode, until, without_suspicion};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use jackstay_apiserver::faulty_relay::FaultyRelay;
use jackstay_core::balance::slow_start;

/// A window in which a prober with an interval of a second would send more than one probe.
const WINDOW: Duration = Duration::from_millis(2_500);

/// The caches of an apiserver that has restarted are empty. Its endpoint is a candidate for a tenth of the
/// requests at first, and for all of them after 30 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn recovered_endpoint_gets_few_requests_at_first() {
    const REQUESTS: u16 = 400;
    let cluster = TestCluster::new(2);
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client().await;
    let server = cluster.servers[0].name();
    cluster.servers[0].kill();
    proxy.wait_state(cluster.servers[0].addr, "ejected").await;
    cluster.servers[0].restart().unwrap();
    // The last time at which the endpoint was known not to be ready.
    let mut recovered = Instant::now();
    until("the endpoint is ready", async || {
        let now = Instant::now();
        let ready = proxy.endpoints().await.iter().all(|endpoint| endpoint["state"] == "ready");
        if !ready {
            recovered = now;
        }
        ready
    })
    .await;
    proxy.wait_connected(2).await;
    cluster.state.audit().clear();
    for _ in 0..REQUESTS {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    let share = slow_start(recovered.elapsed());
    let requests =
        cluster.state.audit().select(|r| r.server == server && r.path == CONFIGMAPS).len();
    println!(
        "{requests} of {REQUESTS} requests went to the recovered endpoint, its share is {share:.2}"
    );
    // At most the share of the requests, if the other endpoint is always the slower candidate, and five standard
    // deviations: each is at most half of the square root of the number of requests.
    let most = f64::from(REQUESTS) * share + 2.5 * f64::from(REQUESTS).sqrt();
    assert!((requests as f64) < most, "{requests} of {REQUESTS}, the share is {share:.2}");
}

/// An apiserver closes the connection of an anonymous probe. A prober without a credential probes every 30 s,
/// whatever happens to its connections.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn anonymous_probes_are_rare_however_connections_end() {
    tokio::join!(expect_rare_probes(None), expect_rare_probes(Some(Action::Close)));
}

/// `first` is the action on the first probe; `None` is a response.
async fn expect_rare_probes(first: Option<Action>) {
    let peers = Peers::start(1);
    let relay = FaultyRelay::start(peers.addresses[0]).unwrap();
    let mut config = peers.certs.config(&[relay.addr]);
    without_suspicion(&mut config);
    config.upstreams[0].health.readyz.cert = None;
    terminate_mode(&mut config).identities.clear();
    let responds = first.is_none();
    peers.set_actions(first);
    let start = Instant::now();
    let proxy = peers.certs.start(config);
    until("the first probe is sent", async || !peers.requests().is_empty()).await;
    if responds {
        until("the endpoint has left the state connecting", async || {
            proxy.endpoints().await.iter().all(|endpoint| endpoint["state"] != "connecting")
        })
        .await;
    }
    let mut connected = peers.accepted.load(Relaxed);
    // With a credential jackstay would probe every second.
    while start.elapsed() < WINDOW || connected < 2 {
        relay.reset_all();
        until("jackstay has connected again", async || {
            let accepted = peers.accepted.load(Relaxed);
            accepted > connected || (start.elapsed() >= WINDOW && connected > 1)
        })
        .await;
        connected = peers.accepted.load(Relaxed);
        pause(Duration::from_millis(100)).await;
    }
    // The version of the apiserver is requested on the same connection as `/readyz`.
    let connections: BTreeSet<_> = peers.requests().iter().map(|probe| probe.connection).collect();
    let probes = connections.len();
    println!("{probes} probes in {:?}, {connected} connections", start.elapsed());
    // The interval of 30 s is shortened by a fifth at most.
    let most = 1 + start.elapsed().as_secs() / 24;
    assert!(probes as u64 <= most, "{probes} probes, expected {most} at most");
}
