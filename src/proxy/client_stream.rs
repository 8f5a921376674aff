//! The type of a client's connection, from the socket to TLS.

use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_rustls::server::TlsStream;

use super::stall_timeout::StallTimeout;
use crate::net::sockets::linger::Linger;
use crate::net::sockets::read_ahead::ReadAhead;
use crate::net::sockets::tunnel_stream::TunnelStream;

/// A connection before its TLS handshake.
pub type PlainStream = ReadAhead<StallTimeout<Linger>>;

/// A connection with TLS, as hyper gets it.
pub type ClientStream = TlsStream<PlainStream>;

/// The stream of a connection that hyper has upgraded, without a stall timeout: a tunnel has none.
///
/// # Errors
/// The connection is not one of a listener.
pub fn of_tunnel(upgraded: Upgraded) -> Result<TunnelStream<ClientStream>, &'static str> {
    let parts = upgraded
        .downcast::<TokioIo<ClientStream>>()
        .map_err(|_| "not a connection of a listener")?;
    let mut stream = parts.io.into_inner();
    stream.get_mut().0.get_mut().disable();
    Ok(TunnelStream::new(parts.read_buf, stream))
}
