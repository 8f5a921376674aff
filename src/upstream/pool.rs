//! The connections of one worker to one upstream: gives a request a stream, and keeps enough
//! connections open that the next one need not wait.
//!
//! Requests call [`Pool::acquire`]. Everything that opens or drains connections is in
//! [`Pool::maintain`], which compares what there is with what should be; it runs on every change,
//! on a slow tick, and when a request finds no stream. [`class`] knows what there is and should be.

mod class;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout_at};

pub use self::class::{ClassPool, PreviousFailure, StreamRequirements};
use super::connection::{self, Connection, Permit};
use super::credentials::CredentialClass;
use super::dial::dial_h2;
use super::endpoint::{Endpoint, EndpointState};
use super::evacuation::{Evacuation, evacuations};
use super::health::ConnectionState;
use super::outage::{Outage, READY_FOR, Reachable};
use super::shared::Upstream;

/// How long a request waits for a usable connection while every endpoint is down, from the moment
/// that it is without one. Promise 6 says that it has its answer within 1.5 s.
pub(super) const UNAVAILABLE_AFTER: Duration = Duration::from_millis(1_200);
/// How long a request waits for a free stream while connections are up but full.
const EXHAUSTED_AFTER: Duration = Duration::from_secs(1);
/// A class that nobody has configured keeps its connections for this long after its last use.
const IDLE_CLASS: Duration = Duration::from_secs(300);
/// Endpoints that such a class keeps connections to: enough to survive the loss of some.
const FANOUT: usize = 3;
/// Slow tick of the maintenance.
const TICK: Duration = Duration::from_millis(200);

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
    classes: RefCell<BTreeMap<CredentialClass, Rc<ClassPool>>>,
    changed: Rc<Notify>,
    outage: Cell<Outage>,
    /// An outage is over.
    returned: Notify,
    this: Weak<Self>,
    /// Orders the endpoints differently on every node, so that nodes spread.
    seed: u64,
    /// It is there for requests of ours: it keeps no connections for configured identities.
    ours: bool,
    /// Nothing is opened any more.
    closed: Cell<bool>,
}

impl Pool {
    /// A pool without connections; spawn [`Self::run`] to fill it.
    pub fn new(upstream: Arc<Upstream>) -> Rc<Self> {
        Self::create(upstream, false)
    }

    /// A pool for a few requests of our own, which keeps one connection while it is in use.
    pub fn for_internal_requests(upstream: Arc<Upstream>) -> Rc<Self> {
        Self::create(upstream, true)
    }

    fn create(upstream: Arc<Upstream>, ours: bool) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            upstream,
            classes: RefCell::default(),
            changed: Rc::new(Notify::new()),
            outage: Cell::default(),
            returned: Notify::new(),
            this: this.clone(),
            seed: fastrand::u64(..),
            ours,
            closed: Cell::new(false),
        })
    }

    /// The upstream it serves.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The connections of a class.
    pub fn class(&self, class: CredentialClass) -> Rc<ClassPool> {
        let mut classes = self.classes.borrow_mut();
        Rc::clone(
            classes.entry(class).or_insert_with(|| Rc::new(ClassPool::new(class, Instant::now()))),
        )
    }

    /// Gives a stream on the best connection, or opens one and waits for it.
    ///
    /// # Errors
    /// Why there is none, after all that could be tried was tried.
    pub async fn acquire(
        &self,
        class: &Rc<ClassPool>,
        need: StreamRequirements<'_>,
    ) -> Result<Permit, Unavailable> {
        let now = Instant::now();
        class.used.set(now);
        if need.held && self.is_total_outage() {
            return Err(Unavailable::Unreachable(self.reasons(class)));
        }
        if let Some(permit) = class.take(need, &self.upstream, now, false) {
            if class.is_tight(&permit, now) {
                self.maintain();
            }
            return Ok(permit);
        }
        // Boxed, so that no other request carries room for it.
        Box::pin(self.wait(class, need, now)).await
    }

    /// Whether a total outage lasts. Cheap.
    pub fn is_total_outage(&self) -> bool {
        self.outage.get().lasts()
    }

    /// Waits until a total outage is over. Connections of the class are tried all the time: one
    /// attempt for each endpoint, however many wait ([`Endpoint::claim_connect_attempt`]).
    pub async fn outage_ended(&self, class: &ClassPool) {
        let _held = class.hold();
        loop {
            let mut returned = std::pin::pin!(self.returned.notified());
            // Registered before the look, so that it cannot end in between.
            returned.as_mut().enable();
            if !self.is_total_outage() {
                return;
            }
            returned.await;
        }
    }

    /// A stream on a live connection, if one is there now.
    pub fn try_acquire(
        &self,
        class: &Rc<ClassPool>,
        need: StreamRequirements<'_>,
    ) -> Option<Permit> {
        class.take(need, &self.upstream, Instant::now(), false)
    }

    #[cold]
    async fn wait(
        &self,
        class: &Rc<ClassPool>,
        need: StreamRequirements<'_>,
        start: Instant,
    ) -> Result<Permit, Unavailable> {
        if self.upstream.credentials.tls(class.class).is_none() {
            return Err(Unavailable::NoCredential);
        }
        self.upstream.metrics.stream_waits(&self.upstream.name).increment(1);
        let _waiting = class.wait();
        let without = need.without_connection_since.map_or(start, |since| since.min(start));
        loop {
            // Registered before the look, so that no change falls between look and wait.
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            self.maintain();
            let now = Instant::now();
            if need.held && self.is_total_outage() {
                return Err(Unavailable::Unreachable(self.reasons(class)));
            }
            if let Some(permit) = class.take(need, &self.upstream, now, false) {
                return Ok(permit);
            }
            if self.closed.get() {
                let why = "the upstream is configured no longer".to_owned();
                return Err(Unavailable::Unreachable(why));
            }
            let connected = class.has_live();
            let until =
                if connected { start + EXHAUSTED_AFTER } else { without + UNAVAILABLE_AFTER };
            let given_up = !connected && self.all_failed_since(class, without);
            if given_up || now >= until {
                // The least bad one: health never makes things worse than no health.
                if !need.live_only
                    && let Some(permit) = class.take(need, &self.upstream, now, true)
                {
                    return Ok(permit);
                }
                if connected {
                    self.upstream.metrics.streams_exhausted(&self.upstream.name).increment(1);
                    return Err(Unavailable::Exhausted);
                }
                return Err(Unavailable::Unreachable(self.reasons(class)));
            }
            let _ = timeout_at(until.min(now + TICK), changed).await;
        }
    }

    /// Keeps the pool as it should be until it is dropped.
    pub async fn run(this: Rc<Self>) {
        loop {
            let changed = Rc::clone(&this.changed);
            let tick = Instant::now() + TICK.mul_f64(0.75 + fastrand::f64() / 2.0);
            tokio::select! {
                () = changed.notified() => {}
                () = this.upstream.endpoints_changed.notified() => {}
                () = sleep_until(tick) => {}
            }
            this.maintain();
        }
    }

    /// Closes every connection, for good; the streams on them fail.
    pub fn close(&self) {
        self.closed.set(true);
        for class in self.classes.borrow().values() {
            for connection in class.connections.borrow().iter() {
                connection.close(connection::RETIRED);
            }
        }
        self.changed.notify_waiters();
    }

    /// Compares what there is with what should be: drains what is old, forgets what is dead, opens
    /// what is missing. Waits for nothing.
    pub fn maintain(&self) {
        if self.closed.get() {
            return;
        }
        let now = Instant::now();
        let endpoints = self.upstream.endpoints();
        let alone = !endpoints.iter().any(|endpoint| endpoint.is_usable());
        self.note_outage(&endpoints, alone, now);
        // A pool of our own keeps none for configured identities.
        let loaded = if self.ours { Vec::new() } else { self.upstream.credentials.loaded() };
        for class in loaded {
            let _ = self.class(class);
        }
        let leave = evacuations(&endpoints);
        let classes: Vec<_> = self.classes.borrow().values().cloned().collect();
        for class in classes {
            self.maintain_class(&class, &endpoints, &leave, alone, now);
        }
    }

    fn note_outage(&self, endpoints: &[Arc<Endpoint>], alone: bool, now: Instant) {
        let ready = |endpoint: &Arc<Endpoint>| {
            endpoint.ready_for(now).is_some_and(|ready| ready >= READY_FOR)
        };
        let reachable = if alone {
            Reachable::Nothing
        } else if endpoints.iter().any(ready) {
            Reachable::Ready
        } else {
            Reachable::Unready
        };
        let mut outage = self.outage.get();
        let over = outage.note(reachable, now);
        self.outage.set(outage);
        let Some(lasted) = over else { return };
        let held: usize = self.classes.borrow().values().map(|class| class.held()).sum();
        if held > 0 {
            tracing::info!(
                upstream = &*self.upstream.name,
                outage_ms = lasted.as_millis() as u64,
                held,
                "an apiserver is reachable again: held watches go on"
            );
        }
        self.returned.notify_waiters();
    }

    fn maintain_class(
        &self,
        class: &Rc<ClassPool>,
        endpoints: &[Arc<Endpoint>],
        leave: &[Evacuation],
        alone: bool,
        now: Instant,
    ) {
        class.connections.borrow_mut().retain(|c| c.state() != ConnectionState::Dead);
        let Some(tls) = self.upstream.credentials.tls(class.class) else {
            self.retire_class(class);
            return;
        };
        let moves = self.upstream.config().rebalance;
        class.rebalancer.borrow_mut().turn(&class.connections.borrow(), moves, now);
        class.evacuations.borrow_mut().tick(&class.connections.borrow(), leave, now);
        class.look_for_waits(now);
        let configured = matches!(class.class, CredentialClass::Identity(_));
        let leave_old = class.may_leave_old(tls.generation, now);
        for connection in class.connections.borrow().iter() {
            if leave_old && connection.generation != tls.generation {
                connection.drain("certificate rotated");
            } else if leave_old && connection.endpoint.state() == EndpointState::Leaving {
                connection.drain("endpoint removed");
            } else if connection.endpoint.state() == EndpointState::Degraded {
                connection.endpoint_degraded();
            } else if !configured
                && connection.idle_since().is_some_and(|since| now >= since + IDLE_CLASS)
            {
                connection.drain(connection::IDLE);
            }
        }
        let in_use = class.used_since(now, IDLE_CLASS);
        if !configured && !in_use {
            return;
        }
        let chosen = self.chosen(endpoints, configured);
        let targets = chosen.len().max(1);
        for endpoint in chosen {
            let limits = &self.upstream.config().connections;
            let missing = class.missing(endpoint, tls.generation, limits, targets, now);
            for _ in 0..missing {
                if !endpoint.claim_connect_attempt(alone, now) {
                    break;
                }
                self.dial(class, endpoint, &tls);
            }
        }
    }

    /// The identity is configured no longer: what runs with it may finish.
    fn retire_class(&self, class: &Rc<ClassPool>) {
        for connection in class.connections.borrow().iter() {
            connection.drain(connection::RETIRED);
        }
        // Whoever else has it is a request on its way, or a dial.
        if class.connections.borrow().is_empty() && Rc::strong_count(class) <= 2 {
            self.classes.borrow_mut().remove(&class.class);
        }
    }

    /// The upstream is configured no longer: what runs on its connections may finish.
    pub fn retire(&self) {
        for class in self.classes.borrow().values() {
            for connection in class.connections.borrow().iter() {
                connection.drain(connection::RETIRED);
            }
        }
    }

    /// Open streams on all connections.
    pub fn streams(&self) -> usize {
        let classes = self.classes.borrow();
        let streams = |class: &Rc<ClassPool>| -> usize {
            class.connections.borrow().iter().map(|connection| connection.streams()).sum()
        };
        classes.values().map(streams).sum()
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
        let fanout = if self.ours { 1 } else { FANOUT };
        if !configured && chosen.len() > fanout {
            chosen.sort_by_key(|e| (e.state(), e.is_fallback(), self.rank(&e.label)));
            chosen.truncate(fanout);
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
            let result = dial_h2(&pool.upstream.outgoing(), &endpoint, &tls.h2, limit).await;
            class.dialled(&endpoint.label);
            match result {
                Ok(established) => {
                    endpoint.metrics.dialled("ok");
                    let connection = Connection::start(
                        established,
                        &endpoint,
                        class.class,
                        &tls,
                        &pool.upstream.settings(),
                        Rc::clone(&pool.changed),
                    );
                    if pool.closed.get() {
                        connection.close(connection::RETIRED);
                    }
                    class.connections.borrow_mut().push(connection);
                }
                Err(failure) => {
                    endpoint.record_connect_failure(&failure);
                    endpoint.connect_failed(failure, Instant::now());
                }
            }
            pool.changed.notify_waiters();
        });
    }

    /// Whether every endpoint has failed a connect since `start` and none is being tried. With no
    /// endpoint at all there is one to wait for: it may be found any moment.
    fn all_failed_since(&self, class: &ClassPool, start: Instant) -> bool {
        let endpoints = self.upstream.endpoints();
        class.dialing.borrow().is_empty()
            && !endpoints.is_empty()
            && endpoints
                .iter()
                .all(|endpoint| endpoint.last_failure().is_some_and(|failed| failed > start))
    }

    fn reasons(&self, class: &ClassPool) -> String {
        let endpoints = self.upstream.endpoints();
        if endpoints.is_empty() {
            let complaints = self.upstream.sources.complaints();
            return format!("no endpoint is known yet; {complaints}");
        }
        let reason = |endpoint: &Arc<Endpoint>| {
            if class.is_silent(endpoint) {
                return format!("{} does not answer: PING unanswered", endpoint.label);
            }
            format!("{} is {} ({})", endpoint.label, endpoint.state().as_str(), endpoint.reason())
        };
        let mut reasons: Vec<_> = endpoints.iter().take(5).map(reason).collect();
        if endpoints.len() > 5 {
            reasons.push(format!("and {} more", endpoints.len() - 5));
        }
        reasons.join("; ")
    }
}
