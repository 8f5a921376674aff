//! Limits of request heads: bytes alone count, alike over HTTP/1.1 and HTTP/2, and the answer to a head above the limit
//! is a `Status` that names it.

use crate::support::http2::{END_HEADERS, END_STREAM, HEADERS, field_block, frame, read_until};
use crate::support::{CONFIGMAPS, Certs, Proxy, TestCluster, soon, terminate_mode};
use http::Method;
use jackstay_apiserver::client::Client;
use jackstay_testkit::recorder::{Recorded, Recorder};
use serde_json::Value;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

/// Time for a head of 1 MiB, without optimisation on a busy machine.
const LARGE_HEAD: Duration = Duration::from_secs(60);

/// Headers of a user whom a front end impersonates with this many groups.
fn impersonation(groups: usize) -> Vec<(&'static str, String)> {
    let mut headers = vec![("impersonate-user", "jane".to_owned())];
    headers.extend((0..groups).map(|number| ("impersonate-group", format!("team-{number:05}"))));
    headers
}

/// jackstay in front of a recorder, with this limit of a head.
async fn start_recorded(certs: &Certs, max_header_bytes: u32) -> (Recorder, Proxy) {
    let recorder = Recorder::start(&certs.pki).await;
    let mut config = certs.config(&[recorder.tls]);
    terminate_mode(&mut config).limits.requests.max_header_bytes = max_header_bytes;
    let proxy = certs.start(config);
    proxy.wait_all("ready").await;
    (recorder, proxy)
}

/// The requests of jackstay's clients at the recorder. A client of the test has no address of its own.
fn recorded(recorder: &Recorder) -> Vec<Recorded> {
    let requests = recorder.record.of(None);
    requests.into_iter().filter(|request| !request.forwarded_for.is_empty()).collect()
}

/// The `message` of a `Status` with this code.
fn message(body: &[u8], code: u16) -> String {
    let status: Value = serde_json::from_slice(body)
        .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(body)));
    assert_eq!(status["kind"], "Status", "{status}");
    assert_eq!(status["code"], code, "{status}");
    status["message"].as_str().expect("a message").to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn many_groups_reach_the_apiserver_over_both_versions_and_in_an_upgrade() {
    let certs = Certs::new();
    // kube-apiserver 1.38 accepts 16,384 fields, in a head of 1 MiB.
    for (limit, groups) in [(64 << 10, 120), (64 << 10, 1_000), (1 << 20, 16_384)] {
        let (recorder, proxy) = start_recorded(&certs, limit).await;
        let headers = impersonation(groups);
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let upgrade =
            [&headers[..], &[("connection", "Upgrade"), ("upgrade", "SPDY/3.1")]].concat();
        let exec = "/api/v1/namespaces/default/pods/p/exec";
        for (http2, method, path, headers) in [
            (true, Method::GET, CONFIGMAPS, &headers),
            (false, Method::GET, CONFIGMAPS, &headers),
            (false, Method::POST, exec, &upgrade),
        ] {
            recorder.record.clear();
            let client = proxy.client_over(http2).await;
            let reply = client.request(method, path, headers, "");
            let reply = timeout(LARGE_HEAD, reply).await.expect("a response").unwrap();
            assert_eq!(reply.status, 200, "{path}, {groups} groups, http2: {http2}");
            // A slow read is hedged.
            let requests = recorded(&recorder);
            assert!(!requests.is_empty());
            let is_group = |(name, _): &&(String, String)| name == "impersonate-group";
            for request in requests {
                let received = request.fields.iter().filter(is_group).count();
                assert_eq!(received, groups, "{path}, http2: {http2}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn head_above_the_limit_gets_a_status_that_names_it() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let large = vec![("x-large", "x".repeat(80 << 10))];
    for (what, headers) in [("one field", large), ("many fields", impersonation(1_400))] {
        let headers: Vec<_> = headers.iter().map(|(name, value)| (*name, value.as_str())).collect();
        for http2 in [true, false] {
            let client = proxy.client_over(http2).await;
            let reply = client.request(Method::GET, CONFIGMAPS, &headers, "");
            let reply = soon("a response", reply).await.unwrap();
            assert_eq!(reply.status, 431, "{what}, http2: {http2}");
            let message = message(&reply.body, 431);
            assert!(message.contains("larger than 65536 bytes"), "{message}");
            assert!(message.contains("limits.max_header_bytes"), "{message}");
        }
    }
    let counted =
        r#"jackstay_own_errors_total{listener="apiserver",code="431",reason="header_too_large"} 4"#;
    proxy.wait_metrics(counted).await;
}

/// What hyper itself refuses before there is a request: its own response has no body.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn head_that_cannot_be_parsed_gets_a_status() {
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| terminate_mode(config).limits.requests.max_header_bytes = 256 << 10)
        .await;
    let path = format!("/{}", "x".repeat(70_000));
    let field = format!("x: {}\r\n", "y".repeat(600 << 10));
    let fields = "a:\r\n".repeat(20_000);
    let cases = [
        (414, "65534 bytes", format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")),
        (431, "262144 bytes", format!("GET / HTTP/1.1\r\nhost: a\r\n{field}\r\n")),
        (431, "262144 bytes", format!("GET / HTTP/1.1\r\nhost: a\r\n{fields}\r\n")),
        (400, "cannot be parsed", "GET / HTTP/1.1\r\nhost: a\r\n folded: yes\r\n\r\n".to_owned()),
        (400, "cannot be parsed", "\0\r\n\r\n".to_owned()),
    ];
    for (code, text, request) in cases {
        // Behind a response on the same connection, too.
        for first in ["", "GET /version HTTP/1.1\r\nhost: a\r\n\r\n"] {
            let mut stream = proxy.wire(&cluster.certs, "http/1.1").await;
            let mut read = 0;
            if !first.is_empty() {
                stream.write_all(first.as_bytes()).await.unwrap();
                read = soon("a response", stream.read(&mut [0; 4096])).await.unwrap();
            }
            assert_eq!(read > 0, !first.is_empty());
            // jackstay may close the connection before it has read everything.
            let _ = stream.write_all(request.as_bytes()).await;
            let mut response = Vec::new();
            let _ = soon("the end of the connection", stream.read_to_end(&mut response)).await;
            let response = String::from_utf8(response).unwrap();
            let (head, body) = response.split_once("\r\n\r\n").expect("a response");
            assert!(head.starts_with(&format!("HTTP/1.1 {code} ")), "{head}");
            let head = head.to_ascii_lowercase();
            assert!(head.contains("\r\ncontent-type: application/json"), "{head}");
            assert!(head.contains("\r\nconnection: close"), "{head}");
            assert!(head.contains(&format!("\r\ncontent-length: {}", body.len())), "{head}");
            let message = message(body.as_bytes(), code);
            assert!(message.contains(text), "{message}");
        }
    }
    let series = |code, reason, count| {
        format!(
            r#"jackstay_own_errors_total{{listener="apiserver",code="{code}",reason="{reason}"}} {count}"#
        )
    };
    for (code, reason, count) in
        [(414, "header_too_large", 2), (431, "header_too_large", 4), (400, "bad_request", 4)]
    {
        proxy.wait_metrics(&series(code, reason, count)).await;
    }
}

/// A head with as many names as an `http::HeaderMap` can hold must not end the worker, to which jackstay adds fields.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn head_with_more_names_than_a_header_map_holds_is_refused() {
    let cluster = TestCluster::new(1);
    let proxy = cluster
        .start_with(|config| terminate_mode(config).limits.requests.max_header_bytes = 1 << 20)
        .await;
    let other: Client = proxy.client().await;
    for count in [24_574, 24_575, 24_576, 24_577, 26_000] {
        let names: Vec<String> = (0..count).map(|number| format!("a{number:x}")).collect();
        let headers: Vec<_> = names.iter().map(|name| (name.as_str(), "")).collect();
        let lines: String = names.iter().flat_map(|name| [name.as_str(), ":\r\n"]).collect();
        let mut stream = proxy.wire(&cluster.certs, "http/1.1").await;
        let head = format!("GET /version HTTP/1.1\r\nhost: a\r\n{lines}\r\n");
        let _ = stream.write_all(head.as_bytes()).await;
        let mut response = vec![0; 4096];
        let size =
            timeout(LARGE_HEAD, stream.read(&mut response)).await.expect("a response").unwrap();
        let response = String::from_utf8_lossy(&response[..size]).into_owned();
        assert!(response.starts_with("HTTP/1.1 431 "), "{count}: {response}");

        let mut stream = proxy.wire(&cluster.certs, "h2").await;
        let pseudo =
            [(":method", "GET"), (":scheme", "https"), (":authority", "a"), (":path", "/version")];
        let block = field_block(&[&pseudo[..], &headers].concat());
        let mut pieces = block.chunks(16 << 10).peekable();
        let mut bytes =
            [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(4, 0, 0, &[])].concat();
        let mut kind = HEADERS;
        while let Some(piece) = pieces.next() {
            let end = if pieces.peek().is_none() { END_HEADERS } else { 0 };
            let stream_end = if kind == HEADERS { END_STREAM } else { 0 };
            bytes.extend(frame(kind, end | stream_end, 1, piece));
            kind = 9;
        }
        let _ = stream.write_all(&bytes).await;
        let read = read_until(&mut stream, |kind, id, _| kind == HEADERS && id == 1);
        let read = timeout(LARGE_HEAD, read).await.expect("a response");
        read.unwrap_or_else(|| panic!("{count}: closed"));
        assert_eq!(other.get(CONFIGMAPS).await.unwrap().status, 200, "{count}");
    }
}

/// RFC 9218 and RFC 9113, section 5.3: what a client says about priorities ends at the listener.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn priority_of_a_client_does_not_reach_the_shared_connection() {
    const PRIORITY: u8 = 2;
    const PRIORITY_UPDATE: u8 = 16;
    const HAS_PRIORITY: u8 = 0x20;
    let certs = Certs::new();
    let (recorder, proxy) = start_recorded(&certs, 64 << 10).await;
    let mut stream = proxy.wire(&certs, "h2").await;
    let fields = [
        (":method", "GET"),
        (":scheme", "https"),
        (":authority", "a"),
        (":path", CONFIGMAPS),
        ("priority", "u=0, i"),
        ("x-kept", "yes"),
    ];
    // Depends on stream 0, with the highest weight.
    let weight = [0, 0, 0, 0, 255];
    let head = [&weight[..], &field_block(&fields)].concat();
    let bytes = [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
        frame(4, 0, 0, &[]),
        frame(PRIORITY_UPDATE, 0, 0, b"\0\0\0\x01u=0"),
        frame(PRIORITY, 0, 1, &weight),
        frame(HEADERS, END_HEADERS | END_STREAM | HAS_PRIORITY, 1, &head),
    ];
    stream.write_all(&bytes.concat()).await.unwrap();
    let response = read_until(&mut stream, |kind, id, _| kind == HEADERS && id == 1);
    soon("a response", response).await.expect("the connection stays open");
    let upgrade = [("connection", "Upgrade"), ("upgrade", "SPDY/3.1"), ("priority", "u=0")];
    let client = proxy.client_over(false).await;
    let exec = "/api/v1/namespaces/default/pods/p/exec";
    assert_eq!(client.request(Method::POST, exec, &upgrade, "").await.unwrap().status, 200);
    let lease = "/apis/coordination.k8s.io/v1/namespaces/default/leases/n";
    let lowest = [("priority", "u=7")];
    let client = proxy.client().await;
    assert_eq!(client.request(Method::PUT, lease, &lowest, "{}").await.unwrap().status, 200);
    let mut requests = recorded(&recorder);
    assert_eq!(requests.len(), 3);
    let heartbeat = requests.pop().unwrap();
    let priority = heartbeat.fields.iter().filter(|(name, _)| name == "priority");
    assert_eq!(priority.map(|(_, value)| &**value).collect::<Vec<_>>(), ["u=0"]);
    for request in &requests {
        assert!(request.fields.iter().all(|(name, _)| name != "priority"), "{request:?}");
        assert!(!request.forwarded_for.is_empty(), "{request:?}");
    }
    assert!(requests[0].fields.contains(&("x-kept".to_owned(), "yes".to_owned())));
}
