//! The moves that are offered to the watches of a connection.
//!
//! No watch is forced to move. [`super::rebalance`] and [`super::evacuation`] offer a number of moves and
//! notify the watches. A watch takes one of the moves if it is eligible and can be resumed.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

pub use jackstay_core::placement::MoveEligibility;

use super::endpoint::Endpoint;

#[derive(Debug)]
struct Offer {
    eligible: MoveEligibility,
    targets: Rc<[Arc<Endpoint>]>,
    /// Number of moves that are left, at least 1.
    count: usize,
}

/// The moves offered on one connection.
#[derive(Debug, Default)]
pub struct WatchMoves {
    offer: RefCell<Option<Offer>>,
    notifications: Cell<u32>,
}

impl WatchMoves {
    /// Number of offers of moves so far; wraps around.
    pub fn notification_count(&self) -> u32 {
        self.notifications.get()
    }

    /// Which watches may take a move; `None` if no move is left.
    pub fn eligibility(&self) -> Option<MoveEligibility> {
        self.offer.borrow().as_ref().map(|offer| offer.eligible)
    }

    /// Takes a move, unless no target suits the watch. Returns the possible targets.
    pub fn take_unless(
        &self,
        is_unsuitable: impl Fn(&Arc<Endpoint>) -> bool,
    ) -> Option<Rc<[Arc<Endpoint>]>> {
        let mut slot = self.offer.borrow_mut();
        let offer = slot.as_mut().filter(|offer| !offer.targets.iter().all(is_unsuitable))?;
        let targets = Rc::clone(&offer.targets);
        offer.count -= 1;
        if offer.count == 0 {
            *slot = None;
        }
        Some(targets)
    }

    /// Notifies the watches of something else than an offer.
    pub(super) fn notify(&self) {
        self.notifications.set(self.notifications.get().wrapping_add(1));
    }

    /// Offers `count` moves to one of `targets`, in place of an earlier offer.
    pub(super) fn offer(
        &self,
        eligible: MoveEligibility,
        targets: &Rc<[Arc<Endpoint>]>,
        count: usize,
    ) {
        let targets = Rc::clone(targets);
        *self.offer.borrow_mut() = (count > 0).then_some(Offer { eligible, targets, count });
        self.notifications.set(self.notifications.get().wrapping_add(1));
    }

    /// Withdraws the offer. Returns whether a move was left.
    pub(super) fn withdraw(&self) -> bool {
        self.offer.borrow_mut().take().is_some()
    }
}
