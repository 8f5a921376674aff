//! A request in Kubernetes terms: verb, resource, name, and the kind that decides on retries.
//!
//! The HTTP method does not show whether a retry is safe: a WebSocket exec is a GET, and a `TokenReview`
//! is a POST. jackstay therefore reads a request as the apiserver does (`RequestInfoFactory` in
//! `k8s.io/apiserver/pkg/endpoints/request/requestinfo.go`, with the path prefixes of kube-apiserver: `api`
//! without a group, `apis` with one), and derives the [`RequestKind`] from the result.
//!
//! A server may have the API below a path ([`PathPrefix`]). The path is then read from there, and a request for another
//! path is no resource request: it may be for another cluster behind the same server.
//!
//! Every request is read once. A [`RequestInfo`] keeps a reference-counted handle of the request target and
//! offsets into it, and allocates only for a percent-encoded path.

#[cfg(test)]
mod tests;

pub use super::query::{first_value, pairs, parse_bool, unescape_query};

use std::borrow::Cow;

use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Request, Uri, Version, header};

use super::hygiene::has_token;
use super::path_prefix::PathPrefix;
use super::query;

/// The kind of a request, which decides whether it may be sent again ([`super::retry`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestKind {
    /// A get, a list, discovery, or any other GET, HEAD or OPTIONS.
    Read,
    /// A watch over plain HTTP.
    Watch,
    /// The log of a container, followed or not.
    Log,
    /// A create of a review type, or a POST, PUT or PATCH with `dryRun=All`. It stores nothing.
    NonMutating,
    /// Exec, attach, port-forward or proxy by any method, and any request for an upgrade.
    Tunnel,
    /// Any other request.
    Write,
}

/// The Kubernetes verb; for a non-resource request, the HTTP method. The set is bounded, because the verb is
/// a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the verbs of Kubernetes
pub enum Verb {
    Get,
    List,
    Watch,
    Create,
    Update,
    Patch,
    Delete,
    DeleteCollection,
    /// A request with the deprecated `/proxy/` path prefix.
    Proxy,
    Head,
    Post,
    Put,
    Options,
    /// Any other method, or a method that is no verb for resources.
    Other,
}

impl Verb {
    /// The name as Kubernetes writes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Verb::Get => "get",
            Verb::List => "list",
            Verb::Watch => "watch",
            Verb::Create => "create",
            Verb::Update => "update",
            Verb::Patch => "patch",
            Verb::Delete => "delete",
            Verb::DeleteCollection => "deletecollection",
            Verb::Proxy => "proxy",
            Verb::Head => "head",
            Verb::Post => "post",
            Verb::Put => "put",
            Verb::Options => "options",
            Verb::Other => "other",
        }
    }

    fn of_non_resource(method: &Method) -> Self {
        match *method {
            Method::GET => Verb::Get,
            Method::HEAD => Verb::Head,
            Method::POST => Verb::Post,
            Method::PUT => Verb::Put,
            Method::PATCH => Verb::Patch,
            Method::DELETE => Verb::Delete,
            Method::OPTIONS => Verb::Options,
            _ => Verb::Other,
        }
    }

    fn of_resource(method: &Method) -> Self {
        match *method {
            Method::GET | Method::HEAD => Verb::Get,
            Method::POST => Verb::Create,
            Method::PUT => Verb::Update,
            Method::PATCH => Verb::Patch,
            Method::DELETE => Verb::Delete,
            _ => Verb::Other,
        }
    }
}

/// A part of the path, as offsets, because the path may be shared or owned.
#[derive(Clone, Copy, Debug, Default)]
struct Span {
    start: u32,
    end: u32,
}

impl Span {
    fn of(self, path: &str) -> &str {
        path.get(self.start as usize..self.end as usize).unwrap_or("")
    }
}

/// Number of path parts that are read: prefix, group, version, verb, `namespaces`, namespace, resource,
/// name, subresource.
const MAX_PARTS: usize = 9;

/// The parts of `path` as in Go's `strings.Split(strings.Trim(path, "/"), "/")`, and their number.
fn split(path: &str) -> ([Span; MAX_PARTS], usize) {
    let trimmed_start = path.trim_start_matches('/');
    let mut at = path.len() - trimmed_start.len();
    let trimmed = trimmed_start.trim_end_matches('/');
    let (mut parts, mut count) = ([Span::default(); MAX_PARTS], 0);
    if !trimmed.is_empty() {
        // For short parts, splitting bytes is faster than searching for a character.
        for (slot, part) in parts.iter_mut().zip(trimmed.as_bytes().split(|&byte| byte == b'/')) {
            *slot = Span { start: at as u32, end: (at + part.len()) as u32 };
            at += part.len() + 1;
            count += 1;
        }
    }
    (parts, count)
}

/// A request as the apiserver understands it.
#[derive(Clone, Debug)]
pub struct RequestInfo {
    /// What it does, for metrics and logs.
    pub verb: Verb,
    /// Whether it may be sent again.
    pub kind: RequestKind,
    /// Whether the path is that of an API resource, not for example of discovery, health or metrics.
    is_resource: bool,
    /// Whether the request asks for an upgrade ([`is_upgrade`]).
    pub upgrade: bool,
    /// Number of bytes of the decoded path before the path of the API.
    prefix: u32,
    target: Option<PathAndQuery>,
    decoded_path: Option<Box<str>>,
    /// The API group; empty for the core group and for non-resource requests.
    group: Span,
    /// The resource in its plural, for example `pods`.
    resource: Span,
    /// The object's name in the path; empty for a collection. The apiserver also takes it from
    /// `fieldSelector=metadata.name=…`, but only for authorization.
    name: Span,
    subresource: Span,
}

impl RequestInfo {
    /// Reads a request's head. The API is below `prefix`.
    pub fn new(parts: &Parts, prefix: &PathPrefix) -> Self {
        Self::read(&parts.method, &parts.uri, (&parts.headers, parts.version), prefix)
    }

    /// Whether this is the head of a watch over plain HTTP. Reads others only as far as needed.
    pub fn is_watch<B>(request: &Request<B>, prefix: &PathPrefix) -> bool {
        let target = request.uri().path_and_query().map_or("", PathAndQuery::as_str);
        target.contains("watch") && {
            let (uri, headers) = (request.uri(), (request.headers(), request.version()));
            Self::read(request.method(), uri, headers, prefix).kind == RequestKind::Watch
        }
    }

    fn read(
        method: &Method,
        uri: &Uri,
        (headers, version): (&HeaderMap, Version),
        prefix: &PathPrefix,
    ) -> Self {
        let target = uri.path_and_query().cloned();
        let raw = target.as_ref().map_or("", PathAndQuery::path);
        // Go decodes the path before it splits it: `a%2Fb` is two parts. The apiserver answers an invalid
        // escape with a 400, so jackstay does not decode such a path.
        let decoded_path = match query::unescape_path(raw) {
            Some(Cow::Owned(path)) => Some(path.into_boxed_str()),
            _ => None,
        };
        let mut info = RequestInfo {
            verb: Verb::of_non_resource(method),
            kind: RequestKind::Write,
            is_resource: false,
            upgrade: is_upgrade(method, headers, version),
            prefix: 0,
            target,
            decoded_path,
            group: Span::default(),
            resource: Span::default(),
            name: Span::default(),
            subresource: Span::default(),
        };
        if prefix.strip(info.path()).is_some() {
            info.prefix = prefix.decoded().len() as u32;
            info.read_path(method);
            info.refine_verb();
        }
        info.kind = info.classify(method);
        info
    }

    /// The decoded path below the prefix, or the whole path of a request outside.
    pub fn path(&self) -> &str {
        let path = match (&self.decoded_path, &self.target) {
            (Some(path), _) => path,
            (None, Some(target)) => target.path(),
            (None, None) => "",
        };
        path.get(self.prefix as usize..).unwrap_or("")
    }

    /// The query as the client sent it, without `?`.
    pub fn query(&self) -> &str {
        self.target.as_ref().and_then(PathAndQuery::query).unwrap_or("")
    }

    /// Group and resource whose version a response shows, for example `apps/deployments`, or `pods` of the core group;
    /// `None` for a request that names no resource, and for a subresource whose responses show no version of the resource.
    ///
    /// A binding and an eviction change a pod, and answer with a Status that may have its version (kube-apiserver,
    /// `pkg/registry/core/pod/storage`). The resource `bindings` is an older form of `pods/binding`.
    pub fn resource_name(&self) -> Option<Cow<'_, str>> {
        let (group, resource) = (self.part(self.group), self.part(self.resource));
        match (group, resource, self.part(self.subresource)) {
            ("", "bindings", "") | ("", "pods", "binding" | "eviction") => {
                return Some("pods".into());
            }
            (_, "", _) => return None,
            (
                ..,
                ""
                | "status"
                | "scale"
                | "resize"
                | "ephemeralcontainers"
                | "approval"
                | "finalize",
            ) => {}
            _ => return None,
        }
        Some(if group.is_empty() { resource.into() } else { format!("{group}/{resource}").into() })
    }

    /// The API group, also that of the discovery of a version (`/apis/GROUP/VERSION`), which an aggregated apiserver serves as
    /// well. Empty for the core group, and for all other paths: kube-apiserver itself answers `/apis/GROUP`.
    pub fn api_group(&self) -> &str {
        if self.is_resource {
            return self.part(self.group);
        }
        let below = self.path().trim_matches('/').strip_prefix("apis/");
        below.and_then(|below| below.split_once('/')).map_or("", |(group, _)| group)
    }

    /// Whether the path is that of a resource or of something below it, not for example of discovery, health or metrics.
    pub fn is_resource(&self) -> bool {
        self.is_resource
    }

    /// Whether the request reads one object, and nothing below it.
    pub fn gets_object(&self) -> bool {
        self.verb == Verb::Get
            && self.kind == RequestKind::Read
            && self.name.start != self.name.end
            && self.subresource.start == self.subresource.end
    }

    fn part(&self, part: Span) -> &str {
        part.of(self.path())
    }

    /// Whether the request is about this resource or subresource of the API group.
    pub fn is_about(&self, group: &str, resource: &str, subresource: &str) -> bool {
        self.part(self.resource) == resource
            && self.part(self.subresource) == subresource
            && self.part(self.group) == group
    }

    /// Whether the request is long-running, so that its duration is not recorded and no timeout applies.
    /// This is kube-apiserver's `BasicLongRunningRequestCheck`, extended to every tunnel.
    pub fn long_running(&self) -> bool {
        matches!(self.verb, Verb::Watch | Verb::Proxy)
            || self.kind == RequestKind::Tunnel
            || self.is_resource
                && matches!(
                    self.part(self.subresource),
                    "attach" | "exec" | "proxy" | "log" | "portforward"
                )
            || !self.is_resource && self.path().starts_with("/debug/pprof/")
    }

    /// Whether it is a watch over WebSocket (fabric8's client and the Java client ask for that): a tunnel, whose frames
    /// are not followed.
    pub fn is_tunnelled_watch(&self) -> bool {
        self.upgrade && self.verb == Verb::Watch
    }

    fn read_path(&mut self, method: &Method) {
        let (parts, count) = split(self.path());
        let part = |at: usize| parts[at].of(self.path());
        if count < 3 {
            return;
        }
        let (mut at, group) = match part(0) {
            "api" => (1, Span::default()),
            "apis" if count >= 4 => (2, parts[1]),
            _ => return,
        };
        at += 1; // the version
        let prefix = match part(at) {
            "watch" => Some(Verb::Watch),
            "proxy" => Some(Verb::Proxy),
            _ => None,
        };
        at += usize::from(prefix.is_some());
        // The resource of `namespaces/x/pods` is `pods`, that of `namespaces/x/status` is `namespaces`.
        if count - at > 2
            && part(at) == "namespaces"
            && !matches!(part(at + 2), "status" | "finalize")
        {
            at += 2;
        }
        (self.is_resource, self.group) = (true, group);
        // For `/api/v1/watch` without a resource, Go returns an error and keeps the method as verb.
        if at == count {
            return;
        }
        self.verb = prefix.unwrap_or_else(|| Verb::of_resource(method));
        // The parts beyond `count` are empty.
        (self.resource, self.name) = (parts[at], parts[at + 1]);
        if self.verb != Verb::Proxy {
            self.subresource = parts[at + 2];
        }
    }

    /// Changes the verb of a request without a name: a get is a list or a watch, and a delete is a
    /// deletecollection.
    fn refine_verb(&mut self) {
        // The resource is empty only if `read_path` returned early.
        if !self.is_resource || self.resource.end == 0 || self.name.start != self.name.end {
            return;
        }
        if self.verb == Verb::Delete {
            self.verb = Verb::DeleteCollection;
        } else if self.verb == Verb::Get {
            let query = self.query();
            let watch = parse_bool(first_value(query, "watch").as_deref());
            self.verb = if watch { Verb::Watch } else { Verb::List };
        }
    }

    fn classify(&self, method: &Method) -> RequestKind {
        if self.upgrade || self.verb == Verb::Proxy {
            return RequestKind::Tunnel;
        }
        let subresource = self.part(self.subresource);
        if matches!(subresource, "exec" | "attach" | "portforward" | "proxy") {
            return RequestKind::Tunnel;
        }
        match *method {
            Method::GET if self.verb == Verb::Watch => RequestKind::Watch,
            Method::GET if subresource == "log" => RequestKind::Log,
            Method::GET | Method::HEAD | Method::OPTIONS => RequestKind::Read,
            Method::POST if self.is_review() => RequestKind::NonMutating,
            // Not DELETE: options in its body override those in the query (`DeleteResource` in
            // k8s.io/apiserver), and jackstay does not read bodies.
            Method::POST | Method::PUT | Method::PATCH if self.is_dry_run() => {
                RequestKind::NonMutating
            }
            _ => RequestKind::Write,
        }
    }

    /// Whether the request creates a review, which computes a result and stores nothing. The subresource
    /// `token` of a service account is no review, because it issues a credential.
    fn is_review(&self) -> bool {
        self.verb == Verb::Create
            && self.part(self.subresource).is_empty()
            && self.part(self.name).is_empty()
            && match self.part(self.group) {
                "authentication.k8s.io" => {
                    matches!(self.part(self.resource), "tokenreviews" | "selfsubjectreviews")
                }
                "authorization.k8s.io" => matches!(
                    self.part(self.resource),
                    "subjectaccessreviews"
                        | "selfsubjectaccessreviews"
                        | "localsubjectaccessreviews"
                        | "selfsubjectrulesreviews"
                ),
                _ => false,
            }
    }

    /// Whether the query has `dryRun=All` as the only value of `dryRun`, and kube-apiserver serves the
    /// group: an aggregated apiserver may not support dry runs.
    fn is_dry_run(&self) -> bool {
        if !self.is_resource
            || !matches!(self.verb, Verb::Create | Verb::Update | Verb::Patch)
            || self.part(self.subresource) == "token"
            || !self.query().contains('=')
            || !is_built_in_group(self.part(self.group))
        {
            return false;
        }
        let mut values = query::pairs(self.query()).filter(|(key, _)| key == "dryRun");
        matches!((values.next(), values.next()), (Some((_, value)), None) if value == "All")
    }
}

/// Whether a request asks for an HTTP/1.1 upgrade (RFC 9110, section 7.8) or for CONNECT. An upgrade to
/// `h2c` is ignored, because it would be a tunnel for requests that jackstay does not check.
pub fn is_upgrade(method: &Method, headers: &HeaderMap, version: Version) -> bool {
    if *method == Method::CONNECT {
        return true;
    }
    version == Version::HTTP_11
        && headers.contains_key(header::UPGRADE)
        && has_token(headers, header::CONNECTION, "upgrade")
        && !has_token(headers, header::UPGRADE, "h2c")
}

/// The API group in the name of a resource ([`RequestInfo::resource_name`]); empty for the core group.
pub fn group_of(resource: &str) -> &str {
    resource.rsplit_once('/').map_or("", |(group, _)| group)
}

/// Whether kube-apiserver itself serves the group, so that its resource versions are those of etcd. Any
/// other group may belong to custom resources, or to an aggregated apiserver behind an `APIService`.
pub fn is_built_in_group(group: &str) -> bool {
    matches!(
        group,
        "" | "admissionregistration.k8s.io"
            | "apiextensions.k8s.io"
            | "apiregistration.k8s.io"
            | "apps"
            | "auditregistration.k8s.io"
            | "authentication.k8s.io"
            | "authorization.k8s.io"
            | "autoscaling"
            | "batch"
            | "certificates.k8s.io"
            | "coordination.k8s.io"
            | "discovery.k8s.io"
            | "events.k8s.io"
            | "extensions"
            | "flowcontrol.apiserver.k8s.io"
            | "internal.apiserver.k8s.io"
            | "networking.k8s.io"
            | "node.k8s.io"
            | "policy"
            | "rbac.authorization.k8s.io"
            | "resource.k8s.io"
            | "scheduling.k8s.io"
            | "settings.k8s.io"
            | "storage.k8s.io"
            | "storagemigration.k8s.io"
    )
}
