//! What a frame of one of two streams is. See the first table of [`super`].

use super::{Progress, Shadow, ShownFrame, Side};
use crate::watch::codec::event::{Event, EventType};
use crate::watch::codec::version::ResourceVersion;
use crate::watch::session::Session;

/// What a frame of one of the streams is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// An event that neither stream has shown.
    New(ShownFrame),
    /// The next pending event.
    Pending(ShownFrame),
    /// A bookmark of a stream that follows.
    EarlyBookmark(ShownFrame),
    /// A bookmark of a stream without pending events. `agreed`: the other stream has reached its version.
    #[allow(missing_docs)] // the text above explains the fields
    Bookmark { frame: ShownFrame, agreed: bool },
    /// The stream cannot be used any more.
    Unusable,
    /// As `Unusable`: its versions are not those of one history.
    Disordered,
    /// The streams show different events.
    Contradiction,
}

impl Shadow {
    /// Judges a frame of this stream; `None` is an unreadable one.
    pub fn judge(&self, side: Side, event: Option<Event<'_>>, session: &Session) -> Judgement {
        let frame = event.and_then(ShownFrame::of);
        let (Some(frame), Some(progress)) = (frame, self.progress(side)) else {
            return Judgement::Unusable;
        };
        let version = event.and_then(|event| ResourceVersion::parse(event.version?));
        if version.is_none_or(|version| session.is_jump_to(&version)) {
            return Judgement::Disordered;
        }
        if frame.is_bookmark() {
            return self.judge_bookmark(side, frame, progress, session);
        }
        if progress.to_repeat > 0 && frame.version == progress.repeated {
            return Judgement::Pending(frame);
        }
        let next = self.lead.next_of(side);
        if progress.to_repeat == 0 && next == Some(frame) {
            return Judgement::Pending(frame);
        }
        let requested = self.second.as_ref().map(|second| second.requested);
        let is_covered = requested.is_none_or(|requested| frame.version > requested);
        if !frame.may_follow(progress.shown) || side == Side::Shadow && !is_covered {
            return Judgement::Disordered;
        }
        if self.follows(side) {
            return Judgement::Contradiction;
        }
        if !is_covered || session.cursor_version().is_none_or(|cursor| frame.version < cursor) {
            return Judgement::Unusable;
        }
        match self.progress(side.other()) {
            Some(other) if !frame.may_follow(other.shown) => Judgement::Contradiction,
            _ => Judgement::New(frame),
        }
    }

    fn judge_bookmark(
        &self,
        side: Side,
        frame: ShownFrame,
        progress: &Progress,
        session: &Session,
    ) -> Judgement {
        if frame.version < progress.shown {
            return Judgement::Disordered;
        }
        let repeated = ShownFrame { version: progress.repeated, event_type: EventType::Deleted };
        let next = Some(repeated).filter(|_| progress.to_repeat > 0);
        if let Some(next) = next.or_else(|| self.lead.next_of(side)) {
            // A bookmark may arrive between the events of one version.
            return if next.may_follow(frame.version) {
                Judgement::EarlyBookmark(frame)
            } else {
                Judgement::Contradiction
            };
        }
        let other = self.progress(side.other());
        let agreed = other.is_none_or(|other| other.shown >= frame.version)
            || session.cursor_version() == Some(frame.version);
        Judgement::Bookmark { frame, agreed }
    }
}
