//! Verifies that a client with an X.509 version 1 certificate has its private key, so that the handshake
//! succeeds and its requests get a 401 with the reason. webpki does not read such certificates; the signature
//! is verified with the public key alone. The certificate itself stays unverifiable.

use rustls::DigitallySignedStruct;
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, SubjectPublicKeyInfoDer};

use super::certificate::{cert_info, public_key};

/// Verifies a signature of a TLS 1.2 handshake. `None` unless the certificate is of version 1 and the signature
/// is valid.
pub(super) fn verify_tls12(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Option<HandshakeSignatureValid> {
    let key = key(certificate)?;
    let key = webpki::RawPublicKeyEntity::try_from(&key).ok()?;
    let mut schemes = algorithms().mapping.iter();
    let (_, candidates) = schemes.find(|(scheme, _)| *scheme == signed.scheme)?;
    let is_valid = candidates
        .iter()
        .any(|algorithm| key.verify_signature(*algorithm, message, signed.signature()).is_ok());
    is_valid.then(HandshakeSignatureValid::assertion)
}

/// Verifies a signature of a TLS 1.3 handshake. `None` unless the certificate is of version 1 and the signature
/// is valid.
pub(super) fn verify_tls13(
    message: &[u8],
    certificate: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Option<HandshakeSignatureValid> {
    let key = key(certificate)?;
    verify_tls13_signature_with_raw_key(message, &key, signed, &algorithms()).ok()
}

/// The public key of a certificate of version 1.
fn key(certificate: &CertificateDer<'_>) -> Option<SubjectPublicKeyInfoDer<'static>> {
    cert_info(certificate).ok().filter(|info| info.is_version_1)?;
    public_key(certificate).map(SubjectPublicKeyInfoDer::from)
}

fn algorithms() -> WebPkiSupportedAlgorithms {
    aws_lc_rs::default_provider().signature_verification_algorithms
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use rustls::version::{TLS12, TLS13};
    use rustls::{ClientConfig, ClientConnection, ServerConnection, SupportedProtocolVersion};

    use rcgen::{CertificateParams, KeyPair};
    use rustls::pki_types::PrivateKeyDer;
    use rustls::pki_types::pem::PemObject;

    use super::super::client_chain::ClientCa;
    use super::super::pem_files::tests::{VERSION_1_CERTIFICATE, VERSION_1_KEY};
    use super::super::pem_files::{ca_from_pem, cert_from_pem};
    use super::super::serving::server_config;
    use super::super::verification::CertificateVerifier;
    use super::*;

    /// Makes a handshake in which the client shows the certificate `shown` and signs with `key`.
    fn handshake(
        version: &'static SupportedProtocolVersion,
        shown: &CertificateDer<'static>,
        key: &PrivateKeyDer<'_>,
    ) -> Result<(), rustls::Error> {
        let server_key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        let pem = params.self_signed(&server_key).unwrap().pem();
        let ca = ca_from_pem("ca".as_ref(), pem.as_bytes()).unwrap();
        let server_key = server_key.serialize_pem();
        let pair = (("crt".as_ref(), pem.as_bytes()), ("key".as_ref(), server_key.as_bytes()));
        let server = cert_from_pem(pair.0, pair.1).unwrap();
        let server = server_config(&server, Some(&ClientCa::from_bundle(&ca)));
        let signing = aws_lc_rs::sign::any_supported_type(key).unwrap();
        let certified = rustls::sign::CertifiedKey::new(vec![shown.clone()], signing);
        let resolver = rustls::sign::SingleCertAndKey::from(Arc::new(certified));
        let client = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_protocol_versions(&[version])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(CertificateVerifier::new(&ca.roots))
            .with_client_cert_resolver(Arc::new(resolver));
        let mut client =
            ClientConnection::new(Arc::new(client), "localhost".try_into().unwrap()).unwrap();
        let mut server = ServerConnection::new(Arc::new(server)).unwrap();
        while client.is_handshaking() || server.is_handshaking() {
            let mut bytes = Vec::new();
            while client.wants_write() {
                client.write_tls(&mut bytes).unwrap();
            }
            let mut unread = &bytes[..];
            while server.read_tls(&mut unread).unwrap() > 0 {
                server.process_new_packets()?;
            }
            let mut bytes = Vec::new();
            while server.wants_write() {
                server.write_tls(&mut bytes).unwrap();
            }
            let mut unread: &[u8] = &bytes;
            while client.read_tls(&mut unread as &mut dyn io::Read).unwrap() > 0 {
                client.process_new_packets()?;
            }
        }
        assert_eq!(server.peer_certificates(), Some(std::slice::from_ref(shown)));
        Ok(())
    }

    #[test]
    fn client_with_version_1_certificate_completes_the_handshake_only_with_its_key() {
        let certificate = CertificateDer::from_pem_slice(VERSION_1_CERTIFICATE.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(VERSION_1_KEY.as_bytes()).unwrap();
        let other = PrivateKeyDer::try_from(KeyPair::generate().unwrap().serialize_der()).unwrap();
        for version in [&TLS12, &TLS13] {
            assert_eq!(handshake(version, &certificate, &key), Ok(()), "{version:?}");
            assert!(handshake(version, &certificate, &other).is_err(), "{version:?}");
        }
    }
}
