//! What is behind the addresses of one upstream.

use std::collections::BTreeMap;
use std::mem;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use jackstay_core::backends::{Kind, ProbeRounds, SearchBudget};
use jackstay_core::pool::ConnectionKey;
use jackstay_sys::clock;
use serde::Serialize;
use tokio::sync::Notify;

/// How long an answer counts that an apiserver is ready. Longer than any probe.
const READY_MEMORY: Duration = Duration::from_secs(60);

/// How long a connection that was left counts: a further one is no warning, and new ones are asked more.
const LEFT_WINDOW: Duration = Duration::from_secs(60);

/// The addresses of one upstream. The control plane writes what is behind them.
#[derive(Debug, Default)]
pub struct AddressBackends {
    addresses: Mutex<BTreeMap<String, BalancerStatus>>,
    /// The connects for each endpoint that may reach other backends than the wanted one, by its label.
    searches: Mutex<BTreeMap<String, SearchBudget>>,
    /// Number of connections that are probed themselves.
    probed: AtomicU32,
    /// When all of them are probed because one fails.
    rounds: Mutex<ProbeRounds>,
    round_begun: Notify,
    /// When the apiserver of each connection has last answered that it is ready, if it cannot be told apart from others.
    ready: Mutex<Vec<(ConnectionKey, Instant)>>,
    ready_noted: Notify,
    /// When a connection was last left because its apiserver was not ready.
    left_at: Mutex<Option<Instant>>,
}

/// What is behind an address, for `/status`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BalancerStatus {
    /// The address.
    pub address: String,
    /// What connections have reached.
    pub kind: Kind,
    /// Whether the last survey has reached an apiserver.
    pub reached: bool,
    /// The names of the apiservers that connections have reached.
    pub backends: Vec<String>,
}

impl BalancerStatus {
    /// The status of an address that has been reached.
    pub fn new(address: String, kind: Kind, backends: Vec<String>) -> Self {
        Self { address, kind, reached: true, backends }
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

    /// Records that a survey of an address has reached nothing.
    pub fn set_unreachable(&self, address: &str) {
        if let Some(status) = lock(&self.addresses).get_mut(address) {
            status.reached = false;
        }
    }

    /// Sets which addresses are examined. Forgets all others.
    pub fn set_examined<'a>(&self, addresses: impl Iterator<Item = &'a str>) {
        let mut all = lock(&self.addresses);
        let mut before = mem::take(&mut *all);
        for address in addresses {
            let new = || BalancerStatus::new(address.to_owned(), Kind::Unknown, Vec::new());
            all.insert(address.to_owned(), before.remove(address).unwrap_or_else(new));
        }
        let address_of = |label: &str| label.split_once('/').map_or(label, |at| at.0).to_owned();
        lock(&self.searches).retain(|label, _| all.contains_key(&address_of(label)));
    }

    /// All addresses that are examined, in alphabetical order.
    pub fn list(&self) -> Vec<BalancerStatus> {
        lock(&self.addresses).values().cloned().collect()
    }

    /// What is known of an address; `None` if it is not examined.
    pub fn kind(&self, address: &str) -> Option<Kind> {
        Some(lock(&self.addresses).get(address)?.kind)
    }

    /// Counts a connection that is probed itself until the guard is dropped.
    pub fn count_probed_connection(&self) -> ProbedConnection<'_> {
        self.probed.fetch_add(1, Ordering::Relaxed);
        ProbedConnection(self)
    }

    /// Number of connections that are probed themselves.
    pub fn probed_connections(&self) -> u32 {
        self.probed.load(Ordering::Relaxed)
    }

    /// The probe of a connection fails or is overdue: each connection that is probed itself is probed at once, unless that
    /// was so not long ago.
    pub fn probe_all(&self) {
        if lock(&self.rounds).begin(clock::now()) {
            self.round_begun.notify_waiters();
        }
    }

    /// Waits for a round of [`Self::probe_all`].
    pub async fn round_begun(&self) {
        self.round_begun.notified().await;
    }

    /// The apiserver of a connection is ready.
    pub fn note_ready(&self, connection: ConnectionKey) {
        let (mut ready, now) = (lock(&self.ready), clock::now());
        ready.retain(|(other, at)| *other != connection && now < *at + READY_MEMORY);
        ready.push((connection, now));
        drop(ready);
        self.ready_noted.notify_waiters();
    }

    /// Whether the apiserver of another connection has answered since then that it is ready.
    pub fn is_other_ready(&self, connection: ConnectionKey, since: Instant) -> bool {
        lock(&self.ready).iter().any(|(other, at)| *other != connection && *at >= since)
    }

    /// Waits until an apiserver answers that it is ready.
    pub async fn ready_noted(&self) {
        self.ready_noted.notified().await;
    }

    /// A connection is left because its apiserver is not ready. Returns whether it is the first one in a minute.
    pub fn note_left(&self) -> bool {
        let now = clock::now();
        let before = lock(&self.left_at).replace(now);
        before.is_none_or(|at| now >= at + LEFT_WINDOW)
    }

    /// Whether a connection was left in the last minute because its apiserver was not ready.
    pub fn was_one_left(&self) -> bool {
        lock(&self.left_at).is_some_and(|at| clock::now() < at + LEFT_WINDOW)
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

/// Counts a connection that is probed itself until it is dropped.
#[derive(Debug)]
pub struct ProbedConnection<'a>(&'a AddressBackends);

impl Drop for ProbedConnection<'_> {
    fn drop(&mut self) {
        self.0.probed.fetch_sub(1, Ordering::Relaxed);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
