//! A certificate authority of this host, which issues the serving certificate of a local listener.
//!
//! `jackstay kubeconfig --mode terminate` creates the CA and the certificate; clients on the host trust the CA
//! by their kubeconfigs. Both are valid for one year, and the CA is constrained to the names of the
//! certificate. The key of the CA exists only in the memory of that command: nothing on the host can issue
//! another certificate. `jackstay kubeconfig --renew` creates a new CA and a new certificate.
//!
//! Earlier versions stored the key, and a running jackstay renewed the certificate with it. A configuration
//! with `tls.issuer` still does that: [`renew_if_due`].

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jackstay_config::CertPaths;
use jackstay_sys::files;
use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    NameConstraints, SanType, SerialNumber,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::certificate::{self, CertInfo, Subject, X509Error};
use super::file_error::TlsFileError;
use super::pem_files::{self, LoadedCert};

const DAY: Duration = Duration::from_secs(24 * 3600);
/// Lifetime of the CA and of a serving certificate: one year, as kubeadm's serving certificates.
const LIFETIME: Duration = Duration::from_secs(365 * 24 * 3600);

/// Maximum length of a common name in characters (RFC 5280 appendix A.1, `ub-common-name`).
const MAX_COMMON_NAME: usize = 64;

/// Why the local CA cannot be used, or a certificate cannot be issued or renewed.
#[derive(Debug, thiserror::Error)]
pub enum LocalCaError {
    /// A certificate or key file cannot be used.
    #[error("{0}")]
    File(#[from] TlsFileError),
    /// The certificate in this file is not that of a CA.
    #[error("{0}: is not the certificate of a CA")]
    NotCa(PathBuf),
    /// The key in this file cannot sign.
    #[error("{0}: cannot sign with this key: {1}")]
    Key(PathBuf, #[source] rcgen::Error),
    /// The certificate of the CA in this file cannot issue others.
    #[error("{0}: {1}")]
    Issuer(PathBuf, #[source] rcgen::Error),
    /// The CA of this subject has expired.
    #[error("the local CA ({0}) has expired")]
    Expired(Subject),
    /// The text cannot be a DNS name in a certificate.
    #[error("{0:?} cannot stand in a certificate: it is neither a DNS name nor an IP address")]
    Name(String),
    /// A key cannot be generated, or a certificate cannot be signed.
    #[error("{0}")]
    Generate(#[source] rcgen::Error),
    /// The names in the certificate of this file cannot be read.
    #[error("{0}: {1}")]
    AltNames(PathBuf, #[source] X509Error),
    /// The key of the certificate in this file is in another file, so that both cannot be replaced in one step.
    #[error("{0}: cannot be renewed: its key is in another file")]
    SeparateKey(PathBuf),
    /// A generated certificate is not valid PEM.
    #[error("{0}")]
    Pem(#[source] pem::Error),
    /// A certificate cannot be read.
    #[error("{0}")]
    Certificate(#[source] X509Error),
    /// The file cannot be replaced.
    #[error("cannot replace {0}: {1}")]
    Replace(PathBuf, #[source] io::Error),
}

/// A new certificate and its key.
pub struct IssuedCertificate {
    /// The certificate, PEM.
    pub certificate: String,
    /// The key, PEM (PKCS #8). Secret.
    pub key: String,
}

impl IssuedCertificate {
    /// Certificate and key in one PEM.
    pub fn pair(&self) -> String {
        format!("{}{}", self.certificate, self.key)
    }
}

/// A serving certificate and the CA that has signed it, whose key no longer exists.
pub struct NewServingCert {
    /// The certificate of the CA, PEM.
    pub ca: String,
    /// The serving certificate and its key, PEM. Secret.
    pub pair: String,
}

/// Creates a CA with the common name `ca_name`, and a serving certificate for these DNS names and IP addresses,
/// to which the CA is constrained.
///
/// # Errors
/// A key cannot be generated, or a name is not valid in a certificate.
pub fn create_serving_cert(
    ca_name: &str,
    names: &[String],
    now: SystemTime,
) -> Result<NewServingCert, LocalCaError> {
    let (ca, created) = LocalCa::create(ca_name, names, now)?;
    let issued = ca.issue(names, now)?;
    Ok(NewServingCert { ca: created.certificate, pair: issued.pair() })
}

/// A CA with its key.
pub struct LocalCa {
    issuer: Issuer<'static, KeyPair>,
    info: CertInfo,
}

impl LocalCa {
    /// Loads a CA and its key.
    ///
    /// # Errors
    /// The file that cannot be used, with the reason.
    pub fn load(paths: &CertPaths) -> Result<Self, LocalCaError> {
        let loaded = pem_files::load_cert(paths)?;
        Self::new(&loaded, &paths.cert_file, &paths.key_file)
    }

    /// Creates a CA with the common name `name`, whose certificates are valid only for loopback addresses,
    /// `localhost` and `names`. Returns it with its certificate and key.
    ///
    /// # Errors
    /// A key cannot be generated, or one of `names` is not valid in the constraints of a CA.
    pub fn create(
        name: &str,
        names: &[String],
        now: SystemTime,
    ) -> Result<(Self, IssuedCertificate), LocalCaError> {
        let mut params = params(name, now - DAY, now + LIFETIME);
        params.name_constraints = Some(constraints(names)?);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().map_err(LocalCaError::Generate)?;
        let certificate = params.self_signed(&key).map_err(LocalCaError::Generate)?;
        let issued = IssuedCertificate { certificate: certificate.pem(), key: key.serialize_pem() };
        let new = Path::new("the new local CA");
        let loaded = pem_files::cert_from_pem(
            (new, issued.certificate.as_bytes()),
            (new, issued.key.as_bytes()),
        );
        Ok((Self::new(&loaded?, new, new)?, issued))
    }

    fn new(loaded: &LoadedCert, cert_file: &Path, key_file: &Path) -> Result<Self, LocalCaError> {
        let der = loaded.chain[0].clone();
        if !X509Certificate::from_der(&der).is_ok_and(|(_, certificate)| certificate.is_ca()) {
            return Err(LocalCaError::NotCa(cert_file.to_owned()));
        }
        let key = KeyPair::try_from(loaded.key())
            .map_err(|error| LocalCaError::Key(key_file.to_owned(), error))?;
        let issuer = Issuer::from_ca_cert_der(&der, key)
            .map_err(|error| LocalCaError::Issuer(cert_file.to_owned(), error))?;
        Ok(Self { issuer, info: loaded.info.clone() })
    }

    /// Subject and validity of the CA.
    pub fn info(&self) -> &CertInfo {
        &self.info
    }

    /// Issues a serving certificate for these DNS names and IP addresses. It expires no later than the CA.
    ///
    /// # Errors
    /// The CA has expired, or a name is not valid in a certificate.
    pub fn issue(
        &self,
        names: &[String],
        now: SystemTime,
    ) -> Result<IssuedCertificate, LocalCaError> {
        let not_after = (now + LIFETIME).min(self.info.not_after);
        if not_after <= now {
            return Err(LocalCaError::Expired(self.info.subject.clone()));
        }
        let first = names.first().map_or("jackstay", String::as_str);
        let mut params = params(first, now - DAY, not_after);
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        for name in names {
            params.subject_alt_names.push(match name.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName(
                    name.as_str().try_into().map_err(|_| LocalCaError::Name(name.clone()))?,
                ),
            });
        }
        let key = KeyPair::generate().map_err(LocalCaError::Generate)?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(LocalCaError::Generate)?;
        Ok(IssuedCertificate { certificate: certificate.pem(), key: key.serialize_pem() })
    }
}

/// Whether Go reads a CA with this DNS constraint (`crypto/x509`, `domainToReverseLabels`).
fn is_dns_constraint(name: &str) -> bool {
    name.split('.')
        .all(|label| !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_graphic()))
}

/// Permits loopback addresses, `localhost` and `names` (RFC 5280 section 4.2.1.10). A DNS name permits the names
/// below it too.
///
/// # Errors
/// A name is neither an IP address nor a DNS name that Go reads.
fn constraints(names: &[String]) -> Result<NameConstraints, LocalCaError> {
    let loopback = [
        GeneralSubtree::DnsName("localhost".to_owned()),
        GeneralSubtree::IpAddress(CidrSubnet::from_v4_prefix([127, 0, 0, 0], 8)),
        GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(Ipv6Addr::LOCALHOST.into(), 128)),
    ];
    let subtree = |name: &String| match name.parse::<IpAddr>() {
        Ok(address) if address.is_loopback() => None,
        Ok(address) => {
            let bits = if address.is_ipv4() { 32 } else { 128 };
            Some(Ok(GeneralSubtree::IpAddress(CidrSubnet::from_addr_prefix(address, bits))))
        }
        Err(_) if name == "localhost" => None,
        Err(_) if is_dns_constraint(name) => Some(Ok(GeneralSubtree::DnsName(name.clone()))),
        Err(_) => Some(Err(LocalCaError::Name(name.clone()))),
    };
    let others = names.iter().filter_map(subtree);
    Ok(NameConstraints {
        permitted_subtrees: loopback.into_iter().map(Ok).chain(others).collect::<Result<_, _>>()?,
        excluded_subtrees: Vec::new(),
    })
}

fn params(name: &str, not_before: SystemTime, not_after: SystemTime) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    let name: String = name.chars().take(MAX_COMMON_NAME).collect();
    params.distinguished_name.push(DnType::CommonName, name);
    params.use_authority_key_identifier_extension = true;
    let at = |time: SystemTime| {
        rcgen::date_time_ymd(1970, 1, 1) + time.duration_since(UNIX_EPOCH).unwrap_or_default()
    };
    params.not_before = at(not_before);
    params.not_after = at(not_after);
    // The serial must be unique; it need not be unpredictable (RFC 5280 section 4.1.2.2).
    params.serial_number = Some(SerialNumber::from(fastrand::u64(1..u64::MAX >> 1)));
    params
}

/// The DNS names and IP addresses of a certificate. Characters outside printable ASCII, which no valid name
/// contains, are escaped for messages.
///
/// # Errors
/// The certificate or its subject alternative names cannot be parsed.
pub fn subject_alt_names(der: &CertificateDer<'_>) -> Result<Vec<String>, X509Error> {
    let (_, certificate) = X509Certificate::from_der(der).map_err(|_| X509Error::NotX509)?;
    let names = certificate.subject_alternative_name().map_err(|_| X509Error::AltNames)?;
    let names = names.map(|extension| extension.value.general_names.as_slice());
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some(name.escape_default().to_string()),
        GeneralName::IPAddress(bytes) => {
            let v4 = <[u8; 4]>::try_from(*bytes).map(IpAddr::from);
            let address = v4.or_else(|_| <[u8; 16]>::try_from(*bytes).map(IpAddr::from));
            address.ok().map(|address| address.to_string())
        }
        _ => None,
    };
    let mut known = HashSet::new();
    let names = names.unwrap_or_default().iter().filter_map(name);
    Ok(names.filter(|name| known.insert(name.clone())).collect())
}

/// Whether `der` is a CA that is constrained to names and has signed `certificate`.
pub fn is_constrained_issuer(der: &CertificateDer<'_>, certificate: &CertificateDer<'_>) -> bool {
    let Ok((_, ca)) = X509Certificate::from_der(der) else { return false };
    ca.is_ca()
        && ca.name_constraints().is_ok_and(|constraints| constraints.is_some())
        && X509Certificate::from_der(certificate).is_ok_and(|(_, certificate)| {
            certificate.issuer() == ca.subject()
                && certificate.verify_signature(Some(ca.public_key())).is_ok()
        })
}

/// Whether both are CAs that are constrained to names and have the same subject, as the generations of one local CA.
pub fn are_constrained_with_one_name(one: &CertificateDer<'_>, other: &CertificateDer<'_>) -> bool {
    let subject = |der: &CertificateDer<'_>| {
        let (_, ca) = X509Certificate::from_der(der).ok()?;
        let is_constrained = ca.name_constraints().is_ok_and(|constraints| constraints.is_some());
        (ca.is_ca() && is_constrained).then(|| ca.subject().as_raw().to_vec())
    };
    subject(one).is_some_and(|one| subject(other) == Some(one))
}

/// The issuer of a certificate, such as `CN=kubernetes`; `?` if it cannot be parsed.
pub fn issuer_name(der: &CertificateDer<'_>) -> String {
    let issuer = X509Certificate::from_der(der).map(|(_, c)| c.issuer().to_string());
    issuer.map_or_else(|_| "?".to_owned(), |name| escape_controls(&name))
}

fn escape_controls(text: &str) -> String {
    let escaped = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.into() };
    text.chars().map(escaped).collect()
}

/// The time from which a certificate is to be renewed: after two thirds of its lifetime.
pub fn renewal_time(info: &CertInfo) -> SystemTime {
    let lifetime = info.not_after.duration_since(info.not_before).unwrap_or_default();
    info.not_before + lifetime * 2 / 3
}

/// Replaces the certificate in `serving` by one with the same names and a new key, issued by the CA in
/// `issuer`. Returns the new certificate, or `None` if the renewal is not due, or if a new certificate would
/// not expire later than the present one because the CA expires.
///
/// Certificate and key must be in one file, because two files cannot be replaced atomically.
///
/// # Errors
/// The file that cannot be used, with the reason. The certificate is then unchanged.
pub fn renew_if_due(
    serving: &CertPaths,
    issuer: &CertPaths,
    now: SystemTime,
) -> Result<Option<CertInfo>, LocalCaError> {
    let loaded = pem_files::load_cert(serving)?;
    if now < renewal_time(&loaded.info) {
        return Ok(None);
    }
    let file = &serving.cert_file;
    if *file != serving.key_file {
        return Err(LocalCaError::SeparateKey(file.clone()));
    }
    let names = subject_alt_names(&loaded.chain[0])
        .map_err(|error| LocalCaError::AltNames(file.clone(), error))?;
    let ca = LocalCa::load(issuer)?;
    if loaded.info.not_after >= ca.info().not_after {
        return Ok(None);
    }
    let issued = ca.issue(&names, now)?;
    let der =
        CertificateDer::from_pem_slice(issued.certificate.as_bytes()).map_err(LocalCaError::Pem)?;
    let info = certificate::cert_info(&der).map_err(LocalCaError::Certificate)?;
    files::replace(file, issued.pair().as_bytes(), files::PRIVATE)
        .map_err(|error| LocalCaError::Replace(file.clone(), error))?;
    Ok(Some(info))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::UnixTime;
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;

    fn write(dir: &Path, name: &str, text: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// A CA that is valid for ten years, as earlier versions created it.
    fn ca(dir: &Path, now: SystemTime) -> CertPaths {
        let mut params = params("test", now - DAY, now + 3650 * DAY);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap();
        CertPaths {
            cert_file: write(dir, "ca.crt", &certificate.pem()),
            key_file: write(dir, "ca.key", &key.serialize_pem()),
        }
    }

    fn serving(dir: &Path, ca: &CertPaths, now: SystemTime) -> CertPaths {
        let names = ["127.0.0.1", "::1", "localhost", "node-1"].map(ToOwned::to_owned);
        let issued = LocalCa::load(ca).unwrap().issue(&names, now).unwrap();
        let file = write(dir, "serving.pem", &issued.pair());
        CertPaths { cert_file: file.clone(), key_file: file }
    }

    #[test]
    fn renew_if_due_renews_after_two_thirds_of_the_lifetime() {
        let dir = tempfile::tempdir().unwrap();
        let start = UNIX_EPOCH + 20_000 * DAY;
        let ca = ca(dir.path(), start);
        let pair = serving(dir.path(), &ca, start);
        let first = pem_files::load_cert(&pair).unwrap();
        assert_eq!(renew_if_due(&pair, &ca, start + 240 * DAY).unwrap(), None);
        let later = start + 250 * DAY;
        let info = renew_if_due(&pair, &ca, later).unwrap().unwrap();
        assert_eq!(info.not_after, later + LIFETIME);
        let second = pem_files::load_cert(&pair).unwrap();
        assert_eq!(second.info, info);
        assert_ne!(second.info.serial, first.info.serial);
        assert_ne!(second.key(), first.key());
        assert_eq!(subject_alt_names(&second.chain[0]), subject_alt_names(&first.chain[0]));
        assert_eq!(
            subject_alt_names(&second.chain[0]).unwrap(),
            ["127.0.0.1", "::1", "localhost", "node-1"]
        );
        let mode = std::fs::metadata(&pair.cert_file).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(renew_if_due(&pair, &ca, later).unwrap(), None);
    }

    #[test]
    fn issue_limits_the_validity_to_that_of_the_ca() {
        let dir = tempfile::tempdir().unwrap();
        let start = UNIX_EPOCH + 20_000 * DAY;
        let ca = ca(dir.path(), start);
        let end = LocalCa::load(&ca).unwrap().info().not_after;
        let pair = serving(dir.path(), &ca, end - 10 * DAY);
        assert_eq!(pem_files::load_cert(&pair).unwrap().info.not_after, end);
        assert_eq!(renew_if_due(&pair, &ca, end - DAY).unwrap(), None);
        assert!(LocalCa::load(&ca).unwrap().issue(&[], end + DAY).is_err());
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    fn der(pem: &str) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
    }

    #[test]
    fn subject_alt_names_lists_no_name_twice() {
        let repeated = names(&["localhost", "127.0.0.1", "localhost"]);
        let created = create_serving_cert("test", &repeated, UNIX_EPOCH + 20_000 * DAY).unwrap();
        assert_eq!(subject_alt_names(&der(&created.pair)).unwrap(), ["localhost", "127.0.0.1"]);
    }

    #[test]
    fn create_serving_cert_is_valid_for_one_year_as_its_ca() {
        let now = UNIX_EPOCH + 20_000 * DAY;
        let created = create_serving_cert("test", &names(&["127.0.0.1", "node-1"]), now).unwrap();
        let (ca, serving) = (der(&created.ca), der(&created.pair));
        for certificate in [&ca, &serving] {
            let info = certificate::cert_info(certificate).unwrap();
            assert_eq!(info.not_after, now + 365 * DAY);
        }
        assert!(is_constrained_issuer(&ca, &serving));
        assert!(!is_constrained_issuer(&serving, &serving));
        let other = create_serving_cert("test", &names(&["127.0.0.1"]), now).unwrap();
        assert!(!is_constrained_issuer(&der(&other.ca), &serving), "another key");
        // The only key is that of the serving certificate.
        assert_eq!(created.pair.matches("PRIVATE KEY-----").count(), 2);
        assert!(!created.ca.contains("PRIVATE"));
    }

    /// Verifies that `leaf` is valid for `name` with `ca` as the only root, as clients with rustls do.
    fn verify_with_webpki(
        ca: &str,
        leaf: &str,
        name: &str,
        now: SystemTime,
    ) -> Result<(), rustls::Error> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(der(ca)).unwrap();
        let provider = rustls::crypto::aws_lc_rs::default_provider();
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.into(), provider.into());
        let name = rustls::pki_types::ServerName::try_from(name.to_owned()).unwrap();
        let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap());
        let result = verifier.build().unwrap().verify_server_cert(&der(leaf), &[], &name, &[], now);
        result.map(drop)
    }

    #[test]
    fn create_ca_certificates_for_other_names_are_refused() {
        let now = UNIX_EPOCH + 20_000 * DAY;
        let permitted = names(&["10.1.2.3", "fd00::1", "node-1"]);
        let (ca, created) = LocalCa::create("test", &permitted, now).unwrap();
        for (name, valid) in [
            ("127.0.0.1", true),
            ("127.9.9.9", true),
            ("::1", true),
            ("localhost", true),
            ("10.1.2.3", true),
            ("fd00::1", true),
            ("node-1", true),
            ("10.1.2.4", false),
            ("fd00::2", false),
            ("node-2", false),
            ("kubernetes.default.svc", false),
            ("example.com", false),
        ] {
            let leaf = ca.issue(&names(&[name]), now).unwrap();
            let result = verify_with_webpki(&created.certificate, &leaf.certificate, name, now);
            assert_eq!(result.is_ok(), valid, "{name}: {result:?}");
            // A permitted name beside it changes nothing.
            let both = ca.issue(&names(&["localhost", name]), now).unwrap();
            let result =
                verify_with_webpki(&created.certificate, &both.certificate, "localhost", now);
            assert_eq!(result.is_ok(), valid, "localhost and {name}: {result:?}");
        }
    }

    #[test]
    fn create_refuses_names_that_go_does_not_read_in_constraints() {
        let now = UNIX_EPOCH + 20_000 * DAY;
        for name in ["my host", "node-1.example.com.", "nœud-1", "node..1", ".node", "", "a\u{7f}"]
        {
            let result = LocalCa::create("test", &names(&[name]), now);
            assert!(matches!(&result, Err(LocalCaError::Name(of)) if of == name), "{name}");
        }
        let long = format!("jackstay on {}", "a".repeat(200));
        let (_, created) = LocalCa::create(&long, &names(&["node_1"]), now).unwrap();
        assert!(issuer_name(&der(&created.certificate)).len() < 70);
    }

    #[test]
    fn renew_if_due_with_unusable_files_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let start = UNIX_EPOCH + 20_000 * DAY;
        let ca = ca(dir.path(), start);
        let pair = serving(dir.path(), &ca, start);
        let later = start + 300 * DAY;
        let before = std::fs::read(&pair.cert_file).unwrap();
        let error = renew_if_due(&pair, &pair, later).unwrap_err();
        assert!(matches!(&error, LocalCaError::NotCa(file) if *file == pair.cert_file), "{error}");
        let missing_key = CertPaths { key_file: dir.path().join("none"), ..ca.clone() };
        let error = renew_if_due(&pair, &missing_key, later).unwrap_err();
        assert!(matches!(&error, LocalCaError::File(error) if error.is_missing()), "{error}");
        let two_files = CertPaths { key_file: write(dir.path(), "k", ""), ..pair.clone() };
        std::fs::copy(&pair.key_file, &two_files.key_file).unwrap();
        let error = renew_if_due(&two_files, &ca, later).unwrap_err();
        assert!(matches!(error, LocalCaError::SeparateKey(_)), "{error}");
        assert_eq!(std::fs::read(&pair.cert_file).unwrap(), before);
    }
}
