//! A record of all writes that were carried out, for tests that check them: no write twice, no event lost.

use super::object::{Event, Object};
use crate::kinds::Kind;
use jackstay_sys::clock;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// What a write did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeType {
    /// Created the object.
    Added,
    /// Changed the object.
    Modified,
    /// Deleted the object.
    Deleted,
    /// Wrote what was stored, which is no change: watches do not see it.
    Unchanged,
}

/// One write that was carried out.
#[derive(Debug, Clone)]
pub struct Commit {
    /// The version of the change; that of the store if nothing changed.
    pub version: u64,
    /// When it was carried out, by tokio's clock.
    pub at: Instant,
    /// The resource type.
    pub kind: &'static Kind,
    /// What it did.
    pub change: ChangeType,
    /// The object before, if there was one.
    pub before: Option<Arc<Object>>,
    /// The object after; a deleted object carries the version of the deletion.
    pub object: Arc<Object>,
    /// The `Audit-ID` of the request; `None` for a request without one, and for a change that the process itself made.
    pub request: Option<Arc<str>>,
}

impl Commit {
    /// The namespace; empty for a resource type without namespaces.
    pub fn namespace(&self) -> &str {
        self.metadata("namespace")
    }

    /// The name of the object.
    pub fn name(&self) -> &str {
        self.metadata("name")
    }

    /// The UID of the object.
    pub fn uid(&self) -> &str {
        self.metadata("uid")
    }

    /// The value of an annotation that this write has set. `None` if the object had the same value before.
    pub fn annotated(&self, annotation: &str) -> Option<&str> {
        let value =
            |object: &'_ Object| object.value["metadata"]["annotations"][annotation].clone();
        let is_old =
            self.before.as_ref().is_some_and(|before| value(before) == value(&self.object));
        let annotations = &self.object.value["metadata"]["annotations"];
        annotations[annotation].as_str().filter(|_| !is_old)
    }

    fn metadata(&self, field: &str) -> &str {
        self.object.value["metadata"][field].as_str().unwrap_or_default()
    }
}

/// The recorded writes.
#[derive(Debug, Clone, Default)]
pub struct CommitLog {
    /// The number of writes that were recorded before these, and dropped for the limit.
    pub dropped: u64,
    /// The writes, in the order in which they were carried out.
    pub commits: Vec<Commit>,
}

impl CommitLog {
    /// The number of writes of the request with this `Audit-ID`.
    pub fn count(&self, audit_id: &str) -> usize {
        self.commits.iter().filter(|commit| commit.request.as_deref() == Some(audit_id)).count()
    }
}

/// Keeps the last writes. The default keeps none.
#[derive(Debug, Default)]
pub(super) struct Recorder {
    limit: usize,
    dropped: u64,
    commits: VecDeque<Commit>,
}

impl Recorder {
    /// Records a change.
    pub fn changed(&mut self, event: &Event, request: Option<Arc<str>>) {
        let change = match event.before {
            _ if event.deleted => ChangeType::Deleted,
            Some(_) => ChangeType::Modified,
            None => ChangeType::Added,
        };
        let (before, object) = (event.before.clone(), event.after.clone());
        let (version, kind) = (event.version, event.kind);
        let at = event.committed;
        self.push(Commit { version, at, kind, change, before, object, request });
    }

    /// Records a write of what is stored.
    pub fn unchanged(
        &mut self,
        version: u64,
        kind: &'static Kind,
        object: &Arc<Object>,
        request: Option<Arc<str>>,
    ) {
        let (before, object) = (Some(object.clone()), object.clone());
        let (at, change) = (clock::now(), ChangeType::Unchanged);
        self.push(Commit { version, at, kind, change, before, object, request });
    }

    fn push(&mut self, commit: Commit) {
        if self.limit > 0 {
            self.commits.push_back(commit);
            self.trim();
        }
    }

    /// Keeps the last `limit` writes.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
        self.trim();
    }

    /// The recorded writes.
    pub fn log(&self) -> CommitLog {
        CommitLog { dropped: self.dropped, commits: self.commits.iter().cloned().collect() }
    }

    fn trim(&mut self) {
        while self.commits.len() > self.limit {
            self.commits.pop_front();
            self.dropped += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::Cluster;
    use crate::kinds::{CONFIG_MAPS, ObjectRef};
    use serde_json::{Value, json};

    const MAP: ObjectRef<'_> = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "a" };
    const TOKEN: &str = "example.com/token";

    fn create(cluster: &Cluster) {
        let map = json!({ "metadata": { "name": "a", "annotations": { TOKEN: "t1" } } });
        cluster.create(&CONFIG_MAPS, "default", map, false).unwrap();
    }

    fn set(cluster: &Cluster, value: &str, dry_run: bool) {
        let change = |now: &Value| {
            let mut next = now.clone();
            next["data"]["k"] = value.into();
            Ok(next)
        };
        cluster.modify(MAP, dry_run, change).unwrap();
    }

    #[test]
    fn writes_are_recorded_in_order_with_their_requests() {
        let cluster = Cluster::new();
        create(&cluster);
        cluster.delete(MAP, &Value::Null, false).unwrap();
        assert!(cluster.commits().commits.is_empty(), "off by default");

        cluster.record_commits(100);
        create(&cluster.on_behalf_of("r1"));
        set(&cluster.on_behalf_of("r2"), "1", true);
        set(&cluster.on_behalf_of("r2"), "1", false);
        set(&cluster.on_behalf_of("r2"), "1", false);
        cluster.delete(MAP, &Value::Null, false).unwrap();
        let log = cluster.commits();
        let seen: Vec<_> = log
            .commits
            .iter()
            .map(|c| (c.change, c.request.as_deref(), c.annotated(TOKEN)))
            .collect();
        let expected = [
            (ChangeType::Added, Some("r1"), Some("t1")),
            (ChangeType::Modified, Some("r2"), None),
            (ChangeType::Unchanged, Some("r2"), None),
            (ChangeType::Deleted, None, None),
        ];
        assert_eq!(seen, expected);
        assert_eq!(log.count("r2"), 2, "the second one is the same write again");
        let first = &log.commits[0];
        assert_eq!((first.namespace(), first.name(), first.kind), ("default", "a", &CONFIG_MAPS));
        assert_eq!(first.uid(), log.commits[3].uid());
        assert_eq!(log.commits[3].version, cluster.version());
    }

    #[test]
    fn record_keeps_its_limit_and_counts_what_it_drops() {
        let cluster = Cluster::new();
        cluster.record_commits(2);
        create(&cluster);
        for value in ["1", "2", "3"] {
            set(&cluster, value, false);
        }
        let log = cluster.commits();
        assert_eq!((log.dropped, log.commits.len()), (2, 2));
        cluster.record_commits(0);
        assert_eq!(cluster.commits().commits.len(), 0);
    }
}
