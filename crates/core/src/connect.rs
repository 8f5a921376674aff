//! Connect attempts to an endpoint: why one failed, how long one may take, and when the next one may start.
//!
//! All workers and the prober share one [`ConnectBackoff`] for each endpoint, in all credential classes.
//! A SYN costs an apiserver little, but a TLS handshake costs it about a millisecond of CPU. When all
//! apiservers are down and thousands of nodes retry, their handshakes can keep a starting apiserver
//! overloaded. Therefore, after a failed connect and while no endpoint is usable, a process has at most one
//! handshake with each endpoint in progress. The connect timeout bounds each handshake, and it doubles
//! after each timeout.

use std::fmt;
use std::time::{Duration, Instant};

use crate::backoff::Backoff;

/// A failed connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectFailure {
    /// Decides what the failure means for the endpoint.
    pub kind: ConnectFailureKind,
    /// Text that names the failed step and the address.
    pub reason: String,
}

impl ConnectFailure {
    /// A failure of this kind.
    pub fn new(kind: ConnectFailureKind, reason: impl Into<String>) -> Self {
        Self { kind, reason: reason.into() }
    }
}

/// Why a connect failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectFailureKind {
    /// Any failure but those below: refused, reset, unreachable, closed, or a protocol violation.
    Failed,
    /// The peer answered, but TLS failed, mostly because its certificate is not trusted. The
    /// endpoint takes no requests, but its process is running.
    TlsFailed,
    /// The same at an endpoint to which only flows go. Their clients make TLS connections of their own.
    Unverified,
    /// A resource of this host is exhausted
    /// (descriptors, memory, ports); the endpoint is not at fault.
    LocalShortage,
    /// The connect did not complete within its timeout.
    Timeout,
    /// The peer did not choose `h2` by ALPN.
    NoH2,
}

impl ConnectFailureKind {
    /// Value of the `outcome` label of the dial counter.
    pub fn metric_label(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::TlsFailed | Self::Unverified => "tls",
            Self::LocalShortage => "local",
            Self::Timeout => "timeout",
            Self::NoH2 => "no_h2",
        }
    }
}

/// The time limit of one connect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectTimeout {
    limit: Duration,
    /// `connect_timeout` of the configuration, from which the limit is derived; `None` for a fixed limit.
    configured: Option<Duration>,
}

impl ConnectTimeout {
    /// A fixed limit.
    pub fn fixed(limit: Duration) -> Self {
        Self { limit, configured: None }
    }

    /// The limit of a connect that may take longer by `delay`.
    #[must_use]
    pub fn later(self, delay: Duration) -> Self {
        Self { limit: self.limit + delay, ..self }
    }

    /// How long a connect may take.
    pub fn limit(self) -> Duration {
        self.limit
    }
}

impl fmt::Display for ConnectTimeout {
    /// `within 10s (connect_timeout 3s, raised after timeouts or on a slow line)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "within {:?}", self.limit)?;
        match self.configured {
            Some(configured) if configured < self.limit => {
                write!(
                    f,
                    " (connect_timeout {configured:?}, raised after timeouts or on a slow line)"
                )
            }
            _ => Ok(()),
        }
    }
}

/// Upper limit of the doubled connect timeout, unless `connect_timeout` is longer.
const CONNECT_TIMEOUT_MAX: Duration = Duration::from_secs(10);
/// The connect timeout doubles no more often than this.
const MAX_DOUBLINGS: u32 = 4;
/// Pause after the first failed connect, before jitter.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest pause while another endpoint is usable, before jitter.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Longest pause while no endpoint is usable, before jitter. All clients wait for the next success.
const BACKOFF_MAX_NONE_USABLE: Duration = Duration::from_millis(800);

/// Pause after this number of failed connects in a row. `jitter`, in 0..1, shortens the pause to at least
/// half of its length.
pub fn backoff(failures: u32, none_usable: bool, jitter: f64) -> Duration {
    let cap = if none_usable { BACKOFF_MAX_NONE_USABLE } else { BACKOFF_MAX };
    Backoff::new(BACKOFF_MIN, cap).with_factors(0.5, 1.0).after(failures).pause_at(jitter)
}

/// Counts failed connects in a row, and decides when the next attempt may start.
#[derive(Debug, Default)]
pub struct ConnectBackoff {
    failures: u32,
    timeouts: u32,
    /// When the last failed connect ended or the last attempt was claimed.
    last_attempt: Option<Instant>,
    last_failure: Option<Instant>,
    /// The argument of [`backoff`], a new random number after each failure.
    jitter: f64,
}

impl ConnectBackoff {
    /// Claims the next attempt; returns whether it may start. After a failure it may not start before the
    /// pause is over. If also `none_usable`, it may not start while `handshakes` are in progress.
    pub fn claim(&mut self, none_usable: bool, handshakes: usize, now: Instant) -> bool {
        if self.failures == 0 {
            return true;
        }
        if none_usable && handshakes > 0 {
            return false;
        }
        let pause = backoff(self.failures, none_usable, self.jitter);
        if self.last_attempt.is_some_and(|last| now < last + pause) {
            return false;
        }
        self.last_attempt = Some(now);
        true
    }

    /// Records a failed connect.
    pub fn failed(&mut self, kind: ConnectFailureKind, rng: &mut fastrand::Rng, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        if kind == ConnectFailureKind::Timeout {
            self.timeouts = self.timeouts.saturating_add(1);
        }
        (self.last_attempt, self.last_failure) = (Some(now), Some(now));
        self.jitter = rng.f64();
    }

    /// Records a connect that succeeded: the next one may start at once, with the configured limit.
    pub fn succeeded(&mut self) {
        (self.failures, self.timeouts) = (0, 0);
    }

    /// The limit of the next connect: `configured`, doubled for each timeout since the last success.
    pub fn timeout(&self, configured: Duration) -> ConnectTimeout {
        let limits = Backoff::new(configured, CONNECT_TIMEOUT_MAX.max(configured));
        let limit = limits.after(1 + self.timeouts.min(MAX_DOUBLINGS)).pause();
        ConnectTimeout { limit, configured: Some(configured) }
    }

    /// Whether a connect has timed out since the last success.
    pub fn has_timed_out(&self) -> bool {
        self.timeouts > 0
    }

    /// When the last connect failed, unless one has succeeded since.
    pub fn last_failure(&self) -> Option<Instant> {
        self.last_failure.filter(|_| self.failures > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connect_timeout_display_after_timeouts_names_the_configured_value() {
        let configured = Duration::from_secs(3);
        let mut backoff = ConnectBackoff::default();
        assert_eq!(backoff.timeout(configured).to_string(), "within 3s");
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..2 {
            backoff.failed(ConnectFailureKind::Timeout, &mut rng, Instant::now());
        }
        let text = backoff.timeout(configured).to_string();
        assert_eq!(
            text,
            "within 10s (connect_timeout 3s, raised after timeouts or on a slow line)"
        );
        assert_eq!(ConnectTimeout::fixed(configured).to_string(), "within 3s");
    }
}
