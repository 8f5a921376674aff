//! A watch whose events come in the order of their versions: it can be resumed at its cursor.

use super::input::{Effect, Ending, NotResumable};
use super::round::Round;
use crate::proxy::watch::codec::event::{Event, EventType, Unreadable};
use crate::proxy::watch::codec::version::ResourceVersion;

/// Status code of "too old resource version": the server's history does not reach back that far.
const TOO_OLD: u16 = 410;

/// The state Ordered of [`super::Session`].
#[derive(Debug)]
pub(super) struct Ordered {
    cursor: ResourceVersion,
    /// Why the watch cannot be resumed at the cursor now: [`NotResumable::Oversized`] until the next
    /// frame, or [`NotResumable::UnknownEvent`] for good.
    obstacle: Option<NotResumable>,
    stream: Stream,
    /// The round that found the stream, while the stream is on trial.
    trial: Option<Round>,
}

/// Which request the stream answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    /// The client's own request.
    First,
    /// A request that continues at the cursor.
    Later {
        /// An event at or below the cursor has been discarded.
        discarded: bool,
    },
}

impl Ordered {
    /// A watch on the stream that answers the client's own request.
    pub(super) fn first(cursor: ResourceVersion) -> Self {
        Self { cursor, obstacle: None, stream: Stream::First, trial: None }
    }

    /// A watch on a stream that has yet to prove that it continues at the cursor.
    pub(super) fn later(cursor: ResourceVersion, trial: Round) -> Self {
        let stream = Stream::Later { discarded: false };
        Self { cursor, obstacle: None, stream, trial: Some(trial) }
    }

    /// The same watch with its stream on trial.
    pub(super) fn on_trial(self, trial: Round) -> Self {
        Self { trial: Some(trial), ..self }
    }

    /// Decides on one frame. `Err`: the frame is forwarded, and the watch can never be resumed from
    /// then on.
    pub(super) fn on_frame(
        &mut self,
        frame: Result<Event<'_>, Unreadable>,
    ) -> Result<Effect, NotResumable> {
        const DIVERGED: Effect = Effect::End(Ending::Clean, NotResumable::Diverged);
        let Ok(event) = frame else {
            let first = self.stream == Stream::First;
            return if first { Err(NotResumable::Unreadable) } else { Ok(DIVERGED) };
        };
        if event.event_type == EventType::Error {
            return self.on_error(event.status_code == Some(TOO_OLD));
        }
        let version = event.version.and_then(ResourceVersion::parse);
        let is_bookmark = event.event_type == EventType::Bookmark;
        let is_next = version.as_ref().is_some_and(|version| {
            *version > self.cursor || is_bookmark && *version == self.cursor
        });
        if let Stream::Later { discarded } = &mut self.stream
            && !is_next
        {
            let discards = version.is_some() && !std::mem::replace(discarded, true);
            return Ok(if discards { Effect::Discard } else { DIVERGED });
        }
        let version = version.ok_or(NotResumable::VersionNotNumeric)?;
        if !is_next {
            return Err(NotResumable::VersionNotGrowing);
        }
        self.trial = None;
        self.cursor = version;
        if event.event_type == EventType::Unknown {
            self.obstacle = Some(NotResumable::UnknownEvent);
        } else if self.obstacle == Some(NotResumable::Oversized) {
            self.obstacle = None;
        }
        Ok(Effect::Forward)
    }

    fn on_error(&self, too_old: bool) -> Result<Effect, NotResumable> {
        if let Some(round) = &self.trial {
            let answers_cursor = self.stream != Stream::First;
            if answers_cursor || too_old && round.withholds() {
                return Ok(Effect::NextEndpoint);
            }
        }
        if too_old && self.obstacle.is_none() {
            return Ok(Effect::Withhold);
        }
        Err(NotResumable::ServerError)
    }

    /// Decides on a piece of a frame above the cap.
    pub(super) fn on_oversized_piece(&mut self, begins: bool) -> Effect {
        if begins && self.trial.is_some() && self.stream != Stream::First {
            return Effect::End(Ending::Clean, NotResumable::Diverged);
        }
        self.obstacle.get_or_insert(NotResumable::Oversized);
        Effect::Forward
    }

    pub(super) fn cursor(&self) -> &ResourceVersion {
        &self.cursor
    }

    pub(super) fn into_cursor(self) -> ResourceVersion {
        self.cursor
    }

    pub(super) fn obstacle(&self) -> Option<NotResumable> {
        self.obstacle
    }

    pub(super) fn is_on_trial(&self) -> bool {
        self.trial.is_some()
    }

    pub(super) fn take_trial(&mut self) -> Option<Round> {
        self.trial.take()
    }
}
