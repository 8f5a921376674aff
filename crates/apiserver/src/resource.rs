//! Rules for objects that clients write: metadata, defaults, and the fields that a request to a
//! subresource may change.

use crate::kinds::{self, Kind, ObjectRef};
use crate::status_error::StatusError;
use crate::timestamps;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use serde_json::{Value, json};
use std::time::SystemTime;

/// Validates an object before it is created at the date `now`, and sets its metadata and defaults. Returns its name.
///
/// # Errors
/// 422 without a name, 400 for any other violation.
pub fn prepare_for_create(
    kind: &Kind,
    namespace: &str,
    value: &mut Value,
    now: SystemTime,
) -> Result<String, StatusError> {
    if !value.is_object() {
        return Err(StatusError::bad_request("the body must be an object"));
    }
    for (field, expected) in [("kind", kind.kind.to_owned()), ("apiVersion", kind.api_version())] {
        match value[field].as_str() {
            Some(sent) if sent != expected => {
                return Err(StatusError::bad_request(format!(
                    "{field} {sent} in the object is not {expected}"
                )));
            }
            _ => value[field] = expected.into(),
        }
    }
    check_types(value)?;
    let metadata = &mut value["metadata"];
    if !metadata["resourceVersion"].as_str().unwrap_or_default().is_empty() {
        return Err(StatusError::bad_request(
            "resourceVersion should not be set on objects to be created",
        ));
    }
    if metadata["name"].as_str().unwrap_or_default().is_empty() {
        let Some(prefix) = metadata["generateName"].as_str().filter(|p| !p.is_empty()) else {
            return Err(StatusError::invalid(format!(
                "{} \"\" is invalid: metadata.name: Required value: name or generateName is required",
                kind.kind
            )));
        };
        metadata["name"] = format!("{prefix}{}", timestamps::name_suffix()).into();
    }
    let sent_namespace = metadata["namespace"].as_str().unwrap_or_default();
    if kind.namespaced {
        if !sent_namespace.is_empty() && sent_namespace != namespace {
            return Err(StatusError::bad_request(
                "the namespace of the provided object does not match the namespace sent on the \
                 request",
            ));
        }
        metadata["namespace"] = namespace.into();
    }
    metadata["uid"] = timestamps::uid().into();
    metadata["creationTimestamp"] = timestamps::rfc3339(now).into();
    if kind.has_status {
        metadata["generation"] = 1.into();
    }
    let name = metadata["name"].as_str().unwrap_or_default().to_owned();
    set_defaults(kind, value, &name);
    Ok(name)
}

/// Checks that the fields to which the server adds keys are objects or absent.
fn check_types(value: &Value) -> Result<(), StatusError> {
    let parts = [value, &value["metadata"], &value["metadata"]["labels"], &value["data"]];
    if parts.iter().all(|part| part.is_object() || part.is_null()) {
        return Ok(());
    }
    Err(StatusError::bad_request("cannot unmarshal: metadata, labels and data must be objects"))
}

/// Checks the preconditions of an update, and restores the fields that a client cannot change from the
/// `current` object.
///
/// # Errors
/// 400 if the name differs or a field has the wrong type, 409 if the `resourceVersion` or the UID differs.
pub fn prepare_for_update(
    object: ObjectRef<'_>,
    current: &Value,
    next: &mut Value,
) -> Result<(), StatusError> {
    check_types(next)?;
    let (stored, sent) = (&current["metadata"], &next["metadata"]);
    let precondition = |field: &str| sent[field].as_str().filter(|v| !v.is_empty());
    if precondition("resourceVersion").is_some_and(|v| stored["resourceVersion"] != v) {
        let message = "the object has been modified; please apply your changes to the latest version \
                       and try again";
        return Err(StatusError::conflict(object.kind, object.name, message));
    }
    if let Some(uid) = precondition("uid").filter(|uid| stored["uid"] != *uid) {
        let message = format!(
            "Precondition failed: UID in precondition: {uid}, UID in object meta: {}",
            stored["uid"].as_str().unwrap_or_default()
        );
        return Err(StatusError::conflict(object.kind, object.name, &message));
    }
    if precondition("name").is_some_and(|name| name != object.name) {
        return Err(StatusError::bad_request(
            "the name of the object does not match the name on the URL",
        ));
    }
    let stored = stored.clone();
    for field in ["name", "namespace", "uid", "creationTimestamp", "resourceVersion", "generation"]
    {
        if !stored[field].is_null() {
            next["metadata"][field] = stored[field].clone();
        }
    }
    next["kind"] = object.kind.kind.into();
    next["apiVersion"] = object.kind.api_version().into();
    if object.kind.has_status && current["spec"] != next["spec"] {
        next["metadata"]["generation"] = (stored["generation"].as_u64().unwrap_or(0) + 1).into();
    }
    Ok(())
}

/// Returns `current` with the fields of `written` that a request to this subresource may change. An empty
/// `subresource` is the object itself.
pub fn merge_subresource(kind: &Kind, subresource: &str, current: &Value, written: Value) -> Value {
    if !kind.has_status {
        return written;
    }
    let (mut next, status) = match subresource {
        "status" => (current.clone(), written["status"].clone()),
        _ => (written.clone(), current["status"].clone()),
    };
    if subresource == "status" {
        // `prepare_for_update` checks these fields as preconditions, then restores the current values.
        for field in ["resourceVersion", "uid", "name"] {
            next["metadata"][field] = written["metadata"][field].clone();
        }
    }
    if let Some(fields) = next.as_object_mut() {
        fields.remove("status");
        if !status.is_null() {
            fields.insert("status".to_owned(), status);
        }
    }
    next
}

/// Sets the defaults of namespaces, Secrets and pods. The demo runs no controllers and no kubelet, so
/// this function also sets the status of namespaces and pods.
fn set_defaults(kind: &Kind, value: &mut Value, name: &str) {
    if *kind == kinds::NAMESPACES {
        value["status"] = json!({ "phase": "Active" });
        value["spec"] = json!({ "finalizers": ["kubernetes"] });
        value["metadata"]["labels"]["kubernetes.io/metadata.name"] = name.into();
    }
    if *kind == kinds::SECRETS {
        if value["type"].is_null() {
            value["type"] = "Opaque".into();
        }
        let string_data = value["stringData"].take();
        if let Some(fields) = value.as_object_mut() {
            fields.remove("stringData");
        }
        for (key, text) in string_data.as_object().into_iter().flatten() {
            let text = text.as_str().unwrap_or_default();
            value["data"][key] = BASE64_STANDARD.encode(text).into();
        }
    }
    if *kind == kinds::PODS && value["status"]["phase"].is_null() {
        let now = value["metadata"]["creationTimestamp"].clone();
        let containers = value["spec"]["containers"].as_array().cloned().unwrap_or_default();
        let statuses: Vec<_> = containers
            .iter()
            .map(|c| {
                json!({
                    "name": c["name"], "image": c["image"], "ready": true, "restartCount": 0,
                    "started": true, "imageID": "", "state": { "running": { "startedAt": now } },
                })
            })
            .collect();
        value["status"] = json!({
            "phase": "Running",
            "startTime": now,
            "podIP": "10.0.0.1",
            "conditions": [{ "type": "Ready", "status": "True", "lastTransitionTime": now }],
            "containerStatuses": statuses,
        });
    }
}
