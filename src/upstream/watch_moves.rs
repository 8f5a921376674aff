//! What the watches of a connection are asked for: to look after themselves, or to move.
//!
//! Nobody is told to go. A number of moves is offered, the watches are woken, and those that can go
//! without their client's notice take one each. [`super::rebalance`] offers moves to even loads out,
//! [`super::evacuation`] to leave an apiserver that is unwell.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::connection::Connection;
use super::endpoint::Endpoint;

/// MoveEligibility may take a move that is offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveEligibility {
    /// A watch that has not moved for a while: its server is well, so nothing is urgent.
    Settled,
    /// A watch that was delivering and has fallen silent.
    Silent,
    /// Any.
    All,
}

/// Moves that are offered.
#[derive(Debug, Clone)]
struct Offer {
    who: MoveEligibility,
    targets: Rc<[Arc<Endpoint>]>,
    count: usize,
}

/// What the watches of a connection are asked for.
#[derive(Debug, Default)]
pub struct Offers {
    offer: RefCell<Option<Offer>>,
    /// Counts the times they were asked for something: a look or a move.
    asked: Cell<u32>,
    /// Of those, the looks: one a minute.
    minutes: Cell<u32>,
}

impl Connection {
    /// How often its watches were asked for something so far: for [`Self::drain_or_notification`].
    pub fn notification_count(&self) -> u32 {
        self.offers.asked.get()
    }

    /// How often its watches were asked to look after themselves, once a minute.
    pub fn self_check_count(&self) -> u32 {
        self.offers.minutes.get()
    }

    /// MoveEligibility may take a move now, if any is left.
    pub fn offered_move(&self) -> Option<MoveEligibility> {
        self.offers.offer.borrow().as_ref().map(|offer| offer.who)
    }

    /// Takes one of the moves that are offered: where to.
    pub fn take_move(&self) -> Option<Rc<[Arc<Endpoint>]>> {
        let mut slot = self.offers.offer.borrow_mut();
        let offer = slot.as_mut()?;
        let targets = Rc::clone(&offer.targets);
        offer.count -= 1;
        if offer.count == 0 {
            *slot = None;
        }
        Some(targets)
    }

    /// Offers so many moves to one of `targets`, in place of what was offered before.
    pub(super) fn offer_moves(
        &self,
        who: MoveEligibility,
        targets: &Rc<[Arc<Endpoint>]>,
        count: usize,
    ) {
        let targets = Rc::clone(targets);
        *self.offers.offer.borrow_mut() = (count > 0).then_some(Offer { who, targets, count });
        self.ask();
    }

    /// Offers no more; whether nobody took up what was offered, or not all of it.
    pub(super) fn withdraw_moves(&self) -> bool {
        self.offers.offer.borrow_mut().take().is_some()
    }

    /// Asks every watch to look after itself.
    pub(super) fn request_self_check(&self) {
        self.offers.minutes.set(self.self_check_count().wrapping_add(1));
        self.ask();
    }

    fn ask(&self) {
        self.offers.asked.set(self.notification_count().wrapping_add(1));
        self.changed.notify_waiters();
    }
}
