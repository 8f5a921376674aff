//! Whether a total outage lasts: nothing of an upstream can be reached.
//!
//! Watches are held while it does ([`super::pool::Pool::outage_ended`]). An apiserver that has just
//! been started answers before it knows its own rules: until RBAC is loaded it refuses watches with
//! 403, which makes their clients list, and `/readyz` too, which tells nothing (1.36: for 1.1 s). So an
//! outage ends when an endpoint has been ready for a while, not when it can be connected to:
//!
//! | the endpoints | the outage |
//! |---|---|
//! | none is usable | begins |
//! | one has been ready for [`READY_FOR`] | ends |
//! | one became usable less than [`BLIP`] after it began | ends: no apiserver starts that fast, connections were lost |
//! | one has been usable for [`UNREADY_FOR`] | ends: health never makes things worse than no health |

use std::time::Duration;

use tokio::time::Instant;

/// What comes back sooner was not restarted. kube-apiserver takes 3 s and more.
const BLIP: Duration = Duration::from_secs(2);
/// How long an endpoint must be ready.
pub const READY_FOR: Duration = Duration::from_secs(3);
/// How long a usable endpoint may take to become ready.
const UNREADY_FOR: Duration = Duration::from_secs(10);

/// The best that is known of the endpoints of an upstream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reachable {
    /// None is usable.
    Nothing,
    /// One is usable, none has been ready for [`READY_FOR`].
    Unready,
    /// One has been.
    Ready,
}

/// The outage of an upstream, as one worker sees it.
#[derive(Debug, Clone, Copy, Default)]
pub struct Outage {
    began: Option<Instant>,
    usable_since: Option<Instant>,
}

impl Outage {
    /// Whether it lasts.
    pub fn lasts(&self) -> bool {
        self.began.is_some()
    }

    /// Takes note of what is known now; how long the outage lasted when that ends it.
    pub fn note(&mut self, reachable: Reachable, now: Instant) -> Option<Duration> {
        if reachable == Reachable::Nothing {
            self.began.get_or_insert(now);
            self.usable_since = None;
            return None;
        }
        let began = self.began?;
        let since = *self.usable_since.get_or_insert(now);
        let over =
            reachable == Reachable::Ready || since < began + BLIP || now >= since + UNREADY_FOR;
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
    use Reachable::{Nothing, Ready, Unready};

    #[test]
    fn outage_ends_when_an_endpoint_is_ready_or_usable_for_long() {
        // Milliseconds, what is known then, and whether the outage lasts afterwards.
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
                let lasted_for = outage.note(reachable, zero + Duration::from_millis(ms));
                assert_eq!(outage.lasts(), lasts, "{notes:?} at {ms}");
                let over = Some(Duration::from_millis(ms)).filter(|_| lasted && !lasts);
                assert_eq!(lasted_for, over, "{notes:?} at {ms}");
                lasted = lasts;
            }
        }
    }
}
