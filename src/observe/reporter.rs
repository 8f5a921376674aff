//! Where the parts of an upstream count and report their changes.

use super::metrics::Metrics;

/// See the module documentation.
#[derive(Debug, Clone, Copy)]
pub struct Reporter<'a> {
    /// The name of the upstream.
    pub upstream: &'a str,
    /// The metrics of the process.
    pub metrics: &'a Metrics,
}
