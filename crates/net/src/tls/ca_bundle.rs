//! The file of a CA bundle, and which of its certificates have expired.
//!
//! An expired CA certificate verifies nothing, as in Go (`crypto/x509/verify.go`, `isValid`), and its successor, which
//! has signed the newer certificates, is missing.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

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
        (expired.len() == self.count).then(|| all_expired(&self.file, last))
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
}

/// That every certificate of a bundle has expired, the last one at `last`, and what to do.
pub(super) fn all_expired(file: &Path, last: SystemTime) -> String {
    format!(
        "every certificate of {} has expired (the last one on {}): renew the CA file",
        file.display(),
        format_seconds(last)
    )
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use crate::tls::certificate::Subject;

    #[test]
    fn bundle_with_expired_certificates_tells_them() {
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
        let all = "every certificate of ca.crt has expired (the last one on 1970-01-01T00:00:20Z): \
                   renew the CA file";
        for (now, expiry) in [
            (10, None),
            (11, Some("1 of 2 certificates expired: (empty subject) on 1970-01-01T00:00:10Z")),
            (21, Some(all)),
        ] {
            assert_eq!(bundle.expiry(at(now)).as_deref(), expiry, "at {now}");
        }
        // The third certificate cannot be parsed, so it may be valid.
        let bundle = CaBundle { count: 3, ..bundle };
        assert_eq!(bundle.all_expired(at(21)), None);
        assert!(bundle.expiry(at(21)).unwrap().starts_with("2 of 3 certificates expired: "));
    }
}
