//! jackstay as a process of a run: its workers, its probers and its pools as they ship, on the sockets of the network.
//!
//! What the control thread does with files, signals and the admin endpoint is left out. The configuration is read from
//! text as that of the program is.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
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
use jackstay_core::admission::{DEFAULT_LIMIT, MemoryBudget};
use jackstay_sys::sockets::connector::Connector;
use jackstay_sys::sockets::stream::DetachedListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::spawn_local;
use tokio::time::interval;

use super::certificates::Certificates;
use crate::net::ProcessId;
use crate::net::sockets::SocketNetwork;

/// The port that the clients of a node connect to.
pub const PORT: u16 = 7443;
/// The port of the apiservers.
pub const APISERVER_PORT: u16 = 6443;

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
    /// Its configuration with the upstreams.
    pub active: ActiveConfig,
    writers: Vec<EndpointSetWriter>,
    held: Held,
}

/// What the control thread holds as long as the process runs.
#[derive(Debug)]
struct Held {
    drain: watch::Sender<bool>,
    /// Nothing says that all sockets are closed, or that connections are to close at once.
    _signals: [watch::Sender<bool>; 2],
    /// The workers end without them.
    _commands: Vec<UnboundedSender<Command>>,
}

impl Program {
    /// Begins to drain, as SIGTERM does. The workers do not wait for each other's sockets.
    pub fn drain(&self) {
        self.held.drain.send_replace(true);
    }

    /// Removes an apiserver from the endpoint sets, as discovery does.
    pub fn remove_endpoint(&self, address: IpAddr) {
        for writer in &self.writers {
            let mut specs = writer.current();
            specs.retain(|spec| spec.address.host != address.to_string());
            writer.apply(&specs);
        }
    }
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
    let text = configuration.text(certificates.directory());
    let loaded = jackstay::config::validate_text(Path::new("jackstay.yaml"), &text);
    let mut config = loaded.map_err(|error| io::Error::other(error.to_string()))?.config;
    (configuration.change)(&mut config);
    let metrics = Metrics::new();
    let memory = MemoryBudget::new(DEFAULT_LIMIT);
    let connector = Arc::new(Connector::over(network.of_process(process)));
    let files = &mut LoadedFiles::default();
    let active = ActiveConfig::without_sockets((config, files), connector, (&metrics, &memory))
        .map_err(|error| io::Error::other(error.to_string()))?;
    let (drain, draining) = watch::channel(false);
    let (close, closed) = watch::channel(false);
    let (force, forced) = watch::channel(false);
    let signals = (DrainSignal::new(draining.clone(), closed), forced);
    let commands = start_workers(&active, &metrics, &signals, (network, process))?;
    let writers = active.upstreams.iter().map(|one| EndpointSetWriter::new(Arc::clone(one)));
    let writers: Vec<_> = writers.collect();
    for upstream in &active.upstreams {
        spawn_local(jackstay::control::canary::run(Arc::clone(upstream)));
        // Without a directory, as configured.
        let floors = saved_floors::run(Arc::clone(upstream), Arc::default(), draining.clone());
        spawn_local(floors);
    }
    spawn_local(upkeep(Arc::clone(&metrics)));
    let held = Held { drain, _signals: [close, force], _commands: commands };
    Ok(Rc::new(Program { metrics, active, writers, held }))
}

/// Starts a worker that accepts and the identity lane.
fn start_workers(
    active: &ActiveConfig,
    metrics: &Arc<Metrics>,
    (drain, forced): &(DrainSignal, watch::Receiver<bool>),
    (network, process): (&SocketNetwork, ProcessId),
) -> io::Result<Vec<UnboundedSender<Command>>> {
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
    let mut sockets = HashMap::new();
    for (id, _) in active.listeners.iter().flat_map(|listener| &listener.sockets) {
        let listener = network.listen(process, PORT)?;
        sockets.insert(*id, vec![DetachedListener::Virtual(listener)]);
    }
    // The workers drop it when they have applied the configuration, for which this function does not wait.
    let (applied, _) = unbounded_channel();
    for (commands, sockets) in [(&lane, HashMap::new()), (&worker, sockets)] {
        let command = Command::Apply(active.desired_state(sockets), applied.clone());
        commands.send(command).map_err(|_| io::Error::other("a worker has ended"))?;
    }
    Ok(vec![lane, worker])
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
    fn text(&self, certificates: &Path) -> String {
        let mut text = String::new();
        let endpoints: Vec<_> = self.endpoints.iter().map(|one| format!("\"{one}\"")).collect();
        let (endpoints, directory) = (endpoints.join(", "), certificates.display());
        let &Self { ping_interval, max_connections, .. } = self;
        let interval = ping_interval.as_millis();
        // Writing to a string does not fail.
        let _ = write!(
            text,
            r#"
state_dir: ""
upstreams:
  - name: apiservers
    endpoints: [{endpoints}]
    tls: {{ ca_file: {directory}/ca.crt }}
    connections: {{ max: {max_connections} }}
    health: {{ ping_interval: {interval}ms }}
listeners:
  - name: clients
    bind: ["127.0.0.1:{PORT}"]
    upstream: apiservers
    tls: {{ cert_file: {directory}/serving.pem, key_file: {directory}/serving.pem }}
    client_ca_file: {directory}/ca.crt
    identities: [{{ cert_file: {directory}/node.pem, key_file: {directory}/node.pem }}]
"#
        );
        text
    }
}
