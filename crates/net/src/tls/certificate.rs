//! The subject, the validity and the serial of an X.509 certificate.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::CertificateDer;
use x509_parser::asn1_rs::{Any, Tag};
use x509_parser::prelude::{ASN1Time, FromDer, X509Certificate, X509Name, X509Version};

use super::file_error::{TlsFileError, TlsFileProblem};

macro_rules! version_1_remedy {
    () => {
        "reissue it as version 3 (`openssl x509 -req … -extfile FILE`, with `extendedKeyUsage` or \
         `subjectAltName` in FILE)"
    };
}

/// Why a certificate of X.509 version 1 is refused, and what to do. webpki accepts version 3 only.
pub const VERSION_1: &str = concat!("the certificate is X.509 version 1: ", version_1_remedy!());
/// What to do about a certificate of X.509 version 1.
pub const VERSION_1_REMEDY: &str = version_1_remedy!();
/// What follows for an identity with a certificate of X.509 version 1: jackstay shows it to the apiservers, which
/// accept it, but cannot verify it when a client presents it.
pub const VERSION_1_EFFECT: &str = "clients that use it get 401";

const OID_COMMON_NAME: &str = "2.5.4.3";
const OID_ORGANIZATION: &str = "2.5.4.10";
/// The attribute from which kube-apiserver (1.33 and later) takes the user's UID.
const OID_KUBERNETES_UID: &str = "1.3.6.1.4.1.57683.2";
/// The attribute `uid` of RFC 4519, which kube-apiserver ignores. [`Subject`] compares it nevertheless, apart
/// from Kubernetes UIDs: subjects that differ only in it are different users for jackstay.
const OID_RFC4519_UID: &str = "0.9.2342.19200300.100.1.1";

/// Why a DER certificate cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum X509Error {
    /// It is not an X.509 certificate.
    #[error("not an X.509 certificate")]
    NotX509,
    /// Bytes follow the certificate.
    #[error("bytes after the end of the certificate")]
    TrailingBytes,
    /// A name has a string type that Go does not read.
    #[error("a name in it has the unsupported type {0}")]
    NameType(Tag),
    /// A name is not valid text of its string type.
    #[error("a name in it is not valid text of its type")]
    NameText,
    /// Its subject alternative names cannot be parsed.
    #[error("its subject alternative names cannot be read")]
    AltNames,
}

/// The subject of a certificate as kube-apiserver reads it. Equal subjects are the same user with the same
/// groups and the same UID.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Subject {
    cn: Vec<String>,
    organizations: Vec<String>,
    kubernetes_uid: Vec<String>,
    rfc4519_uid: Vec<String>,
}

impl Subject {
    /// Reads the subject of a DER certificate. A name that versions of Go decode differently is an error, since its
    /// equality with another name would be ambiguous.
    pub fn from_der(der: &CertificateDer<'_>) -> Result<Self, X509Error> {
        Self::of(&parse(der)?)
    }

    /// The user name for kube-apiserver: the last common name, as in Go's `crypto/x509`. `None` if it is
    /// missing or empty; such a certificate authenticates no user.
    pub fn common_name(&self) -> Option<&str> {
        self.cn.last().map(String::as_str).filter(|cn| !cn.is_empty())
    }

    /// The groups, sorted.
    pub fn organizations(&self) -> &[String] {
        &self.organizations
    }

    fn of(certificate: &X509Certificate<'_>) -> Result<Self, X509Error> {
        Self::of_name(certificate.subject())
    }

    fn of_name(name: &X509Name<'_>) -> Result<Self, X509Error> {
        let mut subject = Self::default();
        for attribute in name.iter_attributes() {
            let list = match attribute.attr_type().to_id_string().as_str() {
                OID_COMMON_NAME => &mut subject.cn,
                OID_ORGANIZATION => &mut subject.organizations,
                OID_KUBERNETES_UID => &mut subject.kubernetes_uid,
                OID_RFC4519_UID => &mut subject.rfc4519_uid,
                _ => continue,
            };
            list.push(text(attribute.attr_value())?);
        }
        subject.organizations.sort();
        Ok(subject)
    }
}

impl fmt::Display for Subject {
    /// `CN=system:node:n1, O=system:nodes`, with control characters escaped for logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.cn.iter().map(|v| ("CN", v));
        let groups = self.organizations.iter().map(|v| ("O", v));
        let uids = self.kubernetes_uid.iter().map(|v| ("UID", v));
        let ignored = self.rfc4519_uid.iter().map(|v| ("uid", v));
        let mut separator = "";
        for (key, value) in names.chain(groups).chain(uids).chain(ignored) {
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

/// Subject, validity and serial of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertInfo {
    /// Subject.
    pub subject: Subject,
    /// Start of the validity.
    pub not_before: SystemTime,
    /// End of the validity.
    pub not_after: SystemTime,
    /// Serial number in upper-case hex, as `openssl x509 -serial` prints it.
    pub serial: String,
    /// Whether it is X.509 version 1, which has no extensions. kube-apiserver accepts such a certificate of a
    /// client; jackstay can show one to an apiserver, but cannot verify that of a client.
    pub is_version_1: bool,
}

/// Whether a certificate is valid at a time. A greater value is more useful.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Validity {
    /// The validity has ended.
    Expired,
    /// The validity has not begun, or the clock of this host is slow.
    NotYet,
    /// The certificate is valid.
    Valid,
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

    /// Why the certificate is not valid at `now`, with the time since when: `certificate expired 3 h ago, on
    /// 2026-07-26T12:34:56Z`. `None` if it is valid.
    pub fn invalidity(&self, now: SystemTime) -> Option<String> {
        let span = |from: SystemTime, to: SystemTime| {
            format_span(to.duration_since(from).unwrap_or_default())
        };
        match self.validity(now) {
            Validity::Valid => None,
            Validity::Expired => Some(format!(
                "certificate expired {} ago, on {}",
                span(self.not_after, now),
                format_seconds(self.not_after)
            )),
            Validity::NotYet => Some(format!(
                "certificate is not valid for another {}, before {}; is this machine's clock right?",
                span(now, self.not_before),
                format_seconds(self.not_before)
            )),
        }
    }

    /// Whether a valid client certificate should have been renewed already: kubelet renews with at least a tenth of the
    /// lifetime left (`jitteryDuration` in client-go's `certificate_manager.go`), kubeadm earlier. The serving
    /// certificate of a local CA is replaced with three weeks left (`jackstay_operator::kubeconfig::setup::renewal`).
    pub fn is_renewal_overdue(&self, now: SystemTime) -> bool {
        let span = |from: SystemTime, to: SystemTime| to.duration_since(from).unwrap_or_default();
        span(now, self.not_after) < span(self.not_before, self.not_after) / 10
    }

    /// The warning that a valid certificate should have been renewed already; `None` if it is not overdue.
    pub fn renewal_overdue(&self, now: SystemTime) -> Option<String> {
        (self.validity(now) == Validity::Valid && self.is_renewal_overdue(now)).then(|| {
            format!(
                "certificate expires in {}, on {}: less than a tenth of its lifetime is left, and it was not renewed",
                format_span(self.not_after.duration_since(now).unwrap_or_default()),
                format_seconds(self.not_after)
            )
        })
    }

    /// An error naming `path` unless the certificate is valid at `now`.
    pub fn check_time(&self, path: &Path, now: SystemTime) -> Result<(), TlsFileError> {
        let (problem, message) = match self.validity(now) {
            Validity::Valid => return Ok(()),
            Validity::Expired => (
                TlsFileProblem::Expired,
                format!(
                    "the certificate of {} expired on {}",
                    self.subject,
                    format_utc(self.not_after, "%F")
                ),
            ),
            Validity::NotYet => (
                TlsFileProblem::Other,
                format!(
                    "the certificate of {} is not valid before {}; is this machine's clock right?",
                    self.subject,
                    format_seconds(self.not_before)
                ),
            ),
        };
        Err(TlsFileError::new(path, problem, message))
    }
}

/// The first and the last second at which a DER certificate is valid.
pub fn validity(der: &CertificateDer<'_>) -> Result<(SystemTime, SystemTime), X509Error> {
    let certificate = parse(der)?;
    let validity = certificate.validity();
    Ok((system_time(validity.not_before), system_time(validity.not_after)))
}

/// Reads a DER certificate.
pub fn cert_info(der: &CertificateDer<'_>) -> Result<CertInfo, X509Error> {
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
        is_version_1: certificate.version() == X509Version::V1,
    })
}

/// The public key of a DER certificate of any version, as a DER `SubjectPublicKeyInfo`.
pub(super) fn public_key(der: &CertificateDer<'_>) -> Option<Vec<u8>> {
    parse(der).ok().map(|certificate| certificate.public_key().raw.to_vec())
}

/// A duration in its largest unit: `3 h`.
fn format_span(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

/// A time in UTC, for an error message: `2026-07-26T12:34:56Z`.
pub(super) fn format_seconds(time: SystemTime) -> String {
    format_utc(time, "%FT%TZ")
}

/// A time in UTC, for an error message.
fn format_utc(time: SystemTime, format: &str) -> String {
    match jiff::Timestamp::try_from(time) {
        Ok(time) => time.strftime(format).to_string(),
        // The latest time that jiff represents is in the year 9999.
        Err(_) => "a date after the year 9999".to_owned(),
    }
}

/// Times before 1970 become 1970: no certificate in use is that old.
pub(super) fn system_time(time: ASN1Time) -> SystemTime {
    let seconds = u64::try_from(time.timestamp()).unwrap_or(0);
    UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(UNIX_EPOCH)
}

pub(super) fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, X509Error> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) => Err(X509Error::TrailingBytes),
        Err(_) => Err(X509Error::NotX509),
    }
}

/// A name for people: as a [`Subject`] if it has a part of one, else all its parts. Control characters are escaped.
pub(super) fn name_text(name: &X509Name<'_>) -> String {
    match Subject::of_name(name) {
        Ok(subject) if subject != Subject::default() => subject.to_string(),
        _ => {
            let all: String = name.to_string().chars().flat_map(escaped).collect();
            if all.is_empty() { Subject::default().to_string() } else { all }
        }
    }
}

fn escaped(c: char) -> impl Iterator<Item = char> {
    let control = c.is_control().then(|| c.escape_default());
    let plain = (!c.is_control()).then_some(c);
    control.into_iter().flatten().chain(plain)
}

/// A name as text, as Go reads it (`crypto/x509/parser.go`, `parseASN1String`). Text that versions of Go read
/// differently is an error: T61 beyond ASCII, BMP with surrogates or zeros.
fn text(value: &Any<'_>) -> Result<String, X509Error> {
    let is_valid: fn(u8) -> bool = match value.tag() {
        Tag::Utf8String => |_| true,
        Tag::BmpString => return bmp_text(value.data),
        Tag::T61String | Tag::Ia5String => |byte| byte.is_ascii(),
        Tag::PrintableString => is_printable,
        Tag::NumericString => |byte| byte.is_ascii_digit() || byte == b' ',
        other => return Err(X509Error::NameType(other)),
    };
    match std::str::from_utf8(value.data) {
        Ok(text) if text.bytes().all(is_valid) => Ok(text.to_owned()),
        _ => Err(X509Error::NameText),
    }
}

/// A character that Go accepts in a `PrintableString`: those of X.680, `*` and `&`.
fn is_printable(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b" '()+,-./:=?*&".contains(&byte)
}

fn bmp_text(data: &[u8]) -> Result<String, X509Error> {
    let (units, rest) = data.as_chunks::<2>();
    let chars = units.iter().map(|unit| {
        let c = char::from_u32(u32::from(u16::from_be_bytes(*unit)));
        c.filter(|c| *c != '\0').ok_or(X509Error::NameText)
    });
    if rest.is_empty() { chars.collect() } else { Err(X509Error::NameText) }
}

/// Why no version of Go reads a part of a name (`parseName`). Some read T61, BMP and Universal strings that others do
/// not.
pub(super) fn name_defect(name: &X509Name<'_>) -> Option<X509Error> {
    name.iter_attributes().find_map(|attribute| match text(attribute.attr_value()) {
        Err(X509Error::NameText)
            if !matches!(attribute.attr_value().tag(), Tag::T61String | Tag::BmpString) =>
        {
            Some(X509Error::NameText)
        }
        _ => None,
    })
}
