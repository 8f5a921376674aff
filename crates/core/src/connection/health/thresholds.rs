//! The thresholds of connection health: fixed ones and configured ones.

use std::time::{Duration, Instant};

/// A PING is sent when a request has waited this long without a byte arriving on its connection.
pub const HEAD_WAIT: Duration = Duration::from_millis(100);
/// A PING is sent when bytes have arrived since the last PING and then none for this long.
pub const PING_AFTER_SILENCE: Duration = Duration::from_millis(250);
/// A PING is sent when another connection has shown an event this long ago that this one should have shown, too, without
/// a byte arriving. The watch caches of apiservers are some milliseconds apart.
pub const EVENT_WAIT: Duration = Duration::from_millis(100);
/// Minimum time from a PONG to a PING for such an event. A selector may exclude the event, and then it never arrives.
pub const EVENT_PING_PAUSE: Duration = Duration::from_millis(300);
/// Pause between two checks while a PING is outstanding.
pub const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Without evidence of life of the path or of the process for this long, or for half of `dead_after` if that
/// is shorter, a connection is not used even if no other is left. By then, five retransmissions of a thin
/// stream were sent.
pub const SILENT_AFTER: Duration = Duration::from_secs(1);
/// Age of a PING at which the endpoint counts the connection as unanswered, and at which keepalive probes
/// are requested if every sent byte is acknowledged. By then, the PING was transmitted three times: at
/// 5 % packet loss each way, all three are lost once in a thousand PINGs.
pub const PROBE_AFTER: Duration = Duration::from_millis(500);
/// While PINGs are limited, more keepalive probes are requested when no segment has arrived for this long. On an idle
/// connection the kernel sends one each second.
pub const PATH_QUIET_AFTER: Duration = Duration::from_millis(1250);
/// While PINGs are limited, one is due when no segment has arrived for this long. By then at least eight probes were
/// sent: at 5 % packet loss each way, all are lost once in 10^8 times.
pub const PATH_SILENT_AFTER: Duration = Duration::from_secs(2);
/// A process counts as stopped if its kernel answers but no PONG and no frame arrives for this long.
pub const STOPPED_AFTER: Duration = Duration::from_secs(5);
/// Time after [`STOPPED_AFTER`] at which requests fail that must not be sent twice. Their clients have
/// time left: the lease updates of kubelet and of leader election have a timeout of 10 s.
pub const WRITE_PATIENCE: Duration = Duration::from_secs(2);
/// Without a PONG or another frame for this long, a connection is dead even if its bytes are
/// acknowledged: a TCP load balancer acknowledges bytes for a dead apiserver.
pub const SILENT_DEATH: Duration = Duration::from_secs(20);
/// A check is late if it runs this long after it was due: the process may not have been scheduled.
pub const LATE_CHECK: Duration = Duration::from_millis(100);
/// How long verdicts are withheld after a late check, so that received bytes are read first.
pub const VERDICT_PAUSE: Duration = Duration::from_millis(300);

/// Configured thresholds of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thresholds {
    /// Longest pause between a PONG and the next PING.
    pub ping_interval: Duration,
    /// Fixed time after which a PING is late; `None` derives it from the RTT.
    pub suspect_after: Option<Duration>,
    /// The path is lost when a PING is outstanding for this long without evidence of life.
    pub dead_after: Duration,
    /// A connection with pinned streams is closed once its path is lost for this long.
    pub tunnel_dead_after: Duration,
}

impl Thresholds {
    /// When the next PING is due after a PONG at `now`: at most `ping_interval` later, at least half of it.
    ///
    /// The times are multiples of half of the interval, counted from `grid`. The connections of an endpoint have
    /// the same `grid`, so that one wake-up of their thread serves all of them.
    pub fn next_ping(&self, grid: Instant, now: Instant) -> Instant {
        let step = (self.ping_interval / 2).as_nanos().max(1);
        let latest = now + self.ping_interval;
        let beyond = latest.saturating_duration_since(grid).as_nanos() % step;
        now + self.ping_interval.saturating_sub(Duration::from_nanos(beyond as u64))
    }
}
