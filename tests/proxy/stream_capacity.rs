//! The use of upstream streams: by many watches, by cancelled watches, and when no stream is free.

use crate::support::{
    CONFIGMAPS, PATIENCE, Proxy, TestCluster, config_map, join_all, soon, until, wait,
    without_suspicion,
};
use http::Method;
use jackstay_apiserver::identity::User;
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
    // Ten watches at a time. jackstay opens another connection before the present ones are full, and the test
    // waits for its handshake, so no watch should have to wait for a stream.
    let other_client = proxy.client_with(&cluster.certs.anonymous()).await;
    let mut waited = 0.0;
    while watches.len() < 350 {
        until("connections for ten more watches are live", async || {
            100 * proxy.connections("identity").await.len() >= watches.len() + 10
        })
        .await;
        // The pool of the worker learns of a new connection later than `/status`. It has done so when the
        // worker, which has one thread, has served another request.
        soon("a response of the worker", other_client.get(CONFIGMAPS)).await.unwrap();
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

/// h2 keeps the memory of a connection's busiest time until the connection closes.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn idle_connection_that_carried_many_streams_is_replaced() {
    let cluster = TestCluster::new(1);
    cluster.state.add_token("alice", User::new("alice", &[]));
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client_with(&cluster.certs.anonymous()).await;
    let bearer = [("authorization", "Bearer alice")];
    let get = async || client.send(Method::GET, CONFIGMAPS, &bearer, "").await.unwrap().status();
    let only_connection = async |class| {
        let connections = proxy.connections(class).await;
        (connections.len() == 1).then(|| connections[0].clone())
    };
    // The first request is sent on a connection of clients whose token is not proven.
    for _ in 0..2 {
        assert_eq!(get().await, 200);
    }
    let few_streams = only_connection("unproven-token").await;
    let before = only_connection("token").await;
    assert!(few_streams.is_some() && before.is_some(), "{few_streams:?} {before:?}");
    let path = cluster.watch_path();
    let watches = (0..70).map(|_| client.send(Method::GET, &path, &bearer, ""));
    let watches = soon("70 watches", join_all(watches)).await;
    assert!(watches.iter().all(|watch| watch.as_ref().unwrap().status() == 200));
    assert_eq!(only_connection("token").await, before);
    drop(watches);
    wait::until_within(2 * PATIENCE, "the idle connection is replaced", async || {
        only_connection("token").await.is_some_and(|now| Some(now) != before)
    })
    .await;
    assert_eq!(only_connection("unproven-token").await, few_streams);
    assert_eq!(get().await, 200);
    assert_eq!(proxy.lost_connections().await, [""; 0]);
}

/// Asserts that the connections in `connections` are still live, and replaces the list by all live connections.
async fn expect_none_lost(proxy: &Proxy, connections: &mut Vec<String>) {
    let now = proxy.connections("identity-0").await;
    assert!(connections.iter().all(|c| now.contains(c)), "{connections:?} {now:?}");
    *connections = now;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_thousand_cancelled_watches_lose_no_connection() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client().await;
    let path = cluster.watch_path();
    // The watches below may take longer than the header timeout, which ends connections without a request.
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    let counters = cluster.servers[0].counters();
    // First make jackstay open enough connections for 1,000 watches and 2,000 cancelled ones, which keep their
    // streams for a while: this test is about losing connections, not about opening them.
    let (mut clients, mut watches) = (Vec::new(), Vec::new());
    while watches.len() < 3000 {
        if watches.len() % 1000 == 0 {
            clients.push(proxy.client().await);
        }
        let client = clients.last().unwrap();
        let some = (0..10).map(|_| client.watch(&path));
        watches.extend(soon("ten watches", join_all(some)).await.into_iter().map(Result::unwrap));
    }
    drop((watches, clients));
    until("the server's watches end", async || cluster.watches(0) == 0).await;
    let mut connections = proxy.connections("identity-0").await;
    let lost = proxy.lost_connections().await;
    for round in 0..3 {
        let all = (0..1000).map(|_| client.send(Method::GET, &path, &[], ""));
        // A slow machine needs long for a thousand requests.
        let responses = timeout(6 * PATIENCE, join_all(all)).await.expect("a thousand watches");
        let refused = responses.iter().filter(|r| !r.as_ref().is_ok_and(|r| r.status() == 200));
        assert_eq!(refused.count(), 0, "round {round}");
        expect_none_lost(&proxy, &mut connections).await;
        drop(responses);
        // Other requests are not affected.
        assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200, "round {round}");
        until("the server's watches end", async || cluster.watches(0) == 0).await;
        expect_none_lost(&proxy, &mut connections).await;
    }
    assert!(!client.is_closed(), "jackstay closed the client's connection");
    // Now the watches are cancelled before the response. One connection may do that to 2,000.
    for round in 0..2 {
        let client = proxy.client().await;
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
        expect_none_lost(&proxy, &mut connections).await;
        assert!(!client.is_closed(), "jackstay closed the client's connection");
    }
    println!("{} connections, none lost", connections.len());
    assert_eq!(
        proxy.lost_connections().await,
        lost,
        "a connection was lost between two reads of /status"
    );
    assert_eq!(counters.goaways.load(Relaxed), 0, "the server sent a GOAWAY");
}

/// All requests share one upstream connection, whose streams may be more than the 100 of kube-apiserver.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn stalled_streams_above_128_do_not_stall_another_request() {
    let cluster = TestCluster::new(1);
    cluster.servers[0].set_faults(|faults| faults.max_streams = Some(500));
    let proxy = cluster
        .start_with(|config| {
            without_suspicion(config);
            config.upstreams[0].connections.max = 1;
            config.upstreams[0].connections.max_streams = 500;
        })
        .await;
    let (stalled_client, client) = (proxy.client().await, proxy.client().await);
    let mut stalled = Vec::new();
    for _ in 0..200 {
        let download = stalled_client.send(Method::GET, "/bytes?size=1000000000", &[], "");
        stalled.push(soon("the head of a download", download).await.unwrap());
    }
    // The server has data for all streams in turn, so the others fill their windows while this one transfers 128 times
    // its own.
    let size = 128 * 256 * 1024;
    let path = format!("/bytes?size={size}");
    let reply = soon("a download beside stalled ones", client.get(&path)).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.body.len()), (200, size));
    assert_eq!(proxy.connections("identity-0").await.len(), 1);
    drop(stalled);
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
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
    // The last tenth of the streams is reserved for other requests.
    let start = Instant::now();
    let refused = soon("a refusal", client.get(&path)).await.unwrap();
    println!("a watch without a stream gets 429 after {:?}", start.elapsed());
    assert_eq!(refused.status, 429);
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.json()["kind"], "Status");
    let waits = proxy.metric("jackstay_stream_waits_total").await;
    for _ in 0..20 {
        assert_eq!(soon("a read", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    }
    let waited = proxy.metric("jackstay_stream_waits_total").await - waits;
    assert!(waited < 1.0, "{waited} reads waited");
    // Two reads occupy the last streams, and a write is refused.
    cluster.servers[0].set_faults(|faults| faults.hang = true);
    let (one, two) = (client.get(CONFIGMAPS), client.get(CONFIGMAPS));
    let refused_write = async {
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
    let all = async { tokio::join!(one, two, refused_write) };
    let (one, two, ()) = soon("all three responses", all).await;
    assert_eq!((one.unwrap().status.as_u16(), two.unwrap().status.as_u16()), (200, 200));
    assert!(proxy.metric("jackstay_streams_exhausted").await >= 2.0);
    drop(watches.pop());
    let mut new_watch = soon("a watch", client.watch(&path)).await.unwrap();
    assert_eq!(client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap().status, 201);
    soon("an event", new_watch.next()).await.unwrap().unwrap();
}
