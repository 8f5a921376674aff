//! Informers receive each change of the store once and in order.

use std::collections::BTreeMap;

use super::history::{Change, CollectionHistory, History};
use super::observation::{Collection, Observation, Seen};
use crate::invariants::Findings;

/// Where an informer is.
#[derive(Debug, Default, Clone, Copy)]
struct Position {
    /// The epoch in which its version is one.
    epoch: usize,
    /// The number of changes that it has seen.
    changes: usize,
    /// The last version that it has seen.
    version: u64,
    /// The version and the epoch of a list, until it watches.
    listed: Option<(u64, usize)>,
}

/// The changes of each epoch and collection.
struct Histories<'a> {
    history: &'a History,
    epochs: &'a [History],
    collections: BTreeMap<(usize, Collection), CollectionHistory<'a>>,
}

impl<'a> Histories<'a> {
    fn of(&mut self, epoch: usize, collection: Collection) -> &CollectionHistory<'a> {
        let of = || self.epochs[epoch].collection(collection.resource, collection.namespace);
        self.collections.entry((epoch, collection)).or_insert_with(of)
    }
}

/// `epochs`: the history of each epoch.
pub(super) fn check(
    (history, epochs): (&History, &[History]),
    observations: &[Observation],
    findings: &mut Findings,
) {
    let mut histories = Histories { history, epochs, collections: BTreeMap::new() };
    let mut informers: BTreeMap<(u16, Collection), Position> = BTreeMap::new();
    for observation in observations {
        let position = match &observation.seen {
            Seen::List { .. }
            | Seen::WatchStarted(_)
            | Seen::Event { .. }
            | Seen::Bookmark(_)
            | Seen::InformerStopped(_) => {
                informers.entry((observation.client.number, observation.collection)).or_default()
            }
            _ => continue,
        };
        if let Some(fault) = step(&mut histories, position, observation, findings) {
            findings.violation(format!("client {}: {fault}", observation.client.number));
        }
    }
}

/// Moves an informer. Returns the rule that is broken.
fn step(
    histories: &mut Histories<'_>,
    position: &mut Position,
    observation: &Observation,
    findings: &mut Findings,
) -> Option<String> {
    let (now, history) = (observation.ended.at, histories.history);
    let epoch = history.epoch_of(observation.ended);
    match &observation.seen {
        Seen::List { version, .. } => position.listed = Some((*version, epoch)),
        &Seen::WatchStarted(version) => {
            let listed = position.listed.take().filter(|(listed, _)| *listed == version);
            let epoch = listed.map_or(position.epoch, |(_, epoch)| epoch);
            let changes = histories.of(epoch, observation.collection).position(version);
            *position = Position { epoch, changes, version, listed: None };
        }
        Seen::Event { .. } | Seen::Bookmark(_) => {
            let is_lost = position.version > history.common_version(position.epoch, epoch);
            let changes = histories.of(epoch, observation.collection);
            if position.epoch < epoch {
                position.changes = changes.position(position.version);
                position.epoch = epoch;
            }
            if is_lost {
                let (version, seen) = (position.version, &observation.seen);
                move_to(changes, position, seen);
                return Some(format!("{seen:?} came after {version}, which a restore has lost"));
            }
            return delivered(changes, position, observation, findings);
        }
        &Seen::InformerStopped(version) => {
            let listed = position.listed.filter(|(listed, _)| *listed == version);
            let seen_in = listed.map_or(position.epoch, |(_, epoch)| epoch);
            if version > history.common_version(seen_in, epoch) {
                let lost_at = history.restores[seen_in].at;
                let since = now.saturating_duration_since(lost_at.at);
                findings.event_open(&observation.collection, since);
                return None;
            }
            let changes = histories.of(epoch, observation.collection);
            if let Some(missing) = changes.at(changes.position(version)) {
                let since = now.saturating_duration_since(missing.at);
                findings.event_open(&observation.collection, since);
            }
        }
        _ => {}
    }
    None
}

/// The informer is where this event or bookmark says.
fn move_to(changes: &CollectionHistory<'_>, position: &mut Position, seen: &Seen) {
    if let Seen::Event { version, .. } | Seen::Bookmark(version) = seen {
        (position.changes, position.version) = (changes.position(*version), *version);
    }
}

/// An event or a bookmark in the epoch of the position.
fn delivered(
    changes: &CollectionHistory<'_>,
    position: &mut Position,
    observation: &Observation,
    findings: &mut Findings,
) -> Option<String> {
    let next = changes.at(position.changes);
    match &observation.seen {
        Seen::Event { version, .. } => {
            let fault = event_fault(next, position.version, &observation.seen);
            let change = if fault.is_none() {
                (position.changes, position.version) = (position.changes + 1, *version);
                next
            } else {
                move_to(changes, position, &observation.seen);
                position.changes.checked_sub(1).and_then(|at| changes.at(at))
            };
            if let Some(change) = change.filter(|change| change.version == *version) {
                let after = observation.ended.at.saturating_duration_since(change.at);
                findings.event(&observation.collection, after);
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
            position.changes = position.changes.max(changes.position(version));
            position.version = version;
            fault
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
