//! TLS connections to jackstay on which a test writes raw bytes.

use super::{Certs, Proxy};
use jackstay::demo::pki::Issued;
use rustls::pki_types::ServerName;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// The client's end of a connection.
pub type Wire = TlsStream<TcpStream>;

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
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certs.pki.ca_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match certificate {
        Some(certificate) => builder
            .with_client_auth_cert(vec![certificate.cert_der()], certificate.key_der())
            .unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    let stream = TcpStream::connect(address).await.unwrap();
    let name = ServerName::from(address.ip());
    tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}
