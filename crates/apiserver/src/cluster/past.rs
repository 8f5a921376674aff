//! Former states of the store, which a watch cache with a lag still has.

use super::{Cluster, Object, State, key};
use crate::kinds::{Kind, ObjectRef};
use crate::lock;
use crate::selector::Selector;
use crate::status_error::StatusError;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl Cluster {
    /// The version of the store that was the last one at `now - lag`, as far as the history goes back.
    pub(crate) fn version_before(&self, now: Instant, lag: Duration) -> u64 {
        let state = lock(&self.shared.state);
        let newer = state.history.partition_point(|event| event.committed + lag <= now);
        // Changes of one transaction have one version and one time.
        newer.checked_sub(1).map_or(state.compacted, |last| state.history[last].version)
    }

    /// When the first change after `version` was committed.
    pub(crate) fn committed_after(&self, version: u64) -> Option<Instant> {
        let state = lock(&self.shared.state);
        let first = state.history.partition_point(|event| event.version <= version);
        state.history.get(first).map(|event| event.committed)
    }

    /// The objects of a resource type (in a namespace, or in all if it is empty) at `version`, which is in the history.
    pub(crate) fn list_at(
        &self,
        kind: &'static Kind,
        namespace: &str,
        selector: &Selector,
        version: u64,
    ) -> Vec<Arc<Object>> {
        let state = lock(&self.shared.state);
        let mut objects: BTreeMap<_, _> = state
            .objects_in(kind, namespace)
            .map(|object| (name_of(object), object.clone()))
            .collect();
        for event in state.undo_to(version).filter(|event| std::ptr::eq(event.kind, kind)) {
            let name = name_of(&event.after);
            if !namespace.is_empty() && name.0 != namespace {
                continue;
            }
            match &event.before {
                Some(before) => objects.insert(name, before.clone()),
                None => objects.remove(&name),
            };
        }
        objects.into_values().filter(|object| selector.matches(&object.value)).collect()
    }

    /// Reads an object as it was at `version`, which is in the history.
    ///
    /// # Errors
    /// 404 if it did not exist.
    pub(crate) fn get_at(
        &self,
        object_ref: ObjectRef<'_>,
        version: u64,
    ) -> Result<Arc<Object>, StatusError> {
        let state = lock(&self.shared.state);
        let is_same = |object: &Object| {
            let (namespace, name) = name_of(object);
            (namespace.as_str(), name.as_str()) == (object_ref.namespace, object_ref.name)
        };
        let of_object = |event: &&Arc<super::Event>| {
            std::ptr::eq(event.kind, object_ref.kind) && is_same(&event.after)
        };
        let object = match state.undo_to(version).filter(of_object).last() {
            Some(event) => event.before.clone(),
            None => state.objects.get(&key(object_ref)).cloned(),
        };
        object.ok_or_else(|| StatusError::not_found(object_ref.kind, object_ref.name))
    }
}

impl State {
    /// The changes after `version`, the newest first.
    fn undo_to(&self, version: u64) -> impl Iterator<Item = &Arc<super::Event>> {
        self.history.iter().rev().take_while(move |event| event.version > version)
    }
}

/// Namespace and name, the order of a list.
fn name_of(object: &Object) -> (String, String) {
    let meta = &object.value["metadata"];
    let part = |field: &str| meta[field].as_str().unwrap_or_default().to_owned();
    (part("namespace"), part("name"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::CONFIG_MAPS;
    use jackstay_sys::clock;
    use serde_json::{Value, json};

    const LAG: Duration = Duration::from_millis(100);

    fn object(name: &str) -> ObjectRef<'_> {
        ObjectRef { kind: &CONFIG_MAPS, namespace: "default", name }
    }

    #[tokio::test(start_paused = true)]
    async fn former_state_has_the_objects_of_its_version() {
        let cluster = Cluster::new();
        let create = |name: &str| {
            let map = json!({ "metadata": { "name": name } });
            cluster.create(&CONFIG_MAPS, "default", map, false).unwrap().version
        };
        let names_at = |version| -> Vec<_> {
            let objects = cluster.list_at(&CONFIG_MAPS, "", &Selector::default(), version);
            objects.iter().map(|object| name_of(object).1).collect()
        };
        let (first, start) = (create("a"), clock::now());
        tokio::time::advance(LAG).await;
        let second = create("b");
        cluster.delete(object("a"), &Value::Null, false).unwrap();
        assert_eq!(names_at(first), ["a"]);
        assert_eq!(names_at(second), ["a", "b"]);
        assert_eq!(names_at(cluster.version()), ["b"]);
        assert_eq!(cluster.get_at(object("a"), second).unwrap().version, first);
        assert_eq!(cluster.get_at(object("b"), first).unwrap_err().code, 404);
        assert_eq!(cluster.get_at(object("a"), cluster.version()).unwrap_err().code, 404);

        assert_eq!(cluster.version_before(clock::now(), LAG), first);
        assert_eq!(cluster.version_before(start + 2 * LAG, LAG), cluster.version());
        assert_eq!(cluster.committed_after(first), Some(start + LAG));
        assert_eq!(cluster.committed_after(cluster.version()), None);
    }
}
