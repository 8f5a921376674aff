//! Reads the resource version of a response that is no watch: of an object, a list, a table or a Status.
//!
//! kube-apiserver writes `metadata` before the items of a list and before the `spec` of an object, so the beginning of
//! the body has the version. Only the JSON of custom resources has its keys in alphabetical order, and CBOR in any order:
//! the metadata of a list may follow its items, and [`json_tail`] and [`cbor_tail`] read it from the end of the body.
//!
//! Protobuf: `k8s\0` and `Unknown{1: TypeMeta{2: kind}, 2: raw}`. Field 1 of raw is `ObjectMeta` with 6:
//! resourceVersion, and in lists, tables and a Status `ListMeta` with 2: resourceVersion (apimachinery,
//! `generated.proto` of meta/v1 and runtime).

use super::version::{HeadVersion, as_u64};
use super::{Encoding, cbor, json, protobuf};

/// The version in the beginning of a JSON body.
pub fn json_head(bytes: &[u8]) -> HeadVersion {
    json::head_version(bytes)
}

/// The version in the beginning of a protobuf body.
pub fn protobuf_head(bytes: &[u8]) -> HeadVersion {
    protobuf::head_version(bytes)
}

/// The version in the beginning of a CBOR body.
pub fn cbor_head(bytes: &[u8]) -> HeadVersion {
    cbor::head_version(bytes)
}

/// Whether the body that begins with `bytes` is a Status; `None` if its kind has not arrived.
pub fn is_status(encoding: Encoding, bytes: &[u8]) -> Option<bool> {
    match encoding {
        Encoding::Json => json::is_status(bytes),
        Encoding::Protobuf => protobuf::is_status(bytes),
        Encoding::Cbor => cbor::is_status(bytes),
    }
}

/// The version in the end of the CBOR of a list whose metadata follows its items.
pub fn cbor_tail(bytes: &[u8]) -> Option<u64> {
    cbor::tail_version(bytes)
}

/// The version in the end of the JSON of a list whose last key is `metadata`.
///
/// In a JSON text, `"metadata":{` with these quotes can only be a key, since a quote in a string is escaped. If only
/// the end of the text follows its value, it is a key of the outermost object.
pub fn json_tail(bytes: &[u8]) -> Option<u64> {
    const KEY: &[u8] = b"\"metadata\":{";
    let at = bytes.windows(KEY.len()).rposition(|window| window == KEY)?;
    let object = &bytes[at + KEY.len() - 1..];
    json::last_metadata_version(object).and_then(as_u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use HeadVersion::{Incomplete, None, Version};

    #[test]
    fn json_head_reads_the_version_of_objects_lists_and_tables() {
        for (text, expected) in [
            (
                r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"12"},"items":[{"metadata":{"resourceVersion":"7"#,
                Version(12),
            ),
            (
                r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a","resourceVersion":"7","x":"#,
                Version(7),
            ),
            (
                r#"{"apiVersion":"e.com/v1","kind":"Foo","metadata":{"annotations":{"resourceVersion":"3"},"managedFields":[{"a":{"resourceVersion":"4"}}],"resourceVersion":"5"},"spec":{}}"#,
                Version(5),
            ),
            (
                r#"{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{"resourceVersion":"44"},"columnDefinitions":["#,
                Version(44),
            ),
            (
                r#"{"apiVersion":"e.com/v1","items":[{"metadata":{"resourceVersion":"4"}}],"kind":"FooList","metadata":{"continue":"","resourceVersion":"9"}}"#,
                Version(9),
            ),
            (
                r#"{"apiVersion":"e.com/v1","items":[{"metadata":{"resourceVersion":"4"}}"#,
                Incomplete,
            ),
            (r#"{"spec":{"resourceVersion":"3"},"metadata":{"resourceVersion":"5"}}"#, Version(5)),
            (r#"{"x":"}","metadata":{"resourceVersion":"6"}}"#, Version(6)),
            (r#"{"x":"\"metadata\":{","resourceVersion":"3"}"#, None),
            (r#"{"status":{"resourceVersion":"3"}}"#, None),
            (r#"{"kind":"Pod","metadata":{"name":"a","resourceVers"#, Incomplete),
            (r#"{"kind":"Pod","metadata":{"resourceVersion":"1"#, Incomplete),
            ("", Incomplete),
            (r#"{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure"}"#, None),
            (
                r#"{"kind":"Status","apiVersion":"v1","metadata":{"resourceVersion":"8"},"status":"Success","details":{}}"#,
                Version(8),
            ),
            (r#"{"kind":"PodMetricsList","metadata":{"resourceVersion":""},"items":[]}"#, None),
            (r#"{"kind":"Pod","metadata":{"resourceVersion":"abc"}}"#, None),
            (r#"{"kind":"Pod","metadata":{"resourceVersion":12}}"#, None),
            (r#"{"kind":"Pod","metadata":null}"#, None),
            ("[1,2]", None),
            ("ok", None),
        ] {
            assert_eq!(json_head(text.as_bytes()), expected, "{text}");
        }
    }

    #[test]
    fn json_head_of_a_prefix_is_the_version_or_incomplete() {
        let text = br#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a\"}","resourceVersion":"71"},"spec":{}}"#;
        for len in 0..text.len() {
            let found = json_head(&text[..len]);
            assert!(matches!(found, Version(71) | Incomplete), "{len}: {found:?}");
        }
    }

    #[test]
    fn json_tail_reads_only_metadata_of_the_outermost_object() {
        for (text, expected) in [
            (
                r#"]},"x"],"kind":"FooList","metadata":{"continue":"","resourceVersion":"9"}}"#,
                Some(9),
            ),
            (
                concat!(r#"1],"metadata":{"resourceVersion":"10","remainingItemCount":3}}"#, "\n"),
                Some(10),
            ),
            (
                r#"[{"metadata":{"resourceVersion":"4"}}],"kind":"FooList","metadata":{"continue":""}}"#,
                Option::None,
            ),
            (r#"[{"metadata":{"resourceVersion":"4"}}]}"#, Option::None),
            (r#"{"x":{"metadata":{"resourceVersion":"4"}}}"#, Option::None),
            (r#""a":"\"metadata\":{\"resourceVersion\":\"4\"}}"}"#, Option::None),
            (r#","metadata":{"resourceVersion":"4"}"#, Option::None),
            ("", Option::None),
        ] {
            assert_eq!(json_tail(text.as_bytes()), expected, "{text}");
        }
    }

    fn message(fields: &[(u8, &[u8])]) -> Vec<u8> {
        let mut out = Vec::new();
        for (tag, bytes) in fields {
            assert!(bytes.len() < 128);
            out.extend([tag << 3 | 2, bytes.len() as u8]);
            out.extend_from_slice(bytes);
        }
        out
    }

    fn protobuf(version: &[u8], kind: &[u8], metadata: &[u8]) -> Vec<u8> {
        let type_meta = message(&[(1, version), (2, kind)]);
        let raw = message(&[(1, metadata), (2, b"rest of the body")]);
        [&b"k8s\0"[..], &message(&[(1, &type_meta), (2, &raw), (3, b""), (4, b"")])].concat()
    }

    #[test]
    fn protobuf_head_reads_the_version_of_objects_lists_and_a_status() {
        let object = message(&[(1, b"name"), (2, b"33"), (6, b"12")]);
        let list = message(&[(1, b""), (2, b"34"), (3, b"")]);
        let none = message(&[(1, b"name")]);
        for (kind, metadata, expected) in [
            (&b"Pod"[..], &object, Version(12)),
            (b"PodList", &list, Version(34)),
            (b"Table", &list, Version(34)),
            (b"Pod", &none, None),
            (b"Status", &none, None),
            (b"Status", &list, Version(34)),
        ] {
            let bytes = protobuf(b"v1", kind, metadata);
            assert_eq!(protobuf_head(&bytes), expected, "{}", kind.escape_ascii());
            for len in 0..bytes.len() {
                let found = protobuf_head(&bytes[..len]);
                assert!(found == Incomplete || found == expected, "{len}: {found:?}");
            }
        }
        assert_eq!(protobuf_head(b"{\"kind\":1}"), None);
        assert_eq!(protobuf_head(&[&b"k8s\0"[..], &[0xff; 24]].concat()), None);
    }

    #[test]
    fn status_is_told_from_an_object_by_its_kind() {
        let object = message(&[(1, b"name"), (6, b"12")]);
        let json = |text: &str| (Encoding::Json, text.as_bytes().to_vec());
        let protobuf = |version, kind| (Encoding::Protobuf, protobuf(version, kind, &object));
        let cbor = |bytes: &[u8]| (Encoding::Cbor, bytes.to_vec());
        for ((encoding, bytes), expected) in [
            (json(r#"{"kind":"Status","apiVersion":"v1","metadata":{}}"#), true),
            (json("{\n  \"kind\": \"Status\",\n  \"apiVersion\": \"v1\"\n}"), true),
            (json(r#"{"kind":"Pod","status":{"kind":"Status"}}"#), false),
            (json(r#"{"apiVersion":"e.com/v1","kind":"Foo","metadata":{}}"#), false),
            (json(r#"{"metadata":{}}"#), false),
            (protobuf(b"v1", b"Status"), true),
            (protobuf(b"v1", b"Pod"), false),
            (protobuf(b"e.com/v1", b"Status"), false),
            (cbor(b"\xa1\x44kind\x46Status"), true),
            (cbor(b"\xd9\xd9\xf7\xa2\x48metadata\xa0\x64kind\x66Status"), true),
            (cbor(b"\xa1\x44kind\x43Pod"), false),
        ] {
            let text = bytes.escape_ascii();
            assert_eq!(is_status(encoding, &bytes), Some(expected), "{text}");
            for len in 0..bytes.len() {
                let found = is_status(encoding, &bytes[..len]);
                assert!(found.is_none_or(|found| found == expected), "{len}: {text}");
            }
        }
    }
}
