//! The Kubernetes verb of a request.

use http::Method;

/// The Kubernetes verb; for a non-resource request the method in lower case. The set is bounded, because
/// the verb is the label of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// One object, or a non-resource GET.
    Get,
    /// A collection.
    List,
    /// A stream of events.
    Watch,
    /// POST on a resource.
    Create,
    /// PUT on a resource.
    Update,
    /// PATCH on any path.
    Patch,
    /// DELETE of one object, or of a non-resource path.
    Delete,
    /// DELETE of a collection.
    DeleteCollection,
    /// The old `/proxy/` path prefix.
    Proxy,
    /// HEAD on a non-resource path.
    Head,
    /// POST on a non-resource path.
    Post,
    /// PUT on a non-resource path.
    Put,
    /// OPTIONS on a non-resource path.
    Options,
    /// Any other method, or a method without a verb for resources.
    Other,
}

impl Verb {
    /// All verbs, in the order of their metrics.
    pub const ALL: [Verb; 14] = [
        Verb::Get,
        Verb::List,
        Verb::Watch,
        Verb::Create,
        Verb::Update,
        Verb::Patch,
        Verb::Delete,
        Verb::DeleteCollection,
        Verb::Proxy,
        Verb::Head,
        Verb::Post,
        Verb::Put,
        Verb::Options,
        Verb::Other,
    ];

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

    pub(super) fn of_non_resource(method: &Method) -> Self {
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

    pub(super) fn of_resource(method: &Method) -> Self {
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
