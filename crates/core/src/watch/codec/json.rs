//! Parses one JSON event and skips the fields that [`Event`] does not contain.

use std::sync::LazyLock;

use memchr::memchr3_iter;
use memchr::memmem::Finder;

use super::event::{Event, EventType, Found, INITIAL_EVENTS_END, once};
use super::version::HeadVersion;

/// Maximum nesting of a skipped value. Go's decoder accepts 10,000 levels; real objects have a few dozen.
const MAX_DEPTH: u32 = 512;

/// Length of the beginning of a body that [`early_version`] searches, in bytes.
const EARLY: usize = 512;

/// Parses one frame; `None` if it is not an event.
pub fn event(frame: &[u8]) -> Option<Event<'_>> {
    let mut scan = Scan { bytes: frame, at: 0 };
    let mut found = Found::default();
    scan.members(|scan, key| {
        if text_is(key, b"type") {
            once(found.event_type.is_some())?;
            let text = scan.string()?;
            found.event_type = Some(EventType::with_name(|name| text_is(text, name)));
            Some(())
        } else if text_is(key, b"object") {
            once(std::mem::replace(&mut found.has_object, true))?;
            object(scan, &mut found)
        } else {
            scan.skip()
        }
    })?;
    if scan.token().is_some() {
        return None;
    }
    found.into_event(|at| ends_initial_events(Scan { bytes: frame, at }))
}

/// Whether a body that begins with `bytes` is a Status; `None` if its kind has not arrived.
pub fn is_status(bytes: &[u8]) -> Option<bool> {
    let mut found = None;
    // Ends with `None` at the kind, at the end of the bytes, or at malformed text.
    let whole = Scan { bytes, at: 0 }.members(|scan, key| {
        if !text_is(key, b"kind") || scan.token() != Some(b'"') {
            return scan.skip();
        }
        found = Some(text_is(scan.string()?, b"Status"));
        None
    });
    found.or(whole.map(|()| false))
}

/// The `metadata.resourceVersion` of an object, a list, a table or a Status, of which `bytes` are the beginning.
pub fn head_version(bytes: &[u8]) -> HeadVersion {
    match early_version(bytes) {
        Some(text) => HeadVersion::of_text(text),
        None => scanned_version(bytes),
    }
}

fn scanned_version(bytes: &[u8]) -> HeadVersion {
    let mut scan = Scan { bytes, at: 0 };
    let mut found = None;
    // Ends with `None` at the version, at the end of the bytes, or at malformed text.
    let whole = scan.members(|scan, key| {
        if !text_is(key, b"metadata") {
            return scan.skip();
        }
        scan.members_if_object(|scan, key| {
            if text_is(key, b"resourceVersion") && scan.token() == Some(b'"') {
                found = Some(scan.string()?);
                return None;
            }
            scan.skip()
        })
    });
    let first = bytes.iter().find(|byte| !byte.is_ascii_whitespace());
    match (found, whole) {
        (Some(text), _) => HeadVersion::of_text(text),
        (None, None) if first.is_none_or(|byte| *byte == b'{') => HeadVersion::Incomplete,
        (None, _) => HeadVersion::None,
    }
}

/// The `metadata.resourceVersion` if it is in the first [`EARLY`] bytes, and no nested object and no escape precede it, as
/// in the built-in resources. Then `{` occurs twice before it, and no brace and no backslash besides. Quotes only begin or
/// end strings, so `"metadata":{` and `"resourceVersion":"` are no part of a string.
fn early_version(bytes: &[u8]) -> Option<&[u8]> {
    static KEY: LazyLock<Finder<'_>> = LazyLock::new(|| Finder::new(b"\"resourceVersion\":\""));
    let early = &bytes[..bytes.len().min(EARLY)];
    let at = KEY.find(early)?;
    let mut braces = memchr3_iter(b'{', b'}', b'\\', &early[..at]);
    let (outer, metadata) = (braces.next()?, braces.next()?);
    if outer != 0 || braces.next().is_some() || !early[..=metadata].ends_with(b"\"metadata\":{") {
        return None;
    }
    let text = &bytes[at + KEY.needle().len()..];
    let end = text.iter().position(|byte| !byte.is_ascii_digit())?;
    (text[end] == b'"').then_some(&text[..end])
}

/// The `resourceVersion` of `object`, which the closing brace of the outermost object must follow.
pub fn last_metadata_version(object: &[u8]) -> Option<&[u8]> {
    let mut scan = Scan { bytes: object, at: 0 };
    let mut version = None;
    scan.members(|scan, key| {
        if text_is(key, b"resourceVersion") && scan.token() == Some(b'"') {
            version = Some(scan.string()?);
            return Some(());
        }
        scan.skip()
    })?;
    scan.expect(b'}')?;
    version.filter(|_| scan.token().is_none())
}

fn object<'a>(scan: &mut Scan<'a>, found: &mut Found<'a>) -> Option<()> {
    scan.members_if_object(|scan, key| {
        if text_is(key, b"metadata") {
            once(std::mem::replace(&mut found.has_metadata, true))?;
            metadata(scan, found)
        } else if text_is(key, b"code") {
            let start = scan.start()?;
            scan.skip()?;
            found.code = number(&scan.bytes[start..scan.at]);
            Some(())
        } else {
            scan.skip()
        }
    })
}

fn metadata<'a>(scan: &mut Scan<'a>, found: &mut Found<'a>) -> Option<()> {
    scan.members_if_object(|scan, key| {
        if text_is(key, b"resourceVersion") {
            once(std::mem::replace(&mut found.has_version, true))?;
            if scan.token() == Some(b'"') {
                found.version = Some(scan.string()?);
                return Some(());
            }
        } else if text_is(key, b"annotations") {
            once(found.annotations.is_some())?;
            found.annotations = Some(scan.start()?);
        }
        scan.skip()
    })
}

fn ends_initial_events(mut scan: Scan<'_>) -> Option<bool> {
    let mut ends = false;
    scan.members_if_object(|scan, key| {
        if text_is(key, INITIAL_EVENTS_END) && scan.token() == Some(b'"') {
            ends = text_is(scan.string()?, b"true");
            return Some(());
        }
        scan.skip()
    })?;
    Some(ends)
}

fn number(text: &[u8]) -> Option<u16> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// A read position in the frame.
struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    /// Skips white space and returns the next byte without consuming it.
    fn token(&mut self) -> Option<u8> {
        while let Some(&byte) = self.bytes.get(self.at) {
            if !matches!(byte, b' ' | b'\n' | b'\t' | b'\r') {
                return Some(byte);
            }
            self.at += 1;
        }
        None
    }

    /// The offset of the next value.
    fn start(&mut self) -> Option<usize> {
        self.token().map(|_| self.at)
    }

    fn expect(&mut self, wanted: u8) -> Option<()> {
        if self.token()? != wanted {
            return None;
        }
        self.at += 1;
        Some(())
    }

    /// Calls `each` with the key of every member of an object; `each` consumes the value.
    fn members(&mut self, mut each: impl FnMut(&mut Self, &'a [u8]) -> Option<()>) -> Option<()> {
        self.expect(b'{')?;
        if self.token()? == b'}' {
            self.at += 1;
            return Some(());
        }
        loop {
            let key = self.string()?;
            self.expect(b':')?;
            each(self, key)?;
            match self.token()? {
                b',' => self.at += 1,
                b'}' => {
                    self.at += 1;
                    return Some(());
                }
                _ => return None,
            }
        }
    }

    /// As [`Self::members`], but skips a value that is not an object.
    fn members_if_object(
        &mut self,
        each: impl FnMut(&mut Self, &'a [u8]) -> Option<()>,
    ) -> Option<()> {
        if self.token() == Some(b'{') { self.members(each) } else { self.skip() }
    }

    /// Consumes a string and returns the text between its quotes, without decoding escapes.
    fn string(&mut self) -> Option<&'a [u8]> {
        self.expect(b'"')?;
        let start = self.at;
        self.at = string_end(self.bytes, start)?;
        Some(&self.bytes[start..self.at - 1])
    }

    /// Skips one value of any type.
    fn skip(&mut self) -> Option<()> {
        match self.token()? {
            b'"' => self.at = string_end(self.bytes, self.at + 1)?,
            b'{' | b'[' => self.at = nested_end(self.bytes, self.at)?,
            _ => {
                let start = self.at;
                let scalar = |b: &u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'+' | b'.');
                self.at += self.bytes[start..].iter().take_while(|b| scalar(b)).count();
                if self.at == start {
                    return None;
                }
            }
        }
        Some(())
    }
}

/// The offset after the object or array that begins at `at`.
fn nested_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    let mut depth = 0;
    loop {
        let byte = *bytes.get(at)?;
        at += 1;
        match byte {
            b'"' => at = string_end(bytes, at)?,
            b'{' | b'[' if depth == MAX_DEPTH => return None,
            b'{' | b'[' => depth += 1,
            b'}' | b']' if depth == 1 => return Some(at),
            b'}' | b']' => depth -= 1,
            _ => {}
        }
    }
}

/// The offset after the closing quote of the string whose text begins at `at`.
///
/// It tests eight bytes at a time for a quote or a backslash. After `x - 0x0101…`, a byte above 0x7f
/// that was not above 0x7f in `x` was zero; the lowest such byte is exact (Hacker's Delight,
/// section 6-1).
fn string_end(bytes: &[u8], mut at: usize) -> Option<usize> {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const QUOTES: u64 = ONES * b'"' as u64;
    const BACKSLASHES: u64 = ONES * b'\\' as u64;
    let zeros = |x: u64| x.wrapping_sub(ONES) & !x & (ONES << 7);
    loop {
        while let Some(word) = bytes.get(at..).and_then(<[u8]>::first_chunk::<8>) {
            let word = u64::from_le_bytes(*word);
            let hits = zeros(word ^ QUOTES) | zeros(word ^ BACKSLASHES);
            if hits != 0 {
                at += hits.trailing_zeros() as usize / 8;
                break;
            }
            at += 8;
        }
        match *bytes.get(at)? {
            b'"' => return Some(at + 1),
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Whether the text between the quotes of a JSON string decodes to the ASCII text `wanted`.
fn text_is(written: &[u8], wanted: &[u8]) -> bool {
    // An escape sequence of an ASCII character has two to six bytes.
    let may_be_escaped = (wanted.len() + 1..=6 * wanted.len()).contains(&written.len());
    written == wanted
        || may_be_escaped
            && written.contains(&b'\\')
            && serde_json::from_slice::<String>(&[b"\"", written, b"\""].concat())
                .is_ok_and(|text| text.as_bytes() == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// JSON with the keys of a version at any place, and strings that look like parts of JSON.
    fn value() -> BoxedStrategy<String> {
        let text = r#"[a{}\[\]:,"\\1]{0,4}"#;
        let quoted = |text: String| serde_json::Value::from(text).to_string();
        let string = prop_oneof![
            text.prop_map(quoted),
            r#"("metadata":\{)?"resourceVersion":"1"#.prop_map(quoted)
        ];
        let leaf =
            prop_oneof![string.clone(), "\"[0-9]{0,2}\"", "[0-9]{1,2}", Just("null".to_owned())];
        let keys = ["metadata", "resourceVersion", "items"].map(|key| format!("\"{key}\""));
        let key = prop_oneof![3 => prop::sample::select(keys.to_vec()), 1 => string];
        leaf.prop_recursive(4, 24, 4, move |inner| {
            let member =
                (key.clone(), inner.clone()).prop_map(|(key, value)| format!("{key}:{value}"));
            prop_oneof![
                3 => vec(member, 0..4).prop_map(|members| format!("{{{}}}", members.join(","))),
                1 => vec(inner, 0..3).prop_map(|values| format!("[{}]", values.join(","))),
            ]
        })
        .boxed()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]
        #[test]
        fn early_version_is_the_one_that_a_scan_finds(text in value(), cut in 0..200_usize) {
            let bytes = text.as_bytes();
            for bytes in [bytes, &bytes[..bytes.len().min(cut)]] {
                if let Some(early) = early_version(bytes) {
                    prop_assert_eq!(HeadVersion::of_text(early), scanned_version(bytes));
                }
            }
        }
    }
}
