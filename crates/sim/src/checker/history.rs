//! What the store has committed, in order, and the state of a collection at a version.

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::observation::{ChangeKind, Moment};

/// A committed change. Changes of one transaction have one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The version of the store after the change; that of the object, too.
    pub version: u64,
    /// When it was committed.
    pub at: Instant,
    /// The plural name of the resource.
    pub resource: String,
    /// The namespace; empty for an object without one.
    pub namespace: String,
    /// The name of the object.
    pub name: String,
    /// How it has changed.
    pub kind: ChangeKind,
    /// The token of the object after the change ([`crate::peers::objects::TOKEN`]).
    pub token: Option<u64>,
}

impl Change {
    /// `NAMESPACE/NAME`.
    pub fn key(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

/// The history of a store from an empty one on. Objects from before the run are changes of the kind `Added`.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// The changes, in the order of their versions.
    pub changes: Vec<Change>,
    /// The tokens of the write requests that a handler has carried out, deletions included, if the store counts them
    /// (by `Audit-ID`). They show what `changes` cannot: an update that is carried out twice in a row changes the
    /// object once, and a deletion leaves no token.
    pub carried_out: Vec<u64>,
    /// The restores from a backup, in their order. Versions are compared within an *epoch*, which a restore ends.
    pub restores: Vec<Restore>,
    /// The groups of clients whose floors were lost, and when: jackstay was killed, which saves them once a minute.
    pub forgotten: Vec<(u32, Moment)>,
}

/// The store is replaced by a backup: its version goes back, and what was committed since is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restore {
    /// When it was made. All that is seen later is of the restored store: no apiserver runs at this moment.
    pub at: Moment,
    /// The number of changes before it, those of lost histories too.
    pub changes: usize,
    /// The version of the backup.
    pub version: u64,
}

/// The changes of one resource, in one namespace or in all.
#[derive(Debug)]
pub(super) struct CollectionHistory<'a> {
    changes: Vec<&'a Change>,
    /// For each object (`NAMESPACE/NAME`) its changes.
    objects: HashMap<String, Vec<&'a Change>>,
}

impl History {
    /// The history of each epoch.
    pub(super) fn epochs(&self) -> Vec<Self> {
        let (mut epochs, mut current, mut from) = (Vec::new(), Vec::new(), 0);
        let of = |changes| Self { changes, ..Self::default() };
        for restore in &self.restores {
            current.extend_from_slice(&self.changes[from..restore.changes]);
            let kept = current.partition_point(|change| change.version <= restore.version);
            let kept = current[..kept].to_vec();
            epochs.push(of(std::mem::replace(&mut current, kept)));
            from = restore.changes;
        }
        current.extend_from_slice(&self.changes[from..]);
        epochs.push(of(current));
        epochs
    }

    /// The number of the epoch of a moment.
    pub(super) fn epoch_of(&self, moment: Moment) -> usize {
        self.restores.partition_point(|restore| restore.at < moment)
    }

    /// The highest version up to which the histories of two epochs are the same.
    pub(super) fn common_version(&self, earlier: usize, later: usize) -> u64 {
        let between = &self.restores[earlier.min(later)..later];
        between.iter().map(|restore| restore.version).min().unwrap_or(u64::MAX)
    }

    /// How often the floors of a group were lost before a moment.
    pub(super) fn generation(&self, group: u32, moment: Moment) -> usize {
        self.forgotten.iter().filter(|(lost, at)| *lost == group && *at < moment).count()
    }

    /// The version of the last change.
    pub fn version(&self) -> u64 {
        self.changes.last().map_or(0, |change| change.version)
    }

    pub(super) fn collection(&self, resource: &str, namespace: &str) -> CollectionHistory<'_> {
        let is_in = |change: &&Change| {
            change.resource == resource && (namespace.is_empty() || change.namespace == namespace)
        };
        let changes: Vec<_> = self.changes.iter().filter(is_in).collect();
        let mut objects: HashMap<String, Vec<&Change>> = HashMap::new();
        for change in &changes {
            objects.entry(change.key()).or_default().push(change);
        }
        CollectionHistory { changes, objects }
    }
}

impl<'a> CollectionHistory<'a> {
    /// The number of changes up to a version.
    pub fn position(&self, version: u64) -> usize {
        self.changes.partition_point(|change| change.version <= version)
    }

    /// The change at a position.
    pub fn at(&self, position: usize) -> Option<&'a Change> {
        self.changes.get(position).copied()
    }

    /// The changes of an object.
    pub fn object(&self, key: &str) -> &[&'a Change] {
        self.objects.get(key).map_or(&[], Vec::as_slice)
    }

    /// The last change of an object up to a version.
    pub fn object_at(&self, key: &str, version: u64) -> Option<&'a Change> {
        let changes = self.object(key);
        let count = changes.partition_point(|change| change.version <= version);
        count.checked_sub(1).map(|at| changes[at])
    }

    /// Whether the object does not exist at a version from `from` on, up to the present.
    pub fn is_absent_from(&self, key: &str, from: u64) -> bool {
        let is_deleted = |change: &&Change| change.kind == ChangeKind::Deleted;
        self.object_at(key, from).is_none_or(|change| is_deleted(&change))
            || self.object(key).iter().any(|change| change.version > from && is_deleted(change))
    }
}

/// The objects of a collection, as they were at one version after the other.
#[derive(Debug)]
pub(super) struct Replay<'a> {
    history: &'a CollectionHistory<'a>,
    position: usize,
    /// For each object its version.
    objects: BTreeMap<String, u64>,
}

impl<'a> Replay<'a> {
    pub fn new(history: &'a CollectionHistory<'a>) -> Self {
        Self { history, position: 0, objects: BTreeMap::new() }
    }

    /// The objects at a version, which is not lower than that of the call before.
    pub fn state(&mut self, version: u64) -> &BTreeMap<String, u64> {
        while let Some(change) = self.history.at(self.position) {
            if change.version > version {
                break;
            }
            self.position += 1;
            if change.kind == ChangeKind::Deleted {
                self.objects.remove(&change.key());
            } else {
                self.objects.insert(change.key(), change.version);
            }
        }
        &self.objects
    }
}
