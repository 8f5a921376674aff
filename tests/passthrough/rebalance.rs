//! Flows that are moved, by ending them: to an endpoint that has come back, and away from one that
//! has been removed.

use crate::prober::Probed;
use crate::support::{
    CONFIGMAPS, Certs, TestCluster, passthrough_config, passthrough_mode, pause, refusing_address,
    until,
};
use jackstay::config::EndpointAddress;
use jackstay::control::endpoint_set::{EndpointSpec, replace_endpoints};
use jackstay::observe::Metrics;
use jackstay::proxy::passthrough::rebalance::decide;
use jackstay::upstream::Upstream;
use jackstay::upstream::credentials::Credentials;
use jackstay::upstream::rebalance::RebalanceSchedule;
use std::io::ErrorKind;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout};

/// An endpoint of most upstreams.
pub const FIRST: &str = "10.0.0.1";

/// Gives an upstream these endpoints.
pub fn place_all(upstream: &Upstream, hosts: &[&str]) {
    let members: Vec<_> = hosts
        .iter()
        .map(|host| EndpointSpec {
            address: EndpointAddress { host: (*host).to_owned(), port: 6443 },
            server_name: None,
            fallback: false,
        })
        .collect();
    replace_endpoints(upstream, &members);
}

/// An upstream with endpoints that are ready, but for the last one.
pub fn upstream(certs: &Certs, hosts: &[&str]) -> Upstream {
    let config = certs.config(&[]).upstreams.remove(0);
    let credentials = Credentials::load(&config, &[]).unwrap();
    let upstream = Upstream::new(config, credentials, &Metrics::new());
    place_all(&upstream, hosts);
    for endpoint in upstream.endpoints().iter().take(hosts.len() - 1) {
        endpoint.connected();
        endpoint.readyz_ok();
    }
    upstream
}

/// A thousand connections on one of two endpoints, and the third comes later: a few go each second,
/// nobody gets any while it is not settled, and it ends when all have their part.
#[tokio::test(start_paused = true)]
async fn a_few_go_each_second_until_all_have_their_part() {
    let certs = Certs::new();
    let upstream = upstream(&certs, &[FIRST, "10.0.0.2", "10.0.0.3"]);
    let endpoints = upstream.endpoints();
    let mut flows = [1000_usize, 0, 0];
    let mut pace = RebalanceSchedule::new(Instant::now());
    let start = Instant::now();
    let mut last = start;
    while start.elapsed() < Duration::from_secs(2000) {
        pause(Duration::from_millis(50)).await;
        let now = Instant::now();
        let Some(elapsed) = pace.is_due(now) else { continue };
        let index =
            |endpoint: &_| endpoints.iter().position(|e| std::sync::Arc::ptr_eq(e, endpoint));
        let count = |endpoint: &_| index(endpoint).map_or(0, |i: usize| flows[i]);
        let found = decide(&mut pace, &upstream, count, elapsed, now);
        if start.elapsed() > Duration::from_secs(600) && endpoints[2].ready_for(now).is_none() {
            assert!(flows[0].abs_diff(flows[1]) <= 2 && flows[2] == 0, "{flows:?}");
            endpoints[2].connected();
            endpoints[2].readyz_ok();
        }
        let Some((from, count)) = found else { continue };
        assert!(start.elapsed() >= Duration::from_secs(5), "not settled");
        let from = index(&from).unwrap();
        let fewest = (0..3)
            .filter(|i| endpoints[*i].ready_for(now).is_some())
            .min_by_key(|i| flows[*i])
            .unwrap();
        // Two in a hundred of what is too much, each second.
        assert!(count <= 1 + flows[from] / 25, "{count} of {flows:?} in {elapsed:?}");
        flows[from] -= count;
        flows[fewest] += count;
        last = now;
    }
    assert!(flows.iter().all(|n| (330..=337).contains(n)), "{flows:?}");
    assert!(last - start < Duration::from_secs(1900), "it never ends");
}

#[tokio::test]
async fn an_endpoint_that_comes_back_gets_quiet_flows_where_that_is_asked_for() {
    let certs = Certs::new();
    let mut first = Probed::start(&certs, &["h2"]).await;
    let absent = refusing_address();
    let mut config = passthrough_config(certs.config(&[first.address, absent]));
    passthrough_mode(&mut config).rebalance = true;
    let proxy = certs.start(config);
    proxy.wait_ready(1).await;
    let mut quiet = Vec::new();
    for _ in 0..60 {
        quiet.push(first.flow(&proxy).await);
    }
    let (mut busy, mut end) = first.flow(&proxy).await;
    let second = Probed::start_at(absent, &certs, &["h2"]).await;
    proxy.wait_ready(2).await;
    let moved = r#"jackstay_passthrough_closed_total{listener="apiserver",reason="rebalance"}"#;
    let moving = async {
        while proxy.metric(moved).await < 3.0 {
            busy.write_all(b"x").await.unwrap();
            end.read_u8().await.unwrap();
            pause(Duration::from_millis(100)).await;
        }
    };
    timeout(Duration::from_secs(60), moving).await.expect("three were moved");
    // Those that were moved were told by a reset; the one that talks is not among them.
    let mut told = 0;
    until("they are told", async || {
        quiet.retain(|(client, _)| match client.try_read(&mut [0; 1]) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => true,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                told += 1;
                false
            }
            Ok(n) => panic!("{n} bytes from nowhere"),
        });
        told >= 3
    })
    .await;
    assert!(told <= 12, "{told} of 60");
    busy.write_all(b"x").await.unwrap();
    assert_eq!(end.read_u8().await.unwrap(), b'x');
    drop(second);
}

/// An endpoint that was removed gets nothing new, and its flows have until `leave_timeout`.
#[tokio::test]
async fn flows_to_an_endpoint_that_was_removed_have_their_time() {
    for (leave_timeout, stay) in
        [(Duration::from_secs(3600), true), (Duration::from_secs(1), false)]
    {
        let cluster = TestCluster::new(2);
        let file = cluster.certs.path().join("endpoints");
        let write = |addresses: &[std::net::SocketAddr]| {
            let lines: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            std::fs::write(file.with_extension("new"), lines.join("\n")).unwrap();
            std::fs::rename(file.with_extension("new"), &file).unwrap();
        };
        write(&cluster.addresses());
        let mut config = passthrough_config(cluster.config());
        config.upstreams[0].endpoints.clear();
        config.upstreams[0].endpoints_file = Some(file.clone());
        passthrough_mode(&mut config).leave_timeout = leave_timeout;
        let proxy = cluster.certs.start(config);
        proxy.wait_ready(2).await;
        let mut clients = Vec::new();
        for _ in 0..6 {
            clients.push(proxy.client().await);
        }
        let endpoints = proxy.endpoints().await;
        let flows = |of: &str| {
            let of = endpoints.iter().find(|endpoint| endpoint["address"] == of).unwrap();
            of["flows"].as_u64().unwrap() as usize
        };
        let (kept, removed) = (cluster.addresses()[0], cluster.addresses()[1]);
        let leaving = flows(&removed.to_string());
        assert_eq!(leaving + flows(&kept.to_string()), 6);
        assert!(leaving > 0, "nothing to see: {endpoints:?}");
        write(&[kept]);
        until("it is removed", async || proxy.endpoints().await.len() == 1).await;
        let open = || clients.iter().filter(|client| !client.is_closed()).count();
        if !stay {
            until("its flows are ended", async || open() == 6 - leaving).await;
            let counted = format!(r#"reason="endpoint_left"}} {leaving}"#);
            until("it is counted", async || proxy.page("/metrics").await.contains(&counted)).await;
        }
        for client in clients.iter().filter(|client| !client.is_closed()) {
            assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        }
        assert_eq!(open(), if stay { 6 } else { 6 - leaving });
        let new = proxy.client().await;
        assert_eq!(new.get(CONFIGMAPS).await.unwrap().status, 200);
    }
}
