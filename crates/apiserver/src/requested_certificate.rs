//! Requests a client certificate, and leaves its verification to the request.
//!
//! kube-apiserver does so (`tls.RequestClientCert`): a certificate that its CA did not sign is answered with 401.

use std::sync::Arc;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, SignatureScheme};
use x509_parser::x509::X509Version;

/// Accepts every client certificate whose key the client proves to have. The inner verifier verifies that
/// proof and provides the CA names of the certificate request.
#[derive(Debug)]
pub struct RequestedCertificate(pub Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for RequestedCertificate {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = self.0.verify_tls12_signature(message, certificate, signature);
        verified.or_else(|error| accept_version_1(certificate).ok_or(error))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let verified = self.0.verify_tls13_signature(message, certificate, signature);
        verified.or_else(|error| accept_version_1(certificate).ok_or(error))
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// Accepts the proof of the key if the certificate is of X.509 version 1, which webpki does not read. Such a certificate
/// is never an identity: its requests get a 401.
fn accept_version_1(certificate: &CertificateDer<'_>) -> Option<HandshakeSignatureValid> {
    let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
    (parsed.version() == X509Version::V1).then(HandshakeSignatureValid::assertion)
}
