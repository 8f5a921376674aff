//! One upstream stream of a world: what its server has sent, and what it may send next.

use bytes::Bytes;

use super::servers::{FrameId, Frames};
use super::world::{Action, Limits, Setting};
use crate::watch::codec::Encoding;
use crate::watch::shadow::Side;

/// Where a stream is within a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    None,
    Half,
    /// Before its last byte, the newline of JSON.
    Last,
}

/// One upstream stream.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools)] // independent of each other
pub struct Stream {
    sent: Vec<FrameId>,
    at: usize,
    cut: Cut,
    pub honest: bool,
    /// It was opened after a wrong server alone had shown a wrong event or hidden one, so that it cannot show this.
    pub blind: bool,
    /// The version of its request.
    requested: u64,
    /// The events of the history up to that version.
    pub before: usize,
    /// Its server has sent an ERROR event.
    pub failed: bool,
    /// Its response head has arrived.
    pub accepted: bool,
}

/// A chunk of the events of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk {
    Whole,
    Two,
    UpTo(Cut),
    Rest,
    RestAndNext,
}

impl Stream {
    pub fn new(setting: &Setting, requested: u64, honest: bool) -> Self {
        let sent = setting.frames.after(requested);
        let before = setting.frames.len - sent.len();
        let sent = match &setting.faulty {
            Some(server) if !honest => server.sent(sent),
            _ => sent,
        };
        let (cut, failed, accepted) = (Cut::None, false, false);
        Self { sent, at: 0, cut, honest, blind: false, requested, before, failed, accepted }
    }

    pub fn actions(&self, side: Side, left: &Limits, setting: &Setting, actions: &mut Vec<Action>) {
        if left.losses > 0 {
            actions.push(Action::Lose(side));
        }
        if left.ends > 0 || self.failed {
            actions.push(Action::End(side));
        }
        let push = |chunk| Action::Push(side, chunk);
        let rest = self.sent.len() - self.at;
        if self.cut != Cut::None {
            actions.push(push(Chunk::Rest));
            if rest > 1 && left.cuts > 0 {
                actions.push(push(Chunk::RestAndNext));
            }
        } else if !self.failed {
            if rest > 0 {
                actions.push(push(Chunk::Whole));
            }
            if left.cuts > 0 && rest > 0 {
                actions.extend([push(Chunk::UpTo(Cut::Half)), push(Chunk::UpTo(Cut::Last))]);
                if rest > 1 {
                    actions.push(push(Chunk::Two));
                }
            }
            if self.is_endless(setting) {
                return;
            }
            if left.bookmarks > 0 {
                let can = |next: &bool| self.bookmark(setting, *next).is_some();
                let bookmarks = [false, true].into_iter().filter(can);
                actions.extend(bookmarks.map(|next| Action::Bookmark(side, next)));
            }
            if left.errors > 0 {
                actions.extend([Action::Error(side, 0), Action::Error(side, 1)]);
            }
        }
    }

    /// The number of events of the history that an honest stream has shown.
    pub fn shown(&self, setting: &Setting) -> usize {
        // A JSON object is complete without its newline.
        let is_complete = self.cut == Cut::Last && setting.frames.encoding == Encoding::Json;
        self.before + self.at + usize::from(is_complete)
    }

    /// The bookmark at the version of the last event, or just below the next one.
    pub fn bookmark(&self, setting: &Setting, next: bool) -> Option<FrameId> {
        let version = |id: FrameId| setting.frames.get(id).version;
        let sent = &self.sent[..self.at];
        let last = sent.iter().filter_map(|id| version(*id)).max().unwrap_or(self.requested);
        if !next {
            return setting.common.bookmark(last.max(self.requested));
        }
        let below = version(*self.sent.get(self.at)?)?.checked_sub(1)?;
        (below > last).then(|| setting.common.bookmark(below)).flatten()
    }

    /// Within the frame that has no end.
    fn is_endless(&self, setting: &Setting) -> bool {
        let last = self.at.checked_sub(1).map(|last| setting.frames.get(self.sent[last]));
        last.is_some_and(|frame| frame.bytes.starts_with(b"{{"))
    }

    /// The next event has the version of the last one.
    pub fn is_within_version(&self, setting: &Setting) -> bool {
        let version = |at: usize| setting.frames.get(*self.sent.get(at)?).version;
        self.at > 0 && version(self.at).is_some() && version(self.at) == version(self.at - 1)
    }

    pub fn take(&mut self, chunk: Chunk, frames: &Frames) -> Bytes {
        let bytes = |at: usize| self.sent.get(at).map_or(&[][..], |id| &frames.get(*id).bytes[..]);
        let (this, next) = (bytes(self.at), bytes(self.at + 1));
        let offset = |cut| match cut {
            Cut::None => 0,
            Cut::Half => this.len() / 2,
            Cut::Last => this.len() - 1,
        };
        let rest = &this[offset(self.cut)..];
        let (taken, frames, cut) = match chunk {
            Chunk::Whole | Chunk::Rest => (rest.to_vec(), 1, Cut::None),
            Chunk::Two | Chunk::RestAndNext => ([rest, next].concat(), 2, Cut::None),
            Chunk::UpTo(cut) => (this[..offset(cut)].to_vec(), 0, cut),
        };
        self.at += frames;
        self.cut = cut;
        taken.into()
    }
}
