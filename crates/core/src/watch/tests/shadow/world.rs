//! A watch with up to two streams, its client, and everything that may happen to them.

use std::fmt::Debug;
use std::time::Instant;

use bytes::Bytes;

use super::super::super::relay::{FirstEnd, PushResult, Relay};
use super::super::super::request::WatchRequest;
use super::super::super::session::{
    AttemptResult, Ending, MoveReason, NotResumable, SessionEffect as Effect, SessionInput as Input,
};
use super::super::super::shadow::{ShadowEnd, Side};
use super::super::events::cursor;
use super::servers::{Common, FaultyServer, Frames, START};
use super::upstream::{Chunk, Stream};
use crate::admission::ByteAccount;
use crate::endpoint_condition::EndpointCondition;
use crate::endpoint_state::EndpointState;
use crate::pool::EndpointKey;

/// How often each input may happen on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Frames that arrive in two chunks, or two in one.
    pub cuts: u8,
    pub bookmarks: u8,
    pub errors: u8,
    pub losses: u8,
    pub ends: u8,
    /// Shadows that are requested.
    pub shadows: u8,
    /// The first stream answers again, and is suspect again.
    pub answers: u8,
    /// Stop, restore, group unordered.
    pub controls: u8,
    pub moves: u8,
}

/// What the paths of a search have in common.
#[derive(Debug)]
pub struct Setting {
    pub name: String,
    pub frames: Frames,
    pub common: Common,
    pub faulty: Option<FaultyServer>,
    pub request: WatchRequest,
    pub limits: Limits,
    /// Bytes that the watch may hold.
    pub budget: usize,
    pub lead_limit: usize,
    pub start: Instant,
}

/// An input.
#[derive(Debug, Clone, Copy)]
pub enum Action {
    Push(Side, Chunk),
    /// At the version of the last event, or just below the next one.
    Bookmark(Side, bool),
    /// 410 or 500.
    Error(Side, usize),
    Lose(Side),
    End(Side),
    Request,
    Accept,
    Refuse,
    Answers,
    Suspect,
    Unordered,
    Stop,
    Restore,
    Move,
    Resume,
    GiveUp,
}

/// How the watch has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// By its server.
    Server,
    Jackstay(Ending, NotResumable),
}

#[derive(Debug)]
pub struct World {
    pub relay: Relay,
    pub account: ByteAccount,
    pub first: Option<Stream>,
    pub second: Option<Stream>,
    resuming: bool,
    pub end: Option<End>,
    pub client: super::client::Client,
    pub left: Limits,
    now: Instant,
}

const ENDPOINTS: [EndpointCondition; 2] = [ready(1), ready(2)];

const fn ready(key: usize) -> EndpointCondition {
    let state = EndpointState::Ready;
    EndpointCondition { key: EndpointKey(key), state, probe_fails: false, is_starting: false }
}

impl World {
    pub fn new(setting: &Setting) -> Self {
        let account = ByteAccount::unmetered(setting.budget);
        let (frames, start) = (&setting.frames, setting.start);
        let request = setting.request.clone();
        let relay = Relay::new(frames.encoding, request, start, account.clone());
        let mut first = Stream::new(setting, START, true);
        first.accepted = true;
        Self {
            relay,
            account,
            first: Some(first),
            second: None,
            resuming: false,
            end: None,
            client: super::client::Client::default(),
            left: setting.limits,
            now: start,
        }
    }

    pub fn fork(&self, setting: &Setting) -> Self {
        let account = ByteAccount::unmetered(setting.budget);
        Self {
            relay: self.relay.fork(&account),
            account,
            first: self.first.clone(),
            second: self.second.clone(),
            client: self.client.clone(),
            ..*self
        }
    }

    pub fn stream(&self, side: Side) -> Option<&Stream> {
        match side {
            Side::First => self.first.as_ref(),
            Side::Shadow => self.second.as_ref(),
        }
    }

    fn stream_mut(&mut self, side: Side) -> Option<&mut Stream> {
        match side {
            Side::First => self.first.as_mut(),
            Side::Shadow => self.second.as_mut(),
        }
    }

    /// What may happen next.
    pub fn actions(&self, setting: &Setting) -> Vec<Action> {
        let mut actions = Vec::new();
        if self.end.is_some() {
            return actions;
        }
        if self.resuming {
            return vec![Action::Resume, Action::GiveUp];
        }
        for side in [Side::First, Side::Shadow] {
            if let Some(stream) = self.stream(side).filter(|stream| stream.accepted) {
                stream.actions(side, &self.left, setting, &mut actions);
            }
        }
        if self.second.is_none() && !self.relay.first_follows() {
            // The session ends a resumed watch at a bookmark between two events that its stream repeats.
            let is_within =
                self.first.as_ref().is_some_and(|first| first.is_within_version(setting));
            actions.retain(|action| !is_within || !matches!(action, Action::Bookmark(..)));
        }
        match &self.second {
            Some(stream) if !stream.accepted => actions.extend([Action::Accept, Action::Refuse]),
            Some(_) if self.left.answers > 0 => actions.extend([Action::Answers, Action::Suspect]),
            None if self.left.shadows > 0 && self.relay.can_shadow(self.now) => {
                actions.push(Action::Request);
            }
            _ => {}
        }
        if self.left.controls > 0 {
            actions.extend([Action::Unordered, Action::Stop, Action::Restore]);
        }
        let may_move = self.relay.session().can_move(MoveReason::Drain, self.now);
        if self.left.moves > 0 && self.second.is_none() && may_move {
            actions.push(Action::Move);
        }
        actions
    }

    /// Takes an action, and returns what has become of the shadow.
    pub fn take(&mut self, setting: &Setting, action: Action) -> Result<Option<ShadowEnd>, String> {
        let before = self.account.budget().held();
        let mut shadow = None;
        match action {
            Action::Push(side, chunk) => {
                self.left.cuts -= u8::from(!matches!(chunk, Chunk::Whole | Chunk::Rest));
                let Some(stream) = self.stream_mut(side) else { return Ok(None) };
                let bytes = stream.take(chunk, &setting.frames);
                shadow = self.push(setting, side, &bytes)?;
            }
            Action::Bookmark(side, next) => {
                self.left.bookmarks -= 1;
                let Some(stream) = self.stream(side) else { return Ok(None) };
                let id = stream.bookmark(setting, next).ok_or("no bookmark")?;
                shadow = self.push(setting, side, &setting.frames.get(id).bytes)?;
            }
            Action::Error(side, code) => {
                self.left.errors -= 1;
                if let Some(stream) = self.stream_mut(side) {
                    stream.failed = true;
                }
                let id = setting.common.errors[code];
                shadow = self.push(setting, side, &setting.frames.get(id).bytes)?;
            }
            other => self.control(setting, other)?,
        }
        if self.end.is_none() && self.relay.has_shadow() != self.second.is_some() {
            return Err("the relay and the body disagree about the shadow".to_owned());
        }
        if self.end.is_none() && self.first.is_none() && !self.resuming {
            return Err("no stream and no request: the watch waits forever".to_owned());
        }
        let held = self.account.budget().held();
        if held > setting.budget.max(before) {
            return Err(format!("{held} bytes are held"));
        }
        Ok(shadow)
    }

    fn control(&mut self, setting: &Setting, action: Action) -> Result<(), String> {
        let now = self.now;
        match action {
            Action::Lose(side) => {
                self.left.losses -= 1;
                self.lose(side)?;
            }
            Action::End(side) => {
                self.left.ends = self.left.ends.saturating_sub(1);
                self.server_ends(setting, side)?;
            }
            Action::Request => {
                self.left.shadows -= 1;
                let asked = self.asked()?;
                let honest = setting.faulty.is_none();
                self.second = Some(Stream::new(setting, asked, honest));
                if !self.relay.request_shadow_with(setting.lead_limit, self.now) {
                    return Err("a shadow was refused".to_owned());
                }
            }
            Action::Accept => {
                self.relay.shadow_accepted();
                if let Some(stream) = &mut self.second {
                    stream.accepted = true;
                }
            }
            Action::Refuse => {
                self.second = None;
                self.relay.shadow_lost(now);
            }
            Action::Answers => {
                self.left.answers -= 1;
                let follows = self.relay.first_follows();
                match self.relay.first_answers(now) {
                    Some(ShadowEnd::Recovered) if !follows => self.second = None,
                    None if follows => {}
                    other => return Err(format!("first answers: {other:?}")),
                }
            }
            Action::Suspect => {
                self.left.answers -= 1;
                self.relay.first_suspect();
            }
            Action::Unordered => {
                self.left.controls -= 1;
                self.second = None;
                let effect = self.relay.group_unordered(now);
                self.execute(effect)?;
            }
            Action::Stop => {
                self.left.controls -= 1;
                let effect = self.relay.stop(NotResumable::Shutdown, now);
                self.execute(effect)?;
            }
            Action::Restore => {
                self.left.controls -= 1;
                let effect = self.relay.history_lost(Bytes::from_static(b"lost"), now);
                self.execute(effect)?;
            }
            Action::Move => {
                self.left.moves -= 1;
                self.relay.session_mut().step(Input::MoveStarted(MoveReason::Drain), now);
                self.first = Some(self.resumed_stream(setting)?);
                self.relay.move_ended(now);
            }
            Action::Resume => {
                self.resuming = false;
                self.first = Some(self.resumed_stream(setting)?);
                let effect = self.relay.session_mut().step(Input::Accepted, now);
                self.execute(effect)?;
            }
            _ => {
                let result = AttemptResult::Head {
                    status: 404,
                    same_content_type: false,
                    retry_after: None,
                };
                let endpoint = Some(EndpointKey(1));
                let input = Input::AttemptFailed { result, endpoint, endpoints: &ENDPOINTS };
                let effect = self.relay.session_mut().step(input, now);
                self.execute(effect)?;
            }
        }
        Ok(())
    }

    /// The version that the next request names.
    fn asked(&self) -> Result<u64, String> {
        let asked = cursor(self.relay.session(), self.now).and_then(|text| text.parse().ok());
        asked.ok_or_else(|| "no version".to_owned())
    }

    /// Other endpoints than that of the shadow are honest.
    fn resumed_stream(&self, setting: &Setting) -> Result<Stream, String> {
        let mut stream = Stream::new(setting, self.asked()?, true);
        stream.accepted = true;
        let correct = self.client.correct(setting);
        let differs = stream.before > correct || self.client.received.len() > correct;
        stream.blind = setting.faulty.is_some() && differs;
        Ok(stream)
    }

    fn lose(&mut self, side: Side) -> Result<(), String> {
        if side == Side::Shadow {
            self.second = None;
            self.relay.shadow_lost(self.now);
            return Ok(());
        }
        let effect = self.relay.stream_lost(false, self.now);
        self.first_lost(effect)
    }

    fn first_lost(&mut self, effect: Effect) -> Result<(), String> {
        self.first = self.second.take().filter(|stream| stream.accepted);
        if (effect == Effect::None) != self.first.is_some() {
            return Err(format!("the first stream is lost: {effect:?}"));
        }
        self.execute(effect)
    }

    fn server_ends(&mut self, setting: &Setting, side: Side) -> Result<(), String> {
        if side == Side::Shadow {
            self.second = None;
            self.relay.shadow_lost(self.now);
            return Ok(());
        }
        let follows = self.second.is_some() || self.relay.first_follows();
        match self.relay.first_ended(self.now) {
            FirstEnd::Ended(rest) => {
                let is_behind = self.first.take().is_some_and(|first| {
                    first.honest && first.shown(setting) < self.client.received.len()
                });
                if follows && is_behind {
                    return Err("ended by a server that is behind".to_owned());
                }
                self.client.partial.extend_from_slice(&rest);
                self.end = Some(End::Server);
                Ok(())
            }
            FirstEnd::Lost(effect) => self.first_lost(effect),
        }
    }

    fn push(
        &mut self,
        setting: &Setting,
        side: Side,
        chunk: &Bytes,
    ) -> Result<Option<ShadowEnd>, String> {
        let mut out = Vec::new();
        let keep = |bytes: Bytes| out.extend_from_slice(&bytes);
        let pushed = match side {
            Side::First => self.relay.push(chunk, self.now, keep),
            Side::Shadow => self.relay.push_shadow(chunk, self.now, keep),
        };
        let PushResult { absorbed, effect, error_event, shadow, .. } = pushed;
        let is_nothing_sent = out.iter().all(u8::is_ascii_whitespace);
        if absorbed > chunk.len() || out.is_empty() != (absorbed == chunk.len()) && is_nothing_sent
        {
            return Err(format!("{absorbed} of {} absorbed, {} sent", chunk.len(), out.len()));
        }
        self.client.receive(&out, setting)?;
        match shadow {
            Some(ShadowEnd::Promoted) => self.first = self.second.take(),
            Some(_) => self.second = None,
            None => {}
        }
        if matches!(effect, Effect::NextEndpoint | Effect::Withhold) {
            (self.first, self.second) = (None, None);
            let endpoint = EndpointKey(1);
            let input = Input::Rejected { error_event, endpoint, endpoints: &ENDPOINTS };
            let effect = self.relay.session_mut().step(input, self.now);
            self.execute(effect)?;
        } else if effect != Effect::None {
            self.execute(effect)?;
        }
        Ok(shadow)
    }

    fn execute(&mut self, effect: Effect) -> Result<(), String> {
        match effect {
            Effect::None => {}
            Effect::Request { .. } => {
                (self.first, self.second, self.resuming) = (None, None, true);
            }
            Effect::End(ending, reason) => {
                (self.first, self.second) = (None, None);
                self.end = Some(End::Jackstay(ending, reason));
                self.relay.session_mut().take_error_event();
            }
            other => return Err(format!("unexpected effect {other:?}")),
        }
        Ok(())
    }
}
