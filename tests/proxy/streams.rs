//! Streams: many watches, watches cancelled by the thousand, and none left.

use crate::hostile::join_all;
use crate::support::{MAPS, PATIENCE, World, map, patient, soon, until};
use http::Method;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use tokio::time::timeout;

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn many_watches_use_few_connections_and_none_waits() {
    let world = World::new(1);
    let proxy = world.start_with(|config| *config = patient(config.clone())).await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    let mut watches = Vec::new();
    let mut slowest = Duration::ZERO;
    // Ten by ten: a connection is opened before the last one is full, with nobody waiting for it.
    // Its handshake takes as long as it takes, and here the watches do not run ahead of it.
    let stranger = proxy.client(&world.certs.nobody()).await;
    let mut waited = 0.0;
    while watches.len() < 350 {
        until("there is room for ten more", async || {
            100 * proxy.connections("identity").await.len() >= watches.len() + 10
        })
        .await;
        // Where it shows as live, the pool may be about to hear of it: the worker has one thread.
        soon("a turn of the worker", stranger.get(MAPS)).await.unwrap();
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
    println!("350 watches on {used:?}, the slowest began after {slowest:?}");
    assert_eq!(used.len(), 4, "{used:?}");
    assert!(waited < 1.0, "{waited} watches waited");
    let kind = jackstay::demo::apiserver::kinds::find("", "v1", "configmaps").unwrap();
    world.cluster.create(kind, "default", map("a", "1"), false).unwrap();
    for watch in &mut watches {
        soon("an event", watch.next()).await.unwrap().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_thousand_watches_cancelled_at_once() {
    let world = World::new(1);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    // Its first request; what follows may take longer than a client has for that.
    assert_eq!(client.get(MAPS).await.unwrap().status, 200);
    let counters = world.servers[0].counters();
    // Streams enough for a thousand watches and two thousand cancelled ones, which keep their places
    // for a while: what follows is about connections that are lost, not about opening them.
    let (mut clients, mut warm) = (Vec::new(), Vec::new());
    while warm.len() < 3000 {
        if warm.len() % 1000 == 0 {
            clients.push(proxy.client(&world.certs.credentials()).await);
        }
        let client = clients.last().unwrap();
        let some = (0..10).map(|_| client.watch(&path));
        warm.extend(soon("ten watches", join_all(some)).await.into_iter().map(Result::unwrap));
    }
    drop((warm, clients));
    until("the server's watches end", async || counters.watches.load(Relaxed) == 0).await;
    let mut before = proxy.connections("identity-0").await;
    let lost = proxy.lost_connections().await;
    for round in 0..3 {
        let all = (0..1000).map(|_| client.send(Method::GET, &path, &[], ""));
        // A starved machine has a lot to do here.
        let responses = timeout(6 * PATIENCE, join_all(all)).await.expect("a thousand watches");
        let refused = responses.iter().filter(|r| !r.as_ref().is_ok_and(|r| r.status() == 200));
        assert_eq!(refused.count(), 0, "round {round}");
        let now = proxy.connections("identity-0").await;
        assert!(before.iter().all(|c| now.contains(c)), "round {round}: {before:?} {now:?}");
        before = now;
        drop(responses);
        // Beside the cancellations, others go on.
        assert_eq!(client.get(MAPS).await.unwrap().status, 200, "round {round}");
        until("the server's watches end", async || counters.watches.load(Relaxed) == 0).await;
        let now = proxy.connections("identity-0").await;
        assert!(before.iter().all(|c| now.contains(c)), "round {round}: {before:?} {now:?}");
    }
    // Cancelled before they are answered.
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
        assert_eq!(client.get(MAPS).await.unwrap().status, 200, "round {round}");
        until("the server's watches end", async || counters.watches.load(Relaxed) == 0).await;
        let now = proxy.connections("identity-0").await;
        assert!(before.iter().all(|c| now.contains(c)), "round {round}: {before:?} {now:?}");
    }
    println!("{} connections, none lost", before.len());
    assert_eq!(proxy.lost_connections().await, lost, "one came and went between two looks");
    assert!(!client.is_closed(), "no GOAWAY for the client");
    assert_eq!(counters.goaways.load(Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn streams_run_out_visibly() {
    let world = World::new(1);
    let proxy = world
        .start_with(|config| {
            *config = patient(config.clone());
            config.upstreams[0].connections.max = 1;
            config.upstreams[0].connections.max_streams = 20;
        })
        .await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    let mut watches = Vec::new();
    for _ in 0..18 {
        watches.push(soon("a watch", client.watch(&path)).await.unwrap());
    }
    // The last tenth is not for watches.
    let start = Instant::now();
    let refused = soon("a refusal", client.get(&path)).await.unwrap();
    println!("a watch above the share of watches is refused after {:?}", start.elapsed());
    assert_eq!(refused.status, 429);
    assert_eq!(refused.headers["retry-after"], "1");
    assert_eq!(refused.json()["kind"], "Status");
    let waits = proxy.metric("jackstay_stream_waits_total").await;
    for _ in 0..20 {
        assert_eq!(soon("a read", client.get(MAPS)).await.unwrap().status, 200);
    }
    let waited = proxy.metric("jackstay_stream_waits_total").await - waits;
    assert!(waited < 1.0, "{waited} reads waited");
    // Then nothing is left at all.
    world.servers[0].hang(true);
    let (one, two) = (client.get(MAPS), client.get(MAPS));
    let third = async {
        until("two reads hang", async || world.servers[0].counters().in_flight.load(Relaxed) >= 2)
            .await;
        let write = soon("a refusal", client.post(MAPS, &map("never", "1"))).await.unwrap();
        assert_eq!(write.status, 429);
        assert_eq!(write.headers["retry-after"], "1");
        world.servers[0].hang(false);
    };
    let (one, two, ()) = soon("all three", async { tokio::join!(one, two, third) }).await;
    assert_eq!((one.unwrap().status.as_u16(), two.unwrap().status.as_u16()), (200, 200));
    assert!(proxy.metric("jackstay_streams_exhausted").await >= 2.0);
    drop(watches.pop());
    let mut again = soon("a watch", client.watch(&path)).await.unwrap();
    assert_eq!(client.post(MAPS, &map("a", "1")).await.unwrap().status, 201);
    soon("an event", again.next()).await.unwrap().unwrap();
}
