//! The memory that clients may make the proxy hold: clients without an identity are refused and shed, an identity
//! is served, and the account returns to zero.

use std::time::Duration;

use http::Method;
use jackstay_apiserver::identity::User;
use jackstay_config::MemoryLimit;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::http2::{
    DATA, END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, PREFACE, REFUSED_STREAM,
    RST_STREAM, field_block, frame, settings,
};
use crate::support::wire::{self, Wire};
use crate::support::{
    CONFIGMAPS, PATIENCE, Proxy, TestCluster, config_map, join_all, soon, terminate_mode, until,
    wait,
};

/// Streams that a client without an identity may open on a connection.
const STREAMS: u32 = 250;

fn head(stream: u32, method: &str, path: &str, flags: u8) -> Vec<u8> {
    let list = [(":method", method), (":scheme", "https"), (":authority", "a"), (":path", path)];
    frame(HEADERS, END_HEADERS | flags, stream, &field_block(&list))
}

/// A connection without a certificate that sends `frames` and has no window for responses.
async fn without_window(cluster: &TestCluster, proxy: &Proxy, frames: Vec<u8>) -> Wire {
    let tls = wire::connector(&cluster.certs, None, "h2");
    let mut wire = wire::handshake(&tls, proxy.addr).await.unwrap();
    wire.write_all(PREFACE).await.unwrap();
    wire.write_all(&settings(&[(INITIAL_WINDOW_SIZE, 0)])).await.unwrap();
    wire.write_all(&frames).await.unwrap();
    wire
}

fn requests() -> Vec<u8> {
    (0..STREAMS).flat_map(|n| head(2 * n + 1, "GET", "/version", END_STREAM)).collect()
}

/// Waits for a stream that is reset with this code.
async fn reset(wire: &mut Wire, code: u32) {
    received(wire, |kind, payload| kind == RST_STREAM && payload == code.to_be_bytes()).await;
}

/// Waits for a frame with this type and payload.
async fn received(wire: &mut Wire, is_expected: impl Fn(u8, &[u8]) -> bool) {
    loop {
        let mut head = [0; 9];
        wire.read_exact(&mut head).await.unwrap();
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        wire.read_exact(&mut payload).await.unwrap();
        if is_expected(head[3], &payload) {
            return;
        }
    }
}

async fn shed(proxy: &Proxy, reason: &str) -> u64 {
    proxy.metric(&format!("jackstay_shed_total{{reason=\"{reason}\"}}")).await as u64
}

/// What is held, without the connections and what belongs to no client.
async fn held(proxy: &Proxy) -> f64 {
    let mut sum = 0.0;
    for kind in ["streams", "request_windows", "responses", "held_bodies", "watch_frames"] {
        sum += proxy.metric(&format!("jackstay_memory_budget_bytes{{kind=\"{kind}\"}}")).await;
    }
    sum
}

async fn responses(proxy: &Proxy) -> f64 {
    proxy.metric("jackstay_memory_budget_bytes{kind=\"responses\"}").await
}

async fn connections(proxy: &Proxy) -> f64 {
    proxy.metric("jackstay_memory_budget_bytes{kind=\"connections\"}").await
}

async fn handshakes(proxy: &Proxy) -> f64 {
    proxy.metric("jackstay_memory_budget_bytes{kind=\"handshakes\"}").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unproven_client_is_refused_and_shed_while_an_identity_is_served() {
    let cluster = TestCluster::new(1);
    let proxy =
        cluster.start_with(|config| config.memory_limit = MemoryLimit::Bytes(16 << 20)).await;
    let identity = proxy.client().await;
    assert_eq!(identity.get(CONFIGMAPS).await.unwrap().status, 200);

    // The source of the client may hold 5 MiB: half of 5/8. While 250 requests wait for their responses, these could
    // fill 16 MiB. A response that waits for its client is small here, so that several connections fit.
    let mut wires = Vec::new();
    while held(&proxy).await + connections(&proxy).await < 4_400_000.0 {
        let mut wire = without_window(&cluster, &proxy, requests()).await;
        soon("a refused stream", reset(&mut wire, REFUSED_STREAM)).await;
        until("the responses have arrived", async || responses(&proxy).await < 400_000.0).await;
        wires.push(wire);
    }
    assert!(shed(&proxy, "stream_refused").await > 0);
    assert!(held(&proxy).await < 6_000_000.0);
    let limit = Duration::from_secs(20);
    wait::until_within(limit, "stalled readers are reset", async || {
        assert_eq!(identity.get(CONFIGMAPS).await.unwrap().status, 200);
        shed(&proxy, "stalled_reader").await > 0
    })
    .await;
    let object = config_map("of-an-identity", "1").to_string();
    let json = [("content-type", "application/json")];
    let created = identity.request(Method::POST, CONFIGMAPS, &json, object).await.unwrap();
    assert_eq!(created.status, 201);
    let status = proxy.status().await;
    assert_eq!(status["memory"]["limit_bytes"], 16 << 20);
    let threads = &status["threads"];
    assert_eq!((&threads["identity_lane"], &threads["workers"]), (&true.into(), &1.into()));
    assert_eq!(threads["identity_lane_connections"], 1);
    drop((wires, identity));
    until("nothing is held", async || held(&proxy).await + connections(&proxy).await == 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn account_returns_to_zero_after_every_kind_of_request() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    for http2 in [true, false] {
        let client = proxy.client_over(http2).await;
        for n in 0..3 {
            let name = format!("held-{http2}-{n}");
            let object = config_map(&name, &"x".repeat(200_000)).to_string();
            let json = [("content-type", "application/json")];
            let created = client.request(Method::POST, CONFIGMAPS, &json, object).await.unwrap();
            assert_eq!(created.status, 201);
            assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
            assert_eq!(client.get("/no/such/path").await.unwrap().status, 404);
        }
        let watch = client.watch(&cluster.watch_path()).await.unwrap();
        assert!(connections(&proxy).await > 0.0);
        drop((watch, client));
    }
    // Bodies that do not end, and large responses that the client does not take.
    let body = [0; 8_000];
    let uploads = (0..4).flat_map(|n| {
        let upload = head(2 * n + 1, "POST", CONFIGMAPS, 0);
        let list = head(2 * n + 101, "GET", CONFIGMAPS, END_STREAM);
        [upload, frame(DATA, 0, 2 * n + 1, &body), list]
    });
    let wire = without_window(&cluster, &proxy, ordered(uploads)).await;
    until("memory is held", async || held(&proxy).await > 0.0).await;
    drop(wire);
    until("nothing is held", async || held(&proxy).await + connections(&proxy).await == 0.0).await;
}

/// Stream ids must increase: uploads first, then lists.
fn ordered(frames: impl Iterator<Item = Vec<u8>>) -> Vec<u8> {
    let mut frames: Vec<_> = frames.collect();
    frames.sort_by_key(|frame| u32::from_be_bytes(frame[5..9].try_into().unwrap()));
    frames.concat()
}

/// An HTTP/1.1 connection without a certificate.
async fn http1(cluster: &TestCluster, proxy: &Proxy) -> Wire {
    let tls = wire::connector(&cluster.certs, None, "http/1.1");
    wire::handshake(&tls, proxy.addr).await.unwrap()
}

/// All that the server sends until it closes the connection.
async fn until_closed(wire: &mut Wire) -> String {
    let mut text = Vec::new();
    // Without close_notify, the end is an error.
    let _ = wire.read_to_end(&mut text).await;
    String::from_utf8(text).unwrap()
}

const GET_VERSION: &[u8] = b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n";

/// The limit has space for the connection, 64 KiB of half of 5/8, and for no request, which has 128 KiB more.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_request_without_memory_gets_a_status_and_ends_its_connection() {
    let cluster = TestCluster::new(1);
    let limit = MemoryLimit::Bytes(430 << 10);
    let proxy = cluster.start_with(|config| config.memory_limit = limit).await;
    let mut wire = http1(&cluster, &proxy).await;
    wire.write_all(GET_VERSION).await.unwrap();
    let answer = soon("the connection ends", until_closed(&mut wire)).await;
    assert!(answer.starts_with("HTTP/1.1 429 "), "{answer}");
    assert!(answer.contains("retry-after: 1\r\n"), "{answer}");
    let status: serde_json::Value =
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!((&status["kind"], &status["code"]), (&"Status".into(), &429.into()), "{answer}");
    assert!(status["message"].as_str().unwrap().contains("memory"), "{answer}");
    assert_eq!(shed(&proxy, "stream_refused").await, 1);
    until("nothing is held", async || held(&proxy).await + connections(&proxy).await == 0.0).await;
}

/// The limit has space for four connections of the user and a request, 384 KiB of half of 5/8. The connections are then
/// more than half of that, and three of them are those of an identity, which are not shed.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_http1_connection_is_closed_when_memory_is_short() {
    let cluster = TestCluster::new(1);
    let proxy =
        cluster.start_with(|config| config.memory_limit = MemoryLimit::Bytes(1_240 << 10)).await;
    let _identities = join_all((0..3).map(|_| proxy.client())).await;
    until("their handshakes have ended", async || handshakes(&proxy).await == 0.0).await;
    let mut wire = http1(&cluster, &proxy).await;
    wire.write_all(GET_VERSION).await.unwrap();
    let limit = Duration::from_secs(30);
    let answer = tokio::time::timeout(limit, until_closed(&mut wire)).await.expect("shed as idle");
    assert!(answer.starts_with("HTTP/1.1 ") && !answer.starts_with("HTTP/1.1 429"), "{answer}");
    assert!(!answer.contains("connection: close"), "it was kept alive: {answer}");
    assert_eq!(shed(&proxy, "idle_connection").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn unfinished_handshakes_are_charged_until_they_end() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(|_| {}).await;
    let mut clients = Vec::new();
    for _ in 0..3 {
        let mut client = TcpStream::connect(proxy.addr).await.unwrap();
        // The start of a TLS record of 256 bytes.
        client.write_all(&[22, 3, 1, 1, 0, 1, 0, 0]).await.unwrap();
        clients.push(client);
        let charged = clients.len() as f64 * 98_304.0;
        until("the handshakes are charged", async || handshakes(&proxy).await >= charged).await;
    }
    drop(clients);
    until("nothing is charged", async || handshakes(&proxy).await == 0.0).await;
}

/// Bytes that are charged for everything.
async fn charged(proxy: &Proxy) -> f64 {
    proxy.metric("jackstay_memory_budget_bytes").await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stalled_responses_of_five_users_stay_within_the_share_of_their_class() {
    const LIMIT: u64 = 16 << 20;
    let cluster = TestCluster::new(1);
    cluster.state.add_token("alice", User::new("alice", &[]));
    let proxy = cluster.start_with(|config| config.memory_limit = MemoryLimit::Bytes(LIMIT)).await;
    let identity = proxy.client().await;
    let json = [("content-type", "application/json")];
    let object = config_map("large", &"x".repeat(200_000)).to_string();
    let created = identity.request(Method::POST, CONFIGMAPS, &json, object).await.unwrap();
    assert_eq!(created.status, 201);
    let tls = wire::connector(&cluster.certs, None, "h2");
    let list = |n: u32| {
        let (method, path) = ((":method", "GET"), (":path", CONFIGMAPS));
        let rest = [(":scheme", "https"), (":authority", "a"), ("authorization", "Bearer alice")];
        let block = field_block(&[&[method, path], &rest[..]].concat());
        frame(HEADERS, END_HEADERS | END_STREAM, 2 * n + 1, &block)
    };
    let begin = [PREFACE, &settings(&[(INITIAL_WINDOW_SIZE, 0)]), &list(0)].concat();
    let mut wires = Vec::new();
    for user in 1..=5 {
        let Ok(mut wire) = wire::handshake_as(1000 + user, &tls, proxy.addr).await else {
            println!("skipped: only root can change the user");
            return;
        };
        // The first response proves the token.
        wire.write_all(&begin).await.unwrap();
        soon("a response", received(&mut wire, |kind, _| kind == HEADERS)).await;
        wires.push(wire);
    }
    for wire in &mut wires {
        wire.write_all(&(1..STREAMS).flat_map(list).collect::<Vec<_>>()).await.unwrap();
        soon("a refused stream", reset(wire, REFUSED_STREAM)).await;
    }
    let mut peak: f64 = 0.0;
    let limit = Duration::from_secs(20);
    wait::until_within(limit, "clients are shed", async || {
        peak = peak.max(charged(&proxy).await);
        shed(&proxy, "stalled_reader").await + shed(&proxy, "long_running").await > 0
    })
    .await;
    // The rest is that of the identity.
    let share = (LIMIT / 4 * 3) as f64;
    println!("peak {:.2} of the limit", peak / LIMIT as f64);
    assert!((share * 0.7..share + 500_000.0).contains(&peak), "{peak}");
    assert_eq!(proxy.client().await.get(CONFIGMAPS).await.unwrap().status, 200);
}

/// Each of 16 workers may start a share of the handshakes of the process.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn identity_connects_while_unfinished_handshakes_fill_the_share_of_each_worker() {
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| {
            config.workers = 16;
            config.memory_limit = MemoryLimit::Bytes(16 << 20);
            // The identity's client has the uid of the others, so its handshake waits behind theirs.
            terminate_mode(config).limits.connections.handshake_timeout = 2 * PATIENCE;
        })
        .await;
    let mut clients = Vec::new();
    // One source has half of the 8 of each worker.
    let expected = 16.0 * 4.0 * 98_304.0;
    // The kernel distributes the connections by chance, so that a worker may get less than its share of the first ones.
    until("the workers have their shares", async || {
        for _ in 0..if clients.len() < 1_000 { 100 } else { 0 } {
            let mut client = TcpStream::connect(proxy.addr).await.unwrap();
            client.write_all(&[22, 3, 1, 1, 0, 1, 0, 0]).await.unwrap();
            clients.push(client);
        }
        handshakes(&proxy).await >= expected
    })
    .await;
    for _ in 0..16 {
        assert!(handshakes(&proxy).await <= expected, "more handshakes are in progress");
        let identity = soon("a connection", proxy.client()).await;
        assert_eq!(identity.get(CONFIGMAPS).await.unwrap().status, 200);
    }
    assert_eq!(shed(&proxy, "connection_refused").await, 0);
}
