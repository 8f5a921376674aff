//! Receive windows follow a line that delays every byte.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use jackstay_apiserver::client::{Client, next_data};
use jackstay_apiserver::identity::User;
use jackstay_config::{Config, MemoryLimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::support::{PATIENCE, Proxy, TestCluster, soon, until};

/// Delay of each direction.
const DELAY: Duration = Duration::from_millis(15);
/// Largest initial window of a stream.
const INITIAL: u64 = 256 << 10;

/// Relays connections to `target`, each direction delayed.
async fn long_line(target: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let Ok(server) = TcpStream::connect(target).await else { continue };
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            let (client, server) = (client.into_split(), server.into_split());
            tokio::spawn(delayed(client.0, server.1));
            tokio::spawn(delayed(server.0, client.1));
        }
    });
    address
}

async fn delayed(
    mut from: impl AsyncReadExt + Unpin + Send + 'static,
    mut to: impl AsyncWriteExt + Unpin,
) {
    let (send, mut receive) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length @ 1..) = from.read(&mut buffer).await {
            let _ = send.send((Instant::now() + DELAY, buffer[..length].to_vec()));
        }
    });
    while let Some((due, bytes)) = receive.recv().await {
        sleep_until(due).await;
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

async fn start(cluster: &TestCluster) -> Proxy {
    start_with(cluster, MemoryLimit::Auto).await
}

async fn start_with(cluster: &TestCluster, limit: MemoryLimit) -> Proxy {
    let line = long_line(cluster.addresses()[0]).await;
    let config = Config { memory_limit: limit, ..cluster.certs.config(&[line]) };
    let proxy = cluster.certs.start(config);
    proxy.wait_ready(1).await;
    proxy
}

/// The largest window of a stream on any connection.
async fn window(proxy: &Proxy) -> u64 {
    let endpoints = proxy.endpoints().await;
    let connections = endpoints[0]["connections"].as_array().unwrap();
    connections.iter().map(|c| c["stream_window_bytes"].as_u64().unwrap()).max().unwrap()
}

async fn lent(proxy: &Proxy) -> f64 {
    proxy.metric("jackstay_memory_budget_bytes{kind=\"upstream_windows\"}").await
}

async fn changes(proxy: &Proxy, change: &str) -> f64 {
    let endpoint = proxy.endpoints().await[0]["address"].as_str().unwrap().to_owned();
    let upstream = proxy.status().await["upstreams"][0]["name"].as_str().unwrap().to_owned();
    let labels = format!("upstream=\"{upstream}\",endpoint=\"{endpoint}\",change=\"{change}\"");
    proxy.metric(&format!("jackstay_upstream_window_changes_total{{{labels}}}")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_grow_for_a_large_response_and_shrink_afterwards() {
    let cluster = TestCluster::new(1);
    let proxy = start(&cluster).await;
    let client = proxy.client().await;
    assert_eq!(client.get("/version").await.unwrap().status, 200);
    assert!(window(&proxy).await <= INITIAL);
    let begin = Instant::now();
    let response = client.get("/bytes?size=20000000").await.unwrap();
    assert_eq!(response.body.len(), 20_000_000);
    // 77 round trips with windows of 256 KiB.
    assert!(begin.elapsed() < 77 * 2 * DELAY, "{:?}", begin.elapsed());
    assert!(changes(&proxy, "grown").await >= 1.0);
    until("the windows shrink", async || {
        window(&proxy).await <= INITIAL && changes(&proxy, "shrunk").await >= 1.0
    })
    .await;
    until("nothing is lent", async || lent(&proxy).await == 0.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_stops_reading_is_charged_and_stalls_no_other_stream() {
    let cluster = TestCluster::new(1);
    let proxy = start(&cluster).await;
    // All share one connection, whose window is 8 MiB at first.
    cluster.state.add_token("alice", User::new("alice", &[]));
    let token = cluster.certs.anonymous().token("alice");
    let reader = proxy.client_with(&token).await;
    assert_eq!(reader.get("/version").await.unwrap().status, 200);
    // They read fast, and then stop.
    let mut stalled = Vec::new();
    for _ in 0..3 {
        let client = proxy.client_with(&token).await;
        let sent = client.send(Method::GET, "/bytes?size=100000000", &[], String::new());
        let mut body = soon("the head", sent).await.unwrap().into_body();
        let mut read = 0;
        while read < 2 << 20 {
            read += soon("data", next_data(&mut body)).await.unwrap().unwrap().len();
        }
        stalled.push((client, body));
    }
    until("the windows shrink", async || window(&proxy).await <= INITIAL).await;
    assert!(lent(&proxy).await > 1e6, "what the streams hold stays charged");
    for _ in 0..20 {
        let reply = tokio::time::timeout(PATIENCE, reader.get("/bytes?size=1000000")).await;
        assert_eq!(reply.expect("the other streams continue").unwrap().body.len(), 1_000_000);
    }
    drop(stalled);
    until("nothing is lent", async || lent(&proxy).await == 0.0).await;
}

/// Opens a stream whose body does not end, and reads it.
async fn read_bulk(client: Arc<Client>) {
    // Refused when memory is short.
    let sent = client.send(Method::GET, "/bytes?size=1000000000", &[], String::new());
    let Ok(response) = sent.await else { return };
    let mut body = response.into_body();
    while let Ok(Some(_)) = next_data(&mut body).await {}
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_are_given_back_when_a_thousand_bulk_streams_begin() {
    let cluster = TestCluster::new(1);
    // The responses of a third of the streams fit.
    let proxy = start_with(&cluster, MemoryLimit::Bytes(64 << 20)).await;
    cluster.state.add_token("alice", User::new("alice", &[]));
    let token = cluster.certs.anonymous().token("alice");
    let identity = proxy.client().await;
    let mut streams = JoinSet::new();
    streams.spawn(read_bulk(Arc::new(proxy.client_with(&token).await)));
    until("the windows grow", async || window(&proxy).await > INITIAL && lent(&proxy).await > 1e6)
        .await;
    for _ in 0..50 {
        let client = Arc::new(proxy.client_with(&token).await);
        for _ in 0..20 {
            streams.spawn(read_bulk(Arc::clone(&client)));
        }
    }
    until("the windows are given back", async || {
        let reply = soon("a read of the identity", identity.get("/version")).await.unwrap();
        assert_eq!(reply.status, 200);
        window(&proxy).await <= INITIAL && lent(&proxy).await == 0.0
    })
    .await;
    for _ in 0..10 {
        let reply = soon("a read of the identity", identity.get("/version")).await.unwrap();
        assert_eq!(reply.status, 200);
    }
    // Those that were refused have ended.
    while streams.try_join_next().is_some() {}
    assert!(streams.len() > 50, "{} streams continue", streams.len());
}
