//! The states of an upstream connection and the reasons of a state change.

use std::time::Instant;

use super::drain::DrainUrgency;

/// The state of a connection, with what belongs to it.
#[derive(Debug, Clone, Copy)]
pub(super) enum State {
    Live,
    Suspect {
        since: Instant,
    },
    Draining {
        since: Instant,
        /// How urgently streams that can move leave.
        urgency: Option<DrainUrgency>,
        suspect_since: Option<Instant>,
    },
    Unresponsive {
        reason: StateChangeReason,
        draining_since: Option<Instant>,
        suspect_since: Option<Instant>,
    },
    Dead {
        urgency: Option<DrainUrgency>,
        suspect_since: Option<Instant>,
    },
}

impl State {
    /// The state without what belongs to it.
    pub(super) fn discriminant(&self) -> ConnectionState {
        match self {
            Self::Live => ConnectionState::Live,
            Self::Suspect { .. } => ConnectionState::Suspect,
            Self::Draining { .. } => ConnectionState::Draining,
            Self::Unresponsive { .. } => ConnectionState::Unresponsive,
            Self::Dead { .. } => ConnectionState::Dead,
        }
    }

    /// The beginning of a drain.
    pub(super) fn draining(&self, urgency: Option<DrainUrgency>, now: Instant) -> Self {
        Self::Draining { since: now, urgency, suspect_since: self.suspect_since() }
    }

    /// The end.
    pub(super) fn dead(&self) -> Self {
        Self::Dead { urgency: self.urgency(), suspect_since: self.suspect_since() }
    }

    /// The state `to` that the evidence demands.
    pub(super) fn by_evidence(
        &self,
        to: ConnectionState,
        reason: StateChangeReason,
        now: Instant,
    ) -> Self {
        match to {
            ConnectionState::Live => Self::Live,
            ConnectionState::Suspect => Self::Suspect { since: now },
            // Streams that were about to leave still are.
            ConnectionState::Draining => self.draining(self.urgency(), now),
            ConnectionState::Unresponsive => Self::Unresponsive {
                reason,
                draining_since: self.draining_since(),
                suspect_since: self.suspect_since(),
            },
            ConnectionState::Dead => self.dead(),
        }
    }

    /// When the connection last became suspect, unless it has been live since.
    pub(super) fn suspect_since(&self) -> Option<Instant> {
        match *self {
            Self::Live => None,
            Self::Suspect { since } => Some(since),
            Self::Draining { suspect_since, .. }
            | Self::Unresponsive { suspect_since, .. }
            | Self::Dead { suspect_since, .. } => suspect_since,
        }
    }

    /// When the connection began to drain. `None` once it is dead.
    pub(super) fn draining_since(&self) -> Option<Instant> {
        match *self {
            Self::Draining { since, .. } => Some(since),
            Self::Unresponsive { draining_since, .. } => draining_since,
            Self::Live | Self::Suspect { .. } | Self::Dead { .. } => None,
        }
    }

    /// How urgently streams that can move leave; `None` if they may stay.
    pub(super) fn urgency(&self) -> Option<DrainUrgency> {
        match *self {
            Self::Live | Self::Suspect { .. } => None,
            Self::Draining { urgency, .. } | Self::Dead { urgency, .. } => urgency,
            Self::Unresponsive { .. } => Some(DrainUrgency::Immediate),
        }
    }
}

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConnectionState {
    /// Accepts new streams.
    Live,
    /// The PING is late. Requests on the connection may be hedged. A new stream is opened on it only if the
    /// request would otherwise fail for want of a free stream on a live connection.
    Suspect,
    /// Accepts no new streams; open streams finish.
    Draining,
    /// The path is lost. Accepts no new streams, and stays open only for pinned streams, which no other
    /// connection can continue.
    Unresponsive,
    /// Closed.
    Dead,
}

impl ConnectionState {
    /// Every state, in the order of the discriminants.
    pub const ALL: [Self; 5] =
        [Self::Live, Self::Suspect, Self::Draining, Self::Unresponsive, Self::Dead];

    /// Whether the connection is live or suspect: no drain has begun.
    pub fn is_in_service(self) -> bool {
        matches!(self, Self::Live | Self::Suspect)
    }

    /// Name in logs, metrics and `/status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Suspect => "suspect",
            Self::Draining => "draining",
            Self::Unresponsive => "unresponsive",
            Self::Dead => "dead",
        }
    }
}

/// Whether the PINGs on a connection are answered. The order is that of the severity.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Responsiveness {
    /// The last PING was answered, or was sent less than `PROBE_AFTER` ago.
    #[default]
    Responds,
    /// A PING has been outstanding for `PROBE_AFTER`, and in that time no frame was received or no pending byte
    /// was acknowledged. Packet loss alone rarely causes this.
    Unanswered,
    /// A PING has been outstanding for `SILENT_AFTER`, and in that time one of the two directions has shown no
    /// evidence of life, or the process has sent no frame and accepted no bytes. A request sent now would
    /// probably get no response.
    Silent,
}

/// Why a connection changed its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateChangeReason {
    /// The PONG of the outstanding PING arrived.
    Pong,
    /// No PONG arrived in time, and one of the two directions has shown no other evidence of life.
    PingLate,
    /// A PING is unanswered, and the kernel received no packet for `dead_after`.
    NothingArrives,
    /// A PING is unanswered, and the peer acknowledged no pending byte for `dead_after`.
    NothingAcknowledged,
    /// The peer's kernel answers, but its process sends neither a PONG nor other frames.
    ProcessStopped,
    /// No frame arrived for 20 s, although sent bytes are acknowledged. With pinned streams, for
    /// `tunnel_dead_after` if that is longer.
    NoFrames,
    /// The peer accepted no bytes for as long as in [`Self::NoFrames`], although its kernel answers.
    WindowClosed,
    /// The apiserver that it has reached is not ready ([`super::DrainReason::NotReady`]).
    NotReady,
}

impl StateChangeReason {
    /// Text for logs, events and the reason of an endpoint's state.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pong => "PONG received",
            Self::PingLate => "PING is late",
            Self::NothingArrives => "PING unanswered and no packet arrives",
            Self::NothingAcknowledged => "PING unanswered and sent bytes are not acknowledged",
            Self::ProcessStopped => "stopped: kernel answers, no PONG",
            Self::NoFrames => "no HTTP/2 frame, although TCP is acknowledged",
            Self::WindowClosed => "kernel answers, but the TCP window stays closed",
            Self::NotReady => "its apiserver is not ready",
        }
    }
}
