//! One stream in the account of its connection.

use std::time::Instant;

/// What the connection knows of one stream. It is created by [`super::ConnectionMachine::reserve`] and given back to
/// the same connection by [`super::ConnectionMachine::release`].
#[derive(Debug)]
pub struct Stream {
    pub(super) long_running: bool,
    /// When the slot was reserved. The stream is opened right afterwards.
    pub(super) reserved_at: Instant,
    /// The request was sent, and its response head has not arrived.
    pub(super) awaits_head: bool,
    /// The response has proven the token of the request.
    pub(super) proven: bool,
    /// The round of [`super::waits`] in which the request was sent; unused for a watch.
    pub(super) round: u32,
    pub(super) phase: StreamPhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamPhase {
    /// Not opened yet.
    Reserved,
    /// Open; the response could be requested from another connection.
    Open,
    /// Open; the rest of the response cannot be requested from another connection.
    Pinned,
    /// Ended by the peer.
    Finished,
    /// Its slot was given back.
    Released,
}

impl Stream {
    pub(super) fn new(long_running: bool, now: Instant) -> Self {
        Self {
            long_running,
            reserved_at: now,
            awaits_head: false,
            proven: false,
            round: 0,
            phase: StreamPhase::Reserved,
        }
    }
}
