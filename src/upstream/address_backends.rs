//! What is behind the addresses of one upstream.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use jackstay_core::backends::{Kind, SearchBudget};
use jackstay_sys::clock;
use serde::Serialize;

/// The addresses of one upstream. The control plane writes what is behind them.
#[derive(Debug, Default)]
pub struct AddressBackends {
    addresses: Mutex<BTreeMap<String, BalancerStatus>>,
    /// The connects for each endpoint that may reach other backends than the wanted one, by its label.
    searches: Mutex<BTreeMap<String, SearchBudget>>,
}

/// What is behind an address, for `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BalancerStatus {
    /// The address.
    pub address: String,
    /// `apiserver`, `balancer`, or `unreliable` if each connection shows something else.
    pub kind: &'static str,
    /// The names of the apiservers that connections have reached.
    pub backends: Vec<String>,
}

impl BalancerStatus {
    /// The status of an address.
    pub fn new(address: String, kind: Kind, backends: Vec<String>) -> Self {
        let kind = match kind {
            Kind::Unknown => "unknown",
            Kind::One => "apiserver",
            Kind::Several(_) => "balancer",
            Kind::Unreliable => "unreliable",
        };
        Self { address, kind, backends }
    }
}

impl AddressBackends {
    /// Sets what is behind an address. Returns whether that is new.
    pub fn set(&self, status: BalancerStatus) -> bool {
        let mut all = lock(&self.addresses);
        let is_new = all.get(&status.address) != Some(&status);
        all.insert(status.address.clone(), status);
        is_new
    }

    /// Forgets all other addresses.
    pub fn retain(&self, is_wanted: impl Fn(&str) -> bool) {
        lock(&self.addresses).retain(|address, _| is_wanted(address));
        let address_of =
            |label: &str| label.split_once('/').map_or(label, |(address, _)| address).to_owned();
        lock(&self.searches).retain(|label, _| is_wanted(&address_of(label)));
    }

    /// All addresses that were examined, in alphabetical order.
    pub fn list(&self) -> Vec<BalancerStatus> {
        lock(&self.addresses).values().cloned().collect()
    }

    /// Whether another connect may be made for the endpoint with this label, which the one before has not reached.
    pub fn may_search(&self, label: &str) -> bool {
        let mut searches = lock(&self.searches);
        if !searches.contains_key(label) {
            searches.insert(label.to_owned(), SearchBudget::new());
        }
        searches.get_mut(label).is_some_and(|budget| budget.take(clock::now()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
