//! What can become of a frame of a watch, and of the watch: the words in which [`super::state`]
//! decides and [`super::relay`] and the body that streams to the client carry it out.

use super::codec::version::ResourceVersion;
use super::resume::Shun;
use std::time::Duration;

/// Why a watch is not resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// Its group may be served by an aggregated apiserver with a history of its own.
    Group,
    /// A frame could not be read.
    Unparsed,
    /// A version was missing or not a number.
    NotNumeric,
    /// A version was not above the one before.
    NotGrowing,
    /// An event of an unknown type came.
    UnknownEvent,
    /// The server said that the watch has failed.
    ServerError,
}

impl Bar {
    /// A short name for logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Unparsed => "unparsed",
            Self::NotNumeric => "version_not_numeric",
            Self::NotGrowing => "version_not_growing",
            Self::UnknownEvent => "unknown_event",
            Self::ServerError => "server_error",
        }
    }
}

/// What stands in the way of resuming a watch, for now or for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// It will never be resumed.
    Bar(Bar),
    /// A frame above the cap passed unread: until the next one the client is ahead of the cursor.
    Oversized,
}

impl Obstacle {
    /// A short name for logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Bar(bar) => bar.as_str(),
            Self::Oversized => "frame_above_cap",
        }
    }
}

/// Why a watch that has lost its stream does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// What its server sent stands in the way ([`Obstacle`]).
    NotResumable,
    /// Its client has part of the initial state, which has no order.
    Initial,
    /// It began at the server's present, and no event or bookmark has said where that was.
    NoVersion,
    /// Less of its time is left than is worth the move.
    Late,
    /// It was resumed too often of late.
    TooOften,
}

impl Stop {
    /// Its name in [`crate::observe::names::WATCH_RESUMES`].
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NotResumable => "not_resumable",
            Self::Initial => "initial",
            Self::NoVersion => "no_version",
            Self::Late => "late",
            Self::TooOften => "too_often",
        }
    }
}

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The client gets it.
    Forward,
    /// A bookmark that only we asked for.
    Swallow,
    /// The client has it already.
    Discard,
    /// This peer does not take the watch: ask another
    /// ([`super::state::WatchState::on_error_event`]).
    NextPeer,
    /// The same; and if nobody else takes it, this frame is what the client gets.
    Withhold,
    /// This stream cannot be trusted to go on where the last one ended: end the watch.
    End(Ending),
}

/// How a watch that is not resumed ends for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// As if the server's timeout had come.
    Clean,
    /// Visibly broken.
    Reset,
}

/// What becomes of a watch whose stream is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterLoss {
    /// After this delay, send the original request again.
    Restart(Duration),
    /// After this delay, go on at the cursor ([`super::state::WatchState::reissue`]).
    Resume(Duration),
    /// It ends.
    End(Ending, Stop),
}

/// What follows an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterAttempt {
    /// The watch goes on with this response.
    Accept,
    /// After the delay, ask another peer.
    Another {
        /// How long to wait.
        delay: Duration,
        /// What to make of the peer that answered.
        shun: Shun,
    },
    /// It ends.
    End(Ending),
}

/// How to ask again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reissue<'a> {
    /// Where to go on; `None` for the request as the client made it.
    pub cursor: Option<&'a ResourceVersion>,
    /// What is left of the client's `timeoutSeconds`, if it gave any.
    pub remaining: Option<Duration>,
}
