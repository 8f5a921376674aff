//! `Table` responses (`meta.k8s.io/v1`), which kubectl prints.

use crate::demo::apiserver::cluster::Object;
use crate::demo::apiserver::kinds::Kind;
use crate::demo::apiserver::timestamps;
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

/// A `Table` with a row for each object; `include` is the query's `includeObject`.
pub fn table(
    kind: &Kind,
    objects: &[&Object],
    definitions: &Value,
    include: &str,
    list: &Value,
) -> Value {
    let rows: Vec<_> = objects.iter().map(|o| row(kind, &o.value, include)).collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": list,
        "columnDefinitions": definitions, "rows": rows,
    })
}

fn row(kind: &Kind, object: &Value, include: &str) -> Value {
    let shown = match include {
        "None" => Value::Null,
        "Object" => object.clone(),
        _ => json!({
            "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1",
            "metadata": object["metadata"],
        }),
    };
    json!({ "cells": cells(kind, object), "object": shown })
}

fn cells(kind: &Kind, object: &Value) -> Vec<Value> {
    let (spec, status) = (&object["spec"], &object["status"]);
    let age = age(&object["metadata"]["creationTimestamp"]);
    let count = |value: &Value| value.as_object().map_or(0, serde_json::Map::len);
    let or = |value: &Value, otherwise: &str| {
        json!(value.as_str().filter(|v| !v.is_empty()).unwrap_or(otherwise))
    };
    let middle = match kind.plural {
        "pods" => {
            let containers = status["containerStatuses"].as_array().cloned().unwrap_or_default();
            let ready = containers.iter().filter(|c| c["ready"] == true).count();
            let all = spec["containers"].as_array().map_or(0, Vec::len);
            let restarts: u64 = containers.iter().filter_map(|c| c["restartCount"].as_u64()).sum();
            let ready = json!(format!("{ready}/{all}"));
            vec![ready, or(&status["phase"], "Pending"), restarts.to_string().into()]
        }
        "configmaps" => {
            vec![(count(&object["data"]) + count(&object["binaryData"])).to_string().into()]
        }
        "secrets" => vec![or(&object["type"], "Opaque"), count(&object["data"]).to_string().into()],
        "nodes" => {
            let ready = status["conditions"].as_array().into_iter().flatten();
            let ready = ready.filter(|c| c["type"] == "Ready").map(|c| &c["status"]).next();
            let state = match ready.and_then(Value::as_str) {
                Some("True") => "Ready",
                Some("False") => "NotReady",
                _ => "Unknown",
            };
            vec![state.into(), "<none>".into()]
        }
        "namespaces" => vec![or(&status["phase"], "Active")],
        "leases" => vec![or(&spec["holderIdentity"], "")],
        "services" => vec![or(&spec["type"], "ClusterIP"), or(&spec["clusterIP"], "<none>")],
        "deployments" => {
            let ready = status["readyReplicas"].as_u64().unwrap_or(0);
            vec![format!("{ready}/{}", spec["replicas"].as_u64().unwrap_or(1)).into()]
        }
        "events" => {
            let about = &object["involvedObject"];
            let about = format!(
                "{}/{}",
                about["kind"].as_str().unwrap_or_default().to_lowercase(),
                about["name"].as_str().unwrap_or_default()
            );
            return vec![
                age,
                or(&object["type"], "Normal"),
                or(&object["reason"], ""),
                about.into(),
                or(&object["message"], ""),
            ];
        }
        _ => Vec::new(),
    };
    let name = or(&object["metadata"]["name"], "");
    std::iter::once(name).chain(middle).chain([age]).collect()
}

fn age(created: &Value) -> Value {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
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
