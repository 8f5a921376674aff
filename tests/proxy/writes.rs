//! A write happens at most once, whatever happens to the servers meanwhile: every write carries an
//! Audit-ID, and the servers count them.

use crate::hostile::before;
use crate::peer::{
    Act, DATA, END_HEADERS, END_STREAM, HEADERS, NO_ERROR, Peers, REFUSED_STREAM, Reply, fields,
    frame, reset,
};
use crate::support::{Certs, MAPS, World, long, map, soon, until, wait};
use http::Method;
use jackstay::demo::client::Client;
use jackstay::demo::faulty_relay::Direction;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const WORKERS: usize = 16;

/// No write ends for so long: they hang.
const STUCK: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn at_most_once() {
    let writes = if long() { 10_000 } else { 2_000 };
    let world = World::new(3);
    let (holes, proxy) = world.start_behind_holes().await;
    world.cluster.audit().clear();

    let next = Arc::new(AtomicUsize::new(0));
    let done = Arc::new(AtomicUsize::new(0));
    let over = Arc::new(AtomicBool::new(false));
    let outcomes = Arc::new(Mutex::new(HashMap::<String, String>::new()));
    let start = Instant::now();
    let workers: Vec<_> = (0..WORKERS)
        .map(|worker| {
            let (next, done, outcomes) = (next.clone(), done.clone(), outcomes.clone());
            let (addr, who) = (proxy.addr, world.certs.credentials());
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
                    let object = map(&format!("w{n}"), "1").to_string();
                    let reply = client.request(Method::POST, MAPS, &headers, object).await;
                    let outcome = match reply {
                        Ok(reply) if reply.status == 502 || reply.status == 503 => {
                            assert!(!reply.headers.contains_key("retry-after"));
                            assert_eq!(reply.json()["kind"], "Status", "{:?}", reply.body);
                            reply.status.as_u16().to_string()
                        }
                        Ok(reply) => reply.status.as_u16().to_string(),
                        Err(error) => {
                            if let Some(h2) = crate::support::h2_error(&error) {
                                assert_ne!(h2.reason(), Some(h2::Reason::REFUSED_STREAM));
                                assert!(!h2.is_go_away());
                            }
                            // Mid-answer; an HTTP/1.1 client has lost its connection with it.
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

    let chaos = async {
        let mut step = 0;
        while !over.load(Relaxed) {
            let at = (step / 8) % 3;
            let (server, hole) = (&world.servers[at], &holes[at]);
            match step % 8 {
                0 => server.kill(),
                1 => server.restart().unwrap(),
                2 => server.reset_connections(),
                3 => {
                    hole.silence_all(Direction::Both);
                }
                4 => {
                    hole.heal();
                    hole.reset_all();
                }
                5 => server.stop(),
                6 => server.cont(),
                _ => server.goaway(),
            }
            step += 1;
            // The next fault after so many writes, or after a while if all of them are stuck.
            let from = done.load(Relaxed);
            let enough = async || done.load(Relaxed) >= from + 25 || over.load(Relaxed);
            wait::within(Duration::from_millis(250), enough).await;
        }
        // Nothing stays broken: whatever is stuck comes to its end.
        if step % 8 == 1 {
            world.servers[(step - 1) / 8 % 3].restart().unwrap();
        }
        for (server, hole) in world.servers.iter().zip(&holes) {
            server.cont();
            hole.heal();
        }
        step
    };
    let all = async {
        for worker in workers {
            worker.await.unwrap();
        }
        over.store(true, Relaxed);
    };
    // However slow the machine is, some write ends all the time.
    let stuck = async {
        let mut last = 0;
        while wait::within(STUCK, async || done.load(Relaxed) != last).await {
            last = done.load(Relaxed);
        }
        last
    };
    let steps = tokio::select! {
        (steps, ()) = async { tokio::join!(chaos, all) } => steps,
        count = stuck => panic!("no write has ended for {STUCK:?}, after {count} of {writes}"),
    };

    let mut counted = HashMap::<String, usize>::new();
    for record in world.cluster.audit().records() {
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
            // No stream for it, or no server: it was never sent. Rare, and none on a quick machine.
            "429" | "503" => assert_eq!(count, 0, "{id}"),
            _ => {}
        }
        *summary.entry(outcome).or_default() += 1;
    }
    println!("{writes} writes under {steps} faults in {:?}: {summary:?}", start.elapsed());
    assert_eq!(outcomes.len(), writes);
    let known = |o: &str| matches!(o, "201" | "502" | "429" | "503") || o.starts_with("error");
    assert!(summary.keys().all(|outcome| known(outcome)), "{summary:?}");
    until("all is well again", async || {
        proxy.endpoints().await.iter().all(|e| e["state"] == "ready")
    })
    .await;
}

/// Refused by the server as soon as it has read all of it: proven unprocessed.
fn refused() -> Act {
    Act::Late(Box::new(Act::raw(|id| reset(id, REFUSED_STREAM))))
}

/// A body is held up to a bound, so that it can be sent again; above it is sent all the same, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_body_is_held_up_to_its_bound() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    let send = async |size: usize, act: Act| {
        peers.script.play([act]);
        let headers = [("content-type", "application/json")];
        let sent = client.request(Method::POST, MAPS, &headers, "x".repeat(size));
        let reply = soon("an answer", sent).await.unwrap();
        let again =
            reply.headers.get("retry-after").map(|value| value.to_str().unwrap().to_owned());
        (reply.status.as_u16(), peers.script.seen().len(), again)
    };
    let (held, too_large) = (2 << 20, (3 << 20) + 1);
    assert_eq!(send(held, refused()).await, (200, 2, None), "sent again");
    // Its beginning is gone, and the client may send it again: the server has done nothing.
    assert_eq!(send(too_large, refused()).await, (502, 1, Some("1".to_owned())));
    let lost = Act::Late(Box::new(Act::Cut));
    assert_eq!(send(too_large, lost).await, (502, 1, None), "it may have been carried out");
    let refused = proxy.metric("jackstay_retries_refused_total{reason=\"not_held\"}").await;
    assert!((refused - 1.0).abs() < 0.5, "{refused}");
    let taken = Act::Late(Box::new(Act::Answer(Reply::ok("{}"))));
    assert_eq!(
        send(too_large, taken).await,
        (200, 1, None),
        "too large to hold is not too large to send"
    );
    until("nothing is held", async || proxy.metric("jackstay_held_body_bytes").await == 0.0).await;
}

/// The apiserver has read enough to say no: it answers in the middle of the upload, and gives the rest
/// of it up with `NO_ERROR`, as Go does. The client gets the whole answer, and nothing is sent twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_answer_in_the_middle_of_an_upload_is_whole() {
    const NO: &str = r#"{"kind":"Status","code":413,"reason":"RequestEntityTooLarge"}"#;
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.stingy.store(true, Relaxed);
    for size in [100 << 10, 4 << 20] {
        peers.script.play([Act::raw(|id| {
            let head = fields(&[(":status", "413"), ("content-type", "application/json")]);
            let answer = frame(DATA, END_STREAM, id, NO.as_bytes());
            [frame(HEADERS, END_HEADERS, id, &head), answer, reset(id, NO_ERROR)].concat()
        })]);
        let headers = [("content-type", "application/json")];
        let sent = client.request(Method::POST, MAPS, &headers, "x".repeat(size));
        let reply = soon("an answer", sent).await.unwrap();
        assert_eq!((reply.status.as_u16(), &reply.body[..]), (413, NO.as_bytes()), "{size}");
        assert_eq!(peers.script.seen().len(), 1, "{size}");
    }
    until("nothing is held", async || proxy.metric("jackstay_held_body_bytes").await == 0.0).await;
    assert_eq!(proxy.lost_connections().await, [""; 0]);
}
