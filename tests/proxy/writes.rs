//! A write is carried out at most once, whatever fails: every write has an Audit-ID, and the
//! servers count them.

use crate::scripted_peer::{
    Action, DATA, END_HEADERS, END_STREAM, HEADERS, NO_ERROR, REFUSED_STREAM, Reply, fields, frame,
    reset, setup,
};
use crate::support::{CONFIGMAPS, TestCluster, config_map, h2_error, long_form, soon, until, wait};
use http::Method;
use jackstay::demo::client::Client;
use jackstay::demo::faulty_relay::Direction;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const WORKERS: usize = 16;

/// If no write ends for this long, the writes hang.
const STUCK: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn writes_are_carried_out_at_most_once_under_faults() {
    let writes = if long_form() { 10_000 } else { 2_000 };
    let cluster = TestCluster::new(3);
    let (relays, proxy) = cluster.start_behind_relays(|_| {}).await;
    cluster.state.audit().clear();

    let next = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let outcomes = Arc::new(Mutex::new(HashMap::<String, String>::new()));
    let start = Instant::now();
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let (next, done, outcomes) = (next.clone(), done.clone(), outcomes.clone());
            let (addr, who) = (proxy.addr, cluster.certs.credentials());
            tokio::spawn(async move {
                let client = if worker % 4 == 0 {
                    Client::connect_http1(addr, &who).await.unwrap()
                } else {
                    Client::connect(addr, &who).await.unwrap()
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
                            // During the response; an HTTP/1.1 client has lost its connection too.
                            format!("error: {error}")
                        }
                    };
                    outcomes.lock().unwrap().insert(id, outcome);
                    done.fetch_add(1, Relaxed);
                    assert!(!client.is_closed(), "worker {worker}: its connection was closed");
                }
            })
        })
        .collect();

    let inject_faults = async {
        let mut step = 0;
        while !over.load(Relaxed) {
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
            // The next fault follows after 25 writes, or after a while if all writes hang.
            let from = done.load(Relaxed);
            let enough = async || done.load(Relaxed) >= from + 25 || over.load(Relaxed);
            wait::within(Duration::from_millis(250), enough).await;
        }
        // All faults end, so that every write ends.
        if step % 8 == 1 {
            cluster.servers[(step - 1) / 8 % 3].restart().unwrap();
        }
        for (server, relay) in cluster.servers.iter().zip(&relays) {
            server.cont();
            relay.clear_faults();
        }
        step
    };
    let all = async {
        for worker in workers {
            worker.await.unwrap();
        }
        over.store(true, Relaxed);
    };
    // Also on a slow machine writes end all the time.
    let stuck = async {
        let mut last = 0;
        while wait::within(STUCK, async || done.load(Relaxed) != last).await {
            last = done.load(Relaxed);
        }
        last
    };
    let steps = tokio::select! {
        (steps, ()) = async { tokio::join!(inject_faults, all) } => steps,
        count = stuck => panic!("no write has ended for {STUCK:?}, after {count} of {writes}"),
    };

    let mut counted = HashMap::<String, usize>::new();
    for record in cluster.state.audit().records() {
        if let Some(id) = record.audit_id {
            *counted.entry(id).or_default() += 1;
        }
    }
    let outcomes = outcomes.lock().unwrap().clone();
    let mut summary = BTreeMap::<&str, usize>::new();
    for (id, outcome) in &outcomes {
        let count = counted.get(id).copied().unwrap_or(0);
        assert!(count <= 1, "{id} ({outcome}) was seen {count} times");
        match outcome.as_str() {
            "201" => assert_eq!(count, 1, "{id}"),
            // No stream or no server, so the write was never sent. Rare, and none on a fast
            // machine.
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

/// The server refuses the request when it has read all of it: it is unprocessed.
fn refused() -> Action {
    Action::after_body(Action::raw(|id| reset(id, REFUSED_STREAM)))
}

/// A body is buffered up to a limit, so that the request can be sent again. A larger one is sent
/// once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn write_is_retried_only_when_its_body_is_buffered() {
    let (peers, proxy, client) = setup(2).await;
    let send = async |size: usize, act: Action| {
        peers.set_actions([act]);
        let headers = [("content-type", "application/json")];
        let sent = client.request(Method::POST, CONFIGMAPS, &headers, "x".repeat(size));
        let reply = soon("a response", sent).await.unwrap();
        let retry_after =
            reply.headers.get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        (reply.status.as_u16(), peers.requests().len(), retry_after)
    };
    let (buffered, too_large) = (2 << 20, (3 << 20) + 1);
    assert_eq!(send(buffered, refused()).await, (200, 2, None), "sent again");
    // The start of the body is no longer buffered; the client may retry, since the server has done
    // nothing.
    assert_eq!(send(too_large, refused()).await, (502, 1, Some("1".to_owned())));
    let lost = Action::after_body(Action::Close);
    assert_eq!(send(too_large, lost).await, (502, 1, None), "it may have been carried out");
    let refused = proxy.metric("jackstay_retries_refused_total{reason=\"not_held\"}").await;
    assert!((refused - 1.0).abs() < 0.5, "{refused}");
    let taken = Action::after_body(Action::Answer(Reply::ok("{}")));
    assert_eq!(
        send(too_large, taken).await,
        (200, 1, None),
        "too large to buffer, and sent all the same"
    );
    until("nothing is buffered", async || proxy.metric("jackstay_held_body_bytes").await == 0.0)
        .await;
}

/// The apiserver responds during the upload, and resets the rest with `NO_ERROR`, as Go does. The
/// client gets the complete response, and nothing is sent twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn response_during_an_upload_is_complete() {
    const NO: &str = r#"{"kind":"Status","code":413,"reason":"RequestEntityTooLarge"}"#;
    let (peers, proxy, client) = setup(2).await;
    peers.withhold_window.store(true, Relaxed);
    for size in [100 << 10, 4 << 20] {
        peers.set_actions([Action::raw(|id| {
            let head = fields(&[(":status", "413"), ("content-type", "application/json")]);
            let body = frame(DATA, END_STREAM, id, NO.as_bytes());
            [frame(HEADERS, END_HEADERS, id, &head), body, reset(id, NO_ERROR)].concat()
        })]);
        let headers = [("content-type", "application/json")];
        let sent = client.request(Method::POST, CONFIGMAPS, &headers, "x".repeat(size));
        let reply = soon("a response", sent).await.unwrap();
        assert_eq!((reply.status.as_u16(), &reply.body[..]), (413, NO.as_bytes()), "{size}");
        assert_eq!(peers.requests().len(), 1, "{size}");
    }
    until("nothing is buffered", async || proxy.metric("jackstay_held_body_bytes").await == 0.0)
        .await;
    assert_eq!(proxy.lost_connections().await, [""; 0]);
}
