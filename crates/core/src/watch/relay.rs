//! Turns the bytes of one watch's upstream streams into the bytes of its client's stream: the codec splits
//! and parses frames, the session decides on each.
//!
//! Adjacent frames of a chunk that are forwarded leave as one slice of that chunk, so a burst of events
//! becomes one piece of output. A watch with two streams ([`super::shadow`]) is in [`shadowed`].

mod shadowed;

use super::codec::event::{Event, EventType};
use super::codec::frame::{FrameSplitter, Piece};
use super::codec::{Encoding, parse, version};
use super::request::WatchRequest;
use super::session::{Session, SessionEffect, SessionInput};
use super::shadow::{Shadow, ShadowEnd, Side};
use crate::admission::ByteAccount;
use crate::credential_class::ClientRank;
use bytes::Bytes;
use std::ops::Range;
use std::time::Instant;

pub use self::shadowed::FirstEnd;

/// The codec and the session of one watch.
#[derive(Debug)]
pub struct Relay {
    splitter: FrameSplitter,
    session: Session,
    /// Boxed, because most watches have none.
    shadow: Option<Box<Shadow>>,
}

/// The result of [`Relay::push`].
#[derive(Debug, PartialEq, Eq)]
pub struct PushResult {
    /// Bytes of the chunk that are not sent to the client now. The caller releases their flow-control
    /// window at once; otherwise a frame larger than the window would never arrive.
    pub absorbed: usize,
    /// [`SessionEffect::None`]: continue with the next chunk. Any other effect: reset the stream.
    pub effect: SessionEffect,
    /// The ERROR event, if the effect is [`SessionEffect::Withhold`].
    pub error_event: Option<Bytes>,
    /// The versions that the chunk has shown.
    pub versions: ChunkVersions,
    /// What has become of the shadow, if it has ended.
    pub shadow: Option<ShadowEnd>,
}

impl Default for PushResult {
    fn default() -> Self {
        Self {
            absorbed: 0,
            effect: SessionEffect::None,
            error_event: None,
            versions: ChunkVersions::default(),
            shadow: None,
        }
    }
}

/// The highest versions in one chunk; 0 without any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChunkVersions {
    /// Of the objects of events that the client receives.
    pub objects: u64,
    /// Of the bookmarks that the client receives.
    pub bookmarks: u64,
    /// Of all events and bookmarks.
    pub shown: u64,
}

impl ChunkVersions {
    fn record(&mut self, event: Option<Event<'_>>, effect: SessionEffect) {
        let version = event.and_then(|event| version::as_u64(event.version?)).unwrap_or(0);
        let is_bookmark = event.is_some_and(|event| event.event_type == EventType::Bookmark);
        match effect {
            SessionEffect::Forward if is_bookmark => self.bookmarks = self.bookmarks.max(version),
            SessionEffect::Forward => self.objects = self.objects.max(version),
            SessionEffect::Swallow => {}
            _ => return,
        }
        self.shown = self.shown.max(version);
    }
}

impl Relay {
    /// Creates the relay of a watch that was requested at `requested_at` and accepted with status 200.
    /// `account` bounds the bytes that it buffers.
    pub fn new(
        encoding: Encoding,
        request: WatchRequest,
        requested_at: Instant,
        account: ByteAccount,
    ) -> Self {
        Self {
            splitter: FrameSplitter::new(encoding, account),
            session: Session::new(request, requested_at),
            shadow: None,
        }
    }

    /// The client has proven this, by which the buffered bytes are limited.
    pub fn raise_rank(&mut self, rank: ClientRank) {
        self.splitter.raise_rank(rank);
        if let Some(shadow) = &mut self.shadow {
            shadow.raise_rank(rank);
        }
    }

    /// The account of the bytes that the relay buffers.
    pub fn account(&self) -> &ByteAccount {
        self.splitter.account()
    }

    /// The state machine of the watch.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// The state machine of the watch, for inputs other than bytes.
    pub fn session_mut(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Passes the frames of a chunk through the session, and the bytes for the client to `out`, in order.
    #[expect(
        clippy::too_many_lines,
        reason = "one loop over the frames of a chunk, on the path of each event"
    )]
    pub fn push(&mut self, chunk: &Bytes, now: Instant, mut out: impl FnMut(Bytes)) -> PushResult {
        if self.shadow.is_some() {
            return self.push_shadowed(Side::First, chunk, now, &mut out);
        }
        // The bytes of the chunk that will leave as one slice.
        let mut run = 0..0;
        let mut at = 0;
        let mut absorbed = 0;
        let mut versions = ChunkVersions::default();
        let encoding = self.encoding();
        while at < chunk.len() {
            // The next `len` bytes of the chunk, the bytes of the same frame from earlier chunks, and the
            // session's decision on them.
            let (len, buffered, effect) = match self.splitter.split(&chunk[at..]) {
                Piece::Whole(len) => {
                    let event = parse(encoding, &chunk[at..at + len]);
                    let effect = self.session.step(SessionInput::Frame(event), now);
                    versions.record(event, effect);
                    (len, Bytes::new(), effect)
                }
                Piece::Completed(len, frame) => {
                    let event = parse(encoding, &frame);
                    let effect = self.session.step(SessionInput::Frame(event), now);
                    versions.record(event, effect);
                    if effect == SessionEffect::Forward {
                        flush(chunk, &mut run, &mut out);
                        out(frame);
                        at += len;
                        run = at..at;
                        continue;
                    }
                    (len, frame, effect)
                }
                Piece::Oversized { buffered, len, begins, ends } => {
                    let piece = SessionInput::OversizedPiece { begins, ends };
                    (len, buffered, self.session.step(piece, now))
                }
                Piece::Whitespace(len) => (len, Bytes::new(), SessionEffect::Forward),
                Piece::Buffered => {
                    absorbed += chunk.len() - at;
                    break;
                }
            };
            match effect {
                SessionEffect::Forward => {
                    if !buffered.is_empty() {
                        flush(chunk, &mut run, &mut out);
                        out(buffered);
                    }
                    if run.is_empty() {
                        run = at..at;
                    }
                    run.end = at + len;
                }
                SessionEffect::Swallow | SessionEffect::Discard => {
                    flush(chunk, &mut run, &mut out);
                    absorbed += len;
                }
                effect => {
                    flush(chunk, &mut run, &mut out);
                    let error_event = (effect == SessionEffect::Withhold).then(|| {
                        // Copied, because it may be held for long, and would keep the buffer that it was read into.
                        if buffered.is_empty() {
                            Bytes::copy_from_slice(&chunk[at..at + len])
                        } else {
                            buffered
                        }
                    });
                    self.splitter.reset();
                    return PushResult {
                        absorbed: absorbed + chunk.len() - at,
                        effect,
                        error_event,
                        versions,
                        shadow: None,
                    };
                }
            }
            at += len;
        }
        flush(chunk, &mut run, &mut out);
        PushResult { absorbed, versions, ..PushResult::default() }
    }

    /// Called when the server has ended the stream. Returns the buffered part of an incomplete frame, which
    /// the client receives too. The shadow, if there is one, is dropped; see [`Self::first_ended`].
    pub fn server_ended(&mut self, now: Instant) -> Bytes {
        self.shadow = None;
        self.session.step(SessionInput::ServerEnded, now);
        self.splitter.reset()
    }

    /// Called when the stream was lost. Drops the buffered part of an incomplete frame. [`SessionEffect::None`]: the
    /// stream of the shadow is that of the watch from now on.
    pub fn stream_lost(&mut self, quiet: bool, now: Instant) -> SessionEffect {
        self.splitter.reset();
        if self.promote(None, quiet, now) {
            return SessionEffect::None;
        }
        self.session.step(SessionInput::StreamLost { quiet }, now)
    }

    /// Called when etcd was restored from a backup. Drops the buffered part of an incomplete frame.
    pub fn history_lost(&mut self, error_event: Bytes, now: Instant) -> SessionEffect {
        self.shadow = None;
        self.splitter.reset();
        self.session.step(SessionInput::HistoryLost { error_event }, now)
    }

    /// The encoding of the watch.
    pub fn encoding(&self) -> Encoding {
        self.splitter.encoding()
    }

    /// Called when a new stream has replaced one that works. Drops the buffered part of an incomplete frame:
    /// the new stream sends that frame again.
    pub fn move_ended(&mut self, now: Instant) {
        self.shadow = None;
        self.splitter.reset();
        self.session.step(SessionInput::MoveEnded { moved: true }, now);
    }

    /// Whether the first chunk of a stream begins with an ERROR event, with which its server refuses the
    /// watch.
    pub fn begins_with_error(&self, first: &[u8]) -> bool {
        let mut splitter = FrameSplitter::new(self.encoding(), self.splitter.account().clone());
        let Piece::Whole(len) = splitter.split(first) else { return false };
        parse(self.encoding(), &first[..len])
            .is_some_and(|event| event.event_type == EventType::Error)
    }
}

/// Passes the bytes of `run` to `out` as one slice, and empties `run`.
fn flush(chunk: &Bytes, run: &mut Range<usize>, out: &mut impl FnMut(Bytes)) {
    if run.start < run.end {
        out(chunk.slice(std::mem::take(run)));
    }
}
