//! The origin: a server that sends responses like those of an apiserver with as little CPU as possible. It runs in a
//! separate process, so that its CPU time is not counted.
//!
//! The process is this program with the argument `origin`. It prints its address and serves until its standard input
//! closes, so it cannot outlive the run.

use std::{
    convert::Infallible,
    io::{Read, Write},
    net::SocketAddr,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    thread,
};

use bytes::Bytes;
use http::{Request, Response, header};
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::{Result, pki::Pki, raw};

/// The object that the request load and the latency measurement read.
pub const OBJECT: &str = "/api/v1/namespaces/default/configmaps/x";
/// A LIST whose response has [`BULK_BYTES`].
pub const BULK: &str = "/api/v1/pods";
/// A LIST whose response has [`LIST_BYTES`].
pub const LIST: &str = "/api/v1/configmaps";
/// An object whose response has [`LONG_OBJECT_BYTES`].
pub const LONG_OBJECT: &str = "/api/v1/namespaces/default/configmaps/long";
/// A watch that sends one event and stays open.
pub const WATCH: &str = "/api/v1/namespaces/default/configmaps?watch=1&resourceVersion=100";

/// Body size of the response for [`OBJECT`].
pub const OBJECT_BYTES: usize = 2048;
/// Body size of the response for [`BULK`].
pub const BULK_BYTES: u64 = 200_000_000;
/// Body size of the response for [`LIST`].
pub const LIST_BYTES: u64 = 20_000_000;
/// Body size of the response for [`LONG_OBJECT`].
pub const LONG_OBJECT_BYTES: u64 = 64 << 10;

/// Concurrent streams of a connection, as with `--http2-max-streams-per-connection=100` of kube-apiserver.
const MAX_STREAMS: u32 = 100;
/// Size of the DATA frames of [`BULK`], similar to those of Go's server for a large LIST.
const CHUNK: usize = 32 * 1024;

/// Serves until standard input ends.
pub fn run(dir: &Path) -> Result<()> {
    // The parent holds the other end of standard input, which closes when the parent exits for any reason.
    thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(serve(dir))
}

async fn serve(dir: &Path) -> Result<()> {
    let tls = TlsAcceptor::from(Pki::in_dir(dir).server_config()?);
    let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).await?;
    println!("{}", listener.local_addr()?);
    std::io::stdout().flush()?;

    let object = object();
    let chunk = Bytes::from(vec![b'x'; CHUNK]);
    loop {
        let (tcp, _) = listener.accept().await?;
        tcp.set_nodelay(true)?;
        let (tls, object, chunk) = (tls.clone(), object.clone(), chunk.clone());
        tokio::spawn(async move {
            let mut first = [0];
            match tcp.peek(&mut first).await {
                Ok(1) if raw::is_raw(first[0]) => {
                    let _ = raw::serve(tcp).await; // the client reports errors
                    return;
                }
                Ok(1) => {}
                _ => return, // a health check that only connects
            }
            let Ok(stream) = tls.accept(tcp).await else { return };
            let service = service_fn(move |request: Request<Incoming>| {
                let response = respond(&request, &object, &chunk);
                async move { Ok::<_, Infallible>(response) }
            });
            // The client reports errors of the connection.
            let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(MAX_STREAMS)
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn respond(request: &Request<Incoming>, object: &Bytes, chunk: &Bytes) -> Response<Body> {
    let watch = request.uri().query().is_some_and(|query| query.contains("watch=1"));
    let body = match request.uri().path() {
        _ if watch => Body::Watch(Some(event())),
        "/readyz" => Body::Whole(Some(Bytes::from_static(b"ok"))),
        BULK => Body::Bulk { chunk: chunk.clone(), left: BULK_BYTES },
        LIST => Body::Bulk { chunk: chunk.clone(), left: LIST_BYTES },
        LONG_OBJECT => Body::Bulk { chunk: chunk.clone(), left: LONG_OBJECT_BYTES },
        _ => Body::Whole(Some(object.clone())),
    };
    let mut response = Response::new(body);
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// A `ConfigMap` of exactly [`OBJECT_BYTES`].
fn object() -> Bytes {
    let head = r#"{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"x","namespace":"default","resourceVersion":"100"},"data":{"x":""#;
    let tail = "\"}}\n";
    let pad = "x".repeat(OBJECT_BYTES - head.len() - tail.len());
    Bytes::from([head, &pad, tail].concat())
}

fn event() -> Bytes {
    Bytes::from_static(b"{\"type\":\"ADDED\",\"object\":{\"kind\":\"ConfigMap\",\"apiVersion\":\"v1\",\"metadata\":{\"name\":\"x\",\"namespace\":\"default\",\"resourceVersion\":\"101\"}}}\n")
}

/// The three kinds of response bodies.
enum Body {
    Whole(Option<Bytes>),
    Bulk { chunk: Bytes, left: u64 },
    Watch(Option<Bytes>),
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Bulk { left: 0, .. } => Poll::Ready(None),
            Self::Bulk { chunk, left } => {
                let len = (*left).min(chunk.len() as u64);
                *left -= len;
                Poll::Ready(Some(Ok(Frame::data(chunk.slice(..len as usize)))))
            }
            // After its event a watch stays pending. It needs no waker, because hyper drops the body of a cancelled
            // stream.
            Self::Watch(event) => match event.take() {
                Some(event) => Poll::Ready(Some(Ok(Frame::data(event)))),
                None => Poll::Pending,
            },
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Self::Bulk { left, .. } => SizeHint::with_exact(*left),
            Self::Watch(_) => SizeHint::default(),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Bulk { left, .. } => *left == 0,
            Self::Watch(_) => false,
        }
    }
}
