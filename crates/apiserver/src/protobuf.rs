//! Kubernetes protobuf: encodes the frames of watches, and decodes the request bodies of typed Go clients
//! such as `kubectl create configmap`.
//!
//! A table for each message type lists its fields, as in `generated.proto`, for both directions. Other
//! fields are neither encoded nor decoded. Of an object whose type has no table, only the metadata is
//! encoded; it cannot be decoded.

use crate::timestamps;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Map, Value, json};

/// The content type of a watch.
pub const WATCH: &str = "application/vnd.kubernetes.protobuf;stream=watch";
const MAGIC: &[u8] = b"k8s\0";

/// The fields of a message: number, JSON name, type.
type Table = &'static [(u64, &'static str, Type)];

#[derive(Clone, Copy)]
enum Type {
    Text,
    /// Bytes; base64 in JSON.
    Bytes,
    Number,
    Bool,
    /// Seconds and nanoseconds; RFC 3339 in JSON.
    Time,
    /// Like `Time`, with microseconds in JSON.
    MicroTime,
    Message(Table),
    Texts,
    Messages(Table),
    TextMap,
    BytesMap,
}

const OWNER: Table = &[
    (5, "apiVersion", Type::Text),
    (1, "kind", Type::Text),
    (3, "name", Type::Text),
    (4, "uid", Type::Text),
    (6, "controller", Type::Bool),
    (7, "blockOwnerDeletion", Type::Bool),
];
const OBJECT_META: Table = &[
    (1, "name", Type::Text),
    (2, "generateName", Type::Text),
    (3, "namespace", Type::Text),
    (5, "uid", Type::Text),
    (6, "resourceVersion", Type::Text),
    (7, "generation", Type::Number),
    (8, "creationTimestamp", Type::Time),
    (11, "labels", Type::TextMap),
    (12, "annotations", Type::TextMap),
    (13, "ownerReferences", Type::Messages(OWNER)),
    (14, "finalizers", Type::Texts),
];
const META: (u64, &str, Type) = (1, "metadata", Type::Message(OBJECT_META));
const METADATA_ONLY: Table = &[META];
const CONFIG_MAP: Table = &[
    META,
    (2, "data", Type::TextMap),
    (3, "binaryData", Type::BytesMap),
    (4, "immutable", Type::Bool),
];
const SECRET: Table = &[
    META,
    (2, "data", Type::BytesMap),
    (3, "type", Type::Text),
    (4, "stringData", Type::TextMap),
    (5, "immutable", Type::Bool),
];
const LEASE_SPEC: Table = &[
    (1, "holderIdentity", Type::Text),
    (2, "leaseDurationSeconds", Type::Number),
    (3, "acquireTime", Type::MicroTime),
    (4, "renewTime", Type::MicroTime),
    (5, "leaseTransitions", Type::Number),
];
const LEASE: Table = &[META, (2, "spec", Type::Message(LEASE_SPEC))];
const REFERENCE: Table = &[
    (1, "kind", Type::Text),
    (2, "namespace", Type::Text),
    (3, "name", Type::Text),
    (4, "uid", Type::Text),
    (5, "apiVersion", Type::Text),
    (6, "resourceVersion", Type::Text),
    (7, "fieldPath", Type::Text),
];
const SOURCE: Table = &[(1, "component", Type::Text), (2, "host", Type::Text)];
const EVENT: Table = &[
    META,
    (2, "involvedObject", Type::Message(REFERENCE)),
    (3, "reason", Type::Text),
    (4, "message", Type::Text),
    (5, "source", Type::Message(SOURCE)),
    (6, "firstTimestamp", Type::Time),
    (7, "lastTimestamp", Type::Time),
    (8, "count", Type::Number),
    (9, "type", Type::Text),
];
const PRECONDITIONS: Table = &[(1, "uid", Type::Text), (2, "resourceVersion", Type::Text)];
const DELETE_OPTIONS: Table = &[
    (1, "gracePeriodSeconds", Type::Number),
    (2, "preconditions", Type::Message(PRECONDITIONS)),
    (4, "propagationPolicy", Type::Text),
    (5, "dryRun", Type::Texts),
];
const STATUS: Table = &[
    (1, "metadata", Type::Message(&[])),
    (2, "status", Type::Text),
    (3, "message", Type::Text),
    (4, "reason", Type::Text),
    (6, "code", Type::Number),
];

/// The table of a `kind`.
fn table(kind: &str) -> Option<Table> {
    Some(match kind {
        "ConfigMap" => CONFIG_MAP,
        "Secret" => SECRET,
        "Lease" => LEASE,
        "Event" => EVENT,
        "Status" => STATUS,
        "DeleteOptions" => DELETE_OPTIONS,
        // The server ignores or sets all other fields.
        "ServiceAccount" | "Namespace" | "SelfSubjectReview" | "SelfSubjectAccessReview" => {
            METADATA_ONLY
        }
        _ => return None,
    })
}

/// One frame of a watch: its length, then `WatchEvent { 1: type, 2: RawExtension { 1: raw } }`.
pub fn frame(event_type: &str, object: &Value) -> Vec<u8> {
    let extension = field(1, &encode(object));
    let event = [field(1, event_type.as_bytes()), field(2, &extension)].concat();
    let length = u32::try_from(event.len()).expect("an object is far below 4 GiB");
    [&length.to_be_bytes(), event.as_slice()].concat()
}

/// `k8s\0` and `runtime.Unknown { 1: TypeMeta, 2: raw, 3: contentEncoding, 4: contentType }`, of which the
/// last two are empty.
pub fn encode(object: &Value) -> Vec<u8> {
    let name = |field: &str| object[field].as_str().unwrap_or_default().as_bytes();
    let type_meta = [field(1, name("apiVersion")), field(2, name("kind"))].concat();
    let table = object["kind"].as_str().and_then(table).unwrap_or(METADATA_ONLY);
    let raw = write(table, object);
    [MAGIC.to_vec(), field(1, &type_meta), field(2, &raw), field(3, b""), field(4, b"")].concat()
}

/// The object in a body; `None` if it is malformed or its type has no table.
pub fn decode(body: &[u8]) -> Option<Value> {
    let mut object = json!({});
    let (mut type_meta, mut raw) = (&b""[..], None);
    for part in Fields(body.strip_prefix(MAGIC)?) {
        match part? {
            (1, WireValue::Bytes(bytes)) => type_meta = bytes,
            (2, WireValue::Bytes(bytes)) => raw = Some(bytes),
            _ => {}
        }
    }
    let names = read(&[(1, "apiVersion", Type::Text), (2, "kind", Type::Text)], type_meta)?;
    let fields = read(table(names.get("kind")?.as_str()?)?, raw?)?;
    object.as_object_mut()?.extend(names.into_iter().chain(fields));
    Some(object)
}

fn write(table: Table, object: &Value) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (tag, name, kind) in table {
        let value = &object[*name];
        if !value.is_null() || matches!(kind, Type::Message(_)) {
            bytes.extend(write_field(*tag, *kind, value));
        }
    }
    bytes
}

fn write_field(tag: u64, kind: Type, value: &Value) -> Vec<u8> {
    let text = |value: &Value| value.as_str().unwrap_or_default().as_bytes().to_vec();
    let base64 = |value: &Value| {
        value.as_str().and_then(|text| BASE64_STANDARD.decode(text).ok()).unwrap_or_default()
    };
    let map = |write: &dyn Fn(&Value) -> Vec<u8>| -> Vec<u8> {
        let entries = value.as_object().into_iter().flatten();
        entries
            .flat_map(|(k, v)| field(tag, &[field(1, k.as_bytes()), field(2, &write(v))].concat()))
            .collect()
    };
    let items = || value.as_array().into_iter().flatten();
    match kind {
        Type::Text => field(tag, &text(value)),
        Type::Bytes => field(tag, &base64(value)),
        Type::Number => number(tag, value.as_u64().unwrap_or(0)),
        Type::Bool => number(tag, u64::from(value == true)),
        Type::Time | Type::MicroTime => {
            let (seconds, nanos) =
                value.as_str().and_then(timestamps::parse_rfc3339).unwrap_or_default();
            let nanos = if nanos > 0 { number(2, u64::from(nanos)) } else { Vec::new() };
            field(tag, &[number(1, seconds), nanos].concat())
        }
        Type::Message(table) => field(tag, &write(table, value)),
        Type::Texts => items().flat_map(|v| field(tag, &text(v))).collect(),
        Type::Messages(table) => items().flat_map(|v| field(tag, &write(table, v))).collect(),
        Type::TextMap => map(&text),
        Type::BytesMap => map(&base64),
    }
}

fn read(table: Table, bytes: &[u8]) -> Option<Map<String, Value>> {
    let mut object = Map::new();
    for part in Fields(bytes) {
        let (tag, part) = part?;
        let Some((_, name, kind)) = table.iter().find(|(t, ..)| *t == tag) else { continue };
        let entry = object.entry(*name).or_insert(Value::Null);
        match (kind, part) {
            (Type::Number, WireValue::Number(number)) => *entry = number.into(),
            (Type::Bool, WireValue::Number(number)) => *entry = (number != 0).into(),
            (Type::Texts | Type::Messages(_), WireValue::Bytes(bytes)) => {
                let item = read_bytes(*kind, bytes)?;
                if entry.is_null() {
                    *entry = json!([]);
                }
                entry.as_array_mut()?.push(item);
            }
            (Type::TextMap | Type::BytesMap, WireValue::Bytes(bytes)) => {
                let kind = if matches!(kind, Type::TextMap) { Type::Text } else { Type::Bytes };
                let (mut key, mut value) = (Value::from(""), Value::from(""));
                for part in Fields(bytes) {
                    match part? {
                        (1, WireValue::Bytes(bytes)) => key = read_bytes(Type::Text, bytes)?,
                        (2, WireValue::Bytes(bytes)) => value = read_bytes(kind, bytes)?,
                        _ => {}
                    }
                }
                entry[key.as_str()?] = value;
            }
            (_, WireValue::Bytes(bytes)) => *entry = read_bytes(*kind, bytes)?,
            (_, WireValue::Number(_)) => return None,
        }
    }
    // gogo-proto encodes every field that is not a pointer, so an empty value means that it is absent.
    object.retain(|_, value| !value.is_null() && value != "");
    Some(object)
}

fn read_bytes(kind: Type, bytes: &[u8]) -> Option<Value> {
    Some(match kind {
        Type::Text | Type::Texts => std::str::from_utf8(bytes).ok()?.into(),
        Type::Bytes => BASE64_STANDARD.encode(bytes).into(),
        Type::Message(table) | Type::Messages(table) => Value::Object(read(table, bytes)?),
        Type::Time | Type::MicroTime => {
            let (mut seconds, mut nanos) = (0, 0);
            for part in Fields(bytes) {
                match part? {
                    (1, WireValue::Number(number)) => seconds = number,
                    (2, WireValue::Number(number)) => nanos = number,
                    _ => {}
                }
            }
            match kind {
                // Go's zero time lies before the epoch and means absent.
                _ if bytes.is_empty() || seconds > 1 << 40 => Value::Null,
                Type::MicroTime => {
                    timestamps::rfc3339_micros(seconds, u32::try_from(nanos).ok()?).into()
                }
                _ => timestamps::rfc3339_seconds(seconds).into(),
            }
        }
        _ => return None,
    })
}

/// The value of a field on the wire.
enum WireValue<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

/// The fields of a message. A malformed field yields `None` and ends the iteration.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn field(&mut self) -> Option<(u64, WireValue<'a>)> {
        let key = self.varint()?;
        let size = match key & 7 {
            0 => return Some((key >> 3, WireValue::Number(self.varint()?))),
            1 => 8,
            2 => usize::try_from(self.varint()?).ok()?,
            5 => 4,
            _ => return None,
        };
        let (bytes, rest) = self.0.split_at_checked(size)?;
        self.0 = rest;
        Some((key >> 3, WireValue::Bytes(bytes)))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<(u64, WireValue<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// A length-delimited field.
fn field(tag: u64, bytes: &[u8]) -> Vec<u8> {
    [varint(tag << 3 | 2), varint(bytes.len() as u64), bytes.to_vec()].concat()
}

fn number(tag: u64, value: u64) -> Vec<u8> {
    [varint(tag << 3), varint(value)].concat()
}

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_encodes_a_watch_event_byte_by_byte() {
        let object = json!({
            "apiVersion": "v1", "kind": "K", "metadata": { "name": "n", "resourceVersion": "300" },
        });
        let raw = b"\x0a\x08\x0a\x01n\x32\x03300";
        let unknown =
            [b"k8s\0\x0a\x07\x0a\x02v1\x12\x01K\x12\x0a".as_slice(), raw, b"\x1a\0\x22\0"].concat();
        let mut event = b"\x0a\x05ADDED\x12".to_vec();
        event.extend([unknown.len() as u8 + 2, 0x0a, unknown.len() as u8]);
        event.extend(&unknown);
        let frame = frame("ADDED", &object);
        assert_eq!(frame[..4], (event.len() as u32).to_be_bytes());
        assert_eq!(frame[4..], event);
        assert_eq!(varint(300), [0xac, 0x02]);
    }

    #[test]
    fn decode_restores_encoded_objects() {
        for object in [
            json!({
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque", "data": { "a": "AP8=" },
                "metadata": {
                    "name": "s", "labels": { "l": "1" }, "finalizers": ["x", "y"],
                    "creationTimestamp": "2026-01-01T00:00:00Z",
                    "ownerReferences": [{ "kind": "Pod", "controller": true }],
                },
            }),
            json!({
                "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": { "name": "l" },
                "spec": {
                    "holderIdentity": "n1", "leaseDurationSeconds": 40,
                    "renewTime": "2026-01-01T00:00:00.123456Z",
                },
            }),
        ] {
            assert_eq!(decode(&encode(&object)), Some(object));
        }
    }

    #[test]
    fn decode_refuses_truncated_bodies_and_types_without_a_table() {
        let whole = encode(&json!({ "kind": "ConfigMap", "metadata": { "name": "n" } }));
        assert!(decode(&whole).is_some());
        for end in 0..whole.len() - 4 {
            // The last 4 bytes are two empty fields, which may be absent.
            assert!(decode(&whole[..end]).is_none(), "truncated at {end}");
        }
        assert!(decode(&encode(&json!({ "kind": "Pod" }))).is_none());
    }
}
