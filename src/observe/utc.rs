//! Moments as people and machines read them: UTC, without a calendar library.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

/// A moment that prints as RFC 3339 with milliseconds: `2026-07-26T12:34:56.789Z`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Utc(pub SystemTime);

impl Utc {
    /// The present, by the system's clock.
    pub fn now() -> Self {
        Self(SystemTime::now())
    }

    /// Reads what [`fmt::Display`] writes, with or without the fraction; only UTC (`Z`).
    pub fn parse(text: &str) -> Option<Self> {
        let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
        let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
        let digits = |text: &str| {
            let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            plain.then(|| text.parse::<u64>().ok()).flatten()
        };
        let three = |text: &str, by: char| {
            let mut parts = text.split(by).map(digits);
            let all = (parts.next()??, parts.next()??, parts.next()??);
            parts.next().is_none().then_some(all)
        };
        let (year, month, day) = three(date, '-')?;
        let (hour, minute, second) = three(time, ':')?;
        let in_range = (1970..10_000).contains(&year)
            && (1..=12).contains(&month)
            && (1..=31).contains(&day)
            && hour < 24
            && minute < 60
            && second < 61;
        let nanos = digits(fraction).filter(|_| fraction.len() <= 9 && in_range)?
            * 10_u64.pow(9 - fraction.len() as u32);
        // The inverse of `parts`: days_from_civil.
        let year = if month <= 2 { year - 1 } else { year };
        let (era, year_of_era) = (year / 400, year % 400);
        let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
        let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
        let days = (era * 146_097 + day_of_era).checked_sub(719_468)?;
        let seconds = days * 86_400 + hour * 3600 + minute * 60 + second;
        Some(Self(UNIX_EPOCH + std::time::Duration::new(seconds, nanos as u32)))
    }

    /// Year, month, day, second of the day and millisecond. Times before 1970 are 1970.
    fn parts(self) -> (u64, u64, u64, u64, u32) {
        let since = self.0.duration_since(UNIX_EPOCH).unwrap_or_default();
        let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
        // Howard Hinnant's civil_from_days: years begin in March, eras have 400 years.
        let z = days + 719_468;
        let (era, day_of_era) = (z / 146_097, z % 146_097);
        let year_of_era =
            (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let shifted_month = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
        let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
        let year = era * 400 + year_of_era + u64::from(month <= 2);
        (year, month, day, second, since.subsec_millis())
    }

    /// The same without milliseconds, `2026-07-26T12:34:56Z`: the form of `metav1.Time`, and all
    /// that dates of certificates have.
    pub fn seconds(self) -> String {
        let mut text = String::with_capacity(20);
        // Writing to a String does not fail.
        let _ = self.write_second(&mut text);
        text.push('Z');
        text
    }

    fn write_second(self, out: &mut impl fmt::Write) -> fmt::Result {
        let (year, month, day, second, _) = self.parts();
        let (h, m, s) = (second / 3600, second / 60 % 60, second % 60);
        write!(out, "{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}")
    }

    /// Writes `07-26 12:34:56.789`, for a person who knows which year it is.
    pub(super) fn write_short(self, out: &mut impl fmt::Write) -> fmt::Result {
        let (_, month, day, second, ms) = self.parts();
        let (h, m, s) = (second / 3600, second / 60 % 60, second % 60);
        write!(out, "{month:02}-{day:02} {h:02}:{m:02}:{s:02}.{ms:03}")
    }
}

impl fmt::Display for Utc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_second(f)?;
        write!(f, ".{:03}Z", self.parts().4)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn known_moments() {
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
        for odd in [
            "",
            "now",
            "2026-07-26T12:34:56",
            "2026-13-26T12:34:56Z",
            "2026-07-26T1:2:3:4Z",
            "1960-01-01T00:00:00Z",
            "2026-07-26T12:34:56.Z",
            "+2026-07-26T12:34:56Z",
        ] {
            assert_eq!(Utc::parse(odd), None, "{odd}");
        }
        let mut short = String::new();
        Utc(UNIX_EPOCH + Duration::from_millis(1_785_069_296_789)).write_short(&mut short).unwrap();
        assert_eq!(short, "07-26 12:34:56.789");
        let second = Utc(UNIX_EPOCH + Duration::from_millis(951_782_399_999)).seconds();
        assert_eq!(second, "2000-02-28T23:59:59Z");
    }
}
