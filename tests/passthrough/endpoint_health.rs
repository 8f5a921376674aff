//! What becomes of flows when the endpoint that they lead to dies, falls ill or falls silent.

use crate::support::figures::check_figure;
use crate::support::{CONFIGMAPS, TestCluster, passthrough_config, soon, until, without_suspicion};
use std::time::{Duration, Instant};

/// The address that most flows lead to, and how many.
async fn busiest(proxy: &crate::support::Proxy) -> (String, u64) {
    let endpoints = proxy.endpoints().await;
    endpoints
        .iter()
        .map(|e| (e["address"].as_str().unwrap().to_owned(), e["flows"].as_u64().unwrap()))
        .max_by_key(|(_, flows)| *flows)
        .unwrap()
}

#[tokio::test]
async fn nobody_asks_anonymously() {
    let cluster = TestCluster::new(2);
    let mut config = passthrough_config(cluster.config());
    config.upstreams[0].health.readyz.cert = None;
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(2).await;
    for endpoint in proxy.endpoints().await {
        assert_eq!(endpoint["reason"], "connected; /readyz is not asked without a credential");
    }
    cluster.servers[0].set_ready(false);
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    assert!(cluster.state.audit().records().iter().all(|r| r.path != "/readyz"));
}

#[tokio::test]
async fn without_a_ca_health_is_probed_all_the_same() {
    let cluster = TestCluster::new(2);
    let mut config = passthrough_config(cluster.config());
    config.upstreams[0].health.readyz.cert = None;
    config.upstreams[0].tls.ca_file = None;
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(2).await;
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_stopped_process_takes_its_flows_with_it() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.certs.start(passthrough_config(cluster.config()));
    proxy.wait_ready(2).await;
    let mut clients = Vec::new();
    let mut watches = Vec::new();
    for _ in 0..6 {
        let client = proxy.client().await;
        watches.push(client.watch(&format!("{CONFIGMAPS}?watch=1")).await.unwrap());
        clients.push(client);
    }
    let (address, flows) = busiest(&proxy).await;
    let server = cluster.servers.iter().find(|s| s.addr.to_string() == address).unwrap();
    let stopped = Instant::now();
    server.stop();
    let gone = || clients.iter().filter(|client| client.is_closed()).count() as u64;
    until("its flows are reset", async || gone() >= flows).await;
    let took = stopped.elapsed();
    check_figure("flows of a stopped process are reset", took, Duration::from_secs(3));
    assert_eq!(gone(), flows, "the others go on");
    let again = proxy.client().await;
    assert_eq!(soon("an answer", again.get(CONFIGMAPS)).await.unwrap().status, 200);
    server.cont();
    proxy.wait_ready(2).await;
}

#[tokio::test]
async fn an_endpoint_that_is_ill_keeps_its_flows_and_gets_no_new_ones() {
    let cluster = TestCluster::new(2);
    // The other one is not ill because its answer takes its time.
    let mut config = passthrough_config(cluster.config());
    without_suspicion(&mut config);
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(2).await;
    let mut old = Vec::new();
    for _ in 0..4 {
        old.push(proxy.client().await);
    }
    let (address, flows) = busiest(&proxy).await;
    let ill = cluster.servers.iter().find(|s| s.addr.to_string() == address).unwrap();
    ill.set_ready(false);
    until("it is degraded", async || {
        let endpoints = proxy.endpoints().await;
        endpoints.iter().any(|e| e["address"] == address.as_str() && e["state"] == "degraded")
    })
    .await;
    for _ in 0..6 {
        old.push(proxy.client().await);
    }
    let endpoints = proxy.endpoints().await;
    let now = endpoints.iter().find(|e| e["address"] == address.as_str()).unwrap();
    assert_eq!(now["flows"], flows);
    for client in &old {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    // With nobody else left it is better than nothing.
    for server in cluster.servers.iter().filter(|s| s.addr.to_string() != address) {
        server.kill();
    }
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
}
