//! Certificates, keys and CA bundles read from PEM files, with errors that name the file.
//!
//! Loading checks that a file can be parsed and that the key belongs to the certificate. It does not check the
//! validity period; callers do so with [`CertInfo::check_time`], since a loaded certificate may expire later.

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::Path;
use std::sync::Arc;

use jackstay_sys::files;
use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use crate::config::CertPaths;

use super::ca_bundle::CaBundle;
use super::certificate::{self, CertInfo, cert_info};
use super::file_error::{TlsFileError, TlsFileProblem};

/// Maximum size of a PEM file: a bundle of all public CAs has about 250 KiB.
const MAX_FILE: u64 = 4 << 20;

/// A certificate chain with the private key of its leaf.
pub struct LoadedCert {
    /// The chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Chain and signing key for rustls' resolvers.
    pub certified: Arc<CertifiedKey>,
    /// Subject, validity and serial of the leaf.
    pub info: CertInfo,
    /// Hash of the contents of the files, which distinguishes a changed file from a touched one.
    pub fingerprint: u64,
    key: Zeroizing<PrivateKeyDer<'static>>,
}

impl LoadedCert {
    /// The private key, for the local CA.
    pub fn key(&self) -> &PrivateKeyDer<'static> {
        &self.key
    }
}

impl fmt::Debug for LoadedCert {
    /// Omits the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedCert").field("info", &self.info).finish_non_exhaustive()
    }
}

/// The certificates in a PEM text; other sections, and those that cannot be parsed, are skipped.
pub fn valid_certificates(pem: &[u8]) -> Vec<CertificateDer<'static>> {
    CertificateDer::pem_slice_iter(pem).filter_map(Result::ok).collect()
}

/// Reads a certificate chain and its key. A file that contains both is read only once, so that a replacement
/// of the file cannot mix two versions.
pub fn load_cert(paths: &CertPaths) -> Result<LoadedCert, TlsFileError> {
    let (cert_path, key_path) = (paths.cert_file.as_path(), paths.key_file.as_path());
    let cert_pem = read(cert_path)?;
    let key_pem = if key_path == cert_path { None } else { Some(read(key_path)?) };
    cert_from_pem((cert_path, &cert_pem), (key_path, key_pem.as_ref().unwrap_or(&cert_pem)))
}

/// Reads the certificate of a server. X.509 version 1 is an error: it has no names that a client can verify.
pub fn load_serving_cert(paths: &CertPaths) -> Result<LoadedCert, TlsFileError> {
    let loaded = load_cert(paths)?;
    check_serving_cert(&loaded, &paths.cert_file)?;
    Ok(loaded)
}

/// Refuses the certificate of a server in `cert_file` if it is X.509 version 1.
pub fn check_serving_cert(loaded: &LoadedCert, cert_file: &Path) -> Result<(), TlsFileError> {
    if loaded.info.is_version_1 {
        return Err(TlsFileError::invalid(cert_file, certificate::VERSION_1));
    }
    Ok(())
}

/// Parses a certificate chain and its key; errors name the paths.
pub fn cert_from_pem(
    (cert_path, cert_pem): (&Path, &[u8]),
    (key_path, key_pem): (&Path, &[u8]),
) -> Result<LoadedCert, TlsFileError> {
    let chain = certificates(cert_path, cert_pem)?;
    let leaf = chain.first().ok_or_else(|| TlsFileError::no_certificate(cert_path))?;
    let info = cert_info(leaf).map_err(|e| {
        TlsFileError::invalid(cert_path, format!("cannot read the certificate: {e}"))
    })?;
    let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|e| no_key(key_path, key_pem, &e))?;
    let key = Zeroizing::new(key);
    let signing = any_supported_type(&key).map_err(|_| {
        TlsFileError::invalid(
            key_path,
            "the private key is damaged or of a kind that is not supported (RSA, ECDSA and \
             Ed25519 are)",
        )
    })?;
    // rustls' own comparison refuses a certificate of X.509 version 1.
    let key_matches = signing.public_key().is_some_and(|public| {
        certificate::public_key(leaf).is_some_and(|of_leaf| *of_leaf == *public)
    });
    if !key_matches {
        let message = format!(
            "the private key does not belong to the certificate in {}{}",
            cert_path.display(),
            if chain.len() > 1 { " (its first one: the leaf must come first)" } else { "" }
        );
        return Err(TlsFileError::new(key_path, TlsFileProblem::Mismatch, message));
    }
    let certified = CertifiedKey::new(chain.clone(), signing);
    let fingerprint = fingerprint(&[cert_pem, key_pem]);
    Ok(LoadedCert { chain, certified: Arc::new(certified), info, fingerprint, key })
}

/// The certificate authorities of a PEM bundle.
#[derive(Debug, Clone)]
pub struct LoadedCa {
    /// The certificates that rustls accepts as trust anchors, at least one.
    pub roots: Arc<RootCertStore>,
    /// The file and its certificates.
    pub bundle: Arc<CaBundle>,
    /// Hash of the content of the file.
    pub fingerprint: u64,
}

/// Reads a CA bundle. Certificates that rustls cannot use as trust anchors are skipped, if at least one can
/// be used.
pub fn load_ca(path: &Path) -> Result<LoadedCa, TlsFileError> {
    ca_from_pem(path, &read(path)?)
}

/// Parses a CA bundle; errors name the path.
pub fn ca_from_pem(path: &Path, pem: &[u8]) -> Result<LoadedCa, TlsFileError> {
    let chain = certificates(path, pem)?;
    if chain.is_empty() {
        return Err(TlsFileError::no_certificate(path));
    }
    let bundle = Arc::new(CaBundle {
        file: path.to_owned(),
        certificates: chain.iter().filter_map(|der| cert_info(der).ok()).collect(),
        count: chain.len(),
    });
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(chain);
    if roots.is_empty() {
        return Err(TlsFileError::invalid(path, "no certificate in it can be used as a CA"));
    }
    let fingerprint = fingerprint(&[pem]);
    Ok(LoadedCa { roots: Arc::new(roots), bundle, fingerprint })
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|e| TlsFileError::invalid(path, format!("not a valid PEM file: {e}")))
}

fn no_key(path: &Path, pem: &[u8], error: &rustls::pki_types::pem::Error) -> TlsFileError {
    let has = |needle: &[u8]| pem.windows(needle.len()).any(|window| window == needle);
    let message = match error {
        rustls::pki_types::pem::Error::NoItemsFound if has(b"BEGIN ENCRYPTED PRIVATE KEY") => {
            "the private key is encrypted; store it without a passphrase".to_owned()
        }
        rustls::pki_types::pem::Error::NoItemsFound => {
            "contains no private key (PEM, -----BEGIN PRIVATE KEY-----)".to_owned()
        }
        other => format!("not a valid PEM file: {other}"),
    };
    TlsFileError::invalid(path, message)
}

/// The content is overwritten when it is dropped, since it may contain a private key.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, TlsFileError> {
    files::read(path, MAX_FILE).map(Zeroizing::new).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => {
            TlsFileError::invalid(path, "larger than 4 MiB: not a certificate or key")
        }
        _ => TlsFileError::io(path, &error),
    })
}

fn fingerprint(parts: &[&[u8]]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
pub(super) mod tests;
