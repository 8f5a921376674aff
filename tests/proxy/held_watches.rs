//! Watches while no apiserver is reachable: jackstay holds them open without an upstream stream, so that
//! clients need not list again after the outage.

use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, Certs, Proxy, TestCluster, refusing_address, soon, until};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The number of held watches.
async fn held(proxy: &Proxy) -> usize {
    proxy.metric("jackstay_held_watches").await as usize
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn running_watches_are_held_and_resume_after_the_outage() {
    const WATCHES: usize = 200;
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    let mut watches = Vec::new();
    for _ in 0..WATCHES {
        watches.push(WatchRecorder::start(&client, &path).await);
    }
    cluster.kill_all();
    until("all watches are held", async || held(&proxy).await == WATCHES).await;
    cluster.create_config_map("missed");
    let server = &cluster.servers[0];
    server.restart().unwrap();
    until("every watch has the event", async || {
        watches.iter().all(|watch| watch.has_seen("missed"))
    })
    .await;
    for watch in &watches {
        assert_eq!((watch.end(), watch.events().len()), (None, 1));
    }
    until("no watch is held", async || held(&proxy).await == 0).await;
    // Watches use 90 of the 100 streams of a connection, so 200 watches need 3 connections. One more belongs to
    // the prober and one is in reserve. A handshake that takes long is raced by a second one, of which one is closed.
    let open = || server.counters().open.load(Relaxed);
    until("few connections are open", async || open() <= 6).await;
    println!("{WATCHES} watches resumed on {} connections", open());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_watch_ends_cleanly_at_its_timeout_seconds() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let path = format!("{}&timeoutSeconds=6", cluster.watch_path());
    let start = Instant::now();
    let mut watch = client.watch(&path).await.unwrap();
    cluster.kill_all();
    let end = soon("the end of the watch", watch.next()).await;
    assert!(matches!(end, Ok(None)), "not a clean end: {end:?}");
    assert!(start.elapsed() >= Duration::from_secs(6), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn new_watch_is_held_and_gets_429_at_its_timeout_seconds() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing_address(), refusing_address()]));
    let client = proxy.client().await;
    let start = Instant::now();
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=1&timeoutSeconds=3");
    let reply = soon("a response", client.get(&path)).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(reply.status, 429, "{:?}", reply.body);
    assert!(!reply.headers.contains_key("retry-after"));
    let status = reply.json();
    assert_eq!((&status["kind"], &status["reason"]), (&"Status".into(), &"TooManyRequests".into()));
    assert!(status["message"].as_str().unwrap().contains("127.0.0.1"), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn new_watch_is_held_until_an_apiserver_returns() {
    let cluster = TestCluster::new(2);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    cluster.kill_all();
    let watch = WatchRecorder::start(&client, &path);
    let restart = async {
        until("the watch is held", async || held(&proxy).await == 1).await;
        cluster.servers[1].restart().unwrap();
    };
    let (watch, ()) = tokio::join!(watch, restart);
    cluster.create_config_map("a");
    until("the watch has an event", async || watch.events().len() == 1).await;
}

/// Both watches that were running before the outage and watches that begin during it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_watches_are_dropped_when_their_client_disconnects() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    for http2 in [true, false] {
        let (first, second) = (proxy.client_over(http2).await, proxy.client_over(http2).await);
        let path = cluster.watch_path();
        let running_watch = first.watch(&path).await.unwrap();
        cluster.kill_all();
        until("the running watch is held", async || held(&proxy).await == 1).await;
        let new_watch = tokio::spawn(async move { second.get(&path).await.map(drop) });
        until("both watches are held", async || held(&proxy).await == 2).await;
        new_watch.abort();
        drop((running_watch, first));
        until("no watch is held", async || held(&proxy).await == 0).await;
        cluster.servers[0].restart().unwrap();
        proxy.wait_connected(1).await;
    }
}

/// SIGTERM during an outage. After the 429 the client repeats the watch, on the listener of the next process.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_new_watch_gets_429_when_its_listener_drains() {
    let cluster = TestCluster::new(1);
    // Watches end within the first quarter of the drain timeout, here 3 s.
    let drain = Duration::from_secs(12);
    let proxy = cluster.start_with(|config| config.shutdown.drain_timeout = drain).await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    cluster.kill_all();
    let drained = async {
        until("the watch is held", async || held(&proxy).await == 1).await;
        proxy.running.drain();
    };
    let both = async { tokio::join!(client.get(&path), drained) };
    let (reply, ()) = soon("a response", both).await;
    assert_eq!(reply.unwrap().status, 429);
}
