//! Streams: many watches, thousands of cancelled watches, and no free stream.

use crate::support::{
    CONFIGMAPS, PATIENCE, Proxy, TestCluster, config_map, join_all, soon, until, without_suspicion,
};
use http::Method;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn many_watches_use_few_connections_without_waiting() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    let mut watches = Vec::new();
    let mut slowest = Duration::ZERO;
    // Ten at a time: jackstay opens a connection before the last one is full, so that no watch
    // waits for it. The watches here wait until its handshake is done.
    let other_client = proxy.client_with(&cluster.certs.anonymous()).await;
    let mut waited = 0.0;
    while watches.len() < 350 {
        until("there is room for ten more", async || {
            100 * proxy.connections("identity").await.len() >= watches.len() + 10
        })
        .await;
        // When `/status` shows the connection as live, the pool may not know it yet: the worker has
        // one thread.
        soon("a turn of the worker", other_client.get(CONFIGMAPS)).await.unwrap();
        let waits = proxy.metric("jackstay_stream_waits_total").await;
        let all = (0..10).map(|_| {
            let (client, path) = (&client, &path);
            async move {
                let start = Instant::now();
                let watch = client.watch(path).await.unwrap();
                (watch, start.elapsed())
            }
        });
        for (watch, took) in soon("ten watches", join_all(all)).await {
            watches.push(watch);
            slowest = slowest.max(took);
        }
        waited += proxy.metric("jackstay_stream_waits_total").await - waits;
    }
    let endpoint = &proxy.endpoints().await[0];
    let used: Vec<_> = endpoint["connections"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|c| c["watches"].as_u64().filter(|watches| *watches > 0))
        .collect();
    println!("350 watches on {used:?}, the slowest started after {slowest:?}");
    assert_eq!(used.len(), 4, "{used:?}");
    assert!(waited < 1.0, "{waited} watches waited");
    cluster.create_config_map("a");
    for watch in &mut watches {
        soon("an event", watch.next()).await.unwrap().unwrap();
    }
}

/// The connections now, which include all of those before.
async fn kept(proxy: &Proxy, before: Vec<String>) -> Vec<String> {
    let now = proxy.connections("identity-0").await;
    assert!(before.iter().all(|c| now.contains(c)), "{before:?} {now:?}");
    now
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_thousand_cancelled_watches_lose_no_connection() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    // The first request; those below may take longer than the header timeout.
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    let counters = cluster.servers[0].counters();
    // Enough streams for a thousand watches and two thousand cancelled ones, which keep their
    // streams for a while: this test is about lost connections, not about opening them.
    let (mut clients, mut warm) = (Vec::new(), Vec::new());
    while warm.len() < 3000 {
        if warm.len() % 1000 == 0 {
            clients.push(proxy.client().await);
        }
        let client = clients.last().unwrap();
        let some = (0..10).map(|_| client.watch(&path));
        warm.extend(soon("ten watches", join_all(some)).await.into_iter().map(Result::unwrap));
    }
    drop((warm, clients));
    until("the server's watches end", async || cluster.watches(0) == 0).await;
    let mut before = proxy.connections("identity-0").await;
    let lost = proxy.lost_connections().await;
    for round in 0..3 {
        let all = (0..1000).map(|_| client.send(Method::GET, &path, &[], ""));
        // A slow machine needs long for this.
        let responses = timeout(6 * PATIENCE, join_all(all)).await.expect("a thousand watches");
        let refused = responses.iter().filter(|r| !r.as_ref().is_ok_and(|r| r.status() == 200));
        assert_eq!(refused.count(), 0, "round {round}");
        before = kept(&proxy, before).await;
        drop(responses);
        // Other requests are not affected.
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "round {round}");
        until("the server's watches end", async || cluster.watches(0) == 0).await;
        before = kept(&proxy, before).await;
    }
    // Cancelled before the response.
    for round in 0..2 {
        let mut all: Vec<_> =
            (0..1000).map(|_| Box::pin(client.send(Method::GET, &path, &[], ""))).collect();
        std::future::poll_fn(|cx| {
            for future in &mut all {
                let _ = future.as_mut().poll(cx);
            }
            std::task::Poll::Ready(())
        })
        .await;
        drop(all);
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "round {round}");
        until("the server's watches end", async || cluster.watches(0) == 0).await;
        before = kept(&proxy, before).await;
    }
    println!("{} connections, none lost", before.len());
    assert_eq!(
        proxy.lost_connections().await,
        lost,
        "a connection was lost between two reads of /status"
    );
    assert!(!client.is_closed(), "no GOAWAY for the client");
    assert_eq!(counters.goaways.load(Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_get_429_when_all_streams_are_used() {
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| {
            without_suspicion(config);
            config.upstreams[0].connections.max = 1;
            config.upstreams[0].connections.max_streams = 20;
        })
        .await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    let mut watches = Vec::new();
    for _ in 0..18 {
        watches.push(soon("a watch", client.watch(&path)).await.unwrap());
    }
    // The last tenth of the streams is not for watches.
    let start = Instant::now();
    let refused = soon("a refusal", client.get(&path)).await.unwrap();
    println!("a watch above the share of watches gets 429 after {:?}", start.elapsed());
    assert_eq!(refused.status, 429);
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.json()["kind"], "Status");
    let waits = proxy.metric("jackstay_stream_waits_total").await;
    for _ in 0..20 {
        assert_eq!(soon("a read", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    }
    let waited = proxy.metric("jackstay_stream_waits_total").await - waits;
    assert!(waited < 1.0, "{waited} reads waited");
    // Then no stream is left.
    cluster.servers[0].set_faults(|faults| faults.hang = true);
    let (one, two) = (client.get(CONFIGMAPS), client.get(CONFIGMAPS));
    let third = async {
        until("two reads hang", async || {
            cluster.servers[0].counters().in_flight.load(Relaxed) >= 2
        })
        .await;
        let write =
            soon("a refusal", client.post(CONFIGMAPS, &config_map("never", "1"))).await.unwrap();
        assert_eq!(write.status, 429);
        assert_eq!(write.headers["retry-after"], "1");
        cluster.servers[0].set_faults(|faults| faults.hang = false);
    };
    let (one, two, ()) = soon("all three", async { tokio::join!(one, two, third) }).await;
    assert_eq!((one.unwrap().status.as_u16(), two.unwrap().status.as_u16()), (200, 200));
    assert!(proxy.metric("jackstay_streams_exhausted").await >= 2.0);
    drop(watches.pop());
    let mut again = soon("a watch", client.watch(&path)).await.unwrap();
    assert_eq!(client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap().status, 201);
    soon("an event", again.next()).await.unwrap().unwrap();
}
