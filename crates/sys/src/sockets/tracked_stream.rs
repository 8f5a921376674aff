//! A TCP stream that counts the bytes of both directions and whose `TCP_INFO` stays readable while TLS and HTTP own the
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
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

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
    bytes_written: Cell<u64>,
}

/// Splits a stream into the half for I/O and the half for its state.
pub fn track(stream: impl Into<TcpStream>) -> (TrackedStream, StreamObserver) {
    let inner = Rc::new(Inner {
        stream: RefCell::new(stream.into()),
        bytes_read: Cell::default(),
        bytes_written: Cell::default(),
    });
    (TrackedStream(Rc::clone(&inner)), StreamObserver(inner))
}

impl StreamObserver {
    /// Bytes received so far.
    pub fn bytes_read(&self) -> u64 {
        self.0.bytes_read.get()
    }

    /// Bytes that the kernel has taken so far.
    pub fn bytes_written(&self) -> u64 {
        self.0.bytes_written.get()
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

impl TrackedStream {
    fn count_written(&self, written: &Poll<io::Result<usize>>) {
        if let Poll::Ready(Ok(written)) = written {
            self.0.bytes_written.set(self.0.bytes_written.get() + *written as u64);
        }
    }
}

impl AsyncWrite for TrackedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut *self.0.stream.borrow_mut()).poll_write(cx, buf);
        self.count_written(&written);
        written
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut *self.0.stream.borrow_mut()).poll_write_vectored(cx, bufs);
        self.count_written(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.stream.borrow_mut()).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut *self.0.stream.borrow_mut()).poll_shutdown(cx)
    }
}

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
        assert_eq!(observer.bytes_written(), 1 << 10);
        let info = observer.tcp_info().unwrap();
        assert!(info.bytes_acked >= 1);
        assert_eq!(info.handed_over, Some(1 << 10));

        drop(io);
        drop(observer);
        assert_eq!(peer.read(&mut buf).await.unwrap(), 0);
    }
}
