//! Verifies a server's certificate and keeps it, so that a failed handshake can still be explained.

use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
};

use super::observations::Kind;
use crate::net::tls::no_server_verification::NoServerVerification;
use crate::net::tls::pem_files::LoadedCert;

/// How one endpoint is verified, and the certificate it showed last.
#[derive(Debug)]
pub(super) struct Verifier {
    inner: Arc<dyn ServerCertVerifier>,
    /// `false`: there is no CA to verify with; everything is taken, and nothing secret is sent.
    verifies: bool,
    provider: Arc<CryptoProvider>,
    shown: Mutex<Option<CertificateDer<'static>>>,
}

impl Verifier {
    /// Verifies against `roots`.
    pub(super) fn new(roots: Option<Arc<RootCertStore>>) -> Result<Arc<Self>, String> {
        let provider = Arc::new(aws_lc_rs::default_provider());
        let verifies = roots.is_some();
        let inner: Arc<dyn ServerCertVerifier> = match roots {
            Some(roots) => {
                WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
                    .build()
                    .map_err(|error| error.to_string())?
            }
            None => Arc::new(NoServerVerification::new(&provider)),
        };
        Ok(Arc::new(Self { inner, verifies, provider, shown: Mutex::default() }))
    }

    /// Whether it verifies anything.
    pub(super) fn verifies(&self) -> bool {
        self.verifies
    }

    /// The certificate of the last handshake.
    pub(super) fn shown(&self) -> Option<CertificateDer<'static>> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A client that uses it and offers HTTP/2. It resumes no session: each handshake is whole.
    pub(super) fn client(
        self: &Arc<Self>,
        certificate: Option<&LoadedCert>,
    ) -> Result<Arc<ClientConfig>, String> {
        let builder = ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?
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

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        *self.shown.lock().unwrap_or_else(PoisonError::into_inner) =
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

/// What kind of failure a handshake ended in.
pub(super) fn kind_of(error: &std::io::Error) -> Kind {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>());
    match inner {
        Some(Error::InvalidCertificate(error)) => match error {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Kind::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Kind::NotYetValid
            }
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                Kind::WrongName
            }
            // An authority of the same name with another key is another authority.
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Kind::UnknownIssuer,
            _ => Kind::Tls,
        },
        Some(_) => Kind::Tls,
        None => match error.kind() {
            std::io::ErrorKind::ConnectionReset
            | std::io::ErrorKind::BrokenPipe
            | std::io::ErrorKind::UnexpectedEof => Kind::Reset,
            _ => Kind::Other,
        },
    }
}
