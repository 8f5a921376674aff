//! The state of endpoints without a `/readyz` credential, and the flows of endpoints that stop or degrade.

use crate::support::figures::check_figure;
use crate::support::{
    CONFIGMAPS, Proxy, TestCluster, passthrough_config, soon, until, without_suspicion,
};
use std::time::{Duration, Instant};

use jackstay_apiserver::ApiServerHandle;

/// The server with the most flows, and their number.
async fn busiest<'a>(cluster: &'a TestCluster, proxy: &Proxy) -> (&'a ApiServerHandle, u64) {
    let mut counts = Vec::new();
    for server in &cluster.servers {
        counts.push((server, proxy.endpoint(server.addr).await["flows"].as_u64().unwrap()));
    }
    counts.into_iter().max_by_key(|(_, flows)| *flows).unwrap()
}

#[tokio::test]
async fn readyz_is_not_probed_without_a_credential() {
    let cluster = TestCluster::new(2);
    let mut config = passthrough_config(cluster.config());
    config.upstreams[0].health.readyz.cert = None;
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(2).await;
    for endpoint in proxy.endpoints().await {
        assert_eq!(endpoint["reason"], "connected; /readyz is not probed without a credential");
    }
    cluster.servers[0].set_faults(|faults| faults.unready = true);
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    assert!(cluster.state.audit().records().iter().all(|r| r.path != "/readyz"));
}

#[tokio::test]
async fn endpoint_is_probed_without_a_ca() {
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
async fn flows_of_a_stopped_process_are_reset() {
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
    let (server, flows) = busiest(&cluster, &proxy).await;
    let stopped = Instant::now();
    server.stop();
    let reset = || clients.iter().filter(|client| client.is_closed()).count() as u64;
    until("the flows are reset", async || reset() >= flows).await;
    let duration = stopped.elapsed();
    check_figure("flows of a stopped process are reset", duration, Duration::from_secs(3));
    assert_eq!(reset(), flows, "a flow of another server was reset");
    let new = proxy.client().await;
    assert_eq!(soon("a response", new.get(CONFIGMAPS)).await.unwrap().status, 200);
    server.cont();
    proxy.wait_ready(2).await;
}

#[tokio::test]
async fn degraded_endpoint_keeps_its_flows_and_gets_no_new_ones() {
    let cluster = TestCluster::new(2);
    // On a busy machine, a slow probe must not degrade the other endpoint.
    let mut config = passthrough_config(cluster.config());
    without_suspicion(&mut config);
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(2).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(proxy.client().await);
    }
    let (degraded, flows) = busiest(&cluster, &proxy).await;
    degraded.set_faults(|faults| faults.unready = true);
    proxy.wait_state(degraded.addr, "degraded").await;
    for _ in 0..6 {
        clients.push(proxy.client().await);
    }
    assert_eq!(proxy.endpoint(degraded.addr).await["flows"], flows);
    for client in &clients {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    // When the other server is killed, the degraded endpoint gets new flows.
    for server in cluster.servers.iter().filter(|server| server.addr != degraded.addr) {
        server.kill();
    }
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
}
