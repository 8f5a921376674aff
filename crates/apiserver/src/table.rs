//! `Table` responses (`meta.k8s.io/v1`), which kubectl prints.

use crate::cluster::Object;
use crate::kinds::Kind;
use crate::timestamps;
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

/// The columns of a resource type between `Name` and `Age`.
fn columns(kind: &Kind) -> &'static [&'static str] {
    match kind.plural {
        "pods" => &["Ready", "Status", "Restarts"],
        "configmaps" => &["Data"],
        "secrets" => &["Type", "Data"],
        "nodes" => &["Status", "Roles"],
        "namespaces" => &["Status"],
        "leases" => &["Holder"],
        "services" => &["Type", "Cluster-IP"],
        "deployments" => &["Ready"],
        _ => &[],
    }
}

/// `columnDefinitions` of a resource type.
pub fn definitions(kind: &Kind) -> Value {
    let names: Vec<&str> = if kind.plural == "events" {
        vec!["Last Seen", "Type", "Reason", "Object", "Message"]
    } else {
        std::iter::once("Name").chain(columns(kind).iter().copied()).chain(["Age"]).collect()
    };
    names
        .iter()
        .map(|name| {
            let format = if *name == "Name" { "name" } else { "" };
            json!({ "name": name, "type": "string", "format": format, "description": name, "priority": 0 })
        })
        .collect()
}

/// A `Table` with a row for each object. `include_object` is the query parameter `includeObject`,
/// `metadata` is the metadata of the list, and ages are those at the date `now`.
pub fn table(
    kind: &Kind,
    objects: &[&Object],
    definitions: &Value,
    include_object: &str,
    metadata: &Value,
    now: SystemTime,
) -> Value {
    let rows: Vec<_> = objects.iter().map(|o| row(kind, &o.value, include_object, now)).collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": definitions, "rows": rows,
    })
}

fn row(kind: &Kind, object: &Value, include_object: &str, now: SystemTime) -> Value {
    let included = match include_object {
        "None" => Value::Null,
        "Object" => object.clone(),
        _ => json!({
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
            "metadata": object["metadata"],
        }),
    };
    json!({ "cells": cells(kind, object, now), "object": included })
}

fn cells(kind: &Kind, object: &Value, now: SystemTime) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let age = age(&object["metadata"]["creationTimestamp"], now);
    let count = |value: &Value| value.as_object().map_or(0, serde_json::Map::len);
    let text_or = |value: &Value, default: &str| {
        json!(value.as_str().filter(|v| !v.is_empty()).unwrap_or(default))
    };
    let middle = match kind.plural {
        "pods" => {
            let containers = status["containerStatuses"].as_array().cloned().unwrap_or_default();
            let ready = containers.iter().filter(|c| c["ready"] == true).count();
            let all = spec["containers"].as_array().map_or(0, Vec::len);
            let restarts: u64 = containers.iter().filter_map(|c| c["restartCount"].as_u64()).sum();
            let ready = json!(format!("{ready}/{all}"));
            vec![ready, text_or(&status["phase"], "Pending"), restarts.to_string().into()]
        }
        "configmaps" => {
            vec![(count(&object["data"]) + count(&object["binaryData"])).to_string().into()]
        }
        "secrets" => {
            vec![text_or(&object["type"], "Opaque"), count(&object["data"]).to_string().into()]
        }
        "nodes" => {
            let mut conditions = status["conditions"].as_array().into_iter().flatten();
            let ready = conditions.find(|condition| condition["type"] == "Ready");
            let state = match ready.and_then(|condition| condition["status"].as_str()) {
                Some("True") => "Ready",
                Some("False") => "NotReady",
                _ => "Unknown",
            };
            vec![state.into(), "<none>".into()]
        }
        "namespaces" => vec![text_or(&status["phase"], "Active")],
        "leases" => vec![text_or(&spec["holderIdentity"], "")],
        "services" => {
            vec![text_or(&spec["type"], "ClusterIP"), text_or(&spec["clusterIP"], "<none>")]
        }
        "deployments" => {
            let ready = status["readyReplicas"].as_u64().unwrap_or(0);
            vec![format!("{ready}/{}", spec["replicas"].as_u64().unwrap_or(1)).into()]
        }
        "events" => {
            let involved = &object["involvedObject"];
            let involved = format!(
                "{}/{}",
                involved["kind"].as_str().unwrap_or_default().to_lowercase(),
                involved["name"].as_str().unwrap_or_default()
            );
            return vec![
                age,
                text_or(&object["type"], "Normal"),
                text_or(&object["reason"], ""),
                involved.into(),
                text_or(&object["message"], ""),
            ];
        }
        _ => Vec::new(),
    };
    let name = text_or(&object["metadata"]["name"], "");
    std::iter::once(name).chain(middle).chain([age]).collect()
}

fn age(created: &Value, now: SystemTime) -> Value {
    let now = now.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let Some((created, _)) = created.as_str().and_then(timestamps::parse_rfc3339) else {
        return "<unknown>".into();
    };
    let seconds = now.saturating_sub(created);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
    .into()
}
