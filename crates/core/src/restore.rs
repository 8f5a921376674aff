//! Recognises that etcd was restored from a backup: its revisions have gone back.
//!
//! A version that an apiserver has shown stays below the revision of its etcd for ever, unless that etcd is replaced by
//! an older state. The watch cache of an apiserver proves nothing, because it may lag. A most-recent list does: its
//! `resourceVersion` is at least the revision of etcd when the list was read (etcd, `server/etcdserver/v3_server.go`,
//! `Range`, linearizable), so an isolated apiserver cannot answer it, and one whose cache lags answers with the present
//! revision (apiserver, `storage/cacher/delegator.go`, `GetList`). If that is below a version that was shown, the
//! version does not exist in this etcd any more, or the endpoints do not share one.
//!
//! A *suspicion* names such a version. Each ready endpoint then reports the version of a most-recent list:
//!
//! | reports | verdict |
//! |---|---|
//! | an endpoint has reached the version | not restored: the others lag, or belong to another etcd |
//! | a ready endpoint has not reported | undecided |
//! | no endpoint has reported a revision | undecided |
//! | every ready endpoint that has an answer is below the version | restored |
//!
//! The prober may not be allowed to list the resource of the version. Then another resource of the same etcd is listed
//! ([`crate::shared_etcd`]).
//!
//! An endpoint without an answer (its apiserver has lost etcd, or refuses the list) does not hold up the verdict of the
//! others: what they have reported cannot be a lag.
//!
//! This module is pure: it reads no clock.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::endpoint_condition::EndpointCondition;
use crate::endpoint_state::EndpointState;
use crate::lag::Expected;
use crate::pool::EndpointKey;

/// An undecided suspicion ends after this time. Its cause raises it again.
const MAX_UNDECIDED: Duration = Duration::from_secs(30);
/// Pause after a suspicion that was not confirmed, so that endpoints of two clusters do not cost lists for ever.
pub const PAUSE_AFTER_CONTRADICTION: Duration = Duration::from_secs(60);

/// A version that may not exist in etcd any more, and what the endpoints have reported about it.
#[derive(Debug, Clone)]
pub struct Suspicion {
    /// Group and resource.
    pub resource: Arc<str>,
    /// The version.
    pub version: u64,
    /// The endpoint that has shown it.
    pub shown_by: Arc<str>,
    /// The resource whose most-recent lists are read, which is stored in the same etcd.
    pub listed: Arc<str>,
    since: Instant,
    reports: Vec<(EndpointKey, Report)>,
}

/// What a most-recent list of an endpoint has shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Report {
    /// The version of the list.
    Revision(u64),
    /// No list was answered.
    None,
}

/// What the reports say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Reports are missing.
    Undecided,
    /// An endpoint has reached the version.
    Contradicted,
    /// etcd was restored, and has this revision or a higher one now.
    Restored {
        /// The highest reported revision.
        revision: u64,
    },
}

impl Suspicion {
    /// A suspicion about a version that was seen, without reports.
    pub fn new(seen: &Expected, listed: Arc<str>, now: Instant) -> Self {
        Self {
            resource: Arc::clone(&seen.resource),
            version: seen.version,
            shown_by: Arc::clone(&seen.shown_by),
            listed,
            since: now,
            reports: Vec::new(),
        }
    }

    /// Whether it has been undecided for too long.
    pub fn is_over(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= MAX_UNDECIDED
    }

    /// Whether this endpoint has not reported yet.
    pub fn wants_report(&self, endpoint: EndpointKey) -> bool {
        self.reports.iter().all(|(known, _)| *known != endpoint)
    }

    /// Takes in a report, in place of an earlier one of the endpoint.
    pub fn report(&mut self, endpoint: EndpointKey, report: Report) {
        self.reports.retain(|(known, _)| *known != endpoint);
        self.reports.push((endpoint, report));
    }

    /// The verdict while the upstream has these endpoints.
    pub fn verdict(&self, endpoints: &[EndpointCondition]) -> Verdict {
        let reported = |key| self.reports.iter().find(|(known, _)| *known == key);
        let present =
            self.reports.iter().filter(|(key, _)| endpoints.iter().any(|e| e.key == *key));
        let highest = present
            .filter_map(|(_, report)| match report {
                Report::Revision(revision) => Some(*revision),
                Report::None => None,
            })
            .max();
        let is_ready = |one: &&EndpointCondition| one.state == EndpointState::Ready;
        let all_reported = endpoints.iter().filter(is_ready).all(|one| reported(one.key).is_some());
        match highest {
            Some(revision) if revision >= self.version => Verdict::Contradicted,
            Some(revision) if all_reported => Verdict::Restored { revision },
            _ => Verdict::Undecided,
        }
    }
}

/// The path of a most-recent list of a resource with at most one object, for its version; `None` if the question is not
/// known, or the object would be a secret. See [`crate::lag::question`] for the resources.
pub fn revision_question(resource: &str) -> Option<String> {
    if resource == "secrets" {
        return None;
    }
    let object = crate::lag::question(resource, 0)?;
    let collection = object.split_once("/jackstay-version-check")?.0;
    let collection = collection.replace("/namespaces/default/", "/");
    Some(format!("{collection}?limit=1"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use EndpointState::{Connecting, Degraded, Ejected, Ready};
    use Verdict::{Contradicted, Restored, Undecided};

    const UNKNOWN: Report = Report::None;

    fn suspicion(version: u64) -> Suspicion {
        let (now, pods) = (Instant::now(), Arc::from("pods"));
        let seen = Expected { resource: Arc::clone(&pods), version, shown_by: "a".into(), at: now };
        Suspicion::new(&seen, pods, now)
    }

    fn rev(revision: u64) -> Report {
        Report::Revision(revision)
    }

    fn verdict(endpoints: &[(EndpointState, Option<Report>)]) -> Verdict {
        let mut suspicion = suspicion(100);
        let condition = |(key, (state, _)): (usize, &(EndpointState, _))| EndpointCondition {
            key: EndpointKey(key),
            state: *state,
            probe_fails: false,
            is_starting: false,
        };
        for (key, (_, report)) in endpoints.iter().enumerate() {
            if let Some(report) = report {
                suspicion.report(EndpointKey(key), *report);
            }
        }
        let conditions: Vec<_> = endpoints.iter().enumerate().map(condition).collect();
        suspicion.verdict(&conditions)
    }

    #[test]
    fn verdict_needs_every_ready_endpoint_and_no_contradiction() {
        for (endpoints, expected) in [
            (&[(Ready, Some(rev(20)))][..], Restored { revision: 20 }),
            (&[(Ready, Some(rev(20))), (Ready, Some(rev(25)))], Restored { revision: 25 }),
            // The endpoint that has shown the version restarts, or its state is not known.
            (&[(Ready, Some(rev(20))), (Ejected, None)], Restored { revision: 20 }),
            (&[(Ready, Some(rev(20))), (Connecting, None)], Restored { revision: 20 }),
            // It is isolated from etcd.
            (&[(Ready, Some(rev(20))), (Ready, Some(UNKNOWN))], Restored { revision: 20 }),
            (&[(Degraded, Some(rev(20))), (Ready, Some(rev(21)))], Restored { revision: 21 }),
            // The endpoint that has shown it was not asked yet.
            (&[(Degraded, Some(rev(20))), (Ready, None)], Undecided),
            // A cache that lags beside an etcd that has the version.
            (&[(Ready, Some(rev(100)))], Contradicted),
            (&[(Ready, Some(rev(120))), (Ready, None)], Contradicted),
            // Two clusters.
            (&[(Degraded, Some(rev(20))), (Ready, Some(rev(130)))], Contradicted),
            (&[(Ready, Some(rev(20))), (Degraded, Some(rev(130)))], Contradicted),
            (&[(Ready, Some(UNKNOWN))], Undecided),
            (&[(Ready, Some(UNKNOWN)), (Ready, Some(UNKNOWN))], Undecided),
            (&[(Ready, None)], Undecided),
            (&[], Undecided),
        ] {
            assert_eq!(verdict(endpoints), expected, "{endpoints:?}");
        }
    }

    /// Whatever the order of reports, states and lags are: apiservers of one etcd that was not restored never report less
    /// than a version that one of them has shown.
    #[test]
    fn apiservers_of_an_etcd_that_only_grows_never_show_a_restore() {
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..20_000 {
            let mut revision = rng.u64(1..1_000);
            // What a watch of some endpoint has shown.
            let shown = rng.u64(1..=revision);
            let mut suspicion = suspicion(shown);
            let mut conditions: Vec<_> = (0..3)
                .map(|key| EndpointCondition {
                    key: EndpointKey(key),
                    state: EndpointState::ALL[rng.usize(..EndpointState::ALL.len())],
                    probe_fails: rng.bool(),
                    is_starting: rng.bool(),
                })
                .collect();
            for _ in 0..rng.usize(..8) {
                revision += rng.u64(..10);
                let key = rng.usize(..3);
                // An apiserver without etcd has no answer; one with a cache that lags reads the present revision.
                let report = if rng.u8(..4) == 0 { UNKNOWN } else { rev(revision) };
                suspicion.report(EndpointKey(key), report);
                conditions[key].state = EndpointState::ALL[rng.usize(..EndpointState::ALL.len())];
                let verdict = suspicion.verdict(&conditions);
                assert!(!matches!(verdict, Restored { .. }), "{suspicion:?} {conditions:?}");
            }
        }
    }

    #[test]
    fn undecided_suspicion_ends() {
        let mut suspicion = suspicion(100);
        let start = suspicion.since;
        assert!(suspicion.wants_report(EndpointKey(1)));
        suspicion.report(EndpointKey(1), UNKNOWN);
        assert!(!suspicion.wants_report(EndpointKey(1)) && suspicion.wants_report(EndpointKey(2)));
        assert!(!suspicion.is_over(start + MAX_UNDECIDED / 2));
        assert!(suspicion.is_over(start + MAX_UNDECIDED));
    }

    #[test]
    fn revision_question_lists_one_object_of_all_namespaces() {
        for (resource, expected) in [
            ("services", Some("/api/v1/services?limit=1")),
            ("nodes", Some("/api/v1/nodes?limit=1")),
            ("apps/deployments", Some("/apis/apps/v1/deployments?limit=1")),
            ("secrets", None),
            ("example.com/machines", None),
        ] {
            assert_eq!(revision_question(resource).as_deref(), expected, "{resource}");
        }
    }
}
