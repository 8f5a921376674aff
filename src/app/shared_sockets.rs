//! Which sockets other processes may have: a socket that only this process has may be excluded from new connections before
//! it is closed, and one that another process accepts on must not.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The other processes that may have a socket.
#[derive(Debug, Clone, Default)]
pub struct OtherOwners(Arc<Owners>);

#[derive(Debug, Default)]
struct Owners {
    /// Whether the process that the socket was inherited from may still have it.
    predecessor: AtomicBool,
    /// How many processes that it was sent to may have it.
    sent_to: AtomicUsize,
}

impl OtherOwners {
    /// Those of a socket that was inherited, or not.
    pub fn new(is_inherited: bool) -> Self {
        let owners = Self::default();
        owners.0.predecessor.store(is_inherited, Ordering::Relaxed);
        owners
    }

    /// Whether another process may have the socket.
    pub fn exist(&self) -> bool {
        !self.are_at_most(0)
    }

    /// Whether at most `count` processes that the socket was sent to have it, and not the one that it was inherited from.
    pub fn are_at_most(&self, count: usize) -> bool {
        !self.0.predecessor.load(Ordering::Relaxed)
            && self.0.sent_to.load(Ordering::Relaxed) <= count
    }

    /// Records that the process that the socket was inherited from has closed it.
    pub fn predecessor_has_closed(&self) {
        self.0.predecessor.store(false, Ordering::Relaxed);
    }
}

/// The sockets that one other process gets.
#[derive(Debug, Default)]
pub struct SentSockets(Vec<OtherOwners>);

impl SentSockets {
    /// Records that another process may have these sockets from now on, also if it never answers.
    pub fn new(owners: impl IntoIterator<Item = OtherOwners>) -> Self {
        let owners: Vec<_> = owners.into_iter().collect();
        for OtherOwners(owners) in &owners {
            owners.sent_to.fetch_add(1, Ordering::Relaxed);
        }
        Self(owners)
    }

    /// Records that the process has ended, and its sockets with it.
    pub fn process_has_ended(&mut self) {
        for OtherOwners(owners) in std::mem::take(&mut self.0) {
            owners.sent_to.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_exist_until_each_process_has_ended() {
        let (own, inherited) = (OtherOwners::default(), OtherOwners::new(true));
        let both = || [own.clone(), inherited.clone()];
        let (mut first, mut second) = (SentSockets::new(both()), SentSockets::new(both()));
        assert!(!own.are_at_most(1) && own.are_at_most(2) && !inherited.are_at_most(2));
        first.process_has_ended();
        first.process_has_ended();
        assert!(own.exist() && own.are_at_most(1));
        second.process_has_ended();
        assert!(!own.exist() && inherited.exist());
        inherited.predecessor_has_closed();
        assert!(!inherited.exist());
        drop(SentSockets::new(both()));
        assert!(own.exist() && inherited.exist(), "what became of it is not known");
    }
}
