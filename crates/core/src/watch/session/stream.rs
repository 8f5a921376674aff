//! The state of one upstream stream of a watch, as far as its session knows it.

use super::input::NotResumable;
use super::round::ResumeRound;

/// From which version a stream was requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamStart {
    /// That of the original request.
    Original,
    /// The cursor.
    Cursor,
    /// The version before the cursor, so that further events at the cursor may follow.
    BeforeCursor,
}

/// One upstream stream.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub struct StreamState {
    pub start: StreamStart,
    /// Number of events at the cursor that the client has received, and that the stream has yet to repeat.
    pub to_repeat: u32,
    /// One event at or below the cursor has been discarded on this stream.
    pub discarded: bool,
    /// The client has received events after those that this stream has shown ([`super::super::shadow`]).
    pub behind: bool,
    /// [`NotResumable::Oversized`] until the next frame, or [`NotResumable::UnknownEvent`] permanently.
    pub not_resumable: Option<NotResumable>,
    /// The round in which the stream was opened; `None` once the stream is confirmed. Boxed, because most watches
    /// have none.
    pub unconfirmed: Option<Box<ResumeRound>>,
}

impl StreamState {
    /// The stream of the original request.
    pub fn original() -> Self {
        Self {
            start: StreamStart::Original,
            to_repeat: 0,
            discarded: false,
            behind: false,
            not_resumable: None,
            unconfirmed: None,
        }
    }

    /// A stream that was opened in `round` and first repeats `to_repeat` events.
    pub fn resumed(to_repeat: u32, round: Box<ResumeRound>) -> Self {
        let start = if to_repeat > 0 { StreamStart::BeforeCursor } else { StreamStart::Cursor };
        Self { start, to_repeat, unconfirmed: Some(round), ..Self::original() }
    }

    /// The stream was requested at the cursor or before it, not with the original request.
    pub fn is_resumed(&self) -> bool {
        self.start != StreamStart::Original
    }

    /// The stream began before the events at the cursor.
    pub fn is_from_before(&self) -> bool {
        self.start == StreamStart::BeforeCursor
    }

    /// The client has received events that the stream has yet to show.
    pub fn is_behind(&self) -> bool {
        self.behind || self.to_repeat > 0
    }

    /// An event or a bookmark has shown that the stream continues the watch.
    pub fn is_confirmed(&self) -> bool {
        self.unconfirmed.is_none()
    }
}
