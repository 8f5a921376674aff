//! The bytes of a frame that has not arrived whole, counted in the [`ByteBudget`] of all of them.
//!
//! A frame is held back until it is whole, and one watch may hold a few MiB. An upstream that begins a
//! frame on each of a thousand watches and ends none must not have a thousand times that: where there
//! is no room, frames pass through in pieces, as those above the cap do.

use std::sync::Arc;

use crate::proxy::byte_budget::ByteBudget;

/// Most bytes that are held of the frames of one worker's watches on one upstream.
pub const ROOM: usize = 32 << 20;

/// Bytes that are held, counted until the last one who has them lets them go: a frame that has become
/// whole may wait for its client.
#[derive(Debug)]
pub struct Held {
    bytes: Vec<u8>,
    room: Arc<ByteBudget>,
}

impl Held {
    /// Nothing yet.
    pub fn new(room: &Arc<ByteBudget>) -> Self {
        Self { bytes: Vec::new(), room: Arc::clone(room) }
    }

    /// Where it is counted.
    pub fn room(&self) -> &Arc<ByteBudget> {
        &self.room
    }

    /// Adds to them; grows by doubling, never above `cap` unless the bytes themselves do.
    pub fn keep(&mut self, more: &[u8], cap: usize) {
        let need = self.bytes.len() + more.len();
        let before = self.bytes.capacity();
        if need > before {
            let grown = (before * 2).clamp(need, cap.max(need));
            self.bytes.reserve_exact(grown - self.bytes.len());
            self.room.take(self.bytes.capacity() - before);
        }
        self.bytes.extend_from_slice(more);
    }
}

impl std::ops::Deref for Held {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.bytes.capacity() > 0 {
            self.room.give_back(self.bytes.capacity());
        }
    }
}
