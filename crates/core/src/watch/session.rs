//! The state machine of one watch. It decides on each frame, and on the watch when its stream is lost. It is
//! pure: no I/O, no clock, no randomness. [`Session::step`] takes a [`SessionInput`] and the time, and returns the
//! [`SessionEffect`] that the response body executes.
//!
//! The *cursor* is the resource version of the last event that the client has received, or of a later
//! bookmark. Initial events arrive in no order, so a watch has no cursor until they are complete. Events whose objects
//! etcd has deleted in one transaction have one version: [`cursor`] has the tables of where a watch continues within them,
//! and of what is lost.
//!
//! # States
//!
//! | state | meaning |
//! |---|---|
//! | Initial | initial events arrive |
//! | Ordered | events arrive in the order of their versions, after the cursor |
//! | Moving | as Ordered, while the body opens a second stream |
//! | Resuming | there is no stream; a *round* of attempts asks endpoints to continue the watch |
//! | Passthrough | everything is forwarded; the watch cannot be resumed |
//! | Ended | the client's stream ends |
//!
//! A watch begins in Ordered if its request has a resourceVersion > 0 and no `sendInitialEvents`, and in
//! Initial otherwise.
//!
//! | state | input | next state | effect |
//! |---|---|---|---|
//! | Initial | `Frame`: with `sendInitialEvents` the bookmark annotated `k8s.io/initial-events-end`, otherwise the first event that is not ADDED | Ordered; Passthrough if its version is not a number | `Forward` or `Swallow` |
//! | Initial, nothing forwarded, not started at the most recent version | `StreamLost` | Resuming with the original request | `Request` |
//! | Ordered, neither an oversized frame after the cursor nor an unknown event type | `StreamLost` | Resuming at the cursor | `Request` |
//! | any other state | `StreamLost` | Ended | `End` |
//! | Ordered | `Rejected` with the withheld ERROR event | Resuming, withholding the event | `Request` |
//! | Ordered, unconfirmed | `Rejected` without an event | Resuming; the endpoint is excluded from the round | `Request` |
//! | Resuming | `Accepted`: 200 with the client's Content-Type | Ordered, unconfirmed; for the original request the state in which it begins | |
//! | Resuming | `AttemptFailed`: 410 | Resuming; the endpoint is excluded from the round: its history is too short | `Request` |
//! | Resuming | `AttemptFailed`: 406, or 200 with another Content-Type | Resuming; the endpoint is excluded from the round: it does not serve the encoding. Later attempts of the round have 1 s, and the watch ends after one if no endpoint is connected | `Request` |
//! | Resuming | `AttemptFailed`: 401, 403, another endpoint is ready | Resuming; the endpoint is excluded from the round: it may have just started ([`crate::request::start_up`]) | `Request` |
//! | Resuming | `AttemptFailed`: 401, 403, no other is ready, and an endpoint that has refused is starting | Resuming; those that have refused are asked again after 1 s | `Request` |
//! | Resuming | `AttemptFailed`: 429, 5xx | Resuming; the endpoint is asked again after its Retry-After | `Request` |
//! | Resuming | `AttemptFailed`: no head within 10 s (withholding: 3 s), or the connection failed | Resuming | `Request` |
//! | Resuming, not withholding | `AttemptFailed`: no endpoint can be reached | Resuming | `Hold` |
//! | Resuming | `AttemptFailed`: any other response, no endpoint left, every Retry-After above 30 s, or the round has lasted 30 s (withholding: 3 s) | Ended | `End` |
//! | Resuming | `OutageEnded` | Resuming, in a new round | `Request`; `HoldUntilDeadline` if less than 2 s are left |
//! | Ordered | `MoveStarted` | Moving | |
//! | Moving | `MoveEnded`, moved | Ordered, unconfirmed | |
//! | Moving | `MoveEnded`, not moved | Ordered, as before | |
//! | any | `ServerEnded` | Ended | |
//! | Ordered | `GroupUnordered` | Passthrough | |
//! | any | `Stop` | Ended | `End` |
//! | any | `HistoryLost` with an ERROR event | Ended | `End`, after the event if the ending is clean |
//! | any | `Contradicted` | Ended | `End`, with a reset |
//! | any other than Resuming | `Accepted`, `AttemptFailed`, `OutageEnded`: impossible | Ended | `End`; a panic with debug assertions |
//!
//! A watch ends instead of resuming if less than 2 s are left until its deadline, or if it was resumed 12
//! times in a window of a minute. In an API group whose watches are not resumed, a watch is repeated only with its
//! original request, and only until the first frame is forwarded; then it enters Passthrough.
//!
//! # Frames
//!
//! The response to a repeated request in Ordered is *unconfirmed* until its first event above the cursor, or
//! its first bookmark at or above the cursor.
//!
//! | state and frame | response to the original request | response to a request at the cursor |
//! |---|---|---|
//! | unreadable | forward; Passthrough | end: the client may have the frame already |
//! | Initial: ERROR, or an unknown event type | forward; Passthrough | |
//! | Initial: any other event | forward | |
//! | Ordered: ERROR 410, while the watch can be resumed | withhold and ask other endpoints; next endpoint if a 410 is withheld already | unconfirmed: next endpoint; confirmed: withhold and ask other endpoints |
//! | Ordered: any other ERROR | forward; Passthrough | unconfirmed: next endpoint; confirmed: forward, Passthrough |
//! | Ordered: above the cursor, or a bookmark at it, before the stream has repeated every event at the cursor that the client has | | end |
//! | Ordered: otherwise above the cursor, or a bookmark at it | forward; becomes the cursor | forward; becomes the cursor |
//! | Ordered: DELETED at the cursor | forward, if a frame has shown the cursor | forward, if a frame of this stream has shown the cursor or the stream was requested before it |
//! | Ordered: at the cursor, on a stream that was requested before it, and the client has the event | | discard |
//! | Ordered: an unknown event type above the cursor | forward; the watch cannot be resumed any more | the same |
//! | Ordered: otherwise not above the cursor | forward; Passthrough | discard the first such event, end at the second |
//! | Ordered: the version is not a number | forward; Passthrough | end |
//! | Ordered: more than 2⁵⁶ above a cursor that a frame has shown | forward; Passthrough | end |
//! | Ordered: oversized, in pieces | forward; the watch cannot be resumed before the next frame | unconfirmed: end; confirmed: the same |
//!
//! "Forward" means "swallow" for a bookmark that the client did not ask for. A 410 is withheld because
//! every apiserver has a history of its own: one that has just started has none, while others may reach
//! back to the cursor. If none does, the client receives the 410.
//!
//! # Which groups are resumed
//!
//! A request that resumes a watch is the request that a client sends after a clean end of its watch, and a watch
//! of an aggregated API reaches the same backend through every kube-apiserver. KEP-5504 makes the versions of
//! every resource decimal numbers that can be compared. So watches of all groups are resumed, except those
//! in `never_resume_groups`. A *contradiction* ends that for the group, because an aggregated apiserver may break
//! the rule: a version that is not a number, does not grow, or jumps, or a resumed stream whose frames do not follow
//! the cursor ([`NotResumable::is_contradiction`]). The group is remembered
//! in its set of groups and shown in `/status`. Built-in groups are never remembered. A version
//! that only the client has named contradicts nothing: otherwise a client that requests a version in the future
//! would end the resumes of all others.
//!
//! | failure | what happens | a client without jackstay |
//! |---|---|---|
//! | replicas with stores of their own, versions of the new store below the cursor | the new stream is silent, or sends a bookmark or event below the cursor: the first is discarded, the watch ends cleanly at the second, and the group is remembered; a 410 ends the watch if no endpoint accepts the cursor | sends the same request after a clean end, and gets the same frames |
//! | the same, versions of the new store above the cursor | the watch continues in the history of the new store, which cannot be detected; such groups belong in `never_resume_groups`. Watches of groups that are not built in are moved only away from a degraded endpoint or a draining connection, never for balance | continues in the same history |
//! | the store was reset, its versions begin again | on the running stream: forwarded, Passthrough, remembered. On a resumed stream: as in the first row | receives the same frames |
//! | a CRD is deleted | its kube-apiserver ends the watch, which is forwarded; if the stream is lost at the same time, the attempt is answered with 404 and the watch ends cleanly | watches again, and gets the 404 |
//! | a CRD is deleted and created again | versions continue to grow, because the store is the same etcd; the new watch cache begins after the cursor, so that the attempt is answered with 410, which is not resumed | watches again, and gets the 410 |
//! | a version jumps by more than 2⁵⁶ | forwarded, Passthrough, remembered; on a resumed stream the watch ends cleanly before the frame | has the version, which no other server knows |
//! | a server answers 504 because the cursor is in its future | asked again within the round, then the watch ends cleanly | gets the 504 and repeats its request |
//! | two upstreams serve groups of one name | each upstream has a memory of its own | |
//! | one group has versions from a CRD and from an aggregated apiserver | the group is remembered as a whole | |
//!
//! # How jackstay ends a watch
//!
//! | state | ending |
//! |---|---|
//! | after an unreadable frame, or within an oversized frame | reset |
//! | two streams of the watch contradict each other ([`super::shadow`]) | reset: the client may lack an event below its last one, and a reflector lists |
//! | Ordered after a DELETED of an Event, the stream lost | reset: others may have the same version, and a reflector lists |
//! | Ordered otherwise, or Passthrough after the initial events | clean: a reflector watches again without a list |
//! | Initial with `sendInitialEvents` and bookmarks for the client | clean: the client notices that the bookmark which ends the initial events is missing, and a reflector requests them again |
//! | Initial from the most recent version, nothing forwarded | clean: no event is missing, and a repeated request would start at a later version |
//! | Initial, otherwise | reset: a clean end would make incomplete initial events look complete |

mod cursor;
mod exclusions;
mod input;
mod leave;
pub(in crate::watch) mod limiter;
mod queries;
mod round;
pub(super) mod second;
mod state;
mod stream;

use self::exclusions::Exclusions;
use self::limiter::ResumeLimiter;
use self::state::{Ordered, State};
use super::codec::event::Event;
use super::request::WatchRequest;
use crate::endpoint_condition::EndpointCondition;
use crate::pool::EndpointKey;
use bytes::Bytes;
use std::time::{Duration, Instant};

pub use self::input::{
    AttemptResult, Ending, Exclusion, MoveReason, NotResumable, SessionEffect, SessionInput,
};
pub use self::leave::{
    AfterSearch, FIRST_FRAME_TIMEOUT, Leave, LeaveReason, SEARCH_TIMEOUT, Searches, offered_move,
};
#[cfg(test)]
pub use self::limiter::MAX_RESUMES;
pub use self::round::{ResumeRound, max_outage_jitter, no_connection_pause};

/// One watch.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Session {
    request: WatchRequest,
    deadline: Option<Instant>,
    state: State,
    /// The client has the beginning of an oversized frame, but not its end.
    mid_frame: bool,
    /// An event or a bookmark has shown the cursor; otherwise it is the version that the client requested.
    cursor_shown: bool,
    /// Boxed, because most watches are never resumed.
    limiter: Option<Box<ResumeLimiter>>,
    /// Boxed, because a watch that has not lost a stream has none.
    exclusions: Option<Box<Exclusions>>,
}

impl Session {
    /// A watch that was requested at `requested_at` and accepted with status 200.
    pub fn new(request: WatchRequest, requested_at: Instant) -> Self {
        Self {
            deadline: request.timeout.and_then(|timeout| requested_at.checked_add(timeout)),
            state: State::first(&request, None),
            request,
            mid_frame: false,
            cursor_shown: false,
            limiter: None,
            exclusions: None,
        }
    }

    /// Processes one input. What happens to frames and pieces of frames does not depend on the time.
    pub fn step(&mut self, input: SessionInput<'_>, now: Instant) -> SessionEffect {
        let effect = match input {
            SessionInput::Frame(frame) => self.on_frame(frame, now),
            SessionInput::OversizedPiece { begins, ends } => {
                self.mid_frame = !ends;
                self.state.on_oversized_piece(begins, &self.request)
            }
            SessionInput::ServerEnded => {
                self.state = State::Ended { error_event: None };
                SessionEffect::None
            }
            SessionInput::GroupUnordered => {
                self.state.on_group_unordered();
                SessionEffect::None
            }
            SessionInput::StreamLost { quiet } => {
                self.forget_round(now);
                match self.begin_round(now, |recent| ResumeRound::begin(now, recent, quiet)) {
                    Ok(()) => self.next_attempt(now, Duration::ZERO),
                    Err(reason) => self.end(reason),
                }
            }
            SessionInput::Rejected { error_event, endpoint, endpoints } => {
                self.on_rejected(error_event, endpoint, endpoints, now)
            }
            SessionInput::Accepted => self.on_accepted(),
            SessionInput::AttemptFailed { result, endpoint, endpoints } => {
                self.on_attempt_failed(result, endpoint, endpoints, now)
            }
            SessionInput::OutageEnded { held } => self.on_outage_ended(held, now),
            SessionInput::MoveStarted(reason) => self.on_move_started(reason, now),
            SessionInput::MoveEnded { moved } => self.on_move_ended(moved, now),
            SessionInput::Stop(reason) => self.stop(reason, now),
            SessionInput::HistoryLost { error_event } => self.on_history_lost(error_event),
            SessionInput::Contradicted => SessionEffect::End(Ending::Reset, NotResumable::Diverged),
        };
        if let SessionEffect::End(ending, _) = effect
            && ending != Ending::Withheld
        {
            self.state = State::Ended { error_event: None };
        }
        if self.exclusions.is_some() && self.state.is_confirmed() {
            self.forget_round(now);
        }
        effect
    }

    /// Any endpoint may be asked again, unless a Retry-After runs.
    fn forget_round(&mut self, now: Instant) {
        self.exclusions.take_if(|exclusions| !exclusions.forget_round(now));
    }

    fn on_frame(&mut self, frame: Option<Event<'_>>, now: Instant) -> SessionEffect {
        let effect = self.state.on_frame(frame, self.cursor_shown, &self.request, now);
        if matches!(effect, SessionEffect::Forward | SessionEffect::Swallow) {
            self.cursor_shown |= matches!(self.state, State::Ordered(_));
        }
        effect
    }

    /// Enters Resuming if the watch can be resumed. `begin` receives the number of recent resumes.
    fn begin_round(
        &mut self,
        now: Instant,
        begin: impl FnOnce(u32) -> ResumeRound,
    ) -> Result<(), NotResumable> {
        let cursor = self.state.resume_cursor(&self.request)?.cloned();
        if self.is_late(now) {
            return Err(NotResumable::Late);
        }
        let recent =
            self.limiter.get_or_insert_default().count_resume(now).ok_or(NotResumable::TooOften)?;
        self.state = State::Resuming { cursor, round: Box::new(begin(recent)) };
        Ok(())
    }

    fn on_rejected(
        &mut self,
        error_event: Option<Bytes>,
        endpoint: EndpointKey,
        endpoints: &[EndpointCondition],
        now: Instant,
    ) -> SessionEffect {
        if let Some(error_event) = error_event {
            let withheld = error_event.clone();
            let begin = |recent| ResumeRound::begin_withholding(now, recent, withheld);
            if self.begin_round(now, begin).is_err() {
                return self.end_withheld(NotResumable::TooOld, Some(error_event));
            }
        } else if let State::Ordered(watch) = &mut self.state
            && let Some(round) = watch.stream.unconfirmed.take()
        {
            let cursor = self.request.resumable_group.then(|| watch.cursor.clone());
            self.state = State::Resuming { cursor, round };
        }
        self.on_attempt_failed(AttemptResult::ErrorEvent, Some(endpoint), endpoints, now)
    }

    fn on_accepted(&mut self) -> SessionEffect {
        if !matches!(self.state, State::Resuming { .. }) {
            return self.impossible("Accepted");
        }
        self.state.update(|state| match state {
            State::Resuming { cursor: Some(cursor), round } => {
                State::Ordered(Ordered::resumed(cursor, round))
            }
            State::Resuming { cursor: None, round } => State::first(&self.request, Some(round)),
            other => other,
        });
        SessionEffect::None
    }

    fn on_attempt_failed(
        &mut self,
        result: AttemptResult,
        endpoint: Option<EndpointKey>,
        endpoints: &[EndpointCondition],
        now: Instant,
    ) -> SessionEffect {
        let State::Resuming { round, .. } = &self.state else {
            return self.impossible("AttemptFailed");
        };
        let withholds_error = round.withholds_error();
        if result == (AttemptResult::NoHead { outage: true }) && !withholds_error {
            self.forget_round(now);
            return SessionEffect::Hold;
        }
        let exclusions = self.exclusions.get_or_insert_default();
        exclusions.record(result, endpoint, withholds_error, now);
        let mut candidates = exclusions.candidates(endpoints, now);
        let is_refused = result.is_refusal() && !withholds_error;
        if is_refused && !candidates.ready && exclusions.ask_starting_again(endpoints, now) {
            candidates = exclusions.candidates(endpoints, now);
            candidates.ready = candidates.any;
        }
        let endpoints_left = if is_refused {
            // A client without rights is refused by every endpoint.
            candidates.ready
        } else if withholds_error
            || result.lacks_encoding()
            || matches!(result, AttemptResult::Head { status: 410, .. })
        {
            // Waiting adds no encoding and makes no history longer, so another endpoint must be usable now. One that
            // connects again is usable: its history is as long as before.
            candidates.usable
        } else if exclusions.encoding_refused {
            // The client may get another encoding now, instead of a pause until an endpoint returns.
            candidates.connected
        } else {
            candidates.any
        };
        if result.exclusion().is_none() || !endpoints_left || self.is_late(now) {
            return self.stop(NotResumable::GaveUp, now);
        }
        self.next_attempt(now, candidates.retry_after)
    }

    /// Requests the next attempt of the round, at the earliest after `pause`.
    fn next_attempt(&mut self, now: Instant, pause: Duration) -> SessionEffect {
        if let State::Resuming { round, .. } = &mut self.state
            && let Some(max_jitter) = round.start_attempt(now)
            && pause <= round.max_pause()
        {
            return SessionEffect::Request { max_jitter, pause };
        }
        self.stop(NotResumable::GaveUp, now)
    }

    fn on_outage_ended(&mut self, held: Duration, now: Instant) -> SessionEffect {
        let is_late = self.is_late(now);
        let State::Resuming { round, .. } = &mut self.state else {
            return self.impossible("OutageEnded");
        };
        if is_late {
            return SessionEffect::HoldUntilDeadline;
        }
        let quiet = round.is_quiet();
        **round = ResumeRound::begin(now, 0, quiet);
        SessionEffect::Request { max_jitter: max_outage_jitter(held, quiet), pause: Duration::ZERO }
    }

    fn on_move_started(&mut self, reason: MoveReason, now: Instant) -> SessionEffect {
        self.limiter.get_or_insert_default().count_move(reason, now);
        self.state.update(|state| match state {
            State::Ordered(watch) => State::Moving(watch),
            other => other,
        });
        SessionEffect::None
    }

    fn on_move_ended(&mut self, moved: bool, now: Instant) -> SessionEffect {
        if moved {
            self.forget_round(now);
        }
        self.state.update(|state| match state {
            State::Moving(watch) if moved => {
                let round = ResumeRound::begin(now, 0, false);
                State::Ordered(Ordered::resumed(watch.cursor, Box::new(round)))
            }
            State::Moving(watch) => State::Ordered(watch),
            other => other,
        });
        SessionEffect::None
    }

    fn stop(&mut self, reason: NotResumable, now: Instant) -> SessionEffect {
        if let State::Ordered(_) = self.state {
            return SessionEffect::End(self.ending_by_choice(now), reason);
        }
        let withheld = match &mut self.state {
            State::Resuming { round, .. } => round.take_withheld_error(),
            _ => None,
        };
        match (withheld, reason) {
            (None, _) | (_, NotResumable::Unproven | NotResumable::Expired) => self.end(reason),
            (withheld, NotResumable::OverBudget) => self.end_withheld(reason, withheld),
            (withheld, _) => self.end_withheld(NotResumable::TooOld, withheld),
        }
    }

    /// The event is for a client that has a whole number of frames and waits for events after a version.
    fn on_history_lost(&mut self, error_event: Bytes) -> SessionEffect {
        let reason = NotResumable::HistoryLost;
        match self.ending() {
            Ending::Clean => self.end_withheld(reason, Some(error_event)),
            ending => SessionEffect::End(ending, reason),
        }
    }

    /// A defect, after which the watch could wait forever.
    #[cold]
    fn impossible(&self, input: &str) -> SessionEffect {
        debug_assert!(false, "input {input} in state {:?}", self.state);
        self.end(NotResumable::InternalError)
    }

    fn end(&self, reason: NotResumable) -> SessionEffect {
        SessionEffect::End(self.ending(), reason)
    }

    fn end_withheld(&mut self, reason: NotResumable, error_event: Option<Bytes>) -> SessionEffect {
        self.state = State::Ended { error_event };
        SessionEffect::End(Ending::Withheld, reason)
    }
}
