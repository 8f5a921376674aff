//! The origin: a server that sends responses like those of an apiserver with as little CPU as possible. It runs in a
//! separate process, so that its CPU time is not counted.
//!
//! The process is this program with the argument `origin`. It prints its address and serves until its standard input
//! closes, so it cannot outlive the run.

use std::{
    convert::Infallible,
    fmt::Write as _,
    future::poll_fn,
    io::{Read, Write as _},
    net::SocketAddr,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    thread,
    time::Duration,
};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body::{Frame, SizeHint};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustix::time::{ClockId, clock_gettime};
use tokio::{
    net::TcpListener,
    time::{Interval, MissedTickBehavior, interval},
};
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

/// A watch of [`LIST`] that sends [`EVENTS_PER_SECOND`] until it is cancelled. Each event has [`EVENT_BYTES`] and its time of sending.
pub const EVENTS: &str = "/api/v1/configmaps?watch=1&resourceVersion=100";

/// A watch like [`EVENTS`], with [`BUSY_EVENTS_PER_SECOND`]. Events for which the origin is late are left out.
pub const BUSY_WATCH: &str = "/api/v1/pods?watch=1&resourceVersion=100";

/// Body size of the response for [`OBJECT`].
pub const OBJECT_BYTES: usize = 2048;
/// Body size of the response for [`BULK`].
pub const BULK_BYTES: u64 = 200_000_000;
/// Body size of the response for [`LIST`].
pub const LIST_BYTES: u64 = 20_000_000;
/// Body size of the response for [`LONG_OBJECT`].
pub const LONG_OBJECT_BYTES: u64 = 64 << 10;
/// Size of the body that a PUT must have.
pub const UPLOAD_BYTES: u64 = 20_000_000;
/// Size of an event of [`EVENTS`], with its line feed.
pub const EVENT_BYTES: usize = 300;
/// Rate of [`EVENTS`]: one each millisecond, the resolution of tokio's timer.
pub const EVENTS_PER_SECOND: u32 = 1000;
/// Rate of [`BUSY_WATCH`].
pub const BUSY_EVENTS_PER_SECOND: u32 = 20;

/// Concurrent streams of a connection, as with `--http2-max-streams-per-connection=100` of kube-apiserver.
const MAX_STREAMS: u32 = 100;
/// Window of an upload and largest frame, as kube-apiserver has them
/// (`resourceBody99Percentile` in `k8s.io/apiserver/pkg/server/secure_serving.go`).
const UPLOAD_WINDOW: u32 = 256 << 10;
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
                let mut response = respond(&request, &object, &chunk);
                async move {
                    let put = request.method() == Method::PUT;
                    let received = discard(request.into_body()).await;
                    if put && received != UPLOAD_BYTES {
                        *response.status_mut() = StatusCode::BAD_REQUEST;
                    }
                    Ok::<_, Infallible>(response)
                }
            });
            // The client reports errors of the connection.
            let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .max_concurrent_streams(MAX_STREAMS)
                .initial_stream_window_size(UPLOAD_WINDOW)
                .initial_connection_window_size(UPLOAD_WINDOW * MAX_STREAMS)
                .max_frame_size(UPLOAD_WINDOW)
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

fn respond(request: &Request<Incoming>, object: &Bytes, chunk: &Bytes) -> Response<Body> {
    let watch = request.uri().query().is_some_and(|query| query.contains("watch=1"));
    let body = match request.uri().path() {
        // A proxy may add parameters to the query.
        LIST if watch => Body::events(EVENTS_PER_SECOND, MissedTickBehavior::Burst),
        BULK if watch => Body::events(BUSY_EVENTS_PER_SECOND, MissedTickBehavior::Skip),
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

/// An event of [`EVENTS`], sent now; `number` is the number of events before it.
fn timed_event(number: u64) -> Bytes {
    let mut event = String::with_capacity(EVENT_BYTES);
    let _ = write!(
        event,
        r#"{{"type":"MODIFIED","object":{{"kind":"ConfigMap","apiVersion":"v1","metadata":{{"name":"x","namespace":"default","resourceVersion":"{}"}},"data":{{"{SENT}":"{}","x":""#,
        101 + number,
        now().as_nanos(),
    );
    let tail = "\"}}}\n";
    let pad = EVENT_BYTES - event.len() - tail.len();
    event.extend(std::iter::repeat_n('x', pad));
    event += tail;
    event.into()
}

/// The key of the time of sending in an event.
const SENT: &str = "sent";

/// How long ago an event of [`EVENTS`] was sent; `None` if `line` is none.
pub fn delay(line: &[u8]) -> Option<Duration> {
    let line = str::from_utf8(line).ok()?;
    let (_, rest) = line.split_once(&format!("\"{SENT}\":\""))?;
    let nanos = rest.split_once('"')?.0.parse().ok()?;
    now().checked_sub(Duration::from_nanos(nanos))
}

/// The monotonic clock, which is the same for all processes of the machine (`clock_gettime(2)`).
fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// Reads a request body and returns its length, or that of the part before an error.
async fn discard(mut body: Incoming) -> u64 {
    let mut length = 0;
    while let Some(Ok(frame)) =
        poll_fn(|cx| http_body::Body::poll_frame(Pin::new(&mut body), cx)).await
    {
        length += frame.data_ref().map_or(0, |data| data.len() as u64);
    }
    length
}

/// The kinds of response bodies.
enum Body {
    Whole(Option<Bytes>),
    Bulk {
        chunk: Bytes,
        left: u64,
    },
    Watch(Option<Bytes>),
    /// The timer starts when the body is read first.
    Events {
        period: Duration,
        late: MissedTickBehavior,
        every: Option<Interval>,
        sent: u64,
    },
}

impl Body {
    fn events(per_second: u32, late: MissedTickBehavior) -> Self {
        Self::Events { period: Duration::from_secs(1) / per_second, late, every: None, sent: 0 }
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
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
            Self::Events { period, late, every, sent } => {
                let every = every.get_or_insert_with(|| {
                    let mut every = interval(*period);
                    every.set_missed_tick_behavior(*late);
                    every
                });
                every.poll_tick(cx).map(|_| {
                    *sent += 1;
                    Some(Ok(Frame::data(timed_event(*sent))))
                })
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Self::Bulk { left, .. } => SizeHint::with_exact(*left),
            Self::Watch(_) | Self::Events { .. } => SizeHint::default(),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Bulk { left, .. } => *left == 0,
            Self::Watch(_) | Self::Events { .. } => false,
        }
    }
}
