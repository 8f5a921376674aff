//! Apiservers with `--goaway-chance`, which spread their clients: now and then the response to a request contains
//! `Connection: close`, for which Go sends a GOAWAY. Clients of jackstay do not notice.

use crate::scripted_peer::setup;
use crate::support::wait::until_within;
use crate::support::{
    CONFIGMAPS, PATIENCE, TestCluster, config_map, join_all, soon, without_suspicion,
};
use http::Method;
use jackstay_apiserver::client::Client;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// The largest chance that kube-apiserver accepts is 2 %.
const REQUESTS_PER_GOAWAY: usize = 50;

/// Go ignores requests above the last stream id of its GOAWAY, so they are sent again, writes included.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_that_a_goaway_excludes_are_processed_once() {
    let (peers, proxy, client) = setup(2).await;
    peers.goaway_every.store(REQUESTS_PER_GOAWAY, Relaxed);
    let mut rounds = 0;
    let retried = async || proxy.metric("jackstay_retries_total{reason=\"unprocessed\"}").await;
    // Whether a GOAWAY excludes a request depends on how fast the peers read.
    until_within(6 * PATIENCE, "GOAWAYs have excluded requests", async || {
        let (method, body) = if rounds % 2 == 0 { (Method::POST, "{}") } else { (Method::GET, "") };
        rounds += 1;
        peers.set_actions([]);
        let requests = (0..100).map(|_| client.request(method.clone(), CONFIGMAPS, &[], body));
        for reply in soon("100 responses", join_all(requests)).await {
            assert_eq!(reply.unwrap().status, 200, "{method}");
        }
        assert_eq!(peers.requests().len(), 100, "{method}");
        rounds >= 10 && retried().await > 0.0
    })
    .await;
    println!("{} requests of {rounds} rounds were sent again", retried().await);
}

/// Creates objects and reads. Each write has an Audit-ID.
async fn requests(client: &Client, task: usize) {
    for number in 0..50 {
        let id = format!("write-{task}-{number}");
        let headers = [("content-type", "application/json"), ("audit-id", &*id)];
        let object = config_map(&id, "1").to_string();
        let write = client.request(Method::POST, CONFIGMAPS, &headers, object);
        assert_eq!(soon(&id, write).await.unwrap().status, 201, "{id}");
        assert_eq!(soon(&id, client.get(CONFIGMAPS)).await.unwrap().status, 200, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_and_watches_do_not_notice_the_goaways_of_apiservers() {
    let cluster = TestCluster::new(3);
    let change = |config: &mut jackstay_config::Config| {
        without_suspicion(config);
        config.upstreams[0].rebalance = false;
    };
    let proxy = cluster.start_with(change).await;
    for server in &cluster.servers {
        server.set_faults(|faults| {
            faults.goaway_chance = 1.0 / REQUESTS_PER_GOAWAY as f64;
            // Other requests are in flight when a GOAWAY arrives.
            faults.delay = Duration::from_millis(2);
        });
    }
    let client = proxy.client().await;
    let from = cluster.state.version();
    let watches = cluster.start_watches(&client, 9).await;
    let before = cluster.watch_counts();
    join_all((0..8).map(|task| requests(&client, task))).await;
    let expected: Vec<_> = (from + 1..=cluster.state.version()).collect();
    assert_eq!(expected.len(), 400);
    for watch in &watches {
        watch.expect_versions(&expected).await;
    }
    for record in cluster.state.audit().records() {
        let Some(id) = record.audit_id.filter(|id| id.starts_with("write")) else { continue };
        assert_eq!(cluster.state.audit().count_id(&id), 1, "{id}");
    }
    assert_eq!(cluster.watch_counts(), before, "a watch has moved");
    assert!(proxy.metric("jackstay_watch_resumes_total").await < 1.0);
    assert!(proxy.metric("jackstay_own_errors_total").await < 1.0);
    let goaways = cluster.servers.iter().map(|server| server.counters().goaways.load(Relaxed));
    let goaways: u64 = goaways.sum();
    println!("{goaways} connections with a GOAWAY");
    // 12 to 14 are expected.
    assert!(goaways > 0);
}
