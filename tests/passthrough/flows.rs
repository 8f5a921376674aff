//! Bytes through a passthrough listener: both ways, half-closed, broken, refused.

use crate::peer::Peer;
use crate::support::stopwatch::Stopwatch;
use crate::support::{
    CONFIGMAPS, Certs, TestCluster, passthrough_config, passthrough_mode, refusing_address, soon,
    until,
};
use jackstay::config::Route;
use jackstay::net::sockets::tcp_options;
use jackstay::net::tls::pem_files;
use jackstay::upstream::credentials::client_tls;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

/// How a connection that says nothing ends. The reset may be there before the connect is seen.
async fn reset_of(addr: SocketAddr) -> ErrorKind {
    let silent = async { TcpStream::connect(addr).await?.read(&mut [0; 1]).await };
    soon("the reset", silent).await.unwrap_err().kind()
}

#[tokio::test]
async fn a_client_verifies_the_apiserver_itself_and_is_who_it_was() {
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
    let nobody = proxy.client_with(&cluster.certs.anonymous()).await;
    assert_eq!(nobody.get(CONFIGMAPS).await.unwrap().status, 403);
}

#[tokio::test]
async fn bytes_arrive_unchanged_both_ways_however_many() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let proxy = certs.start(passthrough_config(certs.config(&[peer.address])));
    let (mut client, mut server) = peer.join(&proxy).await;
    // Small ones first, then enough for every way of moving them, then small ones again.
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
    // And both at once.
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
async fn each_direction_ends_on_its_own() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let proxy = certs.start(passthrough_config(certs.config(&[peer.address])));
    let (mut client, mut server) = peer.join(&proxy).await;
    client.write_all(b"question").await.unwrap();
    client.shutdown().await.unwrap();
    let mut question = String::new();
    soon("the end of the question", server.read_to_string(&mut question)).await.unwrap();
    assert_eq!(question, "question");
    // Long after the client has ended its direction.
    server.write_all(b"answer").await.unwrap();
    let mut answer = [0; 6];
    soon("the answer", client.read_exact(&mut answer)).await.unwrap();
    assert_eq!(&answer, b"answer");
    server.shutdown().await.unwrap();
    assert_eq!(soon("the end", client.read(&mut answer)).await.unwrap(), 0);
    until("it is over", async || proxy.status().await["listeners"][0]["flows"] == 0).await;
    until("it is counted", async || proxy.page("/metrics").await.contains(r#"reason="done"} 1"#))
        .await;

    // The other way round.
    let (mut client, mut server) = peer.join(&proxy).await;
    server.shutdown().await.unwrap();
    assert_eq!(soon("the server's end", client.read(&mut answer)).await.unwrap(), 0);
    client.write_all(b"still").await.unwrap();
    let mut still = [0; 5];
    soon("more", server.read_exact(&mut still)).await.unwrap();
}

/// A reset on one side is a reset on the other, and nothing that looks like an end.
#[tokio::test]
async fn what_breaks_on_one_side_breaks_on_the_other() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let proxy = certs.start(passthrough_config(certs.config(&[peer.address])));
    let reset = |stream: TcpStream| {
        socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
        drop(stream);
    };
    let mut byte = [0; 1];
    let (mut client, server) = peer.join(&proxy).await;
    reset(server);
    let error = soon("the reset", client.read(&mut byte)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    let (client, mut server) = peer.join(&proxy).await;
    reset(client);
    let error = soon("the reset", server.read(&mut byte)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    until("both are counted", async || {
        let metrics = proxy.page("/metrics").await;
        metrics.contains(r#"reason="client_reset"} 1"#)
            && metrics.contains(r#"reason="server_reset"} 1"#)
    })
    .await;
}

/// Who cannot deliver does not read, and would not hear of a reset: an upload into a server that
/// takes nothing does not outlive its client.
#[tokio::test]
async fn a_client_that_is_gone_does_not_stay_because_its_upload_is_stuck() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let proxy = certs.start(passthrough_config(certs.config(&[peer.address])));
    let (mut client, mut server) = peer.join(&proxy).await;
    server.write_all(b"x").await.unwrap();
    soon("a byte", client.read_u8()).await.unwrap();
    let much = vec![7; 1 << 20];
    while let Ok(written) = timeout(Duration::from_secs(1), client.write(&much)).await {
        written.unwrap();
    }
    tcp_options::close_with_reset(client);
    until("it is over", async || proxy.status().await["listeners"][0]["flows"] == 0).await;
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.contains(r#"reason="client_reset"} 1"#), "{metrics}");
    // Nor does one that has said all it had to say, and hears the rest later.
    let (mut client, mut server) = peer.join(&proxy).await;
    client.shutdown().await.unwrap();
    soon("the end", server.read_to_end(&mut Vec::new())).await.unwrap();
    server.write_all(b"late").await.unwrap();
    drop(server);
    let mut late = String::new();
    soon("what came late", client.read_to_string(&mut late)).await.unwrap();
    assert_eq!(late, "late");
}

#[tokio::test]
async fn with_nobody_there_the_client_is_reset_at_once() {
    let certs = Certs::new();
    let proxy =
        certs.start(passthrough_config(certs.config(&[refusing_address(), refusing_address()])));
    let begun = Stopwatch::start();
    assert_eq!(reset_of(proxy.addr).await, ErrorKind::ConnectionReset);
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    until("it is counted", async || {
        let metrics = proxy.page("/metrics").await;
        metrics.contains(r#"passthrough_closed_total{listener="apiserver",reason="unreachable"} 1"#)
    })
    .await;
    let own = proxy.status().await["listeners"][0]["own_errors"][0].clone();
    assert_eq!((own["code"].is_null(), &own["reason"]), (true, &"unreachable".into()), "{own}");
    assert_eq!(own["count"], 1);
}

#[tokio::test]
async fn who_comes_after_the_cap_is_reset_and_the_others_go_on() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let mut config = passthrough_config(certs.config(&[peer.address]));
    config.listeners[0].limits.max_connections = 2;
    let proxy = certs.start(config);
    let (mut first, mut server) = peer.join(&proxy).await;
    let _second = peer.join(&proxy).await;
    assert_eq!(reset_of(proxy.addr).await, ErrorKind::ConnectionReset);
    first.write_all(b"x").await.unwrap();
    assert_eq!(soon("a byte", server.read_u8()).await.unwrap(), b'x');
    let metrics = proxy.page("/metrics").await;
    assert!(metrics.contains(r#"refused_total{listener="apiserver",reason="cap"} 1"#), "{metrics}");
}

#[tokio::test]
async fn a_client_that_says_nothing_and_a_server_that_answers_nothing_are_bounded() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let mut config = passthrough_config(certs.config(&[peer.address]));
    // Long enough for the way to the first "hello" on a slow machine.
    config.listeners[0].limits.handshake_timeout = Duration::from_secs(2);
    let proxy = certs.start(config);
    let (mut answered, mut server) = peer.join(&proxy).await;
    server.write_all(b"hello").await.unwrap();
    let mut hello = [0; 5];
    soon("hello", answered.read_exact(&mut hello)).await.unwrap();
    assert_eq!(reset_of(proxy.addr).await, ErrorKind::ConnectionReset);
    // Who was answered may be quiet for ever.
    server.write_all(b"again").await.unwrap();
    soon("again", answered.read_exact(&mut hello)).await.unwrap();
    until("it is counted", async || {
        proxy.page("/metrics").await.contains(r#"reason="handshake_timeout"} 1"#)
    })
    .await;
}

#[tokio::test]
async fn a_flow_is_idle_for_as_long_as_the_configuration_says() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let mut config = passthrough_config(certs.config(&[peer.address]));
    passthrough_mode(&mut config).idle_timeout = Some(Duration::from_secs(2));
    let proxy = certs.start(config);
    let (mut client, mut server) = peer.join(&proxy).await;
    server.write_all(b"x").await.unwrap();
    soon("a byte", client.read_u8()).await.unwrap();
    let error = soon("the reset", client.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    until("it is counted", async || {
        proxy.page("/metrics").await.contains(r#"reason="idle_timeout"} 1"#)
    })
    .await;
}

#[tokio::test]
async fn a_drain_waits_for_flows_and_resets_what_is_left() {
    let (certs, peer) = (Certs::new(), Peer::start().await);
    let mut config = passthrough_config(certs.config(&[peer.address]));
    config.shutdown.drain_timeout = Duration::from_secs(4);
    let proxy = certs.start(config);
    let (mut client, mut server) = peer.join(&proxy).await;
    let (mut short, mut short_server) = peer.join(&proxy).await;
    proxy.running.drain();
    until("no more are accepted", async || TcpStream::connect(proxy.addr).await.is_err()).await;
    // Both go on; one ends in time.
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
    let error = soon("the reset", server.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    tokio::task::spawn_blocking(move || assert!(proxy.running.stop())).await.unwrap();
}

/// Another name, another upstream; what asks for none of them goes where the listener goes.
#[tokio::test]
async fn the_name_that_is_asked_for_picks_the_upstream() {
    let cluster = TestCluster::new(2);
    let mut config = passthrough_config(cluster.config());
    let mut other = config.upstreams[0].clone();
    other.name = "other".into();
    other.endpoints = vec![other.endpoints.remove(1)];
    config.upstreams[0].endpoints.truncate(1);
    config.upstreams.push(other);
    passthrough_mode(&mut config).routes =
        vec![Route { server_names: vec!["localhost".into()], upstream: "other".into() }];
    config.listeners[0].limits.handshake_timeout = Duration::from_secs(2);
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
    // An address is no server name.
    let client = proxy.client().await;
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    assert_eq!(flows().await, [1, 0]);
    let roots = pem_files::load_ca(&cluster.certs.path().join("ca.crt")).unwrap();
    let connector = TlsConnector::from(client_tls(&roots, None).h2);
    let stream = TcpStream::connect(proxy.addr).await.unwrap();
    let _named = connector.connect("localhost".try_into().unwrap(), stream).await.unwrap();
    assert_eq!(flows().await, [1, 1]);
    // No TLS: the listener's own upstream, whose business it is what to say to that.
    let mut odd = TcpStream::connect(proxy.addr).await.unwrap();
    odd.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = soon("an answer or an end", odd.read_to_end(&mut answer)).await;
    // Half a ClientHello is waited for, and not for ever.
    let mut half = TcpStream::connect(proxy.addr).await.unwrap();
    half.write_all(&[22, 3, 1, 2, 0, 1, 0]).await.unwrap();
    let error = soon("the reset", half.read(&mut [0; 1])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}
