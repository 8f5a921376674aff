//! API discovery: versions, groups, resources, `OpenAPI` schemas.

use crate::kinds::{KINDS, Kind};
use serde_json::{Value, json};

/// The response of `/version` of a server with this `gitVersion`.
pub fn version(git_version: &str) -> Value {
    let mut parts = git_version.trim_start_matches('v').split('.');
    let (major, minor) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    json!({
        "major": major, "minor": minor, "gitVersion": git_version, "gitCommit": "demo",
        "gitTreeState": "clean", "buildDate": "2026-01-01T00:00:00Z", "goVersion": "none",
        "compiler": "rustc", "platform": "linux/amd64",
    })
}

/// The response of `/api` of a server that advertises this address.
pub fn api_versions(address: &str) -> Value {
    json!({
        "kind": "APIVersions", "versions": ["v1"],
        "serverAddressByClientCIDRs": [{ "clientCIDR": "0.0.0.0/0", "serverAddress": address }],
    })
}

/// The document of a discovery path; `None` for other paths.
pub fn document(path: &str) -> Option<Value> {
    match path.trim_end_matches('/') {
        "/apis" => Some(json!({
            "kind": "APIGroupList", "apiVersion": "v1",
            "groups": groups().into_iter().map(group).collect::<Vec<_>>(),
        })),
        "/openapi/v2" => Some(openapi_v2()),
        "/openapi/v3" => Some(openapi_v3_index()),
        path => {
            if let Some(name) = path.strip_prefix("/openapi/v3/") {
                return openapi_v3(name);
            }
            if path == "/api/v1" {
                return Some(resources(""));
            }
            let path = path.strip_prefix("/apis/")?;
            let (name, version) = path.split_once('/').unwrap_or((path, ""));
            let name = groups().into_iter().find(|group| *group == name)?;
            match version {
                "" => Some(group(name)),
                "v1" => Some(resources(name)),
                _ => None,
            }
        }
    }
}

/// The API groups except the core group.
fn groups() -> Vec<&'static str> {
    let mut groups = vec!["authentication.k8s.io", "authorization.k8s.io"];
    groups.extend(KINDS.iter().map(|k| k.group).filter(|g| !g.is_empty()));
    groups
}

fn group(name: &str) -> Value {
    let version = json!({ "groupVersion": format!("{name}/v1"), "version": "v1" });
    json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": name,
        "versions": [version], "preferredVersion": version,
    })
}

fn resources(group: &str) -> Value {
    const VERBS: [&str; 8] =
        ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
    let entry = |name: &str, kind: &str, namespaced: bool, verbs: &[&str]| {
        json!({
            "name": name, "singularName": "", "namespaced": namespaced, "kind": kind,
            "verbs": verbs,
        })
    };
    let mut list = Vec::new();
    for kind in KINDS.iter().filter(|k| k.group == group) {
        let mut resource = entry(kind.plural, kind.kind, kind.namespaced, &VERBS);
        resource["singularName"] = kind.kind.to_lowercase().into();
        resource["shortNames"] = json!(kind.short_names);
        if ["pods", "services", "deployments"].contains(&kind.plural) {
            resource["categories"] = json!(["all"]);
        }
        list.push(resource);
        if kind.has_status {
            let name = format!("{}/status", kind.plural);
            list.push(entry(&name, kind.kind, kind.namespaced, &["get", "patch", "update"]));
        }
    }
    match group {
        "" => {
            for (name, kind) in [
                ("exec", "PodExecOptions"),
                ("attach", "PodAttachOptions"),
                ("portforward", "PodPortForwardOptions"),
            ] {
                list.push(entry(&format!("pods/{name}"), kind, true, &["create", "get"]));
            }
            list.push(entry("pods/log", "Pod", true, &["get"]));
        }
        "authentication.k8s.io" => {
            list.push(entry("selfsubjectreviews", "SelfSubjectReview", false, &["create"]));
        }
        "authorization.k8s.io" => {
            list.push(entry(
                "selfsubjectaccessreviews",
                "SelfSubjectAccessReview",
                false,
                &["create"],
            ));
        }
        _ => {}
    }
    let version = if group.is_empty() { "v1".to_owned() } else { format!("{group}/v1") };
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": list,
    })
}

/// The `OpenAPI` path template of one object.
fn item_path(kind: &Kind) -> String {
    let collection = kind.path();
    if !kind.namespaced {
        return format!("{collection}/{{name}}");
    }
    collection.replace(kind.plural, &format!("namespaces/{{namespace}}/{}/{{name}}", kind.plural))
}

/// The `OpenAPI` operations on one object. kubectl reads from them the resource type and whether the server
/// supports `dryRun` and `fieldValidation`.
fn operations(kind: &Kind) -> Value {
    let parameters: Vec<_> = ["dryRun", "fieldManager", "fieldValidation", "force"]
        .iter()
        .map(|name| json!({ "name": name, "in": "query", "schema": { "type": "string" } }))
        .collect();
    let gvk = json!({ "group": kind.group, "version": kind.version, "kind": kind.kind });
    json!({ "patch": {
        "parameters": parameters,
        "responses": { "200": { "description": "OK" } },
        "x-kubernetes-action": "patch",
        "x-kubernetes-group-version-kind": gvk,
    }})
}

fn schema_name(kind: &Kind) -> String {
    let group = kind.group.split('.').next().filter(|g| !g.is_empty()).unwrap_or("core");
    format!("io.k8s.api.{group}.{}.{}", kind.version, kind.kind)
}

fn schema(kind: &Kind) -> Value {
    json!({
        "type": "object",
        "description": format!("{} of the demo: any fields.", kind.kind),
        "x-kubernetes-preserve-unknown-fields": true,
        "x-kubernetes-group-version-kind":
            [{ "group": kind.group, "version": kind.version, "kind": kind.kind }],
    })
}

fn openapi_v2() -> Value {
    let (mut paths, mut definitions) = (json!({}), json!({}));
    for kind in KINDS {
        paths[item_path(kind)] = operations(kind);
        definitions[schema_name(kind)] = schema(kind);
    }
    json!({
        "swagger": "2.0", "info": { "title": "Kubernetes", "version": "v1.33.0-demo" },
        "paths": paths, "definitions": definitions,
    })
}

fn openapi_v3_index() -> Value {
    let mut paths = json!({});
    for kind in KINDS {
        let name = kind.path();
        let name = name.trim_start_matches('/').trim_end_matches(kind.plural).trim_end_matches('/');
        paths[name] = json!({ "serverRelativeURL": format!("/openapi/v3/{name}") });
    }
    json!({ "paths": paths })
}

fn openapi_v3(name: &str) -> Option<Value> {
    let (mut paths, mut schemas) = (json!({}), json!({}));
    for kind in KINDS.iter().filter(|k| k.path() == format!("/{name}/{}", k.plural)) {
        paths[item_path(kind)] = operations(kind);
        schemas[schema_name(kind)] = schema(kind);
    }
    paths.as_object().is_some_and(|p| !p.is_empty()).then(|| {
        json!({
            "openapi": "3.0.0", "info": { "title": "Kubernetes", "version": "v1.33.0-demo" },
            "paths": paths, "components": { "schemas": schemas },
        })
    })
}
