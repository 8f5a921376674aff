//! What an endpoint's facts say about its state, and how long to wait before it is tried again.

use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::availability::{Downtime, ReadyzCheck};
use crate::observe::EndpointStateGauge;

/// State of an endpoint, best first: the order is the order of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum EndpointState {
    /// First choice.
    Ready,
    /// Nothing is known yet.
    Connecting,
    /// Alive, but not well by its own account.
    Degraded,
    /// Connected, and does not answer.
    Suspect,
    /// Cannot be connected to.
    Ejected,
    /// Does not speak HTTP/2.
    NoH2,
    /// Removed from the set.
    Leaving,
}

impl EndpointState {
    /// Every state, for metrics that show one series each.
    pub const ALL: [Self; 7] = [
        Self::Ready,
        Self::Connecting,
        Self::Degraded,
        Self::Suspect,
        Self::Ejected,
        Self::NoH2,
        Self::Leaving,
    ];

    /// Name in logs, metrics and status.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Connecting => "connecting",
            Self::Degraded => "degraded",
            Self::Suspect => "suspect",
            Self::Ejected => "ejected",
            Self::NoH2 => "no-h2",
            Self::Leaving => "leaving",
        }
    }

    /// What being in it means, for the log.
    pub(super) fn effect(self) -> &'static str {
        match self {
            Self::Ready => "takes requests",
            Self::Connecting => "is tried; requests go elsewhere while they can",
            Self::Degraded => {
                "no new request while another is ready; nothing is cut, watches move away"
            }
            Self::Suspect => "no new request while another is there; a fresh connection is tried",
            Self::Ejected | Self::NoH2 => "no request goes there; tried again with backoff",
            Self::Leaving => "no new request; its connections drain",
        }
    }

    pub(super) fn from_u8(value: u8) -> Self {
        match value {
            0 => Self::Ready,
            2 => Self::Degraded,
            3 => Self::Suspect,
            4 => Self::Ejected,
            5 => Self::NoH2,
            6 => Self::Leaving,
            _ => Self::Connecting,
        }
    }
}

/// What happened to a connect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConnectFailure {
    /// Refused, reset, unreachable, or nonsense: an answer, and a bad one.
    Refused(String),
    /// TLS was answered and not agreed on: a certificate that we do not trust, mostly. No request
    /// goes there, but it is alive.
    TlsFailed(String),
    /// For want of something of ours ([`crate::net::process::resource_limits`]): it says nothing about the endpoint.
    LocalShortage(String),
    /// Not done in time.
    Timeout(String),
    /// The peer did not choose `h2` by ALPN.
    NoH2(String),
}

impl ConnectFailure {
    /// Why, in words that name the step.
    pub fn why(&self) -> &str {
        match self {
            Self::Refused(why)
            | Self::TlsFailed(why)
            | Self::LocalShortage(why)
            | Self::Timeout(why)
            | Self::NoH2(why) => why,
        }
    }
}

/// Shortest pause before an ejected endpoint is tried again.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest pause while other endpoints do the work.
const BACKOFF_MAX: Duration = Duration::from_secs(5);
/// Longest pause while nothing at all is usable: then every client waits for this.
const BACKOFF_MAX_ALONE: Duration = Duration::from_millis(800);
/// Pause after the `failures`-th failed connect in a row; `jitter` is in 0..1.
pub fn backoff(failures: u32, alone: bool, jitter: f64) -> Duration {
    let cap = if alone { BACKOFF_MAX_ALONE } else { BACKOFF_MAX };
    let doubled = BACKOFF_MIN.saturating_mul(1 << failures.saturating_sub(1).min(10));
    doubled.min(cap).mul_f64(0.5 + jitter / 2.0)
}

/// What is known.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) transport: Transport,
    /// Live connections, of all workers and of the prober: here, so that nobody can come between the
    /// end of the last one and what it means.
    pub(super) live: usize,
    /// Those of them whose PING is not answered.
    pub(super) unanswered: usize,
    /// That is so of all of them; in words.
    pub(super) suspect: Option<String>,
    /// Why the last one of them was lost, while there is none.
    pub(super) lost: Option<String>,
    /// The same, and when, where its PINGs were not answered.
    pub(super) given_up: Option<(Instant, String)>,
    pub(super) readyz: Readyz,
    /// When the first of the latest probes failed, or had kept us waiting for too long.
    pub(super) probe_failing_since: Option<Instant>,
    /// When the latest probe was asked that was right.
    pub(super) last_ready_probe: Option<Instant>,
    pub(super) leaving: bool,
    /// Its kernel may answer, but nobody behind it does; why we think so.
    pub(super) silent: Option<String>,
    /// What there is to die.
    pub(super) lifecycle: Lifecycle,
    /// It was not usable, or not well, since it was last ready.
    pub(super) was_out: bool,
    pub(super) failures: u32,
    pub(super) slow_failures: u32,
    /// What we lacked for the latest attempt to connect.
    pub(super) shortage: Option<String>,
    /// When the last failed connect ended, or an attempt on a failing endpoint was claimed.
    pub(super) tried: Option<Instant>,
    /// When the last failed connect ended.
    pub(super) failed: Option<Instant>,
    pub(super) jitter: f64,
    pub(super) since: SystemTime,
    pub(super) reason: String,
    pub(super) last_ejection: Option<(SystemTime, String)>,
    pub(super) downtime: Downtime,
    pub(super) last_check: Option<ReadyzCheck>,
    pub(super) gauge: EndpointStateGauge,
}

/// Where an endpoint is between its first connection and its death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lifecycle {
    /// It was not up since it last died.
    New,
    /// It was.
    Alive,
    /// It was, and said that it ends: what runs there may finish.
    Ending,
}

#[derive(Debug, PartialEq)]
pub(super) enum Transport {
    Unknown,
    Up,
    Down(String),
    NoH2(String),
}

#[derive(Debug, PartialEq)]
pub(super) enum Readyz {
    Unknown,
    Ok,
    Failing(String),
    /// Nobody asks; why.
    NotAsked(&'static str),
}

impl Facts {
    /// A connection lives from now on.
    pub(super) fn opened(&mut self) {
        self.live += 1;
        self.connected();
        self.suspect_if_silent();
    }

    /// One that [`Self::opened`] counted does not any more; whether its PINGs were answered, and why.
    pub(super) fn closed(&mut self, answered: bool, why: &str, now: Instant) {
        self.live = self.live.saturating_sub(1);
        if self.live == 0 && !answered {
            self.given_up = Some((now, why.to_owned()));
        }
        self.unanswered = self.unanswered.saturating_sub(usize::from(!answered));
        if self.live == 0 && self.transport == Transport::Up {
            self.transport = Transport::Unknown;
            self.lost = Some(format!("not connected: {why}"));
        }
        self.suspect_if_silent();
    }

    /// PINGs on one of them are answered again, or no longer.
    pub(super) fn answers(&mut self, answers: bool) {
        self.unanswered =
            if answers { self.unanswered.saturating_sub(1) } else { self.unanswered + 1 };
        self.suspect_if_silent();
    }

    fn suspect_if_silent(&mut self) {
        self.suspect = (self.live > 0 && self.unanswered >= self.live)
            .then(|| format!("PING unanswered on every connection ({})", self.live));
    }

    /// A fresh connection is up.
    pub(super) fn connected(&mut self) {
        self.failures = 0;
        self.slow_failures = 0;
        self.shortage = None;
        self.silent = None;
        self.lost = None;
        self.given_up = None;
        self.lifecycle = Lifecycle::Alive;
        if self.transport != Transport::Up {
            // What was known of its readiness was known of an earlier life. That it is not asked
            // holds for this one too.
            if !matches!(self.readyz, Readyz::NotAsked(_)) {
                self.readyz = Readyz::Unknown;
            }
            self.transport = Transport::Up;
        }
    }

    /// What is known of its readiness, for `/status`.
    pub(super) fn readiness(&self) -> &'static str {
        match (&self.transport, &self.readyz) {
            (Transport::Up, Readyz::Ok) => "ok",
            (Transport::Up, Readyz::Failing(_)) => "failing",
            _ => "unknown",
        }
    }

    pub(super) fn state(&self) -> (EndpointState, &str) {
        match (&self.transport, &self.readyz) {
            _ if self.leaving => (EndpointState::Leaving, "removed from the set"),
            (Transport::Down(why), _) => (EndpointState::Ejected, why),
            _ if self.silent.is_some() => {
                (EndpointState::Ejected, self.silent.as_deref().unwrap_or_default())
            }
            (Transport::NoH2(why), _) => (EndpointState::NoH2, why),
            (Transport::Unknown, _) => {
                let why = self.shortage.as_deref().or(self.lost.as_deref());
                (EndpointState::Connecting, why.unwrap_or("not connected"))
            }
            (Transport::Up, _) if self.suspect.is_some() => {
                (EndpointState::Suspect, self.suspect.as_deref().unwrap_or_default())
            }
            (Transport::Up, Readyz::Failing(why)) => (EndpointState::Degraded, why),
            (Transport::Up, Readyz::Ok) => (EndpointState::Ready, "/readyz is ok"),
            (Transport::Up, Readyz::NotAsked(why)) => (EndpointState::Ready, why),
            (Transport::Up, Readyz::Unknown) => {
                (EndpointState::Connecting, "connected, /readyz not answered yet")
            }
        }
    }
}
