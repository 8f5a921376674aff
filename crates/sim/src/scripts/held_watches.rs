//! Watches while no apiserver can be reached: jackstay holds them open without a stream, so that clients need not list
//! again after the outage.

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use jackstay_core::drain::{MAX_SOCKETS_CLOSE, watch_spread};
use jackstay_sys::clock;
use tokio::task::{AbortHandle, spawn_local};
use tokio::time::sleep;

use super::http1;
use super::requests::{Watch, create, expect_503, get};
use super::testbed::{Testbed, all, until};
use crate::faults::FaultKind;
use crate::peers::transport::Client;

/// The drain timeout of the scripts that drain.
const DRAIN: Duration = Duration::from_secs(12);

/// Two hundred running watches are held, and continue after the outage.
pub async fn resume(testbed: Rc<Testbed>) {
    const WATCHES: u64 = 200;
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    let path = testbed.watch_path();
    let watches = all((0..WATCHES).map(|_| Watch::start(&client, &path))).await;
    testbed.begin_all(FaultKind::Blackhole);
    proxy.until_held(WATCHES).await;
    let missed = testbed.create("missed");
    let back = testbed.choose(testbed.servers());
    testbed.end(back, FaultKind::Blackhole);
    let returned = clock::now();
    for watch in &watches {
        watch.expect_versions(&[missed]).await;
    }
    // It is back when it has been ready for 3 s, and the watches continue within 5 s.
    let took = clock::elapsed(returned);
    testbed.check("the last watch continues", took, Duration::from_secs(9));
    proxy.until_held(0).await;
    // A connection has 100 streams, so 200 watches need 2 or 3 connections. One more belongs to the prober and one is in
    // reserve. A handshake that takes long is raced by a second one, of which one is closed.
    let server = testbed.server(back);
    until("few connections are open", || server.counters().open.load(Relaxed) <= 6).await;
    testbed.end(1 - back, FaultKind::Blackhole);
}

/// A held watch ends cleanly at its `timeoutSeconds`, and a new one gets 429 then.
pub async fn timeouts(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    let path = |seconds: u64| format!("{}&timeoutSeconds={seconds}", testbed.watch_path());
    let began = clock::now();
    let running = Watch::start(&client, &path(6)).await;
    testbed.begin_all(FaultKind::Kill);
    proxy.until_held(1).await;
    let new = get(&client, &path(3)).await;
    let message = new.own_error(429);
    assert_eq!(new.json()["reason"], "TooManyRequests");
    assert!(message.contains("10.0.0."), "{message}");
    running.until_end().await;
    for (took, seconds) in [(new.took, 3), (clock::elapsed(began), 6)] {
        let promise = Duration::from_secs(seconds);
        assert!(took >= promise, "it ended after {took:?}, before {promise:?}");
        testbed.check(
            "a watch ends after its timeout",
            took.saturating_sub(promise),
            Duration::from_secs(1),
        );
    }
    testbed.end_all(FaultKind::Kill);
}

/// A new watch is held until an apiserver returns.
pub async fn new(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    testbed.begin_all(FaultKind::Kill);
    let path = testbed.watch_path();
    let back = testbed.choose(testbed.servers());
    let restart = async {
        proxy.until_held(1).await;
        // A new watch is held for up to 30 s. An apiserver is back when it has been ready for 3 s, and the watch waits for
        // up to an eighth of the outage then.
        sleep(Duration::from_secs(20).mul_f64(fastrand::f64())).await;
        testbed.end(back, FaultKind::Kill);
    };
    let (watch, ()) = tokio::join!(Watch::start(&client, &path), restart);
    let version = testbed.create("a");
    watch.expect_versions(&[version]).await;
    testbed.end(1 - back, FaultKind::Kill);
}

/// Held watches are dropped when their client disconnects: those that were running before the outage, and new ones,
/// over HTTP/2 and HTTP/1.1.
pub async fn disconnect(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    for http2 in [true, false] {
        let (path, client) = (testbed.watch_path(), testbed.client(&proxy));
        let running = Watch::start(&client, &path).await;
        testbed.begin_all(FaultKind::Kill);
        proxy.until_held(1).await;
        let new = if http2 {
            start_held(testbed.client(&proxy), path)
        } else {
            let (testbed, proxy) = (Rc::clone(&testbed), proxy.clone());
            let request = async move {
                http1::request(&testbed, &proxy, &format!("GET {path}"), "").await;
            };
            spawn_local(request).abort_handle()
        };
        proxy.until_held(2).await;
        new.abort();
        let new = proxy.until_held(1).await;
        drop(running);
        client.close_connections();
        let running = proxy.until_held(0).await;
        for took in [new, running] {
            testbed.check("a held watch is dropped", took, Duration::from_millis(100));
        }
        testbed.end_all(FaultKind::Kill);
        proxy.until_connected(testbed.servers()).await;
    }
}

fn start_held(client: Client, path: String) -> AbortHandle {
    spawn_local(async move { get(&client, &path).await }).abort_handle()
}

/// SIGTERM in an outage ends a held watch cleanly, and a new one gets 429: the client repeats it at the next process.
pub async fn drain(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|config| config.shutdown.drain_timeout = DRAIN).await;
    let client = testbed.client(&proxy);
    let running = Watch::start(&client, &testbed.watch_path()).await;
    assert_eq!(create(&client, "a").await.status, 201);
    until("the watch has the event", || running.count() == 1).await;
    testbed.begin_all(FaultKind::Kill);
    until("no endpoint serves clients", || !proxy.is_serving()).await;
    expect_503(&testbed, &client).await;
    let path = testbed.watch_path();
    let drained = async {
        proxy.until_held(2).await;
        proxy.drain();
        clock::now()
    };
    let new = async { (get(&client, &path).await, clock::now()) };
    let ((new, new_end), drained) = tokio::join!(new, drained);
    running.until_end().await;
    assert_eq!((new.status, running.count()), (429, 1));
    let promise = MAX_SOCKETS_CLOSE + watch_spread(DRAIN);
    let took = new_end.max(clock::now()).saturating_duration_since(drained);
    testbed.check("the last watch ends in the drain", took, promise);
    testbed.end_all(FaultKind::Kill);
}
