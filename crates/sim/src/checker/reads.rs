//! Objects and lists are what the store had at the version that they show.

use std::collections::BTreeMap;

use super::history::{CollectionHistory, History, Replay};
use super::observation::{ChangeKind, Collection, Observation, Seen, ShownObject};
use crate::invariants::Findings;

pub(super) fn check(history: &History, observations: &[&Observation], findings: &mut Findings) {
    let mut reads: BTreeMap<Collection, Vec<&Observation>> = BTreeMap::new();
    for &observation in observations {
        if matches!(observation.seen, Seen::Object { shown: Some(_), .. } | Seen::List { .. }) {
            reads.entry(observation.collection).or_default().push(observation);
        }
    }
    for (collection, mut reads) in reads {
        let changes = history.collection(collection.resource, collection.namespace);
        // A replay goes forward.
        reads.sort_by_key(|read| list_version(&read.seen));
        let mut replay = Replay::new(&changes);
        for read in reads {
            let fault = match &read.seen {
                Seen::Object { key, shown: Some(shown), .. } => object_fault(&changes, key, shown),
                Seen::List { version, objects, .. } if *version > history.version() => {
                    Some(format!(
                        "a list of {} objects at {version}, and the store is at {}",
                        objects.len(),
                        history.version()
                    ))
                }
                Seen::List { version, objects, .. } => {
                    list_fault(replay.state(*version), *version, objects)
                }
                _ => None,
            };
            if let Some(fault) = fault {
                let (client, request) = (read.client.number, read.request);
                findings.violation(format!("client {client}: request {request}: {fault}"));
            }
        }
    }
}

fn list_version(seen: &Seen) -> u64 {
    if let Seen::List { version, .. } = seen { *version } else { 0 }
}

fn object_fault(changes: &CollectionHistory<'_>, key: &str, shown: &ShownObject) -> Option<String> {
    let version = shown.version;
    let is_it =
        |change: &&&super::Change| change.version == version && change.kind != ChangeKind::Deleted;
    let Some(change) = changes.object(key).iter().find(is_it) else {
        return Some(format!("{key} at {version}, which the store never had"));
    };
    (change.token != shown.token).then(|| {
        let (shown, stored) = (shown.token, change.token);
        format!("{key} at {version} is of write {shown:x?}, and in the store of {stored:x?}")
    })
}

/// Compares a list with the objects that the store had at its version.
fn list_fault(
    state: &BTreeMap<String, u64>,
    version: u64,
    objects: &[(String, u64)],
) -> Option<String> {
    let complete = state.len();
    let listed: BTreeMap<_, _> = objects.iter().map(|(key, version)| (key, *version)).collect();
    if listed.len() != objects.len() {
        return Some(format!("a list at {version} has an object twice"));
    }
    if let Some((key, _)) = state.iter().find(|(key, _)| !listed.contains_key(key)) {
        let count = objects.len();
        return Some(format!(
            "a list at {version} of {complete} objects had {count}, without {key}"
        ));
    }
    listed.into_iter().find_map(|(key, listed)| match state.get(key) {
        None => Some(format!("a list at {version} has {key}, which the store does not have")),
        Some(&stored) if stored != listed => {
            Some(format!("a list at {version} has {key} at {listed}, and the store at {stored}"))
        }
        Some(_) => None,
    })
}
