//! Flows that jackstay resets so that their clients reconnect elsewhere: to rebalance onto an endpoint that has
//! recovered, or because their endpoint was removed.

use crate::passthrough::peer::{ProbedServer, start_passthrough};
use crate::support::{
    CONFIGMAPS, Certs, TestCluster, new_upstream, passthrough_config, passthrough_mode, pause,
    refusing_address, to_strings, until, write_lines,
};
use jackstay::control::endpoint_set::replace_endpoints;
use jackstay::proxy::passthrough::flow_table::surplus;
use jackstay::upstream::Upstream;
use jackstay::upstream::endpoint::Observation;
use jackstay::upstream::rebalance::RebalanceSchedule;
use jackstay_core::discovery::address::EndpointAddress;
use jackstay_core::discovery::source::EndpointSpec;
use jackstay_sys::clock;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// The first endpoint of the upstreams of this crate.
pub const FIRST: &str = "10.0.0.1";

/// Replaces the endpoints of an upstream.
pub fn set_endpoints(upstream: &Upstream, hosts: &[&str]) {
    let endpoints: Vec<_> = hosts
        .iter()
        .map(|host| EndpointSpec {
            address: EndpointAddress { host: (*host).to_owned(), port: 6443 },
            server_name: None,
            fallback: false,
        })
        .collect();
    replace_endpoints(upstream, &endpoints);
}

/// An upstream whose endpoints, except the last one, are ready.
pub fn upstream(certs: &Certs, hosts: &[&str]) -> Arc<Upstream> {
    let upstream = new_upstream(certs.config(&[]).upstreams.remove(0), &[]);
    set_endpoints(&upstream, hosts);
    for endpoint in upstream.endpoints().iter().take(hosts.len() - 1) {
        endpoint.observe(Observation::Connected);
        endpoint.observe(Observation::ReadyzOk);
    }
    upstream
}

/// Simulates 1,000 flows to the first of two ready endpoints; a third endpoint becomes ready later. A few flows
/// move each second, none of them to an endpoint that has just become ready, until all endpoints have equal
/// shares.
#[tokio::test(start_paused = true)]
async fn flows_move_gradually_until_endpoints_are_balanced() {
    let certs = Certs::new();
    let upstream = upstream(&certs, &[FIRST, "10.0.0.2", "10.0.0.3"]);
    let endpoints = upstream.endpoints();
    let mut flows = [1000_usize, 0, 0];
    let mut schedule = RebalanceSchedule::new(clock::now(), fastrand::Rng::new());
    let start = clock::now();
    let mut last_move = start;
    while clock::elapsed(start) < Duration::from_secs(2000) {
        pause(Duration::from_millis(50)).await;
        let now = clock::now();
        let Some(elapsed) = schedule.begin_round(now) else { continue };
        let index = |endpoint: &_| endpoints.iter().position(|e| Arc::ptr_eq(e, endpoint));
        let count = |endpoint: &_| index(endpoint).map_or(0, |i: usize| flows[i]);
        let to_move = surplus(&mut schedule, &upstream, count, elapsed, now);
        // The first two endpoints are balanced after 600 s. Then the third one becomes ready.
        if clock::elapsed(start) > Duration::from_secs(600) && endpoints[2].ready_for(now).is_none()
        {
            assert!(flows[0].abs_diff(flows[1]) <= 2 && flows[2] == 0, "{flows:?}");
            endpoints[2].observe(Observation::Connected);
            endpoints[2].observe(Observation::ReadyzOk);
        }
        let Some((from, count)) = to_move else { continue };
        assert!(clock::elapsed(start) >= Duration::from_secs(5), "a flow moved to a new endpoint");
        let from = index(&from).unwrap();
        let fewest = (0..3)
            .filter(|i| endpoints[*i].ready_for(now).is_some())
            .min_by_key(|i| flows[*i])
            .unwrap();
        // At most 4 % of the flows move at a time; the rate is 2 % of the excess per second.
        assert!(count <= 1 + flows[from] / 25, "{count} of {flows:?} in {elapsed:?}");
        flows[from] -= count;
        flows[fewest] += count;
        last_move = now;
    }
    assert!(flows.iter().all(|n| (330..=337).contains(n)), "{flows:?}");
    assert!(last_move - start < Duration::from_secs(1900), "the moves have not ended");
}

#[tokio::test]
async fn restarted_endpoint_gets_quiet_flows_when_rebalance_is_set() {
    let certs = Certs::new();
    let mut first = ProbedServer::start(&certs, &["h2"]).await;
    let absent = refusing_address();
    let proxy = start_passthrough(&certs, &[first.address, absent], |config| {
        passthrough_mode(config).flows.rebalance = true;
    });
    proxy.wait_ready(1).await;
    let mut quiet = Vec::new();
    for _ in 0..60 {
        quiet.push(first.flow(&proxy).await);
    }
    let (mut busy, mut busy_server) = first.flow(&proxy).await;
    let second = ProbedServer::start_at(absent, &certs, &["h2"]).await;
    proxy.wait_ready(2).await;
    let moved = r#"jackstay_passthrough_closed_total{listener="apiserver",reason="rebalance"}"#;
    let moving = async {
        while proxy.metric(moved).await < 3.0 {
            busy.write_all(b"x").await.unwrap();
            busy_server.read_u8().await.unwrap();
            pause(Duration::from_millis(100)).await;
        }
    };
    timeout(Duration::from_secs(60), moving).await.expect("three flows move");
    // jackstay has reset quiet flows only; below, the busy flow still works.
    let mut moved_count = 0;
    until("moved flows are reset", async || {
        quiet.retain(|(client, _)| match client.try_read(&mut [0; 1]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                moved_count += 1;
                false
            }
            Ok(n) => panic!("{n} unexpected bytes"),
        });
        moved_count >= 3
    })
    .await;
    assert!(moved_count <= 12, "{moved_count} of 60");
    busy.write_all(b"x").await.unwrap();
    assert_eq!(busy_server.read_u8().await.unwrap(), b'x');
    drop(second);
}

/// A removed endpoint also gets no new flows.
#[tokio::test]
async fn flows_to_a_removed_endpoint_end_after_leave_timeout() {
    // With a leave timeout of an hour the flows stay open during the test.
    for (leave_timeout, flows_stay) in
        [(Duration::from_secs(3600), true), (Duration::from_secs(1), false)]
    {
        let cluster = TestCluster::new(2);
        let file = cluster.certs.path().join("endpoints");
        let write = |addresses: &[SocketAddr]| write_lines(&file, &to_strings(addresses));
        write(&cluster.addresses());
        let mut config = passthrough_config(cluster.config());
        config.upstreams[0].endpoints.clear();
        config.upstreams[0].endpoints_file = Some(file.clone());
        passthrough_mode(&mut config).flows.leave_timeout = leave_timeout;
        let proxy = cluster.certs.start(config);
        proxy.wait_ready(2).await;
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(proxy.client().await);
        }
        let endpoints = proxy.endpoints().await;
        let flows = |address: SocketAddr| {
            let mut endpoints = endpoints.iter();
            let endpoint = endpoints.find(|e| e["address"] == address.to_string()).unwrap();
            endpoint["flows"].as_u64().unwrap() as usize
        };
        let (kept, removed) = (cluster.addresses()[0], cluster.addresses()[1]);
        let leaving = flows(removed);
        assert_eq!(leaving + flows(kept), 6);
        assert!(leaving > 0, "the removed endpoint has no flow: {endpoints:?}");
        write(&[kept]);
        until("the endpoint is removed", async || proxy.endpoints().await.len() == 1).await;
        let open = || clients.iter().filter(|client| !client.is_closed()).count();
        if !flows_stay {
            until("its flows end", async || open() == 6 - leaving).await;
            proxy.wait_metrics(&format!(r#"reason="endpoint_left"}} {leaving}"#)).await;
        }
        for client in clients.iter().filter(|client| !client.is_closed()) {
            assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        }
        assert_eq!(open(), if flows_stay { 6 } else { 6 - leaving });
        let new = proxy.client().await;
        assert_eq!(new.get(CONFIGMAPS).await.unwrap().status, 200);
    }
}
