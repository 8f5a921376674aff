//! A TCP stream that counts received bytes and whose `TCP_INFO` stays readable while TLS and HTTP own the
//! stream.
//!
//! The two halves share one descriptor by a reference count within a thread. A duplicate descriptor would cost
//! one more descriptor for each connection.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use jackstay_core::tcp_info::TcpInfo;
use tokio::io::{AsyncRead, ReadBuf};

use super::stream::{SocketRef, TcpStream};

/// The half that TLS reads and writes.
#[derive(Debug)]
pub struct TrackedStream(Rc<Inner>);

/// The half that reads the connection's state. The socket stays open until both halves are dropped.
#[derive(Debug, Clone)]
pub struct StreamObserver(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    stream: RefCell<TcpStream>,
    bytes_read: Cell<u64>,
}

/// Splits a stream into the half for I/O and the half for its state.
pub fn track(stream: impl Into<TcpStream>) -> (TrackedStream, StreamObserver) {
    let inner = Rc::new(Inner { stream: RefCell::new(stream.into()), bytes_read: Cell::new(0) });
    (TrackedStream(Rc::clone(&inner)), StreamObserver(inner))
}

impl StreamObserver {
    /// Bytes received so far.
    pub fn bytes_read(&self) -> u64 {
        self.0.bytes_read.get()
    }

    /// Reads `TCP_INFO`.
    ///
    /// # Errors
    /// See [`super::tcp_info::read`].
    pub fn tcp_info(&self) -> io::Result<TcpInfo> {
        self.socket().tcp_info()
    }

    /// See [`super::tcp_options::send_keepalive_probe`].
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn send_keepalive_probe(&self) -> io::Result<()> {
        self.socket().send_keepalive_probe()
    }

    /// See [`super::tcp_options::disable_keepalives`].
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn disable_keepalives(&self) -> io::Result<()> {
        self.socket().disable_keepalives()
    }

    /// The local address of the connection.
    ///
    /// # Errors
    /// What the kernel returns.
    pub fn local_addr(&self) -> io::Result<std::net::SocketAddr> {
        self.0.stream.borrow().local_addr()
    }

    /// The socket, which is open as long as this exists.
    pub fn socket(&self) -> SocketRef {
        self.0.stream.borrow().socket()
    }
}

impl AsyncRead for TrackedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        // Unlike `try_read`, `poll_read` treats the socket as empty after a short read, which saves a
        // system call.
        ready!(Pin::new(&mut *self.0.stream.borrow_mut()).poll_read(cx, buf))?;
        let n = buf.filled().len() - before;
        self.0.bytes_read.set(self.0.bytes_read.get() + n as u64);
        Poll::Ready(Ok(()))
    }
}

delegate_async_write!(TrackedStream, |this| &mut *this.0.stream.borrow_mut());

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    #[tokio::test]
    async fn track_counts_received_bytes_and_closes_after_both_halves() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut peer, _) = listener.accept().await.unwrap();
        let (mut io, observer) = track(client);

        peer.write_all(b"hello").await.unwrap();
        let mut buf = [0; 5];
        io.read_exact(&mut buf).await.unwrap();
        assert_eq!(observer.bytes_read(), 5);

        io.write_all(&[1; 1 << 10]).await.unwrap();
        let mut got = vec![0; 1 << 10];
        peer.read_exact(&mut got).await.unwrap();
        assert!(observer.tcp_info().unwrap().bytes_acked >= 1);

        drop(io);
        drop(observer);
        assert_eq!(peer.read(&mut buf).await.unwrap(), 0);
    }
}
