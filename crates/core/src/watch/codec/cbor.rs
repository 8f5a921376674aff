//! Parses one event in CBOR (RFC 8949) and skips the fields that [`Event`] does not contain.
//!
//! Kubernetes encodes strings and keys as byte strings, all lengths as definite ones, and encloses the event and its
//! object in the tag of self-described CBOR. Other encoders may use text strings, indefinite lengths and other
//! tags.

use memchr::memmem::rfind_iter;
use serde_json::{Map, Value};

use super::event::{Event, EventType, Found, INITIAL_EVENTS_END, once};
use super::item_end::{ItemEnd, ItemHead, MAX_DEPTH};
use super::version::{HeadVersion, as_u64};

/// The tag of self-described CBOR, which has no meaning (RFC 8949, section 3.4.6).
const SELF_DESCRIBED: u64 = 55_799;

const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
const MAP: u8 = 5;
const TAG: u8 = 6;
/// Initial byte that ends an item of indefinite length.
const BREAK: u8 = 0xff;

/// Parses one frame; `None` if it is not an event.
pub fn event(frame: &[u8]) -> Option<Event<'_>> {
    let mut scan = Scan { bytes: frame, at: 0 };
    let mut found = Found::default();
    scan.members(|scan, key| {
        if key.is(b"type") {
            once(found.event_type.is_some())?;
            let text = scan.string()?;
            found.event_type = Some(EventType::with_name(|name| text.is(name)));
            Some(())
        } else if key.is(b"object") {
            once(std::mem::replace(&mut found.has_object, true))?;
            object(scan, &mut found)
        } else {
            scan.skip()
        }
    })?;
    if scan.at != frame.len() {
        return None;
    }
    found.into_event(|at| ends_initial_events(Scan { bytes: frame, at }))
}

/// An object as a JSON value; `None` if it is malformed, is nested too deeply, or has something that JSON has not.
pub(crate) fn value(bytes: &[u8]) -> Option<Value> {
    let mut scan = Scan { bytes, at: 0 };
    let value = scan.value(MAX_DEPTH)?;
    (scan.at == bytes.len()).then_some(value)
}

/// The `metadata.resourceVersion` of an object, a list or a table, of which `bytes` are the beginning.
pub fn head_version(bytes: &[u8]) -> HeadVersion {
    match (Scan { bytes, at: 0 }).item() {
        Some((ItemHead { major: MAP, .. }, _)) => {}
        Some(_) => return HeadVersion::None,
        None => return HeadVersion::Incomplete,
    }
    let (mut version, mut has_metadata) = (None, false);
    // Ends with `None` after the metadata, at the end of the bytes, or at a malformed item.
    let whole = Scan { bytes, at: 0 }.members(|scan, key| {
        if !key.is(b"metadata") {
            return scan.skip();
        }
        version = scan.version_member()?;
        has_metadata = true;
        None
    });
    match (version, has_metadata || whole.is_some()) {
        (Some(text), _) => HeadVersion::of_text(text),
        (None, true) => HeadVersion::None,
        (None, false) => HeadVersion::Incomplete,
    }
}

/// Whether a body that begins with `bytes` is a Status; `None` if its kind has not arrived.
pub fn is_status(bytes: &[u8]) -> Option<bool> {
    let mut found = None;
    // Ends with `None` at the kind, at the end of the bytes, or at a malformed item.
    let whole = Scan { bytes, at: 0 }.members(|scan, key| {
        if !key.is(b"kind") {
            return scan.skip();
        }
        found = Some(scan.key()?.is(b"Status"));
        None
    });
    found.or(whole.map(|()| false))
}

/// The version in the end of a list whose items precede its metadata.
///
/// The list ends after its metadata and other members with strings as values. The items are not read, so the
/// metadata of the last item could be taken for that of a list that has none; its version is not above that of the
/// list.
pub fn tail_version(bytes: &[u8]) -> Option<u64> {
    const KEY: &[u8] = b"metadata";
    let at = rfind_iter(bytes, KEY).next()?;
    let is_key = matches!(bytes.get(at.checked_sub(1)?), Some(0x48 | 0x68));
    let mut scan = Scan { bytes, at: at + KEY.len() };
    let version = scan.version_member()?;
    while scan.at < bytes.len() && bytes[scan.at..] != [BREAK] {
        scan.string()?;
        scan.string()?;
    }
    version.filter(|_| is_key).and_then(as_u64)
}

fn object<'a>(scan: &mut Scan<'a>, found: &mut Found<'a>) -> Option<()> {
    scan.members_if_map(|scan, key| {
        if key.is(b"metadata") {
            once(std::mem::replace(&mut found.has_metadata, true))?;
            metadata(scan, found)
        } else if key.is(b"code") {
            let start = scan.at;
            scan.skip()?;
            found.code = Scan { at: start, ..*scan }.unsigned();
            Some(())
        } else {
            scan.skip()
        }
    })
}

fn metadata<'a>(scan: &mut Scan<'a>, found: &mut Found<'a>) -> Option<()> {
    scan.members_if_map(|scan, key| {
        if key.is(b"resourceVersion") {
            once(std::mem::replace(&mut found.has_version, true))?;
            found.version = scan.text()?;
            return Some(());
        }
        if key.is(b"annotations") {
            once(found.annotations.is_some())?;
            found.annotations = Some(scan.at);
        }
        scan.skip()
    })
}

fn ends_initial_events(mut scan: Scan<'_>) -> Option<bool> {
    let mut ends = false;
    scan.members_if_map(|scan, key| {
        if key.is(INITIAL_EVENTS_END) {
            let start = scan.at;
            scan.skip()?;
            ends = Scan { at: start, ..*scan }.string().is_some_and(|value| value.is(b"true"));
            return Some(());
        }
        scan.skip()
    })?;
    Some(ends)
}

/// A byte string or a text string.
#[derive(Clone, Copy)]
enum Text<'a> {
    Whole(&'a [u8]),
    /// The chunks of a string of indefinite length, with their heads.
    Chunks(&'a [u8]),
    /// An item that is no string.
    Other,
}

impl<'a> Text<'a> {
    fn is(self, wanted: &[u8]) -> bool {
        match self {
            Self::Whole(text) => text == wanted,
            Self::Chunks(bytes) => {
                let mut rest = Some(wanted);
                let mut scan = Scan { bytes, at: 0 };
                while let (Some(left), Some(chunk)) = (rest, scan.chunk()) {
                    rest = left.strip_prefix(chunk);
                }
                rest == Some(b"")
            }
            Self::Other => false,
        }
    }

    /// The text if it is contiguous.
    fn as_slice(self) -> Option<&'a [u8]> {
        match self {
            Self::Whole(text) => Some(text),
            Self::Chunks(bytes) => {
                let mut scan = Scan { bytes, at: 0 };
                scan.chunk().filter(|_| scan.at == bytes.len())
            }
            Self::Other => None,
        }
    }
}

/// A read position in the frame.
struct Scan<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Scan<'a> {
    /// Consumes the head of an item.
    fn head(&mut self) -> Option<ItemHead> {
        let (mut head, bytes) = ItemHead::begin(*self.bytes.get(self.at)?).ok()?;
        self.at += 1;
        for &byte in take(self.bytes, &mut self.at, bytes.into())? {
            head.push(byte);
        }
        Some(head)
    }

    /// Consumes the tags and the head of an item. Also returns whether a tag gives the item another meaning.
    fn item(&mut self) -> Option<(ItemHead, bool)> {
        let mut is_tagged = false;
        loop {
            let head = self.head()?;
            if head.major != TAG {
                return Some((head, is_tagged));
            }
            is_tagged |= head.argument? != SELF_DESCRIBED;
        }
    }

    /// Whether the next byte is a break, which it consumes then.
    fn at_break(&mut self) -> bool {
        let is_break = self.bytes.get(self.at) == Some(&BREAK);
        self.at += usize::from(is_break);
        is_break
    }

    /// Calls `each` with the key of every member of a map; `each` consumes the value.
    fn members(&mut self, mut each: impl FnMut(&mut Self, Text<'a>) -> Option<()>) -> Option<()> {
        let (ItemHead { major: MAP, argument: pairs }, _) = self.item()? else { return None };
        let mut left = pairs;
        while left != Some(0) {
            if left.is_none() && self.at_break() {
                break;
            }
            let key = self.key()?;
            each(self, key)?;
            left = left.map(|left| left - 1);
        }
        Some(())
    }

    /// As [`Self::members`], but skips a value that is not a map.
    fn members_if_map(
        &mut self,
        each: impl FnMut(&mut Self, Text<'a>) -> Option<()>,
    ) -> Option<()> {
        let mut value = Scan { ..*self };
        if value.item()?.0.major == MAP { self.members(each) } else { self.skip() }
    }

    /// Consumes an item of any type.
    fn key(&mut self) -> Option<Text<'a>> {
        let start = self.at;
        let (head, is_tagged) = self.item()?;
        match (head, is_tagged) {
            (ItemHead { major: BYTES | TEXT, argument: Some(len) }, false) => {
                let len = usize::try_from(len).ok()?;
                Some(Text::Whole(take(self.bytes, &mut self.at, len)?))
            }
            (ItemHead { major: BYTES | TEXT, argument: None }, false) => {
                let start = self.at;
                while !self.at_break() {
                    self.chunk_of(head.major)?;
                }
                Some(Text::Chunks(&self.bytes[start..self.at - 1]))
            }
            _ => {
                self.at = start;
                self.skip()?;
                Some(Text::Other)
            }
        }
    }

    /// Consumes a string.
    fn string(&mut self) -> Option<Text<'a>> {
        self.key().filter(|text| !matches!(text, Text::Other))
    }

    /// Consumes an item. `Some(None)`: it is no string, or one that is not contiguous.
    #[allow(clippy::option_option)] // malformed, and no text
    fn text(&mut self) -> Option<Option<&'a [u8]>> {
        self.key().map(Text::as_slice)
    }

    /// Consumes one chunk of a string of indefinite length.
    fn chunk_of(&mut self, major: u8) -> Option<&'a [u8]> {
        let head = self.head()?;
        let len = usize::try_from(head.argument?).ok()?;
        (head.major == major).then(|| take(self.bytes, &mut self.at, len))?
    }

    fn chunk(&mut self) -> Option<&'a [u8]> {
        let major = self.bytes.get(self.at)? >> 5;
        self.chunk_of(major)
    }

    /// Consumes the value of `metadata` and returns its `resourceVersion`.
    #[allow(clippy::option_option)] // malformed, and without a version
    fn version_member(&mut self) -> Option<Option<&'a [u8]>> {
        let mut version = None;
        self.members_if_map(|scan, key| {
            if key.is(b"resourceVersion") {
                version = scan.text()?;
                return Some(());
            }
            scan.skip()
        })?;
        Some(version)
    }

    fn unsigned(&mut self) -> Option<u16> {
        match self.item()? {
            (ItemHead { major: 0, argument }, false) => u16::try_from(argument?).ok(),
            _ => None,
        }
    }

    /// Consumes an item of any type, with at most `depth` items inside each other.
    fn value(&mut self, depth: usize) -> Option<Value> {
        let depth = depth.checked_sub(1)?;
        let start = self.at;
        let (head, is_tagged) = self.item()?;
        if is_tagged {
            return None;
        }
        Some(match head {
            ItemHead { major: 0, argument } => argument?.into(),
            ItemHead { major: 1, argument } => (-1 - i64::try_from(argument?).ok()?).into(),
            ItemHead { major: BYTES | TEXT, .. } => {
                self.at = start;
                std::str::from_utf8(self.string()?.as_slice()?).ok()?.into()
            }
            ItemHead { major: ARRAY, argument: mut left } => {
                let mut items = Vec::new();
                while left != Some(0) && !(left.is_none() && self.at_break()) {
                    items.push(self.value(depth)?);
                    left = left.map(|left| left - 1);
                }
                items.into()
            }
            ItemHead { major: MAP, .. } => {
                self.at = start;
                let mut members = Map::new();
                self.members(|scan, key| {
                    let key = std::str::from_utf8(key.as_slice()?).ok()?;
                    members.insert(key.to_owned(), scan.value(depth)?);
                    Some(())
                })?;
                members.into()
            }
            ItemHead { argument, .. } => match (self.at - start, argument?) {
                (1, 20) => false.into(),
                (1, 21) => true.into(),
                (1, 22) => Value::Null,
                (9, bits) => f64::from_bits(bits).into(),
                _ => return None,
            },
        })
    }

    /// Skips one item of any type.
    fn skip(&mut self) -> Option<()> {
        let start = self.at;
        match self.item()?.0 {
            ItemHead { major: 0 | 1 | 7, argument: Some(_) } => return Some(()),
            ItemHead { major: BYTES | TEXT, argument: Some(len) } => {
                return take(self.bytes, &mut self.at, usize::try_from(len).ok()?).map(|_| ());
            }
            _ => self.at = start,
        }
        self.at += ItemEnd::default().find_end(self.bytes.get(self.at..)?).ok()??;
        Some(())
    }
}

fn take<'a>(bytes: &'a [u8], at: &mut usize, len: usize) -> Option<&'a [u8]> {
    let taken = bytes.get(*at..)?.get(..len)?;
    *at += len;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::tests::events::Cbor::{self, Encoded, Map, Number, Object, Text as Bytes};
    use crate::watch::tests::events::cbor_event;

    fn frame(members: &[(&str, Cbor<'_>)]) -> Vec<u8> {
        Object(members).encode()
    }

    #[test]
    fn event_of_kubernetes_has_type_version_and_code() {
        let bytes = cbor_event("MODIFIED", "123", &[], "x");
        assert!(
            bytes.starts_with(b"\xd9\xd9\xf7\xa2\x44type\x48MODIFIED\x46object\xd9\xd9\xf7\xa3")
        );
        let found = event(&bytes).unwrap();
        let expected = Event {
            event_type: EventType::Modified,
            version: Some(b"123"),
            initial_events_end: false,
            status_code: None,
        };
        assert_eq!(found, expected);
        // A truncated frame is unreadable, and so is one that is too long.
        for len in 0..bytes.len() {
            assert_eq!(event(&bytes[..len]), None, "{len}");
        }
        assert_eq!(event(&[&bytes[..], b"\0"].concat()), None);

        let status = |code| {
            let metadata = [("resourceVersion", Bytes("99"))];
            let object = [("code", code), ("metadata", Map(&metadata)), ("kind", Bytes("Status"))];
            frame(&[("object", Object(&object)), ("type", Bytes("ERROR"))])
        };
        for (code, expected) in [
            (Number(410), Some(410)),
            (Encoded(b"\xd9\xd9\xf7\x19\x01\x9a"), Some(410)),
            (Number(65_536), None),
            (Bytes("410"), None),
            (Encoded(b"\x20"), None),
            (Encoded(b"\xf9\x3c\x00"), None),
        ] {
            let bytes = status(code);
            let found = event(&bytes).unwrap();
            assert_eq!((found.event_type, found.version), (EventType::Error, None));
            assert_eq!(found.status_code, expected, "{bytes:02x?}");
        }
    }

    #[test]
    fn event_may_have_other_forms() {
        const INDEFINITE: &[u8] = b"\xbf\x68metadata\xbf\x7f\x68resource\x67Version\xff\x7f\x617\xff\x61a\x9f\xbf\xff\xff\xff\xff";
        let other = [("metadata", Map(&[("resourceVersion", Bytes("666"))]))];
        let metadata = [("x", Map(&other)), ("resourceVersion", Bytes("7")), ("y", Map(&other))];
        let object = [("spec", Map(&other)), ("metadata", Map(&metadata)), ("status", Map(&other))];
        let added = |object| [("type", Bytes("ADDED")), ("object", object)];
        let text = b"\xa2\x64type\x65ADDED\x66object\xa1\x68metadata\xa1\x6fresourceVersion\x617";
        let tags = [b"\xd9\xd9\xf7".repeat(3), vec![0xd8, 42], Map(&object).encode()].concat();
        let number = [("metadata", Map(&[("resourceVersion", Number(7))]))];
        let tagged = [("metadata", Map(&[("resourceVersion", Encoded(b"\xd6\x417"))]))];
        let chunks = [("metadata", Map(&[("resourceVersion", Encoded(b"\x5f\x411\x412\xff"))]))];
        let metadata_last = [("object", Map(&object)), ("x", Bytes("")), ("type", Bytes("ADDED"))];
        for (name, bytes, version) in [
            ("other metadata", frame(&added(Map(&object))), Some("7")),
            ("another order", frame(&metadata_last), Some("7")),
            ("text strings without a tag", text.to_vec(), Some("7")),
            ("tags", frame(&added(Encoded(&tags))), Some("7")),
            ("indefinite lengths", frame(&added(Encoded(INDEFINITE))), Some("7")),
            ("a type in chunks", frame(&[("type", Encoded(b"\x5f\x42AD\x40\x43DED\xff"))]), None),
            (
                "a key that is no string",
                [&b"\xa2\x01\x80\x44type"[..], b"\x45ADDED"].concat(),
                None,
            ),
            ("a version that is a number", frame(&added(Map(&number))), None),
            ("a version of another meaning", frame(&added(Map(&tagged))), None),
            ("a version in chunks", frame(&added(Map(&chunks))), None),
            ("an object that is null", frame(&added(Encoded(b"\xf6"))), None),
            ("no object", frame(&[("type", Bytes("ADDED"))]), None),
        ] {
            let found = event(&bytes).unwrap_or_else(|| panic!("{name}: {bytes:02x?}"));
            assert_eq!(found.event_type, EventType::Added, "{name}");
            assert_eq!(found.version, version.map(str::as_bytes), "{name}");
        }
    }

    #[test]
    fn malformed_event_is_unreadable() {
        let version = [("resourceVersion", Bytes("1")), ("resourceVersion", Bytes("2"))];
        let annotations = [("annotations", Map(&[])), ("annotations", Map(&[]))];
        let metadata = [("metadata", Map(&[])), ("metadata", Map(&[]))];
        let twice = |object| frame(&[("type", Bytes("ADDED")), ("object", Map(object))]);
        let deep = [vec![0x81; 10_000], vec![0]].concat();
        for (name, bytes) in [
            ("nothing", Vec::new()),
            ("an empty map", frame(&[])),
            ("no map", b"\x44type".to_vec()),
            ("a break", vec![0xff]),
            ("a tag alone", b"\xd9\xd9\xf7".to_vec()),
            ("a tag of indefinite length", b"\xdf\xa0".to_vec()),
            ("no type", frame(&[("object", Map(&[]))])),
            ("a type that is a number", frame(&[("type", Number(1))])),
            ("a type twice", frame(&[("type", Bytes("ADDED")), ("type", Bytes("ADDED"))])),
            (
                "an object twice",
                frame(&[("type", Bytes("ADDED")), ("object", Map(&[])), ("object", Map(&[]))]),
            ),
            ("metadata twice", twice(&metadata)),
            ("a version twice", twice(&[("metadata", Map(&version))])),
            ("annotations twice", twice(&[("metadata", Map(&annotations))])),
            ("a key without a value", b"\xbf\x44type\x45ADDED\x41a\xff".to_vec()),
            (
                "more members than bytes",
                b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff\x44type\x45ADDED".to_vec(),
            ),
            ("a string of 2^63 bytes", frame(&[("type", Encoded(b"\x5b\x80\0\0\0\0\0\0\0ADDED"))])),
            ("a chunk of another type", frame(&[("type", Encoded(b"\x5f\x65ADDED\xff"))])),
            ("chunks in chunks", frame(&[("type", Encoded(b"\x5f\x5f\x45ADDED\xff\xff"))])),
            ("too deep", frame(&[("type", Bytes("ADDED")), ("x", Encoded(&deep))])),
        ] {
            assert_eq!(event(&bytes), None, "{name}");
        }
    }

    #[test]
    fn bookmark_that_ends_the_initial_events_is_recognized() {
        let key = "k8s.io/initial-events-end";
        let is_end = |event_type, annotations: &[_]| {
            let bytes = cbor_event(event_type, "5", annotations, "");
            event(&bytes).unwrap().initial_events_end
        };
        assert!(is_end("BOOKMARK", &[("a", Bytes("b")), (key, Bytes("true"))]));
        assert!(is_end("BOOKMARK", &[(key, Encoded(b"\x7f\x62tr\x62ue\xff"))]));
        assert!(!is_end("BOOKMARK", &[]));
        assert!(!is_end("BOOKMARK", &[(key, Bytes("false"))]));
        assert!(!is_end("BOOKMARK", &[(key, Encoded(b"\xf5"))]));
        assert!(!is_end("ADDED", &[(key, Bytes("true"))]));
    }

    #[test]
    fn version_of_a_list_is_read_before_or_after_its_items() {
        use HeadVersion::{Incomplete, Version};
        let item = || Map(&[("metadata", Map(&[("resourceVersion", Bytes("4"))]))]).encode();
        let items = [vec![0x82], item(), item()].concat();
        let metadata = [("continue", Bytes("")), ("resourceVersion", Bytes("9"))];
        let kind = || ("kind", Bytes("PodList"));
        let first = frame(&[("metadata", Map(&metadata)), ("items", Encoded(&items)), kind()]);
        let last = frame(&[("items", Encoded(&items)), ("metadata", Map(&metadata)), kind()]);
        let none = frame(&[("metadata", Map(&[])), kind(), ("items", Encoded(&items))]);
        // The end of the first one looks like that of a list; its head is read before.
        for (bytes, tail, name) in [(&first, 4, "first"), (&last, 9, "last")] {
            assert_eq!(head_version(bytes), Version(9), "{name}");
            for len in 0..bytes.len() {
                let found = head_version(&bytes[..len]);
                assert!(matches!(found, Version(9) | Incomplete), "{name} {len}: {found:?}");
            }
            for from in 0..20 {
                assert_eq!(tail_version(&bytes[from..]), Some(tail), "{name} {from}");
            }
            assert_eq!(tail_version(&bytes[..bytes.len() - 1]), None, "{name}");
        }
        assert_eq!(head_version(&none), HeadVersion::None);
        let indefinite = [b"\x48metadata", &Map(&metadata).encode()[..], b"\xff"].concat();
        assert_eq!(tail_version(&indefinite), Some(9));
        for bytes in [&b"k8s\0"[..], b"\x80", b"\xff", b"\xd9\xd9\xf7\x01"] {
            assert_eq!(head_version(bytes), HeadVersion::None, "{bytes:02x?}");
        }
        for bytes in
            [&b""[..], b"metadata", b"\x47metadata\xa0", b"\x48metadata", b"\x48metadata\xa0"]
        {
            assert_eq!(tail_version(bytes), None, "{bytes:02x?}");
        }
    }
}
