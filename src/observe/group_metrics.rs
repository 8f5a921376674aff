//! The metrics of API groups. The names of groups come from requests, so their number is bounded.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use metrics::Gauge;

use super::names;
use super::registry::Registry;

/// Maximum number of groups that are label values. Further ones are counted as [`OTHER`].
const MAX_GROUPS: usize = 32;
/// The label of all further groups.
const OTHER: &str = "other";

/// Counts a group that fails at an endpoint, until it is dropped.
pub struct FailingGauge(Gauge);

impl std::fmt::Debug for FailingGauge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("FailingGauge")
    }
}

impl Drop for FailingGauge {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

/// The metrics of the groups of all upstreams.
#[derive(Debug)]
pub(super) struct GroupMetrics {
    registry: Arc<Registry>,
    /// The groups that are label values.
    named: Mutex<BTreeSet<Box<str>>>,
}

impl GroupMetrics {
    pub(super) fn new(registry: &Arc<Registry>) -> Self {
        Self { registry: Arc::clone(registry), named: Mutex::default() }
    }

    /// Counts a failed request.
    pub(super) fn failed(&self, upstream: &str, endpoint: &str, group: &str) {
        let labels = [upstream, endpoint, self.label(group)];
        self.registry.count(&names::GROUP_FAILURES, &labels, 1);
    }

    /// Counts a group that fails, until the gauge is dropped.
    pub(super) fn fails(&self, upstream: &str, endpoint: &str, group: &str) -> FailingGauge {
        let gauge =
            self.registry.gauge(&names::GROUP_FAILING, &[upstream, endpoint, self.label(group)]);
        gauge.increment(1.0);
        FailingGauge(gauge)
    }

    fn label<'a>(&self, group: &'a str) -> &'a str {
        let mut named = self.named.lock().unwrap_or_else(PoisonError::into_inner);
        if named.contains(group) {
            return group;
        }
        if named.len() >= MAX_GROUPS {
            return OTHER;
        }
        named.insert(group.into());
        group
    }
}
