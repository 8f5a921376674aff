//! The states of a watch, and what follows from each: the decision on a frame, whether the watch can be
//! resumed, and how it ends.

use super::input::{Effect, NotResumable};
use super::ordered::Ordered;
use super::round::Round;
use crate::proxy::watch::codec::event::{Event, EventType, Unreadable};
use crate::proxy::watch::codec::version::ResourceVersion;
use crate::proxy::watch::request::WatchRequest;
use bytes::Bytes;

/// The states of the tables in [`super`].
#[derive(Debug)]
pub(super) enum State {
    /// The initial events come, in no order.
    Initial(Delivered),
    /// Events come in the order of their versions.
    Ordered(Ordered),
    /// Another stream is tried while the current one works.
    Moving(Ordered),
    /// There is no stream; endpoints are asked to continue the watch.
    Resuming(Resuming),
    /// Everything is forwarded, and nothing is resumed.
    Passthrough {
        reason: NotResumable,
        /// The initial events are over.
        ordered: bool,
    },
    /// Nothing more follows.
    Ended {
        /// The withheld ERROR event that the client gets.
        error_event: Option<Bytes>,
    },
}

/// What the client has of the initial events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Delivered {
    Nothing,
    Frames,
    /// At least part of a frame above the cap.
    OversizedFrame,
}

/// A watch that looks for an endpoint to continue it.
#[derive(Debug)]
pub(super) struct Resuming {
    /// Where to continue; `None`: with the original request.
    pub(super) cursor: Option<ResourceVersion>,
    pub(super) round: Round,
}

impl State {
    /// The state of a watch whose original request has been answered.
    pub(super) fn first(request: &WatchRequest) -> Self {
        match &request.version {
            Some(version) if !request.send_initial_events => {
                Self::Ordered(Ordered::first(version.clone()))
            }
            _ => Self::Initial(Delivered::Nothing),
        }
    }

    /// The same state with its stream on trial. Only Ordered knows a trial.
    pub(super) fn on_trial(self, trial: Round) -> Self {
        match self {
            Self::Ordered(watch) => Self::Ordered(watch.on_trial(trial)),
            other => other,
        }
    }

    pub(super) fn on_frame(
        &mut self,
        frame: Result<Event<'_>, Unreadable>,
        request: &WatchRequest,
    ) -> Effect {
        let decided = match self {
            Self::Ordered(watch) => watch.on_frame(frame),
            Self::Initial(_) | Self::Passthrough { .. } => self.on_unordered_frame(frame, request),
            Self::Moving(_) | Self::Resuming(_) | Self::Ended { .. } => return Effect::None,
        };
        let effect = decided.unwrap_or_else(|reason| {
            self.pass_through(reason);
            Effect::Forward
        });
        if effect != Effect::Forward {
            return effect;
        }
        let is_bookmark = frame.is_ok_and(|event| event.event_type == EventType::Bookmark);
        if is_bookmark && !request.bookmarks {
            return Effect::Swallow;
        }
        if let Self::Initial(delivered @ Delivered::Nothing) = self {
            *delivered = Delivered::Frames;
        }
        if !request.resumable_group {
            self.pass_through(NotResumable::Group);
        }
        Effect::Forward
    }

    fn on_unordered_frame(
        &mut self,
        frame: Result<Event<'_>, Unreadable>,
        request: &WatchRequest,
    ) -> Result<Effect, NotResumable> {
        let event = frame.map_err(|Unreadable| NotResumable::Unreadable)?;
        let ends_initial = match event.event_type {
            EventType::Error => return Err(NotResumable::ServerError),
            EventType::Unknown => return Err(NotResumable::UnknownEvent),
            _ if request.send_initial_events => event.initial_events_end,
            event_type => event_type != EventType::Added,
        };
        if ends_initial {
            let version = event.version.and_then(ResourceVersion::parse);
            match (&mut *self, version) {
                (Self::Passthrough { ordered, .. }, _) => *ordered = true,
                (_, Some(version)) => *self = Self::Ordered(Ordered::first(version)),
                (_, None) => {
                    let reason = NotResumable::VersionNotNumeric;
                    *self = Self::Passthrough { reason, ordered: true };
                }
            }
        }
        Ok(Effect::Forward)
    }

    pub(super) fn on_oversized_piece(&mut self, begins: bool, request: &WatchRequest) -> Effect {
        let effect = match self {
            Self::Ordered(watch) => watch.on_oversized_piece(begins),
            Self::Initial(delivered) => {
                *delivered = Delivered::OversizedFrame;
                Effect::Forward
            }
            _ => Effect::Forward,
        };
        if effect == Effect::Forward && !request.resumable_group {
            self.pass_through(NotResumable::Group);
        }
        effect
    }

    /// Enters Passthrough. The first reason stays, unless frames cannot be parsed from now on.
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

    /// Where a watch that loses its stream now would continue: at the cursor, or, for `None`, with its
    /// original request.
    pub(super) fn resume_cursor(
        &self,
        request: &WatchRequest,
    ) -> Result<Option<&ResourceVersion>, NotResumable> {
        match self {
            Self::Ordered(watch) | Self::Moving(watch) => match watch.obstacle() {
                Some(reason) => Err(reason),
                // Nothing was forwarded: the first forwarded frame enters Passthrough.
                None if !request.resumable_group => Ok(None),
                None => Ok(Some(watch.cursor())),
            },
            Self::Initial(Delivered::Nothing) if !request.from_present => Ok(None),
            Self::Initial(delivered) => Err(match (self.not_resumable(request), delivered) {
                (Some(reason), _) => reason,
                (None, Delivered::Nothing) => NotResumable::NoVersion,
                (None, _) => NotResumable::Initial,
            }),
            Self::Passthrough { reason, .. } => Err(*reason),
            Self::Resuming(_) | Self::Ended { .. } => Err(NotResumable::GaveUp),
        }
    }

    /// The cursor, or the one at which the watch looks for a new stream.
    pub(super) fn cursor(&self) -> Option<&ResourceVersion> {
        match self {
            Self::Ordered(watch) | Self::Moving(watch) => Some(watch.cursor()),
            Self::Resuming(resuming) => resuming.cursor.as_ref(),
            _ => None,
        }
    }

    pub(super) fn not_resumable(&self, request: &WatchRequest) -> Option<NotResumable> {
        if !request.resumable_group {
            return Some(NotResumable::Group);
        }
        match self {
            Self::Initial(Delivered::OversizedFrame) => Some(NotResumable::Oversized),
            Self::Ordered(watch) | Self::Moving(watch) => watch.obstacle(),
            Self::Passthrough { reason, .. } => Some(*reason),
            _ => None,
        }
    }

    pub(super) fn is_ordered(&self) -> bool {
        match self {
            Self::Ordered(_) | Self::Moving(_) => true,
            Self::Passthrough { ordered, .. } => *ordered,
            _ => false,
        }
    }

    pub(super) fn has_settled(&self) -> bool {
        match self {
            Self::Initial(delivered) => *delivered != Delivered::Nothing,
            Self::Ordered(watch) => !watch.is_on_trial(),
            Self::Passthrough { .. } => true,
            Self::Moving(_) | Self::Resuming(_) | Self::Ended { .. } => false,
        }
    }

    /// Whether a clean end tells the client the truth.
    pub(super) fn is_complete(&self, request: &WatchRequest) -> bool {
        // The client notices that the bookmark which ends the initial events is missing.
        let client_notices = request.send_initial_events && request.bookmarks;
        match self {
            Self::Ordered(_)
            | Self::Moving(_)
            | Self::Resuming(Resuming { cursor: Some(_), .. })
            | Self::Ended { .. } => true,
            Self::Initial(delivered) => {
                client_notices || request.from_present && *delivered == Delivered::Nothing
            }
            Self::Resuming(Resuming { cursor: None, .. }) => {
                Self::first(request).is_ordered() || client_notices
            }
            Self::Passthrough { reason: NotResumable::Unreadable, .. } => false,
            Self::Passthrough { ordered, .. } => *ordered || client_notices,
        }
    }
}
