//! The encodings of private keys, and the kinds of public keys.

use std::sync::Arc;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs1KeyDer, PrivatePkcs8KeyDer, PrivateSec1KeyDer};
use rustls::sign::SigningKey;
use x509_parser::prelude::FromDer;
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

/// Parses a key as what its label says, then in the other encodings.
pub(super) fn parse(
    label: &str,
    der: &[u8],
) -> Option<(Zeroizing<PrivateKeyDer<'static>>, Arc<dyn SigningKey>)> {
    let pkcs1 = |der| PrivateKeyDer::Pkcs1(PrivatePkcs1KeyDer::from(der));
    let pkcs8 = |der| PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(der));
    let sec1 = |der| PrivateKeyDer::Sec1(PrivateSec1KeyDer::from(der));
    let encodings: [fn(Vec<u8>) -> PrivateKeyDer<'static>; 3] = match label {
        "RSA PRIVATE KEY" => [pkcs1, pkcs8, sec1],
        "EC PRIVATE KEY" => [sec1, pkcs8, pkcs1],
        _ => [pkcs8, pkcs1, sec1],
    };
    encodings.into_iter().find_map(|encoding| {
        let key = Zeroizing::new(encoding(der.to_vec()));
        let signing = any_supported_type(&key).ok()?;
        Some((key, signing))
    })
}

/// Whether the bytes are a private key in one of the encodings.
pub(super) fn is_private_key(der: &[u8]) -> bool {
    parse("", der).is_some()
}

/// The kind of a public key (DER `SubjectPublicKeyInfo`): `RSA`, or the curve.
pub(super) fn key_kind(public: &[u8]) -> Option<&'static str> {
    let (_, key) = SubjectPublicKeyInfo::from_der(public).ok()?;
    let curve = || Some(key.algorithm.parameters.as_ref()?.as_oid().ok()?.to_id_string());
    match key.algorithm.algorithm.to_id_string().as_str() {
        "1.2.840.113549.1.1.1" => Some("RSA"),
        "1.3.101.112" => Some("Ed25519"),
        "1.2.840.10045.2.1" => Some(match curve()?.as_str() {
            "1.2.840.10045.3.1.7" => "ECDSA on P-256",
            "1.3.132.0.34" => "ECDSA on P-384",
            "1.3.132.0.35" => "ECDSA on P-521",
            _ => "ECDSA on another curve",
        }),
        _ => None,
    }
}
