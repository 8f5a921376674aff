//! Watches in a total outage: they are held, so that no client lists again when it is over.

use crate::support::{Certs, MAPS, Proxy, World, map, refusing, soon, until};
use crate::watches::Follower;
use jackstay::demo::apiserver::ApiServerHandle;
use jackstay::demo::apiserver::kinds::find;
use jackstay::demo::client::Client;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const JSON: &str = "application/json";

async fn held(proxy: &Proxy) -> usize {
    proxy.metric("jackstay_held_watches").await as usize
}

fn watch_from(world: &World) -> String {
    format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version())
}

fn kill(world: &World) {
    world.servers.iter().for_each(ApiServerHandle::kill);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn running_watches_are_held_and_go_on_at_the_return() {
    const WATCHES: usize = 200;
    let world = World::new(2);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = watch_from(&world);
    let mut followers = Vec::new();
    for _ in 0..WATCHES {
        followers.push(Follower::start(&client, &path, JSON).await);
    }
    kill(&world);
    until("all are held", async || held(&proxy).await == WATCHES).await;
    let kind = find("", "v1", "configmaps").unwrap();
    world.cluster.create(kind, "default", map("missed", "1"), false).unwrap();
    let server = &world.servers[0];
    let before = server.counters().accepted.load(Relaxed);
    server.restart().unwrap();
    let has_it = |follower: &Follower| follower.events().iter().any(|event| event.1 == "missed");
    until("every watch has the event", async || followers.iter().all(has_it)).await;
    for follower in &followers {
        assert_eq!((follower.end(), follower.events().len()), (None, 1));
    }
    until("none is held", async || held(&proxy).await == 0).await;
    // 100 streams a connection, of which a tenth is kept free; one of the prober, one in reserve.
    let connections = server.counters().accepted.load(Relaxed) - before;
    println!("{WATCHES} watches came back over {connections} connections");
    assert!(connections <= 6, "{connections} connections");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_watch_ends_cleanly_at_its_own_deadline() {
    let world = World::new(2);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = format!("{}&timeoutSeconds=6", watch_from(&world));
    let start = Instant::now();
    let mut watch = client.watch(&path).await.unwrap();
    kill(&world);
    let end = soon("its end", watch.next()).await;
    assert!(matches!(end, Ok(None)), "{end:?}");
    assert!(start.elapsed() >= Duration::from_secs(6), "{:?}", start.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn new_watch_is_held_and_then_answered_with_429() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing(), refusing()]));
    let client = proxy.client(&certs.credentials()).await;
    let start = Instant::now();
    let path = format!("{MAPS}?watch=1&resourceVersion=1&timeoutSeconds=3");
    let reply = soon("an answer", client.get(&path)).await.unwrap();
    assert!(start.elapsed() >= Duration::from_secs(3), "{:?}", start.elapsed());
    assert_eq!(reply.status, 429, "{:?}", reply.body);
    assert!(!reply.headers.contains_key("retry-after"));
    let status = reply.json();
    assert_eq!((&status["kind"], &status["reason"]), (&"Status".into(), &"TooManyRequests".into()));
    assert!(status["message"].as_str().unwrap().contains("127.0.0.1"), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn new_watch_is_held_until_an_apiserver_returns() {
    let world = World::new(2);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = watch_from(&world);
    kill(&world);
    let followed = Follower::start(&client, &path, JSON);
    let back = async {
        until("it is held", async || held(&proxy).await == 1).await;
        world.servers[1].restart().unwrap();
    };
    let (watch, ()) = tokio::join!(followed, back);
    let kind = find("", "v1", "configmaps").unwrap();
    world.cluster.create(kind, "default", map("a", "1"), false).unwrap();
    until("it has an event", async || watch.events().len() == 1).await;
}

/// A client that leaves takes its held watches with it, running ones and new ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_watches_of_a_client_that_leaves_are_dropped() {
    let world = World::new(1);
    let proxy = world.start().await;
    let who = world.certs.credentials();
    for http1 in [false, true] {
        let connect = async || {
            if http1 {
                return Client::connect_http1(proxy.addr, &who).await.unwrap();
            }
            Client::connect(proxy.addr, &who).await.unwrap()
        };
        let (running, new) = (connect().await, connect().await);
        let path = watch_from(&world);
        let watch = running.watch(&path).await.unwrap();
        kill(&world);
        until("it is held", async || held(&proxy).await == 1).await;
        let asking = tokio::spawn(async move { new.get(&path).await.map(|reply| reply.status) });
        until("both are held", async || held(&proxy).await == 2).await;
        asking.abort();
        drop((watch, running));
        until("none is held", async || held(&proxy).await == 0).await;
        world.servers[0].restart().unwrap();
        proxy.ready(1).await;
    }
}

/// SIGTERM in an outage: a new watch gets 429, and its client retries elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn held_new_watch_is_answered_when_its_listener_ends() {
    let world = World::new(1);
    // Its turn is within a quarter of it.
    let drain = Duration::from_secs(12);
    let proxy = world.start_with(|config| config.shutdown.drain_timeout = drain).await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = watch_from(&world);
    kill(&world);
    let drained = async {
        until("it is held", async || held(&proxy).await == 1).await;
        proxy.running.drain();
    };
    let both = async { tokio::join!(client.get(&path), drained) };
    let (reply, ()) = soon("an answer", both).await;
    assert_eq!(reply.unwrap().status, 429);
}
