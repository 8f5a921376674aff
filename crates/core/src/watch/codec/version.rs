//! Resource versions as decimal integers of any length.
//!
//! Kubernetes long documented resource versions as opaque. KEP-5504 defines them as decimal integers that
//! can be compared within one resource type, as etcd's revisions always could. A version that is not a plain
//! decimal number does not parse, and a watch that contains one is not resumed.

use std::cmp::Ordering;
use std::fmt;

/// Digits that are stored without an allocation; a `u64` has at most 20.
const INLINE: usize = 22;

/// Maximum length of a version. etcd's versions have at most 19 digits. Without a limit, a hostile frame
/// could make the cursor of a watch occupy megabytes.
const MAX_DIGITS: usize = 1024;

/// The greatest difference between two successive versions of one history. Versions that are clock readings in
/// nanoseconds differ by less within 2.2 years, and etcd's revisions count writes.
const MAX_STEP: u128 = 1 << 56;
/// Digits of [`MAX_STEP`]. A shorter version is never the end of a jump.
const MAX_STEP_DIGITS: usize = 17;

/// A position in the history of a resource: a decimal integer greater than zero.
///
/// Zero is not a position: as a parameter it means "any version", and no object has it.
#[derive(Clone, PartialEq, Eq)]
pub struct ResourceVersion(Digits);

/// The digits, most significant first, without leading zeros. Unused bytes of `digits` are zero, and up to
/// [`INLINE`] digits are always inline, so the derived equality compares versions correctly.
#[derive(Clone, PartialEq, Eq)]
enum Digits {
    Inline { len: u8, digits: [u8; INLINE] },
    Heap(Box<[u8]>),
}

impl ResourceVersion {
    /// Parses a version. Returns `None` for zero, an empty text, any byte that is not a digit, and more than
    /// 1,024 digits.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let is_number = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
        if text.len() > MAX_DIGITS || !is_number {
            return None;
        }
        let zeros = text.iter().take_while(|&&b| b == b'0').count();
        let significant = &text[zeros..];
        let len = significant.len();
        if len == 0 {
            return None;
        }
        Some(Self(if len <= INLINE {
            let mut digits = [0; INLINE];
            digits[..len].copy_from_slice(significant);
            Digits::Inline { len: len as u8, digits }
        } else {
            Digits::Heap(significant.into())
        }))
    }

    fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Digits::Inline { len, digits } => &digits[..usize::from(*len)],
            Digits::Heap(digits) => digits,
        }
    }

    /// The version that is lower by one; `None` if that is no position.
    pub fn before(&self) -> Option<Self> {
        let mut digits = self.as_bytes().to_vec();
        let borrows = digits.iter().rev().take_while(|&&digit| digit == b'0').count();
        let nonzero = digits.len() - borrows;
        let (last, zeros) = digits.split_at_mut(nonzero);
        *last.last_mut()? -= 1;
        zeros.fill(b'9');
        Self::parse(&digits)
    }

    /// Whether `later` is so far above this version that both cannot belong to one history.
    pub fn is_jump_to(&self, later: &Self) -> bool {
        if later.as_bytes().len() < MAX_STEP_DIGITS {
            return false;
        }
        let number = |version: &Self| version.as_str().parse::<u128>().ok();
        match (number(self), number(later)) {
            (Some(from), Some(to)) => to.saturating_sub(from) > MAX_STEP,
            (Some(_), None) => true,
            (None, _) => self.as_bytes().len() < later.as_bytes().len(),
        }
    }

    /// The digits as text.
    pub fn as_str(&self) -> &str {
        // `parse` accepts only digits, so this is always valid UTF-8.
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }
}

/// The version as an integer; `None` if it is not a decimal number greater than zero, or above `u64::MAX`.
pub fn as_u64(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 {
        return None;
    }
    let digit = |number: u64, byte: &u8| {
        let digit = u64::from(byte.wrapping_sub(b'0'));
        if digit > 9 { None } else { number.checked_mul(10)?.checked_add(digit) }
    };
    text.iter().try_fold(0, digit).filter(|&number| number > 0)
}

/// The result of reading the beginning of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadVersion {
    /// The version.
    Version(u64),
    /// The bytes end before the version.
    Incomplete,
    /// The body has no version that is a number, or is no Kubernetes object.
    None,
}

impl HeadVersion {
    /// The version in these digits.
    pub fn of_text(text: &[u8]) -> Self {
        as_u64(text).map_or(Self::None, Self::Version)
    }
}

impl Ord for ResourceVersion {
    fn cmp(&self, other: &Self) -> Ordering {
        let (a, b) = (self.as_bytes(), other.as_bytes());
        a.len().cmp(&b.len()).then_with(|| a.cmp(b))
    }
}

impl PartialOrd for ResourceVersion {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for ResourceVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn parse_accepts_only_positive_decimal_integers() {
        for invalid in ["", "0", "000", "-1", "+1", " 1", "1 ", "1.0", "0x1", "abc", "1a", "١"] {
            assert_eq!(ResourceVersion::parse(invalid.as_bytes()), None, "{invalid:?}");
        }
        for (text, digits) in
            [("1", "1"), ("007", "7"), ("18446744073709551616", "18446744073709551616")]
        {
            assert_eq!(ResourceVersion::parse(text.as_bytes()).unwrap().as_str(), digits);
        }
    }

    #[test]
    fn as_u64_accepts_only_positive_decimal_integers_of_64_bits() {
        for (text, number) in [
            ("1", Some(1)),
            ("007", Some(7)),
            ("18446744073709551615", Some(u64::MAX)),
            ("18446744073709551616", None),
            ("99999999999999999999", None),
            ("000000000000000000001", None),
            ("0", None),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("1 ", None),
            ("1a", None),
        ] {
            assert_eq!(as_u64(text.as_bytes()), number, "{text:?}");
        }
    }

    #[test]
    fn comparison_is_numeric_for_any_length() {
        let long = |tail: &str| {
            ResourceVersion::parse(format!("{}{tail}", "9".repeat(60)).as_bytes()).unwrap()
        };
        assert!(long("1") < long("2"));
        assert!(long("") < long("0"));
        assert!(ResourceVersion::parse(b"9") < ResourceVersion::parse(b"10"));
        assert_eq!(ResourceVersion::parse(&[b'0'; 99]), None);
        assert!(ResourceVersion::parse(&[b'9'; MAX_DIGITS]).is_some());
        assert_eq!(ResourceVersion::parse(&[b'9'; MAX_DIGITS + 1]), None, "more than the maximum");
    }

    #[test]
    fn before_is_lower_by_one() {
        let before = |text: &str| ResourceVersion::parse(text.as_bytes()).unwrap().before();
        assert_eq!(before("1"), None);
        let (nines, long) = ("9".repeat(60), format!("1{}", "0".repeat(60)));
        for (text, expected) in
            [("2", "1"), ("10", "9"), ("100", "99"), ("1100", "1099"), ("1234", "1233")]
        {
            assert_eq!(before(text).unwrap().as_str(), expected);
        }
        assert_eq!(before(&long).unwrap().as_str(), nines);
    }

    #[test]
    fn is_jump_to_accepts_steps_of_clocks_and_of_counters() {
        let version = |text: &str| ResourceVersion::parse(text.as_bytes()).unwrap();
        let nines = "9".repeat(60);
        for (from, to, expected) in [
            ("1", "2", false),
            ("1", "9999999999999999", false),
            ("72057594037927936", "144115188075855872", false),
            ("72057594037927936", "144115188075855873", true),
            ("1000", "1152921504606846976", true),
            ("1700000000000000000", "1731536000000000000", false),
            ("1152921504606846976", "1000", false),
            ("1000", &nines, true),
            (&nines, &nines, false),
            (&nines, &format!("{nines}0"), true),
        ] {
            assert_eq!(version(from).is_jump_to(&version(to)), expected, "{from} {to}");
        }
    }

    proptest! {
        #[test]
        fn comparison_equals_that_of_integers(a in 1u64.., b in 1u64..) {
            let version = |n: u64| ResourceVersion::parse(n.to_string().as_bytes()).unwrap();
            prop_assert_eq!(version(a).cmp(&version(b)), a.cmp(&b));
            prop_assert_eq!(version(a) == version(b), a == b);
        }
    }
}
