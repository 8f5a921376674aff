//! A write is carried out at most once, whatever fails. Every write has an Audit-ID, by which the audit of the
//! servers is compared with the responses of the clients.

use crate::scripted_peer::{Action, Reply, setup};
use crate::support::http2::{
    DATA, END_HEADERS, END_STREAM, HEADERS, NO_ERROR, REFUSED_STREAM, field_block, frame, reset,
};
use crate::support::{CONFIGMAPS, TestCluster, config_map, h2_error, long_form, soon, until, wait};
use http::Method;
use jackstay_apiserver::client::Client;
use jackstay_apiserver::faulty_relay::Direction;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The number of concurrent clients.
const CLIENTS: usize = 16;

/// The test fails if no write ends for this long.
const STALL_TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn writes_are_carried_out_at_most_once_under_faults() {
    let writes = if long_form() { 10_000 } else { 400 };
    let cluster = TestCluster::new(3);
    let (relays, proxy) = cluster.start_behind_relays(|_| {}).await;
    cluster.state.audit().clear();

    let next = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicUsize::new(0));
    let finished = Arc::new(AtomicBool::new(false));
    let outcomes = Arc::new(Mutex::new(HashMap::<String, String>::new()));
    let start = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|index| {
            let (next, done, outcomes) = (next.clone(), done.clone(), outcomes.clone());
            let (addr, credentials) = (proxy.addr, cluster.certs.credentials());
            tokio::spawn(async move {
                let client = if index % 4 == 0 {
                    Client::connect_http1(addr, &credentials).await.unwrap()
                } else {
                    Client::connect(addr, &credentials).await.unwrap()
                };
                loop {
                    let n = next.fetch_add(1, Relaxed);
                    if n >= writes {
                        return;
                    }
                    let id = format!("write-{n}");
                    let headers = [("content-type", "application/json"), ("audit-id", id.as_str())];
                    let object = config_map(&format!("w{n}"), "1").to_string();
                    let reply = client.request(Method::POST, CONFIGMAPS, &headers, object).await;
                    let outcome = match reply {
                        Ok(reply) if reply.status == 502 || reply.status == 503 => {
                            assert!(!reply.headers.contains_key("retry-after"));
                            assert_eq!(reply.json()["kind"], "Status", "{:?}", reply.body);
                            reply.status.as_u16().to_string()
                        }
                        Ok(reply) => reply.status.as_u16().to_string(),
                        Err(error) => {
                            if let Some(h2) = h2_error(&error) {
                                assert_ne!(h2.reason(), Some(h2::Reason::REFUSED_STREAM));
                                assert!(!h2.is_go_away());
                            }
                            // The response was interrupted.
                            format!("error: {error}")
                        }
                    };
                    outcomes.lock().unwrap().insert(id, outcome);
                    done.fetch_add(1, Relaxed);
                    assert!(!client.is_closed(), "client {index}: its connection was closed");
                }
            })
        })
        .collect();

    let inject_faults = async {
        let mut step = 0;
        while !finished.load(Relaxed) {
            let at = (step / 8) % 3;
            let (server, relay) = (&cluster.servers[at], &relays[at]);
            match step % 8 {
                0 => server.kill(),
                1 => server.restart().unwrap(),
                2 => server.reset_connections(),
                3 => {
                    relay.silence_all(Direction::Both);
                }
                4 => {
                    relay.clear_faults();
                    relay.reset_all();
                }
                5 => server.stop(),
                6 => server.cont(),
                _ => server.goaway(),
            }
            step += 1;
            // The next fault follows after 25 writes, or after 250 ms if the writes wait.
            let from = done.load(Relaxed);
            let enough = async || done.load(Relaxed) >= from + 25 || finished.load(Relaxed);
            wait::within(Duration::from_millis(250), enough).await;
        }
        // All faults end, so that jackstay recovers.
        if step % 8 == 1 {
            cluster.servers[(step - 1) / 8 % 3].restart().unwrap();
        }
        for (server, relay) in cluster.servers.iter().zip(&relays) {
            server.cont();
            relay.clear_faults();
        }
        step
    };
    let all_clients = async {
        for client in clients {
            client.await.unwrap();
        }
        finished.store(true, Relaxed);
    };
    // There is no limit for the whole test, because a slow machine needs long.
    let stall = async {
        let mut last = 0;
        while wait::within(STALL_TIMEOUT, async || done.load(Relaxed) != last).await {
            last = done.load(Relaxed);
        }
        last
    };
    let steps = tokio::select! {
        (steps, ()) = async { tokio::join!(inject_faults, all_clients) } => steps,
        count = stall => panic!("no write has ended for {STALL_TIMEOUT:?}, after {count} of {writes}"),
    };

    let mut record_counts = HashMap::<String, usize>::new();
    for record in cluster.state.audit().records() {
        if let Some(id) = record.audit_id {
            *record_counts.entry(id).or_default() += 1;
        }
    }
    let outcomes = outcomes.lock().unwrap().clone();
    let mut summary = BTreeMap::<&str, usize>::new();
    for (id, outcome) in &outcomes {
        let count = record_counts.get(id).copied().unwrap_or(0);
        assert!(count <= 1, "{id} ({outcome}) reached the servers {count} times");
        match outcome.as_str() {
            "201" => assert_eq!(count, 1, "{id}"),
            // jackstay had no stream or no endpoint for the write and has not sent it. This happens rarely, on slow
            // machines.
            "429" | "503" => assert_eq!(count, 0, "{id}"),
            _ => {}
        }
        *summary.entry(outcome).or_default() += 1;
    }
    println!("{writes} writes under {steps} faults in {:?}: {summary:?}", start.elapsed());
    assert_eq!(outcomes.len(), writes);
    let known = |o: &str| matches!(o, "201" | "502" | "429" | "503") || o.starts_with("error");
    assert!(summary.keys().all(|outcome| known(outcome)), "{summary:?}");
    proxy.wait_all("ready").await;
}

/// The server reads the whole request and then resets it with `REFUSED_STREAM`, by which it declares that it has
/// not processed the request (RFC 9113, section 8.7).
fn refused() -> Action {
    Action::after_body(Action::raw(|id| reset(id, REFUSED_STREAM)))
}

/// Bodies are buffered up to a limit, so that their requests can be sent again. A larger body is sent once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn write_is_retried_only_when_its_body_is_buffered() {
    let (peers, proxy, client) = setup(2).await;
    let send = async |size: usize, action: Action| {
        peers.set_actions([action]);
        let headers = [("content-type", "application/json")];
        let sent = client.request(Method::POST, CONFIGMAPS, &headers, "x".repeat(size));
        let reply = soon("a response", sent).await.unwrap();
        let retry_after =
            reply.headers.get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        (reply.status.as_u16(), peers.requests().len(), retry_after)
    };
    let (buffered, too_large) = (2 << 20, (3 << 20) + 1);
    assert_eq!(send(buffered, refused()).await, (200, 2, None));
    // jackstay no longer has the start of the body. Retry-After asks the client to retry, which is safe because the
    // server has not processed the write.
    assert_eq!(send(too_large, refused()).await, (502, 1, Some("1".to_owned())));
    // The server may have carried out this write, so the response has no Retry-After.
    let lost = Action::after_body(Action::Close);
    assert_eq!(send(too_large, lost).await, (502, 1, None));
    let refused = proxy.metric("jackstay_retries_refused_total{reason=\"not_held\"}").await;
    assert!((refused - 1.0).abs() < 0.5, "{refused}");
    // A body that is too large to buffer is forwarded all the same.
    let success = Action::after_body(Action::Answer(Reply::ok("{}")));
    assert_eq!(send(too_large, success).await, (200, 1, None));
    until("nothing is buffered", async || proxy.metric("jackstay_held_body_bytes").await == 0.0)
        .await;
}

/// The apiserver responds during the upload and then resets the stream with `NO_ERROR`, as Go does. The request
/// must not be sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn response_during_an_upload_is_complete() {
    const TOO_LARGE: &str = r#"{"kind":"Status","code":413,"reason":"RequestEntityTooLarge"}"#;
    let (peers, proxy, client) = setup(2).await;
    peers.withhold_window.store(true, Relaxed);
    for size in [100 << 10, 4 << 20] {
        peers.set_actions([Action::raw(|id| {
            let head = field_block(&[(":status", "413"), ("content-type", "application/json")]);
            let body = frame(DATA, END_STREAM, id, TOO_LARGE.as_bytes());
            [frame(HEADERS, END_HEADERS, id, &head), body, reset(id, NO_ERROR)].concat()
        })]);
        let headers = [("content-type", "application/json")];
        let sent = client.request(Method::POST, CONFIGMAPS, &headers, "x".repeat(size));
        let reply = soon("a response", sent).await.unwrap();
        assert_eq!((reply.status.as_u16(), &reply.body[..]), (413, TOO_LARGE.as_bytes()), "{size}");
        assert_eq!(peers.requests().len(), 1, "{size}");
    }
    until("nothing is buffered", async || proxy.metric("jackstay_held_body_bytes").await == 0.0)
        .await;
    assert_eq!(proxy.lost_connections().await, [""; 0]);
}
