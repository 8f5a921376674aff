//! Whether the process of an endpoint may have just started, and what tells it: the first of its open connections, and its
//! answers to probes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use jackstay_core::probe::answers::ProbeAnswers;

/// The credential of a probe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProbeCredential {
    /// The configured one.
    Configured,
    /// None.
    Anonymous,
}

/// See the documentation of the module.
#[derive(Debug)]
pub(super) struct ProcessStart {
    /// Whether the endpoint was starting when that was last determined, so that requests read no clock while it is not.
    pub(super) is_starting: AtomicBool,
    /// The answers to the probes with each [`ProbeCredential`].
    answers: Mutex<[ProbeAnswers; 2]>,
}

impl Default for ProcessStart {
    fn default() -> Self {
        Self { is_starting: AtomicBool::new(true), answers: Mutex::default() }
    }
}

impl ProcessStart {
    /// The process may have just started. Called with the lock of the endpoint.
    pub(super) fn begin(&self) {
        self.is_starting.store(true, Ordering::Relaxed);
    }

    pub(super) fn answers(&self) -> MutexGuard<'_, [ProbeAnswers; 2]> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_probe_refused(&self) -> bool {
        self.answers().iter().any(ProbeAnswers::is_starting)
    }
}
