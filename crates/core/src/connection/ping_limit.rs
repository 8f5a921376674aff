//! Endpoints that limit PINGs: the interval grows with each complaint.
//!
//! gRPC servers, and front ends with the same policy, close a connection whose peer sends PINGs more often than they
//! accept: with GOAWAY, `ENHANCE_YOUR_CALM` and the debug data `too_many_pings` (gRFC A8). By default they accept one PING in
//! 5 minutes without data, and two more. A gRPC client doubles its interval then. Here it grows faster, because each
//! complaint ends a connection with all its streams, and because the kernel's keepalive probes watch the path meanwhile.

use std::time::Duration;

/// The interval does not grow beyond it: twice what gRPC servers accept by default.
pub const LONGEST_INTERVAL: Duration = Duration::from_secs(600);

/// The factor by which the interval grows.
const GROWTH: u32 = 4;

/// A connection that was idle for this many intervals has sent nothing but PINGs.
const IDLE_INTERVALS: u32 = 2;

/// Whether a GOAWAY with `ENHANCE_YOUR_CALM` complains of PINGs: its debug data names them, or it has none and the
/// connection, idle for `idle`, has sent only PINGs in `interval`. Other reasons for that code are resets and header
/// lists (RFC 9113 section 10.5).
pub fn is_complaint(debug_data: &str, idle: Option<Duration>, interval: Duration) -> bool {
    match debug_data {
        "" => idle.is_some_and(|idle| idle >= interval * IDLE_INTERVALS),
        text => text.to_ascii_lowercase().contains("ping"),
    }
}

/// The interval after a complaint about a connection whose PINGs had the interval `used`.
pub fn longer_interval(used: Duration) -> Duration {
    (used * GROWTH).min(LONGEST_INTERVAL).max(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaint_names_pings_or_meets_a_connection_with_nothing_else() {
        let second = Duration::from_secs(1);
        for (debug_data, idle, expected) in [
            ("too_many_pings", None, true),
            ("Too many PING frames", None, true),
            ("", Some(2 * second), true),
            ("", Some(second), false),
            ("", None, false),
            ("too_many_internal_resets", Some(9 * second), false),
        ] {
            assert_eq!(is_complaint(debug_data, idle, second), expected, "{debug_data:?} {idle:?}");
        }
    }

    #[test]
    fn interval_exceeds_five_minutes_after_five_complaints_and_ends_at_ten() {
        let mut interval = Duration::from_secs(1);
        let mut seconds = Vec::new();
        for _ in 0..6 {
            interval = longer_interval(interval);
            seconds.push(interval.as_secs());
        }
        assert_eq!(seconds, [4, 16, 64, 256, 600, 600]);
        assert_eq!(longer_interval(Duration::from_secs(900)), Duration::from_secs(900));
    }
}
