//! Rules of the requests of the aggregated group, by what apiservers receive of them.
//!
//! | rule | what it says |
//! |---|---|
//! | once | a write arrives once |
//! | avoided | while one apiserver cannot reach the aggregated server and the others can, it receives no writes, and of the safe requests only those that show whether it can again, after pauses that double |
//! | budget | while no apiserver can, at most 1.1 requests arrive for each one of the clients |
//!
//! They are judged if nothing else goes wrong.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use crate::invariants::Findings;

/// The shortest pause between two requests that show whether a group works again (`group_health`, `FIRST_PAUSE`).
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest one (`LONGEST_PAUSE`).
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A request waits for its head so long before another apiserver is asked (`HEAD_WAIT`), whose answer takes some more.
const NOTICED_AFTER: Duration = Duration::from_millis(1_100);
/// The budget is promised for so many requests of clients.
const MIN_REQUESTS: usize = 200;
/// Arrivals for each request of a client, in percent.
const MAX_ARRIVALS: usize = 110;

/// A request of the group as an apiserver has received it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupArrival {
    /// When, since the start of the run.
    pub at: Duration,
    /// The apiserver.
    pub server: usize,
    /// The request of the client.
    pub id: String,
    /// Whether it changes something.
    pub is_write: bool,
}

/// A time in which an apiserver cannot reach the aggregated server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CutPath {
    /// The apiserver.
    pub server: usize,
    /// The time.
    pub time: Range<Duration>,
}

/// The requests of the group, and its faults.
#[derive(Debug, Clone, Default)]
pub struct GroupTraffic {
    /// The requests, in the order of their times.
    pub arrivals: Vec<GroupArrival>,
    /// The number of apiservers.
    pub servers: usize,
    /// The paths that are cut.
    pub cuts: Vec<CutPath>,
    /// The times in which an apiserver answers that the group is unavailable.
    pub unavailable: Vec<Range<Duration>>,
}

impl GroupTraffic {
    /// Checks all rules.
    pub fn check(&self, findings: &mut Findings) {
        let broken = [self.repeated_write(), self.not_avoided(), self.too_many_arrivals()];
        findings.violations.extend(broken.into_iter().flatten());
    }

    fn repeated_write(&self) -> Option<String> {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for arrival in self.arrivals.iter().filter(|arrival| arrival.is_write) {
            *counts.entry(&arrival.id).or_default() += 1;
        }
        let (id, count) = counts.into_iter().find(|(_, count)| *count > 1)?;
        Some(format!("write {id} of the group arrived {count} times"))
    }

    fn not_avoided(&self) -> Option<String> {
        self.cuts.iter().find_map(|cut| {
            let overlaps =
                |other: &Range<Duration>| other.start < cut.time.end && cut.time.start < other.end;
            let is_other = |other: &&CutPath| *other != cut;
            let mut others = self.cuts.iter().filter(is_other).map(|other| &other.time);
            if others.any(overlaps) || self.unavailable.iter().any(overlaps) {
                return None;
            }
            self.not_avoided_in(cut)
        })
    }

    fn not_avoided_in(&self, cut: &CutPath) -> Option<String> {
        let is_there = |one: &&GroupArrival| one.server == cut.server && cut.time.contains(&one.at);
        let there: Vec<_> = self.arrivals.iter().filter(is_there).collect();
        // A write shows nothing: its client waits, and it is not sent elsewhere.
        let first = there.iter().find(|arrival| !arrival.is_write)?.at;
        let noticed = first + NOTICED_AFTER;
        let later: Vec<_> = there.into_iter().filter(|arrival| arrival.at >= noticed).collect();
        let writes = later.iter().filter(|arrival| arrival.is_write).count();
        let probes = later.len() - writes;
        let last = later.last().map_or(noticed, |arrival| arrival.at);
        let allowed = allowed_probes(last.saturating_sub(first));
        let server = cut.server;
        if writes > 0 {
            return Some(format!(
                "{writes} writes of the group arrived at apiserver {server}, which has failed since {first:.3?}"
            ));
        }
        (probes > allowed).then(|| {
            format!(
                "{probes} requests of the group arrived at apiserver {server} until {last:.3?}, which has failed \
                 since {first:.3?}, at most {allowed} allowed"
            )
        })
    }

    fn too_many_arrivals(&self) -> Option<String> {
        let cut: BTreeSet<_> = self.cuts.iter().map(|cut| cut.server).collect();
        if cut.len() < self.servers {
            return None;
        }
        let from = self.cuts.iter().map(|cut| cut.time.start).max()?;
        let until = self.cuts.iter().map(|cut| cut.time.end).min()?;
        let arrivals = self.arrivals.iter().filter(|arrival| (from..until).contains(&arrival.at));
        let ids: Vec<_> = arrivals.map(|arrival| &arrival.id).collect();
        let (arrived, requests) = (ids.len(), ids.iter().collect::<BTreeSet<_>>().len());
        (requests >= MIN_REQUESTS && arrived * 100 > requests * MAX_ARRIVALS).then(|| {
            format!("{arrived} requests of the group arrived for {requests} of clients, and all apiservers fail")
        })
    }
}

/// How many requests may show whether a group works again, within this time after its first failure.
fn allowed_probes(time: Duration) -> usize {
    let pauses =
        std::iter::successors(Some(FIRST_PAUSE), |pause| Some((2 * *pause).min(LONGEST_PAUSE)));
    let mut at = Duration::ZERO;
    pauses
        .take_while(|pause| {
            at += *pause;
            at <= time
        })
        .count()
}

#[cfg(test)]
mod tests;
