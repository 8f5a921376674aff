//! Idle connections and connections of unproven clients leave slots for identities.

use crate::support::http2::{GOAWAY, HEADERS, NO_ERROR, PREFACE, headers, read_until, settings};
use crate::support::wire::{self, Wire};
use crate::support::{CONFIGMAPS, PATIENCE, Proxy, TestCluster, soon, until};
use jackstay_apiserver::client::Client;
use jackstay_apiserver::identity::User;
use jackstay_config::Config;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// Slots of the listener: half are the reserve, and one source gets half of the others.
const SLOTS: usize = 32;
const SHARE: usize = 8;
const EVICTED: &str = r#"jackstay_downstream_refused_total{listener="apiserver",reason="evicted"}"#;

async fn setup() -> (TestCluster, Proxy) {
    let cluster = TestCluster::new(1);
    cluster.state.add_token("alice", User::new("alice", &[]));
    let change = |config: &mut Config| {
        let limits = config.listeners[0].limits_mut();
        limits.max_connections = SLOTS;
        limits.handshake_timeout = 6 * PATIENCE;
    };
    let proxy = cluster.start_with(change).await;
    (cluster, proxy)
}

/// A new connection with a client certificate, and a request.
async fn fresh_identity_succeeds(cluster: &TestCluster, proxy: &Proxy) -> Client {
    let client = Client::connect(proxy.addr, &cluster.certs.credentials()).await.unwrap();
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    client
}

/// The whole test is one source: the identity's client has the same uid as the others.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_tcp_connections_are_closed_for_new_ones_and_proven_ones_stay() {
    let (cluster, proxy) = setup().await;
    let first = fresh_identity_succeeds(&cluster, &proxy).await;
    let mut idle = Vec::new();
    for _ in 0..4 * SLOTS {
        idle.push(TcpStream::connect(proxy.addr).await.unwrap());
    }
    for _ in 0..SLOTS / 2 {
        until("an idle connection is old enough", async || {
            Client::connect(proxy.addr, &cluster.certs.credentials()).await.is_ok()
        })
        .await;
        assert_eq!(first.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    assert!(!first.is_closed());
    proxy.wait_metrics(r#"refused_total{listener="apiserver",reason="evicted"}"#).await;
}

/// In a burst of new connections the handshakes wait for their turns, for seconds if they are thousands.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_stays_during_its_handshake_while_idle_connections_are_closed() {
    let (cluster, proxy) = setup().await;
    let chain = (vec![cluster.certs.admin.cert_der()], cluster.certs.admin.key_der());
    let connector = wire::connector(&cluster.certs, Some(chain), "http/1.1");
    let mut identities = Vec::new();
    for _ in 0..SHARE {
        let mut socket = TcpStream::connect(proxy.addr).await.unwrap();
        let (client, mut relay) = tokio::io::duplex(1 << 16);
        let client = connector.connect(ServerName::from(proxy.addr.ip()), client);
        let client = tokio::spawn(client.into_future());
        let mut hello = vec![0; 1 << 14];
        let length = soon("the ClientHello", relay.read(&mut hello)).await.unwrap();
        hello.truncate(length);
        let rest = hello.split_off(5);
        socket.write_all(&hello).await.unwrap();
        identities.push((client, socket, relay, rest));
    }
    // All are older than those that are evicted here. Two are evicted for each slot.
    let mut idle = Vec::new();
    until("idle connections are evicted", async || {
        idle.push(TcpStream::connect(proxy.addr).await.unwrap());
        proxy.metric(EVICTED).await >= 2.0 * SLOTS as f64
    })
    .await;
    for (client, mut socket, mut relay, rest) in identities {
        socket.write_all(&rest).await.unwrap();
        tokio::spawn(async move { tokio::io::copy_bidirectional(&mut relay, &mut socket).await });
        let mut stream = soon("the handshake", client).await.unwrap().unwrap();
        let request = format!("GET {CONFIGMAPS} HTTP/1.1\r\nHost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut head = [0; 12];
        soon("a response", stream.read_exact(&mut head)).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 200");
    }
}

/// A connection without a certificate whose request got a response.
async fn unproven(cluster: &TestCluster, proxy: &Proxy) -> Option<Wire> {
    let connector = wire::connector(&cluster.certs, None, "http/1.1");
    let mut stream = wire::handshake(&connector, proxy.addr).await.ok()?;
    let request = format!("GET {CONFIGMAPS} HTTP/1.1\r\nHost: a\r\n\r\n");
    stream.write_all(request.as_bytes()).await.ok()?;
    let read = stream.read(&mut [0; 4096]).await.ok()?;
    (read > 0).then_some(stream)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_connection_after_a_request_is_closed_for_a_new_one_oldest_first() {
    let (cluster, proxy) = setup().await;
    let mut idle = Vec::new();
    for n in 0..SHARE {
        idle.push(unproven(&cluster, &proxy).await.unwrap_or_else(|| panic!("connection {n}")));
    }
    // Each one above the share closes the oldest. A connection without a request would be closed before them.
    for n in 0..SHARE {
        let newer = unproven(&cluster, &proxy).await;
        assert!(newer.is_some(), "connection {n} above the share");
        let mut rest = Vec::new();
        soon("the oldest is closed", idle[n].read_to_end(&mut rest)).await.unwrap();
        idle.push(newer.unwrap());
    }
    proxy
        .wait_metrics(&format!("jackstay_downstream_connections{{listener=\"apiserver\"}} {SHARE}"))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_http2_connection_gets_a_goaway_without_error_before_it_is_closed() {
    let (cluster, proxy) = setup().await;
    let connector = wire::connector(&cluster.certs, None, "h2");
    let mut oldest = wire::handshake(&connector, proxy.addr).await.unwrap();
    let fields = [
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "a"),
        (":path", CONFIGMAPS),
        ("authorization", "Bearer alice"),
    ];
    let request = [PREFACE, &settings(&[]), &headers(1, true, &fields)].concat();
    oldest.write_all(&request).await.unwrap();
    let response = read_until(&mut oldest, |kind, id, _| kind == HEADERS && id == 1);
    soon("a response", response).await.expect("a response");
    let token = cluster.certs.anonymous().token("alice");
    let mut idle = Vec::new();
    for _ in 0..SHARE {
        let client = proxy.client_with(&token).await;
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        idle.push(client);
    }
    let goaway = read_until(&mut oldest, |kind, _, _| kind == GOAWAY);
    let goaway = soon("the oldest gets a GOAWAY", goaway).await.expect("a GOAWAY before the end");
    assert_eq!(goaway[4..8], NO_ERROR.to_be_bytes(), "{goaway:?}");
    let end = read_until(&mut oldest, |_, _, _| false);
    assert_eq!(soon("the oldest is closed", end).await, None);
    for (n, client) in idle.iter().enumerate() {
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "connection {n}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reserve_serves_identities_while_others_use_their_share() {
    let (cluster, proxy) = setup().await;
    let token = cluster.certs.anonymous().token("alice");
    let mut watching = Vec::new();
    for _ in 0..SHARE {
        let client = proxy.client_with(&token).await;
        let watch = client.watch(&cluster.watch_path()).await.unwrap();
        watching.push((client, watch));
    }
    // A client without an identity is closed after its handshake.
    for _ in 0..2 {
        assert!(unproven(&cluster, &proxy).await.is_none());
    }
    let mut identities = Vec::new();
    for _ in 0..SLOTS - SHARE {
        identities.push(fresh_identity_succeeds(&cluster, &proxy).await);
    }
    assert!(Client::connect(proxy.addr, &cluster.certs.credentials()).await.is_err());
    let refused = |reason| format!(r#"refused_total{{listener="apiserver",reason="{reason}"}}"#);
    for reason in ["source", "cap"] {
        proxy.wait_metrics(&refused(reason)).await;
    }
    assert_eq!(watching.len(), SHARE);
}
