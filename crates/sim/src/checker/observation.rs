//! What clients have seen, and when.

use std::time::Instant;

/// How an object has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChangeKind {
    /// It was created.
    Added,
    /// It was written.
    Modified,
    /// It was deleted.
    Deleted,
}

/// A moment of a run. Many have the same time, because nothing takes time but waiting, so each also has a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment {
    /// Its number among all moments of the run.
    pub order: u64,
    /// The time.
    pub at: Instant,
}

/// A client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ClientId {
    /// Its number.
    pub number: u16,
    /// Clients of one group may not see a version older than one that any of them has seen: they have one credential
    /// and reach the apiservers through one jackstay. `None` promises nothing: a load balancer spreads their
    /// connections.
    pub group: Option<u32>,
}

/// A resource, in one namespace or in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Collection {
    /// The group and version in paths, such as `/api/v1`.
    pub api: &'static str,
    /// The plural name.
    pub resource: &'static str,
    /// The kind of its objects.
    pub kind: &'static str,
    /// The namespace; empty for all.
    pub namespace: &'static str,
}

/// How recent a read has to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recency {
    /// It has no `resourceVersion`: the state when it began, or a later one.
    MostRecent,
    /// `resourceVersion=0`: any state that is not older than what the client has seen.
    Any,
    /// This version or a later one.
    NotOlderThan(u64),
    /// Exactly this version, of a list.
    Exact(u64),
}

/// An object as a read has shown it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ShownObject {
    /// Its version.
    pub version: u64,
    /// Its token.
    pub token: Option<u64>,
}

/// The result of a write for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WriteOutcome {
    /// It was answered with 2xx. The version is that of the object in the answer, if there is one.
    Done(Option<u64>),
    /// It was answered with 4xx: it was not carried out.
    Refused,
    /// There was no answer, or one of 5xx: it may have been carried out.
    Unknown,
}

/// What a client has seen.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Seen {
    /// An object (`NAMESPACE/NAME`), `None` if there was none.
    Object {
        /// How recent it had to be.
        recency: Recency,
        /// The object.
        key: String,
        /// What was shown.
        shown: Option<ShownObject>,
    },
    /// A list.
    List {
        /// How recent it had to be.
        recency: Recency,
        /// Its version.
        version: u64,
        /// Objects and their versions.
        objects: Vec<(String, u64)>,
    },
    /// The answer to a write, or the lack of one.
    Write {
        /// The object.
        key: String,
        /// What it does.
        kind: ChangeKind,
        /// The token of the write.
        token: u64,
        /// The result.
        outcome: WriteOutcome,
    },
    /// An informer watches from this version on.
    WatchStarted(u64),
    /// An event of a watch.
    Event {
        /// How the object has changed.
        kind: ChangeKind,
        /// The object.
        key: String,
        /// Its version.
        version: u64,
        /// Its token.
        token: Option<u64>,
    },
    /// A bookmark of a watch.
    Bookmark(u64),
    /// An informer ended that has seen this version.
    InformerStopped(u64),
}

/// What a client has seen, and when.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Observation {
    /// The client.
    pub client: ClientId,
    /// The number of its request.
    pub request: u64,
    /// Where it was seen.
    pub collection: Collection,
    /// When the request was made; for what a watch delivers, the end.
    pub began: Moment,
    /// When it was seen.
    pub ended: Moment,
    /// What was seen.
    pub seen: Seen,
}

impl Collection {
    /// Config maps of the namespace `default`.
    pub const CONFIG_MAPS: Self =
        Self { api: "/api/v1", resource: "configmaps", kind: "ConfigMap", namespace: "default" };
    /// Pods of the namespace `default`.
    pub const PODS: Self =
        Self { api: "/api/v1", resource: "pods", kind: "Pod", namespace: "default" };
    /// Secrets of the namespace `default`.
    pub const SECRETS: Self =
        Self { api: "/api/v1", resource: "secrets", kind: "Secret", namespace: "default" };
    /// The objects of the aggregated group in the namespace `default`.
    pub const WIDGETS: Self = Self {
        api: "/apis/aggregated.jackstay.test/v1",
        resource: "widgets",
        kind: "Widget",
        namespace: "default",
    };
    /// The leases of kubelets.
    pub const NODE_LEASES: Self = Self {
        api: "/apis/coordination.k8s.io/v1",
        resource: "leases",
        kind: "Lease",
        namespace: "kube-node-lease",
    };
    /// The leases of leaders.
    pub const LEADER_LEASES: Self = Self { namespace: "kube-system", ..Self::NODE_LEASES };

    /// Whether an aggregated server has it.
    pub fn is_aggregated(&self) -> bool {
        self.api == Self::WIDGETS.api
    }

    /// The path of the collection.
    pub fn path(&self) -> String {
        let Self { api, resource, namespace, .. } = self;
        if namespace.is_empty() {
            format!("{api}/{resource}")
        } else {
            format!("{api}/namespaces/{namespace}/{resource}")
        }
    }

    /// The path of an object.
    pub fn object(&self, name: &str) -> String {
        format!("{}/{name}", self.path())
    }

    /// `NAMESPACE/NAME`.
    pub fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.namespace)
    }

    /// The `apiVersion` of its objects.
    pub fn api_version(&self) -> &'static str {
        self.api.trim_start_matches("/apis/").trim_start_matches("/api/")
    }
}
