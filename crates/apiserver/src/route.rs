//! Parses the path and query of a request into resource, namespace, name and verb.

use crate::kinds::{self, Kind};
use http::Method;
use percent_encoding::percent_decode_str;

/// The decoded query of a request.
#[derive(Debug, Clone, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Parses a query string.
    pub fn parse(text: &str) -> Self {
        Self(form_urlencoded::parse(text.as_bytes()).into_owned().collect())
    }

    /// The first value of a key; empty if the key is absent.
    pub fn get(&self, key: &str) -> &str {
        self.0.iter().find(|(k, _)| k == key).map_or("", |(_, v)| v.as_str())
    }

    /// Every value of a key.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    /// Whether a boolean key is true: present, and not `false`, `False`, `f` or `0`.
    pub fn flag(&self, key: &str) -> bool {
        self.all(key).next().is_some_and(|v| !matches!(v, "false" | "0" | "False" | "f"))
    }
}

/// The resource that a path names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The resource type.
    pub kind: &'static Kind,
    /// The namespace; empty for all namespaces and for cluster-scoped resources.
    pub namespace: String,
    /// The object's name; empty for the collection.
    pub name: String,
    /// The subresource; empty for the object itself.
    pub subresource: String,
    /// Whether the path has the deprecated form `/api/v1/watch/…`.
    pub watch_prefix: bool,
}

impl Target {
    /// Parses a path below `/api/` or `/apis/`; `None` for other paths and unknown resources.
    pub fn parse(path: &str) -> Option<Self> {
        let mut parts = path.trim_start_matches('/').split('/').peekable();
        let (group, version) = match parts.next()? {
            "api" => ("", parts.next()?),
            "apis" => (parts.next()?, parts.next()?),
            _ => return None,
        };
        let watch_prefix = parts.next_if_eq(&"watch").is_some();
        let rest: Vec<_> = parts.collect();
        // `namespaces/x`, its `status` and its `finalize` name the namespace itself.
        let (namespace, rest) = match rest.as_slice() {
            ["namespaces", namespace, inside @ ..]
                if !matches!(inside, [] | ["status" | "finalize"]) =>
            {
                (*namespace, inside)
            }
            rest => ("", rest),
        };
        let (plural, rest) = rest.split_first()?;
        let kind = kinds::find(group, version, plural)?;
        if rest.iter().any(|part| part.is_empty()) || (!kind.namespaced && !namespace.is_empty()) {
            return None;
        }
        let name = rest.first().copied().unwrap_or_default();
        if kind.namespaced && namespace.is_empty() && !name.is_empty() {
            return None;
        }
        let subresource = rest.get(1..).unwrap_or_default().join("/");
        let (namespace, name) =
            (namespace.to_owned(), percent_decode_str(name).decode_utf8_lossy().into_owned());
        Some(Self { kind, namespace, name, subresource, watch_prefix })
    }

    /// The Kubernetes verb of a request for this target.
    pub fn verb(&self, method: &Method, query: &Query) -> &'static str {
        let collection = self.name.is_empty();
        match *method {
            Method::GET | Method::HEAD if self.watch_prefix || query.flag("watch") => "watch",
            Method::GET | Method::HEAD if collection => "list",
            Method::GET | Method::HEAD => "get",
            Method::POST => "create",
            Method::PUT => "update",
            Method::PATCH => "patch",
            Method::DELETE if collection => "deletecollection",
            Method::DELETE => "delete",
            _ => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_is_parsed_from_resource_paths() {
        for (path, expected) in [
            ("/api/v1/pods", Some(("pods", "", "", ""))),
            ("/api/v1/namespaces", Some(("namespaces", "", "", ""))),
            ("/api/v1/namespaces/a", Some(("namespaces", "", "a", ""))),
            ("/api/v1/namespaces/a/status", Some(("namespaces", "", "a", "status"))),
            ("/api/v1/namespaces/a/pods", Some(("pods", "a", "", ""))),
            ("/api/v1/namespaces/a/pods/b/log", Some(("pods", "a", "b", "log"))),
            ("/api/v1/watch/namespaces/a/pods", Some(("pods", "a", "", ""))),
            ("/apis/coordination.k8s.io/v1/namespaces/a/leases/l", Some(("leases", "a", "l", ""))),
            ("/api/v1/nodes/n1/status", Some(("nodes", "", "n1", "status"))),
            ("/apis/apps/v1beta1/deployments", None),
            ("/api/v1/pods/b", None),
            ("/api/v1/namespaces/a/nodes", None),
            ("/healthz", None),
        ] {
            let target = Target::parse(path);
            let found = target.as_ref().map(|t| {
                (t.kind.plural, t.namespace.as_str(), t.name.as_str(), t.subresource.as_str())
            });
            assert_eq!(found, expected, "{path}");
        }
    }

    #[test]
    fn query_decodes_values_and_flags() {
        let query = Query::parse("watch=1&command=sh&command=-c&fieldSelector=a%3Db%2Cc+d&follow");
        assert!(query.flag("watch") && query.flag("follow") && !query.flag("tty"));
        assert_eq!(query.all("command").collect::<Vec<_>>(), ["sh", "-c"]);
        assert_eq!(query.get("fieldSelector"), "a=b,c d");
    }
}
