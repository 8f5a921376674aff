//! The inputs and effects of [`super::Session::step`]: the body reports inputs and executes effects.

#![allow(missing_docs)] // the text of a variant explains its fields

use bytes::Bytes;
use std::time::Duration;

use crate::endpoint_condition::EndpointCondition;
use crate::pool::EndpointKey;
use crate::request::start_up;
use crate::watch::codec::event::Event;

/// What the body reports: a frame, the end of a stream or of an attempt, or a reason to end the watch.
#[derive(Debug)]
pub enum SessionInput<'a> {
    /// A whole frame has arrived; `None` if it cannot be read.
    Frame(Option<Event<'a>>),
    /// A piece of a frame above the cap has arrived. `begins`: it contains the first byte of the frame;
    /// `ends`: the last byte.
    OversizedPiece { begins: bool, ends: bool },
    /// The server has ended the response.
    ServerEnded,
    /// Another watch of the API group has shown versions that are not ordered.
    GroupUnordered,
    /// The stream was lost before the server ended the response. `quiet`: the watch was not delivering
    /// events shortly before.
    StreamLost { quiet: bool },
    /// The body has reset the stream from `endpoint`: after [`SessionEffect::Withhold`], then `error_event` is the
    /// withheld event, or after [`SessionEffect::NextEndpoint`]. `endpoints`: all of the upstream.
    Rejected {
        error_event: Option<Bytes>,
        endpoint: EndpointKey,
        endpoints: &'a [EndpointCondition],
    },
    /// An attempt to resume was accepted.
    Accepted,
    /// An attempt to resume was not accepted. `endpoint`: that of the stream, if one was opened; `endpoints`: all of
    /// the upstream.
    AttemptFailed {
        result: AttemptResult,
        endpoint: Option<EndpointKey>,
        endpoints: &'a [EndpointCondition],
    },
    /// The watch was held for this time ([`SessionEffect::Hold`]), and an attempt may succeed again.
    OutageEnded { held: Duration },
    /// The body opens another stream while the current one works; [`super::Session::can_move`] was true.
    MoveStarted(MoveReason),
    /// The attempt to move has ended. `moved`: the new stream continues the watch; otherwise the watch stays
    /// on the current one.
    MoveEnded { moved: bool },
    /// The body must end the watch now, for this reason.
    Stop(NotResumable),
    /// etcd was restored from a backup, so that the cursor is not a version of its history. The client receives this
    /// ERROR event.
    HistoryLost { error_event: Bytes },
    /// Two streams of the watch have shown different events ([`super::super::shadow`]).
    Contradicted,
}

impl SessionInput<'_> {
    /// The name, for the log line about an input that is impossible.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Frame(_) => "Frame",
            Self::OversizedPiece { .. } => "OversizedPiece",
            Self::ServerEnded => "ServerEnded",
            Self::GroupUnordered => "GroupUnordered",
            Self::StreamLost { .. } => "StreamLost",
            Self::Rejected { .. } => "Rejected",
            Self::Accepted => "Accepted",
            Self::AttemptFailed { .. } => "AttemptFailed",
            Self::OutageEnded { .. } => "OutageEnded",
            Self::MoveStarted(_) => "MoveStarted",
            Self::MoveEnded { .. } => "MoveEnded",
            Self::Stop(_) => "Stop",
            Self::HistoryLost { .. } => "HistoryLost",
            Self::Contradicted => "Contradicted",
        }
    }
}

/// What the body does after a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionEffect {
    /// Nothing.
    None,
    /// Send the frame to the client.
    Forward,
    /// Drop the frame: a bookmark that only jackstay asked for.
    Swallow,
    /// Drop the frame: the client has received it already.
    Discard,
    /// Reset the stream and report [`SessionInput::Rejected`]: this endpoint cannot continue the watch.
    NextEndpoint,
    /// As [`Self::NextEndpoint`], and keep the frame, an ERROR event: the client receives it if no other
    /// endpoint continues the watch.
    Withhold,
    /// Ask an endpoint to continue the watch ([`super::Session::resume_query`]): after a random part of
    /// `max_jitter`, at the earliest after `pause`.
    Request { max_jitter: Duration, pause: Duration },
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
    /// Cleanly, as when `timeoutSeconds` expires.
    Clean,
    /// With a reset, which shows the client that the response is incomplete.
    Reset,
    /// Cleanly, after the withheld ERROR event ([`super::Session::take_error_event`]).
    Withheld,
}

/// Why a watch is not resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotResumable {
    /// Watches of the API group are not resumed: by configuration, or because its versions are not ordered.
    Group,
    /// A frame could not be parsed.
    Unreadable,
    /// A resource version was missing or not a number.
    VersionNotNumeric,
    /// A resource version was not above the one before.
    VersionNotGrowing,
    /// A resource version was so far above the one before that both cannot belong to one history.
    VersionJumped,
    /// A resource version was not above the one that the client requested, which no event had shown before.
    BelowRequested,
    /// An event of an unknown type arrived.
    UnknownEvent,
    /// The server ended the watch with an ERROR event.
    ServerError,
    /// A frame above the cap was forwarded unparsed: before the next frame the cursor is too old.
    Oversized,
    /// The client has part of the initial events, which have no order.
    Initial,
    /// The watch started at the most recent version, and no event or bookmark has shown that version.
    NoVersion,
    /// Less than 2 s are left until the deadline.
    Late,
    /// The watch was resumed too often within a minute.
    TooOften,
    /// The events of the new stream do not follow the cursor.
    Diverged,
    /// No endpoint continued the watch.
    GaveUp,
    /// An endpoint answered 410, and no other endpoint has the history.
    TooOld,
    /// No endpoint is known to honour the same parameters of the query.
    Parameter,
    /// The budget for retries after a 410 is used up.
    OverBudget,
    /// The deadline has passed in a total outage.
    Expired,
    /// etcd was restored from a backup: the cursor is not a version of its history.
    HistoryLost,
    /// The client's certificate no longer proves an identity.
    Unproven,
    /// The listener shuts down.
    Shutdown,
    /// A defect of jackstay: an input that is impossible in its state, after which it could wait forever.
    InternalError,
}

impl NotResumable {
    /// The name in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Unreadable => "unparsed",
            Self::VersionNotNumeric => "version_not_numeric",
            Self::VersionNotGrowing => "version_not_growing",
            Self::VersionJumped => "version_jumped",
            Self::BelowRequested => "version_below_request",
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
            Self::Parameter => "parameter_not_honoured",
            Self::OverBudget => "over_budget",
            Self::Expired => "expired",
            Self::HistoryLost => "history_lost",
            Self::Unproven => "unproven",
            Self::Shutdown => "shutdown",
            Self::InternalError => "internal_error",
        }
    }

    /// Whether the server has contradicted itself: versions that it showed are not those of one ordered history.
    /// The other watches of the API group are then not resumed either.
    ///
    /// A version that only the client has named proves nothing, because the client may name any.
    pub fn is_contradiction(self) -> bool {
        use NotResumable::{Diverged, VersionJumped, VersionNotGrowing, VersionNotNumeric};
        matches!(self, VersionNotNumeric | VersionNotGrowing | VersionJumped | Diverged)
    }

    /// The label in `jackstay_watch_resumes_total` of a watch that ends for this reason. `None`
    /// for a shutdown, which is no failed resume, and for an empty budget, which was counted when the retry
    /// was refused.
    pub fn outcome(self) -> Option<&'static str> {
        match self {
            Self::Group
            | Self::Unreadable
            | Self::VersionNotNumeric
            | Self::VersionNotGrowing
            | Self::VersionJumped
            | Self::BelowRequested
            | Self::UnknownEvent
            | Self::ServerError
            | Self::Oversized => Some("not_resumable"),
            Self::OverBudget | Self::Shutdown => None,
            Self::Parameter => Some("parameter"),
            _ => Some(self.as_str()),
        }
    }
}

/// Why a watch leaves a stream that works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveReason {
    /// The endpoint has more watches than others.
    Rebalance,
    /// The endpoint is degraded, or its probe fails or is overdue.
    Evacuate,
    /// The connection drains.
    Drain,
}

/// The result of one attempt to resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttemptResult {
    /// A response head. `same_content_type`: its Content-Type equals that of the client's response.
    Head { status: u16, same_content_type: bool, retry_after: Option<Duration> },
    /// The head was accepted, and then the endpoint rejected the watch with an ERROR event.
    ErrorEvent,
    /// No head: connecting failed, the connection was lost, or the time limit passed. `outage`: the pool can
    /// reach no apiserver.
    NoHead { outage: bool },
}

/// For how long an endpoint is not asked again after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exclusion {
    For(Duration),
    /// Until the end of this round.
    Round,
    /// While another endpoint is ready.
    Refusal,
}

impl AttemptResult {
    /// Whether the watch continues on the new stream.
    pub fn is_accepted(self) -> bool {
        matches!(self, Self::Head { status: 200, same_content_type: true, .. })
    }

    /// Whether the endpoint does not serve the encoding of the watch.
    pub fn lacks_encoding(self) -> bool {
        matches!(
            self,
            Self::Head { status: 406, .. }
                | Self::Head { status: 200, same_content_type: false, .. }
        )
    }

    /// Whether the endpoint refuses the client, as one does that has just started ([`crate::request::start_up`]).
    pub fn is_refusal(self) -> bool {
        matches!(self, Self::Head { status, .. } if start_up::is_refusal(status))
    }

    /// For how long the endpoint is not asked again, as the table in [`super`] defines it; `None` if every
    /// endpoint would give the same response.
    pub fn exclusion(self) -> Option<Exclusion> {
        match self {
            Self::Head { status: 410, .. } | Self::ErrorEvent => Some(Exclusion::Round),
            _ if self.lacks_encoding() => Some(Exclusion::Round),
            _ if self.is_refusal() => Some(Exclusion::Refusal),
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
            (other_type, Some(Exclusion::Round)),
            (head(201), None),
            (head(301), None),
            (head(400), None),
            (head(401), Some(Exclusion::Refusal)),
            (head(403), Some(Exclusion::Refusal)),
            (head(404), None),
            (head(406), Some(Exclusion::Round)),
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
