//! Notices when a serving certificate is not renewed in time. Pure: the time is an argument.

use std::time::{Duration, SystemTime};

use jackstay_net::tls::certificate::CertInfo;

/// A certificate is late when less than this part of its lifetime is left: 18 days of a year. A local CA is renewed 21
/// days before its end, cert-manager renews after two thirds of the lifetime.
const PART: u32 = 20;

/// Whether a serving certificate is late, at the last update.
#[derive(Debug, Default)]
pub struct LateRenewal(Option<CertInfo>);

impl LateRenewal {
    /// Returns the end of the certificate when it becomes late.
    pub fn update(&mut self, info: &CertInfo, now: SystemTime) -> Option<SystemTime> {
        let lifetime = info.not_after.duration_since(info.not_before).unwrap_or_default();
        let left = info.not_after.duration_since(now).unwrap_or(Duration::ZERO);
        // An expired certificate is an event of its own.
        let is_late = !left.is_zero() && left < lifetime / PART;
        let is_news = is_late && self.0.as_ref() != Some(info);
        self.0 = is_late.then(|| info.clone());
        is_news.then_some(info.not_after)
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use jackstay_net::tls::certificate::Subject;

    #[test]
    fn update_reports_each_certificate_once_when_a_twentieth_of_its_lifetime_is_left() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let certificate = |from, to| CertInfo {
            subject: Subject::default(),
            not_before: at(from),
            not_after: at(to),
            serial: String::new(),
            is_version_1: false,
        };
        let (first, second) = (certificate(0, 100), certificate(90, 190));
        let mut late = LateRenewal::default();
        for (now, info, expected) in [
            (0, &first, None),
            (95, &first, None),
            (96, &first, Some(at(100))),
            (97, &first, None),
            (98, &second, None),
            (186, &second, Some(at(190))),
            // The clock was wrong.
            (100, &second, None),
            (187, &second, Some(at(190))),
            (190, &second, None),
            (500, &second, None),
        ] {
            assert_eq!(late.update(info, at(now)), expected, "second {now}");
        }
    }
}
