//! Decides which requests are sent again after a failed attempt.
//!
//! | request | not sent | unprocessed | no head | head held | forwarded |
//! |---|---|---|---|---|---|
//! | get, list, discovery | retry | retry | retry | retry | reset |
//! | watch | retry | retry | retry | retry | resume |
//! | log, log -f | retry | retry | retry | retry | reset |
//! | create, update, patch, delete | retry | retry | **fail** | fail | reset |
//! | create of the \*Review types; POST, PUT, PATCH with dryRun=All | retry | retry | retry | retry | reset |
//! | exec, attach, port-forward, proxy | retry | fail | fail | fail | reset |
//!
//! The columns are the [`Stage`] that the attempt had reached. *forwarded* means that the client has
//! received a part of the response ([`is_resumed`]). The actions are:
//!
//! * *retry*: the request is sent on another connection, up to [`ATTEMPTS`] times, if jackstay still
//!   holds the part of its body that it has read.
//! * *fail*: the client gets an error ([`client_error`]).
//! * *reset*: the client's stream is reset, so that a truncated response does not look complete.
//! * *resume*: the watch continues on another connection ([`crate::watch`]).
//!
//! A watch whose response is a 410 is in the stage *too old*. It is sent to each other ready endpoint once,
//! up to [`ATTEMPTS`] times, because each apiserver has its own history, and one that has just started has
//! none. A [`RetryBudget`](super::retry_budget::RetryBudget) limits these requests, because otherwise a
//! client that repeats an old version would cause one request to each endpoint each time. When the budget is
//! used up, the client gets the 410.
//!
//! A read or a watch whose response says that the watch cache has not reached its version is in the stage *not
//! reached*, and the reads of any version decide.
//!
//! A 429 of an overloaded apiserver, or an answer that it cannot serve the resource yet, is in the stage *rejected*
//! ([`super::overload_rejection`]). A request that changes nothing is then sent to one other ready endpoint, within a
//! budget of a tenth of all requests. The client gets the first rejection if that one rejects the request as well. A
//! write is never sent again for this reason: the client repeats it after the Retry-After.
//!
//! A 401 or 403 of an apiserver that may have just started is in the stage *starting* ([`super::start_up`] has its table).
//! A request that changes nothing is then sent to one other endpoint that has been up longer, within the budget of hedges.
//! The client gets the response of that endpoint, or the refusal if it has none.
//!
//! A response that shows that the endpoint cannot serve the API group of the request ([`crate::group_health`]) is in the
//! stage *group failed*. A request that changes nothing is then sent to one after another of the ready endpoints at which
//! the group is not known to fail. If the aggregator says that the group is unavailable, the stage is *group
//! unavailable*: the request is sent again after a short pause, because apiservers share that state, and one that has lost
//! its path changes it for all. Both are within a budget. The client gets the first of these responses
//! if no other endpoint accepts the request. A write is never sent again for this reason.
//!
//! A heartbeat on an apiserver that is not healthy is in the stage *unanswered* after 4 s, and fails
//! (a heartbeat).
//!
//! A write that may have been executed is never sent again, and its error carries no Retry-After, because
//! client-go re-sends every verb after a 429 or 5xx with that header. The one exception is a heartbeat that can be carried
//! out only once ([`super::settlement`]).

use super::info::RequestKind;
use super::start_up;
use super::status_error::StatusError;

/// Maximum number of attempts at one request, the first included. Each failure means another lost
/// connection; so many during one request are an outage, which the client should notice.
pub const ATTEMPTS: u32 = 5;

/// How far an attempt got before it failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Connect or TLS failed, the stream was not opened, or the kernel was kept from sending its head
    /// ([`crate::unsent_requests`]).
    NotSent,
    /// The apiserver has not processed the request. It says so by `REFUSED_STREAM`, by a GOAWAY with a lower
    /// last stream id, or by one of the two responses that kube-apiserver sends before any handler runs
    /// while it shuts down ([`super::shutdown_rejection`]).
    Unprocessed,
    /// The response to a watch is a 410: the apiserver's history does not reach back to the requested
    /// version.
    TooOld,
    /// The watch cache of the endpoint has not reached the version of a read or a watch.
    NotReached,
    /// The apiserver rejected the request because of its own load or state; another one may accept it.
    Rejected,
    /// The response is a 401 or 403, and the process of the apiserver may have just started.
    Starting,
    /// The response shows that the endpoint cannot serve the API group ([`crate::group_health::GroupSignal::Failed`]).
    GroupFailed,
    /// The response says that the API group is unavailable ([`crate::group_health::GroupSignal::Unavailable`]).
    GroupUnavailable,
    /// The request was sent, and no response head arrived.
    NoHead,
    /// The request is a heartbeat, and jackstay has ended it before its response had arrived
    /// (a heartbeat).
    Unanswered,
    /// A response head arrived and was held back, to wait for the prefix of its body
    /// or to check whether the body is a rejection.
    HeadHeld,
}

impl Stage {
    /// The label of the metric that counts retries.
    pub const fn retry_reason(self) -> &'static str {
        match self {
            Self::NotSent => "not_sent",
            Self::Unprocessed => "unprocessed",
            Self::TooOld => "too_old",
            Self::NotReached => "not_reached",
            Self::Rejected => "rejected",
            Self::Starting => "starting",
            Self::GroupFailed => "group_failed",
            Self::GroupUnavailable => "group_unavailable",
            Self::NoHead | Self::Unanswered | Self::HeadHeld => "lost",
        }
    }
}

impl Stage {
    /// Whether the apiserver has answered, and another one may accept the request.
    const fn is_rejection(self) -> bool {
        matches!(
            self,
            Self::TooOld
                | Self::NotReached
                | Self::Rejected
                | Self::Starting
                | Self::GroupFailed
                | Self::GroupUnavailable
        )
    }
}

/// The action after a failed attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryDecision {
    /// Send the request on another connection.
    Retry,
    /// Send the request to another ready endpoint, if there is one and the budget allows it.
    RetryAtOtherEndpoint,
    /// Do not send the request again.
    Refuse(RetryRefusal),
}

/// Why a request is not sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryRefusal {
    /// The request may have been executed, or may not be executed twice.
    Unsafe,
    /// jackstay no longer holds its whole body.
    BodyNotHeld,
    /// The request has been sent [`ATTEMPTS`] times.
    AttemptsExhausted,
}

impl RetryRefusal {
    /// The label of the metric that counts refused retries.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unsafe => "unsafe",
            Self::BodyNotHeld => "not_held",
            Self::AttemptsExhausted => "attempts",
        }
    }
}

/// Decides whether a request is sent again after its attempt number `attempt` failed.
pub fn decide(kind: RequestKind, stage: Stage, body_is_held: bool, attempt: u32) -> RetryDecision {
    if !may_repeat(kind, stage) {
        RetryDecision::Refuse(RetryRefusal::Unsafe)
    } else if !body_is_held {
        RetryDecision::Refuse(RetryRefusal::BodyNotHeld)
    } else if attempt >= ATTEMPTS {
        RetryDecision::Refuse(RetryRefusal::AttemptsExhausted)
    } else if stage.is_rejection() {
        RetryDecision::RetryAtOtherEndpoint
    } else {
        RetryDecision::Retry
    }
}

/// The columns before *forwarded*: whether the request may be sent again.
const fn may_repeat(kind: RequestKind, stage: Stage) -> bool {
    match kind {
        RequestKind::Watch => true,
        RequestKind::Read => !matches!(stage, Stage::TooOld),
        RequestKind::Log | RequestKind::NonMutating => {
            !matches!(stage, Stage::TooOld | Stage::NotReached)
        }
        RequestKind::Write => matches!(stage, Stage::NotSent | Stage::Unprocessed),
        RequestKind::Tunnel => matches!(stage, Stage::NotSent),
    }
}

/// Whether a second attempt may run in parallel with the first one, which may still reach a handler.
pub const fn may_hedge(kind: RequestKind) -> bool {
    may_repeat(kind, Stage::NoHead)
}

/// Whether a 410 is held back so that the request can be sent to other endpoints.
pub const fn may_ask_other_endpoints(kind: RequestKind) -> bool {
    may_repeat(kind, Stage::TooOld)
}

/// Whether a response that shows that the API group fails is held back so that the request can be sent to another endpoint.
pub const fn may_ask_after_group_failure(kind: RequestKind) -> bool {
    may_repeat(kind, Stage::GroupFailed)
}

/// Whether a rejection for overload is held back so that the request can be sent to another endpoint.
pub const fn may_ask_after_rejection(kind: RequestKind) -> bool {
    may_repeat(kind, Stage::Rejected)
}

/// The stage of an attempt whose response has this status, if it rejects the request in a way that another endpoint may
/// not: 410 (too old), 504 (not reached), 429 and 503 (rejected), 401 and 403 (starting), 500 (group failed). Headers and
/// body decide whether it does ([`overload_rejection`](super::overload_rejection)), also of which of several kinds
/// ([`crate::group_health`]), or the uptime of the endpoint ([`start_up`]). `None` if the client gets the response.
pub const fn stage_of_rejection(kind: RequestKind, status: u16) -> Option<Stage> {
    let stage = match status {
        410 => Stage::TooOld,
        504 => Stage::NotReached,
        429 | 503 => Stage::Rejected,
        500 => Stage::GroupFailed,
        _ if start_up::is_refusal(status) => Stage::Starting,
        _ => return None,
    };
    if may_repeat(kind, stage) { Some(stage) } else { None }
}

/// The column *forwarded*: whether a response that ends early is resumed after the client has received a
/// part of it. Otherwise the client's stream is reset, because a truncated response must not look complete.
pub const fn is_resumed(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::Watch)
}

/// The error for the client of a request that is not sent again. `is_connection_dead` and `reason` describe the
/// last attempt.
///
/// A watch that fails [`ATTEMPTS`] times on live connections gets an error after which its client lists,
/// because sending the same watch again would probably fail again.
pub fn client_error(
    kind: RequestKind,
    stage: Stage,
    body_is_held: bool,
    is_connection_dead: bool,
    reason: &str,
) -> StatusError {
    let unprocessed = matches!(stage, Stage::NotSent | Stage::Unprocessed) || stage.is_rejection();
    if kind == RequestKind::Watch && (unprocessed || is_connection_dead) {
        StatusError::no_upstream_for_watch(reason)
    } else if unprocessed && !body_is_held {
        StatusError::unprocessed(reason)
    } else if unprocessed {
        StatusError::bad_gateway(format_args!(
            "the request was not processed and cannot be sent again: {reason}"
        ))
    } else if may_hedge(kind) {
        StatusError::bad_gateway(reason)
    } else if stage == Stage::Unanswered {
        StatusError::unanswered_heartbeat(reason)
    } else {
        StatusError::unknown_outcome(reason)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use RequestKind::{Log, NonMutating, Read, Tunnel, Watch, Write};
    use Stage::{
        GroupFailed, GroupUnavailable, HeadHeld, NoHead, NotReached, NotSent, Rejected, Starting,
        TooOld, Unanswered, Unprocessed,
    };

    /// All stages but [`Unanswered`], which only heartbeats have.
    pub(in crate::request) const STAGES: [Stage; 10] = [
        NotSent,
        Unprocessed,
        TooOld,
        NotReached,
        Rejected,
        Starting,
        GroupFailed,
        GroupUnavailable,
        NoHead,
        HeadHeld,
    ];

    /// For each kind, whether it may be repeated in each of [`STAGES`], and whether it is resumed.
    const TABLE: [(RequestKind, [bool; 10], bool); 6] = [
        (Read, [true, true, false, true, true, true, true, true, true, true], false),
        (Watch, [true; 10], true),
        (Log, [true, true, false, false, true, true, true, true, true, true], false),
        (Write, [true, true, false, false, false, false, false, false, false, false], false),
        (NonMutating, [true, true, false, false, true, true, true, true, true, true], false),
        (Tunnel, [true, false, false, false, false, false, false, false, false, false], false),
    ];

    #[test]
    fn decide_every_kind_and_stage_follows_the_table() {
        for (kind, may_repeat_in_stage, resumed) in TABLE {
            assert_eq!(is_resumed(kind), resumed, "{kind:?}");
            for (stage, may_repeat) in STAGES.into_iter().zip(may_repeat_in_stage) {
                let case = format!("{kind:?} {stage:?}");
                let expected = match (may_repeat, stage) {
                    (false, _) => RetryDecision::Refuse(RetryRefusal::Unsafe),
                    (true, stage) if stage.is_rejection() => RetryDecision::RetryAtOtherEndpoint,
                    (true, _) => RetryDecision::Retry,
                };
                assert_eq!(decide(kind, stage, true, 1), expected, "{case}");
                assert_eq!(decide(kind, stage, true, ATTEMPTS - 1), expected, "{case}");
                for (held, attempt, refusal) in [
                    (false, 1, RetryRefusal::BodyNotHeld),
                    (false, ATTEMPTS, RetryRefusal::BodyNotHeld),
                    (true, ATTEMPTS, RetryRefusal::AttemptsExhausted),
                ] {
                    let refusal = if may_repeat { refusal } else { RetryRefusal::Unsafe };
                    let decision = decide(kind, stage, held, attempt);
                    assert_eq!(decision, RetryDecision::Refuse(refusal), "{case} {held} {attempt}");
                }
            }
        }
    }

    #[test]
    fn stage_of_rejection_is_none_for_a_kind_that_is_not_repeated() {
        for (kind, may_repeat_in_stage, _) in TABLE {
            for (status, stage) in [
                (410, TooOld),
                (504, NotReached),
                (429, Rejected),
                (503, Rejected),
                (401, Starting),
                (403, Starting),
                (500, GroupFailed),
            ] {
                let mut stages = STAGES.into_iter().zip(may_repeat_in_stage);
                let may_repeat = stages.any(|(other, may_repeat)| other == stage && may_repeat);
                let expected = may_repeat.then_some(stage);
                assert_eq!(stage_of_rejection(kind, status), expected, "{kind:?} {status}");
            }
            for status in [200, 404, 409, 501, 502] {
                assert_eq!(stage_of_rejection(kind, status), None, "{kind:?} {status}");
            }
        }
    }

    #[test]
    fn client_error_every_kind_and_stage_follows_its_table() {
        /// The metric label of an error, and whether it says that the request was not processed.
        type Error = (&'static str, bool);
        const WATCH: Error = ("no_upstream", false);
        const NOT_HELD: Error = ("unprocessed", true);
        const UNPROCESSED: Error = ("bad_gateway", true);
        const SAFE: Error = ("bad_gateway", false);
        const UNKNOWN: Error = ("unknown_outcome", false);
        const HEARTBEAT: Error = ("heartbeat_ended", false);
        // Expected with a held body and a live connection; without a held body; with a dead connection.
        for (kind, stage, alive, not_held, dead) in [
            (Read, NotSent, UNPROCESSED, NOT_HELD, UNPROCESSED),
            (Read, Unprocessed, UNPROCESSED, NOT_HELD, UNPROCESSED),
            (Read, NoHead, SAFE, SAFE, SAFE),
            (Read, HeadHeld, SAFE, SAFE, SAFE),
            (Log, NoHead, SAFE, SAFE, SAFE),
            (NonMutating, Unprocessed, UNPROCESSED, NOT_HELD, UNPROCESSED),
            (NonMutating, NoHead, SAFE, SAFE, SAFE),
            (Watch, NotSent, WATCH, WATCH, WATCH),
            (Watch, Unprocessed, WATCH, WATCH, WATCH),
            (Watch, TooOld, WATCH, WATCH, WATCH),
            (Watch, NoHead, SAFE, SAFE, WATCH),
            (Watch, HeadHeld, SAFE, SAFE, WATCH),
            (Write, NotSent, UNPROCESSED, NOT_HELD, UNPROCESSED),
            (Write, Unprocessed, UNPROCESSED, NOT_HELD, UNPROCESSED),
            (Write, NoHead, UNKNOWN, UNKNOWN, UNKNOWN),
            (Write, HeadHeld, UNKNOWN, UNKNOWN, UNKNOWN),
            (Write, Unanswered, HEARTBEAT, HEARTBEAT, HEARTBEAT),
            (Tunnel, NotSent, UNPROCESSED, NOT_HELD, UNPROCESSED),
            (Tunnel, Unprocessed, UNPROCESSED, NOT_HELD, UNPROCESSED),
            (Tunnel, NoHead, UNKNOWN, UNKNOWN, UNKNOWN),
            (Tunnel, HeadHeld, UNKNOWN, UNKNOWN, UNKNOWN),
        ] {
            let error = |held, dead| {
                let error = client_error(kind, stage, held, dead, "lost");
                (error.label, error.message.contains("was not processed"))
            };
            let errors = [error(true, false), error(false, false), error(true, true)];
            assert_eq!(errors, [alive, not_held, dead], "{kind:?} {stage:?}");
        }
    }

    #[test]
    fn may_hedge_allows_only_requests_that_change_nothing() {
        assert!([Read, Watch, Log, NonMutating].into_iter().all(may_hedge));
        assert!(![Write, Tunnel].into_iter().any(may_hedge));
    }
}
