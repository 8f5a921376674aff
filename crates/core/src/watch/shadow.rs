//! Shadow watches: a second stream of a watch beside one that is suspect.
//!
//! The connection of a watch that does not answer may answer again, or be dead. The watch opens a second stream at its
//! cursor on another endpoint, the *shadow*, and keeps the *first* stream. Both show the same events after the cursor. The
//! client receives each event from the stream that shows it first. [`super::relay::Relay`] owns both streams and executes
//! what this module decides.
//!
//! # The lead
//!
//! The events that the client has received and that a stream has yet to show are *pending* for it: at first the events at
//! the cursor that its request repeats ([`super::session`]), then the *lead*, a queue of the events that the other
//! stream has shown. A stream with pending events *follows*. At most one of the streams has a lead to follow, because a
//! stream shows a new event only when nothing is pending for it.
//!
//! | frame of a stream | nothing is pending for it | it follows |
//! |---|---|---|
//! | the next pending event: same version, same type | | discard |
//! | an event after everything that either stream has shown, in the order of the session | forward; it becomes the cursor, and is pending for the other stream | contradiction |
//! | an event that a bookmark of the other stream has passed | contradiction | contradiction |
//! | a bookmark that passes a pending event | | contradiction |
//! | a bookmark that the other stream has reached, or at the cursor | forward, or swallow | swallow |
//! | any other bookmark | swallow | swallow |
//! | *unusable*: ERROR, unreadable, of unknown type, above the cap, with a version that is no number of 64 bits | see below | see below |
//! | *disordered*: not above what this stream has shown or was asked for, or a jump of versions | see below | see below |
//!
//! | unusable or disordered frame of | nothing is pending for the first stream | the first stream follows |
//! |---|---|---|
//! | the shadow, unusable | the shadow is dropped | the shadow is dropped; the first stream continues to follow |
//! | the shadow, disordered | the shadow is dropped | contradiction: the client has events that only this server has shown |
//! | the first stream, an ERROR for which other endpoints would be asked | the shadow is the watch | the shadow is the watch |
//! | the first stream, any other | the shadow is dropped; the session decides as without one | the shadow is the watch |
//! | the only stream, which follows | | [`SessionEffect::NextEndpoint`](super::session::SessionEffect::NextEndpoint) |
//!
//! | input | nothing is pending for the first stream | the first stream follows |
//! |---|---|---|
//! | the shadow is lost, or its server ends it | the shadow is dropped | the shadow is dropped; the first stream continues to follow |
//! | the first stream is lost, the shadow is accepted | the shadow is the watch, and follows if something is pending for it | the shadow is the watch |
//! | the first stream is lost, the shadow is not accepted | the session resumes the watch | the session resumes the watch |
//! | the server ends the first stream | the watch ends | as if the first stream was lost |
//! | the first stream answers again | the shadow is dropped | the shadow is dropped once nothing is pending for the first stream |
//! | the lead has [`LEAD_LIMIT`] events, or the budget is used up | the shadow is dropped | the shadow is the watch |
//! | the group is unordered | the shadow is dropped | the watch ends |
//! | etcd restored, stop | the watch ends | the watch ends |
//! | contradiction | the watch ends with a reset | the watch ends with a reset |
//!
//! # Why each event arrives once and in order
//!
//! - What the client has received is the history up to the opening of the shadow, then the new events of both streams in
//!   the order in which they were forwarded. Each stream has shown a beginning of it: a stream without pending events has
//!   shown all, and a stream that follows has shown all but what is pending. A new event is forwarded only from a
//!   stream of the first kind, which keeps this true.
//! - So an event that both streams show is discarded the second time, and no event of a stream that is read is missing: the
//!   next event of a stream that follows is pending, or the watch ends.
//! - A bookmark promises that no event up to its version follows. It advances the cursor only if the other stream has
//!   reached its version, so a wrong bookmark of one stream does not hide an event of the other. A bookmark that is
//!   withheld costs nothing but a longer history at the next resume, and the next one follows within a minute.
//! - Partial frames are buffered in the splitter of their stream. Frames above the cap leave in pieces, so there is no
//!   shadow beside them. While a shadow runs, each JSON frame that leaves ends with a newline, which may otherwise
//!   arrive after a frame of the other stream.
//!
//! After a contradiction one of the servers has shown an event that does not exist, or has left one out. Neither jackstay
//! nor the client knows which. The client may have an event after one that it lacks, so a clean end, after which it
//! watches from its last event, could lose that one: the watch is reset, and a reflector lists.
//!
//! # What cannot be promised
//!
//! - An event that a wrong server invents is forwarded if it arrives first. The other stream contradicts it with its next
//!   event or bookmark. If the other stream is lost before, nothing shows that the event was wrong, as
//!   after a resume on a wrong server.
//! - The objects of two events of one type and version are not compared, because a frame may have no name, and servers
//!   may encode an object differently. If a wrong server leaves out one of several DELETED of one version, the client may
//!   receive another one twice before the streams contradict each other.
//! - If the shadow was requested after a version, a further DELETED of that version reaches only the first stream. The
//!   shadow is then dropped, and may be opened again. If the first stream is lost before the DELETED arrives, it is missing, as
//!   after a resume ([`super::session`]).
//! - A watch cache drops the events of one version that it receives after a new watch has begun within them. The shadow
//!   then contradicts the first stream, and the watch is reset, where a resume would lose the events.

mod judgement;
pub mod lead;
pub mod opening;

use super::codec::frame::FrameSplitter;
use super::session::second::{SecondStream, StreamState};
#[cfg(test)]
use crate::admission::ByteAccount;
use crate::credential_class::ClientRank;

pub use self::judgement::Judgement;
pub use self::lead::{Full, LEAD_LIMIT, Lead, ShownFrame, Side};

/// What has become of the shadow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShadowEnd {
    /// Its stream is that of the watch from now on. The caller drops the first stream.
    Promoted,
    /// The first stream answers again and has shown every event that the client has received.
    Recovered,
    /// A frame of the shadow cannot be used.
    Unusable,
    /// It has fallen behind the first stream by more than [`LEAD_LIMIT`] events or the budget.
    TooFarBehind,
    /// The watch cannot be resumed after a frame of the first stream.
    FirstNotResumable,
    /// The first stream needs the memory of its partial frame.
    OverBudget,
    /// The streams contradict each other, and the watch ends.
    Contradicted,
}

impl ShadowEnd {
    /// The name in logs.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Promoted => "promoted",
            Self::Recovered => "recovered",
            Self::Unusable => "unusable",
            Self::TooFarBehind => "too_far_behind",
            Self::FirstNotResumable => "first_not_resumable",
            Self::OverBudget => "over_budget",
            Self::Contradicted => "contradicted",
        }
    }
}

/// How far one stream is.
#[derive(Debug, Clone, Copy)]
pub struct Progress {
    /// Number of events that it has yet to repeat, before the lead.
    pub to_repeat: u32,
    /// Their version.
    pub repeated: u64,
    /// The version of its last event or bookmark; at first that of its request.
    pub shown: u64,
}

/// The second stream.
#[derive(Debug)]
pub(super) struct SecondWatch {
    pub(super) splitter: FrameSplitter,
    /// What the session knows about the stream. The repeated events are counted in `progress`.
    pub(super) stream: StreamState,
    pub(super) progress: Progress,
    /// The version that its request names: it shows no event up to it.
    pub(super) requested: u64,
    /// The response head has arrived.
    pub(super) accepted: bool,
}

/// The second stream of a watch, and how far both are. Without the second stream: the lead that the first has yet to show.
#[derive(Debug)]
pub struct Shadow {
    pub(super) second: Option<SecondWatch>,
    pub(super) first: Progress,
    pub(super) lead: Lead,
    /// The first stream answers again.
    pub(super) first_answers: bool,
}

impl Shadow {
    /// A shadow that is requested now.
    pub(super) fn new(start: SecondStream, splitter: FrameSplitter, limit: usize) -> Self {
        let lead = Lead::new(splitter.account().clone(), limit);
        let first = Progress {
            to_repeat: start.first_to_repeat,
            repeated: start.cursor,
            shown: start.cursor - u64::from(start.first_to_repeat > 0),
        };
        let mut shadow = Self { second: None, first, lead, first_answers: false };
        shadow.request(start, splitter);
        shadow
    }

    /// Requests another second stream, while the first follows the lead of an earlier one.
    pub(super) fn request(&mut self, start: SecondStream, splitter: FrameSplitter) {
        self.first_answers = false;
        self.second = Some(SecondWatch {
            splitter,
            stream: start.stream,
            progress: Progress {
                to_repeat: start.to_repeat,
                repeated: start.cursor,
                shown: start.requested,
            },
            requested: start.requested,
            accepted: false,
        });
    }

    fn progress(&self, side: Side) -> Option<&Progress> {
        match side {
            Side::First => Some(&self.first),
            Side::Shadow => self.second.as_ref().map(|second| &second.progress),
        }
    }

    pub(super) fn progress_mut(&mut self, side: Side) -> Option<&mut Progress> {
        match side {
            Side::First => Some(&mut self.first),
            Side::Shadow => self.second.as_mut().map(|second| &mut second.progress),
        }
    }

    /// Whether the client has received events that this stream has yet to show.
    pub(super) fn follows(&self, side: Side) -> bool {
        self.progress(side).is_some_and(|progress| progress.to_repeat > 0)
            || self.lead.next_of(side).is_some()
    }

    pub(super) fn raise_rank(&mut self, rank: ClientRank) {
        self.lead.raise_rank(rank);
        if let Some(second) = &mut self.second {
            second.splitter.raise_rank(rank);
        }
    }

    /// A copy whose memory counts in another budget.
    #[cfg(test)]
    pub(super) fn fork(&self, account: &ByteAccount) -> Self {
        let second = self.second.as_ref().map(|second| SecondWatch {
            splitter: second.splitter.fork(account.clone()),
            stream: second.stream.clone(),
            ..*second
        });
        let lead = self.lead.fork(account.clone());
        Self { second, lead, ..*self }
    }
}
