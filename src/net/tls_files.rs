//! Certificates, keys and CA bundles read from PEM files, with errors that name the file.
//!
//! Loading checks what never changes about a file (it parses, the key belongs to the certificate)
//! and leaves the clock to the caller: [`CertInfo::check_time`] takes the time as an argument, so
//! that a certificate which expires while we run is found by the same code.

use std::collections::hash_map::DefaultHasher;
use std::fmt::{self, Write as _};
use std::hash::{Hash, Hasher};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::RootCertStore;
use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use x509_parser::asn1_rs::{Any, Tag};
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate};

use crate::config::CertPaths;

/// Largest PEM file read: the bundle of all public CAs is about 250 KiB.
const MAX_FILE: u64 = 4 << 20;

const OID_COMMON_NAME: &str = "2.5.4.3";
const OID_ORGANIZATION: &str = "2.5.4.10";
/// The attribute from which kube-apiserver (1.33 and later) takes the user's UID.
const OID_KUBERNETES_UID: &str = "1.3.6.1.4.1.57683.2";
/// The UID attribute of RFC 4519. kube-apiserver ignores it, comparing it only makes us stricter.
const OID_USER_ID: &str = "0.9.2342.19200300.100.1.1";

/// Who a certificate says it is, as far as kube-apiserver looks: two equal subjects are the same
/// user, the same groups and the same UID to it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Subject {
    cn: Vec<String>,
    organizations: Vec<String>,
    uid: Vec<String>,
}

impl Subject {
    /// Reads the subject of a DER certificate. A name in an encoding that programs decode
    /// differently (T61, BMP and the like) is refused: it must not equal anything.
    pub fn from_der(der: &CertificateDer<'_>) -> Result<Self, String> {
        Self::of(&parse(der)?)
    }

    /// The user name kube-apiserver sees: the last common name, as Go's `crypto/x509` decides.
    /// `None` if there is none or it is empty: such a certificate authenticates nobody.
    pub fn common_name(&self) -> Option<&str> {
        self.cn.last().map(String::as_str).filter(|cn| !cn.is_empty())
    }

    /// The groups, sorted.
    pub fn organizations(&self) -> &[String] {
        &self.organizations
    }

    fn of(certificate: &X509Certificate<'_>) -> Result<Self, String> {
        let mut subject = Self::default();
        for attribute in certificate.subject().iter_attributes() {
            let list = match attribute.attr_type().to_id_string().as_str() {
                OID_COMMON_NAME => &mut subject.cn,
                OID_ORGANIZATION => &mut subject.organizations,
                OID_KUBERNETES_UID | OID_USER_ID => &mut subject.uid,
                _ => continue,
            };
            list.push(text(attribute.attr_value())?);
        }
        subject.organizations.sort();
        Ok(subject)
    }
}

impl fmt::Display for Subject {
    /// `CN=system:node:n1, O=system:nodes`, with control characters escaped: it goes into logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.cn.iter().map(|v| ("CN", v));
        let groups = self.organizations.iter().map(|v| ("O", v));
        let uids = self.uid.iter().map(|v| ("UID", v));
        let mut separator = "";
        for (key, value) in names.chain(groups).chain(uids) {
            write!(f, "{separator}{key}=")?;
            separator = ", ";
            for c in value.chars() {
                match c {
                    ',' | '\\' => write!(f, "\\{c}")?,
                    c if c.is_control() => write!(f, "{}", c.escape_default())?,
                    c => write!(f, "{c}")?,
                }
            }
        }
        if separator.is_empty() { f.write_str("(empty subject)") } else { Ok(()) }
    }
}

/// What an operator wants to know about a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertInfo {
    /// Who it is.
    pub subject: Subject,
    /// Start of its validity.
    pub not_before: SystemTime,
    /// End of its validity.
    pub not_after: SystemTime,
    /// Serial number in upper-case hex, as `openssl x509 -serial` prints it.
    pub serial: String,
}

/// Whether a certificate is valid at some moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validity {
    /// It is.
    Valid,
    /// Its time has not come (or this machine's clock is behind).
    NotYet,
    /// Its time is over.
    Expired,
}

impl CertInfo {
    /// Whether the certificate is valid at `now`.
    pub fn validity(&self, now: SystemTime) -> Validity {
        if now > self.not_after {
            Validity::Expired
        } else if now < self.not_before {
            Validity::NotYet
        } else {
            Validity::Valid
        }
    }

    /// An error naming `path` unless the certificate is valid at `now`.
    pub fn check_time(&self, path: &Path, now: SystemTime) -> Result<(), TlsFileError> {
        let (problem, message) = match self.validity(now) {
            Validity::Valid => return Ok(()),
            Validity::Expired => (
                Problem::Expired,
                format!("the certificate of {} expired on {}", self.subject, date(self.not_after)),
            ),
            Validity::NotYet => (
                Problem::NotYetValid,
                format!(
                    "the certificate of {} is not valid before {}; is this machine's clock right?",
                    self.subject,
                    rfc3339(self.not_before)
                ),
            ),
        };
        Err(TlsFileError::at(path, problem, message))
    }
}

/// Reads a DER certificate.
pub fn cert_info(der: &CertificateDer<'_>) -> Result<CertInfo, String> {
    let certificate = parse(der)?;
    let validity = certificate.validity();
    let mut serial = String::new();
    for byte in certificate.raw_serial().iter().skip_while(|byte| **byte == 0) {
        let _ = write!(serial, "{byte:02X}");
    }
    Ok(CertInfo {
        subject: Subject::of(&certificate)?,
        not_before: system_time(validity.not_before),
        not_after: system_time(validity.not_after),
        serial,
    })
}

/// A certificate chain with its private key, proven to belong together.
pub struct LoadedCert {
    /// The chain, leaf first.
    pub chain: Vec<CertificateDer<'static>>,
    /// Chain and signing key as rustls' resolvers take them.
    pub certified: Arc<CertifiedKey>,
    /// The leaf.
    pub info: CertInfo,
    /// Differs when the contents of the files differ: tells a changed file from a touched one.
    pub fingerprint: u64,
    key: PrivateKeyDer<'static>,
}

impl LoadedCert {
    /// A copy of the private key, for `with_client_auth_cert` and `with_single_cert`.
    pub fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

impl fmt::Debug for LoadedCert {
    /// Everything but the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoadedCert").field("info", &self.info).finish_non_exhaustive()
    }
}

/// Reads a certificate chain and its key. Both may be in one file, which is then read once, so
/// that a rename between two reads cannot mix two generations.
pub fn load_cert(paths: &CertPaths) -> Result<LoadedCert, TlsFileError> {
    let (cert_path, key_path) = (paths.cert_file.as_path(), paths.key_file.as_path());
    let cert_pem = read(cert_path)?;
    let key_pem = if key_path == cert_path { None } else { Some(read(key_path)?) };
    let key_pem = key_pem.as_deref().unwrap_or(&cert_pem);

    let chain = certificates(cert_path, &cert_pem)?;
    let leaf = chain.first().ok_or_else(|| TlsFileError::no_certificate(cert_path))?;
    let info = cert_info(leaf).map_err(|e| {
        TlsFileError::broken(cert_path, format!("cannot read the certificate: {e}"))
    })?;
    let key = PrivateKeyDer::from_pem_slice(key_pem).map_err(|e| no_key(key_path, key_pem, &e))?;
    let signing = any_supported_type(&key).map_err(|_| {
        TlsFileError::broken(
            key_path,
            "the private key is damaged or of a kind that is not supported (RSA, ECDSA and \
             Ed25519 are)",
        )
    })?;
    let certified = CertifiedKey::new(chain.clone(), signing);
    certified.keys_match().map_err(|_| {
        let message = format!(
            "the private key does not belong to the certificate in {}{}",
            cert_path.display(),
            if chain.len() > 1 { " (its first one: the leaf must come first)" } else { "" }
        );
        TlsFileError::at(key_path, Problem::Mismatch, message)
    })?;
    let fingerprint = fingerprint(&[&cert_pem, key_pem]);
    Ok(LoadedCert { chain, certified: Arc::new(certified), info, fingerprint, key })
}

/// The certificate authorities of a PEM bundle.
#[derive(Debug, Clone)]
pub struct LoadedCa {
    /// The usable ones.
    pub roots: Arc<RootCertStore>,
    /// How many those are; never 0.
    pub count: usize,
    /// Each certificate of the bundle that can be read.
    pub certificates: Vec<CertInfo>,
    /// Differs when the contents of the file differ.
    pub fingerprint: u64,
}

/// Reads a CA bundle. A certificate that rustls cannot use as a trust anchor is skipped, as long
/// as one is left.
pub fn load_ca(path: &Path) -> Result<LoadedCa, TlsFileError> {
    let pem = read(path)?;
    let chain = certificates(path, &pem)?;
    if chain.is_empty() {
        return Err(TlsFileError::no_certificate(path));
    }
    let certificates = chain.iter().filter_map(|der| cert_info(der).ok()).collect();
    let mut roots = RootCertStore::empty();
    let (count, _) = roots.add_parsable_certificates(chain);
    if count == 0 {
        return Err(TlsFileError::broken(path, "no certificate in it can be used as a CA"));
    }
    let fingerprint = fingerprint(&[&pem]);
    Ok(LoadedCa { roots: Arc::new(roots), count, certificates, fingerprint })
}

/// What is wrong with a file of certificates or keys: a sentence for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFileError {
    /// The file.
    pub path: PathBuf,
    /// The kind of problem.
    pub problem: Problem,
    message: String,
}

/// Kinds of [`TlsFileError`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Problem {
    /// The file does not exist.
    Missing,
    /// It exists and cannot be read.
    Unreadable,
    /// It does not contain what it should.
    Broken,
    /// The key is another certificate's.
    Mismatch,
    /// The certificate has expired.
    Expired,
    /// The certificate is not valid yet.
    NotYetValid,
}

impl TlsFileError {
    /// Whether the file does not exist. An identity whose file is still to come is no error.
    pub fn is_missing(&self) -> bool {
        self.problem == Problem::Missing
    }

    fn at(path: &Path, problem: Problem, message: impl fmt::Display) -> Self {
        let message = format!("{}: {message}", path.display());
        Self { path: path.to_owned(), problem, message }
    }

    fn broken(path: &Path, message: impl fmt::Display) -> Self {
        Self::at(path, Problem::Broken, message)
    }

    fn no_certificate(path: &Path) -> Self {
        Self::broken(path, "contains no certificate (PEM, -----BEGIN CERTIFICATE-----)")
    }

    fn io(path: &Path, error: &std::io::Error) -> Self {
        let problem = match error.kind() {
            std::io::ErrorKind::NotFound => Problem::Missing,
            _ => Problem::Unreadable,
        };
        let reason = error.to_string();
        let reason = reason.split(" (os error").next().unwrap_or_default();
        let message = format!("cannot read {}: {reason}", path.display());
        Self { path: path.to_owned(), problem, message }
    }
}

impl fmt::Display for TlsFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for TlsFileError {}

/// A moment as `2026-01-02T03:04:05Z`.
pub fn rfc3339(time: SystemTime) -> String {
    let day = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() % 86_400;
    format!("{}T{:02}:{:02}:{:02}Z", date(time), day / 3600, day / 60 % 60, day % 60)
}

/// The day of a moment, in UTC, as `2026-01-02`.
fn date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    match i64::try_from(seconds).map(ASN1Time::from_timestamp) {
        Ok(Ok(time)) => {
            let day = time.to_datetime();
            format!("{:04}-{:02}-{:02}", day.year(), u8::from(day.month()), day.day())
        }
        _ => "the end of time".to_owned(),
    }
}

/// Moments before 1970 become 1970: no certificate that matters is that old.
fn system_time(time: ASN1Time) -> SystemTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(UNIX_EPOCH)
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, String> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err("bytes after the end of the certificate".to_owned()),
        Err(_) => Err("not an X.509 certificate".to_owned()),
    }
}

/// A name as text, from the string types every X.509 library decodes alike.
fn text(value: &Any<'_>) -> Result<String, String> {
    let ascii_only = match value.tag() {
        Tag::Utf8String => false,
        Tag::PrintableString | Tag::Ia5String | Tag::NumericString => true,
        other => return Err(format!("a name in its subject has the unsupported type {other}")),
    };
    match std::str::from_utf8(value.data) {
        Ok(text) if !ascii_only || text.is_ascii() => Ok(text.to_owned()),
        _ => Err("a name in its subject is not valid text".to_owned()),
    }
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsFileError> {
    CertificateDer::pem_slice_iter(pem)
        .collect::<Result<_, _>>()
        .map_err(|e| TlsFileError::broken(path, format!("not a valid PEM file: {e}")))
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
    TlsFileError::broken(path, message)
}

/// Reads a regular file of bounded size: a pipe or a device would block or never end.
fn read(path: &Path) -> Result<Vec<u8>, TlsFileError> {
    let metadata = std::fs::metadata(path).map_err(|e| TlsFileError::io(path, &e))?;
    if !metadata.is_file() {
        return Err(TlsFileError::at(path, Problem::Unreadable, "not a regular file"));
    }
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|e| TlsFileError::io(path, &e))?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(TlsFileError::broken(path, "larger than 4 MiB: not a certificate or key"));
    }
    Ok(bytes)
}

fn fingerprint(parts: &[&[u8]]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{CertificateParams, DistinguishedName, DnType, DnValue, KeyPair};
    use std::fs;

    const CN: &[u64] = &[2, 5, 4, 3];
    const O: &[u64] = &[2, 5, 4, 10];
    const UID: &[u64] = &[1, 3, 6, 1, 4, 1, 57683, 2];

    fn certificate(names: &[(&[u64], DnValue)]) -> (String, KeyPair) {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for (oid, value) in names {
            params.distinguished_name.push(DnType::from_oid(oid), value.clone());
        }
        params.not_before = rcgen::date_time_ymd(2020, 1, 2);
        params.not_after = rcgen::date_time_ymd(2030, 3, 4);
        params.serial_number = Some(vec![0x0a, 0xff].into());
        let key = KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap().pem(), key)
    }

    fn node() -> (String, KeyPair) {
        certificate(&[(O, "system:nodes".into()), (CN, "system:node:n1".into())])
    }

    fn subject(names: &[(&[u64], DnValue)]) -> Result<Subject, String> {
        let (pem, _) = certificate(names);
        Subject::from_der(&CertificateDer::from_pem_slice(pem.as_bytes()).unwrap())
    }

    struct Files(tempfile::TempDir);

    impl Files {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
            let path = self.0.path().join(name);
            fs::write(&path, contents).unwrap();
            path
        }

        /// The message with the directory taken out of it.
        fn load(&self, cert: &str, key: &str) -> Result<LoadedCert, String> {
            let (cert_file, key_file) = (self.0.path().join(cert), self.0.path().join(key));
            load_cert(&CertPaths { cert_file, key_file }).map_err(|e| self.message(&e))
        }

        fn message(&self, error: &TlsFileError) -> String {
            error.to_string().replace(&format!("{}/", self.0.path().display()), "")
        }
    }

    #[test]
    fn a_subject_is_what_kubernetes_sees() {
        let node = subject(&[(O, "system:nodes".into()), (CN, "system:node:n1".into())]).unwrap();
        assert_eq!(node.to_string(), "CN=system:node:n1, O=system:nodes");
        assert_eq!(node.common_name(), Some("system:node:n1"));
        let printable = DnValue::PrintableString("system:nodes".try_into().unwrap());
        let same = subject(&[(CN, "system:node:n1".into()), (O, printable)]).unwrap();
        assert_eq!(node, same, "neither the order of attributes nor their string type matters");

        let name: (&[u64], DnValue) = (CN, "system:node:n1".into());
        for other in [
            subject(&[(O, "system:nodes".into()), (CN, "system:node:n2".into())]),
            subject(&[(O, "system:masters".into()), name.clone()]),
            subject(std::slice::from_ref(&name)),
            subject(&[(O, "system:nodes".into()), name, (UID, "1".into())]),
            subject(&[]),
        ] {
            assert_ne!(other, Ok(node.clone()));
        }
        let nobody = subject(&[]).unwrap();
        assert_eq!((nobody.common_name(), nobody.to_string()), (None, "(empty subject)".into()));
        assert_eq!(subject(&[(CN, "".into())]).unwrap().common_name(), None);
        let forged = subject(&[(CN, "a\nb, O=x".into())]).unwrap();
        assert_eq!(forged.to_string(), "CN=a\\nb\\, O=x");
        let teletex = DnValue::TeletexString("n1".try_into().unwrap());
        assert!(subject(&[(CN, teletex)]).unwrap_err().contains("unsupported type"));
    }

    #[test]
    fn a_certificate_tells_its_serial_and_its_time() {
        let (pem, _) = node();
        let info = cert_info(&CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
        assert_eq!(info.serial, "0AFF");
        assert_eq!(rfc3339(info.not_before), "2020-01-02T00:00:00Z");
        let second = Duration::from_secs(1);
        let path = Path::new("/x.crt");
        assert_eq!(info.check_time(path, info.not_before), Ok(()));
        assert_eq!(info.check_time(path, info.not_after), Ok(()));
        assert_eq!(info.validity(info.not_before - second), Validity::NotYet);
        assert_eq!(
            info.check_time(path, info.not_after + second).unwrap_err().to_string(),
            "/x.crt: the certificate of CN=system:node:n1, O=system:nodes expired on 2030-03-04"
        );
    }

    #[test]
    fn loads_a_pair_from_two_files_or_from_one() {
        let files = Files::new();
        let (pem, key) = node();
        files.write("c", &pem);
        files.write("k", key.serialize_pem());
        files.write("both", format!("{}# a comment\n{pem}", key.serialize_pem()));
        let two = files.load("c", "k").unwrap();
        let one = files.load("both", "both").unwrap();
        assert_eq!(two.info, one.info);
        assert_eq!(two.key(), one.key());
        assert_eq!(two.fingerprint, files.load("c", "k").unwrap().fingerprint);
        let (pem, key) = node();
        files.write("c", &pem);
        files.write("k", key.serialize_pem());
        assert_ne!(two.fingerprint, files.load("c", "k").unwrap().fingerprint);
        assert!(!format!("{two:?}").to_lowercase().contains("key"));
    }

    #[test]
    fn says_what_is_wrong_with_a_file() {
        let files = Files::new();
        let (pem, key) = node();
        files.write("c", &pem);
        files.write("chain", format!("{pem}{}", node().0));
        files.write("k", key.serialize_pem());
        files.write("other", KeyPair::generate().unwrap().serialize_pem());
        files.write("empty", "");
        files.write("garbage", [0xff, 0, b'-', b'\n', 7]);
        files.write("base64", "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n");
        files.write("open", "-----BEGIN CERTIFICATE-----\nAAAA\n");
        files.write("der", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
        files.write("badkey", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n");
        files.write(
            "locked",
            "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n",
        );
        fs::create_dir(files.0.path().join("dir")).unwrap();
        for (cert, key, expected) in [
            ("none", "k", "cannot read none: No such file or directory"),
            ("c", "none", "cannot read none: No such file or directory"),
            ("dir", "k", "dir: not a regular file"),
            ("c", "other", "other: the private key does not belong to the certificate in c"),
            (
                "chain",
                "other",
                "other: the private key does not belong to the certificate in chain (its first \
                 one: the leaf must come first)",
            ),
            ("empty", "k", "empty: contains no certificate (PEM, -----BEGIN CERTIFICATE-----)"),
            ("garbage", "k", "garbage: contains no certificate (PEM, -----BEGIN CERTIFICATE-----)"),
            ("k", "k", "k: contains no certificate (PEM, -----BEGIN CERTIFICATE-----)"),
            ("c", "c", "c: contains no private key (PEM, -----BEGIN PRIVATE KEY-----)"),
            ("der", "k", "der: cannot read the certificate: not an X.509 certificate"),
            ("c", "locked", "locked: the private key is encrypted; store it without a passphrase"),
        ] {
            assert_eq!(files.load(cert, key).unwrap_err(), expected, "{cert} {key}");
        }
        for (cert, key, expected) in [
            ("base64", "k", "base64: not a valid PEM file: "),
            ("open", "k", "open: not a valid PEM file: "),
            ("c", "badkey", "badkey: the private key is damaged or of a kind"),
        ] {
            let message = files.load(cert, key).unwrap_err();
            assert!(message.starts_with(expected), "{message}");
        }
        let none = load_ca(&files.0.path().join("none")).unwrap_err();
        assert!(none.is_missing());
    }

    #[test]
    fn loads_a_ca_bundle() {
        let files = Files::new();
        let bundle = format!("{}{}{}", node().0, node().0, node().1.serialize_pem());
        let ca = load_ca(&files.write("ca", bundle)).unwrap();
        assert_eq!((ca.count, ca.roots.len(), ca.certificates.len()), (2, 2, 2));
        let message =
            |contents: &str| files.message(&load_ca(&files.write("ca", contents)).unwrap_err());
        assert_eq!(message(""), "ca: contains no certificate (PEM, -----BEGIN CERTIFICATE-----)");
        assert_eq!(
            message("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
            "ca: no certificate in it can be used as a CA"
        );
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(bytes: Vec<u8>, cut in 0_usize..400, flip in 0_usize..400) {
            let _ = cert_info(&CertificateDer::from(bytes));
            let (pem, _) = node();
            let mut der = CertificateDer::from_pem_slice(pem.as_bytes()).unwrap().to_vec();
            if let Some(byte) = der.get_mut(flip) {
                *byte ^= 0x41;
            }
            let _ = cert_info(&CertificateDer::from(der.clone()));
            der.truncate(cut);
            let _ = cert_info(&CertificateDer::from(der));
        }
    }
}
