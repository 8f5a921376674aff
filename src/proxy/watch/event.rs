//! Reads of a watch event the few things that resuming needs, without decoding the rest.
//!
//! From JSON: `.type`, `.object.metadata.resourceVersion` (of a `meta.k8s.io` Table likewise), the
//! annotation that ends the initial events, and an error's `.object.code`. Owner references,
//! templates, rows of a table and every other `metadata` lie elsewhere and are skipped. Keys may come
//! in any order and with escapes; a key that we read and that comes twice makes the frame unreadable,
//! since readers disagree which one counts. The scanner allocates nothing and does not recurse; it
//! finds its way by quotes and braces and does not validate what it skips.
//!
//! From protobuf (apimachinery, `generated.proto` of meta/v1 and runtime):
//! `WatchEvent{1: type, 2: RawExtension{1: raw}}`, raw = `k8s\0` + `Unknown{1: TypeMeta, 2: raw,
//! 3: contentEncoding, 4: contentType}`; in every object field 1 is `ObjectMeta` with 6:
//! resourceVersion and 12: annotations; in a `Status` field 6 is the code.
//!
//! A frame that cannot be read is [`Unparsed`]; it is forwarded, and its watch never resumed.

use super::Encoding;

mod json;
mod protobuf;

/// Marks the bookmark after the initial events (KEP-3157).
const INITIAL_EVENTS_END: &[u8] = b"k8s.io/initial-events-end";

/// What happened to an object, or to the watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The object came into being, or into view.
    Added,
    /// The object changed.
    Modified,
    /// The object is gone, or out of view.
    Deleted,
    /// Nothing happened up to this version.
    Bookmark,
    /// The watch has failed; the object is a `Status`.
    Error,
    /// A type that we do not know.
    Other,
}

/// What resuming needs to know of one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// Its type.
    pub kind: Kind,
    /// The object's resourceVersion as it is written; never an error's.
    pub version: Option<&'a [u8]>,
    /// A bookmark that says that the initial events are complete.
    pub initial_events_end: bool,
    /// The code of an error's `Status`.
    pub code: Option<u16>,
}

/// The frame is not an event that we can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unparsed;

/// Reads one whole frame.
pub fn read(encoding: Encoding, frame: &[u8]) -> Result<Event<'_>, Unparsed> {
    let event = match encoding {
        Encoding::Json => json::event(frame),
        Encoding::Protobuf => protobuf::event(frame),
    };
    event.ok_or(Unparsed)
}

/// The types as they are written (apimachinery, `watch.EventType`).
const KINDS: [(&[u8], Kind); 5] = [
    (b"ADDED", Kind::Added),
    (b"MODIFIED", Kind::Modified),
    (b"DELETED", Kind::Deleted),
    (b"BOOKMARK", Kind::Bookmark),
    (b"ERROR", Kind::Error),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn json(text: &str) -> Result<Event<'_>, Unparsed> {
        read(Encoding::Json, text.as_bytes())
    }

    #[test]
    fn json_events() {
        let deep = format!(
            r#"{{"type":"ADDED","object":{{"spec":{}1{},"metadata":{{"resourceVersion":"8"}}}}}}"#,
            "[".repeat(400),
            "]".repeat(400)
        );
        #[rustfmt::skip]
        let table: &[(&str, Kind, Option<&str>)] = &[
            (r#"{"type":"ADDED","object":{"kind":"Pod","metadata":{"name":"a","resourceVersion":"12"}}}"#, Kind::Added, Some("12")),
            // Order, white space, pretty objects.
            (r#" { "object" : { "metadata" : { "resourceVersion" : "7" } } , "type" : "DELETED" } "#, Kind::Deleted, Some("7")),
            ("{\n  \"type\": \"MODIFIED\",\n  \"object\": {\n \"metadata\": {\"resourceVersion\": \"3\"}}\n}\n", Kind::Modified, Some("3")),
            // Other people's metadata, before and after.
            (r#"{"type":"ADDED","object":{"spec":{"template":{"metadata":{"resourceVersion":"666"}}},"metadata":{"ownerReferences":[{"resourceVersion":"667"}],"managedFields":[{"x":{"resourceVersion":"668"}}],"resourceVersion":"5"},"status":{"metadata":{"resourceVersion":"669"}}}}"#, Kind::Added, Some("5")),
            (r#"{"metadata":{"resourceVersion":"1"},"type":"ADDED","object":{"resourceVersion":"2"}}"#, Kind::Added, None),
            // A table.
            (r#"{"type":"MODIFIED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"44"},"columnDefinitions":[{"name":"Name"}],"rows":[{"cells":["a"],"object":{"metadata":{"resourceVersion":"43"}}}]}}"#, Kind::Modified, Some("44")),
            // Escapes in keys and strings, braces and quotes in strings.
            (r#"{"\u0074ype":"ADD\u0045D","object":{"m\u0065tadata":{"resource\u0056ersion":"9"}}}"#, Kind::Added, Some("9")),
            (r#"{"type":"ADDED","object":{"a\"}{":"\\\"}]","metadata":{"labels":{"x":"\\"},"resourceVersion":"6"}}}"#, Kind::Added, Some("6")),
            // What has no version.
            (r#"{"type":"ADDED","object":{"metadata":{"resourceVersion":12}}}"#, Kind::Added, None),
            (r#"{"type":"ADDED","object":null}"#, Kind::Added, None),
            (r#"{"type":"ADDED"}"#, Kind::Added, None),
            (r#"{"type":"NEWS","object":{"metadata":{"resourceVersion":"4"}}}"#, Kind::Other, Some("4")),
            (&deep, Kind::Added, Some("8")),
        ];
        for (text, kind, version) in table {
            let event = json(text).unwrap_or_else(|_| panic!("{text}"));
            assert_eq!(event.kind, *kind, "{text}");
            assert_eq!(event.version, version.map(str::as_bytes), "{text}");
        }
    }

    #[test]
    fn what_json_cannot_be_read() {
        let too_deep =
            format!(r#"{{"type":"ADDED","object":{}1{}}}"#, "[".repeat(9999), "]".repeat(9999));
        for text in [
            "",
            " ",
            "{",
            "}",
            "{}",
            "[]",
            "null",
            "not json",
            r#"{"type":"ADDED""#,
            r#"{"type":1}"#,
            r#"{"object":{}}"#,
            r#"{"type":"ADDED"}{"type":"ADDED"}"#,
            r#"{"type":"ADDED","type":"ADDED"}"#,
            r#"{"type":"ADDED","object":{"metadata":{}},"object":{}}"#,
            r#"{"type":"ADDED","object":{"metadata":{},"metadata":{}}}"#,
            r#"{"type":"ADDED","object":{"metadata":{"resourceVersion":"1","resourceVersion":"2"}}}"#,
            r#"{"type":"ADDED","object":{"metadata":{"resourceVersion":"1"}}"#,
            r#"{"type":"ADDED","object":{"a":"\"}}"#,
            r#"{"type":"ADDED" "object":{}}"#,
            &too_deep,
        ] {
            assert_eq!(json(text), Err(Unparsed), "{text:.60}");
        }
    }

    #[test]
    fn json_bookmarks_and_errors() {
        let end = json(r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"5","annotations":{"a":"b","k8s.io/initial-events-end":"true"}}}}"#).unwrap();
        assert!(end.initial_events_end);
        for no in [
            r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"5"}}}"#,
            r#"{"type":"BOOKMARK","object":{"metadata":{"annotations":{"k8s.io/initial-events-end":"false"}}}}"#,
            r#"{"type":"ADDED","object":{"metadata":{"annotations":{"k8s.io/initial-events-end":"true"}}}}"#,
            r#"{"type":"BOOKMARK","object":{"metadata":{"labels":{"k8s.io/initial-events-end":"true"}}}}"#,
        ] {
            assert!(!json(no).unwrap().initial_events_end, "{no}");
        }
        let gone = json(r#"{"type":"ERROR","object":{"kind":"Status","metadata":{"resourceVersion":"99"},"status":"Failure","code":410}}"#).unwrap();
        assert_eq!((gone.kind, gone.code, gone.version), (Kind::Error, Some(410), None));
        let odd = json(r#"{"type":"ERROR","object":{"code":"410"}}"#).unwrap();
        assert_eq!((odd.kind, odd.code), (Kind::Error, None));
    }

    #[test]
    fn protobuf_events() {
        use super::super::tests::model::{protobuf_event, protobuf_status};
        let frame = protobuf_event("MODIFIED", "v1", "Pod", "123", &[("x", "y")]);
        let event = read(Encoding::Protobuf, &frame).unwrap();
        assert_eq!((event.kind, event.version), (Kind::Modified, Some(&b"123"[..])));
        let frame = protobuf_event(
            "BOOKMARK",
            "v1",
            "Pod",
            "7",
            &[("a", "b"), ("k8s.io/initial-events-end", "true")],
        );
        assert!(read(Encoding::Protobuf, &frame).unwrap().initial_events_end);
        let frame = protobuf_status(410);
        let event = read(Encoding::Protobuf, &frame).unwrap();
        assert_eq!((event.kind, event.code, event.version), (Kind::Error, Some(410), None));
        // Cut anywhere, or with a wrong length, it cannot be read.
        for len in 0..frame.len() {
            assert_eq!(read(Encoding::Protobuf, &frame[..len]), Err(Unparsed), "{len}");
        }
    }
}
