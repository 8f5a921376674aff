//! jackstay as a process of a run: its workers, its probers and its pools as they ship, on the sockets of the network.
//!
//! What the control thread does with files, signals and the admin endpoint is left out. The configuration is read from
//! text as that of the program is.

use std::cell::RefCell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use jackstay::app::SocketId;
use jackstay::app::active::ActiveConfig;
use jackstay::app::drain_signal::DrainSignal;
use jackstay::app::worker::{Command, Role, WorkerSetup};
use jackstay::control::endpoint_set::EndpointSetWriter;
use jackstay::control::saved_floors::{self, LAST_WRITE};
use jackstay::observe::{Liveness, Metrics};
use jackstay::proxy::identity_lane::IdentityLane;
use jackstay::proxy::request_body;
use jackstay::upstream::Upstream;
use jackstay_config::{Config, EndpointKind, MemoryLimit};
use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};
use jackstay_net::loaded_files::LoadedFiles;
use jackstay_sys::sockets::connector::Connector;
use jackstay_sys::sockets::stream::DetachedListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::{interval, timeout};

use super::certificates::Certificates;
use crate::net::sockets::SocketNetwork;
use crate::net::{HostId, ProcessId};

/// The port that the clients of a node connect to.
pub const PORT: u16 = 7443;
/// The port of the listener after [`Program::replace_upstream`]. Connections to [`PORT`] remain.
const SECOND_PORT: u16 = PORT + 1;
/// The ports of the listeners of two clusters differ by this number.
const PORTS_OF_CLUSTER: u16 = 10;
/// The port of the apiservers.
pub const APISERVER_PORT: u16 = 6443;

/// The port that the clients of a cluster connect to.
pub fn port_of(cluster: usize) -> u16 {
    PORT + PORTS_OF_CLUSTER * cluster as u16
}

/// The number of the apiserver at an address; `servers`: how many there are.
pub fn server_of(address: &str, servers: usize) -> Option<usize> {
    let address: IpAddr = address.parse().ok()?;
    (0..servers).find(|&server| SocketNetwork::address_of(server as HostId) == address)
}

/// What a run configures; the rest has the program's defaults.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// The endpoints of each cluster: its apiservers, or the balancer in front of them.
    pub clusters: Vec<Vec<SocketAddr>>,
    /// What is behind each endpoint (`kind`).
    pub kind: EndpointKind,
    /// `health.ping_interval`.
    pub ping_interval: Duration,
    /// `connections.max`.
    pub max_connections: usize,
    /// Whether the listener has the certificate of the node (`identities`).
    pub has_identities: bool,
    /// Whether clients with a certificate are served by a worker of their own (`identity_lane`).
    pub has_identity_lane: bool,
    /// `shutdown.drain_timeout`.
    pub drain_timeout: Duration,
    /// Where it keeps the floors of its clients.
    pub state_dir: PathBuf,
    /// Changes the rest.
    pub change: fn(&mut Config),
}

/// A started jackstay. Its tasks run on the `LocalSet` that [`start`] was called on.
#[derive(Debug)]
pub struct Program {
    /// Its metrics.
    pub metrics: Arc<Metrics>,
    parts: Parts,
    current: RefCell<Current>,
    control: Control,
}

/// What all configurations of the process are made of.
#[derive(Debug)]
struct Parts {
    configuration: Configuration,
    certificates: PathBuf,
    connector: Arc<Connector>,
    memory: Arc<MemoryBudget>,
    network: SocketNetwork,
    process: ProcessId,
}

/// The configuration in use.
#[derive(Debug)]
struct Current {
    active: ActiveConfig,
    writers: Vec<Rc<EndpointSetWriter>>,
    /// Those of the upstreams.
    tasks: Vec<JoinHandle<()>>,
}

/// What the control thread holds as long as the process runs.
#[derive(Debug)]
struct Control {
    /// Becomes true with the termination signal.
    drain: watch::Sender<bool>,
    /// Becomes true when no worker accepts any more.
    sockets_closed: watch::Sender<bool>,
    _force: watch::Sender<bool>,
    /// The workers end without them. The last one accepts.
    commands: Vec<UnboundedSender<Command>>,
    /// The number of workers that have ended.
    ended: watch::Receiver<usize>,
    /// Becomes true when the process ends.
    end: watch::Sender<bool>,
}

impl Program {
    /// Begins to drain, as SIGTERM does. The workers do not wait for each other's sockets.
    pub fn begin_drain(&self) {
        self.control.drain.send_replace(true);
    }

    /// Its metrics as a scrape shows them.
    pub fn scrape(&self) -> String {
        self.metrics.show_memory(&self.parts.memory);
        self.metrics.render()
    }

    /// The upstreams of the configuration in use.
    pub fn upstreams(&self) -> Vec<Arc<Upstream>> {
        self.current.borrow().active.upstreams.clone()
    }

    /// Removes an apiserver from the endpoint sets, as discovery does.
    pub fn remove_endpoint(&self, address: IpAddr) {
        for writer in &self.current.borrow().writers {
            let mut specs = writer.current();
            specs.retain(|spec| spec.address.host != address.to_string());
            writer.apply(&specs);
        }
    }

    /// Applies a configuration whose upstream has another name, as a reload does. The pools of the old one end when
    /// their requests have, at the latest after the drain timeout. Called on the `LocalSet` of the process.
    ///
    /// # Errors
    /// The second port has a listener.
    pub fn replace_upstream(&self) -> io::Result<()> {
        let second = ("replaced", SECOND_PORT);
        let active = self.parts.load(second, &self.metrics)?;
        self.control.apply(&self.parts, &active, SECOND_PORT)?;
        let last = self.current.replace(Current::start(active, &self.control));
        last.tasks.iter().for_each(JoinHandle::abort);
        Ok(())
    }

    /// SIGTERM: closes the socket, drains, and returns when all workers have ended. Does what the control thread does
    /// (`app/control/drain.rs`).
    pub async fn drain(&self) {
        let Control { sockets_closed, commands, ended, end, .. } = &self.control;
        self.begin_drain();
        let (done, mut closed) = unbounded_channel::<Infallible>();
        for worker in commands {
            // It fails if the worker has ended.
            let _ = worker.send(Command::CloseSockets(done.clone()));
        }
        drop(done);
        closed.recv().await;
        sockets_closed.send_replace(true);
        // The senders are tasks of the process.
        let _ = ended.clone().wait_for(|ended| *ended == commands.len()).await;
        end.send_replace(true);
        let _ = timeout(LAST_WRITE, end.closed()).await;
    }
}

impl Current {
    /// Starts the tasks of the upstreams.
    fn start(active: ActiveConfig, control: &Control) -> Self {
        let mut writers = Vec::new();
        let mut tasks = Vec::new();
        for upstream in &active.upstreams {
            let writer = Rc::new(EndpointSetWriter::new(Arc::clone(upstream)));
            let backends =
                jackstay::control::backends::run(Arc::clone(upstream), Rc::clone(&writer));
            tasks.push(spawn_local(backends));
            writers.push(writer);
            tasks.push(spawn_local(jackstay::control::canary::run(Arc::clone(upstream))));
            let state_dir = Arc::new(ArcSwap::from_pointee(active.config.state_dir.clone()));
            let (drain, end) = (control.drain.subscribe(), control.end.subscribe());
            let floors = saved_floors::run(Arc::clone(upstream), state_dir, drain, end);
            tasks.push(spawn_local(floors));
        }
        Self { active, writers, tasks }
    }
}

impl Control {
    /// Makes the workers serve this configuration, with listeners on this port.
    fn apply(&self, parts: &Parts, active: &ActiveConfig, port: u16) -> io::Result<()> {
        let Some((worker, lane)) = self.commands.split_last() else { return Ok(()) };
        for lane in lane {
            send(lane, Parts::apply(active, HashMap::new()))?;
        }
        send(worker, Parts::apply(active, parts.listen(active, port)?))
    }
}

impl Parts {
    /// Loads a configuration with an upstream of this name and a listener on this port.
    fn load(&self, names: (&str, u16), metrics: &Arc<Metrics>) -> io::Result<ActiveConfig> {
        let text = self.configuration.text(&self.certificates, names);
        let loaded = jackstay_config::validate_text(Path::new("jackstay.yaml"), &text);
        let mut config = loaded.map_err(|error| io::Error::other(error.to_string()))?.config;
        (self.configuration.change)(&mut config);
        let files = &mut LoadedFiles::default();
        let connector = Arc::clone(&self.connector);
        ActiveConfig::without_sockets((config, files), connector, (metrics, &self.memory))
            .map_err(|error| io::Error::other(error.to_string()))
    }

    /// The sockets of the listeners of this configuration, of which the first one has this port.
    fn listen(&self, active: &ActiveConfig, port: u16) -> io::Result<Sockets> {
        let mut sockets = HashMap::new();
        for (number, listener) in active.listeners.iter().enumerate() {
            let port = port + PORTS_OF_CLUSTER * number as u16;
            for (id, _) in &listener.sockets {
                let listener = self.network.listen(self.process, port)?;
                sockets.insert(*id, vec![DetachedListener::Virtual(listener)]);
            }
        }
        Ok(sockets)
    }

    /// The command to serve this configuration with these sockets.
    fn apply(active: &ActiveConfig, sockets: Sockets) -> Command {
        // The workers drop it when they have applied the configuration, for which this function does not wait.
        let (applied, _) = unbounded_channel();
        Command::Apply(active.desired_state(sockets), applied)
    }
}

/// The listening sockets of a worker.
type Sockets = HashMap<SocketId, Vec<DetachedListener>>;

fn send(worker: &UnboundedSender<Command>, command: Command) -> io::Result<()> {
    worker.send(command).map_err(|_| io::Error::other("a worker has ended"))
}

/// Starts jackstay as the process of that number, and serves its clients on [`PORT`].
///
/// # Errors
/// The configuration is not accepted, or the port has another listener.
pub fn start(
    configuration: &Configuration,
    certificates: &Certificates,
    (network, process): (&SocketNetwork, ProcessId),
) -> io::Result<Rc<Program>> {
    let metrics = Metrics::new();
    let parts = Parts {
        configuration: configuration.clone(),
        certificates: certificates.directory().to_owned(),
        connector: Arc::new(Connector::over(network.of_process(process))),
        memory: MemoryBudget::new(DEFAULT_LIMIT),
        network: network.clone(),
        process,
    };
    let active = parts.load(("apiservers", PORT), &metrics)?;
    // Otherwise the limit is that of the cgroup of this machine.
    if let MemoryLimit::Bytes(bytes) = active.config.memory_limit {
        parts.memory.set_limit(usize::try_from(bytes).unwrap_or(usize::MAX));
    }
    let (drain, draining) = watch::channel(false);
    let (close, closed) = watch::channel(false);
    let (force, forced) = watch::channel(false);
    let signals = (DrainSignal::new(draining.clone(), closed), forced);
    let (count, ended) = watch::channel(0);
    let (end, _) = watch::channel(false);
    let commands = start_workers(configuration.has_identity_lane, &metrics, &signals, &count);
    let control = Control { drain, sockets_closed: close, _force: force, commands, ended, end };
    control.apply(&parts, &active, PORT)?;
    let current = RefCell::new(Current::start(active, &control));
    spawn_local(upkeep(Arc::clone(&metrics)));
    Ok(Rc::new(Program { metrics, parts, current, control }))
}

/// Starts the identity lane, if there is one, and a worker that accepts. `ended` counts those that have ended.
fn start_workers(
    has_identity_lane: bool,
    metrics: &Arc<Metrics>,
    (drain, forced): &(DrainSignal, watch::Receiver<bool>),
    ended: &watch::Sender<usize>,
) -> Vec<UnboundedSender<Command>> {
    let bodies = request_body::budget();
    let start = |name: &str, role| {
        let (sender, commands): (_, UnboundedReceiver<Command>) = unbounded_channel();
        let worker = WorkerSetup {
            metrics: Arc::clone(metrics),
            bodies: Arc::clone(&bodies),
            workers: 1,
            role,
            drain: drain.clone(),
            force: forced.clone(),
            liveness: Liveness::new(name),
        };
        let (worker, ended) = (worker.run_here(commands), ended.clone());
        spawn_local(async move {
            worker.await;
            ended.send_modify(|ended| *ended += 1);
        });
        sender
    };
    let mut workers = Vec::new();
    let mut lane = None;
    if has_identity_lane {
        let (sender, connections) = unbounded_channel();
        workers.push(start("identity lane", Role::IdentityLane(connections)));
        lane = Some(IdentityLane::new(sender));
    }
    workers.push(start("worker 0", Role::Accept(lane)));
    workers
}

/// As the control thread does.
async fn upkeep(metrics: Arc<Metrics>) {
    let mut ticks = interval(Duration::from_secs(1));
    loop {
        ticks.tick().await;
        metrics.upkeep();
    }
}

impl Configuration {
    /// The file. The upstream of the first cluster has this name, and its listener this port.
    fn text(&self, certificates: &Path, (name, port): (&str, u16)) -> String {
        let (mut upstreams, mut listeners) = (String::new(), String::new());
        for (number, endpoints) in self.clusters.iter().enumerate() {
            let name = if number == 0 { name.to_owned() } else { format!("{name}-{number}") };
            self.upstream(&mut upstreams, certificates, (&name, endpoints));
            let port = port + PORTS_OF_CLUSTER * number as u16;
            let listener = if number == 0 { "clients" } else { &format!("clients-{number}") };
            self.listener(&mut listeners, certificates, (listener, &name, port));
        }
        let &Self { has_identity_lane, .. } = self;
        let (state_dir, drain) = (self.state_dir.display(), self.drain_timeout.as_millis());
        format!(
            "state_dir: {state_dir}\nidentity_lane: {has_identity_lane}\nshutdown: {{ drain_timeout: {drain}ms }}\n\
             upstreams:\n{upstreams}listeners:\n{listeners}"
        )
    }

    fn upstream(
        &self,
        text: &mut String,
        certificates: &Path,
        (name, endpoints): (&str, &[SocketAddr]),
    ) {
        let endpoints: Vec<_> = endpoints.iter().map(|one| format!("\"{one}\"")).collect();
        let (endpoints, directory) = (endpoints.join(", "), certificates.display());
        let (interval, max_connections) = (self.ping_interval.as_millis(), self.max_connections);
        let kind = match self.kind {
            EndpointKind::Apiserver => "apiserver",
            EndpointKind::Auto => "auto",
            EndpointKind::Balancer => "balancer",
        };
        // Writing to a string does not fail.
        let _ = write!(
            text,
            r"  - name: {name}
    endpoints: [{endpoints}]
    kind: {kind}
    tls: {{ ca_file: {directory}/ca.crt }}
    connections: {{ max: {max_connections} }}
    health: {{ ping_interval: {interval}ms }}
"
        );
    }

    fn listener(
        &self,
        text: &mut String,
        certificates: &Path,
        (name, upstream, port): (&str, &str, u16),
    ) {
        let directory = certificates.display();
        let _ = write!(
            text,
            r#"  - name: {name}
    bind: ["127.0.0.1:{port}"]
    upstream: {upstream}
    tls: {{ cert_file: {directory}/serving.pem, key_file: {directory}/serving.pem }}
"#
        );
        if self.has_identities {
            let _ = write!(
                text,
                r"    client_ca_file: {directory}/ca.crt
    identities: [{{ cert_file: {directory}/node.pem, key_file: {directory}/node.pem }}]
"
            );
        }
    }
}
