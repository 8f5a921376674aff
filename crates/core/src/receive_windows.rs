//! The receive windows with which an HTTP/2 connection to an endpoint begins (RFC 9113 section 5.2). They follow the line
//! later (`connection/line_windows.rs`).
//!
//! A stream whose client does not read fills its window. The window of the connection is larger than the windows of
//! all streams that may be open, so that such streams cannot stall the others.

/// Window of a stream. It also bounds the memory of a stream whose client does not read. 256 KiB allow 2 Gbit/s at a
/// round-trip time of 1 ms.
const IDENTITY_STREAM: u32 = 256 * 1024;
/// The same on connections without the certificate of an identity, whose streams any process may open: 64 KiB allow
/// 500 Mbit/s.
pub const UNPROVEN_STREAM: u32 = 64 * 1024;
/// Windows of a connection beyond those of its open streams, for data that the peer has sent on a cancelled stream
/// and that has not arrived when the slot of the stream is free again.
const SPARE_STREAMS: usize = 28;
/// Largest flow-control window (RFC 9113 section 6.9.1).
const MAX_WINDOW: u32 = (1 << 31) - 1;

/// The windows of one connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceiveWindows {
    /// Of each stream, in bytes.
    pub stream: u32,
    /// Of the connection, in bytes.
    pub connection: u32,
    /// Budget for small DATA frames, shared by all streams. Watch events are small, and with h2's default about a
    /// hundred unread ones close the connection.
    pub data_frame_budget: usize,
}

impl ReceiveWindows {
    /// The windows of a connection with at most `max_streams` open streams. If the windows of so many streams exceed
    /// [`MAX_WINDOW`], each stream gets a smaller one.
    pub fn new(max_streams: usize, has_identity: bool) -> Self {
        let streams = u32::try_from(max_streams.saturating_add(SPARE_STREAMS)).unwrap_or(u32::MAX);
        let wanted = if has_identity { IDENTITY_STREAM } else { UNPROVEN_STREAM };
        let stream = wanted.min(MAX_WINDOW / streams);
        Self {
            stream,
            connection: stream * streams,
            data_frame_budget: IDENTITY_STREAM as usize * streams as usize,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_window_exceeds_those_of_all_streams_and_respects_the_maximum() {
        // The configuration accepts up to 10,000.
        for max_streams in [1, 100, 128, 129, 500, 8_163, 8_164, 10_000] {
            for has_identity in [false, true] {
                let windows = ReceiveWindows::new(max_streams, has_identity);
                assert!(windows.connection <= MAX_WINDOW, "{max_streams}: {windows:?}");
                let of_streams = windows.stream as usize * max_streams;
                assert!(windows.connection as usize > of_streams, "{max_streams}: {windows:?}");
            }
        }
        // The default of 100 streams.
        let window = |max_streams, has_identity| {
            let windows = ReceiveWindows::new(max_streams, has_identity);
            (windows.stream, windows.connection)
        };
        assert_eq!(window(100, true), (256 << 10, 32 << 20));
        assert_eq!(window(100, false), (64 << 10, 8 << 20));
        assert_eq!(window(10_000, true).0, 214_148);
        assert_eq!(window(10_000, false).0, UNPROVEN_STREAM);
    }
}
