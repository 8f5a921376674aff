//! One connection of a demo apiserver: TLS, its protocol, its end.

use crate::demo::apiserver::Server;
use crate::demo::handler;
use crate::demo::identity::Certificate;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Buffers as Go's server has them: 256 KiB a stream.
const STREAM_WINDOW: u32 = 256 << 10;
static NEXT: AtomicU64 = AtomicU64::new(1);

/// What requests know of the connection they came on.
pub(super) struct Connection {
    pub id: u64,
    pub remote: SocketAddr,
    pub certificate: Certificate,
    /// Rung to send this connection away.
    pub goaway: Notify,
}

/// Serves a connection until it ends, or the server does.
pub(super) async fn serve(stream: TcpStream, remote: SocketAddr, server: Arc<Server>) {
    let socket = Socket::new(stream, server.clone());
    let reset_flag = socket.reset.clone();
    let mut reset = server.reset.subscribe();
    tokio::select! {
        () = handshake_and_serve(socket, remote, &server) => {}
        // The future, and with it the socket, is dropped after this.
        _ = reset.changed() => reset_flag.store(true, Relaxed),
    }
}

async fn handshake_and_serve(socket: Socket, remote: SocketAddr, server: &Arc<Server>) {
    let handshake = server.tls.accept(socket);
    let Ok(Ok(tls)) = tokio::time::timeout(Duration::from_secs(10), handshake).await else {
        server.counters.handshake_failures.fetch_add(1, Relaxed);
        return;
    };
    let session = tls.get_ref().1;
    let http2 = session.alpn_protocol() == Some(b"h2");
    let certificate = Certificate::judge(session.peer_certificates(), &*server.verifier);
    let id = NEXT.fetch_add(1, Relaxed);
    let connection = Arc::new(Connection { id, remote, certificate, goaway: Notify::new() });
    let service = service_fn(|request: http::Request<Incoming>| {
        handler::handle(server.clone(), connection.clone(), request)
    });
    let mut goaway = server.goaway.subscribe();
    let mut away = pin!(async {
        tokio::select! {
            _ = goaway.changed() => {}
            () = connection.goaway.notified() => {}
        }
        server.counters.goaways.fetch_add(1, Relaxed);
    });
    // Errors of a connection are the client's doing, or the test's.
    if http2 {
        let max_streams = server.max_streams.load(Relaxed);
        let mut serving = pin!(
            hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                .timer(TokioTimer::new())
                .max_concurrent_streams(max_streams)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(STREAM_WINDOW.saturating_mul(max_streams.max(4)))
                .max_header_list_size(1 << 20)
                .max_pending_accept_reset_streams(10_000)
                .max_local_error_reset_streams(10_000)
                .serve_connection(TokioIo::new(tls), service)
        );
        tokio::select! {
            _ = serving.as_mut() => return,
            () = away.as_mut() => serving.as_mut().graceful_shutdown(),
        }
        let _ = serving.await;
    } else {
        let mut serving = pin!(
            hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .half_close(false)
                .serve_connection(TokioIo::new(tls), service)
                .with_upgrades()
        );
        tokio::select! {
            _ = serving.as_mut() => return,
            () = away.as_mut() => serving.as_mut().graceful_shutdown(),
        }
        let _ = serving.await;
    }
}

/// A socket that is counted while it is open, and reset instead of closed where that is asked for.
struct Socket {
    stream: TcpStream,
    server: Arc<Server>,
    reset: Arc<AtomicBool>,
}

impl Socket {
    fn new(stream: TcpStream, server: Arc<Server>) -> Self {
        server.counters.accepted.fetch_add(1, Relaxed);
        server.counters.open.fetch_add(1, Relaxed);
        // Small frames must not wait for acknowledgements; without it they merely come later.
        let _ = stream.set_nodelay(true);
        Self { stream, server, reset: Arc::default() }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.server.counters.open.fetch_sub(1, Relaxed);
        if self.server.killed.load(Relaxed) || self.reset.load(Relaxed) {
            let socket = socket2::SockRef::from(&self.stream);
            let _ = socket.set_linger(Some(Duration::ZERO));
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

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
