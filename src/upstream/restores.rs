//! Whether the etcd of one upstream was restored from a backup ([`jackstay_core::restore`]), shared by all threads.
//!
//! Probers raise and decide a suspicion. After a restore, the versions that endpoints have shown and the floors of clients
//! are lowered to the revision of etcd, and each watch that follows versions of the lost history ends with 410. So
//! does a watch that a client starts later at such a version: the *lost range* reaches from the revision at which the restore
//! was recognised to the highest version that was seen before. A version within it may be one of the new history, so a
//! prober reads the revision of etcd once more, after the watch has begun: if that is lower, the version is lost.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jackstay_core::endpoint_condition::EndpointCondition;
use jackstay_core::lag::Expected;
use jackstay_core::pool::EndpointKey;
use jackstay_core::restore::{
    PAUSE_AFTER_CONTRADICTION, Report, Suspicion, Verdict, revision_question,
};
use jackstay_core::shared_etcd::{REFERENCE, SharedEtcd};
use jackstay_sys::utc::Utc;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// How long versions of the lost history may still be seen after a restore was recognised: in answers of an apiserver that
/// was not restarted yet, and in questions that were asked before.
const SETTLING: Duration = Duration::from_secs(600);

/// How often one of the endpoints looks whether the reference must be read.
pub const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// What is known about restores of one upstream.
#[derive(Debug, Default)]
pub struct Restores {
    /// Counts what watches must look at: each restore, and each revision that was read for them.
    notices: AtomicU32,
    /// The notice of the latest restore; 0 if there was none.
    recognised_at: AtomicU32,
    /// The revision of etcd that was read last.
    revision: AtomicU64,
    /// The end of the lost range; 0 without one.
    lost_up_to: AtomicU64,
    /// A watch waits for a newer revision.
    wants_revision: AtomicBool,
    guarded: Mutex<Guarded>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Guarded {
    suspicion: Option<Suspicion>,
    /// No suspicion of this version or a lower one is raised before this time.
    contradicted: Option<(u64, Instant)>,
    /// Before this time, a version of the lost range is no reason for a suspicion.
    settled_at: Option<Instant>,
    latest: Option<RestoreStatus>,
    /// The resource whose lists are read for the revision.
    listed: Option<Arc<str>>,
    shared_etcd: SharedEtcd,
    /// Before this time, no endpoint looks whether a read of the reference is due.
    next_look: Option<Instant>,
}

/// The latest restore, for `/status`.
#[derive(Debug, Clone, Serialize)]
pub struct RestoreStatus {
    /// When it was recognised, RFC 3339.
    pub recognised_at: String,
    /// The resource whose versions have shown it.
    pub resource: Box<str>,
    /// A version that was shown before.
    pub before: u64,
    /// The revision of etcd when it was recognised.
    pub revision: u64,
}

/// What a watch knows about restores: twice the number of notices that it has looked at, and 1 if it began at a version that
/// may be lost and waits for a newer revision. One number, because each watch has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryMark(u32);

impl HistoryMark {
    fn new(seen: u32, is_doubtful: bool) -> Self {
        Self(seen << 1 | u32::from(is_doubtful))
    }

    fn seen(self) -> u32 {
        self.0 >> 1
    }

    fn is_doubtful(self) -> bool {
        self.0 & 1 == 1
    }
}

/// What a watch does after a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterNotice {
    /// Nothing.
    Continue,
    /// It ends: its cursor is a version of the lost history.
    End,
}

impl Restores {
    /// Raises a suspicion about a version that was seen, unless there is one or an endpoint has contradicted it a short time
    /// ago. Returns whether a suspicion is open.
    pub fn suspect(&self, seen: &Expected, now: Instant) -> bool {
        let (resource, version) = (&seen.resource, seen.version);
        let mut guarded = self.lock();
        let is_read = guarded.shared_etcd.latest().is_some();
        let listed = if is_read && guarded.shared_etcd.has(resource) {
            REFERENCE.into()
        } else if revision_question(resource).is_some() {
            Arc::clone(resource)
        } else {
            return false;
        };
        if guarded.suspicion.as_ref().is_some_and(|open| !open.is_over(now)) {
            return true;
        }
        let is_lost = version <= self.lost_up_to.load(Ordering::Relaxed);
        if is_lost && guarded.settled_at.is_some_and(|end| now < end)
            || guarded.contradicted.is_some_and(|(highest, end)| version <= highest && now < end)
        {
            return false;
        }
        guarded.suspicion = Some(Suspicion::new(seen, listed, now));
        drop(guarded);
        self.changed.notify_waiters();
        true
    }

    /// The resource that this endpoint is asked to list for the open suspicion, if it has not reported.
    pub fn wanted_report(&self, endpoint: EndpointKey, now: Instant) -> Option<Arc<str>> {
        let mut guarded = self.lock();
        guarded.suspicion.take_if(|open| open.is_over(now));
        let open = guarded.suspicion.as_ref()?;
        open.wants_report(endpoint).then(|| Arc::clone(&open.listed))
    }

    /// Takes in the report of an endpoint about the resource that is listed for the open suspicion. Returns the suspicion
    /// and the revision of etcd if it was restored.
    pub fn report(
        &self,
        endpoint: EndpointKey,
        (resource, report): (&str, Report),
        endpoints: &[EndpointCondition],
        now: Instant,
    ) -> Option<(Suspicion, u64)> {
        let mut guarded = self.lock();
        let open = guarded.suspicion.as_mut().filter(|open| *open.listed == *resource)?;
        open.report(endpoint, report);
        match open.verdict(endpoints) {
            Verdict::Undecided => None,
            Verdict::Contradicted => {
                let version = open.version;
                guarded.suspicion = None;
                guarded.contradicted = Some((version, now + PAUSE_AFTER_CONTRADICTION));
                None
            }
            Verdict::Restored { revision } => Some((guarded.suspicion.take()?, revision)),
        }
    }

    /// Records a restore. `highest` is the highest version that was seen before. The caller has lowered what was shown.
    pub fn recognised(&self, suspicion: &Suspicion, revision: u64, highest: u64, now: Instant) {
        let mut guarded = self.lock();
        guarded.settled_at = Some(now + SETTLING);
        guarded.contradicted = None;
        guarded.listed = Some(Arc::clone(&suspicion.listed));
        guarded.shared_etcd.restored(revision);
        guarded.latest = Some(RestoreStatus {
            recognised_at: Utc::now().seconds(),
            resource: (*suspicion.resource).into(),
            before: suspicion.version,
            revision,
        });
        self.revision.store(revision, Ordering::Relaxed);
        self.lost_up_to.store(highest.max(suspicion.version), Ordering::Relaxed);
        let notice = self.notices.load(Ordering::Relaxed) + 1;
        self.recognised_at.store(notice, Ordering::Relaxed);
        self.notices.store(notice, Ordering::Release);
        drop(guarded);
        self.changed.notify_waiters();
    }

    /// Whether this endpoint looks whether a read of the [`REFERENCE`] is due. One of them does, every [`LOOK_INTERVAL`].
    pub fn take_look(&self, now: Instant) -> bool {
        let mut guarded = self.lock();
        let is_next = guarded.next_look.is_none_or(|at| now >= at);
        if is_next {
            guarded.next_look = Some(now + LOOK_INTERVAL);
        }
        is_next
    }

    /// Whether a read of the reference may prove that a resource of these versions is stored in its etcd.
    pub fn is_reference_due(&self, seen: &[Expected], now: Instant) -> bool {
        self.lock().shared_etcd.is_read_due(seen, now)
    }

    /// What the latest read of the reference has shown, if there was one.
    pub fn latest_reference(&self) -> Option<Expected> {
        self.lock().shared_etcd.latest().cloned()
    }

    /// Takes in a read of the reference ([`SharedEtcd::read`]); `None` if it was not answered. Returns a version that may be
    /// lost. A read that was sent before the latest restore, whose notice is `sent_after`, says nothing.
    pub fn reference_read(
        &self,
        (revision, read_by): (Option<u64>, &Arc<str>),
        seen: &[Expected],
        sent_after: u32,
        now: Instant,
    ) -> Option<Expected> {
        let mut guarded = self.lock();
        if sent_after != self.recognised_notice() {
            return None;
        }
        let Some(revision) = revision else {
            guarded.shared_etcd.failed(now);
            return None;
        };
        guarded.shared_etcd.read((revision, read_by), seen, now)
    }

    /// The resource whose revision a watch waits for. Only the caller reads it, and calls [`Self::revision_read`]: the
    /// list must begin after this call.
    pub fn take_wanted_revision(&self) -> Option<Arc<str>> {
        if !self.wants_revision.load(Ordering::Relaxed) {
            return None;
        }
        let resource = self.lock().listed.clone()?;
        self.wants_revision.swap(false, Ordering::Acquire).then_some(resource)
    }

    /// Records the revision for which [`Self::take_wanted_revision`] has asked; `None` if it was not answered, so that it
    /// is asked again.
    pub fn revision_read(&self, revision: Option<u64>) {
        let Some(revision) = revision else {
            return self.wants_revision.store(true, Ordering::Relaxed);
        };
        let guarded = self.lock();
        self.revision.fetch_max(revision, Ordering::Relaxed);
        if revision >= self.lost_up_to.load(Ordering::Relaxed) {
            self.lost_up_to.store(0, Ordering::Relaxed);
        }
        self.notices.fetch_add(1, Ordering::Release);
        drop(guarded);
        self.changed.notify_waiters();
    }

    /// The mark of a watch that begins after this version; `None` if it does not follow versions.
    pub fn mark(&self, version: Option<u64>) -> HistoryMark {
        let seen = self.notices();
        let lost_up_to = self.lost_up_to.load(Ordering::Relaxed);
        let is_doubtful = version.is_some_and(|version| {
            version <= lost_up_to && version > self.revision.load(Ordering::Relaxed)
        });
        if is_doubtful {
            self.wants_revision.store(true, Ordering::Release);
            self.changed.notify_waiters();
        }
        HistoryMark::new(seen, is_doubtful)
    }

    /// Whether a watch must look at a notice. One atomic load, because it is asked on each poll.
    pub fn is_news(&self, mark: HistoryMark) -> bool {
        self.notices() != mark.seen()
    }

    /// What a watch that follows versions does after the notices since its mark. `cursor` is its version.
    pub fn look_at_notices(&self, mark: &mut HistoryMark, cursor: Option<u64>) -> AfterNotice {
        let now = self.notices();
        let began_before = mark.seen() < self.recognised_at.load(Ordering::Relaxed);
        let is_above = cursor.is_some_and(|c| c > self.revision.load(Ordering::Relaxed));
        let is_doubtful = mark.is_doubtful();
        *mark = HistoryMark::new(now, false);
        if began_before || is_doubtful && is_above {
            AfterNotice::End
        } else {
            AfterNotice::Continue
        }
    }

    /// The number of notices so far.
    pub fn notices(&self) -> u32 {
        self.notices.load(Ordering::Acquire)
    }

    /// The number of the notice of the latest restore; 0 if there was none.
    pub fn recognised_notice(&self) -> u32 {
        self.recognised_at.load(Ordering::Relaxed)
    }

    /// Completes after a suspicion, a restore or a revision that follows this call.
    pub fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    /// Completes when a restore is recognised that is not the one of this notice.
    pub async fn recognised_after(&self, notice: u32) {
        loop {
            let mut changed = std::pin::pin!(self.changed());
            // Registered before the check, so that no restore is missed.
            changed.as_mut().enable();
            if self.recognised_notice() != notice {
                return;
            }
            changed.await;
        }
    }

    /// The latest restore.
    pub fn latest(&self) -> Option<RestoreStatus> {
        self.lock().latest.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use AfterNotice::{Continue, End};
    use jackstay_core::endpoint_state::EndpointState;
    use jackstay_sys::clock::now;

    fn ready(key: usize) -> EndpointCondition {
        EndpointCondition {
            key: EndpointKey(key),
            state: EndpointState::Ready,
            probe_fails: false,
            is_starting: false,
        }
    }

    fn seen(version: u64) -> Expected {
        Expected { resource: "pods".into(), version, shown_by: "a".into(), at: now() }
    }

    fn suspicion(version: u64) -> Suspicion {
        Suspicion::new(&seen(version), "pods".into(), now())
    }

    #[test]
    fn watches_that_began_before_a_restore_end_and_later_ones_continue() {
        let restores = Restores::default();
        let mut before = restores.mark(Some(90));
        assert!(!restores.is_news(before));
        restores.recognised(&suspicion(100), 20, 100, now());
        assert!(restores.is_news(before));
        assert_eq!(restores.look_at_notices(&mut before, Some(90)), End);
        let mut of_new_history = restores.mark(Some(20));
        assert!(!restores.is_news(of_new_history));
        assert_eq!(restores.take_wanted_revision(), None, "20 is no doubtful version");
        restores.revision_read(Some(25));
        assert_eq!(restores.look_at_notices(&mut of_new_history, Some(20)), Continue);
    }

    #[test]
    fn version_in_the_lost_range_is_decided_by_a_revision_that_was_read_later() {
        let restores = Restores::default();
        restores.recognised(&suspicion(100), 20, 100, now());
        // The client has listed at 24 meanwhile; the other one has its version from the lost history.
        let (mut new, mut lost) = (restores.mark(Some(24)), restores.mark(Some(95)));
        assert_eq!(restores.take_wanted_revision().as_deref(), Some("pods"));
        assert_eq!(restores.take_wanted_revision(), None);
        restores.revision_read(None);
        assert!(!restores.is_news(lost), "no answer decides nothing");
        assert_eq!(restores.take_wanted_revision().as_deref(), Some("pods"));
        restores.revision_read(Some(24));
        assert!(restores.is_news(lost));
        assert_eq!(restores.look_at_notices(&mut new, Some(24)), Continue);
        assert_eq!(restores.look_at_notices(&mut lost, Some(95)), End);
        // From here on no version is doubtful.
        restores.revision_read(Some(100));
        assert!(!restores.mark(Some(99)).is_doubtful() && !restores.mark(Some(101)).is_doubtful());
    }

    #[test]
    fn restore_is_decided_once_by_reports_of_all_ready_endpoints() {
        let (restores, now) = (Restores::default(), now());
        let endpoints = [ready(1), ready(2)];
        let report = |key, revision| {
            let report = ("pods", Report::Revision(revision));
            let decided = restores.report(EndpointKey(key), report, &endpoints, now);
            decided.map(|(suspicion, revision)| (suspicion.version, revision))
        };
        let suspect = || restores.suspect(&seen(100), now);
        assert_eq!(report(1, 20), None, "without a suspicion");
        assert!(suspect());
        assert_eq!(restores.wanted_report(EndpointKey(1), now).as_deref(), Some("pods"));
        assert_eq!(report(1, 20), None);
        assert_eq!(restores.wanted_report(EndpointKey(1), now), None);
        assert_eq!(report(2, 21), Some((100, 21)));
        assert_eq!(report(2, 21), None, "decided");
        assert!(suspect());
        assert_eq!(report(1, 100), None);
        assert!(!suspect(), "an endpoint has contradicted it");
        assert!(restores.suspect(&seen(101), now), "a higher version");
    }

    #[test]
    fn resource_that_shares_the_etcd_of_the_reference_is_decided_by_it() {
        let (restores, now) = (Restores::default(), now());
        let read = |revision, seen: &[Expected], notice| {
            let lost = restores.reference_read((revision, &"a".into()), seen, notice, now);
            lost.map(|lost| (lost.resource.to_string(), lost.version))
        };
        let secret = |version| Expected { resource: "secrets".into(), ..seen(version) };
        assert!(!restores.suspect(&secret(100), now), "secrets are not listed");
        assert!(restores.take_look(now) && !restores.take_look(now));
        assert!(restores.take_look(now + LOOK_INTERVAL));
        assert!(restores.is_reference_due(&[secret(10)], now));
        assert_eq!(read(Some(20), &[secret(10)], 0), None);
        assert_eq!(read(Some(120), &[secret(100)], 0), None);
        assert_eq!(read(Some(50), &[secret(100)], 1), None, "sent before a restore");
        assert_eq!(read(Some(50), &[secret(100)], 0), Some(("secrets".to_owned(), 100)));
        assert!(restores.suspect(&secret(100), now));
        assert_eq!(restores.wanted_report(EndpointKey(1), now).as_deref(), Some(REFERENCE));
        let report = (REFERENCE, Report::Revision(50));
        let (lost, revision) = restores.report(EndpointKey(1), report, &[ready(1)], now).unwrap();
        assert_eq!((&*lost.resource, lost.version, revision), ("secrets", 100, 50));
        restores.recognised(&lost, revision, 120, now);
        assert_eq!(restores.latest_reference().unwrap().version, 50);
        restores.mark(Some(90));
        assert_eq!(restores.take_wanted_revision().as_deref(), Some(REFERENCE));
    }

    #[test]
    fn version_of_the_lost_history_is_no_second_restore() {
        let (restores, now) = (Restores::default(), now());
        restores.recognised(&suspicion(100), 20, 110, now);
        let suspect = |version, now| restores.suspect(&seen(version), now);
        assert!(!suspect(110, now));
        assert!(suspect(111, now));
        let restores = Restores::default();
        restores.recognised(&suspicion(100), 20, 110, now);
        assert!(restores.suspect(&seen(110), now + SETTLING));
    }
}
