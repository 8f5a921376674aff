//! What a session does for a watch with two streams ([`super::super::shadow`]): the state of the second stream takes
//! the place of that of the first while a frame of the second is processed, and for good if the first is lost.

use std::time::Instant;

use bytes::Bytes;

use super::Session;
use super::input::{MoveReason, SessionEffect, SessionInput};
use super::round::ResumeRound;
use super::state::State;
use crate::watch::codec::event::Event;
use crate::watch::codec::version::{ResourceVersion, as_u64};

pub use super::stream::StreamState;

/// A second stream that is requested now, and where both streams are.
pub struct SecondStream {
    /// The state of the second stream; its repeated events are counted in `to_repeat`.
    pub stream: StreamState,
    /// The version that the request names.
    pub requested: u64,
    /// Number of events at the cursor that the second stream repeats.
    pub to_repeat: u32,
    /// Number of events at the cursor that the first stream has yet to repeat.
    pub first_to_repeat: u32,
    /// The version of the cursor.
    pub cursor: u64,
}

impl Session {
    /// Whether a second stream may be requested now: under the conditions of a move away from a connection that drains, if
    /// the cursor is a number of 64 bits and [`super::limiter::MAX_SHADOWS`] are not used up.
    pub fn can_have_second_stream(&self, now: Instant) -> bool {
        matches!(self.state, State::Ordered(_))
            && self.cursor_version().is_some()
            && self.can_move(MoveReason::Drain, now)
            && self.limiter.as_ref().is_none_or(|limiter| limiter.may_shadow(now))
    }

    /// Counts the request of a second stream. `None` if there may not be one.
    pub fn request_second_stream(&mut self, now: Instant) -> Option<SecondStream> {
        if !self.can_have_second_stream(now) {
            return None;
        }
        self.limiter.get_or_insert_default().count_shadow(now);
        let State::Ordered(watch) = &mut self.state else { return None };
        let number = |version: &ResourceVersion| as_u64(version.as_str().as_bytes());
        let requested = number(&watch.cursor.resume_version())?;
        let cursor = number(watch.cursor.version())?;
        let to_repeat = watch.cursor.repeated();
        let round = Box::new(ResumeRound::begin(now, 0, false));
        let mut stream = StreamState::resumed(to_repeat, round);
        stream.to_repeat = 0;
        let first_to_repeat = std::mem::take(&mut watch.stream.to_repeat);
        Some(SecondStream { stream, requested, to_repeat, first_to_repeat, cursor })
    }

    /// Processes a frame of the second stream.
    pub fn step_second(
        &mut self,
        stream: &mut StreamState,
        frame: Event<'_>,
        now: Instant,
    ) -> SessionEffect {
        self.swap_stream(stream);
        let effect = self.step(SessionInput::Frame(Some(frame)), now);
        self.swap_stream(stream);
        effect
    }

    fn swap_stream(&mut self, stream: &mut StreamState) {
        if let State::Ordered(watch) = &mut self.state {
            std::mem::swap(&mut watch.stream, stream);
        }
    }

    /// The first stream is lost, and the watch continues on the second one. `withheld`: the ERROR event with which the
    /// server of the first one refused to continue the watch. `behind`: see [`StreamState::behind`]. Returns whether the
    /// watch continues.
    pub fn continue_on_second(
        &mut self,
        (mut stream, behind): (StreamState, bool),
        withheld: Option<Bytes>,
        quiet: bool,
        now: Instant,
    ) -> bool {
        if !self.is_resumable() {
            return false;
        }
        self.forget_round(now);
        let limiter = self.limiter.get_or_insert_default();
        let recent = limiter.recent_resumes(now);
        limiter.count_resume(now);
        let State::Ordered(watch) = &mut self.state else { return false };
        let round_of_first = watch.stream.unconfirmed.take();
        let withheld = withheld.or_else(|| round_of_first?.take_withheld_error());
        stream.behind = behind;
        if behind || !stream.is_confirmed() {
            stream.unconfirmed = Some(Box::new(match withheld {
                Some(event) => ResumeRound::begin_withholding(now, recent, event),
                None => ResumeRound::begin(now, recent, quiet),
            }));
        }
        watch.stream = stream;
        true
    }

    /// The only stream has yet to show events that the client has received from another one.
    pub fn set_behind(&mut self, now: Instant) {
        if let State::Ordered(watch) = &mut self.state {
            let begin = || Box::new(ResumeRound::begin(now, 0, false));
            watch.stream.behind = true;
            watch.stream.unconfirmed.get_or_insert_with(begin);
        }
    }

    /// Whether the stream has yet to show events that the client has received.
    pub fn is_behind(&self) -> bool {
        matches!(&self.state, State::Ordered(watch) if watch.stream.is_behind())
    }

    /// The stream has shown every event that the client has received. `confirmed`: one of them since it was opened, not
    /// only those that its request repeats.
    pub fn caught_up(&mut self, confirmed: bool, now: Instant) {
        if let State::Ordered(watch) = &mut self.state {
            watch.stream.behind = false;
            watch.stream.unconfirmed.take_if(|_| confirmed);
        }
        if self.state.is_confirmed() {
            self.forget_round(now);
        }
    }

    /// Whether no history contains both the cursor and this version.
    pub fn is_jump_to(&self, version: &ResourceVersion) -> bool {
        let is_jump = |cursor: &ResourceVersion| cursor.is_jump_to(version);
        self.cursor_shown && self.state.cursor().is_some_and(|cursor| is_jump(cursor.version()))
    }
}
