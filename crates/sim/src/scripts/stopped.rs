//! Apiservers that are stopped, as by SIGSTOP: the kernel acknowledges packets and completes TCP handshakes, and the
//! process sends nothing.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use http::Method;
use jackstay::observe::events::{Event, EventKind};
use jackstay_sys::clock;
use tokio::time::sleep;

use super::http1;
use super::objects::{CONFIG_MAPS, config_map};
use super::requests::{ANSWERED_WITHIN, Watch, create, get, send, until_read};
use super::testbed::{Proxy, Testbed, all, until};
use crate::faults::FaultKind;
use crate::peers::transport::{Client, Outgoing};

/// The promise for a write in flight on a stopped process.
const WRITE_ENDS: Duration = Duration::from_secs(8);
/// When requests are sent, after the stop.
const SENT_AFTER: [Duration; 3] =
    [Duration::from_millis(100), Duration::from_secs(1), Duration::from_secs(3)];
/// More reads at once than the budget of hedges allows to hedge.
const MANY: usize = 200;

/// The only apiserver stops. Every request gets 503 in time, none is sent to it later, and watches continue afterwards.
pub async fn only_server(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    let running = Watch::start(&client, &testbed.watch_path()).await;
    // There are connections for as many requests as are sent later.
    testbed.set_faults(0, |faults| faults.delay = Duration::from_millis(300));
    for reply in all((0..MANY).map(|_| get(&client, CONFIG_MAPS))).await {
        assert_eq!(reply.status, 200);
    }
    testbed.set_faults(0, |faults| faults.delay = Duration::ZERO);
    testbed.begin(0, FaultKind::Stop);
    let unready = async {
        let took = until("/readyz fails", || !proxy.is_serving()).await;
        testbed.check("/readyz fails", took, Duration::from_secs(2));
    };
    let new_watch = async {
        sleep(SENT_AFTER[1]).await;
        Watch::start(&client, &testbed.watch_path()).await
    };
    let errors = async {
        expect_errors(&testbed, &client).await;
        testbed.end(0, FaultKind::Stop);
        let took = until_read(&client).await;
        testbed.check("a read after the stop", took, Duration::from_secs(1));
    };
    let (new_watch, (), ()) = tokio::join!(new_watch, unready, errors);
    // A request that was sent on a silent connection would arrive now.
    let silent = SENT_AFTER[1..].iter().map(|after| path_after(*after)).collect::<Vec<_>>();
    let arrived = testbed.received(|r| silent.contains(&r.path) || r.verb == "create");
    assert!(arrived.is_empty(), "sent on silent connections: {arrived:?}");
    let version = testbed.create("event");
    for watch in [&running, &new_watch] {
        watch.expect_versions(&[version]).await;
    }
}

fn path_after(after: Duration) -> String {
    format!("{CONFIG_MAPS}/read-{}", after.as_millis())
}

/// Sends a read after each of [`SENT_AFTER`], [`MANY`] with the first one, and a write with the last one.
async fn expect_errors(testbed: &Testbed, client: &Client) {
    let many = (0..MANY).map(|_| (SENT_AFTER[0], Outgoing::get(CONFIG_MAPS)));
    let reads = SENT_AFTER.map(|after| (after, Outgoing::get(path_after(after))));
    let write = Outgoing::json(Method::POST, CONFIG_MAPS, &config_map("write", "1"));
    let requests = many.chain(reads).chain([(SENT_AFTER[2], write)]);
    let replies = requests.map(|(after, outgoing)| async move {
        sleep(after).await;
        (after, send(client, outgoing).await)
    });
    for (after, reply) in all(replies).await {
        let message = reply.own_error(503);
        assert!(message.contains("10.0.0.1"), "{message}");
        testbed.check(&format!("an error {after:?} after the stop"), reply.took, ANSWERED_WITHIN);
    }
}

/// The kernel of a process that is stopped for 3 s buffers a part of a large body, and then closes its window. The
/// write succeeds when the process continues.
pub async fn large_write(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    let mut large = config_map("large", "1");
    large["data"]["large"] = "x".repeat(700_000).into();
    testbed.begin(0, FaultKind::Stop);
    let stopped = async {
        sleep(Duration::from_secs(3)).await;
        testbed.end(0, FaultKind::Stop);
    };
    let large = send(&client, Outgoing::json(Method::POST, CONFIG_MAPS, &large));
    let (large, small, ()) = tokio::join!(large, create(&client, "small"), stopped);
    assert_eq!((large.status, small.status), (201, 201));
    assert_eq!(proxy.lost_connections(), [""; 0]);
}

/// A write in flight on a process that stops gets 502, over HTTP/2.
pub async fn write(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let client = testbed.client(&proxy);
    let message = async { create(&client, "a").await.own_error(502) };
    expect_502(&testbed, &proxy, message).await;
}

/// An upgrade has a connection of its own, on which jackstay sends no PINGs and the kernel acknowledges all data. Only
/// the other connections show that the process is stopped.
pub async fn upgrade(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let line = "POST /api/v1/namespaces/default/pods/o1/exec?command=sh";
    let headers = "connection: Upgrade\r\nupgrade: SPDY/3.1\r\ncontent-length: 0\r\n";
    let message = async {
        let response = http1::request(&testbed, &proxy, line, headers).await;
        assert!(response.starts_with("HTTP/1.1 502"), "{response}");
        assert!(!response.to_ascii_lowercase().contains("retry-after"), "{response}");
        response
    };
    expect_502(&testbed, &proxy, message).await;
}

/// Stops the process that has received a request, before it responds, and checks the message of its 502.
async fn expect_502(testbed: &Testbed, proxy: &Proxy, message: impl Future<Output = String>) {
    let set = |hang| (0..2).for_each(|at| testbed.set_faults(at, |faults| faults.hang = hang));
    set(true);
    let received = |at: usize| {
        let name = format!("apiserver-{at}");
        !testbed.received(|r| r.server == name && r.verb == "create").is_empty()
    };
    let stopped = Cell::new((0, clock::now()));
    let stop = async {
        until("the write is in flight", || received(0) || received(1)).await;
        stopped.set((usize::from(received(1)), clock::now()));
        testbed.begin(stopped.get().0, FaultKind::Stop);
    };
    let (message, ()) = tokio::join!(message, stop);
    let (server, at) = stopped.get();
    testbed.check("a write ends after the stop", clock::elapsed(at), WRITE_ENDS);
    assert!(message.contains("may or may not have been carried out"), "{message}");
    assert!(message.contains("stopped: kernel answers"), "{message}");
    // Connections for clients drain and are not found dead.
    let mut dead = proxy.lost_connections();
    dead.retain(|lost| lost.contains(" to dead"));
    assert_eq!(dead, [""; 0]);
    set(false);
    testbed.end(server, FaultKind::Stop);
}

/// The endpoint is suspect, with one event, before its connections drain, and then says that the process is stopped.
pub async fn suspect(testbed: Rc<Testbed>) {
    let proxy = testbed.start_connected(|_| {}).await;
    let before = proxy.events().last().map_or(0, |event| event.seq);
    let stopped = testbed.choose(2);
    testbed.begin(stopped, FaultKind::Stop);
    proxy.until_state(stopped, "suspect").await;
    let reason = proxy.reason(stopped);
    assert!(reason.starts_with("PING unanswered on every connection"), "{reason}");
    let is_of =
        |event: &Event, kind, to| event.kind == kind && event.to == to && event.seq > before;
    let drain =
        || proxy.events().into_iter().find(|one| is_of(one, EventKind::Connection, "draining"));
    until("its connections drain", || drain().is_some()).await;
    let mut suspect = proxy.events();
    suspect.retain(|event| is_of(event, EventKind::Endpoint, "suspect"));
    assert_eq!(suspect.len(), 1, "one event: {suspect:?}");
    assert_eq!((&*suspect[0].from, suspect[0].bad), ("ready", true));
    let address = proxy.endpoint(stopped)["address"].as_str().map(str::to_owned);
    assert_eq!(Some(&suspect[0].name), address.as_ref());
    assert!(drain().is_some_and(|drain| suspect[0].seq < drain.seq), "{:?}", proxy.events());
    until("the reason says that the process is stopped", || {
        let is_stopped = proxy.reason(stopped).contains("stopped: kernel answers");
        proxy.state(stopped) == "connecting" && is_stopped
    })
    .await;
    testbed.end(stopped, FaultKind::Stop);
    proxy.until_connected(2).await;
}
