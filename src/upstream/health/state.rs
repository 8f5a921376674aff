//! The states of a connection and the reasons of a change, by name.

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConnectionState {
    /// Takes streams.
    Live,
    /// Its PING is late: takes no new streams, requests on it may be hedged.
    Suspect,
    /// Takes no new streams; open ones finish.
    Draining,
    /// Its path is lost: takes no new streams, and only streams that cannot move stay.
    Unresponsive,
    /// Closed.
    Dead,
}

impl ConnectionState {
    /// Every state, in the order of their numbers.
    pub const ALL: [Self; 5] =
        [Self::Live, Self::Suspect, Self::Draining, Self::Unresponsive, Self::Dead];

    /// Name in logs, metrics and status.
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

/// Why a connection changed its state, for the log line and the status page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A PONG arrived.
    Pong,
    /// A PING is late.
    PingLate,
    /// Nothing arrives.
    NothingArrives,
    /// Sent bytes are not acknowledged.
    NothingAcknowledged,
    /// The kernel answers, the process does not.
    ProcessStopped,
    /// No frame for 20 s, although sent bytes are acknowledged.
    NoFrames,
    /// The peer has accepted no bytes for 20 s, although its kernel answers.
    WindowClosed,
}

impl Reason {
    /// Text for the log and `/status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pong => "PONG received",
            Self::PingLate => "PING is late",
            Self::NothingArrives => "PING unanswered and no packet arrives",
            Self::NothingAcknowledged => "PING unanswered and sent bytes are not acknowledged",
            Self::ProcessStopped => "stopped: kernel answers, no PONG",
            Self::NoFrames => "no HTTP/2 frame, although TCP is acknowledged",
            Self::WindowClosed => "kernel answers, but the TCP window stays closed",
        }
    }
}
