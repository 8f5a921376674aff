//! No read goes back: a read is at least as new as what was seen before it began.

use std::collections::BTreeMap;

use super::history::{CollectionHistory, History};
use super::observation::{Collection, Observation, Recency, Seen, WriteOutcome};
use crate::invariants::Findings;

/// What a client has seen: the version of its collection is at least this one.
#[derive(Debug, Clone, Copy)]
struct Shown<'a> {
    version: u64,
    by: &'a Observation,
}

/// The highest version that was seen up to each moment, of one set of clients and one resource.
#[derive(Debug, Default)]
struct Floor<'a> {
    /// By the order of the moments; versions grow.
    steps: Vec<(u64, Shown<'a>)>,
}

impl<'a> Floor<'a> {
    fn raise(&mut self, shown: Shown<'a>) {
        if self.steps.last().is_none_or(|(_, last)| last.version < shown.version) {
            self.steps.push((shown.by.ended.order, shown));
        }
    }

    /// The highest version that was seen before a moment.
    fn before(&self, order: u64) -> Option<Shown<'a>> {
        let count = self.steps.partition_point(|(at, _)| *at < order);
        count.checked_sub(1).map(|at| self.steps[at].1)
    }
}

/// Whose floor: of all clients, or of a group since its floors were lost last, for a resource. What a bookmark shows
/// says nothing of objects in other namespaces, so gets have floors without them.
type FloorKey = (Option<(u32, usize)>, &'static str, bool);

/// `epoch`: the history that all observations are of.
pub(super) fn check(
    (history, epoch): (&History, &History),
    observations: &[&Observation],
    findings: &mut Findings,
) {
    let group_of = |seen: &Observation| {
        seen.client.group.map(|group| (group, history.generation(group, seen.ended)))
    };
    let mut by_end = observations.to_vec();
    by_end.sort_by_key(|observation| observation.ended.order);
    let mut floors: BTreeMap<FloorKey, Floor<'_>> = BTreeMap::new();
    for by in by_end {
        let Some(version) = shown_version(&by.seen) else { continue };
        let resource = by.collection.resource;
        let is_bookmark = matches!(by.seen, Seen::Bookmark(_));
        for group in [None, group_of(by)] {
            for with_bookmarks in [false, true] {
                if with_bookmarks || !is_bookmark {
                    let floor = floors.entry((group, resource, with_bookmarks)).or_default();
                    floor.raise(Shown { version, by });
                }
            }
        }
    }
    let mut collections: BTreeMap<Collection, CollectionHistory<'_>> = BTreeMap::new();
    for &read in observations {
        let collection = read.collection;
        let changes = collections
            .entry(collection)
            .or_insert_with(|| epoch.collection(collection.resource, collection.namespace));
        if let Some(fault) = fault((&floors, group_of(read)), changes, read) {
            let (client, request) = (read.client.number, read.request);
            findings.violation(format!("client {client}: request {request}: {fault}"));
        }
    }
}

/// The version that a client has seen.
fn shown_version(seen: &Seen) -> Option<u64> {
    match seen {
        Seen::Object { shown, .. } => shown.as_ref().map(|shown| shown.version),
        Seen::Write { outcome: WriteOutcome::Done(version), .. } => *version,
        Seen::List { version, .. } | Seen::Event { version, .. } | Seen::Bookmark(version) => {
            Some(*version)
        }
        _ => None,
    }
}

fn fault(
    (floors, group): (&BTreeMap<FloorKey, Floor<'_>>, Option<(u32, usize)>),
    changes: &CollectionHistory<'_>,
    read: &Observation,
) -> Option<String> {
    let (recency, is_list) = match &read.seen {
        Seen::Object { recency, .. } => (*recency, false),
        Seen::List { recency, .. } => (*recency, true),
        _ => return None,
    };
    if let Recency::NotOlderThan(version) = recency
        && is_older(changes, &read.seen, version)
    {
        return Some(format!(
            "{} is older than {version}, which it asks for",
            describe(&read.seen)
        ));
    }
    if let (Recency::Exact(version), Seen::List { version: shown, .. }) = (recency, &read.seen)
        && *shown != version
    {
        return Some(format!("{} and not at {version}, which it asks for", describe(&read.seen)));
    }
    let group = match recency {
        // jackstay leaves such a version as it is.
        Recency::Exact(_) | Recency::NotOlderThan(_) => return None,
        // As new as what any client has seen.
        Recency::MostRecent => None,
        Recency::Any => Some(group?),
    };
    let floor = floors.get(&(group, read.collection.resource, is_list))?;
    let before = floor.before(read.began.order)?;
    if !is_older(changes, &read.seen, before.version) {
        return None;
    }
    let what = if group.is_none() { "a most recent read goes back" } else { "a read goes back" };
    let (client, request) = (before.by.client.number, before.by.request);
    Some(format!(
        "{what}: {} came after {} of client {client} (request {request}), which had ended {:?} before",
        describe(&read.seen),
        describe(&before.by.seen),
        read.began.at.saturating_duration_since(before.by.ended.at)
    ))
}

/// Whether what a read shows was no longer so at a version and all later ones.
fn is_older(changes: &CollectionHistory<'_>, seen: &Seen, floor: u64) -> bool {
    match seen {
        Seen::List { version, .. } => *version < floor,
        Seen::Object { key, shown: Some(shown), .. } => {
            // It was the object's version until its next change.
            let next = changes.object(key).iter().find(|change| change.version > shown.version);
            next.is_some_and(|next| next.version <= floor)
        }
        Seen::Object { key, shown: None, .. } => !changes.is_absent_from(key, floor),
        _ => false,
    }
}

fn describe(seen: &Seen) -> String {
    match seen {
        Seen::Object { key, shown: Some(shown), .. } => format!("{key} at {}", shown.version),
        Seen::Object { key, shown: None, .. } => format!("the absence of {key}"),
        Seen::List { version, .. } => format!("a list at {version}"),
        Seen::Write { key, outcome: WriteOutcome::Done(Some(version)), .. } => {
            format!("a write of {key} at {version}")
        }
        Seen::Event { key, version, .. } => format!("an event of {key} at {version}"),
        Seen::Bookmark(version) => format!("a bookmark of {version}"),
        _ => "nothing".to_owned(),
    }
}
