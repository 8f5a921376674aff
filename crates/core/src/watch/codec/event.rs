//! The fields of a watch event that resuming needs, and where the parsers find them.
//!
//! JSON: `.type`, `.object.metadata.resourceVersion` (also of a `meta.k8s.io` Table), the annotation that
//! ends the initial events, and the `.object.code` of an error. Every other `metadata` (in templates, or in
//! rows of a table) is deeper in the object and is skipped. Keys may come in any order and may contain
//! escapes. If `type`, `object`, `metadata`, `resourceVersion` or `annotations` occurs twice, the frame is
//! unreadable, because JSON parsers disagree on which value counts. The parser does not recurse, and
//! allocates only for a string with escapes. It skips other values by their quotes and brackets, without
//! validating them.
//!
//! Protobuf (apimachinery, `generated.proto` of meta/v1 and runtime):
//! `WatchEvent{1: type, 2: RawExtension{1: raw}}`, where raw is `k8s\0` and `Unknown{1: TypeMeta,
//! 2: raw, 3: contentEncoding, 4: contentType}`. Field 1 of every object is `ObjectMeta` with
//! 6: resourceVersion and 12: annotations. Field 6 of a `Status` is the code.
//!
//! CBOR: the same fields as JSON, in any order and under any tags. If one of these keys occurs twice, the frame is
//! unreadable. A version in more than one chunk counts as no version.

/// The annotation of the bookmark after the initial events (KEP-3157).
pub const INITIAL_EVENTS_END: &[u8] = b"k8s.io/initial-events-end";

/// The type of a watch event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventType {
    /// The object was created, or began to match the selector.
    Added,
    /// The object was changed.
    Modified,
    /// The object was deleted, or no longer matches the selector.
    Deleted,
    /// The client has received every event up to this version.
    Bookmark,
    /// The watch has failed; the object is a `Status`.
    Error,
    /// Any other type.
    Unknown,
}

/// The fields of one event that resuming needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event<'a> {
    /// The field `type`.
    pub event_type: EventType,
    /// The text of the object's resourceVersion; `None` for an error.
    pub version: Option<&'a [u8]>,
    /// Whether this is the bookmark after the initial events.
    pub initial_events_end: bool,
    /// The code of the `Status` of an error.
    pub status_code: Option<u16>,
}

/// The fields that a parser of JSON or CBOR has found, and which keys have occurred.
#[derive(Default)]
pub(super) struct Found<'a> {
    pub(super) event_type: Option<EventType>,
    pub(super) has_object: bool,
    pub(super) has_metadata: bool,
    pub(super) version: Option<&'a [u8]>,
    pub(super) has_version: bool,
    /// The offset of the value of `.object.metadata.annotations`.
    pub(super) annotations: Option<usize>,
    /// The value of `.object.code`, if it is a code.
    pub(super) code: Option<u16>,
}

impl<'a> Found<'a> {
    /// The event; `None` if the frame is unreadable. `ends_initial_events` reads the annotations of a bookmark at this
    /// offset.
    pub(super) fn into_event(
        self,
        ends_initial_events: impl FnOnce(usize) -> Option<bool>,
    ) -> Option<Event<'a>> {
        let event_type = self.event_type?;
        let annotations = self.annotations.filter(|_| event_type == EventType::Bookmark);
        Some(Event {
            event_type,
            version: self.version.filter(|_| event_type != EventType::Error),
            initial_events_end: match annotations {
                Some(at) => ends_initial_events(at)?,
                None => false,
            },
            status_code: self.code.filter(|_| event_type == EventType::Error),
        })
    }
}

/// Returns `None` if the key has occurred before; the frame is then unreadable.
pub(super) fn once(before: bool) -> Option<()> {
    (!before).then_some(())
}

impl EventType {
    /// The type for whose name `is_name` is true (apimachinery, `watch.EventType`).
    pub fn with_name(is_name: impl Fn(&[u8]) -> bool) -> Self {
        const TYPES: [(&[u8], EventType); 5] = [
            (b"ADDED", EventType::Added),
            (b"MODIFIED", EventType::Modified),
            (b"DELETED", EventType::Deleted),
            (b"BOOKMARK", EventType::Bookmark),
            (b"ERROR", EventType::Error),
        ];
        let known = TYPES.iter().find(|(name, _)| is_name(name));
        known.map_or(Self::Unknown, |(_, event_type)| *event_type)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::watch::codec::{Encoding, parse};

    fn json(text: &str) -> Option<Event<'_>> {
        parse(Encoding::Json, text.as_bytes())
    }

    #[test]
    fn json_event_has_type_and_version() {
        let deep = format!(
            r#"{{"type":"ADDED","object":{{"spec":{}1{},"metadata":{{"resourceVersion":"8"}}}}}}"#,
            "[".repeat(400),
            "]".repeat(400)
        );
        #[rustfmt::skip]
        let table: &[(&str, EventType, Option<&str>)] = &[
            (r#"{"type":"ADDED","object":{"kind":"Pod","metadata":{"name":"a","resourceVersion":"12"}}}"#, EventType::Added, Some("12")),
            // Key order, white space, pretty-printed objects.
            (r#" { "object" : { "metadata" : { "resourceVersion" : "7" } } , "type" : "DELETED" } "#, EventType::Deleted, Some("7")),
            ("{\n  \"type\": \"MODIFIED\",\n  \"object\": {\n \"metadata\": {\"resourceVersion\": \"3\"}}\n}\n", EventType::Modified, Some("3")),
            // Other `metadata` before and after that of the object.
            (r#"{"type":"ADDED","object":{"spec":{"template":{"metadata":{"resourceVersion":"666"}}},"metadata":{"ownerReferences":[{"resourceVersion":"667"}],"managedFields":[{"x":{"resourceVersion":"668"}}],"resourceVersion":"5"},"status":{"metadata":{"resourceVersion":"669"}}}}"#, EventType::Added, Some("5")),
            (r#"{"metadata":{"resourceVersion":"1"},"type":"ADDED","object":{"resourceVersion":"2"}}"#, EventType::Added, None),
            // A table.
            (r#"{"type":"MODIFIED","object":{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"44"},"columnDefinitions":[{"name":"Name"}],"rows":[{"cells":["a"],"object":{"metadata":{"resourceVersion":"43"}}}]}}"#, EventType::Modified, Some("44")),
            // Escapes in keys and strings, braces and quotes in strings.
            (r#"{"\u0074ype":"ADD\u0045D","object":{"m\u0065tadata":{"resource\u0056ersion":"9"}}}"#, EventType::Added, Some("9")),
            (r#"{"type":"ADDED","object":{"a\"}{":"\\\"}]","metadata":{"labels":{"x":"\\"},"resourceVersion":"6"}}}"#, EventType::Added, Some("6")),
            // Objects without a version.
            (r#"{"type":"ADDED","object":{"metadata":{"resourceVersion":12}}}"#, EventType::Added, None),
            (r#"{"type":"ADDED","object":null}"#, EventType::Added, None),
            (r#"{"type":"ADDED"}"#, EventType::Added, None),
            (r#"{"type":"NEWS","object":{"metadata":{"resourceVersion":"4"}}}"#, EventType::Unknown, Some("4")),
            (&deep, EventType::Added, Some("8")),
        ];
        for (text, event_type, version) in table {
            let event = json(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!(event.event_type, *event_type, "{text}");
            assert_eq!(event.version, version.map(str::as_bytes), "{text}");
        }
    }

    #[test]
    fn malformed_json_is_unreadable() {
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
            assert_eq!(json(text), None, "{text:.60}");
        }
    }

    #[test]
    fn json_bookmark_and_error_are_recognized() {
        let end = json(r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"5","annotations":{"a":"b","k8s.io/initial-events-end":"true"}}}}"#).unwrap();
        assert!(end.initial_events_end);
        for not_the_end in [
            r#"{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"5"}}}"#,
            r#"{"type":"BOOKMARK","object":{"metadata":{"annotations":{"k8s.io/initial-events-end":"false"}}}}"#,
            r#"{"type":"ADDED","object":{"metadata":{"annotations":{"k8s.io/initial-events-end":"true"}}}}"#,
            r#"{"type":"BOOKMARK","object":{"metadata":{"labels":{"k8s.io/initial-events-end":"true"}}}}"#,
        ] {
            assert!(!json(not_the_end).unwrap().initial_events_end, "{not_the_end}");
        }
        let error = json(r#"{"type":"ERROR","object":{"kind":"Status","metadata":{"resourceVersion":"99"},"status":"Failure","code":410}}"#).unwrap();
        assert_eq!(
            (error.event_type, error.status_code, error.version),
            (EventType::Error, Some(410), None)
        );
        let text_code = json(r#"{"type":"ERROR","object":{"code":"410"}}"#).unwrap();
        assert_eq!((text_code.event_type, text_code.status_code), (EventType::Error, None));
    }

    #[test]
    fn protobuf_event_has_type_version_and_code() {
        use crate::watch::tests::events::{protobuf_event, protobuf_status};
        let frame = protobuf_event("MODIFIED", "v1", "Pod", "123", &[("x", "y")]);
        let event = parse(Encoding::Protobuf, &frame).unwrap();
        assert_eq!((event.event_type, event.version), (EventType::Modified, Some(&b"123"[..])));
        let frame = protobuf_event(
            "BOOKMARK",
            "v1",
            "Pod",
            "7",
            &[("a", "b"), ("k8s.io/initial-events-end", "true")],
        );
        assert!(parse(Encoding::Protobuf, &frame).unwrap().initial_events_end);
        let frame = protobuf_status(410);
        let event = parse(Encoding::Protobuf, &frame).unwrap();
        assert_eq!(
            (event.event_type, event.status_code, event.version),
            (EventType::Error, Some(410), None)
        );
        // A truncated frame is unreadable.
        for len in 0..frame.len() {
            assert_eq!(parse(Encoding::Protobuf, &frame[..len]), None, "{len}");
        }
    }
}
