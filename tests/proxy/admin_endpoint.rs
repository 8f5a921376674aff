//! The admin endpoint while apiservers have faults.

use crate::support::{Certs, TestCluster, refusing_address, soon, until};

/// Prober and admin endpoint run on the same thread.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn silent_probe_connection_does_not_block_the_admin_endpoint() {
    let cluster = TestCluster::new(2);
    let (relays, proxy) = cluster.start_behind_relays(|_| {}).await;
    relays[0].refuse_new(true);
    assert!(relays[0].drop_all_packets().unwrap() > 0);
    let suspected = async || {
        let page = soon("a response", proxy.page("/events")).await;
        page.contains("\"to\": \"suspect\"")
    };
    until("a connection is suspect", suspected).await;
    soon("the endpoint is ejected", proxy.wait_state(relays[0].addr, "ejected")).await;
    relays[0].clear_faults();
    soon("all endpoints are ready", proxy.wait_all("ready")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn readyz_fails_when_every_apiserver_refuses() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing_address(), refusing_address()]));
    until("/readyz fails", async || proxy.page("/readyz").await.starts_with("HTTP/1.1 503")).await;
}
