//! The state machine of one watch. It decides on each frame, and on the watch when its stream is lost.
//!
//! The session is pure: no I/O, no clock, no randomness. [`Session::step`] takes an [`Input`] and the
//! time, and returns the [`Effect`] that the body of the response executes.
//!
//! The *cursor* is the resource version of the last event that the client has received, or of a later
//! bookmark. Initial events arrive in no order, so a watch has no cursor until they are over.
//!
//! # States
//!
//! | request | first state |
//! |---|---|
//! | resourceVersion > 0, no `sendInitialEvents` | Ordered at that version |
//! | anything else | Initial |
//!
//! | state | input | next state | effect |
//! |---|---|---|---|
//! | Initial | `sendInitialEvents`: the bookmark annotated `k8s.io/initial-events-end`; otherwise: the first event that is not ADDED | Ordered | as in the table of frames |
//! | Initial, nothing forwarded, and not started at the most recent version | `StreamLost` | Resuming (the original request) | `Request` |
//! | Ordered, no oversized frame since the cursor | `StreamLost` | Resuming (at the cursor) | `Request` |
//! | Ordered | `MoveStarted` | Moving | |
//! | Moving | `MoveEnded`, moved | Ordered, unconfirmed | |
//! | Moving | `MoveEnded`, not moved | Ordered, as before | |
//! | Resuming | `AttemptEnded`: 200 with the client's Content-Type | Ordered, unconfirmed (the original request: the first state) | `Accept` |
//! | Resuming | 410, or an ERROR event as the first event | Resuming; this endpoint is not asked again in the round, because its history is too short | `Request` |
//! | Resuming | 429, 5xx | Resuming; this endpoint is asked again after its Retry-After | `Request` |
//! | Resuming | no head within 10 s (3 s with a withheld ERROR), or the connection failed | Resuming | `Request` |
//! | Resuming, nothing withheld | no endpoint can be reached | Resuming | `Hold`, then a new round |
//! | Resuming | any other answer, no endpoint left, or the round is over (30 s; 3 s with a withheld ERROR) | Ended | `End` |
//! | any other state | `StreamLost` | Ended | `End` |
//! | any | `ServerEnded` | Ended | |
//! | any | `Stop` | Ended | `End` |
//!
//! A watch ends instead of resuming if less than 2 s are left until its deadline, or if it was resumed 12
//! times in a window of a minute. A watch of an API group that an aggregated apiserver may serve is resumed
//! only with its original request, and only until the first frame is forwarded.
//!
//! # Frames
//!
//! A stream that continues a watch is *unconfirmed* until its first event above the cursor.
//!
//! | frame | first stream | later stream |
//! |---|---|---|
//! | not readable | forward; Passthrough | end: the client may have it already |
//! | ERROR 410 in Ordered, resumable | withhold, ask other endpoints | unconfirmed: next endpoint; later: withhold, ask other endpoints |
//! | any other ERROR | forward; Passthrough | unconfirmed: next endpoint; later: forward, Passthrough |
//! | Initial, any event | forward | (Initial is never resumed) |
//! | Ordered, above the cursor (bookmark: or at it) | forward; becomes the cursor | forward; becomes the cursor |
//! | Ordered, not above the cursor | forward; Passthrough | discard the first one, then end |
//! | Ordered, version is not a number | forward; Passthrough | end |
//!
//! "Forward" means "swallow" for a bookmark that the client did not ask for. A 410 is withheld because
//! every apiserver has a history of its own: one that has just started has none, while others may have
//! it. If no other apiserver has it, the client receives the 410.
//!
//! # How jackstay ends a watch
//!
//! | state | ending |
//! |---|---|
//! | a frame is unreadable, or an oversized frame is incomplete | reset |
//! | Ordered | clean: a reflector watches again without a list |
//! | Initial with `sendInitialEvents` and bookmarks for the client | clean: the client misses the bookmark that ends the initial events, and a reflector requests them again |
//! | Initial from the most recent version, nothing forwarded | clean: no event is missing, and a repeated request would start at a later version |
//! | Initial, otherwise | reset: a clean end would make incomplete initial events look complete |

mod input;
mod limiter;
mod round;
mod state;

use self::limiter::{MIN_REMAINING, MIN_REMAINING_TO_REBALANCE, ResumeLimiter};
use self::state::{Ordered, State};
use super::codec::event::{Event, EventType};
use super::request::{WatchRequest, resume_query};
use bytes::Bytes;
use std::time::Duration;
use tokio::time::Instant;

pub use self::input::{
    AttemptResult, Candidates, Effect, Ending, Exclusion, Input, MoveReason, NotResumable,
};
#[cfg(test)]
pub use self::limiter::RESUMES_PER_MINUTE;
pub use self::round::{ResumeRound, max_outage_jitter};

/// Checks in a row, one a minute, without a bookmark after which a watch counts as stale. An apiserver
/// sends one bookmark a minute (`cacher.go`, `bookmarkFrequency`).
const MISSED_BOOKMARKS: u8 = 3;

/// One watch.
#[derive(Debug)]
pub struct Session {
    request: WatchRequest,
    deadline: Option<Instant>,
    state: State,
    /// The client has part of an oversized frame whose end has not arrived.
    mid_frame: bool,
    limiter: ResumeLimiter,
    /// Checks in a row that found no new bookmark; `None` until the first bookmark.
    missed_bookmarks: Option<u8>,
    bookmark_since_check: bool,
}

impl Session {
    /// A watch that was requested at `requested_at` and has been answered with 200.
    pub fn new(request: WatchRequest, requested_at: Instant) -> Self {
        Self {
            deadline: request.timeout.and_then(|timeout| requested_at.checked_add(timeout)),
            state: State::first(&request, None),
            request,
            mid_frame: false,
            limiter: ResumeLimiter::default(),
            missed_bookmarks: None,
            bookmark_since_check: false,
        }
    }

    /// Processes one input. Frames and pieces of frames do not depend on the time.
    pub fn step(&mut self, input: Input<'_>, now: Instant) -> Effect {
        let effect = match input {
            Input::Frame(frame) => self.on_frame(frame),
            Input::OversizedPiece { begins, ends } => {
                self.mid_frame = !ends;
                self.state.on_oversized_piece(begins, &self.request)
            }
            Input::ServerEnded => {
                self.state = State::Ended { error_event: None };
                Effect::None
            }
            Input::StreamLost { quiet } => {
                // The next server has three minutes to send its first bookmark.
                self.missed_bookmarks = self.missed_bookmarks.map(|_| 0);
                match self.begin_round(now, |recent| ResumeRound::begin(now, recent, quiet)) {
                    Ok(()) => self.next_attempt(now, Duration::ZERO),
                    Err(reason) => self.end(reason),
                }
            }
            Input::Rejected { error_event, candidates } => {
                self.on_rejected(error_event, candidates, now)
            }
            Input::AttemptEnded { result, candidates } => {
                self.on_attempt_ended(result, candidates, now)
            }
            Input::OutageEnded { held } => self.on_outage_ended(held, now),
            Input::MoveStarted(reason) => self.on_move_started(reason, now),
            Input::MoveEnded { moved } => self.on_move_ended(moved, now),
            Input::Stop(reason) => self.stop(reason),
        };
        if let Effect::End(ending, _) = effect
            && ending != Ending::Withheld
        {
            self.state = State::Ended { error_event: None };
        }
        effect
    }

    fn on_frame(&mut self, frame: Option<Event<'_>>) -> Effect {
        let is_bookmark = frame.is_some_and(|event| event.event_type == EventType::Bookmark);
        let effect = self.state.on_frame(frame, &self.request);
        if is_bookmark && matches!(effect, Effect::Forward | Effect::Swallow) {
            self.missed_bookmarks = Some(0);
            self.bookmark_since_check = true;
        }
        effect
    }

    /// Enters Resuming, if the watch can be resumed. `begin` receives the number of recent resumes.
    fn begin_round(
        &mut self,
        now: Instant,
        begin: impl FnOnce(u32) -> ResumeRound,
    ) -> Result<(), NotResumable> {
        let cursor = self.state.resume_cursor(&self.request)?.cloned();
        if self.is_late(now) {
            return Err(NotResumable::Late);
        }
        let recent = self.limiter.count_resume(now).ok_or(NotResumable::TooOften)?;
        self.state = State::Resuming { cursor, round: begin(recent) };
        Ok(())
    }

    fn on_rejected(
        &mut self,
        error_event: Option<Bytes>,
        candidates: Candidates,
        now: Instant,
    ) -> Effect {
        if let Some(error_event) = error_event {
            let withheld = error_event.clone();
            let begin = |recent| ResumeRound::begin_withholding(now, recent, withheld);
            if self.begin_round(now, begin).is_err() {
                return self.end_withheld(NotResumable::TooOld, Some(error_event));
            }
        } else if let State::Ordered(watch) = &mut self.state
            && let Some(round) = watch.unconfirmed.take()
        {
            let cursor = self.request.resumable_group.then(|| watch.cursor.clone());
            self.state = State::Resuming { cursor, round };
        }
        self.on_attempt_ended(AttemptResult::ErrorEvent, candidates, now)
    }

    fn on_attempt_ended(
        &mut self,
        result: AttemptResult,
        candidates: Candidates,
        now: Instant,
    ) -> Effect {
        if result.is_accepted() {
            self.state.update(|state| match state {
                State::Resuming { cursor: Some(cursor), round } => {
                    State::Ordered(Ordered::new(cursor, true, Some(round)))
                }
                State::Resuming { cursor: None, round } => State::first(&self.request, Some(round)),
                other => other,
            });
            return Effect::Accept;
        }
        let State::Resuming { round, .. } = &self.state else {
            return self.end(NotResumable::GaveUp);
        };
        if result == (AttemptResult::NoHead { outage: true }) && !round.withholds_error() {
            return Effect::Hold;
        }
        let endpoints_left = if round.withholds_error() {
            candidates.ready
        } else if matches!(result, AttemptResult::Head { status: 410, .. }) {
            // The history of this endpoint does not become longer: another endpoint must be usable now.
            candidates.usable
        } else {
            candidates.any
        };
        if result.exclusion().is_none() || !endpoints_left || self.is_late(now) {
            return self.stop(NotResumable::GaveUp);
        }
        self.next_attempt(now, candidates.retry_after)
    }

    /// The next attempt of the round, not before `pause` has passed.
    fn next_attempt(&mut self, now: Instant, pause: Duration) -> Effect {
        if let State::Resuming { round, .. } = &mut self.state
            && let Some(max_jitter) = round.start_attempt(now)
            && pause <= round.max_pause()
        {
            return Effect::Request { max_jitter, pause };
        }
        self.stop(NotResumable::GaveUp)
    }

    fn on_outage_ended(&mut self, held: Duration, now: Instant) -> Effect {
        if self.is_late(now) {
            return Effect::HoldUntilDeadline;
        }
        let State::Resuming { round, .. } = &mut self.state else { return Effect::None };
        let quiet = round.is_quiet();
        *round = ResumeRound::begin(now, 0, quiet);
        Effect::Request { max_jitter: max_outage_jitter(held, quiet), pause: Duration::ZERO }
    }

    fn on_move_started(&mut self, reason: MoveReason, now: Instant) -> Effect {
        self.limiter.count_move(reason, now);
        self.state.update(|state| match state {
            State::Ordered(watch) => State::Moving(watch),
            other => other,
        });
        Effect::None
    }

    fn on_move_ended(&mut self, moved: bool, now: Instant) -> Effect {
        if moved {
            self.missed_bookmarks = self.missed_bookmarks.map(|_| 0);
        }
        self.state.update(|state| match state {
            State::Moving(watch) if moved => {
                let round = ResumeRound::begin(now, 0, false);
                State::Ordered(Ordered::new(watch.cursor, true, Some(round)))
            }
            State::Moving(watch) => State::Ordered(watch),
            other => other,
        });
        Effect::None
    }

    fn stop(&mut self, reason: NotResumable) -> Effect {
        let withheld = match &mut self.state {
            State::Resuming { round, .. } => round.take_withheld_error(),
            _ => None,
        };
        match reason {
            NotResumable::Unproven | NotResumable::Expired => self.end(reason),
            _ if withheld.is_none() => self.end(reason),
            NotResumable::OverBudget => self.end_withheld(reason, withheld),
            _ => self.end_withheld(NotResumable::TooOld, withheld),
        }
    }

    fn end(&self, reason: NotResumable) -> Effect {
        Effect::End(self.ending(), reason)
    }

    fn end_withheld(&mut self, reason: NotResumable, error_event: Option<Bytes>) -> Effect {
        self.state = State::Ended { error_event };
        Effect::End(Ending::Withheld, reason)
    }

    /// The query of the request that continues the watch, or starts it again. `query` is that of the first
    /// request upstream.
    pub fn resume_query(&self, query: &str, now: Instant) -> String {
        resume_query(query, self.state.cursor(), self.remaining(now))
    }

    /// Whether the watch may be moved for this reason now.
    pub fn can_move(&self, reason: MoveReason, now: Instant) -> bool {
        let min_remaining = match reason {
            MoveReason::Rebalance => MIN_REMAINING_TO_REBALANCE,
            MoveReason::Evacuate | MoveReason::Drain => MIN_REMAINING,
        };
        self.is_resumable()
            && self.remaining(now).is_none_or(|remaining| remaining >= min_remaining)
            && self.limiter.may_move(reason, now)
    }

    /// Whether the watch would continue at its cursor if it lost its stream now.
    pub fn is_resumable(&self) -> bool {
        matches!(self.state.resume_cursor(&self.request), Ok(Some(_)))
    }

    /// Whether the watch would continue or end cleanly if it lost its stream now.
    pub fn can_lose_stream(&self) -> bool {
        self.state.resume_cursor(&self.request).is_ok() || self.ending() == Ending::Clean
    }

    /// Whether the initial events are over.
    pub fn is_ordered(&self) -> bool {
        self.state.is_ordered()
    }

    /// Whether an event on the current stream has shown that it continues the watch.
    pub fn is_confirmed(&self) -> bool {
        self.state.is_confirmed()
    }

    /// Why the frames so far prevent a resume, permanently or until the next frame.
    pub fn not_resumable(&self) -> Option<NotResumable> {
        self.state.not_resumable(&self.request)
    }

    /// How the watch ends if jackstay ends it now.
    pub fn ending(&self) -> Ending {
        let is_clean = self.state.may_end_cleanly(&self.request) && !self.mid_frame;
        if is_clean { Ending::Clean } else { Ending::Reset }
    }

    /// Whether the session withholds an ERROR event while other endpoints are asked.
    pub fn withholds_error(&self) -> bool {
        matches!(&self.state, State::Resuming { round, .. } if round.withholds_error())
    }

    /// The withheld ERROR event, after [`Ending::Withheld`].
    pub fn take_error_event(&mut self) -> Option<Bytes> {
        match &mut self.state {
            State::Ended { error_event } => error_event.take(),
            _ => None,
        }
    }

    /// How long the next attempt may take.
    pub fn attempt_timeout(&self) -> Duration {
        match &self.state {
            State::Resuming { round, .. } => round.attempt_timeout(),
            _ => Duration::ZERO,
        }
    }

    /// When the server would end the watch; `None` if the client has set no `timeoutSeconds`.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Called once a minute. Returns true, once, after the third check in a row without a bookmark on a
    /// watch that had bookmarks: the watch cache of its apiserver may be stale. The proxy counts that for
    /// operators and does nothing else about it.
    pub fn has_gone_stale(&mut self) -> bool {
        let seen = std::mem::take(&mut self.bookmark_since_check);
        let Some(missed) = self.missed_bookmarks.as_mut().filter(|_| !seen) else { return false };
        *missed = missed.saturating_add(1);
        *missed == MISSED_BOOKMARKS
    }

    fn remaining(&self, now: Instant) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now))
    }

    fn is_late(&self, now: Instant) -> bool {
        self.remaining(now).is_some_and(|remaining| remaining < MIN_REMAINING)
    }
}
