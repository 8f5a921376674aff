//! Upgrades from the client's socket to the apiserver's: what crosses, what does not, and how each
//! side learns of the other's end.

#![cfg(feature = "demo")]

#[path = "../support/netns.rs"]
mod netns;
mod setup;
#[path = "../support/wait.rs"]
mod wait;

use std::time::{Duration, SystemTime};

use jackstay::demo::faulty_relay::FaultyRelay;
use netns::nft;
use setup::{Ca, Peer, Proxy, nobody, run, scene};

const EXEC: &str = "POST /api/v1/namespaces/d/pods/p/exec?command=sh&stdin=true HTTP/1.1\r\n\
    Host: api.example:6443\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n";
const SWITCH: &str =
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n";

/// An exec that has just been granted: the client's end and the apiserver's.
async fn granted(ca: &Ca, peer: &Peer, proxy: &Proxy) -> (setup::Talk, setup::Talk) {
    granted_to(proxy.client(ca).await, peer).await
}

async fn granted_to(mut client: setup::Talk, peer: &Peer) -> (setup::Talk, setup::Talk) {
    client.say(&format!("{EXEC}\r\n")).await;
    let mut server = peer.accept().await;
    server.head().await;
    server.say(&format!("{SWITCH}\r\n")).await;
    let head = client.head().await;
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    (client, server)
}

fn lines<'a>(head: &'a str, name: &str) -> Vec<&'a str> {
    let fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
}

#[test]
fn spdy_crosses_with_its_headers_and_bytes_flow_both_ways() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut client = proxy.client(&ca).await;
        let request = format!(
            "{EXEC}X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\
             X-Stream-Protocol-Version: v3.channel.k8s.io\r\n\
             X-Accepted-Stream-Protocol-Versions: v4\r\nX-Remote-User: admin\r\n\
             x-remote-Group: system:masters\r\nKeep-Alive: 5\r\n\r\n"
        );
        client.say(&request).await;
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

        // The first bytes of the new protocol may come with the head.
        let answer = format!(
            "{SWITCH}X-Stream-Protocol-Version: v4.channel.k8s.io\r\nKeep-Alive: 5\r\n\r\nearly"
        );
        server.say(&answer).await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert_eq!(lines(&head, "connection"), ["Upgrade"]);
        assert_eq!(lines(&head, "upgrade"), ["SPDY/3.1"]);
        assert_eq!(lines(&head, "x-stream-protocol-version"), ["v4.channel.k8s.io"]);
        assert!(lines(&head, "keep-alive").is_empty(), "{head}");
        client.hear("early").await;
        client.say("ls").await;
        server.hear("ls").await;
        let much = "0123456789abcdef".repeat(40_000);
        tokio::join!(server.say(&much), client.hear(&much));
        tokio::join!(client.say(&much), server.hear(&much));
        assert_eq!(proxy.tunnels.open(), 1);
        let metrics = proxy.metrics.render();
        assert!(metrics.contains("jackstay_tunnels{listener=\"l\"} 1"), "{metrics}");
    });
}

#[test]
fn each_direction_ends_on_its_own() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        for client_first in [true, false] {
            let (client, server) = granted(&ca, &peer, &proxy).await;
            let (mut first, mut last) =
                if client_first { (client, server) } else { (server, client) };
            first.say("bye").await;
            first.half_close().await;
            assert_eq!(last.rest().await, "bye");
            last.say("not yet").await;
            first.hear("not yet").await;
            assert_eq!(proxy.tunnels.open(), 1);
            last.half_close().await;
            assert_eq!(first.rest().await, "");
            proxy.tunnels.closed().await;
        }
    });
}

#[test]
fn websocket_keeps_its_headers_and_its_token() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        // A certificate of the node would make this token the node's.
        let mut client = proxy.client(&ca).await;
        client
            .say(
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
            .say(
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

/// As kubectl forwards a port since 1.31 (KEP-4006): SPDY in WebSocket messages, which are only bytes
/// here.
#[test]
fn a_port_is_forwarded_by_websocket() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut client = proxy.node(&ca).await;
        client
            .say(
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
            .say(
                "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n\
                 Upgrade: websocket\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\
                 Sec-WebSocket-Protocol: SPDY/3.1+portforward.k8s.io\r\n\r\nhello",
            )
            .await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        assert_eq!(lines(&head, "sec-websocket-protocol"), ["SPDY/3.1+portforward.k8s.io"]);
        client.hear("hello").await;
        let much = "0123456789abcdef".repeat(40_000);
        tokio::join!(client.say(&much), server.hear(&much));
        tokio::join!(server.say(&much), client.hear(&much));
        assert_eq!(proxy.tunnels.open(), 1);
        client.half_close().await;
        assert_eq!(server.rest().await, "");
        server.say("closing").await;
        server.half_close().await;
        assert_eq!(client.rest().await, "closing");
        proxy.tunnels.closed().await;
    });
}

#[test]
fn an_identity_goes_with_its_certificate_and_a_token_with_none() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut node = proxy.node(&ca).await;
        node.say(&format!("{EXEC}\r\n")).await;
        assert!(peer.accept().await.has_client_certificate());
        let mut user = proxy.client(&ca).await;
        user.say(&format!("{EXEC}Authorization: Bearer abc\r\n\r\n")).await;
        let mut server = peer.accept().await;
        assert!(!server.has_client_certificate());
        assert_eq!(lines(&server.head().await, "authorization"), ["Bearer abc"]);
    });
}

#[test]
fn a_refusal_is_an_answer_and_the_end() {
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
            // What a client says in the hope of a tunnel reaches nobody.
            let hopeful = "GET /api/v1/secrets HTTP/1.1\r\nHost: api\r\n\r\n";
            client.say(&format!("{EXEC}\r\n{hopeful}")).await;
            let mut server = peer.accept().await;
            server.head().await;
            let length = body.len();
            let answer =
                format!("HTTP/1.1 {line}\r\nContent-Length: {length}\r\n{field}\r\n{body}");
            server.say(&answer).await;
            let head = client.head().await;
            assert!(head.starts_with(&format!("HTTP/1.1 {line}\r\n")), "{head}");
            assert!(head.to_lowercase().contains(&field.trim_end().to_lowercase()), "{head}");
            assert_eq!(lines(&head, "connection"), ["close"]);
            assert_eq!(client.rest().await, body);
            assert_eq!(server.gone().await, "");
            assert_eq!(proxy.tunnels.open(), 0);
        }
        assert!(!elsewhere.is_visited().await);
    });
}

#[test]
fn a_switch_to_something_else_is_not_an_upgrade() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let mut client = proxy.client(&ca).await;
        client.say(&format!("{EXEC}\r\n")).await;
        let mut server = peer.accept().await;
        server.head().await;
        server.say("HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n").await;
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
        server.gone().await;
    });
}

#[test]
fn a_body_goes_along() {
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
            client.say(&request).await;
            let mut server = peer.accept().await;
            let head = server.head().await;
            let (name, value) = framing.split_once(": ").unwrap();
            assert_eq!(lines(&head, name), [value]);
            server.hear(sent).await;
            server.say(&format!("{SWITCH}\r\nhi")).await;
            client.head().await;
            client.hear("hi").await;
        }
    });
}

#[test]
fn an_endpoint_that_refuses_is_passed_over() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        for _ in 0..4 {
            let endpoints = [nobody(), peer.address(), nobody()];
            let proxy = Proxy::start(&ca, &endpoints);
            let (mut client, mut server) = granted(&ca, &peer, &proxy).await;
            client.say("x").await;
            server.hear("x").await;
        }
    });
}

#[test]
fn with_nobody_there_the_client_is_told_so_and_not_to_repeat_it() {
    run(async {
        let ca = Ca::new();
        let proxy = Proxy::start(&ca, &[nobody(), nobody()]);
        let mut client = proxy.client(&ca).await;
        client.say(&format!("{EXEC}\r\n")).await;
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
fn what_was_sent_is_not_sent_again() {
    run(async {
        let ca = Ca::new();
        let peers = [Peer::start(&ca).await, Peer::start(&ca).await];
        let proxy = Proxy::start(&ca, &peers.each_ref().map(Peer::address));
        let mut client = proxy.client(&ca).await;
        client.say(&format!("{EXEC}\r\n")).await;
        let (mut server, other) = tokio::select! {
            server = peers[0].accept() => (server, &peers[1]),
            server = peers[1].accept() => (server, &peers[0]),
        };
        server.head().await;
        drop(server);
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
        assert!(lines(&head, "retry-after").is_empty(), "{head}");
        assert!(!other.is_visited().await);
    });
}

#[test]
fn a_client_that_leaves_takes_the_upstream_with_it() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        // Before the answer.
        let mut client = proxy.client(&ca).await;
        client.say(&format!("{EXEC}\r\n")).await;
        let mut server = peer.accept().await;
        server.head().await;
        drop(client);
        server.gone().await;
        // In the tunnel.
        let (client, mut server) = granted(&ca, &peer, &proxy).await;
        drop(client);
        server.gone().await;
        proxy.tunnels.closed().await;
    });
}

#[test]
fn an_upstream_that_dies_does_not_look_finished() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = granted(&ca, &peer, &proxy).await;
        server.say("half an out").await;
        client.hear("half an out").await;
        drop(server);
        let mut rest = Vec::new();
        let end = tokio::io::AsyncReadExt::read_to_end(&mut client.0, &mut rest).await;
        assert!(end.is_err(), "a clean end after {rest:?}");
        proxy.tunnels.closed().await;
        let metrics = proxy.metrics.render();
        assert!(metrics.contains(r#"{listener="l",side="upstream"} 1"#), "{metrics}");
    });
}

/// A process in a pod has ended while its input still comes: the apiserver says how it ended and
/// closes with bytes unread, so that the next write fails. What it said is heard all the same.
#[test]
fn last_words_are_heard_of_a_server_that_takes_nothing_more() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = granted(&ca, &peer, &proxy).await;
        client.say("input").await;
        server.has_unread().await;
        // None of this waits, so all of it has happened by the proxy's next turn, in which it
        // writes before it reads.
        client.say("more input").await;
        server.say("exit status 0").await;
        server.half_close().await;
        drop(server);
        assert_eq!(client.rest().await, "exit status 0");
        drop(client);
        proxy.tunnels.closed().await;
    });
}

#[test]
fn a_drain_can_end_what_does_not_end() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = granted(&ca, &peer, &proxy).await;
        proxy.tunnels.end();
        tokio::join!(client.gone(), server.gone(), proxy.tunnels.closed());
    });
}

#[test]
fn tunnel_ends_when_the_client_certificate_that_opened_it_expires() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let proxy = Proxy::start(&ca, &[peer.address()]);
        let expires = SystemTime::now() + Duration::from_secs(8);
        ca.issue_until("brief", "system:node:n1", expires);
        let client = proxy.showing(&ca, "brief").await;
        let (mut client, mut server) = granted_to(client, &peer).await;
        let (mut other, mut others_server) = granted_to(proxy.node(&ca).await, &peer).await;
        client.say("ls").await;
        server.hear("ls").await;
        tokio::join!(client.gone(), server.gone());
        assert!(SystemTime::now() > expires - Duration::from_secs(1), "not before its end");
        assert_eq!(proxy.tunnels.open(), 1);
        other.say("ls").await;
        others_server.hear("ls").await;
    });
}

/// What a dead flow costs, by the place where its packets vanish. Changes the firewall, so:
/// `unshare -n sh -c 'ip link set lo up && cargo test --test upgrade -- --ignored'`.
#[test]
#[ignore = "needs root and a network namespace of its own"]
fn a_dead_flow_is_noticed() {
    for (hook, port, talking) in [
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
            let (mut client, _server) = granted(&ca, &peer, &proxy).await;
            let number = peer.address().port();
            nft("add table inet t");
            nft(&format!("add chain inet t c {{ type filter hook {hook} priority 0; }}"));
            nft(&format!("add rule inet t c tcp {port} {number} drop"));
            let start = std::time::Instant::now();
            if talking {
                client.say("x").await;
            }
            client.gone().await;
            let took = start.elapsed();
            nft("delete table inet t");
            println!("{hook} {port}, talking {talking}: {took:?}");
            assert!(took < Duration::from_secs(8), "{hook} {port}: {took:?}");
        });
    }
}

/// A closed window is not a dead flow, however long it lasts.
#[test]
#[ignore = "takes a quarter of a minute"]
fn a_peer_that_reads_nothing_is_left_alone() {
    run(async {
        let (ca, peer, proxy) = scene().await;
        let (mut client, mut server) = granted(&ca, &peer, &proxy).await;
        let much = "0123456789abcdef".repeat(2_000_000);
        tokio::join!(client.say(&much), async {
            wait::pause(Duration::from_secs(14)).await;
            server.hear(&much).await;
        });
    });
}

/// Nothing can take its place, so it waits for its path: longer than any flow that can be replaced.
#[test]
fn tunnel_survives_a_blackout_shorter_than_tunnel_dead_after() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let hole = FaultyRelay::start(peer.address()).unwrap();
        let proxy = Proxy::start(&ca, &[hole.addr]);
        let (mut client, mut server) = granted(&ca, &peer, &proxy).await;
        // One that waits for nothing, and one on which something is under way both ways.
        let (mut busy, mut busy_server) = granted(&ca, &peer, &proxy).await;
        assert_eq!(hole.lose_all().unwrap(), 2);
        tokio::join!(busy.say("typed"), busy_server.say("shown"));
        // The length of the fault: a flow at L4 dies after 2.7 s at most.
        wait::pause(Duration::from_secs(4)).await;
        assert_eq!(proxy.tunnels.open(), 2);
        hole.heal();
        tokio::join!(client.say("ls"), server.hear("ls"));
        tokio::join!(server.say("p"), client.hear("p"));
        tokio::join!(busy.hear("shown"), busy_server.hear("typed"));
    });
}

#[test]
fn tunnel_ends_when_its_path_is_lost_for_tunnel_dead_after() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let hole = FaultyRelay::start(peer.address()).unwrap();
        let proxy = Proxy::start_with(&ca, &[hole.addr], "tunnel_dead_after: 6s");
        let (mut client, _server) = granted(&ca, &peer, &proxy).await;
        assert_eq!(hole.lose_all().unwrap(), 1);
        let start = std::time::Instant::now();
        assert_eq!(client.gone().await, "");
        let took = start.elapsed();
        assert_eq!(proxy.tunnels.open(), 0);
        // What was heard last may be a keepalive's answer of a second before. Other flows die after
        // 2.7 s, and the kernel gives up by itself after 14 s.
        let expected = Duration::from_millis(4_500)..Duration::from_secs(12);
        assert!(expected.contains(&took), "{took:?}");
    });
}

/// Until it is answered it is a request like others, and its client hears soon that its fate is not known.
#[test]
fn upgrade_without_an_answer_on_a_lost_path_is_an_unknown_fate() {
    run(async {
        let ca = Ca::new();
        let peer = Peer::start(&ca).await;
        let hole = FaultyRelay::start(peer.address()).unwrap();
        // It would wait for a minute as a tunnel.
        let proxy = Proxy::start_with(&ca, &[hole.addr], "tunnel_dead_after: 1m");
        let mut client = proxy.client(&ca).await;
        client.say(&format!("{EXEC}\r\n")).await;
        let mut server = peer.accept().await;
        server.head().await;
        hole.lose_all().unwrap();
        let head = client.head().await;
        assert!(head.starts_with("HTTP/1.1 502 "), "{head}");
    });
}
