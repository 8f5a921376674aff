//! A worker: a thread with its own event loop, sockets and connections to endpoints.
//!
//! The control thread sends it the [`DesiredState`]. The worker then starts new listeners, updates changed
//! ones without closing their connections, and drains removed ones while the others continue to serve. The
//! first state is applied like every later one. During a takeover the worker stops accepting, leaves the accept
//! queues to the new process, and continues to serve its open connections. Before a drain, all workers close their
//! sockets; then connections end ([`super::drain_signal`]).

mod command;
mod listener;
mod role;

use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay_config::{self as config, AccessLog};
use jackstay_core::admission::ByteBudget;
use jackstay_sys::process::allocator;
use jackstay_sys::process::allocator::Release;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_local};
use tokio::time::sleep;

pub use self::command::{Command, Completion, DesiredState};
use self::listener::{DRAIN_POLL, DrainDeadline, Server, WorkerListener};
pub use self::role::Role;
use super::drain_signal::DrainSignal;
use super::listener::{BoundListener, Destinations, ListenerMode};
use crate::observe::{Liveness, Metrics};
use crate::proxy::admission::handshake_queue::HandshakeQueue;
use crate::proxy::admission::listener_admission::ListenerAdmission;
use crate::proxy::admission::proven_tokens::ProvenTokens;
use crate::proxy::admission::socket_memory;
use crate::proxy::credential_selector::CredentialSelector;
use crate::proxy::drain::{self, DrainTrigger, DrainWatcher};
use crate::proxy::https_server::{HttpsServer, ServedClients};
use crate::proxy::identity_lane::HandedOver;
use crate::proxy::lingering::lingering_connections;
use crate::proxy::listener_service::ListenerService;
use crate::proxy::passthrough::flow::ListenerFlows;
use crate::proxy::passthrough::flow_table::FlowTable;
use crate::proxy::passthrough::forwarder::TcpForwarder;
use crate::proxy::passthrough::routing::{Routing, Transparent};
use crate::proxy::task_queues::TaskQueues;
use crate::proxy::tunnels::Tunnels;
use crate::proxy::upstream_client::UpstreamClient;
use crate::upstream::Upstream;
use crate::upstream::credentials::IdentitySlot;
use crate::upstream::pool::WarmClasses;

/// How often a worker records that its event loop runs, and returns free memory to the kernel.
const TICK: Duration = Duration::from_secs(1);
/// All free memory is returned once in so many ticks, because the kernel then has to provide the part that is soon
/// used again.
const RELEASE_ALL_TICKS: u32 = 60;

/// The parameters of a worker thread.
pub struct WorkerSetup {
    /// The metrics of the process.
    pub metrics: Arc<Metrics>,
    /// The memory for request bodies, a limit for all workers together.
    pub bodies: Arc<ByteBudget>,
    /// Number of workers that accept, among which the connection limits of a listener are divided.
    pub workers: usize,
    /// The connections that it serves.
    pub role: Role,
    /// Drains the worker.
    pub drain: DrainSignal,
    /// Becomes true to close all open connections.
    pub force: watch::Receiver<bool>,
    /// Records that the event loop runs.
    pub liveness: Liveness,
}

impl WorkerSetup {
    /// Runs a worker on a runtime of its own. See [`Self::run_here`].
    pub fn run(self, commands: UnboundedReceiver<Command>) {
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(error) => {
                tracing::error!(%error, "worker cannot create its runtime");
                return;
            }
        };
        runtime.block_on(self.run_here(commands));
    }

    /// Runs a worker, which executes `commands`, until its drain has ended. Its tasks run while the future is polled,
    /// and end when it is dropped. It can share its thread with other workers.
    pub fn run_here(self, commands: UnboundedReceiver<Command>) -> impl Future<Output = ()> {
        TaskQueues::run(|tasks| self.serve(tasks, commands))
    }

    async fn serve(self, tasks: TaskQueues, mut commands: UnboundedReceiver<Command>) {
        let (drain, liveness) = (self.drain.clone(), self.liveness.clone());
        let iterations = liveness.clone();
        spawn_local(async move {
            for tick in 1_u32.. {
                iterations.record_iteration();
                let all = tick.is_multiple_of(RELEASE_ALL_TICKS);
                allocator::release_free_memory(if all { Release::All } else { Release::Expired });
                sleep(TICK).await;
            }
        });
        let mut worker = Worker {
            handshakes: HandshakeQueue::new(self.workers),
            setup: self,
            tasks,
            listen_addresses: Arc::default(),
            flows: FlowTable::new(),
            clients: Vec::new(),
            listeners: Vec::new(),
            draining: JoinSet::new(),
            drain_timeout: Duration::ZERO,
        };
        spawn_local(Rc::clone(&worker.flows).run());
        spawn_local(socket_memory::run());
        let mut connections_end = pin!(drain.connections_end());
        loop {
            tokio::select! {
                // A listener is started before connections to it are handed over.
                biased;
                command = commands.recv() => match command {
                    Some(Command::Apply(state, done)) => worker.apply(state, done),
                    Some(Command::ReleaseSockets(_done)) => worker.release_sockets(),
                    Some(Command::LimitDrain(limit, _done)) => {
                        worker.drain_timeout = worker.drain_timeout.min(limit);
                    }
                    Some(Command::CloseSockets(done)) => worker.close_sockets(done),
                    None => break,
                },
                () = &mut connections_end => break,
                connection = worker.setup.role.handed_over() => worker.serve_handed_over(connection),
                // Frees the memory of drains that have ended.
                Some(_) = worker.draining.join_next(), if !worker.draining.is_empty() => {}
            }
        }
        // The control thread does not wait for commands that this worker will not execute.
        drop(commands);
        for connection in worker.setup.role.close() {
            worker.serve_handed_over(connection);
        }
        worker.drain().await;
        liveness.finish();
    }
}

/// Drops `done` when the accept loops with these triggers have closed their sockets.
fn drop_when_closed(done: Completion, sockets: Vec<DrainTrigger>) {
    spawn_local(async move {
        for socket in sockets {
            socket.unwatched().await;
        }
        drop(done);
    });
}

struct Worker {
    setup: WorkerSetup,
    tasks: TaskQueues,
    listen_addresses: Arc<[SocketAddr]>,
    flows: Rc<FlowTable>,
    /// One client for each upstream of an L7 listener.
    clients: Vec<Rc<UpstreamClient>>,
    /// The TLS handshakes of all listeners.
    handshakes: Rc<HandshakeQueue>,
    listeners: Vec<WorkerListener>,
    /// The drains of removed listeners and of clients and watches that are replaced.
    draining: JoinSet<()>,
    drain_timeout: Duration,
}

impl Worker {
    /// Serves `state`, and drops `done` when the sockets that it does not have are closed. Before that, their addresses
    /// cannot be bound again.
    fn apply(&mut self, state: DesiredState, done: Completion) {
        let DesiredState { listeners, mut new_sockets, access, drain_timeout, listen_addresses } =
            state;
        self.drain_timeout = drain_timeout;
        self.listen_addresses = listen_addresses;
        let serves = |listener: &Arc<BoundListener>| match self.setup.role {
            Role::Accept(_) => true,
            Role::IdentityLane(_) => !listener.mode.identities().is_empty(),
        };
        let listeners: Vec<_> = listeners.into_iter().filter(serves).collect();
        let used: Vec<_> =
            listeners.iter().flat_map(|bound| &bound.sockets).map(|(id, _)| *id).collect();
        let mut previous = std::mem::take(&mut self.listeners);
        let mut closing = Vec::new();
        for bound in listeners {
            let index = previous.iter().position(|listener| listener.is_same_listener(&bound));
            let mut listener = match index.map(|index| previous.swap_remove(index)) {
                Some(mut listener) => {
                    self.update(&mut listener, &bound, access);
                    listener
                }
                None => self.start(&bound, access),
            };
            closing.extend(listener.listen(&bound.sockets, &mut new_sockets));
            self.listeners.push(listener);
        }
        for mut listener in previous {
            // A socket that another listener uses now stays open, with its accept queue.
            listener.release_sockets(|id| used.contains(&id));
            closing.extend(listener.close_sockets());
            self.draining.spawn_local(listener.drain(self.deadline()));
        }
        let listeners = &self.listeners;
        let is_unused =
            |client: &mut Rc<_>| !listeners.iter().any(|listener| listener.uses(client));
        for client in self.clients.extract_if(.., is_unused) {
            let deadline = DrainDeadline::new(drain_timeout, self.setup.force.clone());
            self.draining.spawn_local(client.drain(move || deadline.is_over()));
        }
        drop_when_closed(done, closing);
    }

    /// Serves a connection with the listener of that name. Closes it if the listener was removed.
    fn serve_handed_over(&self, connection: HandedOver) {
        let mut listeners = self.listeners.iter();
        let listener = listeners.find(|listener| listener.name() == connection.client.listener);
        if let Some(Server::Https(server)) = listener.map(WorkerListener::server) {
            server.serve_handed_over(connection);
        }
    }

    /// Stops accepting at once, and leaves all accept queues to another process.
    fn release_sockets(&mut self) {
        for listener in &mut self.listeners {
            listener.release_sockets(|_| true);
        }
    }

    /// Closes all sockets after their accept queues are empty, and drops `done` then.
    fn close_sockets(&mut self, done: Completion) {
        let sockets = self.listeners.iter_mut().flat_map(WorkerListener::close_sockets);
        drop_when_closed(done, sockets.collect());
    }

    fn start(&mut self, bound: &Arc<BoundListener>, access: AccessLog) -> WorkerListener {
        let watches = drain::channel();
        let (trigger, connections) = drain::channel();
        let (metrics, memory) = (&bound.metrics, &bound.upstream.memory);
        let admission = Rc::new(ListenerAdmission::new(
            bound.name().to_owned(),
            Arc::clone(metrics),
            Arc::clone(memory),
        ));
        let server = match &bound.mode {
            ListenerMode::Terminate { config, tls, identities } => {
                let mode = (config, &identities[..]);
                let service = self.service(bound, mode, access, watches.1.clone(), None);
                let server = Rc::new(HttpsServer::new(
                    admission,
                    service,
                    Arc::clone(tls),
                    Rc::clone(&self.handshakes),
                    connections,
                    self.lane(bound),
                    self.tasks.clone(),
                ));
                self.pass_through(&server, bound, config);
                Server::Https(server)
            }
            ListenerMode::Passthrough { config, routes, destinations } => {
                let routing = self.routing(bound, config, routes, destinations);
                let flows = self.listener_flows(admission, routing, connections);
                Server::Tcp(Rc::new(TcpForwarder::new(flows)))
            }
        };
        WorkerListener::new(Arc::clone(bound), server, trigger, watches)
    }

    /// Applies a changed configuration to a listener. Open connections continue. A request in progress is
    /// served by the service with which it started, later ones by the new service.
    fn update(
        &mut self,
        listener: &mut WorkerListener,
        bound: &Arc<BoundListener>,
        access: AccessLog,
    ) {
        let other_upstream = listener.replace_bound(Arc::clone(bound));
        match (listener.server(), &bound.mode) {
            (Server::Https(server), ListenerMode::Terminate { config, identities, .. }) => {
                let server = Rc::clone(server);
                let current = server.service();
                if other_upstream {
                    // The new upstream may have other objects, so the watches end and clients list again.
                    let trigger = listener.replace_watch_drain();
                    let deadline = self.deadline();
                    self.draining.spawn_local(async move {
                        trigger.start(deadline.spread());
                        deadline.over().await;
                        trigger.force();
                    });
                }
                let (mode, watches) = ((config, &identities[..]), listener.watch_drain());
                server.replace_service(self.service(bound, mode, access, watches, Some(&current)));
                self.pass_through(&server, bound, config);
            }
            (
                Server::Tcp(forwarder),
                ListenerMode::Passthrough { config, routes, destinations },
            ) => {
                let routing = self.routing(bound, config, routes, destinations);
                forwarder.flows().routing.replace(routing);
            }
            // `is_same_listener` compares the modes.
            (Server::Https(_), ListenerMode::Passthrough { .. })
            | (Server::Tcp(_), ListenerMode::Terminate { .. }) => {}
        }
    }

    /// The service of an L7 listener's requests. It keeps the proven tokens and the tunnels of the `current`
    /// service.
    fn service(
        &mut self,
        bound: &BoundListener,
        (config, identities): (&config::Terminate, &[Arc<IdentitySlot>]),
        access: AccessLog,
        watches: DrainWatcher,
        current: Option<&ListenerService>,
    ) -> Rc<ListenerService> {
        let (tokens, tunnels) = match current {
            Some(current) => (Rc::clone(&current.credentials.tokens), current.tunnels.clone()),
            None => (Rc::new(ProvenTokens::default()), Tunnels::default()),
        };
        let passed_through = config.passed_through.as_ref();
        let passthrough_names = passed_through.map(|configured| configured.server_names.clone());
        Rc::new(ListenerService {
            upstream: self.client(&bound.upstream),
            credentials: CredentialSelector {
                slots: identities.to_vec(),
                listener: bound.name().to_owned(),
                passthrough_names: passthrough_names.unwrap_or_default(),
                tokens,
            },
            metrics: Arc::clone(&bound.metrics),
            access_log: access,
            never_resume_groups: config.never_resume_groups.clone(),
            heartbeats: config.heartbeats.clone(),
            limits: self.limits(bound),
            request_limits: config.limits.requests.clone(),
            tunnels,
            drain: watches,
        })
    }

    /// Passes the connections of an L7 listener through that have a configured server name. Open flows continue with
    /// their settings if no name is configured any more.
    fn pass_through(
        &self,
        server: &HttpsServer,
        bound: &BoundListener,
        config: &config::Terminate,
    ) {
        let (configured, current) = (config.passed_through.as_ref(), server.flows());
        let names = configured.map(|configured| configured.server_names.clone());
        let settings = match (configured, &current) {
            (Some(configured), _) => configured.flows.clone(),
            (None, Some(current)) => current.routing.current().flows.clone(),
            (None, None) => return,
        };
        let routing = Routing {
            upstream: Arc::clone(&bound.upstream),
            routes: names.map(|names| (names, Arc::clone(&bound.upstream))).into_iter().collect(),
            transparent: None,
            flows: settings,
            limits: self.limits(bound),
        };
        if let Some(flows) = current {
            flows.routing.replace(routing);
        } else {
            let admission = Rc::clone(server.admission());
            server.set_flows(self.listener_flows(admission, routing, server.drain().clone()));
        }
    }

    fn listener_flows(
        &self,
        admission: Rc<ListenerAdmission>,
        routing: Routing,
        drain: DrainWatcher,
    ) -> Rc<ListenerFlows> {
        let metrics = self.setup.metrics.passthrough(admission.listener());
        ListenerFlows::new(admission, routing, metrics, Rc::clone(&self.flows), drain)
    }

    /// The routing of an L4 listener.
    fn routing(
        &self,
        bound: &BoundListener,
        config: &config::Passthrough,
        routes: &[Arc<Upstream>],
        destinations: &Destinations,
    ) -> Routing {
        let transparent = || Transparent {
            listening: Arc::clone(&self.listen_addresses),
            destinations: destinations.clone(),
        };
        let names = config.routes.iter().map(|route| route.server_names.clone());
        Routing {
            upstream: Arc::clone(&bound.upstream),
            routes: names.zip(routes.iter().cloned()).collect(),
            transparent: bound.config.transparent.then(transparent),
            flows: config.flows.clone(),
            limits: self.limits(bound),
        }
    }

    /// The connections of a listener that this worker serves.
    fn lane(&self, bound: &BoundListener) -> ServedClients {
        match &self.setup.role {
            Role::Accept(None) => ServedClients::All,
            Role::Accept(Some(lane)) => ServedClients::Others {
                identity_lane: lane.clone(),
                handed_over: bound.lane_connections.clone(),
                workers: self.setup.workers,
            },
            Role::IdentityLane(_) => ServedClients::Identities,
        }
    }

    /// This worker's share of the listener's limits.
    fn limits(&self, bound: &BoundListener) -> config::Limits {
        let mut limits = bound.config.limits().clone();
        limits.max_connections = limits.max_connections.div_ceil(self.setup.workers);
        limits
    }

    /// The client of an upstream, which all listeners with that upstream share.
    fn client(&mut self, upstream: &Arc<Upstream>) -> Rc<UpstreamClient> {
        if let Some(client) = self.clients.iter().find(|client| client.is_client_of(upstream)) {
            return Rc::clone(client);
        }
        let warm = match self.setup.role {
            Role::Accept(Some(_)) => WarmClasses::None,
            Role::Accept(None) | Role::IdentityLane(_) => WarmClasses::Identities,
        };
        let client = UpstreamClient::start(upstream, warm, &self.setup.metrics, &self.setup.bodies);
        self.clients.push(Rc::clone(&client));
        client
    }

    /// The deadline of a drain that starts now.
    fn deadline(&self) -> DrainDeadline {
        DrainDeadline::new(self.drain_timeout, self.setup.force.clone())
    }

    /// Drains all listeners. The upstream clients need no drain, since the process ends afterwards.
    async fn drain(mut self) {
        let deadline = self.deadline();
        for listener in self.listeners {
            self.draining.spawn_local(listener.drain(deadline.clone()));
        }
        while self.draining.join_next().await.is_some() {}
        while lingering_connections() > 0 && !deadline.is_over() {
            sleep(DRAIN_POLL).await;
        }
    }
}
