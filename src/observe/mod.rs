//! Metrics, the outcome of each request, log lines and recent state changes.
//!
//! * [`names`] is the table of all metrics, and [`metrics`] owns their registry. The data plane keeps the
//!   handles of [`listener_metrics`], [`endpoint_metrics`] and [`passthrough_metrics`], so that counting is
//!   an atomic addition. The values of [`scrape_metrics`] are read at each scrape.
//! * [`outcome`] records each request exactly once, and [`own_errors`] counts the error responses that
//!   jackstay generated itself.
//! * [`log`] writes lines without blocking the caller. [`rate_limited_warnings`], [`line_quota`] and
//!   [`repeat_filter`] limit how often a line is repeated, and [`redact`] removes secrets.
//! * [`events`] logs and remembers state changes, with the warnings about one fault as few lines
//!   ([`jackstay_core::fault_lines`]); [`history`] keeps ten minutes of figures per endpoint.
//! * [`liveness`] detects event loops that have stalled.

pub mod build;
mod change;
pub mod count_gauge;
pub mod endpoint_metrics;
pub mod events;
mod group_metrics;
pub mod history;
pub mod line_quota;
pub mod listener_metrics;
pub mod liveness;
pub mod log;
pub mod metrics;
pub mod names;
pub mod outcome;
pub mod own_errors;
pub mod passthrough_metrics;
pub mod rate_limited_warnings;
pub mod redact;
mod registry;
pub mod repeat_filter;
pub mod reporter;
pub mod scrape_metrics;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use endpoint_metrics::{EndpointMetrics, StateGauge};
pub use events::{Change, Events};
pub use group_metrics::FailingGauge;
pub use jackstay_core::fault_lines::Loss;
pub use jackstay_core::open_streams::OpenStreams;
pub use jackstay_core::quantity::quantity;
pub use listener_metrics::ListenerMetrics;
pub use liveness::{Liveness, LivenessMonitor};
pub use metrics::{GzipBytes, Metrics};
pub use outcome::{Outcome, Side};
pub use passthrough_metrics::PassthroughMetrics;
pub use rate_limited_warnings::RateLimitedWarnings;
pub use redact::redact_path;
pub use repeat_filter::RepeatFilter;
pub use reporter::Reporter;
pub use scrape_metrics::{CertificateExpiry, ConfiguredSeries};

/// Locks a mutex. A thread that panicked with the lock held is ignored, because each critical section leaves
/// the data consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asserts that the rendered metrics contain `line`.
#[cfg(test)]
fn assert_line(metrics: &Metrics, line: &str) {
    let text = metrics.render();
    assert!(text.lines().any(|rendered| rendered == line), "no {line} in\n{text}");
}
