//! Objects, and their changes.

use crate::kinds::Kind;
use bytes::Bytes;
use serde_json::Value;
use std::sync::Arc;
use std::time::Instant;

/// One version of an object, serialized once for all readers.
#[derive(Debug)]
pub struct Object {
    /// The object.
    pub value: Value,
    /// `value`, serialized.
    pub json: Bytes,
    /// `metadata.resourceVersion`.
    pub version: u64,
}

/// A change of one object.
#[derive(Debug)]
pub struct Event {
    /// The version of the change.
    pub version: u64,
    /// The resource type.
    pub kind: &'static Kind,
    /// The object before the change; `None` if the change created it.
    pub before: Option<Arc<Object>>,
    /// The object after the change; a deleted object carries the version of the deletion.
    pub after: Arc<Object>,
    /// Whether the change deleted the object.
    pub deleted: bool,
    /// When it was committed, by tokio's clock.
    pub(super) committed: Instant,
}

impl Object {
    pub(crate) fn new(value: Value, version: u64) -> Self {
        let json = Bytes::from(value.to_string());
        Self { value, json, version }
    }
}
