//! What requests tell the prober of an endpoint: passive evidence of trouble, and requests for a
//! probe before its time.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tokio::sync::Notify;

/// Responses of 500 and above in a row after which `/readyz` is asked at once.
const ERROR_STREAK: u64 = 5;

/// Why `/readyz` is asked before its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeTrigger {
    /// Passive evidence: requests met a streak of errors or slow response heads here.
    PassiveEvidence,
    /// Another endpoint's probe fails; watches may move here only once this one's is ok.
    Confirmation,
}

/// Requests for a probe, and whether the latest one failed.
#[derive(Debug, Default)]
pub struct ProbeSignals {
    requested: Notify,
    confirmation_requested: AtomicBool,
    failing: AtomicBool,
    errors_in_row: AtomicU64,
}

impl ProbeSignals {
    pub(super) fn response_received(&self, status: u16) {
        if status < 500 {
            if self.errors_in_row.load(Ordering::Relaxed) != 0 {
                self.errors_in_row.store(0, Ordering::Relaxed);
            }
        } else if self.errors_in_row.fetch_add(1, Ordering::Relaxed) + 1 == ERROR_STREAK {
            self.requested.notify_one();
        }
    }

    /// Requests a `/readyz` at once.
    pub fn request(&self, trigger: ProbeTrigger) {
        if trigger == ProbeTrigger::Confirmation {
            self.confirmation_requested.store(true, Ordering::Relaxed);
        }
        self.requested.notify_one();
    }

    /// Waits until a probe is requested; returns why.
    pub async fn requested(&self) -> ProbeTrigger {
        self.requested.notified().await;
        if self.confirmation_requested.swap(false, Ordering::Relaxed) {
            ProbeTrigger::Confirmation
        } else {
            ProbeTrigger::PassiveEvidence
        }
    }

    /// Whether the latest `/readyz` failed or is overdue. One atomic load.
    pub fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Relaxed)
    }

    /// Notes the latest result; returns the previous one.
    pub(super) fn set_failing(&self, failing: bool) -> bool {
        self.failing.swap(failing, Ordering::Relaxed)
    }
}
