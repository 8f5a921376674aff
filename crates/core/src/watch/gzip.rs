//! Decodes the gzip members of a watch response (RFC 1952), piece by piece.
//!
//! kube-apiserver 1.37 compresses a watch that begins with all objects, if its client accepts gzip
//! (`WatchListCompression`). It closes a member whenever no further event waits, so a member has one event or many, and
//! the body is a sequence of members (`endpoints/handlers/watch.go`, `perFlushGzipWriter`). Other servers may flush
//! within one long member, or send empty ones.
//!
//! The decoder inflates a piece when it is asked for one, so a chunk of any ratio takes little memory: one piece, and
//! [`STATE`] bytes while a member is incomplete, which are charged to an account.

use std::cell::RefCell;

use bytes::{Buf as _, Bytes};
use flate2::{Crc, Decompress, FlushDecompress, Status};
use http::{HeaderMap, header};

use crate::admission::ByteAccount;
use crate::credential_class::ClientRank;

/// Size of the pieces, in bytes.
pub const PIECE: usize = 16 * 1024;
/// What an incomplete member holds, in bytes: a window of 32 KiB (RFC 1951, section 2) and tables.
pub const STATE: usize = 44 * 1024;
/// A stream of a higher ratio is a bomb. Events of similar objects have 10 to 50, and deflate permits 1,032.
const MAX_RATIO: u64 = 200;
/// Inflated bytes in which the ratio may be higher: events of a few objects of repeated text. etcd refuses objects above 1.5 MiB
/// by default.
const RATIO_FREE: u64 = 32 << 20;
/// Maximum of the header of a member: it may contain a name and a comment.
const MAX_HEADER: usize = 4096;
/// Length of the checksum and the size after a member.
const TRAILER: usize = 8;

/// How a body is coded (RFC 9110, section 8.4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ContentCoding {
    /// Not at all.
    Identity,
    /// A sequence of gzip members.
    Gzip,
}

impl ContentCoding {
    /// The coding of a body with these headers; `None` if it cannot be decoded.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
        let Some(coding) = codings.next() else { return Some(Self::Identity) };
        let is = |name: &str| coding.as_bytes().eq_ignore_ascii_case(name.as_bytes());
        match codings.next() {
            None if is("identity") => Some(Self::Identity),
            None if is("gzip") || is("x-gzip") => Some(Self::Gzip),
            _ => None,
        }
    }
}

/// Why a compressed body cannot be decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GzipError {
    /// The bytes are no gzip, for this reason.
    Invalid(&'static str),
    /// The ratio is that of a bomb.
    Ratio,
    /// There is no memory for the state of an incomplete member.
    Memory,
}

impl GzipError {
    /// For the log and for `/status`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Invalid(reason) => reason,
            Self::Ratio => "compressed events inflate to more than 200 times their size",
            Self::Memory => "no memory for the state of a compressed stream",
        }
    }

    /// The label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Invalid(_) => "invalid",
            Self::Ratio => "ratio",
            Self::Memory => "memory",
        }
    }
}

/// Decodes the body of one response.
#[derive(Debug)]
pub struct GzipDecoder {
    /// The bytes that are not decoded yet.
    input: Bytes,
    /// Length of the chunk that is being decoded; 0 if there is none.
    chunk: usize,
    part: Part,
    inflater: Option<Inflater>,
    /// Whether [`STATE`] is charged.
    is_charged: bool,
    account: ByteAccount,
    ratio: Ratio,
    /// What was found after the last piece.
    error: Option<GzipError>,
}

/// The part of a member to which the next byte belongs.
#[derive(Debug)]
enum Part {
    Header(MemberHeader),
    Data,
    Trailer { bytes: [u8; TRAILER], len: usize },
}

impl GzipDecoder {
    /// Creates the decoder of a body. `account` bounds the state of incomplete members.
    pub fn new(account: ByteAccount) -> Self {
        Self {
            input: Bytes::new(),
            chunk: 0,
            part: Part::Header(MemberHeader::default()),
            inflater: None,
            is_charged: false,
            account,
            ratio: Ratio::default(),
            error: None,
        }
    }

    /// The client has proven this, by which the state is limited.
    pub fn raise_rank(&mut self, rank: ClientRank) {
        self.account.raise_rank(rank);
    }

    /// Takes the next bytes of the body, after [`Self::next_piece`] has returned `None`.
    pub fn push(&mut self, chunk: Bytes) {
        debug_assert!(self.input.is_empty(), "the last chunk was not decoded");
        self.chunk = chunk.len();
        self.input = chunk;
    }

    /// Whether the last chunk has more pieces.
    pub fn has_chunk(&self) -> bool {
        self.chunk > 0
    }

    /// Called when the last chunk has no more pieces. Returns its length.
    pub fn take_chunk(&mut self) -> usize {
        std::mem::take(&mut self.chunk)
    }

    /// Inflates up to [`PIECE`] bytes; `None` if the next bytes of the body are needed.
    ///
    /// # Errors
    /// See [`GzipError`]. What precedes the error is returned before.
    pub fn next_piece(&mut self) -> Result<Option<Bytes>, GzipError> {
        thread_local!(static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; PIECE].into()));
        BUFFER.with_borrow_mut(|buffer| {
            let mut len = 0;
            if self.error.is_none() {
                self.error = self.fill(buffer, &mut len).err();
            }
            match self.error {
                Some(error) if len == 0 => Err(error),
                _ => Ok((len > 0).then(|| Bytes::copy_from_slice(&buffer[..len]))),
            }
        })
    }

    /// Whether the body may end here.
    pub fn is_between_members(&self) -> bool {
        matches!(&self.part, Part::Header(header) if header.len == 0)
    }

    /// Inflates into `buffer` until it is full or the input is used up. `filled` is the number of bytes.
    fn fill(&mut self, buffer: &mut [u8], filled: &mut usize) -> Result<(), GzipError> {
        loop {
            match &mut self.part {
                Part::Header(header) => {
                    if self.input.is_empty() {
                        break;
                    }
                    if header.push(self.input.get_u8())? {
                        self.part = Part::Data;
                        self.inflater = Some(Inflater::take());
                    }
                }
                Part::Data if *filled == buffer.len() => break,
                Part::Data => {
                    let Some(inflater) = &mut self.inflater else { break };
                    let step = inflater.step(&self.input, &mut buffer[*filled..])?;
                    self.ratio.add(step.consumed, step.produced)?;
                    self.input.advance(step.consumed);
                    *filled += step.produced;
                    if step.is_end {
                        self.part = Part::Trailer { bytes: [0; TRAILER], len: 0 };
                    } else if step.consumed == 0 && step.produced == 0 {
                        break;
                    }
                }
                Part::Trailer { bytes, len } => {
                    let taken = self.input.len().min(TRAILER - *len);
                    self.input.copy_to_slice(&mut bytes[*len..*len + taken]);
                    *len += taken;
                    if *len < TRAILER {
                        break;
                    }
                    let bytes = *bytes;
                    self.part = Part::Header(MemberHeader::default());
                    self.end_member(bytes)?;
                }
            }
        }
        // The client may take the piece and nothing more.
        if self.inflater.is_some() { self.charge() } else { Ok(()) }
    }

    fn end_member(&mut self, trailer: [u8; TRAILER]) -> Result<(), GzipError> {
        self.release();
        let Some(inflater) = self.inflater.take() else { return Ok(()) };
        let expected = inflater.trailer();
        inflater.put_back();
        if expected == trailer {
            return Ok(());
        }
        Err(GzipError::Invalid("the checksum of a gzip member is wrong"))
    }

    /// Charges the state of a member that is incomplete when a piece is returned.
    fn charge(&mut self) -> Result<(), GzipError> {
        if !std::mem::replace(&mut self.is_charged, true) && !self.account.take(STATE) {
            return Err(GzipError::Memory);
        }
        Ok(())
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.is_charged) {
            self.account.release(STATE);
        }
    }
}

impl Drop for GzipDecoder {
    fn drop(&mut self) {
        self.release();
    }
}

/// Inflates the data of one member.
#[derive(Debug)]
struct Inflater {
    deflate: Decompress,
    checksum: Crc,
}

/// The result of [`Inflater::step`].
struct Step {
    consumed: usize,
    produced: usize,
    /// The data of the member has ended.
    is_end: bool,
}

thread_local!(static SPARE: RefCell<Option<Inflater>> = const { RefCell::new(None) });

impl Inflater {
    /// One that a member has put back, or a new one. Most members arrive whole, so that one for each thread suffices.
    fn take() -> Self {
        let new = || Self { deflate: Decompress::new(false), checksum: Crc::new() };
        SPARE.with_borrow_mut(Option::take).unwrap_or_else(new)
    }

    fn put_back(mut self) {
        self.deflate.reset(false);
        self.checksum.reset();
        SPARE.with_borrow_mut(|spare| *spare = Some(self));
    }

    /// Inflates `input` into `output`. Without input it returns what an earlier call had no room for.
    fn step(&mut self, input: &[u8], output: &mut [u8]) -> Result<Step, GzipError> {
        let before = (self.deflate.total_in(), self.deflate.total_out());
        let status = self.deflate.decompress(input, output, FlushDecompress::None);
        let status =
            status.map_err(|_| GzipError::Invalid("the data of a gzip member is corrupt"))?;
        let consumed = (self.deflate.total_in() - before.0) as usize;
        let produced = (self.deflate.total_out() - before.1) as usize;
        self.checksum.update(&output[..produced]);
        let is_end = status == Status::StreamEnd;
        if consumed == 0 && produced == 0 && !is_end && !input.is_empty() {
            return Err(GzipError::Invalid("the data of a gzip member is corrupt"));
        }
        Ok(Step { consumed, produced, is_end })
    }

    /// What must follow the member: the CRC-32 and the size of its data, modulo 2³² (RFC 1952, section 2.3.1).
    fn trailer(&self) -> [u8; TRAILER] {
        let mut trailer = [0; TRAILER];
        trailer[..4].copy_from_slice(&self.checksum.sum().to_le_bytes());
        trailer[4..].copy_from_slice(&self.checksum.amount().to_le_bytes());
        trailer
    }
}

/// The header of a member (RFC 1952, section 2.3), of which nothing is kept.
#[derive(Debug, Default)]
struct MemberHeader {
    /// Bytes that have arrived.
    len: usize,
    flags: u8,
    /// The length of the extra field, and how many of its bytes are missing.
    extra: usize,
    /// The optional field in progress: a bit of [`Self::OPTIONAL`].
    field: u8,
    /// Bytes of that field that have arrived.
    in_field: usize,
    /// Of the bytes before that of [`Self::CHECKSUM`].
    checksum: Crc,
}

impl MemberHeader {
    const CHECKSUM: u8 = 1 << 1;
    const EXTRA: u8 = 1 << 2;
    const NAME: u8 = 1 << 3;
    const COMMENT: u8 = 1 << 4;
    const RESERVED: u8 = 0b1110_0000;
    /// In the order in which they occur.
    const OPTIONAL: [u8; 4] = [Self::EXTRA, Self::NAME, Self::COMMENT, Self::CHECKSUM];
    /// Length without optional fields.
    const FIXED: usize = 10;

    /// Reads a byte. Returns whether it is the last one.
    fn push(&mut self, byte: u8) -> Result<bool, GzipError> {
        match (self.len, byte) {
            (0, 0x1f) | (1, 0x8b) | (2, 8) | (4..Self::FIXED, _) => {}
            (0 | 1, _) => return Err(GzipError::Invalid("bytes that are no gzip member")),
            (2, _) => return Err(GzipError::Invalid("a gzip member that is not deflated")),
            (3, flags) if flags & Self::RESERVED != 0 => {
                return Err(GzipError::Invalid("a gzip member with unknown flags"));
            }
            (3, flags) => self.flags = flags,
            (MAX_HEADER.., _) => {
                return Err(GzipError::Invalid("a gzip member with a long header"));
            }
            _ => self.optional(byte)?,
        }
        self.len += 1;
        if self.field != Self::CHECKSUM {
            self.checksum.update(&[byte]);
        }
        if self.len >= Self::FIXED && self.field == 0 {
            self.next_field();
        }
        Ok(self.len >= Self::FIXED && self.field == 0)
    }

    fn optional(&mut self, byte: u8) -> Result<(), GzipError> {
        self.in_field += 1;
        let is_end = match (self.field, self.in_field) {
            (Self::EXTRA, 1) => {
                self.extra = usize::from(byte);
                false
            }
            (Self::EXTRA, 2) => {
                self.extra += usize::from(byte) << 8;
                self.extra == 0
            }
            (Self::EXTRA, len) => len == self.extra + 2,
            (Self::CHECKSUM, at) => {
                if byte != self.checksum.sum().to_le_bytes()[at - 1] {
                    return Err(GzipError::Invalid("the checksum of a gzip header is wrong"));
                }
                at == 2
            }
            _ => byte == 0,
        };
        if is_end {
            self.flags &= !self.field;
            self.field = 0;
        }
        Ok(())
    }

    fn next_field(&mut self) {
        self.in_field = 0;
        self.field =
            Self::OPTIONAL.into_iter().find(|field| self.flags & field != 0).unwrap_or_default();
    }
}

/// Compares what was inflated with what has arrived.
#[derive(Debug, Default)]
struct Ratio {
    compressed: u64,
    inflated: u64,
}

impl Ratio {
    /// Both counts are halved now and then, so that a long stream does not permit a bomb at its end.
    fn add(&mut self, compressed: usize, inflated: usize) -> Result<(), GzipError> {
        self.compressed += compressed as u64;
        self.inflated += inflated as u64;
        if self.inflated <= RATIO_FREE {
            return Ok(());
        }
        if self.inflated > MAX_RATIO.saturating_mul(self.compressed) {
            return Err(GzipError::Ratio);
        }
        if self.inflated > 2 * RATIO_FREE {
            self.compressed /= 2;
            self.inflated /= 2;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_stream_permits_no_bomb_at_its_end() {
        let mut ratio = Ratio::default();
        for _ in 0..1000 {
            ratio.add(1 << 20, 1 << 20).unwrap();
        }
        let pieces = (0..100_000).take_while(|_| ratio.add(16, PIECE).is_ok()).count();
        assert!(pieces * PIECE < 400 << 20, "{pieces}");
    }

    #[test]
    fn usual_ratio_is_never_refused() {
        let mut ratio = Ratio::default();
        for _ in 0..100_000 {
            ratio.add(PIECE / 190, PIECE).unwrap();
        }
    }
}
