//! The verbs, a bounded set: they label metrics and decide what may be done.

use http::Method;

/// The Kubernetes verb; for a non-resource request the method in lower case. A bounded set, so
/// that it can be a metric's label.
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
    /// PATCH, on whatever.
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
    /// Any other method, and what is no verb on a resource.
    Other,
}

impl Verb {
    /// Every verb, for whoever registers its metrics beforehand.
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
