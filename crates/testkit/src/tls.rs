//! The TLS configurations of test clients and servers, and the loop that accepts TLS connections.

use std::sync::Arc;

use jackstay_apiserver::pki::Issued;
use jackstay_net::tls::no_server_verification::NoServerVerification;
use rustls::client::Resumption;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

/// A certificate chain and the key of its first certificate.
pub type ChainAndKey = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Which servers a client accepts.
#[derive(Debug)]
pub enum Trust {
    /// Those with a certificate of this CA.
    Ca(CertificateDer<'static>),
    /// All.
    Any,
}

/// A client that presents this chain, offers only the ALPN protocol `alpn`, and never resumes a session.
pub fn client(trust: Trust, chain: Option<ChainAndKey>, alpn: &str) -> Arc<ClientConfig> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap();
    let builder = match trust {
        Trust::Ca(ca) => builder.with_root_certificates(roots(ca)),
        Trust::Any => {
            let verifier = Arc::new(NoServerVerification::new(&provider));
            builder.dangerous().with_custom_certificate_verifier(verifier)
        }
    };
    let mut config = match chain {
        Some((chain, key)) => builder.with_client_auth_cert(chain, key).unwrap(),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    config.resumption = Resumption::disabled();
    Arc::new(config)
}

/// A server with this certificate that accepts these clients and the ALPN protocols `alpn`, the preferred one first.
/// [`WebPkiClientVerifier::no_client_auth`] asks no client for a certificate.
pub fn server(
    issued: &Issued,
    clients: Arc<dyn ClientCertVerifier>,
    alpn: &[&str],
) -> Arc<ServerConfig> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(clients)
        .with_single_cert(vec![issued.cert_der()], issued.key_der())
        .unwrap();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    Arc::new(config)
}

/// Clients with a certificate of this CA, and clients without a certificate if they may be `anonymous`.
pub fn clients_of(ca: CertificateDer<'static>, anonymous: bool) -> Arc<dyn ClientCertVerifier> {
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(ca)), provider);
    let builder = if anonymous { builder.allow_unauthenticated() } else { builder };
    builder.build().unwrap()
}

fn roots(ca: CertificateDer<'static>) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(ca).unwrap();
    roots
}

/// Accepts connections until the listener fails. `serve` gets each one after its handshake, in a task of its own.
pub async fn accept_each<F: Future + Send + 'static>(
    listener: TcpListener,
    config: Arc<ServerConfig>,
    serve: impl FnOnce(TlsStream<TcpStream>) -> F + Clone + Send + 'static,
) {
    let acceptor = TlsAcceptor::from(config);
    while let Ok((stream, _)) = listener.accept().await {
        let _ = stream.set_nodelay(true);
        let (handshake, serve) = (acceptor.accept(stream), serve.clone());
        tokio::spawn(async move {
            if let Ok(stream) = handshake.await {
                let _ = serve(stream).await;
            }
        });
    }
}
