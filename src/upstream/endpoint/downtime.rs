//! How long an endpoint was out of service, for `/status`.

use std::time::Duration;

use tokio::time::Instant;

/// Time that an endpoint has spent out of service since it joined the set.
#[derive(Debug, Default)]
pub(super) struct Downtime {
    total: Duration,
    since: Option<Instant>,
    ejections: u64,
}

impl Downtime {
    /// Records whether the endpoint is ejected at `now`.
    pub(super) fn record(&mut self, ejected: bool, now: Instant) {
        if ejected && self.since.is_none() {
            self.since = Some(now);
            self.ejections += 1;
        } else if !ejected && let Some(since) = self.since.take() {
            self.total += now.saturating_duration_since(since);
        }
    }

    /// The total at `now`, including a downtime that has not ended.
    pub(super) fn total(&self, now: Instant) -> Duration {
        self.total + self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since))
    }

    /// Number of downtimes.
    pub(super) fn ejections(&self) -> u64 {
        self.ejections
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn downtime_sums_ejected_periods_including_the_current_one() {
        let (mut downtime, start) = (Downtime::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        for (second, ejected, total, ejections) in [
            (0, false, 0, 0),
            (10, true, 0, 1),
            (12, true, 2, 1),
            (15, false, 5, 1),
            (20, false, 5, 1),
            (30, true, 5, 2),
            (31, true, 6, 2),
        ] {
            downtime.record(ejected, at(second));
            let known = (downtime.total(at(second)).as_secs(), downtime.ejections());
            assert_eq!(known, (total, ejections), "at {second} s");
        }
        assert_eq!(downtime.total(at(40)).as_secs(), 15);
    }
}
