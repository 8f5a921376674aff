//! Total outages: no endpoint of an upstream is usable. Three parts act on an outage:
//!
//! | part | begins | ends |
//! |---|---|---|
//! | each worker, for the watches that it holds ([`Outage`]) | at once | by the table below |
//! | the log and the events ([`report`]) | after 0.75 s, so that a lost connection is none | when an endpoint has been usable for 0.75 s |
//! | the lines about single endpoints, which that of the outage covers ([`crate::fault_lines`]) | with the log | with the log |
//!
//! Watches are held during an outage. An apiserver that has just started accepts requests before its RBAC rules are
//! loaded, and refuses watches and `/readyz` with 403 (Kubernetes 1.36: for 1.1 s). A client whose watch is refused
//! lists again. So an outage does not end when an endpoint accepts connections, but when one has been ready for a
//! while:
//!
//! | endpoints | outage |
//! |---|---|
//! | none is usable | begins |
//! | one has been ready for [`READY_FOR`] | ends |
//! | one became usable less than [`RESTART_TIME`] after the outage began | ends: no apiserver starts that fast, so only connections were lost |
//! | one has been usable for [`UNREADY_LIMIT`] | ends: waiting longer could do more harm than 403 responses |

pub mod report;

use std::time::{Duration, Instant};

/// An endpoint that is usable again within this time was not restarted: kube-apiserver takes 3 s or more
/// to start.
const RESTART_TIME: Duration = Duration::from_secs(2);
/// How long an endpoint must have been ready.
pub const READY_FOR: Duration = Duration::from_secs(3);
/// How long the outage waits for a usable endpoint to become ready.
const UNREADY_LIMIT: Duration = Duration::from_secs(10);

/// The best state of the endpoints of an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reachability {
    /// No endpoint is usable.
    Unreachable,
    /// An endpoint is usable, but none has been ready for [`READY_FOR`].
    Unready,
    /// An endpoint has been ready for [`READY_FOR`].
    Ready,
}

/// The total outage of an upstream, if there is one, from the view of one worker.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outage {
    began: Option<Instant>,
    usable_since: Option<Instant>,
}

impl Outage {
    /// Whether an outage is in progress.
    pub fn is_active(&self) -> bool {
        self.began.is_some()
    }

    /// Updates the outage. When it ends, returns why held watches can resume, for the log.
    pub fn observe(&mut self, reachability: Reachability, now: Instant) -> Option<&'static str> {
        if reachability == Reachability::Unreachable {
            self.began.get_or_insert(now);
            self.usable_since = None;
            return None;
        }
        let began = self.began?;
        let usable_since = *self.usable_since.get_or_insert(now);
        let reason = if reachability == Reachability::Ready {
            "an apiserver has been ready for 3 s"
        } else if usable_since < began + RESTART_TIME {
            "an apiserver was usable again within 2 s"
        } else if now >= usable_since + UNREADY_LIMIT {
            "an apiserver has been usable for 10 s, though not ready"
        } else {
            return None;
        };
        *self = Self::default();
        Some(reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Reachability::{Ready, Unreachable, Unready};

    #[test]
    fn observe_ends_the_outage_when_an_endpoint_is_ready_or_usable_for_long() {
        // Time in milliseconds, reachability, and whether the outage is active afterwards.
        for steps in [
            &[(0, Ready, false), (1, Unready, false), (20_000, Unready, false)][..],
            &[(0, Unreachable, true), (60_000, Unreachable, true), (60_001, Ready, false)],
            // The connections were lost, but no apiserver was restarted.
            &[(0, Unreachable, true), (1_900, Unready, false)],
            &[(0, Unreachable, true), (5_000, Unready, true), (7_000, Ready, false)],
            &[(0, Unreachable, true), (5_000, Unready, true), (14_999, Unready, true)],
            &[(0, Unreachable, true), (5_000, Unready, true), (15_000, Unready, false)],
            // The endpoint becomes unusable again before it is ready.
            &[
                (0, Unreachable, true),
                (5_000, Unready, true),
                (6_000, Unreachable, true),
                (7_000, Unready, true),
                (16_999, Unready, true),
            ],
        ] {
            let start = Instant::now();
            let mut outage = Outage::default();
            let mut was_active = false;
            for &(ms, reachability, active) in steps {
                let time = Duration::from_millis(ms);
                let reason = outage.observe(reachability, start + time);
                assert_eq!(outage.is_active(), active, "{steps:?} at {ms}");
                assert_eq!(reason.is_some(), was_active && !active, "{steps:?} at {ms}");
                was_active = active;
            }
        }
    }
}
