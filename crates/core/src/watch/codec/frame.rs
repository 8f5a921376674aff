//! Splits the bytes of a watch response into whole frames, so that a watch can change its upstream stream
//! between two events.
//!
//! * JSON: a frame is one object and a newline. kube-apiserver encodes every event with Go's
//!   `encoding/json`, which compacts the embedded object and escapes newlines in strings, with or
//!   without `pretty=true`. So a line that ends in `}` is a frame, and the splitter only searches for
//!   newlines. If a line does not end in `}`, or a chunk ends in `}` without a newline, the splitter
//!   counts brackets instead, which also splits pretty-printed objects and objects without a newline
//!   between them.
//! * Protobuf: a frame is a big-endian length of four bytes and that many bytes (apimachinery's
//!   `LengthDelimitedFramer`).
//! * CBOR: a frame is one data item of a sequence (RFC 8742; apimachinery, `serializer/cbor/framer.go`). After bytes that
//!   are no CBOR the ends of frames are unknown, so the rest of each chunk is a frame, which [`super::parse`] cannot
//!   read.
//!
//! A frame within one chunk is not copied. The beginning of a frame at the end of a chunk is buffered until
//! the frame is whole, up to [`FRAME_CAP`] bytes and within a budget that all watches share. A larger frame
//! passes through in pieces ([`Piece::Oversized`]).
//!
//! Two JSON objects in one line become one frame, which [`super::parse`] cannot read. A watch with such a
//! frame is not resumed.

use super::Encoding;
use super::item_end::{ItemEnd, Malformed};
use crate::admission::ByteAccount;
use crate::credential_class::ClientRank;
use bytes::Bytes;

/// The largest frame that is buffered to be forwarded whole. etcd refuses requests above 1.5 MiB by default,
/// so events are much smaller.
pub const FRAME_CAP: usize = 8 * 1024 * 1024;

/// The length of the size prefix of a protobuf frame, in bytes.
const PREFIX: usize = 4;

/// Splits the bytes of one watch response into frames.
#[derive(Debug)]
pub struct FrameSplitter {
    encoding: Encoding,
    cap: usize,
    /// The buffered beginning of the current frame, from earlier chunks.
    partial: PartialFrame,
    boundary: Boundary,
    /// The beginning of the current frame was returned as [`Piece::Oversized`].
    oversized: bool,
}

/// How the splitter finds the end of the current frame.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
enum Boundary {
    /// JSON: at the next newline.
    Newline,
    /// JSON: where the brackets are balanced.
    Braces(Braces),
    /// Protobuf: after this many more bytes; `None` while the size prefix is incomplete.
    Length(Option<usize>),
    /// CBOR: where the data item ends. Boxed, because most watches are not CBOR.
    Item(Box<ItemEnd>),
    /// CBOR: nowhere after malformed bytes.
    Unknown,
}

/// The meaning of the first bytes of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// The first `.0` bytes are one whole frame.
    Whole(usize),
    /// The first `.0` bytes complete the frame that earlier chunks began; `.1` is the whole frame.
    Completed(usize, Bytes),
    /// The first `.0` bytes are white space between frames.
    Whitespace(usize),
    /// All bytes belong to a frame whose end has not arrived; the splitter has buffered them.
    Buffered,
    /// The frame is above the cap or the budget is used up, so the frame passes through in pieces: first
    /// the buffered bytes, then the first `len` bytes of the chunk.
    Oversized {
        /// The bytes of the frame that earlier chunks contained and that were buffered.
        buffered: Bytes,
        /// Number of bytes of the chunk that belong to the frame.
        len: usize,
        /// Whether this piece contains the first byte of the frame.
        begins: bool,
        /// Whether this piece contains the last byte of the frame.
        ends: bool,
    },
}

impl FrameSplitter {
    /// Creates a splitter for a response body. `account` bounds the bytes that it buffers.
    pub fn new(encoding: Encoding, account: ByteAccount) -> Self {
        Self::with_cap(encoding, FRAME_CAP, account)
    }

    /// Creates a splitter that buffers at most `cap` bytes of a frame.
    pub fn with_cap(encoding: Encoding, cap: usize, account: ByteAccount) -> Self {
        let partial = PartialFrame::new(account);
        Self { encoding, cap, partial, boundary: Boundary::start(encoding), oversized: false }
    }

    /// Splits off the first frame of a chunk, or the part of the frame that the chunk contains. The caller
    /// repeats it with the remaining bytes of the chunk until none are left.
    pub fn split(&mut self, chunk: &[u8]) -> Piece {
        if self.encoding == Encoding::Json && self.at_boundary() {
            let whitespace = chunk.iter().take_while(|b| b.is_ascii_whitespace()).count();
            if whitespace > 0 {
                return Piece::Whitespace(whitespace);
            }
        }
        // An incomplete size prefix is buffered even if the budget is used up: it determines the end of the
        // frame.
        let budget = self.buffered() + self.partial.account.left();
        let cap = self.cap.min(budget.max(PREFIX));
        let end = match self.boundary {
            Boundary::Length(_) => self.length_end(chunk),
            Boundary::Newline => self.line_end(chunk, cap),
            Boundary::Braces(_) => self.braces_end(chunk),
            Boundary::Item(_) => self.item_end(chunk),
            Boundary::Unknown => Some(chunk.len()),
        };
        let len = end.unwrap_or(chunk.len());
        let missing = self.boundary.missing();
        let is_whole = end.is_some() && self.partial.bytes.is_empty();
        let cap = if is_whole { self.cap } else { cap };
        if self.oversized || (self.buffered() + len).saturating_add(missing) > cap {
            let ends = end.is_some() && !matches!(self.boundary, Boundary::Unknown);
            return self.pass_through(&chunk[..len], ends);
        }
        let Some(len) = end else {
            self.partial.append(chunk, cap);
            return Piece::Buffered;
        };
        self.begin_frame_after(&chunk[..len]);
        if is_whole {
            return Piece::Whole(len);
        }
        self.partial.append(&chunk[..len], cap);
        Piece::Completed(len, self.take_buffered())
    }

    /// Whether the splitter is between two frames.
    pub fn at_boundary(&self) -> bool {
        self.partial.bytes.is_empty() && !self.oversized
    }

    /// The encoding of the frames.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// The account of the bytes that the splitter buffers.
    pub fn account(&self) -> &ByteAccount {
        &self.partial.account
    }

    /// The client has proven this, by which the account is limited.
    pub fn raise_rank(&mut self, rank: ClientRank) {
        self.partial.account.raise_rank(rank);
    }

    /// Number of buffered bytes of the current frame.
    pub fn buffered(&self) -> usize {
        self.partial.bytes.len()
    }

    /// Prepares the splitter for a new response body, and returns the buffered bytes. The caller forwards
    /// them if the server ended the response, and drops them if the stream was lost.
    pub fn reset(&mut self) -> Bytes {
        self.boundary = Boundary::start(self.encoding);
        self.oversized = false;
        self.take_buffered()
    }

    /// A copy whose buffer counts in another budget.
    #[cfg(test)]
    #[must_use]
    pub fn fork(&self, account: ByteAccount) -> Self {
        let mut bytes = Vec::with_capacity(self.partial.bytes.capacity());
        bytes.extend_from_slice(&self.partial.bytes);
        account.take(bytes.capacity());
        let partial = PartialFrame { bytes, account };
        Self { partial, boundary: self.boundary.clone(), ..*self }
    }

    /// Takes the buffer, which counts in the budget until the returned bytes are dropped.
    fn take_buffered(&mut self) -> Bytes {
        if self.partial.bytes.is_empty() {
            return Bytes::new();
        }
        let empty = PartialFrame::new(self.partial.account.clone());
        Bytes::from_owner(std::mem::replace(&mut self.partial, empty))
    }

    /// Passes the buffered bytes and this part of the chunk on.
    fn pass_through(&mut self, part: &[u8], ends: bool) -> Piece {
        let begins = !std::mem::replace(&mut self.oversized, !ends);
        if ends {
            self.begin_frame_after(part);
        }
        Piece::Oversized { buffered: self.take_buffered(), len: part.len(), begins, ends }
    }

    /// Prepares for the frame after `frame`. After an object without a newline the splitter continues to count brackets:
    /// if it searched for a newline first, it would read the rest of the chunk once for each object.
    fn begin_frame_after(&mut self, frame: &[u8]) {
        match &mut self.boundary {
            Boundary::Braces(braces) if frame.last() != Some(&b'\n') => *braces = Braces::default(),
            // After the end of an item it finds that of the next one.
            Boundary::Item(_) | Boundary::Unknown => {}
            _ => self.boundary = Boundary::start(self.encoding),
        }
    }

    fn length_end(&mut self, chunk: &[u8]) -> Option<usize> {
        let missing = if let Boundary::Length(Some(missing)) = self.boundary {
            missing
        } else {
            let mut prefix = [0; PREFIX];
            let buffered = self.buffered();
            let fresh = chunk.len().min(PREFIX - buffered);
            if buffered + fresh < PREFIX {
                return None;
            }
            prefix[..buffered].copy_from_slice(&self.partial.bytes);
            prefix[buffered..].copy_from_slice(&chunk[..fresh]);
            fresh + u32::from_be_bytes(prefix) as usize
        };
        self.boundary = Boundary::Length(Some(missing.saturating_sub(chunk.len())));
        (missing <= chunk.len()).then_some(missing)
    }

    fn line_end(&mut self, chunk: &[u8], cap: usize) -> Option<usize> {
        let end = find_newline(chunk);
        let line = &chunk[..end.unwrap_or(chunk.len())];
        // The buffered bytes never end in `}`: the splitter would already count brackets.
        let closed = line.iter().rfind(|b| !b.is_ascii_whitespace()) == Some(&b'}');
        if closed && end.is_some() {
            return end;
        }
        let above_cap = self.buffered() + line.len() > cap;
        if closed || end.is_some() || above_cap {
            // The line ends inside an object, or the object has no newline, or the frame is too large to be
            // buffered and read again. Count the brackets from the beginning of the frame.
            let mut braces = Braces::default();
            let buffered_end = braces.find_end(&self.partial.bytes);
            self.boundary = Boundary::Braces(braces);
            // If an object ends in the buffer, the buffer holds more than one; they leave as one frame.
            return if buffered_end.is_some() { Some(line.len()) } else { self.braces_end(chunk) };
        }
        None
    }

    fn braces_end(&mut self, chunk: &[u8]) -> Option<usize> {
        let Boundary::Braces(braces) = &mut self.boundary else { return None };
        let end = braces.find_end(chunk)?;
        // A newline after the object belongs to the frame if the chunk contains it.
        let blanks =
            chunk[end..].iter().take_while(|&&b| matches!(b, b' ' | b'\t' | b'\r')).count();
        let newline = chunk.get(end + blanks) == Some(&b'\n');
        Some(if newline { end + blanks + 1 } else { end })
    }

    fn item_end(&mut self, chunk: &[u8]) -> Option<usize> {
        let Boundary::Item(item) = &mut self.boundary else { return None };
        item.find_end(chunk).unwrap_or_else(|Malformed| {
            self.boundary = Boundary::Unknown;
            Some(chunk.len())
        })
    }
}

impl Boundary {
    fn start(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Json => Self::Newline,
            Encoding::Protobuf => Self::Length(None),
            Encoding::Cbor => Self::Item(Box::default()),
        }
    }

    /// The number of bytes that the frame needs at least after the chunk.
    fn missing(&self) -> usize {
        match self {
            Self::Length(missing) => missing.unwrap_or_default(),
            Self::Item(item) => usize::try_from(item.string_left()).unwrap_or(usize::MAX),
            _ => 0,
        }
    }
}

/// The buffered bytes of an incomplete frame.
///
/// The capacity of the buffer counts in a budget that all watches share, until the bytes are dropped: a
/// completed frame may still wait for its client. Without the budget, an upstream that begins a frame on each
/// of a thousand watches and completes none could make the proxy buffer a thousand times [`FRAME_CAP`].
#[derive(Debug)]
struct PartialFrame {
    bytes: Vec<u8>,
    account: ByteAccount,
}

impl PartialFrame {
    /// An empty buffer, which allocates nothing.
    fn new(account: ByteAccount) -> Self {
        Self { bytes: Vec::new(), account }
    }

    /// Appends bytes. When the capacity must grow, it doubles, but not above `cap` unless the bytes need
    /// more.
    fn append(&mut self, more: &[u8], cap: usize) {
        let needed = self.bytes.len() + more.len();
        let before = self.bytes.capacity();
        if needed > before {
            let grown = (before * 2).clamp(needed, cap.max(needed));
            self.bytes.reserve_exact(grown - self.bytes.len());
            self.account.take(self.bytes.capacity() - before);
        }
        self.bytes.extend_from_slice(more);
    }
}

impl AsRef<[u8]> for PartialFrame {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for PartialFrame {
    fn drop(&mut self) {
        if self.bytes.capacity() > 0 {
            self.account.release(self.bytes.capacity());
        }
    }
}

/// Finds the end of a JSON object by counting brackets, across any number of chunks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Braces {
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// The frame does not begin with `{` or `[`, so it ends at the next newline.
    not_an_object: bool,
}

impl Braces {
    /// The number of bytes that belong to the object; `None` if they do not contain its end.
    fn find_end(&mut self, bytes: &[u8]) -> Option<usize> {
        for (at, &byte) in bytes.iter().enumerate() {
            if self.not_an_object {
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
                    _ if self.depth == 0 => self.not_an_object = true,
                    b'"' => self.in_string = true,
                    _ => {}
                }
            }
        }
        None
    }
}

/// The number of bytes up to and including the first newline.
///
/// `BufRead::skip_until` is the only stable function that uses the standard library's `memchr`.
fn find_newline(bytes: &[u8]) -> Option<usize> {
    let mut rest = bytes;
    let skipped = std::io::BufRead::skip_until(&mut rest, b'\n').unwrap_or(0);
    (skipped > 0 && bytes[skipped - 1] == b'\n').then_some(skipped)
}
