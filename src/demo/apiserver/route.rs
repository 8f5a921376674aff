//! What a request is about: its path and query, in Kubernetes' terms.

use crate::demo::apiserver::kinds::{self, Kind};
use http::Method;

/// The query of a request.
#[derive(Debug, Clone, Default)]
pub struct Query(Vec<(String, String)>);

impl Query {
    /// Parses and decodes.
    pub fn parse(text: &str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty());
        Self(
            pairs
                .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
                .map(|(key, value)| (decode(key), decode(value)))
                .collect(),
        )
    }

    /// The first value of a key; empty if there is none.
    pub fn get(&self, key: &str) -> &str {
        self.0.iter().find(|(k, _)| k == key).map_or("", |(_, v)| v.as_str())
    }

    /// Every value of a key.
    pub fn all<'a>(&'a self, key: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(k, _)| k == key).map(|(_, v)| v.as_str())
    }

    /// Whether a key says yes (`true`, `1`, or nothing but the key).
    pub fn flag(&self, key: &str) -> bool {
        self.all(key).next().is_some_and(|v| !matches!(v, "false" | "0" | "False" | "f"))
    }
}

fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let escaped = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3).and_then(|hex| u8::from_str_radix(hex, 16).ok()))
            .flatten();
        match (escaped, bytes[at]) {
            (Some(byte), _) => {
                decoded.push(byte);
                at += 2;
            }
            (None, b'+') => decoded.push(b' '),
            (None, byte) => decoded.push(byte),
        }
        at += 1;
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// What a path of the resource API names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// The kind.
    pub kind: &'static Kind,
    /// The namespace; empty for all of them and for cluster-scoped kinds.
    pub namespace: String,
    /// The object; empty for the collection.
    pub name: String,
    /// The subresource; empty for the object itself.
    pub subresource: String,
    /// The old form `/api/v1/watch/…`.
    pub watch_prefix: bool,
}

impl Target {
    /// Reads a path below `/api/` or `/apis/`.
    pub fn parse(path: &str) -> Option<Self> {
        let mut parts = path.trim_start_matches('/').split('/').peekable();
        let (group, version) = match parts.next()? {
            "api" => ("", parts.next()?),
            "apis" => (parts.next()?, parts.next()?),
            _ => return None,
        };
        let watch_prefix = parts.next_if_eq(&"watch").is_some();
        let rest: Vec<_> = parts.collect();
        // `namespaces/x` is itself an object, and so are its status and its finalisers.
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
        let (namespace, name) = (namespace.to_owned(), decode(name));
        Some(Self { kind, namespace, name, subresource, watch_prefix })
    }

    /// The Kubernetes verb of a request for this.
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
    fn paths() {
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
    fn queries() {
        let query = Query::parse("watch=1&command=sh&command=-c&fieldSelector=a%3Db%2Cc+d&follow");
        assert!(query.flag("watch") && query.flag("follow") && !query.flag("tty"));
        assert_eq!(query.all("command").collect::<Vec<_>>(), ["sh", "-c"]);
        assert_eq!(query.get("fieldSelector"), "a=b,c d");
    }
}
