//! Flows through a passthrough listener: data in both directions, half-closes, resets, refusals, timeouts, drains
//! and routes.

use crate::passthrough::peer::{
    LISTENERS, Peer, exchange, setup, setup_behind, setup_with, wait_flows,
};
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    CONFIGMAPS, Certs, Proxy, TestCluster, passthrough_config, passthrough_mode, refusing_address,
    soon, until,
};
use jackstay::upstream::credentials::client_tls;
use jackstay_config::{Config, Route};
use jackstay_net::tls::pem_files;
use jackstay_sys::sockets::tcp_options;
use serde_json::Value;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// A drain timeout.
const DRAIN: Duration = Duration::from_secs(4);

/// The error that a client gets which connects and sends nothing. The reset may arrive before the connect returns.
async fn reset_of(addr: SocketAddr) -> ErrorKind {
    let silent = async { TcpStream::connect(addr).await?.read(&mut [0; 1]).await };
    soon("the reset", silent).await.unwrap_err().kind()
}

#[tokio::test]
async fn client_and_apiserver_authenticate_each_other() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.certs.start(passthrough_config(cluster.config()));
    proxy.wait_ready(2).await;
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    let status = proxy.status().await;
    assert_eq!(status["listeners"][0]["mode"], "passthrough");
    assert_eq!(status["listeners"][0]["flows"], 1);
    assert!(proxy.metric("jackstay_passthrough_bytes_total").await > 1000.0);
    let flows: u64 =
        proxy.endpoints().await.iter().map(|endpoint| endpoint["flows"].as_u64().unwrap()).sum();
    assert_eq!(flows, 1);
    let anonymous = proxy.client_with(&cluster.certs.anonymous()).await;
    assert_eq!(anonymous.get(CONFIGMAPS).await.unwrap().status, 403);
}

#[tokio::test]
async fn data_arrives_unchanged_in_both_directions() {
    let (peer, proxy) = setup().await;
    let (mut client, mut server) = peer.connect(&proxy).await;
    // Small messages are copied and large ones spliced; after large ones comes a small one again.
    for size in [1, 100, 70_000, 3_000_000, 20_000_000, 5] {
        let sent: Vec<u8> =
            (0..size).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let mut got = vec![0; sent.len()];
        let (written, read) = tokio::join!(client.write_all(&sent), server.read_exact(&mut got));
        written.unwrap();
        read.unwrap();
        assert!(got == sent, "{size} bytes to the server");
        let mut back = vec![0; sent.len()];
        let (written, read) = tokio::join!(server.write_all(&got), client.read_exact(&mut back));
        written.unwrap();
        read.unwrap();
        assert!(back == sent, "{size} bytes to the client");
    }
    // Both directions at once.
    let sent = vec![7; 10_000_000];
    let (mut one, mut two) = (vec![0; sent.len()], vec![0; sent.len()]);
    let (mut client_reads, mut client_writes) = client.split();
    let (mut server_reads, mut server_writes) = server.split();
    let all = soon("both directions", async {
        tokio::join!(
            client_writes.write_all(&sent),
            server_writes.write_all(&sent),
            client_reads.read_exact(&mut one),
            server_reads.read_exact(&mut two),
        )
    });
    let (to_server, to_client, by_client, by_server) = all.await;
    to_server.and(to_client).unwrap();
    by_client.and(by_server).unwrap();
    assert!(one == sent && two == sent);
}

#[tokio::test]
async fn one_direction_continues_after_the_end_of_the_other() {
    let (peer, proxy) = setup().await;
    let (mut client, mut server) = peer.connect(&proxy).await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut question = String::new();
    soon("the end of the question", server.read_to_string(&mut question)).await.unwrap();
    assert_eq!(question, "question");
    // The client has ended its direction, and still gets data.
    server.write_all(b"answer").await.unwrap();
    let mut answer = [0; 6];
    soon("the answer", client.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"answer");
    server.shutdown().await.unwrap();
    assert_eq!(soon("the end", client.read(&mut answer)).await.unwrap(), 0);
    wait_flows(&proxy, 0).await;
    proxy.wait_metrics(r#"reason="done"} 1"#).await;

    // The server ends its direction first.
    let (mut client, mut server) = peer.connect(&proxy).await;
    server.shutdown().await.unwrap();
    assert_eq!(soon("the server's end", client.read(&mut answer)).await.unwrap(), 0);
    client.write_all(b"later").await.unwrap();
    let mut later = [0; 5];
    soon("later data", server.read_exact(&mut later)).await.unwrap();
}

/// A reset must not look like a clean end.
#[tokio::test]
async fn reset_of_one_side_resets_the_other() {
    let (peer, proxy) = setup().await;
    let reset = |stream: TcpStream| {
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        drop(stream);
    };
    let mut byte = [0; 1];
    let (mut client, server) = peer.connect(&proxy).await;
    reset(server);
    let error = soon("the reset", client.read(&mut byte)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let (client, mut server) = peer.connect(&proxy).await;
    reset(client);
    let error = soon("the reset", server.read(&mut byte)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    until("both resets are counted", async || {
        let metrics = proxy.page("/metrics").await;
        metrics.contains(r#"reason="client_reset"} 1"#)
            && metrics.contains(r#"reason="server_reset"} 1"#)
    })
    .await;
    let lost_flows = async || {
        let events = proxy.events().await;
        let of_flow = |event: &&Value| event["kind"] == "connection";
        events
            .iter()
            .filter(of_flow)
            .map(|event| event["open"]["flows"].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(lost_flows().await, 1, "only the reset by the endpoint is a fault");
    // The client has ended its direction, so it loses nothing.
    let (mut client, server) = peer.connect(&proxy).await;
    client.shutdown().await.unwrap();
    reset(server);
    proxy.wait_metrics(r#"reason="server_reset"} 2"#).await;
    assert_eq!(lost_flows().await, 1);
}

/// While jackstay cannot forward an upload it does not read from the client. It must detect the reset of the
/// client all the same.
#[tokio::test]
async fn reset_of_a_client_ends_its_flow_while_the_upload_is_blocked() {
    let (peer, proxy) = setup().await;
    let (mut client, mut server) = peer.connect(&proxy).await;
    server.write_all(b"x").await.unwrap();
    soon("a byte", client.read_u8()).await.unwrap();
    let data = vec![7; 1 << 20];
    while let Ok(written) = timeout(Duration::from_secs(1), client.write(&data)).await {
        written.unwrap();
    }
    tcp_options::close_with_reset(client);
    wait_flows(&proxy, 0).await;
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.contains(r#"reason="client_reset"} 1"#), "{metrics}");
    // In contrast to a reset client, one that has ended its direction gets later data.
    let (mut client, mut server) = peer.connect(&proxy).await;
    client.shutdown().await.unwrap();
    soon("the end", server.read_to_end(&mut Vec::new())).await.unwrap();
    server.write_all(b"late").await.unwrap();
    drop(server);
    let mut late = String::new();
    soon("the late data", client.read_to_string(&mut late)).await.unwrap();
    assert_eq!(late, "late");
}

#[tokio::test]
async fn client_is_reset_when_every_endpoint_refuses() {
    let certs = Certs::new();
    let proxy =
        certs.start(passthrough_config(certs.config(&[refusing_address(), refusing_address()])));
    let start = Stopwatch::start();
    assert_eq!(reset_of(proxy.addr).await, ErrorKind::ConnectionReset);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    until("the error is counted", async || {
        let metrics = proxy.page("/metrics").await;
        metrics.contains(r#"passthrough_closed_total{listener="apiserver",reason="unreachable"} 1"#)
    })
    .await;
    let error = proxy.status().await["listeners"][0]["own_errors"][0].clone();
    assert!(error["code"].is_null(), "{error}");
    assert_eq!((&error["reason"], &error["count"]), (&"unreachable".into(), &1.into()));
}

#[tokio::test]
async fn connections_above_the_share_of_their_source_are_reset() {
    // One source gets half of the slots.
    let (peer, proxy) =
        setup_with(|config| config.listeners[0].limits_mut().max_connections = 4).await;
    let (mut first, mut server) = peer.connect(&proxy).await;
    let mut second = peer.connect(&proxy).await;
    exchange(&mut second).await;
    first.write_all(b"x").await.unwrap();
    assert_eq!(soon("a byte", server.read_u8()).await.unwrap(), b'x');
    assert_eq!(reset_of(proxy.addr).await, ErrorKind::ConnectionReset);
    first.write_all(b"x").await.unwrap();
    assert_eq!(soon("a byte", server.read_u8()).await.unwrap(), b'x');
    let metrics = proxy.page("/metrics").await;
    assert!(
        metrics.contains(r#"refused_total{listener="apiserver",reason="source"} 1"#),
        "{metrics}"
    );
}

#[tokio::test]
async fn idle_connections_that_sent_nothing_are_closed_for_new_ones() {
    // Transparent and SNI listeners wait for a ClientHello; this listener connects at once. All are closed.
    let (peer, proxy) =
        setup_with(|config| config.listeners[0].limits_mut().max_connections = 40).await;
    let mut first = peer.connect(&proxy).await;
    exchange(&mut first).await;
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(proxy.addr).await);
    }
    let mut others = Vec::new();
    for _ in 0..15 {
        // A connection may be closed for a new one once it is 100 ms old.
        let mut connected = None;
        until("a new connection is served", async || {
            let Ok(mut client) = TcpStream::connect(proxy.addr).await else { return false };
            let sent = client.write_all(b"x").await.is_ok();
            connected = (sent && is_open(&mut client).await).then_some(client);
            connected.is_some()
        })
        .await;
        others.push(connected);
    }
    exchange(&mut first).await;
    proxy.wait_metrics(r#"closed_total{listener="apiserver",reason="evicted"}"#).await;
}

/// Whether the proxy has neither closed nor reset the connection within 50 ms.
async fn is_open(client: &mut TcpStream) -> bool {
    let mut byte = [0];
    tokio::time::timeout(Duration::from_millis(50), client.read(&mut byte)).await.is_err()
}

#[tokio::test]
async fn handshake_timeout_resets_only_flows_without_a_response() {
    // The timeout is long enough for the response of the first flow on a slow machine.
    let (peer, proxy) = setup_with(|config| {
        config.listeners[0].limits_mut().handshake_timeout = Duration::from_secs(2);
    })
    .await;
    let (mut answered, mut server) = peer.connect(&proxy).await;
    server.write_all(b"hello").await.unwrap();
    let mut hello = [0; 5];
    soon("hello", answered.read_exact(&mut hello)).await.unwrap();
    assert_eq!(reset_of(proxy.addr).await, ErrorKind::ConnectionReset);
    // A flow with a response may be idle without limit.
    server.write_all(b"again").await.unwrap();
    soon("again", answered.read_exact(&mut hello)).await.unwrap();
    proxy.wait_metrics(r#"reason="handshake_timeout"} 1"#).await;
}

#[tokio::test]
async fn idle_timeout_resets_idle_flows() {
    let (peer, proxy) = setup_with(|config| {
        passthrough_mode(config).flows.idle_timeout = Some(Duration::from_secs(2));
    })
    .await;
    let (mut client, mut server) = peer.connect(&proxy).await;
    server.write_all(b"x").await.unwrap();
    soon("a byte", client.read_u8()).await.unwrap();
    let error = soon("the reset", client.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    proxy.wait_metrics(r#"reason="idle_timeout"} 1"#).await;
}

#[tokio::test]
async fn drain_waits_for_flows_and_resets_the_rest() {
    for listener in LISTENERS {
        let change = |config: &mut Config| config.shutdown.drain_timeout = DRAIN;
        let (peer, proxy) = setup_behind(listener, change).await;
        check_drain(&peer, proxy).await;
    }
}

async fn check_drain(peer: &Peer, proxy: Proxy) {
    let (mut client, mut server) = peer.connect(&proxy).await;
    let (mut short, mut short_server) = peer.connect(&proxy).await;
    let start = Instant::now();
    proxy.running.drain();
    until("no connection is accepted", async || TcpStream::connect(proxy.addr).await.is_err())
        .await;
    // Both flows continue, and one ends before the timeout.
    short_server.write_all(b"end").await.unwrap();
    short_server.shutdown().await.unwrap();
    short.shutdown().await.unwrap();
    let mut end = String::new();
    soon("the end", short.read_to_string(&mut end)).await.unwrap();
    assert_eq!(end, "end");
    client.write_all(b"x").await.unwrap();
    assert_eq!(soon("a byte", server.read_u8()).await.unwrap(), b'x');
    let error = soon("the reset", client.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(start.elapsed() >= DRAIN * 4 / 5, "{:?}", start.elapsed());
    let error = soon("the reset", server.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    tokio::task::spawn_blocking(move || assert!(proxy.running.stop())).await.unwrap();
}

/// Flows without a configured server name go to the upstream of the listener.
#[tokio::test]
async fn server_name_selects_the_upstream() {
    let cluster = TestCluster::new(2);
    let mut config = passthrough_config(cluster.config());
    let mut other = config.upstreams[0].clone();
    other.name = "other".into();
    other.endpoints = vec![other.endpoints.remove(1)];
    config.upstreams[0].endpoints.truncate(1);
    config.upstreams.push(other);
    passthrough_mode(&mut config).routes =
        vec![Route { server_names: vec!["localhost".into()], upstream: "other".into() }];
    config.listeners[0].limits_mut().handshake_timeout = Duration::from_secs(2);
    let proxy = cluster.certs.start(config);
    let ready = async || {
        let status = proxy.status().await;
        let upstreams = status["upstreams"].as_array().unwrap().clone();
        upstreams.iter().all(|u| u["endpoints"][0]["state"] == "ready")
    };
    until("both upstreams are ready", ready).await;
    let flows = async || {
        let status = proxy.status().await;
        [0, 1].map(|i| status["upstreams"][i]["endpoints"][0]["flows"].as_u64().unwrap())
    };
    // A client that connects to an address sends no server name.
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    assert_eq!(flows().await, [1, 0]);
    let roots = pem_files::load_ca(&cluster.certs.path().join("ca.crt")).unwrap();
    let connector = TlsConnector::from(client_tls(&roots, None).h2);
    let stream = TcpStream::connect(proxy.addr).await.unwrap();
    let _named = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
    assert_eq!(flows().await, [1, 1]);
    // A flow without TLS goes to the upstream of the listener too, whose apiserver ends it.
    let mut plain = TcpStream::connect(proxy.addr).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let _ = soon("the end", plain.read_to_end(&mut Vec::new())).await;
    // A client that sends an incomplete ClientHello is reset at the handshake timeout.
    let mut incomplete = TcpStream::connect(proxy.addr).await.unwrap();
    incomplete.write_all(&[22, 3, 1, 2, 0, 1, 0]).await.unwrap();
    let error = soon("the reset", incomplete.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}
