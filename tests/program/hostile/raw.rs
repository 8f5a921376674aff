//! An attacker's connection: HTTP/2 frames over TLS, without flow control and without limits.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::http2::{PREFACE, headers, settings};
use crate::support::tls::{self, ChainAndKey, Trust};

pub type Tls = TlsStream<TcpStream>;

/// Encodes the request `GET path`, with these fields besides the pseudo-header fields.
pub fn get(stream: u32, path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let mut fields =
        vec![(":method", "GET"), (":scheme", "https"), (":authority", "api"), (":path", path)];
    fields.extend(more);
    headers(stream, true, &fields)
}

/// TLS settings of an attacker, which accepts any server.
pub fn tls_config(alpn: &str, chain: Option<ChainAndKey>) -> Arc<ClientConfig> {
    tls::client(Trust::Any, chain, alpn)
}

pub async fn connect_tls(server: SocketAddr, config: &Arc<ClientConfig>) -> io::Result<Tls> {
    connect_tls_to(server, ServerName::from(server.ip()), config).await
}

/// Connects, and expects a server of this name.
pub async fn connect_tls_to(
    server: SocketAddr,
    name: ServerName<'static>,
    config: &Arc<ClientConfig>,
) -> io::Result<Tls> {
    let stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    TlsConnector::from(Arc::clone(config)).connect(name, stream).await
}

/// Connects, and sends the preface with these SETTINGS.
pub async fn connect_h2(
    server: SocketAddr,
    config: &Arc<ClientConfig>,
    parameters: &[(u16, u32)],
) -> io::Result<Tls> {
    let mut tls = connect_tls(server, config).await?;
    tls.write_all(&[PREFACE, &settings(parameters)].concat()).await?;
    tls.flush().await?;
    Ok(tls)
}

/// Reads and discards until the server closes the connection.
pub async fn drain(mut stream: impl tokio::io::AsyncRead + Unpin) {
    let mut buffer = vec![0; 65_536];
    while matches!(stream.read(&mut buffer).await, Ok(1..)) {}
}
