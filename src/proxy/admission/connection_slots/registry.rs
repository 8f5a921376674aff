//! The unproven connections of a listener by source, and the search for the one that is closed for another.
//!
//! The queue of idle connections is corrected when a victim is searched, so a request changes two cells.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;
use std::task::Waker;
use std::time::{Duration, Instant};

use jackstay_core::admission::Holders;
use jackstay_core::credential_class::ClientRank;
use jackstay_sys::sockets::source::Source;

/// Age from which a connection without a request may be closed for another one. A handshake over loopback and
/// the check of a known certificate take a few milliseconds.
pub(super) const GRACE: Duration = Duration::from_millis(100);
/// The same for one of its own source, while the reserve has a slot. A Go client that opens many watches at once opens
/// as many connections, and sends the last `ClientHello` after it has computed the keys of all.
pub(super) const OWN_GRACE: Duration = Duration::from_secs(3);
/// The same for one of its own source that has sent nothing, while the reserve has no slot. A client sends its `ClientHello`
/// at once, and usually before its connection is accepted.
pub(super) const SILENT_GRACE: Duration = Duration::from_millis(20);
/// Maximum number of evicted connections that are still open. An evicted connection occupies no slot.
pub(super) const MAX_CLOSING: usize = 256;
/// Maximum number of sources that are searched for an idle connection.
const MAX_SEARCHED: usize = 8;

/// The ages from which connections may be closed for one of their own source.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnGraces {
    /// Of one without a request.
    pub(super) idle: Duration,
    /// Of one whose client has sent nothing.
    pub(super) silent: Duration,
}

/// How far the client of an unproven connection has got. Connections of a lower rank are closed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum EvictionRank {
    /// The client has sent nothing.
    Silent,
    /// No request yet, and no handshake in progress.
    New,
    /// What the client had proven with the last request; no identity, with which a connection is not ranked.
    Served(ClientRank),
    /// The client has sent the first bytes of its handshake, and may prove an identity. The handshake waits for its
    /// turn or is in progress, or the certificate is being verified.
    Handshake,
}

/// The ranks of idle connections.
const IDLE: &[EvictionRank] = &[
    EvictionRank::Silent,
    EvictionRank::New,
    EvictionRank::Served(ClientRank::Unproven),
    EvictionRank::Served(ClientRank::Token),
];
const RANKS: usize = EvictionRank::Handshake.index() + 1;

impl EvictionRank {
    /// Whether no request has begun.
    pub fn is_before_requests(self) -> bool {
        matches!(self, Self::Silent | Self::New | Self::Handshake)
    }

    /// The queue of connections with this rank.
    const fn index(self) -> usize {
        match self {
            Self::Silent => 0,
            Self::New => 1,
            Self::Served(rank) => 2 + rank as usize,
            Self::Handshake => 3 + ClientRank::Identity as usize,
        }
    }
}

/// Position in the queue of a source: rank, time since which the connection is idle, number of the connection.
pub(super) type Key = (EvictionRank, Instant, u64);

/// An unproven connection.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) source: Source,
    number: u64,
    pub(super) rank: Cell<EvictionRank>,
    /// When the last request ended, the handshake began or ended, or the connection was opened.
    pub(super) idle_since: Cell<Instant>,
    /// Requests in progress.
    pub(super) requests: Cell<usize>,
    /// The position in the queue, which may be outdated. A connection with requests may be in the queue or not,
    /// one without always is.
    pub(super) queued: Cell<Option<Key>>,
    pub(super) in_reserve: Cell<bool>,
    pub(super) phase: Cell<Phase>,
    /// Woken when the connection is evicted.
    pub(super) waker: RefCell<Option<Waker>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Unproven,
    Evicted,
    Proven,
}

impl Entry {
    fn key(&self) -> Key {
        (self.rank.get(), self.idle_since.get(), self.number)
    }
}

/// The queues of the unproven connections of one source, one for each rank. One of them is not empty.
type Queues = [BTreeMap<Key, Rc<Entry>>; RANKS];

#[derive(Debug, Default)]
pub(super) struct Registry {
    /// How many unproven connections each source has. It gives one while it has a queue.
    pub(super) sources: Holders<Source>,
    queues: HashMap<Source, Queues>,
    /// Unproven connections outside the reserve.
    pub(super) shared: usize,
    /// Unproven connections in the reserve.
    pub(super) reserved: usize,
    /// Evicted connections that are still open.
    pub(super) closing: usize,
    /// Proven connections.
    pub(super) proven: usize,
    next_number: u64,
}

impl Registry {
    pub(super) fn add(&mut self, source: Source, in_reserve: bool, now: Instant) -> Rc<Entry> {
        self.next_number += 1;
        let entry = Rc::new(Entry {
            source,
            number: self.next_number,
            rank: Cell::new(EvictionRank::Silent),
            idle_since: Cell::new(now),
            requests: Cell::new(0),
            queued: Cell::new(None),
            in_reserve: Cell::new(in_reserve),
            phase: Cell::new(Phase::Unproven),
            waker: RefCell::default(),
        });
        *self.used(in_reserve) += 1;
        self.sources.add(source);
        self.queue(&entry);
        entry
    }

    fn used(&mut self, in_reserve: bool) -> &mut usize {
        if in_reserve { &mut self.reserved } else { &mut self.shared }
    }

    /// Puts a connection into the queue of its source.
    pub(super) fn queue(&mut self, entry: &Rc<Entry>) {
        insert(self.queues.entry(entry.source).or_default(), Rc::clone(entry));
        self.sources.set_gives(entry.source, true);
    }

    fn take_out(&mut self, entry: &Entry) {
        if let Some(queues) = self.queues.get_mut(&entry.source) {
            take_out(queues, entry);
            self.forget_empty(entry.source);
        }
    }

    /// Begins or ends the handshake of a connection. Such a change is queued at once, so that the queue of handshakes
    /// has no outdated position.
    pub(super) fn change_handshake(&mut self, entry: &Rc<Entry>, rank: EvictionRank, now: Instant) {
        if entry.phase.get() != Phase::Unproven {
            return;
        }
        self.take_out(entry);
        entry.rank.set(rank);
        entry.idle_since.set(now);
        self.queue(entry);
    }

    /// No longer counts an unproven connection.
    pub(super) fn remove(&mut self, entry: &Entry) {
        *self.used(entry.in_reserve.get()) -= 1;
        self.take_out(entry);
        self.sources.remove(entry.source);
    }

    /// Forgets the queues of a source if they are empty.
    fn forget_empty(&mut self, source: Source) {
        let is_empty = |queues: &Queues| queues.iter().all(BTreeMap::is_empty);
        if self.queues.get(&source).is_some_and(is_empty) {
            self.queues.remove(&source);
            self.sources.set_gives(source, false);
        }
    }

    /// Evicts a connection for one of `newcomer`, which has `count` connections: an idle one of a larger source, an
    /// idle one of its own that is older than the grace, or else a handshake of a larger source.
    pub(super) fn evict(
        &mut self,
        newcomer: Source,
        count: usize,
        graces: OwnGraces,
        now: Instant,
    ) -> Option<Rc<Entry>> {
        if self.closing >= MAX_CLOSING {
            return None;
        }
        self.evict_of_larger(count, IDLE, now)
            .or_else(|| self.evict_of(newcomer, IDLE, graces.idle, now))
            .or_else(|| self.evict_of(newcomer, &[EvictionRank::Silent], graces.silent, now))
            .or_else(|| self.evict_of_larger(count, &[EvictionRank::Handshake], now))
    }

    /// Evicts an idle connection of this source, if it has one.
    pub(super) fn evict_idle_of(&mut self, source: Source, now: Instant) -> bool {
        self.closing < MAX_CLOSING && self.evict_of(source, IDLE, OWN_GRACE, now).is_some()
    }

    /// Evicts a connection of the largest source that has more than `count`.
    fn evict_of_larger(
        &mut self,
        count: usize,
        ranks: &[EvictionRank],
        now: Instant,
    ) -> Option<Rc<Entry>> {
        let mut largest = None;
        for _ in 0..MAX_SEARCHED {
            largest = self.sources.largest(largest).filter(|(size, _)| *size > count);
            let (_, source) = largest?;
            let victim = self.evict_of(source, ranks, GRACE, now);
            if victim.is_some() {
                return victim;
            }
        }
        None
    }

    fn evict_of(
        &mut self,
        source: Source,
        ranks: &[EvictionRank],
        grace: Duration,
        now: Instant,
    ) -> Option<Rc<Entry>> {
        let victim = next_victim(self.queues.get_mut(&source)?, ranks, grace, now);
        match &victim {
            Some(entry) => {
                entry.phase.set(Phase::Evicted);
                self.remove(entry);
                self.closing += 1;
                if let Some(waker) = entry.waker.take() {
                    waker.wake();
                }
            }
            // The search may have emptied the queue.
            None => self.forget_empty(source),
        }
        victim
    }
}

fn insert(queues: &mut Queues, entry: Rc<Entry>) {
    let key = entry.key();
    entry.queued.set(Some(key));
    queues[key.0.index()].insert(key, entry);
}

fn take_out(queues: &mut Queues, entry: &Entry) {
    if let Some(key) = entry.queued.take() {
        queues[key.0.index()].remove(&key);
    }
}

/// The connection of these ranks that is closed first; one without a request only if it is older than `grace`.
/// Corrects outdated positions: each was caused by a request since the last search.
fn next_victim(
    queues: &mut Queues,
    ranks: &[EvictionRank],
    grace: Duration,
    now: Instant,
) -> Option<Rc<Entry>> {
    // A correction moves a connection to a higher rank, or to a lower one that is searched later.
    for _ in 0..2 {
        for rank in ranks {
            let has_grace = rank.is_before_requests();
            while let Some((key, entry)) = queues[rank.index()].first_key_value() {
                let (key, entry) = (*key, Rc::clone(entry));
                if entry.requests.get() > 0 {
                    take_out(queues, &entry);
                } else if entry.key() != key {
                    take_out(queues, &entry);
                    insert(queues, entry);
                } else if has_grace && now < key.1 + grace {
                    break; // all others without a request are younger
                } else {
                    return Some(entry);
                }
            }
        }
    }
    None
}
