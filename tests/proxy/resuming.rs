//! Upstreams that abuse what is done to keep a watch alive: it has bounds, and behind each of them an
//! end from which the client goes on by itself.

use crate::peer::{
    Act, END_HEADERS, HEADERS, INTERNAL_ERROR, NO_ERROR, Peers, Reply, fields, frame, goaway, reset,
};
use crate::support::{Certs, MAPS, Proxy, patient, replace, soon, strings, terminate, until};
use http::Method;
use hyper::body::Incoming;
use jackstay::config::CertPaths;
use jackstay::demo::client::{Client, next_data};
use jackstay::demo::pki::Subject;
use std::time::{Duration, Instant};

const FIRST: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"6"}}}"#;
const SECOND: &str = r#"{"type":"ADDED","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"b","resourceVersion":"7"}}}"#;
const BOOKMARK: &str = r#"{"type":"BOOKMARK","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"6"}}}"#;

/// Peers that all say the same, and a client before jackstay before them.
async fn scene(count: usize) -> (Peers, Proxy, Client) {
    let certs = Certs::new();
    let peers = Peers::start(&certs, count);
    let mut config = certs.config(&peers.addresses);
    // On a busy machine a PONG may take its time; here no connection is to be suspected for it.
    config.upstreams[0].health.suspect_after = Some(Duration::from_secs(5));
    config.upstreams[0].health.dead_after = Duration::from_secs(10);
    let proxy = certs.start(config);
    proxy.ready(count).await;
    let client = proxy.client(&certs.credentials()).await;
    (peers, proxy, client)
}

async fn watch(client: &Client) -> Incoming {
    watch_with(client, "resourceVersion=5").await
}

async fn watch_with(client: &Client, query: &str) -> Incoming {
    let path = format!("{MAPS}?watch=1&{query}");
    let answer = soon("a watch", client.send(Method::GET, &path, &[], "")).await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.into_body()
}

/// All that comes, and whether it ends cleanly.
async fn rest(mut body: Incoming, patience: Duration) -> (String, bool) {
    let mut got = Vec::new();
    let reading = async {
        loop {
            match next_data(&mut body).await {
                Ok(Some(data)) => got.extend_from_slice(&data),
                Ok(None) => break true,
                Err(_) => break false,
            }
        }
    };
    let clean = tokio::time::timeout(patience, reading).await.expect("an end");
    (String::from_utf8(got).unwrap(), clean)
}

fn lines(events: &[&str]) -> String {
    events.iter().flat_map(|event| [*event, "\n"]).collect()
}

/// Events on a stream that is then reset.
fn broken(events: &[&str]) -> Act {
    Act::partly(Reply::ok(&lines(events)), |id| reset(id, INTERNAL_ERROR))
}

/// Every stream that takes the watch over is lost at once. Twelve resumes a minute, and then the
/// client is told to watch again, without a list.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn nothing_is_resumed_for_ever() {
    let (peers, proxy, client) = scene(2).await;
    peers.script.play(std::iter::once(broken(&[FIRST])).chain((0..100).map(|_| broken(&[]))));
    // The pauses between them grow: about 8 s in all.
    let saw = rest(watch(&client).await, Duration::from_secs(60)).await;
    assert_eq!(saw, (lines(&[FIRST]), true));
    let seen = peers.script.seen().len();
    println!("asked {seen} times");
    assert!((6..=13).contains(&seen), "{seen}");
    let resumed = proxy.metric("jackstay_watch_resumes_total{outcome=\"resumed\"").await;
    assert!(resumed <= 12.0, "{resumed}");
}

/// An end that the server sends is its own, also on a stream that has just taken the watch over.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_end_on_a_resumed_stream_is_passed_on() {
    let (peers, _proxy, client) = scene(2).await;
    peers.script.usually(Reply::ok(""));
    peers.script.play([broken(&[FIRST])]);
    let saw = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(saw, (lines(&[FIRST]), true));
    assert_eq!(peers.script.seen().len(), 2);
}

/// One event again and again on a stream that was to go on after it: the client has it, and what
/// comes from there is not to be trusted.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_history_that_repeats_itself_is_left() {
    let (peers, _proxy, client) = scene(2).await;
    let again = [FIRST; 100];
    peers.script.play([broken(&[FIRST]), Act::partly(Reply::ok(&lines(&again)), |_| Vec::new())]);
    let saw = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(saw, (lines(&[FIRST]), true));
    until("its stream is reset", async || !peers.script.given_up().is_empty()).await;
}

/// The same of bookmarks is allowed, and these are not the client's: nothing comes of them, and
/// nothing stays of them. What follows does come.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn bookmarks_without_end_leave_nothing_behind() {
    let (peers, proxy, client) = scene(2).await;
    let mut bookmarks = vec![BOOKMARK; 100];
    bookmarks.push(SECOND);
    let second = Reply::ok(&lines(&bookmarks));
    peers.script.play([broken(&[FIRST]), Act::Answer(second)]);
    let saw = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(saw, (lines(&[FIRST, SECOND]), true));
    let held = proxy.metric("jackstay_held_frame_bytes").await;
    assert!(held.abs() < 1.0, "{held}");
}

/// Who says when to come again is not asked before, even where everybody says so: then it is who named
/// the sooner time that is asked again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn whoever_names_a_time_is_not_asked_before() {
    let (peers, _proxy, client) = scene(2).await;
    let busy = |time| Act::Answer(Reply::status("429", "{}").header("retry-after", time));
    peers.script.usually(Reply::ok(&lines(&[SECOND])));
    peers.script.play([broken(&[FIRST]), busy("25"), busy("2")]);
    let begun = Instant::now();
    let saw = rest(watch(&client).await, Duration::from_secs(30)).await;
    assert_eq!(saw, (lines(&[FIRST, SECOND]), true));
    let seen = peers.script.seen();
    let who: Vec<_> = seen.iter().map(|(peer, ..)| *peer).collect();
    assert_eq!(seen.len(), 4, "{who:?}");
    assert_ne!(who[1], who[2], "each of the two once");
    assert_eq!(who[3], who[2], "the other one's time is far away");
    assert!(begun.elapsed() >= Duration::from_secs(2), "{:?}", begun.elapsed());
}

/// A server that lives, by its PONGs, and does not answer: another one is asked after 10 s. The client
/// has no time limit of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_attempt_without_an_answer_is_given_up() {
    let (peers, _proxy, client) = scene(2).await;
    peers.script.usually(Reply::ok(&lines(&[SECOND])));
    peers.script.play([broken(&[FIRST]), Act::Hang]);
    let saw = rest(watch(&client).await, Duration::from_secs(60)).await;
    assert_eq!(saw, (lines(&[FIRST, SECOND]), true));
    let seen = peers.script.seen();
    assert!(seen.len() == 3 && seen[1].0 != seen[2].0, "another one: {seen:?}");
    until("what hangs is reset", async || !peers.script.given_up().is_empty()).await;
}

/// Half a frame is held, shown, and given back when the client goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn what_is_held_of_a_frame_is_shown() {
    let (peers, proxy, client) = scene(1).await;
    let half = format!("{FIRST}\n{}", &SECOND[..50]);
    peers.script.play([Act::raw(move |id| {
        let head = fields(&[(":status", "200"), ("content-type", "application/json")]);
        [frame(HEADERS, END_HEADERS, id, &head), frame(0, 0, id, half.as_bytes())].concat()
    })]);
    let mut body = watch(&client).await;
    let first = soon("the whole one", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!(first, lines(&[FIRST]));
    let held = async || proxy.metric("jackstay_held_frame_bytes").await as usize;
    until("the other half is held", async || held().await >= 50).await;
    drop(body);
    until("it is given back", async || held().await == 0).await;
}

/// client-go asks for a `WatchList` again that ends before the bookmark it waits for, and falls back
/// to a LIST where the stream is reset. Without that bookmark a clean end would look complete.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_list_cut_in_its_initial_events_ends_cleanly() {
    let (peers, _proxy, client) = scene(2).await;
    let list = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan";
    for (query, clean) in [
        (format!("{list}&allowWatchBookmarks=true"), true),
        (list.to_owned(), false),
        ("allowWatchBookmarks=true".to_owned(), false),
    ] {
        // Cut when the client has its beginning: a reset overtakes what waits to be sent.
        peers.script.play([Act::PartlyCut(Reply::ok(&lines(&[FIRST])))]);
        let saw = rest(watch_with(&client, &query).await, Duration::from_secs(30)).await;
        assert_eq!(saw, (lines(&[FIRST]), clean), "{query}");
        assert_eq!(peers.script.seen().len(), 1, "{query}: not asked again");
    }
}

/// A watch that begins at its server's present cannot be asked for again: it would begin later. Once a
/// bookmark has named a version it goes on there.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_from_the_present_is_not_restarted() {
    let (peers, _proxy, client) = scene(2).await;
    peers.script.usually(Reply::ok(&lines(&[SECOND])));
    let query = "sendInitialEvents=false&resourceVersionMatch=NotOlderThan";
    peers.script.play([broken(&[])]);
    let saw = rest(watch_with(&client, query).await, Duration::from_secs(30)).await;
    assert_eq!(saw, (String::new(), true));
    assert_eq!(peers.script.seen().len(), 1);
    peers.script.play([broken(&[BOOKMARK])]);
    let saw = rest(watch_with(&client, query).await, Duration::from_secs(30)).await;
    assert_eq!(saw, (lines(&[SECOND]), true));
    assert_eq!(peers.script.seen().len(), 2);
}

/// A proxy before one peer, whose credential a test can replace.
struct Rotation {
    certs: Certs,
    peers: Peers,
    proxy: Proxy,
}

impl Rotation {
    async fn start() -> Self {
        let certs = Certs::new();
        let peers = Peers::start(&certs, 1);
        let current = certs.path().join("current.pem");
        certs.admin.write_pair(certs.path(), "first").unwrap();
        let second = certs.pki.client(&Subject::admin()).unwrap();
        second.write_pair(certs.path(), "second").unwrap();
        std::os::unix::fs::symlink(certs.path().join("first.pem"), &current).unwrap();
        let mut config = certs.config(&peers.addresses);
        config.upstreams[0].health.suspect_after = Some(Duration::from_secs(5));
        config.upstreams[0].health.dead_after = Duration::from_secs(10);
        terminate(&mut config).identities =
            vec![CertPaths { cert_file: current.clone(), key_file: current }];
        let proxy = certs.start(config);
        proxy.ready(1).await;
        Self { certs, peers, proxy }
    }

    fn replace_credential(&self) {
        let next = self.certs.path().join("next");
        std::os::unix::fs::symlink(self.certs.path().join("second.pem"), &next).unwrap();
        std::fs::rename(next, self.certs.path().join("current.pem")).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_leaves_a_replaced_certificate_only_for_a_stream_that_takes_it() {
    let rotation = Rotation::start().await;
    let Rotation { certs, peers, proxy } = &rotation;
    let client = proxy.client(&certs.credentials()).await;
    leave_for_one_that_takes_it(peers, &client, |_| rotation.replace_credential()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_leaves_a_removed_endpoint_only_for_a_stream_that_takes_it() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let file = certs.path().join("endpoints");
    replace(&file, &strings(&peers.addresses).join("\n"));
    let mut config = patient(certs.config(&[]));
    config.upstreams[0].endpoints_file = Some(file.clone());
    let proxy = certs.start(config);
    proxy.ready(2).await;
    let client = proxy.client(&certs.credentials()).await;
    let remove = |peer: usize| replace(&file, &peers.addresses[1 - peer].to_string());
    leave_for_one_that_takes_it(&peers, &client, remove).await;
}

/// A watch whose connection gets a reason to be left, by what `give_reason` does to the peer that it is
/// on: it stays on its stream while the other connection refuses it, by a status or by an ERROR event,
/// and leaves the old stream for one that takes it.
async fn leave_for_one_that_takes_it(
    peers: &Peers,
    client: &Client,
    give_reason: impl FnOnce(usize),
) {
    const TOO_OLD: &str =
        r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","code":410}}"#;
    peers.script.play([
        Act::partly(Reply::ok(&lines(&[FIRST])), |_| Vec::new()),
        Act::Answer(Reply::status("503", "{}")),
        Act::Answer(Reply::ok(&lines(&[TOO_OLD]))),
        Act::Answer(Reply::ok(&lines(&[SECOND]))),
    ]);
    let mut body = watch(client).await;
    let first = soon("an event", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!(first, lines(&[FIRST]));
    give_reason(peers.script.seen()[0].0);
    until("another connection is asked", async || peers.script.seen().len() >= 2).await;
    // The next attempt is at least 2 s later, and no success either.
    assert_eq!(peers.script.given_up(), [], "its stream was given up for nothing");
    let saw = rest(body, Duration::from_secs(60)).await;
    assert_eq!(saw, (lines(&[SECOND]), true));
    let seen = peers.script.seen();
    assert_eq!(seen.len(), 4, "{seen:?}");
    let old = (seen[0].1, seen[0].2);
    until("its old stream alone was left", async || {
        let left = peers.script.given_up();
        left.iter().map(|(at, stream, _)| (*at, *stream)).eq([old])
    })
    .await;
}

/// An apiserver that ends sends a GOAWAY first, which alone moves nothing, and leaves the set afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn watch_leaves_a_connection_that_drained_already_when_there_is_a_reason() {
    let rotation = Rotation::start().await;
    let Rotation { certs, peers, proxy } = &rotation;
    let client = proxy.client(&certs.credentials()).await;
    peers.script.play([
        Act::partly(Reply::ok(&lines(&[FIRST])), |id| goaway(id, NO_ERROR)),
        Act::Answer(Reply::ok(&lines(&[SECOND]))),
    ]);
    let mut body = watch(&client).await;
    let first = soon("an event", next_data(&mut body)).await.unwrap().unwrap();
    assert_eq!(first, lines(&[FIRST]));
    rotation.replace_credential();
    assert_eq!(rest(body, Duration::from_secs(60)).await, (lines(&[SECOND]), true));
    assert_eq!(peers.script.seen().len(), 2);
}
