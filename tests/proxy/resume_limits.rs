//! Upstreams that fail while a watch is resumed. Resumes are limited; when a limit is reached, the watch ends in
//! a way that lets the client continue.

use crate::scripted_peer::{
    Action, BOOKMARK, FIRST, Peers, Reply, SECOND, lines, member, setup_with,
};
use crate::support::http2::{
    END_HEADERS, HEADERS, INTERNAL_ERROR, NO_ERROR, field_block, frame, goaway, reset,
};
use crate::support::{
    CONFIGMAPS, Proxy, read_body, replace_file, replace_symlink, soon, terminate_mode, to_strings,
    tolerate_late_pongs, until, without_suspicion,
};
use http::Method;
use hyper::body::Incoming;
use jackstay_apiserver::client::{Client, next_data};
use jackstay_apiserver::pki::Subject;
use jackstay_config::CertPaths;
use std::time::{Duration, Instant};

/// Peers, jackstay in front of them with [`tolerate_late_pongs`], and a client.
async fn setup(count: usize) -> (Peers, Proxy, Client) {
    setup_with(count, tolerate_late_pongs).await
}

async fn watch(client: &Client) -> Incoming {
    watch_with(client, "resourceVersion=5").await
}

async fn watch_with(client: &Client, query: &str) -> Incoming {
    let path = format!("{CONFIGMAPS}?watch=1&{query}");
    let response = soon("a watch", client.send(Method::GET, &path, &[], "")).await.unwrap();
    assert_eq!(response.status(), 200);
    response.into_body()
}

/// Reads a body to its end. Returns the data, and whether the end is clean.
async fn rest(body: Incoming, limit: Duration) -> (String, bool) {
    let (rest, end) = tokio::time::timeout(limit, read_body(body)).await.expect("the body ends");
    (String::from_utf8(rest).unwrap(), end.is_ok())
}

/// Sends events and then resets the stream.
fn events_then_reset(events: &[&str]) -> Action {
    Action::partial(Reply::ok(&lines(events)), |id| reset(id, INTERNAL_ERROR))
}

/// The server ends the stream to which the watch has just been resumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn clean_end_after_a_resume_is_forwarded() {
    let (peers, _proxy, client) = setup(2).await;
    peers.set_default(Reply::ok(""));
    peers.set_actions([events_then_reset(&[FIRST])]);
    let received = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(received, (lines(&[FIRST]), true));
    assert_eq!(peers.requests().len(), 2);
}

/// The new stream sends events that the client already has. The first is discarded. The second ends the watch,
/// because the server's history may differ.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn second_repeated_event_after_a_resume_ends_the_watch_cleanly() {
    let (peers, _proxy, client) = setup(2).await;
    let repeated = [FIRST; 100];
    peers.set_actions([
        events_then_reset(&[FIRST]),
        Action::partial(Reply::ok(&lines(&repeated)), |_| Vec::new()),
    ]);
    let received = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(received, (lines(&[FIRST]), true));
    until("the stream is reset", async || !peers.resets().is_empty()).await;
}

/// The client has not asked for bookmarks, and no frame stays buffered.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn repeated_bookmarks_after_a_resume_are_dropped_and_later_events_forwarded() {
    let (peers, proxy, client) = setup(2).await;
    let mut bookmarks = vec![BOOKMARK; 100];
    bookmarks.push(SECOND);
    let second = Reply::ok(&lines(&bookmarks));
    peers.set_actions([events_then_reset(&[FIRST]), Action::Answer(second)]);
    let received = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(received, (lines(&[FIRST, SECOND]), true));
    let buffered = proxy.metric("jackstay_held_frame_bytes").await;
    assert!(buffered.abs() < 1.0, "{buffered}");
}

/// Both endpoints refuse the resume with a Retry-After. jackstay waits for the shorter time and asks that
/// endpoint again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn resume_waits_for_retry_after() {
    let (peers, _proxy, client) = setup(2).await;
    let busy = |time| Action::Answer(Reply::status("429", "{}").header("retry-after", time));
    peers.set_default(Reply::ok(&lines(&[SECOND])));
    peers.set_actions([events_then_reset(&[FIRST]), busy("25"), busy("2")]);
    let start = Instant::now();
    let received = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(received, (lines(&[FIRST, SECOND]), true));
    let seen = peers.requests();
    let peers: Vec<_> = seen.iter().map(|request| request.peer).collect();
    assert_eq!(seen.len(), 4, "{peers:?}");
    assert_ne!(peers[1], peers[2], "an endpoint was asked twice before its Retry-After");
    assert_eq!(peers[3], peers[2], "the endpoint with the longer Retry-After was asked");
    assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
}

/// The server answers PINGs but sends no response head. The attempt is abandoned after 10 s, because the client
/// of a running watch has no timeout that would end the wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn resume_without_a_response_head_is_tried_on_another_endpoint() {
    let (peers, _proxy, client) = setup(2).await;
    peers.set_default(Reply::ok(&lines(&[SECOND])));
    peers.set_actions([events_then_reset(&[FIRST]), Action::Hang]);
    let received = rest(watch(&client).await, Duration::from_secs(60)).await;
    assert_eq!(received, (lines(&[FIRST, SECOND]), true));
    let seen = peers.requests();
    assert!(seen.len() == 3 && seen[1].peer != seen[2].peer, "{seen:?}");
    until("the attempt is reset", async || !peers.resets().is_empty()).await;
}

/// The part of an event that has arrived is counted in a metric, and released when the client disconnects.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn buffered_part_of_an_event_is_counted() {
    let (peers, proxy, client) = setup(1).await;
    let half = format!("{FIRST}\n{}", &SECOND[..50]);
    peers.set_actions([Action::raw(move |id| {
        let head = field_block(&[(":status", "200"), ("content-type", "application/json")]);
        [frame(HEADERS, END_HEADERS, id, &head), frame(0, 0, id, half.as_bytes())].concat()
    })]);
    let mut body = watch(&client).await;
    let first = soon("the first event", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!(first, lines(&[FIRST]));
    let buffered = async || proxy.metric("jackstay_held_frame_bytes").await as usize;
    until("the incomplete event is buffered", async || buffered().await >= 50).await;
    drop(body);
    until("nothing is buffered", async || buffered().await == 0).await;
}

/// client-go repeats a `WatchList` that ends before the bookmark that it expects, but falls back to a LIST if
/// the stream is reset. Without such a bookmark, initial events that end cleanly would look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_lost_during_its_initial_events_ends_cleanly_only_if_it_expects_a_bookmark() {
    let (peers, _proxy, client) = setup(2).await;
    let list = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    for (query, clean) in [
        (format!("{list}&allowWatchBookmarks=true"), true),
        (list.to_owned(), false),
        ("allowWatchBookmarks=true".to_owned(), false),
    ] {
        // The peer closes the connection instead of resetting the stream, because a reset overtakes the event.
        peers.set_actions([Action::PartialThenClose(Reply::ok(&lines(&[FIRST])))]);
        let received = rest(watch_with(&client, &query).await, Duration::from_secs(30)).await;
        assert_eq!(received, (lines(&[FIRST]), clean), "{query}");
        assert_eq!(peers.requests().len(), 1, "{query}: not sent again");
    }
}

/// A watch without a resource version and with `sendInitialEvents=false` starts at the server's present
/// version. If it were repeated, it would start at a later version and miss events. A bookmark contains the
/// version.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_without_a_version_resumes_after_a_bookmark_but_not_before() {
    let (peers, _proxy, client) = setup(2).await;
    peers.set_default(Reply::ok(&lines(&[SECOND])));
    let query = "sendInitialEvents=false&resourceVersionMatch=NotOlderThan";
    peers.set_actions([events_then_reset(&[])]);
    let received = rest(watch_with(&client, query).await, Duration::from_secs(30)).await;
    assert_eq!(received, (String::new(), true));
    assert_eq!(peers.requests().len(), 1);
    peers.set_actions([events_then_reset(&[BOOKMARK])]);
    let received = rest(watch_with(&client, query).await, Duration::from_secs(30)).await;
    assert_eq!(received, (lines(&[SECOND]), true));
    assert_eq!(peers.requests().len(), 2);
}

/// Two attempts are refused, one by a status and one by an ERROR event, and the watch stays on its stream. The third
/// attempt succeeds.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_of_a_removed_endpoint_moves_only_when_an_attempt_succeeds() {
    moves_only_when_an_attempt_succeeds(|events| Reply::ok(&lines(events))).await;
}

/// A refusal is read from a compressed stream, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn compressed_watch_moves_only_when_an_attempt_succeeds() {
    let reply = |events: &[&str]| Reply::gzip(member(lines(events).as_bytes()));
    moves_only_when_an_attempt_succeeds(reply).await;
}

async fn moves_only_when_an_attempt_succeeds(reply: impl Fn(&[&str]) -> Reply) {
    const TOO_OLD: &str =
        r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","code":410}}"#;
    let peers = Peers::start(2);
    let file = peers.certs.path().join("endpoints");
    replace_file(&file, &to_strings(&peers.addresses).join("\n"));
    let proxy = peers
        .start_proxy(|config| {
            without_suspicion(config);
            config.upstreams[0].endpoints.clear();
            config.upstreams[0].endpoints_file = Some(file.clone());
        })
        .await;
    let client = proxy.client().await;
    peers.set_actions([
        Action::partial(reply(&[FIRST]), |_| Vec::new()),
        Action::Answer(Reply::status("503", "{}")),
        Action::Answer(reply(&[TOO_OLD])),
        Action::Answer(reply(&[SECOND])),
    ]);
    let mut body = watch(&client).await;
    let first = soon("an event", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!(first, lines(&[FIRST]));
    let other = 1 - peers.requests()[0].peer;
    replace_file(&file, &peers.addresses[other].to_string());
    until("another stream is tried", async || peers.requests().len() >= 2).await;
    // The next attempt comes at least 2 s later and fails too, so the watch must not have moved yet.
    assert_eq!(peers.resets(), [], "the old stream was reset too early");
    let received = rest(body, Duration::from_secs(60)).await;
    assert_eq!(received, (lines(&[SECOND]), true));
    let seen = peers.requests();
    assert_eq!(seen.len(), 4, "{seen:?}");
    let old = (seen[0].connection, seen[0].stream);
    until("only the old stream is reset", async || {
        let resets = peers.resets();
        resets.iter().map(|(at, stream, _)| (*at, *stream)).eq([old])
    })
    .await;
}

/// A GOAWAY alone would not move the watch.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_moves_from_a_draining_connection_when_its_certificate_is_replaced() {
    let peers = Peers::start(1);
    let (certs, dir) = (&peers.certs, peers.certs.path());
    certs.admin.write_pair(dir, "first").unwrap();
    certs.pki.client(&Subject::admin()).unwrap().write_pair(dir, "second").unwrap();
    let current = dir.join("current.pem");
    replace_symlink(&current, &dir.join("first.pem"));
    let pair = CertPaths { cert_file: current.clone(), key_file: current.clone() };
    let proxy = peers
        .start_proxy(|config| {
            tolerate_late_pongs(config);
            terminate_mode(config).identities = vec![pair.into()];
        })
        .await;
    let client = proxy.client().await;
    peers.set_actions([
        Action::partial(Reply::ok(&lines(&[FIRST])), |id| goaway(id, NO_ERROR)),
        // The trial of the new certificate.
        Action::Answer(Reply::ok("{}")),
        Action::Answer(Reply::ok(&lines(&[SECOND]))),
    ]);
    let mut body = watch(&client).await;
    let first = soon("an event", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!(first, lines(&[FIRST]));
    replace_symlink(&current, &dir.join("second.pem"));
    assert_eq!(rest(body, Duration::from_secs(60)).await, (lines(&[SECOND]), true));
    assert_eq!(peers.requests().len(), 3);
}
