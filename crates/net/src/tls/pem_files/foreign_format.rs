//! The format of a file that is not PEM, with the command that converts it.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use x509_parser::prelude::{FromDer, X509Certificate};
use zeroize::Zeroizing;

use super::key_encoding::is_private_key;

/// `pkcs7-data` (RFC 2315 section 14) without its last byte, which is in PKCS #12 and PKCS #7 files.
const PKCS7: &[u8] = &[0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x07];
/// The version of a PKCS #12 file (RFC 7292 section 4).
const PKCS12_VERSION: &[u8] = &[0x02, 0x01, 0x03];

/// What a file without a PEM block is, if that is known.
pub(super) fn describe(bytes: &[u8]) -> Option<String> {
    let text = match bytes {
        _ if bytes.trim_ascii().is_empty() => "is empty",
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            "is UTF-16: save it as UTF-8 (iconv -f UTF-16 -t UTF-8 FILE)"
        }
        [0xfe, 0xed, 0xfe, 0xed, ..] => {
            "is a Java keystore: convert it to PKCS #12 (keytool -importkeystore), and that to PEM (openssl pkcs12)"
        }
        [0x30, ..] => der(bytes),
        _ => return base64(bytes).map(ToOwned::to_owned),
    };
    Some(text.to_owned())
}

fn der(bytes: &[u8]) -> &'static str {
    let has = |part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
    if X509Certificate::from_der(bytes).is_ok() {
        "is a certificate in DER: convert it to PEM (openssl x509 -inform DER -in FILE -out NEW-FILE)"
    } else if is_private_key(bytes) {
        "is a private key in DER: convert it to PEM (openssl pkey -inform DER -in FILE -out NEW-FILE)"
    } else if has(PKCS7) && bytes.iter().take(8).collect::<Vec<_>>().windows(3).any(is_version) {
        "is PKCS #12: convert it to PEM (openssl pkcs12 -in FILE -nodes -out NEW-FILE)"
    } else if has(PKCS7) {
        "is PKCS #7: convert it to PEM (openssl pkcs7 -inform DER -in FILE -print_certs -out NEW-FILE)"
    } else {
        "is binary: a PEM file is text, with -----BEGIN lines"
    }
}

fn is_version(window: &[&u8]) -> bool {
    window.iter().copied().eq(PKCS12_VERSION)
}

/// Base64 of a PEM file or of DER.
fn base64(bytes: &[u8]) -> Option<&'static str> {
    let mut joined = Zeroizing::new(Vec::with_capacity(bytes.len()));
    joined.extend(bytes.iter().filter(|byte| !byte.is_ascii_whitespace()));
    let decoded = Zeroizing::new(STANDARD.decode(&*joined).ok()?);
    if decoded.windows(11).any(|window| window == b"-----BEGIN ") {
        Some("is PEM in Base64, as a Secret or a kubeconfig holds it: decode it (base64 -d FILE)")
    } else if decoded.first() == Some(&0x30) {
        Some("is Base64 without its -----BEGIN and -----END lines: add them")
    } else {
        None
    }
}
