//! Drives one client connection after its TLS handshake: HTTP/2 or HTTP/1.1, with the limits of the protocols. A
//! drain ends it with a GOAWAY, so that the client loses no request.

use std::cell::Cell;
use std::convert::Infallible;
use std::error::Error;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use h2::Reason;
use hyper::rt::{Executor, Timer};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jackstay_config::RequestLimits;
use jackstay_core::admission::{Level, Refusal};
use jackstay_core::credential_class::ClientRank;
use jackstay_core::request::hygiene;
use jackstay_net::frame_limiter::FrameLimiter;
use jackstay_sys::clock;
use jackstay_sys::sockets::cork::{Collect, Uncork, cork};
use jackstay_sys::sockets::source::Source;
use tokio::task::spawn_local;
use tokio::time::sleep;

use super::admission::client_memory::{ClientMemory, StreamMemory, UNPROVEN_STREAMS, open_head};
use super::admission::connection_slots::{ConnectionSlot, OpenRequest};
use super::admission::listener_admission::ListenerAdmission;
use super::body_progress::{BodyProgress, StallBoundStream, TrackedBody};
use super::client_certificate::ClientCertificate;
use super::client_connection::ClientConnection;
use super::client_stream::ClientStream;
use super::drain::DrainWatcher;
use super::head_errors::HeadErrors;
use super::head_timeout::limit_heads;
use super::listener_service::ListenerService;

/// Largest frame accepted: RFC 9113's default.
const MAX_FRAME_SIZE: u32 = 16 * 1024;
/// The largest head that kube-apiserver accepts (Go's `net/http`, `DefaultMaxHeaderBytes`).
const KUBE_APISERVER_HEAD: u32 = 1 << 20;
/// Bytes of one response that h2 buffers. [`TrackedBody`] returns fewer than that at a time.
const SEND_BUFFER_SIZE: usize = 256 * 1024;
/// Limit on streams that a client has opened and reset before hyper accepted them. The rapid-reset attack
/// (CVE-2023-44487) does so continuously. A client that cancels a thousand watches at once does so too,
/// so the limit is above the default stream limit.
const MAX_PENDING_RESETS: usize = 2_000;
/// Limit on streams that were reset because of a client's protocol errors. Beyond it, the connection is
/// closed with `ENHANCE_YOUR_CALM`. This is h2's default (CVE-2025-8671).
const MAX_ERROR_RESETS: usize = 1_024;
/// How often a connection checks whether memory is short, on average.
const MEMORY_CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// How long a connection that is closed for another one may take to close, if it has no request.
const EVICTION_PAUSE: Duration = Duration::from_millis(250);
/// How long it may take if the client has sent a request before it received the GOAWAY.
const MAX_EVICTION_TIME: Duration = Duration::from_secs(5);

/// How long a drain waits for the first request of an HTTP/1.1 connection. hyper closes one without a request at once,
/// and Go's client repeats a request only if its connection has carried another one before (`shouldRetryRequest`).
const FIRST_REQUEST_WAIT: Duration = Duration::from_secs(2);

/// A client connection and what it needs besides the stream.
pub struct HttpConnection<'a> {
    /// The admission of the listener.
    pub admission: &'a ListenerAdmission,
    /// The service of the listener when it accepted the connection. Its limits apply until the connection ends.
    pub service: &'a ListenerService,
    /// Ends the connection.
    pub drain: DrainWatcher,
}

impl HttpConnection<'_> {
    /// Serves requests until the connection ends.
    ///
    /// # Errors
    /// The connection has failed, or the client has broken a limit.
    pub async fn serve(
        self,
        stream: ClientStream,
        client: Rc<ClientConnection>,
        slot: &ConnectionSlot,
    ) -> Result<(), Box<dyn Error>> {
        if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
            self.serve_http2(stream, client, slot).await
        } else {
            self.serve_http1(stream, client, slot).await
        }
    }

    /// Records that a client has exceeded a limit of frames.
    fn warn_of_frames(&self, frame: &'static str, source: Source) {
        self.service.metrics.closed_for_frames(frame);
        let about = format!(
            "listener {} closed a connection with ENHANCE_YOUR_CALM, because {}",
            self.admission.listener(),
            Refusal::Frames.reason()
        );
        self.admission.warnings.warn(&about, format_args!("{frame}, from {source}"));
    }

    #[expect(
        clippy::too_many_lines,
        reason = "the settings of a connection and what ends it, in one place"
    )]
    async fn serve_http2(
        self,
        stream: ClientStream,
        client: Rc<ClientConnection>,
        slot: &ConnectionSlot,
    ) -> Result<(), Box<dyn Error>> {
        let (limits, source) = (&self.service.request_limits, slot.source());
        let (memory, certificate) = (Rc::clone(&client.memory), client.certificate.clone());
        let warn_of_shed = || self.warn_of_shed(&memory, source);
        let windows = memory.windows();
        let max_streams = match memory.rank() {
            ClientRank::Identity => limits.max_streams,
            _ => limits.max_streams.min(UNPROVEN_STREAMS),
        };
        let streams = Rc::new(Streams::new(limits.stall_timeout));
        let begun = Rc::clone(&streams);
        let respond = service_fn(move |request| {
            // A refused request is dropped here. REFUSED_STREAM says that it was not processed, so that clients
            // send it again (RFC 9113, 8.7).
            let memory = client.charge(&request);
            let begun = memory.map(|memory| {
                let progress = begun.begin(memory, client.slot.begin_request());
                let response = Rc::clone(&client).serve(request, Rc::clone(&progress));
                (progress, response)
            });
            async move {
                let (progress, response) = begun.ok_or(h2::Error::from(Reason::REFUSED_STREAM))?;
                let Ok(response) = response.await;
                let reserve = response.body().reserve();
                Ok::<_, h2::Error>(response.map(|body| TrackedBody::new(body, progress, reserve)))
            }
        });
        let (stream, uncork) = cork(stream);
        let list = http2_header_list(limits.max_header_bytes);
        let (stream, frames) = FrameLimiter::of_client(stream, max_streams, limits.header_timeout);
        let charged = Rc::clone(&memory);
        let charge = move |kind, bytes| charged.charge_headers(kind, bytes);
        let stream = stream.charging_headers(open_head(list as usize), Box::new(charge));
        let mut builder = http2::Builder::new(LocalExecutor(Rc::clone(&streams)));
        let connection = builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(windows.stream)
            .initial_connection_window_size(windows.connection)
            .max_frame_size(MAX_FRAME_SIZE)
            .max_send_buf_size(SEND_BUFFER_SIZE)
            .max_concurrent_streams(max_streams)
            .max_header_list_size(list)
            .max_pending_accept_reset_streams(MAX_PENDING_RESETS.max(max_streams as usize))
            .max_local_error_reset_streams(MAX_ERROR_RESETS)
            .serve_connection(TokioIo::new(stream), respond);
        let mut connection = std::pin::pin!(connection);
        let mut drain = self.drain.clone();
        let served = async {
            tokio::select! {
                // The connection is polled first, so that a received request counts before the timeout.
                biased;
                result = poll_fn(|cx| poll_and_flush(connection.as_mut(), &uncork, cx)) => return result,
                () = drain.started() => {}
                () = slot.evicted() => {}
                () = streams.idle_without_stream(limits.header_timeout, || uncork.received_since_last_call()) => {
                    self.admission.count(Refusal::NoRequest);
                }
                shed = shed_when_short(&memory, warn_of_shed) => shed?,
                () = identity_lost(&memory, certificate) => {}
            }
            // A first request that is on its way is served, or the GOAWAY tells the client to retry it.
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                result = poll_fn(|cx| poll_and_flush(connection.as_mut(), &uncork, cx)) => result,
                () = streams.no_stream_within(limits.header_timeout) => Err(Refusal::NoRequest.reason().into()),
                () = evicted_and_idle(slot, self.admission) => Err("closed for another connection".into()),
            }
        };
        let result = served.await;
        warn_of_shed();
        if let Some(frame) = frames.violation() {
            self.warn_of_frames(frame.as_str(), source);
        }
        result
    }

    async fn serve_http1(
        self,
        stream: ClientStream,
        client: Rc<ClientConnection>,
        slot: &ConnectionSlot,
    ) -> Result<(), Box<dyn Error>> {
        let (limits, source) = (&self.service.request_limits, slot.source());
        let (memory, certificate) = (Rc::clone(&client.memory), client.certificate.clone());
        let warn_of_shed = || self.warn_of_shed(&memory, source);
        let errors = HeadErrors::new(limits.max_header_bytes, Arc::clone(&self.service.metrics));
        let (stream, timer) = limit_heads(stream, limits.header_timeout, memory.heads(), errors);
        let has_request = Cell::new(false);
        let respond = service_fn(|request| {
            has_request.set(true);
            let memory = client.charge(&request).ok_or(());
            let fits = memory.is_ok();
            let memory = memory.unwrap_or_else(|()| client.memory.begin_uncharged());
            let progress = BodyProgress::new(memory, client.slot.begin_request());
            let response = if fits {
                Ok(Rc::clone(&client).serve(request, Rc::clone(&progress)))
            } else {
                Err(client.refuse_for_memory(request))
            };
            async move {
                let response = match response {
                    Ok(served) => served.await?,
                    Err(refusal) => refusal,
                };
                let reserve = response.body().reserve();
                Ok::<_, Infallible>(response.map(|body| TrackedBody::new(body, progress, reserve)))
            }
        });
        let connection = http1_builder(limits, timer)
            .serve_connection(TokioIo::new(stream), respond)
            .with_upgrades();
        let mut connection = std::pin::pin!(connection);
        let mut drain = self.drain.clone();
        let served = async {
            tokio::select! {
                // The connection is polled first, so that a received request counts before it is shed as idle.
                biased;
                result = connection.as_mut() => return result.map_err(Into::into),
                () = drain.started() => {
                    let first = Box::pin(first_request(&has_request));
                    tokio::select! {
                        biased;
                        result = connection.as_mut() => return result.map_err(Into::into),
                        () = first => {}
                        () = slot.evicted() => {}
                    }
                }
                () = slot.evicted() => {}
                shed = shed_when_short(&memory, warn_of_shed) => shed?,
                () = identity_lost(&memory, certificate) => {}
            }
            // An idle connection is closed, and another one after its response.
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                result = connection.as_mut() => result.map_err(Into::into),
                () = evicted_and_idle(slot, self.admission) => Err("closed for another connection".into()),
            }
        };
        let result = served.await;
        warn_of_shed();
        result
    }

    /// Warns if something of this client was shed since the last call.
    fn warn_of_shed(&self, client: &ClientMemory, source: Source) {
        if let Some(refusal) = client.take_last_shed() {
            let about = format!(
                "listener {} is short of memory for a client (memory_limit)",
                self.admission.listener()
            );
            self.admission
                .warnings
                .warn(&about, format_args!("{}, from {source}", refusal.counted().label()));
        }
    }
}

/// The header list that an HTTP/2 client may send: twice the limit of a head, and as much as kube-apiserver accepts. A
/// head between both gets a `Status` ([`hygiene::check_size`]). h2 answers a larger one itself with a 431 without a
/// body, or closes the connection. Go's client sends no head that is larger than announced, and its error does not name
/// the limit.
const fn http2_header_list(max_header_bytes: u32) -> u32 {
    let twice = max_header_bytes.saturating_mul(2);
    if twice > KUBE_APISERVER_HEAD { twice } else { KUBE_APISERVER_HEAD }
}

/// The settings of an HTTP/1.1 connection.
fn http1_builder(
    limits: &RequestLimits,
    timer: impl Timer + Send + Sync + 'static,
) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(timer)
        .header_read_timeout(limits.header_timeout)
        .max_headers(http1_fields(limits.max_header_bytes as usize))
        .max_buf_size((limits.max_header_bytes as usize).max(8 * 1024))
        .half_close(false);
    builder
}

/// The fields that hyper reads of an HTTP/1.1 head: no head of `max_header_bytes` has more.
fn http1_fields(max_header_bytes: usize) -> usize {
    (max_header_bytes / hygiene::FIELD_OVERHEAD).min(hygiene::MAX_NAMES)
}

/// Returns when the certificate of an identity's client is no longer valid. The connection then ends after its
/// requests, so that the identity lane serves only proven identities, and the client can show a new certificate. Never
/// returns for another client.
async fn identity_lost(client: &ClientMemory, certificate: Option<Rc<ClientCertificate>>) {
    match certificate.filter(|_| client.rank() == ClientRank::Identity) {
        Some(certificate) => {
            let reason = Box::pin(certificate.expired()).await;
            tracing::debug!(%reason, "connection ends");
        }
        None => pending().await,
    }
}

/// Returns when the connection has a request, or none comes. Must be polled after the connection.
async fn first_request(has_request: &Cell<bool>) {
    let begun = poll_fn(|_| if has_request.get() { Poll::Ready(()) } else { Poll::Pending });
    let _ = tokio::time::timeout(FIRST_REQUEST_WAIT, begun).await;
}

/// Counts an evicted connection, and returns when it has had time to close. Never returns for another connection.
async fn evicted_and_idle(slot: &ConnectionSlot, admission: &ListenerAdmission) {
    slot.evicted().await;
    admission.count(Refusal::Evicted);
    let end = clock::now() + MAX_EVICTION_TIME;
    loop {
        sleep(EVICTION_PAUSE).await;
        if slot.is_idle() || clock::now() >= end {
            return;
        }
    }
}

/// Waits until memory is short for a client, and counts its connection as shed. `warn` is called before each check. The
/// random pause avoids that all connections of a source are shed at the same time.
///
/// # Errors
/// The connection has requests, and must be closed at once.
async fn shed_when_short(client: &ClientMemory, warn: impl Fn()) -> Result<(), Box<dyn Error>> {
    loop {
        sleep(MEMORY_CHECK_INTERVAL.mul_f64(0.5 + fastrand::f64())).await;
        warn();
        match (client.rank(), client.level(), client.open_streams()) {
            (ClientRank::Identity, ..) | (_, Level::Free, _) => {}
            (.., 0) => {
                client.count(Refusal::IdleConnection);
                return Ok(());
            }
            (_, Level::Critical, _) => {
                client.count(Refusal::LongRunning);
                return Err(Refusal::LongRunning.reason().into());
            }
            (..) => {}
        }
    }
}

/// Polls a connection, then sends all bytes that it has written.
fn poll_and_flush(
    connection: Pin<&mut impl Future<Output = hyper::Result<()>>>,
    uncork: &Uncork<impl Collect>,
    cx: &mut Context<'_>,
) -> Poll<Result<(), Box<dyn Error>>> {
    let done = connection.poll(cx);
    let sent = uncork.poll(cx);
    match (done, sent) {
        (Poll::Ready(result), _) => Poll::Ready(result.map_err(Into::into)),
        (Poll::Pending, Poll::Ready(Err(error))) => Poll::Ready(Err(error.into())),
        (Poll::Pending, _) => Poll::Pending,
    }
}

/// The streams of one HTTP/2 connection.
struct Streams {
    /// How long a client may take no piece of a response.
    stall_timeout: Duration,
    /// Whether the client has opened a stream.
    has_opened: Cell<bool>,
    /// The progress of the stream whose task hyper starts next.
    next_progress: Cell<Option<Rc<BodyProgress>>>,
}

impl Streams {
    fn new(stall_timeout: Duration) -> Self {
        Self { stall_timeout, has_opened: Cell::new(false), next_progress: Cell::new(None) }
    }

    /// Registers a request that is charged in `memory`. hyper starts the task of its stream once it has the future
    /// of the response.
    fn begin(&self, memory: StreamMemory, request: OpenRequest) -> Rc<BodyProgress> {
        let progress = BodyProgress::new(memory, request);
        self.has_opened.set(true);
        self.next_progress.set(Some(Rc::clone(&progress)));
        progress
    }

    /// Returns when the connection has had no stream yet and has received nothing for `limit`.
    ///
    /// A client that sends PINGs keeps its connection open before its first request, as another jackstay
    /// without clients does. If such a connection were closed, the client would reconnect each time, with
    /// another handshake. `limits.max_connections` still limits such connections. (kube-apiserver closes
    /// every connection that has no stream for 90 s.)
    async fn idle_without_stream(&self, limit: Duration, has_received: impl Fn() -> bool) {
        loop {
            self.no_stream_within(limit).await;
            if !has_received() {
                return;
            }
        }
    }

    /// Returns after `limit` if the client has opened no stream by then, and otherwise never: a connection
    /// that has had a stream, such as that of a kubelet, may be idle for any time.
    async fn no_stream_within(&self, limit: Duration) {
        sleep(limit).await;
        if self.has_opened.get() {
            pending::<()>().await;
        }
    }
}

/// Runs hyper's tasks on the worker's own thread.
#[derive(Clone)]
struct LocalExecutor(Rc<Streams>);

impl<F> Executor<F> for LocalExecutor
where
    F: Future<Output = ()> + 'static,
{
    fn execute(&self, future: F) {
        match self.0.next_progress.take() {
            Some(progress) => {
                spawn_local(StallBoundStream::new(future, progress, self.0.stall_timeout))
            }
            None => spawn_local(future),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::timeout;

    #[tokio::test(start_paused = true)]
    async fn idle_before_first_stream_is_extended_by_received_bytes() {
        let limit = Duration::from_secs(10);
        let streams = Streams::new(limit);
        let remaining = Cell::new(3);
        let has_received = || remaining.replace(remaining.get() - 1) > 0;
        let start = clock::now();
        streams.idle_without_stream(limit, has_received).await;
        assert_eq!(clock::elapsed(start), limit * 4);
        streams.has_opened.set(true);
        let idle = timeout(limit * 1_000, streams.idle_without_stream(limit, || false));
        assert!(idle.await.is_err(), "a connection that has had a stream may be idle");
    }
}
