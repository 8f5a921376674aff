//! The lifecycle of a connection: its state, the reasons for a drain, and how urgently streams leave.

use std::cell::{Cell, RefCell};

use std::time::Instant;

use jackstay_core::connection_health::{ConnectionState, Responsiveness};
use jackstay_sys::clock;

use crate::observe::{OpenStreams, StateGauge};

/// Why jackstay drains or closes a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainReason {
    /// No stream has used it for a while.
    Idle,
    /// Its upstream was removed from the configuration.
    ConfigurationRemoved,
    /// The certificate of its identity has expired, or the identity was removed from the configuration.
    IdentityUnusable,
    /// Its credential was replaced.
    CertificateRotated,
    /// Its endpoint was removed from the set.
    EndpointRemoved,
    /// The prober has ended.
    ProbingEnded,
    /// The prober received no response on it.
    ProbeFailed,
    /// A fresh connection to the same endpoint works; this one does not.
    Superseded,
    /// Its class has too many connections to the endpoint.
    ConnectionLimit,
}

/// How urgently streams that can move should leave a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrainUrgency {
    /// Its path is lost; or it drains, and its PING is late or its endpoint is degraded.
    Immediate,
    /// It works, but its certificate was replaced or its endpoint was removed.
    Relaxed,
}

impl DrainReason {
    /// Text for logs and events.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::ConfigurationRemoved => "removed from the configuration",
            Self::IdentityUnusable => "identity expired or removed from the configuration",
            Self::CertificateRotated => "certificate rotated",
            Self::EndpointRemoved => "endpoint removed",
            Self::ProbingEnded => "no longer probed",
            Self::ProbeFailed => "probe failed",
            Self::Superseded => "a fresh connection works, this one does not",
            Self::ConnectionLimit => "connection limit",
        }
    }

    /// How urgently streams should move to another connection; `None` if they may finish, because there
    /// is no stream or no connection to which it could move.
    pub fn urgency(self) -> Option<DrainUrgency> {
        match self {
            Self::CertificateRotated | Self::EndpointRemoved | Self::ConnectionLimit => {
                Some(DrainUrgency::Relaxed)
            }
            Self::Idle
            | Self::ConfigurationRemoved
            | Self::IdentityUnusable
            | Self::ProbingEnded
            | Self::ProbeFailed
            | Self::Superseded => None,
        }
    }
}

/// The state of a connection, and the findings and decisions that belong to it.
pub(super) struct ConnectionLifecycle {
    pub(super) state: Cell<ConnectionState>,
    /// When it last became suspect; kept while it drains and after its death.
    pub(super) suspect_since: Cell<Option<Instant>>,
    /// When it began to drain.
    pub(super) draining_since: Cell<Option<Instant>>,
    /// The gauge of its state; `None` once it is dead.
    gauge: RefCell<Option<StateGauge>>,
    /// Whether the endpoint counts it as live.
    pub(super) counted: Cell<bool>,
    /// Whether its PINGs are answered, as reported to the endpoint.
    pub(super) responsiveness: Cell<Responsiveness>,
    /// Whether requests fail that wait for a response head and must not be sent twice.
    pub(super) fails_unsafe_requests: Cell<bool>,
    /// Why it became unresponsive.
    pub(super) unresponsive_reason: Cell<&'static str>,
    pub(super) drain_urgency: Cell<Option<DrainUrgency>>,
    pub(super) close_requested: Cell<Option<DrainReason>>,
    /// See [`super::Connection::expect_end`].
    pub(super) end_expected: Cell<bool>,
}

impl ConnectionLifecycle {
    /// A live connection.
    pub(super) fn new(mut gauge: StateGauge) -> Self {
        gauge.set(ConnectionState::Live.as_str());
        Self {
            state: Cell::new(ConnectionState::Live),
            suspect_since: Cell::new(None),
            draining_since: Cell::new(None),
            gauge: RefCell::new(Some(gauge)),
            counted: Cell::new(true),
            responsiveness: Cell::default(),
            fails_unsafe_requests: Cell::new(false),
            unresponsive_reason: Cell::new(""),
            drain_urgency: Cell::new(None),
            close_requested: Cell::new(None),
            end_expected: Cell::new(false),
        }
    }

    /// Enters a state. Returns the previous one if it was another.
    pub(super) fn enter(&self, state: ConnectionState) -> Option<ConnectionState> {
        let before = self.state.replace(state);
        if before == state {
            return None;
        }
        match state {
            ConnectionState::Live => self.suspect_since.set(None),
            ConnectionState::Suspect => self.suspect_since.set(Some(clock::now())),
            ConnectionState::Draining => self.draining_since.set(Some(clock::now())),
            ConnectionState::Unresponsive | ConnectionState::Dead => {}
        }
        if state == ConnectionState::Dead {
            self.gauge.take();
        } else if let Some(gauge) = self.gauge.borrow_mut().as_mut() {
            gauge.set(state.as_str());
        }
        Some(before)
    }
}

/// What a new state means for the streams on the connection, for the log.
pub(super) fn effect(state: ConnectionState, open: OpenStreams) -> String {
    let none_open = open.is_empty();
    let open = if none_open { "no open streams".to_owned() } else { format!("open: {open}") };
    match state {
        ConnectionState::Live => "takes new streams again".to_owned(),
        ConnectionState::Suspect => {
            format!("no new streams; a replacement is opened if no other is left; {open}")
        }
        ConnectionState::Draining => format!("no new streams; {open}"),
        ConnectionState::Unresponsive => {
            format!("no new streams; streams that can move are moved; {open}")
        }
        ConnectionState::Dead if none_open => format!("closed; {open}"),
        ConnectionState::Dead => {
            format!("closed; watches are resumed, safe requests retried elsewhere; {open}")
        }
    }
}
