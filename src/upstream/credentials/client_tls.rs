//! TLS client configurations for connections to apiservers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use jackstay_net::tls::ca_bundle::CaBundle;
use jackstay_net::tls::certificate::CertInfo;
use jackstay_net::tls::key_log;
use jackstay_net::tls::no_server_verification::NoServerVerification;
use jackstay_net::tls::pem_files::{LoadedCa, LoadedCert};
use jackstay_net::tls::verification::CertificateVerifier;
use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs;

static GENERATION: AtomicU64 = AtomicU64::new(1);

/// The TLS configurations of one credential class, one for each protocol.
#[derive(Debug)]
pub struct ClientTls {
    /// Offers `h2` by ALPN, for the connections of the pool.
    pub h2: Arc<ClientConfig>,
    /// Offers `http/1.1` by ALPN, for upgrades.
    pub http1: Arc<ClientConfig>,
    /// The CA bundle that verifies the server, if any.
    pub ca: Option<Arc<CaBundle>>,
    /// Grows with each change. Connections of an older generation drain.
    pub generation: u64,
    /// The certificate that is shown, if any.
    pub certificate: Option<Arc<CertInfo>>,
}

/// Configurations that show `certificate`, or none.
pub fn client_tls(ca: &LoadedCa, certificate: Option<&LoadedCert>) -> ClientTls {
    let verifier = CertificateVerifier::new(&ca.roots);
    let builder = builder().dangerous().with_custom_certificate_verifier(verifier);
    let config = match certificate {
        None => builder.with_no_client_auth(),
        Some(loaded) => builder.with_client_cert_resolver(Arc::new(
            rustls::sign::SingleCertAndKey::from(Arc::clone(&loaded.certified)),
        )),
    };
    ClientTls { ca: Some(Arc::clone(&ca.bundle)), ..by_protocol(config, certificate) }
}

/// Configurations that show no certificate.
pub(super) fn plain_tls(ca: Option<&LoadedCa>) -> ClientTls {
    ca.map_or_else(unverified_tls, |ca| client_tls(ca, None))
}

/// Configurations that do not verify the server and show no certificate. They suffice to find out whether
/// an endpoint answers.
pub fn unverified_tls() -> ClientTls {
    let builder = builder();
    let verifier = Arc::new(NoServerVerification::new(builder.crypto_provider()));
    let config =
        builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
    by_protocol(config, None)
}

fn builder() -> rustls::ConfigBuilder<ClientConfig, rustls::WantsVerifier> {
    ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("aws-lc-rs has cipher suites for TLS 1.2 and 1.3")
}

fn by_protocol(mut config: ClientConfig, certificate: Option<&LoadedCert>) -> ClientTls {
    config.alpn_protocols = vec![b"h2".to_vec()];
    config.key_log = key_log::key_log();
    let mut http1 = config.clone();
    // Each protocol has its own session tickets, because a resumed session keeps its ALPN protocol.
    http1.resumption = rustls::client::Resumption::in_memory_sessions(16);
    http1.alpn_protocols = vec![b"http/1.1".to_vec()];
    ClientTls {
        h2: Arc::new(config),
        http1: Arc::new(http1),
        ca: None,
        generation: GENERATION.fetch_add(1, Ordering::Relaxed),
        certificate: certificate.map(|loaded| Arc::new(loaded.info.clone())),
    }
}
