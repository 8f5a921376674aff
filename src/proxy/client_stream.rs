//! The stream of a client connection after its TLS handshake.

use tokio_rustls::server::TlsStream;

use super::stall_timeout::StallTimeout;
use crate::net::sockets::linger::Linger;
use crate::net::sockets::read_ahead::ReadAhead;

/// TLS over a socket with read-ahead, a stall timeout and a lingering close.
pub type ClientStream = TlsStream<ReadAhead<StallTimeout<Linger>>>;
