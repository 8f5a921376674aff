//! Turns the bytes of one watch's upstream streams into the bytes of its one downstream stream.
//!
//! What lies together in a chunk and is forwarded leaves together, as one slice of that chunk: a
//! burst of events costs one piece of output, not one an event.

use super::codec::Encoding;
use super::codec::event::{self, EventType};
use super::codec::frame::{FrameSplitter, Piece};
use super::request::Asked;
use super::state::WatchState;
use super::verdict::{AfterLoss, Ending, Verdict};
use crate::observe::ByteBudget;
use bytes::Bytes;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// One watch between its upstream streams and its client.
#[derive(Debug)]
pub struct Relay {
    encoding: Encoding,
    splitter: FrameSplitter,
    state: WatchState,
    /// The server's last word, while others are asked for a better one.
    withheld: Option<Bytes>,
}

/// What to do after a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// So many bytes of the chunk will never be put out, or not soon: give their flow-control
    /// window back now. Otherwise a frame larger than the window would wait for itself.
    pub absorbed: usize,
    /// Where to go on.
    pub flow: Flow,
}

/// Where to go on after a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// With the next chunk.
    Continue,
    /// On another peer: cancel this stream and call [`WatchState::on_error_event`].
    NextPeer,
    /// Nowhere: cancel this stream and end the client's.
    End(Ending),
}

impl Relay {
    /// A relay for a watch that was asked for at `asked_at` and has just been answered with 200.
    pub fn new(
        encoding: Encoding,
        asked: &Asked,
        asked_at: Instant,
        room: &Arc<ByteBudget>,
    ) -> Self {
        Self {
            encoding,
            splitter: FrameSplitter::new(encoding, room),
            state: WatchState::new(asked, asked_at),
            withheld: None,
        }
    }

    /// What is known of the watch.
    pub fn state(&self) -> &WatchState {
        &self.state
    }

    /// The watch, to judge attempts or to forbid resuming.
    pub fn state_mut(&mut self) -> &mut WatchState {
        &mut self.state
    }

    /// Whether the client is owed an answer that was withheld.
    pub fn withholds(&self) -> bool {
        self.withheld.is_some()
    }

    /// The answer that was withheld: nobody has a better one.
    pub fn take_withheld(&mut self) -> Option<Bytes> {
        self.withheld.take()
    }

    /// Takes a chunk from upstream and hands what the client gets to `out`, in order.
    pub fn push(&mut self, chunk: &Bytes, mut out: impl FnMut(Bytes)) -> Step {
        let mut run = 0..0;
        let mut at = 0;
        let mut absorbed = 0;
        while at < chunk.len() {
            let cut = self.splitter.split(&chunk[at..]);
            let (len, copied, verdict) = match cut {
                Piece::Whole(len) => {
                    let frame = event::parse(self.encoding, &chunk[at..at + len]);
                    (len, Bytes::new(), self.state.on_frame(frame))
                }
                Piece::Completed(len, frame) => {
                    let verdict = self.state.on_frame(event::parse(self.encoding, &frame));
                    if verdict == Verdict::Forward {
                        self.withheld = None;
                        flush(chunk, &mut run, &mut out);
                        out(frame);
                        at += len;
                        run = at..at;
                        continue;
                    }
                    (len, frame, verdict)
                }
                Piece::Oversized { buffered: kept, len, begins, ends } => {
                    (len, kept, self.state.on_oversized(begins, ends))
                }
                Piece::Whitespace(len) => (len, Bytes::new(), Verdict::Forward),
                Piece::Buffered => {
                    absorbed += chunk.len() - at;
                    break;
                }
            };
            match verdict {
                Verdict::Forward => {
                    self.withheld = None;
                    if !copied.is_empty() {
                        flush(chunk, &mut run, &mut out);
                        out(copied);
                    }
                    if run.is_empty() {
                        run = at..at;
                    }
                    run.end = at + len;
                }
                Verdict::Swallow | Verdict::Discard => {
                    flush(chunk, &mut run, &mut out);
                    absorbed += len;
                }
                Verdict::NextPeer | Verdict::Withhold | Verdict::End(_) => {
                    flush(chunk, &mut run, &mut out);
                    if verdict == Verdict::Withhold {
                        let whole = copied.is_empty();
                        self.withheld =
                            Some(if whole { chunk.slice(at..at + len) } else { copied });
                    }
                    let flow = match verdict {
                        Verdict::End(ending) => Flow::End(ending),
                        _ => Flow::NextPeer,
                    };
                    self.splitter.reset();
                    return Step { absorbed: absorbed + chunk.len() - at, flow };
                }
            }
            at += len;
        }
        flush(chunk, &mut run, &mut out);
        Step { absorbed, flow: Flow::Continue }
    }

    /// The server has ended the stream: what is left of it, to be passed on before the end.
    pub fn finish(&mut self) -> Bytes {
        self.splitter.reset()
    }

    /// Whether what a stream begins with is an ERROR event: its server does not take the watch.
    pub fn begins_with_error(&self, first: &[u8]) -> bool {
        let room = self.splitter.budget();
        let Piece::Whole(len) = FrameSplitter::new(self.encoding, room).split(first) else {
            return false;
        };
        event::parse(self.encoding, &first[..len])
            .is_ok_and(|event| event.event_type == EventType::Error)
    }

    /// Another apiserver has taken the watch over at the cursor; what was held back of a frame
    /// comes again from there.
    pub fn moved(&mut self, now: Instant) {
        self.splitter.reset();
        self.state.moved(now);
    }

    /// The stream was lost without an end by the server: what becomes of the watch.
    ///
    /// Part of a frame that the client has not seen is dropped. `quiet` says that the watch was not
    /// delivering; `random` is any number.
    pub fn on_lost(&mut self, now: Instant, quiet: bool, random: u64) -> AfterLoss {
        self.splitter.reset();
        self.withheld = None;
        self.state.on_lost(now, quiet, random)
    }
}

/// Puts out the run of bytes that are forwarded together.
fn flush(chunk: &Bytes, run: &mut Range<usize>, out: &mut impl FnMut(Bytes)) {
    if run.start < run.end {
        out(chunk.slice(std::mem::take(run)));
    }
}
