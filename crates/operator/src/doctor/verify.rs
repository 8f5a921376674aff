//! Verifies and records server certificates, and classifies why a handshake failed.

use std::sync::{Arc, Mutex, PoisonError};

use jackstay_net::tls::no_server_verification::NoServerVerification;
use jackstay_net::tls::pem_files::LoadedCert;
use jackstay_net::tls::refusal::{CertificateRefusal, RefusalKind};
use jackstay_net::tls::tls_error::tls_error;
use jackstay_net::tls::verification::{CertificateVerifier, TrustedCas};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

use super::observations::FailureKind;

/// Verifies one endpoint and records the certificate of its last handshake, even if the handshake fails.
#[derive(Debug)]
pub(super) struct RecordingVerifier {
    inner: Arc<dyn ServerCertVerifier>,
    /// `false` without a CA: every certificate is accepted, and no credential may be sent.
    verifies: bool,
    provider: Arc<CryptoProvider>,
    recorded: Mutex<Option<CertificateDer<'static>>>,
}

impl RecordingVerifier {
    /// A verifier with these roots. Without roots it accepts every certificate.
    pub(super) fn new(roots: Option<&Arc<TrustedCas>>) -> Arc<Self> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifies = roots.is_some();
        let inner: Arc<dyn ServerCertVerifier> = match roots {
            Some(roots) => CertificateVerifier::new(roots),
            None => Arc::new(NoServerVerification::new(&provider)),
        };
        Arc::new(Self { inner, verifies, provider, recorded: Mutex::default() })
    }

    /// Whether there is a CA to verify with.
    pub(super) fn verifies(&self) -> bool {
        self.verifies
    }

    /// The server certificate of the last handshake.
    pub(super) fn last_certificate(&self) -> Option<CertificateDer<'static>> {
        self.recorded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A TLS client that uses this verifier and offers HTTP/2. It resumes no session, so that the server
    /// sends its certificate in each handshake.
    pub(super) fn client(
        self: &Arc<Self>,
        certificate: Option<&LoadedCert>,
    ) -> Result<Arc<ClientConfig>, Error> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(self) as Arc<dyn ServerCertVerifier>);
        let mut config = match certificate {
            Some(loaded) if self.verifies() => builder.with_client_cert_resolver(Arc::new(
                rustls::sign::SingleCertAndKey::from(Arc::clone(&loaded.certified)),
            )),
            _ => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        config.resumption = rustls::client::Resumption::disabled();
        Ok(Arc::new(config))
    }
}

impl ServerCertVerifier for RecordingVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        *self.recorded.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(end_entity.clone().into_owned());
        self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// Classifies the failure of a handshake.
pub(super) fn kind_of(error: &std::io::Error) -> FailureKind {
    match tls_error(error) {
        Some(error) => match CertificateRefusal::of_error(error).map(|refusal| refusal.kind) {
            Some(RefusalKind::Expired) => FailureKind::Expired,
            Some(RefusalKind::NotYetValid) => FailureKind::NotYetValid,
            Some(RefusalKind::WrongName) => FailureKind::WrongName,
            Some(RefusalKind::UnknownIssuer) => FailureKind::UnknownIssuer,
            Some(RefusalKind::Other) => FailureKind::Certificate,
            None => FailureKind::Tls,
        },
        None => match error.kind() {
            std::io::ErrorKind::ConnectionReset
            | std::io::ErrorKind::BrokenPipe
            | std::io::ErrorKind::UnexpectedEof => FailureKind::Reset,
            _ => FailureKind::Other,
        },
    }
}
