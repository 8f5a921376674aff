//! Upstreams that break off responses, change their limits or flood: no request hangs, and a truncated response never
//! looks complete.

use crate::scripted_peer::{Action, Peers, Reply, Request, setup, setup_with};
use crate::support::figures::check_figure;
use crate::support::http2::{
    CANCEL, DATA, END_HEADERS, END_STREAM, HEADERS, INITIAL_WINDOW_SIZE, INTERNAL_ERROR,
    MAX_CONCURRENT_STREAMS, NO_ERROR, PING, field_block, frame, goaway, reset, settings,
};
use crate::support::stopwatch::Stopwatch;
use crate::support::{CONFIGMAPS, PATIENCE, join_all, read_body, soon, until, without_suspicion};
use http::Method;
use jackstay_apiserver::client::{Client, next_data};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// The header block of a response with status 200 and these additional fields.
pub fn head(additional: &[(&str, &str)]) -> Vec<u8> {
    let mut all = vec![(":status", "200"), ("content-type", "application/json")];
    all.extend(additional);
    field_block(&all)
}

/// The client gets an error, over HTTP/2 and over HTTP/1.1.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn truncated_response_never_looks_complete() {
    let (peers, proxy, _) = setup(2).await;
    let body = |length: &'static str, end: u8| {
        move |id| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[("content-length", length)]));
            let first = frame(DATA, 0, id, b"{\"first\":1,");
            [head, first, frame(DATA, end, id, b"\"second\":2}")].concat()
        }
    };
    let truncations: Vec<(&str, Action)> = vec![
        ("content-length too long", Action::raw(body("100", END_STREAM))),
        ("content-length too short", Action::raw(body("5", END_STREAM))),
        (
            "content-length too long, then NO_ERROR",
            Action::raw(move |id| [body("100", 0)(id), reset(id, NO_ERROR)].concat()),
        ),
        (
            "complete by content-length, then NO_ERROR instead of END_STREAM",
            Action::raw(move |id| [body("23", 0)(id), reset(id, NO_ERROR)].concat()),
        ),
        (
            "no content-length, then NO_ERROR",
            Action::partial(Reply::ok("{\"first\":1,"), |id| reset(id, NO_ERROR)),
        ),
        (
            "no content-length, then CANCEL",
            Action::partial(Reply::ok("{\"first\":1,"), |id| reset(id, CANCEL)),
        ),
        (
            "no content-length, then GOAWAY and the end of the connection",
            Action::PartialThenClose(Reply::ok("{\"first\":1,")),
        ),
    ];
    for http2 in [true, false] {
        for path in [CONFIGMAPS.to_owned(), "/api/v1/namespaces/default/pods/p/log".to_owned()] {
            for (name, action) in &truncations {
                // Every attempt gets a truncated response, so retries do not help.
                peers.set_actions(std::iter::repeat_n(action.clone(), 8));
                let client = proxy.client_over(http2).await;
                let response = soon(name, client.request(Method::GET, &path, &[], "")).await;
                let failed = match &response {
                    Err(_) => true,
                    Ok(reply) => reply.status == 502,
                };
                assert!(failed, "{name} {path} (http2: {http2}): {response:?}");
            }
        }
    }
}

/// HTTP/2 forbids hop-by-hop headers (RFC 9113, section 8.2.2). If an upstream sends one, it must not reach an
/// HTTP/1.1 client.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hop_by_hop_response_header_is_never_forwarded() {
    let (peers, proxy, _) = setup(2).await;
    for http2 in [true, false] {
        for (name, value) in [
            ("connection", "close"),
            ("transfer-encoding", "chunked"),
            ("keep-alive", "timeout=1"),
            ("upgrade", "h2c"),
            ("proxy-connection", "close"),
            ("proxy-authenticate", "Basic"),
        ] {
            peers.set_actions([Action::Answer(Reply::ok("{}").header(name, value))]);
            let client = proxy.client_over(http2).await;
            let reply = soon(name, client.get(CONFIGMAPS)).await.unwrap();
            // jackstay rejects the response as malformed and retries, or strips the header.
            assert_eq!(reply.status, 200, "{name}");
            let forwarded = reply.headers.get(name).is_some_and(|v| v == value);
            assert!(!forwarded, "{name} (http2: {http2}): {:?}", reply.headers);
            assert_eq!(soon(name, client.get(CONFIGMAPS)).await.unwrap().status, 200, "{name}");
        }
    }
    let custom = Reply::ok("{}").header("x-remote-user", "root").header("x-anything", "1");
    peers.set_actions([Action::Answer(custom)]);
    let client = proxy.client().await;
    let reply = client.get(CONFIGMAPS).await.unwrap();
    assert_eq!(reply.headers["x-anything"], "1", "other headers are forwarded");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn request_that_a_goaway_includes_finishes_on_its_connection() {
    let (peers, _proxy, client) = setup(2).await;
    peers.set_default(Reply::ok("{}"));
    // The last stream id of the GOAWAY is the stream of the request.
    for round in 0..20 {
        let response = |id: u32| {
            let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
            (head, frame(DATA, END_STREAM, id, b"{}"))
        };
        let action = match round % 4 {
            0 => Action::raw(move |id| {
                [goaway(id, NO_ERROR), response(id).0, response(id).1].concat()
            }),
            1 => Action::raw(move |id| {
                [response(id).0, goaway(id, NO_ERROR), response(id).1].concat()
            }),
            2 => Action::raw(move |id| {
                [response(id).0, response(id).1, goaway(id, NO_ERROR)].concat()
            }),
            // Go sends two GOAWAYs: the first with the largest stream id, the second with the last stream.
            _ => Action::raw(move |id| {
                [
                    goaway(0x7fff_ffff, NO_ERROR),
                    response(id).0,
                    goaway(id, NO_ERROR),
                    response(id).1,
                ]
                .concat()
            }),
        };
        for write in [false, true] {
            peers.set_actions([action.clone()]);
            let reply = if write {
                soon("a write", client.post(CONFIGMAPS, &"{}".into())).await
            } else {
                soon("a read", client.get(CONFIGMAPS)).await
            };
            assert_eq!(reply.unwrap().status, 200, "round {round}, write: {write}");
            assert_eq!(peers.requests().len(), 1, "round {round}, write: {write}");
        }
    }
}

/// Repeats a GET while it gets 429. On a slow machine jackstay cannot open enough connections within a second
/// to have a stream for every request.
async fn get_until_admitted(client: &Client) -> u16 {
    loop {
        let reply = client.get(CONFIGMAPS).await.unwrap();
        if reply.status != 429 {
            return reply.status.as_u16();
        }
        assert_eq!(reply.headers["retry-after"], "1");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn requests_succeed_when_max_concurrent_streams_changes() {
    let (peers, _proxy, client) = setup(1).await;
    peers.set_default(Reply::ok("{}"));
    // A new limit arrives immediately before the response.
    peers.set_actions([Action::raw(|id| {
        [
            settings(&[(MAX_CONCURRENT_STREAMS, 1), (INITIAL_WINDOW_SIZE, 1 << 20)]),
            frame(HEADERS, END_HEADERS, id, &head(&[])),
            frame(DATA, END_STREAM, id, b"{}"),
        ]
        .concat()
    })]);
    assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
    *peers.settings.lock().unwrap() = vec![(MAX_CONCURRENT_STREAMS, 1)];
    peers.set_actions([]);
    let all = (0..40).map(|_| {
        let client = &client;
        async move { get_until_admitted(client).await }
    });
    let start = Instant::now();
    let statuses = soon("40 requests", join_all(all)).await;
    println!("40 requests, one stream per connection: {:?}", start.elapsed());
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
    assert_eq!(peers.requests().len(), 40);
    assert_eq!(peers.goaways.load(Relaxed), 0, "jackstay sent a GOAWAY");

    // The limit falls and rises while requests run.
    peers.set_actions([]);
    *peers.settings.lock().unwrap() = vec![];
    let all = (0..40).map(|n| {
        let (client, peers) = (&client, &peers);
        async move {
            if n % 5 == 0 {
                let streams = if n % 2 == 0 { 1 } else { 100 };
                let change = Action::raw(move |id| {
                    [
                        settings(&[(MAX_CONCURRENT_STREAMS, streams)]),
                        frame(HEADERS, END_HEADERS, id, &head(&[])),
                        frame(DATA, END_STREAM, id, b"{}"),
                    ]
                    .concat()
                });
                peers.set_actions([change]);
            }
            get_until_admitted(client).await
        }
    });
    let statuses = soon("40 requests", join_all(all)).await;
    assert!(statuses.iter().all(|status| *status == 200), "{statuses:?}");
}

/// The hedge goes to the other endpoint, and new requests avoid the silent connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn read_is_hedged_when_pings_are_unanswered() {
    let (peers, proxy, client) = setup_with(2, |_| {}).await;
    peers.set_default(Reply::ok("{}"));
    let mut slowest = Duration::ZERO;
    let mut silent_connections = Vec::new();
    for _ in 0..3 {
        peers.set_actions([Action::Unresponsive]);
        let start = Stopwatch::start();
        let reply = soon("a read", client.get(CONFIGMAPS)).await.unwrap();
        slowest = slowest.max(start.elapsed());
        assert_eq!(reply.status, 200);
        let seen = peers.requests();
        assert!(seen.len() >= 2, "{seen:?}");
        let Request { connection, stream, .. } = seen[0];
        until("the losing attempt is cancelled", async || {
            peers.resets().contains(&(connection, stream, CANCEL))
        })
        .await;
        silent_connections.push(connection);
    }
    assert!(proxy.hedges("hedge").await >= 3.0);
    let promise = Duration::from_millis(600);
    check_figure("slowest read on a connection that fell silent", slowest, promise);

    peers.set_actions([]);
    for _ in 0..20 {
        assert_eq!(soon("a read", client.get(CONFIGMAPS)).await.unwrap().status, 200);
    }
    let seen = peers.requests();
    assert!(
        !seen.iter().any(|request| silent_connections.contains(&request.connection)),
        "{seen:?}"
    );
}

/// A read that the budget does not allow to be hedged is retried when its connection has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn hedges_are_limited_by_a_budget() {
    const READS: usize = 400;
    let (peers, proxy, client) = setup_with(2, |_| {}).await;
    // Each connection falls silent with its first read.
    peers.set_actions(std::iter::repeat_n(Action::Unresponsive, READS));
    let all = (0..READS).map(|_| client.get(CONFIGMAPS));
    let replies = tokio::time::timeout(3 * PATIENCE, join_all(all)).await.unwrap();
    let failed = replies.iter().filter(|reply| reply.as_ref().is_err()).count();
    assert_eq!(failed, 0, "reads without a response");
    let (over_budget, won) = (proxy.hedges("over_budget").await, proxy.hedges("hedge").await);
    let made = won + proxy.hedges("original").await + proxy.hedges("failed").await;
    println!("{READS} reads: {made} hedges, {won} of them won, {over_budget} over the budget");
    assert!(over_budget >= 1.0, "{over_budget}");
    // The budget is a burst of about the streams of one connection, and a tenth of the reads.
    assert!((1.0..=READS as f64 / 2.0).contains(&made), "{made}");
}

/// The server takes long to respond, and its connection answers PINGs. Reads of resources are late then (`late_reads`).
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn slow_read_of_no_resource_is_not_hedged_while_its_connection_lives() {
    // On a busy machine a PONG may take longer than 100 ms, after which jackstay would hedge the read.
    let suspect_after = Some(Duration::from_secs(1));
    let (peers, _proxy, client) = setup_with(2, |config| {
        config.upstreams[0].health.suspect_after = suspect_after;
    })
    .await;
    peers.set_actions([Action::Hang]);
    let hanging =
        tokio::time::timeout(Duration::from_millis(1500), client.get("/openapi/v3")).await;
    assert!(hanging.is_err(), "the read got a response");
    assert_eq!(peers.requests().len(), 1, "the read was hedged");
    until("the stream is reset", async || peers.resets().len() == 1).await;
}

/// The server opens no flow-control window: the uploads wait, and their cancellation by the client reaches the
/// server.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn upload_without_a_window_blocks_no_other_request() {
    let peers = Peers::start(2);
    *peers.settings.lock().unwrap() = vec![(INITIAL_WINDOW_SIZE, 0)];
    peers.withhold_window.store(true, Relaxed);
    let proxy = peers.start_proxy(without_suspicion).await;
    let client = proxy.client().await;
    peers.set_default(Reply::ok("{}"));
    peers.set_actions(std::iter::repeat_n(Action::Hang, 8));
    let big = "x".repeat(200_000);
    let headers = [("content-type", "application/json")];
    let uploads = (0..8).map(|_| client.request(Method::POST, CONFIGMAPS, &headers, big.clone()));
    let uploading = join_all(uploads);
    let reading = async {
        until("all uploads have started", async || peers.requests().len() == 8).await;
        let start = Instant::now();
        for _ in 0..20 {
            assert_eq!(client.get(CONFIGMAPS).await.unwrap().status, 200);
        }
        println!("20 reads beside 8 blocked uploads: {:?}", start.elapsed());
    };
    tokio::select! {
        biased;
        _ = uploading => panic!("an upload ended"),
        () = soon("reads beside blocked uploads", reading) => {}
    }
    until("the uploads are reset", async || peers.resets().len() == 8).await;
}

/// Many tiny or empty DATA frames, PINGs, SETTINGS or unknown frames before the end of a response.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn frame_flood_is_tolerated_or_ends_the_connection() {
    let (peers, _proxy, client) = setup(2).await;
    let response = |id, noise: Vec<u8>| {
        let head = frame(HEADERS, END_HEADERS, id, &head(&[]));
        [head, noise, frame(DATA, END_STREAM, id, b"}")].concat()
    };
    let one_byte_frames =
        Action::raw(move |id| response(id, frame(DATA, 0, id, b"{").repeat(5000)));
    peers.set_actions([one_byte_frames]);
    let reply = soon("DATA of one byte", client.get(CONFIGMAPS)).await.unwrap();
    assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 5001));
    for (name, noise) in [
        ("empty DATA", frame(DATA, 0, 1, b"")),
        ("PING", frame(PING, 0, 0, &[7; 8])),
        ("SETTINGS", settings(&[])),
        ("unknown frames", frame(0x42, 0, 0, b"hello")),
        ("PRIORITY", frame(2, 0, 1, &[0, 0, 0, 3, 1])),
    ] {
        let action = Action::raw(move |id| {
            let mut noise = noise.clone();
            // Stream 1 in the list stands for the stream of the request.
            if noise[8] == 1 {
                noise[5..9].copy_from_slice(&id.to_be_bytes());
            }
            response(id, noise.repeat(3000))
        });
        peers.set_actions([action]);
        let reply = soon(name, client.get(CONFIGMAPS)).await;
        // The connection was closed, or the response is complete.
        if let Ok(reply) = reply {
            assert!(matches!(reply.status.as_u16(), 200 | 502), "{name}: {}", reply.status);
        }
        peers.set_actions([]);
        assert_eq!(soon(name, client.get(CONFIGMAPS)).await.unwrap().status, 200, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn malformed_watch_is_forwarded_and_never_resumed() {
    let (peers, _proxy, client) = setup(2).await;
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let event = |version: &str| {
        format!(
            r#"{{"type":"ADDED","object":{{"kind":"ConfigMap","apiVersion":"v1","metadata":{{"name":"a","resourceVersion":"{version}"}}}}}}"#
        ) + "\n"
    };
    for (name, text) in [
        ("a line that is not JSON", "not JSON\n".to_owned()),
        ("an event without a version", "{\"type\":\"ADDED\",\"object\":{}}\n".to_owned()),
        ("decreasing versions", event("9") + &event("8")),
        ("repeated versions", event("9").repeat(100)),
        ("a version of 10,000 digits", event(&"9".repeat(10_000))),
        ("a version that is not a number", event("abc")),
        ("deeply nested JSON", "[".repeat(25_000) + &"]".repeat(25_000) + "\n"),
    ] {
        peers.set_actions([Action::partial(Reply::ok(&text), |id| reset(id, INTERNAL_ERROR))]);
        // A reset that immediately follows the response head may discard the head.
        let Ok(response) = soon(name, client.send(Method::GET, &path, &[], "")).await else {
            continue;
        };
        let (received, end) = soon(name, read_body(response.into_body())).await;
        assert!(text.as_bytes().starts_with(&received), "{name}: the data was changed");
        assert_eq!(peers.requests().len(), 1, "{name}: resumed ({end:?})");
        println!("a watch with {name}: {} of {} bytes, {end:?}", received.len(), text.len());
    }
    assert!(!client.is_closed());
}

/// It is counted when the event arrives that makes a resume impossible, not when its stream is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_that_cannot_be_resumed_is_counted_once() {
    let (peers, proxy, client) = setup(1).await;
    let path = format!("{CONFIGMAPS}?watch=1&resourceVersion=5");
    let event = |version: &str| {
        let object = format!("{{\"metadata\":{{\"resourceVersion\":\"{version}\"}}}}");
        format!("{{\"type\":\"ADDED\",\"object\":{object}}}\n")
    };
    let texts = [
        "not JSON\nnor this\n".to_owned(),
        event("9") + &event("8") + &event("7"),
        event("abc"),
        event("6") + &event("7"),
    ];
    let mut watches = Vec::new();
    for text in &texts {
        peers.set_actions([Action::partial(Reply::ok(text), |_| Vec::new())]);
        let response = soon("a head", client.send(Method::GET, &path, &[], "")).await.unwrap();
        let mut body = response.into_body();
        let mut got = Vec::new();
        while got.len() < text.len() {
            let data = soon(text, next_data(&mut body)).await.unwrap();
            got.extend_from_slice(&data.expect("the watch continues"));
        }
        assert_eq!(got, text.as_bytes());
        watches.push(body);
    }
    let not_resumable = proxy.resumes("not_resumable").await;
    assert_eq!(not_resumable as usize, texts.len() - 1, "all watches except the last one");
}

/// A frame on a closed stream is answered with `RST_STREAM`, however many of them a connection carries.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn late_frames_on_closed_streams_do_not_end_the_connection() {
    // A suspect connection would be replaced.
    let suspect_after = Some(Duration::from_secs(1));
    let (peers, proxy, client) = setup_with(1, |config| {
        config.upstreams[0].health.suspect_after = suspect_after;
    })
    .await;
    // 1,100 streams, each of which gets a late frame below: more than the 1,024 that h2 tolerates by default.
    for _ in 0..22 {
        let replies = join_all((0..50).map(|_| client.get(CONFIGMAPS)));
        for reply in soon("responses", replies).await {
            assert_eq!(reply.unwrap().status, 200);
        }
    }
    let late_frames_and_response = |id| {
        let late = (1..id).step_by(2).flat_map(|earlier| frame(DATA, 0, earlier, b"late"));
        let response = frame(HEADERS, END_HEADERS, id, &head(&[]));
        late.chain(response).chain(frame(DATA, END_STREAM, id, b"{}")).collect()
    };
    peers.set_actions([Action::raw(late_frames_and_response)]);
    let reply = soon("a response", client.get(CONFIGMAPS)).await.unwrap();
    assert_eq!(reply.status, 200);
    assert!(proxy.metric("jackstay_retries_total").await < 0.5, "the connection was lost");
    until("the late frames are reset", async || !peers.resets().is_empty()).await;
    assert_eq!(peers.goaways.load(Relaxed), 0);
}
