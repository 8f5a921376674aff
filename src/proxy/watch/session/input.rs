//! What can happen to a watch, and what the session tells the body to do: the inputs and the effects of
//! [`super::Session::step`].

use bytes::Bytes;
use std::time::Duration;

use crate::proxy::watch::codec::event::Event;

/// Something that happened to a watch.
#[derive(Debug)]
pub enum Input<'a> {
    /// A whole frame has arrived; `None` if it cannot be read.
    Frame(Option<Event<'a>>),
    /// A piece of a frame above the cap has arrived. `begins`: with the first byte of the frame; `ends`:
    /// with its last byte.
    OversizedPiece { begins: bool, ends: bool },
    /// The server has ended the response.
    ServerEnded,
    /// The stream was lost without an end by the server. `quiet`: the watch was not delivering events
    /// shortly before.
    StreamLost { quiet: bool },
    /// The body has reset the stream after [`Effect::Withhold`], which has the ERROR event to withhold, or
    /// after [`Effect::NextEndpoint`].
    Rejected { error_event: Option<Bytes>, candidates: Candidates },
    /// An attempt to resume is over.
    AttemptEnded { result: AttemptResult, candidates: Candidates },
    /// The watch was held for this time, and an attempt may succeed again ([`Effect::Hold`]).
    OutageEnded { held: Duration },
    /// The body tries to move the watch while its stream works; [`super::Session::can_move`] was true.
    MoveStarted(MoveReason),
    /// The attempt to move is over. `moved`: another stream has taken the watch; otherwise it stays.
    MoveEnded { moved: bool },
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
    /// Ask an endpoint to continue the watch ([`super::Session::resume_query`]): after a random part of
    /// `max_jitter`, and not before `pause` has passed.
    Request { max_jitter: Duration, pause: Duration },
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
    /// The watch started at the most recent version, and no event or bookmark has shown which one that is.
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
pub struct Candidates {
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
pub enum AttemptResult {
    /// A response head. `same_content_type`: its Content-Type is that of the client's response.
    Head { status: u16, same_content_type: bool, retry_after: Option<Duration> },
    /// The head was accepted, and the first event was an ERROR.
    ErrorEvent,
    /// No head: connecting failed, or the connection was lost, or none came in time. `outage`: no
    /// apiserver can be reached at all.
    NoHead { outage: bool },
}

/// For how long an endpoint is not asked again after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exclusion {
    /// For this time; other endpoints are preferred after it.
    For(Duration),
    /// Until the end of this round.
    Round,
}

impl AttemptResult {
    /// Whether the watch continues on this stream.
    pub fn is_accepted(self) -> bool {
        matches!(self, Self::Head { status: 200, same_content_type: true, .. })
    }

    /// For how long the endpoint is not asked again; `None` if no other endpoint would answer otherwise.
    /// The table is in [`super`].
    pub fn exclusion(self) -> Option<Exclusion> {
        match self {
            Self::Head { status: 410, .. } | Self::ErrorEvent => Some(Exclusion::Round),
            Self::Head { status: 429 | 500..=599, retry_after, .. } => {
                Some(Exclusion::For(retry_after.unwrap_or_default()))
            }
            Self::NoHead { .. } => Some(Exclusion::For(Duration::ZERO)),
            Self::Head { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempt_result_decides_when_its_endpoint_is_asked_again() {
        let pause = Duration::from_secs(3);
        let at_once = Exclusion::For(Duration::ZERO);
        let head = |status| AttemptResult::Head {
            status,
            same_content_type: true,
            retry_after: Some(pause),
        };
        let other_type =
            AttemptResult::Head { status: 200, same_content_type: false, retry_after: None };
        let bare = AttemptResult::Head { status: 504, same_content_type: false, retry_after: None };
        assert!(head(200).is_accepted());
        for (result, exclusion) in [
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
            (bare, Some(at_once)),
            (AttemptResult::ErrorEvent, Some(Exclusion::Round)),
            (AttemptResult::NoHead { outage: false }, Some(at_once)),
        ] {
            assert!(!result.is_accepted(), "{result:?}");
            assert_eq!(result.exclusion(), exclusion, "{result:?}");
        }
    }
}
