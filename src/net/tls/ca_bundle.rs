//! The file of a CA bundle, and which of its certificates have expired.
//!
//! An expired certificate stays a trust anchor: RFC 5280 section 6.1.1 excludes its validity from the path, and
//! webpki does not check it. Usually its successor has signed newer certificates, which then have no trusted CA.

use std::path::PathBuf;
use std::time::SystemTime;

use rustls::{CertificateError, Error};

use super::certificate::{CertInfo, Validity, format_seconds};

/// The certificates of a CA bundle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaBundle {
    /// The file with the certificates.
    pub file: PathBuf,
    /// Every certificate of the bundle that can be parsed.
    pub certificates: Vec<CertInfo>,
    /// The number of certificates, with those that cannot be parsed.
    pub count: usize,
    /// Certificates of the file that are not used: sentences with file, line, reason and remedy.
    pub skipped: Vec<String>,
    /// Forms that jackstay reads and programs in Go do not: sentences with file and line.
    pub notes: Vec<String>,
}

impl CaBundle {
    /// The certificates that have expired at `now`.
    pub fn expired(&self, now: SystemTime) -> Vec<&CertInfo> {
        let certificates = self.certificates.iter();
        certificates.filter(|info| info.validity(now) == Validity::Expired).collect()
    }

    /// That no certificate of the bundle is left, and what to do, if all have expired at `now`.
    pub fn all_expired(&self, now: SystemTime) -> Option<String> {
        let expired = self.expired(now);
        let last = expired.iter().map(|info| info.not_after).max()?;
        (expired.len() == self.count).then(|| {
            format!(
                "every certificate of {} has expired (the last one on {}): renew the CA file",
                self.file.display(),
                format_seconds(last)
            )
        })
    }

    /// Which certificates have expired at `now`; `None` if none has.
    pub fn expiry(&self, now: SystemTime) -> Option<String> {
        if let Some(text) = self.all_expired(now) {
            return Some(text);
        }
        let expired = self.expired(now);
        let each: Vec<String> = expired
            .iter()
            .map(|info| format!("{} on {}", info.subject, format_seconds(info.not_after)))
            .collect();
        (!each.is_empty()).then(|| {
            let count = self.count;
            format!("{} of {count} certificates expired: {}", each.len(), each.join(", "))
        })
    }

    /// The probable cause in the bundle of an `error` of the verification of another certificate.
    pub fn cause_of(&self, error: &Error, now: SystemTime) -> Option<String> {
        match error {
            Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => self.all_expired(now),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::net::tls::certificate::Subject;

    #[test]
    fn bundle_with_expired_certificates_tells_them_and_explains_unknown_issuers() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let certificate = |last| CertInfo {
            subject: Subject::default(),
            not_before: at(0),
            not_after: at(last),
            serial: String::new(),
            is_version_1: false,
        };
        let file = PathBuf::from("ca.crt");
        let certificates = vec![certificate(10), certificate(20)];
        let (skipped, notes) = (Vec::new(), Vec::new());
        let bundle = CaBundle { file, certificates, count: 2, skipped, notes };
        let unknown = Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let all = "every certificate of ca.crt has expired (the last one on 1970-01-01T00:00:20Z): \
                   renew the CA file";
        for (now, expiry, cause) in [
            (10, None, None),
            (
                11,
                Some("1 of 2 certificates expired: (empty subject) on 1970-01-01T00:00:10Z"),
                None,
            ),
            (21, Some(all), Some(all)),
        ] {
            assert_eq!(bundle.expiry(at(now)).as_deref(), expiry, "at {now}");
            assert_eq!(bundle.cause_of(&unknown, at(now)).as_deref(), cause, "at {now}");
        }
        assert_eq!(
            bundle.cause_of(&Error::InvalidCertificate(CertificateError::Revoked), at(21)),
            None
        );
        // The third certificate cannot be parsed, so it may be valid.
        let bundle = CaBundle { count: 3, ..bundle };
        assert_eq!(bundle.all_expired(at(21)), None);
        assert!(bundle.expiry(at(21)).unwrap().starts_with("2 of 3 certificates expired: "));
    }
}
