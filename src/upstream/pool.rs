//! The connections of one worker to one upstream. The pool reserves a stream for each request, and keeps
//! enough connections open that the next request need not wait.
//!
//! Requests call [`Pool::acquire`]. One task ([`Pool::run`]) maintains the connections on every change and at least
//! every 200 ms, and then grants free streams to the requests that wait. [`jackstay_core::pool`] decides; this module
//! describes connections and endpoints to it ([`table`]), and opens, drains and closes connections.

mod acquire;
mod class;
mod stream_request;
mod table;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jackstay_core::connection::ConnectionState;
pub(super) use jackstay_core::pool::UNAVAILABLE_AFTER;
use jackstay_core::pool::{ClassEffect, EndpointRow, PoolState, Purpose, Surroundings};
pub use jackstay_core::pool::{Lane, PreviousFailure, StreamRequirements, WarmClasses};
use jackstay_sys::clock;
use tokio::sync::Notify;
use tokio::time::sleep_until;

pub use self::class::ClassPool;
pub use self::stream_request::{StreamRequest, Unavailable};
use self::table::{connection_limits, endpoint_rows};
use super::backends::dial_backend;
use super::connection::{Connection, DrainReason};
use super::connection_probe;
use super::credentials::{ClientTls, CredentialClass};
use super::endpoint::{Endpoint, ProbeTrigger};
use super::evacuation::{Evacuation, evacuations};
use super::resource_versions::ResourceRecord;
use super::shared::{HeldWatch, Upstream};
use super::trial::try_certificate;

/// Within this time, the pool tells its connections of one event only ([`Pool::event_shown`]).
const EVENT_INTERVAL: Duration = Duration::from_millis(20);

/// The pool of one worker for one upstream. It stays on the thread of the worker.
pub struct Pool {
    upstream: Arc<Upstream>,
    classes: RefCell<BTreeMap<(CredentialClass, Lane), Rc<ClassPool>>>,
    /// Notifies the pool's task of changes of connections, of free streams and of waiting requests.
    changed: Rc<Notify>,
    /// Decides what concerns all classes.
    state: Cell<PoolState>,
    /// Notified when a total outage ends.
    outage_over: Notify,
    /// The notices of [`Upstream::restores`] that watches were notified of.
    restore_notices: Cell<u32>,
    /// Number of failures of API groups of which the watches were notified.
    group_notices: Cell<u32>,
    /// When connections were last told that an event should arrive.
    event_shown_at: Cell<Option<Instant>>,
    this: Weak<Self>,
    /// Makes the order of endpoints differ between pools, of other workers as of other nodes.
    seed: u64,
    rng: RefCell<fastrand::Rng>,
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
            state: Cell::new(PoolState::new(purpose)),
            outage_over: Notify::new(),
            restore_notices: Cell::new(0),
            group_notices: Cell::new(0),
            event_shown_at: Cell::default(),
            this: this.clone(),
            seed: fastrand::u64(..),
            rng: RefCell::default(),
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
        self.lane(class, Lane::Requests)
    }

    fn lane(&self, class: CredentialClass, lane: Lane) -> Rc<ClassPool> {
        let mut classes = self.classes.borrow_mut();
        let entry = classes.entry((class, lane));
        Rc::clone(entry.or_insert_with(|| Rc::new(ClassPool::new(class, lane, clock::now()))))
    }

    /// A watch of the resource has shown an event on `source`. Other connections whose endpoint serves watches of the
    /// resource should show it, too: one that does not is asked by a PING. Nearly free if it was called within
    /// [`EVENT_INTERVAL`].
    pub fn event_shown(&self, resource: &ResourceRecord, source: &Connection, now: Instant) {
        let last = self.event_shown_at.get();
        if last.is_some_and(|last| now.saturating_duration_since(last) < EVENT_INTERVAL) {
            return;
        }
        self.event_shown_at.set(Some(now));
        for class in self.classes.borrow().values() {
            for connection in &*class.connections.borrow() {
                if connection.key() != source.key()
                    && connection.watches() > 0
                    && resource.has_watch(&connection.endpoint)
                {
                    connection.event_expected(now);
                }
            }
        }
    }

    /// Changes the state.
    fn update<T>(&self, change: impl FnOnce(&mut PoolState) -> T) -> T {
        let mut state = self.state.get();
        let result = change(&mut state);
        self.state.set(state);
        result
    }

    /// Whether a total outage is in progress. Reads one cell.
    pub fn is_total_outage(&self) -> bool {
        self.state.get().is_total_outage()
    }

    /// Counts a held watch of `class` until the guard is dropped.
    pub fn hold_watch<'a>(&'a self, class: &'a ClassPool) -> HeldInClass<'a> {
        class.machine.borrow_mut().hold_watch();
        HeldInClass { class, _of_upstream: self.upstream.count_held_watch() }
    }

    /// Whether a watch whose client has no response yet may be held. The limit does not apply to a running
    /// watch that loses its stream.
    pub fn may_hold_new_watch(&self) -> bool {
        PoolState::may_hold(self.held_watches())
    }

    fn held_watches(&self) -> usize {
        self.classes.borrow().values().map(|class| class.machine.borrow().held_watches()).sum()
    }

    /// Waits until no total outage is in progress. While no endpoint is usable, each endpoint gets one connect
    /// attempt at a time, however many requests wait ([`Endpoint::claim_connect_attempt`]).
    pub async fn outage_ended(&self) {
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

    /// Maintains the pool and serves the waiting requests until the future is dropped. Then no request waits any
    /// more: those that do get an error.
    pub fn run(this: Rc<Self>) -> impl Future<Output = ()> {
        let stop = StopOnDrop(this);
        async move {
            let pool = &stop.0;
            loop {
                let changed = Rc::clone(&pool.changed);
                let now = clock::now();
                let next = pool.update(|state| state.next_run(now, &mut pool.rng.borrow_mut()));
                tokio::select! {
                    () = changed.notified() => {}
                    () = pool.upstream.endpoints_changed() => {}
                    () = pool.upstream.restores.changed() => {}
                    () = pool.upstream.group_failures.changed() => {}
                    () = sleep_until(next.into()) => {}
                }
                pool.run_once();
            }
        }
    }

    /// Maintains the connections and serves the waiting requests.
    fn run_once(&self) {
        #[cfg(test)]
        self.maintenance_runs.set(self.maintenance_runs.get() + 1);
        let now = clock::now();
        self.notify_of_restores();
        self.notify_of_groups();
        let endpoints = self.upstream.endpoints();
        let rows = endpoint_rows(&self.upstream, &endpoints, self.seed, now);
        if !self.state.get().is_closed() {
            self.maintain(&endpoints, &rows, now);
        }
        self.serve_waiters(&rows);
    }

    /// Notifies the watches if etcd was restored from a backup.
    fn notify_of_restores(&self) {
        let notices = self.upstream.restores.notices();
        if self.restore_notices.replace(notices) != notices {
            self.for_each_connection(Connection::notify_watches);
        }
    }

    /// Notifies the watches if an API group has begun to fail at an endpoint.
    fn notify_of_groups(&self) {
        let failures = &self.upstream.group_failures;
        failures.retain(&self.upstream.endpoints(), self.upstream.reporter());
        let notices = failures.notices();
        if self.group_notices.replace(notices) != notices {
            self.for_each_connection(Connection::notify_watches);
        }
    }

    /// Closes every connection and opens no more. Open streams fail, and so do waiting requests.
    pub fn close(&self) {
        let refusal = self.update(PoolState::close);
        self.for_each_connection(|connection| connection.close(DrainReason::ConfigurationRemoved));
        self.refuse_waiters(refusal);
    }

    /// Drains old connections, removes dead ones and starts connects, without waiting for them.
    fn maintain(&self, endpoints: &[Arc<Endpoint>], rows: &[EndpointRow], now: Instant) {
        self.update_outage(rows, now);
        if self.state.get().keeps_identities() {
            for class in self.upstream.credentials.loaded() {
                self.class(class);
            }
        }
        let evacuations = evacuations(endpoints);
        let classes: Vec<_> = self.classes.borrow().values().cloned().collect();
        for class in classes {
            self.maintain_class(&class, (endpoints, rows), &evacuations, now);
        }
    }

    /// Updates the total outage. When it ends, held watches are notified.
    fn update_outage(&self, rows: &[EndpointRow], now: Instant) {
        let ended = self.update(|state| state.observe_endpoints(rows, now));
        let Some(reason) = ended else { return };
        let held = self.held_watches();
        if held > 0 {
            // The upstream reports the length of the outage when an endpoint is usable, which is earlier.
            tracing::info!(upstream = &*self.upstream.name, held, reason, "held watches resume");
        }
        self.outage_over.notify_waiters();
    }

    fn maintain_class(
        &self,
        class: &Rc<ClassPool>,
        (endpoints, endpoint_rows): (&[Arc<Endpoint>], &[EndpointRow]),
        evacuations: &[Evacuation],
        now: Instant,
    ) {
        class.connections.borrow_mut().retain(|c| c.state() != ConnectionState::Dead);
        let name = class.credential_class();
        if class.take_question() {
            // A request may be sent again on those of the other lane.
            let classes = self.classes.borrow();
            let of_class = classes.iter().filter(|((one, _), _)| *one == name);
            of_class.for_each(|(_, class)| class.ask(now));
        }
        self.hand_over(class, now);
        let tls = self.upstream.credentials.tls(name);
        if tls.is_some() {
            let (connections, config) = (class.connections.borrow(), self.upstream.config());
            class.rebalancer.borrow_mut().tick(&connections, &config, now);
            class.evacuations.borrow_mut().tick(&connections, evacuations, now);
        }
        let state = self.state.get();
        let around = Surroundings {
            endpoints: endpoint_rows,
            limits: connection_limits(&self.upstream),
            generation: tls.as_ref().map(|tls| tls.generation),
            is_warm: state.is_warm(name, class.lane()),
            fanout: state.fanout(name, class.lane()),
            is_retired: state.is_retired(),
            now,
        };
        let none_usable = PoolState::none_usable(endpoint_rows);
        let is_slow_head_round = class.machine.borrow_mut().begin_slow_head_round(now);
        let mut rows = class.rows(is_slow_head_round, now);
        let waits = class.machine.borrow().waiting() > 0;
        if !waits {
            class.drain_unused();
        }
        let claim = |endpoint: usize| {
            let endpoint = &endpoints[endpoint];
            (waits || !class.awaits_token(&self.upstream, endpoint, tls.as_deref()))
                && endpoint.claim_connect_attempt(none_usable, now)
        };
        let effects = class.machine.borrow_mut().plan(&mut rows, &around, claim);
        for effect in effects {
            self.execute(class, effect, endpoints, tls.as_ref());
        }
    }

    /// Hands the connections that mostly carry streams of proven tokens to the class of these tokens.
    fn hand_over(&self, class: &Rc<ClassPool>, now: Instant) {
        if !class.credential_class().is_unproven_token() {
            return;
        }
        let proven = self.class(CredentialClass::Token);
        let handed_over = class.machine.borrow_mut().hand_over(
            &class.rows(false, now),
            &proven.machine.borrow(),
            &proven.rows(false, now),
            connection_limits(&self.upstream),
        );
        // From the last one on, so that the indices of the others stay valid.
        for index in handed_over.into_iter().rev() {
            let connection = class.connections.borrow_mut().remove(index);
            connection.serve_proven_tokens();
            proven.connections.borrow_mut().push(connection);
        }
    }

    /// Executes an effect of [`jackstay_core::pool::Class::plan`].
    fn execute(
        &self,
        class: &Rc<ClassPool>,
        effect: ClassEffect,
        endpoints: &[Arc<Endpoint>],
        tls: Option<&Arc<ClientTls>>,
    ) {
        let connection = |index: usize| Rc::clone(&class.connections.borrow()[index]);
        match effect {
            ClassEffect::Probe(index) => {
                connection(index).probe().request(ProbeTrigger::PassiveEvidence);
            }
            ClassEffect::Drain(index, cause) => connection(index).drain(cause),
            ClassEffect::Close(index) => connection(index).close(DrainReason::ConnectionLimit),
            ClassEffect::NotifyDegraded(index) => connection(index).endpoint_degraded(),
            ClassEffect::NotifySuspected(index) => connection(index).endpoint_suspected(),
            ClassEffect::Dial(endpoint) => {
                if let Some(tls) = tls {
                    self.dial(class, &endpoints[endpoint], tls);
                }
            }
            ClassEffect::WakeAt(at) => self.update(|state| state.wake_at(at)),
            ClassEffect::Retire => {
                // The map and the caller hold two references. Requests and connects in progress hold others.
                if Rc::strong_count(class) <= 2 {
                    self.classes.borrow_mut().remove(&(class.credential_class(), class.lane()));
                }
            }
        }
    }

    /// Drains every connection, because the upstream was removed from the configuration.
    pub fn retire(&self) {
        self.update(PoolState::retire);
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

    /// Starts a connect to an endpoint. The new connection joins the class.
    fn dial(&self, class: &Rc<ClassPool>, endpoint: &Arc<Endpoint>, tls: &Arc<ClientTls>) {
        let Some(pool) = self.this.upgrade() else { return };
        let credential = class.question_credential(&self.upstream, endpoint, tls);
        let (class, endpoint, tls) = (Rc::clone(class), Arc::clone(endpoint), Arc::clone(tls));
        tokio::task::spawn_local(async move {
            let config = pool.upstream.config();
            let limit = endpoint.connect_timeout(config.health.connect_timeout);
            let max_streams = config.connections.max_streams;
            drop(config);
            let dial = (&*endpoint, &*tls);
            let dialed = dial_backend(&pool.upstream, dial, limit, max_streams, &credential).await;
            match dialed {
                Ok(established) => {
                    endpoint.metrics.dialled("ok");
                    if established.for_one_request {
                        class.token_refused(&credential);
                    }
                    let connection = Connection::start(
                        established,
                        &endpoint,
                        class.credential_class(),
                        &tls,
                        &pool.upstream.config(),
                        &pool.upstream.memory,
                        Rc::clone(&pool.changed),
                    );
                    if class.lane() == Lane::Heartbeats {
                        connection.serve_heartbeats();
                    }
                    pool.admit(&class, connection, &tls).await;
                }
                Err(failure) => {
                    pool.report_wait(&class, &endpoint, &tls, &failure.reason);
                    endpoint.connect_failed(failure, clock::now());
                }
            }
            class.machine.borrow_mut().connect_ended(endpoint.key());
            pool.changed.notify_one();
        });
    }

    /// Adds a new connection to its class, unless its certificate is refused and one with another credential works.
    async fn admit(&self, class: &ClassPool, connection: Rc<Connection>, tls: &Arc<ClientTls>) {
        let is_replacement = class.has_older(tls.generation);
        if is_replacement
            && connection.shows_certificate()
            && let Err(why) = try_certificate(&connection).await
        {
            if class.has_older(tls.generation) {
                let (endpoint, random) = (&connection.endpoint, self.rng.borrow_mut().f64());
                let (key, generation, now) = (endpoint.key(), tls.generation, clock::now());
                class.machine.borrow_mut().credential_refused(key, generation, random, now);
                self.report_wait(class, endpoint, tls, &why);
                return connection.close(DrainReason::CertificateRefused);
            }
            connection.set_end_expected(false);
        } else if is_replacement {
            self.upstream.successions.end(class.credential_class(), &connection.endpoint);
        }
        if self.state.get().is_closed() {
            connection.close(DrainReason::ConfigurationRemoved);
        }
        connection_probe::start(&self.upstream, &connection, tls);
        class.connections.borrow_mut().push(connection);
    }

    /// Reports that a connect has failed while connections with another credential work.
    fn report_wait(&self, class: &ClassPool, endpoint: &Endpoint, tls: &ClientTls, why: &str) {
        if class.has_older(tls.generation) {
            let (class, waited_for) = (class.credential_class(), (endpoint, why));
            self.upstream.successions.wait(class, tls.generation, waited_for, clock::now());
        }
    }
}

/// Refuses the waiting requests when the task of the pool ends.
struct StopOnDrop(Rc<Pool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        let refusal = self.0.update(PoolState::stop);
        self.0.refuse_waiters(refusal);
    }
}

/// Counts a held watch of a class until it is dropped.
pub struct HeldInClass<'a> {
    class: &'a ClassPool,
    _of_upstream: HeldWatch<'a>,
}

impl Drop for HeldInClass<'_> {
    fn drop(&mut self) {
        self.class.machine.borrow_mut().release_watch();
    }
}
