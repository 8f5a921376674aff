//! The connections of one credential class: selects a connection for each request, and computes how many
//! connections to open. The pool opens and drains them.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::balance;
use jackstay_core::connection_health::ConnectionState;

use super::class_limits::{self, UNPROVEN_WITH_DRAINING, longest_dial_pause, max_connections};
use super::counts::{ConnectionCounts, CountGuard};
use super::dial_pause::DialPause;
use super::drain::{is_idle_after_burst, make_room};
use super::requirements::{PreviousFailure, StreamRequirements};
use super::waiters::Waiters;
use crate::config;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::{Endpoint, EndpointState, ProbeTrigger};
use crate::upstream::evacuation::ActiveEvacuations;
use crate::upstream::rebalance::Rebalancer;
use crate::upstream::shared::Upstream;
use crate::upstream::version_preference::PreferredVersions;

/// Time for which connections with an old certificate or to a removed endpoint stay in use without a live
/// replacement.
const OLD_CONNECTION_GRACE: Duration = Duration::from_secs(5);
/// After a connection did not respond, a retry uses only connections whose last byte arrived at most this
/// long before the newest byte of any candidate.
const RECENT_RECEIVE_WINDOW: Duration = Duration::from_millis(100);
/// Interval of the search for slow response heads. A request that has waited for a whole interval is a sign
/// of a failing endpoint if responses usually take less than a quarter of it, and after five in any case.
const SLOW_HEAD_INTERVAL: Duration = Duration::from_millis(200);
/// Share of an endpoint's streams that watches may take. The others are reserved for short requests, such as
/// lease updates.
const WATCH_SHARE: f64 = 0.9;

/// The connections of one class.
pub struct ClassPool {
    class: CredentialClass,
    pub(super) connections: RefCell<Vec<Rc<Connection>>>,
    /// Number of connects in progress by endpoint label. An endpoint without any has no entry.
    dialing: RefCell<HashMap<Arc<str>, usize>>,
    /// The requests that wait for a stream.
    pub(super) waiters: Waiters,
    /// The recent connects by endpoint label, of a class whose connects are paced.
    dial_pauses: RefCell<HashMap<Arc<str>, DialPause>>,
    /// Number of watches that are held until a total outage ends.
    held_watches: Cell<usize>,
    /// When a request last asked for a stream.
    last_used: Cell<Instant>,
    /// Since when there has been no live connection with the current certificate to an endpoint of the set.
    without_current_since: Cell<Option<Instant>>,
    rng: RefCell<fastrand::Rng>,
    pub(super) rebalancer: RefCell<Rebalancer>,
    pub(super) evacuations: RefCell<ActiveEvacuations>,
    slow_heads_checked: Cell<Instant>,
}

impl ClassPool {
    /// A pool without connections.
    pub(super) fn new(class: CredentialClass, now: Instant) -> Self {
        Self {
            class,
            connections: RefCell::default(),
            dialing: RefCell::default(),
            waiters: Waiters::default(),
            dial_pauses: RefCell::default(),
            held_watches: Cell::new(0),
            last_used: Cell::new(now),
            without_current_since: Cell::new(None),
            rng: RefCell::default(),
            rebalancer: RefCell::new(Rebalancer::new(now)),
            evacuations: RefCell::default(),
            slow_heads_checked: Cell::new(now),
        }
    }

    /// The credential class that the connections serve.
    pub fn credential_class(&self) -> CredentialClass {
        self.class
    }

    /// Whether no more requests may wait for a stream.
    pub(super) fn has_too_many_waiters(&self) -> bool {
        self.waiters.len() >= class_limits::max_waiters(self.class)
    }

    /// Counts a held watch, until the guard is dropped. Held watches are no waiters, so no connections are
    /// opened for them. When the outage ends, they ask for streams, spread over time.
    pub(super) fn count_held_watch(&self) -> CountGuard<'_> {
        CountGuard::new(&self.held_watches)
    }

    /// Number of held watches.
    pub(super) fn held_watches(&self) -> usize {
        self.held_watches.get()
    }

    /// Records that a request asks for a stream.
    pub(super) fn mark_used(&self, now: Instant) {
        self.last_used.set(now);
    }

    /// Whether a request waits, a watch is held, or a request asked for a stream within `window`.
    pub(super) fn used_within(&self, window: Duration, now: Instant) -> bool {
        self.waiters.len() > 0 || self.held_watches.get() > 0 || now < self.last_used.get() + window
    }

    /// Reserves a stream on the less loaded of two random connections of the best rank. `allow_suspect`
    /// includes suspect connections that are not silent. On a silent connection a write would have an unknown
    /// outcome, and a read would fail later.
    pub(super) fn reserve_stream(
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
                ConnectionState::Suspect => allow_suspect && !connection.is_silent(),
                ConnectionState::Draining
                | ConnectionState::Unresponsive
                | ConnectionState::Dead => false,
            };
            alive
                && connection.free_streams(now) > 0
                && !required.excluded_endpoints.iter().any(|excluded| connection.is_to(excluded))
                && (!required.watch
                    || self.leaves_streams_for_requests(connection, &connections, upstream))
        };
        let refusing_endpoint = match required.previous_failure {
            Some(PreviousFailure::Refusal(connection)) => Some(&connection.endpoint),
            _ => None,
        };
        let versions = match required.previous_failure {
            Some(PreviousFailure::Silence(_)) if !required.watch => PreferredVersions::default(),
            _ => required.versions,
        };
        // Lower is better.
        let rank = |connection: &Rc<Connection>| {
            let endpoint = &connection.endpoint;
            let has_refused = refusing_endpoint.is_some_and(|refusing| connection.is_to(refusing));
            let has_failed = required
                .previous_failure
                .is_some_and(|failure| Rc::ptr_eq(connection, failure.connection()));
            let has_warning = connection.has_warning_signs(now);
            let is_behind = required
                .resource_version
                .is_some_and(|(record, version)| !record.has_reached(endpoint, version));
            let (version, is_fallback) = (versions.rank_of(endpoint), endpoint.is_fallback());
            (
                endpoint.state(),
                has_failed,
                has_refused,
                version,
                is_fallback,
                is_behind,
                has_warning,
            )
        };
        let best = connections.iter().filter(eligible).map(rank).min()?;
        let ranked = || connections.iter().filter(eligible).filter(|c| rank(c) == best);
        let received_since = match required.previous_failure {
            Some(PreviousFailure::Silence(_)) => ranked()
                .map(|connection| connection.last_received())
                .max()
                .and_then(|last| last.checked_sub(RECENT_RECEIVE_WINDOW)),
            _ => None,
        };
        let candidates =
            ranked().filter(|c| received_since.is_none_or(|since| c.last_received() >= since));
        let mut rng = self.rng.borrow_mut();
        let share = |c: &&Rc<Connection>| c.endpoint.slow_start_share(now);
        let chosen = balance::pick_by_share(candidates, &mut rng, |c| c.cost(now), share)?;
        if !chosen.may_carry(required.client_subject) {
            // All connections of a class have the same subject. If a defect breaks this rule, the request
            // must not be sent with the identity of another client.
            tracing::error!(
                class = ?self.class,
                endpoint = &*chosen.endpoint.label,
                "connection not used: its certificate has another subject than the client"
            );
            debug_assert!(false, "a connection of another subject in {:?}", self.class);
            return None;
        }
        Some(chosen.reserve(required.watch, now))
    }

    /// Requests a probe of each endpoint whose response heads are slow.
    pub(super) fn probe_slow_endpoints(&self, now: Instant) {
        if now < self.slow_heads_checked.get() + SLOW_HEAD_INTERVAL {
            return;
        }
        self.slow_heads_checked.set(now);
        for connection in self.connections.borrow().iter() {
            if connection.has_slow_response_heads(SLOW_HEAD_INTERVAL, now) {
                connection.endpoint.probe.request(ProbeTrigger::PassiveEvidence);
            }
        }
    }

    /// Whether a watch may take a stream of the candidate's endpoint. Watches may take [`WATCH_SHARE`] of the
    /// streams of as many connections as may be opened.
    fn leaves_streams_for_requests(
        &self,
        candidate: &Rc<Connection>,
        connections: &[Rc<Connection>],
        upstream: &Upstream,
    ) -> bool {
        let watches: usize =
            connections.iter().filter(|c| c.is_to(&candidate.endpoint)).map(|c| c.watches()).sum();
        let capacity =
            max_connections(self.class, &upstream.config().connections) * candidate.stream_limit();
        (watches as f64) < (capacity as f64 * WATCH_SHARE).max(1.0)
    }

    /// Counts a connect to the endpoint until [`Self::connect_ended`].
    pub(super) fn connect_started(&self, label: &Arc<str>, now: Instant) {
        if longest_dial_pause(self.class).is_some() {
            let mut pauses = self.dial_pauses.borrow_mut();
            pauses.retain(|_, pause| !pause.is_over(now));
            pauses.entry(Arc::clone(label)).or_default().dialled(now);
        }
        *self.dialing.borrow_mut().entry(Arc::clone(label)).or_default() += 1;
    }

    /// Ends a connect. The entry of an endpoint is removed with its last connect, so that the map does not
    /// grow as endpoints change.
    pub(super) fn connect_ended(&self, label: &str) {
        let mut dialing = self.dialing.borrow_mut();
        if let Some(count) = dialing.get_mut(label) {
            *count -= 1;
            if *count == 0 {
                dialing.remove(label);
            }
        }
    }

    /// Until when the class makes no connect to the endpoint, if its connections there keep ending.
    pub(super) fn dial_paused_until(
        &self,
        endpoint: &Arc<Endpoint>,
        now: Instant,
    ) -> Option<Instant> {
        let pauses = self.dial_pauses.borrow();
        let next = pauses.get(&endpoint.label)?.next_at(longest_dial_pause(self.class)?)?;
        (now < next).then_some(next)
    }

    /// Forgets the recent connects to an endpoint, because the connections stay in use.
    pub(super) fn forget_dials(&self, label: &str) {
        self.dial_pauses.borrow_mut().remove(label);
    }

    pub(super) fn is_connecting(&self) -> bool {
        !self.dialing.borrow().is_empty()
    }

    /// Whether another live connection to the endpoint is within the limit.
    pub(super) fn may_add_to(
        &self,
        endpoint: &Arc<Endpoint>,
        limits: &config::Connections,
    ) -> bool {
        let connections = self.connections.borrow();
        let in_service = |c: &&Rc<Connection>| c.is_to(endpoint) && c.state().is_in_service();
        connections.iter().filter(in_service).count() + self.dialing_to(endpoint)
            < max_connections(self.class, limits)
    }

    /// Number of connects in progress to the endpoint.
    fn dialing_to(&self, endpoint: &Arc<Endpoint>) -> usize {
        self.dialing.borrow().get(&endpoint.label).copied().unwrap_or(0)
    }

    /// Whether old connections (with an older generation of the credential, or to a removed endpoint) drain
    /// now. They drain when a replacement is live, so that no request waits for one, or after
    /// [`OLD_CONNECTION_GRACE`].
    pub(super) fn may_drain_old(&self, generation: u64, now: Instant) -> bool {
        let is_current = |connection: &Rc<Connection>| {
            connection.generation == generation
                && connection.state() == ConnectionState::Live
                && connection.endpoint.state() != EndpointState::Leaving
        };
        if self.connections.borrow().iter().any(is_current) {
            self.without_current_since.set(None);
            return true;
        }
        let since = self.without_current_since.get().unwrap_or(now);
        self.without_current_since.set(Some(since));
        now >= since + OLD_CONNECTION_GRACE
    }

    /// Whether a live connection has a free stream.
    pub(super) fn has_free_stream(&self, now: Instant) -> bool {
        let connections = self.connections.borrow();
        connections.iter().any(|c| c.state() == ConnectionState::Live && c.free_streams(now) > 0)
    }

    /// Whether a connection is live.
    pub fn has_live(&self) -> bool {
        self.connections.borrow().iter().any(|c| c.state() == ConnectionState::Live)
    }

    /// Whether a live connection to the endpoint has this `generation` of the credential and is not idle after a
    /// burst.
    pub(super) fn has_current(
        &self,
        endpoint: &Arc<Endpoint>,
        generation: u64,
        now: Instant,
    ) -> bool {
        self.connections.borrow().iter().any(|c| {
            c.is_to(endpoint)
                && c.generation == generation
                && c.state() == ConnectionState::Live
                && !is_idle_after_burst(c, now)
        })
    }

    /// Whether connections to this endpoint are suspect and none is live.
    pub(super) fn only_suspect_to(&self, endpoint: &Arc<Endpoint>) -> bool {
        let connections = self.connections.borrow();
        let has = |state| connections.iter().any(|c| c.is_to(endpoint) && c.state() == state);
        has(ConnectionState::Suspect) && !has(ConnectionState::Live)
    }

    /// Whether the live connections to the endpoint have fewer free streams than a tenth of the limit of one
    /// connection. Then another connection is opened before a request has to wait.
    pub(super) fn is_nearly_full(&self, permit: &Permit, now: Instant) -> bool {
        let connection = permit.connection();
        // The second comparison implies the first, which avoids the search in most cases.
        connection.free_streams(now) * 10 < connection.stream_limit()
            && self.free_streams_to(&connection.endpoint, now) * 10 < connection.stream_limit()
    }

    /// Free streams on all live connections to the endpoint.
    fn free_streams_to(&self, endpoint: &Arc<Endpoint>, now: Instant) -> usize {
        self.connections
            .borrow()
            .iter()
            .filter(|c| c.is_to(endpoint) && c.state() == ConnectionState::Live)
            .map(|c| c.free_streams(now))
            .sum()
    }

    /// Number of connections to open to `endpoint` now, with the credential of this `generation`. The class
    /// keeps connections to `targets` endpoints, which share the waiting requests. A `warm` class keeps
    /// `limits.min` connections to each.
    pub(super) fn connections_to_open(
        &self,
        endpoint: &Arc<Endpoint>,
        generation: u64,
        limits: &config::Connections,
        (targets, warm): (usize, bool),
        now: Instant,
    ) -> usize {
        let dialing = self.dialing_to(endpoint);
        let connections = self.connections.borrow();
        // A connection that is to be replaced does not count, so that its replacement is opened.
        let current = || {
            connections
                .iter()
                .filter(|c| c.generation == generation && c.is_to(endpoint))
                .filter(|c| warm || !is_idle_after_burst(c, now))
        };
        let live = || current().filter(|c| c.state() == ConnectionState::Live);
        let stream_limit = current().map(|c| c.stream_limit()).max().unwrap_or(limits.max_streams);
        let counts = ConnectionCounts {
            live: live().count(),
            suspect: current().filter(|c| c.state() == ConnectionState::Suspect).count(),
            dialing,
            free_streams: live().map(|c| c.free_streams(now)).sum(),
            stream_limit: stream_limit.max(1),
            waiters: self.waiters.len().div_ceil(targets),
        };
        let min = if warm { limits.min } else { 1 };
        let to_open = counts.to_open(min, max_connections(self.class, limits));
        if longest_dial_pause(self.class).is_none() {
            return to_open;
        }
        let open = || connections.iter().filter(|c| c.is_to(endpoint));
        let room = UNPROVEN_WITH_DRAINING.saturating_sub(open().count() + dialing);
        if to_open > 0 && room == 0 {
            make_room(open(), now);
        }
        to_open.min(room)
    }
}
