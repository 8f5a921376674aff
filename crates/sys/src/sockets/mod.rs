//! TCP and Unix sockets, and the stream adapters between a socket and TLS or HTTP/2.
//!
//! * [`listening`] opens listening sockets, [`connector`] opens upstream connections,
//!   [`tcp_options`] sets the options of both.
//! * [`peer_uid`] finds the user at the other end of a loopback connection.
//! * [`interception`] reads the original destination of a redirected connection.
//! * [`tcp_info`] reads the kernel's state of a connection; [`tracked_stream`] makes it readable
//!   while TLS owns the stream.
//! * [`queue_memory`] reads and bounds the kernel memory of a connection.
//! * [`read_ahead`] and [`cork`] batch reads and writes; [`splice`] moves bytes inside the kernel.
//! * [`tunnel_stream`] is one side of a tunnel.
//! * [`stream`] has the sockets that L7 uses: those of the kernel, or those of a simulation ([`virtual_network`]).

/// Implements `AsyncWrite` for a wrapper by passing every call on to the stream that it wraps.
#[macro_export]
macro_rules! delegate_async_write {
    ($stream:ident$(<$T:ident>)?, |$this:ident| $inner:expr) => {
        impl$(<$T: tokio::io::AsyncWrite + Unpin>)? tokio::io::AsyncWrite for $stream$(<$T>)? {
            fn poll_write(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                buf: &[u8],
            ) -> Poll<io::Result<usize>> {
                let $this = self.get_mut();
                Pin::new($inner).poll_write(cx, buf)
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                bufs: &[io::IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                let $this = self.get_mut();
                Pin::new($inner).poll_write_vectored(cx, bufs)
            }

            fn is_write_vectored(&self) -> bool {
                true
            }

            fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                let $this = self.get_mut();
                Pin::new($inner).poll_flush(cx)
            }

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                let $this = self.get_mut();
                Pin::new($inner).poll_shutdown(cx)
            }
        }
    };
}

pub mod connector;
pub mod cork;
pub mod interception;
pub mod listening;
pub mod peer_uid;
pub mod queue_memory;
pub mod read_ahead;
pub mod source;
pub mod splice;
pub mod stream;
pub mod tcp_info;
pub mod tcp_options;
pub mod tracked_stream;
pub mod tunnel_stream;
pub mod virtual_network;
pub mod zone;
