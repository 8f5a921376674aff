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
//! | ERROR | forward; never resume | as the first frame: next peer; later: forward |
//! | INITIAL, any event | forward | (is never resumed) |
//! | ORDERED, above the cursor (a bookmark: or at it) | forward; it is the cursor | forward; it is the cursor |
//! | ORDERED, not above it | forward; never resume | discard the first such, then end |
//! | ORDERED, not a number | forward; never resume | end |
//!
//! where "forward" means "swallow" for a bookmark that the client did not ask for.
//!
//! Loss of the stream without an end by the server; a partial frame has been dropped:
//!
//! | state | what follows |
//! |---|---|
//! | in the middle of a frame above the cap | reset |
//! | less than 2 s left, or too many resumes | end or reset |
//! | ORDERED, resumable | resume at the cursor |
//! | nothing forwarded yet | restart the original request |
//! | ORDERED, every frame read | end cleanly: a reflector watches again, without a list |
//! | INITIAL, or a frame unread | reset: a clean end would make a partial state look complete |

use super::event::{Event, Kind, Unparsed};
use super::request::Asked;
use super::resume::{self, Answer, Judgement, Round, Shun};
use super::version::Version;
use std::time::{Duration, Instant};

/// With less of its time left a watch is not worth moving.
const MIN_REMAINING_TO_MOVE: Duration = Duration::from_secs(30);
/// Least pause between two attempts of a watch to leave an apiserver that is unwell.
const FLEE_PAUSE: Duration = Duration::from_secs(2);
/// With less of its time left a watch is not worth resuming.
const MIN_REMAINING: Duration = Duration::from_secs(2);
/// Resumes within a minute before a watch is left to its client.
pub const RESUMES_A_MINUTE: u32 = 12;
const MINUTE: Duration = Duration::from_secs(60);
/// Looks, one a minute, without a bookmark after which a watch counts as stale.
const LOOKS_WITHOUT_BOOKMARK: u8 = 3;

/// Whether the versions of the events that come are positions in history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The objects there are, in any order.
    Initial,
    /// What happens to them, in the order of their versions.
    Ordered,
}

/// Why a watch is not resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bar {
    /// Its group may be served by an aggregated apiserver with a history of its own.
    Group,
    /// A frame could not be read.
    Unparsed,
    /// A version was missing or not a number.
    NotNumeric,
    /// A version was not above the one before.
    NotGrowing,
    /// An event of an unknown type came.
    UnknownEvent,
    /// The server said that the watch has failed.
    ServerError,
    /// The client does not read.
    StalledClient,
}

impl Bar {
    /// A short name for logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Group => "group",
            Self::Unparsed => "unparsed",
            Self::NotNumeric => "version_not_numeric",
            Self::NotGrowing => "version_not_growing",
            Self::UnknownEvent => "unknown_event",
            Self::ServerError => "server_error",
            Self::StalledClient => "stalled_client",
        }
    }
}

/// What becomes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The client gets it.
    Forward,
    /// A bookmark that only we asked for.
    Swallow,
    /// The client has it already.
    Discard,
    /// This peer does not have the history: ask another ([`WatchState::on_answer`] with
    /// [`Answer::FirstFrameError`]).
    NextPeer,
    /// This stream cannot be trusted to go on where the last one ended: end the watch.
    End(Ending),
}

/// How a watch that is not resumed ends for its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// As if the server's timeout had come.
    Clean,
    /// Visibly broken.
    Reset,
}

/// What becomes of a watch whose stream is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterLoss {
    /// After this delay, send the original request again.
    Restart(Duration),
    /// After this delay, go on at the cursor ([`WatchState::reissue`]).
    Resume(Duration),
    /// It ends.
    End(Ending),
}

/// What follows an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterAttempt {
    /// The watch goes on with this response.
    Accept,
    /// After the delay, ask another peer.
    Another {
        /// How long to wait.
        delay: Duration,
        /// What to make of the peer that answered.
        shun: Shun,
    },
    /// It ends.
    End(Ending),
}

/// How to ask again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reissue<'a> {
    /// Where to go on; `None` for the request as the client made it.
    pub cursor: Option<&'a Version>,
    /// What is left of the client's `timeoutSeconds`, if it gave any.
    pub remaining: Option<Duration>,
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
    /// The client did not ask for bookmarks.
    swallow: bool,
    cursor: Option<Version>,
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
    minute: Option<(Instant, u32)>,
    moved: Option<Instant>,
    bookmarks: Bookmarks,
}

/// Whether bookmarks come that used to come.
#[derive(Debug, Default)]
struct Bookmarks {
    /// One has come since the last look.
    news: bool,
    /// One has ever come.
    had: bool,
    /// Looks in a row without one.
    missed: u8,
}

impl WatchState {
    /// A watch that has just been answered with 200, asked for at `asked_at`.
    pub fn new(asked: &Asked, asked_at: Instant) -> Self {
        let ordered = asked.version.is_some() && !asked.send_initial_events;
        Self {
            phase: if ordered { Phase::Ordered } else { Phase::Initial },
            send_initial_events: asked.send_initial_events,
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
            minute: None,
            moved: None,
            bookmarks: Bookmarks::default(),
        }
    }

    /// Called once a minute: true, once, when bookmarks have stayed away for
    /// [`LOOKS_WITHOUT_BOOKMARK`] of them on a watch that had them. The apiserver sends one a
    /// minute (`cacher.go`, `bookmarkFrequency`): its watch cache may be stale.
    pub fn has_gone_stale(&mut self) -> bool {
        let bookmarks = &mut self.bookmarks;
        if std::mem::take(&mut bookmarks.news) || !bookmarks.had {
            bookmarks.missed = 0;
            return false;
        }
        bookmarks.missed = bookmarks.missed.saturating_add(1);
        bookmarks.missed == LOOKS_WITHOUT_BOOKMARK
    }

    /// How to ask another apiserver to take it over, if it can be moved without any risk: else
    /// `None`. Until [`Self::moved`] no frame may be taken.
    pub fn reissue_to_move(&self, now: Instant) -> Option<Reissue<'_>> {
        let lately = |since: Instant| now.saturating_duration_since(since) < MINUTE;
        let late = self.remaining(now).is_some_and(|left| left < MIN_REMAINING_TO_MOVE);
        if !self.resumable() || late || self.moved.is_some_and(lately) {
            return None;
        }
        Some(Reissue { cursor: self.cursor.as_ref(), remaining: self.remaining(now) })
    }

    /// The same for a watch that should leave its apiserver, which is unwell: it goes however little
    /// time has passed since it moved, but a flight must not become a habit.
    pub fn reissue_to_flee(&self, now: Instant) -> Option<Reissue<'_>> {
        let lately = |since: Instant| now.saturating_duration_since(since) < FLEE_PAUSE;
        let often = self.resumes_lately(now) >= RESUMES_A_MINUTE / 2;
        if !self.resumable() || self.too_late(now) || often || self.moved.is_some_and(lately) {
            return None;
        }
        Some(Reissue { cursor: self.cursor.as_ref(), remaining: self.remaining(now) })
    }

    /// Notes an attempt to flee; it counts as a resume.
    pub fn tried_to_flee(&mut self, now: Instant) {
        self.moved = Some(now);
        self.count_resume(now);
    }

    /// Notes an attempt to move it: no other one soon.
    pub fn tried_to_move(&mut self, now: Instant) {
        self.moved = Some(now);
    }

    /// Another apiserver has taken it over; the next frames are of its stream.
    pub fn moved(&mut self, now: Instant) {
        self.leg = Leg::Resumed { strays: 0, settled: false };
        self.bookmarks.missed = 0;
        // Should the history there be too short after all.
        self.round = Some(Round::begin(now, 0));
    }

    /// The phase.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// The version of the last event that the client has.
    pub fn cursor(&self) -> Option<&Version> {
        self.cursor.as_ref()
    }

    /// Why the watch will never be resumed, if so.
    pub fn bar(&self) -> Option<Bar> {
        self.bar
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
    pub fn on_frame(&mut self, frame: Result<Event<'_>, Unparsed>) -> Verdict {
        match self.leg {
            Leg::Original => self.on_original(frame),
            Leg::Resumed { strays, settled } => self.on_resumed(frame, strays, settled),
        }
    }

    fn on_original(&mut self, frame: Result<Event<'_>, Unparsed>) -> Verdict {
        let Ok(event) = frame else {
            self.unparsed = true;
            self.forbid(Bar::Unparsed);
            self.forwarded = true;
            return Verdict::Forward;
        };
        self.advance(&event);
        if event.kind == Kind::Bookmark && self.swallow {
            return Verdict::Swallow;
        }
        self.forwarded = true;
        Verdict::Forward
    }

    fn on_resumed(
        &mut self,
        frame: Result<Event<'_>, Unparsed>,
        strays: u8,
        settled: bool,
    ) -> Verdict {
        let Ok(event) = frame else { return Verdict::End(self.ending()) };
        if event.kind == Kind::Error {
            return if settled { self.on_original(frame) } else { Verdict::NextPeer };
        }
        let Some(version) = event.version.and_then(Version::parse) else {
            return Verdict::End(self.ending());
        };
        if !self.is_news(event.kind, &version) {
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
        match event.kind {
            Kind::Bookmark => self.bookmarks = Bookmarks { news: true, had: true, missed: 0 },
            Kind::Error => return self.forbid(Bar::ServerError),
            Kind::Other => self.forbid(Bar::UnknownEvent),
            _ => {}
        }
        let ordered_before = self.phase == Phase::Ordered;
        if !ordered_before && self.ends_initial(event) {
            self.phase = Phase::Ordered;
        }
        if self.phase == Phase::Initial {
            return;
        }
        match event.version.and_then(Version::parse) {
            None => self.forbid(Bar::NotNumeric),
            Some(version) if !ordered_before || self.is_news(event.kind, &version) => {
                self.cursor = Some(version);
                self.cursor_behind = false;
            }
            Some(_) => self.forbid(Bar::NotGrowing),
        }
    }

    fn ends_initial(&self, event: &Event<'_>) -> bool {
        if self.send_initial_events {
            event.kind == Kind::Bookmark && event.initial_events_end
        } else {
            matches!(event.kind, Kind::Modified | Kind::Deleted | Kind::Bookmark)
        }
    }

    fn is_news(&self, kind: Kind, version: &Version) -> bool {
        self.cursor
            .as_ref()
            .is_none_or(|cursor| version > cursor || kind == Kind::Bookmark && version == cursor)
    }

    /// The stream was lost without an end by the server; a partial frame has been dropped.
    ///
    /// `random` is any number, evenly distributed.
    pub fn on_lost(&mut self, now: Instant, random: u64) -> AfterLoss {
        self.round = None;
        self.bookmarks.missed = 0;
        let resume = self.resumable();
        let restart = !self.forwarded
            && !self.mid_frame
            && self.bar.is_none_or(|bar| bar == Bar::Group)
            && (self.phase == Phase::Initial || self.bar.is_some());
        if !(resume || restart) || self.too_late(now) {
            return AfterLoss::End(self.ending());
        }
        let Some(recent) = self.count_resume(now) else {
            return AfterLoss::End(self.ending());
        };
        let mut round = Round::begin(now, recent);
        let Some(delay) = round.next(now, random) else {
            return AfterLoss::End(self.ending());
        };
        self.round = Some(round);
        if resume {
            self.leg = Leg::Resumed { strays: 0, settled: false };
            AfterLoss::Resume(delay)
        } else {
            self.leg = Leg::Original;
            AfterLoss::Restart(delay)
        }
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
        if self.phase == Phase::Ordered && !self.mid_frame && !self.unparsed {
            Ending::Clean
        } else {
            Ending::Reset
        }
    }

    fn remaining(&self, now: Instant) -> Option<Duration> {
        self.deadline.map(|deadline| deadline.saturating_duration_since(now))
    }

    fn too_late(&self, now: Instant) -> bool {
        self.remaining(now).is_some_and(|remaining| remaining < MIN_REMAINING)
    }

    fn resumes_lately(&self, now: Instant) -> u32 {
        self.minute
            .filter(|(began, _)| now.saturating_duration_since(*began) < MINUTE)
            .map_or(0, |(_, count)| count)
    }

    /// How many resumes there were in this minute before; `None` when there were too many.
    fn count_resume(&mut self, now: Instant) -> Option<u32> {
        let recent = match self.minute {
            Some((began, count)) if now.saturating_duration_since(began) < MINUTE => {
                self.minute = Some((began, count + 1));
                count
            }
            _ => {
                self.minute = Some((now, 1));
                0
            }
        };
        (recent < RESUMES_A_MINUTE).then_some(recent)
    }
}
