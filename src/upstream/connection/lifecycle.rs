//! The state of a connection, why it drains, and what goes with it.

use std::cell::{Cell, RefCell};

use tokio::time::Instant;

use crate::observe::StateGauge;
use crate::upstream::health::ConnectionState;

/// Why a connection takes no new streams any more, or is closed, although it works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainReason {
    /// Nothing has used its class for a while.
    Idle,
    /// Its identity or upstream was removed from the configuration.
    ConfigurationRemoved,
    /// Its credential was replaced.
    CertificateRotated,
    /// Its endpoint was removed from the set.
    EndpointRemoved,
    /// The prober does not need it any more.
    ProbingEnded,
    /// The prober got no response on it.
    ProbeFailed,
    /// A fresh connection to the same endpoint works, this one does not.
    Superseded,
}

/// How urgently streams that can move should leave a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainUrgency {
    /// It delivers nothing, or soon may not: its process is stopped, or its endpoint is degraded.
    Immediate,
    /// It works, but its certificate is old or its endpoint was removed.
    Relaxed,
}

impl DrainReason {
    /// Text for the log and `/status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::ConfigurationRemoved => "removed from the configuration",
            Self::CertificateRotated => "certificate rotated",
            Self::EndpointRemoved => "endpoint removed",
            Self::ProbingEnded => "no longer probed",
            Self::ProbeFailed => "probe failed",
            Self::Superseded => "a fresh connection works, this one does not",
        }
    }

    /// How urgently streams should move to another connection; `None` where they may finish: no
    /// stream is left, or there is no other connection to move to.
    pub fn urgency(self) -> Option<DrainUrgency> {
        match self {
            Self::Idle | Self::ConfigurationRemoved => None,
            Self::CertificateRotated
            | Self::EndpointRemoved
            | Self::ProbingEnded
            | Self::ProbeFailed
            | Self::Superseded => Some(DrainUrgency::Relaxed),
        }
    }
}

/// The state of a connection and what goes with it.
pub(super) struct ConnectionLifecycle {
    pub(super) state: Cell<ConnectionState>,
    /// Since when its PING has been late; draining and death keep it.
    pub(super) suspect_since: Cell<Option<Instant>>,
    /// The gauge of its state, until it is dead.
    gauge: RefCell<Option<StateGauge>>,
    /// Whether the endpoint counts it as live.
    pub(super) counted: Cell<bool>,
    /// Whether its PINGs are answered, as reported to the endpoint.
    pub(super) responds: Cell<bool>,
    pub(super) path_unresponsive: Cell<bool>,
    /// Whether requests end that wait for a response head and must not be sent twice.
    pub(super) fails_unsafe_requests: Cell<bool>,
    /// Why it is unresponsive.
    pub(super) unresponsive_reason: Cell<&'static str>,
    pub(super) drain_urgency: Cell<Option<DrainUrgency>>,
    pub(super) close_requested: Cell<Option<DrainReason>>,
    /// Its end is neither an event nor a sign that the endpoint fails.
    pub(super) end_expected: Cell<bool>,
}

impl ConnectionLifecycle {
    /// A live connection.
    pub(super) fn new(mut gauge: StateGauge) -> Self {
        gauge.set(ConnectionState::Live.as_str());
        Self {
            state: Cell::new(ConnectionState::Live),
            suspect_since: Cell::new(None),
            gauge: RefCell::new(Some(gauge)),
            counted: Cell::new(true),
            responds: Cell::new(true),
            path_unresponsive: Cell::new(false),
            fails_unsafe_requests: Cell::new(false),
            unresponsive_reason: Cell::new(""),
            drain_urgency: Cell::new(None),
            close_requested: Cell::new(None),
            end_expected: Cell::new(false),
        }
    }

    /// Enters a state; returns the one before, unless it is the same.
    pub(super) fn enter(&self, state: ConnectionState) -> Option<ConnectionState> {
        let before = self.state.replace(state);
        if before == state {
            return None;
        }
        match state {
            ConnectionState::Live => self.suspect_since.set(None),
            ConnectionState::Suspect => self.suspect_since.set(Some(Instant::now())),
            ConnectionState::Draining | ConnectionState::Unresponsive | ConnectionState::Dead => {}
        }
        match state {
            ConnectionState::Dead => drop(self.gauge.take()),
            _ => self.gauge.borrow_mut().iter_mut().for_each(|gauge| gauge.set(state.as_str())),
        }
        Some(before)
    }
}

/// Consequence of entering a state for the streams on the connection, for the log.
pub(super) fn effect(state: ConnectionState, streams: usize, watches: usize) -> String {
    let open = match streams {
        0 => "no open streams".to_owned(),
        _ => format!("open: {watches} watches, {} requests", streams.saturating_sub(watches)),
    };
    match state {
        ConnectionState::Live => "takes new streams again".to_owned(),
        ConnectionState::Suspect => {
            format!("no new streams; a replacement is opened if no other is left; {open}")
        }
        ConnectionState::Draining => format!("no new streams; {open}"),
        ConnectionState::Unresponsive => {
            format!("no new streams; streams that can move are moved; {open}")
        }
        ConnectionState::Dead if streams == 0 => format!("closed; {open}"),
        ConnectionState::Dead => {
            format!("closed; watches are resumed, safe requests retried elsewhere; {open}")
        }
    }
}
