//! RFC 3339 timestamps in UTC, for logs, JSON and pages.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use jiff::Timestamp;

/// A time that prints as RFC 3339 with milliseconds: `2026-07-26T12:34:56.789Z`. Times before 1970 print
/// as 1970.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Utc(pub SystemTime);

impl Utc {
    /// The current time of the system clock.
    pub fn now() -> Self {
        Self(wall_clock())
    }

    /// Reads RFC 3339 in UTC (`Z`), with or without a fraction; `None` for anything else and for times
    /// before 1970.
    pub fn parse(text: &str) -> Option<Self> {
        let timestamp: Timestamp = text.ends_with('Z').then(|| text.parse().ok()).flatten()?;
        let since_1970 = Duration::try_from(timestamp.as_duration()).ok()?;
        Some(Self(UNIX_EPOCH + since_1970))
    }

    /// The time without a fraction, `2026-07-26T12:34:56Z`: the form of `metav1.Time` and of the dates of
    /// certificates.
    pub fn seconds(self) -> String {
        format!("{:.0}", self.timestamp())
    }

    fn timestamp(self) -> Timestamp {
        let since_1970 = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = i64::try_from(since_1970.as_secs()).unwrap_or(i64::MAX);
        Timestamp::new(seconds, since_1970.subsec_nanos().cast_signed()).unwrap_or(Timestamp::MAX)
    }
}

/// The current time of the system clock, which may jump. It is for certificates, for timestamps in output
/// and for times that outlive the process; durations are measured with tokio's `Instant`.
#[allow(clippy::disallowed_methods)] // the only place that reads the system clock
pub fn wall_clock() -> SystemTime {
    SystemTime::now()
}

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3}", self.timestamp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn utc_formats_and_parses_rfc3339() {
        let table = [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_078_012_799_000, "2004-02-28T23:59:59.000Z"),
            (1_735_689_599_001, "2024-12-31T23:59:59.001Z"),
            (1_785_069_296_789, "2026-07-26T12:34:56.789Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ];
        for (ms, text) in table {
            let utc = Utc(UNIX_EPOCH + Duration::from_millis(ms));
            assert_eq!(utc.to_string(), text);
            assert_eq!(Utc::parse(text), Some(utc));
        }
        assert_eq!(Utc(UNIX_EPOCH - Duration::from_secs(1)).to_string(), table[0].1);
        let whole = Utc(UNIX_EPOCH + Duration::from_secs(951_782_400));
        assert_eq!(Utc::parse("2000-02-29T00:00:00Z"), Some(whole));
        for invalid in [
            "",
            "now",
            "2026-07-26T12:34:56",
            "2026-13-26T12:34:56Z",
            "2026-07-26T1:2:3:4Z",
            "1960-01-01T00:00:00Z",
            "2026-07-26T12:34:56.Z",
            "+2026-07-26T12:34:56Z",
        ] {
            assert_eq!(Utc::parse(invalid), None, "{invalid}");
        }
        let second = Utc(UNIX_EPOCH + Duration::from_millis(951_782_399_999)).seconds();
        assert_eq!(second, "2000-02-28T23:59:59Z");
    }
}
