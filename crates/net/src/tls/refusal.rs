//! Why a certificate is refused, in one sentence that names the certificate, the reason and the remedy. `kubeconfig`,
//! `check`, `doctor`, `status`, the log and the responses use the same sentence.

use std::sync::Arc;

use rustls::{CertificateError, Error, OtherError};

/// Why a certificate is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{certificate} {reason}: {remedy}")]
pub struct CertificateRefusal {
    /// For programs.
    pub kind: RefusalKind,
    /// The refused certificate: `the certificate of CN=kube-apiserver`.
    certificate: String,
    /// Whether it is that of the peer, not one of a CA.
    is_leaf: bool,
    /// `expired on 2026-07-26T12:34:56Z`.
    reason: String,
    /// What to do.
    remedy: String,
}

/// Kinds of refusals that callers distinguish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    /// The validity of the peer's certificate has ended.
    Expired,
    /// The validity of the peer's certificate has not begun.
    NotYetValid,
    /// The certificate is not valid for the name of the server.
    WrongName,
    /// No trusted CA has signed it.
    UnknownIssuer,
    /// Every other reason.
    Other,
}

impl CertificateRefusal {
    /// The refusal of the certificate of a peer.
    pub(super) fn of_peer(
        kind: RefusalKind,
        subject: &str,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let certificate = format!("the certificate of {subject}");
        Self { kind, certificate, is_leaf: true, reason: reason.into(), remedy: remedy.into() }
    }

    /// The refusal of a CA certificate, which is in `place`.
    pub(super) fn of_ca(
        subject: &str,
        place: &str,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        let certificate = format!("the CA certificate of {subject} {place}");
        let (kind, is_leaf) = (RefusalKind::Other, false);
        Self { kind, certificate, is_leaf, reason: reason.into(), remedy: remedy.into() }
    }

    /// What to do.
    pub fn remedy(&self) -> &str {
        &self.remedy
    }

    /// The certificate and the reason, without the remedy.
    pub fn statement(&self) -> String {
        format!("{} {}", self.certificate, self.reason)
    }

    /// The sentence for a text that has named the certificate of the peer already.
    pub fn about_it(&self) -> String {
        if self.is_leaf { format!("it {}: {}", self.reason, self.remedy) } else { self.to_string() }
    }

    /// The refusal in a TLS error.
    pub fn of_error(error: &Error) -> Option<&Self> {
        match error {
            Error::InvalidCertificate(CertificateError::Other(OtherError(inner))) => {
                inner.downcast_ref()
            }
            _ => None,
        }
    }
}

impl From<CertificateRefusal> for Error {
    fn from(refusal: CertificateRefusal) -> Self {
        CertificateError::Other(OtherError(Arc::new(refusal))).into()
    }
}
