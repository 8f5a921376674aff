//! Verifies certificates of servers and clients as Go's `crypto/x509` does, which kubectl, kubelet and kube-apiserver
//! use. webpki builds and verifies the chains; this module adds what Go decides in another way:
//!
//! * A certificate of the CA bundle is valid as that of the peer itself, with CA:TRUE or CA:FALSE, if its name, validity
//!   and usages fit (`Verify`: `opts.Roots.contains(c)`). webpki refuses it.
//! * `anyExtendedKeyUsage` permits every purpose (`checkChainForKeyUsage`).
//! * The CA at the end of the chain must be a CA that may sign, valid now, and within its path length, usages and
//!   critical extensions (`CheckSignatureFrom`, `isValid`). webpki reads only the name constraints of a trust anchor.
//! * `keyUsage` of a CA in the chain must contain `keyCertSign`.
//! * An address matches its IPv4-mapped IPv6 form (`net.IP.Equal`).
//!
//! Nothing is accepted that Go refuses, with the exceptions in `config/compatibility.md`. A refusal is a
//! [`CertificateRefusal`].

mod explain;
mod rules;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, aws_lc_rs, verify_tls12_signature, verify_tls13_signature,
};
use rustls::pki_types::{CertificateDer, IpAddr as PkiIpAddr, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme};
use webpki::{EndEntityCert, KeyPurposeIdIter, KeyUsage, VerifiedPath};

use self::explain::RefusedChain;
pub use self::rules::Purpose;
use self::rules::{CertificateRules, IssuerDefect};
use super::ca_bundle;
use super::refusal::CertificateRefusal;

/// `anyExtendedKeyUsage` (RFC 5280 section 4.2.1.12).
const ANY_USAGE: [usize; 5] = [2, 5, 29, 37, 0];

/// The CAs of a bundle.
#[derive(Debug)]
pub struct TrustedCas {
    file: PathBuf,
    /// The certificates of the bundle as trust anchors.
    roots: RootCertStore,
    /// The certificate of each root, in the same order.
    certificates: Vec<(CertificateDer<'static>, CertificateRules)>,
    subjects: Vec<DistinguishedName>,
}

impl TrustedCas {
    /// The CAs of a file, none so far.
    pub fn new(file: &Path) -> Self {
        let (roots, certificates) = (RootCertStore::empty(), Vec::new());
        Self { file: file.to_owned(), roots, certificates, subjects: Vec::new() }
    }

    /// Adds a certificate.
    ///
    /// # Errors
    /// It cannot be used. Go skips such a certificate (`AppendCertsFromPEM`).
    pub fn add(&mut self, der: CertificateDer<'static>) -> Result<(), CertificateRefusal> {
        let rules =
            CertificateRules::from_der(&der).map_err(|error| RefusedChain::unreadable(&error))?;
        if let Some(refusal) = explain::form_defect(&rules) {
            return Err(refusal);
        }
        self.roots.add(der.clone()).map_err(|error| explain::not_a_root(&rules, &error))?;
        self.certificates.push((der, rules));
        self.subjects = self.roots.subjects();
        Ok(())
    }

    /// That no certificate is left, and what to do, if all have expired at `now`.
    fn all_expired(&self, now: SystemTime) -> Option<String> {
        let last = self.certificates.iter().map(|(_, rules)| rules.not_after).max()?;
        (now > last).then(|| ca_bundle::all_expired(&self.file, last))
    }

    /// Whether no certificate can be used.
    pub fn is_empty(&self) -> bool {
        self.certificates.is_empty()
    }

    /// The number of certificates that can be used.
    pub fn len(&self) -> usize {
        self.certificates.len()
    }

    /// The first and the last second at which each certificate is valid.
    pub fn validities(&self) -> impl Iterator<Item = (SystemTime, SystemTime)> {
        self.certificates.iter().map(|(_, rules)| (rules.not_before, rules.not_after))
    }

    /// Verifies the certificate of a client, leaf first.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn verify_client(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), CertificateRefusal> {
        self.verify(leaf, intermediates, Purpose::Client, now)
    }

    /// Verifies the certificate of a server with this name.
    ///
    /// # Errors
    /// Why it is refused.
    pub fn verify_server(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        now: UnixTime,
    ) -> Result<(), CertificateRefusal> {
        self.verify(leaf, intermediates, Purpose::Server, now)?;
        let verified = EndEntityCert::try_from(leaf).and_then(|leaf| verify_name(&leaf, name));
        verified.map_err(|error| {
            let purpose = Purpose::Server;
            self.refused(leaf, intermediates, purpose, system_time(now)).explain(&error)
        })
    }

    fn refused<'a>(
        &'a self,
        leaf: &'a CertificateDer<'a>,
        intermediates: &'a [CertificateDer<'a>],
        purpose: Purpose,
        now: SystemTime,
    ) -> RefusedChain<'a> {
        RefusedChain {
            leaf,
            intermediates,
            file: &self.file,
            all_expired: self.all_expired(now),
            cas: &self.certificates,
            purpose,
            now,
        }
    }

    fn verify(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        purpose: Purpose,
        now: UnixTime,
    ) -> Result<(), CertificateRefusal> {
        let time = system_time(now);
        if let Some((_, rules)) = self.certificates.iter().find(|(own, _)| own == leaf) {
            return explain::key_defect(rules)
                .or_else(|| explain::own_defect(rules, purpose, time))
                .map_or(Ok(()), Err);
        }
        let rules =
            CertificateRules::from_der(leaf).map_err(|error| RefusedChain::unreadable(&error))?;
        if let Some(refusal) = explain::key_defect(&rules).or_else(|| explain::form_defect(&rules))
        {
            return Err(refusal);
        }
        // webpki has no error for the defects of CAs.
        let defect = RefCell::new(None);
        let check = |path: &VerifiedPath<'_>| match self.path_defect(path, purpose, time) {
            None => Ok(()),
            Some(refusal) => {
                defect.replace(Some(refusal));
                Err(webpki::Error::UnknownIssuer)
            }
        };
        let verified = EndEntityCert::try_from(leaf).and_then(|leaf| {
            let path = leaf.verify_for_usage(
                algorithms().all,
                &self.roots.roots,
                intermediates,
                now,
                GoUsage(purpose),
                None,
                Some(&check),
            );
            path.map(drop)
        });
        verified.map_err(|error| {
            let refused = || self.refused(leaf, intermediates, purpose, time).explain(&error);
            defect.take().unwrap_or_else(refused)
        })
    }

    /// Why Go refuses a CA of a path that webpki has verified.
    fn path_defect(
        &self,
        path: &VerifiedPath<'_>,
        purpose: Purpose,
        now: SystemTime,
    ) -> Option<CertificateRefusal> {
        let refusal = |rules: &CertificateRules, place: &str, defect: &IssuerDefect| {
            Some(explain::issuer_defect(rules, place, defect, (purpose, now)))
        };
        let mut intermediates = 0;
        for certificate in path.intermediate_certificates() {
            intermediates += 1;
            let rules = match CertificateRules::from_der(&certificate.der()) {
                Ok(rules) => rules,
                Err(error) => return Some(RefusedChain::unreadable(&error)),
            };
            if let Some(refusal) = explain::form_defect(&rules) {
                return Some(refusal);
            }
            if let Some(defect) = rules.signing_defect() {
                return refusal(&rules, "in its chain", &defect);
            }
        }
        let mut anchors = self.roots.roots.iter();
        let index = anchors.position(|anchor| std::ptr::eq(anchor, path.anchor()))?;
        let (_, rules) = self.certificates.get(index)?;
        let defect = rules.anchor_defect(intermediates, purpose, now)?;
        refusal(rules, &format!("in {}", self.file.display()), &defect)
    }
}

/// Verifies the name as Go does: an IPv4 address also in its IPv6 form (`VerifyHostname`, `net.IP.Equal`).
fn verify_name(leaf: &EndEntityCert<'_>, name: &ServerName<'_>) -> Result<(), webpki::Error> {
    let verified = leaf.verify_is_valid_for_subject_name(name);
    let Err(error) = verified else { return Ok(()) };
    let ServerName::IpAddress(ip) = name else { return Err(error) };
    let other = match IpAddr::from(*ip) {
        IpAddr::V4(ip) => IpAddr::V6(ip.to_ipv6_mapped()),
        IpAddr::V6(ip) => match ip.to_ipv4_mapped() {
            Some(ip) => IpAddr::V4(ip),
            None => return Err(error),
        },
    };
    let other = ServerName::IpAddress(PkiIpAddr::from(other));
    leaf.verify_is_valid_for_subject_name(&other).map_err(|_| error)
}

fn system_time(time: UnixTime) -> SystemTime {
    let seconds = Duration::from_secs(time.as_secs());
    UNIX_EPOCH.checked_add(seconds).unwrap_or(UNIX_EPOCH)
}

/// The algorithms of the provider, which is a list of all that it has.
static ALGORITHMS: LazyLock<WebPkiSupportedAlgorithms> =
    LazyLock::new(|| aws_lc_rs::default_provider().signature_verification_algorithms);

fn algorithms() -> &'static WebPkiSupportedAlgorithms {
    &ALGORITHMS
}

/// The extended key usage of a leaf or an intermediate CA, with the rules of Go.
struct GoUsage(Purpose);

impl webpki::ExtendedKeyUsageValidator for GoUsage {
    fn validate(&self, usages: KeyPurposeIdIter<'_, '_>) -> Result<(), webpki::Error> {
        let required = match self.0 {
            Purpose::Server => KeyUsage::server_auth(),
            Purpose::Client => KeyUsage::client_auth(),
        };
        let wanted: Vec<usize> = required.oid_values().collect();
        let mut present = Vec::new();
        for usage in usages {
            let usage = usage?.to_decoded_oid();
            if usage == wanted || usage == ANY_USAGE {
                return Ok(());
            }
            present.push(usage);
        }
        if present.is_empty() {
            return Ok(());
        }
        let context = webpki::RequiredEkuNotFoundContext { required, present };
        Err(webpki::Error::RequiredEkuNotFoundContext(context))
    }
}

/// Verifies servers and clients under the CAs of a bundle.
#[derive(Debug, Clone)]
pub struct CertificateVerifier(Arc<TrustedCas>);

impl CertificateVerifier {
    /// A verifier with these CAs.
    pub fn new(trusted: &Arc<TrustedCas>) -> Arc<Self> {
        Arc::new(Self(Arc::clone(trusted)))
    }
}

impl ServerCertVerifier for CertificateVerifier {
    fn verify_server_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        _: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.0.verify_server(leaf, intermediates, name, now)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}

impl ClientCertVerifier for CertificateVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &self.0.subjects
    }

    fn verify_client_cert(
        &self,
        leaf: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.0.verify_client(leaf, intermediates, now)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, algorithms())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        algorithms().supported_schemes()
    }
}
