//! Cuts the bytes of a watch into whole frames, so that no client ever sees half an event.
//!
//! * JSON: one object and a newline. kube-apiserver encodes every event with Go's `encoding/json`,
//!   which compacts the embedded object and escapes newlines in strings, `pretty=true` or not, so a
//!   line that ends in `}` is a frame and looking for newlines is enough. A line that does not end
//!   so, or a chunk that ends in `}` without a newline, is measured by its braces instead: pretty
//!   objects and objects without a newline between them come out whole as well.
//! * Protobuf: a big-endian length of four bytes, then that many bytes (apimachinery's
//!   `LengthDelimitedFramer`).
//!
//! A frame inside one chunk is never copied, only measured. What is left over at the end of a chunk
//! is copied and kept until it is whole, up to a cap, and as long as all watches together have
//! [`ByteBudget`]; a larger frame passes through in pieces ([`Cut::Oversized`]).
//!
//! Where a guess about JSON turns out wrong (two objects in a line), the frame is one that
//! [`super::event`] cannot read, and a watch with such a frame is never resumed.

use super::Encoding;
use super::held::Held;
use crate::proxy::byte_budget::ByteBudget;
use bytes::Bytes;
use std::sync::Arc;

/// The largest frame that is held back to be forwarded whole.
///
/// etcd refuses requests above 1.5 MiB by default, so an event of 8 MiB is not to be expected.
pub const FRAME_CAP: usize = 8 * 1024 * 1024;

/// The length of a protobuf frame precedes it in so many bytes.
const PREFIX: usize = 4;

/// Cuts one watch's bytes into frames.
#[derive(Debug)]
pub struct Splitter {
    encoding: Encoding,
    cap: usize,
    /// The beginning of a frame whose end has not arrived.
    partial: Held,
    mode: Mode,
    /// Part of the current frame has been passed on.
    oversized: bool,
}

/// How the end of the current frame is recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// JSON: at the next newline.
    Line,
    /// JSON: where the braces are balanced.
    Braces(Braces),
    /// Protobuf: after so many more bytes; `None` while the prefix is incomplete.
    Length(Option<usize>),
}

/// What the first bytes of the rest of a chunk are.
#[derive(Debug, PartialEq, Eq)]
pub enum Cut {
    /// So many bytes are one whole frame.
    Whole(usize),
    /// So many bytes complete the frame that earlier chunks began, which is this.
    Joined(usize, Bytes),
    /// So many bytes of white space between frames: forward them, they mean nothing.
    Blank(usize),
    /// All the rest began a frame and was copied.
    Partial,
    /// The frame is above the cap, or there is no room for it, and passes through: first what was kept
    /// of it, then so many bytes of the chunk.
    Oversized {
        /// What had been kept until the cap was reached.
        kept: Bytes,
        /// How much of the chunk belongs to it.
        len: usize,
        /// These are the first bytes of the frame.
        begins: bool,
        /// These are the last bytes of the frame.
        ends: bool,
    },
}

impl Splitter {
    /// A splitter at the beginning of a stream.
    pub fn new(encoding: Encoding, room: &Arc<ByteBudget>) -> Self {
        Self::with_cap(encoding, FRAME_CAP, room)
    }

    /// A splitter that keeps at most `cap` bytes of an incomplete frame.
    pub fn with_cap(encoding: Encoding, cap: usize, room: &Arc<ByteBudget>) -> Self {
        let partial = Held::new(room);
        Self { encoding, cap, partial, mode: Mode::start(encoding), oversized: false }
    }

    /// Cuts off the first frame, or what there is of it, from the rest of a chunk.
    ///
    /// Call it with what the cuts before have left until nothing is left.
    pub fn cut(&mut self, rest: &[u8]) -> Cut {
        if self.encoding == Encoding::Json && self.at_boundary() {
            let blank = rest.iter().take_while(|b| b.is_ascii_whitespace()).count();
            if blank > 0 {
                return Cut::Blank(blank);
            }
        }
        // There is always room for the length of a frame: without it nobody knows where it ends.
        let room = self.partial.len() + self.partial.room().left();
        let cap = self.cap.min(room.max(PREFIX));
        let end = match self.mode {
            Mode::Length(_) => self.length_end(rest),
            Mode::Line => self.line_end(rest, cap),
            Mode::Braces(_) => self.braces_end(rest),
        };
        let len = end.unwrap_or(rest.len());
        let announced = if let Mode::Length(Some(missing)) = self.mode { missing } else { 0 };
        let is_whole = end.is_some() && self.partial.is_empty();
        let cap = if is_whole { self.cap } else { cap };
        if self.oversized || self.partial.len() + len + announced > cap {
            return self.pass(&rest[..len], end.is_some());
        }
        let Some(len) = end else {
            self.partial.keep(rest, cap);
            return Cut::Partial;
        };
        self.mode = self.mode_after(&rest[..len]);
        if is_whole {
            return Cut::Whole(len);
        }
        self.partial.keep(&rest[..len], cap);
        Cut::Joined(len, self.take_kept())
    }

    /// Nothing of a frame has been seen that has not ended.
    pub fn at_boundary(&self) -> bool {
        self.partial.is_empty() && !self.oversized
    }

    /// Part of a frame above the cap has been passed on, and its end has not.
    pub fn in_oversized(&self) -> bool {
        self.oversized
    }

    /// Where what is kept is counted.
    pub fn room(&self) -> &Arc<ByteBudget> {
        self.partial.room()
    }

    /// How many bytes of an incomplete frame are kept.
    pub fn kept(&self) -> usize {
        self.partial.len()
    }

    /// Gives out what is kept and starts anew: for the end that the server itself sends, where what
    /// came passes on as it is, and for a lost stream, where it is dropped.
    pub fn take_partial(&mut self) -> Bytes {
        self.mode = Mode::start(self.encoding);
        self.oversized = false;
        self.take_kept()
    }

    /// What is kept, counted as long as it is anywhere.
    fn take_kept(&mut self) -> Bytes {
        if self.partial.is_empty() {
            return Bytes::new();
        }
        let empty = Held::new(self.partial.room());
        Bytes::from_owner(std::mem::replace(&mut self.partial, empty))
    }

    /// Passes on what is kept, and these bytes more, of a frame that is not kept.
    fn pass(&mut self, piece: &[u8], ends: bool) -> Cut {
        let begins = !std::mem::replace(&mut self.oversized, !ends);
        if ends {
            self.mode = self.mode_after(piece);
        }
        Cut::Oversized { kept: self.take_kept(), len: piece.len(), begins, ends }
    }

    /// How the end of the next frame is recognised after one that ended so. Where objects follow each
    /// other without newlines, looking for one before each would read the chunk once for each.
    fn mode_after(&self, end: &[u8]) -> Mode {
        match (self.mode, end.last()) {
            (Mode::Braces(_), Some(&last)) if last != b'\n' => Mode::Braces(Braces::default()),
            _ => Mode::start(self.encoding),
        }
    }

    fn length_end(&mut self, rest: &[u8]) -> Option<usize> {
        let missing = if let Mode::Length(Some(missing)) = self.mode {
            missing
        } else {
            let mut prefix = [0; PREFIX];
            let kept = self.partial.len();
            let fresh = rest.len().min(PREFIX - kept);
            if kept + fresh < PREFIX {
                return None;
            }
            prefix[..kept].copy_from_slice(&self.partial);
            prefix[kept..].copy_from_slice(&rest[..fresh]);
            fresh + u32::from_be_bytes(prefix) as usize
        };
        self.mode = Mode::Length(Some(missing.saturating_sub(rest.len())));
        (missing <= rest.len()).then_some(missing)
    }

    fn line_end(&mut self, rest: &[u8], cap: usize) -> Option<usize> {
        let end = find_newline(rest);
        let line = &rest[..end.unwrap_or(rest.len())];
        // What is kept never ends so: its braces were counted then.
        let closed = line.iter().rfind(|b| !b.is_ascii_whitespace()) == Some(&b'}');
        if closed && end.is_some() {
            return end;
        }
        let above_cap = self.partial.len() + line.len() > cap;
        if closed || end.is_some() || above_cap {
            // A newline inside an object, an object without a newline, or one that will not be kept
            // to be looked at again: count its braces, from its beginning.
            let mut braces = Braces::default();
            let before = braces.find_end(&self.partial);
            self.mode = Mode::Braces(braces);
            // More than one object was kept: it cannot be cut any more, only passed on.
            return if before.is_some() { Some(line.len()) } else { self.braces_end(rest) };
        }
        None
    }

    fn braces_end(&mut self, rest: &[u8]) -> Option<usize> {
        let Mode::Braces(braces) = &mut self.mode else { return None };
        let end = braces.find_end(rest)?;
        // The newline belongs to its frame, where it is at hand.
        let blank = rest[end..].iter().take_while(|&&b| matches!(b, b' ' | b'\t' | b'\r')).count();
        let newline = rest.get(end + blank) == Some(&b'\n');
        Some(if newline { end + blank + 1 } else { end })
    }
}

impl Mode {
    fn start(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Json => Self::Line,
            Encoding::Protobuf => Self::Length(None),
        }
    }
}

/// Finds the end of a JSON object by its braces, over any number of slices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Braces {
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// The frame does not begin with an object: it ends with its line.
    foreign: bool,
}

impl Braces {
    /// How many bytes belong to the object, if its end is among them.
    fn find_end(&mut self, bytes: &[u8]) -> Option<usize> {
        for (at, &byte) in bytes.iter().enumerate() {
            if self.foreign {
                if byte == b'\n' {
                    return Some(at + 1);
                }
            } else if self.escaped {
                self.escaped = false;
            } else if self.in_string {
                match byte {
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
            } else {
                match byte {
                    b'{' | b'[' => self.depth = self.depth.saturating_add(1),
                    b'}' | b']' if self.depth <= 1 => return Some(at + 1),
                    b'}' | b']' => self.depth -= 1,
                    _ if byte.is_ascii_whitespace() => {}
                    _ if self.depth == 0 => self.foreign = true,
                    b'"' => self.in_string = true,
                    _ => {}
                }
            }
        }
        None
    }
}

/// How many bytes there are up to and with the first newline.
///
/// The standard library's `memchr`, reached through the one stable door to it.
fn find_newline(bytes: &[u8]) -> Option<usize> {
    let mut rest = bytes;
    let skipped = std::io::BufRead::skip_until(&mut rest, b'\n').unwrap_or(0);
    (skipped > 0 && bytes[skipped - 1] == b'\n').then_some(skipped)
}
