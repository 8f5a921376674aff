//! What can happen to a watch, and what the session tells the body to do: the inputs and the effects of
//! [`super::Session::step`].

use bytes::Bytes;
use std::time::Duration;

use crate::proxy::watch::codec::event::{Event, Unreadable};

/// Something that happened to a watch.
#[derive(Debug)]
pub enum Input<'a> {
    /// A whole frame has arrived.
    Frame(Result<Event<'a>, Unreadable>),
    /// A piece of a frame above the cap has arrived.
    OversizedPiece {
        /// Whether it contains the first byte of the frame.
        begins: bool,
        /// Whether it contains the last byte of the frame.
        ends: bool,
    },
    /// The server has ended the response.
    ServerEnded,
    /// The stream was lost without an end by the server.
    StreamLost {
        /// The watch was not delivering events shortly before.
        quiet: bool,
        /// A random number for the jitter.
        random: u64,
    },
    /// The body has reset the stream after [`Effect::Withhold`] or [`Effect::NextEndpoint`].
    Rejected {
        /// The frame to withhold; `None` after [`Effect::NextEndpoint`].
        error_event: Option<Bytes>,
        /// The endpoints that are left.
        peers: Peers,
        /// A random number for the jitter.
        random: u64,
    },
    /// An attempt to resume has got an answer, or none.
    Answered {
        /// The answer.
        answer: Answer,
        /// The endpoints that are left.
        peers: Peers,
        /// A random number for the jitter.
        random: u64,
    },
    /// A total outage is over, or its end is worth a check ([`Effect::Hold`]).
    Returned {
        /// How long the watch was held.
        held: Duration,
        /// A random number for the jitter.
        random: u64,
    },
    /// The body tries to move the watch while its stream works; [`super::Session::can_move`] was true.
    MoveStarted(MoveReason),
    /// The attempt to move is over: another stream has taken the watch, or it stays on its stream.
    MoveEnded {
        /// Whether another stream has taken the watch.
        moved: bool,
    },
    /// The watch must end now, for this reason.
    Stop(NotResumable),
}

/// What the body does after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    None,
    /// Send the frame to the client.
    Forward,
    /// Drop the frame: a bookmark that only jackstay asked for.
    Swallow,
    /// Drop the frame: the client has it already.
    Discard,
    /// Reset the stream and report [`Input::Rejected`]: this endpoint does not take the watch.
    NextEndpoint,
    /// The same, and keep the frame: the client gets it if no other endpoint takes the watch.
    Withhold,
    /// After this delay, ask an endpoint to continue the watch ([`super::Session::resume_point`]).
    Request(Duration),
    /// The new stream has taken the watch: read from it.
    Accept,
    /// Hold the watch until an apiserver can be reached.
    Hold,
    /// Hold the watch until its deadline: too little time is left to resume it.
    HoldUntilDeadline,
    /// End the client's stream.
    End(Ending, NotResumable),
}

/// How the client's stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Cleanly, as if the server's timeout had come.
    Clean,
    /// With a reset, so that the client sees that it is incomplete.
    Reset,
    /// With the ERROR event that was withheld ([`super::Session::take_error_event`]).
    Withheld,
}

/// Why a watch is not resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotResumable {
    /// An aggregated apiserver may serve its API group, with a history of its own.
    Group,
    /// A frame could not be parsed.
    Unreadable,
    /// A resource version was missing or not a number.
    VersionNotNumeric,
    /// A resource version was not above the one before.
    VersionNotGrowing,
    /// An event of an unknown type came.
    UnknownEvent,
    /// The server ended the watch with an ERROR event.
    ServerError,
    /// A frame above the cap passed unread: until the next frame the client is ahead of the cursor.
    Oversized,
    /// The client has part of the initial events, which have no order.
    Initial,
    /// The watch began at the server's present, and no event or bookmark has told its version.
    NoVersion,
    /// Less time is left until its deadline than a resume is worth.
    Late,
    /// It was resumed too often in the last minute.
    TooOften,
    /// The stream that continued it has another history.
    Diverged,
    /// No endpoint took it.
    GaveUp,
    /// No other endpoint has the history that one has answered with 410.
    TooOld,
    /// The budget for retries after a 410 is used up.
    OverBudget,
    /// Its deadline has passed in a total outage.
    Expired,
    /// The proof of its client's identity has ended.
    Unproven,
    /// Its listener shuts down.
    Shutdown,
}

impl NotResumable {
    /// The name in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Unreadable => "unparsed",
            Self::VersionNotNumeric => "version_not_numeric",
            Self::VersionNotGrowing => "version_not_growing",
            Self::UnknownEvent => "unknown_event",
            Self::ServerError => "server_error",
            Self::Oversized => "frame_above_cap",
            Self::Initial => "initial",
            Self::NoVersion => "no_version",
            Self::Late => "late",
            Self::TooOften => "too_often",
            Self::Diverged => "diverged",
            Self::GaveUp => "gave_up",
            Self::TooOld => "too_old",
            Self::OverBudget => "over_budget",
            Self::Expired => "expired",
            Self::Unproven => "unproven",
            Self::Shutdown => "shutdown",
        }
    }

    /// The label in [`crate::observe::names::WATCH_RESUMES`] of a watch that ends for this reason.
    /// `None`: a shutdown is no failed resume, and the budget counts its refusals itself.
    pub fn outcome(self) -> Option<&'static str> {
        match self {
            Self::Group
            | Self::Unreadable
            | Self::VersionNotNumeric
            | Self::VersionNotGrowing
            | Self::UnknownEvent
            | Self::ServerError
            | Self::Oversized => Some("not_resumable"),
            Self::OverBudget | Self::Shutdown => None,
            _ => Some(self.as_str()),
        }
    }
}

/// Why a watch leaves a stream that works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveReason {
    /// Its endpoint has more watches than others.
    Rebalance,
    /// Its endpoint is degraded or suspected.
    Evacuate,
    /// Its connection drains.
    Drain,
}

/// The endpoints that are left to ask, without those excluded for this round.
#[derive(Debug, Clone, Copy, Default)]
pub struct Peers {
    /// There is one, in whatever state.
    pub any: bool,
    /// There is one other than the last one asked, and its state allows requests.
    pub usable: bool,
    /// There is one that is ready.
    pub ready: bool,
    /// How long until the first usable one may be asked again (Retry-After).
    pub retry_after: Duration,
}

/// The result of one attempt to resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// A response head.
    Head {
        /// The status code.
        status: u16,
        /// Whether the Content-Type is that of the client's response.
        same_content_type: bool,
        /// The Retry-After, if it is a number of seconds.
        retry_after: Option<Duration>,
    },
    /// The head was accepted, and the first event was an ERROR.
    ErrorEvent,
    /// No head: connecting failed, or the connection was lost, or none came in time.
    None {
        /// Whether no apiserver can be reached at all.
        outage: bool,
    },
}

/// For how long an endpoint is not asked again after its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exclusion {
    /// It may be asked again at once; other endpoints are preferred.
    None,
    /// For this time.
    For(Duration),
    /// Until the end of this round.
    Round,
}

impl Answer {
    /// Whether the watch continues with this answer.
    pub fn is_accepted(self) -> bool {
        matches!(self, Self::Head { status: 200, same_content_type: true, .. })
    }

    /// For how long the endpoint is not asked again; `None` if no other endpoint would give a better
    /// answer either. The table is in [`super`].
    pub fn exclusion(self) -> Option<Exclusion> {
        match self {
            Self::Head { status: 410, .. } | Self::ErrorEvent => Some(Exclusion::Round),
            Self::Head { status: 429 | 500..=599, retry_after, .. } => {
                Some(retry_after.map_or(Exclusion::None, Exclusion::For))
            }
            Self::None { .. } => Some(Exclusion::None),
            Self::Head { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_decides_whether_and_when_its_endpoint_is_asked_again() {
        let pause = Duration::from_secs(3);
        let head =
            |status| Answer::Head { status, same_content_type: true, retry_after: Some(pause) };
        let other_type = Answer::Head { status: 200, same_content_type: false, retry_after: None };
        let bare = Answer::Head { status: 504, same_content_type: false, retry_after: None };
        assert!(head(200).is_accepted());
        for (answer, exclusion) in [
            (other_type, None),
            (head(201), None),
            (head(301), None),
            (head(400), None),
            (head(401), None),
            (head(403), None),
            (head(404), None),
            (head(406), None),
            (head(410), Some(Exclusion::Round)),
            (head(429), Some(Exclusion::For(pause))),
            (head(500), Some(Exclusion::For(pause))),
            (head(503), Some(Exclusion::For(pause))),
            (bare, Some(Exclusion::None)),
            (Answer::ErrorEvent, Some(Exclusion::Round)),
            (Answer::None { outage: false }, Some(Exclusion::None)),
        ] {
            assert!(!answer.is_accepted(), "{answer:?}");
            assert_eq!(answer.exclusion(), exclusion, "{answer:?}");
        }
    }
}
