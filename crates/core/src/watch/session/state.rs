//! The states of a watch. A state decides what happens to a frame, whether the watch can be resumed, and how
//! it ends.

use super::cursor::Cursor;
use super::input::{Ending, NotResumable, SessionEffect};
use super::round::ResumeRound;
use super::stream::StreamState;
use crate::watch::codec::event::{Event, EventType};
use crate::watch::codec::version::ResourceVersion;
use crate::watch::request::WatchRequest;
use bytes::Bytes;
use std::cmp::Ordering;
use std::time::Instant;

/// Status code of "too old resource version": the apiserver's history does not reach back to the version.
const TOO_OLD: u16 = 410;

/// The states of the tables in [`super`].
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub enum State {
    /// Initial events arrive, in no order.
    Initial(Delivered),
    /// Events arrive in the order of their versions.
    Ordered(Ordered),
    /// The body opens another stream while the current one works.
    Moving(Ordered),
    /// There is no stream; endpoints are asked to continue the watch at the cursor, or, without a cursor,
    /// to serve its original request.
    Resuming { cursor: Option<Cursor>, round: Box<ResumeRound> },
    /// Every frame is forwarded, and the watch is not resumed. `ordered`: the initial events are complete.
    Passthrough { reason: NotResumable, ordered: bool },
    /// The stream of the client ends, after the withheld ERROR event if there is one.
    Ended { error_event: Option<Bytes> },
}

/// Which part of the initial events the client has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Delivered {
    Nothing,
    Frames,
    /// At least part of a frame above the cap.
    OversizedFrame,
}

/// A watch whose events arrive in the order of their versions.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct Ordered {
    pub cursor: Cursor,
    pub stream: StreamState,
}

impl State {
    /// The state after the response head of the original request. `round`: the request was repeated in this
    /// round.
    pub fn first(request: &WatchRequest, round: Option<Box<ResumeRound>>) -> Self {
        match &request.version {
            Some(version) if !request.send_initial_events => {
                let cursor = Cursor::new(version.clone(), request);
                let mut watch = Ordered::new(cursor);
                watch.stream.unconfirmed = round;
                Self::Ordered(watch)
            }
            _ => Self::Initial(Delivered::Nothing),
        }
    }

    /// The name, for the log line about an input that is impossible.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Initial(_) => "Initial",
            Self::Ordered(_) => "Ordered",
            Self::Moving(_) => "Moving",
            Self::Resuming { .. } => "Resuming",
            Self::Passthrough { .. } => "Passthrough",
            Self::Ended { .. } => "Ended",
        }
    }

    /// Replaces the state by `next` of the state.
    pub fn update(&mut self, next: impl FnOnce(Self) -> Self) {
        *self = next(std::mem::replace(self, Self::Ended { error_event: None }));
    }

    /// Decides on one frame that is received at `now`; `None` is an unreadable frame. `shown`: an event or a bookmark
    /// has shown the cursor.
    pub fn on_frame(
        &mut self,
        frame: Option<Event<'_>>,
        shown: bool,
        request: &WatchRequest,
        now: Instant,
    ) -> SessionEffect {
        let decided = match self {
            Self::Ordered(watch) => watch.on_frame(frame, shown, now),
            Self::Initial(_) | Self::Passthrough { .. } => {
                self.on_unordered_frame(frame, request, now)
            }
            Self::Moving(_) | Self::Resuming { .. } | Self::Ended { .. } => {
                return SessionEffect::None;
            }
        };
        let effect = decided.unwrap_or_else(|reason| {
            self.pass_through(reason);
            SessionEffect::Forward
        });
        if effect != SessionEffect::Forward {
            return effect;
        }
        let is_bookmark = frame.is_some_and(|event| event.event_type == EventType::Bookmark);
        if is_bookmark && !request.bookmarks {
            return SessionEffect::Swallow;
        }
        if let Self::Initial(delivered @ Delivered::Nothing) = self {
            *delivered = Delivered::Frames;
        }
        if !request.resumable_group {
            self.pass_through(NotResumable::Group);
        }
        SessionEffect::Forward
    }

    fn on_unordered_frame(
        &mut self,
        frame: Option<Event<'_>>,
        request: &WatchRequest,
        now: Instant,
    ) -> Result<SessionEffect, NotResumable> {
        let event = frame.ok_or(NotResumable::Unreadable)?;
        let ends_initial = match event.event_type {
            EventType::Error => return Err(NotResumable::ServerError),
            EventType::Unknown => return Err(NotResumable::UnknownEvent),
            _ if request.send_initial_events => event.initial_events_end,
            event_type => event_type != EventType::Added,
        };
        if ends_initial {
            match (&mut *self, event.version.and_then(ResourceVersion::parse)) {
                (Self::Passthrough { ordered, .. }, _) => *ordered = true,
                (_, Some(version)) => {
                    let mut cursor = Cursor::new(version.clone(), request);
                    cursor.advance(version, event.event_type, now);
                    *self = Self::Ordered(Ordered::new(cursor));
                }
                (_, None) => {
                    let reason = NotResumable::VersionNotNumeric;
                    *self = Self::Passthrough { reason, ordered: true };
                }
            }
        }
        Ok(SessionEffect::Forward)
    }

    pub fn on_oversized_piece(&mut self, begins: bool, request: &WatchRequest) -> SessionEffect {
        match self {
            // The client may have received this frame on an earlier stream.
            Self::Ordered(watch)
                if begins && watch.stream.is_resumed() && !watch.stream.is_confirmed() =>
            {
                return SessionEffect::End(watch.cursor.ending(), NotResumable::Oversized);
            }
            Self::Ordered(watch) => {
                watch.stream.not_resumable.get_or_insert(NotResumable::Oversized);
            }
            Self::Initial(delivered) => *delivered = Delivered::OversizedFrame,
            _ => {}
        }
        if !request.resumable_group {
            self.pass_through(NotResumable::Group);
        }
        SessionEffect::Forward
    }

    /// Ends resuming after another watch of the API group has shown versions that are not ordered.
    pub fn on_group_unordered(&mut self) {
        if matches!(self, Self::Ordered(_)) {
            self.pass_through(NotResumable::Group);
        }
    }

    /// Enters Passthrough. The first reason is kept; only an unreadable frame replaces it.
    fn pass_through(&mut self, reason: NotResumable) {
        match self {
            Self::Passthrough { reason: first, .. } => {
                if reason == NotResumable::Unreadable {
                    *first = reason;
                }
            }
            _ => *self = Self::Passthrough { reason, ordered: self.is_ordered() },
        }
    }

    /// Where the watch would continue if it lost its stream now: at the cursor, or, for `None`, with its
    /// original request.
    pub fn resume_cursor(&self, request: &WatchRequest) -> Result<Option<&Cursor>, NotResumable> {
        match self {
            Self::Ordered(watch) | Self::Moving(watch) => match watch.stream.not_resumable {
                Some(reason) => Err(reason),
                // No frame has been forwarded yet: the first one enters Passthrough.
                None if !request.resumable_group => Ok(None),
                None => Ok(Some(&watch.cursor)),
            },
            Self::Initial(Delivered::Nothing) if !request.starts_at_most_recent => Ok(None),
            Self::Initial(delivered) => Err(match (self.not_resumable(request), delivered) {
                (Some(reason), _) => reason,
                (None, Delivered::Nothing) => NotResumable::NoVersion,
                (None, _) => NotResumable::Initial,
            }),
            Self::Passthrough { reason, .. } => Err(*reason),
            Self::Resuming { .. } | Self::Ended { .. } => Err(NotResumable::GaveUp),
        }
    }

    /// The cursor at which the watch continues; `None` for the original request.
    pub fn cursor(&self) -> Option<&Cursor> {
        match self {
            Self::Ordered(watch) | Self::Moving(watch) => Some(&watch.cursor),
            Self::Resuming { cursor, .. } => cursor.as_ref(),
            _ => None,
        }
    }

    pub fn not_resumable(&self, request: &WatchRequest) -> Option<NotResumable> {
        if !request.resumable_group {
            return Some(NotResumable::Group);
        }
        match self {
            Self::Initial(Delivered::OversizedFrame) => Some(NotResumable::Oversized),
            Self::Ordered(watch) | Self::Moving(watch) => watch.stream.not_resumable,
            Self::Passthrough { reason, .. } => Some(*reason),
            _ => None,
        }
    }

    pub fn is_ordered(&self) -> bool {
        match self {
            Self::Ordered(_) | Self::Moving(_) => true,
            Self::Passthrough { ordered, .. } => *ordered,
            _ => false,
        }
    }

    pub fn is_confirmed(&self) -> bool {
        match self {
            Self::Initial(delivered) => *delivered != Delivered::Nothing,
            Self::Ordered(watch) => watch.stream.is_confirmed(),
            Self::Passthrough { .. } => true,
            Self::Moving(_) | Self::Resuming { .. } | Self::Ended { .. } => false,
        }
    }

    /// Whether a clean end is correct after the stream was lost: no event is missing, or the client notices that some
    /// are.
    pub fn may_end_cleanly(&self, request: &WatchRequest) -> bool {
        // Such a client waits for the bookmark that ends the initial events.
        let client_notices = request.send_initial_events && request.bookmarks;
        match self {
            Self::Ordered(Ordered { cursor, .. })
            | Self::Moving(Ordered { cursor, .. })
            | Self::Resuming { cursor: Some(cursor), .. } => cursor.ending() == Ending::Clean,
            Self::Ended { .. } => true,
            Self::Initial(delivered) => {
                client_notices || request.starts_at_most_recent && *delivered == Delivered::Nothing
            }
            Self::Resuming { cursor: None, .. } => {
                Self::first(request, None).is_ordered() || client_notices
            }
            Self::Passthrough { reason: NotResumable::Unreadable, .. } => false,
            Self::Passthrough { ordered, .. } => *ordered || client_notices,
        }
    }
}

/// Where a frame belongs in the history of the watch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Position {
    /// It follows the cursor.
    Next,
    /// The client has the event, and the stream was asked to repeat it.
    Repeated,
    /// A bookmark at the version that was asked for, which the client has passed.
    Asked,
    /// It follows events at the cursor that the stream has not repeated.
    Gap,
    /// Not above the cursor, or without a number.
    Behind,
}

impl Ordered {
    /// A watch at `cursor`, on the stream of the original request.
    pub fn new(cursor: Cursor) -> Self {
        Self { cursor, stream: StreamState::original() }
    }

    /// A watch that continues on another stream, which was opened in `round`.
    pub fn resumed(cursor: Cursor, round: Box<ResumeRound>) -> Self {
        let stream = StreamState::resumed(cursor.repeated(), round);
        Self { cursor, stream }
    }

    /// Decides on one frame. `Err`: the frame is forwarded, and the watch enters Passthrough. `shown`: an event or
    /// a bookmark has shown the cursor.
    fn on_frame(
        &mut self,
        frame: Option<Event<'_>>,
        shown: bool,
        now: Instant,
    ) -> Result<SessionEffect, NotResumable> {
        let ending = self.cursor.ending();
        let end = |reason| Ok(SessionEffect::End(ending, reason));
        let Some(event) = frame else {
            let reason = NotResumable::Unreadable;
            return if self.stream.is_resumed() { end(reason) } else { Err(reason) };
        };
        if event.event_type == EventType::Error {
            return self.on_error(event.status_code == Some(TOO_OLD));
        }
        let below_requested = NotResumable::BelowRequested;
        let version = event.version.and_then(ResourceVersion::parse);
        match self.position(event.event_type, version.as_ref(), shown) {
            Position::Next => {}
            Position::Repeated => {
                self.stream.to_repeat -= 1;
                return Ok(SessionEffect::Discard);
            }
            Position::Asked => return Ok(SessionEffect::Discard),
            Position::Gap => return end(NotResumable::Diverged),
            Position::Behind if self.stream.is_resumed() => {
                if version.is_some() && !std::mem::replace(&mut self.stream.discarded, true) {
                    return Ok(SessionEffect::Discard);
                }
                let is_proven = shown || version.is_none();
                return end(if is_proven { NotResumable::Diverged } else { below_requested });
            }
            Position::Behind if version.is_none() => return Err(NotResumable::VersionNotNumeric),
            Position::Behind => {
                return Err(if shown { NotResumable::VersionNotGrowing } else { below_requested });
            }
        }
        let version = version.ok_or(NotResumable::VersionNotNumeric)?;
        if shown && self.cursor.version().is_jump_to(&version) {
            let reason = NotResumable::VersionJumped;
            return if self.stream.is_resumed() { end(reason) } else { Err(reason) };
        }
        if event.event_type == EventType::Unknown {
            self.stream.not_resumable = Some(NotResumable::UnknownEvent);
        } else if self.stream.not_resumable == Some(NotResumable::Oversized)
            && version != *self.cursor.version()
        {
            self.stream.not_resumable = None;
        }
        self.stream.unconfirmed = None;
        self.cursor.advance(version, event.event_type, now);
        Ok(SessionEffect::Forward)
    }

    fn position(
        &self,
        event_type: EventType,
        version: Option<&ResourceVersion>,
        shown: bool,
    ) -> Position {
        let Some(version) = version else { return Position::Behind };
        let is_bookmark = event_type == EventType::Bookmark;
        // A watch receives events after the version that it names, so the stream must have shown the cursor or begun
        // before it.
        let may_share = event_type == EventType::Deleted
            && if self.stream.is_resumed() {
                self.stream.is_from_before() || self.stream.is_confirmed()
            } else {
                shown
            };
        match (version.cmp(self.cursor.version()), self.stream.to_repeat) {
            (Ordering::Greater, 0) => Position::Next,
            (Ordering::Equal, 0) if is_bookmark || may_share => Position::Next,
            (Ordering::Equal, 1..) if !is_bookmark => Position::Repeated,
            (Ordering::Greater | Ordering::Equal, 1..) => Position::Gap,
            (Ordering::Less, _)
                if is_bookmark
                    && self.stream.is_from_before()
                    && self.cursor.is_before(version) =>
            {
                Position::Asked
            }
            _ => Position::Behind,
        }
    }

    fn on_error(&self, too_old: bool) -> Result<SessionEffect, NotResumable> {
        if let Some(round) = &self.stream.unconfirmed
            && (self.stream.is_resumed() || too_old && round.withholds_error())
        {
            return Ok(SessionEffect::NextEndpoint);
        }
        if too_old && self.stream.not_resumable.is_none() {
            return Ok(SessionEffect::Withhold);
        }
        Err(NotResumable::ServerError)
    }
}
