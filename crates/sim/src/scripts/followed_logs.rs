//! Followed logs on a lost path: they cannot be resumed at their position, so they wait for it, and everything else
//! leaves.

use std::rc::Rc;
use std::time::Duration;

use jackstay_sys::clock;

use super::objects::CONFIG_MAPS;
use super::requests::{FollowedLog, Watch, create, get};
use super::testbed::{Proxy, Testbed, until};

async fn start(testbed: &Testbed) -> Proxy {
    // Only the fault moves watches.
    testbed.start_connected(|config| config.upstreams[0].rebalance = false).await
}

/// The packets of the established connections are lost for 8 s. A log waits for them; a write and a watch use another
/// connection at once.
pub async fn waits(testbed: Rc<Testbed>) {
    let proxy = start(&testbed).await;
    let client = testbed.client(&proxy);
    let watch = Watch::start(&client, &testbed.watch_path()).await;
    let mut log = FollowedLog::start(&client).await;
    log.expect_lines(1..=4).await;
    testbed.lose_flows();
    let lost = clock::now();
    let unresponsive = || proxy.streams_in_state("unresponsive");
    until("only the log remains on the connection", || unresponsive() == [1]).await;
    assert_eq!(create(&client, "a").await.status, 201);
    let version = testbed.cluster().version();
    watch.expect_versions(&[version]).await;
    // A PING is due within 1.4 s, its connection is dead 2 s later, and the watch continues within 50 ms.
    testbed.check("the watch continues", clock::elapsed(lost), Duration::from_millis(3_500));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(unresponsive(), [1], "the log waits");
    testbed.restore_flows();
    log.expect_lines(5..=8).await;
    let draining = || proxy.streams_in_state("draining");
    until("its connection takes no new requests", || draining() == [1]).await;
    drop(log);
    until("the connection is closed with its last stream", || draining().is_empty()).await;
    assert_eq!(watch.end(), None);
}

/// A write in flight on the lost connection ends, while a log waits there.
pub async fn write_ends(testbed: Rc<Testbed>) {
    let proxy = start(&testbed).await;
    let client = testbed.client(&proxy);
    let mut log = FollowedLog::start(&client).await;
    log.expect_lines(1..=1).await;
    testbed.set_faults(0, |faults| faults.hang_paths = &[CONFIG_MAPS]);
    let lose = async {
        let received = || !testbed.received(|r| r.verb == "create").is_empty();
        until("the write is in flight", received).await;
        testbed.lose_flows();
        clock::now()
    };
    let write = async { (create(&client, "a").await, clock::now()) };
    let ((write, end), lost) = tokio::join!(write, lose);
    write.own_error(502);
    testbed.check(
        "the write ends",
        end.saturating_duration_since(lost),
        Duration::from_millis(3_500),
    );
    assert_eq!(proxy.streams_in_state("unresponsive"), [1], "the log waits");
    testbed.set_faults(0, |faults| faults.hang_paths = &[]);
    testbed.restore_flows();
    log.expect_lines(2..=6).await;
}

/// The path is lost for longer than `tunnel_dead_after`. The end of the log must not look complete.
pub async fn reset(testbed: Rc<Testbed>) {
    let dead_after = Duration::from_secs(4);
    let proxy = testbed.start_connected(|config| {
        config.upstreams[0].health.tunnel_dead_after = Duration::from_secs(4);
    });
    let proxy = proxy.await;
    let client = testbed.client(&proxy);
    let mut log = FollowedLog::start(&client).await;
    log.expect_lines(1..=1).await;
    testbed.lose_flows();
    let lost = clock::now();
    let end = loop {
        match log.next().await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("the end of the log is clean"),
            Err(failure) => break failure,
        }
    };
    // Its last line may be on the way, and a PING is due after 1 s.
    let took = clock::elapsed(lost);
    assert!(took >= dead_after, "{end:?} after {took:?}");
    testbed.check("the log is reset", took, dead_after + Duration::from_millis(1_500));
    let events = proxy.events().into_iter();
    let mut changes = events.filter(|event| event.detail.starts_with("class identity"));
    let died = changes.any(|event| (&*event.from, &*event.to) == ("unresponsive", "dead"));
    assert!(died, "{:?}", proxy.events());
}

/// An apiserver that closes an idle connection is no failure, and appears in no event.
pub async fn idle_close(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    assert_eq!(get(&client, CONFIG_MAPS).await.status, 200);
    let counters = || {
        let server = testbed.server(0);
        let accepted = &server.counters().accepted;
        accepted.load(std::sync::atomic::Ordering::Relaxed)
    };
    let before = counters();
    testbed.server(0).goaway();
    until("the connections are replaced", || counters() > before).await;
    proxy.until_connected(1).await;
    assert_eq!(proxy.lost_connections(), [""; 0]);
    assert_eq!(get(&client, CONFIG_MAPS).await.status, 200);
}
