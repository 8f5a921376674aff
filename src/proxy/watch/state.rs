//! Decides what becomes of each frame of a watch, and of the watch when its stream is lost.
//!
//! Phases. The initial events of a watch come in no order, so their versions are no position:
//!
//! | request | begins | ORDERED from |
//! |---|---|---|
//! | resourceVersion > 0, no `sendInitialEvents` | ORDERED | the start, at that version |
//! | `sendInitialEvents` | INITIAL | the bookmark annotated `k8s.io/initial-events-end` |
//! | anything else | INITIAL | the first event that is not ADDED |
//!
//! Frames. The cursor is the version of the last event the client was sent (or a bookmark for it):
//!
//! | frame | first stream | resumed stream |
//! |---|---|---|
//! | unreadable | forward; never resume | end: it may be one that the client has |
//! | ERROR 410, where it can go on elsewhere | withhold; ask others | as the first frame: next peer; later: withhold; ask others |
//! | any other ERROR | forward; never resume | as the first frame: next peer; later: forward |
//! | INITIAL, any event | forward | (is never resumed) |
//! | ORDERED, above the cursor (a bookmark: or at it) | forward; it is the cursor | forward; it is the cursor |
//! | ORDERED, not above it | forward; never resume | discard the first such, then end |
//! | ORDERED, not a number | forward; never resume | end |
//!
//! where "forward" means "swallow" for a bookmark that the client did not ask for. A 410 is withheld
//! because history is per server: one that has just started knows none, while its peers may. The
//! client gets it when no other has the history either.
//!
//! Loss of the stream without an end by the server; a partial frame has been dropped:
//!
//! | state | what follows |
//! |---|---|
//! | in the middle of a frame above the cap | reset |
//! | less than 2 s left, or too many resumes | end or reset |
//! | ORDERED, resumable | resume at the cursor |
//! | nothing forwarded yet, and it did not begin at the server's present | restart the original request |
//! | ORDERED, every frame read | end cleanly: a reflector watches again, without a list |
//! | INITIAL with `sendInitialEvents` and the client's own bookmarks | end cleanly: the client misses the bookmark that ends the initial events, and a reflector asks for them again |
//! | INITIAL from the server's present, nothing forwarded | end cleanly: nothing is partial, and a restart would begin later |
//! | INITIAL, or a frame unread | reset: a clean end would make a partial state look complete |

use super::allowance::Allowance;
use super::bookmarks::Bookmarks;
use super::codec::event::{Event, EventType, Unreadable};
use super::codec::version::ResourceVersion;
use super::request::Asked;
use super::resume::{self, Answer, Judgement, Round};
use super::verdict::{AfterAttempt, AfterLoss, Bar, Ending, Obstacle, Reissue, Stop, Verdict};
use std::time::{Duration, Instant};

/// Status code of "too old resource version": the history does not reach back that far.
const TOO_OLD: u16 = 410;
/// With less of its time left a watch is not worth moving.
const MIN_REMAINING_TO_MOVE: Duration = Duration::from_secs(30);
/// With less of its time left a watch is not worth resuming.
const MIN_REMAINING: Duration = Duration::from_secs(2);

/// Whether the versions of the events that come are positions in history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The objects there are, in any order.
    Initial,
    /// What happens to them, in the order of their versions.
    Ordered,
}

/// Which stream the frames come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leg {
    /// The answer to the request as the client made it.
    Original,
    /// One that goes on at the cursor.
    Resumed { strays: u8, settled: bool },
}

/// One watch.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools)] // facts that are independent of phase and leg
pub struct WatchState {
    phase: Phase,
    send_initial_events: bool,
    /// [`Asked::from_present`].
    from_present: bool,
    /// The client did not ask for bookmarks.
    swallow: bool,
    cursor: Option<ResourceVersion>,
    deadline: Option<Instant>,
    bar: Option<Bar>,
    /// A frame was forwarded that could not be read: where frames end is a guess from there on.
    unparsed: bool,
    /// Part of a frame above the cap was forwarded.
    mid_frame: bool,
    /// The last frame was above the cap, so the cursor is older than what the client has.
    cursor_behind: bool,
    forwarded: bool,
    leg: Leg,
    round: Option<Round>,
    allowance: Allowance,
    bookmarks: Bookmarks,
}

impl WatchState {
    /// A watch that has just been answered with 200, asked for at `asked_at`.
    pub fn new(asked: &Asked, asked_at: Instant) -> Self {
        let ordered = asked.version.is_some() && !asked.send_initial_events;
        Self {
            phase: if ordered { Phase::Ordered } else { Phase::Initial },
            send_initial_events: asked.send_initial_events,
            from_present: asked.from_present,
            swallow: !asked.bookmarks,
            cursor: asked.version.clone().filter(|_| ordered),
            deadline: asked.timeout.and_then(|timeout| asked_at.checked_add(timeout)),
            bar: (!asked.resumable_group).then_some(Bar::Group),
            unparsed: false,
            mid_frame: false,
            cursor_behind: false,
            forwarded: false,
            leg: Leg::Original,
            round: None,
            allowance: Allowance::default(),
            bookmarks: Bookmarks::default(),
        }
    }

    /// Called once a minute: true, once, when its bookmarks have stayed away for too long.
    pub fn has_gone_stale(&mut self) -> bool {
        self.bookmarks.have_stayed_away()
    }

    /// How to ask another apiserver to take it over, if it can be moved without any risk: else
    /// `None`. Until [`Self::moved`] no frame may be taken.
    pub fn reissue_to_move(&self, now: Instant) -> Option<Reissue<'_>> {
        let late = self.remaining(now).is_some_and(|left| left < MIN_REMAINING_TO_MOVE);
        if !self.resumable() || late || !self.allowance.may_move(now) {
            return None;
        }
        Some(Reissue { cursor: self.cursor.as_ref(), remaining: self.remaining(now) })
    }

    /// The same for a watch that should leave its apiserver, which is unwell: it goes however little
    /// time has passed since it moved, but a flight must not become a habit.
    pub fn reissue_to_flee(&self, now: Instant) -> Option<Reissue<'_>> {
        if !self.resumable() || self.too_late(now) || !self.allowance.may_flee(now) {
            return None;
        }
        Some(Reissue { cursor: self.cursor.as_ref(), remaining: self.remaining(now) })
    }

    /// The same for a watch whose connection has no future.
    pub fn reissue_to_leave(&self, now: Instant) -> Option<Reissue<'_>> {
        if !self.resumable() || self.too_late(now) || !self.allowance.may_leave(now) {
            return None;
        }
        Some(Reissue { cursor: self.cursor.as_ref(), remaining: self.remaining(now) })
    }

    /// Notes an attempt to flee; it counts as a resume.
    pub fn tried_to_flee(&mut self, now: Instant) {
        self.allowance.tried_to_move(now);
        self.allowance.resume(now);
    }

    /// Notes an attempt to move it: no other one soon.
    pub fn tried_to_move(&mut self, now: Instant) {
        self.allowance.tried_to_move(now);
    }

    /// Another apiserver has taken it over; the next frames are of its stream.
    pub fn moved(&mut self, now: Instant) {
        self.leg = Leg::Resumed { strays: 0, settled: false };
        self.bookmarks.begin_anew();
        // Should the history there be too short after all.
        self.round = Some(Round::begin(now, 0, false));
    }

    /// The phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The version of the last event that the client has.
    pub fn cursor(&self) -> Option<&ResourceVersion> {
        self.cursor.as_ref()
    }

    /// Why the watch will never be resumed, if so.
    pub fn bar(&self) -> Option<Bar> {
        self.bar
    }

    /// What its server sent that stands in the way of resuming it.
    pub fn obstacle(&self) -> Option<Obstacle> {
        let oversized = self.cursor_behind.then_some(Obstacle::Oversized);
        self.bar.map(Obstacle::Bar).or(oversized)
    }

    /// Whether the watch would be resumed now.
    pub fn resumable(&self) -> bool {
        self.phase == Phase::Ordered
            && self.bar.is_none()
            && self.cursor.is_some()
            && !self.mid_frame
            && !self.cursor_behind
    }

    /// Never resume from here on; the first reason is kept.
    pub fn forbid(&mut self, bar: Bar) {
        self.bar.get_or_insert(bar);
    }

    /// Decides on one whole frame.
    pub fn on_frame(&mut self, frame: Result<Event<'_>, Unreadable>) -> Verdict {
        match self.leg {
            Leg::Original => self.on_original(frame),
            Leg::Resumed { strays, settled } => self.on_resumed(frame, strays, settled),
        }
    }

    fn on_original(&mut self, frame: Result<Event<'_>, Unreadable>) -> Verdict {
        let Ok(event) = frame else {
            self.unparsed = true;
            self.forbid(Bar::Unparsed);
            self.forwarded = true;
            return Verdict::Forward;
        };
        let too_old = event.event_type == EventType::Error && event.status_code == Some(TOO_OLD);
        if too_old && self.phase == Phase::Ordered && self.way_on().is_some() {
            return Verdict::Withhold;
        }
        self.advance(&event);
        if event.event_type == EventType::Bookmark && self.swallow {
            return Verdict::Swallow;
        }
        self.forwarded = true;
        Verdict::Forward
    }

    fn on_resumed(
        &mut self,
        frame: Result<Event<'_>, Unreadable>,
        strays: u8,
        settled: bool,
    ) -> Verdict {
        let Ok(event) = frame else { return Verdict::End(self.ending()) };
        if event.event_type == EventType::Error {
            return if settled { self.on_original(frame) } else { Verdict::NextPeer };
        }
        let Some(version) = event.version.and_then(ResourceVersion::parse) else {
            return Verdict::End(self.ending());
        };
        if !self.is_news(event.event_type, &version) {
            self.leg = Leg::Resumed { strays: strays + 1, settled };
            return if strays == 0 { Verdict::Discard } else { Verdict::End(self.ending()) };
        }
        self.leg = Leg::Resumed { strays, settled: true };
        self.on_original(frame)
    }

    /// Takes note of a piece of a frame above the cap, which passes through unread.
    pub fn on_oversized(&mut self, begins: bool, ends: bool) -> Verdict {
        if begins && matches!(self.leg, Leg::Resumed { settled: false, .. }) {
            return Verdict::End(self.ending());
        }
        self.forwarded = true;
        self.cursor_behind = true;
        self.mid_frame = !ends;
        Verdict::Forward
    }

    /// Moves the phase and the cursor on.
    fn advance(&mut self, event: &Event<'_>) {
        match event.event_type {
            EventType::Bookmark => self.bookmarks.came(),
            EventType::Error => return self.forbid(Bar::ServerError),
            EventType::Unknown => self.forbid(Bar::UnknownEvent),
            _ => {}
        }
        let ordered_before = self.phase == Phase::Ordered;
        if !ordered_before && self.ends_initial(event) {
            self.phase = Phase::Ordered;
        }
        if self.phase == Phase::Initial {
            return;
        }
        match event.version.and_then(ResourceVersion::parse) {
            None => self.forbid(Bar::NotNumeric),
            Some(version) if !ordered_before || self.is_news(event.event_type, &version) => {
                self.cursor = Some(version);
                self.cursor_behind = false;
            }
            Some(_) => self.forbid(Bar::NotGrowing),
        }
    }

    fn ends_initial(&self, event: &Event<'_>) -> bool {
        if self.send_initial_events {
            event.event_type == EventType::Bookmark && event.initial_events_end
        } else {
            matches!(
                event.event_type,
                EventType::Modified | EventType::Deleted | EventType::Bookmark
            )
        }
    }

    fn is_news(&self, kind: EventType, version: &ResourceVersion) -> bool {
        self.cursor.as_ref().is_none_or(|cursor| {
            version > cursor || kind == EventType::Bookmark && version == cursor
        })
    }

    /// The stream was lost without an end by the server; a partial frame has been dropped.
    ///
    /// `quiet` says that it was not delivering; `random` is any number, evenly distributed.
    pub fn on_lost(&mut self, now: Instant, quiet: bool, random: u64) -> AfterLoss {
        self.bookmarks.begin_anew();
        let round = match self.begin_round(now, |recent| Round::begin(now, recent, quiet)) {
            Ok(round) => round,
            Err(stop) => return AfterLoss::End(self.ending(), stop),
        };
        let Some(delay) = round.next(now, random) else {
            return AfterLoss::End(self.ending(), Stop::Late);
        };
        match self.leg {
            Leg::Resumed { .. } => AfterLoss::Resume(delay),
            Leg::Original => AfterLoss::Restart(delay),
        }
    }

    /// The server ended the watch by an ERROR event; [`Verdict::NextPeer`] and
    /// [`Verdict::Withhold`] ask for this. `peers_left` and `random` are those of
    /// [`Self::on_answer`].
    pub fn on_error_event(
        &mut self,
        content_type: &str,
        peers_left: bool,
        now: Instant,
        random: u64,
    ) -> AfterAttempt {
        // Where it is the answer to an attempt, the round of that attempt goes on.
        let answers = matches!(self.leg, Leg::Resumed { settled: false, .. });
        if !answers && self.begin_round(now, |recent| Round::brief(now, recent)).is_err() {
            return AfterAttempt::End(self.ending());
        }
        self.on_answer(Answer::ErrorEvent, content_type, peers_left, now, random)
    }

    /// Begins to look for another stream, if the watch can go on with one.
    fn begin_round(
        &mut self,
        now: Instant,
        begin: impl FnOnce(u32) -> Round,
    ) -> Result<&mut Round, Stop> {
        self.round = None;
        let leg = self.way_on().ok_or_else(|| match self.obstacle() {
            Some(_) => Stop::NotResumable,
            None if self.from_present && !self.forwarded => Stop::NoVersion,
            None => Stop::Initial,
        })?;
        if self.too_late(now) {
            return Err(Stop::Late);
        }
        let recent = self.allowance.resume(now).ok_or(Stop::TooOften)?;
        self.leg = leg;
        Ok(self.round.insert(begin(recent)))
    }

    /// What another stream would be for it, if it can go on with one: at the cursor, or, while
    /// nothing was forwarded, as the answer to the original request.
    fn way_on(&self) -> Option<Leg> {
        if self.resumable() {
            return Some(Leg::Resumed { strays: 0, settled: false });
        }
        let restart = !self.forwarded
            && !self.from_present
            && !self.mid_frame
            && self.bar.is_none_or(|bar| bar == Bar::Group)
            && (self.phase == Phase::Initial || self.bar.is_some());
        restart.then_some(Leg::Original)
    }

    /// Whether the loss of its stream does no harm: it goes on with another one, or ends cleanly.
    pub fn can_leave(&self) -> bool {
        self.way_on().is_some() || self.ending() == Ending::Clean
    }

    /// Whether something came of the stream it reads now: it has taken the watch.
    pub fn has_settled(&self) -> bool {
        match self.leg {
            Leg::Original => self.forwarded,
            Leg::Resumed { settled, .. } => settled,
        }
    }

    /// When it ends whatever happens; `None` if its client has set no end.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// A total outage is over in which it was held for so long: when to ask, or `None` if too little of
    /// its time is left. `quiet` and `random` are those of [`Self::on_lost`].
    pub fn on_return(
        &mut self,
        now: Instant,
        held: Duration,
        quiet: bool,
        random: u64,
    ) -> Option<Duration> {
        if self.too_late(now) {
            return None;
        }
        self.round = Some(Round::begin(now, 0, quiet));
        Some(resume::return_jitter(held, quiet, random))
    }

    /// What to ask in the next attempt.
    pub fn reissue(&self, now: Instant) -> Reissue<'_> {
        let resumed = matches!(self.leg, Leg::Resumed { .. });
        Reissue { cursor: self.cursor.as_ref().filter(|_| resumed), remaining: self.remaining(now) }
    }

    /// An attempt has come to something. `content_type` is what the client was given;
    /// `peers_left` says that there is a peer to ask that is not shunned for the round.
    pub fn on_answer(
        &mut self,
        answer: Answer<'_>,
        content_type: &str,
        peers_left: bool,
        now: Instant,
        random: u64,
    ) -> AfterAttempt {
        match resume::judge(answer, content_type) {
            Judgement::Accept => AfterAttempt::Accept,
            Judgement::Another(shun) if peers_left && !self.too_late(now) => {
                match self.round.as_mut().and_then(|round| round.next(now, random)) {
                    Some(delay) => AfterAttempt::Another { delay, shun },
                    None => AfterAttempt::End(self.ending()),
                }
            }
            Judgement::Another(_) | Judgement::GiveUp => AfterAttempt::End(self.ending()),
        }
    }

    /// How the watch ends if it ends now and the server did not end it.
    pub fn ending(&self) -> Ending {
        let complete = match self.phase {
            Phase::Ordered => true,
            // Its client knows that the end of the initial events is missing.
            Phase::Initial if self.send_initial_events => !self.swallow,
            Phase::Initial => self.from_present && !self.forwarded,
        };
        if complete && !self.mid_frame && !self.unparsed { Ending::Clean } else { Ending::Reset }
    }

    fn remaining(&self, now: Instant) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now))
    }

    fn too_late(&self, now: Instant) -> bool {
        self.remaining(now).is_some_and(|remaining| remaining < MIN_REMAINING)
    }
}
