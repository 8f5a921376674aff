//! The client, and what it must have received.

use super::servers::{FrameId, START};
use super::world::{End, Setting, World};
use crate::watch::codec::Encoding;
use crate::watch::codec::event::EventType;
use crate::watch::session::Ending;
use crate::watch::shadow::{ShadowEnd, Side};

/// What the client has received.
#[derive(Debug, Clone, Default)]
pub struct Client {
    /// Events, without bookmarks and ERROR events.
    pub received: Vec<FrameId>,
    /// The version of the last bookmark.
    bookmark: u64,
    /// The beginning of a frame that arrives in pieces.
    pub partial: Vec<u8>,
}

impl Client {
    /// Reads whole frames of the scenario.
    pub fn receive(&mut self, bytes: &[u8], setting: &Setting) -> Result<(), String> {
        let frames = &setting.frames;
        self.partial.extend_from_slice(bytes);
        let mut at = 0;
        while at < self.partial.len() {
            let rest = &self.partial[at..];
            if frames.encoding == Encoding::Json && rest[0] == b'\n' {
                at += 1;
                continue;
            }
            let is_next = |bytes: &[u8]| rest.starts_with(bytes.trim_ascii_end());
            let found = frames.all.iter().position(|frame| is_next(&frame.bytes));
            let Some(id) = found else { break };
            let frame = &frames.all[id];
            let whole = frame.bytes.trim_ascii_end().len();
            at += if frames.encoding == Encoding::Json { whole } else { frame.bytes.len() };
            match frame.event_type {
                Some(EventType::Bookmark) if !setting.request.bookmarks => {
                    return Err("a bookmark that the client has not asked for".to_owned());
                }
                Some(EventType::Bookmark) => self.bookmark = frame.version.unwrap_or_default(),
                Some(_) => self.received.push(id as FrameId),
                None => {}
            }
        }
        self.partial.drain(..at);
        // Only a frame above the budget leaves in pieces.
        let begins_last = frames.all[frames.len - 1].bytes.starts_with(&self.partial);
        let is_endless = setting.faulty.is_some() && self.partial.iter().all(|byte| *byte == b'{');
        if self.partial.is_empty() || setting.has_large() && begins_last || is_endless {
            return Ok(());
        }
        Err(format!("not a frame: {:?}", String::from_utf8_lossy(&self.partial)))
    }

    /// Number of received events that are those of the history, in order. Beside a wrong server, events of one type and
    /// version are not told apart.
    pub fn correct(&self, setting: &Setting) -> usize {
        let identity = |id: FrameId| {
            let frame = setting.frames.get(id);
            (frame.version, frame.event_type)
        };
        let is_same = |received: FrameId, event: FrameId| match setting.faulty {
            None => received == event,
            Some(_) => identity(received) == identity(event),
        };
        let history = (0..setting.frames.len).map(|event| event as FrameId);
        self.received.iter().zip(history).take_while(|(id, event)| is_same(**id, *event)).count()
    }

    /// The version after which the client watches again.
    fn version(&self, setting: &Setting) -> u64 {
        let last = self.received.last().and_then(|id| setting.frames.get(*id).version);
        last.unwrap_or(START).max(self.bookmark)
    }
}

impl Setting {
    /// The last event is above the budget, so that it leaves in pieces.
    fn has_large(&self) -> bool {
        self.frames.all[self.frames.len - 1].bytes.len() > self.budget
    }
}

impl World {
    /// Checks everything that the client may rely on after an action. `side`: the stream on which something arrived;
    /// `compares`: the streams were compared before.
    pub fn check(
        &self,
        setting: &Setting,
        (side, compares): (Option<Side>, bool),
        shadow: Option<ShadowEnd>,
    ) -> Result<(), String> {
        let client = &self.client;
        let correct = client.correct(setting);
        let is_wrong = correct < client.received.len();
        let may_be_wrong = setting.faulty.is_some();
        if is_wrong && !may_be_wrong {
            return Err("not the history".to_owned());
        }
        let lost = |below: u64| {
            (correct..setting.frames.len).any(|event| setting.frames.version(event) < below)
        };
        let streams = [&self.first, &self.second].into_iter().flatten();
        let mut honest = streams.filter(|stream| stream.honest && !stream.blind).peekable();
        let is_honest = honest.peek().is_some();
        if !is_wrong && (is_honest || !may_be_wrong) {
            if lost(client.bookmark) {
                return Err("a bookmark has passed an event".to_owned());
            }
            if self.relay.session().cursor_version().is_some_and(lost) {
                return Err("the cursor has passed an event".to_owned());
            }
        }
        let is_running = is_honest && self.end.is_none();
        if is_running && !client.partial.is_empty() && !setting.has_large() {
            return Err("a piece of a frame".to_owned());
        }
        for stream in honest {
            if stream.shown(setting) > correct && client.partial.is_empty() {
                return Err("an event of a stream is missing".to_owned());
            }
        }
        // Evidence against a wrong event: from an honest first stream, and from the wrong server itself.
        let is_dropped = match side {
            Some(Side::First) => shadow == Some(ShadowEnd::Promoted),
            Some(Side::Shadow) => is_honest && shadow == Some(ShadowEnd::Unusable),
            None => false,
        };
        if is_wrong && is_dropped {
            return Err("the evidence is dropped".to_owned());
        }
        match self.end {
            Some(End::Jackstay(ending, reason)) => {
                self.check_end(setting, compares, ending, reason)
            }
            _ => Ok(()),
        }
    }

    fn check_end(
        &self,
        setting: &Setting,
        compares: bool,
        ending: Ending,
        reason: crate::watch::session::NotResumable,
    ) -> Result<(), String> {
        use crate::watch::session::NotResumable::{
            Diverged, Group, InternalError, ServerError, Shutdown,
        };
        let client = &self.client;
        if reason == InternalError {
            return Err("impossible input".to_owned());
        }
        if reason == Diverged && setting.faulty.is_none() {
            return Err("two honest servers contradict each other".to_owned());
        }
        let is_wrong = client.correct(setting) < client.received.len();
        // After a reset and after a 410 a client lists.
        // One stream alone shows nothing wrong.
        let is_unknown = is_wrong && !(compares && reason == Diverged);
        if ending != Ending::Clean || is_unknown {
            return Ok(());
        }
        if !client.partial.is_empty() {
            return Err("a clean end within a frame".to_owned());
        }
        if is_wrong {
            return Err("a clean end after a contradiction".to_owned());
        }
        // A clean end, after which the client watches from its version.
        let version = client.version(setting);
        let is_missing = |event: usize| {
            let at = setting.frames.version(event);
            // Objects that are not expected to share a version, a stream without news for a second, a watch that is not
            // resumed.
            let is_settled =
                !setting.request.objects_expire || matches!(reason, Shutdown | Group | ServerError);
            if is_settled { at < version } else { at <= version }
        };
        let mut rest = client.received.len()..setting.frames.len;
        if setting.faulty.is_none() && rest.any(is_missing) {
            return Err("a clean end loses an event".to_owned());
        }
        Ok(())
    }
}
