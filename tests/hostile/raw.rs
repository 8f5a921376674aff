//! An attacker's connection: HTTP/2 frames over TLS, without flow control and without limits.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::http2::{PREFACE, headers, settings};

pub type Tls = TlsStream<TcpStream>;

/// Encodes the request `GET path`, with these fields besides the pseudo-header fields.
pub fn get(stream: u32, path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let mut fields =
        vec![(":method", "GET"), (":scheme", "https"), (":authority", "api"), (":path", path)];
    fields.extend(more);
    headers(stream, true, &fields)
}

/// TLS settings of an attacker, which accepts any server.
pub fn tls_config(
    alpn: &str,
    chain: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> Arc<ClientConfig> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyServer(provider)));
    let mut config = match chain {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Arc::new(config)
}

pub async fn connect_tls(server: SocketAddr, config: &Arc<ClientConfig>) -> io::Result<Tls> {
    let stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    TlsConnector::from(Arc::clone(config)).connect(ServerName::from(server.ip()), stream).await
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

#[derive(Debug)]
struct AnyServer(Arc<rustls::crypto::CryptoProvider>);

impl rustls::client::danger::ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: rustls::pki_types::UnixTime,
    ) -> Result<rustls::client::danger::ServerCertVerified, rustls::Error> {
        Ok(rustls::client::danger::ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &rustls::DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, rustls::Error> {
        Ok(rustls::client::danger::HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<rustls::SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
