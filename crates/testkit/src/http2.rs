//! HTTP/2 frames as bytes (RFC 9113), valid or not. Field blocks are literals without indexing and without Huffman
//! coding (RFC 7541, section 6.2.2), so that no peer needs a table to encode them.

pub use jackstay_core::http2_frames::frame_type::*;
pub use jackstay_core::http2_frames::{ACK, END_HEADERS, END_STREAM};
use tokio::io::{AsyncRead, AsyncReadExt};

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const NO_ERROR: u32 = 0;
pub const INTERNAL_ERROR: u32 = 2;
pub const REFUSED_STREAM: u32 = 7;
pub const CANCEL: u32 = 8;

/// Parameters of SETTINGS.
pub const MAX_CONCURRENT_STREAMS: u16 = 3;
pub const INITIAL_WINDOW_SIZE: u16 = 4;

/// The default of `SETTINGS_MAX_FRAME_SIZE`.
const MAX_FRAME_SIZE: usize = 16_384;
/// The size of a frame's header.
const HEADER_SIZE: usize = 9;

/// A frame among received bytes.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: &'a [u8],
}

/// The complete frames at the beginning of these bytes, and the bytes after them.
pub fn parse(mut bytes: &[u8]) -> (Vec<Frame<'_>>, &[u8]) {
    let mut frames = Vec::new();
    while let Some((head, rest)) = bytes.split_at_checked(HEADER_SIZE) {
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let Some((payload, rest)) = rest.split_at_checked(length) else { break };
        let stream = u32::from_be_bytes(head[5..9].try_into().unwrap()) & 0x7fff_ffff;
        frames.push(Frame { kind: head[3], flags: head[4], stream, payload });
        bytes = rest;
    }
    (frames, bytes)
}

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    let mut frame = length[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

pub fn settings(parameters: &[(u16, u32)]) -> Vec<u8> {
    let encode =
        |(name, value): &(u16, u32)| [&name.to_be_bytes()[..], &value.to_be_bytes()].concat();
    frame(SETTINGS, 0, 0, &parameters.iter().flat_map(encode).collect::<Vec<_>>())
}

pub fn reset(stream: u32, code: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, &code.to_be_bytes())
}

pub fn goaway(last: u32, code: u32) -> Vec<u8> {
    frame(GOAWAY, 0, 0, &[last.to_be_bytes(), code.to_be_bytes()].concat())
}

/// A field block.
pub fn field_block<N: AsRef<[u8]>, V: AsRef<[u8]>>(fields: &[(N, V)]) -> Vec<u8> {
    let mut block = Vec::new();
    for (name, value) in fields {
        block.push(0);
        string(&mut block, name.as_ref());
        string(&mut block, value.as_ref());
    }
    block
}

/// A string literal. Its length is an integer with a prefix of 7 bits (RFC 7541, section 5.1).
fn string(block: &mut Vec<u8>, text: &[u8]) {
    match text.len() {
        short @ 0..127 => block.push(short as u8),
        long => {
            block.push(127);
            let mut rest = long - 127;
            while rest >= 128 {
                block.push((rest % 128) as u8 | 128);
                rest /= 128;
            }
            block.push(rest as u8);
        }
    }
    block.extend(text);
}

/// HEADERS, and CONTINUATION where one frame is not enough.
pub fn headers<N: AsRef<[u8]>, V: AsRef<[u8]>>(
    stream: u32,
    end_stream: bool,
    fields: &[(N, V)],
) -> Vec<u8> {
    block(stream, end_stream, &field_block(fields))
}

/// A field block in HEADERS, and in CONTINUATION where one frame is not enough.
pub fn block(stream: u32, end_stream: bool, block: &[u8]) -> Vec<u8> {
    let (mut rest, mut frames, mut kind) = (block, Vec::new(), HEADERS);
    loop {
        let (piece, after) = rest.split_at(rest.len().min(MAX_FRAME_SIZE));
        let end_headers = if after.is_empty() { END_HEADERS } else { 0 };
        let end_stream = if kind == HEADERS && end_stream { END_STREAM } else { 0 };
        frames.extend(frame(kind, end_headers | end_stream, stream, piece));
        if after.is_empty() {
            return frames;
        }
        (rest, kind) = (after, CONTINUATION);
    }
}

/// Reads frames until `wanted` returns true for the type, the stream id and the payload of one, and returns that payload.
/// Returns `None` if the connection ends before.
pub async fn read_until(
    stream: &mut (impl AsyncRead + Unpin),
    mut wanted: impl FnMut(u8, u32, &[u8]) -> bool,
) -> Option<Vec<u8>> {
    loop {
        let mut head = [0; HEADER_SIZE];
        stream.read_exact(&mut head).await.ok()?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await.ok()?;
        let id = u32::from_be_bytes(head[5..].try_into().unwrap());
        if wanted(head[3], id, &payload) {
            return Some(payload);
        }
    }
}
