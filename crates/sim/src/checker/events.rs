//! Informers receive each change of the store once and in order.

use std::collections::BTreeMap;

use super::history::{Change, CollectionHistory, History};
use super::observation::{Collection, Observation, Seen};
use crate::invariants::Findings;

/// Where an informer is.
#[derive(Debug, Default, Clone, Copy)]
struct Position {
    /// The number of changes that it has seen.
    changes: usize,
    /// The last version that it has seen.
    version: u64,
}

pub(super) fn check(history: &History, observations: &[Observation], findings: &mut Findings) {
    let mut collections: BTreeMap<Collection, CollectionHistory<'_>> = BTreeMap::new();
    let mut informers: BTreeMap<(u16, Collection), Position> = BTreeMap::new();
    for observation in observations {
        let collection = observation.collection;
        let position = match &observation.seen {
            Seen::WatchStarted(_)
            | Seen::Event { .. }
            | Seen::Bookmark(_)
            | Seen::InformerStopped(_) => {
                informers.entry((observation.client.number, collection)).or_default()
            }
            _ => continue,
        };
        let changes = collections
            .entry(collection)
            .or_insert_with(|| history.collection(collection.resource, collection.namespace));
        if let Some(fault) = step(changes, position, observation, findings) {
            findings.violation(format!("client {}: {fault}", observation.client.number));
        }
    }
}

/// Moves an informer. Returns the rule that is broken.
fn step(
    changes: &CollectionHistory<'_>,
    position: &mut Position,
    observation: &Observation,
    findings: &mut Findings,
) -> Option<String> {
    let now = observation.ended.at;
    let next = changes.at(position.changes);
    match &observation.seen {
        &Seen::WatchStarted(version) => {
            *position = Position { changes: changes.position(version), version };
            None
        }
        Seen::Event { version, .. } => {
            let fault = event_fault(next, position.version, &observation.seen);
            let change = if fault.is_none() {
                position.changes += 1;
                next
            } else {
                position.changes = changes.position(*version);
                position.changes.checked_sub(1).and_then(|at| changes.at(at))
            };
            position.version = *version;
            if let Some(change) = change.filter(|change| change.version == *version) {
                findings.event(now.saturating_duration_since(change.at));
            }
            fault
        }
        &Seen::Bookmark(version) => {
            let skipped = next.filter(|next| next.version <= version);
            let fault = skipped
                .map(|next| format!("bookmark {version} came before event {}", next.version));
            let fault = fault.or_else(|| {
                let before = position.version;
                (version < before).then(|| format!("bookmark {version} came after {before}"))
            });
            let changes = position.changes.max(changes.position(version));
            *position = Position { changes, version };
            fault
        }
        &Seen::InformerStopped(version) => {
            if let Some(missing) = changes.at(changes.position(version)) {
                findings.event_open(now.saturating_duration_since(missing.at));
            }
            None
        }
        _ => None,
    }
}

/// What is wrong with an event after which the store has `next`.
fn event_fault(next: Option<&Change>, before: u64, event: &Seen) -> Option<String> {
    let Seen::Event { kind, key, version, token } = event else { return None };
    let Some(next) = next.filter(|next| next.version == *version) else {
        let next = next.map(|next| next.version);
        return Some(format!("event {version} came after {before}, and the store has {next:?}"));
    };
    let is_same = next.kind == *kind && next.key() == *key && next.token == *token;
    (!is_same).then(|| {
        format!("event {version} is {kind:?} {key} of {token:x?}, and the store has {next:x?}")
    })
}
