//! The states of a connection and the reasons for a change, by name.

/// State of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ConnectionState {
    /// Takes streams.
    Live,
    /// Its PING is late: takes no new streams, what waits on it may be hedged.
    Suspect,
    /// Takes no new streams; running ones finish.
    Draining,
    /// Its path is lost. Takes no new streams, and only those stay on it that cannot move.
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
    /// A PONG came.
    Pong,
    /// A PING is late.
    PingLate,
    /// Nothing at all arrives.
    NothingArrives,
    /// Nothing of ours is acknowledged.
    NothingAcknowledged,
    /// The kernel answers, the process does not.
    ProcessStopped,
    /// No frame for a long time, although something acknowledges.
    NoFrames,
    /// The peer has taken nothing for a long time, although its kernel answers.
    WindowClosed,
}

impl Reason {
    /// Words for people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pong => "PONG received",
            Self::PingLate => "PING is late",
            Self::NothingArrives => "PING unanswered and no packet arrives",
            Self::NothingAcknowledged => "PING unanswered and nothing we send is acknowledged",
            Self::ProcessStopped => "kernel answers but no PONG: the process is stopped",
            Self::NoFrames => "no HTTP/2 frame, although TCP is acknowledged",
            Self::WindowClosed => "kernel answers but takes nothing: the window stays closed",
        }
    }
}
