//! The connections of one worker to one upstream: gives a request a stream, and keeps enough
//! connections open that the next one need not wait.
//!
//! Requests call [`Pool::acquire`]. Everything that opens or drains connections is in
//! [`Pool::maintain`], which compares what there is with what should be; it runs on every change,
//! on a slow tick, and when a request finds no stream.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::balance;
use super::connection::{self, Connection, Permit, Settings};
use super::credentials::{Class, Credentials};
use super::dial::dial_h2;
use super::endpoint::{ConnectFailure, Endpoint, EndpointState};
use super::health::{Life, Thresholds};
use super::rebalance::Mover;
use crate::config;
use crate::observe::Metrics;

/// How long a request waits for a usable connection while every endpoint is down. Promise 6 says
/// that it has its answer within 1.5 s.
pub(super) const UNAVAILABLE_AFTER: Duration = Duration::from_millis(1_200);
/// How long a request waits for a free stream while connections are up but full.
const EXHAUSTED_AFTER: Duration = Duration::from_secs(1);
/// Connections per endpoint for requests that have proven nothing: random tokens must not buy more.
const UNPROVEN_CONNECTIONS: usize = 2;
/// A class that nobody has configured keeps its connections for this long after its last use.
const IDLE_CLASS: Duration = Duration::from_secs(300);
/// Endpoints that such a class keeps connections to: enough to survive the loss of some.
const FANOUT: usize = 3;
/// Dials in parallel for one class and endpoint.
const PARALLEL_DIALS: usize = 4;
/// Connections heard of within this time of the last one are equally trusted.
const HEARD_LATELY: Duration = Duration::from_millis(100);
/// Slow tick of the maintenance.
const TICK: Duration = Duration::from_millis(200);
/// Share of an endpoint's streams that watches may take: the rest is for heartbeats.
const WATCH_SHARE: f64 = 0.9;

/// What all workers share of one upstream.
#[derive(Debug)]
pub struct Upstream {
    /// Its name.
    pub name: Arc<str>,
    /// The endpoints now. Replaced whole; readers never wait.
    pub endpoints: ArcSwap<Vec<Arc<Endpoint>>>,
    /// What we show it.
    pub credentials: Credentials,
    /// Limits and thresholds. Replaced whole by a reload; see [`Self::config`].
    pub config: ArcSwap<config::Upstream>,
    /// Where things are counted.
    pub metrics: Arc<Metrics>,
}

impl Upstream {
    /// Limits and thresholds now. Load it once for each decision: a reload may swap it in between.
    pub fn config(&self) -> Guard<Arc<config::Upstream>> {
        self.config.load()
    }

    /// Thresholds of its connections.
    pub fn settings(&self) -> Settings {
        let config = self.config();
        Settings {
            thresholds: Thresholds {
                ping_interval: config.health.ping_interval,
                suspect_after: config.health.suspect_after,
                dead_after: config.health.dead_after,
            },
            max_streams: config.connections.max_streams,
        }
    }

    /// Whether any endpoint is usable.
    pub fn is_usable(&self) -> bool {
        self.endpoints.load().iter().any(|endpoint| endpoint.is_usable())
    }
}

/// What a request needs of the connection that it gets.
#[derive(Debug, Clone, Copy, Default)]
pub struct Need<'a> {
    /// It is a watch: it keeps its stream for long.
    pub watch: bool,
    /// Where it has just failed, and how.
    pub after: Option<After<'a>>,
    /// Endpoints that will not do.
    pub shun: &'a [Arc<Endpoint>],
}

/// A connection that has just failed a request.
#[derive(Debug, Clone, Copy)]
pub enum After<'a> {
    /// It fell silent or was lost. Others may have with it, so rather one that was heard of
    /// lately, wherever it goes.
    Silence(&'a Rc<Connection>),
    /// Its server refused the request: rather another server.
    Refusal(&'a Rc<Connection>),
}

impl After<'_> {
    fn connection(&self) -> &Rc<Connection> {
        match self {
            Self::Silence(connection) | Self::Refusal(connection) => connection,
        }
    }
}

/// Why a request got no stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unavailable {
    /// No endpoint can be reached: why, for each.
    Unreachable(String),
    /// Connections are up, but every stream of them is taken.
    Exhausted,
    /// The identity of the class is not loaded.
    NoCredential,
}

/// The pool of one worker for one upstream. Lives on its thread.
pub struct Pool {
    upstream: Arc<Upstream>,
    classes: RefCell<HashMap<Class, Rc<ClassPool>>>,
    changed: Rc<Notify>,
    this: Weak<Self>,
    /// Orders the endpoints differently on every node, so that nodes spread.
    seed: u64,
}

/// The connections of one class.
pub struct ClassPool {
    class: Class,
    connections: RefCell<Vec<Rc<Connection>>>,
    dialing: RefCell<HashMap<Arc<str>, usize>>,
    waiters: Cell<usize>,
    used: Cell<Instant>,
    rng: RefCell<fastrand::Rng>,
    mover: RefCell<Mover>,
}

impl Pool {
    /// A pool without connections; spawn [`Self::run`] to fill it.
    pub fn new(upstream: Arc<Upstream>) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            upstream,
            classes: RefCell::default(),
            changed: Rc::new(Notify::new()),
            this: this.clone(),
            seed: fastrand::u64(..),
        })
    }

    /// The upstream it serves.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The connections of a class.
    pub fn class(&self, class: Class) -> Rc<ClassPool> {
        let mut classes = self.classes.borrow_mut();
        Rc::clone(classes.entry(class).or_insert_with(|| {
            Rc::new(ClassPool {
                class,
                connections: RefCell::default(),
                dialing: RefCell::default(),
                waiters: Cell::new(0),
                used: Cell::new(Instant::now()),
                rng: RefCell::default(),
                mover: RefCell::new(Mover::new(Instant::now())),
            })
        }))
    }

    /// Gives a stream on the best connection, or opens one and waits for it.
    ///
    /// # Errors
    /// Why there is none, after all that could be tried was tried.
    pub async fn acquire(
        &self,
        class: &Rc<ClassPool>,
        need: Need<'_>,
    ) -> Result<Permit, Unavailable> {
        let now = Instant::now();
        class.used.set(now);
        if let Some(permit) = class.take(need, &self.upstream, now, false) {
            if class.is_tight(&permit, now) {
                self.maintain();
            }
            return Ok(permit);
        }
        // Boxed, so that no other request carries room for it.
        Box::pin(self.wait(class, need, now)).await
    }

    /// A stream on a live connection, if one is there now.
    pub fn try_acquire(&self, class: &Rc<ClassPool>, need: Need<'_>) -> Option<Permit> {
        class.take(need, &self.upstream, Instant::now(), false)
    }

    #[cold]
    async fn wait(
        &self,
        class: &Rc<ClassPool>,
        need: Need<'_>,
        start: Instant,
    ) -> Result<Permit, Unavailable> {
        if self.upstream.credentials.tls(class.class).is_none() {
            return Err(Unavailable::NoCredential);
        }
        self.upstream.metrics.stream_waits(&self.upstream.name).increment(1);
        let _waiting = Waiting::new(&class.waiters);
        loop {
            // Registered before the look, so that no change falls between look and wait.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            self.maintain();
            let now = Instant::now();
            if let Some(permit) = class.take(need, &self.upstream, now, false) {
                return Ok(permit);
            }
            let connected = class.has_live();
            let limit = if connected { EXHAUSTED_AFTER } else { UNAVAILABLE_AFTER };
            let given_up = !connected && self.all_failed_since(class, start);
            if given_up || now >= start + limit {
                // The least bad one: health never makes things worse than no health.
                if let Some(permit) = class.take(need, &self.upstream, now, true) {
                    return Ok(permit);
                }
                if connected {
                    self.upstream.metrics.streams_exhausted(&self.upstream.name).increment(1);
                    return Err(Unavailable::Exhausted);
                }
                return Err(Unavailable::Unreachable(self.reasons()));
            }
            let _ = timeout_at((start + limit).min(now + TICK), changed).await;
        }
    }

    /// Keeps the pool as it should be until it is dropped.
    pub async fn run(this: Rc<Self>) {
        loop {
            let changed = Rc::clone(&this.changed);
            let tick = Instant::now() + TICK.mul_f64(0.75 + fastrand::f64() / 2.0);
            tokio::select! {
                () = changed.notified() => {}
                () = sleep_until(tick) => {}
            }
            this.maintain();
        }
    }

    /// Closes every connection; the streams on them fail.
    pub fn close(&self) {
        for class in self.classes.borrow().values() {
            for connection in class.connections.borrow().iter() {
                connection.close("shutdown");
            }
        }
    }

    /// Compares what there is with what should be: drains what is old, forgets what is dead, opens
    /// what is missing. Waits for nothing.
    pub fn maintain(&self) {
        let now = Instant::now();
        let endpoints = self.upstream.endpoints.load();
        let alone = !endpoints.iter().any(|endpoint| endpoint.is_usable());
        for slot in 0..self.upstream.credentials.slots().len() {
            let class = Class::Identity(slot);
            if self.upstream.credentials.tls(class).is_some() {
                let _ = self.class(class);
            }
        }
        let classes: Vec<_> = self.classes.borrow().values().cloned().collect();
        for class in classes {
            self.maintain_class(&class, &endpoints, alone, now);
        }
    }

    fn maintain_class(
        &self,
        class: &Rc<ClassPool>,
        endpoints: &[Arc<Endpoint>],
        alone: bool,
        now: Instant,
    ) {
        let Some(tls) = self.upstream.credentials.tls(class.class) else { return };
        class.connections.borrow_mut().retain(|c| c.life() != Life::Dead);
        let moves = self.upstream.config().rebalance;
        class.mover.borrow_mut().turn(&class.connections.borrow(), moves, now);
        let configured = matches!(class.class, Class::Identity(_));
        for connection in class.connections.borrow().iter() {
            if connection.generation != tls.generation {
                connection.drain("certificate rotated");
            } else if connection.endpoint.state() == EndpointState::Leaving {
                connection.drain("endpoint removed");
            } else if connection.endpoint.state() == EndpointState::Degraded {
                connection.unwell();
            } else if !configured
                && connection.idle_since().is_some_and(|since| now >= since + IDLE_CLASS)
            {
                connection.drain(connection::IDLE);
            }
        }
        let in_use = class.waiters.get() > 0 || now < class.used.get() + IDLE_CLASS;
        if !configured && !in_use {
            return;
        }
        let chosen = self.chosen(endpoints, configured);
        let targets = chosen.len().max(1);
        for endpoint in chosen {
            let missing =
                class.missing(endpoint, &self.upstream.config().connections, targets, now);
            for _ in 0..missing {
                if !endpoint.may_connect(alone, now) {
                    break;
                }
                self.dial(class, endpoint, &tls);
            }
        }
    }

    /// The endpoints that a class keeps connections to: all of them for a configured identity,
    /// else the best few, in an order that differs from node to node.
    fn chosen<'a>(
        &self,
        endpoints: &'a [Arc<Endpoint>],
        configured: bool,
    ) -> Vec<&'a Arc<Endpoint>> {
        let mut chosen: Vec<_> =
            endpoints.iter().filter(|e| e.state() != EndpointState::Leaving).collect();
        if !configured && chosen.len() > FANOUT {
            chosen.sort_by_key(|e| (e.state(), self.rank(&e.label)));
            chosen.truncate(FANOUT);
        }
        chosen
    }

    fn rank(&self, label: &str) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.seed.hash(&mut hasher);
        label.hash(&mut hasher);
        hasher.finish()
    }

    fn dial(
        &self,
        class: &Rc<ClassPool>,
        endpoint: &Arc<Endpoint>,
        tls: &Arc<super::credentials::ClientTls>,
    ) {
        let Some(pool) = self.this.upgrade() else { return };
        let (class, endpoint, tls) = (Rc::clone(class), Arc::clone(endpoint), Arc::clone(tls));
        *class.dialing.borrow_mut().entry(Arc::clone(&endpoint.label)).or_default() += 1;
        tokio::task::spawn_local(async move {
            let limit = endpoint.connect_timeout(pool.upstream.config().health.connect_timeout);
            let result = dial_h2(&endpoint, &tls.h2, limit).await;
            if let Some(count) = class.dialing.borrow_mut().get_mut(&endpoint.label) {
                *count -= 1;
            }
            match result {
                Ok(established) => {
                    endpoint.metrics.dialled("ok");
                    let serial = tls.certificate.as_ref().map(|info| info.serial.clone());
                    let connection = Connection::start(
                        established,
                        &endpoint,
                        class.class,
                        (tls.generation, serial),
                        &pool.upstream.settings(),
                        Rc::clone(&pool.changed),
                    );
                    class.connections.borrow_mut().push(connection);
                }
                Err(failure) => {
                    note_failure(&endpoint, &failure);
                    endpoint.connect_failed(failure, Instant::now());
                }
            }
            pool.changed.notify_waiters();
        });
    }

    /// Whether every endpoint has failed a connect since `start` and none is being tried.
    fn all_failed_since(&self, class: &ClassPool, start: Instant) -> bool {
        let endpoints = self.upstream.endpoints.load();
        class.dialing.borrow().values().all(|&count| count == 0)
            && endpoints
                .iter()
                .all(|endpoint| endpoint.last_failure().is_some_and(|failed| failed > start))
    }

    fn reasons(&self) -> String {
        let endpoints = self.upstream.endpoints.load();
        let mut reasons: Vec<_> = endpoints
            .iter()
            .take(5)
            .map(|e| format!("{} is {} ({})", e.label, e.state().as_str(), e.reason()))
            .collect();
        if endpoints.len() > 5 {
            reasons.push(format!("and {} more", endpoints.len() - 5));
        }
        reasons.join("; ")
    }
}

/// Counts and logs a failed connect. The first one shows up as an ejection as well; a repeat is
/// worth a line only for who looks for it.
pub fn note_failure(endpoint: &Endpoint, failure: &ConnectFailure) {
    let (outcome, why) = match failure {
        ConnectFailure::Refused(why) => ("failed", why),
        ConnectFailure::Slow(why) => ("timeout", why),
        ConnectFailure::NoH2(why) => ("no_h2", why),
    };
    endpoint.metrics.dialled(outcome);
    tracing::debug!(endpoint = %endpoint.label, reason = %why, "connect failed");
}

impl ClassPool {
    /// Its class.
    pub fn class(&self) -> Class {
        self.class
    }

    /// Takes a stream on the better of two connections of the best tier. `desperate` takes a
    /// suspect one too.
    fn take(
        &self,
        need: Need<'_>,
        upstream: &Upstream,
        now: Instant,
        desperate: bool,
    ) -> Option<Permit> {
        let connections = self.connections.borrow();
        let eligible = |connection: &&Rc<Connection>| {
            let alive = match connection.life() {
                Life::Live => true,
                Life::Suspect => desperate,
                Life::Draining | Life::Dead => false,
            };
            alive
                && connection.free(now) > 0
                && !need.shun.iter().any(|shunned| Arc::ptr_eq(shunned, &connection.endpoint))
                && (!need.watch || self.leaves_room(connection, &connections, upstream))
        };
        let refused = match need.after {
            Some(After::Refusal(connection)) => Some(&connection.endpoint),
            _ => None,
        };
        let rank = |connection: &Rc<Connection>| {
            let refused = refused.is_some_and(|there| Arc::ptr_eq(there, &connection.endpoint));
            // The same one only where there is no other: it lives, and one stream of it failed.
            let same = need.after.is_some_and(|a| Rc::ptr_eq(connection, a.connection()));
            (connection.endpoint.state(), same, refused, connection.is_doubtful(now))
        };
        let best = connections.iter().filter(eligible).map(rank).min()?;
        let ranked = || connections.iter().filter(eligible).filter(|c| rank(c) == best);
        let heard_since = match need.after {
            Some(After::Silence(_)) => ranked()
                .map(|connection| connection.heard())
                .max()
                .and_then(|last| last.checked_sub(HEARD_LATELY)),
            _ => None,
        };
        let candidates = ranked().filter(|c| heard_since.is_none_or(|since| c.heard() >= since));
        let mut rng = self.rng.borrow_mut();
        let lot = rng.f64();
        let chosen = balance::pick(candidates, &mut rng, |c| c.cost(now, lot))?;
        Some(chosen.reserve(need.watch, now))
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

    fn most(&self, limits: &config::Connections) -> usize {
        match self.class {
            Class::Identity(_) | Class::Token => limits.max,
            Class::UnprovenToken | Class::Anonymous | Class::Probe => {
                UNPROVEN_CONNECTIONS.min(limits.max)
            }
        }
    }

    fn has_live(&self) -> bool {
        self.connections.borrow().iter().any(|c| c.life() == Life::Live)
    }

    /// Whether the endpoint that has just given a stream is nearly full, so that the next
    /// connection should be opened before somebody has to wait for it.
    fn is_tight(&self, permit: &Permit, now: Instant) -> bool {
        let connection = permit.connection();
        connection.free(now) * 10 < connection.cap()
            && self.free_on(&connection.endpoint, now) * 10 < connection.cap()
    }

    fn free_on(&self, endpoint: &Arc<Endpoint>, now: Instant) -> usize {
        self.connections
            .borrow()
            .iter()
            .filter(|c| Arc::ptr_eq(&c.endpoint, endpoint) && c.life() == Life::Live)
            .map(|c| c.free(now))
            .sum()
    }

    /// How many connections to open now.
    fn missing(
        &self,
        endpoint: &Arc<Endpoint>,
        limits: &config::Connections,
        targets: usize,
        now: Instant,
    ) -> usize {
        let dialing = self.dialing.borrow().get(&endpoint.label).copied().unwrap_or(0);
        let connections = self.connections.borrow();
        let mine = || connections.iter().filter(|c| Arc::ptr_eq(&c.endpoint, endpoint));
        let counts = Counts {
            live: mine().filter(|c| c.life() == Life::Live).count(),
            suspect: mine().filter(|c| c.life() == Life::Suspect).count(),
            // What drains is on its way out, and must not keep its replacement out.
            total: mine().filter(|c| matches!(c.life(), Life::Live | Life::Suspect)).count(),
            dialing,
            free: mine().filter(|c| c.life() == Life::Live).map(|c| c.free(now)).sum(),
            cap: mine().map(|c| c.cap()).max().unwrap_or(limits.max_streams).max(1),
            waiters: self.waiters.get().div_ceil(targets),
        };
        let min = if matches!(self.class, Class::Identity(_)) { limits.min } else { 1 };
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
struct Waiting<'a>(&'a Cell<usize>);

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
