//! The byte stream of a client's connection, from the socket to TLS.
//!
//! A connection whose client stopped reading is closed, because it keeps memory and an upstream stream. A
//! client that reads a byte within each limit keeps its connection.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use jackstay_net::tls::serving::ServingTls;
use jackstay_sys::sockets::read_ahead::ReadAhead;
use jackstay_sys::sockets::tunnel_stream::TunnelStream;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::client_socket::ClientSocket;
use super::head_timeout::HeadStream;

/// The response to a request without TLS, which is that of kube-apiserver (Go's `net/http`, `conn.serve`).
/// The connection is closed after it.
const PLAIN_HTTP_RESPONSE: &[u8] =
    b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n";

/// The first five bytes of a request by method, as many as Go compares. No TLS record starts with a
/// letter (RFC 8446, section 5.1).
const HTTP_PREFIXES: [&[u8]; 9] =
    [b"GET /", b"HEAD ", b"POST ", b"PUT /", b"PATCH", b"DELET", b"OPTIO", b"CONNE", b"TRACE"];

/// A connection before its TLS handshake.
pub type PlainStream = ReadAhead<StallTimeout<ClientSocket>>;

/// A connection with TLS. Boxed, because each future that passes it on would store its 1,288 bytes once more.
pub type ClientStream = Box<TlsStream<PlainStream>>;

/// Makes the TLS handshake. A client that sends plain HTTP gets a response that says so.
///
/// # Errors
/// The handshake fails, or the client sent plain HTTP.
pub async fn accept_tls(mut stream: PlainStream, tls: &ServingTls) -> io::Result<ClientStream> {
    if is_plain_http(stream.peek().await?) {
        stream.write_all(PLAIN_HTTP_RESPONSE).await?;
        stream.flush().await?;
        return Err(io::Error::new(io::ErrorKind::InvalidData, "HTTP without TLS"));
    }
    let mut stream = Box::new(TlsAcceptor::from(tls.config()).accept(stream).await?);
    stream.get_mut().0.established();
    Ok(stream)
}

/// Whether a connection that starts with these bytes carries an HTTP/1 request without TLS.
fn is_plain_http(bytes: &[u8]) -> bool {
    HTTP_PREFIXES.iter().any(|prefix| bytes.starts_with(prefix))
}

/// The stream of a connection that hyper has upgraded, without the stall timeout.
///
/// # Errors
/// A listener of jackstay did not accept the connection.
pub fn into_tunnel_stream(upgraded: Upgraded) -> Result<TunnelStream<ClientStream>, &'static str> {
    let parts = upgraded
        .downcast::<TokioIo<HeadStream<ClientStream>>>()
        .map_err(|_| "not a connection of a listener")?;
    let mut stream = parts.io.into_inner().into_inner();
    stream.get_mut().0.get_mut().disable();
    Ok(TunnelStream::new(parts.read_buf, stream))
}

/// A connection whose writes fail once they have made no progress for `limit`.
pub struct StallTimeout<T> {
    inner: T,
    limit: Option<Duration>,
    /// Runs while a write is blocked.
    timer: Option<Pin<Box<Sleep>>>,
}

impl<T> StallTimeout<T> {
    /// Limits the writes of `inner`.
    pub fn new(inner: T, limit: Duration) -> Self {
        Self { inner, limit: Some(limit), timer: None }
    }

    /// The stream whose writes are limited.
    pub fn get_ref(&self) -> &T {
        &self.inner
    }

    /// The stream whose writes are limited.
    pub fn get_mut(&mut self) -> &mut T {
        &mut self.inner
    }

    /// The stream without the limit.
    pub fn into_inner(self) -> T {
        self.inner
    }

    /// Stops the timer, which belongs to this thread. A write that is still blocked starts another one.
    pub fn stop_timer(&mut self) {
        self.timer = None;
    }

    /// Removes the limit. A tunnel may carry a terminal whose user reads nothing for hours.
    pub fn disable(&mut self) {
        self.limit = None;
        self.timer = None;
    }

    fn limit_pending<R>(
        &mut self,
        cx: &mut Context<'_>,
        result: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if result.is_ready() {
            self.timer = None;
            return result;
        }
        let Some(limit) = self.limit else { return result };
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(limit)));
        timer
            .as_mut()
            .poll(cx)
            .map(|()| Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes no bytes")))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StallTimeout<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for StallTimeout<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.limit_pending(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.limit_pending(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_flush(cx);
        self.limit_pending(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.inner).poll_shutdown(cx);
        self.limit_pending(cx, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;
    use tokio::io::AsyncReadExt;

    #[tokio::test(start_paused = true)]
    async fn write_without_progress_fails_after_limit() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut stalled = StallTimeout::new(ours, Duration::from_secs(60));
        let start = clock::now();
        let error = stalled.write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert_eq!(clock::elapsed(start).as_secs(), 60);
    }

    #[tokio::test(start_paused = true)]
    async fn write_after_disable_waits_without_limit() {
        let (ours, _theirs) = tokio::io::duplex(16);
        let mut stalled = StallTimeout::new(ours, Duration::from_secs(60));
        stalled.disable();
        let day = Duration::from_secs(86_400);
        assert!(tokio::time::timeout(day, stalled.write_all(&[0; 64])).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn write_to_slow_reader_succeeds() {
        let (ours, mut theirs) = tokio::io::duplex(16);
        let mut stalled = StallTimeout::new(ours, Duration::from_secs(60));
        let reader = tokio::spawn(async move {
            for _ in 0..4 {
                tokio::time::sleep(Duration::from_secs(59)).await;
                theirs.read_exact(&mut [0; 16]).await.unwrap();
            }
        });
        stalled.write_all(&[0; 64]).await.unwrap();
        reader.await.unwrap();
    }

    #[test]
    fn is_plain_http_distinguishes_http_from_tls() {
        for http in ["GET / HTTP/1.1\r\n", "PUT /a HTTP/1.1\r\n", "DELETE /a", "OPTIONS *"] {
            assert!(is_plain_http(http.as_bytes()), "{http}");
        }
        for other in [&b""[..], b"GET", b"\x16\x03\x01\x02\x00\x01", b"GETTY", b"SSH-2.0-x\r\n"] {
            assert!(!is_plain_http(other), "{other:?}");
        }
    }
}
