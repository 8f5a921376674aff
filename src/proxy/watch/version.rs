//! resourceVersions as what they are for us: decimal integers of any length that only grow.
//!
//! Kubernetes long called them opaque; since KEP-5504 they are documented as decimal integers that
//! can be compared within one resource, which is what etcd's revisions always were. A version that
//! is not a plain decimal number is no [`Version`], and a watch that shows one is not resumed.

use std::cmp::Ordering;
use std::fmt;

/// Room for every `u64` (20 digits) without an allocation.
const INLINE: usize = 22;

/// The longest version that is read. etcd's have 19 digits; one of megabytes, which a frame has room
/// for, would be kept for as long as its watch runs.
const MAX_DIGITS: usize = 1024;

/// A position in the history of a resource: a decimal integer greater than zero.
///
/// Zero is no position: as a parameter it means "anything you have", and objects never carry it.
#[derive(Clone)]
pub struct Version(Digits);

/// The digits, most significant first, without leading zeros.
#[derive(Clone)]
enum Digits {
    Inline { len: u8, digits: [u8; INLINE] },
    Heap(Box<[u8]>),
}

impl Version {
    /// Reads a version; `None` for zero, for nothing, for what is not only digits, and for more of
    /// them than anybody needs.
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.len() > MAX_DIGITS || !is_numeric(text) {
            return None;
        }
        let significant = strip_zeros(text);
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

    /// The digits, without leading zeros.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.0 {
            Digits::Inline { len, digits } => &digits[..usize::from(*len)],
            Digits::Heap(digits) => digits,
        }
    }

    /// The digits as text, as a query parameter carries them.
    pub fn as_str(&self) -> &str {
        // Only digits get in, so this is always text.
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }
}

/// Whether the text is one or more decimal digits and nothing else: no sign, no space.
pub fn is_numeric(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(u8::is_ascii_digit)
}

fn strip_zeros(text: &[u8]) -> &[u8] {
    let zeros = text.iter().take_while(|&&b| b == b'0').count();
    &text[zeros..]
}

impl PartialEq for Version {
    fn eq(&self, other: &Self) -> bool {
        self.as_bytes() == other.as_bytes()
    }
}

impl Eq for Version {}

impl Ord for Version {
    fn cmp(&self, other: &Self) -> Ordering {
        let (a, b) = (self.as_bytes(), other.as_bytes());
        a.len().cmp(&b.len()).then_with(|| a.cmp(b))
    }
}

impl PartialOrd for Version {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn only_positive_decimal_integers_are_versions() {
        for no in ["", "0", "000", "-1", "+1", " 1", "1 ", "1.0", "0x1", "abc", "1a", "١"] {
            assert_eq!(Version::parse(no.as_bytes()), None, "{no:?}");
        }
        for (text, digits) in
            [("1", "1"), ("007", "7"), ("18446744073709551616", "18446744073709551616")]
        {
            assert_eq!(Version::parse(text.as_bytes()).unwrap().as_str(), digits);
        }
    }

    #[test]
    fn any_length_compares_as_a_number() {
        let long =
            |tail: &str| Version::parse(format!("{}{tail}", "9".repeat(60)).as_bytes()).unwrap();
        assert!(long("1") < long("2"));
        assert!(long("") < long("0"));
        assert!(Version::parse(b"9") < Version::parse(b"10"));
        assert_eq!(Version::parse(&[b'0'; 99]), None);
        assert!(Version::parse(&[b'9'; MAX_DIGITS]).is_some());
        assert_eq!(Version::parse(&[b'9'; MAX_DIGITS + 1]), None, "more than anybody needs");
    }

    proptest! {
        #[test]
        fn compares_as_integers_do(a in 1u64.., b in 1u64..) {
            let version = |n: u64| Version::parse(n.to_string().as_bytes()).unwrap();
            prop_assert_eq!(version(a).cmp(&version(b)), a.cmp(&b));
            prop_assert_eq!(version(a) == version(b), a == b);
        }
    }
}
