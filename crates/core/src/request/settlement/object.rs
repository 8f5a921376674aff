//! The object of a write, and whether another one of the same name shows that the write was carried out.

use std::cmp::Ordering;

use jiff::Timestamp;
use serde_json::{Map, Value};

use super::lease;
use crate::watch::codec::cbor;
use crate::watch::codec::version::ResourceVersion;

/// The longest body of a write that is settled, in bytes. A Lease has less than one kilobyte, and the status of a node some
/// tens of them.
pub const MAX_BODY: usize = 256 << 10;

/// What the apiserver sets or keeps, whatever a write contains, and what the path of the request says.
const SERVER_FIELDS: [&str; 12] = [
    "name",
    "namespace",
    "generateName",
    "selfLink",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "managedFields",
    "clusterName",
];

/// What an object shows of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Found {
    /// The write was carried out.
    Written,
    /// The object has the version that the write names.
    Unwritten,
    /// Anything else.
    Other,
    /// The object could not be read.
    Unknown,
}

/// The kind of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ObjectKind {
    /// A Lease of coordination.k8s.io.
    Lease,
    /// Any other, whose updates are configured as heartbeats.
    Configured,
}

/// The object of a write that can be settled.
#[derive(Debug, PartialEq)]
pub struct WrittenObject {
    kind: ObjectKind,
    version: ResourceVersion,
    uid: Option<String>,
    /// What is compared, as JSON text: the parsed value may take a hundred times the memory of the body.
    contents: String,
}

impl WrittenObject {
    /// Parses the body of a write; `None` if what it writes cannot be recognised later: the encoding is unknown, it names no
    /// resourceVersion, or it is a Lease whose `renewTime` has no fraction of a second, so that another client may write the
    /// same.
    pub fn parse(kind: ObjectKind, content_type: &[u8], body: &[u8]) -> Option<Self> {
        let object = Object::parse(kind, content_type, body)?;
        let renewed = object.contents.pointer("/spec/renewTime").and_then(Value::as_i64);
        let is_unique = renewed.is_some_and(|micros| micros % 1_000_000 != 0);
        (kind != ObjectKind::Lease || is_unique).then_some(Self {
            kind,
            version: object.version?,
            uid: object.uid,
            contents: object.contents.to_string(),
        })
    }

    /// Whether it names the uid of the object.
    pub fn names_uid(&self) -> bool {
        self.uid.is_some()
    }

    /// What the response to a GET of the object shows.
    pub fn found(&self, status: u16, content_type: &[u8], body: &[u8]) -> Found {
        match status {
            200 => {}
            404 => return Found::Other,
            _ => return Found::Unknown,
        }
        let Some(read) = Object::parse(self.kind, content_type, body) else {
            return Found::Unknown;
        };
        let Some(version) = read.version else { return Found::Unknown };
        if self.uid.is_some() && read.uid != self.uid {
            return Found::Other;
        }
        let Ok(contents) = serde_json::from_str(&self.contents) else { return Found::Unknown };
        let is_written = match self.kind {
            ObjectKind::Lease => read.contents == contents,
            ObjectKind::Configured => contains(&read.contents, &contents),
        };
        match version.cmp(&self.version) {
            Ordering::Equal => Found::Unwritten,
            Ordering::Greater if is_written => Found::Written,
            Ordering::Greater | Ordering::Less => Found::Other,
        }
    }
}

/// What is compared of an object.
struct Object {
    version: Option<ResourceVersion>,
    uid: Option<String>,
    contents: Value,
}

impl Object {
    fn parse(kind: ObjectKind, content_type: &[u8], body: &[u8]) -> Option<Self> {
        if body.len() > MAX_BODY {
            return None;
        }
        let media_type = content_type.split(|&byte| byte == b';').next()?.trim_ascii();
        let mut object = match (media_type, kind) {
            (b"application/json", _) => serde_json::from_slice(body).ok()?,
            (b"application/cbor", _) => cbor::value(body)?,
            (b"application/vnd.kubernetes.protobuf", ObjectKind::Lease) => lease::value(body)?,
            _ => return None,
        };
        remove_empty(&mut object);
        let object = object.as_object_mut()?;
        let metadata = object.get_mut("metadata")?.as_object_mut()?;
        let text = |name| metadata.get(name).and_then(Value::as_str);
        let version =
            text("resourceVersion").and_then(|text| ResourceVersion::parse(text.as_bytes()));
        let uid = text("uid").map(str::to_owned);
        for field in SERVER_FIELDS {
            metadata.remove(field);
        }
        object.remove("apiVersion");
        object.remove("kind");
        if kind == ObjectKind::Lease {
            for field in ["acquireTime", "renewTime"] {
                let time = object.get_mut("spec").and_then(|spec| spec.get_mut(field));
                if let Some(time) = time {
                    *time = microseconds(time)?.into();
                }
            }
        }
        let mut contents = Value::Object(std::mem::take(object));
        remove_empty(&mut contents);
        Some(Self { version, uid, contents })
    }
}

/// A time in RFC 3339, or one in microseconds since 1970. Kubernetes keeps no more of a `MicroTime`.
fn microseconds(time: &Value) -> Option<i64> {
    match time {
        Value::String(text) => text.parse::<Timestamp>().ok().map(Timestamp::as_microsecond),
        other => other.as_i64(),
    }
}

/// Removes members that mean the same as their absence: null, and empty lists, maps and strings.
fn remove_empty(value: &mut Value) {
    match value {
        Value::Object(members) => members.retain(|_, member| {
            remove_empty(member);
            !is_empty(member)
        }),
        Value::Array(items) => items.iter_mut().for_each(remove_empty),
        _ => {}
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(members) => members.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Whether `read` has all that was written. An apiserver adds defaults and what other subresources have.
fn contains(read: &Value, written: &Value) -> bool {
    match (read, written) {
        (Value::Object(read), Value::Object(written)) => contains_members(read, written),
        (Value::Array(read), Value::Array(written)) => {
            read.len() == written.len()
                && read.iter().zip(written).all(|(read, written)| contains(read, written))
        }
        (read, written) => read == written,
    }
}

fn contains_members(read: &Map<String, Value>, written: &Map<String, Value>) -> bool {
    written.iter().all(|(name, written)| read.get(name).is_some_and(|read| contains(read, written)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty name and a number are seven bytes of text and more than 600 bytes of memory.
    #[test]
    fn kept_contents_are_not_larger_than_the_body() {
        let items = vec![r#"{"":0}"#; 30_000].join(",");
        let body = format!(
            r#"{{"metadata":{{"resourceVersion":"7"}},"spec":{{"renewTime":"2026-11-30T02:28:53.000001Z","x":[{items}]}}}}"#
        );
        let parse = |body: &str| {
            WrittenObject::parse(ObjectKind::Lease, b"application/json", body.as_bytes()).unwrap()
        };
        let written = parse(&body);
        assert!(written.contents.len() <= body.len(), "{}", written.contents.len());
        let read = body.replace(r#""7""#, r#""8""#);
        let found = written.found(200, b"application/json", read.as_bytes());
        assert_eq!(found, Found::Written);
    }
}
