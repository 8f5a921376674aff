//! The inputs that the shell has classified, and the effects that it executes.

use std::time::Duration;

use super::drain::DrainReason;
use super::state::{ConnectionState, Responsiveness, StateChangeReason};

/// Why h2 opens no more streams on the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum H2Refusal {
    /// The apiserver sent a GOAWAY with `NO_ERROR`: it closes an idle connection, spreads its clients
    /// (`--goaway-chance`) or shuts down.
    GracefulGoaway,
    /// The apiserver sent a GOAWAY with an error.
    Goaway,
    /// h2 sent a GOAWAY itself, because the apiserver broke the protocol.
    OwnGoaway,
    /// Another error. No stream continues.
    Failure,
}

/// How h2 has ended the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum H2End {
    /// After a GOAWAY, because the last stream has ended. Its request may not have read the response yet.
    Finished,
    /// Without an error, because the apiserver has closed it.
    Closed,
    /// With an error, or the socket accepts no more bytes.
    Failed,
    /// The apiserver exceeded a limit on its frames.
    FrameLimit,
}

/// Why a connection has changed its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeReason {
    /// The evidence of its life.
    Health(StateChangeReason),
    /// jackstay drains or closes it.
    Drain(DrainReason),
    /// It drains, and its last stream has ended.
    Drained,
    /// The apiserver has closed it without an error.
    ClosedByApiserver,
    /// The error that the shell has reported as a [`H2Refusal`] or as [`H2End`], and whose text it knows.
    Error,
}

impl ChangeReason {
    /// Text for logs and events; that of [`Self::Error`] is `error`.
    pub fn text(self, error: &str) -> &str {
        match self {
            Self::Health(reason) => reason.as_str(),
            Self::Drain(reason) => reason.as_str(),
            Self::Drained => "drained",
            Self::ClosedByApiserver => "closed by the apiserver",
            Self::Error => error,
        }
    }
}

/// How much a change of state matters to an operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Significance {
    /// Its end is expected ([`super::ConnectionMachine::set_end_expected`]).
    Expected,
    /// The end without unfinished streams as HTTP/2 provides for. An apiserver closes a connection that is idle for
    /// 90 s, and the pool opens another one.
    OrderlyEnd,
    /// A GOAWAY with `NO_ERROR`. If the apiserver shuts down, its endpoint reports that.
    ServerShutdown,
    /// Nothing has failed for certain.
    Notable,
    /// The path or all streams have failed.
    Fault,
}

/// A change of state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionTransition {
    /// The state before.
    pub from: ConnectionState,
    /// The state entered.
    pub to: ConnectionState,
    /// Why.
    pub reason: ChangeReason,
    /// How much it matters.
    pub significance: Significance,
}

impl ConnectionTransition {
    /// Whether the connection has begun to drain or is closed. Its endpoint does not count it any more.
    pub fn leaves_service(&self) -> bool {
        self.from.is_in_service() && !self.to.is_in_service()
    }
}

/// A change of [`Responsiveness`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponsivenessChange {
    /// The finding before.
    pub from: Responsiveness,
    /// The present finding.
    pub to: Responsiveness,
}

/// What the shell does after an input, in this order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[must_use]
#[allow(clippy::struct_excessive_bools)] // independent effects
pub struct Effects {
    /// Request a keepalive probe from the kernel.
    pub probe_kernel: bool,
    /// Send a PING. It counts as sent.
    pub send_ping: bool,
    /// Ask the connections to which a waiting request may be sent again ([`super::ConnectionMachine::ask`]), so that it is
    /// not sent to one that is as dead.
    pub ask_others: bool,
    /// Tell the endpoint that its apiserver has announced its shutdown by a GOAWAY.
    pub shutdown_announced: bool,
    /// Tell the endpoint that the PINGs of a connection in service are answered differently than before.
    pub responsiveness: Option<ResponsivenessChange>,
    /// Record the round-trip time of a PING.
    pub round_trip: Option<Duration>,
    /// Publish the new state. In [`ConnectionState::Dead`], close the socket.
    pub transition: Option<ConnectionTransition>,
    /// Notify the requests on the connection.
    pub notify_requests: bool,
    /// Notify the pool: the state has changed, or a stream can be opened.
    pub notify_pool: bool,
    /// Wake the task that reads the socket, which calls [`super::ConnectionMachine::end_if_due`].
    pub wake_driver: bool,
}
