//! Every apiserver is stopped, as by SIGSTOP: its kernel acknowledges packets and completes TCP handshakes, and its
//! process sends nothing. A load balancer with such backends looks the same.

use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::watch_recorder::WatchRecorder;
use crate::support::{CONFIGMAPS, PATIENCE, TestCluster, config_map, join_all, pause, soon, until};
use http::StatusCode;
use jackstay_apiserver::client::Client;
use std::time::Duration;
use tokio::time::timeout;

/// When requests are sent, after the apiservers stopped.
const SENT_AFTER: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(3)];
const PROMISE: Duration = Duration::from_millis(1_500);

/// More parallel reads than the budget of hedges allows to hedge.
const MANY: usize = 200;

/// Sends a read after each of [`SENT_AFTER`], [`MANY`] with the first one, and a write with the last one. Asserts
/// that each gets 503 within the promised time.
async fn expect_errors(client: &Client, fault: &str) {
    let reads = SENT_AFTER.map(|after| async move {
        pause(after).await;
        let start = Stopwatch::start();
        let reply = client.get(&format!("{CONFIGMAPS}/read-{}", after.as_millis())).await.unwrap();
        (after, start.elapsed(), reply)
    });
    let write = async {
        pause(SENT_AFTER[2]).await;
        let start = Stopwatch::start();
        let reply = client.post(CONFIGMAPS, &config_map("write", "1")).await.unwrap();
        (SENT_AFTER[2], start.elapsed(), reply)
    };
    let many = async {
        pause(SENT_AFTER[0]).await;
        let start = Stopwatch::start();
        let reads = (0..MANY).map(|_| async {
            let reply = client.get(CONFIGMAPS).await.unwrap();
            assert_eq!(reply.status, 503, "{:?}", reply.body);
        });
        join_all(reads).await;
        start.elapsed()
    };
    let [first, second, third] = reads;
    let all = Box::pin(async { tokio::join!(many, first, second, third, write) });
    let (many, first, second, third, write) = soon("all responses", all).await;
    check_figure(&format!("{fault}: the slowest of {MANY} reads fails"), many, PROMISE);
    for (request, (after, took, reply)) in
        [("read", first), ("read", second), ("read", third), ("write", write)]
    {
        check_figure(
            &format!("{fault}: a {request} {after:?} after the stop fails"),
            took,
            PROMISE,
        );
        assert_eq!(reply.status, 503, "{request} {after:?}: {:?}", reply.body);
        assert!(!reply.headers.contains_key("retry-after"));
        let message = reply.json()["message"].as_str().unwrap().to_owned();
        assert!(message.contains("127.0.0.1"), "{message}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_fail_within_the_promise_when_the_only_server_is_stopped() {
    let (cluster, fault) = (TestCluster::new(1), "the only server stopped");
    let proxy = cluster.start().await;
    let client = proxy.client().await;
    let running = WatchRecorder::start(&client, &cluster.watch_path()).await;
    // There are connections for as many requests as are sent later.
    cluster.servers[0].set_faults(|faults| faults.delay = Duration::from_millis(300));
    let reads = (0..MANY).map(|_| client.get(CONFIGMAPS));
    for reply in soon("reads before the fault", join_all(reads)).await {
        assert_eq!(reply.unwrap().status, 200);
    }
    cluster.servers[0].set_faults(|faults| faults.delay = Duration::ZERO);
    for server in &cluster.servers {
        server.stop();
    }
    let unready = async {
        let start = Stopwatch::start();
        until("/readyz fails", async || proxy.page("/readyz").await.starts_with("HTTP/1.1 503"))
            .await;
        let name = format!("{fault}: /readyz fails");
        check_figure(&name, start.elapsed(), Duration::from_secs(2));
    };
    let new_watch = async {
        pause(SENT_AFTER[1]).await;
        WatchRecorder::start(&client, &cluster.watch_path()).await
    };
    let errors = async {
        expect_errors(&client, fault).await;
        let start = Stopwatch::start();
        for server in &cluster.servers {
            server.cont();
        }
        let mut requests = 0;
        until("reads succeed", async || {
            requests += 1;
            client.get(CONFIGMAPS).await.unwrap().status == StatusCode::OK
        })
        .await;
        println!("{requests} reads after the return");
        let name = format!("{fault}: a read succeeds after the return");
        check_figure(&name, start.elapsed(), Duration::from_secs(1));
    };
    let all = Box::pin(async { tokio::join!(new_watch, unready, errors) });
    let (new_watch, (), ()) = timeout(3 * PATIENCE, all).await.expect("the new watch begins");
    // A request that was sent into silence would arrive now.
    let path = |path: &str| format!("{CONFIGMAPS}{path}");
    let silent = [path("/read-1000"), path("/read-3000")];
    let arrived = cluster.state.audit().select(|r| silent.contains(&r.path) || r.verb == "create");
    assert!(arrived.is_empty(), "sent on silent connections: {arrived:?}");
    cluster.create_config_map("event");
    for watch in [&running, &new_watch] {
        until("each watch has the event", async || watch.has_seen("event")).await;
        assert_eq!((watch.end(), watch.events().len()), (None, 1));
    }
}
