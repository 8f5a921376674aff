//! What the log says of an outage.
//!
//! | condition | line |
//! |---|---|
//! | no endpoint of an upstream is usable for [`OUTAGE_AFTER`] | one error |
//! | an endpoint is usable again for [`OUTAGE_AFTER`] | one warning, with the number of failed requests |

use std::time::{Duration, Instant};

/// How long no endpoint is usable before this is an outage, and one is usable before the outage is over. With
/// four checks a second, an outage of a second is reported.
const OUTAGE_AFTER: Duration = Duration::from_millis(750);
/// Requests may fail for this long before an outage is recognised: 0.7 s if every process is stopped.
pub const FAILS_BEFORE: Duration = Duration::from_millis(1_500);

/// Whether an upstream can serve requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Usability {
    /// An endpoint is usable.
    Usable,
    /// No endpoint is usable, and not every endpoint has been tried.
    Untried,
    /// No endpoint is usable.
    Unusable,
}

/// Numbers of requests that failed because no endpoint was reached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Failures {
    /// Responses with status 503.
    pub rejected: u64,
    /// Connections (L4) that were reset.
    pub resets: u64,
}

/// What the log says of an outage.
#[derive(Debug, PartialEq, Eq)]
pub enum OutageEvent {
    /// No endpoint is usable.
    Began,
    /// One is usable again.
    Ended {
        /// How long requests could fail.
        lasted: Duration,
        /// Requests that failed meanwhile.
        failures: Failures,
        /// The largest number of watches that were held at once.
        held: usize,
    },
}

/// The outage of one upstream, if there is one.
#[derive(Debug, Default)]
pub struct OutageReport {
    /// An endpoint has been usable.
    was_usable: bool,
    /// The failures at the last check.
    latest: Failures,
    /// When requests began to fail, the failures before that, and when the latest one was seen.
    failing: Option<(Instant, Failures, Instant)>,
    /// Since when none is usable.
    unusable_since: Option<Instant>,
    /// When requests began to fail, or no endpoint was usable.
    began: Option<Instant>,
    /// Since when one is usable again, during an outage.
    usable_since: Option<Instant>,
    /// The error was written.
    reported: bool,
    /// The failures before it.
    before: Failures,
    /// The largest number of watches that were held at once.
    held: usize,
}

impl OutageReport {
    /// Processes what was seen at a check. `failures`: since the process started. `held`: watches.
    pub fn observe(
        &mut self,
        usability: Usability,
        failures: Failures,
        held: usize,
        now: Instant,
    ) -> Option<OutageEvent> {
        let usable = match usability {
            Usability::Usable => true,
            Usability::Unusable => false,
            Usability::Untried => !self.was_usable,
        };
        self.was_usable |= usability == Usability::Usable;
        let before = std::mem::replace(&mut self.latest, failures);
        if usable && !self.reported {
            (self.unusable_since, self.began, self.held) = (None, None, 0);
            if failures != before {
                self.failing.get_or_insert((now, before, now)).2 = now;
            }
            self.failing = self.failing.filter(|(.., latest)| now < *latest + FAILS_BEFORE);
            return None;
        }
        let since = *self.unusable_since.get_or_insert(now);
        let began = *self.began.get_or_insert_with(|| {
            let (began, before, _) = self.failing.take().unwrap_or((now, before, now));
            self.before = before;
            began
        });
        self.held = self.held.max(held);
        if !usable {
            self.usable_since = None;
            if self.reported || now < since + OUTAGE_AFTER {
                return None;
            }
            self.reported = true;
            return Some(OutageEvent::Began);
        }
        let usable_since = *self.usable_since.get_or_insert(now);
        if now < usable_since + OUTAGE_AFTER {
            return None;
        }
        let Failures { rejected, resets } = self.before;
        let ended = OutageEvent::Ended {
            lasted: usable_since.saturating_duration_since(began),
            failures: Failures {
                rejected: failures.rejected.saturating_sub(rejected),
                resets: failures.resets.saturating_sub(resets),
            },
            held: self.held,
        };
        *self = Self { was_usable: true, latest: failures, ..Self::default() };
        Some(ended)
    }

    /// Whether no endpoint is usable, or was during the outage that is reported.
    pub fn is_unusable(&self) -> bool {
        self.unusable_since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use OutageEvent::{Began, Ended};
    use Usability::{Untried, Unusable, Usable};

    /// Observes each usability from the given time in milliseconds until the next one, in steps of
    /// a quarter of a second. Returns the events, with their times.
    fn events(steps: &[(u64, Usability)]) -> Vec<(u64, OutageEvent)> {
        let (mut report, start) = (OutageReport::default(), Instant::now());
        let (mut events, mut rejected) = (Vec::new(), 0);
        for ms in (0..steps.last().unwrap().0).step_by(250) {
            let usability = steps.iter().rev().find(|(from, _)| ms >= *from).unwrap().1;
            let held = if usability == Usable { 0 } else { 20 };
            rejected += u64::from(usability != Usable);
            let failures = Failures { rejected, resets: 0 };
            let now = start + Duration::from_millis(ms);
            events.extend(report.observe(usability, failures, held, now).map(|event| (ms, event)));
        }
        events
    }

    fn ended(ms: u64, rejected: u64) -> OutageEvent {
        let failures = Failures { rejected, resets: 0 };
        Ended { lasted: Duration::from_millis(ms), failures, held: 20 }
    }

    #[test]
    fn outage_has_one_error_and_one_end_and_a_short_one_has_none() {
        for (steps, expected) in [
            (vec![(0, Usable), (1_000, Unusable), (1_500, Usable), (9_000, Usable)], vec![]),
            (
                vec![(0, Usable), (1_000, Unusable), (2_000, Usable), (9_000, Usable)],
                vec![(1_750, Began), (2_750, ended(1_000, 4))],
            ),
            // It is usable for a moment in between, as while the first apiserver starts.
            (
                vec![
                    (0, Usable),
                    (1_000, Unusable),
                    (20_000, Usable),
                    (20_500, Unusable),
                    (26_000, Usable),
                    (40_000, Usable),
                ],
                vec![(1_750, Began), (26_750, ended(25_000, 98))],
            ),
            // At start, before the first attempts have failed.
            (vec![(0, Untried), (60_000, Usable)], vec![]),
            (vec![(0, Untried), (3_000, Unusable), (9_000, Usable)], vec![(3_750, Began)]),
            // Connections were lost, and new ones are tried.
            (vec![(0, Usable), (1_000, Untried), (9_000, Usable)], vec![(1_750, Began)]),
        ] {
            assert_eq!(events(&steps), expected, "{steps:?}");
        }
    }

    #[test]
    fn outage_begins_with_the_first_failure_before_it() {
        let (mut report, start) = (OutageReport::default(), Instant::now());
        let mut events = Vec::new();
        // Requests fail from 3 s, as when every process is stopped. One that failed at 1 s has another reason.
        for ms in (0..12_000).step_by(250) {
            let rejected = u64::from(ms >= 1_000) + u64::from(ms >= 3_000) * (ms / 250);
            let usability = if (4_000..9_000).contains(&ms) { Unusable } else { Usable };
            let now = start + Duration::from_millis(ms);
            let failures = Failures { rejected: rejected.min(30), resets: 0 };
            events.extend(report.observe(usability, failures, 20, now).map(|event| (ms, event)));
        }
        assert_eq!(events, [(4_750, Began), (9_750, ended(6_000, 29))]);
    }
}
