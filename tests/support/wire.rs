//! TLS connections to jackstay on which a test writes raw bytes.

use super::{Certs, Proxy};
use rustls::pki_types::ServerName;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream;

/// The client's end of a connection.
pub type Wire = TlsStream<TcpStream>;

/// Connects with the certificate of the configured identity, offering only the ALPN protocol `alpn`.
pub async fn connect(proxy: &Proxy, certs: &Certs, alpn: &str) -> Wire {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(certs.pki.ca_der()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(vec![certs.admin.cert_der()], certs.admin.key_der())
        .unwrap();
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    let stream = TcpStream::connect(proxy.addr).await.unwrap();
    let name = ServerName::from(proxy.addr.ip());
    tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap()
}
