//! Durations and sizes with units: `250ms`, `1m30s`, `64KiB`. A number without a unit is refused,
//! because its author may have meant another unit.

use std::fmt::{self, Write as _};
use std::time::Duration;

use jackstay_core::discovery::address::quote;

/// A share of 0 % to 100 %.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Percent(u8);

impl Percent {
    /// 0 %.
    pub const ZERO: Self = Self(0);

    /// This share; `None` if it is more than 100 %.
    pub fn new(percent: u8) -> Option<Self> {
        (percent <= 100).then_some(Self(percent))
    }

    /// The number of percent, at most 100.
    pub fn get(self) -> u8 {
        self.0
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

pub(super) const MS: Duration = Duration::from_millis(1);
pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const MINUTE: Duration = Duration::from_secs(60);
pub(super) const HOUR: Duration = Duration::from_secs(3600);

/// What a text with a unit measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// A time span.
    Duration,
    /// A number of bytes.
    Size,
    /// A [`Percent`].
    Share,
}

impl Quantity {
    /// Its name in messages.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Duration => "duration",
            Self::Size => "size",
            Self::Share => "share",
        }
    }

    /// Correct texts, for messages.
    fn examples(self) -> &'static str {
        match self {
            Self::Duration => "250ms, 2s, 1m30s or 1h",
            Self::Size => "512B, 64KiB or 1MiB",
            Self::Share => "10%",
        }
    }
}

/// Why a text is not a quantity with a unit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UnitError {
    /// It does not consist of numbers and units of the quantity, the largest unit first.
    #[error("{} is not a {}: write it as {}", quote(.1), .0.as_str(), .0.examples())]
    Malformed(Quantity, String),
    /// Its last number has no unit.
    #[error("the {} {} has no unit: write it as {}", .0.as_str(), quote(.1), .0.examples())]
    NoUnit(Quantity, String),
    /// It exceeds 64 bits.
    #[error("the {} {} is too large", .0.as_str(), quote(.1))]
    TooLarge(Quantity, String),
    /// It is not within the limits.
    #[error("{0}")]
    OutOfRange(#[from] OutOfRange),
}

/// A value that is not within its limits.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text} is out of range: {low} to {high}")]
pub struct OutOfRange {
    /// The value as written.
    pub text: String,
    /// The lower limit, in the form that the text has.
    pub low: String,
    /// The upper limit.
    pub high: String,
}

/// Units of time in nanoseconds, largest first.
const TIME: [(&str, u64); 5] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
];

/// Units of size in bytes, largest first.
const SIZE: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1)];

/// Reads `250ms`, `2s`, `1h` or `1m30s`.
///
/// # Errors
/// The text is not a duration, or exceeds 64 bits of nanoseconds.
pub fn parse_duration(text: &str) -> Result<Duration, UnitError> {
    parse(text, &TIME, Quantity::Duration).map(Duration::from_nanos)
}

/// Reads `64KiB`, `1MiB` or `512B`.
///
/// # Errors
/// The text is not a size, or exceeds 64 bits of bytes.
pub fn parse_size(text: &str) -> Result<u64, UnitError> {
    parse(text, &SIZE, Quantity::Size)
}

/// Reads a whole number of percent, such as `10%`.
pub(super) fn parse_percent(text: &str) -> Result<Percent, UnitError> {
    let digits = text.strip_suffix('%');
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    match digits {
        Some(digits) if is_number(digits) => {
            digits.parse().ok().and_then(Percent::new).ok_or_else(|| {
                let (low, high) = ("0%".to_owned(), "100%".to_owned());
                OutOfRange { text: text.to_owned(), low, high }.into()
            })
        }
        None if is_number(text) => Err(UnitError::NoUnit(Quantity::Share, text.to_owned())),
        _ => Err(UnitError::Malformed(Quantity::Share, text.to_owned())),
    }
}

/// A duration in the form that [`parse_duration`] reads, rounded down to microseconds.
pub fn format_duration(duration: Duration) -> String {
    let mut nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    let mut text = String::new();
    for (unit, factor) in TIME {
        if nanos >= factor {
            let _ = write!(text, "{}{unit}", nanos / factor);
            nanos %= factor;
        }
    }
    if text.is_empty() { "0s".to_owned() } else { text }
}

/// A size in the form that [`parse_size`] reads, in the largest unit that divides it.
pub fn format_size(bytes: u64) -> String {
    let unit = SIZE.iter().find(|(_, factor)| bytes >= *factor && bytes.is_multiple_of(*factor));
    let (name, factor) = unit.unwrap_or(&("B", 1));
    format!("{}{name}", bytes / factor)
}

/// Reads numbers with units: the largest unit first, each unit at most once.
fn parse(text: &str, units: &[(&str, u64)], quantity: Quantity) -> Result<u64, UnitError> {
    let malformed = || UnitError::Malformed(quantity, text.to_owned());
    let too_large = || UnitError::TooLarge(quantity, text.to_owned());
    if text.is_empty() {
        return Err(malformed());
    }
    let mut rest = text;
    let mut allowed = units;
    let mut total = 0_u64;
    while !rest.is_empty() {
        let (digits, after) = split_prefix(rest, |c| c.is_ascii_digit());
        let (unit, after) = split_prefix(after, |c| c.is_ascii_alphabetic());
        if digits.is_empty() {
            return Err(malformed());
        }
        if unit.is_empty() && after.is_empty() {
            return Err(UnitError::NoUnit(quantity, text.to_owned()));
        }
        let index = allowed.iter().position(|(name, _)| *name == unit).ok_or_else(malformed)?;
        let number: u64 = digits.parse().map_err(|_| too_large())?;
        let value = number.checked_mul(allowed[index].1).ok_or_else(too_large)?;
        total = total.checked_add(value).ok_or_else(too_large)?;
        allowed = &allowed[index + 1..];
        rest = after;
    }
    Ok(total)
}

/// Splits after the leading characters that meet `condition`.
fn split_prefix(text: &str, condition: impl Fn(char) -> bool) -> (&str, &str) {
    text.split_at(text.find(|c| !condition(c)).unwrap_or(text.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_duration_accepts_ordered_units_and_explains_errors() {
        for (text, millis) in [
            ("0s", 0),
            ("250ms", 250),
            ("2s", 2_000),
            ("1m30s", 90_000),
            ("1h", 3_600_000),
            ("1h1m1s1ms", 3_661_001),
            ("007s", 7_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        assert_eq!(parse_duration("5us"), Ok(Duration::from_micros(5)));
        let hint = "write it as 250ms, 2s, 1m30s or 1h";
        for (text, error) in [
            ("2", format!("the duration \"2\" has no unit: {hint}")),
            ("1m30", format!("the duration \"1m30\" has no unit: {hint}")),
            ("", format!("\"\" is not a duration: {hint}")),
            ("s", format!("\"s\" is not a duration: {hint}")),
            ("-2s", format!("\"-2s\" is not a duration: {hint}")),
            ("1.5s", format!("\"1.5s\" is not a duration: {hint}")),
            ("2 s", format!("\"2 s\" is not a duration: {hint}")),
            ("2S", format!("\"2S\" is not a duration: {hint}")),
            ("1s1m", format!("\"1s1m\" is not a duration: {hint}")),
            ("1s1s", format!("\"1s1s\" is not a duration: {hint}")),
            ("2días", format!("\"2días\" is not a duration: {hint}")),
            ("99999999999999999999s", "the duration \"99999999999999999999s\" is too large".into()),
            ("9999999999h", "the duration \"9999999999h\" is too large".into()),
        ] {
            assert_eq!(parse_duration(text).unwrap_err().to_string(), error, "{text}");
        }
    }

    #[test]
    fn parse_percent_accepts_whole_numbers_up_to_100() {
        for percent in [0, 1, 10, 100] {
            let text = format!("{percent}%");
            let parsed = parse_percent(&text).unwrap();
            assert_eq!((parsed.get(), parsed.to_string()), (percent, text));
        }
        for (text, error) in [
            ("101%", "101% is out of range: 0% to 100%"),
            ("99999999999999999999%", "99999999999999999999% is out of range: 0% to 100%"),
            ("10", "the share \"10\" has no unit: write it as 10%"),
            ("", "\"\" is not a share: write it as 10%"),
            ("%", "\"%\" is not a share: write it as 10%"),
            ("-1%", "\"-1%\" is not a share: write it as 10%"),
            ("+1%", "\"+1%\" is not a share: write it as 10%"),
            ("0.5%", "\"0.5%\" is not a share: write it as 10%"),
            ("10 %", "\"10 %\" is not a share: write it as 10%"),
        ] {
            assert_eq!(parse_percent(text).unwrap_err().to_string(), error, "{text}");
        }
    }

    #[test]
    fn parse_size_accepts_units_and_format_size_uses_the_largest() {
        for (text, bytes) in [("512B", 512), ("64KiB", 65_536), ("1MiB", 1 << 20), ("1KiB1B", 1025)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        let hint = "write it as 512B, 64KiB or 1MiB";
        for (text, error) in [
            ("64", format!("the size \"64\" has no unit: {hint}")),
            ("64KB", format!("\"64KB\" is not a size: {hint}")),
        ] {
            assert_eq!(parse_size(text).unwrap_err().to_string(), error);
        }
        for (bytes, text) in [(0, "0B"), (1, "1B"), (1025, "1025B"), (65_536, "64KiB")] {
            assert_eq!(format_size(bytes), text);
        }
    }

    proptest::proptest! {
        #[test]
        fn formatted_values_parse_back(micros in 0_u64..u64::MAX / 1000, bytes: u64, text: String) {
            let duration = Duration::from_micros(micros);
            assert_eq!(parse_duration(&format_duration(duration)), Ok(duration));
            assert_eq!(parse_size(&format_size(bytes)), Ok(bytes));
            let _ = (parse_duration(&text), parse_size(&text));
        }
    }
}
