//! Total outages: no endpoint of an upstream is usable.
//!
//! Watches are held meanwhile ([`super::pool::Pool::outage_ended`]). An apiserver that has just started
//! answers before its RBAC rules are loaded: it refuses watches with 403, which makes their clients
//! list, and `/readyz` too (Kubernetes 1.36: for 1.1 s). So an outage ends when an endpoint has been
//! ready for a while, not when it can be connected to:
//!
//! | the endpoints | the outage |
//! |---|---|
//! | none is usable | begins |
//! | one has been ready for [`READY_FOR`] | ends |
//! | one became usable less than [`BLIP`] after it began | ends: no apiserver starts that fast, so only connections were lost |
//! | one has been usable for [`UNREADY_FOR`] | ends: health must not make things worse than no health |

use std::time::Duration;

use tokio::time::Instant;

/// An endpoint that is usable again sooner was not restarted: kube-apiserver takes 3 s and more.
const BLIP: Duration = Duration::from_secs(2);
/// How long an endpoint must be ready.
pub const READY_FOR: Duration = Duration::from_secs(3);
/// How long a usable endpoint may take to become ready.
const UNREADY_FOR: Duration = Duration::from_secs(10);

/// The best state of the endpoints of an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reachability {
    /// None is usable.
    Nothing,
    /// One is usable, none has been ready for [`READY_FOR`].
    Unready,
    /// One has been ready for [`READY_FOR`].
    Ready,
}

/// The outage of an upstream, as one worker sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outage {
    began: Option<Instant>,
    usable_since: Option<Instant>,
}

impl Outage {
    pub fn is_active(&self) -> bool {
        self.began.is_some()
    }

    /// Takes in the reachability now; returns how long the outage lasted if this ends it.
    pub fn observe(&mut self, reachable: Reachability, now: Instant) -> Option<Duration> {
        if reachable == Reachability::Nothing {
            self.began.get_or_insert(now);
            self.usable_since = None;
            return None;
        }
        let began = self.began?;
        let since = *self.usable_since.get_or_insert(now);
        let over =
            reachable == Reachability::Ready || since < began + BLIP || now >= since + UNREADY_FOR;
        if !over {
            return None;
        }
        *self = Self::default();
        Some(now.saturating_duration_since(began))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Reachability::{Nothing, Ready, Unready};

    #[test]
    fn outage_ends_when_an_endpoint_is_ready_or_usable_for_long() {
        // Time in milliseconds, reachability, and whether the outage lasts afterwards.
        for notes in [
            &[(0, Ready, false), (1, Unready, false), (20_000, Unready, false)][..],
            &[(0, Nothing, true), (60_000, Nothing, true), (60_001, Ready, false)],
            // Lost connections, not a restart.
            &[(0, Nothing, true), (1_900, Unready, false)],
            &[(0, Nothing, true), (5_000, Unready, true), (7_000, Ready, false)],
            &[(0, Nothing, true), (5_000, Unready, true), (14_999, Unready, true)],
            &[(0, Nothing, true), (5_000, Unready, true), (15_000, Unready, false)],
            // It goes down again before it is ready.
            &[
                (0, Nothing, true),
                (5_000, Unready, true),
                (6_000, Nothing, true),
                (7_000, Unready, true),
                (16_999, Unready, true),
            ],
        ] {
            let zero = Instant::now();
            let mut outage = Outage::default();
            let mut lasted = false;
            for &(ms, reachable, lasts) in notes {
                let lasted_for = outage.observe(reachable, zero + Duration::from_millis(ms));
                assert_eq!(outage.is_active(), lasts, "{notes:?} at {ms}");
                let over = Some(Duration::from_millis(ms)).filter(|_| lasted && !lasts);
                assert_eq!(lasted_for, over, "{notes:?} at {ms}");
                lasted = lasts;
            }
        }
    }
}
