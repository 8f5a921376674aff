//! Outages: all servers gone, one that is unwell, one that is stopped.

use crate::peer::{Act, Peers, black_hole};
use crate::support::figures::within;
use crate::support::stopwatch::Stopwatch;
use crate::support::{Certs, MAPS, PATIENCE, World, map, pass, refusing, soon, until};
use http::Method;
use jackstay::demo::apiserver::ApiServerHandle;
use jackstay::demo::client::Client;
use jackstay::demo::faulty_relay::FaultyRelay;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Every kind of request but a watch fails in time, as a Status without Retry-After.
async fn all_fail(client: &Client, what: &str) {
    let start = Instant::now();
    let requests = [
        (Method::GET, MAPS.to_owned()),
        (Method::POST, MAPS.to_owned()),
        (Method::DELETE, format!("{MAPS}/a")),
        (Method::GET, "/api/v1/namespaces/default/pods/p/log".to_owned()),
    ];
    let all = requests.into_iter().map(|(method, path)| async move {
        let start = Stopwatch::start();
        let body = if method == Method::POST { "{}" } else { "" };
        let reply = client.request(method, &path, &[], body).await.unwrap();
        let took = start.elapsed();
        assert_eq!(reply.status, 503, "{path}: {:?}", reply.body);
        assert!(!reply.headers.contains_key("retry-after"), "{path}");
        let status = reply.json();
        assert_eq!(status["kind"], "Status", "{path}");
        assert!(status["message"].as_str().unwrap().contains("127.0.0.1"), "{status}");
        took
    });
    let took = soon(what, crate::hostile::join_all(all)).await;
    println!("{what}: all failed within {:?}", start.elapsed());
    let slowest = took.into_iter().max().unwrap();
    within(&format!("{what}: slowest failure"), slowest, Duration::from_millis(1_500));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn refused_everywhere() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing(), refusing(), refusing()]));
    let client = proxy.client(&certs.credentials()).await;
    for _ in 0..3 {
        all_fail(&client, "every apiserver refuses").await;
    }
    let page = proxy.page("/readyz").await;
    assert!(page.starts_with("HTTP/1.1 503") || page.starts_with("HTTP/1.1 500"), "{page}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn swallowed_everywhere() {
    let certs = Certs::new();
    let holes = [black_hole(), black_hole()];
    let addresses = holes.each_ref().map(|hole| hole.local_addr().unwrap());
    let proxy = certs.start(certs.config(&addresses));
    let client = proxy.client(&certs.credentials()).await;
    all_fail(&client, "every apiserver swallows").await;
    all_fail(&client, "every apiserver swallows").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn killed_and_back() {
    let world = World::new(2);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let tokens = proxy.client(&world.certs.nobody().token("alice")).await;
    world.cluster.add_token("alice", jackstay::demo::apiserver::identity::User::new("alice", &[]));
    assert_eq!(tokens.get(MAPS).await.unwrap().status, 200);
    world.servers.iter().for_each(ApiServerHandle::kill);
    all_fail(&client, "every apiserver is killed").await;
    for _ in 0..10 {
        // Backoff has time to grow to its cap.
        assert_eq!(client.get(MAPS).await.unwrap().status, 503);
    }
    let start = Stopwatch::start();
    world.servers[1].restart().unwrap();
    for (client, who) in [(&client, "a certificate"), (&tokens, "a token")] {
        let mut asked = 0;
        until("traffic flows", async || {
            asked += 1;
            client.get(MAPS).await.unwrap().status == 200
        })
        .await;
        println!("{asked} requests of {who}");
        let name = format!("traffic of {who} after the first endpoint returned");
        within(&name, start.elapsed(), Duration::from_secs(1));
    }
}

/// The prober's own connection falls silent: whoever asks the admin endpoint still gets an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_suspect_probe_holds_nothing_up() {
    let world = World::new(2);
    let holes: Vec<_> =
        world.servers.iter().map(|server| FaultyRelay::start(server.addr).unwrap()).collect();
    let addresses: Vec<_> = holes.iter().map(|hole| hole.addr).collect();
    let proxy = world.certs.start(world.certs.config(&addresses));
    proxy.ready(2).await;
    holes[0].refuse_new(true);
    assert!(holes[0].lose_all().unwrap() > 0);
    let suspected = async || {
        let page = soon("an answer", proxy.page("/events")).await;
        page.contains("\"to\": \"suspect\"")
    };
    until("a connection is suspect", suspected).await;
    let out = async || {
        let endpoints = soon("an answer", proxy.endpoints()).await;
        endpoints.iter().filter(|endpoint| endpoint["state"] == "ejected").count() == 1
    };
    until("the silent endpoint is out", out).await;
    holes[0].heal();
    until("it is ready again", async || {
        let endpoints = soon("an answer", proxy.endpoints()).await;
        endpoints.iter().all(|endpoint| endpoint["state"] == "ready")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn alive_is_not_well() {
    let world = World::new(3);
    let proxy = world.start().await;
    let client = proxy.client(&world.certs.credentials()).await;
    let mut watches = Vec::new();
    let version = world.cluster.version();
    for _ in 0..12 {
        let path = format!("{MAPS}?watch=1&resourceVersion={version}");
        watches.push(client.watch(&path).await.unwrap());
    }
    let on_it = |at: usize| world.servers[at].counters().watches.load(Relaxed);
    until("all watches run", async || on_it(0) + on_it(1) + on_it(2) == 12).await;
    let sick = (0..3).find(|&at| on_it(at) > 0).unwrap();
    let before = on_it(sick);
    world.servers[sick].set_ready(false);
    let address = world.servers[sick].addr.to_string();
    until("it is degraded", async || {
        proxy.endpoints().await.iter().any(|e| e["address"] == *address && e["state"] == "degraded")
    })
    .await;
    world.cluster.audit().clear();
    for n in 0..40 {
        assert_eq!(client.get(MAPS).await.unwrap().status, 200);
        if n == 20 {
            assert_eq!(client.post(MAPS, &map("a", "1")).await.unwrap().status, 201);
        }
    }
    let name = world.servers[sick].name();
    let there = world.cluster.audit().select(|r| r.server == name && r.path != "/readyz");
    assert!(there.is_empty(), "new requests went to a server that is not ready: {there:?}");
    until("its watches have moved", async || on_it(sick) == 0).await;
    let moved = format!("{before} have moved, and none was cut");
    until(&moved, async || on_it(0) + on_it(1) + on_it(2) == 12).await;
    for watch in &mut watches {
        let event = soon("an event", watch.next()).await.unwrap().unwrap();
        assert_eq!(event["object"]["metadata"]["name"], "a");
    }
    // Nobody is well: everybody is used.
    world.servers.iter().for_each(|server| server.set_ready(false));
    until("all are degraded", async || {
        proxy.endpoints().await.iter().all(|e| e["state"] == "degraded")
    })
    .await;
    for _ in 0..10 {
        assert_eq!(client.get(MAPS).await.unwrap().status, 200, "panic mode");
    }
    world.servers.iter().for_each(|server| server.set_ready(true));
    proxy.ready(3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn reads_go_on_when_a_server_is_stopped() {
    let world = World::new(3);
    let proxy = world.start().await;
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicUsize::new(0));
    let mut readers = Vec::new();
    for _ in 0..4 {
        let client = proxy.client(&world.certs.credentials()).await;
        let (stop, done) = (stop.clone(), done.clone());
        readers.push(tokio::spawn(async move {
            let mut slowest = Duration::ZERO;
            while !stop.load(Relaxed) {
                let start = Stopwatch::start();
                let reply = client.get(MAPS).await.unwrap();
                assert_eq!(reply.status, 200, "{:?}", reply.body);
                slowest = slowest.max(start.elapsed());
                done.fetch_add(1, Relaxed);
                // It is not the machine that is tried: reads without a pause take all of a small one.
                pass(Duration::from_millis(5)).await;
            }
            slowest
        }));
    }
    let pass = async |count: usize| {
        let from = done.load(Relaxed);
        until("reads go on", async || done.load(Relaxed) > from + count).await;
    };
    pass(50).await;
    for server in &world.servers {
        server.stop();
        pass(200).await;
        server.cont();
        proxy.ready(3).await;
        pass(50).await;
    }
    stop.store(true, Relaxed);
    let mut slowest = Duration::ZERO;
    for reader in readers {
        slowest = slowest.max(reader.await.unwrap());
    }
    within("slowest read while a server is stopped", slowest, Duration::from_millis(600));
}

/// All flows fall silent at once, and new ones too, as behind a cut cable: what was sent fails with
/// its connection, and what may be sent again does not begin to wait only then.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn all_go_dark_at_once() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let hole = FaultyRelay::start(peers.addresses[0]).unwrap();
    let proxy = certs.start(certs.config(&[hole.addr]));
    proxy.ready(1).await;
    let client = proxy.client(&certs.credentials()).await;
    // Both on the one connection there is: the write ends with it, and says when that was.
    peers.script.play(std::iter::repeat_n(Act::Hang, 8));
    let start = Stopwatch::start();
    let in_flight = async |method, body| {
        let reply = client.request(method, MAPS, &[], body).await.unwrap();
        (reply.status.as_u16(), start.elapsed())
    };
    let cut = async {
        until("both are in flight", async || peers.script.seen().len() >= 2).await;
        hole.silence_new(true);
        assert!(hole.lose_all().unwrap() > 0);
        start.elapsed()
    };
    let all =
        async { tokio::join!(in_flight(Method::GET, ""), in_flight(Method::POST, "{}"), cut) };
    let ((read, read_end), (write, write_end), cut) = soon("all ends", all).await;
    println!("the read failed {:?} after the write", read_end.saturating_sub(write_end));
    let write_failed = write_end.saturating_sub(cut);
    within("all dark: a write in flight fails", write_failed, Duration::from_millis(2_500));
    assert_eq!((read, write), (503, 502));
    // It has been without a connection that works for longer than a request waits that finds none.
    assert!(read_end < write_end + Duration::from_secs(1));
    all_fail(&client, "every apiserver went dark").await;
}

/// A read waits on apiservers that have all stopped, and nobody else is to be found: who comes back
/// is asked long before those are given up (20 s).
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_read_that_waits_finds_who_comes_back() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 3);
    let holes: Vec<_> =
        peers.addresses.iter().map(|&peer| FaultyRelay::start(peer).unwrap()).collect();
    let addresses: Vec<_> = holes.iter().map(|hole| hole.addr).collect();
    let proxy = certs.start(certs.config(&addresses));
    proxy.ready(3).await;
    let client = proxy.client(&certs.credentials()).await;
    // Each has one connection for it, which is acknowledged and says no more.
    for hole in &holes {
        hole.refuse_new(true);
    }
    peers.script.play(std::iter::repeat_n(Act::Mute, 3));
    let back = async {
        let nobody = r#"jackstay_hedges_total{outcome="nobody""#;
        until("nobody is to be found", async || proxy.metric(nobody).await >= 1.0).await;
        holes[2].refuse_new(false);
        Instant::now()
    };
    let both = async { tokio::join!(client.get(MAPS), back) };
    // As long as it takes: how it came is what counts.
    let (reply, back) = tokio::time::timeout(4 * PATIENCE, both).await.unwrap();
    println!("answered {:?} after the return", back.elapsed());
    assert_eq!(reply.unwrap().status, 200);
    assert!(peers.script.seen().len() >= 4, "{:?}", peers.script.seen());
    let hedged = proxy.metric(r#"jackstay_hedges_total{outcome="hedge""#).await;
    assert!(hedged >= 1.0, "it came only when a connection had been given up");
}

/// Nothing comes back on the one connection there is, and it is not dead yet. Who asks now is told
/// so: a write that was sent there would share its end, and nobody could say any more whether it was
/// carried out.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn no_write_is_sent_into_the_dark() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let hole = FaultyRelay::start(peers.addresses[0]).unwrap();
    let mut config = certs.config(&[hole.addr]);
    // It stays suspect for long.
    config.upstreams[0].health.dead_after = Duration::from_millis(4_500);
    let proxy = certs.start(config);
    proxy.ready(1).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.play([Act::Hang]);
    let in_flight = async {
        let reply = client.post(MAPS, &map("first", "1")).await.unwrap();
        assert_eq!(reply.status, 502, "it shares the end of its connection");
        reply
    };
    let later = async {
        until("it is in flight", async || peers.script.seen().len() == 1).await;
        hole.silence_new(true);
        assert!(hole.lose_all().unwrap() > 0);
        let mut writes = tokio::task::JoinSet::new();
        let start = Instant::now();
        // One after the other: where our own timers run late there is no verdict.
        loop {
            let client = proxy.client(&certs.credentials()).await;
            writes.spawn(async move {
                let start = Instant::now();
                let reply = client.post(MAPS, &map("later", "1")).await.unwrap();
                (start.elapsed(), reply)
            });
            let pause = pass(Duration::from_millis(100));
            tokio::select! {
                Some(write) = writes.join_next() => {
                    let (took, reply) = write.unwrap();
                    assert_eq!(reply.status, 503, "{:?}", reply.body);
                    println!("told after {took:?}, {:?} after it went dark", start.elapsed());
                    return reply;
                }
                () = pause => {}
            }
        }
    };
    let told = async {
        tokio::select! {
            reply = later => reply,
            reply = in_flight => panic!("sent into the dark until its end: {:?}", reply.body),
        }
    };
    // Boxed: it holds both.
    let reply = Box::pin(soon("an answer", told)).await;
    let message = reply.json()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("does not answer: PING unanswered"), "{message}");
    assert_eq!(peers.script.seen().len(), 1);
}

/// SIGTERM in an outage: a watch that looks for an apiserver hears of it, and ends cleanly.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_watch_that_finds_nobody_ends_with_its_listener() {
    let world = World::new(2);
    // A watch's turn is within a quarter of it; what is left at its end is cut.
    let drain = Duration::from_secs(12);
    let proxy = world.start_with(|config| config.shutdown.drain_timeout = drain).await;
    let client = proxy.client(&world.certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion={}", world.cluster.version());
    let mut watch = client.watch(&path).await.unwrap();
    assert_eq!(client.post(MAPS, &map("a", "1")).await.unwrap().status, 201);
    soon("an event", watch.next()).await.unwrap().unwrap();
    world.servers.iter().for_each(ApiServerHandle::kill);
    all_fail(&client, "every apiserver is killed").await;
    let start = Instant::now();
    proxy.running.drain();
    assert!(soon("the watch's end", watch.next()).await.unwrap().is_none(), "a clean end");
    println!("a watch without an apiserver ended {:?} after the drain began", start.elapsed());
}
