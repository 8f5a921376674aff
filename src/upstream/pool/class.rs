//! The connections of one class: which of them a request gets, and how many more are needed.
//!
//! Nothing here opens or closes a connection; the pool above does, by what [`ClassPool::missing`]
//! says.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::config;
use crate::net::tls::certificate::Subject;
use crate::upstream::balance;
use crate::upstream::connection::{Connection, Permit};
use crate::upstream::credentials::CredentialClass;
use crate::upstream::endpoint::{Endpoint, EndpointState};
use crate::upstream::evacuation::ActiveEvacuations;
use crate::upstream::health::ConnectionState;
use crate::upstream::rebalance::Rebalancer;
use crate::upstream::shared::Upstream;

/// Connections per endpoint for requests that have proven nothing, of each worker: random tokens
/// must not buy more.
const UNPROVEN_CONNECTIONS: usize = 2;
/// What is old (another certificate, an endpoint that was removed) is used for this long where
/// nothing new comes up.
const OLD_FOR: Duration = Duration::from_secs(5);
/// Dials in parallel for one class and endpoint.
const PARALLEL_DIALS: usize = 4;
/// Connections heard of within this time of the last one are equally trusted.
const HEARD_LATELY: Duration = Duration::from_millis(100);
/// Pause between two looks for requests that wait: one that has waited for a whole pause, where an
/// answer usually takes a fraction of it, is a sign.
const WAIT_LOOK: Duration = Duration::from_millis(200);
/// Share of an endpoint's streams that watches may take: the rest is for heartbeats.
const WATCH_SHARE: f64 = 0.9;

/// What a request needs of the connection that it gets.
#[derive(Debug, Clone, Copy)]
pub struct StreamRequirements<'a> {
    /// It is a watch: it keeps its stream for long.
    pub watch: bool,
    /// Where it has just failed, and how.
    pub previous_failure: Option<PreviousFailure<'a>>,
    /// Endpoints that will not do.
    pub excluded_endpoints: &'a [Arc<Endpoint>],
    /// Since when it has had no connection that works, if that is longer than it asks for one.
    pub without_connection_since: Option<Instant>,
    /// It is held by its caller during a total outage: it does not wait here for the end of one.
    pub held: bool,
    /// It waits on a connection that is in trouble, and another such one would help it no more.
    pub live_only: bool,
    /// The subject that its client has proven, where it goes upstream with a certificate.
    pub client_subject: Option<&'a Subject>,
}

impl<'a> StreamRequirements<'a> {
    /// That of a request whose client has proven this subject, and of nothing else. There is no default,
    /// so that no place is asked for without saying whose request it is for.
    pub fn for_client(client_subject: Option<&'a Subject>) -> Self {
        Self {
            watch: false,
            held: false,
            previous_failure: None,
            excluded_endpoints: &[],
            without_connection_since: None,
            live_only: false,
            client_subject,
        }
    }
}

/// A connection that has just failed a request.
#[derive(Debug, Clone, Copy)]
pub enum PreviousFailure<'a> {
    /// It fell silent or was lost. Others may have with it, so rather one that was heard of
    /// lately, wherever it goes.
    Silence(&'a Rc<Connection>),
    /// Its server refused the request: rather another server.
    Refusal(&'a Rc<Connection>),
}

impl PreviousFailure<'_> {
    /// Since when that connection had not worked.
    pub fn suspect_since(&self) -> Option<Instant> {
        self.connection().suspect_since()
    }

    fn connection(&self) -> &Rc<Connection> {
        match self {
            Self::Silence(connection) | Self::Refusal(connection) => connection,
        }
    }
}

/// The connections of one class.
pub struct ClassPool {
    pub(super) class: CredentialClass,
    pub(super) connections: RefCell<Vec<Rc<Connection>>>,
    pub(super) dialing: RefCell<HashMap<Arc<str>, usize>>,
    waiters: Cell<usize>,
    /// Watches that are held until something can be reached.
    held: Cell<usize>,
    pub(super) used: Cell<Instant>,
    /// Since when nothing is live that has a future here.
    without_new: Cell<Option<Instant>>,
    rng: RefCell<fastrand::Rng>,
    pub(super) rebalancer: RefCell<Rebalancer>,
    pub(super) evacuations: RefCell<ActiveEvacuations>,
    looked: Cell<Instant>,
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
            without_new: Cell::new(None),
            rng: RefCell::default(),
            rebalancer: RefCell::new(Rebalancer::new(now)),
            evacuations: RefCell::default(),
            looked: Cell::new(now),
        }
    }

    /// Its class.
    pub fn class(&self) -> CredentialClass {
        self.class
    }

    /// Counts one who waits for a stream, until it is dropped.
    pub(super) fn wait(&self) -> Waiting<'_> {
        Waiting::new(&self.waiters)
    }

    /// Counts a watch that is held, until it is dropped. It asks for a stream when something can be
    /// reached, each at its own moment; until then one connection is enough for all.
    pub(super) fn hold(&self) -> Waiting<'_> {
        Waiting::new(&self.held)
    }

    /// Watches that are held.
    pub(super) fn held(&self) -> usize {
        self.held.get()
    }

    /// Whether a request waits, a watch is held, or one asked within the last `window`.
    pub(super) fn used_since(&self, now: Instant, window: Duration) -> bool {
        self.waiters.get() > 0 || self.held.get() > 0 || now < self.used.get() + window
    }

    /// Takes a stream on the better of two connections of the best tier. `desperate` takes a
    /// suspect one too, but for those that are dark: nobody could say of a write that was sent
    /// there whether it was carried out, and a read would only fail later.
    pub(super) fn take(
        &self,
        need: StreamRequirements<'_>,
        upstream: &Upstream,
        now: Instant,
        desperate: bool,
    ) -> Option<Permit> {
        let connections = self.connections.borrow();
        let eligible = |connection: &&Rc<Connection>| {
            let alive = match connection.state() {
                ConnectionState::Live => true,
                ConnectionState::Suspect => desperate && !connection.path_unresponsive(),
                ConnectionState::Draining
                | ConnectionState::Unresponsive
                | ConnectionState::Dead => false,
            };
            alive
                && connection.free(now) > 0
                && !need
                    .excluded_endpoints
                    .iter()
                    .any(|shunned| Arc::ptr_eq(shunned, &connection.endpoint))
                && (!need.watch || self.leaves_room(connection, &connections, upstream))
        };
        let refused = match need.previous_failure {
            Some(PreviousFailure::Refusal(connection)) => Some(&connection.endpoint),
            _ => None,
        };
        let rank = |connection: &Rc<Connection>| {
            let refused = refused.is_some_and(|there| Arc::ptr_eq(there, &connection.endpoint));
            // The same one only where there is no other: it lives, and one stream of it failed.
            let same =
                need.previous_failure.is_some_and(|a| Rc::ptr_eq(connection, a.connection()));
            let endpoint = &connection.endpoint;
            let doubtful = connection.has_warning_signs(now);
            (endpoint.state(), same, refused, endpoint.is_fallback(), doubtful)
        };
        let best = connections.iter().filter(eligible).map(rank).min()?;
        let ranked = || connections.iter().filter(eligible).filter(|c| rank(c) == best);
        let heard_since = match need.previous_failure {
            Some(PreviousFailure::Silence(_)) => ranked()
                .map(|connection| connection.last_received())
                .max()
                .and_then(|last| last.checked_sub(HEARD_LATELY)),
            _ => None,
        };
        let candidates =
            ranked().filter(|c| heard_since.is_none_or(|since| c.last_received() >= since));
        let mut rng = self.rng.borrow_mut();
        let lot = rng.f64();
        let chosen = balance::pick(candidates, &mut rng, |c| c.cost(now, lot))?;
        if !chosen.may_carry(need.client_subject) {
            // A class has one subject, so this cannot be; if it is, no request may go there.
            tracing::error!(
                class = ?self.class,
                endpoint = &*chosen.endpoint.label,
                "connection refused to a request: it shows another subject than the client has proven"
            );
            debug_assert!(false, "a connection of another subject in {:?}", self.class);
            return None;
        }
        Some(chosen.reserve(need.watch, now))
    }

    /// Passive evidence: where the head of a request stays away for longer than is usual there, the
    /// endpoint is asked how it is.
    pub(super) fn look_for_waits(&self, now: Instant) {
        if now < self.looked.get() + WAIT_LOOK {
            return;
        }
        self.looked.set(now);
        for connection in self.connections.borrow().iter() {
            if connection.has_slow_response_heads(WAIT_LOOK, now) {
                connection.endpoint.request_probe();
            }
        }
    }

    /// Whether a watch may take a stream of this endpoint: a tenth of them is kept for requests
    /// that end.
    fn leaves_room(
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
        let capacity = self.most(&upstream.config().connections) * candidate.cap();
        (watches as f64) < (capacity as f64 * WATCH_SHARE).max(1.0)
    }

    /// A dial has ended. What is not being dialled has no entry: endpoints come and go.
    pub(super) fn dialled(&self, label: &str) {
        let mut dialing = self.dialing.borrow_mut();
        if let Some(count) = dialing.get_mut(label) {
            *count -= 1;
            if *count == 0 {
                dialing.remove(label);
            }
        }
    }

    fn most(&self, limits: &config::Connections) -> usize {
        match self.class {
            CredentialClass::Identity(_) | CredentialClass::Token => limits.max,
            CredentialClass::UnprovenToken
            | CredentialClass::Anonymous
            | CredentialClass::Probe
            | CredentialClass::Discovery => UNPROVEN_CONNECTIONS.min(limits.max),
        }
    }

    /// Whether what is old (another generation of the credential, an endpoint that was removed) is
    /// to be left: as soon as something new is live, so that nobody waits for it, and soon in any
    /// case.
    pub(super) fn may_leave_old(&self, generation: u64, now: Instant) -> bool {
        let new = |connection: &Rc<Connection>| {
            connection.generation == generation
                && connection.state() == ConnectionState::Live
                && connection.endpoint.state() != EndpointState::Leaving
        };
        if self.connections.borrow().iter().any(new) {
            self.without_new.set(None);
            return true;
        }
        let since = self.without_new.get().unwrap_or(now);
        self.without_new.set(Some(since));
        now >= since + OLD_FOR
    }

    pub(super) fn has_live(&self) -> bool {
        self.connections.borrow().iter().any(|c| c.state() == ConnectionState::Live)
    }

    /// Whether it has connections to this endpoint, and none of them answers.
    pub(super) fn is_silent(&self, endpoint: &Arc<Endpoint>) -> bool {
        let connections = self.connections.borrow();
        let mut lives = connections
            .iter()
            .filter(|c| Arc::ptr_eq(&c.endpoint, endpoint))
            .map(|c| c.state())
            .filter(|life| matches!(life, ConnectionState::Live | ConnectionState::Suspect))
            .peekable();
        lives.peek().is_some() && lives.all(|life| life == ConnectionState::Suspect)
    }

    /// Whether the endpoint that has just given a stream is nearly full, so that the next
    /// connection should be opened before somebody has to wait for it.
    pub(super) fn is_tight(&self, permit: &Permit, now: Instant) -> bool {
        let connection = permit.connection();
        connection.free(now) * 10 < connection.cap()
            && self.free_on(&connection.endpoint, now) * 10 < connection.cap()
    }

    fn free_on(&self, endpoint: &Arc<Endpoint>, now: Instant) -> usize {
        self.connections
            .borrow()
            .iter()
            .filter(|c| Arc::ptr_eq(&c.endpoint, endpoint) && c.state() == ConnectionState::Live)
            .map(|c| c.free(now))
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
            // What drains is on its way out, and must not keep its replacement out.
            total: mine()
                .filter(|c| matches!(c.state(), ConnectionState::Live | ConnectionState::Suspect))
                .count(),
            dialing,
            free: mine().filter(|c| c.state() == ConnectionState::Live).map(|c| c.free(now)).sum(),
            cap: mine().map(|c| c.cap()).max().unwrap_or(limits.max_streams).max(1),
            waiters: self.waiters.get().div_ceil(targets),
        };
        let min = if matches!(self.class, CredentialClass::Identity(_)) { limits.min } else { 1 };
        counts.missing(min, self.most(limits))
    }
}

/// The connections of one class to one endpoint, in numbers.
#[derive(Debug, Clone, Copy)]
struct Counts {
    live: usize,
    suspect: usize,
    total: usize,
    dialing: usize,
    free: usize,
    cap: usize,
    waiters: usize,
}

impl Counts {
    /// How many more to open: up to the minimum, one for a suspect, and enough streams for those
    /// who wait, plus a tenth of a connection in reserve.
    fn missing(&self, min: usize, max: usize) -> usize {
        let mut want = min.saturating_sub(self.live);
        // More than half suspect: the endpoint is in trouble, not a flow; its fresh connects are
        // left to the backoff, one at a time.
        if self.suspect > 0 && self.live == 0 {
            want = want.max(1);
        }
        if self.suspect * 2 > self.total {
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
            .min(max.saturating_sub(self.total + self.dialing))
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
