//! The store that all servers of a demo control plane share: objects, and a bounded history from which
//! each server can serve each watch.
//!
//! As in etcd, one counter numbers all changes. A new change evicts the oldest one when the history is
//! full. A watch from a version before an evicted or compacted change gets 410.

mod commits;
mod object;
mod past;

pub use self::commits::{ChangeType, Commit, CommitLog};
pub use self::object::{Event, Object};

use self::commits::Recorder;
use crate::audit::Audit;
use crate::identity::User;
use crate::kinds::{self, Kind, ObjectRef};
use crate::lock;
use crate::resource;
use crate::selector::Selector;
use crate::status_error::StatusError;
use crate::wall_clock::WallClock;
use jackstay_sys::clock;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::watch;

/// Default limit of the history, in changes.
const HISTORY_LIMIT: usize = 10_000;

/// The store of a control plane; clones share it.
#[derive(Clone)]
pub struct Cluster {
    shared: Arc<Shared>,
    /// The `Audit-ID` of the request whose changes go through this handle.
    request: Option<Arc<str>>,
}

struct Shared {
    state: Mutex<State>,
    /// For each resource type, the version of its last change.
    last_changes: HashMap<&'static str, watch::Sender<u64>>,
    /// The version of the last change of any resource type.
    last_change: watch::Sender<u64>,
    audit: Audit,
    clock: WallClock,
    /// The number of connections to all servers so far.
    connections: AtomicU64,
}

struct State {
    version: u64,
    /// The newest version that is no longer in the history.
    compacted: u64,
    objects: BTreeMap<Key, Arc<Object>>,
    history: VecDeque<Arc<Event>>,
    /// For each resource type, its newest change that is no longer in the history.
    evicted: HashMap<&'static str, u64>,
    history_limit: usize,
    bookmark_interval: Duration,
    tokens: HashMap<String, User>,
    recorder: Recorder,
}

/// A backup of a store.
#[derive(Debug, Clone)]
pub struct Snapshot {
    version: u64,
    objects: BTreeMap<Key, Arc<Object>>,
}

/// Plural name of the resource type (unique here), namespace, name.
type Key = (&'static str, String, String);

fn key(object: ObjectRef<'_>) -> Key {
    (object.kind.plural, object.namespace.to_owned(), object.name.to_owned())
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new()
    }
}

impl Cluster {
    /// A cluster with only the namespaces that kube-apiserver creates.
    pub fn new() -> Self {
        Self::with_clock(WallClock::System)
    }

    /// The same with the dates of this clock in objects and responses.
    pub fn with_clock(clock: WallClock) -> Self {
        let state = State {
            version: 0,
            compacted: 0,
            objects: BTreeMap::new(),
            history: VecDeque::new(),
            evicted: HashMap::new(),
            history_limit: HISTORY_LIMIT,
            bookmark_interval: Duration::from_secs(60),
            tokens: HashMap::new(),
            recorder: Recorder::default(),
        };
        let last_changes = kinds::KINDS.iter().map(|k| (k.plural, watch::Sender::new(0))).collect();
        let shared = Shared {
            state: Mutex::new(state),
            last_changes,
            last_change: watch::Sender::new(0),
            audit: Audit::default(),
            clock,
            connections: AtomicU64::new(0),
        };
        let cluster = Self { shared: Arc::new(shared), request: None };
        for name in ["default", "kube-system", "kube-public", "kube-node-lease"] {
            let namespace = json!({ "metadata": { "name": name } });
            cluster
                .create(&kinds::NAMESPACES, "", namespace, false)
                .expect("a new cluster has no such namespace");
        }
        cluster
    }

    /// The requests that all servers received.
    pub fn audit(&self) -> &Audit {
        &self.shared.audit
    }

    /// The clock of its dates.
    pub fn clock(&self) -> WallClock {
        self.shared.clock
    }

    /// A number for a new connection to one of its servers.
    pub(super) fn next_connection(&self) -> u64 {
        self.shared.connections.fetch_add(1, Relaxed) + 1
    }

    /// A handle whose changes are recorded as those of the request with this `Audit-ID`.
    #[must_use]
    pub fn on_behalf_of(&self, audit_id: &str) -> Self {
        Self { request: Some(audit_id.into()), ..self.clone() }
    }

    /// Records the writes from now on, and keeps the last `limit` of them. 0 records none, which is the default.
    pub fn record_commits(&self, limit: usize) {
        lock(&self.shared.state).recorder.set_limit(limit);
    }

    /// The recorded writes, oldest first.
    pub fn commits(&self) -> CommitLog {
        lock(&self.shared.state).recorder.log()
    }

    /// The version of the last change.
    pub fn version(&self) -> u64 {
        lock(&self.shared.state).version
    }

    /// Accepts a bearer token for a user.
    pub fn add_token(&self, token: &str, user: User) {
        lock(&self.shared.state).tokens.insert(token.to_owned(), user);
    }

    /// Does not accept a bearer token any more.
    pub fn remove_token(&self, token: &str) {
        lock(&self.shared.state).tokens.remove(token);
    }

    /// The user of a bearer token.
    pub(super) fn user_of(&self, token: &str) -> Option<User> {
        lock(&self.shared.state).tokens.get(token).cloned()
    }

    /// Sets the interval of bookmarks for watches that allow them.
    pub fn set_bookmark_interval(&self, interval: Duration) {
        lock(&self.shared.state).bookmark_interval = interval;
    }

    pub(super) fn bookmark_interval(&self) -> Duration {
        lock(&self.shared.state).bookmark_interval
    }

    /// Sets the limit of the history, in changes.
    pub fn set_history_limit(&self, limit: usize) {
        let mut state = lock(&self.shared.state);
        state.history_limit = limit;
        state.trim();
    }

    /// A backup of the objects and the version.
    pub fn snapshot(&self) -> Snapshot {
        let state = lock(&self.shared.state);
        Snapshot { version: state.version, objects: state.objects.clone() }
    }

    /// Replaces the store by a backup, as when an etcd is restored: its version goes back, and its history is empty. Kill
    /// the apiservers before, and start them again.
    pub fn restore(&self, snapshot: Snapshot) {
        let mut state = lock(&self.shared.state);
        state.history.clear();
        state.evicted.clear();
        state.compacted = snapshot.version;
        state.version = snapshot.version;
        state.objects = snapshot.objects;
    }

    /// Drops the history as etcd's compaction does, and returns the version of the store.
    pub fn compact(&self) -> u64 {
        let mut state = lock(&self.shared.state);
        while state.evict_oldest() {}
        state.compacted = state.version;
        state.version
    }

    /// Reads an object.
    ///
    /// # Errors
    /// 404 if it does not exist.
    pub fn get(&self, object_ref: ObjectRef<'_>) -> Result<Arc<Object>, StatusError> {
        lock(&self.shared.state).get(object_ref)
    }

    /// The objects of a resource type (in a namespace, or in all if it is empty), and the version of the
    /// store.
    pub fn list(
        &self,
        kind: &'static Kind,
        namespace: &str,
        selector: &Selector,
    ) -> (Vec<Arc<Object>>, u64) {
        let state = lock(&self.shared.state);
        let objects = state
            .objects_in(kind, namespace)
            .filter(|o| selector.matches(&o.value))
            .cloned()
            .collect();
        (objects, state.version)
    }

    /// Creates an object.
    ///
    /// # Errors
    /// 400 or 422 for an invalid object, 404 for a missing namespace, 409 for a name in use.
    pub fn create(
        &self,
        kind: &'static Kind,
        namespace: &str,
        mut value: Value,
        dry_run: bool,
    ) -> Result<Arc<Object>, StatusError> {
        let now = self.shared.clock.now();
        let name = resource::prepare_for_create(kind, namespace, &mut value, now)?;
        let object_ref = ObjectRef { kind, namespace, name: &name };
        let mut state = lock(&self.shared.state);
        if state.objects.contains_key(&key(object_ref)) {
            return Err(StatusError::already_exists(kind, &name));
        }
        if kind.namespaced {
            state.get(ObjectRef { kind: &kinds::NAMESPACES, namespace: "", name: namespace })?;
        }
        if dry_run {
            return Ok(Arc::new(Object::new(value, 0)));
        }
        Ok(self.commit(&mut state, object_ref, value, false))
    }

    /// Changes an object atomically: `change` receives the current version and returns the next.
    ///
    /// # Errors
    /// 404 if it does not exist, 409 if a precondition fails, or the error of `change`.
    pub fn modify(
        &self,
        object_ref: ObjectRef<'_>,
        dry_run: bool,
        change: impl FnOnce(&Value) -> Result<Value, StatusError>,
    ) -> Result<Arc<Object>, StatusError> {
        let mut state = lock(&self.shared.state);
        let current = state.get(object_ref)?;
        let mut next = change(&current.value)?;
        resource::prepare_for_update(object_ref, &current.value, &mut next)?;
        if next == current.value {
            if !dry_run {
                let version = state.version;
                let request = self.request.clone();
                state.recorder.unchanged(version, object_ref.kind, &current, request);
            }
            return Ok(current);
        }
        if dry_run {
            return Ok(Arc::new(Object::new(next, current.version)));
        }
        Ok(self.commit(&mut state, object_ref, next, false))
    }

    /// Deletes an object if it meets the preconditions (`uid`, `resourceVersion`).
    ///
    /// # Errors
    /// 404 if it does not exist, 409 if a precondition fails.
    pub fn delete(
        &self,
        object_ref: ObjectRef<'_>,
        preconditions: &Value,
        dry_run: bool,
    ) -> Result<Arc<Object>, StatusError> {
        let mut state = lock(&self.shared.state);
        let current = state.get(object_ref)?;
        for field in ["uid", "resourceVersion"] {
            let (expected, actual) = (&preconditions[field], &current.value["metadata"][field]);
            if !expected.is_null() && expected != actual {
                let why = format!(
                    "Precondition failed: {field} in precondition: {expected}, {field} in object \
                     meta: {actual}"
                );
                return Err(StatusError::conflict(object_ref.kind, object_ref.name, &why));
            }
        }
        if dry_run {
            return Ok(current);
        }
        let deleted = self.commit(&mut state, object_ref, current.value.clone(), true);
        if *object_ref.kind == kinds::NAMESPACES {
            self.delete_all_in(&mut state, object_ref.name);
        }
        Ok(deleted)
    }

    /// Deletes objects of a resource type in one transaction, so that their changes have one version, as etcd does when a
    /// lease expires.
    ///
    /// # Errors
    /// 404 if one does not exist. Those before it are deleted.
    pub fn expire(
        &self,
        kind: &'static Kind,
        namespace: &str,
        names: &[&str],
    ) -> Result<u64, StatusError> {
        let mut state = lock(&self.shared.state);
        let before = state.version;
        for name in names {
            let object_ref = ObjectRef { kind, namespace, name };
            let current = state.get(object_ref)?;
            state.version = before;
            self.commit(&mut state, object_ref, current.value.clone(), true);
        }
        Ok(state.version)
    }

    /// Notifies of each change of a resource type.
    pub(super) fn changes_of(&self, kind: &Kind) -> watch::Receiver<u64> {
        self.shared.last_changes[kind.plural].subscribe()
    }

    /// Notifies of each change.
    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.shared.last_change.subscribe()
    }

    /// The changes of a resource type after `cursor` (in a namespace, or in all if it is empty), and the
    /// version of the store.
    ///
    /// # Errors
    /// 410 if the history of this resource type after `cursor` is incomplete.
    pub(super) fn changes_since(
        &self,
        kind: &'static Kind,
        namespace: &str,
        cursor: u64,
    ) -> Result<(Vec<Arc<Event>>, u64), StatusError> {
        let state = lock(&self.shared.state);
        let evicted = state.evicted.get(kind.plural).copied().unwrap_or(0);
        if cursor < evicted {
            return Err(StatusError::expired(cursor, evicted));
        }
        let first = state.history.partition_point(|e| e.version <= cursor);
        let matches = |e: &&Arc<Event>| {
            std::ptr::eq(e.kind, kind)
                && (namespace.is_empty() || e.after.value["metadata"]["namespace"] == namespace)
        };
        Ok((state.history.range(first..).filter(matches).cloned().collect(), state.version))
    }

    /// Checks that a new watch or a continued list can start at `version`.
    ///
    /// # Errors
    /// 410 if the history of any resource type after `version` is incomplete.
    pub(super) fn check_not_compacted(&self, version: u64) -> Result<(), StatusError> {
        let state = lock(&self.shared.state);
        if version < state.compacted {
            return Err(StatusError::expired(version, state.compacted));
        }
        Ok(())
    }

    /// Deletes all objects in a namespace.
    fn delete_all_in(&self, state: &mut State, namespace: &str) {
        for kind in kinds::KINDS.into_iter().filter(|k| k.namespaced) {
            let objects: Vec<_> = state.objects_in(kind, namespace).cloned().collect();
            for object in objects {
                let name = object.value["metadata"]["name"].as_str().unwrap_or_default();
                let object_ref = ObjectRef { kind, namespace, name };
                self.commit(state, object_ref, object.value.clone(), true);
            }
        }
    }

    /// Applies a change: increments the version, appends to the history and notifies watches.
    fn commit(
        &self,
        state: &mut State,
        object_ref: ObjectRef<'_>,
        mut value: Value,
        deleted: bool,
    ) -> Arc<Object> {
        state.version += 1;
        let version = state.version;
        value["metadata"]["resourceVersion"] = version.to_string().into();
        let after = Arc::new(Object::new(value, version));
        let before = if deleted {
            state.objects.remove(&key(object_ref))
        } else {
            state.objects.insert(key(object_ref), after.clone())
        };
        let event = Event {
            version,
            kind: object_ref.kind,
            before,
            after: after.clone(),
            deleted,
            committed: clock::now(),
        };
        state.recorder.changed(&event, self.request.clone());
        state.history.push_back(Arc::new(event));
        state.trim();
        self.shared.last_changes[object_ref.kind.plural].send_replace(version);
        self.shared.last_change.send_replace(version);
        after
    }
}

impl State {
    fn get(&self, object_ref: ObjectRef<'_>) -> Result<Arc<Object>, StatusError> {
        let missing = || StatusError::not_found(object_ref.kind, object_ref.name);
        self.objects.get(&key(object_ref)).cloned().ok_or_else(missing)
    }

    fn trim(&mut self) {
        while self.history.len() > self.history_limit && self.evict_oldest() {}
    }

    /// Drops the oldest change; false if there is none.
    fn evict_oldest(&mut self) -> bool {
        let Some(event) = self.history.pop_front() else { return false };
        self.compacted = event.version;
        self.evicted.insert(event.kind.plural, event.version);
        true
    }

    /// The objects of a resource type in a namespace, or in all if it is empty.
    fn objects_in(&self, kind: &Kind, namespace: &str) -> impl Iterator<Item = &Arc<Object>> {
        let first: Key = (kind.plural, namespace.to_owned(), String::new());
        let (plural, namespace) = (kind.plural, namespace.to_owned());
        self.objects
            .range((Bound::Included(first), Bound::Unbounded))
            .take_while(move |((key_plural, key_namespace, _), _)| {
                *key_plural == plural && (namespace.is_empty() || *key_namespace == namespace)
            })
            .map(|(_, object)| object)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::{CONFIG_MAPS, NAMESPACES};

    fn map(name: &str) -> Value {
        json!({ "metadata": { "name": name } })
    }

    #[test]
    fn objects_that_expire_together_have_one_version() {
        let cluster = Cluster::new();
        for name in ["a", "b", "c"] {
            cluster.create(&CONFIG_MAPS, "default", map(name), false).unwrap();
        }
        let before = cluster.version();
        let version = cluster.expire(&CONFIG_MAPS, "default", &["a", "c"]).unwrap();
        assert_eq!((version, cluster.version()), (before + 1, before + 1));
        let (events, _) = cluster.changes_since(&CONFIG_MAPS, "", before).unwrap();
        let deleted: Vec<_> = events.iter().map(|event| (event.version, event.deleted)).collect();
        assert_eq!(deleted, [(version, true); 2]);
        assert!(cluster.changes_since(&CONFIG_MAPS, "", version).unwrap().0.is_empty());
        let missing = cluster.expire(&CONFIG_MAPS, "default", &["a"]).unwrap_err();
        assert_eq!(missing.code, 404);
    }

    #[test]
    fn write_with_stale_version_or_other_uid_conflicts() {
        let cluster = Cluster::new();
        let object_ref = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "a" };
        let first = cluster.create(&CONFIG_MAPS, "default", map("a"), false).unwrap();
        let duplicate = cluster.create(&CONFIG_MAPS, "default", map("a"), false).unwrap_err();
        assert_eq!((duplicate.code, duplicate.reason), (409, "AlreadyExists"));
        let no_namespace = cluster.create(&CONFIG_MAPS, "missing", map("a"), false).unwrap_err();
        assert_eq!(no_namespace.code, 404);

        let write = |version: u64| {
            cluster.modify(object_ref, false, |now| {
                let mut next = now.clone();
                next["data"]["k"] = version.to_string().into();
                next["metadata"]["resourceVersion"] = version.to_string().into();
                Ok(next)
            })
        };
        let second = write(first.version).unwrap();
        assert!(second.version > first.version);
        assert_eq!(write(first.version).unwrap_err().reason, "Conflict");
        let unchanged = cluster.modify(object_ref, false, |now| Ok(now.clone())).unwrap();
        assert_eq!(unchanged.version, second.version, "a write without a change creates no event");

        let uid = json!({ "uid": "other" });
        assert_eq!(cluster.delete(object_ref, &uid, false).unwrap_err().code, 409);
        let deleted = cluster.delete(object_ref, &Value::Null, false).unwrap();
        assert!(deleted.version > second.version);
        assert_eq!(cluster.get(object_ref).unwrap_err().code, 404);
    }

    #[test]
    fn history_evicts_oldest_changes_and_expires_older_versions() {
        let cluster = Cluster::new();
        let changes_since = |version| cluster.changes_since(&CONFIG_MAPS, "", version);
        let start = cluster.version();
        for name in ["a", "b", "c"] {
            cluster.create(&CONFIG_MAPS, "default", map(name), false).unwrap();
        }
        let (events, version) = changes_since(start).unwrap();
        assert_eq!((events.len(), version), (3, start + 3));
        cluster.set_history_limit(2);
        assert_eq!(changes_since(start).unwrap_err().code, 410);
        assert_eq!(cluster.check_not_compacted(start).unwrap_err().code, 410);
        assert_eq!(changes_since(start + 1).unwrap().0.len(), 2);
        let compacted = cluster.compact();
        assert!(changes_since(compacted - 1).is_err());
        assert!(changes_since(compacted).is_ok());
    }

    #[test]
    fn delete_of_a_namespace_deletes_its_objects() {
        let cluster = Cluster::new();
        cluster.create(&NAMESPACES, "", map("ns"), false).unwrap();
        cluster.create(&CONFIG_MAPS, "ns", map("a"), false).unwrap();
        cluster.create(&CONFIG_MAPS, "default", map("b"), false).unwrap();
        let object_ref = ObjectRef { kind: &NAMESPACES, namespace: "", name: "ns" };
        cluster.delete(object_ref, &Value::Null, false).unwrap();
        let (remaining, _) = cluster.list(&CONFIG_MAPS, "", &Selector::default());
        assert_eq!(remaining.len(), 1);
    }
}
