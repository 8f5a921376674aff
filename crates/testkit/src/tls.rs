//! The TLS configuration of test clients.

use std::sync::Arc;

use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

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
        Trust::Ca(ca) => {
            let mut roots = RootCertStore::empty();
            roots.add(ca).unwrap();
            builder.with_root_certificates(roots)
        }
        Trust::Any => {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyServer(provider)))
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

#[derive(Debug)]
struct AnyServer(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyServer {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
