//! Certificates, keys and CA bundles read from PEM files, with errors that name the file.
//!
//! Loading checks that a file can be parsed and that the key belongs to the certificate. It does not check the
//! validity period; callers do so with [`CertInfo::check_time`], since a loaded certificate may expire later.

mod blocks;
mod foreign_format;
mod key_encoding;
mod private_key;

use std::collections::hash_map::DefaultHasher;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jackstay_config::CertPaths;
use jackstay_sys::files;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use zeroize::Zeroizing;

use self::blocks::{Block, BlockError, Unusual, at_line, blocks, found_labels};
use self::key_encoding::key_kind;
use self::private_key::{LoadedKey, private_key};
use super::ca_bundle::CaBundle;
use super::certificate::{self, CertInfo, cert_info};
use super::file_error::{TlsFileError, TlsFileProblem};
use super::verification::TrustedCas;

/// Maximum size of a PEM file: a bundle of all public CAs has about 250 KiB.
pub const MAX_PEM_FILE: u64 = 4 << 20;
/// The only label of certificates that Go reads.
const CERTIFICATE: &str = "CERTIFICATE";
const NO_CERTIFICATE: &str = "contains no certificate (PEM, -----BEGIN CERTIFICATE-----)";

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
    /// The files from which it was read, besides those that the configuration names.
    pub more_files: Vec<PathBuf>,
    /// Certificates of the file that are not read: sentences with file, line, reason and remedy.
    pub skipped: Vec<String>,
    /// Forms that jackstay reads and programs in Go do not: sentences with file and line.
    pub notes: Vec<String>,
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
    let certificates = blocks(pem).into_iter().filter(|block| block.label == CERTIFICATE);
    certificates.filter_map(|block| block.content.ok()).map(|der| der.to_vec().into()).collect()
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
    let cert_blocks = blocks(cert_pem);
    let certificates = Certificates::new(cert_path, cert_pem, &cert_blocks)?;
    if let Some((line, error)) = certificates.damaged.first() {
        let message = at_line(*line, format!("the certificate is not read: {error}"));
        return Err(TlsFileError::invalid(cert_path, message));
    }
    let (chain, leaf_line) = (certificates.chain, certificates.lines[0]);
    let info = cert_info(&chain[0]).map_err(|e| {
        let message = at_line(leaf_line, format!("cannot read the certificate: {e}"));
        TlsFileError::invalid(cert_path, message)
    })?;
    let key_blocks = blocks(key_pem);
    let LoadedKey { key, signing, line } = private_key(key_path, key_pem, &key_blocks)?;
    // rustls' own comparison refuses a certificate of X.509 version 1.
    let (of_key, of_leaf) = (signing.public_key(), certificate::public_key(&chain[0]));
    if of_key.as_deref() != of_leaf.as_deref() || of_key.is_none() {
        let kinds = match (of_key, of_leaf.as_deref()) {
            (Some(key), Some(leaf)) => key_kind(&key).zip(key_kind(leaf)),
            _ => None,
        };
        let kinds = kinds.filter(|(key, leaf)| key != leaf);
        let message = format!(
            "the private key does not belong to the certificate in {}{}{}",
            cert_path.display(),
            if chain.len() > 1 { " (its first one: the leaf must come first)" } else { "" },
            kinds.map_or_else(String::new, |(key, leaf)| format!(
                ": the key is {key}, and that of the certificate is {leaf}"
            ))
        );
        let several =
            key_blocks.iter().filter(|block| block.label.ends_with("PRIVATE KEY")).count();
        let message = if several > 1 { at_line(line, message) } else { message };
        return Err(TlsFileError::new(key_path, TlsFileProblem::Mismatch, message));
    }
    let mut notes = certificates.notes;
    if key_path != cert_path {
        notes.extend(unusual_forms(key_path, &key_blocks));
    }
    let certified = Arc::new(CertifiedKey::new(chain.clone(), signing));
    let fingerprint = fingerprint(&[cert_pem, key_pem]);
    Ok(LoadedCert {
        chain,
        certified,
        info,
        fingerprint,
        more_files: Vec::new(),
        skipped: certificates.skipped,
        notes,
        key,
    })
}

/// The certificate authorities of a PEM bundle.
#[derive(Debug, Clone)]
pub struct LoadedCa {
    /// The certificates that can be used, at least one.
    pub roots: Arc<TrustedCas>,
    /// The file and its certificates.
    pub bundle: Arc<CaBundle>,
    /// Hash of the content of the file.
    pub fingerprint: u64,
}

/// Reads a CA bundle. Certificates that cannot be used as trust anchors are skipped, if at least one can
/// be used; [`CaBundle::skipped`] has them.
pub fn load_ca(path: &Path) -> Result<LoadedCa, TlsFileError> {
    ca_from_pem(path, &read(path)?)
}

/// Parses a CA bundle; errors name the path.
pub fn ca_from_pem(path: &Path, pem: &[u8]) -> Result<LoadedCa, TlsFileError> {
    let certificates = Certificates::new(path, pem, &blocks(pem))?;
    let (mut roots, mut infos) = (TrustedCas::new(path), Vec::new());
    let mut skipped = Vec::new();
    for (der, line) in certificates.chain.iter().zip(&certificates.lines) {
        let info = cert_info(der);
        match (roots.add(der.clone()), info) {
            (Ok(()), Ok(info)) => infos.push(info),
            (Ok(()), Err(_)) => {}
            (Err(_), Err(error)) => skipped.push((*line, error.to_string())),
            (Err(refusal), Ok(_)) => skipped.push((*line, refusal.to_string())),
        }
    }
    let count = certificates.chain.len() + certificates.damaged.len();
    let damaged = certificates.damaged.into_iter().map(|(line, error)| (line, error.to_string()));
    skipped.extend(damaged);
    skipped.sort();
    if roots.is_empty() {
        let first = skipped.first().map(|(line, why)| format!(": line {line}: {why}"));
        let message =
            format!("no certificate in it can be used as a CA{}", first.unwrap_or_default());
        return Err(TlsFileError::invalid(path, message));
    }
    let sentence = |(line, why): (usize, String)| {
        format!(
            "{}: {}",
            path.display(),
            at_line(line, format!("this certificate is not used: {why}"))
        )
    };
    let skipped = skipped.into_iter().map(sentence).chain(certificates.skipped).collect();
    let bundle = Arc::new(CaBundle {
        file: path.to_owned(),
        certificates: infos,
        count,
        skipped,
        notes: certificates.notes,
    });
    let fingerprint = fingerprint(&[pem]);
    Ok(LoadedCa { roots: Arc::new(roots), bundle, fingerprint })
}

/// The certificates of a PEM text, at least one of them damaged or not.
struct Certificates {
    /// Those with content. In a chain that is not used as a CA bundle, there is at least one.
    chain: Vec<CertificateDer<'static>>,
    /// The line of each.
    lines: Vec<usize>,
    /// Lines of those without content, with the reason.
    damaged: Vec<(usize, BlockError)>,
    /// Blocks that hold certificates in a form that is not read, and traces of blocks. Sentences with file and line.
    skipped: Vec<String>,
    /// Forms that Go does not read. Sentences with file and line.
    notes: Vec<String>,
}

impl Certificates {
    /// The certificates of a text with these blocks.
    ///
    /// # Errors
    /// There is none, or none that can be read.
    fn new(path: &Path, pem: &[u8], blocks: &[Block]) -> Result<Self, TlsFileError> {
        let (mut chain, mut lines) = (Vec::new(), Vec::new());
        let (mut damaged, mut skipped) = (Vec::new(), Vec::new());
        let mut skip = |line, why: String| skipped.push(at_line(line, why));
        for block in blocks {
            match (&block.content, remedy_for_label(&block.label)) {
                (Ok(der), _) if block.label == CERTIFICATE => {
                    chain.push(CertificateDer::from(der.to_vec()));
                    lines.push(block.line);
                }
                (Err(error @ (BlockError::NoBegin | BlockError::Marker)), _)
                    if block.label == CERTIFICATE =>
                {
                    skip(block.line, format!("a certificate is not read: {error}"));
                }
                (Err(error), _) if block.label == CERTIFICATE => {
                    damaged.push((block.line, error.clone()));
                }
                (_, Some(remedy)) => {
                    skip(block.line, format!("the block {} is not read: {remedy}", block.label));
                }
                (_, None) => {}
            }
        }
        let damaged_first = damaged
            .first()
            .map(|(line, error)| at_line(*line, format!("the certificate is not read: {error}")));
        if chain.is_empty() {
            let why = damaged_first.or_else(|| skipped.first().cloned());
            let format = || foreign_format::describe(pem).filter(|_| blocks.is_empty());
            let message = why
                .or_else(format)
                .unwrap_or_else(|| format!("{NO_CERTIFICATE}{}", found_labels(blocks)));
            return Err(TlsFileError::invalid(path, message));
        }
        let of_file = |text| format!("{}: {text}", path.display());
        let skipped = skipped.into_iter().map(of_file).collect();
        Ok(Self { chain, lines, damaged, skipped, notes: unusual_forms(path, blocks) })
    }
}

/// What to do with a block that holds certificates, and whose label Go ignores as well.
fn remedy_for_label(label: &str) -> Option<&'static str> {
    Some(match label {
        "TRUSTED CERTIFICATE" => {
            "it is OpenSSL's own format; convert it (openssl x509 -in FILE -out NEW-FILE)"
        }
        "X509 CERTIFICATE" | "X.509 CERTIFICATE" => "write its label as CERTIFICATE",
        "PKCS7" | "CMS" | "PKCS #7 SIGNED DATA" | "CERTIFICATE CHAIN" => {
            "convert it (openssl pkcs7 -in FILE -print_certs -out NEW-FILE)"
        }
        _ => return None,
    })
}

/// The forms of a file that Go does not read, each once.
fn unusual_forms(path: &Path, blocks: &[Block]) -> Vec<String> {
    let mut known = Vec::new();
    let is_new = |(_, form): &(usize, Unusual)| {
        let is_new = !known.contains(form);
        known.push(*form);
        is_new
    };
    let forms = blocks.iter().filter(|block| block.content.is_ok());
    let forms = forms.filter_map(|block| block.unusual).filter(is_new);
    let sentence = |(line, form): (usize, Unusual)| {
        let message = format!(
            "{form}: jackstay reads this, kubectl and other programs in Go do not; write each BEGIN and END \
             on its own line"
        );
        format!("{}: {}", path.display(), at_line(line, message))
    };
    forms.map(sentence).collect()
}

/// Reads a PEM file. The content is overwritten when it is dropped, since it may contain a private key.
///
/// # Errors
/// The file cannot be read, is not a regular file, or is larger than 4 MiB.
pub fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, TlsFileError> {
    files::read(path, MAX_PEM_FILE).map(Zeroizing::new).map_err(|error| match error.kind() {
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
