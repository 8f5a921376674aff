//! When the timer of what was sent ends: tail loss probes and retransmissions (RFC 8985, section 7, and RFC 6298), and
//! probes of a closed window.

use std::time::{Duration, Instant};

use super::socket_state::MIN_RTO;
use super::tcp::{End, MAX_RTO, MSS};

/// The least time of a tail loss probe besides two round trips (Linux, `TCP_TIMEOUT_MIN` with 250 ticks a second).
const MIN_PROBE_TIMEOUT: Duration = Duration::from_millis(8);

impl End {
    /// When the timer ends that starts now.
    pub(super) fn timer_from(&self, now: Instant) -> Instant {
        let Some(first) = self.in_flight.front() else {
            // The timeout of probes of a closed window doubles, and that of retransmissions does not (Linux,
            // `tcp_probe0_when`).
            let doubled = self.rto.saturating_mul(1 << self.socket.window_backoff.min(16));
            return now + doubled.min(MAX_RTO);
        };
        if self.retransmits > 0 {
            return now + self.rto;
        }
        // The retransmission timeout counts from the oldest segment (Linux, `tcp_rto_delta_us`).
        let timeout = (first.sent_at.unwrap_or(now) + self.rto).max(now);
        if self.may_probe_tail() { timeout.min(now + self.probe_timeout()) } else { timeout }
    }

    /// Whether the timer is that of a tail loss probe. One is sent before the first retransmission timeout, unless a
    /// segment is known to be lost.
    pub(super) fn may_probe_tail(&self) -> bool {
        let is_intact = self.in_flight.front().is_some_and(|first| !first.repeated);
        is_intact && self.retransmits == 0 && !self.socket.tail_probe_sent
    }

    /// The timeout of a tail loss probe (Linux, `tcp_schedule_loss_probe`): a single packet may have a delayed
    /// acknowledgement.
    fn probe_timeout(&self) -> Duration {
        let is_single = self.in_flight.len() == 1 && self.bytes_in_flight <= MSS;
        let rest = if is_single { MIN_RTO } else { MIN_PROBE_TIMEOUT };
        2 * self.socket.round_trip.smoothed + rest
    }
}
