//! When the share of the requests that go to the newest version, during an upgrade of the control plane, is withdrawn
//! because that version fails more often.
//!
//! Every [`INTERVAL`] the shell passes the answers of each endpoint to [`CanaryGuard::step`]. The share is withdrawn if
//! all of this holds for the last minute:
//!
//! | rule | reason |
//! |---|---|
//! | at least [`MIN_ERRORS`] answers of the newest version had a status of 500 or above | single errors occur in every restart |
//! | they are more than 5 % of its answers | |
//! | this share is more than three times that of the older versions | an etcd that is unavailable fails the requests of every apiserver |
//!
//! 429 is no error: the apiserver sheds load. A withdrawal ends after [`PAUSE`], or when an apiserver reports
//! another version, such as a patch release that repairs the errors.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::kubernetes_version::MinorVersion;

/// Time between two steps.
pub const INTERVAL: Duration = Duration::from_secs(5);
/// Number of steps over which answers are compared: one minute.
const WINDOW: usize = 12;
/// Fewest errors of the newest version that withdraw its share.
const MIN_ERRORS: u64 = 5;
/// How long a withdrawal lasts.
pub const PAUSE: Duration = Duration::from_secs(600);

/// Answers, and those of them with a status of 500 or above.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Answers {
    /// Number of answers.
    pub all: u64,
    /// Number of answers with a status of 500 or above.
    pub errors: u64,
}

impl Answers {
    fn add(&mut self, other: Self) {
        self.all += other.all;
        self.errors += other.errors;
    }

    /// The answers since `before`; none if the counter was reset.
    fn since(self, before: Self) -> Self {
        Self {
            all: self.all.saturating_sub(before.all),
            errors: self.errors.saturating_sub(before.errors),
        }
    }

    fn percent(self) -> f64 {
        if self.all == 0 { 0.0 } else { self.errors as f64 * 100.0 / self.all as f64 }
    }
}

/// Whether the newest version fails so much more often than the older ones that its share is withdrawn.
fn diverges(newest: Answers, older: Answers) -> bool {
    newest.errors >= MIN_ERRORS
        && newest.percent() > 5.0
        && newest.percent() > older.percent() * 3.0
}

/// An endpoint at a step.
#[derive(Debug, Clone)]
pub struct CanaryEndpoint {
    /// Its address.
    pub label: Arc<str>,
    /// Its version.
    pub version: MinorVersion,
    /// Its complete version.
    pub git_version: Box<str>,
    /// All answers so far.
    pub answers: Answers,
}

/// A change of the share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CanaryChange {
    /// The share was withdrawn, for this reason.
    Withdrawn(String),
    /// The withdrawal ended, for this reason.
    Restored(&'static str),
}

/// The share is withdrawn.
#[derive(Debug)]
pub struct Withdrawal {
    /// When it ends at the latest.
    pub until: Instant,
    /// Why.
    pub reason: String,
    /// The complete versions of all endpoints.
    versions: Vec<Box<str>>,
}

/// The answers of the last minute, and the withdrawal if there is one.
#[derive(Debug, Default)]
pub struct CanaryGuard {
    /// The answers of each endpoint at the last step.
    before: HashMap<Arc<str>, Answers>,
    /// The answers of the newest and of the older versions in each step, oldest first.
    window: VecDeque<(Answers, Answers)>,
    newest: Option<MinorVersion>,
    withdrawal: Option<Withdrawal>,
}

impl CanaryGuard {
    /// The newest version, if there are two or more.
    pub fn newest(&self) -> Option<MinorVersion> {
        self.newest
    }

    /// The withdrawal, if there is one.
    pub fn withdrawal(&self) -> Option<&Withdrawal> {
        self.withdrawal.as_ref()
    }

    /// Compares the answers of all endpoints whose version is known. Returns the change of the share, if there is one.
    pub fn step(&mut self, endpoints: &[CanaryEndpoint], now: Instant) -> Option<CanaryChange> {
        let newest = endpoints.iter().map(|endpoint| endpoint.version).max();
        let is_mixed = endpoints.iter().any(|endpoint| Some(endpoint.version) != newest);
        let newest = newest.filter(|_| is_mixed);
        if newest != self.newest {
            self.newest = newest;
            self.window.clear();
        }
        let (mut of_newest, mut of_older) = (Answers::default(), Answers::default());
        let before = std::mem::take(&mut self.before);
        for endpoint in endpoints {
            // A new endpoint counts from its next step on.
            if let Some(before) = before.get(&endpoint.label) {
                let answers = endpoint.answers.since(*before);
                let is_newest = Some(endpoint.version) == newest;
                if is_newest { &mut of_newest } else { &mut of_older }.add(answers);
            }
            self.before.insert(Arc::clone(&endpoint.label), endpoint.answers);
        }
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back((of_newest, of_older));
        if let Some(withdrawal) = &self.withdrawal {
            let ended = if withdrawal.versions != versions(endpoints) {
                "an apiserver reports another version"
            } else if now >= withdrawal.until {
                "it is tried again after 10 minutes"
            } else {
                return None;
            };
            self.withdrawal = None;
            self.window.clear();
            return Some(CanaryChange::Restored(ended));
        }
        let newest = newest?;
        let (mut of_newest, mut of_older) = (Answers::default(), Answers::default());
        for (step_of_newest, step_of_older) in &self.window {
            of_newest.add(*step_of_newest);
            of_older.add(*step_of_older);
        }
        if !diverges(of_newest, of_older) {
            return None;
        }
        let reason = format!(
            "{} of {} answers of {newest} were 5xx in the last minute, and {} of {} of older versions",
            of_newest.errors, of_newest.all, of_older.errors, of_older.all
        );
        let versions = versions(endpoints);
        self.withdrawal = Some(Withdrawal { until: now + PAUSE, reason: reason.clone(), versions });
        Some(CanaryChange::Withdrawn(reason))
    }
}

/// The distinct complete versions, sorted.
fn versions(endpoints: &[CanaryEndpoint]) -> Vec<Box<str>> {
    let mut versions: Vec<_> = endpoints.iter().map(|e| e.git_version.clone()).collect();
    versions.sort_unstable();
    versions.dedup();
    versions
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(label: &str, minor: u16, all: u64, errors: u64) -> CanaryEndpoint {
        CanaryEndpoint {
            label: label.into(),
            version: MinorVersion::new(1, minor).unwrap(),
            git_version: format!("v1.{minor}.0").into(),
            answers: Answers { all, errors },
        }
    }

    #[test]
    fn diverges_by_the_table() {
        for (newest, older, expected) in [
            ((0, 0), (0, 0), false),
            ((1000, 0), (1000, 0), false),
            // Too few errors.
            ((4, 4), (1000, 0), false),
            ((5, 5), (1000, 0), true),
            // Not more than 5 %.
            ((100, 5), (1000, 0), false),
            ((99, 5), (1000, 0), true),
            ((1000, 51), (0, 0), true),
            // Not more than three times the share of the older versions.
            ((100, 30), (100, 10), false),
            ((100, 31), (100, 10), true),
            // etcd is unavailable for all.
            ((100, 100), (900, 850), false),
        ] {
            let answers = |(all, errors)| Answers { all, errors };
            assert_eq!(diverges(answers(newest), answers(older)), expected, "{newest:?} {older:?}");
        }
    }

    #[test]
    fn share_is_withdrawn_when_the_newest_version_fails_and_returns_after_10_minutes() {
        let (mut canary, start) = (CanaryGuard::default(), Instant::now());
        let mut step = |at: u64, all: u64, errors: u64| {
            let endpoints = [endpoint("a", 37, all, errors), endpoint("b", 36, all * 9, 0)];
            canary.step(&endpoints, start + Duration::from_secs(at))
        };
        // Errors before the first step do not count.
        assert_eq!(step(0, 100, 100), None);
        assert_eq!(step(5, 110, 104), None);
        let reason =
            "6 of 20 answers of 1.37 were 5xx in the last minute, and 0 of 180 of older versions";
        assert_eq!(step(10, 120, 106), Some(CanaryChange::Withdrawn(reason.to_owned())));
        assert_eq!(step(609, 120, 106), None);
        assert!(matches!(step(610, 120, 106), Some(CanaryChange::Restored(_))));
        // Errors of the time before do not count.
        assert_eq!(step(615, 130, 106), None);
    }

    #[test]
    fn errors_older_than_a_minute_do_not_withdraw_the_share() {
        let mut canary = CanaryGuard::default();
        let start = Instant::now();
        let mut errors = 0;
        for step in 0..100_u32 {
            // One error in 20 s: three in the window.
            errors += u64::from(step % 4 == 0);
            let endpoints = [endpoint("a", 37, errors, errors), endpoint("b", 36, 0, 0)];
            assert_eq!(canary.step(&endpoints, start + INTERVAL * step), None, "{step}");
        }
    }

    #[test]
    fn another_version_ends_a_withdrawal_and_an_endpoint_out_of_service_does_not() {
        let mut canary = CanaryGuard::default();
        let now = Instant::now();
        canary.step(&[endpoint("a", 37, 0, 0), endpoint("b", 36, 0, 0)], now);
        let failing = [endpoint("a", 37, 10, 10), endpoint("b", 36, 90, 0)];
        assert!(matches!(canary.step(&failing, now), Some(CanaryChange::Withdrawn(_))));
        assert_eq!(canary.step(&failing, now), None);
        // The third endpoint has joined.
        let more = [failing.to_vec(), vec![endpoint("c", 36, 5, 5)]].concat();
        assert_eq!(canary.step(&more, now), None);
        let repaired = CanaryEndpoint { git_version: "v1.37.1".into(), ..failing[0].clone() };
        let repaired = [repaired, failing[1].clone()];
        let change = canary.step(&repaired, now);
        assert_eq!(change, Some(CanaryChange::Restored("an apiserver reports another version")));
        assert!(canary.withdrawal().is_none());
    }

    #[test]
    fn answers_before_an_endpoint_was_upgraded_do_not_count_for_its_new_version() {
        let mut canary = CanaryGuard::default();
        let now = Instant::now();
        // 1.36 has failed before the upgrade of `b`.
        canary.step(&[endpoint("a", 37, 0, 0), endpoint("b", 36, 100, 100)], now);
        let upgraded =
            [endpoint("a", 37, 10, 0), endpoint("b", 37, 110, 100), endpoint("c", 36, 9, 0)];
        assert_eq!(canary.step(&upgraded, now), None);
        // With one version there is no canary.
        let equal = [endpoint("a", 37, 10, 0), endpoint("b", 37, 900, 700)];
        assert_eq!(canary.step(&equal, now), None);
        assert_eq!(canary.newest(), None);
    }
}
