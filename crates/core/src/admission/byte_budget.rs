//! A limit on the bytes of one kind in memory: request bodies kept for a retry, or
//! watch frames that are incomplete or wait for their client.
//!
//! The bytes of a client are also charged to its source in the [account of all memory](super::memory_budget).
//! Clients without a configured identity may use half of the limit, so that they cannot take what the others
//! need.
//!
//! The budget only counts. The callers decide what happens to bytes that exceed it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::memory_budget::SourceMemory;
use super::memory_labels::MemoryKind;
use crate::credential_class::ClientRank;

/// Counts the bytes that are held of one kind.
///
/// The count is atomic because a buffer may be dropped on another thread than the one that filled it.
#[derive(Debug)]
pub struct ByteBudget {
    kind: MemoryKind,
    limit: usize,
    held: AtomicUsize,
}

/// What one client may hold of a [`ByteBudget`].
#[derive(Debug, Clone)]
pub struct ByteAccount {
    budget: Arc<ByteBudget>,
    client: Option<(Arc<SourceMemory>, ClientRank)>,
}

impl ByteBudget {
    /// Creates a budget of `limit` bytes.
    pub fn new(kind: MemoryKind, limit: usize) -> Arc<Self> {
        Arc::new(Self { kind, limit, held: AtomicUsize::new(0) })
    }

    /// The account of a client of this rank, whose bytes are also charged to its source.
    pub fn account(self: &Arc<Self>, source: &Arc<SourceMemory>, rank: ClientRank) -> ByteAccount {
        ByteAccount { budget: Arc::clone(self), client: Some((Arc::clone(source), rank)) }
    }

    /// How many bytes are held.
    pub fn held(&self) -> usize {
        self.held.load(Relaxed)
    }
}

impl ByteAccount {
    /// An account of no client, for tests and fuzzing.
    pub fn unmetered(limit: usize) -> Self {
        let budget = ByteBudget::new(MemoryKind::WatchFrames, limit);
        Self { budget, client: None }
    }

    /// The budget of which this is a part.
    pub fn budget(&self) -> &Arc<ByteBudget> {
        &self.budget
    }

    /// The account of the same client for another budget.
    #[must_use]
    pub fn with_budget(&self, budget: &Arc<ByteBudget>) -> Self {
        Self { budget: Arc::clone(budget), client: self.client.clone() }
    }

    /// The client has proven this.
    pub fn raise_rank(&mut self, rank: ClientRank) {
        if let Some((_, known)) = &mut self.client {
            *known = rank.max(*known);
        }
    }

    /// How many more bytes fit, within the limit and within the memory for the client.
    pub fn left(&self) -> usize {
        let (limit, memory) = match &self.client {
            None => (self.budget.limit, usize::MAX),
            Some((source, ClientRank::Identity)) => {
                (self.budget.limit, source.left(ClientRank::Identity))
            }
            Some((source, rank)) => (self.budget.limit / 2, source.left(*rank)),
        };
        limit.saturating_sub(self.budget.held()).min(memory)
    }

    /// Counts bytes as held, even if they do not fit. Returns whether they do.
    pub fn take(&self, bytes: usize) -> bool {
        let fits = bytes <= self.left();
        self.budget.held.fetch_add(bytes, Relaxed);
        if let Some((source, _)) = &self.client {
            source.add(self.budget.kind, bytes);
        }
        fits
    }

    /// Counts bytes as dropped.
    pub fn release(&self, bytes: usize) {
        self.budget.held.fetch_sub(bytes, Relaxed);
        if let Some((source, _)) = &self.client {
            source.subtract(self.budget.kind, bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::MemoryBudget;
    use ClientRank::{Identity, Token, Unproven};

    const MIB: usize = 1 << 20;

    #[test]
    fn bytes_are_charged_to_the_source_until_they_are_released() {
        let memory = MemoryBudget::new(100 * MIB);
        let budget = ByteBudget::new(MemoryKind::HeldBodies, MIB);
        let account = budget.account(&memory.source(1), Identity);
        assert!(account.take(MIB));
        assert!(!account.take(1), "above the limit");
        assert_eq!((budget.held(), memory.source(1).used()), (MIB + 1, MIB + 1));
        assert_eq!(memory.used_for(MemoryKind::HeldBodies), MIB + 1);
        account.release(MIB + 1);
        assert_eq!((budget.held(), memory.used()), (0, 0));
    }

    #[test]
    fn half_of_the_limit_is_left_for_identities() {
        let memory = MemoryBudget::new(100 * MIB);
        let budget = ByteBudget::new(MemoryKind::HeldBodies, 8 * MIB);
        let [identity, token, unproven] = [Identity, Token, Unproven]
            .map(|rank| budget.account(&memory.source(rank as u128), rank));
        assert!(unproven.take(4 * MIB));
        assert_eq!((token.left(), unproven.left(), identity.left()), (0, 0, 4 * MIB));
        assert!(!token.take(1));
        assert!(identity.take(4 * MIB - 1));
    }

    #[test]
    fn raise_rank_extends_what_is_left_and_never_lowers_it() {
        let memory = MemoryBudget::new(8 * MIB);
        let budget = ByteBudget::new(MemoryKind::WatchFrames, 100 * MIB);
        let mut account = budget.account(&memory.source(1), Unproven);
        account.raise_rank(Token);
        // Half of 3/4 of 8 MiB.
        assert_eq!(account.left(), 3 * MIB);
        account.raise_rank(Unproven);
        assert_eq!(account.left(), 3 * MIB);
    }

    #[test]
    fn the_memory_of_the_source_limits_it_too() {
        let memory = MemoryBudget::new(8 * MIB);
        let budget = ByteBudget::new(MemoryKind::WatchFrames, 100 * MIB);
        let account = budget.account(&memory.source(1), Unproven);
        // Half of 5/8 of 8 MiB.
        assert_eq!(account.left(), 5 * MIB / 2);
        assert!(account.take(2 * MIB));
        assert!(!account.take(MIB));
    }
}
