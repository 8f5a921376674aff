//! The interval of PINGs to an endpoint that limits them ([`jackstay_core::connection::ping_limit`]), shared by its
//! connections.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use jackstay_config::format_duration;
use jackstay_core::connection::ping_limit::longer_interval;

use crate::observe::EndpointMetrics;
use crate::observe::events::{Change, EventKind};

/// The interval in milliseconds; 0 if the endpoint has not complained.
#[derive(Debug, Default)]
pub(super) struct PingLimit(AtomicU64);

impl PingLimit {
    /// The interval, if the endpoint limits PINGs. One atomic load, because each check of a connection reads it.
    pub(super) fn get(&self) -> Option<Duration> {
        Some(self.0.load(Ordering::Relaxed)).filter(|ms| *ms > 0).map(Duration::from_millis)
    }

    /// Takes in a complaint about a connection whose PINGs had the interval `used`, and reports it. `reason` is the
    /// text of its GOAWAY.
    pub(super) fn refused(
        &self,
        used: Duration,
        reason: &str,
        (upstream, endpoint): (&str, &str),
        metrics: &EndpointMetrics,
    ) {
        let Some((before, interval)) = self.complaint(used) else { return };
        metrics.ping_limit(interval);
        let states = [before, interval]
            .map(|interval| format!("a PING every {}", format_duration(interval)));
        metrics.events().changed(&Change {
            kind: EventKind::Endpoint,
            upstream: Some(upstream),
            name: endpoint,
            detail: "",
            from: &states[0],
            to: &states[1],
            reason: &format!(
                "{reason}: the endpoint, or a front end before it, limits PINGs, and health.ping_interval is shorter \
                 than it accepts"
            ),
            effect: "dead paths are noticed by TCP keepalives within 5 s, stopped processes by the next request or \
                     /readyz",
            bad: true,
        });
    }

    /// Returns the interval before and the present one, if it has grown: several connections may complain of the same
    /// interval.
    fn complaint(&self, used: Duration) -> Option<(Duration, Duration)> {
        let longer = longer_interval(used);
        let before = self.0.fetch_max(longer.as_millis() as u64, Ordering::Relaxed);
        let before = Duration::from_millis(before).max(used);
        (longer > before).then_some((before, longer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_grows_once_for_the_complaints_about_one_interval() {
        let (limit, second) = (PingLimit::default(), Duration::from_secs(1));
        assert_eq!(limit.get(), None);
        assert_eq!(limit.complaint(second), Some((second, 4 * second)));
        assert_eq!(limit.complaint(second), None);
        assert_eq!(limit.get(), Some(4 * second));
        assert_eq!(limit.complaint(4 * second), Some((4 * second, 16 * second)));
        // It has grown as far as it does.
        let longest = Duration::from_secs(600);
        assert_eq!(limit.complaint(longest), None);
    }
}
