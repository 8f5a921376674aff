//! Tests of upgraded connections (exec, port-forward) from the client's socket to the apiserver's: headers,
//! data, ends and failures.

mod setup;

use std::time::{Duration, Instant, SystemTime};

use crate::support::netns::nft;
use crate::support::{Certs, pause, refusing_address};
use jackstay_apiserver::pki::{Subject, Validity};
use jackstay_core::admission::MemoryKind;
use setup::{Connection, Peer, Proxy, Setup, respond, run};

/// An exec over SPDY with these additional header lines.
fn exec(headers: &str) -> String {
    format!(
        "POST /api/v1/namespaces/d/pods/p/exec?command=sh&stdin=true HTTP/1.1\r\n\
         Host: api.example:6443\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         Content-Length: 0\r\n{headers}\r\n"
    )
}

/// The switch to SPDY with these additional header lines.
fn switch(headers: &str) -> String {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\
         {headers}\r\n"
    )
}

/// A WebSocket handshake that offers these subprotocols.
fn websocket_request(path: &str, protocols: &[&str]) -> String {
    let protocols: String =
        protocols.iter().flat_map(|name| ["Sec-WebSocket-Protocol: ", name, "\r\n"]).collect();
    format!(
        "GET {path} HTTP/1.1\r\nHost: api\r\nConnection: keep-alive, Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
         Sec-WebSocket-Version: 13\r\n{protocols}\r\n"
    )
}

fn websocket_response(protocol: &str) -> String {
    format!(
        "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: WebSocket\r\n\
         Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\
         Sec-WebSocket-Protocol: {protocol}\r\n\r\n"
    )
}

/// The values of a header in a head, in order.
fn values<'a>(head: &'a str, name: &str) -> Vec<&'a str> {
    let fields = head.lines().filter_map(|line| line.split_once(": "));
    fields.filter(|(field, _)| field.eq_ignore_ascii_case(name)).map(|(_, value)| value).collect()
}

#[track_caller]
fn assert_status(head: &str, status: &str) {
    assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{head}");
}

/// Both ends of a tunnel that a client without a certificate has opened.
async fn open_tunnel(setup: &Setup) -> (Connection, Connection) {
    open_tunnel_of(setup.client().await, setup).await
}

/// Both ends of a tunnel that this client has opened.
async fn open_tunnel_of(mut client: Connection, setup: &Setup) -> (Connection, Connection) {
    let (mut server, _) = setup.request(&mut client, &exec("")).await;
    let head = respond(&mut server, &mut client, &switch("")).await;
    assert_status(&head, "101");
    (client, server)
}

/// Sends 640 kB in each direction.
async fn send_both_ways(client: &mut Connection, server: &mut Connection) {
    let data = "0123456789abcdef".repeat(40_000);
    tokio::join!(server.send(&data), client.expect(&data));
    tokio::join!(client.send(&data), server.expect(&data));
}

#[test]
fn spdy_upgrade_forwards_headers_and_data_both_ways() {
    run(async {
        let setup = Setup::new().await;
        let mut client = setup.client().await;
        let request = exec(
            "X-Stream-Protocol-Version: v4.channel.k8s.io\r\n\
             X-Stream-Protocol-Version: v3.channel.k8s.io\r\n\
             X-Accepted-Stream-Protocol-Versions: v4\r\nX-Remote-User: admin\r\n\
             x-remote-Group: system:masters\r\nKeep-Alive: 5\r\n",
        );
        let (mut server, head) = setup.request(&mut client, &request).await;
        let first_line = "POST /api/v1/namespaces/d/pods/p/exec?command=sh&stdin=true HTTP/1.1\r\n";
        assert!(head.starts_with(first_line), "{head}");
        for (name, expected) in [
            ("host", &["api.example:6443"][..]),
            ("connection", &["Upgrade"]),
            ("upgrade", &["SPDY/3.1"]),
            ("x-stream-protocol-version", &["v4.channel.k8s.io", "v3.channel.k8s.io"]),
            ("x-accepted-stream-protocol-versions", &["v4"]),
            ("x-forwarded-for", &["127.0.0.1"]),
            ("x-remote-user", &[]),
            ("x-remote-group", &[]),
            ("keep-alive", &[]),
        ] {
            assert_eq!(values(&head, name), expected, "{head}");
        }

        // The first bytes of the new protocol may arrive with the head.
        let response =
            switch("X-Stream-Protocol-Version: v4.channel.k8s.io\r\nKeep-Alive: 5\r\n") + "early";
        let head = respond(&mut server, &mut client, &response).await;
        assert_status(&head, "101");
        for (name, expected) in [
            ("connection", &["Upgrade"][..]),
            ("upgrade", &["SPDY/3.1"]),
            ("x-stream-protocol-version", &["v4.channel.k8s.io"]),
            ("keep-alive", &[]),
        ] {
            assert_eq!(values(&head, name), expected, "{head}");
        }
        client.expect("early").await;
        client.send("ls").await;
        server.expect("ls").await;
        send_both_ways(&mut client, &mut server).await;
        assert_eq!(setup.proxy.tunnels.open(), 1);
        let metrics = setup.proxy.metrics.render();
        assert!(metrics.contains("jackstay_tunnels{listener=\"apiserver\"} 1"), "{metrics}");
    });
}

#[test]
fn tunnel_is_charged_to_the_memory_budget_until_it_ends() {
    run(async {
        let setup = Setup::new().await;
        let charged = || setup.proxy.memory.used_for(MemoryKind::Tunnels);
        let mut tunnels = vec![open_tunnel(&setup).await];
        let of_one = charged();
        assert!(of_one >= 64 << 10, "{of_one}");
        tunnels.push(open_tunnel(&setup).await);
        assert_eq!(charged(), 2 * of_one);
        drop(tunnels);
        while charged() > 0 {
            pause(Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn each_direction_ends_separately() {
    run(async {
        let setup = Setup::new().await;
        for client_ends_first in [true, false] {
            let (client, server) = open_tunnel(&setup).await;
            let (mut first, mut last) =
                if client_ends_first { (client, server) } else { (server, client) };
            first.send("bye").await;
            first.half_close().await;
            assert_eq!(last.read_to_clean_end().await, "bye");
            last.send("not yet").await;
            first.expect("not yet").await;
            assert_eq!(setup.proxy.tunnels.open(), 1);
            last.half_close().await;
            assert_eq!(first.read_to_clean_end().await, "");
            setup.proxy.tunnels.all_closed().await;
        }
    });
}

#[test]
fn websocket_upgrade_keeps_its_headers_and_token() {
    run(async {
        let setup = Setup::new().await;
        // With the certificate of an identity the token would be ignored.
        let mut client = setup.client().await;
        let token = "base64url.bearer.authorization.k8s.io.c2VjcmV0";
        let path = "/api/v1/namespaces/d/pods/p/exec?command=sh";
        let request = websocket_request(path, &[token, "v5.channel.k8s.io"]);
        let (mut server, head) = setup.request(&mut client, &request).await;
        assert!(!server.has_peer_certificate());
        assert_eq!(values(&head, "sec-websocket-protocol"), [token, "v5.channel.k8s.io"]);
        assert_eq!(values(&head, "sec-websocket-key"), ["dGhlIHNhbXBsZSBub25jZQ=="]);
        assert_eq!(values(&head, "connection"), ["Upgrade"]);
        let response = websocket_response("v5.channel.k8s.io");
        let head = respond(&mut server, &mut client, &response).await;
        assert_status(&head, "101");
        assert_eq!(values(&head, "sec-websocket-accept"), ["s3pPLMBiTxaQ9kYGzzhZRbK+xOo="]);
        assert_eq!(values(&head, "sec-websocket-protocol"), ["v5.channel.k8s.io"]);
    });
}

/// kubectl since 1.31 sends SPDY in WebSocket messages (KEP-4006), which jackstay forwards as bytes.
#[test]
fn websocket_upgrade_forwards_a_port() {
    run(async {
        let setup = Setup::new().await;
        let mut client = setup.identity_client().await;
        let protocol = "SPDY/3.1+portforward.k8s.io";
        let request = websocket_request("/api/v1/namespaces/d/pods/p/portforward", &[protocol]);
        let (mut server, head) = setup.request(&mut client, &request).await;
        assert!(server.has_peer_certificate());
        assert!(head.starts_with("GET /api/v1/namespaces/d/pods/p/portforward HTTP/1.1\r\n"));
        assert_eq!(values(&head, "upgrade"), ["websocket"]);
        assert_eq!(values(&head, "sec-websocket-version"), ["13"]);
        assert_eq!(values(&head, "sec-websocket-protocol"), [protocol]);
        let response = websocket_response(protocol) + "hello";
        let head = respond(&mut server, &mut client, &response).await;
        assert_status(&head, "101");
        assert_eq!(values(&head, "sec-websocket-protocol"), [protocol]);
        client.expect("hello").await;
        send_both_ways(&mut client, &mut server).await;
        assert_eq!(setup.proxy.tunnels.open(), 1);
        client.half_close().await;
        assert_eq!(server.read_to_clean_end().await, "");
        server.send("closing").await;
        server.half_close().await;
        assert_eq!(client.read_to_clean_end().await, "closing");
        setup.proxy.tunnels.all_closed().await;
    });
}

#[test]
fn upgrade_uses_the_certificate_for_an_identity_and_none_for_a_token() {
    run(async {
        let setup = Setup::new().await;
        let mut client = setup.identity_client().await;
        let (server, _) = setup.request(&mut client, &exec("")).await;
        assert!(server.has_peer_certificate());
        let mut client = setup.client().await;
        let request = exec("Authorization: Bearer abc\r\n");
        let (server, head) = setup.request(&mut client, &request).await;
        assert!(!server.has_peer_certificate());
        assert_eq!(values(&head, "authorization"), ["Bearer abc"]);
    });
}

#[test]
fn refused_upgrade_gets_the_response_and_ends() {
    run(async {
        let setup = Setup::new().await;
        let redirect_target = Peer::start(&setup.certs).await;
        let forbidden = r#"{"kind":"Status","status":"Failure","reason":"Forbidden","code":403}"#;
        let location = format!("Location: https://{}/\r\n", redirect_target.address());
        for (status, field, body) in [
            ("403 Forbidden", "Content-Type: application/json\r\n", forbidden),
            ("302 Found", location.as_str(), "moved"),
            ("200 OK", "", "not an upgrade"),
        ] {
            let mut client = setup.client().await;
            // Data that a client sends before the response reaches no endpoint.
            let early = "GET /api/v1/secrets HTTP/1.1\r\nHost: api\r\n\r\n";
            let (mut server, _) = setup.request(&mut client, &(exec("") + early)).await;
            let length = body.len();
            let response =
                format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{field}\r\n{body}");
            let head = respond(&mut server, &mut client, &response).await;
            assert!(head.starts_with(&format!("HTTP/1.1 {status}\r\n")), "{head}");
            assert!(head.to_lowercase().contains(&field.trim_end().to_lowercase()), "{head}");
            assert_eq!(values(&head, "connection"), ["close"]);
            assert_eq!(client.read_to_clean_end().await, body);
            assert_eq!(server.read_to_end().await.0, "");
            assert_eq!(setup.proxy.tunnels.open(), 0);
        }
        assert!(!redirect_target.has_connection().await);
    });
}

#[test]
fn switch_to_another_protocol_gets_502() {
    run(async {
        let setup = Setup::new().await;
        let mut client = setup.client().await;
        let (mut server, _) = setup.request(&mut client, &exec("")).await;
        let response = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n";
        assert_status(&respond(&mut server, &mut client, response).await, "502");
        assert_eq!(server.read_to_end().await.0, "");
    });
}

#[test]
fn upgrade_forwards_the_request_body() {
    run(async {
        let setup = Setup::new().await;
        for (name, value, body) in [
            ("Content-Length", "5", "hello"),
            ("Transfer-Encoding", "chunked", "5\r\nhello\r\n0\r\n\r\n"),
        ] {
            let mut client = setup.client().await;
            let request = format!(
                "GET /exec HTTP/1.1\r\nHost: api\r\nConnection: Upgrade\r\n\
                 Upgrade: SPDY/3.1\r\n{name}: {value}\r\n\r\n{body}"
            );
            let (mut server, head) = setup.request(&mut client, &request).await;
            assert_eq!(values(&head, name), [value]);
            server.expect(body).await;
            respond(&mut server, &mut client, &(switch("") + "hi")).await;
            client.expect("hi").await;
        }
    });
}

#[test]
fn upgrade_skips_an_endpoint_that_refuses() {
    run(async {
        let mut setup = Setup::new().await;
        for _ in 0..4 {
            let endpoints = [refusing_address(), setup.peer.address(), refusing_address()];
            setup.proxy = Proxy::start(&setup.certs, &endpoints);
            let (mut client, mut server) = open_tunnel(&setup).await;
            client.send("x").await;
            server.expect("x").await;
        }
    });
}

#[test]
fn upgrade_gets_503_without_retry_after_when_every_endpoint_refuses() {
    run(async {
        let certs = Certs::new();
        let proxy = Proxy::start(&certs, &[refusing_address(), refusing_address()]);
        let mut client = proxy.connect(&certs, None).await;
        client.send(&exec("")).await;
        let head = client.head().await;
        assert_status(&head, "503");
        assert!(values(&head, "retry-after").is_empty(), "{head}");
        let body = client.read(values(&head, "content-length")[0].parse().unwrap()).await;
        let status: serde_json::Value = serde_json::from_str(&body).unwrap();
        let message = status["message"].as_str().unwrap();
        assert_eq!(message.matches("TCP to 127.0.0.1:").count(), 2, "{message}");
    });
}

#[test]
fn upgrade_that_was_sent_is_not_retried() {
    run(async {
        let certs = Certs::new();
        let peers = [Peer::start(&certs).await, Peer::start(&certs).await];
        let proxy = Proxy::start(&certs, &peers.each_ref().map(Peer::address));
        let mut client = proxy.connect(&certs, None).await;
        client.send(&exec("")).await;
        let (mut server, other) = tokio::select! {
            server = peers[0].accept() => (server, &peers[1]),
            server = peers[1].accept() => (server, &peers[0]),
        };
        server.head().await;
        drop(server);
        let head = client.head().await;
        assert_status(&head, "502");
        assert!(values(&head, "retry-after").is_empty(), "{head}");
        assert!(!other.has_connection().await);
    });
}

#[test]
fn upstream_connection_ends_when_the_client_disconnects() {
    run(async {
        let setup = Setup::new().await;
        // Before the response.
        let mut client = setup.client().await;
        let (mut server, _) = setup.request(&mut client, &exec("")).await;
        drop(client);
        assert_eq!(server.read_to_end().await.0, "");
        // In the tunnel.
        let (client, mut server) = open_tunnel(&setup).await;
        drop(client);
        assert_eq!(server.read_to_end().await.0, "");
        setup.proxy.tunnels.all_closed().await;
    });
}

#[test]
fn lost_upstream_does_not_look_like_a_clean_end() {
    run(async {
        let setup = Setup::new().await;
        let (mut client, mut server) = open_tunnel(&setup).await;
        server.send("half an out").await;
        client.expect("half an out").await;
        drop(server);
        let (data, is_clean) = client.read_to_end().await;
        assert!(!is_clean, "a clean end after {data:?}");
        setup.proxy.tunnels.all_closed().await;
        let metrics = setup.proxy.metrics.render();
        assert!(metrics.contains(r#"{listener="apiserver",side="upstream"} 1"#), "{metrics}");
    });
}

/// When a process in a pod ends while input arrives, the apiserver sends the exit status and closes with
/// unread bytes, so jackstay's next write fails. The client receives the status all the same.
#[test]
fn data_of_a_server_that_reads_no_more_is_forwarded() {
    run(async {
        let setup = Setup::new().await;
        let (mut client, mut server) = open_tunnel(&setup).await;
        client.send("input").await;
        server.wait_unread().await;
        // The proxy, in the same thread, runs only after these calls, none of which waits. It writes before
        // it reads.
        client.send("more input").await;
        server.send("exit status 0").await;
        server.half_close().await;
        drop(server);
        assert_eq!(client.read_to_clean_end().await, "exit status 0");
        drop(client);
        setup.proxy.tunnels.all_closed().await;
    });
}

#[test]
fn drain_can_end_tunnels() {
    run(async {
        let setup = Setup::new().await;
        let (mut client, mut server) = open_tunnel(&setup).await;
        let tunnels = &setup.proxy.tunnels;
        tunnels.close_all();
        tokio::join!(client.read_to_end(), server.read_to_end(), tunnels.all_closed());
    });
}

#[test]
fn tunnel_ends_when_the_client_certificate_that_opened_it_expires() {
    run(async {
        let setup = Setup::new().await;
        let expires = SystemTime::now() + Duration::from_secs(8);
        let validity = Validity { not_after: expires, ..Validity::usual() };
        let certificate = setup.certs.pki.client_valid(&Subject::admin(), validity).unwrap();
        let client = setup.proxy.connect(&setup.certs, Some(&certificate)).await;
        let (mut client, mut server) = open_tunnel_of(client, &setup).await;
        let (mut other_client, mut other_server) =
            open_tunnel_of(setup.identity_client().await, &setup).await;
        client.send("ls").await;
        server.expect("ls").await;
        tokio::join!(client.read_to_end(), server.read_to_end());
        assert!(
            SystemTime::now() > expires - Duration::from_secs(1),
            "the tunnel ended before its certificate expired"
        );
        assert_eq!(setup.proxy.tunnels.open(), 1);
        other_client.send("ls").await;
        other_server.expect("ls").await;
    });
}

/// Measures the time to detect the loss of a path, by the place where its packets are dropped. The test
/// changes the firewall, so run it with
/// `unshare -n sh -c 'ip link set lo up && cargo test --test proxy upgrade:: -- --ignored'`.
#[test]
#[ignore = "needs root and a network namespace of its own"]
fn tunnel_ends_when_packets_are_dropped() {
    for (hook, port_match, client_sends) in [
        ("input", "dport", true),
        ("input", "sport", true),
        ("output", "dport", true),
        ("output", "sport", true),
        ("input", "dport", false),
        ("output", "dport", false),
    ] {
        run(async {
            let setup = Setup::with(Duration::from_secs(4)).await;
            let (mut client, _server) = open_tunnel(&setup).await;
            let port = setup.peer.address().port();
            nft("add table inet t");
            nft(&format!("add chain inet t c {{ type filter hook {hook} priority 0; }}"));
            nft(&format!("add rule inet t c tcp {port_match} {port} drop"));
            let start = Instant::now();
            if client_sends {
                client.send("x").await;
            }
            let (data, is_clean) = client.read_to_end().await;
            let took = start.elapsed();
            nft("delete table inet t");
            println!("{hook} {port_match}, client sends {client_sends}: {took:?}");
            assert!(
                data.is_empty() && !is_clean,
                "{hook} {port_match}: a clean end after {data:?}"
            );
            assert!(took < Duration::from_secs(8), "{hook} {port_match}: {took:?}");
        });
    }
}

/// An endpoint with a closed window is not dead, however long the window is closed.
#[test]
#[ignore = "takes 15 s"]
fn tunnel_survives_a_closed_window() {
    run(async {
        let setup = Setup::new().await;
        let (mut client, mut server) = open_tunnel(&setup).await;
        let data = "0123456789abcdef".repeat(2_000_000);
        tokio::join!(client.send(&data), async {
            pause(Duration::from_secs(14)).await;
            server.expect(&data).await;
        });
    });
}

/// A tunnel cannot be replaced by a new connection, so it survives longer faults than other flows.
#[test]
fn tunnel_survives_a_blackout_shorter_than_tunnel_dead_after() {
    run(async {
        let (relay, setup) = Setup::behind_relay(Duration::from_secs(20)).await;
        // One tunnel is idle, and one has data in flight both ways.
        let (mut idle_client, mut idle_server) = open_tunnel(&setup).await;
        let (mut busy_client, mut busy_server) = open_tunnel(&setup).await;
        assert_eq!(relay.drop_all_packets().unwrap(), 2);
        tokio::join!(busy_client.send("typed"), busy_server.send("shown"));
        // The length of the fault. An L4 flow dies after 2.7 s at most.
        pause(Duration::from_secs(4)).await;
        assert_eq!(setup.proxy.tunnels.open(), 2);
        relay.clear_faults();
        tokio::join!(idle_client.send("ls"), idle_server.expect("ls"));
        tokio::join!(idle_server.send("p"), idle_client.expect("p"));
        tokio::join!(busy_client.expect("shown"), busy_server.expect("typed"));
    });
}

#[test]
fn tunnel_ends_when_its_path_is_lost_for_tunnel_dead_after() {
    run(async {
        let (relay, setup) = Setup::behind_relay(Duration::from_secs(6)).await;
        let (mut client, _server) = open_tunnel(&setup).await;
        assert_eq!(relay.drop_all_packets().unwrap(), 1);
        let start = Instant::now();
        assert_eq!(client.read_to_end().await.0, "");
        let took = start.elapsed();
        assert_eq!(setup.proxy.tunnels.open(), 0);
        // The last answer of the endpoint may have come a second before the fault. Other flows die after
        // 2.7 s, and the kernel closes the connection after 14 s.
        let expected = Duration::from_millis(4_500)..Duration::from_secs(12);
        assert!(expected.contains(&took), "{took:?}");
    });
}

/// Until its response an upgrade is a request like any other: `tunnel_dead_after` does not apply.
#[test]
fn upgrade_in_flight_on_a_lost_path_gets_502() {
    run(async {
        let (relay, setup) = Setup::behind_relay(Duration::from_secs(60)).await;
        let mut client = setup.client().await;
        let _server = setup.request(&mut client, &exec("")).await;
        relay.drop_all_packets().unwrap();
        assert_status(&client.head().await, "502");
    });
}
