//! Frame headers in a byte stream of HTTP/2 (RFC 9113, 4.1).
//!
//! h2 handles PING, SETTINGS, PRIORITY and `WINDOW_UPDATE` itself and shows none of them, so a limit of their
//! number must count them in the bytes.

/// Length of the preface that a client sends before its first frame (RFC 9113, 3.4).
pub const CLIENT_PREFACE_LENGTH: usize = 24;
/// Length of a frame header.
pub const HEADER_LENGTH: usize = 9;

/// Frame types (RFC 9113, 6).
pub mod frame_type {
    #![allow(missing_docs)] // the names are those of the RFC
    pub const DATA: u8 = 0;
    pub const HEADERS: u8 = 1;
    pub const PRIORITY: u8 = 2;
    pub const RST_STREAM: u8 = 3;
    pub const SETTINGS: u8 = 4;
    pub const PING: u8 = 6;
    pub const GOAWAY: u8 = 7;
    pub const WINDOW_UPDATE: u8 = 8;
    pub const CONTINUATION: u8 = 9;
}

/// `END_STREAM` of DATA and HEADERS.
pub const END_STREAM: u8 = 1;
/// `END_HEADERS` of HEADERS and CONTINUATION.
pub const END_HEADERS: u8 = 4;
/// `PADDED` of DATA and HEADERS.
pub const PADDED: u8 = 8;
/// `PRIORITY` of HEADERS.
pub const PRIORITY: u8 = 32;
/// `ACK` of SETTINGS and PING.
pub const ACK: u8 = 1;

/// The error code `ENHANCE_YOUR_CALM` (RFC 9113, 7).
const ENHANCE_YOUR_CALM: u32 = 11;

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Length of the payload in bytes.
    pub length: u32,
    /// One of [`frame_type`], or unknown.
    pub frame_type: u8,
    /// Flags, whose meaning depends on the type.
    pub flags: u8,
    /// 0 for the connection.
    pub stream: u32,
}

impl FrameHeader {
    fn decode(bytes: [u8; HEADER_LENGTH]) -> Self {
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        Self {
            length: number(&bytes[..3]),
            frame_type: bytes[3],
            flags: bytes[4],
            // The first bit is reserved.
            stream: number(&bytes[5..]) & (u32::MAX >> 1),
        }
    }
}

/// What a scan finds.
#[derive(Debug)]
pub enum FramePart<'a> {
    /// The header of a frame.
    Header(FrameHeader),
    /// Bytes of the payload of the last header.
    Payload(&'a [u8]),
}

/// Finds frame headers in a byte stream that arrives in pieces.
#[derive(Debug)]
pub struct FrameScanner {
    /// Bytes until the next header: the rest of a payload, or the preface.
    skip: usize,
    header: [u8; HEADER_LENGTH],
    /// Bytes of `header` that have arrived.
    filled: usize,
}

impl FrameScanner {
    /// A stream whose first `skip` bytes are no frame.
    pub fn new(skip: usize) -> Self {
        Self { skip, header: [0; HEADER_LENGTH], filled: 0 }
    }

    /// Whether the stream is between two frames.
    pub fn is_at_frame_boundary(&self) -> bool {
        self.skip == 0 && self.filled == 0
    }

    /// Whether the payload of the last frame is not complete.
    pub fn is_in_payload(&self) -> bool {
        self.skip > 0
    }

    /// Calls `found` for each frame header that is complete with these bytes.
    ///
    /// # Errors
    /// The first error of `found`; then the rest of the bytes is not scanned.
    pub fn scan<E>(
        &mut self,
        bytes: &[u8],
        mut found: impl FnMut(FrameHeader) -> Result<(), E>,
    ) -> Result<(), E> {
        self.scan_parts(bytes, |part| match part {
            FramePart::Header(header) => found(header),
            FramePart::Payload(_) => Ok(()),
        })
    }

    /// Calls `found` for each frame header that is complete with these bytes, and for what they have of a payload. What
    /// precedes the first frame counts as a payload.
    ///
    /// # Errors
    /// The first error of `found`; then the rest of the bytes is not scanned.
    pub fn scan_parts<E>(
        &mut self,
        mut bytes: &[u8],
        mut found: impl FnMut(FramePart<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        loop {
            let (payload, rest) = bytes.split_at(self.skip.min(bytes.len()));
            self.skip -= payload.len();
            bytes = rest;
            if !payload.is_empty() {
                found(FramePart::Payload(payload))?;
            }
            if bytes.is_empty() {
                return Ok(());
            }
            let taken = (HEADER_LENGTH - self.filled).min(bytes.len());
            self.header[self.filled..self.filled + taken].copy_from_slice(&bytes[..taken]);
            self.filled += taken;
            bytes = &bytes[taken..];
            if self.filled < HEADER_LENGTH {
                return Ok(());
            }
            let header = FrameHeader::decode(self.header);
            self.filled = 0;
            self.skip = header.length as usize;
            found(FramePart::Header(header))?;
        }
    }
}

/// GOAWAY with `ENHANCE_YOUR_CALM` and the last stream that was accepted (RFC 9113, 6.8).
pub fn enhance_your_calm(last_stream: u32) -> Vec<u8> {
    let payload = [last_stream.to_be_bytes(), ENHANCE_YOUR_CALM.to_be_bytes()].concat();
    let mut frame = vec![0, 0, payload.len() as u8, frame_type::GOAWAY, 0, 0, 0, 0, 0];
    frame.extend(payload);
    frame
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    fn encode(header: FrameHeader) -> Vec<u8> {
        let mut bytes = header.length.to_be_bytes()[1..].to_vec();
        bytes.extend([header.frame_type, header.flags]);
        bytes.extend((header.stream | 1 << 31).to_be_bytes());
        bytes.extend(vec![7; header.length as usize]);
        bytes
    }

    fn any_header() -> impl Strategy<Value = FrameHeader> {
        (0..300_u32, any::<u8>(), any::<u8>(), 0..1_u32 << 31).prop_map(
            |(length, frame_type, flags, stream)| FrameHeader { length, frame_type, flags, stream },
        )
    }

    proptest! {
        #[test]
        fn scan_finds_every_header_however_the_stream_is_cut(
            headers in prop::collection::vec(any_header(), 0..20),
            piece in 1..400_usize,
        ) {
            let mut stream = vec![0; CLIENT_PREFACE_LENGTH];
            stream.extend(headers.iter().flat_map(|header| encode(*header)));
            let (mut scanner, mut found) = (FrameScanner::new(CLIENT_PREFACE_LENGTH), Vec::new());
            for piece in stream.chunks(piece) {
                let collect = |header| {
                    found.push(header);
                    Ok::<_, Infallible>(())
                };
                scanner.scan(piece, collect).unwrap();
            }
            prop_assert_eq!(found, headers);
            prop_assert!(scanner.is_at_frame_boundary());
        }
    }

    #[test]
    fn enhance_your_calm_is_one_goaway_frame() {
        let (mut scanner, mut found) = (FrameScanner::new(0), Vec::new());
        let collect = |header| {
            found.push(header);
            Ok::<_, Infallible>(())
        };
        let bytes = enhance_your_calm(5);
        scanner.scan(&bytes, collect).unwrap();
        let header = FrameHeader { length: 8, frame_type: frame_type::GOAWAY, flags: 0, stream: 0 };
        assert_eq!(found, [header]);
        assert_eq!(bytes[9..], [0, 0, 0, 5, 0, 0, 0, 11]);
        assert!(scanner.is_at_frame_boundary());
    }
}
