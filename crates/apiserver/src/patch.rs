//! Applies JSON patches, merge patches, strategic merge patches and server-side apply.

use crate::status_error::StatusError;
use json_patch::Patch;
use serde_json::{Map, Value};

/// Applies a patch of this content type and returns the changed object.
///
/// # Errors
/// 415 for an unknown content type, 400 or 422 for a JSON patch that is malformed or does not apply.
pub fn apply(object: &Value, content_type: &str, patch: &Value) -> Result<Value, StatusError> {
    let mut object = object.clone();
    match content_type.split(';').next().unwrap_or_default().trim() {
        "application/json-patch+json" => json_patch(&mut object, patch)?,
        "application/merge-patch+json" => json_patch::merge(&mut object, patch),
        // Server-side apply has no field ownership here: it sets the fields of the patch and removes none.
        "application/strategic-merge-patch+json" | "application/apply-patch+yaml" => {
            strategic_merge(&mut object, patch, "");
        }
        other => {
            return Err(StatusError::new(
                415,
                "UnsupportedMediaType",
                format!("the body of the request was in an unknown format: {other}"),
            ));
        }
    }
    Ok(object)
}

/// Merges `patch` into `target`, which is the value of `field`.
fn strategic_merge(target: &mut Value, patch: &Value, field: &str) {
    match patch {
        Value::Object(patch) => strategic_merge_object(target, patch),
        Value::Array(items) => match (merge_key(field), target) {
            (Some(key), Value::Array(existing)) => strategic_merge_list(existing, items, key),
            (_, target) => *target = Value::Array(items.iter().map(without_directives).collect()),
        },
        other => *target = other.clone(),
    }
}

fn strategic_merge_object(target: &mut Value, patch: &Map<String, Value>) {
    if patch.get("$patch").and_then(Value::as_str) == Some("replace") {
        *target = Value::Object(Map::new());
    }
    let target = as_object(target);
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(existing)), Some(deleted)) =
                (target.get_mut(list), value.as_array())
            {
                existing.retain(|item| !deleted.contains(item));
            }
        } else if key.starts_with('$') {
            // Directives for the order of lists and for unions are not implemented.
        } else if value.is_null() {
            target.remove(key);
        } else {
            strategic_merge(target.entry(key.clone()).or_insert(Value::Null), value, key);
        }
    }
}

/// Merges `items` into a list whose elements `key` identifies. An empty `key` identifies plain values.
fn strategic_merge_list(existing: &mut Vec<Value>, items: &[Value], key: &str) {
    if key.is_empty() {
        for item in items {
            if !existing.contains(item) {
                existing.push(item.clone());
            }
        }
        return;
    }
    if items.iter().any(|i| i["$patch"] == "replace") {
        *existing =
            items.iter().filter(|i| i["$patch"].is_null()).map(without_directives).collect();
        return;
    }
    for item in items {
        let at = existing.iter().position(|e| !item[key].is_null() && e[key] == item[key]);
        match (at, item["$patch"] == "delete") {
            (Some(at), true) => drop(existing.remove(at)),
            (None, true) => {}
            (Some(at), false) => strategic_merge(&mut existing[at], item, ""),
            (None, false) => existing.push(without_directives(item)),
        }
    }
}

/// The field that identifies an element of the list `field`: the `patchMergeKey` of the resource types
/// served here, or empty for a merged list of plain values. `None` for a list that a patch replaces.
fn merge_key(field: &str) -> Option<&'static str> {
    Some(match field {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "env"
        | "volumes"
        | "imagePullSecrets"
        | "secrets" => "name",
        "conditions" | "addresses" => "type",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "ports" => "containerPort",
        "ownerReferences" => "uid",
        "podIPs" | "hostIPs" => "ip",
        "finalizers" => "",
        _ => return None,
    })
}

/// A copy without the directives of strategic merge.
fn without_directives(value: &Value) -> Value {
    let mut copy = Value::Null;
    match value {
        Value::Object(fields) => strategic_merge_object(&mut copy, fields),
        other => copy = other.clone(),
    }
    copy
}

fn as_object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("the value is an object")
}

/// RFC 6902.
fn json_patch(target: &mut Value, operations: &Value) -> Result<(), StatusError> {
    let patch: Patch = serde_json::from_value(operations.clone())
        .map_err(|error| StatusError::bad_request(format!("error decoding patch: {error}")))?;
    json_patch::patch(target, &patch).map_err(|error| {
        StatusError::invalid(format!(
            "the server rejected our request due to an error in our request: {error}"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patch_of_each_content_type_changes_the_object() {
        let pod = json!({
            "metadata": { "labels": { "a": "1" }, "finalizers": ["x"] },
            "spec": { "containers": [{ "name": "c", "image": "i" }], "tolerations": [{ "key": "t" }] },
        });
        let (json_patch, merge, strategic) = (
            "application/json-patch+json",
            "application/merge-patch+json; charset=utf-8",
            "application/strategic-merge-patch+json",
        );
        for (content_type, patch, pointer, expected) in [
            (
                merge,
                json!({"metadata": {"labels": {"a": null, "b": "2"}}}),
                "/metadata/labels",
                json!({"b": "2"}),
            ),
            (merge, json!({"spec": {"containers": []}}), "/spec/containers", json!([])),
            (
                strategic,
                json!({"spec": {"containers": [{"name": "c", "image": "j"}, {"name": "d"}]}}),
                "/spec/containers",
                json!([{"name": "c", "image": "j"}, {"name": "d"}]),
            ),
            (
                strategic,
                json!({"spec": {"containers": [{"name": "c", "$patch": "delete"}], "$setElementOrder/containers": []}}),
                "/spec",
                json!({"containers": [], "tolerations": [{"key": "t"}]}),
            ),
            (
                strategic,
                json!({"spec": {"tolerations": [{"key": "u"}]}}),
                "/spec/tolerations",
                json!([{"key": "u"}]),
            ),
            (
                strategic,
                json!({"metadata": {"finalizers": ["x", "y"]}}),
                "/metadata/finalizers",
                json!(["x", "y"]),
            ),
            (
                strategic,
                json!({"metadata": {"$deleteFromPrimitiveList/finalizers": ["x"]}}),
                "/metadata/finalizers",
                json!([]),
            ),
            (
                json_patch,
                json!([{"op": "add", "path": "/metadata/labels/x~1y", "value": "3"}, {"op": "remove", "path": "/metadata/labels/a"}]),
                "/metadata/labels",
                json!({"x/y": "3"}),
            ),
            (
                json_patch,
                json!([{"op": "add", "path": "/spec/containers/-", "value": {}}, {"op": "move", "from": "/spec/containers/0", "path": "/first"}]),
                "/first/name",
                json!("c"),
            ),
        ] {
            let patched = apply(&pod, content_type, &patch).unwrap();
            assert_eq!(patched.pointer(pointer), Some(&expected), "{patch}");
        }
        let test = json!([{"op": "test", "path": "/metadata/labels/a", "value": "2"}]);
        assert_eq!(apply(&pod, json_patch, &test).unwrap_err().code, 422);
        assert_eq!(apply(&pod, "text/plain", &test).unwrap_err().code, 415);
    }
}
