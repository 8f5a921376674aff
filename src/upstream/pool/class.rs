//! The connections of one credential class: which of them a request gets, and how many more are
//! needed.
//!
//! Opens and closes no connection: the pool does, as [`ClassPool::missing`] says.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::requirements::{PreviousFailure, StreamRequirements};
use crate::config;
use crate::upstream::balance;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::evacuation::ActiveEvacuations;
use crate::upstream::health::ConnectionState;
use crate::upstream::rebalance::Rebalancer;
use crate::upstream::shared::Upstream;

/// Connections to each endpoint, of each worker, for requests whose credential is not proven: random
/// tokens must not open more.
const UNPROVEN_CONNECTIONS: usize = 2;
/// Connections with an old certificate or to a removed endpoint are used for this long if no
/// replacement becomes live.
const KEEP_OLD_FOR: Duration = Duration::from_secs(5);
/// Most connects at once for one class and endpoint.
const PARALLEL_DIALS: usize = 4;
/// Connections that received bytes within this time of the most recent one are equally trusted.
const RECEIVED_LATELY: Duration = Duration::from_millis(100);
/// Pause between two searches for slow response heads: a request that has waited for a whole pause,
/// where a response usually takes a fraction of it, is evidence of trouble.
const SLOW_HEAD_PAUSE: Duration = Duration::from_millis(200);
/// Share of an endpoint's streams that watches may take: the rest is for short requests, such as
/// lease updates.
const WATCH_SHARE: f64 = 0.9;

/// The connections of one class.
pub struct ClassPool {
    pub(super) class: CredentialClass,
    pub(super) connections: RefCell<Vec<Rc<Connection>>>,
    pub(super) dialing: RefCell<HashMap<Arc<str>, usize>>,
    waiters: Cell<usize>,
    /// Watches that are held until an endpoint is usable.
    held: Cell<usize>,
    pub(super) used: Cell<Instant>,
    /// Since when no connection is live that has the current certificate and is in the set.
    without_current_since: Cell<Option<Instant>>,
    rng: RefCell<fastrand::Rng>,
    pub(super) rebalancer: RefCell<Rebalancer>,
    pub(super) evacuations: RefCell<ActiveEvacuations>,
    slow_heads_checked: Cell<Instant>,
}

impl ClassPool {
    /// No connections yet.
    pub(super) fn new(class: CredentialClass, now: Instant) -> Self {
        Self {
            class,
            connections: RefCell::default(),
            dialing: RefCell::default(),
            waiters: Cell::new(0),
            held: Cell::new(0),
            used: Cell::new(now),
            without_current_since: Cell::new(None),
            rng: RefCell::default(),
            rebalancer: RefCell::new(Rebalancer::new(now)),
            evacuations: RefCell::default(),
            slow_heads_checked: Cell::new(now),
        }
    }

    /// Its class.
    pub fn class(&self) -> CredentialClass {
        self.class
    }

    /// Counts a request that waits for a stream, until the guard is dropped.
    pub(super) fn wait(&self) -> Waiting<'_> {
        Waiting::new(&self.waiters)
    }

    /// Counts a held watch, until the guard is dropped. It asks for a stream once an endpoint is
    /// usable, each at its own moment; until then one connection is enough for all.
    pub(super) fn hold(&self) -> Waiting<'_> {
        Waiting::new(&self.held)
    }

    /// Held watches.
    pub(super) fn held(&self) -> usize {
        self.held.get()
    }

    /// Whether a request waits, a watch is held, or a stream was asked for within `window`.
    pub(super) fn used_since(&self, now: Instant, window: Duration) -> bool {
        self.waiters.get() > 0 || self.held.get() > 0 || now < self.used.get() + window
    }

    /// Takes a stream on the better of two random connections of the best rank. With
    /// `allow_suspect` suspect connections count too, unless their path is unresponsive: a write sent
    /// there would have an unknown result, and a read would only fail later.
    pub(super) fn take(
        &self,
        required: StreamRequirements<'_>,
        upstream: &Upstream,
        now: Instant,
        allow_suspect: bool,
    ) -> Option<Permit> {
        let connections = self.connections.borrow();
        let eligible = |connection: &&Rc<Connection>| {
            let alive = match connection.state() {
                ConnectionState::Live => true,
                ConnectionState::Suspect => allow_suspect && !connection.path_unresponsive(),
                ConnectionState::Draining
                | ConnectionState::Unresponsive
                | ConnectionState::Dead => false,
            };
            alive
                && connection.free_streams(now) > 0
                && !required
                    .excluded_endpoints
                    .iter()
                    .any(|shunned| Arc::ptr_eq(shunned, &connection.endpoint))
                && (!required.watch
                    || self.leaves_streams_for_requests(connection, &connections, upstream))
        };
        let refused = match required.previous_failure {
            Some(PreviousFailure::Refusal(connection)) => Some(&connection.endpoint),
            _ => None,
        };
        let rank = |connection: &Rc<Connection>| {
            let refused = refused.is_some_and(|there| Arc::ptr_eq(there, &connection.endpoint));
            // The same connection only where there is no other: one of its streams has just failed.
            let same =
                required.previous_failure.is_some_and(|a| Rc::ptr_eq(connection, a.connection()));
            let endpoint = &connection.endpoint;
            let has_warning = connection.has_warning_signs(now);
            (endpoint.state(), same, refused, endpoint.is_fallback(), has_warning)
        };
        let best = connections.iter().filter(eligible).map(rank).min()?;
        let ranked = || connections.iter().filter(eligible).filter(|c| rank(c) == best);
        let received_since = match required.previous_failure {
            Some(PreviousFailure::Silence(_)) => ranked()
                .map(|connection| connection.last_received())
                .max()
                .and_then(|last| last.checked_sub(RECEIVED_LATELY)),
            _ => None,
        };
        let candidates =
            ranked().filter(|c| received_since.is_none_or(|since| c.last_received() >= since));
        let mut rng = self.rng.borrow_mut();
        let lot = rng.f64();
        let chosen = balance::pick(candidates, &mut rng, |c| c.cost(now, lot))?;
        if !chosen.may_carry(required.client_subject) {
            // A class has one subject, so this cannot happen; if it does, the request must not be sent.
            tracing::error!(
                class = ?self.class,
                endpoint = &*chosen.endpoint.label,
                "connection refused to a request: it shows another subject than the client has proven"
            );
            debug_assert!(false, "a connection of another subject in {:?}", self.class);
            return None;
        }
        Some(chosen.reserve(required.watch, now))
    }

    /// Passive evidence: requests a probe of each endpoint whose response heads are slow.
    pub(super) fn probe_slow_endpoints(&self, now: Instant) {
        if now < self.slow_heads_checked.get() + SLOW_HEAD_PAUSE {
            return;
        }
        self.slow_heads_checked.set(now);
        for connection in self.connections.borrow().iter() {
            if connection.has_slow_response_heads(SLOW_HEAD_PAUSE, now) {
                connection.endpoint.request_probe();
            }
        }
    }

    /// Whether a watch may take a stream of this endpoint: a tenth of them is reserved for other
    /// requests.
    fn leaves_streams_for_requests(
        &self,
        candidate: &Rc<Connection>,
        connections: &[Rc<Connection>],
        upstream: &Upstream,
    ) -> bool {
        let watches: usize = connections
            .iter()
            .filter(|c| Arc::ptr_eq(&c.endpoint, &candidate.endpoint))
            .map(|c| c.watches())
            .sum();
        let capacity =
            self.max_connections(&upstream.config().connections) * candidate.stream_limit();
        (watches as f64) < (capacity as f64 * WATCH_SHARE).max(1.0)
    }

    /// A connect has ended. Endpoints without connects in progress have no entry, since endpoints come
    /// and go.
    pub(super) fn connect_ended(&self, label: &str) {
        let mut dialing = self.dialing.borrow_mut();
        if let Some(count) = dialing.get_mut(label) {
            *count -= 1;
            if *count == 0 {
                dialing.remove(label);
            }
        }
    }

    fn max_connections(&self, limits: &config::Connections) -> usize {
        match self.class {
            CredentialClass::Identity(_) | CredentialClass::Token => limits.max,
            CredentialClass::UnprovenToken
            | CredentialClass::Anonymous
            | CredentialClass::Probe
            | CredentialClass::Discovery => UNPROVEN_CONNECTIONS.min(limits.max),
        }
    }

    /// Whether old connections (another generation of the credential, a removed endpoint) drain now:
    /// once a replacement is live, so that no request waits for one, or after [`KEEP_OLD_FOR`].
    pub(super) fn may_drain_old(&self, generation: u64, now: Instant) -> bool {
        let new = |connection: &Rc<Connection>| {
            connection.generation == generation
                && connection.state() == ConnectionState::Live
                && connection.endpoint.state() != EndpointState::Leaving
        };
        if self.connections.borrow().iter().any(new) {
            self.without_current_since.set(None);
            return true;
        }
        let since = self.without_current_since.get().unwrap_or(now);
        self.without_current_since.set(Some(since));
        now >= since + KEEP_OLD_FOR
    }

    pub(super) fn has_live(&self) -> bool {
        self.connections.borrow().iter().any(|c| c.state() == ConnectionState::Live)
    }

    /// Whether it has connections to this endpoint and all of them are suspect.
    pub(super) fn is_silent(&self, endpoint: &Arc<Endpoint>) -> bool {
        let connections = self.connections.borrow();
        let mut states = connections
            .iter()
            .filter(|c| Arc::ptr_eq(&c.endpoint, endpoint))
            .map(|c| c.state())
            .filter(|state| matches!(state, ConnectionState::Live | ConnectionState::Suspect))
            .peekable();
        states.peek().is_some() && states.all(|state| state == ConnectionState::Suspect)
    }

    /// Whether less than a tenth of the endpoint's streams is free after this one, so that another
    /// connection should be opened before a request waits for it.
    pub(super) fn is_tight(&self, permit: &Permit, now: Instant) -> bool {
        let connection = permit.connection();
        connection.free_streams(now) * 10 < connection.stream_limit()
            && self.free_on(&connection.endpoint, now) * 10 < connection.stream_limit()
    }

    fn free_on(&self, endpoint: &Arc<Endpoint>, now: Instant) -> usize {
        self.connections
            .borrow()
            .iter()
            .filter(|c| Arc::ptr_eq(&c.endpoint, endpoint) && c.state() == ConnectionState::Live)
            .map(|c| c.free_streams(now))
            .sum()
    }

    /// How many connections to open now.
    pub(super) fn missing(
        &self,
        endpoint: &Arc<Endpoint>,
        generation: u64,
        limits: &config::Connections,
        targets: usize,
        now: Instant,
    ) -> usize {
        let dialing = self.dialing.borrow().get(&endpoint.label).copied().unwrap_or(0);
        let connections = self.connections.borrow();
        let mine = || {
            let ours = connections.iter().filter(|c| c.generation == generation);
            ours.filter(|c| Arc::ptr_eq(&c.endpoint, endpoint))
        };
        let counts = Counts {
            live: mine().filter(|c| c.state() == ConnectionState::Live).count(),
            suspect: mine().filter(|c| c.state() == ConnectionState::Suspect).count(),
            dialing,
            free: mine()
                .filter(|c| c.state() == ConnectionState::Live)
                .map(|c| c.free_streams(now))
                .sum(),
            cap: mine().map(|c| c.stream_limit()).max().unwrap_or(limits.max_streams).max(1),
            waiters: self.waiters.get().div_ceil(targets),
        };
        let min = if matches!(self.class, CredentialClass::Identity(_)) { limits.min } else { 1 };
        counts.missing(min, self.max_connections(limits))
    }
}

/// Counts of the connections of one class to one endpoint.
#[derive(Debug, Clone, Copy)]
struct Counts {
    live: usize,
    suspect: usize,
    dialing: usize,
    free: usize,
    cap: usize,
    waiters: usize,
}

impl Counts {
    /// How many more to open: up to the minimum, one if all are suspect, and enough streams for the
    /// waiting requests, plus a tenth of a connection in reserve.
    fn missing(&self, min: usize, max: usize) -> usize {
        // Draining connections do not count, so that they cannot block their replacements.
        let total = self.live + self.suspect;
        let mut want = min.saturating_sub(self.live);
        // More than half are suspect: the endpoint is in trouble, not one connection, so it gets one
        // connect at a time.
        if self.suspect > 0 && self.live == 0 {
            want = want.max(1);
        }
        if self.suspect * 2 > total {
            want = want.min(1);
        }
        if self.live > 0 && self.free * 10 < self.cap {
            want = want.max(1);
        }
        if self.waiters > self.free {
            want = want.max((self.waiters - self.free).div_ceil(self.cap));
        }
        want.saturating_sub(self.dialing)
            .min(PARALLEL_DIALS.saturating_sub(self.dialing))
            .min(max.saturating_sub(total + self.dialing))
    }
}

/// Counts a waiting request for as long as it waits.
pub(super) struct Waiting<'a>(&'a Cell<usize>);

impl<'a> Waiting<'a> {
    fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}
