//! The store that all servers of a demo control plane share: objects, one revision counter, and a
//! bounded history from which any server can serve any watch.
//!
//! Versions are etcd's: one counter for everything, raised by every change. History is a ring;
//! what fell out of it, or was compacted, answers 410.

use crate::demo::apiserver::audit::Audit;
use crate::demo::apiserver::identity::User;
use crate::demo::apiserver::kinds::{self, Kind, ObjectRef};
use crate::demo::apiserver::resource;
use crate::demo::apiserver::selector::Selector;
use crate::demo::apiserver::status_error::StatusError;
use bytes::Bytes;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Changes remembered by default.
const HISTORY: usize = 10_000;

/// A control plane's state; clones share it.
#[derive(Clone)]
pub struct Cluster {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    /// One bell for each kind: its value is the version of the last change to that kind.
    bells: HashMap<&'static str, watch::Sender<u64>>,
    audit: Audit,
}

struct State {
    version: u64,
    /// The newest version that history no longer holds.
    compacted: u64,
    objects: BTreeMap<Key, Arc<Object>>,
    history: VecDeque<Arc<Event>>,
    /// For each kind, the newest change to it that history no longer holds.
    forgotten: HashMap<&'static str, u64>,
    limit: usize,
    bookmark_interval: Duration,
    tokens: HashMap<String, User>,
}

/// Kind (its qualified name is unique), namespace, name.
type Key = (&'static str, String, String);

fn key(object: ObjectRef<'_>) -> Key {
    (object.kind.plural, object.namespace.to_owned(), object.name.to_owned())
}

/// One version of an object, and its JSON, written once for all readers.
#[derive(Debug)]
pub struct Object {
    /// The object.
    pub value: Value,
    /// The same, serialised.
    pub json: Bytes,
    /// Its resourceVersion.
    pub version: u64,
}

/// A change.
#[derive(Debug)]
pub struct Event {
    /// The version it made.
    pub version: u64,
    /// What changed.
    pub kind: &'static Kind,
    /// The object as it was, unless it was created.
    pub before: Option<Arc<Object>>,
    /// The object as it is, or as it was when it was deleted, with the version of the deletion.
    pub after: Arc<Object>,
    /// Whether it is gone.
    pub deleted: bool,
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new()
    }
}

impl Cluster {
    /// An empty cluster with the usual namespaces.
    pub fn new() -> Self {
        let state = State {
            version: 0,
            compacted: 0,
            objects: BTreeMap::new(),
            history: VecDeque::new(),
            forgotten: HashMap::new(),
            limit: HISTORY,
            bookmark_interval: Duration::from_secs(60),
            tokens: HashMap::new(),
        };
        let bells = kinds::KINDS.iter().map(|k| (k.plural, watch::Sender::new(0))).collect();
        let shared = Shared { state: Mutex::new(state), bells, audit: Audit::default() };
        let cluster = Self { shared: Arc::new(shared) };
        for name in ["default", "kube-system", "kube-public", "kube-node-lease"] {
            let namespace = json!({ "metadata": { "name": name } });
            cluster
                .create(&kinds::NAMESPACES, "", namespace, false)
                .expect("a new cluster has no such namespace");
        }
        cluster
    }

    /// What the servers were asked.
    pub fn audit(&self) -> &Audit {
        &self.shared.audit
    }

    /// The version of the last change.
    pub fn version(&self) -> u64 {
        self.lock().version
    }

    /// Lets a bearer token stand for a user.
    pub fn add_token(&self, token: &str, user: User) {
        self.lock().tokens.insert(token.to_owned(), user);
    }

    pub(super) fn with_tokens<T>(&self, look: impl FnOnce(&HashMap<String, User>) -> T) -> T {
        look(&self.lock().tokens)
    }

    /// How often a watch that allows bookmarks gets one.
    pub fn set_bookmark_interval(&self, interval: Duration) {
        self.lock().bookmark_interval = interval;
    }

    pub(super) fn bookmark_interval(&self) -> Duration {
        self.lock().bookmark_interval
    }

    /// How many changes are remembered.
    pub fn set_history(&self, limit: usize) {
        let mut state = self.lock();
        state.limit = limit;
        state.trim();
    }

    /// Forgets all history, as etcd's compaction does, and returns the version up to which.
    pub fn compact(&self) -> u64 {
        let mut state = self.lock();
        while state.forget() {}
        state.compacted = state.version;
        state.version
    }

    /// The object there.
    pub fn get(&self, place: ObjectRef<'_>) -> Result<Arc<Object>, StatusError> {
        let state = self.lock();
        state.objects.get(&key(place)).cloned().ok_or_else(|| missing(place))
    }

    /// The objects of a kind (in a namespace, or everywhere), and the version of that picture.
    pub fn list(
        &self,
        kind: &'static Kind,
        namespace: &str,
        selector: &Selector,
    ) -> (Vec<Arc<Object>>, u64) {
        let state = self.lock();
        let objects =
            state.range(kind, namespace).filter(|o| selector.matches(&o.value)).cloned().collect();
        (objects, state.version)
    }

    /// Creates an object.
    pub fn create(
        &self,
        kind: &'static Kind,
        namespace: &str,
        mut value: Value,
        dry_run: bool,
    ) -> Result<Arc<Object>, StatusError> {
        let name = resource::prepare(kind, namespace, &mut value)?;
        let place = ObjectRef { kind, namespace, name: &name };
        let mut state = self.lock();
        if state.objects.contains_key(&key(place)) {
            return Err(StatusError::already_exists(kind, &name));
        }
        if kind.namespaced {
            let home = ObjectRef { kind: &kinds::NAMESPACES, namespace: "", name: namespace };
            if !state.objects.contains_key(&key(home)) {
                return Err(missing(home));
            }
        }
        if dry_run {
            return Ok(Arc::new(Object::new(value, 0)));
        }
        Ok(self.commit(&mut state, place, value, false))
    }

    /// Changes an object in one step; `change` gets the current one and returns the next.
    pub fn modify(
        &self,
        place: ObjectRef<'_>,
        dry_run: bool,
        change: impl FnOnce(&Value) -> Result<Value, StatusError>,
    ) -> Result<Arc<Object>, StatusError> {
        let mut state = self.lock();
        let current = state.objects.get(&key(place)).cloned().ok_or_else(|| missing(place))?;
        let mut next = change(&current.value)?;
        resource::carry_over(place, &current.value, &mut next)?;
        if next == current.value {
            return Ok(current);
        }
        if dry_run {
            return Ok(Arc::new(Object::new(next, current.version)));
        }
        Ok(self.commit(&mut state, place, next, false))
    }

    /// Deletes an object if it meets the preconditions (`uid`, `resourceVersion`).
    pub fn delete(
        &self,
        place: ObjectRef<'_>,
        preconditions: &Value,
        dry_run: bool,
    ) -> Result<Arc<Object>, StatusError> {
        let mut state = self.lock();
        let current = state.objects.get(&key(place)).cloned().ok_or_else(|| missing(place))?;
        for field in ["uid", "resourceVersion"] {
            let (wanted, is) = (&preconditions[field], &current.value["metadata"][field]);
            if !wanted.is_null() && wanted != is {
                let why = format!(
                    "Precondition failed: {field} in precondition: {wanted}, {field} in object meta: {is}"
                );
                return Err(StatusError::conflict(place.kind, place.name, &why));
            }
        }
        if dry_run {
            return Ok(current);
        }
        let gone = self.commit(&mut state, place, current.value.clone(), true);
        if *place.kind == kinds::NAMESPACES {
            self.empty(&mut state, place.name);
        }
        Ok(gone)
    }

    /// Rings at every change of a kind.
    pub(super) fn bell(&self, kind: &Kind) -> watch::Receiver<u64> {
        self.shared.bells[kind.plural].subscribe()
    }

    /// The changes after a version, and the version up to which there is nothing more to see. A
    /// new watch needs all of history since then; a running one only that of its own kind.
    pub(super) fn since(
        &self,
        kind: &'static Kind,
        namespace: &str,
        cursor: u64,
        running: bool,
    ) -> Result<(Vec<Arc<Event>>, u64), StatusError> {
        let state = self.lock();
        let forgotten = state.forgotten.get(kind.plural).copied().unwrap_or(0);
        let oldest = if running { forgotten } else { state.compacted };
        if cursor < oldest {
            return Err(StatusError::expired(cursor, oldest));
        }
        let from = state.history.partition_point(|e| e.version <= cursor);
        let wanted = |e: &&Arc<Event>| {
            std::ptr::eq(e.kind, kind)
                && (namespace.is_empty() || e.after.value["metadata"]["namespace"] == namespace)
        };
        Ok((state.history.range(from..).filter(wanted).cloned().collect(), state.version))
    }

    /// Whether a list of that version can still be continued.
    pub(super) fn reaches(&self, version: u64) -> Result<(), StatusError> {
        let state = self.lock();
        if version < state.compacted {
            return Err(StatusError::expired(version, state.compacted));
        }
        Ok(())
    }

    /// Deletes what lived in a namespace.
    fn empty(&self, state: &mut State, namespace: &str) {
        for kind in kinds::KINDS.into_iter().filter(|k| k.namespaced) {
            let inside: Vec<_> = state.range(kind, namespace).cloned().collect();
            for object in inside {
                let name = object.value["metadata"]["name"].as_str().unwrap_or_default();
                let place = ObjectRef { kind, namespace, name };
                self.commit(state, place, object.value.clone(), true);
            }
        }
    }

    /// Makes a change true: raises the version, remembers it, and rings.
    fn commit(
        &self,
        state: &mut State,
        place: ObjectRef<'_>,
        mut value: Value,
        deleted: bool,
    ) -> Arc<Object> {
        state.version += 1;
        let version = state.version;
        value["metadata"]["resourceVersion"] = version.to_string().into();
        let after = Arc::new(Object::new(value, version));
        let before = if deleted {
            state.objects.remove(&key(place))
        } else {
            state.objects.insert(key(place), after.clone())
        };
        let event = Event { version, kind: place.kind, before, after: after.clone(), deleted };
        state.history.push_back(Arc::new(event));
        state.trim();
        self.shared.bells[place.kind.plural].send_replace(version);
        after
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn trim(&mut self) {
        while self.history.len() > self.limit && self.forget() {}
    }

    /// Drops the oldest change.
    fn forget(&mut self) -> bool {
        let Some(event) = self.history.pop_front() else { return false };
        self.compacted = event.version;
        self.forgotten.insert(event.kind.plural, event.version);
        true
    }

    /// The objects of a kind in a namespace, or everywhere.
    fn range(&self, kind: &Kind, namespace: &str) -> impl Iterator<Item = &Arc<Object>> {
        let first: Key = (kind.plural, namespace.to_owned(), String::new());
        let (plural, namespace) = (kind.plural, namespace.to_owned());
        self.objects
            .range((Bound::Included(first), Bound::Unbounded))
            .take_while(move |((kind, home, _), _)| {
                *kind == plural && (namespace.is_empty() || *home == namespace)
            })
            .map(|(_, object)| object)
    }
}

impl Object {
    fn new(value: Value, version: u64) -> Self {
        let json = Bytes::from(value.to_string());
        Self { value, json, version }
    }
}

fn missing(place: ObjectRef<'_>) -> StatusError {
    StatusError::not_found(place.kind, place.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::apiserver::kinds::{CONFIG_MAPS, NAMESPACES};

    fn map(name: &str) -> Value {
        json!({ "metadata": { "name": name } })
    }

    #[test]
    fn conflicts_and_versions() {
        let cluster = Cluster::new();
        let place = ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name: "a" };
        let first = cluster.create(&CONFIG_MAPS, "default", map("a"), false).unwrap();
        let taken = cluster.create(&CONFIG_MAPS, "default", map("a"), false).unwrap_err();
        assert_eq!((taken.code, taken.reason), (409, "AlreadyExists"));
        let homeless = cluster.create(&CONFIG_MAPS, "nowhere", map("a"), false).unwrap_err();
        assert_eq!(homeless.code, 404);

        let write = |version: u64| {
            cluster.modify(place, false, |now| {
                let mut next = now.clone();
                next["data"]["k"] = version.to_string().into();
                next["metadata"]["resourceVersion"] = version.to_string().into();
                Ok(next)
            })
        };
        let second = write(first.version).unwrap();
        assert!(second.version > first.version);
        assert_eq!(write(first.version).unwrap_err().reason, "Conflict");
        let same = cluster.modify(place, false, |now| Ok(now.clone())).unwrap();
        assert_eq!(same.version, second.version, "a write that changes nothing is no event");

        let uid = json!({ "uid": "other" });
        assert_eq!(cluster.delete(place, &uid, false).unwrap_err().code, 409);
        let gone = cluster.delete(place, &Value::Null, false).unwrap();
        assert!(gone.version > second.version);
        assert_eq!(cluster.get(place).unwrap_err().code, 404);
    }

    #[test]
    fn history_is_bounded() {
        let cluster = Cluster::new();
        let start = cluster.version();
        for name in ["a", "b", "c"] {
            cluster.create(&CONFIG_MAPS, "default", map(name), false).unwrap();
        }
        let (events, to) = cluster.since(&CONFIG_MAPS, "", start, false).unwrap();
        assert_eq!((events.len(), to), (3, start + 3));
        cluster.set_history(2);
        assert_eq!(cluster.since(&CONFIG_MAPS, "", start, false).unwrap_err().code, 410);
        assert_eq!(cluster.since(&CONFIG_MAPS, "", start + 1, false).unwrap().0.len(), 2);
        let compacted = cluster.compact();
        assert!(cluster.since(&CONFIG_MAPS, "", compacted - 1, false).is_err());
        assert!(cluster.since(&CONFIG_MAPS, "", compacted, false).is_ok());
    }

    #[test]
    fn a_namespace_takes_its_objects_along() {
        let cluster = Cluster::new();
        cluster.create(&NAMESPACES, "", map("ns"), false).unwrap();
        cluster.create(&CONFIG_MAPS, "ns", map("a"), false).unwrap();
        cluster.create(&CONFIG_MAPS, "default", map("b"), false).unwrap();
        let place = ObjectRef { kind: &NAMESPACES, namespace: "", name: "ns" };
        cluster.delete(place, &Value::Null, false).unwrap();
        let (left, _) = cluster.list(&CONFIG_MAPS, "", &Selector::default());
        assert_eq!(left.len(), 1);
    }
}
