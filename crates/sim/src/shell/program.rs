//! jackstay as a process of a run: its workers, its probers and its pools as they ship, on the sockets of the network.
//!
//! What the control thread does with files, signals and the admin endpoint is left out. The configuration is read from
//! text as that of the program is.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use jackstay::app::active::ActiveConfig;
use jackstay::app::drain_signal::DrainSignal;
use jackstay::app::worker::{Command, Role, WorkerSetup};
use jackstay::config::Config;
use jackstay::control::endpoint_set::EndpointSetWriter;
use jackstay::control::saved_floors;
use jackstay::net::loaded_files::LoadedFiles;
use jackstay::observe::{Liveness, Metrics};
use jackstay::proxy::identity_lane::IdentityLane;
use jackstay::proxy::request_body;
use jackstay::upstream::Upstream;
use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};
use jackstay_sys::sockets::connector::Connector;
use jackstay_sys::sockets::stream::DetachedListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_local};
use tokio::time::interval;

use super::certificates::Certificates;
use crate::net::ProcessId;
use crate::net::sockets::SocketNetwork;

/// The port that the clients of a node connect to.
pub const PORT: u16 = 7443;
/// The port of the listener after [`Program::replace_upstream`]. Connections to [`PORT`] remain.
const SECOND_PORT: u16 = PORT + 1;
/// `shutdown.drain_timeout`: how long the requests of a replaced upstream go on.
const REPLACED_WITHIN: Duration = Duration::from_millis(300);
/// The port of the apiservers.
pub const APISERVER_PORT: u16 = 6443;

/// The place of the identity lane among the workers. It has no sockets.
const IDENTITY_LANE: usize = 0;

/// What a run configures; the rest has the program's defaults.
#[derive(Debug, Clone)]
pub struct Configuration {
    /// The addresses of the apiservers.
    pub endpoints: Vec<SocketAddr>,
    /// `health.ping_interval`.
    pub ping_interval: Duration,
    /// `connections.max`.
    pub max_connections: usize,
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
    held: Held,
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
    writers: Vec<EndpointSetWriter>,
    /// Those of the upstreams.
    tasks: Vec<JoinHandle<()>>,
}

/// What the control thread holds as long as the process runs.
#[derive(Debug)]
struct Held {
    drain: watch::Sender<bool>,
    /// Nothing says that all sockets are closed, or that connections are to close at once.
    _signals: [watch::Sender<bool>; 2],
    /// The workers end without them.
    commands: Vec<UnboundedSender<Command>>,
}

impl Program {
    /// Begins to drain, as SIGTERM does. The workers do not wait for each other's sockets.
    pub fn drain(&self) {
        self.held.drain.send_replace(true);
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
    /// their requests have, at the latest after [`REPLACED_WITHIN`].
    ///
    /// # Errors
    /// The second port has a listener.
    pub fn replace_upstream(&self) -> io::Result<()> {
        let second = ("replaced", SECOND_PORT);
        let active = self.parts.load(second, &self.metrics)?;
        for (number, commands) in self.held.commands.iter().enumerate() {
            let port = (number != IDENTITY_LANE).then_some(SECOND_PORT);
            send(commands, self.parts.apply(&active, port)?)?;
        }
        let next = Current::start(active, &self.held.drain.subscribe());
        let last = self.current.replace(next);
        last.tasks.iter().for_each(JoinHandle::abort);
        Ok(())
    }
}

impl Current {
    /// Starts the tasks of the upstreams.
    fn start(active: ActiveConfig, draining: &watch::Receiver<bool>) -> Self {
        let writers = active.upstreams.iter().map(|one| EndpointSetWriter::new(Arc::clone(one)));
        let writers: Vec<_> = writers.collect();
        let mut tasks = Vec::new();
        for upstream in &active.upstreams {
            tasks.push(spawn_local(jackstay::control::canary::run(Arc::clone(upstream))));
            // Without a directory, as configured.
            let (drain, end) = (draining.clone(), draining.clone());
            let floors = saved_floors::run(Arc::clone(upstream), Arc::default(), drain, end);
            tasks.push(spawn_local(floors));
        }
        Self { active, writers, tasks }
    }
}

impl Parts {
    /// Loads a configuration with an upstream of this name and a listener on this port.
    fn load(&self, names: (&str, u16), metrics: &Arc<Metrics>) -> io::Result<ActiveConfig> {
        let text = self.configuration.text(&self.certificates, names);
        let loaded = jackstay::config::validate_text(Path::new("jackstay.yaml"), &text);
        let mut config = loaded.map_err(|error| io::Error::other(error.to_string()))?.config;
        (self.configuration.change)(&mut config);
        let files = &mut LoadedFiles::default();
        let connector = Arc::clone(&self.connector);
        ActiveConfig::without_sockets((config, files), connector, (metrics, &self.memory))
            .map_err(|error| io::Error::other(error.to_string()))
    }

    /// The command to serve this configuration, with listeners on this port.
    fn apply(&self, active: &ActiveConfig, port: Option<u16>) -> io::Result<Command> {
        let mut sockets = HashMap::new();
        if let Some(port) = port {
            for (id, _) in active.listeners.iter().flat_map(|listener| &listener.sockets) {
                let listener = self.network.listen(self.process, port)?;
                sockets.insert(*id, vec![DetachedListener::Virtual(listener)]);
            }
        }
        // The workers drop it when they have applied the configuration, for which this function does not wait.
        let (applied, _) = unbounded_channel();
        Ok(Command::Apply(active.desired_state(sockets), applied))
    }
}

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
    let (drain, draining) = watch::channel(false);
    let (close, closed) = watch::channel(false);
    let (force, forced) = watch::channel(false);
    let signals = (DrainSignal::new(draining.clone(), closed), forced);
    let commands = start_workers(&metrics, &signals);
    send(&commands[IDENTITY_LANE], parts.apply(&active, None)?)?;
    send(&commands[1], parts.apply(&active, Some(PORT))?)?;
    let current = RefCell::new(Current::start(active, &draining));
    spawn_local(upkeep(Arc::clone(&metrics)));
    let held = Held { _signals: [close, force], drain, commands };
    Ok(Rc::new(Program { metrics, parts, current, held }))
}

/// Starts the identity lane and a worker that accepts.
fn start_workers(
    metrics: &Arc<Metrics>,
    (drain, forced): &(DrainSignal, watch::Receiver<bool>),
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
        spawn_local(worker.run_here(commands));
        sender
    };
    let (sender, connections) = unbounded_channel();
    let lane = start("identity lane", Role::IdentityLane(connections));
    let worker = start("worker 0", Role::Accept(Some(IdentityLane::new(sender))));
    vec![lane, worker]
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
    fn text(&self, certificates: &Path, (name, port): (&str, u16)) -> String {
        let mut text = String::new();
        let endpoints: Vec<_> = self.endpoints.iter().map(|one| format!("\"{one}\"")).collect();
        let (endpoints, directory) = (endpoints.join(", "), certificates.display());
        let &Self { ping_interval, max_connections, .. } = self;
        let interval = ping_interval.as_millis();
        let drain = REPLACED_WITHIN.as_millis();
        // Writing to a string does not fail.
        let _ = write!(
            text,
            r#"
state_dir: ""
shutdown: {{ drain_timeout: {drain}ms }}
upstreams:
  - name: {name}
    endpoints: [{endpoints}]
    tls: {{ ca_file: {directory}/ca.crt }}
    connections: {{ max: {max_connections} }}
    health: {{ ping_interval: {interval}ms }}
listeners:
  - name: clients
    bind: ["127.0.0.1:{port}"]
    upstream: {name}
    tls: {{ cert_file: {directory}/serving.pem, key_file: {directory}/serving.pem }}
    client_ca_file: {directory}/ca.crt
    identities: [{{ cert_file: {directory}/node.pem, key_file: {directory}/node.pem }}]
"#
        );
        text
    }
}
