//! TLS connections to jackstay on which a test writes raw bytes.

use jackstay_apiserver::pki::{Issued, Pki};
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;
use rustls::pki_types::ServerName;
use std::io;
use std::net::SocketAddr;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::tls::{self, ChainAndKey, Trust};

/// The client's end of a connection.
pub type Wire = TlsStream<TcpStream>;

/// Connects to a listener, with this client certificate if there is one.
pub async fn connect_with(
    address: SocketAddr,
    ca: &impl AsRef<Pki>,
    certificate: Option<&Issued>,
    alpn: &str,
) -> Wire {
    let chain = certificate.map(|issued| (vec![issued.cert_der()], issued.key_der()));
    handshake(&connector(ca, chain, alpn), address).await.unwrap()
}

/// A TLS client that presents this chain and offers only the ALPN protocol `alpn`.
pub fn connector(ca: &impl AsRef<Pki>, chain: Option<ChainAndKey>, alpn: &str) -> TlsConnector {
    tls::client(Trust::Ca(ca.as_ref().ca_der()), chain, alpn).into()
}

/// Connects with this TLS client.
pub async fn handshake(connector: &TlsConnector, address: SocketAddr) -> io::Result<Wire> {
    let stream = TcpStream::connect(address).await?;
    connector.connect(ServerName::from(address.ip()), stream).await
}

/// Connects with this TLS client as another user, which only root can do.
pub async fn handshake_as(
    uid: u32,
    connector: &TlsConnector,
    address: SocketAddr,
) -> io::Result<Wire> {
    let stream = as_user(uid, || std::net::TcpStream::connect(address))?;
    stream.set_nonblocking(true)?;
    let stream = TcpStream::from_std(stream)?;
    connector.connect(ServerName::from(address.ip()), stream).await
}

/// Runs `act` while the thread has this effective uid, which a socket gets when it is created.
fn as_user<T>(uid: u32, act: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let own = geteuid();
    set_thread_res_uid(None::<Uid>, Uid::from_raw(uid), None::<Uid>)?;
    let result = act();
    set_thread_res_uid(None::<Uid>, own, None::<Uid>)?;
    result
}
