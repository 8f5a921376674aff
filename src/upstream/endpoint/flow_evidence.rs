//! What flows show about an endpoint whose probe fails.
//!
//! The probe can fail for reasons of its own, such as a server that routes by a TLS server name that only clients send.
//! What clients get decides then: the endpoint serves flows if one that began after the endpoint entered its state was
//! answered, until another one is refused or dies, or [`VALID_FOR`] has passed. Bytes of an older flow show nothing: a
//! server that shuts down serves its connections, but accepts no new ones.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long an answer shows that the endpoint serves flows.
const VALID_FOR: Duration = Duration::from_secs(30);

/// When flows of an endpoint were answered last.
#[derive(Debug)]
pub struct FlowEvidence {
    origin: Instant,
    /// When the answered flow began, in milliseconds after `origin`, plus one; 0 for none.
    began: AtomicU64,
    /// When it was answered, in milliseconds after `origin`.
    answered: AtomicU64,
}

impl FlowEvidence {
    /// No evidence. Times before `origin` count as `origin`.
    pub fn new(origin: Instant) -> Self {
        Self { origin, began: AtomicU64::new(0), answered: AtomicU64::new(0) }
    }

    /// The endpoint has sent the first bytes on a flow that began at `began`.
    pub fn answered(&self, began: Instant, now: Instant) {
        self.answered.store(self.millis(now), Ordering::Relaxed);
        self.began.store(self.millis(began) + 1, Ordering::Relaxed);
    }

    /// A connection was refused, or a flow is dead.
    pub fn refused(&self) {
        self.began.store(0, Ordering::Relaxed);
    }

    /// Whether flows that begin now are served, as far as the last one shows that began at or after `since`.
    pub fn shows_service(&self, since: Instant, now: Instant) -> bool {
        let (began, answered) =
            (self.began.load(Ordering::Relaxed), self.answered.load(Ordering::Relaxed));
        began > self.millis(since)
            && self.millis(now).saturating_sub(answered) < VALID_FOR.as_millis() as u64
    }

    fn millis(&self, at: Instant) -> u64 {
        at.saturating_duration_since(self.origin).as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use jackstay_sys::clock;

    #[test]
    fn shows_service_only_after_a_later_flow_was_answered_and_none_was_refused() {
        let origin = clock::now();
        let at = |seconds| origin + Duration::from_secs(seconds);
        let evidence = FlowEvidence::new(origin);
        assert!(!evidence.shows_service(at(0), at(1)), "no flow");
        evidence.answered(at(4), at(11));
        assert!(!evidence.shows_service(at(10), at(12)), "it began before");
        evidence.answered(at(10), at(11));
        assert!(evidence.shows_service(at(10), at(12)));
        assert!(evidence.shows_service(at(10), at(40)));
        assert!(!evidence.shows_service(at(10), at(41)), "it is too old");
        evidence.refused();
        assert!(!evidence.shows_service(at(10), at(12)), "refused");
    }
}
