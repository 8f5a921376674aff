//! Serves one connection of a demo apiserver: TLS handshake, HTTP/2 or HTTP/1.1, GOAWAY, reset.

use crate::goaway::LastStream;
use crate::handler;
use crate::identity::Certificate;
use crate::lock;
use crate::state::{ConnectionInfo, Counted, Phase, ServerState};
use hyper::body::Incoming;
use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use jackstay_sys::delegate_async_write;
use jackstay_sys::sockets::stream::TcpStream;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

/// `SETTINGS_MAX_CONCURRENT_STREAMS`, as kube-apiserver sends it.
const MAX_STREAMS: u32 = 100;
/// Receive window for each stream, as kube-apiserver sets it: 256 KiB.
const STREAM_WINDOW: u32 = 256 << 10;
/// Fields of an HTTP/1.1 head. kube-apiserver limits their bytes only.
const MAX_HEADERS: usize = 4_096;

/// Serves a connection until it ends or the server resets it.
pub(super) async fn serve(stream: TcpStream, server: Arc<ServerState>) {
    let socket = Socket::new(stream, server.clone());
    let reset_flag = socket.reset.clone();
    let mut reset = server.reset.subscribe();
    tokio::select! {
        () = handshake_and_serve(socket, &server) => {}
        // The future and its socket are dropped after this branch.
        _ = reset.changed() => reset_flag.store(true, Relaxed),
    }
}

async fn handshake_and_serve(socket: Socket, server: &Arc<ServerState>) {
    let config = lock(&server.tls).clone();
    let handshake = TlsAcceptor::from(config).accept(socket);
    let Ok(Ok(tls)) = tokio::time::timeout(Duration::from_secs(10), handshake).await else {
        return;
    };
    let session = tls.get_ref().1;
    let http2 = session.alpn_protocol() == Some(b"h2");
    let now = server.cluster.clock().unix_time();
    let certificate = Certificate::verify_at(session.peer_certificates(), &*server.verifier, now);
    let id = server.cluster.next_connection();
    let connection = Arc::new(ConnectionInfo { id, certificate, goaway: Notify::new() });
    let service = service_fn(|request: http::Request<Incoming>| {
        handler::handle(server.clone(), connection.clone(), request)
    });
    let mut goaway = server.goaway.subscribe();
    let mut goaway_requested = pin!(async {
        tokio::select! {
            _ = goaway.changed() => {}
            () = connection.goaway.notified() => {}
        }
        server.counters.goaways.fetch_add(1, Relaxed);
    });
    // Connection errors are caused by the client or the test; nothing is logged.
    if http2 {
        let max_streams = server.faults.borrow().max_streams.unwrap_or(MAX_STREAMS);
        let mut serving = pin!(
            hyper::server::conn::http2::Builder::new(LocalExecutor)
                .timer(TokioTimer::new())
                .auto_date_header(false)
                .max_concurrent_streams(max_streams)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(STREAM_WINDOW * MAX_STREAMS)
                .max_header_list_size(1 << 20)
                .max_pending_accept_reset_streams(10_000)
                .max_local_error_reset_streams(10_000)
                .serve_connection(TokioIo::new(LastStream::new(tls)), service)
        );
        tokio::select! {
            _ = serving.as_mut() => return,
            () = goaway_requested.as_mut() => serving.as_mut().graceful_shutdown(),
        }
        let _ = serving.await;
    } else {
        let mut serving = pin!(
            hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .auto_date_header(false)
                .max_headers(MAX_HEADERS)
                .half_close(false)
                .serve_connection(TokioIo::new(tls), service)
                .with_upgrades()
        );
        tokio::select! {
            _ = serving.as_mut() => return,
            () = goaway_requested.as_mut() => serving.as_mut().graceful_shutdown(),
        }
        let _ = serving.await;
    }
}

/// Runs hyper's tasks in the process of the server.
#[derive(Debug, Clone)]
struct LocalExecutor;

impl<F: Future<Output: 'static> + 'static> Executor<F> for LocalExecutor {
    fn execute(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}

/// A counted socket. Its drop sends RST instead of FIN if `reset` is set or the server was killed.
struct Socket {
    stream: TcpStream,
    server: Arc<ServerState>,
    reset: Arc<AtomicBool>,
    _open: Counted,
}

impl Socket {
    fn new(stream: TcpStream, server: Arc<ServerState>) -> Self {
        server.counters.accepted.fetch_add(1, Relaxed);
        let open = Counted::new(&server, |counters| &counters.open);
        if let TcpStream::Kernel(stream) = &stream {
            // A failure only delays small frames.
            let _ = stream.set_nodelay(true);
        }
        Self { stream, server, reset: Arc::default(), _open: open }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if *self.server.phase.borrow() == Phase::Killed || self.reset.load(Relaxed) {
            self.stream.reset_when_closed();
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

delegate_async_write!(Socket, |this| &mut this.stream);
