//! A limit on the bytes of one kind in memory, exported as a gauge: request bodies kept for a retry, or
//! watch frames that are incomplete or wait for their client.
//!
//! The budget only counts. The callers decide what happens to bytes that exceed it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use metrics::Gauge;

use super::memory_budget::{MemoryKind, SourceMemory};

/// Counts the bytes that are held of one kind.
///
/// The count is atomic because a buffer may be dropped on another thread than the one that filled it.
#[derive(Debug)]
pub struct ByteBudget {
    limit: usize,
    held: AtomicUsize,
    gauge: Gauge,
    /// The account of all memory, of which this is a part.
    memory: Option<(Arc<SourceMemory>, MemoryKind)>,
}

impl ByteBudget {
    /// Creates a budget of `limit` bytes. Several budgets may share one gauge, since they increment and
    /// decrement it and never set it.
    pub fn new(limit: usize, gauge: Gauge) -> Arc<Self> {
        Arc::new(Self { limit, held: AtomicUsize::new(0), gauge, memory: None })
    }

    /// Creates a budget whose bytes are also charged to the account of all memory.
    pub fn within(
        memory: &Arc<SourceMemory>,
        kind: MemoryKind,
        limit: usize,
        gauge: Gauge,
    ) -> Arc<Self> {
        let memory = Some((Arc::clone(memory), kind));
        Arc::new(Self { limit, held: AtomicUsize::new(0), gauge, memory })
    }

    /// Creates a budget without a gauge, for tests and fuzzing.
    pub fn unmetered(limit: usize) -> Arc<Self> {
        Self::new(limit, Gauge::noop())
    }

    /// How many more bytes fit.
    pub fn left(&self) -> usize {
        self.limit.saturating_sub(self.held())
    }

    /// How many bytes are held.
    pub fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Counts bytes as held, even above the limit. Returns whether the sum is within the limit, and all memory
    /// within its own.
    pub fn take(&self, bytes: usize) -> bool {
        self.gauge.increment(bytes as f64);
        let has_memory = self.memory.as_ref().is_none_or(|(memory, kind)| {
            memory.add(*kind, bytes);
            memory.budget().used() <= memory.budget().limit()
        });
        self.held.fetch_add(bytes, Ordering::Relaxed) + bytes <= self.limit && has_memory
    }

    /// Counts bytes as dropped.
    pub fn release(&self, bytes: usize) {
        self.gauge.decrement(bytes as f64);
        if let Some((memory, kind)) = &self.memory {
            memory.subtract(*kind, bytes);
        }
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }
}
