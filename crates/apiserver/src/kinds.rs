//! The table of resource types that the demo apiserver serves. Storage, routing and discovery use it.

use crate::aggregated;

/// A resource type.
#[derive(Debug, PartialEq, Eq)]
pub struct Kind {
    /// The API group; empty for the core group.
    pub group: &'static str,
    /// The API version; each resource type has only one.
    pub version: &'static str,
    /// The plural name, as in paths.
    pub plural: &'static str,
    /// The `kind` field of its objects, such as `Pod`.
    pub kind: &'static str,
    /// Whether its objects belong to a namespace.
    pub namespaced: bool,
    /// Whether it has a `status` subresource.
    pub has_status: bool,
    /// Short names for kubectl, such as `po`.
    pub short_names: &'static [&'static str],
}

impl Kind {
    /// The `apiVersion` field of its objects, such as `v1` or `apps/v1`.
    pub fn api_version(&self) -> String {
        if self.group.is_empty() {
            self.version.to_owned()
        } else {
            format!("{}/{}", self.group, self.version)
        }
    }

    /// The name in error messages, such as `pods` or `leases.coordination.k8s.io`.
    pub fn qualified(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_owned()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }

    /// The path of its collection in all namespaces.
    pub fn path(&self) -> String {
        if self.group.is_empty() {
            format!("/api/{}/{}", self.version, self.plural)
        } else {
            format!("/apis/{}/{}/{}", self.group, self.version, self.plural)
        }
    }
}

const fn core(
    plural: &'static str,
    kind: &'static str,
    namespaced: bool,
    has_status: bool,
    short_names: &'static [&'static str],
) -> Kind {
    Kind { group: "", version: "v1", plural, kind, namespaced, has_status, short_names }
}

const fn grouped(
    group: &'static str,
    plural: &'static str,
    kind: &'static str,
    has_status: bool,
    short_names: &'static [&'static str],
) -> Kind {
    Kind { group, version: "v1", plural, kind, namespaced: true, has_status, short_names }
}

/// Pods.
pub static PODS: Kind = core("pods", "Pod", true, true, &["po"]);
/// `ConfigMaps`.
pub static CONFIG_MAPS: Kind = core("configmaps", "ConfigMap", true, false, &["cm"]);
/// Secrets.
pub static SECRETS: Kind = core("secrets", "Secret", true, false, &[]);
/// Service accounts.
pub static SERVICE_ACCOUNTS: Kind = core("serviceaccounts", "ServiceAccount", true, false, &["sa"]);
/// Namespaces.
pub static NAMESPACES: Kind = core("namespaces", "Namespace", false, true, &["ns"]);
/// Nodes.
pub static NODES: Kind = core("nodes", "Node", false, true, &["no"]);
/// Events.
pub static EVENTS: Kind = core("events", "Event", true, false, &["ev"]);
/// Services.
pub static SERVICES: Kind = core("services", "Service", true, true, &["svc"]);
/// Endpoints (core/v1).
pub static ENDPOINTS: Kind = core("endpoints", "Endpoints", true, false, &["ep"]);
/// Leases; kubelet renews one as its heartbeat.
pub static LEASES: Kind = grouped("coordination.k8s.io", "leases", "Lease", false, &[]);
/// Deployments; no controller runs them.
pub static DEPLOYMENTS: Kind = grouped("apps", "deployments", "Deployment", true, &["deploy"]);
/// Endpoint slices.
pub static ENDPOINT_SLICES: Kind =
    grouped("discovery.k8s.io", "endpointslices", "EndpointSlice", false, &[]);
/// The objects of the aggregated server.
pub static WIDGETS: Kind = grouped(aggregated::GROUP, "widgets", "Widget", false, &[]);

/// All resource types.
pub static KINDS: [&Kind; 13] = [
    &PODS,
    &CONFIG_MAPS,
    &SECRETS,
    &SERVICE_ACCOUNTS,
    &NAMESPACES,
    &NODES,
    &EVENTS,
    &SERVICES,
    &ENDPOINTS,
    &LEASES,
    &DEPLOYMENTS,
    &ENDPOINT_SLICES,
    &WIDGETS,
];

/// The resource type with this plural name in a group and version.
pub fn find(group: &str, version: &str, plural: &str) -> Option<&'static Kind> {
    KINDS.into_iter().find(|k| k.group == group && k.version == version && k.plural == plural)
}

/// Identifies one object.
#[derive(Debug, Clone, Copy)]
pub struct ObjectRef<'a> {
    /// The resource type.
    pub kind: &'static Kind,
    /// The namespace; empty for cluster-scoped resources.
    pub namespace: &'a str,
    /// `metadata.name`.
    pub name: &'a str,
}
