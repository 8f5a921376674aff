//! Upgraded connections from the client's socket to the apiserver's: headers, data, ends and
//! failures.

#![cfg(feature = "demo")]

mod setup;
#[path = "../support/mod.rs"]
mod support;

use std::time::{Duration, SystemTime};

use jackstay::demo::faulty_relay::FaultyRelay;
use setup::{Ca, Peer, Proxy, run, scene};
use support::netns::nft;
use support::{pause, refusing_address};

const EXEC: &str = "POST /api/v1/namespaces/d/pods/p/exec?command=sh&stdin=true HTTP/1.1\r\n\
    Host: api.example:6443\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n";
const SWITCH: &str =
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";

/// Both ends of an upgraded exec.
async fn upgraded(ca: &Ca, peer: &Peer, proxy: &Proxy) -> (setup::Connection, setup::Connection) {
    upgrade(proxy.client(ca).await, peer).await
}

async fn upgrade(
    mut client: setup::Connection,
    peer: &Peer,
) -> (setup::Connection, setup::Connection) {
    client.send(&format!("{EXEC}\r\n")).await;
    let mut server = peer.accept().await;
    server.head().await;
    server.send(&format!("{SWITCH}\r\n")).await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    (client, server)
}

fn lines<'a>(head: &'a str, name: &str) -> Vec<&'a str> {
    let fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
}

#[test]
fn spdy_upgrade_forwards_headers_and_data_both_ways() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut client = proxy.client(&ca).await;
        let request = format!(
            "{EXEC}X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\
             X-Stream-Protocol-Version: v3.channel.k8s.io\r\n\
             X-Accepted-Stream-Protocol-Versions: v4\r\nX-Remote-User: admin\r\n\
             x-remote-Group: system:masters\r\nKeep-Alive: 5\r\n\r\n"
        );
        client.send(&request).await;
        let mut server = peer.accept().await;
        let head = server.head().await;
        let first = "POST /api/v1/namespaces/d/pods/p/exec?command=sh&stdin=true HTTP/1.1\r\n";
        assert!(head.starts_with(first), "{head}");
        assert_eq!(lines(&head, "host"), ["api.example:6443"]);
        assert_eq!(lines(&head, "connection"), ["Upgrade"]);
        assert_eq!(lines(&head, "upgrade"), ["SPDY/3.1"]);
        assert_eq!(
            lines(&head, "x-stream-protocol-version"),
            ["v4.channel.k8s.io", "v3.channel.k8s.io"]
        );
        assert_eq!(lines(&head, "x-accepted-stream-protocol-versions"), ["v4"]);
        assert_eq!(lines(&head, "x-forwarded-for"), ["127.0.0.1"]);
        for gone in ["x-remote-user", "x-remote-group", "keep-alive"] {
            assert!(lines(&head, gone).is_empty(), "{head}");
        }

        // The first bytes of the new protocol may arrive with the head.
        let response = format!(
            "{SWITCH}X-Stream-Protocol-Version: v4.channel.k8s.io\r\nKeep-Alive: 5\r\n\r\nearly"
        );
        server.send(&response).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert_eq!(lines(&head, "connection"), ["Upgrade"]);
        assert_eq!(lines(&head, "upgrade"), ["SPDY/3.1"]);
        assert_eq!(lines(&head, "x-stream-protocol-version"), ["v4.channel.k8s.io"]);
        assert!(lines(&head, "keep-alive").is_empty(), "{head}");
        client.expect("early").await;
        client.send("ls").await;
        server.expect("ls").await;
        let data = "0123456789abcdef".repeat(40_000);
        tokio::join!(server.send(&data), client.expect(&data));
        tokio::join!(client.send(&data), server.expect(&data));
        assert_eq!(proxy.tunnels.open(), 1);
        let metrics = proxy.metrics.render();
        assert!(metrics.contains("jackstay_tunnels{listener=\"l\"} 1"), "{metrics}");
    });
}

#[test]
fn each_direction_ends_separately() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        for client_first in [true, false] {
            let (client, server) = upgraded(&ca, &peer, &proxy).await;
            let (mut first, mut last) =
                if client_first { (client, server) } else { (server, client) };
            first.send("bye").await;
            first.half_close().await;
            assert_eq!(last.rest().await, "bye");
            last.send("not yet").await;
            first.expect("not yet").await;
            assert_eq!(proxy.tunnels.open(), 1);
            last.half_close().await;
            assert_eq!(first.rest().await, "");
            proxy.tunnels.all_closed().await;
        }
    });
}

#[test]
fn websocket_upgrade_keeps_its_headers_and_token() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        // With the certificate of the node the token would be ignored.
        let mut client = proxy.client(&ca).await;
        client
            .send(
                "GET /api/v1/namespaces/d/pods/p/exec?command=sh HTTP/1.1\r\nHost: api\r\n\
                 Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\
                 Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\
                 Sec-WebSocket-Protocol: base64url.bearer.authorization.k8s.io.c2VjcmV0\r\n\
                 Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n",
            )
            .await;
        let mut server = peer.accept().await;
        assert!(!server.has_client_certificate());
        let head = server.head().await;
        assert_eq!(
            lines(&head, "sec-websocket-protocol"),
            ["base64url.bearer.authorization.k8s.io.c2VjcmV0", "v5.channel.k8s.io"]
        );
        assert_eq!(lines(&head, "sec-websocket-key"), ["dGhlIHNhbXBsZSBub25jZQ=="]);
        assert_eq!(lines(&head, "connection"), ["Upgrade"]);
        server
            .send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                 Upgrade: WebSocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\
                 Sec-WebSocket-Protocol: v5.channel.k8s.io\r\n\r\n",
            )
            .await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert_eq!(lines(&head, "sec-websocket-accept"), ["s3pPLMBiTxaQ9kYGzzhZRbK+xOo="]);
        assert_eq!(lines(&head, "sec-websocket-protocol"), ["v5.channel.k8s.io"]);
    });
}

/// As kubectl since 1.31 (KEP-4006): SPDY in WebSocket messages, which jackstay forwards as bytes.
#[test]
fn websocket_upgrade_forwards_a_port() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut client = proxy.node(&ca).await;
        client
            .send(
                "GET /api/v1/namespaces/d/pods/p/portforward HTTP/1.1\r\nHost: api\r\n\
                 Connection: Upgrade\r\nUpgrade: websocket\r\n\
                 Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\
                 Sec-WebSocket-Protocol: SPDY/3.1+portforward.k8s.io\r\n\r\n",
            )
            .await;
        let mut server = peer.accept().await;
        assert!(server.has_client_certificate());
        let head = server.head().await;
        assert!(head.starts_with("GET /api/v1/namespaces/d/pods/p/portforward HTTP/1.1\r\n"));
        assert_eq!(lines(&head, "upgrade"), ["websocket"]);
        assert_eq!(lines(&head, "sec-websocket-version"), ["13"]);
        assert_eq!(lines(&head, "sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
        server
            .send(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                 Upgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\
                 Sec-WebSocket-Protocol: SPDY/3.1+portforward.k8s.io\r\n\r\nhello",
            )
            .await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert_eq!(lines(&head, "sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
        client.expect("hello").await;
        let data = "0123456789abcdef".repeat(40_000);
        tokio::join!(client.send(&data), server.expect(&data));
        tokio::join!(server.send(&data), client.expect(&data));
        assert_eq!(proxy.tunnels.open(), 1);
        client.half_close().await;
        assert_eq!(server.rest().await, "");
        server.send("closing").await;
        server.half_close().await;
        assert_eq!(client.rest().await, "closing");
        proxy.tunnels.all_closed().await;
    });
}

#[test]
fn upgrade_uses_the_certificate_for_an_identity_and_none_for_a_token() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut node = proxy.node(&ca).await;
        node.send(&format!("{EXEC}\r\n")).await;
        assert!(peer.accept().await.has_client_certificate());
        let mut user = proxy.client(&ca).await;
        user.send(&format!("{EXEC}Authorization: Bearer abc\r\n\r\n")).await;
        let mut server = peer.accept().await;
        assert!(!server.has_client_certificate());
        assert_eq!(lines(&server.head().await, "authorization"), ["Bearer abc"]);
    });
}

#[test]
fn refused_upgrade_gets_the_response_and_ends() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let elsewhere = Peer::start(&ca).await;
        let proxy = Proxy::start(&ca, &[peer.address()]);
        let status = r#"{"kind":"Status","status":"Failure","reason":"Forbidden","code":403}"#;
        let redirect = format!("Location: https://{}/\r\n", elsewhere.address());
        for (line, field, body) in [
            ("403 Forbidden", "Content-Type: application/json\r\n", status),
            ("302 Found", redirect.as_str(), "moved"),
            ("200 OK", "", "not an upgrade"),
        ] {
            let mut client = proxy.client(&ca).await;
            // Data that a client sends before the response reaches no endpoint.
            let early = "GET /api/v1/secrets HTTP/1.1\r\nHost: api\r\n\r\n";
            client.send(&format!("{EXEC}\r\n{early}")).await;
            let mut server = peer.accept().await;
            server.head().await;
            let length = body.len();
            let response =
                format!("HTTP/1.1 {line}\r\nContent-Length: {length}\r\n{field}\r\n{body}");
            server.send(&response).await;
            let head = client.head().await;
            assert!(head.starts_with(&format!("HTTP/1.1 {line}\r\n")), "{head}");
            assert!(head.to_lowercase().contains(&field.trim_end().to_lowercase()), "{head}");
            assert_eq!(lines(&head, "connection"), ["close"]);
            assert_eq!(client.rest().await, body);
            assert_eq!(server.read_to_end().await, "");
            assert_eq!(proxy.tunnels.open(), 0);
        }
        assert!(!elsewhere.has_connection().await);
    });
}

#[test]
fn switch_to_another_protocol_gets_502() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut client = proxy.client(&ca).await;
        client.send(&format!("{EXEC}\r\n")).await;
        let mut server = peer.accept().await;
        server.head().await;
        server.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n").await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
        server.read_to_end().await;
    });
}

#[test]
fn upgrade_forwards_the_request_body() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        for (framing, sent) in [
            ("Content-Length: 5", "hello"),
            ("Transfer-Encoding: chunked", "5\r\nhello\r\n0\r\n\r\n"),
        ] {
            let mut client = proxy.client(&ca).await;
            let request = format!(
                "GET /exec HTTP/1.1\r\nHost: api\r\nConnection: Upgrade\r\n\
                 Upgrade: SPDY/3.1\r\n{framing}\r\n\r\n{sent}"
            );
            client.send(&request).await;
            let mut server = peer.accept().await;
            let head = server.head().await;
            let (name, value) = framing.split_once(": ").unwrap();
            assert_eq!(lines(&head, name), [value]);
            server.expect(sent).await;
            server.send(&format!("{SWITCH}\r\nhi")).await;
            client.head().await;
            client.expect("hi").await;
        }
    });
}

#[test]
fn upgrade_skips_an_endpoint_that_refuses() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        for _ in 0..4 {
            let endpoints = [refusing_address(), peer.address(), refusing_address()];
            let proxy = Proxy::start(&ca, &endpoints);
            let (mut client, mut server) = upgraded(&ca, &peer, &proxy).await;
            client.send("x").await;
            server.expect("x").await;
        }
    });
}

#[test]
fn upgrade_gets_503_without_retry_after_when_every_endpoint_refuses() {
    run(async {
        let ca = Ca::new();
        let proxy = Proxy::start(&ca, &[refusing_address(), refusing_address()]);
        let mut client = proxy.client(&ca).await;
        client.send(&format!("{EXEC}\r\n")).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
        assert!(lines(&head, "retry-after").is_empty(), "{head}");
        let mut body = vec![0; lines(&head, "content-length")[0].parse().unwrap()];
        tokio::io::AsyncReadExt::read_exact(&mut client.0, &mut body).await.unwrap();
        let status: serde_json::Value = serde_json::from_slice(&body).unwrap();
        let message = status["message"].as_str().unwrap();
        assert_eq!(message.matches("TCP to 127.0.0.1:").count(), 2, "{message}");
    });
}

#[test]
fn upgrade_that_was_sent_is_not_retried() {
    run(async {
        let ca = Ca::new();
        let peers = [Peer::start(&ca).await, Peer::start(&ca).await];
        let proxy = Proxy::start(&ca, &peers.each_ref().map(Peer::address));
        let mut client = proxy.client(&ca).await;
        client.send(&format!("{EXEC}\r\n")).await;
        let (mut server, other) = tokio::select! {
            server = peers[0].accept() => (server, &peers[1]),
            server = peers[1].accept() => (server, &peers[0]),
        };
        server.head().await;
        drop(server);
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
        assert!(lines(&head, "retry-after").is_empty(), "{head}");
        assert!(!other.has_connection().await);
    });
}

#[test]
fn upstream_connection_ends_when_the_client_disconnects() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        // Before the response.
        let mut client = proxy.client(&ca).await;
        client.send(&format!("{EXEC}\r\n")).await;
        let mut server = peer.accept().await;
        server.head().await;
        drop(client);
        server.read_to_end().await;
        // In the tunnel.
        let (client, mut server) = upgraded(&ca, &peer, &proxy).await;
        drop(client);
        server.read_to_end().await;
        proxy.tunnels.all_closed().await;
    });
}

#[test]
fn lost_upstream_does_not_look_like_a_clean_end() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = upgraded(&ca, &peer, &proxy).await;
        server.send("half an out").await;
        client.expect("half an out").await;
        drop(server);
        let mut rest = Vec::new();
        let end = tokio::io::AsyncReadExt::read_to_end(&mut client.0, &mut rest).await;
        assert!(end.is_err(), "a clean end after {rest:?}");
        proxy.tunnels.all_closed().await;
        let metrics = proxy.metrics.render();
        assert!(metrics.contains(r#"{listener="l",side="upstream"} 1"#), "{metrics}");
    });
}

/// A process in a pod has ended while input still arrives: the apiserver sends the exit status and
/// closes with unread bytes, so that the next write fails. The client gets the status all the same.
#[test]
fn data_of_a_server_that_reads_no_more_is_forwarded() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = upgraded(&ca, &peer, &proxy).await;
        client.send("input").await;
        server.has_unread().await;
        // None of this waits, so all of it has happened when the proxy runs again, which writes
        // before it reads.
        client.send("more input").await;
        server.send("exit status 0").await;
        server.half_close().await;
        drop(server);
        assert_eq!(client.rest().await, "exit status 0");
        drop(client);
        proxy.tunnels.all_closed().await;
    });
}

#[test]
fn drain_can_end_tunnels() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = upgraded(&ca, &peer, &proxy).await;
        proxy.tunnels.close_all();
        tokio::join!(client.read_to_end(), server.read_to_end(), proxy.tunnels.all_closed());
    });
}

#[test]
fn tunnel_ends_when_the_client_certificate_that_opened_it_expires() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let proxy = Proxy::start(&ca, &[peer.address()]);
        let expires = SystemTime::now() + Duration::from_secs(8);
        ca.issue_until("short-lived", "system:node:n1", expires);
        let client = proxy.client_with(&ca, "short-lived").await;
        let (mut client, mut server) = upgrade(client, &peer).await;
        let (mut other, mut others_server) = upgrade(proxy.node(&ca).await, &peer).await;
        client.send("ls").await;
        server.expect("ls").await;
        tokio::join!(client.read_to_end(), server.read_to_end());
        assert!(
            SystemTime::now() > expires - Duration::from_secs(1),
            "the tunnel ended before its certificate expired"
        );
        assert_eq!(proxy.tunnels.open(), 1);
        other.send("ls").await;
        others_server.expect("ls").await;
    });
}

/// How fast a dead flow is noticed, by the place where its packets vanish. Changes the firewall, so:
/// `unshare -n sh -c 'ip link set lo up && cargo test --test upgrade -- --ignored'`.
#[test]
#[ignore = "needs root and a network namespace of its own"]
fn tunnel_ends_when_packets_are_dropped() {
    for (hook, port, sending) in [
        ("input", "dport", true),
        ("input", "sport", true),
        ("output", "dport", true),
        ("output", "sport", true),
        ("input", "dport", false),
        ("output", "dport", false),
    ] {
        run(async {
            let ca = Ca::new();
            let peer = Peer::start(&ca).await;
            let proxy = Proxy::start_with(&ca, &[peer.address()], "tunnel_dead_after: 4s");
            let (mut client, _server) = upgraded(&ca, &peer, &proxy).await;
            let number = peer.address().port();
            nft("add table inet t");
            nft(&format!("add chain inet t c {{ type filter hook {hook} priority 0; }}"));
            nft(&format!("add rule inet t c tcp {port} {number} drop"));
            let start = std::time::Instant::now();
            if sending {
                client.send("x").await;
            }
            client.read_to_end().await;
            let took = start.elapsed();
            nft("delete table inet t");
            println!("{hook} {port}, sending {sending}: {took:?}");
            assert!(took < Duration::from_secs(8), "{hook} {port}: {took:?}");
        });
    }
}

/// A closed window is no dead flow, however long it lasts.
#[test]
#[ignore = "takes a quarter of a minute"]
fn tunnel_survives_a_closed_window() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = upgraded(&ca, &peer, &proxy).await;
        let data = "0123456789abcdef".repeat(2_000_000);
        tokio::join!(client.send(&data), async {
            pause(Duration::from_secs(14)).await;
            server.expect(&data).await;
        });
    });
}

/// A tunnel cannot be replaced, so it waits for its path longer than other flows.
#[test]
fn tunnel_survives_a_blackout_shorter_than_tunnel_dead_after() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let hole = FaultyRelay::start(peer.address()).unwrap();
        let proxy = Proxy::start(&ca, &[hole.addr]);
        let (mut client, mut server) = upgraded(&ca, &peer, &proxy).await;
        // The first tunnel is idle, the second has data in flight both ways.
        let (mut busy, mut busy_server) = upgraded(&ca, &peer, &proxy).await;
        assert_eq!(hole.drop_all_packets().unwrap(), 2);
        tokio::join!(busy.send("typed"), busy_server.send("shown"));
        // The length of the fault. An L4 flow dies after 2.7 s at most.
        pause(Duration::from_secs(4)).await;
        assert_eq!(proxy.tunnels.open(), 2);
        hole.clear_faults();
        tokio::join!(client.send("ls"), server.expect("ls"));
        tokio::join!(server.send("p"), client.expect("p"));
        tokio::join!(busy.expect("shown"), busy_server.expect("typed"));
    });
}

#[test]
fn tunnel_ends_when_its_path_is_lost_for_tunnel_dead_after() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let hole = FaultyRelay::start(peer.address()).unwrap();
        let proxy = Proxy::start_with(&ca, &[hole.addr], "tunnel_dead_after: 6s");
        let (mut client, _server) = upgraded(&ca, &peer, &proxy).await;
        assert_eq!(hole.drop_all_packets().unwrap(), 1);
        let start = std::time::Instant::now();
        assert_eq!(client.read_to_end().await, "");
        let took = start.elapsed();
        assert_eq!(proxy.tunnels.open(), 0);
        // The last response may be to a keepalive of a second before. Other flows die after 2.7 s,
        // and the kernel gives up after 14 s.
        let expected = Duration::from_millis(4_500)..Duration::from_secs(12);
        assert!(expected.contains(&took), "{took:?}");
    });
}

/// Before its response an upgrade is a request like others, and its client soon gets an unknown
/// outcome.
#[test]
fn upgrade_in_flight_on_a_lost_path_gets_502() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let hole = FaultyRelay::start(peer.address()).unwrap();
        // As a tunnel it would wait for a minute.
        let proxy = Proxy::start_with(&ca, &[hole.addr], "tunnel_dead_after: 1m");
        let mut client = proxy.client(&ca).await;
        client.send(&format!("{EXEC}\r\n")).await;
        let mut server = peer.accept().await;
        server.head().await;
        hole.drop_all_packets().unwrap();
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    });
}
