//! A socket whose reads and writes are recorded in its [`SocketMemory`].

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use jackstay_core::admission::Refusal;
use jackstay_sys::sockets::stream::TcpStream;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::admission::socket_memory::{Peer, SocketMemory};

/// A socket of a client. Writes fail once its connection must be reset for lack of memory.
#[derive(Debug)]
pub struct AccountedStream {
    // Dropped before the socket is closed.
    memory: SocketMemory,
    stream: TcpStream,
}

impl AccountedStream {
    /// Records the reads and writes of `stream` in `memory`.
    pub fn new(stream: TcpStream, memory: SocketMemory) -> Self {
        Self { memory, stream }
    }

    /// The memory of the socket.
    pub fn memory(&self) -> &SocketMemory {
        &self.memory
    }

    /// The stream.
    pub fn get_ref(&self) -> &TcpStream {
        &self.stream
    }

    /// The stream, and the memory of its socket.
    pub fn into_parts(self) -> (TcpStream, SocketMemory) {
        (self.stream, self.memory)
    }

    /// Records the result of a write; `bytes` returns the number of written bytes.
    fn record_write<R>(
        &self,
        cx: &Context<'_>,
        result: Poll<io::Result<R>>,
        bytes: impl FnOnce(&R) -> usize,
    ) -> Poll<io::Result<R>> {
        if self.memory.is_shed() {
            let reason = Refusal::StalledReader.reason();
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, reason)));
        }
        let written = match &result {
            Poll::Ready(Ok(result)) => bytes(result),
            Poll::Ready(Err(_)) | Poll::Pending => 0,
        };
        self.memory.record_write(Peer::Client, written, result.is_pending(), cx.waker());
        result
    }
}

impl AsyncRead for AccountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let result = Pin::new(&mut self.stream).poll_read(cx, buf);
        // After the end of the stream, the peer sends no more bytes.
        self.memory.record_read(Peer::Client, buf.filled().len() > before);
        result
    }
}

impl AsyncWrite for AccountedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.record_write(cx, result, |bytes| *bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.record_write(cx, result, |bytes| *bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
