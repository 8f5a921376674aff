//! One account of the memory that clients can make the process hold.
//!
//! Every buffer that grows with what clients do is charged here, by kind, by source, and against one limit:
//! `memory_limit`, by default 70 % of the cgroup's limit. Charges are estimates above the true size; the rest
//! of the cgroup's limit is for the process itself, for the allocator, and for what a turn of the event loop
//! reads before it is charged. What the kernel holds for the sockets of clients is measured and charged, too, since it
//! counts for a cgroup of version 2.
//!
//! A [rank](ClientRank) of clients may use a part of the limit, so that each rank has a reserve that lower ones cannot
//! take: unproven clients 5/8, clients with an accepted token 3/4, proven identities all and 1/8 beyond, TLS
//! handshakes, which prove an identity, all and 1/16 beyond. Below identities, a source may hold at most as much as it leaves free for others, which is half of what is free
//! without it.
//!
//! A request of a lower rank is admitted with what its response may hold although the client takes nothing, so what
//! is admitted does not grow while memory is short.
//!
//! What does not fit is refused. Before that, what is held is shed. The level is the used part of the rank's
//! share, or of the share of its source if that is larger:
//!
//! | level | shed, by rank: unproven first, then tokens | reason in `jackstay_shed_total` |
//! |---|---|---|
//! | 1/2 | connections without a request, closed with GOAWAY | `idle_connection` |
//! | 3/4 | streams whose client has not taken a piece of the response for two seconds, and connections and flows whose socket accepts no bytes for two seconds, reset | `stalled_reader` |
//! | 7/8 | connections and flows whose socket accepts no bytes for 50 ms, reset, the largest first | `stalled_reader` |
//! | 7/8 | connections with long-running requests, closed | `long_running` |
//! | 1 | new streams, reset with `REFUSED_STREAM`, which clients may repeat (HTTP/1.1: 429) | `stream_refused` |
//! | 1 | new connections, closed | `connection_refused` |
//!
//! A request that proves nothing and finds the queue of its source full is counted as `queue_full`, a closed connection
//! that is reset because too many wait for their clients as `lingering`.
//!
//! Of proven identities, stalled readers are reset at 7/8 of the limit, and new streams refused at 9/8.
//!
//! The account is atomic and shared by all threads. Clients' connections take from it in steps, so that most
//! requests do not touch it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use serde::Serialize;

use super::memory_labels::{MemoryKind, Shed};
use super::refusal::{Counted, Refusal};
use crate::credential_class::ClientRank;

/// The limit until it is configured, and without a limit of the cgroup.
pub const DEFAULT_LIMIT: usize = 192 << 20;

impl ClientRank {
    /// The part of the limit up to which clients of the rank may fill the budget.
    fn share(self, limit: usize) -> usize {
        match self {
            Self::Unproven => limit / 8 * 5,
            Self::Token => limit / 4 * 3,
            Self::Identity => limit + limit / 8,
        }
    }
}

/// How short memory is for a rank and a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Less than half of the share is used.
    Free,
    /// Idle connections are closed.
    Half,
    /// Stalled readers are reset.
    High,
    /// Long-running requests are ended.
    Critical,
}

/// What is used at a moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Usage {
    limit: usize,
    used: usize,
    /// Used by the source in question, included in `used`.
    by_source: usize,
}

impl Usage {
    /// Whether a rank may hold this much, where `used` already includes what is to be admitted.
    fn fits(self, rank: ClientRank) -> bool {
        let share = rank.share(self.limit);
        self.used <= share && (rank == ClientRank::Identity || self.by_source <= share - self.used)
    }

    /// How much more fits.
    fn left(self, rank: ClientRank) -> usize {
        let free = rank.share(self.limit).saturating_sub(self.used);
        if rank == ClientRank::Identity {
            return free;
        }
        // Each byte is one more of the source, and one less of what it leaves free.
        free.saturating_sub(self.by_source) / 2
    }

    fn level(self, rank: ClientRank) -> Level {
        let share = rank.share(self.limit).max(1);
        if rank == ClientRank::Identity {
            return if self.used >= self.limit / 8 * 7 { Level::High } else { Level::Free };
        }
        // A source may hold half of what the others leave.
        let others = self.used.saturating_sub(self.by_source);
        let share_of_source = (share.saturating_sub(others) / 2).max(1);
        let eighths = |used: usize, share: usize| used.saturating_mul(8) / share;
        match eighths(self.used, share).max(eighths(self.by_source, share_of_source)) {
            0..4 => Level::Free,
            4..6 => Level::Half,
            6 => Level::High,
            _ => Level::Critical,
        }
    }
}

/// The account of all memory that clients make the process hold.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: AtomicUsize,
    used: AtomicUsize,
    by_kind: [AtomicUsize; MemoryKind::ALL.len()],
    shed: [AtomicU64; Shed::ALL.len()],
    /// The sources that hold something. Locked when a connection begins and ends.
    sources: Mutex<HashMap<u128, Weak<SourceMemory>>>,
}

/// The part of the budget that one source holds.
#[derive(Debug)]
pub struct SourceMemory {
    key: u128,
    used: AtomicUsize,
    budget: Arc<MemoryBudget>,
}

impl MemoryBudget {
    /// A budget with this limit in bytes.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit: AtomicUsize::new(limit),
            used: AtomicUsize::new(0),
            by_kind: Default::default(),
            shed: Default::default(),
            sources: Mutex::default(),
        })
    }

    /// Replaces the limit. What is held above a smaller one stays until it is released or shed.
    pub fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Relaxed);
    }

    /// The limit in bytes.
    pub fn limit(&self) -> usize {
        self.limit.load(Relaxed)
    }

    /// Bytes that are charged.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Bytes that are charged for this.
    pub fn used_for(&self, kind: MemoryKind) -> usize {
        self.by_kind[kind as usize].load(Relaxed)
    }

    /// Counts a refusal, unless another metric counts it.
    pub fn count(&self, refusal: Refusal) {
        if let Counted::Shed(shed) = refusal.counted() {
            self.shed[shed as usize].fetch_add(1, Relaxed);
        }
    }

    /// How often this was shed.
    pub fn shed(&self, shed: Shed) -> u64 {
        self.shed[shed as usize].load(Relaxed)
    }

    /// The account of the source with this key; the same for all its connections.
    pub fn source(self: &Arc<Self>, key: u128) -> Arc<SourceMemory> {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = sources.get(&key).and_then(Weak::upgrade) {
            return source;
        }
        let (used, budget) = (AtomicUsize::new(0), Arc::clone(self));
        let source = Arc::new(SourceMemory { key, used, budget });
        sources.insert(key, Arc::downgrade(&source));
        source
    }

    /// The account of what upstream connections for this rank may hold beyond the shares of their requests.
    pub fn upstream_windows(self: &Arc<Self>, rank: ClientRank) -> Arc<SourceMemory> {
        // No client has such an address.
        self.source(u128::MAX - rank as u128)
    }

    /// How short memory is for a rank, whatever its sources hold.
    pub fn level(&self, rank: ClientRank) -> Level {
        Usage { limit: self.limit(), used: self.used(), by_source: 0 }.level(rank)
    }

    /// The state of the account.
    pub fn status(&self) -> MemoryStatus {
        let kinds = MemoryKind::ALL.map(|kind| (kind.as_str(), self.used_for(kind)));
        let shed = Shed::ALL.map(|shed| (shed.as_str(), self.shed(shed)));
        MemoryStatus {
            limit_bytes: self.limit(),
            used_bytes: self.used(),
            by_kind: kinds.into_iter().filter(|(_, bytes)| *bytes > 0).collect(),
            shed: shed.into_iter().filter(|(_, count)| *count > 0).collect(),
        }
    }

    /// Adds `bytes`, and returns the sum.
    fn add(&self, kind: MemoryKind, bytes: usize) -> usize {
        self.by_kind[kind as usize].fetch_add(bytes, Relaxed);
        self.used.fetch_add(bytes, Relaxed) + bytes
    }

    fn subtract(&self, kind: MemoryKind, bytes: usize) {
        self.by_kind[kind as usize].fetch_sub(bytes, Relaxed);
        self.used.fetch_sub(bytes, Relaxed);
    }
}

/// The object `memory` of `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemoryStatus {
    /// [`MemoryBudget::limit`].
    pub limit_bytes: usize,
    /// [`MemoryBudget::used`].
    pub used_bytes: usize,
    /// The kinds that hold something.
    pub by_kind: std::collections::BTreeMap<&'static str, usize>,
    /// What was shed, and how often.
    pub shed: std::collections::BTreeMap<&'static str, u64>,
}

impl SourceMemory {
    /// The key of the source.
    pub fn key(&self) -> u128 {
        self.key
    }

    /// The budget of which this is a part.
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    /// Bytes that are charged to the source.
    pub fn used(&self) -> usize {
        self.used.load(Relaxed)
    }

    /// Charges memory if the rank may have it.
    pub fn try_charge(
        self: &Arc<Self>,
        kind: MemoryKind,
        bytes: usize,
        rank: ClientRank,
    ) -> Option<MemoryCharge> {
        self.try_add(kind, bytes, rank).then(|| MemoryCharge {
            source: Arc::clone(self),
            kind,
            bytes,
        })
    }

    /// Charges memory that is held in any case.
    pub fn charge(self: &Arc<Self>, kind: MemoryKind, bytes: usize) -> MemoryCharge {
        self.add(kind, bytes);
        MemoryCharge { source: Arc::clone(self), kind, bytes }
    }

    /// How short memory is for this source.
    pub fn level(&self, rank: ClientRank) -> Level {
        self.usage().level(rank)
    }

    /// How many more bytes the rank may have for this source.
    pub fn left(&self, rank: ClientRank) -> usize {
        self.usage().left(rank)
    }

    fn usage(&self) -> Usage {
        let (limit, used) = (self.budget.limit(), self.budget.used());
        Usage { limit, used, by_source: self.used() }
    }

    /// Adds memory without a guard, if the rank may have it.
    pub fn try_add(&self, kind: MemoryKind, bytes: usize, rank: ClientRank) -> bool {
        let used = self.budget.add(kind, bytes);
        let by_source = self.used.fetch_add(bytes, Relaxed) + bytes;
        let fits = Usage { limit: self.budget.limit(), used, by_source }.fits(rank);
        if !fits {
            self.subtract(kind, bytes);
        }
        fits
    }

    /// Adds memory without a guard.
    pub fn add(&self, kind: MemoryKind, bytes: usize) {
        self.budget.add(kind, bytes);
        self.used.fetch_add(bytes, Relaxed);
    }

    /// Subtracts memory that was added without a guard.
    pub fn subtract(&self, kind: MemoryKind, bytes: usize) {
        self.budget.subtract(kind, bytes);
        self.used.fetch_sub(bytes, Relaxed);
    }
}

impl Drop for SourceMemory {
    fn drop(&mut self) {
        let mut sources = self.budget.sources.lock().unwrap_or_else(PoisonError::into_inner);
        // Another connection may have begun a new account of this source.
        if sources.get(&self.key).is_some_and(|source| source.strong_count() == 0) {
            sources.remove(&self.key);
        }
    }
}

/// Memory that is charged until this is dropped.
#[derive(Debug)]
pub struct MemoryCharge {
    source: Arc<SourceMemory>,
    kind: MemoryKind,
    bytes: usize,
}

impl MemoryCharge {
    /// The account to which the memory is charged.
    pub fn source(&self) -> &Arc<SourceMemory> {
        &self.source
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.source.subtract(self.kind, self.bytes);
    }
}

#[cfg(test)]
mod tests;
