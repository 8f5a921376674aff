//! A connection as Go's HTTP/2 client has it: TCP, TLS, windows, PINGs, and what GOAWAY and `RST_STREAM` mean.
//!
//! The figures are those of client-go: a dial takes at most 30 s and a TLS handshake 10 s (`net/http`,
//! `DefaultTransport`; client-go, `transport/cache.go`); a PING follows 30 s without a frame, and its PONG may take 15
//! s (apimachinery, `util/net/http.go`); windows of 4 MiB and 1 GiB (`x/net/http2`, `transport.go`).

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{Ping, PingPong, Reason, SendStream};
use http::Request;
use jackstay_sys::clock;
use jackstay_sys::sockets::virtual_network::{VirtualNetwork, VirtualStream};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

const DIAL_TIMEOUT: Duration = Duration::from_secs(30);
const TLS_TIMEOUT: Duration = Duration::from_secs(10);
const IDLE_BEFORE_PING: Duration = Duration::from_secs(30);
const PING_TIMEOUT: Duration = Duration::from_secs(15);
const CONNECTION_WINDOW: u32 = 1 << 30;
const MAX_HEADER_LIST: u32 = 10 << 20;
/// Go has no such budget; this one is never used up.
const DATA_FRAME_BUDGET: usize = usize::MAX >> 1;
/// h2 measures it by the system clock, so the time must not matter.
const RESET_STREAMS_REMEMBERED: Duration = Duration::from_secs(u32::MAX as u64);

/// Why a request failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The server refused the connection.
    Refused,
    /// No connection was established for another reason.
    Connect,
    /// The connection was closed or reset.
    Closed,
    /// The connection did not answer a PING.
    Lost,
    /// The stream was reset.
    Reset,
    /// It took too long.
    Timeout,
    /// The body is no gzip, or ends in the middle of a member.
    Undecodable,
}

impl Failure {
    /// For the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "connection refused",
            Self::Connect => "connect failed",
            Self::Closed => "connection closed",
            Self::Lost => "connection lost",
            Self::Reset => "stream reset",
            Self::Timeout => "timeout",
            Self::Undecodable => "undecodable body",
        }
    }
}

/// Why a request got no response head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NoHead {
    /// The server has not processed it: Go sends it again.
    Unprocessed,
    /// It failed.
    Failed(Failure),
}

/// Where and how a client connects.
#[derive(Clone)]
pub(super) struct Destination {
    pub network: Arc<dyn VirtualNetwork>,
    pub address: SocketAddr,
    pub tls: TlsConnector,
    pub server_name: ServerName<'static>,
    /// Window of a stream in bytes.
    pub stream_window: u32,
}

/// A connection.
pub(super) struct Connection {
    /// `None` once it takes no new streams.
    sender: RefCell<Option<SendRequest<Bytes>>>,
    streams: Cell<usize>,
    close: Notify,
    lost: Cell<bool>,
    ended: Cell<bool>,
    socket: Rc<SocketState>,
}

/// A stream of a connection, which counts until it is dropped.
pub(super) struct StreamPermit(Rc<Connection>);

/// What the connection knows of its socket.
struct SocketState {
    last_read: Cell<Instant>,
    reads: Cell<bool>,
}

/// The socket below TLS. It remembers when bytes arrived, and can stop reading.
struct ObservedSocket {
    stream: Box<dyn VirtualStream>,
    state: Rc<SocketState>,
}

/// Connects. The connection is not yet one of HTTP/2.
pub(super) async fn dial(to: &Destination) -> Result<Dialed, Failure> {
    let connected = timeout(DIAL_TIMEOUT, to.network.connect(to.address)).await;
    let stream = match connected {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
            return Err(Failure::Refused);
        }
        _ => return Err(Failure::Connect),
    };
    let state = Rc::new(SocketState { last_read: Cell::new(clock::now()), reads: Cell::new(true) });
    let socket = ObservedSocket { stream, state: Rc::clone(&state) };
    let handshake = to.tls.connect(to.server_name.clone(), socket);
    match timeout(TLS_TIMEOUT, handshake).await {
        Ok(Ok(tls)) if tls.get_ref().1.alpn_protocol() == Some(b"h2") => Ok(Dialed { tls, state }),
        _ => Err(Failure::Connect),
    }
}

/// A connection after the TLS handshake.
pub(super) struct Dialed {
    tls: TlsStream<ObservedSocket>,
    state: Rc<SocketState>,
}

impl Dialed {
    /// Starts HTTP/2. A task of this `LocalSet` drives the connection and calls `changed` when it
    /// has ended.
    pub async fn start(
        self,
        stream_window: u32,
        changed: impl Fn() + 'static,
    ) -> Result<Rc<Connection>, Failure> {
        let mut builder = h2::client::Builder::new();
        builder
            .enable_push(false)
            .initial_window_size(stream_window)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_header_list_size(MAX_HEADER_LIST)
            .data_frame_budget(DATA_FRAME_BUDGET)
            .reset_stream_duration(RESET_STREAMS_REMEMBERED);
        let handshake = builder.handshake::<_, Bytes>(self.tls).await;
        let (sender, mut h2) = handshake.map_err(|_| Failure::Closed)?;
        let connection = Rc::new(Connection {
            sender: RefCell::new(Some(sender)),
            streams: Cell::new(0),
            close: Notify::new(),
            lost: Cell::new(false),
            ended: Cell::new(false),
            socket: self.state,
        });
        let driven = Rc::clone(&connection);
        tokio::task::spawn_local(async move {
            let pings = h2.ping_pong();
            tokio::select! {
                biased;
                () = driven.close.notified() => {}
                () = driven.keep_alive(pings) => driven.lost.set(true),
                () = poll_fn(|cx| driven.poll_h2(&mut h2, cx)) => {}
            }
            drop(h2);
            driven.sender.take();
            driven.ended.set(true);
            changed();
        });
        Ok(connection)
    }
}

impl Connection {
    /// Polls the connection, and stops new streams after a GOAWAY, of which h2 tells its senders only.
    fn poll_h2(
        &self,
        h2: &mut h2::client::Connection<TlsStream<ObservedSocket>, Bytes>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        loop {
            if Pin::new(&mut *h2).poll(cx).is_ready() {
                return Poll::Ready(());
            }
            let mut sender = self.sender.borrow_mut();
            let goes_away = sender
                .as_mut()
                .is_some_and(|sender| matches!(sender.poll_ready(cx), Poll::Ready(Err(_))));
            if !goes_away {
                return Poll::Pending;
            }
            // h2 closes a connection with neither streams nor senders.
            let last = sender.take();
            drop(sender);
            drop(last);
        }
    }

    /// Returns when a PING had no PONG.
    async fn keep_alive(&self, pings: Option<PingPong>) {
        let Some(mut pings) = pings else { return std::future::pending().await };
        loop {
            let due = self.socket.last_read.get() + IDLE_BEFORE_PING;
            if clock::now() < due {
                tokio::time::sleep_until(due.into()).await;
            } else if !matches!(timeout(PING_TIMEOUT, pings.ping(Ping::opaque())).await, Ok(Ok(_)))
            {
                return;
            }
        }
    }

    /// A stream, if the connection takes another one.
    pub fn stream(self: &Rc<Self>) -> Option<StreamPermit> {
        let max = self.sender.borrow().as_ref()?.current_max_send_streams();
        if self.streams.get() >= max {
            return None;
        }
        self.streams.set(self.streams.get() + 1);
        Some(StreamPermit(Rc::clone(self)))
    }

    /// Whether it is closed.
    pub fn has_ended(&self) -> bool {
        self.ended.get()
    }

    /// Closes it. Its streams fail.
    pub fn close(&self) {
        self.close.notify_one();
    }

    /// Stops reading from the socket, for ever.
    pub fn stop_reading(&self) {
        self.socket.reads.set(false);
    }
}

impl StreamPermit {
    /// Sends a request and its body.
    pub async fn send(&self, request: Request<()>, body: Bytes) -> Result<ResponseFuture, NoHead> {
        Ok(self.begin(request, body, true).await?.0)
    }

    /// Sends a request and the beginning of its body. Dropping what is returned resets the stream.
    pub async fn send_unfinished(
        &self,
        request: Request<()>,
        body: Bytes,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), NoHead> {
        self.begin(request, body, false).await
    }

    async fn begin(
        &self,
        request: Request<()>,
        body: Bytes,
        is_whole: bool,
    ) -> Result<(ResponseFuture, SendStream<Bytes>), NoHead> {
        let sender = self.0.sender.borrow().clone().ok_or(NoHead::Unprocessed)?;
        // A connection that has become unusable before the request was sent.
        let mut sender = sender.ready().await.map_err(|_| NoHead::Unprocessed)?;
        let sent = sender.send_request(request, is_whole && body.is_empty());
        let (response, mut stream) = sent.map_err(|error| self.no_head(&error))?;
        if !body.is_empty() {
            stream.send_data(body, is_whole).map_err(|error| self.no_head(&error))?;
        }
        Ok((response, stream))
    }

    /// What an error means for a request without a response head (`x/net/http2`, `canRetryError`).
    pub fn no_head(&self, error: &h2::Error) -> NoHead {
        let is_unprocessed = error.is_remote()
            && (error.is_go_away()
                || error.is_reset()
                    && matches!(
                        error.reason(),
                        Some(Reason::REFUSED_STREAM | Reason::PROTOCOL_ERROR)
                    ));
        if is_unprocessed { NoHead::Unprocessed } else { NoHead::Failed(self.failure(error)) }
    }

    /// Why a stream has failed.
    pub fn failure(&self, error: &h2::Error) -> Failure {
        if error.is_reset() {
            Failure::Reset
        } else if self.0.lost.get() {
            Failure::Lost
        } else {
            Failure::Closed
        }
    }

    /// Stops reading from the socket of the connection, for ever.
    pub fn stop_reading(&self) {
        self.0.stop_reading();
    }
}

impl Drop for StreamPermit {
    fn drop(&mut self) {
        self.0.streams.set(self.0.streams.get() - 1);
    }
}

impl AsyncRead for ObservedSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.state.reads.get() {
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.state.last_read.set(clock::now());
        }
        read
    }
}

impl AsyncWrite for ObservedSocket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
