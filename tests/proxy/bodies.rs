//! Request bodies: those of HTTP/1.1 whose length is not declared (RFC 9112, section 7.1), and those
//! that the client holds back until it gets a 100 (RFC 9110, section 10.1.1).

use crate::hostile::before;
use crate::peer::{Act, CANCEL, Peers, Reply};
use crate::support::wire::{self, Wire};
use crate::support::{Certs, MAPS, World, map, refusing, soon, until};
use bytes::Bytes;
use http::{Method, Request};
use http_body::{Body, Frame};
use hyper_util::rt::TokioIo;
use jackstay::demo::client::{Client, next_data};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// A body that does not say how long it is.
struct Pieces(VecDeque<Bytes>);

impl Pieces {
    fn of(text: &str, size: usize) -> Self {
        Self(text.as_bytes().chunks(size).map(Bytes::copy_from_slice).collect())
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready(self.0.pop_front().map(|data| Ok(Frame::data(data))))
    }
}

/// A request with a chunked body, as bytes; `rest` is what follows the headers.
fn chunked(method: &Method, path: &str, rest: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\
         Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n{rest}"
    )
}

/// `text` in chunks of this size, without the last chunk.
fn chunks(text: &str, size: usize, extension: &str) -> String {
    let chunk = |data: &[u8]| {
        let data = std::str::from_utf8(data).unwrap();
        format!("{:x}{extension}\r\n{data}\r\n", data.len())
    };
    text.as_bytes().chunks(size).map(chunk).collect()
}

/// All that the proxy answers until it closes the connection.
async fn answer(wire: &mut Wire) -> String {
    let mut answer = Vec::new();
    // A connection that is cut off ends with an error instead.
    let _ = soon("the end of the answer", wire.read_to_end(&mut answer)).await;
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_body_of_unknown_length_arrives_whole() {
    let world = World::new(1);
    let proxy = world.start().await;
    let object = map("unknown-length", "1").to_string();
    let item = format!("{MAPS}/unknown-length");
    let large = "0123456789".repeat(100_000);
    for (method, path, body, size, code) in [
        (Method::POST, MAPS, &object, 7, 201),
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
            // Without it, hyper's client sends no body with a GET.
            .header("transfer-encoding", "chunked")
            .body(Pieces::of(body, size))
            .unwrap();
        // A connection for each: a server that answers before the body's end closes it.
        let stream = wire::connect(&proxy, &world.certs, "http/1.1").await;
        let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = connected.unwrap();
        tokio::spawn(connection);
        let sent = soon("an answer", sender.send_request(request)).await.unwrap();
        let (head, mut incoming) = sent.into_parts();
        let mut got = Vec::new();
        while let Some(data) = next_data(&mut incoming).await.unwrap() {
            got.extend_from_slice(&data);
        }
        let text = String::from_utf8_lossy(&got);
        assert_eq!(head.status, code, "{method} {path}: {text}");
        if path == "/echo" {
            assert!(text == *body, "{method} {path}: {} of {} bytes", got.len(), body.len());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_chunked_body_is_accepted_with_every_method() {
    const LAST: &str = "0\r\n\r\n";
    let world = World::new(1);
    let proxy = world.start().await;
    let object = map("chunked", "1").to_string();
    let replaced = map("chunked", "2").to_string();
    let traced = map("trailers", "1").to_string();
    let item = format!("{MAPS}/chunked");
    // Hop-by-hop fields, and one that claims an identity.
    let trailers = "0\r\nX-Checksum: 1\r\nConnection: close\r\nX-Remote-User: root\r\n\r\n";
    for (method, path, body, code) in [
        (Method::POST, MAPS, chunks(&object, usize::MAX, "") + LAST, 201),
        (Method::PUT, &item, chunks(&replaced, 1, ";a=b") + LAST, 200),
        (Method::GET, &item, LAST.to_owned(), 200),
        (Method::GET, &item, chunks("not asked for", 5, "") + LAST, 200),
        (Method::POST, MAPS, chunks(&traced, 9, "") + trailers, 201),
        (Method::DELETE, &item, chunks("{}", 2, "") + LAST, 200),
    ] {
        let mut wire = wire::connect(&proxy, &world.certs, "http/1.1").await;
        wire.write_all(chunked(&method, path, &body).as_bytes()).await.unwrap();
        let answer = answer(&mut wire).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {code} ")), "{method} {body:?}: {answer}");
        if method == Method::GET {
            assert!(answer.contains("\"v\":\"2\""), "{answer}");
        }
    }
}

/// Truncation never looks complete: upstream the stream is reset, and nothing is sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_chunked_body_cut_short_is_reset_upstream() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 2);
    let proxy = before(&peers, &certs).await;
    for cut in ["", "a\r\nhello", "5\r\nhello\r\n", "5\r\nhello\r\n0\r\n", "5\r\nhello\r\nzz\r\n"] {
        for (method, silent) in [(Method::POST, true), (Method::POST, false), (Method::GET, true)] {
            let name = format!("{method} {cut:?}, without an end of TLS: {silent}");
            peers.script.play([Act::Late(Box::new(Act::Answer(Reply::ok("{}"))))]);
            let mut wire = wire::connect(&proxy, &certs, "http/1.1").await;
            wire.write_all(chunked(&method, MAPS, cut).as_bytes()).await.unwrap();
            until(&name, async || peers.script.seen().len() == 1).await;
            if silent {
                drop(wire);
            } else {
                wire.shutdown().await.unwrap();
                let answer = answer(&mut wire).await;
                assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 400 "), "{answer}");
            }
            until(&name, async || !peers.script.given_up().is_empty()).await;
            let (_, connection, stream) = peers.script.seen()[0];
            assert_eq!(peers.script.given_up(), [(connection, stream, CANCEL)], "{name}");
            assert_eq!(peers.script.whole(), [], "{name}");
            assert_eq!(peers.script.seen().len(), 1, "{name}: sent again");
        }
    }
}

/// The end of a drain drops the client's connection, and hyper ends the body of a request without an
/// error then.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_chunked_body_cut_by_the_drain_is_not_completed() {
    let certs = Certs::new();
    let peers = Peers::start(&certs, 1);
    let mut config = certs.config(&peers.addresses);
    config.shutdown.drain_timeout = Duration::from_millis(50);
    let proxy = certs.start(config);
    proxy.ready(1).await;
    peers.script.play([Act::Hang]);
    let mut wire = wire::connect(&proxy, &certs, "http/1.1").await;
    let begun = chunked(&Method::POST, MAPS, "5\r\nhello\r\n");
    wire.write_all(begun.as_bytes()).await.unwrap();
    until("it is sent", async || peers.script.seen().len() == 1).await;
    let stopped = tokio::task::spawn_blocking(move || proxy.running.stop());
    assert!(soon("the end", stopped).await.unwrap(), "no worker panicked");
    let all = || peers.script.accepted.load(std::sync::atomic::Ordering::Relaxed);
    let ended = || peers.script.ended.load(std::sync::atomic::Ordering::Relaxed);
    until("its connections have ended", async || ended() == all()).await;
    assert_eq!(peers.script.whole(), []);
}

/// A write whose client waits for a 100 before it sends the body.
fn expecting(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nExpect: 100-continue\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
}

/// The head of an answer, its empty line included.
async fn head(wire: &mut Wire) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon("a head", wire.read_u8()).await.unwrap());
    }
    String::from_utf8(head).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_expect_is_answered_with_100_before_the_apiserver_has_the_body() {
    let world = World::new(1);
    let proxy = world.start().await;
    let object = map("expected", "1").to_string();
    let mut wire = wire::connect(&proxy, &world.certs, "http/1.1").await;
    wire.write_all(expecting(MAPS, object.len()).as_bytes()).await.unwrap();
    assert_eq!(head(&mut wire).await, "HTTP/1.1 100 Continue\r\n\r\n");
    wire.write_all(object.as_bytes()).await.unwrap();
    let answer = answer(&mut wire).await;
    assert!(answer.starts_with("HTTP/1.1 201 "), "{answer}");
}

/// The client need not send a body that has nowhere to go.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn http1_expect_is_answered_with_the_error_where_no_upstream_stream_opens() {
    let certs = Certs::new();
    let proxy = certs.start(certs.config(&[refusing()]));
    let mut wire = wire::connect(&proxy, &certs, "http/1.1").await;
    wire.write_all(expecting(MAPS, 1000).as_bytes()).await.unwrap();
    let head = head(&mut wire).await;
    assert!(head.starts_with("HTTP/1.1 503 "), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn expect_is_never_sent_upstream() {
    let world = World::new(1);
    let proxy = world.start().await;
    let who = world.certs.credentials();
    for (name, client) in [
        ("http2", Client::connect(proxy.addr, &who).await.unwrap()),
        ("http1", Client::connect_http1(proxy.addr, &who).await.unwrap()),
    ] {
        let headers = [("content-type", "application/json"), ("expect", "100-continue")];
        let object = map(name, "1").to_string();
        let reply = soon("an answer", client.request(Method::POST, MAPS, &headers, object)).await;
        assert_eq!(reply.unwrap().status, 201, "{name}");
    }
    let records = world.cluster.audit().select(|r| r.verb == "create");
    assert_eq!(records.len(), 2);
    let seen = records.iter().flat_map(|r| &r.header_names).find(|name| *name == "expect");
    assert_eq!(seen, None);
}
