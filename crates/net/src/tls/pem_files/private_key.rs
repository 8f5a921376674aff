//! The private key of a PEM text.

use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::PrivateKeyDer;
use rustls::sign::SigningKey;
use zeroize::Zeroizing;

use super::super::file_error::TlsFileError;
use super::blocks::{Block, at_line, found_labels};
use super::foreign_format;
use super::key_encoding::parse;

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
