//! Limits the number of requests that jackstay sends in addition to those of its clients.

use std::cell::Cell;

/// Tokens for additional requests. A request of a client earns [`TOKENS_PER_REQUEST`], and an additional
/// request costs one token. After an initial burst, additional requests are therefore at most a tenth of
/// the clients' requests, so that they do not overload an apiserver.
///
/// A budget belongs to a worker's client of an upstream and not to a listener, because it protects the
/// apiservers, which listeners share.
#[derive(Debug)]
pub struct RetryBudget {
    burst: f64,
    tokens: Cell<f64>,
}

/// Minimum burst of hedges. A switch that loses its flow table breaks all connections at once, and
/// kube-apiserver allows 100 streams on each.
const MIN_HEDGE_BURST: usize = 128;
/// Burst of requests to other endpoints after a 410: about two for each watch of kube-controller-manager,
/// which starts watches of about 200 resources at once.
const TOO_OLD_BURST: usize = 512;
/// Burst of requests to another endpoint after a rejection for overload: the requests that one connection to the
/// rejecting apiserver carries.
const REJECTED_BURST: usize = 128;
/// Burst of additional requests of API groups that fail at an endpoint: those that wait there when it loses its path.
const GROUPS_BURST: usize = 128;
/// Tokens of that burst that are kept for other endpoints while groups are unavailable.
const GROUPS_RESERVE: f64 = 112.0;
/// The same while a group fails at one endpoint and works at another, so that it is available again soon.
const DISPUTED_RESERVE: f64 = 32.0;
/// Burst of late reads of an object: half of those that one connection carries.
const LATE_OBJECTS_BURST: usize = 64;
/// Burst of late lists and similar reads.
const LATE_OTHERS_BURST: usize = 16;
/// Tokens that a request earns for these three.
const FEWER_TOKENS_PER_REQUEST: f64 = 0.05;
/// Tokens that one request of a client earns.
const TOKENS_PER_REQUEST: f64 = 0.1;

impl RetryBudget {
    /// A budget for hedges. Its burst allows to hedge all requests of one connection at once.
    pub fn hedges(streams_per_connection: usize) -> Self {
        Self::full(streams_per_connection.max(MIN_HEDGE_BURST))
    }

    /// A budget for sending a watch to other endpoints after a 410.
    pub fn too_old() -> Self {
        Self::full(TOO_OLD_BURST)
    }

    /// A budget for sending reads to another endpoint after a rejection for overload.
    pub fn rejected() -> Self {
        Self::full(REJECTED_BURST)
    }

    /// A budget for requests of API groups that fail at an endpoint ([`crate::group_health`]).
    pub fn groups() -> Self {
        Self::full(GROUPS_BURST)
    }

    /// A budget for asking another endpoint, too, when the read of an object is late ([`super::late_reads`]).
    pub fn late_objects() -> Self {
        Self::full(LATE_OBJECTS_BURST)
    }

    /// The same for any other read.
    pub fn late_others() -> Self {
        Self::full(LATE_OTHERS_BURST)
    }

    fn full(burst: usize) -> Self {
        Self { burst: burst as f64, tokens: Cell::new(burst as f64) }
    }

    /// Adds the share of one client request.
    pub fn deposit(&self) {
        self.add(TOKENS_PER_REQUEST);
    }

    /// Adds the share of one request to a budget that earns less: for groups, and for late reads.
    pub fn deposit_less(&self) {
        self.add(FEWER_TOKENS_PER_REQUEST);
    }

    /// Whether a token is left.
    pub fn has_token(&self) -> bool {
        self.tokens.get() >= 1.0
    }

    /// Takes one token of those that are not kept for other endpoints. Returns false if none is left. `is_disputed`: the
    /// group fails at one endpoint and works at another.
    pub fn take_unreserved(&self, is_disputed: bool) -> bool {
        let reserve = if is_disputed { DISPUTED_RESERVE } else { GROUPS_RESERVE };
        self.tokens.get() > reserve && self.take()
    }

    /// Takes one token. Returns false if none is left.
    pub fn take(&self) -> bool {
        let left = self.tokens.get() - 1.0;
        let is_taken = left >= 0.0;
        if is_taken {
            self.tokens.set(left);
        }
        is_taken
    }

    /// Puts back a token whose request was not sent.
    pub fn release(&self) {
        self.add(1.0);
    }

    /// Puts back the tokens of requests that were answered.
    pub fn release_all(&self, tokens: u8) {
        self.add(f64::from(tokens));
    }

    fn add(&self, tokens: f64) {
        self.tokens.set((self.tokens.get() + tokens).min(self.burst));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_of_groups_keeps_a_reserve_and_refills_by_a_twentieth() {
        let budget = RetryBudget::groups();
        for (is_disputed, unreserved) in [(false, 16), (true, 80)] {
            let taken = (0..1_000).filter(|_| budget.take_unreserved(is_disputed)).count();
            assert_eq!(taken, unreserved);
        }
        assert_eq!((0..1_000).filter(|_| budget.take()).count(), DISPUTED_RESERVE as usize);
        assert!(!budget.has_token());
        (0..1_000).for_each(|_| budget.deposit_less());
        assert!(budget.has_token());
        let twentieth = (0..1_000).filter(|_| budget.take()).count();
        assert!((49..=51).contains(&twentieth), "{twentieth}");
        budget.release_all(3);
        assert_eq!((0..1_000).filter(|_| budget.take()).count(), 3);
    }

    #[test]
    fn retry_budget_refills_by_a_tenth_and_never_exceeds_its_burst() {
        for (budget, burst) in [
            (RetryBudget::hedges(1), 128),
            (RetryBudget::hedges(1_000), 1_000),
            (RetryBudget::too_old(), 512),
            (RetryBudget::rejected(), 128),
        ] {
            let take_up_to = |tokens: u32| (0..tokens).filter(|_| budget.take()).count();
            assert_eq!(take_up_to(2_000), burst);
            assert!(!budget.take());
            (0..1_000).for_each(|_| budget.deposit());
            let tenth = take_up_to(1_000);
            assert!((99..=101).contains(&tenth), "{tenth}");
            (0..100_000).for_each(|_| budget.deposit());
            assert_eq!(take_up_to(2_000), burst, "earned tokens do not exceed the burst");
            budget.release();
            assert_eq!(take_up_to(2_000), 1);
            (0..2_000).for_each(|_| budget.release());
            assert_eq!(take_up_to(2_000), burst, "released tokens do not exceed the burst");
        }
    }
}
