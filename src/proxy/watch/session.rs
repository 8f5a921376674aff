//! The state machine of one watch: what happens to each frame, and to the watch when its stream is lost.
//!
//! The session is pure: no I/O, no clock, no randomness. [`Session::step`] takes an [`Input`] and the
//! time, and returns the [`Effect`] that [`super::body`] executes.
//!
//! The *cursor* is the resource version of the last event that the client has, or of a bookmark after
//! it. The initial events of a watch come in no order, so their versions are no cursor.
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
//! | Initial, nothing forwarded, and not begun at the server's present | `StreamLost` | Resuming (the original request) | `Request` |
//! | Ordered, no oversized frame since the cursor | `StreamLost` | Resuming (at the cursor) | `Request` |
//! | Ordered | `MoveStarted` | Moving | |
//! | Moving | `MoveEnded`, moved | Ordered, on trial | |
//! | Moving | `MoveEnded`, not moved | Ordered, as before | |
//! | Resuming | `Answered`: 200 with the client's Content-Type | Ordered, on trial (the original request: the first state) | `Accept` |
//! | Resuming | 410, or an ERROR event as the first event | Resuming; not this endpoint again: history is per server | `Request` |
//! | Resuming | 429, 5xx | Resuming; this endpoint not before its Retry-After | `Request` |
//! | Resuming | no head within 10 s, or none at all | Resuming | `Request` |
//! | Resuming, nothing withheld | no endpoint can be reached | Resuming | `Hold`, and then a new round |
//! | Resuming | any other answer, no endpoint left, or the round is over (30 s; 3 s with a withheld ERROR) | Ended | `End` |
//! | any other state | `StreamLost` | Ended | `End` |
//! | any | `ServerEnded` | Ended | |
//! | any | `Stop` | Ended | `End` |
//!
//! A watch ends instead of resuming if less than 2 s are left until its deadline, or if it was resumed 12
//! times within a minute. A watch of an API group that an aggregated apiserver may serve is resumed
//! only with its original request, and only until the first frame is forwarded.
//!
//! # Frames
//!
//! A stream that continues a watch is *on trial* until its first event above the cursor.
//!
//! | frame | first stream | later stream |
//! |---|---|---|
//! | not readable | forward; Passthrough | end: the client may have it already |
//! | ERROR 410 in Ordered, resumable | withhold, ask other endpoints | on trial: next endpoint; later: withhold, ask other endpoints |
//! | any other ERROR | forward; Passthrough | on trial: next endpoint; later: forward, Passthrough |
//! | Initial, any event | forward | (Initial is never resumed) |
//! | Ordered, above the cursor (bookmark: or at it) | forward; becomes the cursor | forward; becomes the cursor |
//! | Ordered, not above the cursor | forward; Passthrough | discard the first one, then end |
//! | Ordered, version is not a number | forward; Passthrough | end |
//!
//! "Forward" means "swallow" for a bookmark that the client did not ask for. A 410 is withheld because
//! history is per server: a server that has just started has none, while others may have it. If no
//! other server has it either, the client gets the 410.
//!
//! # How a watch ends that its server has not ended
//!
//! | state | ending |
//! |---|---|
//! | a frame is unreadable, or an oversized frame is incomplete | reset |
//! | Ordered | clean: a reflector watches again without a list |
//! | Initial with `sendInitialEvents` and bookmarks for the client | clean: the client misses the bookmark that ends the initial events, and a reflector requests them again |
//! | Initial from the server's present, nothing forwarded | clean: nothing is incomplete, and a repeated request would begin later |
//! | Initial, otherwise | reset: a clean end would make incomplete initial events look complete |

mod bookmarks;
mod input;
mod limiter;
mod ordered;
mod round;
mod state;

use self::bookmarks::BookmarkMonitor;
use self::limiter::{MIN_REMAINING, MIN_REMAINING_TO_REBALANCE, ResumeLimiter};
use self::ordered::Ordered;
use self::state::{Resuming, State};
use super::codec::event::{Event, EventType, Unreadable};
use super::request::{ResumePoint, WatchRequest};
use bytes::Bytes;
use std::time::Duration;
use tokio::time::Instant;

pub use self::input::{Answer, Effect, Ending, Exclusion, Input, MoveReason, NotResumable, Peers};
pub use self::limiter::RESUMES_PER_MINUTE;
pub use self::round::{Round, return_jitter};

/// One watch.
#[derive(Debug)]
pub struct Session {
    request: WatchRequest,
    deadline: Option<Instant>,
    state: State,
    /// The client has part of an oversized frame whose end has not arrived.
    mid_frame: bool,
    limiter: ResumeLimiter,
    bookmarks: BookmarkMonitor,
}

impl Session {
    /// A watch that was requested at `requested_at` and has been answered with 200.
    pub fn new(request: WatchRequest, requested_at: Instant) -> Self {
        Self {
            deadline: request.timeout.and_then(|timeout| requested_at.checked_add(timeout)),
            state: State::first(&request),
            request,
            mid_frame: false,
            limiter: ResumeLimiter::default(),
            bookmarks: BookmarkMonitor::default(),
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
            Input::StreamLost { quiet, random } => {
                self.bookmarks.restart();
                match self.begin_round(now, |recent| Round::begin(now, recent, quiet)) {
                    Ok(()) => self.request_after(now, random, Duration::ZERO),
                    Err(reason) => self.end(reason),
                }
            }
            Input::Rejected { error_event, peers, random } => {
                self.on_rejected(error_event, peers, now, random)
            }
            Input::Answered { answer, peers, random } => self.on_answer(answer, peers, now, random),
            Input::Returned { held, random } => self.on_return(held, now, random),
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

    fn on_frame(&mut self, frame: Result<Event<'_>, Unreadable>) -> Effect {
        let is_bookmark = frame.is_ok_and(|event| event.event_type == EventType::Bookmark);
        let effect = self.state.on_frame(frame, &self.request);
        if is_bookmark && matches!(effect, Effect::Forward | Effect::Swallow) {
            self.bookmarks.seen();
        }
        effect
    }

    /// Enters Resuming, if the watch can be resumed.
    fn begin_round(
        &mut self,
        now: Instant,
        begin: impl FnOnce(u32) -> Round,
    ) -> Result<(), NotResumable> {
        let cursor = self.state.resume_cursor(&self.request)?.cloned();
        if self.is_late(now) {
            return Err(NotResumable::Late);
        }
        let recent = self.limiter.resume(now).ok_or(NotResumable::TooOften)?;
        self.state = State::Resuming(Resuming { cursor, round: begin(recent) });
        Ok(())
    }

    fn on_rejected(
        &mut self,
        error_event: Option<Bytes>,
        peers: Peers,
        now: Instant,
        random: u64,
    ) -> Effect {
        if let Some(error_event) = error_event {
            let withheld = error_event.clone();
            let begin = |recent| Round::withholding(now, recent, withheld);
            if self.begin_round(now, begin).is_err() {
                return self.end_withheld(NotResumable::TooOld, Some(error_event));
            }
        } else if let State::Ordered(watch) = &mut self.state
            && let Some(round) = watch.take_trial()
        {
            let cursor = self.request.resumable_group.then(|| watch.cursor().clone());
            self.state = State::Resuming(Resuming { cursor, round });
        }
        self.on_answer(Answer::ErrorEvent, peers, now, random)
    }

    fn on_answer(&mut self, answer: Answer, peers: Peers, now: Instant, random: u64) -> Effect {
        if answer.is_accepted() {
            return self.accept();
        }
        let late = self.is_late(now);
        let State::Resuming(Resuming { round, .. }) = &self.state else {
            return self.end(NotResumable::GaveUp);
        };
        if answer == (Answer::None { outage: true }) && !round.withholds() {
            return Effect::Hold;
        }
        let peers_left = if round.withholds() {
            peers.ready
        } else if matches!(answer, Answer::Head { status: 410, .. }) {
            // A history that is too short stays too short: another endpoint must be usable now.
            peers.usable
        } else {
            peers.any
        };
        if answer.exclusion().is_none() || !peers_left || late {
            return self.stop(NotResumable::GaveUp);
        }
        self.request_after(now, random, peers.retry_after)
    }

    fn accept(&mut self) -> Effect {
        self.state = match self.take_state() {
            State::Resuming(Resuming { cursor: Some(cursor), round }) => {
                State::Ordered(Ordered::later(cursor, round))
            }
            State::Resuming(Resuming { cursor: None, round }) => {
                State::first(&self.request).on_trial(round)
            }
            other => other,
        };
        Effect::Accept
    }

    /// The next attempt of the round, after the jitter and not before `pause`.
    fn request_after(&mut self, now: Instant, random: u64, pause: Duration) -> Effect {
        if let State::Resuming(Resuming { round, .. }) = &mut self.state
            && let Some(jitter) = round.next(now, random)
            && jitter.max(pause) <= round.max_pause()
        {
            return Effect::Request(jitter.max(pause));
        }
        self.stop(NotResumable::GaveUp)
    }

    fn on_return(&mut self, held: Duration, now: Instant, random: u64) -> Effect {
        if self.is_late(now) {
            return Effect::HoldUntilDeadline;
        }
        let State::Resuming(Resuming { round, .. }) = &mut self.state else { return Effect::None };
        let quiet = round.is_quiet();
        *round = Round::begin(now, 0, quiet);
        Effect::Request(return_jitter(held, quiet, random))
    }

    fn on_move_started(&mut self, reason: MoveReason, now: Instant) -> Effect {
        self.limiter.note_move(now);
        if reason != MoveReason::Rebalance {
            self.limiter.resume(now);
        }
        self.state = match self.take_state() {
            State::Ordered(watch) => State::Moving(watch),
            other => other,
        };
        Effect::None
    }

    fn on_move_ended(&mut self, moved: bool, now: Instant) -> Effect {
        if moved {
            self.bookmarks.restart();
        }
        self.state = match self.take_state() {
            State::Moving(watch) if moved => {
                State::Ordered(Ordered::later(watch.into_cursor(), Round::begin(now, 0, false)))
            }
            State::Moving(watch) => State::Ordered(watch),
            other => other,
        };
        Effect::None
    }

    fn stop(&mut self, reason: NotResumable) -> Effect {
        let withheld = match &mut self.state {
            State::Resuming(resuming) => resuming.round.take_error_event(),
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

    fn take_state(&mut self) -> State {
        std::mem::replace(&mut self.state, State::Ended { error_event: None })
    }

    /// What the client asked for.
    pub fn request(&self) -> &WatchRequest {
        &self.request
    }

    /// Where the next request continues the watch.
    pub fn resume_point(&self, now: Instant) -> ResumePoint<'_> {
        ResumePoint { cursor: self.state.cursor(), remaining: self.remaining(now) }
    }

    /// Whether the watch may be moved for this reason now.
    pub fn can_move(&self, reason: MoveReason, now: Instant) -> bool {
        self.is_resumable()
            && !self.is_late(now)
            && match reason {
                MoveReason::Rebalance => {
                    let remaining = self.remaining(now);
                    remaining.is_none_or(|left| left >= MIN_REMAINING_TO_REBALANCE)
                        && self.limiter.may_rebalance(now)
                }
                MoveReason::Evacuate => self.limiter.may_evacuate(now),
                MoveReason::Drain => self.limiter.may_leave_draining(now),
            }
    }

    /// Whether the watch would continue at its cursor if it lost its stream now.
    pub fn is_resumable(&self) -> bool {
        matches!(self.state.resume_cursor(&self.request), Ok(Some(_)))
    }

    /// Whether the loss of the stream does no harm: the watch continues, or ends cleanly.
    pub fn can_lose_stream(&self) -> bool {
        self.state.resume_cursor(&self.request).is_ok() || self.ending() == Ending::Clean
    }

    /// Whether the initial events are over.
    pub fn is_ordered(&self) -> bool {
        self.state.is_ordered()
    }

    /// Whether the current stream has proven that it continues the watch.
    pub fn has_settled(&self) -> bool {
        self.state.has_settled()
    }

    /// What the server has sent that prevents resuming the watch, for good or until the next frame.
    pub fn not_resumable(&self) -> Option<NotResumable> {
        self.state.not_resumable(&self.request)
    }

    /// How the watch would end if it ended now and its server had not ended it.
    pub fn ending(&self) -> Ending {
        let complete = self.state.is_complete(&self.request) && !self.mid_frame;
        if complete { Ending::Clean } else { Ending::Reset }
    }

    /// Whether an ERROR event is withheld while other endpoints are asked.
    pub fn withholds(&self) -> bool {
        matches!(&self.state, State::Resuming(resuming) if resuming.round.withholds())
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
            State::Resuming(resuming) => resuming.round.attempt_timeout(),
            _ => Duration::ZERO,
        }
    }

    /// When the watch ends in any case; `None` if the client has set no `timeoutSeconds`.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Called once a minute. Returns true, once, if the bookmarks of the watch have ceased.
    pub fn has_gone_stale(&mut self) -> bool {
        self.bookmarks.check()
    }

    fn remaining(&self, now: Instant) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now))
    }

    fn is_late(&self, now: Instant) -> bool {
        self.remaining(now).is_some_and(|remaining| remaining < MIN_REMAINING)
    }
}
