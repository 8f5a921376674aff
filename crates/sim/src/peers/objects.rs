//! Objects in JSON, as far as the clients read and write them.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::checker::{ChangeKind, Collection};

/// The annotation with the token of the last write, as 16 hexadecimal digits. Each write has another token.
pub const TOKEN: &str = "sim.jackstay/write";

/// The annotation of the bookmark that follows all objects with which a watch begins.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// The metadata of an object or a list.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Metadata {
    name: String,
    namespace: String,
    resource_version: String,
    annotations: Option<BTreeMap<String, String>>,
    /// Where the next page begins.
    pub r#continue: String,
}

/// An object of which only the metadata matter.
#[derive(Debug, Deserialize)]
pub struct Object {
    /// The metadata.
    pub metadata: Metadata,
}

/// A list.
#[derive(Debug, Deserialize)]
pub struct List {
    /// The metadata of the list.
    pub metadata: Metadata,
    /// The objects.
    #[serde(default)]
    pub items: Vec<Object>,
}

#[derive(Debug, Deserialize)]
struct Line {
    r#type: String,
    object: Value,
}

/// A line of a watch.
#[derive(Debug)]
pub enum WatchLine {
    /// An object has changed.
    Changed(ChangeKind, Object),
    /// Everything up to this version was sent.
    Bookmark(u64),
    /// All objects of this version were sent, with which the watch has begun.
    InitialEventsEnd(u64),
    /// The watch failed with this status.
    Error(u16),
}

impl Metadata {
    /// `NAMESPACE/NAME`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// The version, if it is a number.
    pub fn version(&self) -> Option<u64> {
        self.resource_version.parse().ok()
    }

    /// The token of the last write.
    pub fn token(&self) -> Option<u64> {
        parse_token(self.annotation(TOKEN)?)
    }

    fn annotation(&self, name: &str) -> Option<&str> {
        self.annotations.as_ref()?.get(name).map(String::as_str)
    }
}

/// A token as the annotation has it.
pub fn token_text(token: u64) -> String {
    format!("{token:016x}")
}

/// The token of an annotation or of an `Audit-ID`.
pub fn parse_token(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// A new object, or one for an unconditional update.
pub fn object(collection: &Collection, name: &str, token: u64) -> Value {
    json!({
        "kind": collection.kind,
        "apiVersion": collection.api_version(),
        "metadata": {
            "name": name,
            "namespace": collection.namespace,
            "annotations": { TOKEN: token_text(token) },
        },
    })
}

/// A patch of the token (RFC 7386).
pub fn token_patch(token: u64) -> Value {
    json!({ "metadata": { "annotations": { TOKEN: token_text(token) } } })
}

/// Reads a line of a watch without its newline. `None` if it is no event.
pub fn watch_line(line: &[u8]) -> Option<WatchLine> {
    let Line { r#type, object } = serde_json::from_slice(line).ok()?;
    let kind = match r#type.as_str() {
        "ADDED" => ChangeKind::Added,
        "MODIFIED" => ChangeKind::Modified,
        "DELETED" => ChangeKind::Deleted,
        "ERROR" => {
            return Some(WatchLine::Error(object["code"].as_u64()?.try_into().ok()?));
        }
        "BOOKMARK" => {
            let object = Object::deserialize(object).ok()?;
            let is_end = object.metadata.annotation(INITIAL_EVENTS_END) == Some("true");
            let line = if is_end { WatchLine::InitialEventsEnd } else { WatchLine::Bookmark };
            return object.metadata.version().map(line);
        }
        _ => return None,
    };
    let object = Object::deserialize(object).ok()?;
    object.metadata.version()?;
    Some(WatchLine::Changed(kind, object))
}

/// Reads a whole body.
pub fn parse<'a, T: Deserialize<'a>>(body: &'a Bytes) -> Option<T> {
    serde_json::from_slice(body).ok()
}
