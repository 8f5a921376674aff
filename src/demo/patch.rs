//! The four ways to patch an object: pure functions from (object, patch) to object.

use crate::demo::failure::Failure;
use serde_json::{Map, Value};

/// Applies a patch of that content type.
pub fn apply(object: &Value, content_type: &str, patch: &Value) -> Result<Value, Failure> {
    let mut object = object.clone();
    match content_type.split(';').next().unwrap_or_default().trim() {
        "application/json-patch+json" => json_patch(&mut object, patch)?,
        "application/merge-patch+json" => merge(&mut object, patch),
        // Server-side apply without field ownership: what is applied wins, nothing is pruned.
        "application/strategic-merge-patch+json" | "application/apply-patch+yaml" => {
            strategic(&mut object, patch, "");
        }
        other => {
            return Err(Failure::new(
                415,
                "UnsupportedMediaType",
                format!("the body of the request was in an unknown format: {other}"),
            ));
        }
    }
    Ok(object)
}

/// RFC 7386.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    let target = as_object(target);
    for (key, value) in patch {
        if value.is_null() {
            target.remove(key);
        } else {
            merge(target.entry(key.clone()).or_insert(Value::Null), value);
        }
    }
}

/// Strategic merge with the merge keys that the resources served here have.
fn strategic(target: &mut Value, patch: &Value, field: &str) {
    match patch {
        Value::Object(patch) => strategic_object(target, patch),
        Value::Array(items) => match (merge_key(field), target) {
            (Some(key), Value::Array(existing)) => strategic_list(existing, items, key),
            (_, target) => *target = Value::Array(items.iter().map(undirected).collect()),
        },
        other => *target = other.clone(),
    }
}

fn strategic_object(target: &mut Value, patch: &Map<String, Value>) {
    if patch.get("$patch").and_then(Value::as_str) == Some("replace") {
        *target = Value::Object(Map::new());
    }
    let target = as_object(target);
    for (key, value) in patch {
        if let Some(list) = key.strip_prefix("$deleteFromPrimitiveList/") {
            if let (Some(Value::Array(existing)), Some(gone)) =
                (target.get_mut(list), value.as_array())
            {
                existing.retain(|item| !gone.contains(item));
            }
        } else if key.starts_with('$') {
            // Directives about order and unions change nothing that is compared here.
        } else if value.is_null() {
            target.remove(key);
        } else {
            strategic(target.entry(key.clone()).or_insert(Value::Null), value, key);
        }
    }
}

fn strategic_list(existing: &mut Vec<Value>, items: &[Value], key: &str) {
    if key.is_empty() {
        for item in items {
            if !existing.contains(item) {
                existing.push(item.clone());
            }
        }
        return;
    }
    if items.iter().any(|i| i["$patch"] == "replace") {
        *existing = items.iter().filter(|i| i["$patch"].is_null()).map(undirected).collect();
        return;
    }
    for item in items {
        let at = existing.iter().position(|e| !item[key].is_null() && e[key] == item[key]);
        match (at, item["$patch"] == "delete") {
            (Some(at), true) => drop(existing.remove(at)),
            (None, true) => {}
            (Some(at), false) => strategic(&mut existing[at], item, ""),
            (None, false) => existing.push(undirected(item)),
        }
    }
}

/// What identifies an element of the list called `field`; empty for sets of plain values.
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
fn undirected(value: &Value) -> Value {
    let mut copy = Value::Null;
    match value {
        Value::Object(fields) => strategic_object(&mut copy, fields),
        other => copy = other.clone(),
    }
    copy
}

fn as_object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut().expect("made an object above")
}

/// RFC 6902.
fn json_patch(target: &mut Value, operations: &Value) -> Result<(), Failure> {
    let Some(operations) = operations.as_array() else {
        return Err(Failure::bad_request("a JSON patch is a list of operations"));
    };
    for operation in operations {
        let path = operation["path"].as_str().unwrap_or_default();
        let from = operation["from"].as_str().unwrap_or_default();
        let value = operation["value"].clone();
        let done = match operation["op"].as_str().unwrap_or_default() {
            "add" => add(target, path, value),
            "remove" => remove(target, path).map(drop),
            "replace" => target.pointer_mut(path).map(|at| *at = value),
            "move" => remove(target, from).and_then(|moved| add(target, path, moved)),
            "copy" => target.pointer(from).cloned().and_then(|copy| add(target, path, copy)),
            "test" => (target.pointer(path) == Some(&value)).then_some(()),
            _ => None,
        };
        if done.is_none() {
            return Err(Failure::invalid(format!(
                "the server rejected our request due to an error in our request: {operation}"
            )));
        }
    }
    Ok(())
}

fn split(path: &str) -> Option<(&str, String)> {
    let (parent, last) = path.rsplit_once('/')?;
    Some((parent, last.replace("~1", "/").replace("~0", "~")))
}

fn add(target: &mut Value, path: &str, value: Value) -> Option<()> {
    if path.is_empty() {
        *target = value;
        return Some(());
    }
    let (parent, last) = split(path)?;
    match target.pointer_mut(parent)? {
        Value::Object(fields) => drop(fields.insert(last, value)),
        Value::Array(items) if last == "-" => items.push(value),
        Value::Array(items) => {
            let at = last.parse().ok().filter(|at| *at <= items.len())?;
            items.insert(at, value);
        }
        _ => return None,
    }
    Some(())
}

fn remove(target: &mut Value, path: &str) -> Option<Value> {
    let (parent, last) = split(path)?;
    match target.pointer_mut(parent)? {
        Value::Object(fields) => fields.remove(&last),
        Value::Array(items) => {
            let at = last.parse().ok().filter(|at| *at < items.len())?;
            Some(items.remove(at))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn patches() {
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
