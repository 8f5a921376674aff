//! TLS connections to jackstay on which a test writes raw bytes.

use super::{Certs, Proxy};
use jackstay_apiserver::pki::Issued;
use rustix::process::{Uid, geteuid};
use rustix::thread::set_thread_res_uid;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The client's end of a connection.
pub type Wire = TlsStream<TcpStream>;

/// A certificate chain and the key of its first certificate.
pub type ChainAndKey = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Connects with the certificate of the configured identity, offering only the ALPN protocol `alpn`.
pub async fn connect(proxy: &Proxy, certs: &Certs, alpn: &str) -> Wire {
    connect_with(proxy.addr, certs, Some(&certs.admin), alpn).await
}

/// Connects to a listener, with this client certificate if there is one.
pub async fn connect_with(
    address: SocketAddr,
    certs: &Certs,
    certificate: Option<&Issued>,
    alpn: &str,
) -> Wire {
    let chain = certificate.map(|issued| (vec![issued.cert_der()], issued.key_der()));
    handshake(&connector(certs, chain, alpn), address).await.unwrap()
}

/// A TLS client that presents this chain, offers only the ALPN protocol `alpn`, and never resumes a session.
pub fn connector(certs: &Certs, chain: Option<ChainAndKey>, alpn: &str) -> TlsConnector {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certs.pki.ca_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match chain {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    TlsConnector::from(Arc::new(config))
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
