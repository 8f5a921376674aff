//! No client waits for the head of a response until its body begins.

use crate::cases::peer::{Part, Rig, Script, addresses, start_peers};
use crate::support::figures::check_figure;
use crate::support::stopwatch::Stopwatch;
use crate::support::{Certs, soon};
use flate2::Compression;
use flate2::write::GzEncoder;
use http::Method;
use hyper::body::Incoming;
use jackstay_apiserver::client::{Client, next_data};
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Time after which a head is forwarded without a body.
const HOLD: Duration = Duration::from_secs(1);
/// The time in which it arrives.
const HEAD_ARRIVES: Duration = Duration::from_millis(1_250);
const CONFIGMAPS: &str = "/api/v1/namespaces/default/configmaps";
const CUSTOM: &str = "/apis/example.com/v1/namespaces/default/foos";

/// jackstay in front of `count` peers.
async fn start(count: usize) -> (Script, Rig) {
    let (script, certs) = (Script::default(), Certs::new());
    let peers = start_peers(&certs, count, &script).await;
    let rig = Rig::start(certs, &addresses(&peers), |_| {}).await;
    (script, rig)
}

/// The status and the body of a response, and the time until its head has arrived.
async fn head(client: &Client, method: Method, target: &str) -> (u16, Incoming, Duration) {
    let time = Stopwatch::start();
    let sent = client.send(method, target, &[], "");
    let (head, body) = soon("a head", sent).await.unwrap().into_parts();
    (head.status.as_u16(), body, time.elapsed())
}

/// The rest of a body; the error if it is cut.
async fn rest(body: &mut Incoming) -> Result<String, String> {
    let mut text = Vec::new();
    loop {
        match soon("data or the end", next_data(body)).await {
            Ok(Some(data)) => text.extend_from_slice(&data),
            Ok(None) => return Ok(String::from_utf8_lossy(&text).into_owned()),
            Err(error) => return Err(error.to_string()),
        }
    }
}

fn gzip(text: &str) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(text.as_bytes()).unwrap();
    gzip.finish().unwrap()
}

/// A watch at a path that no API has, server-sent events, NDJSON of an aggregated API, and the log of a quiet container:
/// their bodies begin when something happens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn head_of_a_quiet_response_arrives_within_its_limit() {
    let (script, rig) = start(2).await;
    let gzipped = vec![("content-encoding", "gzip".to_owned())];
    let cases = [
        (
            "a watch below an unknown path",
            Method::GET,
            "/k8s/clusters/c-1/api/v1/configmaps?watch=1",
            Part::json(),
        ),
        (
            "events of a service",
            Method::GET,
            "/api/v1/namespaces/d/services/s/proxy/events",
            Part::Head(200, "text/event-stream", vec![]),
        ),
        (
            "events at an unknown path",
            Method::GET,
            "/events",
            Part::Head(200, "text/event-stream", vec![]),
        ),
        (
            "a stream of an aggregated API",
            Method::GET,
            "/apis/example.com/v1/stream",
            Part::Head(200, "application/x-ndjson", vec![]),
        ),
        (
            "a compressed stream",
            Method::GET,
            "/apis/example.com/v1/archive",
            Part::Head(200, "application/json", gzipped),
        ),
        (
            "a subscription by POST",
            Method::POST,
            "/apis/example.com/v1/subscribe",
            Part::Head(200, "text/event-stream", vec![]),
        ),
        (
            "a log",
            Method::GET,
            "/api/v1/namespaces/d/pods/p/log?follow=true",
            Part::Head(200, "text/plain", vec![]),
        ),
        (
            "a watch",
            Method::GET,
            "/api/v1/namespaces/d/configmaps?watch=1&resourceVersion=5",
            Part::json(),
        ),
        (
            "a short 403",
            Method::GET,
            "/apis/example.com/v1/denied",
            Part::Head(403, "text/plain", vec![("content-length", "5".to_owned())]),
        ),
        (
            "a short 429",
            Method::GET,
            "/apis/example.com/v1/limited",
            Part::Head(429, "text/plain", vec![("content-length", "5".to_owned())]),
        ),
        (
            "a short 410",
            Method::GET,
            "/api/v1/namespaces/e/configmaps?watch=1&resourceVersion=5",
            Part::Head(410, "text/plain", vec![("content-length", "5".to_owned())]),
        ),
    ];
    for http2 in [true, false] {
        for (what, method, target, answer) in &cases {
            let begin = Arc::new(Notify::new());
            let path = target.split('?').next().unwrap();
            script.set(
                path,
                &[&[answer.clone(), Part::Wait(begin.clone()), Part::data("first"), Part::End]],
            );
            let asked = script.requests(path).len();
            let client = rig.client(http2).await;
            let (_, mut body, time) = head(&client, method.clone(), target).await;
            check_figure(&format!("head of {what}, http2: {http2}"), time, HEAD_ARRIVES);
            begin.notify_one();
            if !target.contains("watch=1&") {
                assert_eq!(rest(&mut body).await.as_deref(), Ok("first"), "{what}");
            }
            assert_eq!(
                script.requests(path).len() - asked,
                1,
                "{what}: the response is quiet, not lost"
            );
        }
    }
}

/// A body that comes within the time is still held with its head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connection_is_noticed_only_after_the_head_was_forwarded() {
    let (script, rig) = start(2).await;
    let complete = [Part::json(), Part::data("{}"), Part::End];
    let lost = [Part::json(), Part::Pause(HOLD / 2), Part::Close];
    let lost_later = [Part::json(), Part::Pause(HOLD * 2), Part::Close];
    let log = "/api/v1/namespaces/d/pods/p/log";
    for http2 in [true, false] {
        let client = rig.client(http2).await;
        for path in ["/stream", CONFIGMAPS, log] {
            let asked = script.requests(path).len();
            script.set(path, &[&lost, &complete]);
            let (status, mut body, _) = head(&client, Method::GET, path).await;
            assert_eq!((status, rest(&mut body).await), (200, Ok("{}".to_owned())), "{path}");
            let peers = script.requests(path).split_off(asked);
            assert_eq!(peers.len(), 2, "{path}: asked again, {peers:?}");
        }
        for path in ["/stream", CONFIGMAPS, log] {
            let client = rig.client(http2).await;
            let asked = script.requests(path).len();
            script.set(path, &[&lost_later, &complete]);
            let (status, mut body, time) = head(&client, Method::GET, path).await;
            check_figure(&format!("head of {path}, http2: {http2}"), time, HEAD_ARRIVES);
            let end = rest(&mut body).await;
            assert!(status == 200 && end.is_err(), "{path}: {end:?} must not look complete");
            assert_eq!(script.requests(path).len() - asked, 1, "{path}");
        }
    }
}

fn list(version: u64, items: &str) -> String {
    format!(
        r#"{{"kind":"List","apiVersion":"v1","metadata":{{"resourceVersion":"{version}"}},"items":[{items}]}}"#
    )
}

/// A list of custom resources has its metadata behind its items.
fn custom_list(version: u64, items: &str) -> String {
    format!(
        r#"{{"apiVersion":"example.com/v1","items":[{items}],"kind":"FooList","metadata":{{"resourceVersion":"{version}"}}}}"#
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_list_is_reset_when_its_head_was_forwarded_before_its_version() {
    let many = r#"{"metadata":{"name":"a"}},"#.repeat(8_000) + "{}";
    let gzipped =
        || Part::Head(200, "application/json", vec![("content-encoding", "gzip".to_owned())]);
    for http2 in [true, false] {
        for (what, path, first, head_part, older, is_slow) in [
            ("slow body", CONFIGMAPS, list(9, ""), Part::json(), list(7, "").into_bytes(), true),
            ("slow compressed body", CONFIGMAPS, list(9, ""), gzipped(), gzip(&list(7, "")), true),
            (
                "slow list of custom resources",
                CUSTOM,
                custom_list(9, ""),
                Part::json(),
                custom_list(7, "").into_bytes(),
                true,
            ),
            (
                "long list of custom resources",
                CUSTOM,
                custom_list(9, ""),
                Part::json(),
                custom_list(7, &many).into_bytes(),
                false,
            ),
        ] {
            let (script, rig) = start(1).await;
            let client = rig.client(http2).await;
            let target = format!("{path}?resourceVersion=0");
            script.set(path, &[&[Part::json(), Part::data(first), Part::End]]);
            let (_, mut body, _) = head(&client, Method::GET, &target).await;
            assert!(rest(&mut body).await.is_ok());
            let pause = Part::Pause(if is_slow { HOLD * 2 } else { Duration::ZERO });
            let (half, other) = older.split_at(older.len() / 2);
            let parts = [
                head_part.clone(),
                pause,
                Part::data(half.to_vec()),
                Part::data(other.to_vec()),
                Part::End,
            ];
            script.set(path, &[&parts]);
            let (status, mut body, _) = head(&client, Method::GET, &target).await;
            let end = rest(&mut body).await;
            assert!(status == 200 && end.is_err(), "{what}, http2: {http2}: {end:?}");
            // The only apiserver is older: the client is not reset each time.
            let client = rig.client(http2).await;
            let (status, mut body, _) = head(&client, Method::GET, &target).await;
            let end = rest(&mut body).await;
            assert!(status == 200 && end.is_ok(), "{what}, http2: {http2}: {end:?}");
        }
    }
}

/// A short list of custom resources shows its version at its end, and is compared before its head is forwarded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_list_of_custom_resources_is_asked_of_another_apiserver() {
    let (script, rig) = start(2).await;
    let client = rig.client(true).await;
    let target = format!("{CUSTOM}?resourceVersion=0");
    let of = |version| [Part::json(), Part::data(custom_list(version, "{}")), Part::End];
    script.set(CUSTOM, &[&of(9)]);
    let (_, mut body, _) = head(&client, Method::GET, &target).await;
    assert!(rest(&mut body).await.is_ok());
    let first = script.requests(CUSTOM)[0].0;
    script.set(CUSTOM, &[&of(7), &of(9)]);
    let (_, mut body, _) = head(&client, Method::GET, &target).await;
    assert!(rest(&mut body).await.unwrap().contains(r#""resourceVersion":"9""#));
    let peers = script.requests(CUSTOM);
    assert_eq!(peers.len(), 3, "the list is not shown: {first} {peers:?}");
}
