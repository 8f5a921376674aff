//! Shares the connection slots of one listener on one worker among the sources of its connections.
//!
//! * A connection is proven once its client has shown a valid certificate of a configured identity. Proven
//!   connections are never closed for others.
//! * A source with n unproven connections gets another one while n is less than the number of free slots. So
//!   one source gets at most half of the slots, and two get a third each.
//! * Beyond that, a new connection takes the slot of an idle one: of the source with the most connections, and
//!   of its own source if no other has more. Connections that have sent nothing are closed first, then those without a
//!   request, then those without an accepted token, and among equals the one that is idle for longest. A connection
//!   whose client only sends PINGs is idle.
//! * A connection without a request is idle from an age of 100 ms. While the reserve has a slot, it is idle for one of
//!   its own source from 3 s only, because a burst of connections sends its handshakes late. While it has none, one
//!   that has sent nothing is idle for one of its own source from 20 ms: a flood of such connections would refuse the
//!   handshake of an identity with the same source.
//! * A connection whose handshake has begun may prove an identity, and is not idle. It is never closed for one of its
//!   own source, and for one of a smaller source from an age of 100 ms, if none is idle. The handshake timeout bounds it.
//! * A connection that is passed through is in use once the first bytes of its client were read to route it, or were
//!   sent to an endpoint, and is never closed for others. Whether the client continues is known to the endpoint only.
//! * An eighth of the slots is a reserve, beside those of proven connections. If no connection is idle, a new one gets a
//!   slot of the reserve, and is closed unless it proves an identity in its handshake, or gets a shared slot then, as a
//!   new connection does. So no connection of the reserve is passed through.
//! * A connection for which its source has no memory left takes the place of an idle one of its source.
//!
//! Only the size of the reserve depends on whether identities are configured. A process that runs as the same
//! user as the kubelet has the same source: it can fill that source's share with requests in progress, and
//! then the kubelet's next connection gets a slot of the reserve.

mod registry;

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Instant;

use jackstay_core::admission::Refusal;
use jackstay_core::credential_class::ClientRank;
use jackstay_sys::clock;
use jackstay_sys::sockets::source::Source;

use self::registry::{Entry, EvictionRank, OwnGraces, Phase, Registry};

/// The reserve is this part of the slots.
const RESERVE_DIVISOR: usize = 8;
/// Minimum size of the reserve, unless that is more than half of the slots.
const MIN_RESERVE: usize = 16;

/// A connection that got a slot.
#[derive(Debug)]
pub struct Admitted {
    /// The slot.
    pub slot: ConnectionSlot,
    /// The source of the idle connection that is closed for it.
    pub evicted: Option<Source>,
}

/// The slots of one listener on one worker.
#[derive(Debug, Default)]
pub struct ConnectionSlots {
    registry: RefCell<Registry>,
}

/// The limit of slots.
#[derive(Debug, Clone, Copy)]
pub struct SlotLimit {
    /// The number of slots.
    pub slots: usize,
    /// Whether the listener has identities. Without, there is no reserve.
    pub has_identities: bool,
    /// Proven connections that count for the limit and were handed over to another thread.
    pub handed_over: usize,
}

/// What the connections of a listener leave free.
struct FreeSlots {
    unused: usize,
    /// Those that are not kept for the reserve.
    shared: usize,
    reserve: Reserve,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reserve {
    HasSlot,
    InUse,
}

impl Reserve {
    /// The ages from which connections may be closed for one of their own source.
    fn own_graces(self) -> OwnGraces {
        match self {
            Self::HasSlot => OwnGraces { idle: registry::OWN_GRACE, silent: registry::OWN_GRACE },
            Self::InUse => OwnGraces { idle: registry::GRACE, silent: registry::SILENT_GRACE },
        }
    }
}

impl SlotLimit {
    fn free(self, registry: &Registry) -> FreeSlots {
        let Self { slots, has_identities, handed_over } = self;
        let reserve = if has_identities { (slots / RESERVE_DIVISOR).max(MIN_RESERVE) } else { 0 };
        let reserve = reserve.min(slots / 2);
        let used = registry.shared + registry.reserved + registry.proven + handed_over;
        let unused = slots.saturating_sub(used);
        let shared = unused.saturating_sub(reserve.saturating_sub(registry.reserved));
        let has_slot = unused > 0 && registry.reserved < reserve;
        let reserve = if has_slot { Reserve::HasSlot } else { Reserve::InUse };
        FreeSlots { unused, shared, reserve }
    }
}

impl ConnectionSlots {
    /// The number of open connections.
    pub fn open(&self) -> usize {
        let registry = self.registry.borrow();
        registry.shared + registry.reserved + registry.closing + registry.proven
    }

    /// Gives a slot to a proven connection that was handed over from another thread, beyond any limit.
    pub fn admit_proven(self: &Rc<Self>, source: Source, now: Instant) -> ConnectionSlot {
        let entry = self.registry.borrow_mut().add(source, false, now);
        let slot = ConnectionSlot { slots: Rc::clone(self), entry };
        slot.set_proven();
        slot
    }

    /// Gives a slot to a new connection.
    ///
    /// # Errors
    /// The connection must be closed.
    pub fn admit(
        self: &Rc<Self>,
        source: Source,
        limit: SlotLimit,
        now: Instant,
    ) -> Result<Admitted, Refusal> {
        let mut registry = self.registry.borrow_mut();
        let FreeSlots { unused, shared, reserve } = limit.free(&registry);
        let count = registry.sources.count(source);
        let mut evicted = None;
        let in_reserve = if count < shared {
            false
        } else if let Some(victim) = registry.evict(source, count, reserve.own_graces(), now) {
            evicted = Some(victim.source);
            victim.in_reserve.get()
        } else if reserve == Reserve::HasSlot {
            true
        } else if unused == 0 {
            return Err(Refusal::SlotsFull);
        } else {
            return Err(Refusal::SourceShare);
        };
        let entry = registry.add(source, in_reserve, now);
        drop(registry);
        let slot = ConnectionSlot { slots: Rc::clone(self), entry };
        Ok(Admitted { slot, evicted })
    }
}

/// The slot of one open connection. The drop frees it.
#[derive(Debug)]
pub struct ConnectionSlot {
    slots: Rc<ConnectionSlots>,
    entry: Rc<Entry>,
}

impl ConnectionSlot {
    /// The source of the connection.
    pub fn source(&self) -> Source {
        self.entry.source
    }

    /// Whether the connection must be closed unless it proves an identity.
    pub fn must_prove_identity(&self) -> bool {
        self.entry.in_reserve.get() && self.entry.phase.get() == Phase::Unproven
    }

    /// Exchanges a slot of the reserve for a shared one, by the rules of a new connection. False if there is none.
    pub fn leave_reserve(&self, limit: SlotLimit, now: Instant) -> bool {
        let (source, mut registry) = (self.entry.source, self.slots.registry.borrow_mut());
        let FreeSlots { shared, reserve, .. } = limit.free(&registry);
        let count = registry.sources.count(source);
        let leaves = count.saturating_sub(1) < shared
            || registry
                .evict(source, count, reserve.own_graces(), now)
                .is_some_and(|victim| !victim.in_reserve.get());
        if leaves && self.entry.in_reserve.replace(false) {
            registry.reserved -= 1;
            registry.shared += 1;
        }
        leaves
    }

    /// Evicts an idle connection of the same source, for this one. False if there is none.
    pub fn evict_idle_of_source(&self, now: Instant) -> bool {
        self.slots.registry.borrow_mut().evict_idle_of(self.entry.source, now)
    }

    /// The client has proven an identity: the connection is not closed for others from now on.
    pub fn set_proven(&self) {
        if self.entry.phase.get() != Phase::Unproven {
            return;
        }
        self.entry.phase.set(Phase::Proven);
        let mut registry = self.slots.registry.borrow_mut();
        registry.remove(&self.entry);
        registry.proven += 1;
    }

    /// Sets what the client has proven with its last request.
    pub fn set_rank(&self, rank: ClientRank) {
        if rank == ClientRank::Identity {
            return self.set_proven();
        }
        let rank = EvictionRank::Served(rank);
        if self.entry.rank.get() == EvictionRank::Handshake {
            self.slots.registry.borrow_mut().change_handshake(&self.entry, rank, clock::now());
        }
        self.entry.rank.set(rank);
    }

    /// The client has sent the first bytes of its handshake.
    pub fn handshake_begun(&self, now: Instant) {
        let mut registry = self.slots.registry.borrow_mut();
        registry.change_handshake(&self.entry, EvictionRank::Handshake, now);
    }

    /// The handshake is complete and the certificate verified, if the client has sent one. Changes nothing after a
    /// request.
    pub fn handshake_complete(&self, now: Instant) {
        if self.entry.rank.get().is_before_requests() {
            let mut registry = self.slots.registry.borrow_mut();
            registry.change_handshake(&self.entry, EvictionRank::New, now);
        }
    }

    /// The connection is in use from now on, and is not closed for others.
    pub fn set_in_use(&self) {
        self.entry.requests.set(self.entry.requests.get().max(1));
    }

    /// Counts a request in progress until the guard is dropped.
    pub fn begin_request(self: &Rc<Self>) -> OpenRequest {
        let entry = &self.entry;
        entry.requests.set(entry.requests.get() + 1);
        if entry.rank.get().is_before_requests() {
            self.set_rank(ClientRank::Unproven);
        }
        OpenRequest(Rc::clone(self))
    }

    /// Whether no request is in progress.
    pub fn is_idle(&self) -> bool {
        self.entry.requests.get() == 0
    }

    /// Waits until the connection has to close for another one.
    /// One task at a time can wait.
    pub async fn evicted(&self) {
        poll_fn(|cx| self.poll_evicted(cx)).await;
    }

    /// Like [`Self::evicted`].
    pub fn poll_evicted(&self, cx: &Context<'_>) -> Poll<()> {
        if self.entry.phase.get() == Phase::Evicted {
            return Poll::Ready(());
        }
        let mut waker = self.entry.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|waker| waker.will_wake(cx.waker())) {
            *waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }

    fn end_request(&self) {
        let entry = &self.entry;
        entry.requests.set(entry.requests.get() - 1);
        if entry.requests.get() == 0 && entry.phase.get() == Phase::Unproven {
            entry.idle_since.set(clock::now());
            if entry.queued.get().is_none() {
                self.slots.registry.borrow_mut().queue(entry);
            }
        }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut registry = self.slots.registry.borrow_mut();
        match self.entry.phase.get() {
            Phase::Unproven => registry.remove(&self.entry),
            Phase::Evicted => registry.closing -= 1,
            Phase::Proven => registry.proven -= 1,
        }
    }
}

/// A request in progress.
#[derive(Debug)]
pub struct OpenRequest(Rc<ConnectionSlot>);

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.0.end_request();
    }
}

#[cfg(test)]
mod tests;
