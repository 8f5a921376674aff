//! The store of a run: what it has at the beginning, and what it has committed in the end.

use std::io;
use std::time::{Duration, SystemTime};

use jackstay_apiserver::WallClock;
use jackstay_apiserver::cluster::{ChangeType, Cluster, Commit};
use jackstay_apiserver::kinds::{self, Kind, ObjectRef};
use serde_json::json;

use crate::checker::{Change, ChangeKind, Collection, History, Moment, Restore};
use crate::peers::objects;

/// Pods in the store.
pub const PODS: u32 = 20;
/// Config maps in the store that every client may write.
pub const CONFIG_MAPS: u32 = 20;
/// Objects of the aggregated group that every client may write.
pub const WIDGETS: u32 = 20;
/// Secrets that bulk readers list.
const SECRETS: u32 = 1_000;
/// Bytes of a secret in base64, which with its metadata has 1.5 KB.
const SECRET_PAYLOAD: usize = 1_200;
/// The first token of the secrets, which are below those of the other objects.
const SECRET_TOKENS: u64 = u64::MAX - (1 << 20);

/// The first token of the objects of the aggregated group.
const WIDGET_TOKENS: u64 = u64::MAX - (1 << 19);

/// A store with the objects that clients read and write, after so many other writes. Its watches get a bookmark at this
/// interval.
///
/// # Errors
/// An object is not accepted.
pub fn filled(
    date: SystemTime,
    bookmark_interval: Duration,
    writes_before: u64,
) -> io::Result<Cluster> {
    let cluster = Cluster::with_clock(WallClock::starting_at(date));
    for number in 0..writes_before {
        let name = format!("before-{number}");
        let object = objects::object(&Collection::CONFIG_MAPS, &name, number);
        let namespace = Collection::CONFIG_MAPS.namespace;
        let created = cluster.create(&kinds::CONFIG_MAPS, namespace, object, false);
        created.map_err(|error| io::Error::other(error.message))?;
        let reference = ObjectRef { kind: &kinds::CONFIG_MAPS, namespace, name: &name };
        let deleted = cluster.delete(reference, &serde_json::Value::Null, false);
        deleted.map_err(|error| io::Error::other(error.message))?;
    }
    cluster.record_commits(usize::MAX);
    cluster.set_bookmark_interval(bookmark_interval);
    let kinds: [(&'static Kind, Collection, u32); 2] = [
        (&kinds::PODS, Collection::PODS, PODS),
        (&kinds::CONFIG_MAPS, Collection::CONFIG_MAPS, CONFIG_MAPS),
    ];
    // Every write has another token, those before the run too.
    let mut token = u64::MAX;
    for (kind, collection, count) in kinds {
        for number in 0..count {
            let object = objects::object(&collection, &format!("o{number}"), token);
            token -= 1;
            let created = cluster.create(kind, collection.namespace, object, false);
            created.map_err(|error| io::Error::other(error.message))?;
        }
    }
    Ok(cluster)
}

/// Adds [`SECRETS`] of 1.5 KB each, which bulk readers list.
///
/// # Errors
/// An object is not accepted.
pub fn add_secrets(cluster: &Cluster) -> io::Result<()> {
    let payload = "AAAA".repeat(SECRET_PAYLOAD / 4);
    for number in 0..SECRETS {
        let token = SECRET_TOKENS + u64::from(number);
        let collection = Collection::SECRETS;
        let mut object = objects::object(&collection, &format!("o{number}"), token);
        object["data"] = json!({ "payload": payload });
        let created = cluster.create(&kinds::SECRETS, collection.namespace, object, false);
        created.map_err(|error| io::Error::other(error.message))?;
    }
    Ok(())
}

/// Adds the objects of the aggregated group.
///
/// # Errors
/// An object is not accepted.
pub fn add_widgets(cluster: &Cluster) -> io::Result<()> {
    for number in 0..WIDGETS {
        let (collection, token) = (Collection::WIDGETS, WIDGET_TOKENS + u64::from(number));
        let object = objects::object(&collection, &format!("o{number}"), token);
        let created = cluster.create(&kinds::WIDGETS, collection.namespace, object, false);
        created.map_err(|error| io::Error::other(error.message))?;
    }
    Ok(())
}

/// A restore of the store.
#[derive(Debug, Clone, Copy)]
pub struct StoreRestore {
    /// When it was made.
    pub at: Moment,
    /// The number of writes before it.
    pub commits: usize,
    /// The version of the backup.
    pub version: u64,
}

/// What the store has committed from the beginning on.
pub fn history(cluster: &Cluster, restores: &[StoreRestore]) -> History {
    let (mut history, mut restores) = (History::default(), restores.iter().peekable());
    for (number, commit) in cluster.commits().commits.into_iter().enumerate() {
        while let Some(restore) = restores.next_if(|restore| restore.commits <= number) {
            let (at, version) = (restore.at, restore.version);
            history.restores.push(Restore { at, changes: history.changes.len(), version });
        }
        let request = commit.request.as_deref().and_then(objects::parse_token);
        history.carried_out.extend(request);
        history.changes.extend(change(&commit));
    }
    for &StoreRestore { at, version, .. } in restores {
        history.restores.push(Restore { at, changes: history.changes.len(), version });
    }
    history
}

/// The change that a write has made, if there is one.
fn change(commit: &Commit) -> Option<Change> {
    let kind = match commit.change {
        ChangeType::Added => ChangeKind::Added,
        ChangeType::Modified => ChangeKind::Modified,
        ChangeType::Deleted => ChangeKind::Deleted,
        ChangeType::Unchanged => return None,
    };
    Some(Change {
        version: commit.version,
        at: commit.at,
        resource: commit.kind.plural.to_owned(),
        namespace: commit.namespace().to_owned(),
        name: commit.name().to_owned(),
        kind,
        token: commit.object.value["metadata"]["annotations"][objects::TOKEN]
            .as_str()
            .and_then(objects::parse_token),
    })
}
