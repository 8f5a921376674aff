//! The store that all apiservers share, in place of etcd. It keeps its whole history, by which the run is checked; how
//! much of it a server still has is the server's matter.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use bytes::Bytes;

use crate::http2::Write;

/// A resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resource {
    /// Pods.
    Pods,
    /// Config maps.
    ConfigMaps,
    /// Leases.
    Leases,
    /// Secrets: the large collection of scenarios with bulk readers.
    Secrets,
}

impl Resource {
    /// Every resource.
    pub const ALL: [Self; 4] = [Self::Pods, Self::ConfigMaps, Self::Leases, Self::Secrets];

    /// The path of the collection.
    pub fn path(self) -> &'static str {
        match self {
            Self::Pods => "/api/v1/namespaces/default/pods",
            Self::ConfigMaps => "/api/v1/namespaces/default/configmaps",
            Self::Secrets => "/api/v1/namespaces/default/secrets",
            Self::Leases => "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases",
        }
    }

    /// The path of an object.
    pub fn object(self, key: u32) -> String {
        format!("{}/o{key}", self.path())
    }

    /// The resource of a path, and the key of the object if it names one.
    pub fn parse(path: &str) -> Option<(Self, Option<u32>)> {
        let resource = Self::ALL.into_iter().find(|resource| path.starts_with(resource.path()))?;
        let rest = &path[resource.path().len()..];
        Some((resource, rest.strip_prefix("/o").and_then(|key| key.parse().ok())))
    }
}

/// How an object has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeKind {
    /// It was created.
    Added,
    /// It was written.
    Modified,
    /// It was deleted.
    Deleted,
}

/// A change. Each has a revision of its own.
#[derive(Debug, Clone)]
pub struct Change {
    /// The revision.
    pub revision: u64,
    /// The resource of the object.
    pub resource: Resource,
    /// When it was committed.
    pub at: Instant,
    /// The line that a watch delivers.
    pub line: Bytes,
}

/// The result of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteResult {
    /// The revision of the change.
    Committed(u64),
    /// The object has another version than the write replaces, or exists already.
    Conflict,
    /// There is no such object.
    NotFound,
}

/// The version of a store without changes.
const FIRST: u64 = 1_000;

/// The store.
#[derive(Debug, Default)]
pub struct Store {
    objects: BTreeMap<(Resource, u32), u64>,
    history: Vec<Change>,
    revisions: [Vec<u64>; Resource::ALL.len()],
    /// How often each write was carried out.
    pub writes: HashMap<u64, u32>,
}

impl Store {
    /// The revision of the latest change.
    pub fn revision(&self) -> u64 {
        FIRST + self.history.len() as u64
    }

    /// The change of a revision.
    pub fn change(&self, revision: u64) -> Option<&Change> {
        self.history.get(revision.checked_sub(FIRST + 1)? as usize)
    }

    /// The version of an object.
    pub fn version(&self, resource: Resource, key: u32) -> Option<u64> {
        self.objects.get(&(resource, key)).copied()
    }

    /// Keys and versions of a resource.
    pub fn objects(&self, resource: Resource) -> impl Iterator<Item = (u32, u64)> {
        let range = (resource, 0)..=(resource, u32::MAX);
        self.objects.range(range).map(|(&(_, key), &version)| (key, version))
    }

    /// The first revision of a resource after another revision.
    pub fn next_revision(&self, resource: Resource, after: u64) -> Option<u64> {
        let revisions = &self.revisions[resource as usize];
        revisions.get(revisions.partition_point(|&revision| revision <= after)).copied()
    }

    /// Creates an object before the run.
    pub fn create(&mut self, resource: Resource, key: u32, write: Write, now: Instant) {
        self.write(ChangeKind::Added, (resource, key), write, now);
    }

    /// Creates, writes or deletes an object.
    pub fn write(
        &mut self,
        kind: ChangeKind,
        (resource, key): (Resource, u32),
        write: Write,
        now: Instant,
    ) -> WriteResult {
        let current = self.version(resource, key);
        match (kind, current) {
            (ChangeKind::Added, Some(_)) => return WriteResult::Conflict,
            (ChangeKind::Modified | ChangeKind::Deleted, None) => return WriteResult::NotFound,
            (_, Some(version)) if write.replaces.is_some_and(|replaces| replaces != version) => {
                return WriteResult::Conflict;
            }
            _ => {}
        }
        *self.writes.entry(write.token).or_default() += 1;
        let revision = self.revision() + 1;
        if kind == ChangeKind::Deleted {
            self.objects.remove(&(resource, key));
        } else {
            self.objects.insert((resource, key), revision);
        }
        let name = match kind {
            ChangeKind::Added => "ADDED",
            ChangeKind::Modified => "MODIFIED",
            ChangeKind::Deleted => "DELETED",
        };
        let line = line(name, key, revision);
        self.history.push(Change { revision, resource, at: now, line });
        self.revisions[resource as usize].push(revision);
        WriteResult::Committed(revision)
    }
}

/// An event of a watch, as kube-apiserver writes it.
pub fn line(event_type: &str, key: u32, version: u64) -> Bytes {
    Bytes::from(format!(
        "{{\"type\":\"{event_type}\",\"object\":{{\"metadata\":{{\"name\":\"o{key}\",\
         \"resourceVersion\":\"{version}\"}}}}}}\n"
    ))
}

/// The ERROR event of a watch whose version is too old.
pub fn expired_line() -> Bytes {
    Bytes::from_static(
        b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"status\":\"Failure\",\
          \"message\":\"too old resource version\",\"reason\":\"Expired\",\"code\":410}}\n",
    )
}
