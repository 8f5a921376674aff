//! Signals to the prober of an endpoint: requests for a `/readyz` before its time, and whether the latest
//! one failed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use jackstay_core::probe::schedule::ProbeTrigger;
use tokio::sync::Notify;

/// Number of responses of 500 or above in a row after which `/readyz` is asked at once.
const ERROR_STREAK: u64 = 5;

/// Requests for a probe, and whether the latest one failed.
#[derive(Debug, Default)]
pub struct ProbeSignals {
    requested: Notify,
    confirmation_requested: AtomicBool,
    failing: AtomicBool,
    errors_in_row: AtomicU64,
}

impl ProbeSignals {
    pub(in crate::upstream) fn response_received(&self, status: u16) {
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

    /// Waits until a probe is requested. Returns the reason.
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

    /// Stores whether the latest `/readyz` failed or is overdue. Returns the previous value.
    pub(in crate::upstream) fn set_failing(&self, failing: bool) -> bool {
        self.failing.swap(failing, Ordering::Relaxed)
    }
}
