//! Upstreams that break the rules: the other endpoint serves on, nothing hangs, nothing truncated
//! looks complete.

use crate::peer::{
    Act, CANCEL, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, INITIAL_WINDOW_SIZE,
    INTERNAL_ERROR, MAX_CONCURRENT_STREAMS, NO_ERROR, PING, Peers, RST_STREAM, Reply, SETTINGS,
    WINDOW_UPDATE, fields, frame, goaway, reset, settings,
};
use crate::support::figures::within;
pub use crate::support::join_all;
use crate::support::stopwatch::Stopwatch;
use crate::support::{Certs, MAPS, PATIENCE, Proxy, patient, soon, until};
use http::Method;
use jackstay::demo::client::{Client, next_data};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// A proxy before these peers that suspects none of them soon: what each is asked can be counted.
pub async fn before(peers: &Peers, certs: &Certs) -> Proxy {
    let proxy = certs.start(patient(certs.config(&peers.addresses)));
    proxy.ready(peers.addresses.len()).await;
    proxy
}

fn head(list: &[(&str, &str)]) -> Vec<u8> {
    let mut all = vec![(":status", "200"), ("content-type", "application/json")];
    all.extend(list);
    fields(&all)
}

/// What no HTTP/2 server says: each of these ends its stream or its connection.
fn violations() -> Vec<(&'static str, Act)> {
    let raw = |name, bytes: fn(u32) -> Vec<u8>| (name, Act::raw(bytes));
    vec![
        raw("a frame longer than allowed", |id| {
            let mut bytes = frame(DATA, 0, id, &[]);
            bytes[..3].copy_from_slice(&[0xff, 0xff, 0xff]);
            bytes
        }),
        raw("DATA on stream 0", |_| frame(DATA, 0, 0, b"x")),
        raw("DATA before HEADERS", |id| frame(DATA, 0, id, b"x")),
        raw("DATA on a stream that nobody opened", |id| frame(DATA, 0, id + 1000, b"x")),
        raw("HEADERS on a pushed stream", |_| frame(HEADERS, END_HEADERS, 2, &head(&[]))),
        raw("PUSH_PROMISE", |id| {
            frame(5, END_HEADERS, id, &[&[0, 0, 0, 2][..], &fields(&[(":method", "GET")])].concat())
        }),
        raw("CONTINUATION out of nowhere", |id| frame(CONTINUATION, END_HEADERS, id, &[])),
        raw("a broken header block", |id| frame(HEADERS, END_HEADERS, id, &[0xff; 40])),
        raw("an index that does not exist", |id| frame(HEADERS, END_HEADERS, id, &[0xfe])),
        raw("no :status", |id| frame(HEADERS, END_HEADERS, id, &fields(&[("a", "b")]))),
        raw("a status that is none", |id| {
            frame(HEADERS, END_HEADERS, id, &fields(&[(":status", "x")]))
        }),
        raw("capital letters in a name", |id| {
            frame(HEADERS, END_HEADERS, id, &head(&[("Aa", "b")]))
        }),
        raw("padding longer than the frame", |id| frame(DATA, 8, id, &[200, 1])),
        raw("SETTINGS of a bad length", |_| frame(SETTINGS, 0, 0, &[1, 2, 3])),
        raw("SETTINGS on a stream", |id| frame(SETTINGS, 0, id, &[])),
        raw("an initial window that is too large", |_| {
            settings(&[(INITIAL_WINDOW_SIZE, u32::MAX)])
        }),
        raw("WINDOW_UPDATE of nothing", |id| frame(WINDOW_UPDATE, 0, id, &[0; 4])),
        raw("WINDOW_UPDATE of too much", |_| {
            let most = frame(WINDOW_UPDATE, 0, 0, &[0x7f, 0xff, 0xff, 0xff]);
            [most.clone(), most].concat()
        }),
        raw("PING of a bad length", |_| frame(PING, 0, 0, &[0; 7])),
        raw("RST_STREAM of a bad length", |id| frame(RST_STREAM, 0, id, &[0; 3])),
        raw("GOAWAY of a bad length", |_| frame(GOAWAY, 0, 0, &[0; 3])),
        raw("GOAWAY that grows", |_| [goaway(1, NO_ERROR), goaway(99, INTERNAL_ERROR)].concat()),
        raw("not HTTP/2 at all", |_| b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok".to_vec()),
        ("a cut", Act::Cut),
        (
            "endless CONTINUATION",
            Act::flood({
                move |id| {
                    let block = fields(&[("x-filler", &"x".repeat(4000))]);
                    // The first one of each flood is a HEADERS frame only by luck; see below.
                    frame(CONTINUATION, 0, id, &block)
                }
            }),
        ),
        (
            "endless CONTINUATION after HEADERS",
            Act::raw(|id| {
                let block = fields(&[("x-filler", &"x".repeat(4000))]);
                let mut bytes = frame(HEADERS, 0, id, &head(&[]));
                for _ in 0..1000 {
                    bytes.extend(frame(CONTINUATION, 0, id, &block));
                }
                bytes
            }),
        ),
        (
            "endless empty CONTINUATION",
            Act::raw(|id| {
                let mut bytes = frame(HEADERS, 0, id, &head(&[]));
                for _ in 0..10_000 {
                    bytes.extend(frame(CONTINUATION, 0, id, &[]));
                }
                bytes
            }),
        ),
        (
            "headers above the limit",
            Act::raw(|id| {
                let value = "x".repeat(15_000);
                let mut bytes = frame(HEADERS, 0, id, &head(&[]));
                for _ in 0..5 {
                    bytes.extend(frame(CONTINUATION, 0, id, &fields(&[("x-filler", &value)])));
                }
                bytes.extend(frame(CONTINUATION, END_HEADERS, id, &[]));
                bytes
            }),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn violations_cost_a_retry() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    let mut slowest = (Duration::ZERO, "");
    for (name, act) in violations() {
        peers.script.play([act]);
        let start = Instant::now();
        let reply = soon(name, client.get(MAPS)).await.unwrap_or_else(|e| panic!("{name}: {e}"));
        slowest = slowest.max((start.elapsed(), name));
        assert!(matches!(reply.status.as_u16(), 200 | 502), "{name}: {}", reply.status);
        // A write that met it happened at most once.
        peers.script.play([violations().into_iter().find(|(n, _)| *n == name).unwrap().1]);
        let reply = soon(name, client.post(MAPS, &"{}".into())).await.unwrap();
        let seen = peers.script.seen().len();
        let once = reply.status == 502 && seen == 1;
        assert!(once || (reply.status == 200 && seen <= 2), "{name}: {} {seen}", reply.status);
        // Who is not concerned does not notice.
        let reply = soon(name, client.get(MAPS)).await.unwrap();
        assert_eq!(reply.status, 200, "{name}");
    }
    println!("slowest read: {:?} ({})", slowest.0, slowest.1);
    assert!(!client.is_closed());
}

/// What the client gets where the answer breaks off or contradicts itself; over h2 and HTTP/1.1.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn truncation_never_looks_complete() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let body = |length: &'static str, end: u8| {
        move |id| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[("content-length", length)]));
            let first = frame(DATA, 0, id, b"{\"first\":1,");
            [head, first, frame(DATA, end, id, b"\"second\":2}")].concat()
        }
    };
    let late = |act: Vec<Vec<u8>>| act.concat();
    let acts: Vec<(&str, Act)> = vec![
        ("content-length too long", Act::raw(body("100", END_STREAM))),
        ("content-length too short", Act::raw(body("5", END_STREAM))),
        (
            "content-length too long, then NO_ERROR",
            Act::raw(move |id| late(vec![body("100", 0)(id), reset(id, NO_ERROR)])),
        ),
        (
            "whole by content-length, then NO_ERROR instead of an end, on more",
            Act::raw(move |id| late(vec![body("23", 0)(id), reset(id, NO_ERROR)])),
        ),
        (
            "no content-length, then NO_ERROR",
            Act::partly(Reply::ok("{\"first\":1,"), |id| reset(id, NO_ERROR)),
        ),
        (
            "no content-length, then CANCEL",
            Act::partly(Reply::ok("{\"first\":1,"), |id| reset(id, 8)),
        ),
        (
            "no content-length, then GOAWAY and the end of the connection",
            Act::PartlyCut(Reply::ok("{\"first\":1,")),
        ),
    ];
    for http2 in [true, false] {
        for path in [MAPS.to_owned(), "/api/v1/namespaces/default/pods/p/log".to_owned()] {
            for (name, act) in &acts {
                // Every server lies: no retry can hide it.
                peers.script.play(std::iter::repeat_n(act.clone(), 8));
                let who = certs.credentials();
                let client = if http2 {
                    Client::connect(proxy.addr, &who).await.unwrap()
                } else {
                    Client::connect_http1(proxy.addr, &who).await.unwrap()
                };
                let saw = soon(name, client.request(Method::GET, &path, &[], "")).await;
                let failed = match &saw {
                    Err(_) => true,
                    Ok(reply) => reply.status == 502,
                };
                assert!(failed, "{name} {path} (http2: {http2}): {saw:?}");
            }
        }
    }
}

/// Hop-by-hop headers in an answer: HTTP/2 has none, and they must not reach an HTTP/1.1 client.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hostile_response_headers() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    for http2 in [true, false] {
        for (name, value) in [
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
            ("keep-alive", "timeout=1"),
            ("upgrade", "h2c"),
            ("proxy-connection", "close"),
            ("proxy-authenticate", "Basic"),
        ] {
            peers.script.play([Act::Answer(Reply::ok("{}").header(name, value))]);
            let who = certs.credentials();
            let client = if http2 {
                Client::connect(proxy.addr, &who).await.unwrap()
            } else {
                Client::connect_http1(proxy.addr, &who).await.unwrap()
            };
            let reply = soon(name, client.get(MAPS)).await.unwrap();
            // Refused as malformed and asked again, or stripped; never forwarded.
            assert_eq!(reply.status, 200, "{name}");
            let theirs = reply.headers.get(name).is_some_and(|v| v == value);
            assert!(!theirs, "{name} (http2: {http2}): {:?}", reply.headers);
            assert_eq!(soon(name, client.get(MAPS)).await.unwrap().status, 200, "{name}");
        }
    }
    let strange = Reply::ok("{}").header("x-remote-user", "root").header("x-anything", "1");
    peers.script.play([Act::Answer(strange)]);
    let client = proxy.client(&certs.credentials()).await;
    let reply = client.get(MAPS).await.unwrap();
    assert_eq!(reply.headers["x-anything"], "1", "answers keep what is the server's own");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn goaway_at_any_moment() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.usually(Reply::ok("{}"));
    // Above: the request is finished on the connection that goes away.
    for round in 0..20 {
        let answer = |id: u32| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
            (head, frame(DATA, END_STREAM, id, b"{}"))
        };
        let act = match round % 4 {
            0 => Act::raw(move |id| [goaway(id, NO_ERROR), answer(id).0, answer(id).1].concat()),
            1 => Act::raw(move |id| [answer(id).0, goaway(id, NO_ERROR), answer(id).1].concat()),
            2 => Act::raw(move |id| [answer(id).0, answer(id).1, goaway(id, NO_ERROR)].concat()),
            // As Go does: first "no more", then the last one it has seen.
            _ => Act::raw(move |id| {
                [goaway(0x7fff_ffff, NO_ERROR), answer(id).0, goaway(id, NO_ERROR), answer(id).1]
                    .concat()
            }),
        };
        for write in [false, true] {
            peers.script.play([act.clone()]);
            let reply = if write {
                soon("a write", client.post(MAPS, &"{}".into())).await
            } else {
                soon("a read", client.get(MAPS)).await
            };
            assert_eq!(reply.unwrap().status, 200, "round {round}, write: {write}");
            assert_eq!(peers.script.seen().len(), 1, "round {round}, write: {write}");
        }
    }
}

/// As a client does that is told to come again: a machine that is too slow for so many handshakes in a
/// second has no stream for everybody.
async fn patiently(client: &Client) -> u16 {
    loop {
        let reply = client.get(MAPS).await.unwrap();
        if reply.status != 429 {
            return reply.status.as_u16();
        }
        assert_eq!(reply.headers["retry-after"], "1");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn streams_lowered_to_one() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.usually(Reply::ok("{}"));
    // SETTINGS in flight: the answer comes right behind them.
    peers.script.play([Act::raw(|id| {
        [
            settings(&[(MAX_CONCURRENT_STREAMS, 1), (INITIAL_WINDOW_SIZE, 1 << 20)]),
            frame(HEADERS, END_HEADERS, id, &head(&[])),
            frame(DATA, END_STREAM, id, b"{}"),
        ]
        .concat()
    })]);
    assert_eq!(client.get(MAPS).await.unwrap().status, 200);
    *peers.script.settings.lock().unwrap() = vec![(MAX_CONCURRENT_STREAMS, 1)];
    peers.script.play([]);
    let all = (0..40).map(|_| {
        let client = &client;
        async move { patiently(client).await }
    });
    let start = Instant::now();
    let statuses = soon("40 requests", join_all(all)).await;
    println!("40 requests, one stream each connection: {:?}", start.elapsed());
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    assert_eq!(peers.script.seen().len(), 40);
    assert_eq!(peers.script.goaways.load(Relaxed), 0, "no connection of ours broke a rule");

    // Lowered in mid-flight, with requests on it, and raised again.
    peers.script.play([]);
    *peers.script.settings.lock().unwrap() = vec![];
    let all = (0..40).map(|n| {
        let (client, peers) = (&client, &peers);
        async move {
            if n % 5 == 0 {
                let wanted = if n % 2 == 0 { 1 } else { 100 };
                let change = Act::raw(move |id| {
                    [
                        settings(&[(MAX_CONCURRENT_STREAMS, wanted)]),
                        frame(HEADERS, END_HEADERS, id, &head(&[])),
                        frame(DATA, END_STREAM, id, b"{}"),
                    ]
                    .concat()
                });
                peers.script.play([change]);
            }
            patiently(client).await
        }
    });
    let statuses = soon("40 requests", join_all(all)).await;
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
}

/// PINGs are not answered, nor is the request: it goes to the other endpoint, and the connection
/// is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn ping_never_answered() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = certs.start(certs.config(&peers.addresses));
    proxy.ready(2).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.usually(Reply::ok("{}"));
    let mut slowest = Duration::ZERO;
    let mut silent = Vec::new();
    for _ in 0..3 {
        peers.script.play([Act::Mute]);
        let start = Stopwatch::start();
        let reply = soon("a read", client.get(MAPS)).await.unwrap();
        slowest = slowest.max(start.elapsed());
        assert_eq!(reply.status, 200);
        let seen = peers.script.seen();
        assert!(seen.len() >= 2, "{seen:?}");
        let (_, connection, stream) = seen[0];
        until("who lost is told so", async || {
            peers.script.given_up().contains(&(connection, stream, CANCEL))
        })
        .await;
        silent.push(connection);
    }
    assert!(proxy.metric("jackstay_hedges_total{outcome=\"hedge\"").await >= 3.0);
    let promise = Duration::from_millis(600);
    within("slowest read on a connection that fell silent", slowest, promise);
    // New requests keep away from it.
    peers.script.play([]);
    for _ in 0..20 {
        assert_eq!(soon("a read", client.get(MAPS)).await.unwrap().status, 200);
    }
    let seen = peers.script.seen();
    assert!(!seen.iter().any(|(_, connection, _)| silent.contains(connection)), "{seen:?}");
}

/// Second attempts are few beside the requests: above the budget a read waits for the end of its
/// connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hedges_have_a_budget() {
    const READS: usize = 400;
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = certs.start(certs.config(&peers.addresses));
    proxy.ready(2).await;
    let client = proxy.client(&certs.credentials()).await;
    // As many connections as it takes, and all of them fall silent with their first reads.
    peers.script.play(std::iter::repeat_n(Act::Mute, READS));
    let all = (0..READS).map(|_| client.get(MAPS));
    let replies = tokio::time::timeout(3 * PATIENCE, join_all(all)).await.unwrap();
    let failed = replies.iter().filter(|reply| reply.as_ref().is_err()).count();
    assert_eq!(failed, 0, "each has an answer");
    let hedges = async |outcome: &str| {
        proxy.metric(&format!("jackstay_hedges_total{{outcome=\"{outcome}\"")).await
    };
    let (over, won) = (hedges("over_budget").await, hedges("hedge").await);
    let made = won + hedges("original").await + hedges("failed").await;
    println!("{READS} reads: {made} hedges, {won} of them won, {over} were not made");
    assert!(over >= 1.0, "{over}");
    // The burst, which is the streams of a connection or a little more, and a tenth of the reads.
    assert!((1.0..=READS as f64 / 2.0).contains(&made), "{made}");
}

/// A handler that takes its time, on a connection that lives: nothing is cut, nothing hedged.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slow_is_not_dead() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    // A machine so busy that a PONG takes 100 ms would have it suspected, and rightly.
    let mut config = certs.config(&peers.addresses);
    config.upstreams[0].health.suspect_after = Some(Duration::from_secs(1));
    let proxy = certs.start(config);
    proxy.ready(2).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.play([Act::Hang]);
    let hanging = tokio::time::timeout(Duration::from_millis(1500), client.get(MAPS)).await;
    assert!(hanging.is_err(), "it is the client that gives up");
    assert_eq!(peers.script.seen().len(), 1, "and nobody else was asked");
    until("its stream is reset", async || peers.script.given_up().len() == 1).await;
}

/// A server that gives no window: the upload waits, everybody else does not, and the client's
/// cancellation reaches the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn window_never_opened() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    *peers.script.settings.lock().unwrap() = vec![(INITIAL_WINDOW_SIZE, 0)];
    peers.script.stingy.store(true, Relaxed);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.usually(Reply::ok("{}"));
    peers.script.play(std::iter::repeat_n(Act::Hang, 8));
    let big = "x".repeat(200_000);
    let headers = [("content-type", "application/json")];
    let uploads = (0..8).map(|_| client.request(Method::POST, MAPS, &headers, big.clone()));
    let uploading = join_all(uploads);
    let reading = async {
        until("all uploads are there", async || peers.script.seen().len() == 8).await;
        let start = Instant::now();
        for _ in 0..20 {
            assert_eq!(client.get(MAPS).await.unwrap().status, 200);
        }
        println!("20 reads beside 8 stuck uploads: {:?}", start.elapsed());
    };
    tokio::select! {
        biased;
        _ = uploading => panic!("no upload can end"),
        () = soon("reads beside stuck uploads", reading) => {}
    }
    until("the uploads are reset", async || peers.script.given_up().len() == 8).await;
}

/// Answers in 1-byte frames, empty frames, a flood of PINGs and of SETTINGS: odd, and allowed, or
/// answered by closing; never memory without bound, never a hang.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn floods() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    let answer = |id, noise: Vec<u8>| {
        let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
        [head, noise, frame(DATA, END_STREAM, id, b"}")].concat()
    };
    let ones = Act::raw(move |id| answer(id, frame(DATA, 0, id, b"{").repeat(5000)));
    peers.script.play([ones]);
    let reply = soon("small frames", client.get(MAPS)).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 5001));
    for (name, noise) in [
        ("empty DATA", frame(DATA, 0, 1, b"")),
        ("PING", frame(PING, 0, 0, &[7; 8])),
        ("SETTINGS", settings(&[])),
        ("unknown frames", frame(0x42, 0, 0, b"hello")),
        ("PRIORITY", frame(2, 0, 1, &[0, 0, 0, 3, 1])),
    ] {
        let act = Act::raw(move |id| {
            let mut noise = noise.clone();
            if noise[8] == 1 {
                noise[5..9].copy_from_slice(&id.to_be_bytes());
            }
            answer(id, noise.repeat(3000))
        });
        peers.script.play([act]);
        let reply = soon(name, client.get(MAPS)).await;
        // Cut off for it, or borne: what is given is given whole.
        if let Ok(reply) = reply {
            assert!(matches!(reply.status.as_u16(), 200 | 502), "{name}: {}", reply.status);
        }
        peers.script.play([]);
        assert_eq!(soon(name, client.get(MAPS)).await.unwrap().status, 200, "{name}");
    }
}

/// A watch on a hostile server: frames that do not parse pass through, and are never resumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watches_that_make_no_sense() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion=5");
    let event = |version: &str| {
        format!(
            r#"{{"type":"ADDED","object":{{"kind":"ConfigMap","apiVersion":"v1","metadata":{{"name":"a","resourceVersion":"{version}"}}}}}}"#
        ) + "\n"
    };
    for (name, text) in [
        ("no JSON", "what is this\n".to_owned()),
        ("no version", "{\"type\":\"ADDED\",\"object\":{}}\n".to_owned()),
        ("backwards", event("9") + &event("8")),
        ("the same version for ever", event("9").repeat(100)),
        ("a version of 10,000 digits", event(&"9".repeat(10_000))),
        ("not a number", event("abc")),
        ("deep", "[".repeat(25_000) + &"]".repeat(25_000) + "\n"),
    ] {
        peers.script.play([Act::partly(Reply::ok(&text), |id| reset(id, INTERNAL_ERROR))]);
        let mut got = Vec::new();
        // A head that is followed by a reset at once may be lost with it.
        let Ok(response) = soon(name, client.send(Method::GET, &path, &[], "")).await else {
            continue;
        };
        let mut body = response.into_body();
        let end = loop {
            match soon(name, next_data(&mut body)).await {
                Ok(Some(data)) => got.extend_from_slice(&data),
                Ok(None) => break "clean",
                Err(_) => break "reset",
            }
        };
        assert!(text.as_bytes().starts_with(&got), "{name}: changed");
        let (size, seen) = (got.len(), peers.script.seen());
        assert_eq!(seen.len(), 1, "{name}: resumed ({end}, {size} of {})", text.len());
        println!("a watch with {name} is passed on and ends: {end}");
    }
    assert!(!client.is_closed());
}

/// What bars a watch from being resumed is counted when it comes, once for each watch, not only when
/// the watch is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_bars_a_watch_is_counted() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let proxy = before(&peers, &certs).await;
    let client = proxy.client(&certs.credentials()).await;
    let path = format!("{MAPS}?watch=1&resourceVersion=5");
    let event = |version: &str| {
        let object = format!("{{\"metadata\":{{\"resourceVersion\":\"{version}\"}}}}");
        format!("{{\"type\":\"ADDED\",\"object\":{object}}}\n")
    };
    let texts = [
        "what is this\nand this\n".to_owned(),
        event("9") + &event("8") + &event("7"),
        event("abc"),
        event("6") + &event("7"),
    ];
    let mut watches = Vec::new();
    for text in &texts {
        peers.script.play([Act::partly(Reply::ok(text), |_| Vec::new())]);
        let response = soon("a head", client.send(Method::GET, &path, &[], "")).await.unwrap();
        let mut body = response.into_body();
        let mut got = Vec::new();
        while got.len() < text.len() {
            let data = soon(text, next_data(&mut body)).await.unwrap();
            got.extend_from_slice(&data.expect("no end"));
        }
        assert_eq!(got, text.as_bytes());
        watches.push(body);
    }
    let barred = proxy.metric("jackstay_watch_resumes_total{outcome=\"barred\"").await;
    assert_eq!(barred as usize, texts.len() - 1, "all but the last");
}

/// A frame that comes late on a stream which is done and forgotten costs a reset and no more, however
/// many there are in the life of a connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn late_frames_do_not_add_up() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let mut config = certs.config(&peers.addresses);
    // A peer that is slow here is not suspect: its connection would be replaced.
    config.upstreams[0].health.suspect_after = Some(Duration::from_secs(1));
    let proxy = certs.start(config);
    proxy.ready(1).await;
    let client = proxy.client(&certs.credentials()).await;
    // More streams than the 1,024 late frames that h2 lets pass by default.
    for _ in 0..22 {
        let replies = join_all((0..50).map(|_| client.get(MAPS)));
        for reply in soon("answers", replies).await {
            assert_eq!(reply.unwrap().status, 200);
        }
    }
    let late = |id| {
        let late = (1..id).step_by(2).flat_map(|earlier| frame(DATA, 0, earlier, b"late"));
        let answer = frame(HEADERS, END_HEADERS, id, &head(&[]));
        late.chain(answer).chain(frame(DATA, END_STREAM, id, b"{}")).collect()
    };
    peers.script.play([Act::raw(late)]);
    let reply = soon("an answer", client.get(MAPS)).await.unwrap();
    assert_eq!(reply.status, 200);
    assert!(proxy.metric("jackstay_retries_total").await < 0.5, "its connection was lost");
    until("they are noticed", async || !peers.script.given_up().is_empty()).await;
    assert_eq!(peers.script.goaways.load(Relaxed), 0);
}
