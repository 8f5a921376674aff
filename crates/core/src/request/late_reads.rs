//! When a read of a built-in API group is late, so that another endpoint is asked, too.
//!
//! An apiserver that has lost its etcd accepts connections and answers PINGs, and its `/livez` fails only after seconds.
//! Until then, requests that need etcd do not return. The first reads show it: another endpoint answers them, and the
//! next ones avoid the apiserver ([`crate::group_health`]).
//!
//! | read | is late after |
//! |---|---|
//! | `get` of an object | the wait for objects |
//! | any other, at an endpoint that is suspected meanwhile | [`OTHERS_CHECK`] |
//! | any other | the wait for others, at least as long |
//!
//! Only the silence about a read that etcd must answer counts against the endpoint ([`crate::group_health::asks_etcd`]): a read
//! of the watch cache may wait for a version that the cache of another endpoint has. A watch is never late, nor a log.
//!
//! A read is late later by the round-trip time of its connection, and by what a long queue of the line delays it
//! ([`crate::line_delay`]): asked twice, a large list would make the queue longer for all.
//!
//! No read is late whose connection has received nothing since: its PING is unanswered, too, and shows whether it is lost.
//!
//! An apiserver that is slow because all are busy, because etcd is slow, or because the list is long, answers hardly later than
//! another one. Only an answer within a quarter of the time that the read has waited ([`is_quick`]) shows that the first one is
//! at fault; any other hedge was in vain, and doubles the wait. It is the shortest again after one that was not, or after
//! [`MEMORY`]. Few others are asked twice, because a list may cost as much as thousands of objects.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::retry_budget::RetryBudget;
use crate::backoff::Backoff;

/// The shortest wait for an object.
const OBJECT_WAIT: Duration = Duration::from_millis(150);
/// The longest one. Kubernetes promises that 99 % of the reads of an object take no longer ("API call latency SLI").
const LONGEST_OBJECT_WAIT: Duration = Duration::from_secs(1);
/// How often other reads look whether they are late: for the first time when objects that were asked for with them have
/// been read elsewhere.
const OTHERS_CHECK: Duration = Duration::from_millis(175);
/// The longest wait for others: as for objects, but of all objects of a namespace.
const LONGEST_OTHERS_WAIT: Duration = Duration::from_secs(5);
/// How long a hedge in vain counts.
const MEMORY: Duration = Duration::from_secs(60);

/// What decides when reads of built-in groups are late, and how many are asked of another endpoint.
#[derive(Debug)]
pub struct LateReads {
    objects: Pace,
    others: Pace,
}

impl Default for LateReads {
    fn default() -> Self {
        Self {
            objects: Pace::new(RetryBudget::late_objects(), OBJECT_WAIT, LONGEST_OBJECT_WAIT),
            others: Pace::new(RetryBudget::late_others(), OTHERS_CHECK, LONGEST_OTHERS_WAIT),
        }
    }
}

impl LateReads {
    /// After which time, and again after each such time, a read asks [`Self::is_late`]. `is_object`: it gets one object.
    pub fn check_interval(&self, is_object: bool, now: Instant) -> Duration {
        if is_object { self.objects.wait(now) } else { OTHERS_CHECK }
    }

    /// Whether a read is late that has waited for this time, without the time on the line. `is_suspected`: a
    /// read at its endpoint was late, and another endpoint has answered it.
    pub fn is_late(
        &self,
        is_object: bool,
        waited: Duration,
        is_suspected: bool,
        now: Instant,
    ) -> bool {
        let wait = match (is_object, is_suspected) {
            (true, _) => self.objects.wait(now),
            (false, true) => OTHERS_CHECK,
            (false, false) => self.others.wait(now),
        };
        waited >= wait
    }

    /// Limits the reads that are asked of another endpoint.
    pub fn budget(&self, is_object: bool) -> &RetryBudget {
        &self.pace(is_object).budget
    }

    /// A read that was asked of another endpoint was answered. `is_quick`: by that one, and quickly ([`is_quick`]).
    pub fn answered(&self, is_object: bool, is_quick: bool, now: Instant) {
        self.pace(is_object).answered(is_quick, now);
    }

    fn pace(&self, is_object: bool) -> &Pace {
        if is_object { &self.objects } else { &self.others }
    }
}

/// Whether a hedge that was answered after `took` shows that the endpoint of the first attempt, which has `waited` until
/// then, is slower than others.
pub fn is_quick(took: Duration, waited: Duration) -> bool {
    4 * took <= waited
}

#[derive(Debug)]
struct Pace {
    budget: RetryBudget,
    wait: Cell<Backoff>,
    /// The last hedge in vain.
    in_vain_at: Cell<Option<Instant>>,
}

impl Pace {
    fn new(budget: RetryBudget, shortest: Duration, longest: Duration) -> Self {
        let wait = Cell::new(Backoff::new(shortest, longest).after(1));
        Self { budget, wait, in_vain_at: Cell::new(None) }
    }

    fn wait(&self, now: Instant) -> Duration {
        if self.in_vain_at.get().is_some_and(|at| now >= at + MEMORY) {
            self.forget();
        }
        self.wait.get().pause()
    }

    fn answered(&self, is_quick: bool, now: Instant) {
        if is_quick {
            return self.forget();
        }
        let mut wait = self.wait.get();
        wait.failed();
        self.wait.set(wait);
        self.in_vain_at.set(Some(now));
    }

    fn forget(&self) {
        self.wait.set(self.wait.get().after(1));
        self.in_vain_at.set(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn wait_doubles_with_hedges_in_vain_until_one_is_not() {
        let (reads, now) = (LateReads::default(), Instant::now());
        let wait = |now| reads.check_interval(true, now);
        for expected in [150, 300, 600, 1_000, 1_000] {
            assert_eq!(wait(now), expected * MS);
            reads.answered(true, false, now);
        }
        assert_eq!(wait(now + MEMORY.checked_sub(MS).unwrap()), LONGEST_OBJECT_WAIT);
        assert_eq!(wait(now + MEMORY), OBJECT_WAIT);
        reads.answered(true, false, now + MEMORY);
        assert_eq!(wait(now + MEMORY), 300 * MS);
        reads.answered(true, true, now + MEMORY);
        assert_eq!(wait(now + MEMORY), OBJECT_WAIT);
    }

    #[test]
    fn hedge_is_quick_within_a_quarter_of_the_time() {
        for (took, expected) in [(0, true), (50, true), (51, false), (150, false)] {
            assert_eq!(is_quick(took * MS, 150 * MS + took * MS), expected, "{took}");
        }
    }

    #[test]
    fn other_reads_are_late_at_once_if_the_endpoint_is_suspected() {
        let (reads, now) = (LateReads::default(), Instant::now());
        for expected in [175, 350, 700, 1_400, 2_800, 5_000, 5_000] {
            assert_eq!(reads.check_interval(false, now), OTHERS_CHECK);
            let before = (expected - 1) * MS;
            for (waited, is_suspected, is_late) in [
                (expected * MS, false, true),
                (before, false, false),
                (OTHERS_CHECK, true, true),
                (OTHERS_CHECK.checked_sub(MS).unwrap(), true, false),
            ] {
                let found = reads.is_late(false, waited, is_suspected, now);
                assert_eq!(found, is_late, "{waited:?} {is_suspected}");
            }
            reads.answered(false, false, now);
        }
        assert_eq!(reads.check_interval(true, now), OBJECT_WAIT, "objects have their own pace");
        assert!(reads.is_late(true, OBJECT_WAIT, false, now));
        assert!(!reads.is_late(true, OBJECT_WAIT.checked_sub(MS).unwrap(), true, now));
    }
}
