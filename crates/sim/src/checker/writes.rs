//! No write is carried out twice, and the store has what was acknowledged.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::history::{Change, History};
use super::observation::{ChangeKind, Observation, Seen, WriteOutcome};
use crate::invariants::Findings;

pub(super) fn check(history: &History, observations: &[Observation], findings: &mut Findings) {
    let mut changes: HashMap<u64, Vec<&Change>> = HashMap::new();
    let written = history.changes.iter().filter(|change| change.kind != ChangeKind::Deleted);
    for change in written {
        if let Some(token) = change.token {
            changes.entry(token).or_default().push(change);
        }
    }
    let mut carried_out: BTreeMap<u64, usize> = BTreeMap::new();
    for token in &history.carried_out {
        *carried_out.entry(*token).or_default() += 1;
    }
    for (token, changes) in &changes {
        let count = carried_out.entry(*token).or_default();
        *count = changes.len().max(*count);
    }
    for (token, count) in carried_out.into_iter().filter(|(_, count)| *count > 1) {
        findings.violation(format!("write {token:x} was carried out {count} times"));
    }
    let counted: BTreeSet<_> = history.carried_out.iter().copied().collect();
    for observation in observations {
        let Seen::Write { key, kind, token, outcome } = &observation.seen else { continue };
        let made = changes.get(token).map_or(&[][..], Vec::as_slice);
        let fault = match outcome {
            WriteOutcome::Done(_) if *kind == ChangeKind::Deleted && counted.is_empty() => {
                deletion_fault(history, observation, key)
            }
            WriteOutcome::Done(_) if *kind == ChangeKind::Deleted => (!counted.contains(token))
                .then(|| format!("deleted {key}, and the store has no such change")),
            WriteOutcome::Done(version) => done_fault(made, key, *version),
            WriteOutcome::Refused if !made.is_empty() || counted.contains(token) => {
                Some("was refused, and the store has it".to_owned())
            }
            _ => None,
        };
        if let Some(fault) = fault {
            let (client, request) = (observation.client.number, observation.request);
            findings
                .violation(format!("client {client}: request {request}: write {token:x} {fault}"));
        }
    }
}

fn done_fault(made: &[&Change], key: &str, version: Option<u64>) -> Option<String> {
    let Some(change) = made.first() else {
        return Some("was answered, and the store does not have it".to_owned());
    };
    let is_it = change.key() == key && version.is_none_or(|version| version == change.version);
    (!is_it).then(|| {
        let stored = (change.key(), change.version);
        format!("of {key} was answered with {version:?}, and the store has {stored:?}")
    })
}

/// A deletion leaves no token. It is one of those that were committed while the request ran.
fn deletion_fault(history: &History, observation: &Observation, key: &str) -> Option<String> {
    let range = observation.began.at..=observation.ended.at;
    let collection = observation.collection;
    let is_it = |change: &Change| {
        change.kind == ChangeKind::Deleted
            && change.resource == collection.resource
            && range.contains(&change.at)
            && change.key() == key
    };
    let is_done = history.changes.iter().any(is_it);
    (!is_done).then(|| format!("deleted {key}, and the store has no such change"))
}
