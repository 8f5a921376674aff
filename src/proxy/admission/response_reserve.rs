//! What a response may hold although its client takes nothing.

use jackstay_core::receive_windows;

/// Largest piece that a body should return, in bytes. A client that reads one such piece within the default
/// limit of five minutes, 220 bytes a second, keeps its stream while memory is not short.
pub const MAX_PIECE: usize = 64 << 10;
/// The same for a watch.
pub const MAX_WATCH_PIECE: usize = 16 << 10;
/// What is charged for the upstream window of a response: that of clients without an identity.
const WINDOW: usize = receive_windows::UNPROVEN_STREAM as usize;
/// What is charged for that of a watch. Its client usually reads each event at once.
const WATCH_WINDOW: usize = 8 << 10;

/// The bytes that a response may hold although its client takes nothing. They are charged before the response has
/// any, because these can no longer be refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ResponseReserve {
    /// Bytes that the upstream may send.
    pub window: usize,
    /// The largest piece that waits for the client.
    pub piece: usize,
}

impl ResponseReserve {
    /// The reserve of a response that is forwarded, and of one whose head has not arrived.
    pub const STREAM: Self = Self { window: WINDOW, piece: MAX_PIECE };
    /// That of a watch whose head has arrived.
    pub const WATCH: Self = Self { window: WATCH_WINDOW, piece: MAX_WATCH_PIECE };

    /// That of a body that has arrived completely.
    pub fn complete(bytes: usize) -> Self {
        Self { window: 0, piece: bytes }
    }

    /// The bytes of both.
    pub fn sum(self) -> usize {
        self.window + self.piece
    }
}
