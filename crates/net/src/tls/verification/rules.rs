//! The parts of a certificate on which Go's `crypto/x509` decides and webpki does not.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;
use x509_parser::oid_registry::Oid;
use x509_parser::prelude::{ExtendedKeyUsage, X509Certificate};
use x509_parser::public_key::PublicKey;

use crate::tls::certificate::{X509Error, name_defect, name_text, parse, system_time};

/// The extensions that Go evaluates or ignores even if they are critical (`crypto/x509/parser.go`,
/// `processExtensions`): subject key identifier, key usage, subject alternative name, basic constraints, name
/// constraints, CRL distribution points, certificate policies, authority key identifier, extended key usage,
/// authority information access.
const HANDLED_BY_GO: [&str; 10] = [
    "2.5.29.14",
    "2.5.29.15",
    "2.5.29.17",
    "2.5.29.19",
    "2.5.29.30",
    "2.5.29.31",
    "2.5.29.32",
    "2.5.29.35",
    "2.5.29.37",
    "1.3.6.1.5.5.7.1.1",
];
/// The critical extensions of a certificate in a chain that webpki evaluates (`Cert::from_input`).
const HANDLED_BY_WEBPKI: [&str; 6] =
    ["2.5.29.15", "2.5.29.17", "2.5.29.19", "2.5.29.30", "2.5.29.31", "2.5.29.37"];
/// The RSA keys that rustls verifies signatures with.
const RSA_BITS: RangeInclusive<usize> = 2048..=8192;

/// What a certificate is to be used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// A server shows it.
    Server,
    /// A client shows it.
    Client,
}

impl Purpose {
    /// The name of the extended key usage in configurations of `OpenSSL`.
    pub fn usage(self) -> &'static str {
        match self {
            Self::Server => "serverAuth",
            Self::Client => "clientAuth",
        }
    }
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Server => "server authentication",
            Self::Client => "client authentication",
        })
    }
}

/// Why a CA certificate of a bundle cannot sign the certificates below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IssuerDefect {
    /// `basicConstraints` is missing or says CA:FALSE.
    NotCa,
    /// `keyUsage` lacks `keyCertSign`.
    NoCertSign,
    /// Its validity has ended.
    Expired,
    /// Its validity has not begun.
    NotYetValid,
    /// More CA certificates than its path length permits are below it.
    PathLength,
    /// Its extended key usage excludes the purpose.
    Usage,
    /// It has this critical extension, which is not evaluated.
    CriticalExtension(String),
}

/// The parts of one certificate.
#[derive(Debug, Clone)]
pub struct CertificateRules {
    /// The subject for people.
    pub subject: String,
    /// The issuer for people.
    pub issuer: String,
    /// The start of the validity.
    pub not_before: SystemTime,
    /// The end of the validity.
    pub not_after: SystemTime,
    /// The key, if rustls verifies no signatures with it: `an RSA key of 1024 bits`.
    pub unsupported_key: Option<String>,
    /// The name of the signature algorithm, or its OID.
    pub signature: String,
    /// Extended key usages, `None` without the extension.
    pub usages: Option<Vec<String>>,
    /// The critical extensions that Go does not evaluate.
    unhandled_by_go: Option<String>,
    /// The critical extension that webpki does not evaluate.
    pub unhandled_by_webpki: Option<String>,
    /// Why Go does not read it, although webpki does.
    pub defect: Option<String>,
    /// CA of `basicConstraints`; `None` without the extension.
    pub is_ca: Option<bool>,
    path_length: Option<u32>,
    /// `keyCertSign` of `keyUsage`; `None` without the extension.
    cert_sign: Option<bool>,
    is_version_3: bool,
}

impl CertificateRules {
    /// Reads a DER certificate.
    ///
    /// # Errors
    /// It is not an X.509 certificate.
    pub fn from_der(der: &CertificateDer<'_>) -> Result<Self, X509Error> {
        let certificate = parse(der)?;
        let extensions = certificate.extensions();
        let critical = |handled: &[&str]| {
            let ids = extensions.iter().filter(|extension| extension.critical);
            ids.map(|extension| extension.oid.to_id_string()).find(|id| !handled.contains(&&**id))
        };
        let constraints = certificate.basic_constraints().ok().flatten().map(|found| found.value);
        let usages = certificate.extended_key_usage().ok().flatten().map(|found| found.value);
        let key_usage = certificate.key_usage().ok().flatten().map(|found| found.value);
        Ok(Self {
            subject: name_text(certificate.subject()),
            issuer: name_text(certificate.issuer()),
            not_before: system_time(certificate.validity().not_before),
            not_after: system_time(certificate.validity().not_after),
            unsupported_key: unsupported_key(&certificate),
            signature: signature_name(&certificate.signature_algorithm.algorithm),
            usages: usages.map(usage_names),
            unhandled_by_go: critical(&HANDLED_BY_GO),
            unhandled_by_webpki: critical(&HANDLED_BY_WEBPKI),
            defect: defect(&certificate),
            is_ca: constraints.map(|constraints| constraints.ca),
            path_length: constraints.and_then(|constraints| constraints.path_len_constraint),
            // Go ignores a key usage without a bit.
            cert_sign: key_usage
                .filter(|usage| usage.flags != 0)
                .map(x509_parser::extensions::KeyUsage::key_cert_sign),
            is_version_3: certificate.version() == x509_parser::x509::X509Version::V3,
        })
    }

    /// Whether the extended key usage permits the purpose: it is absent or empty, contains the purpose or
    /// `anyExtendedKeyUsage` (`crypto/x509/verify.go`, `checkChainForKeyUsage`).
    pub fn permits(&self, purpose: Purpose) -> bool {
        self.usages.as_ref().is_none_or(|usages| {
            usages.is_empty() || usages.iter().any(|usage| usage == purpose.usage() || usage == ANY)
        })
    }

    /// The critical extension that Go does not evaluate.
    pub fn unhandled_critical(&self) -> Option<&str> {
        self.unhandled_by_go.as_deref()
    }

    /// Why Go does not accept a signature of this CA (`crypto/x509/x509.go`, `CheckSignatureFrom`). webpki ignores
    /// `keyUsage`, and reads no extension of a trust anchor but the name constraints.
    pub fn signing_defect(&self) -> Option<IssuerDefect> {
        if self.is_ca == Some(false) || self.is_version_3 && self.is_ca.is_none() {
            return Some(IssuerDefect::NotCa);
        }
        (self.cert_sign == Some(false)).then_some(IssuerDefect::NoCertSign)
    }

    /// Why Go does not accept this certificate of a bundle as the CA of a chain with `intermediates` CA certificates
    /// below it (`crypto/x509/verify.go`, `isValid`, `checkChainForKeyUsage`).
    pub fn anchor_defect(
        &self,
        intermediates: usize,
        purpose: Purpose,
        now: SystemTime,
    ) -> Option<IssuerDefect> {
        if let Some(defect) = self.signing_defect() {
            return Some(defect);
        }
        if let Some(id) = &self.unhandled_by_go {
            return Some(IssuerDefect::CriticalExtension(id.clone()));
        }
        if now > self.not_after {
            return Some(IssuerDefect::Expired);
        }
        if now < self.not_before {
            return Some(IssuerDefect::NotYetValid);
        }
        let is_too_long = |most: u32| intermediates > usize::try_from(most).unwrap_or(usize::MAX);
        if self.path_length.is_some_and(is_too_long) {
            return Some(IssuerDefect::PathLength);
        }
        (!self.permits(purpose)).then_some(IssuerDefect::Usage)
    }
}

/// `anyExtendedKeyUsage` (RFC 5280 section 4.2.1.12).
const ANY: &str = "anyExtendedKeyUsage";

fn usage_names(usages: &ExtendedKeyUsage<'_>) -> Vec<String> {
    let known = [
        (usages.any, ANY),
        (usages.server_auth, "serverAuth"),
        (usages.client_auth, "clientAuth"),
        (usages.code_signing, "codeSigning"),
        (usages.email_protection, "emailProtection"),
        (usages.time_stamping, "timeStamping"),
        (usages.ocsp_signing, "OCSPSigning"),
    ];
    let known = known.into_iter().filter(|(present, _)| *present).map(|(_, name)| name.to_owned());
    known.chain(usages.other.iter().map(Oid::to_id_string)).collect()
}

/// Go reads no certificate with an extension twice, or with a name in another string type than its own
/// (`crypto/x509/parser.go`, `parseCertificate`).
fn defect(certificate: &X509Certificate<'_>) -> Option<String> {
    if certificate.extensions_map().is_err() {
        return Some("has an extension twice".to_owned());
    }
    let defect = name_defect(certificate.subject()).or_else(|| name_defect(certificate.issuer()));
    defect.map(|error| format!("cannot be read ({error})"))
}

fn unsupported_key(certificate: &X509Certificate<'_>) -> Option<String> {
    let key = certificate.public_key();
    match key.parsed().ok()? {
        PublicKey::RSA(rsa) => {
            let bits = rsa.key_size();
            (!RSA_BITS.contains(&bits)).then(|| format!("an RSA key of {bits} bits"))
        }
        PublicKey::EC(_) => {
            let curve = key.algorithm.parameters.as_ref()?.as_oid().ok()?.to_id_string();
            match curve.as_str() {
                "1.2.840.10045.3.1.7" | "1.3.132.0.34" | "1.3.132.0.35" => None,
                "1.3.132.0.33" => Some("a P-224 key".to_owned()),
                "1.3.132.0.10" => Some("a secp256k1 key".to_owned()),
                other => Some(format!("a key of the curve {other}")),
            }
        }
        _ => None,
    }
}

/// The name of a signature algorithm that webpki does not verify, or its OID.
fn signature_name(algorithm: &Oid<'_>) -> String {
    let id = algorithm.to_id_string();
    let name = match id.as_str() {
        "1.2.840.113549.1.1.4" => "MD5 with RSA",
        "1.2.840.113549.1.1.5" => "SHA-1 with RSA",
        "1.2.840.113549.1.1.10" => "RSA-PSS",
        "1.2.840.10045.4.1" => "SHA-1 with ECDSA",
        "1.2.840.10040.4.3" => "SHA-1 with DSA",
        "1.2.840.113549.1.1.11" => "SHA-256 with RSA",
        "1.2.840.113549.1.1.12" => "SHA-384 with RSA",
        "1.2.840.113549.1.1.13" => "SHA-512 with RSA",
        "1.2.840.10045.4.3.2" => "SHA-256 with ECDSA",
        "1.2.840.10045.4.3.3" => "SHA-384 with ECDSA",
        "1.2.840.10045.4.3.4" => "SHA-512 with ECDSA",
        _ => return id,
    };
    name.to_owned()
}
