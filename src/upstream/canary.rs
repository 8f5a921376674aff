//! The share of the requests that go to the newest version during an upgrade of the control plane
//! ([`jackstay_core::canary`] withdraws it).

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use jackstay_config::Percent;
use jackstay_core::canary::{CanaryChange, CanaryEndpoint, CanaryGuard};
use jackstay_sys::utc::{Utc, wall_clock};
use serde::Serialize;

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
        self.withdrawn.store(guard.withdrawal().is_some(), Ordering::Relaxed);
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
        let withdrawal = guard.withdrawal();
        let until = withdrawal.map(|withdrawal| {
            Utc(wall_clock() + withdrawal.until.saturating_duration_since(now)).seconds()
        });
        Some(CanaryStatus {
            share: share.to_string(),
            state: match (withdrawal, guard.newest()) {
                (Some(_), _) => "withdrawn",
                (None, Some(_)) => "active",
                (None, None) => "waiting",
            },
            version: guard.newest().map(|version| version.to_string()),
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
    use std::time::Duration;

    use jackstay_core::canary::Answers;
    use jackstay_core::kubernetes_version::MinorVersion;
    use jackstay_sys::clock;

    use super::*;

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

    #[tokio::test(start_paused = true)]
    async fn withdrawn_share_is_in_the_status_and_no_request_takes_it() {
        let canary = Canary::default();
        let start = clock::now();
        let step = |at: u64, all: u64, errors: u64| {
            let endpoints = [endpoint("a", 37, all, errors), endpoint("b", 36, all * 9, 0)];
            canary.step(&endpoints, start + Duration::from_secs(at))
        };
        let state = || canary.status(share(10), start).unwrap().state;
        assert_eq!(step(0, 100, 100), None);
        assert!(canary.next(share(100)) && state() == "active");
        let Some(CanaryChange::Withdrawn(reason)) = step(10, 120, 106) else { panic!() };
        assert!(canary.is_withdrawn() && !canary.next(share(100)));
        let status = canary.status(share(10), start + Duration::from_secs(10)).unwrap();
        assert_eq!((status.state, status.version.as_deref()), ("withdrawn", Some("1.37")));
        assert_eq!((status.share.as_str(), status.reason), ("10%", Some(reason)));
        assert!(matches!(step(610, 120, 106), Some(CanaryChange::Restored(_))));
        assert!(!canary.is_withdrawn() && canary.next(share(100)) && state() == "active");
        canary.step(&[endpoint("a", 37, 130, 106)], start);
        assert_eq!(state(), "waiting", "all have one version");
        assert_eq!(canary.status(Percent::ZERO, start), None);
    }
}
