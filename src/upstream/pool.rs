//! The connections of one worker to one upstream. The pool reserves a stream for each request, and keeps
//! enough connections open that the next request need not wait.
//!
//! Requests call [`Pool::acquire`]. [`Pool::maintain`] opens and drains the connections of each
//! [`class`]. One task ([`Pool::run`]) runs it on every change and every [`TICK`], and then grants free streams to
//! the requests that wait, in order ([`waiters`]).

mod acquire;
mod class;
mod class_limits;
mod counts;
mod dial_pause;
mod drain;
mod hand_over;
mod requirements;
#[cfg(test)]
mod tests;
mod waiters;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::connection_health::ConnectionState;
use jackstay_core::outage::{Outage, READY_FOR, Reachability};
use jackstay_sys::clock;
use tokio::sync::Notify;
use tokio::time::sleep_until;

pub(super) use self::acquire::UNAVAILABLE_AFTER;
pub use self::class::ClassPool;
use self::drain::{IDLE_CLASS, is_idle, is_idle_after_burst};
use self::hand_over::{hand_over_proven, is_unproven};
pub use self::requirements::{PreviousFailure, StreamRequirements, Unavailable};
use super::connection::{Connection, DrainReason};
use super::credentials::{ClientTls, CredentialClass};
use super::dial::dial_h2;
use super::endpoint::{Endpoint, EndpointState};
use super::evacuation::{Evacuation, evacuations};
use super::shared::Upstream;
use super::version_preference::keep_both_sides;

/// Number of endpoints to which a class other than a configured identity keeps connections. After the loss
/// of two, one is left.
const FANOUT: usize = 3;
/// Mean interval of maintenance when nothing changes.
const TICK: Duration = Duration::from_millis(200);

/// The classes whose connections a pool keeps while no request uses them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WarmClasses {
    /// Those of all configured identities.
    Identities,
    /// None: another worker serves the clients with a configured identity.
    None,
}

/// The requests that a pool serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Those of clients.
    Clients(WarmClasses),
    /// jackstay's own requests.
    Internal,
}

/// The pool of one worker for one upstream. It stays on the thread of the worker.
pub struct Pool {
    upstream: Arc<Upstream>,
    classes: RefCell<BTreeMap<CredentialClass, Rc<ClassPool>>>,
    /// Notifies the pool's task of changes of connections, of free streams and of waiting requests.
    changed: Rc<Notify>,
    /// When the pool's task has to run at the latest, for the first deadline of a waiting request or the end of a
    /// pause between connects.
    wake_at: Cell<Option<Instant>>,
    outage: Cell<Outage>,
    /// Notified when a total outage ends.
    outage_over: Notify,
    this: Weak<Self>,
    /// Makes the order of endpoints differ between pools, of other workers as of other nodes.
    seed: u64,
    purpose: Purpose,
    /// Set by [`Self::retire`]: connections are opened only for requests that wait.
    retired: Cell<bool>,
    /// Set by [`Self::close`]: no more connections are opened.
    closed: Cell<bool>,
    #[cfg(test)]
    maintenance_runs: Cell<usize>,
}

impl Pool {
    /// A pool without connections. Spawn [`Self::run`], which opens them.
    pub fn new(upstream: Arc<Upstream>, warm: WarmClasses) -> Rc<Self> {
        Self::create(upstream, Purpose::Clients(warm))
    }

    /// A pool for jackstay's own requests. It keeps connections to one endpoint while it is in use.
    pub fn for_internal_requests(upstream: Arc<Upstream>) -> Rc<Self> {
        Self::create(upstream, Purpose::Internal)
    }

    fn create(upstream: Arc<Upstream>, purpose: Purpose) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            upstream,
            classes: RefCell::default(),
            changed: Rc::new(Notify::new()),
            wake_at: Cell::new(None),
            outage: Cell::default(),
            outage_over: Notify::new(),
            this: this.clone(),
            seed: fastrand::u64(..),
            purpose,
            retired: Cell::new(false),
            closed: Cell::new(false),
            #[cfg(test)]
            maintenance_runs: Cell::new(0),
        })
    }

    /// The upstream of the connections.
    pub fn upstream(&self) -> &Arc<Upstream> {
        &self.upstream
    }

    /// The connections of a class.
    pub fn class(&self, class: CredentialClass) -> Rc<ClassPool> {
        let mut classes = self.classes.borrow_mut();
        Rc::clone(
            classes.entry(class).or_insert_with(|| Rc::new(ClassPool::new(class, clock::now()))),
        )
    }

    /// Whether a total outage is in progress. Reads one cell.
    pub fn is_total_outage(&self) -> bool {
        self.outage.get().is_active()
    }

    /// Waits until no total outage is in progress, and counts as a held watch of `class` until then. While no
    /// endpoint is usable, each endpoint gets one connect attempt at a time, however many requests wait
    /// ([`Endpoint::claim_connect_attempt`]).
    pub async fn outage_ended(&self, class: &ClassPool) {
        let _held = (class.count_held_watch(), self.upstream.count_held_watch());
        loop {
            let mut outage_over = std::pin::pin!(self.outage_over.notified());
            // Registered before the check, so that the end of the outage is not missed.
            outage_over.as_mut().enable();
            if !self.is_total_outage() {
                return;
            }
            outage_over.await;
        }
    }

    /// Maintains the pool and serves the waiting requests until the future is dropped.
    pub async fn run(this: Rc<Self>) {
        loop {
            let changed = Rc::clone(&this.changed);
            let tick = clock::now() + TICK.mul_f64(0.75 + fastrand::f64() / 2.0);
            let wake_at = this.wake_at.take().map_or(tick, |wake_at| wake_at.min(tick));
            tokio::select! {
                () = changed.notified() => {}
                () = this.upstream.endpoints_changed() => {}
                () = sleep_until(wake_at.into()) => {}
            }
            this.maintain();
            this.serve_waiters();
        }
    }

    /// Makes the pool's task run at this time, or earlier.
    fn wake_at(&self, at: Instant) {
        self.wake_at.set(Some(self.wake_at.get().map_or(at, |wake_at| wake_at.min(at))));
    }

    /// Closes every connection and opens no more. Open streams fail.
    pub fn close(&self) {
        self.closed.set(true);
        self.for_each_connection(|connection| connection.close(DrainReason::ConfigurationRemoved));
        // The task may have been stopped.
        self.serve_waiters();
    }

    /// Drains old connections, removes dead ones and starts connects, without waiting for them.
    pub fn maintain(&self) {
        if self.closed.get() {
            return;
        }
        #[cfg(test)]
        self.maintenance_runs.set(self.maintenance_runs.get() + 1);
        let now = clock::now();
        let endpoints = self.upstream.endpoints();
        let none_usable = !endpoints.iter().any(|endpoint| endpoint.is_usable());
        self.update_outage(&endpoints, none_usable, now);
        if self.purpose == Purpose::Clients(WarmClasses::Identities) {
            for class in self.upstream.credentials.loaded() {
                self.class(class);
            }
        }
        let evacuations = evacuations(&endpoints);
        let classes: Vec<_> = self.classes.borrow().values().cloned().collect();
        for class in classes {
            self.maintain_class(&class, &endpoints, &evacuations, none_usable, now);
        }
    }

    /// Updates the total outage. When it ends, held watches are notified.
    fn update_outage(&self, endpoints: &[Arc<Endpoint>], none_usable: bool, now: Instant) {
        let is_ready = |endpoint: &Arc<Endpoint>| {
            endpoint.ready_for(now).is_some_and(|ready_for| ready_for >= READY_FOR)
        };
        let reachability = if none_usable {
            Reachability::Unreachable
        } else if endpoints.iter().any(is_ready) {
            Reachability::Ready
        } else {
            Reachability::Unready
        };
        let mut outage = self.outage.get();
        let ended = outage.observe(reachability, now);
        self.outage.set(outage);
        let Some(reason) = ended else { return };
        let held: usize = self.classes.borrow().values().map(|class| class.held_watches()).sum();
        if held > 0 {
            // The upstream reports the length of the outage when an endpoint is usable, which is earlier.
            tracing::info!(upstream = &*self.upstream.name, held, reason, "held watches resume");
        }
        self.outage_over.notify_waiters();
    }

    fn maintain_class(
        &self,
        class: &Rc<ClassPool>,
        endpoints: &[Arc<Endpoint>],
        evacuations: &[Evacuation],
        none_usable: bool,
        now: Instant,
    ) {
        class.connections.borrow_mut().retain(|c| c.state() != ConnectionState::Dead);
        if is_unproven(class.credential_class()) {
            let proven = self.class(CredentialClass::Token);
            hand_over_proven(class, &proven, &self.upstream.config().connections);
        }
        let Some(tls) = self.upstream.credentials.tls(class.credential_class()) else {
            self.retire_class(class);
            return;
        };
        class.rebalancer.borrow_mut().tick(
            &class.connections.borrow(),
            &self.upstream.config(),
            now,
        );
        class.evacuations.borrow_mut().tick(&class.connections.borrow(), evacuations, now);
        class.probe_slow_endpoints(now);
        let configured = self.is_warm(class.credential_class());
        let drain_old = class.may_drain_old(tls.generation, now);
        for connection in class.connections.borrow().iter() {
            if drain_old && connection.generation != tls.generation {
                connection.drain(DrainReason::CertificateRotated);
            } else if drain_old && connection.endpoint.state() == EndpointState::Leaving {
                connection.drain(DrainReason::EndpointRemoved);
            } else if connection.endpoint.state() == EndpointState::Degraded {
                connection.endpoint_degraded();
            } else if connection.endpoint.probe.is_failing() {
                connection.endpoint_suspected();
            } else if !configured
                && (is_idle(connection, now)
                    || is_idle_after_burst(connection, now)
                        && class.has_current(&connection.endpoint, tls.generation, now))
            {
                connection.drain(DrainReason::Idle);
            }
        }
        let in_use = class.used_within(IDLE_CLASS, now);
        if !configured && !in_use || self.retired.get() && class.waiters.len() == 0 {
            return;
        }
        let targets = self.target_endpoints(endpoints, configured);
        for endpoint in &targets {
            let limits = &self.upstream.config().connections;
            let to_open = class.connections_to_open(
                endpoint,
                tls.generation,
                limits,
                (targets.len(), configured),
                now,
            );
            for _ in 0..to_open {
                if let Some(at) = class.dial_paused_until(endpoint, now) {
                    self.wake_at(at);
                    break;
                }
                if !endpoint.claim_connect_attempt(none_usable, now) {
                    break;
                }
                self.dial(class, endpoint, &tls);
            }
        }
    }

    /// Whether connections of the class are kept while no request uses them.
    fn is_warm(&self, class: CredentialClass) -> bool {
        self.purpose == Purpose::Clients(WarmClasses::Identities)
            && matches!(class, CredentialClass::Identity(_))
    }

    /// Drains the connections of a class whose identity was removed from the configuration, and then removes
    /// the class.
    fn retire_class(&self, class: &Rc<ClassPool>) {
        for connection in class.connections.borrow().iter() {
            connection.drain(DrainReason::IdentityUnusable);
        }
        // The map and the caller hold two references. Requests and connects in progress hold others.
        if class.connections.borrow().is_empty() && Rc::strong_count(class) <= 2 {
            self.classes.borrow_mut().remove(&class.credential_class());
        }
    }

    /// Drains every connection, because the upstream was removed from the configuration.
    pub fn retire(&self) {
        self.retired.set(true);
        self.for_each_connection(|connection| connection.drain(DrainReason::ConfigurationRemoved));
    }

    /// Number of open streams on all connections.
    pub fn streams(&self) -> usize {
        let mut streams = 0;
        self.for_each_connection(|connection| streams += connection.streams());
        streams
    }

    fn for_each_connection(&self, mut act: impl FnMut(&Connection)) {
        for class in self.classes.borrow().values() {
            class.connections.borrow().iter().for_each(|connection| act(connection));
        }
    }

    /// The endpoints to which a class keeps connections: all for a configured identity, one for an internal
    /// pool, and otherwise the best [`FANOUT`]. The order within a state differs between pools.
    fn target_endpoints<'a>(
        &self,
        endpoints: &'a [Arc<Endpoint>],
        configured: bool,
    ) -> Vec<&'a Arc<Endpoint>> {
        let mut targets: Vec<_> =
            endpoints.iter().filter(|e| e.state() != EndpointState::Leaving).collect();
        let fanout = if self.purpose == Purpose::Internal { 1 } else { FANOUT };
        if !configured && targets.len() > fanout {
            targets.sort_by_key(|e| (e.state(), e.is_fallback(), self.rank(&e.label)));
            keep_both_sides(&self.upstream, &mut targets, fanout);
            targets.truncate(fanout);
        }
        targets
    }

    /// A number by which this pool orders the endpoints of one state.
    fn rank(&self, label: &str) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.seed, label).hash(&mut hasher);
        hasher.finish()
    }

    /// Starts a connect to an endpoint. The new connection joins the class.
    fn dial(&self, class: &Rc<ClassPool>, endpoint: &Arc<Endpoint>, tls: &Arc<ClientTls>) {
        let Some(pool) = self.this.upgrade() else { return };
        let (class, endpoint, tls) = (Rc::clone(class), Arc::clone(endpoint), Arc::clone(tls));
        class.connect_started(&endpoint.label, clock::now());
        tokio::task::spawn_local(async move {
            let config = pool.upstream.config();
            let limit = endpoint.connect_timeout(config.health.connect_timeout);
            let max_streams = config.connections.max_streams;
            drop(config);
            let connector = pool.upstream.connector();
            let result = dial_h2(&connector, &endpoint, &tls, limit, max_streams).await;
            class.connect_ended(&endpoint.label);
            match result {
                Ok(established) => {
                    endpoint.metrics.dialled("ok");
                    let connection = Connection::start(
                        established,
                        &endpoint,
                        class.credential_class(),
                        &tls,
                        &pool.upstream.config(),
                        Rc::clone(&pool.changed),
                    );
                    if pool.closed.get() {
                        connection.close(DrainReason::ConfigurationRemoved);
                    }
                    class.connections.borrow_mut().push(connection);
                }
                Err(failure) => endpoint.connect_failed(failure, clock::now()),
            }
            pool.changed.notify_one();
        });
    }
}
