//! Request bodies of HTTP/1.1: chunked bodies, whose length is not declared (RFC 9112, section 7.1), and bodies
//! that the client sends only after a 100 (RFC 9110, section 10.1.1).

use crate::scripted_peer::{Action, Peers, Reply, Request as SeenRequest};
use crate::support::http2::{CANCEL, DATA, END_STREAM, frame};
use crate::support::wire::Wire;
use crate::support::{
    CONFIGMAPS, Certs, TestCluster, config_map, read_body, refusing_address, soon, until,
    without_suspicion,
};
use bytes::Bytes;
use http::{Method, Request};
use http_body::{Body, Frame};
use hyper_util::rt::TokioIo;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A body of undeclared length, as a queue of chunks.
struct ChunkedBody(VecDeque<Bytes>);

impl ChunkedBody {
    fn new(text: &str, size: usize) -> Self {
        Self(text.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect())
    }
}

impl Body for ChunkedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
    }
}

/// A request with `Transfer-Encoding: chunked`, in its wire format; `body` is already encoded.
fn chunked_request(method: &Method, path: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
         Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n{body}"
    )
}

/// `text` in the wire format, in chunks of this size and without the last chunk.
fn chunks(text: &str, size: usize, extension: &str) -> String {
    let chunk = |data: &[u8]| {
        let data = std::str::from_utf8(data).unwrap();
        format!("{:x}{extension}\r\n{data}\r\n", data.len())
    };
    text.as_bytes().chunks(size).map(chunk).collect()
}

/// All data up to the end of the connection.
async fn response(wire: &mut Wire) -> String {
    let mut response = Vec::new();
    // A connection that is reset ends with an error.
    let _ = soon("the end of the response", wire.read_to_end(&mut response)).await;
    String::from_utf8_lossy(&response).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_body_of_undeclared_length_arrives_complete() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let object = config_map("unknown-length", "1").to_string();
    let item = format!("{CONFIGMAPS}/unknown-length");
    let large = "0123456789".repeat(100_000);
    for (method, path, body, size, code) in [
        (Method::POST, CONFIGMAPS, &object, 7, 201),
        (Method::PUT, &item, &object, object.len(), 200),
        (Method::GET, &item, &object, 7, 200),
        (Method::POST, "/echo", &large, 60_000, 200),
        (Method::POST, "/echo", &String::new(), 1, 200),
    ] {
        let request = Request::builder()
            .method(&method)
            .uri(path)
            .header("host", "a")
            .header("content-type", "application/json")
            // Without this header hyper's client sends no body with a GET.
            .header("transfer-encoding", "chunked")
            .body(ChunkedBody::new(body, size))
            .unwrap();
        // Each request has its own connection, because a server that responds before the end of the body closes
        // the connection.
        let stream = proxy.wire(&cluster.certs, "http/1.1").await;
        let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.unwrap();
        tokio::spawn(connection);
        let sent = soon("a response", sender.send_request(request)).await.unwrap();
        let (head, incoming) = sent.into_parts();
        let (received, end) = read_body(incoming).await;
        end.unwrap();
        let text = String::from_utf8_lossy(&received);
        assert_eq!(head.status, code, "{method} {path}: {text}");
        if path == "/echo" {
            assert!(text == *body, "{method} {path}: {} of {} bytes", text.len(), body.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_chunked_body_is_accepted_with_every_method() {
    const LAST: &str = "0\r\n\r\n";
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let object = config_map("chunked", "1").to_string();
    let replaced = config_map("chunked", "2").to_string();
    let traced = config_map("trailers", "1").to_string();
    let item = format!("{CONFIGMAPS}/chunked");
    // Trailer fields that must not be forwarded: a hop-by-hop field, and one that claims an identity.
    let trailers = "0\r\nX-Checksum: 1\r\nConnection: close\r\nX-Remote-User: root\r\n\r\n";
    for (method, path, body, code) in [
        (Method::POST, CONFIGMAPS, chunks(&object, usize::MAX, "") + LAST, 201),
        (Method::PUT, &item, chunks(&replaced, 1, ";a=b") + LAST, 200),
        (Method::GET, &item, LAST.to_owned(), 200),
        (Method::GET, &item, chunks("unexpected", 5, "") + LAST, 200),
        (Method::POST, CONFIGMAPS, chunks(&traced, 9, "") + trailers, 201),
        (Method::DELETE, &item, chunks("{}", 2, "") + LAST, 200),
    ] {
        let mut wire = proxy.wire(&cluster.certs, "http/1.1").await;
        wire.write_all(chunked_request(&method, path, &body).as_bytes()).await.unwrap();
        let response = response(&mut wire).await;
        assert!(
            response.starts_with(&format!("HTTP/1.1 {code} ")),
            "{method} {body:?}: {response}"
        );
        if method == Method::GET {
            assert!(response.contains("\"v\":\"2\""), "{response}");
        }
    }
}

/// A truncated body must not look complete, and its request must not be sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_chunked_body_that_is_truncated_is_reset_upstream() {
    let peers = Peers::start(2);
    let proxy = peers.start_proxy(without_suspicion).await;
    for body in ["", "a\r\nhello", "5\r\nhello\r\n", "5\r\nhello\r\n0\r\n", "5\r\nhello\r\nzz\r\n"]
    {
        for (method, abort) in [(Method::POST, true), (Method::POST, false), (Method::GET, true)] {
            let name = format!("{method} {body:?}, without close_notify: {abort}");
            peers.set_actions([Action::after_body(Action::Answer(Reply::ok("{}")))]);
            let mut wire = proxy.wire(&peers.certs, "http/1.1").await;
            wire.write_all(chunked_request(&method, CONFIGMAPS, body).as_bytes()).await.unwrap();
            until(&name, async || peers.requests().len() == 1).await;
            if abort {
                drop(wire);
            } else {
                wire.shutdown().await.unwrap();
                let response = response(&mut wire).await;
                assert!(response.is_empty() || response.starts_with("HTTP/1.1 400 "), "{response}");
            }
            until(&name, async || !peers.resets().is_empty()).await;
            let SeenRequest { connection, stream, .. } = peers.requests()[0];
            assert_eq!(peers.resets(), [(connection, stream, CANCEL)], "{name}");
            assert_eq!(peers.completed(), [], "{name}");
            assert_eq!(peers.requests().len(), 1, "{name}: sent again");
        }
    }
}

/// At the end of a drain jackstay drops the client's connection, and hyper then ends the request body without an
/// error.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_chunked_body_that_a_drain_interrupts_is_not_completed() {
    let peers = Peers::start(1);
    let drain = Duration::from_millis(50);
    let proxy = peers.start_proxy(|config| config.shutdown.drain_timeout = drain).await;
    peers.set_actions([Action::Hang]);
    let mut wire = proxy.wire(&peers.certs, "http/1.1").await;
    let request = chunked_request(&Method::POST, CONFIGMAPS, "5\r\nhello\r\n");
    wire.write_all(request.as_bytes()).await.unwrap();
    until("the request is sent", async || peers.requests().len() == 1).await;
    let stopped = tokio::task::spawn_blocking(move || proxy.running.stop());
    assert!(soon("the end of jackstay", stopped).await.unwrap(), "a worker panicked");
    let accepted = || peers.accepted.load(std::sync::atomic::Ordering::Relaxed);
    let ended = || peers.ended.load(std::sync::atomic::Ordering::Relaxed);
    until("its upstream connections have ended", async || ended() == accepted()).await;
    assert_eq!(peers.completed(), []);
}

/// The head of a write whose client sends the body only after a 100.
fn expecting_head(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: 100-continue\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
}

/// Reads the head of a response, up to its empty line.
async fn head(wire: &mut Wire) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon("a head", wire.read_u8()).await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_expect_gets_100_before_the_apiserver_has_the_body() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    let object = config_map("expected", "1").to_string();
    let mut wire = proxy.wire(&cluster.certs, "http/1.1").await;
    wire.write_all(expecting_head(CONFIGMAPS, object.len()).as_bytes()).await.unwrap();
    assert_eq!(head(&mut wire).await, "HTTP/1.1 100 Continue\r\n\r\n");
    wire.write_all(object.as_bytes()).await.unwrap();
    let response = response(&mut wire).await;
    assert!(response.starts_with("HTTP/1.1 201 "), "{response}");
}

/// The client need not send a body that jackstay could not forward.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_expect_gets_the_error_when_no_upstream_stream_opens() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing_address()]));
    let mut wire = proxy.wire(&certs, "http/1.1").await;
    wire.write_all(expecting_head(CONFIGMAPS, 1000).as_bytes()).await.unwrap();
    let head = head(&mut wire).await;
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn expect_is_never_sent_upstream() {
    let cluster = TestCluster::new(1);
    let proxy = cluster.start().await;
    for (name, client) in
        [("http2", proxy.client().await), ("http1", proxy.client_over(false).await)]
    {
        let headers = [("content-type", "application/json"), ("expect", "100-continue")];
        let object = config_map(name, "1").to_string();
        let reply =
            soon("a response", client.request(Method::POST, CONFIGMAPS, &headers, object)).await;
        assert_eq!(reply.unwrap().status, 201, "{name}");
    }
    let records = cluster.state.audit().select(|r| r.verb == "create");
    assert_eq!(records.len(), 2);
    let forwarded = records.iter().flat_map(|r| &r.header_names).find(|name| *name == "expect");
    assert_eq!(forwarded, None);
}

/// kube-apiserver rejects a write for overload before it reads the body. The client's next request is on the same
/// connection, unless the body is long.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_connection_survives_a_response_before_a_short_body() {
    let long = "x".repeat(2 << 20);
    let chunked = |data: &str| format!("{:x}\r\n{data}\r\n0\r\n\r\n", data.len());
    let length = |data: &str| format!("Content-Length: {}", data.len());
    let encoded = || "Transfer-Encoding: chunked".to_owned();
    // jackstay waits for the end of a short response, and forwards a long one while it arrives.
    for (size, frames) in [("9", 1), ("96000", 6)] {
        let text = if frames == 1 { "Forbidden".to_owned() } else { "y".repeat(16_000) };
        for (header, body, survives) in [
            (length("123456789"), "123456789".to_owned(), true),
            (encoded(), chunked("123456789"), true),
            (length(&long), long.clone(), false),
            (encoded(), chunked(&long), false),
        ] {
            let peers = Peers::start(1);
            let proxy = peers.start_proxy(without_suspicion).await;
            let reply = Reply::status("403", &text).header("content-length", size);
            let piece = text.clone();
            let rejection = Action::partial(reply, move |id| {
                let mut rest = frame(DATA, 0, id, piece.as_bytes()).repeat(frames - 1);
                rest.extend(frame(DATA, END_STREAM, id, b""));
                rest
            });
            peers.set_actions([rejection, Action::Answer(Reply::ok("{}"))]);
            let mut wire = proxy.wire(&peers.certs, "http/1.1").await;
            let write = format!("POST {CONFIGMAPS} HTTP/1.1\r\nHost: a\r\n{header}\r\n\r\n");
            wire.write_all(write.as_bytes()).await.unwrap();
            let rejected = head(&mut wire).await;
            assert!(rejected.starts_with("HTTP/1.1 403 "), "{rejected}");
            let mut received = vec![0; size.parse().unwrap()];
            soon("the response", wire.read_exact(&mut received)).await.unwrap();
            assert_eq!(received, text.repeat(frames).as_bytes());
            let next = format!("{body}GET {CONFIGMAPS} HTTP/1.1\r\nHost: a\r\n\r\n");
            // The connection may be closed meanwhile.
            let _ = wire.write_all(next.as_bytes()).await;
            let mut answered = Vec::new();
            while !answered.ends_with(b"{}")
                && let Ok(1..) = soon("an answer or the end", wire.read_buf(&mut answered)).await
            {
            }
            let answered = String::from_utf8_lossy(&answered);
            let name = format!("{header}, response of {size} bytes");
            assert_eq!(answered.starts_with("HTTP/1.1 200 "), survives, "{name}: {answered}");
        }
    }
}

/// After a response, the rest of a body is awaited for 1 s. Then the connection is closed, as nothing else can be read on
/// it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_connection_closes_if_the_rest_of_a_short_body_does_not_come() {
    let peers = Peers::start(1);
    let proxy = peers.start_proxy(without_suspicion).await;
    peers.set_actions([Action::Answer(Reply::status("403", "Forbidden"))]);
    let mut wire = proxy.wire(&peers.certs, "http/1.1").await;
    let write = format!("POST {CONFIGMAPS} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1234");
    let start = Instant::now();
    wire.write_all(write.as_bytes()).await.unwrap();
    let rejected = head(&mut wire).await;
    assert!(rejected.starts_with("HTTP/1.1 403 "), "{rejected}");
    let mut rest = Vec::new();
    let _ = soon("the end", wire.read_to_end(&mut rest)).await;
    let waited = start.elapsed();
    assert_eq!(rest, b"Forbidden");
    let limit = Duration::from_secs(1);
    assert!((limit..4 * limit).contains(&waited), "{waited:?}");
}
