//! Timestamps, UIDs and name suffixes in the formats of Kubernetes.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jackstay_sys::utc::Utc;

/// `2026-01-31T12:00:00Z`, the format of `metav1.Time`.
pub fn rfc3339(time: SystemTime) -> String {
    Utc(time).seconds()
}

/// The same for seconds since the epoch.
pub fn rfc3339_seconds(seconds: u64) -> String {
    rfc3339(UNIX_EPOCH + Duration::from_secs(seconds))
}

/// `2026-01-31T12:00:00.000000Z`, the format of `metav1.MicroTime`.
pub fn rfc3339_micros(seconds: u64, nanos: u32) -> String {
    let second = rfc3339_seconds(seconds);
    format!("{}.{:06}Z", second.trim_end_matches('Z'), nanos / 1000)
}

/// Seconds since the epoch, and nanoseconds, of an RFC 3339 time in UTC.
pub fn parse_rfc3339(text: &str) -> Option<(u64, u32)> {
    let since_1970 = Utc::parse(text)?.0.duration_since(UNIX_EPOCH).ok()?;
    Some((since_1970.as_secs(), since_1970.subsec_nanos()))
}

/// A random UUID (version 4). The random numbers are not cryptographic.
pub fn uid() -> String {
    let bits = fastrand::u128(..);
    let bits = bits & !(0xf << 76) | (0x4 << 76);
    let bits = bits & !(0x3 << 62) | (0x2 << 62);
    let hex = format!("{bits:032x}");
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The five random characters that the server appends to `generateName`.
pub fn name_suffix() -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    (0..5).map(|_| char::from(ALPHABET[fastrand::usize(..ALPHABET.len())])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rfc3339_and_parse_rfc3339_agree() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(UNIX_EPOCH + Duration::from_secs(seconds)), text);
            assert_eq!(parse_rfc3339(text), Some((seconds, 0)));
        }
        assert_eq!(rfc3339_micros(0, 12_345_678), "1970-01-01T00:00:00.012345Z");
        assert_eq!(parse_rfc3339("1970-01-01T00:00:01.5Z"), Some((1, 500_000_000)));
    }

    #[test]
    fn uid_is_a_version_4_uuid() {
        let uid = uid();
        assert_eq!(uid.len(), 36);
        assert_eq!(&uid[14..15], "4");
        assert!("89ab".contains(&uid[19..20]));
    }
}
