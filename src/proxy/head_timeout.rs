//! Limits how long an HTTP/1.1 connection waits for a request head, and charges what it holds of one.
//!
//! * Between two requests a connection may be idle for [`IDLE_TIMEOUT`]; before its first request, for
//!   `limits.header_timeout`.
//! * From its first byte a head must be complete within `limits.header_timeout`, however slowly its bytes come.
//!
//! hyper asks its timer for one sleep for each head, when it starts to wait for the head, and closes the connection when
//! the sleep ends. [`HeadTimer`] makes these sleeps, and [`HeadStream`] reports to them that bytes have arrived. If a
//! client pipelines a part of a head behind a request, hyper reads both at once, so the part is reported with the
//! request: the connection counts as idle until the next byte.
//!
//! While a sleep exists, hyper has no request: what it writes then is the end of the response before, or its own answer
//! to a head that it refuses, which [`HeadStream`] replaces ([`super::head_errors`]).
//!
//! hyper reads a head into a buffer that it doubles each time that a read fills it. [`HeadMemory`] charges the buffer
//! beyond its first size until the head is complete, which is then charged as decoded.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::{Sleep, Timer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{self, Instant};

use super::admission::head_memory::HeadMemory;
use super::head_errors::HeadErrors;

/// How long a connection may be idle between two requests: the `IdleTimeout` of kube-apiserver
/// (`staging/src/k8s.io/apiserver/pkg/server/secure_serving.go`). A client that keeps connections as long as the
/// apiserver does sends no request on one that is about to be closed.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);

/// The stream and the timer of one connection.
pub fn limit_heads<T>(
    io: T,
    header_timeout: Duration,
    memory: HeadMemory,
    errors: HeadErrors,
) -> (HeadStream<T>, HeadTimer) {
    let head = Head::default();
    let is_first = AtomicBool::new(true);
    (
        HeadStream { io, head: head.clone(), memory, errors, is_flushed: true },
        HeadTimer { header_timeout, is_first, head },
    )
}

/// The head that is read. Atomic, because hyper's timers must be `Sync`; one thread uses it.
#[derive(Debug, Clone, Default)]
struct Head(Arc<HeadState>);

#[derive(Debug, Default)]
struct HeadState {
    /// Bytes have arrived.
    has_received: AtomicBool,
    /// hyper waits for a head, or has refused one.
    is_awaited: AtomicBool,
}

impl Head {
    fn received(&self) {
        self.0.has_received.store(true, Ordering::Relaxed);
    }

    fn take_received(&self) -> bool {
        self.0.has_received.swap(false, Ordering::Relaxed)
    }

    fn await_head(&self, is_awaited: bool) {
        self.0.is_awaited.store(is_awaited, Ordering::Relaxed);
    }

    fn is_awaited(&self) -> bool {
        self.0.is_awaited.load(Ordering::Relaxed)
    }
}

/// Makes the sleeps of one connection.
#[derive(Debug)]
pub struct HeadTimer {
    header_timeout: Duration,
    /// No head has been waited for yet.
    is_first: AtomicBool,
    head: Head,
}

impl HeadTimer {
    /// The sleep of the next head.
    fn next_sleep(&self) -> Pin<Box<dyn Sleep>> {
        let is_first = self.is_first.swap(false, Ordering::Relaxed);
        let idle_timeout = if is_first { self.header_timeout } else { IDLE_TIMEOUT };
        // What has arrived until now belongs to the previous request.
        self.head.take_received();
        self.head.await_head(true);
        Box::pin(HeadSleep {
            sleep: Box::pin(time::sleep(idle_timeout)),
            header_timeout: self.header_timeout,
            has_begun: false,
            head: self.head.clone(),
        })
    }
}

impl Timer for HeadTimer {
    fn sleep(&self, _: Duration) -> Pin<Box<dyn Sleep>> {
        self.next_sleep()
    }

    fn sleep_until(&self, _: std::time::Instant) -> Pin<Box<dyn Sleep>> {
        self.next_sleep()
    }

    fn now(&self) -> std::time::Instant {
        Instant::now().into_std()
    }
}

/// Ends when the connection has waited too long for a head.
#[derive(Debug)]
struct HeadSleep {
    sleep: Pin<Box<time::Sleep>>,
    header_timeout: Duration,
    /// The first byte of the head has arrived.
    has_begun: bool,
    head: Head,
}

impl Sleep for HeadSleep {}

/// hyper drops the sleep when it has read the head, and makes the next one later.
impl Drop for HeadSleep {
    fn drop(&mut self) {
        self.head.await_head(false);
    }
}

impl Future for HeadSleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if !self.has_begun && self.head.take_received() {
            self.has_begun = true;
            let deadline = Instant::now() + self.header_timeout;
            self.sleep.as_mut().reset(deadline);
        }
        self.sleep.as_mut().poll(cx)
    }
}

/// The decrypted stream of a connection.
#[derive(Debug)]
pub struct HeadStream<T> {
    io: T,
    head: Head,
    memory: HeadMemory,
    errors: HeadErrors,
    /// Everything that hyper has written was sent.
    is_flushed: bool,
}

impl<T> HeadStream<T> {
    /// The wrapped stream.
    pub fn into_inner(self) -> T {
        self.io
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for HeadStream<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.head.is_awaited() {
            self.memory.charge(buf.remaining())?;
        } else {
            self.memory.release();
        }
        let before = buf.filled().len();
        let result = Pin::new(&mut self.io).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.head.received();
        }
        result
    }
}

impl<T: AsyncWrite + Unpin> HeadStream<T> {
    /// Sends a response instead of hyper's answer to a head that it refuses; `None` if `buf` is no such answer. Once
    /// everything before was sent, what hyper writes while it has no request is one.
    fn poll_replace(&mut self, buf: &[u8], cx: &mut Context<'_>) -> Option<Poll<io::Result<()>>> {
        if self.is_flushed && self.head.is_awaited() {
            self.errors.refuse(buf);
        }
        self.is_flushed = false;
        self.errors.poll_send(&mut self.io, cx)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for HeadStream<T> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match this.poll_replace(buf, cx) {
            Some(sent) => sent.map_ok(|()| buf.len()),
            None => Pin::new(&mut this.io).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let first = bufs.iter().find(|buf| !buf.is_empty()).map_or(&[][..], |buf| buf);
        match this.poll_replace(first, cx) {
            Some(sent) => sent.map_ok(|()| bufs.iter().map(|buf| buf.len()).sum()),
            None => Pin::new(&mut this.io).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.io).poll_flush(cx);
        self.is_flushed |= matches!(flushed, Poll::Ready(Ok(())));
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use hyper::body::Incoming;
    use hyper::server::conn::http1;
    use hyper::service::service_fn;
    use hyper::{Request, Response};
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
    use tokio::time::sleep;

    use super::*;
    use crate::observe::Metrics;
    use jackstay_core::admission::MemoryBudget;
    use jackstay_core::credential_class::ClientRank;

    const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
    const GET: &[u8] = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    const POST: &[u8] = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc";

    /// The stream and the timer of a connection that is charged to `budget`.
    fn limited(
        io: DuplexStream,
        budget: &Arc<MemoryBudget>,
    ) -> (HeadStream<DuplexStream>, HeadTimer) {
        let memory = HeadMemory::new(budget.source(1), ClientRank::Unproven);
        let errors = HeadErrors::new(1 << 16, Metrics::new().listener("l"));
        limit_heads(io, HEADER_TIMEOUT, memory, errors)
    }

    /// Serves a connection, whose responses take `response_time`, while `client` runs. Returns how long after the end of
    /// `client` the connection is closed.
    async fn open_after<F>(response_time: Duration, client: impl FnOnce(DuplexStream) -> F) -> u64
    where
        F: Future<Output = DuplexStream>,
    {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (stream, timer) = limited(ours, &MemoryBudget::new(1 << 20));
        let respond = service_fn(async |request: Request<Incoming>| {
            let _body = http_body_util::BodyExt::collect(request.into_body()).await;
            sleep(response_time).await;
            Ok::<_, Infallible>(Response::new("ok".to_owned()))
        });
        let mut builder = http1::Builder::new();
        builder.timer(timer).header_read_timeout(HEADER_TIMEOUT);
        let connection = builder.serve_connection(TokioIo::new(stream), respond);
        let client = async {
            let mut stream = client(theirs).await;
            let start = Instant::now();
            while matches!(stream.read(&mut [0; 1024]).await, Ok(1..)) {}
            start.elapsed().as_secs()
        };
        let (_, open) = tokio::join!(connection, client);
        open
    }

    /// Sends a request, and reads the response.
    async fn exchange(stream: &mut DuplexStream, request: &[u8]) {
        stream.write_all(request).await.unwrap();
        let mut response = Vec::new();
        while !response.ends_with(b"ok") {
            assert!(stream.read_buf(&mut response).await.unwrap() > 0, "closed");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn idle_connection_after_a_response_is_closed_after_90_seconds() {
        for request in [GET, POST] {
            let open = open_after(Duration::ZERO, async |mut stream| {
                // Each request begins another period.
                for _ in 0..5 {
                    exchange(&mut stream, request).await;
                    sleep(Duration::from_secs(89)).await;
                }
                exchange(&mut stream, request).await;
                stream
            });
            assert_eq!(open.await, 90);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn new_connection_without_a_byte_is_closed_at_the_header_timeout() {
        assert_eq!(open_after(Duration::ZERO, async |stream| stream).await, 10);
    }

    #[tokio::test(start_paused = true)]
    async fn head_that_is_not_complete_is_closed_at_the_header_timeout_after_its_first_byte() {
        for (requests, idle) in [(0, 0), (0, 9), (1, 0), (1, 60), (2, 89)] {
            let open = open_after(Duration::ZERO, async |mut stream| {
                for _ in 0..requests {
                    exchange(&mut stream, GET).await;
                }
                sleep(Duration::from_secs(idle)).await;
                stream.write_all(&GET[..1]).await.unwrap();
                stream
            });
            assert_eq!(open.await, 10, "after {requests} requests and {idle} s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn head_whose_bytes_come_slowly_is_closed_at_the_header_timeout_after_its_first_byte() {
        let open = open_after(Duration::ZERO, async |mut stream| {
            exchange(&mut stream, GET).await;
            sleep(Duration::from_secs(50)).await;
            for byte in &GET[..7] {
                stream.write_all(&[*byte]).await.unwrap();
                sleep(Duration::from_secs(1)).await;
            }
            stream
        });
        assert_eq!(open.await, 3);
    }

    #[tokio::test(start_paused = true)]
    async fn response_that_takes_longer_than_both_limits_is_served() {
        let open = open_after(Duration::from_secs(200), async |mut stream| {
            for _ in 0..2 {
                exchange(&mut stream, POST).await;
            }
            stream
        });
        assert_eq!(open.await, 90);
    }

    /// Sends a head with a field of this size, in pieces, and returns what is charged for it when all but its end has
    /// been read, and after the response.
    async fn charged_for(size: usize, limit: usize) -> io::Result<(usize, usize)> {
        let budget = MemoryBudget::new(limit);
        let (ours, mut theirs) = tokio::io::duplex(1 << 10);
        let (stream, timer) = limited(ours, &budget);
        let respond = service_fn(async |_: Request<Incoming>| {
            Ok::<_, Infallible>(Response::new("ok".to_owned()))
        });
        let mut builder = http1::Builder::new();
        builder.timer(timer).header_read_timeout(HEADER_TIMEOUT).max_buf_size(64 << 10);
        let connection = builder.serve_connection(TokioIo::new(stream), respond);
        let client = async {
            let head = format!("GET / HTTP/1.1\r\nHost: a\r\nX: {}", "x".repeat(size));
            theirs.write_all(head.as_bytes()).await?;
            // The last piece is read, too.
            sleep(Duration::from_millis(10)).await;
            let reading = budget.used();
            exchange(&mut theirs, b"\r\n\r\n").await;
            sleep(Duration::from_millis(10)).await;
            Ok((reading, budget.used()))
        };
        tokio::select! {
            result = client => result,
            _ = connection => Err(io::ErrorKind::ConnectionReset.into()),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn large_head_is_charged_until_it_is_complete() {
        let limit = 1 << 20;
        assert_eq!(charged_for(100, limit).await.unwrap(), (0, 0));
        let (reading, after) = charged_for(50_000, limit).await.unwrap();
        assert!((30_000..=112 << 10).contains(&reading), "{reading}");
        assert!(after <= 16 << 10, "{after}");
        let error = charged_for(50_000, 64 << 10).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionReset, "it does not fit");
    }
}
