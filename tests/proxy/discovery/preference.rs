//! `prefer: local`: an apiserver on this host before others. It needs its own namespaces, as `host_faults` does: an
//! address of another host is one that nftables translates.

use crate::discovery::host_faults::{HostChange, run};
use crate::support::wait::until_within;
use crate::support::{CONFIGMAPS, PATIENCE, TestCluster, passthrough_config, until};
use std::net::{Ipv4Addr, SocketAddr};

use jackstay_config::{Config, EndpointPreference};

/// The address of the other host (RFC 5737).
const OTHER_HOST: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// Two apiservers, of which the second is reached by the address of another host.
fn cluster() -> (TestCluster, Config, HostChange) {
    let cluster = TestCluster::new(2);
    let [local, other] = cluster.addresses()[..] else { unreachable!() };
    let change = HostChange("nft delete table ip preference; ip route del 192.0.2.0/24 dev lo");
    run(&format!(
        "ip route add 192.0.2.0/24 dev lo src 127.0.0.1 && nft add table ip preference && \
         nft 'add chain ip preference output {{ type nat hook output priority -100; }}' && \
         nft add rule ip preference output ip daddr {OTHER_HOST} dnat to {}",
        other.ip()
    ));
    let there = SocketAddr::new(OTHER_HOST.into(), other.port());
    let mut config = cluster.certs.config(&[there, local]);
    config.upstreams[0].tls.server_name = Some("localhost".to_owned());
    config.upstreams[0].prefer = EndpointPreference::Local;
    (cluster, config, change)
}

#[tokio::test]
#[ignore = "translates addresses of the whole host; needs its own namespaces"]
async fn requests_and_watches_stay_on_the_local_apiserver_while_it_lives_and_return() {
    let (cluster, config, _change) = cluster();
    let proxy = cluster.certs.start(config);
    proxy.wait_connected(2).await;
    let client = proxy.client().await;
    assert_eq!(cluster.spread(&client, "kubelet", 20).await, [20, 0]);
    let _watches = cluster.start_watches(&client, 30).await;
    assert_eq!(cluster.watch_counts(), [30, 0]);
    cluster.servers[0].kill();
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    until("the watches are resumed on the other host", async || cluster.watches(1) == 30).await;
    cluster.servers[0].restart().unwrap();
    until("requests return", async || cluster.spread(&client, "kubelet", 4).await == [4, 0]).await;
    // 5 s after it is ready, 0.6 watches a second.
    until_within(6 * PATIENCE, "watches return", async || cluster.watches(0) > 2).await;
    assert_eq!(cluster.spread(&client, "kubelet", 20).await, [20, 0]);
}

#[tokio::test]
#[ignore = "translates addresses of the whole host; needs its own namespaces"]
async fn flows_go_to_the_local_apiserver_while_it_lives() {
    let (cluster, config, _change) = cluster();
    let proxy = cluster.certs.start(passthrough_config(config));
    proxy.wait_ready(2).await;
    let mut clients = Vec::new();
    for _ in 0..8 {
        clients.push(proxy.client().await);
    }
    let flows =
        async |address: SocketAddr| proxy.endpoint(address).await["flows"].as_u64().unwrap();
    let [local, other] = cluster.addresses()[..] else { unreachable!() };
    let there = SocketAddr::new(OTHER_HOST.into(), other.port());
    assert_eq!((flows(local).await, flows(there).await), (8, 0));
    cluster.servers[0].kill();
    until("a new client is served by the other host", async || {
        proxy.client().await.get(CONFIGMAPS).await.is_ok_and(|response| response.status == 200)
    })
    .await;
}
