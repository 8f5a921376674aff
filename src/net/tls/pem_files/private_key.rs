//! The private key of a PEM text.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs1KeyDer, PrivatePkcs8KeyDer, PrivateSec1KeyDer};
use rustls::sign::SigningKey;
use x509_parser::prelude::FromDer;
use x509_parser::x509::SubjectPublicKeyInfo;
use zeroize::Zeroizing;

use super::blocks::Block;
use super::foreign_format;
use super::{TlsFileError, at_line, found_labels};

/// A private key with the line of its block.
pub(super) struct LoadedKey {
    pub(super) key: Zeroizing<PrivateKeyDer<'static>>,
    pub(super) signing: Arc<dyn SigningKey>,
    pub(super) line: usize,
}

/// The first private key of a text with these blocks. Go takes the first one, too, and tries each encoding whatever the
/// label says (`crypto/tls`, `X509KeyPair` and `parsePrivateKey`).
///
/// # Errors
/// There is no key, or it cannot be used.
pub(super) fn private_key(
    path: &Path,
    pem: &[u8],
    blocks: &[Block],
) -> Result<LoadedKey, TlsFileError> {
    let is_key = |label: &str| label == "PRIVATE KEY" || label.ends_with(" PRIVATE KEY");
    let Some(block) = blocks.iter().find(|block| is_key(&block.label)) else {
        let message = match foreign_format::describe(pem).filter(|_| blocks.is_empty()) {
            Some(format) => format,
            None => format!(
                "contains no private key (PEM, -----BEGIN PRIVATE KEY-----){}",
                found_labels(blocks)
            ),
        };
        return Err(TlsFileError::invalid(path, message));
    };
    let refuse = |message: &str| TlsFileError::invalid(path, at_line(block.line, message));
    if block.is_encrypted || block.label == "ENCRYPTED PRIVATE KEY" {
        return Err(refuse(
            "the private key is encrypted; store it without a passphrase (openssl pkey -in FILE -out NEW-FILE)",
        ));
    }
    let der = match &block.content {
        Ok(der) => der,
        Err(error) => return Err(refuse(&format!("the private key is not read: {error}"))),
    };
    match block.label.as_str() {
        "OPENSSH PRIVATE KEY" => Err(refuse(
            "the private key has the format of OpenSSH; convert it (ssh-keygen -p -m PKCS8 -f FILE)",
        )),
        "DSA PRIVATE KEY" => Err(refuse(UNSUPPORTED)),
        label => {
            let (key, signing) = parse(label, der).ok_or_else(|| refuse(UNSUPPORTED))?;
            Ok(LoadedKey { key, signing, line: block.line })
        }
    }
}

const UNSUPPORTED: &str = "the private key is damaged or of a kind that is not supported (RSA of 2048 to 8192 bits, ECDSA \
    on P-256, P-384 and P-521, and Ed25519 are)";

/// Parses a key as what its label says, then in the other encodings.
fn parse(
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
