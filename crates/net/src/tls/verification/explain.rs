//! Turns an error of webpki into a [`CertificateRefusal`]. The error does not say which certificate of the chain it is
//! about, so the rules of each are evaluated again.

use std::net::IpAddr;
use std::path::Path;
use std::time::SystemTime;

use rustls::pki_types::CertificateDer;

use super::rules::{CertificateRules, IssuerDefect, Purpose};
use crate::tls::certificate::{self, X509Error, format_seconds};
use crate::tls::refusal::{CertificateRefusal, RefusalKind};

/// Names of a certificate in a sentence, at most this number.
const MAX_NAMES: usize = 8;
/// How a certificate is reissued with other extensions.
const REISSUE: &str = "reissue it";

/// A chain that was refused.
pub(super) struct RefusedChain<'a> {
    pub(super) leaf: &'a CertificateDer<'a>,
    pub(super) intermediates: &'a [CertificateDer<'a>],
    /// The file of the CAs.
    pub(super) file: &'a Path,
    /// That all have expired, and what to do.
    pub(super) all_expired: Option<String>,
    pub(super) cas: &'a [(CertificateDer<'static>, CertificateRules)],
    pub(super) purpose: Purpose,
    pub(super) now: SystemTime,
}

/// One certificate of the chain.
struct Blamed {
    rules: CertificateRules,
    is_leaf: bool,
}

impl RefusedChain<'_> {
    /// The refusal of the certificate of the peer that cannot be read.
    pub(super) fn unreadable(error: &X509Error) -> CertificateRefusal {
        let kind = RefusalKind::Other;
        CertificateRefusal::of_peer(kind, "the peer", format!("cannot be read ({error})"), REISSUE)
    }

    /// The refusal for an error of webpki.
    pub(super) fn explain(&self, error: &webpki::Error) -> CertificateRefusal {
        let leaf = match CertificateRules::from_der(self.leaf) {
            Ok(rules) => rules,
            Err(error) => return Self::unreadable(&error),
        };
        let of_peer = |kind, reason: String, remedy: String| {
            CertificateRefusal::of_peer(kind, &leaf.subject, reason, remedy)
        };
        match error {
            webpki::Error::CertExpired { .. } => self.blame(&leaf, |rules| self.now > rules.not_after, |rules| {
                (RefusalKind::Expired, expired(rules, self.now), "renew it".to_owned())
            }),
            webpki::Error::CertNotValidYet { .. } => {
                self.blame(&leaf, |rules| self.now < rules.not_before, |rules| {
                    (RefusalKind::NotYetValid, not_yet_valid(rules, self.now), CLOCK.to_owned())
                })
            }
            webpki::Error::UnknownIssuer => self.unknown_issuer(&leaf),
            webpki::Error::InvalidSignatureForPublicKey => self.bad_signature(&leaf),
            webpki::Error::CertNotValidForName(context) => {
                let (reason, remedy) = wrong_name(context);
                of_peer(RefusalKind::WrongName, reason, remedy)
            }
            webpki::Error::RequiredEkuNotFoundContext(_) => {
                self.blame(&leaf, |rules| !rules.permits(self.purpose), |rules| {
                    let usages = rules.usages.as_deref().unwrap_or_default().join(", ");
                    let reason = format!("does not permit {}, only {usages} (extendedKeyUsage)", self.purpose);
                    (RefusalKind::Other, reason, format!("reissue it with extendedKeyUsage {}", self.purpose.usage()))
                })
            }
            webpki::Error::CaUsedAsEndEntity => of_peer(
                RefusalKind::Other,
                "is that of a CA (basicConstraints CA:TRUE) and is used as that of a client or server".to_owned(),
                format!(
                    "reissue it with CA:FALSE, or add the certificate itself to {}",
                    self.file.display()
                ),
            ),
            webpki::Error::EndEntityUsedAsCa => {
                self.blame(&leaf, |rules| rules.is_ca != Some(true), |_| {
                    let reason = "signs another one and is not that of a CA (basicConstraints CA:TRUE is missing)";
                    (RefusalKind::Other, reason.to_owned(), "reissue it with CA:TRUE".to_owned())
                })
            }
            webpki::Error::UnsupportedCriticalExtension => self.critical(&leaf),
            webpki::Error::UnsupportedCertVersion => of_peer(
                RefusalKind::Other,
                "is X.509 version 1".to_owned(),
                certificate::VERSION_1_REMEDY.to_owned(),
            ),
            error if is_unsupported_signature(error) => self.unsupported_signature(&leaf),
            other => {
                let (reason, remedy) = of_form(other);
                of_peer(RefusalKind::Other, reason, remedy.to_owned())
            }
        }
    }

    /// The refusal of the first certificate for which `is_wrong`, else of the leaf.
    fn blame(
        &self,
        leaf: &CertificateRules,
        is_wrong: impl Fn(&CertificateRules) -> bool,
        text: impl Fn(&CertificateRules) -> (RefusalKind, String, String),
    ) -> CertificateRefusal {
        let leaf = Blamed { rules: leaf.clone(), is_leaf: true };
        let intermediates = self.intermediates.iter().filter_map(|der| {
            let rules = CertificateRules::from_der(der).ok()?;
            Some(Blamed { rules, is_leaf: false })
        });
        let is_ca_wrong = |blamed: &Blamed| is_wrong(&blamed.rules);
        let wrong =
            if is_ca_wrong(&leaf) { None } else { intermediates.into_iter().find(is_ca_wrong) };
        let blamed = wrong.unwrap_or(leaf);
        let (kind, reason, remedy) = text(&blamed.rules);
        if blamed.is_leaf {
            CertificateRefusal::of_peer(kind, &blamed.rules.subject, reason, remedy)
        } else {
            CertificateRefusal::of_ca(&blamed.rules.subject, "in its chain", reason, remedy)
        }
    }

    fn unknown_issuer(&self, leaf: &CertificateRules) -> CertificateRefusal {
        let remedy = self.all_expired.clone().unwrap_or_else(|| {
            let file = self.file.display();
            format!(
                "its issuer, {}, is not in {file}, or an intermediate CA was not sent; name the CA file of this cluster",
                leaf.issuer
            )
        });
        let reason = "is not signed by a trusted CA";
        CertificateRefusal::of_peer(RefusalKind::UnknownIssuer, &leaf.subject, reason, remedy)
    }

    /// A CA has the name of the issuer and another key, or one of a size that webpki does not support.
    fn bad_signature(&self, leaf: &CertificateRules) -> CertificateRefusal {
        let mut cas = self.cas.iter().filter(|(_, rules)| rules.subject == leaf.issuer);
        let issuer = cas.find_map(|(_, rules)| rules.unsupported_key.clone());
        let file = self.file.display();
        if let Some(key) = issuer {
            let reason = format!("is signed by a CA with {key}, which is not supported");
            let remedy = format!("create the CA anew with {SUPPORTED_KEYS}");
            return CertificateRefusal::of_peer(RefusalKind::Other, &leaf.subject, reason, remedy);
        }
        let remedy = self.all_expired.clone().unwrap_or_else(|| {
            format!(
                "its issuer, {}, has the name of a CA in {file} and another key; name the CA file of this cluster",
                leaf.issuer
            )
        });
        let reason = "is not signed by a trusted CA";
        CertificateRefusal::of_peer(RefusalKind::UnknownIssuer, &leaf.subject, reason, remedy)
    }

    fn critical(&self, leaf: &CertificateRules) -> CertificateRefusal {
        self.blame(
            leaf,
            |rules| rules.unhandled_by_webpki.is_some(),
            |rules| {
                let id = rules.unhandled_by_webpki.as_deref().unwrap_or("?");
                let reason = format!(
                    "has the critical extension {}, which is not evaluated",
                    extension_name(id)
                );
                (
                    RefusalKind::Other,
                    reason,
                    "reissue it without `critical` in that extension".to_owned(),
                )
            },
        )
    }

    fn unsupported_signature(&self, leaf: &CertificateRules) -> CertificateRefusal {
        let is_weak = |rules: &CertificateRules| {
            !["SHA-256", "SHA-384", "SHA-512"].iter().any(|hash| rules.signature.starts_with(hash))
        };
        self.blame(leaf, is_weak, |rules| {
            let reason = format!(
                "is signed with {}, which is not supported with the key of its CA",
                rules.signature
            );
            let remedy =
                format!("reissue it with SHA-256 or better, by a CA with {SUPPORTED_KEYS}");
            (RefusalKind::Other, reason, remedy)
        })
    }
}

/// The keys that rustls supports.
const SUPPORTED_KEYS: &str =
    "an RSA key of 2048 to 8192 bits, an ECDSA key (P-256, P-384, P-521) or an Ed25519 key";
const CLOCK: &str = "check the clock of this machine";

fn expired(rules: &CertificateRules, now: SystemTime) -> String {
    format!(
        "expired on {}; the clock here says {}",
        format_seconds(rules.not_after),
        format_seconds(now)
    )
}

fn not_yet_valid(rules: &CertificateRules, now: SystemTime) -> String {
    format!(
        "is not valid before {}; the clock here says {}",
        format_seconds(rules.not_before),
        format_seconds(now)
    )
}

/// The refusal of a certificate of a bundle that is that of the peer itself.
pub(super) fn own_defect(
    rules: &CertificateRules,
    purpose: Purpose,
    now: SystemTime,
) -> Option<CertificateRefusal> {
    let of_peer = |kind, reason, remedy: &str| {
        Some(CertificateRefusal::of_peer(kind, &rules.subject, reason, remedy))
    };
    if now > rules.not_after {
        return of_peer(RefusalKind::Expired, expired(rules, now), "renew it");
    }
    if now < rules.not_before {
        return of_peer(RefusalKind::NotYetValid, not_yet_valid(rules, now), CLOCK);
    }
    if let Some(id) = rules.unhandled_critical() {
        let reason =
            format!("has the critical extension {}, which is not evaluated", extension_name(id));
        return of_peer(
            RefusalKind::Other,
            reason,
            "reissue it without `critical` in that extension",
        );
    }
    if !rules.permits(purpose) {
        let usages = rules.usages.as_deref().unwrap_or_default().join(", ");
        let reason = format!("does not permit {purpose}, only {usages} (extendedKeyUsage)");
        let remedy = format!("reissue it with extendedKeyUsage {}", purpose.usage());
        return of_peer(RefusalKind::Other, reason, &remedy);
    }
    None
}

/// The refusal of a certificate of a bundle that webpki does not read.
pub(super) fn not_a_root(rules: &CertificateRules, error: &rustls::Error) -> CertificateRefusal {
    let reason = format!("cannot be used as that of a CA ({error})");
    CertificateRefusal::of_peer(RefusalKind::Other, &rules.subject, reason, REISSUE)
}

/// The refusal of a key with which the signature of a handshake cannot be verified.
pub(super) fn key_defect(rules: &CertificateRules) -> Option<CertificateRefusal> {
    let key = rules.unsupported_key.as_ref()?;
    let reason = format!("has {key}, which is not supported");
    let remedy = format!("reissue it with {SUPPORTED_KEYS}");
    Some(CertificateRefusal::of_peer(RefusalKind::Other, &rules.subject, reason, remedy))
}

/// The refusal of a certificate that Go does not read.
pub(super) fn form_defect(rules: &CertificateRules) -> Option<CertificateRefusal> {
    let defect = rules.defect.as_deref()?;
    Some(CertificateRefusal::of_peer(RefusalKind::Other, &rules.subject, defect, REISSUE))
}

/// The refusal of a CA certificate in `place`: that of a bundle, or of the chain.
pub(super) fn issuer_defect(
    rules: &CertificateRules,
    place: &str,
    defect: &IssuerDefect,
    (purpose, now): (Purpose, SystemTime),
) -> CertificateRefusal {
    let (reason, remedy) = match defect {
        IssuerDefect::NotCa => (
            "signs another one and is not that of a CA (basicConstraints CA:TRUE is missing)"
                .to_owned(),
            "reissue it with CA:TRUE".to_owned(),
        ),
        IssuerDefect::NoCertSign => (
            "may not sign certificates (keyUsage lacks keyCertSign)".to_owned(),
            "reissue it with keyCertSign".to_owned(),
        ),
        IssuerDefect::Expired => (expired(rules, now), "renew the CA".to_owned()),
        IssuerDefect::NotYetValid => (not_yet_valid(rules, now), CLOCK.to_owned()),
        IssuerDefect::PathLength => (
            "has more CAs below it than its path length permits (basicConstraints pathlen)"
                .to_owned(),
            "reissue it with a greater pathlen".to_owned(),
        ),
        IssuerDefect::Usage => (
            format!("does not permit {purpose} (extendedKeyUsage)"),
            format!("reissue it without extendedKeyUsage, or with {}", purpose.usage()),
        ),
        IssuerDefect::CriticalExtension(id) => (
            format!("has the critical extension {}, which is not evaluated", extension_name(id)),
            "reissue it without `critical` in that extension".to_owned(),
        ),
    };
    CertificateRefusal::of_ca(&rules.subject, place, reason, remedy)
}

fn wrong_name(context: &webpki::InvalidNameContext) -> (String, String) {
    let expected = context.expected.to_str();
    let names: Vec<String> = context.presented.iter().map(|name| presented_name(name)).collect();
    if names.is_empty() {
        return (
            format!("is not valid for {expected}: it has no subject alternative name"),
            "reissue it with subjectAltName, since the common name is not used".to_owned(),
        );
    }
    (
        format!("is not valid for {expected}, only for {}", some_of(&names)),
        "set the server name (`tls.server_name`, `tls-server-name`) to one of these, or add the name to the certificate \
         (certSANs of kubeadm)"
            .to_owned(),
    )
}

/// The first names, and how many more there are.
fn some_of(names: &[String]) -> String {
    let shown = names[..names.len().min(MAX_NAMES)].join(", ");
    match names.len().saturating_sub(MAX_NAMES) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// A name from its debug form, in which webpki passes it: `kubernetes` from `DnsName("kubernetes")`, `10.0.0.1` from
/// `IpAddress(10.0.0.1)`.
fn presented_name(debug: &str) -> String {
    let (form, rest) = debug.split_once('(').unwrap_or(("", debug));
    let name = rest.strip_suffix(')').unwrap_or(rest).trim_matches('"');
    match (form, name.parse::<IpAddr>()) {
        ("DnsName", Ok(_)) => format!("{name} as a DNS name"),
        // webpki writes `0::1`.
        (_, Ok(address)) => address.to_string(),
        (_, Err(_)) => name.to_owned(),
    }
}

#[allow(deprecated)] // variants without context
fn is_unsupported_signature(error: &webpki::Error) -> bool {
    use webpki::Error::{
        UnsupportedSignatureAlgorithm, UnsupportedSignatureAlgorithmContext,
        UnsupportedSignatureAlgorithmForPublicKey,
        UnsupportedSignatureAlgorithmForPublicKeyContext,
    };
    matches!(
        error,
        UnsupportedSignatureAlgorithm
            | UnsupportedSignatureAlgorithmContext(_)
            | UnsupportedSignatureAlgorithmForPublicKey
            | UnsupportedSignatureAlgorithmForPublicKeyContext(_)
    )
}

/// The reason and the remedy of errors that concern the form of a certificate or of its chain.
fn of_form(error: &webpki::Error) -> (String, &'static str) {
    use webpki::Error::{
        BadDer, BadDerTime, EmptyEkuExtension, ExtensionValueInvalid, InvalidCertValidity,
        MaximumNameConstraintComparisonsExceeded, MaximumPathBuildCallsExceeded,
        MaximumPathDepthExceeded, MaximumSignatureChecksExceeded, NameConstraintViolation,
        PathLenConstraintViolated, SignatureAlgorithmMismatch, TrailingData,
    };
    let (reason, remedy) = match error {
        BadDer | TrailingData(_) => {
            ("is damaged, or a certificate of its chain is: not valid DER", REISSUE)
        }
        BadDerTime => (
            "has a date, or a certificate of its chain has one, that is not written as RFC 5280 says (YYMMDDHHMMSSZ or \
             YYYYMMDDHHMMSSZ)",
            REISSUE,
        ),
        EmptyEkuExtension => ("has an empty extendedKeyUsage", "reissue it without the extension"),
        ExtensionValueInvalid => ("has an extension twice", REISSUE),
        InvalidCertValidity => ("expires before its validity begins", REISSUE),
        PathLenConstraintViolated => (
            "has a longer chain than the path length of one of its CAs permits (basicConstraints pathlen)",
            "reissue that CA with a greater pathlen",
        ),
        NameConstraintViolation => (
            "has names that one of its CAs does not permit (nameConstraints; those for directory names, URIs and e-mail \
             addresses permit none)",
            "reissue it with other names, or the CA with other constraints",
        ),
        SignatureAlgorithmMismatch => ("names two signature algorithms", REISSUE),
        MaximumPathBuildCallsExceeded
        | MaximumPathDepthExceeded
        | MaximumSignatureChecksExceeded
        | MaximumNameConstraintComparisonsExceeded => {
            ("has a chain that takes too long to verify", "send fewer intermediate CAs")
        }
        other => return (format!("is not valid ({other:?})"), REISSUE),
    };
    (reason.to_owned(), remedy)
}

/// The OID of an extension, with its name in configurations of `OpenSSL` if it has one there.
fn extension_name(id: &str) -> String {
    let name = match id {
        "2.5.29.14" => "subjectKeyIdentifier",
        "2.5.29.18" => "issuerAltName",
        "2.5.29.32" => "certificatePolicies",
        "2.5.29.33" => "policyMappings",
        "2.5.29.35" => "authorityKeyIdentifier",
        "2.5.29.36" => "policyConstraints",
        "2.5.29.54" => "inhibitAnyPolicy",
        "1.3.6.1.5.5.7.1.1" => "authorityInfoAccess",
        "1.3.6.1.5.5.7.1.24" => "tlsfeature",
        _ => return id.to_owned(),
    };
    format!("{name} ({id})")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presented_names_are_written_as_people_write_them() {
        for (debug, expected) in [
            (r#"DnsName("kubernetes")"#, "kubernetes"),
            (r#"DnsName("10.0.0.1")"#, "10.0.0.1 as a DNS name"),
            ("IpAddress(10.0.0.1)", "10.0.0.1"),
            ("IpAddress(0::1)", "::1"),
            ("UnsupportedNameTag(4)", "4"),
        ] {
            assert_eq!(presented_name(debug), expected, "{debug}");
        }
    }
}
