//! The share of the requests that go to the newest version during an upgrade of the control plane, and when that
//! share is withdrawn because the newest version fails more often.
//!
//! Every [`INTERVAL`] the control plane passes the answers of each endpoint to [`Canary::step`]. The share is
//! withdrawn if all of this holds for the last minute:
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
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jackstay_core::kubernetes_version::MinorVersion;
use jackstay_sys::utc::{Utc, wall_clock};
use serde::Serialize;

use crate::config::Percent;

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

#[derive(Debug)]
struct Withdrawal {
    until: Instant,
    reason: String,
    /// The complete versions of all endpoints.
    versions: Vec<Box<str>>,
}

/// The answers of the last minute, and the withdrawal if there is one.
#[derive(Debug, Default)]
struct CanaryGuard {
    /// The answers of each endpoint at the last step.
    before: HashMap<Arc<str>, Answers>,
    /// The answers of the newest and of the older versions in each step, oldest first.
    window: VecDeque<(Answers, Answers)>,
    newest: Option<MinorVersion>,
    withdrawal: Option<Withdrawal>,
}

impl CanaryGuard {
    fn step(&mut self, endpoints: &[CanaryEndpoint], now: Instant) -> Option<CanaryChange> {
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

/// The canary of one upstream. All workers share it.
#[derive(Debug, Default)]
pub struct Canary {
    /// Number of requests that had a choice; wraps around.
    turns: AtomicU32,
    withdrawn: AtomicBool,
    guard: Mutex<CanaryGuard>,
}

/// The canary in `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CanaryStatus {
    /// The configured share.
    pub share: String,
    /// `waiting` while all apiservers have one version, `active`, or `withdrawn`.
    pub state: &'static str,
    /// The newest version, if there are two or more.
    pub version: Option<String>,
    /// Why the share was withdrawn.
    pub reason: Option<String>,
    /// When a withdrawal ends at the latest, RFC 3339.
    pub until: Option<String>,
}

impl Canary {
    /// Whether the next request goes to the newest version. Of 100 requests in a row exactly `share` do, spread
    /// evenly.
    pub fn next(&self, share: Percent) -> bool {
        if self.withdrawn.load(Ordering::Relaxed) {
            return false;
        }
        let share = u32::from(share.get());
        let turn = self.turns.fetch_add(1, Ordering::Relaxed) % 100;
        (turn + 1) * share / 100 > turn * share / 100
    }

    /// Compares the answers of all endpoints whose version is known. Returns the change of the share, if there is
    /// one.
    pub fn step(&self, endpoints: &[CanaryEndpoint], now: Instant) -> Option<CanaryChange> {
        let mut guard = self.guard();
        let change = guard.step(endpoints, now);
        self.withdrawn.store(guard.withdrawal.is_some(), Ordering::Relaxed);
        change
    }

    /// Forgets everything, because no share is configured.
    pub fn reset(&self) {
        *self.guard() = CanaryGuard::default();
        self.withdrawn.store(false, Ordering::Relaxed);
    }

    /// Whether the share is withdrawn.
    pub fn is_withdrawn(&self) -> bool {
        self.withdrawn.load(Ordering::Relaxed)
    }

    /// The canary in `/status`; `None` if no share is configured.
    pub fn status(&self, share: Percent, now: Instant) -> Option<CanaryStatus> {
        if share == Percent::ZERO {
            return None;
        }
        let guard = self.guard();
        let withdrawal = guard.withdrawal.as_ref();
        let until = withdrawal.map(|withdrawal| {
            Utc(wall_clock() + withdrawal.until.saturating_duration_since(now)).seconds()
        });
        Some(CanaryStatus {
            share: share.to_string(),
            state: match (withdrawal, guard.newest) {
                (Some(_), _) => "withdrawn",
                (None, Some(_)) => "active",
                (None, None) => "waiting",
            },
            version: guard.newest.map(|version| version.to_string()),
            reason: withdrawal.map(|withdrawal| withdrawal.reason.clone()),
            until,
        })
    }

    fn guard(&self) -> MutexGuard<'_, CanaryGuard> {
        self.guard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    fn endpoint(label: &str, minor: u16, all: u64, errors: u64) -> CanaryEndpoint {
        CanaryEndpoint {
            label: label.into(),
            version: MinorVersion::new(1, minor).unwrap(),
            git_version: format!("v1.{minor}.0").into(),
            answers: Answers { all, errors },
        }
    }

    fn share(percent: u8) -> Percent {
        Percent::new(percent).unwrap()
    }

    #[test]
    fn next_takes_exactly_the_share_of_any_100_requests() {
        for percent in [0, 1, 10, 33, 50, 99, 100] {
            let canary = Canary::default();
            let taken: Vec<bool> = (0..1000).map(|_| canary.next(share(percent))).collect();
            for hundred in taken.windows(100) {
                let count = hundred.iter().filter(|taken| **taken).count();
                assert_eq!(count, usize::from(percent), "{percent} %");
            }
        }
        // They are spread: with 10 % no two of ten requests in a row.
        let canary = Canary::default();
        let taken: Vec<bool> = (0..1000).map(|_| canary.next(share(10))).collect();
        assert!(taken.windows(10).all(|ten| ten.iter().filter(|taken| **taken).count() == 1));
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

    #[tokio::test(start_paused = true)]
    async fn share_is_withdrawn_when_the_newest_version_fails_and_returns_after_10_minutes() {
        let canary = Canary::default();
        let start = clock::now();
        let step = |at: u64, all: u64, errors: u64| {
            let endpoints = [endpoint("a", 37, all, errors), endpoint("b", 36, all * 9, 0)];
            canary.step(&endpoints, start + Duration::from_secs(at))
        };
        // Errors before the first step do not count.
        assert_eq!(step(0, 100, 100), None);
        assert!(canary.next(share(100)));
        assert_eq!(step(5, 110, 104), None);
        let Some(CanaryChange::Withdrawn(reason)) = step(10, 120, 106) else { panic!() };
        assert_eq!(
            reason,
            "6 of 20 answers of 1.37 were 5xx in the last minute, and 0 of 180 of older versions"
        );
        assert!(canary.is_withdrawn() && !canary.next(share(100)));
        let status = canary.status(share(10), start + Duration::from_secs(10)).unwrap();
        assert_eq!((status.state, status.version.as_deref()), ("withdrawn", Some("1.37")));
        assert_eq!((status.share.as_str(), status.reason), ("10%", Some(reason)));
        assert_eq!(step(609, 120, 106), None);
        assert!(matches!(step(610, 120, 106), Some(CanaryChange::Restored(_))));
        assert!(!canary.is_withdrawn());
        // Errors of the time before do not count.
        assert_eq!(step(615, 130, 106), None);
        assert_eq!(canary.status(share(10), start).unwrap().state, "active");
    }

    #[tokio::test(start_paused = true)]
    async fn errors_older_than_a_minute_do_not_withdraw_the_share() {
        let canary = Canary::default();
        let start = clock::now();
        let mut errors = 0;
        for step in 0..100_u32 {
            // One error in 20 s: three in the window.
            errors += u64::from(step % 4 == 0);
            let endpoints = [endpoint("a", 37, errors, errors), endpoint("b", 36, 0, 0)];
            assert_eq!(canary.step(&endpoints, start + INTERVAL * step), None, "{step}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn another_version_ends_a_withdrawal_and_an_endpoint_out_of_service_does_not() {
        let canary = Canary::default();
        let now = clock::now();
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
        assert!(!canary.is_withdrawn());
    }

    #[tokio::test(start_paused = true)]
    async fn answers_before_an_endpoint_was_upgraded_do_not_count_for_its_new_version() {
        let canary = Canary::default();
        let now = clock::now();
        // 1.36 has failed before the upgrade of `b`.
        canary.step(&[endpoint("a", 37, 0, 0), endpoint("b", 36, 100, 100)], now);
        let upgraded =
            [endpoint("a", 37, 10, 0), endpoint("b", 37, 110, 100), endpoint("c", 36, 9, 0)];
        assert_eq!(canary.step(&upgraded, now), None);
        // With one version there is no canary.
        let equal = [endpoint("a", 37, 10, 0), endpoint("b", 37, 900, 700)];
        assert_eq!(canary.step(&equal, now), None);
        assert_eq!(canary.status(share(10), now).unwrap().state, "waiting");
        assert_eq!(canary.status(Percent::ZERO, now), None);
    }
}
