//! What the HPACK decoder of h2 keeps of the header blocks of a client (RFC 7541).
//!
//! h2's decoder (`hpack::Decoder`) has a table of 4 KiB, by the rule of RFC 7541, 4.1. It copies the values of regular
//! fields, but those of `:authority`, `:path`, `:scheme` and `:protocol` are slices of the buffer that they were decoded
//! from, and a slice keeps its whole buffer as long as the entry is in the table, also while the connection is idle:
//!
//! | value | slice of | bytes that an entry keeps |
//! |---|---|---|
//! | as it is | the buffer that the frame was read into | those that were received since the last such entry, up to [`READ_BUFFER`] |
//! | the same, in a representation that continued in another frame, or after one | the buffer in which h2 collects its frames | the above, and twice those frames |
//! | Huffman code | the buffer for decoded strings | those that were decoded since the last such entry |
//!
//! The buffer for decoded strings has 4 KiB, or room for the largest string, which the decoder never gives back.
//!
//! [`HeaderTable`] reads the representations in a block (RFC 7541, 6), but decodes no Huffman code, and keeps the sizes
//! of the entries. A size that it does not know counts as the smallest one, and a name that is an entry of the table as
//! one of those above, so that the sum is not below what is kept.

use std::collections::VecDeque;

use crate::http2_frames::{FrameHeader, HEADER_LENGTH, PADDED, PRIORITY, frame_type};

/// Size of the decoder's table, which jackstay does not change in its SETTINGS.
const TABLE_SIZE: u32 = 4_096;
/// Size of an entry besides its name and value.
const ENTRY_OVERHEAD: u32 = 32;
/// The first index of an entry in the table; those below are constants (RFC 7541, appendix A).
const FIRST_DYNAMIC: u32 = 62;
/// h2's buffers for received frames and for decoded strings, at first.
const FIRST_READ_BUFFER: u32 = 8 << 10;
const FIRST_STRING_BUFFER: u32 = 4 << 10;
/// Strings that leave at most a sixteenth of a buffer empty.
const SHORT_STRING: u32 = FIRST_STRING_BUFFER / 17;
/// The largest buffer of frames: h2 reserves space for one of 16 KiB with its head, and `BytesMut` doubles its capacity if
/// it must grow.
const READ_BUFFER: u32 = 2 * ((16 << 10) + 9);
/// Integers are cut here. The largest block is smaller.
const MAX_INTEGER: u32 = 1 << 24;

/// The table of one connection, and the position in the header block that arrives.
#[derive(Debug, Default)]
pub struct HeaderTable {
    /// The pad length and the priority fields at the begin of HEADERS, as far as they have arrived.
    lead: [u8; 6],
    lead_filled: u8,
    /// What is read of the frame besides the lead.
    fragment: u32,
    header: Option<FrameHeader>,
    /// Bytes of the block that were read, and where its last representation began.
    block: u32,
    begin: u32,
    /// The buffer in which h2 collects a representation that has continued in this frame.
    collected: u32,
    expected: Expected,
    literal: Literal,
    /// What an entry with a value as it is would keep.
    received: u32,
    /// The value of `inserted` before the last such entry, if it is of this frame.
    last_of_frame: Option<u32>,
    /// What an entry with a Huffman code would keep.
    decoded: u32,
    /// Room that the largest string has needed.
    largest_string: u32,
    /// The sizes of all entries up to now.
    inserted: u32,
    /// The value of `inserted` before each entry that keeps a buffer, and the bytes that it keeps.
    entries: VecDeque<(u32, u32)>,
    kept: usize,
}

/// What the next byte is.
#[derive(Debug, Clone, Copy, Default)]
enum Expected {
    #[default]
    Representation,
    /// The rest of an integer (RFC 7541, 5.1).
    Integer {
        of: Integer,
        value: u32,
        shift: u32,
    },
    NameLength,
    ValueLength,
    /// The first byte of a name.
    Name {
        left: u32,
        is_coded: bool,
    },
    /// Bytes that are skipped, of a name or of a value.
    RestOfName(u32),
    Value(u32),
}

#[derive(Debug, Clone, Copy)]
enum Integer {
    /// An indexed field or a table size, of which nothing follows.
    Alone,
    NameIndex,
    NameLength {
        is_coded: bool,
    },
    ValueLength {
        is_coded: bool,
    },
}

/// The literal that arrives.
#[derive(Debug, Clone, Copy, Default)]
struct Literal {
    is_inserted: bool,
    /// Whether the name may be that of a value that is not copied.
    keeps_value: bool,
    is_coded: bool,
    /// The size of the entry, at least.
    size: u32,
}

impl HeaderTable {
    /// Takes in the header of a frame.
    pub fn frame(&mut self, header: FrameHeader) {
        if self.last_of_frame.take().is_some() {
            self.received = 0;
        }
        self.received = self.received.saturating_add(HEADER_LENGTH as u32 + header.length);
        self.header = None;
        match header.frame_type {
            frame_type::HEADERS => {
                (self.block, self.collected) = (0, 0);
                self.expected = Expected::Representation;
            }
            frame_type::CONTINUATION => {
                self.collected = match self.expected {
                    Expected::Representation => 0,
                    // `BytesMut` may double the capacity.
                    _ => 2 * (self.block - self.begin + header.length),
                };
            }
            _ => return,
        }
        (self.header, self.lead_filled) = (Some(header), 0);
        self.begin_fragment(header);
    }

    /// Takes in bytes of the payload of the last frame.
    pub fn payload(&mut self, mut bytes: &[u8]) {
        let Some(header) = self.header else { return };
        let missing = lead_length(header) - usize::from(self.lead_filled);
        if missing > 0 {
            let (lead, rest) = bytes.split_at(missing.min(bytes.len()));
            let filled = usize::from(self.lead_filled);
            self.lead[filled..filled + lead.len()].copy_from_slice(lead);
            self.lead_filled += lead.len() as u8;
            self.begin_fragment(header);
            bytes = rest;
        }
        let bytes = &bytes[..bytes.len().min(self.fragment as usize)];
        self.fragment -= bytes.len() as u32;
        self.scan(bytes);
    }

    /// Bytes that the decoder keeps beside what each connection has, at most.
    pub fn kept(&self) -> usize {
        let strings =
            if self.largest_string > FIRST_STRING_BUFFER { self.largest_string } else { 0 };
        self.kept + strings as usize * 2
    }

    /// Computes how much of the frame is a fragment of the block, once its lead is complete.
    fn begin_fragment(&mut self, header: FrameHeader) {
        let lead = lead_length(header);
        self.fragment = 0;
        if usize::from(self.lead_filled) < lead {
            return;
        }
        let (padding, priority) = match header.flags & PADDED {
            _ if lead == 0 => (0, &self.lead[..0]),
            0 => (0, &self.lead[..lead]),
            _ => (u32::from(self.lead[0]), &self.lead[1..lead]),
        };
        // h2 resets a stream that depends on itself without decoding its block.
        let depends_on_itself = priority.first_chunk().is_some_and(|dependency| {
            u32::from_be_bytes(*dependency) & (u32::MAX >> 1) == header.stream
        });
        if !depends_on_itself {
            self.fragment = header.length.saturating_sub(lead as u32 + padding);
        }
    }

    fn scan(&mut self, mut bytes: &[u8]) {
        let end = self.block + bytes.len() as u32;
        while let Some((&byte, rest)) = bytes.split_first() {
            bytes = rest;
            match self.expected {
                // An indexed field of one byte, which most fields are.
                Expected::Representation if matches!(byte, 0x80..=0xfe) => {}
                Expected::Representation => {
                    self.begin = end - 1 - bytes.len() as u32;
                    self.representation(byte);
                }
                Expected::Integer { of, value, shift } => {
                    let value = value.saturating_add(u32::from(byte & 0x7f) << shift);
                    let value = value.min(MAX_INTEGER);
                    if byte & 0x80 == 0 {
                        self.complete(of, value);
                    } else {
                        let shift = (shift + 7).min(24);
                        self.expected = Expected::Integer { of, value, shift };
                    }
                }
                Expected::NameLength => {
                    self.integer(byte, 7, Integer::NameLength { is_coded: byte & 0x80 != 0 });
                }
                Expected::ValueLength => {
                    self.integer(byte, 7, Integer::ValueLength { is_coded: byte & 0x80 != 0 });
                }
                Expected::Name { left, is_coded } => {
                    // A colon, or its Huffman code, which has 7 bits.
                    self.literal.keeps_value =
                        if is_coded { byte >> 1 == 0x5c } else { byte == b':' };
                    self.skip(left - 1, Expected::RestOfName);
                }
                Expected::RestOfName(left) | Expected::Value(left) => {
                    let skipped = (left as usize - 1).min(bytes.len());
                    bytes = &bytes[skipped..];
                    let left = left - 1 - skipped as u32;
                    match self.expected {
                        Expected::Value(_) => self.skip(left, Expected::Value),
                        _ => self.skip(left, Expected::RestOfName),
                    }
                }
            }
        }
        self.block = end;
    }

    /// Expects these bytes, or what follows them if there are none.
    fn skip(&mut self, left: u32, of: fn(u32) -> Expected) {
        self.expected = match of(left) {
            Expected::RestOfName(0) => Expected::ValueLength,
            Expected::Value(0) => {
                self.end_literal();
                Expected::Representation
            }
            expected => expected,
        };
    }

    /// Takes in the first byte of a representation (RFC 7541, 6).
    fn representation(&mut self, byte: u8) {
        let is_inserted = byte & 0xc0 == 0x40;
        self.literal = Literal { is_inserted, size: ENTRY_OVERHEAD, ..Literal::default() };
        match byte {
            0x80.. => self.integer(byte, 7, Integer::Alone),
            0x40.. => self.integer(byte, 6, Integer::NameIndex),
            0x20.. => self.integer(byte, 5, Integer::Alone),
            _ => self.integer(byte, 4, Integer::NameIndex),
        }
    }

    /// Takes in the first byte of an integer whose prefix has so many bits.
    fn integer(&mut self, byte: u8, prefix: u32, of: Integer) {
        let mask = (1 << prefix) - 1;
        match u32::from(byte) & mask {
            value if value == mask => self.expected = Expected::Integer { of, value, shift: 0 },
            value => self.complete(of, value),
        }
    }

    fn complete(&mut self, of: Integer, value: u32) {
        match of {
            Integer::Alone => self.expected = Expected::Representation,
            Integer::NameIndex if value == 0 => self.expected = Expected::NameLength,
            Integer::NameIndex => {
                let (size, keeps_value) = name_of(value);
                self.literal.size += size;
                self.literal.keeps_value = keeps_value;
                self.expected = Expected::ValueLength;
            }
            Integer::NameLength { is_coded } => {
                self.string(value, is_coded);
                self.expected = match value {
                    0 => Expected::ValueLength,
                    left => Expected::Name { left, is_coded },
                };
            }
            Integer::ValueLength { is_coded } => {
                self.string(value, is_coded);
                self.literal.is_coded = is_coded;
                self.skip(value, Expected::Value);
            }
        }
    }

    /// Counts a string of the literal.
    fn string(&mut self, length: u32, is_coded: bool) {
        if is_coded {
            // Codes have 5 to 30 bits. h2 reserves space for the former, in a new buffer if the rest of the last one is
            // too small.
            let room = length * 8 / 5 + 1;
            let with_rest = if room > SHORT_STRING { 2 * room } else { room + room / 16 + 1 };
            self.decoded =
                self.decoded.saturating_add(room.max(with_rest.min(FIRST_STRING_BUFFER)));
            self.largest_string = self.largest_string.max(room);
            self.literal.size += length * 4 / 15;
        } else {
            self.literal.size += length;
        }
    }

    fn end_literal(&mut self) {
        let Literal { is_inserted, keeps_value, is_coded, size } = self.literal;
        if !is_inserted {
            return;
        }
        let before = self.inserted;
        self.inserted = before.wrapping_add(size);
        match self.entries.back_mut() {
            _ if !keeps_value => {}
            _ if is_coded => {
                let buffer = FIRST_STRING_BUFFER.max(self.largest_string);
                let kept = std::mem::take(&mut self.decoded).min(2 * buffer);
                self.push(before, kept);
            }
            // Of the entries in one frame, the last one keeps its buffer for the longest time.
            Some(last) if self.last_of_frame == Some(last.0) => {
                last.0 = before;
                self.last_of_frame = Some(before);
            }
            _ => {
                // A buffer may be half empty, because a frame did not fit in the rest of it.
                let usual = self.received.saturating_mul(2).min(FIRST_READ_BUFFER);
                let kept = self.received.max(usual).min(READ_BUFFER) + self.collected;
                self.push(before, kept);
                self.last_of_frame = Some(before);
            }
        }
        while let Some((before, kept)) = self.entries.front().copied()
            && self.inserted.wrapping_sub(before) > TABLE_SIZE
        {
            self.entries.pop_front();
            self.kept -= kept as usize;
        }
    }

    fn push(&mut self, before: u32, kept: u32) {
        self.entries.push_back((before, kept));
        self.kept += kept as usize;
    }
}

/// Length of what precedes the fragment of a block (RFC 9113, 6.2).
fn lead_length(header: FrameHeader) -> usize {
    let has = |flag| header.frame_type == frame_type::HEADERS && header.flags & flag != 0;
    usize::from(has(PADDED)) + if has(PRIORITY) { 5 } else { 0 }
}

/// The size of the name with this index, at least, and whether its value may be kept.
fn name_of(index: u32) -> (u32, bool) {
    match index {
        1 => (10, true),
        4 | 5 => (5, true),
        6 | 7 => (7, true),
        FIRST_DYNAMIC.. => (1, true),
        // The shortest names are `age` and `via`.
        _ => (3, false),
    }
}

#[cfg(test)]
mod tests;
