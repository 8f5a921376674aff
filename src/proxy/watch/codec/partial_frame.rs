//! Buffers the bytes of a frame that has not arrived whole, and counts them in a shared [`ByteBudget`].
//!
//! One watch may buffer a few MiB. Without a shared budget, an upstream that begins a frame on each of
//! a thousand watches and ends none of them could make the proxy buffer a thousand times as much. When
//! the budget is used up, frames pass through in pieces, as frames above the cap of one frame do.

use std::sync::Arc;

use crate::observe::ByteBudget;

/// A buffer whose capacity counts in a budget until the last owner drops it: a frame that has become
/// whole may still wait for its client.
#[derive(Debug)]
pub(super) struct PartialFrame {
    bytes: Vec<u8>,
    budget: Arc<ByteBudget>,
}

impl PartialFrame {
    /// Creates an empty buffer, which allocates nothing.
    pub(super) fn new(budget: &Arc<ByteBudget>) -> Self {
        Self { bytes: Vec::new(), budget: Arc::clone(budget) }
    }

    pub(super) fn budget(&self) -> &Arc<ByteBudget> {
        &self.budget
    }

    /// Appends bytes. The capacity doubles when it must grow, up to `cap`, or up to the length of the
    /// bytes if they are longer than `cap`.
    pub(super) fn append(&mut self, more: &[u8], cap: usize) {
        let needed = self.bytes.len() + more.len();
        let before = self.bytes.capacity();
        if needed > before {
            let grown = (before * 2).clamp(needed, cap.max(needed));
            self.bytes.reserve_exact(grown - self.bytes.len());
            self.budget.take(self.bytes.capacity() - before);
        }
        self.bytes.extend_from_slice(more);
    }
}

impl std::ops::Deref for PartialFrame {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
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
            self.budget.give_back(self.bytes.capacity());
        }
    }
}
