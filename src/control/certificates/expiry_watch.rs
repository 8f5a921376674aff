//! Notices when a certificate in use expires, or when its validity begins. Pure: the time is an argument.

use std::time::SystemTime;

use jackstay_net::tls::certificate::{CertInfo, Validity};

/// A certificate in use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WatchedCertificate {
    /// The certificate's name in the log: its file, its listener or its CA bundle.
    pub name: String,
    /// Its content.
    pub info: CertInfo,
    /// The effect on requests while it is not valid.
    pub effect: &'static str,
}

/// A change of the validity of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValidityChange {
    /// The certificate.
    pub certificate: WatchedCertificate,
    /// The validity before; `None` for a certificate that was not in use before.
    pub from: Option<Validity>,
    /// The validity now.
    pub to: Validity,
}

/// The validity of the certificates in use, at the last update.
#[derive(Debug, Default)]
pub struct ExpiryWatch(Vec<(WatchedCertificate, Validity)>);

impl ExpiryWatch {
    /// Returns the changes since the last update: certificates that have expired or whose validity has begun,
    /// and new ones that are not valid. The clock may jump in either direction.
    pub fn update(
        &mut self,
        certificates: Vec<WatchedCertificate>,
        now: SystemTime,
    ) -> Vec<ValidityChange> {
        let mut changes = Vec::new();
        let mut next = Vec::new();
        for certificate in certificates {
            let to = certificate.info.validity(now);
            let known = self.0.iter().find(|(known, _)| {
                known.name == certificate.name && known.info == certificate.info
            });
            let from = known.map(|(_, validity)| *validity);
            if from.unwrap_or(Validity::Valid) != to {
                changes.push(ValidityChange { certificate: certificate.clone(), from, to });
            }
            next.push((certificate, to));
        }
        self.0 = next;
        changes
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use jackstay_net::tls::certificate::Subject;

    /// A certificate that is valid in the seconds `from` to `to` of 1970.
    fn certificate(name: &str, from: u64, to: u64) -> WatchedCertificate {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let info = CertInfo {
            subject: Subject::default(),
            not_before: at(from),
            not_after: at(to),
            serial: String::new(),
            is_version_1: false,
        };
        WatchedCertificate { name: name.into(), info, effect: "" }
    }

    #[test]
    fn update_reports_each_change_of_validity_once() {
        use Validity::{Expired, NotYet, Valid};
        let mut watch = ExpiryWatch::default();
        let (short, long) = (certificate("short", 10, 20), certificate("long", 10, 90));
        let renewed = certificate("short", 22, 40);
        // At each second: the certificates in use, and the changes.
        let both = [&short, &long];
        for (now, in_use, expected) in [
            (5, &both[..], vec![("short", None, NotYet), ("long", None, NotYet)]),
            (6, &both, vec![]),
            (10, &both, vec![("short", Some(NotYet), Valid), ("long", Some(NotYet), Valid)]),
            (20, &both, vec![]),
            (21, &both, vec![("short", Some(Valid), Expired)]),
            (22, &both, vec![]),
            // The clock is set back.
            (15, &both, vec![("short", Some(Expired), Valid)]),
            (30, &both, vec![("short", Some(Valid), Expired)]),
            // The file is renewed.
            (31, &[&renewed, &long], vec![]),
            // The file holds an expired certificate.
            (32, &both, vec![("short", None, Expired)]),
            (33, &[], vec![]),
        ] {
            let in_use = in_use.iter().map(|&certificate| certificate.clone()).collect();
            let changes = watch.update(in_use, UNIX_EPOCH + Duration::from_secs(now));
            let changes: Vec<_> = changes
                .iter()
                .map(|change| (change.certificate.name.as_str(), change.from, change.to))
                .collect();
            assert_eq!(changes, expected, "at {now}");
        }
    }
}
