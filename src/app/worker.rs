//! One worker: a thread with its own event loop, its own sockets and its own connections.
//!
//! It is told what should be ([`Assignment`]) and makes it so: what is new begins, what has changed
//! is swapped under the connections that there are, what is gone drains by itself while the rest
//! goes on. Its first assignment is no different from the next. When another process has its
//! sockets, it leaves them and goes on with the connections that it has.

mod kept;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::{JoinSet, LocalSet, spawn_local};
use tokio::time::sleep;

use self::kept::{Deadline, Kept, Kind};
use super::build::{Bound, Destinations, Plane};
use crate::config::{self, AccessLog};
use crate::net::process::allocator;
use crate::net::sockets::linger::lingering_connections;
use crate::observe::{ListenerMetrics, Liveness, Metrics, RateLimitedWarnings};
use crate::proxy::accept::REPEAT;
use crate::proxy::byte_budget::ByteBudget;
use crate::proxy::client_connection::{CurrentService, ListenerService};
use crate::proxy::credential_selector::{CredentialSelector, ProvenTokens};
use crate::proxy::drain;
use crate::proxy::listener::Listener;
use crate::proxy::passthrough;
use crate::proxy::passthrough::table::Table;
use crate::proxy::passthrough::transparent::Transparent;
use crate::proxy::upgrade::Tunnels;
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::Upstream;

/// How often a worker shows that its loop turns, and returns free memory to the kernel.
const PULSE: Duration = Duration::from_secs(1);
/// How often it is looked whether a drain is done.
const DRAIN_TICK: Duration = Duration::from_millis(10);

/// Everything that a worker should do from now on.
#[derive(Debug)]
pub struct Assignment {
    /// Its listeners; one that it has and that is not among them goes.
    pub listeners: Vec<Part>,
    /// Which requests are logged.
    pub access: AccessLog,
    /// How long what goes may take.
    pub drain_timeout: Duration,
    /// Every address that this process listens on.
    pub listening: Arc<[SocketAddr]>,
    /// Dropped when it is so.
    pub _done: UnboundedSender<Infallible>,
}

/// What a worker is told.
#[derive(Debug)]
pub enum Order {
    /// What it should do from now on.
    Follow(Assignment),
    /// To accept no more anywhere: another process does, and what waits in the queues is for it. The
    /// sender is dropped when it is so.
    Leave(UnboundedSender<Infallible>),
}

/// A listener of an [`Assignment`].
#[derive(Debug)]
pub struct Part {
    config: config::Listener,
    metrics: Arc<ListenerMetrics>,
    upstream: Arc<Upstream>,
    plane: Plane,
    /// Where it listens.
    places: Vec<u64>,
    /// The sockets of those places that it does not have yet.
    sockets: Vec<(u64, Vec<std::net::TcpListener>)>,
}

impl Part {
    /// What one of so many workers needs to know of a listener; `has` are the places that it has
    /// already, or should not accept at yet.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn new(
        (worker, workers): (usize, usize),
        bound: &Bound,
        has: &[u64],
    ) -> std::io::Result<Self> {
        let new = bound.places.iter().filter(|place| !has.contains(&place.id));
        let sockets = new.map(|place| Ok((place.id, place.sockets(worker, workers)?)));
        Ok(Self {
            config: bound.config.clone(),
            metrics: Arc::clone(&bound.metrics),
            upstream: Arc::clone(&bound.upstream),
            plane: bound.plane.clone(),
            places: bound.places.iter().map(|place| place.id).collect(),
            sockets: sockets.collect::<std::io::Result<_>>()?,
        })
    }
}

/// A worker before its thread runs, and what it is led by.
pub struct Setup {
    /// What should be, from now on.
    pub orders: UnboundedReceiver<Order>,
    /// Where its parts count.
    pub metrics: Arc<Metrics>,
    /// Bounds what all of them hold of request bodies.
    pub bodies: Arc<ByteBudget>,
    /// How many workers share what a listener may hold.
    pub workers: usize,
    /// Begins the drain of everything.
    pub drain: watch::Receiver<bool>,
    /// Ends what drains at once.
    pub cut: watch::Receiver<bool>,
    /// Records the turns of its loop.
    pub liveness: Liveness,
}

impl Setup {
    /// A worker, and the way to lead it.
    pub fn new(
        index: usize,
        metrics: &Arc<Metrics>,
        bodies: &Arc<ByteBudget>,
        workers: usize,
        drain: watch::Receiver<bool>,
        cut: watch::Receiver<bool>,
    ) -> (Self, UnboundedSender<Order>) {
        let (sender, orders) = unbounded_channel();
        let liveness = Liveness::new(&format!("worker {index}"));
        let (metrics, bodies) = (Arc::clone(metrics), Arc::clone(bodies));
        (Self { orders, metrics, bodies, workers, drain, cut, liveness }, sender)
    }

    /// Runs until the drain is over.
    pub fn run(self) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!(%error, "a worker has no runtime");
                return;
            }
        };
        LocalSet::new().block_on(&runtime, self.serve());
    }

    async fn serve(self) {
        let Self { mut orders, metrics, bodies, workers, mut drain, cut, liveness } = self;
        let turns = liveness.clone();
        spawn_local(async move {
            loop {
                turns.record_turn();
                allocator::release_free_memory();
                sleep(PULSE).await;
            }
        });
        let mut worker = Worker {
            metrics,
            bodies,
            workers,
            listening: Arc::default(),
            table: Table::new(),
            clients: Vec::new(),
            listeners: Vec::new(),
            going: JoinSet::new(),
            drain_timeout: Duration::ZERO,
            cut,
        };
        spawn_local(Rc::clone(&worker.table).run());
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Follow(assignment)) => worker.follow(assignment),
                    Some(Order::Leave(_done)) => worker.leave(),
                    None => break,
                },
                // An error means that the sender is gone: the program ends.
                _ = drain.wait_for(|draining| *draining) => break,
                // Nobody waits for what goes, but it is taken off the list.
                Some(_) = worker.going.join_next(), if !worker.going.is_empty() => {}
            }
        }
        worker.end().await;
        liveness.finish();
    }
}

/// What a worker has.
struct Worker {
    metrics: Arc<Metrics>,
    bodies: Arc<ByteBudget>,
    workers: usize,
    /// Every address that this process listens on.
    listening: Arc<[SocketAddr]>,
    /// Its passed flows.
    table: Rc<Table>,
    clients: Vec<Rc<UpstreamClient>>,
    listeners: Vec<Kept>,
    /// What drains.
    going: JoinSet<()>,
    drain_timeout: Duration,
    cut: watch::Receiver<bool>,
}

impl Worker {
    /// Makes it so.
    fn follow(&mut self, assignment: Assignment) {
        self.drain_timeout = assignment.drain_timeout;
        self.listening = assignment.listening;
        let places: Vec<u64> =
            assignment.listeners.iter().flat_map(|part| part.places.iter().copied()).collect();
        let mut before = std::mem::take(&mut self.listeners);
        for part in assignment.listeners {
            let known = before.iter().position(|kept| kept.is(&part));
            let kept = match known.map(|index| before.swap_remove(index)) {
                Some(mut kept) => {
                    self.change(&mut kept, part, assignment.access);
                    kept
                }
                None => self.begin(part, assignment.access),
            };
            self.listeners.push(kept);
        }
        for mut kept in before {
            kept.hand_over(|place| places.contains(&place));
            self.going.spawn_local(kept.end(self.deadline()));
        }
        let (used, unused) = std::mem::take(&mut self.clients)
            .into_iter()
            .partition(|client| self.listeners.iter().any(|kept| kept.uses(client)));
        self.clients = used;
        let unused: Vec<Rc<UpstreamClient>> = unused;
        for client in unused {
            let deadline = self.deadline();
            self.going.spawn_local(client.drain(move || deadline.is_over()));
        }
    }

    /// Accepts no more, and goes on with what there is.
    fn leave(&mut self) {
        for kept in &mut self.listeners {
            kept.hand_over(|_| true);
        }
    }

    fn begin(&mut self, part: Part, access: AccessLog) -> Kept {
        let watches = drain::channel();
        let (trigger, drain) = drain::channel();
        let name = part.config.name.clone();
        let (upstream, limits) = (Arc::clone(&part.upstream), self.limits(&part));
        let kind = match part.plane {
            Plane::Terminate { config, tls, slots } => {
                let service = Rc::new(ListenerService {
                    upstream: self.upstream_client(&upstream),
                    credentials: CredentialSelector {
                        slots,
                        listener: name.clone(),
                        tokens: Rc::new(ProvenTokens::default()),
                    },
                    metrics: part.metrics,
                    access_log: access,
                    resume_groups: config.resume_groups,
                    limits,
                    request_limits: config.limits,
                    tunnels: Tunnels::default(),
                    drain: watches.1.clone(),
                });
                Kind::Terminate(Rc::new(Listener {
                    name: name.clone(),
                    serving: CurrentService::new(service),
                    tls,
                    open: Cell::new(0),
                    warnings: RateLimitedWarnings::new(REPEAT),
                    drain,
                }))
            }
            Plane::Passthrough { config, routes, destinations } => {
                let routing =
                    self.routing(Arc::clone(&upstream), config, routes, destinations, limits);
                Kind::Passthrough(Rc::new(passthrough::Listener {
                    flows: self.metrics.passthrough(&name),
                    name: name.clone(),
                    routing: RefCell::new(Rc::new(routing)),
                    metrics: part.metrics,
                    table: Rc::clone(&self.table),
                    open: Cell::new(0),
                    warnings: RateLimitedWarnings::new(REPEAT),
                }))
            }
        };
        let mut kept = Kept { name, upstream, watches, trigger, places: HashMap::new(), kind };
        kept.listen(&part.places, part.sockets);
        kept
    }

    /// Swaps what has changed under the connections that there are.
    fn change(&mut self, kept: &mut Kept, part: Part, access: AccessLog) {
        let limits = self.limits(&part);
        let another = !Arc::ptr_eq(&kept.upstream, &part.upstream);
        if another {
            kept.upstream = Arc::clone(&part.upstream);
        }
        match (&kept.kind, part.plane) {
            (Kind::Terminate(listener), Plane::Terminate { config, slots, .. }) => {
                if another {
                    // What goes on there may not exist here: its clients ask anew.
                    let (trigger, _) = std::mem::replace(&mut kept.watches, drain::channel());
                    let deadline = self.deadline();
                    self.going.spawn_local(async move {
                        trigger.start(deadline.spread());
                        deadline.over().await;
                        trigger.force();
                    });
                }
                let before = listener.serving.now();
                listener.serving.replace(Rc::new(ListenerService {
                    upstream: if another {
                        self.upstream_client(&part.upstream)
                    } else {
                        Rc::clone(&before.upstream)
                    },
                    credentials: CredentialSelector {
                        slots,
                        listener: kept.name.clone(),
                        tokens: Rc::clone(&before.credentials.tokens),
                    },
                    metrics: part.metrics,
                    access_log: access,
                    resume_groups: config.resume_groups,
                    limits,
                    request_limits: config.limits,
                    tunnels: before.tunnels.clone(),
                    drain: kept.watches.1.clone(),
                }));
            }
            (Kind::Passthrough(listener), Plane::Passthrough { config, routes, destinations }) => {
                let routing = self.routing(part.upstream, config, routes, destinations, limits);
                listener.routing.replace(Rc::new(routing));
            }
            // `Kept::is` compares the modes.
            (Kind::Terminate(_), Plane::Passthrough { .. })
            | (Kind::Passthrough(_), Plane::Terminate { .. }) => {}
        }
        kept.listen(&part.places, part.sockets);
    }

    /// Where a passthrough listener leads, and how.
    fn routing(
        &self,
        upstream: Arc<Upstream>,
        config: config::Passthrough,
        routes: Vec<Arc<Upstream>>,
        destinations: Destinations,
        limits: config::Limits,
    ) -> passthrough::Routing {
        let listening = Arc::clone(&self.listening);
        let transparent = config.transparent.then(|| Transparent::new(listening, destinations));
        passthrough::Routing { upstream, routes, transparent, config, limits }
    }

    /// This worker's share of what a listener may hold.
    fn limits(&self, part: &Part) -> config::Limits {
        let mut limits = part.config.limits.clone();
        limits.max_connections = limits.max_connections.div_ceil(self.workers);
        limits
    }

    /// The client of `upstream`. Listeners with the same upstream share it.
    fn upstream_client(&mut self, upstream: &Arc<Upstream>) -> Rc<UpstreamClient> {
        if let Some(client) = self.clients.iter().find(|client| client.leads_to(upstream)) {
            return Rc::clone(client);
        }
        let client = UpstreamClient::start(upstream, &self.metrics, &self.bodies);
        self.clients.push(Rc::clone(&client));
        client
    }

    /// Of a drain that begins now.
    fn deadline(&self) -> Deadline {
        Deadline::new(self.drain_timeout, self.cut.clone())
    }

    /// Drains everything.
    async fn end(mut self) {
        let deadline = self.deadline();
        for kept in self.listeners {
            self.going.spawn_local(kept.end(deadline.clone()));
        }
        while self.going.join_next().await.is_some() {}
        while lingering_connections() > 0 && !deadline.is_over() {
            sleep(DRAIN_TICK).await;
        }
    }
}
