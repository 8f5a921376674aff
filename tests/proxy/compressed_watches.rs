//! Watches whose response is compressed, as kube-apiserver 1.37 sends them, and as no server should.

use std::io::{Read as _, Write as _};
use std::sync::atomic::Ordering::Relaxed;

use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use http::{Method, header};
use hyper::body::Incoming;
use jackstay_apiserver::client::Client;
use jackstay_config as config;
use serde_json::Value;

use crate::scripted_peer::{Action, FIRST, Peers, Reply, SECOND, lines, member, setup};
use crate::support::http2::{DATA, END_STREAM, INTERNAL_ERROR, frame, reset};
use crate::support::{
    CONFIGMAPS, TestCluster, config_map, long_form, read_body, soon, until, without_suspicion,
};

const LIST: &str =
    "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
/// Largest payload of a frame, in bytes (RFC 9113, section 6.5.2).
const FRAME: usize = 16_384;
const INITIAL_EVENTS_END: &str = r#"{"type":"BOOKMARK","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"6","annotations":{"k8s.io/initial-events-end":"true"}}}}"#;

fn event(event: &str) -> Vec<u8> {
    lines(&[event]).into_bytes()
}

/// Sends a compressed body in frames of the default size, and ends it.
fn whole(body: Vec<u8>) -> Action {
    Action::partial(Reply::gzip(Vec::new()), move |id| {
        let frames = body.chunks(FRAME).flat_map(|part| frame(DATA, 0, id, part));
        frames.chain(frame(DATA, END_STREAM, id, &[])).collect()
    })
}

/// Starts a watch, which must not be compressed for its client.
async fn watch(client: &Client, query: &str) -> Incoming {
    let path = format!("{CONFIGMAPS}?watch=1&{query}");
    let headers = [("accept-encoding", "gzip")];
    let response = soon("a watch", client.send(Method::GET, &path, &headers, "")).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(!response.headers().contains_key(header::CONTENT_ENCODING), "{response:?}");
    response.into_body()
}

/// Reads a body to its end. Returns the data, and whether the end is clean.
async fn rest(body: Incoming) -> (String, bool) {
    let (rest, end) = soon("the end of the watch", read_body(body)).await;
    (String::from_utf8(rest).unwrap(), end.is_ok())
}

/// The bodies in which a server may send the events: members by event and by batch, empty members, and a member
/// that goes on after a flush.
fn bodies(events: &[&str]) -> Vec<(&'static str, Vec<u8>)> {
    let all = lines(events).into_bytes();
    let by_event: Vec<_> = events.iter().map(|one| member(&event(one))).collect();
    let mut flushed = GzEncoder::new(Vec::new(), Compression::fast());
    for one in events {
        flushed.write_all(&event(one)).unwrap();
        flushed.flush().unwrap();
        flushed.flush().unwrap();
    }
    let halves = all.split_at(all.len() / 2 + 3);
    vec![
        ("by event", by_event.concat()),
        ("by batch", member(&all)),
        ("empty members", [member(b""), by_event.join(&member(b"")[..]), member(b"")].concat()),
        ("an event in two members", [member(halves.0), member(halves.1)].concat()),
        ("flushed", flushed.finish().unwrap()),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn client_receives_the_events_of_every_kind_of_members() {
    let (peers, proxy, client) = setup(1).await;
    let events = [FIRST, INITIAL_EVENTS_END, SECOND];
    let mut received = 0;
    for (kind, body) in bodies(&events) {
        received += body.len();
        // No apiserver sends the length of a watch. It would be wrong for the client.
        let length = body.len().to_string().leak();
        peers.set_actions([Action::Answer(Reply::gzip(body).header("content-length", length))]);
        let watched = rest(watch(&client, LIST).await).await;
        assert_eq!(watched, (lines(&events), true), "{kind}");
    }
    let bytes = async |form: &str| {
        let labels = format!("{{upstream=\"control-plane\",form=\"{form}\"}}");
        proxy.metric(&format!("jackstay_watch_gzip_bytes_total{labels}")).await as usize
    };
    assert_eq!(bytes("received").await, received);
    assert_eq!(bytes("inflated").await, 5 * lines(&events).len());
}

/// A frame in one byte each, and at each place one in two.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn members_may_be_split_anywhere() {
    let (peers, _proxy, client) = setup(1).await;
    let body = [member(&event(FIRST)), member(&event(SECOND))].concat();
    for at in (0..body.len()).step_by(7) {
        let rest_of_body = body[at..].to_vec();
        let then = move |id| {
            let (last, bytes) = rest_of_body.split_last().unwrap();
            let single = bytes.iter().flat_map(|&byte| frame(DATA, 0, id, &[byte]));
            single.chain(frame(DATA, END_STREAM, id, &[*last])).collect()
        };
        peers.set_actions([Action::partial(Reply::gzip(body[..at].to_vec()), then)]);
        let watched = rest(watch(&client, "resourceVersion=5").await).await;
        assert_eq!(watched, (lines(&[FIRST, SECOND]), true), "{at}");
    }
}

/// The stream is lost in the middle of a member. It continues on one that is compressed or not, without the part
/// of the event that has arrived.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn compressed_watch_is_resumed_on_either_kind_of_stream() {
    let (peers, proxy, client) = setup(2).await;
    let mut flushed = GzEncoder::new(Vec::new(), Compression::fast());
    flushed.write_all(&event(FIRST)).unwrap();
    flushed.write_all(&SECOND.as_bytes()[..50]).unwrap();
    flushed.flush().unwrap();
    let lost = flushed.get_ref().clone();
    for (kind, next) in [
        ("compressed", Reply::gzip(member(&event(SECOND)))),
        ("plain", Reply::ok(&lines(&[SECOND]))),
        ("declared as plain", Reply::ok(&lines(&[SECOND])).header("content-encoding", "identity")),
    ] {
        let lose = Action::partial(Reply::gzip(lost.clone()), |id| reset(id, INTERNAL_ERROR));
        peers.set_actions([lose, Action::Answer(next)]);
        let watched = rest(watch(&client, "resourceVersion=5").await).await;
        assert_eq!(watched, (lines(&[FIRST, SECOND]), true), "{kind}");
    }
    let held = proxy.metric("jackstay_held_frame_bytes").await;
    assert!(held.abs() < 1.0, "{held}");
    assert!(proxy.status().await["upstreams"][0]["gzip_failure"].is_null());
}

/// An endpoint that answers a resume with a coding that jackstay does not read is not the next stream.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn resume_with_an_unknown_coding_is_asked_of_another_endpoint() {
    let (peers, _proxy, client) = setup(2).await;
    let lose = Action::partial(Reply::gzip(member(&event(FIRST))), |id| reset(id, INTERNAL_ERROR));
    let unknown = Reply::ok("(coded)").header("content-encoding", "zstd");
    let next = Reply::gzip(member(&event(SECOND)));
    peers.set_actions([lose, Action::Answer(unknown), Action::Answer(next)]);
    let watched = rest(watch(&client, "resourceVersion=5").await).await;
    assert_eq!(watched, (lines(&[FIRST, SECOND]), true));
    assert_eq!(peers.requests().len(), 3);
}

/// Only the stream of the body ends that cannot be decoded: its watch continues with another one, the other watches
/// keep theirs, and the status has the reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn undecodable_stream_is_left_and_its_watch_continues() {
    let first = member(&event(FIRST));
    let bomb = member(&vec![b' '; 33 << 20]);
    let (last, most) = first.split_last().unwrap();
    let with = |bytes: &[u8]| [&first[..], bytes].concat();
    for (body, label, reason) in [
        (with(&bomb), "ratio", "inflate to more than 200 times their size"),
        (with(&first[..20]), "invalid", "the response ends within a gzip member"),
        (with(b"\0\0\0"), "invalid", "bytes that are no gzip member"),
        (with(b"{}\n"), "invalid", "bytes that are no gzip member"),
        ([most, &[!last]].concat(), "invalid", "the checksum of a gzip member is wrong"),
    ] {
        let (peers, proxy, client) = setup(2).await;
        let idle = Action::partial(Reply::gzip(member(&event(FIRST))), |_| Vec::new());
        peers.set_actions([idle]);
        let mut other = watch(&client, "resourceVersion=5").await;
        let data = soon("an event", jackstay_apiserver::client::next_data(&mut other)).await;
        assert_eq!(data.unwrap().unwrap(), event(FIRST));
        peers.set_actions([whole(body.clone()), Action::Answer(Reply::ok(&lines(&[SECOND])))]);
        let (watched, is_clean) = rest(watch(&client, "resourceVersion=5").await).await;
        // The bomb consists of white space between events.
        assert_eq!(watched.replace(' ', ""), lines(&[FIRST, SECOND]), "{reason}");
        assert!(is_clean, "{reason}");
        let labels = format!("{{upstream=\"control-plane\",reason=\"{label}\"}}");
        let failures = proxy.metric(&format!("jackstay_watch_gzip_errors_total{labels}")).await;
        assert!((failures - 1.0).abs() < 0.1, "{reason}: {failures}");
        let failure = &proxy.status().await["upstreams"][0]["gzip_failure"];
        assert!(failure["reason"].as_str().unwrap().contains(reason), "{reason}: {failure}");
        assert!(
            peers.resets().is_empty() || peers.resets().len() == 1,
            "{reason}: the other watch"
        );
        drop(other);
    }
}

/// h2 grants window again when at least half as much was read as is left of the stream window of 256 KiB. Of these
/// frames only the last one reaches that, in whatever order they are received and decoded.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn window_of_an_idle_watch_is_granted_again() {
    let (peers, _proxy, client) = setup(1).await;
    let text: String =
        (0..).map(|n: u32| format!("{:08x}", n.wrapping_mul(2_654_435_761))).take(60_000).collect();
    let long = format!(
        r#"{{"type":"ADDED","object":{{"kind":"ConfigMap","metadata":{{"resourceVersion":"6"}},"data":"{text}"}}}}"#
    );
    let mut body = member(&event(&long));
    let (size, count) = (10_000, 9);
    assert!(body.len() > size * count, "{}", body.len());
    body.truncate(size * count);
    let frames = move |id| body.chunks(size).flat_map(|part| frame(DATA, 0, id, part)).collect();
    peers.set_actions([Action::partial(Reply::gzip(Vec::new()), frames)]);
    let _watch = watch(&client, "resourceVersion=5").await;
    until("the window is granted", async || peers.granted.load(Relaxed) == size * count).await;
}

/// A list that cannot be decoded ends, because its events have no order yet. Its client lists again, and the apiserver
/// is not asked for gzip.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn undecodable_list_ends_and_pauses_gzip() {
    let (peers, proxy, client) = setup(2).await;
    peers.set_actions([whole([&member(&event(FIRST))[..], b"{}"].concat())]);
    let (received, _) = rest(watch(&client, LIST).await).await;
    assert_eq!(received, lines(&[FIRST]));
    assert_eq!(peers.requests().len(), 1);
    let failure = &proxy.status().await["upstreams"][0]["gzip_failure"];
    assert_eq!(failure["reason"], "bytes that are no gzip member");
}

/// An event without an end is above what jackstay holds of one.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn endless_event_is_forwarded_in_pieces() {
    let (peers, proxy, client) = setup(1).await;
    let long = format!(r#"{{"type":"ADDED","object":{{"data":"{}"#, "text ".repeat(2_500_000));
    let mut body = member(long.as_bytes());
    body.truncate(body.len() - 4);
    peers.set_actions([whole(body)]);
    let (received, is_clean) = rest(watch(&client, "resourceVersion=5").await).await;
    assert!(!is_clean);
    // The reset of the stream overtakes the last bytes.
    assert!(long.starts_with(&received) && received.len() > 8 << 20, "{}", received.len());
    until("nothing is held", async || proxy.metric("jackstay_held_frame_bytes").await < 1.0).await;
}

/// With `compression: off`, and if a client refuses gzip, the apiserver is not asked for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn compression_is_asked_for_as_configured() {
    for (compression, codings, is_compressed) in [
        (config::Compression::Auto, &[("accept-encoding", "gzip")][..], true),
        (config::Compression::Auto, &[], true),
        (config::Compression::Auto, &[("accept-encoding", "identity")], false),
        (config::Compression::Off, &[("accept-encoding", "gzip")], false),
    ] {
        let cluster = TestCluster::new(1);
        let proxy = cluster
            .start_with(|config| {
                without_suspicion(config);
                config.upstreams[0].compression = compression;
            })
            .await;
        let client = proxy.client().await;
        client.post(CONFIGMAPS, &config_map("a", "1")).await.unwrap();
        let path = format!("{CONFIGMAPS}?watch=1&{LIST}&timeoutSeconds=1");
        let response = client.send(Method::GET, &path, codings, "").await.unwrap();
        let (body, end) = read_body(response.into_body()).await;
        let body = String::from_utf8(body).unwrap();
        assert!(end.is_ok() && body.starts_with(r#"{"type":"ADDED""#), "{body}");
        let name = "jackstay_watch_gzip_bytes_total{upstream=\"control-plane\",form=\"inflated\"}";
        let inflated = proxy.metric(name).await as usize;
        assert_eq!(
            inflated,
            if is_compressed { body.len() } else { 0 },
            "{compression:?} {codings:?}"
        );
    }
}

/// A pod as a Deployment creates it, with status and managed fields, of which some hundred bytes differ from those of
/// other pods.
fn pod(n: u32) -> Value {
    let hash = format!("{:08x}", n.wrapping_mul(2_654_435_761));
    let text = include_str!("pod.json")
        .replace("$HASH", &hash)
        .replace("$UID", &format!("{hash}-3f2a-4c1d-9b7e-{n:04x}{hash}"))
        .replace("$IP", &format!("10.{}.{}.{}", n % 3, n % 256, n / 256))
        .replace("$TIME", &format!("2026-11-26T{:02}:{:02}:{:02}Z", n % 24, n % 60, n % 59));
    serde_json::from_str(&text).unwrap()
}

/// The bytes that a list by a watch takes on the line of the apiserver.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn list_of_pods_takes_an_eighth_of_its_bytes_on_the_line() {
    let pods = if long_form() { 5_000 } else { 200 };
    let cluster = TestCluster::new(1);
    let proxy = cluster.start_with(without_suspicion).await;
    let client = proxy.client().await;
    for n in 0..pods {
        let reply = client.post("/api/v1/namespaces/default/pods", &pod(n)).await.unwrap();
        assert_eq!(reply.status, 201, "{:?}", reply.body);
    }
    let path = format!("/api/v1/pods?watch=1&{LIST}&timeoutSeconds=1");
    let response = client.send(Method::GET, &path, &[], "").await.unwrap();
    let (body, end) = read_body(response.into_body()).await;
    end.unwrap();
    let bytes = async |form: &str| {
        let labels = format!("{{upstream=\"control-plane\",form=\"{form}\"}}");
        proxy.metric(&format!("jackstay_watch_gzip_bytes_total{labels}")).await as usize
    };
    let (received, inflated) = (bytes("received").await, bytes("inflated").await);
    println!("{pods} pods: {inflated} bytes of events, {received} on the line");
    assert_eq!(inflated, body.len());
    assert!(received * 8 < inflated, "{received} of {inflated}");
}

/// A client on another host gets gzip members that begin and end with its events, also after the watch has continued on
/// a stream that is not compressed. Run it with
/// `unshare -n sh -c 'ip link set lo up && cargo test --test proxy compressed_watches -- --ignored'`.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
#[ignore = "needs root and a network namespace of its own"]
async fn remote_client_receives_gzip_if_the_apiserver_compresses() {
    // Connections to the first address have the second one as their source.
    for command in [
        "addr add 192.0.2.1/32 dev lo",
        "addr add 192.0.2.2/32 dev lo",
        "route replace local 192.0.2.1 dev lo table local src 192.0.2.2",
    ] {
        let status = std::process::Command::new("ip").args(command.split(' ')).status().unwrap();
        assert!(status.success(), "ip {command}");
    }
    let peers = Peers::start(2);
    let proxy = peers
        .start_proxy(|config| {
            without_suspicion(config);
            config.listeners[0].bind = vec!["192.0.2.1:0".parse().unwrap()];
        })
        .await;
    let client = proxy.client_with(&proxy.credentials.clone().expecting("127.0.0.1")).await;
    let path = format!("{CONFIGMAPS}?watch=1&{LIST}");
    let events = [FIRST, INITIAL_EVENTS_END];
    for (codings, first, has_gzip) in [
        (&[("accept-encoding", "gzip")][..], Reply::gzip(member(lines(&events).as_bytes())), true),
        (&[("accept-encoding", "gzip")], Reply::ok(&lines(&events)), false),
        (&[], Reply::gzip(member(lines(&events).as_bytes())), false),
    ] {
        let lose = Action::partial(first, |id| reset(id, INTERNAL_ERROR));
        peers.set_actions([lose, Action::Answer(Reply::ok(&lines(&[SECOND])))]);
        let response = client.send(Method::GET, &path, codings, "").await.unwrap();
        let coding = response.headers().get(header::CONTENT_ENCODING).cloned();
        assert_eq!(coding.is_some_and(|coding| coding == "gzip"), has_gzip);
        let (body, end) = soon("the end of the watch", read_body(response.into_body())).await;
        end.unwrap();
        let body = if has_gzip {
            let mut data = Vec::new();
            MultiGzDecoder::new(&body[..]).read_to_end(&mut data).unwrap();
            data
        } else {
            body
        };
        assert_eq!(String::from_utf8(body).unwrap(), lines(&[FIRST, INITIAL_EVENTS_END, SECOND]));
    }
}
