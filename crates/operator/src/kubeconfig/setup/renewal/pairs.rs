//! The pairs of a local CA and its serving certificate: the one that is served, the next one, which is published and
//! not served yet, and the one that was served before.
//!
//! | file | content |
//! |---|---|
//! | `serving.pem` | the served certificate and its key |
//! | `serving.next.pem` | the next certificate, its key, and its CA |
//! | `serving.previous.pem` | the same of the previous pair |
//! | `local-ca.crt` | the CAs that clients are to trust, that of the served certificate first |
//!
//! The next pair is one file, so it exists as a whole or not at all. The key of a CA is never stored.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use jackstay_net::tls::certificate::{CertInfo, cert_info};
use jackstay_net::tls::local_ca::{self, NewServingCert};
use jackstay_net::tls::pem_files::{self, valid_certificates};
use jackstay_sys::files;
use rustls::pki_types::CertificateDer;
use zeroize::Zeroizing;

use super::super::error::SetupError;
use super::super::serving::{MAX_CA_FILE, ServingFiles};
use super::stage::Window;

const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
/// Characters in a line of PEM (RFC 7468 section 2).
const LINE: usize = 64;

/// A serving certificate with its key and its CA.
#[derive(Clone)]
pub(super) struct Pair {
    /// The certificate of the CA; `None` if no file has it.
    pub(super) ca: Option<CertificateDer<'static>>,
    /// The serving certificate.
    pub(super) leaf: CertificateDer<'static>,
    /// The content of the served file: certificate and key.
    pub(super) serving: Zeroizing<Vec<u8>>,
    /// The names in the certificate, sorted.
    pub(super) names: Vec<String>,
    /// When both are valid.
    pub(super) window: Window,
}

/// The pairs of a listener.
pub(super) struct Pairs {
    pub(super) current: Pair,
    pub(super) next: Option<Pair>,
    pub(super) previous: Option<Pair>,
    /// The certificates in the file that clients trust.
    pub(super) published: Vec<CertificateDer<'static>>,
}

impl Pair {
    /// Reads certificate and key, with a CA that may have signed it.
    fn read(
        path: &Path,
        pem: &[u8],
        candidates: &[CertificateDer<'static>],
    ) -> Result<Self, SetupError> {
        let loaded =
            pem_files::cert_from_pem((path, pem), (path, pem)).map_err(SetupError::TlsFile)?;
        let leaf = loaded.chain[0].clone();
        let mut names = local_ca::subject_alt_names(&leaf)
            .map_err(|error| SetupError::ServingNames(path.to_owned(), error))?;
        names.sort();
        let signed = |ca: &&CertificateDer<'static>| local_ca::is_constrained_issuer(ca, &leaf);
        let ca = candidates.iter().find(signed).cloned();
        let of_ca = ca.as_ref().map(cert_info).transpose();
        let of_ca = of_ca.map_err(SetupError::LocalCaCertificate)?;
        let window = window_of(&loaded.info, of_ca.as_ref());
        Ok(Self { ca, leaf, serving: Zeroizing::new(pem.to_vec()), names, window })
    }

    /// Reads a pair with its CA in one file. `None` if the file does not exist or is not such a pair: then it is of no
    /// use, and a new one is created when it is needed.
    fn read_kept(path: &Path) -> Option<Self> {
        let pem = files::read(path, MAX_CA_FILE).ok().map(Zeroizing::new)?;
        let begin = pem.windows(BEGIN.len()).rposition(|text| text == BEGIN.as_bytes())?;
        let (pair, ca) = pem.split_at(begin);
        Self::read(path, pair, &valid_certificates(ca)).ok().filter(|pair| pair.ca.is_some())
    }

    /// A new pair.
    pub(super) fn new(created: &NewServingCert) -> Result<Self, SetupError> {
        let ca = valid_certificates(created.ca.as_bytes());
        Self::read(Path::new("the new serving certificate"), created.pair.as_bytes(), &ca)
    }

    /// Certificate, key and CA as one file.
    pub(super) fn kept(&self) -> Vec<u8> {
        let ca = self.ca.iter().map(pem_of).collect::<String>();
        let mut bytes = self.serving.to_vec();
        if bytes.last().is_some_and(|last| *last != b'\n') {
            bytes.push(b'\n');
        }
        bytes.extend_from_slice(ca.as_bytes());
        bytes
    }
}

impl Pairs {
    /// Reads the files. `known` are further CAs, one of which may have signed the served certificate.
    ///
    /// # Errors
    /// The served certificate cannot be used, or the file of the CA cannot be read.
    pub(super) fn read(
        files: &ServingFiles,
        known: &[CertificateDer<'static>],
    ) -> Result<Self, SetupError> {
        let published = match jackstay_sys::files::read(&files.ca, MAX_CA_FILE) {
            Ok(pem) => valid_certificates(&pem),
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(SetupError::LocalCaFile(files.ca.clone(), error)),
        };
        let next = Pair::read_kept(&files.next());
        let previous = Pair::read_kept(&files.previous());
        let kept = [&next, &previous].into_iter().flatten().filter_map(|pair| pair.ca.as_ref());
        let candidates: Vec<_> = published.iter().chain(kept).chain(known).cloned().collect();
        let pem = pem_files::read(&files.serving).map_err(SetupError::TlsFile)?;
        let current = Pair::read(&files.serving, &pem, &candidates)?;
        // A pair for other names is of an earlier configuration. A next pair that is served already is left by a
        // run that was interrupted after its switch.
        let fits = |pair: &Pair| pair.names == current.names && pair.leaf != current.leaf;
        let (next, previous) = (next.filter(fits), previous.filter(fits));
        Ok(Self { current, next, previous, published })
    }

    /// The CA of each pair, that of the served one first.
    pub(super) fn cas(&self) -> impl Iterator<Item = &CertificateDer<'static>> {
        let pairs = [Some(&self.current), self.next.as_ref(), self.previous.as_ref()];
        pairs.into_iter().flatten().filter_map(|pair| pair.ca.as_ref())
    }
}

impl ServingFiles {
    /// The file of the next pair.
    pub(super) fn next(&self) -> PathBuf {
        self.serving.with_extension("next.pem")
    }

    /// The file of the previous pair.
    pub(super) fn previous(&self) -> PathBuf {
        self.serving.with_extension("previous.pem")
    }
}

/// When a certificate and its CA are both valid.
fn window_of(leaf: &CertInfo, ca: Option<&CertInfo>) -> Window {
    let window = |info: &CertInfo| Window { from: info.not_before, until: info.not_after };
    let (leaf, ca) = (window(leaf), ca.map_or_else(|| window(leaf), window));
    Window { from: leaf.from.max(ca.from), until: leaf.until.min(ca.until) }
}

/// A certificate as PEM.
pub(super) fn pem_of(der: &CertificateDer<'static>) -> String {
    let text = STANDARD.encode(der);
    let lines = text.as_bytes().chunks(LINE).map(|line| String::from_utf8_lossy(line) + "\n");
    format!("{BEGIN}\n{}-----END CERTIFICATE-----\n", lines.collect::<String>())
}
