//! A relay with two streams: executes what [`Shadow`] decides on the frames and losses of both.

use std::time::Instant;

use bytes::Bytes;

use super::{ChunkVersions, PushResult, Relay};
use crate::watch::codec::event::Event;
use crate::watch::codec::frame::{FrameSplitter, Piece};
use crate::watch::codec::{Encoding, parse};
use crate::watch::session::{NotResumable, SessionEffect, SessionInput};
use crate::watch::shadow::{Full, Judgement, LEAD_LIMIT, Shadow, ShadowEnd, ShownFrame, Side};

/// What follows when the server has ended the first stream.
#[derive(Debug, PartialEq, Eq)]
pub enum FirstEnd {
    /// The response ends after these bytes, the beginning of an incomplete frame.
    Ended(Bytes),
    /// The stream had not shown every event that the client has received. As after [`Relay::stream_lost`].
    Lost(SessionEffect),
}

/// The decision on one frame or piece of a frame.
#[derive(Debug, Clone, Copy)]
struct Decision {
    effect: SessionEffect,
    shadow: Option<ShadowEnd>,
}

impl From<SessionEffect> for Decision {
    fn from(effect: SessionEffect) -> Self {
        Self { effect, shadow: None }
    }
}

impl Relay {
    /// Whether a shadow may be requested now: as a move away from a degraded endpoint may be, if there is none.
    pub fn can_shadow(&self, now: Instant) -> bool {
        !self.has_shadow() && self.session.can_have_second_stream(now)
    }

    /// Whether there is a shadow, accepted or requested.
    pub fn has_shadow(&self) -> bool {
        self.shadow.as_ref().is_some_and(|shadow| shadow.second.is_some())
    }

    /// Whether the first stream has yet to show events that the client has received.
    pub fn first_follows(&self) -> bool {
        self.shadow.as_ref().is_some_and(|shadow| shadow.follows(Side::First))
    }

    /// Called when a shadow is requested, at the moment when the query of the request is made
    /// ([`super::super::session::Session::resume_query`]): its response lacks what the client receives afterwards.
    /// Returns whether it may be requested.
    pub fn request_shadow(&mut self, now: Instant) -> bool {
        self.request_shadow_with(LEAD_LIMIT, now)
    }

    pub(in crate::watch) fn request_shadow_with(&mut self, limit: usize, now: Instant) -> bool {
        if self.has_shadow() {
            return false;
        }
        let Some(start) = self.session.request_second_stream(now) else { return false };
        let splitter = FrameSplitter::new(self.encoding(), self.splitter.account().clone());
        match &mut self.shadow {
            Some(shadow) => shadow.request(start, splitter),
            None => self.shadow = Some(Box::new(Shadow::new(start, splitter, limit))),
        }
        true
    }

    /// Called when the response head of the shadow has arrived: 200, with the Content-Type of the client's response.
    pub fn shadow_accepted(&mut self) {
        if let Some(second) = self.shadow.as_mut().and_then(|shadow| shadow.second.as_mut()) {
            second.accepted = true;
        }
    }

    /// Called when the request of the shadow has failed, its stream was lost or its server has ended it.
    pub fn shadow_lost(&mut self, now: Instant) {
        self.drop_shadow(now);
    }

    /// Called when the connection of the first stream answers again. [`ShadowEnd::Recovered`]: the shadow is not needed
    /// any more. Otherwise a later result of [`Self::push`] may say so.
    pub fn first_answers(&mut self, now: Instant) -> Option<ShadowEnd> {
        let shadow = self.shadow.as_mut().filter(|shadow| shadow.second.is_some())?;
        shadow.first_answers = true;
        if shadow.follows(Side::First) {
            return None;
        }
        self.drop_shadow(now);
        Some(ShadowEnd::Recovered)
    }

    /// Called when the connection of the first stream is suspect again: the shadow stays.
    pub fn first_suspect(&mut self) {
        if let Some(shadow) = &mut self.shadow {
            shadow.first_answers = false;
        }
    }

    /// As [`Self::push`], for a chunk of the shadow. The caller stops to read a shadow that has ended. After
    /// [`ShadowEnd::Promoted`] the effect is that on the rest of the chunk.
    pub fn push_shadow(
        &mut self,
        chunk: &Bytes,
        now: Instant,
        mut out: impl FnMut(Bytes),
    ) -> PushResult {
        self.push_shadowed(Side::Shadow, chunk, now, &mut out)
    }

    /// Called when the server has ended the first stream, if the watch may have a shadow.
    pub fn first_ended(&mut self, now: Instant) -> FirstEnd {
        if self.first_follows() {
            return FirstEnd::Lost(self.stream_lost(false, now));
        }
        FirstEnd::Ended(self.server_ended(now))
    }

    /// Called when another watch of the API group has shown versions that are not ordered.
    pub fn group_unordered(&mut self, now: Instant) -> SessionEffect {
        self.drop_shadow(now);
        self.shadow = None;
        if self.session.is_behind() {
            return self.session.step(SessionInput::Stop(NotResumable::Group), now);
        }
        self.session.step(SessionInput::GroupUnordered, now)
    }

    /// Called when the body must end the watch, for this reason.
    pub fn stop(&mut self, reason: NotResumable, now: Instant) -> SessionEffect {
        self.shadow = None;
        self.splitter.reset();
        self.session.step(SessionInput::Stop(reason), now)
    }

    /// The first stream is lost. Returns whether the shadow is the watch. `withheld`: the ERROR event of the first stream.
    pub(super) fn promote(&mut self, withheld: Option<Bytes>, quiet: bool, now: Instant) -> bool {
        let Some(mut shadow) = self.shadow.take() else { return false };
        let Some(second) = shadow.second.take_if(|second| second.accepted) else { return false };
        shadow.first = second.progress;
        shadow.lead.promote_shadow();
        let follows = shadow.follows(Side::First);
        let state = (second.stream, follows);
        if !self.session.continue_on_second(state, withheld, quiet, now) {
            return false;
        }
        self.splitter = second.splitter;
        self.shadow = follows.then_some(shadow);
        true
    }

    fn drop_shadow(&mut self, now: Instant) {
        let Some(shadow) = &mut self.shadow else { return };
        shadow.second = None;
        shadow.lead.drop_shadow();
        if shadow.follows(Side::First) {
            self.session.set_behind(now);
        } else {
            self.shadow = None;
        }
    }

    /// Passes a chunk of one of two streams through the session.
    #[cold]
    pub(super) fn push_shadowed(
        &mut self,
        side: Side,
        chunk: &Bytes,
        now: Instant,
        out: &mut dyn FnMut(Bytes),
    ) -> PushResult {
        let mut result = PushResult::default();
        if !self.session.is_resumable() {
            self.drop_shadow(now);
        } else if side == Side::First {
            result.shadow = self.yield_memory(chunk.len(), now);
        }
        let mut at = 0;
        while at < chunk.len() {
            let is_promoted = result.shadow == Some(ShadowEnd::Promoted);
            if is_promoted || side == Side::First && self.shadow.is_none() {
                return result.and(self.push(&chunk.slice(at..), now, out));
            }
            let Some(splitter) = self.splitter_of(side) else { break };
            let (len, frame, oversized) = match splitter.split(&chunk[at..]) {
                Piece::Whole(len) => (len, chunk.slice(at..at + len), None),
                Piece::Completed(len, frame) => (len, frame, None),
                Piece::Oversized { buffered, len, begins, ends } => {
                    (len, buffered, Some(SessionInput::OversizedPiece { begins, ends }))
                }
                Piece::Whitespace(len) => {
                    match side {
                        Side::First => out(chunk.slice(at..at + len)),
                        Side::Shadow => result.absorbed += len,
                    }
                    at += len;
                    continue;
                }
                Piece::Buffered => break,
            };
            let is_oversized = oversized.is_some();
            let decision = match oversized {
                Some(piece) => self.on_unusable(side, piece, None, now),
                None => self.on_frame(side, &frame, now, &mut result.versions),
            };
            at += len;
            result.shadow = result.shadow.or(decision.shadow);
            match decision.effect {
                SessionEffect::Forward if is_oversized => {
                    out(frame);
                    out(chunk.slice(at - len..at));
                }
                SessionEffect::Forward => self.forward(frame, out),
                SessionEffect::Swallow | SessionEffect::Discard => result.absorbed += len,
                SessionEffect::None => {
                    result.absorbed += len;
                    break;
                }
                effect => {
                    result.absorbed += len;
                    result.effect = effect;
                    let is_withheld = effect == SessionEffect::Withhold;
                    result.error_event = is_withheld.then(|| Bytes::copy_from_slice(&frame));
                    self.shadow = None;
                    self.splitter.reset();
                    break;
                }
            }
        }
        result.absorbed += chunk.len() - at;
        result
    }

    /// The splitter of the stream, while it is read.
    fn splitter_of(&mut self, side: Side) -> Option<&mut FrameSplitter> {
        match side {
            Side::First => Some(&mut self.splitter),
            Side::Shadow => Some(&mut self.shadow.as_mut()?.second.as_mut()?.splitter),
        }
    }

    /// Sends a frame to the client. The newline of a JSON object may arrive after a frame of the other stream.
    fn forward(&self, frame: Bytes, out: &mut dyn FnMut(Bytes)) {
        let lacks_newline = self.encoding() == Encoding::Json && frame.last() != Some(&b'\n');
        out(frame);
        if lacks_newline {
            out(Bytes::from_static(b"\n"));
        }
    }

    /// The first stream has the memory that the shadow has taken for a partial frame, because a frame above the budget
    /// makes the watch not resumable.
    fn yield_memory(&mut self, needed: usize, now: Instant) -> Option<ShadowEnd> {
        let second = self.shadow.as_ref()?.second.as_ref()?;
        if second.splitter.buffered() == 0 || second.splitter.account().left() >= needed {
            return None;
        }
        self.drop_shadow(now);
        Some(ShadowEnd::OverBudget)
    }

    fn on_frame(
        &mut self,
        side: Side,
        bytes: &Bytes,
        now: Instant,
        versions: &mut ChunkVersions,
    ) -> Decision {
        let event = parse(self.encoding(), bytes);
        let Some(shadow) = &mut self.shadow else { return SessionEffect::None.into() };
        let decision = match (shadow.judge(side, event, &self.session), event) {
            (Judgement::Pending(frame), _) => self.on_pending(side, frame, now),
            (Judgement::EarlyBookmark(frame), _) => {
                advance(shadow, side, frame);
                SessionEffect::Swallow.into()
            }
            (Judgement::Bookmark { frame, agreed }, Some(event)) => {
                advance(shadow, side, frame);
                self.confirm(side, now);
                let effect =
                    if agreed { self.step(side, event, now) } else { SessionEffect::Swallow };
                effect.into()
            }
            (Judgement::New(frame), Some(event)) => self.on_new(side, event, frame, now),
            (Judgement::Contradiction, _) => self.contradicted(now),
            // Only the shadow has shown the last events of the client.
            (Judgement::Disordered, _) if side == Side::Shadow && self.first_follows() => {
                self.contradicted(now)
            }
            _ => {
                let event = SessionInput::Frame(event);
                self.on_unusable(side, event, Some(bytes), now)
            }
        };
        versions.record(event, decision.effect);
        decision
    }

    fn contradicted(&mut self, now: Instant) -> Decision {
        Decision {
            effect: self.session.step(SessionInput::Contradicted, now),
            shadow: self.has_shadow().then_some(ShadowEnd::Contradicted),
        }
    }

    /// Passes a frame to the session, with the state of its stream.
    fn step(&mut self, side: Side, event: Event<'_>, now: Instant) -> SessionEffect {
        let second = self.shadow.as_mut().and_then(|shadow| shadow.second.as_mut());
        match second {
            Some(second) if side == Side::Shadow => {
                self.session.step_second(&mut second.stream, event, now)
            }
            _ => self.session.step(SessionInput::Frame(Some(event)), now),
        }
    }

    fn confirm(&mut self, side: Side, now: Instant) {
        match (side, self.shadow.as_mut().and_then(|shadow| shadow.second.as_mut())) {
            (Side::First, _) => self.session.caught_up(true, now),
            (Side::Shadow, Some(second)) => second.stream.unconfirmed = None,
            (Side::Shadow, None) => {}
        }
    }

    fn on_pending(&mut self, side: Side, frame: ShownFrame, now: Instant) -> Decision {
        let Some(shadow) = &mut self.shadow else { return SessionEffect::None.into() };
        advance(shadow, side, frame);
        let mut is_repeated = false;
        if let Some(progress) = shadow.progress_mut(side)
            && progress.to_repeat > 0
        {
            progress.to_repeat -= 1;
            is_repeated = true;
        } else {
            shadow.lead.pop();
        }
        let mut decision = Decision::from(SessionEffect::Discard);
        if shadow.follows(side) {
            return decision;
        }
        let (first_answers, has_second) = (shadow.first_answers, shadow.second.is_some());
        if !is_repeated {
            self.confirm(side, now);
        }
        if side == Side::First && (first_answers || !has_second) {
            self.session.caught_up(!is_repeated, now);
            self.drop_shadow(now);
            decision.shadow = has_second.then_some(ShadowEnd::Recovered);
        }
        decision
    }

    fn on_new(
        &mut self,
        side: Side,
        event: Event<'_>,
        frame: ShownFrame,
        now: Instant,
    ) -> Decision {
        let effect = self.step(side, event, now);
        let Some(shadow) = &mut self.shadow else { return effect.into() };
        if effect != SessionEffect::Forward && side == Side::First {
            return effect.into();
        }
        if effect != SessionEffect::Forward || !self.session.is_resumable() {
            let end = match side {
                Side::First => ShadowEnd::FirstNotResumable,
                Side::Shadow => ShadowEnd::Unusable,
            };
            self.drop_shadow(now);
            return Decision { effect, shadow: Some(end) };
        }
        advance(shadow, side, frame);
        let mut decision = Decision::from(effect);
        if let Err(Full) = shadow.lead.push(side.other(), frame) {
            decision.shadow = Some(match side {
                Side::Shadow if self.promote(None, false, now) => ShadowEnd::Promoted,
                _ => {
                    self.drop_shadow(now);
                    ShadowEnd::TooFarBehind
                }
            });
        }
        decision
    }

    /// A frame, or a piece of one, that ends one of the streams or the shadow. `bytes` of a whole frame.
    fn on_unusable(
        &mut self,
        side: Side,
        input: SessionInput<'_>,
        bytes: Option<&Bytes>,
        now: Instant,
    ) -> Decision {
        if side == Side::Shadow {
            self.drop_shadow(now);
            let shadow = Some(ShadowEnd::Unusable);
            return Decision { effect: SessionEffect::Discard, shadow };
        }
        if self.first_follows() {
            return if self.promote(None, false, now) {
                Decision { effect: SessionEffect::None, shadow: Some(ShadowEnd::Promoted) }
            } else {
                SessionEffect::NextEndpoint.into()
            };
        }
        let had_shadow = self.has_shadow();
        let effect = self.session.step(input, now);
        let withheld = match effect {
            // Copied, because it may be held for long.
            SessionEffect::Withhold => bytes.map(|bytes| Bytes::copy_from_slice(bytes)),
            _ => None,
        };
        let asks_others = matches!(effect, SessionEffect::Withhold | SessionEffect::NextEndpoint);
        if asks_others && self.promote(withheld, false, now) {
            return Decision { effect: SessionEffect::None, shadow: Some(ShadowEnd::Promoted) };
        }
        self.shadow = None;
        Decision { effect, shadow: had_shadow.then_some(ShadowEnd::FirstNotResumable) }
    }

    /// A copy whose memory counts in another budget.
    #[cfg(test)]
    pub(in crate::watch) fn fork(&self, account: &crate::admission::ByteAccount) -> Self {
        Self {
            splitter: self.splitter.fork(account.clone()),
            session: self.session.clone(),
            shadow: self.shadow.as_ref().map(|shadow| Box::new(shadow.fork(account))),
        }
    }
}

impl PushResult {
    /// The result of a chunk whose rest has this one.
    fn and(mut self, rest: Self) -> Self {
        self.absorbed += rest.absorbed;
        self.effect = rest.effect;
        self.error_event = rest.error_event;
        self.versions.objects = self.versions.objects.max(rest.versions.objects);
        self.versions.bookmarks = self.versions.bookmarks.max(rest.versions.bookmarks);
        self.versions.shown = self.versions.shown.max(rest.versions.shown);
        self
    }
}

/// The stream has shown this frame.
fn advance(shadow: &mut Shadow, side: Side, frame: ShownFrame) {
    if let Some(progress) = shadow.progress_mut(side) {
        progress.shown = progress.shown.max(frame.version);
    }
}
