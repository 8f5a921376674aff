//! Issues certificates for the demo, the tests and the benches.

use base64::prelude::{BASE64_STANDARD, Engine as _};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PKCS_ED25519, SanType, SerialNumber,
    SignatureAlgorithm, SigningKey,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Validity of issued certificates.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// A certificate authority.
pub struct Pki {
    issuer: Issuer<'static, KeyPair>,
    key_der: Vec<u8>,
    certificate: rcgen::Certificate,
    /// Of the issued certificates too.
    keys: KeyType,
    /// Of certificates that are issued without a validity; by default [`Validity::usual`].
    validity: Option<Validity>,
    /// The number of serials of fixed length that it has used.
    serials: AtomicU64,
}

/// The type of keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum KeyType {
    /// ECDSA on P-256. The length of a signature varies (DER).
    #[default]
    P256,
    /// Ed25519. A signature has 64 bytes, and serial numbers have a fixed length too, so a certificate for the same names,
    /// and each message of a handshake, always has the same length.
    Ed25519,
}

impl KeyType {
    fn generate(self) -> io::Result<KeyPair> {
        let algorithm: &'static SignatureAlgorithm = match self {
            Self::P256 => &PKCS_ECDSA_P256_SHA256,
            Self::Ed25519 => &PKCS_ED25519,
        };
        KeyPair::generate_for(algorithm).map_err(io::Error::other)
    }
}

/// An issued certificate and its key.
#[derive(Debug, Clone)]
pub struct Issued {
    /// The certificate, PEM.
    pub cert_pem: String,
    /// The key, PEM (PKCS #8).
    pub key_pem: String,
    cert_der: CertificateDer<'static>,
    key_der: Vec<u8>,
}

/// Subject of a client certificate.
#[derive(Debug, Clone, Default)]
pub struct Subject {
    /// The common name: the user.
    pub user: String,
    /// The organizations: the groups. At most two, because rcgen keeps one value per attribute.
    pub groups: Vec<String>,
}

impl Subject {
    /// A user with groups.
    pub fn new(user: &str, groups: &[&str]) -> Self {
        Self { user: user.to_owned(), groups: groups.iter().map(|&g| g.to_owned()).collect() }
    }

    /// `system:node:NAME` in `system:nodes`.
    pub fn node(name: &str) -> Self {
        Self::new(&format!("system:node:{name}"), &["system:nodes"])
    }

    /// `kubernetes-admin` in `system:masters`.
    pub fn admin() -> Self {
        Self::new("kubernetes-admin", &["system:masters"])
    }
}

/// Validity period of a certificate.
#[derive(Debug, Clone, Copy)]
pub struct Validity {
    /// Start.
    pub not_before: SystemTime,
    /// End.
    pub not_after: SystemTime,
}

impl Validity {
    /// From an hour ago to 24 hours from now.
    pub fn usual() -> Self {
        let now = SystemTime::now();
        Self { not_before: now - Duration::from_secs(3600), not_after: now + LIFETIME }
    }

    /// From 24 hours ago to an hour ago.
    pub fn expired() -> Self {
        let now = SystemTime::now();
        Self { not_before: now - LIFETIME, not_after: now - Duration::from_secs(3600) }
    }
}

impl Pki {
    /// Creates an authority with this common name.
    pub fn new(name: &str) -> io::Result<Self> {
        Self::new_valid(name, Validity::usual())
    }

    /// Creates an authority with this common name and validity.
    pub fn new_valid(name: &str, validity: Validity) -> io::Result<Self> {
        Self::with_keys(name, validity, KeyType::P256)
    }

    /// Creates an authority for a simulation, with Ed25519 keys. `validity` is also that of the certificates that it
    /// issues without another one.
    pub fn new_ed25519(name: &str, validity: Validity) -> io::Result<Self> {
        let pki = Self::with_keys(name, validity, KeyType::Ed25519)?;
        Ok(Self { validity: Some(validity), ..pki })
    }

    fn with_keys(name: &str, validity: Validity, keys: KeyType) -> io::Result<Self> {
        let serials = AtomicU64::new(0);
        let mut params = params(name, validity)?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = next_serial(keys, &serials);
        let key = keys.generate()?;
        let certificate = params.self_signed(&key).map_err(io::Error::other)?;
        let key_der = key.serialize_der();
        let issuer = Issuer::new(params, key);
        Ok(Self { issuer, key_der, certificate, keys, validity: None, serials })
    }

    /// The authority's certificate, PEM.
    pub fn ca_pem(&self) -> String {
        self.certificate.pem()
    }

    /// The authority's certificate, DER.
    pub fn ca_der(&self) -> CertificateDer<'static> {
        self.certificate.der().clone()
    }

    /// The authority's own certificate and key.
    ///
    /// # Errors
    /// The key cannot be read.
    pub fn authority(&self) -> io::Result<Issued> {
        let key = KeyPair::try_from(&*self.key_der).map_err(io::Error::other)?;
        Ok(Issued {
            cert_pem: self.ca_pem(),
            key_pem: key.serialize_pem(),
            cert_der: self.ca_der(),
            key_der: self.key_der.clone(),
        })
    }

    /// Issues a serving certificate for loopback, `localhost` and `kubernetes.default.svc`.
    pub fn server(&self) -> io::Result<Issued> {
        let hosts = ["127.0.0.1", "::1", "localhost", "kubernetes.default.svc"];
        self.server_for(&hosts, self.default_validity())
    }

    /// Issues a serving certificate for these names and addresses.
    pub fn server_for(&self, hosts: &[&str], validity: Validity) -> io::Result<Issued> {
        let mut params = params("kube-apiserver", validity)?;
        for host in hosts {
            params.subject_alt_names.push(match host.parse::<IpAddr>() {
                Ok(address) => SanType::IpAddress(address),
                Err(_) => SanType::DnsName((*host).try_into().map_err(io::Error::other)?),
            });
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        self.issue(params)
    }

    /// Issues a client certificate with the default validity.
    pub fn client(&self, subject: &Subject) -> io::Result<Issued> {
        self.client_valid(subject, self.default_validity())
    }

    /// Issues a client certificate with this validity.
    pub fn client_valid(&self, subject: &Subject, validity: Validity) -> io::Result<Issued> {
        let mut params = params(&subject.user, validity)?;
        // `2.5.4.10` is the OID of the organization: as a second `DnType` it holds a second value.
        let organizations = [DnType::OrganizationName, DnType::CustomDnType(vec![2, 5, 4, 10])];
        if subject.groups.len() > organizations.len() {
            return Err(io::Error::other("a demo certificate holds at most two groups"));
        }
        for (attribute, group) in organizations.into_iter().zip(&subject.groups) {
            params.distinguished_name.push(attribute, group.as_str());
        }
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.issue(params)
    }

    /// Issues a client certificate of X.509 version 1, as `openssl x509 -req` does without `-extfile`.
    pub fn client_version_1(&self, subject: &Subject) -> io::Result<Issued> {
        let issued = self.client(subject)?;
        let certificate = content(&issued.cert_der);
        let [signed, algorithm, _] = elements(certificate)[..] else {
            return Err(io::Error::other("not a certificate"));
        };
        // Without the first element, the version, and the last one, the extensions (RFC 5280 section 4.1).
        let [_, fields @ .., _] = &elements(content(signed))[..] else {
            return Err(io::Error::other("not a certificate of version 3"));
        };
        let signed = encode(SEQUENCE, &fields.concat());
        let key = KeyPair::try_from(&*self.key_der).map_err(io::Error::other)?;
        let signature = key.sign(&signed).map_err(io::Error::other)?;
        let signature = encode(BIT_STRING, &[&[0], &*signature].concat());
        let der = encode(SEQUENCE, &[&*signed, algorithm, &signature].concat());
        let base64 = BASE64_STANDARD.encode(&der);
        let lines: Vec<_> = base64.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
        let (begin, end) = ("-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----");
        let cert_pem = format!("{begin}\n{}\n{end}\n", lines.join("\n"));
        Ok(Issued { cert_pem, cert_der: der.into(), ..issued })
    }

    /// Writes `ca.crt` into a directory and returns its path.
    pub fn write_ca(&self, dir: &Path) -> io::Result<PathBuf> {
        let path = dir.join("ca.crt");
        std::fs::write(&path, self.ca_pem())?;
        Ok(path)
    }

    fn default_validity(&self) -> Validity {
        self.validity.unwrap_or_else(Validity::usual)
    }

    fn issue(&self, mut params: CertificateParams) -> io::Result<Issued> {
        params.serial_number = next_serial(self.keys, &self.serials);
        let key = self.keys.generate()?;
        let certificate = params.signed_by(&key, &self.issuer).map_err(io::Error::other)?;
        Ok(Issued {
            cert_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            cert_der: certificate.into(),
            key_der: key.serialize_der(),
        })
    }
}

impl Issued {
    /// A certificate that another program, or a test, has issued.
    pub fn new(certificate: &rcgen::Certificate, key: &KeyPair) -> Self {
        Self {
            cert_pem: certificate.pem(),
            key_pem: key.serialize_pem(),
            cert_der: certificate.der().clone(),
            key_der: key.serialize_der(),
        }
    }

    /// The certificate followed by the key, PEM, as kubelet stores them.
    pub fn pair_pem(&self) -> String {
        format!("{}{}", self.cert_pem, self.key_pem)
    }

    /// The certificate, DER.
    pub fn cert_der(&self) -> CertificateDer<'static> {
        self.cert_der.clone()
    }

    /// The key, DER.
    pub fn key_der(&self) -> PrivateKeyDer<'static> {
        PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.key_der.clone()))
    }

    /// Writes `NAME.crt` and `NAME.key` (mode 0600) and returns their paths.
    pub fn write_to(&self, dir: &Path, name: &str) -> io::Result<(PathBuf, PathBuf)> {
        let (cert, key) = (dir.join(format!("{name}.crt")), dir.join(format!("{name}.key")));
        std::fs::write(&cert, &self.cert_pem)?;
        write_private(&key, &self.key_pem)?;
        Ok((cert, key))
    }

    /// Writes certificate and key to `NAME.pem` (mode 0600) and returns its path.
    pub fn write_pair(&self, dir: &Path, name: &str) -> io::Result<PathBuf> {
        let path = dir.join(format!("{name}.pem"));
        write_private(&path, &self.pair_pem())?;
        Ok(path)
    }
}

const SEQUENCE: u8 = 0x30;
const BIT_STRING: u8 = 0x03;

/// The first element in these DER bytes: its length, and its content.
fn first(der: &[u8]) -> (usize, &[u8]) {
    let (header, length) = match der[1] {
        long @ 0x80.. => {
            let bytes = &der[2..2 + usize::from(long & 0x7f)];
            let length = bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
            (2 + bytes.len(), length)
        }
        short => (2, usize::from(short)),
    };
    (header + length, &der[header..header + length])
}

fn content(der: &[u8]) -> &[u8] {
    first(der).1
}

/// The elements of a DER sequence.
fn elements(mut der: &[u8]) -> Vec<&[u8]> {
    let mut elements = Vec::new();
    while !der.is_empty() {
        let (element, rest) = der.split_at(first(der).0);
        elements.push(element);
        der = rest;
    }
    elements
}

/// A DER element of at most 64 KiB.
fn encode(tag: u8, content: &[u8]) -> Vec<u8> {
    let header = match (content.len() as u16).to_be_bytes() {
        [0, length @ ..0x80] => vec![tag, length],
        [0, length] => vec![tag, 0x81, length],
        [high, low] => vec![tag, 0x82, high, low],
    };
    [header.as_slice(), content].concat()
}

/// A kubeconfig for one user with a certificate, a token, or no credentials.
pub fn kubeconfig(
    server: &str,
    ca_pem: &str,
    certificate: Option<&Issued>,
    token: Option<&str>,
) -> String {
    let encode = |text: &str| BASE64_STANDARD.encode(text);
    let mut user = serde_json::json!({});
    if let Some(issued) = certificate {
        user["client-certificate-data"] = encode(&issued.cert_pem).into();
        user["client-key-data"] = encode(&issued.key_pem).into();
    }
    if let Some(token) = token {
        user["token"] = token.into();
    }
    // Every JSON document is YAML.
    serde_json::json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": "demo",
            "cluster": { "server": server, "certificate-authority-data": encode(ca_pem) },
        }],
        "users": [{ "name": "demo", "user": user }],
        "contexts": [{ "name": "demo", "context": { "cluster": "demo", "user": "demo" } }],
        "current-context": "demo",
    })
    .to_string()
}

/// A serial number of 8 bytes for keys of fixed length; for other keys, rcgen derives one from the key.
fn next_serial(keys: KeyType, serials: &AtomicU64) -> Option<SerialNumber> {
    // The first bit of a serial number is 0 and its first byte is not 0, so DER adds and omits no byte.
    const FIRST: u64 = 0x4000_0000_0000_0000;
    (keys == KeyType::Ed25519).then(|| (FIRST + serials.fetch_add(1, Relaxed)).into())
}

fn params(name: &str, validity: Validity) -> io::Result<CertificateParams> {
    let mut params = CertificateParams::new(Vec::new()).map_err(io::Error::other)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, name);
    params.use_authority_key_identifier_extension = true;
    let date_time = |time: SystemTime| {
        rcgen::date_time_ymd(1970, 1, 1) + time.duration_since(UNIX_EPOCH).unwrap_or_default()
    };
    params.not_before = date_time(validity.not_before);
    params.not_after = date_time(validity.not_after);
    Ok(params)
}

fn write_private(path: &Path, text: &str) -> io::Result<()> {
    use std::io::Write;
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(0o600);
    options.open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ed25519_certificates_have_a_fixed_length_and_the_given_validity() {
        let validity = Validity {
            not_before: UNIX_EPOCH + Duration::from_secs(1_767_225_600),
            not_after: UNIX_EPOCH + Duration::from_secs(2_000_000_000),
        };
        let lengths = || {
            let pki = Pki::new_ed25519("kubernetes", validity).unwrap();
            let hosts = ["10.0.0.1", "fd00::1", "kubernetes.default.svc"];
            let server = pki.server_for(&hosts, validity).unwrap();
            let client = pki.client(&Subject::node("n1")).unwrap();
            let (_, parsed) = x509_parser::parse_x509_certificate(&client.cert_der).unwrap();
            assert_eq!(parsed.validity().not_after.timestamp(), 2_000_000_000);
            assert_eq!(parsed.raw_serial().len(), 8);
            let names = [&pki.ca_der(), &server.cert_der, &client.cert_der];
            names.map(|certificate| certificate.len())
        };
        let first = lengths();
        for _ in 0..300 {
            assert_eq!(lengths(), first);
        }
    }
}
