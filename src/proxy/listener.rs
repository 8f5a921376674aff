//! Accepts the connections of one listener, does their TLS and hands their requests to
//! [`super::client_connection`]; ends them on shutdown so that clients do not notice.

use std::cell::Cell;
use std::error::Error;
use std::future::{pending, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::rt::Executor;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::accept;
use super::body_progress::{BodyProgress, StallBoundStream, TrackedBody};
use super::client_certificate::ClientCertificate;
use super::client_connection::{ClientConnection, CurrentService, ListenerService};
use super::credential_selector::LastToken;
use super::drain::DrainWatcher;
use super::hygiene::ForwardedFor;
use super::plain_http;
use super::stall_timeout::StallTimeout;
use crate::config::RequestLimits;
use crate::net::sockets::cork::{Uncork, cork};
use crate::net::sockets::linger::Linger;
use crate::net::sockets::read_ahead::ReadAhead;
use crate::net::sockets::tcp_options;
use crate::net::tls::serving::{self, ServingTls};
use crate::observe::{ListenerMetrics, RateLimitedWarnings};

/// Receive window of one request body: what waits in it is the bound on memory per upload.
const STREAM_WINDOW: u32 = 256 * 1024;
/// Receive window of a client connection: sixteen uploads at full speed, and one that is stalled
/// upstream does not stop the others.
const CONNECTION_WINDOW: u32 = STREAM_WINDOW * 16;
/// Largest frame accepted: RFC 9113's default.
const MAX_FRAME: u32 = 16 * 1024;
/// Bytes of one answer that are buffered beyond the client's window.
const SEND_BUFFER: usize = 64 * 1024;
/// Streams that a client opened and reset before we looked at them. The rapid-reset attack
/// (CVE-2023-44487) does that for ever; an informer that cancels a thousand watches does it once,
/// so this is above the stream limit's default and far below an attack.
const PENDING_RESETS: usize = 2_000;
/// Streams that we reset because of a client's errors before its connection is closed with
/// `ENHANCE_YOUR_CALM`: h2's default (CVE-2025-8671), a well-behaved client makes none.
const ERROR_RESETS: usize = 1_024;
/// Header fields of an HTTP/1.1 request: hyper's default.
const MAX_HEADERS: usize = 100;

/// A client's connection, as hyper gets it.
pub type ClientStream = TlsStream<ReadAhead<StallTimeout<Linger>>>;

/// One listener on one worker.
pub struct Listener {
    /// Name, for the log.
    pub name: String,
    /// What serves its connections.
    pub serving: CurrentService,
    /// Its TLS.
    pub tls: Arc<ServingTls>,
    /// Open connections.
    pub open: Cell<usize>,
    /// About connections that are refused.
    pub warnings: RateLimitedWarnings,
    /// When connections are to end.
    pub drain: DrainWatcher,
}

impl Listener {
    /// Accepts on one socket until `drain` begins.
    pub async fn accept(self: Rc<Self>, socket: TcpListener, drain: DrainWatcher) {
        let metrics = Arc::clone(&self.serving.now().metrics);
        let about = (self.name.as_str(), &*metrics, &self.warnings);
        accept::until_drain(socket, drain, about, |stream, from| self.admit(stream, from)).await;
    }

    fn admit(self: &Rc<Self>, stream: TcpStream, from: SocketAddr) {
        // hyper is done with a connection that has become a tunnel, but it is open all the same.
        let service = self.serving.now();
        if self.open.get() + service.tunnels.open() >= service.limits.max_connections {
            service.metrics.refused("cap");
            self.warnings.warn(&accept::full(&self.name, service.limits.max_connections), from);
            return;
        }
        let guard = Open::new(self, &service.metrics);
        let this = Rc::clone(self);
        spawn_local(async move {
            let mut drain = this.drain.clone();
            tokio::select! {
                () = this.connection(stream, from, &service) => {}
                () = drain.forced() => {}
            }
            drop(guard);
        });
    }

    async fn connection(&self, stream: TcpStream, from: SocketAddr, service: &ListenerService) {
        if tcp_options::configure_accepted(&stream).is_err() {
            return;
        }
        // What changes from here on is for the next connection.
        let limits = &service.request_limits;
        let stream = ReadAhead::new(StallTimeout::new(Linger::new(stream), limits.stall_timeout));
        let handshake = self.handshake(stream);
        let stream = match timeout(service.limits.handshake_timeout, handshake).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => {
                service.metrics.refused("handshake");
                if let Some(why) = serving::chain_limit_error(&error) {
                    let about = format!("listener {} refused a TLS handshake", self.name);
                    self.warnings.warn(&about, format_args!("{why}, from {from}"));
                }
                tracing::debug!(listener = self.name, client = %from, %error, "TLS failed");
                return;
            }
            Err(_) => {
                service.metrics.refused("timeout");
                tracing::debug!(listener = self.name, client = %from, "TLS took too long");
                return;
            }
        };
        let session = stream.get_ref().1;
        let h2 = session.alpn_protocol() == Some(b"h2");
        let peer = ClientCertificate::new(session.peer_certificates(), &self.tls, &service.metrics);
        let client = Rc::new(ClientConnection {
            serving: self.serving.clone(),
            peer: peer.clone(),
            address: from.ip().to_canonical(),
            forwarded_for: ForwardedFor::new(from.ip()),
            token: LastToken::default(),
        });
        // Pinned here, so that it is there once.
        let mut served = std::pin::pin!(async {
            if h2 {
                self.http2(stream, client, service).await
            } else {
                self.http1(stream, client, limits).await.map_err(Into::into)
            }
        });
        let result = match &peer {
            None => served.await,
            Some(peer) => tokio::select! {
                result = &mut served => result,
                never = peer.follow() => match never {},
            },
        };
        if let Err(error) = result {
            tracing::debug!(listener = self.name, client = %from, %error, "connection ended");
        }
    }

    async fn handshake(
        &self,
        mut stream: ReadAhead<StallTimeout<Linger>>,
    ) -> io::Result<ClientStream> {
        if plain_http::is_request(stream.peek().await?) {
            stream.write_all(plain_http::ANSWER).await?;
            stream.flush().await?;
            return Err(io::Error::new(io::ErrorKind::InvalidData, "HTTP without TLS"));
        }
        TlsAcceptor::from(self.tls.config()).accept(stream).await
    }

    async fn http2(
        &self,
        stream: ClientStream,
        client: Rc<ClientConnection>,
        found: &ListenerService,
    ) -> Result<(), Box<dyn Error>> {
        let limits = &found.request_limits;
        let streams = Rc::new(Streams::new(limits.stall_timeout));
        let begun = Rc::clone(&streams);
        let service = service_fn(move |request| {
            let progress = begun.begin();
            let answer = Rc::clone(&client).handle(request);
            async move {
                answer.await.map(|response| response.map(|body| TrackedBody::new(body, progress)))
            }
        });
        let (stream, uncork) = cork(stream);
        let mut builder = http2::Builder::new(LocalExecutor(Rc::clone(&streams)));
        let connection = builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(MAX_FRAME)
            .max_send_buf_size(SEND_BUFFER)
            .max_concurrent_streams(limits.max_streams)
            .max_header_list_size(limits.max_header_bytes)
            .max_pending_accept_reset_streams(PENDING_RESETS.max(limits.max_streams as usize))
            .max_local_error_reset_streams(ERROR_RESETS)
            .serve_connection(TokioIo::new(stream), service);
        let mut connection = std::pin::pin!(connection);
        let mut drain = self.drain.clone();
        tokio::select! {
            // What has come is read before anybody is judged by his silence.
            biased;
            result = poll_fn(|cx| turn(connection.as_mut(), &uncork, cx)) => return result,
            () = drain.started() => {}
            () = streams.nothing_for(limits.header_timeout, || uncork.received_since_last_call()) => {
                found.metrics.refused("timeout");
            }
        }
        // A first request may be on its way: it is served, or the client sends it elsewhere.
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            result = poll_fn(|cx| turn(connection.as_mut(), &uncork, cx)) => result,
            () = streams.none_for(limits.header_timeout) => Err("no request came".into()),
        }
    }

    async fn http1(
        &self,
        stream: ClientStream,
        client: Rc<ClientConnection>,
        limits: &RequestLimits,
    ) -> hyper::Result<()> {
        let service = service_fn(move |request| Rc::clone(&client).handle(request));
        let mut builder = http1::Builder::new();
        let connection = builder
            .timer(TokioTimer::new())
            .header_read_timeout(limits.header_timeout)
            .max_headers(MAX_HEADERS)
            .max_buf_size((limits.max_header_bytes as usize).max(8 * 1024))
            .half_close(false)
            .serve_connection(TokioIo::new(stream), service)
            .with_upgrades();
        let mut connection = std::pin::pin!(connection);
        let mut drain = self.drain.clone();
        tokio::select! {
            result = connection.as_mut() => return result,
            () = drain.started() => {}
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    }
}

/// Lets a connection do what there is to do, then sends what that made it write.
fn turn(
    connection: Pin<&mut impl Future<Output = hyper::Result<()>>>,
    uncork: &Uncork<impl AsyncWrite + Unpin>,
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

/// Counts an open connection.
struct Open {
    listener: Rc<Listener>,
    metrics: Arc<ListenerMetrics>,
}

impl Open {
    fn new(listener: &Rc<Listener>, metrics: &Arc<ListenerMetrics>) -> Self {
        listener.open.set(listener.open.get() + 1);
        metrics.connections.increment(1);
        Self { listener: Rc::clone(listener), metrics: Arc::clone(metrics) }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.listener.open.set(self.listener.open.get() - 1);
        self.metrics.connections.decrement(1);
    }
}

/// The streams of one HTTP/2 connection.
struct Streams {
    /// How long a client may take nothing of one.
    limit: Duration,
    /// There has been one.
    any: Cell<bool>,
    /// The one whose task hyper starts next.
    next: Cell<Option<BodyProgress>>,
}

impl Streams {
    fn new(limit: Duration) -> Self {
        Self { limit, any: Cell::new(false), next: Cell::new(None) }
    }

    /// A request has come; hyper starts its task as soon as it has the future of its answer.
    fn begin(&self) -> BodyProgress {
        let progress = BodyProgress::default();
        self.any.set(true);
        self.next.set(Some(progress.clone()));
        progress
    }

    /// Ready once there has been none, and nothing else has come, for so long. Whoever sends PINGs
    /// keeps a connection ready for what is yet to be asked, as another one of us does with nobody
    /// before it: cut off, it would come again with another handshake each time. That bounds no less:
    /// one request, refused or not, is enough to be idle for ever, and what holds for all is
    /// `max_connections`. (kube-apiserver ends each that is without a stream for 90 s.)
    async fn nothing_for(&self, limit: Duration, heard: impl Fn() -> bool) {
        loop {
            self.none_for(limit).await;
            if !heard() {
                return;
            }
        }
    }

    /// Ready if there has been none by then. A connection that has had one may be idle for ever:
    /// kubelet's is.
    async fn none_for(&self, limit: Duration) {
        sleep(limit).await;
        if self.any.get() {
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
        match self.0.next.take() {
            Some(progress) => spawn_local(StallBoundStream::new(future, progress, self.0.limit)),
            None => spawn_local(future),
        };
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_says_something_may_ask_later() {
        let limit = Duration::from_secs(10);
        let streams = Streams::new(limit);
        let left = Cell::new(3);
        let speaks = || left.replace(left.get() - 1) > 0;
        let start = Instant::now();
        streams.nothing_for(limit, speaks).await;
        assert_eq!(start.elapsed(), limit * 4);
        drop(streams.begin());
        let idle = timeout(limit * 1_000, streams.nothing_for(limit, || false));
        assert!(idle.await.is_err(), "who has asked may be silent for ever");
    }
}
