//! A run of a scenario: starts the processes, begins and ends the faults, and judges what the clients have seen.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use jackstay::observe::Metrics;
use jackstay_apiserver::cluster::{Cluster, Snapshot};
use jackstay_config::Config;
use jackstay_core::endpoint_state::EndpointState;
use jackstay_core::pool::EndpointKey;
use jackstay_sys::clock;
use jackstay_sys::simulation::SimulatedRun;
use tokio::time::{sleep, sleep_until};

use super::certificates::Certificates;
use super::process::Process;
use super::program::{APISERVER_PORT, Configuration, Program};
use super::servers::Apiserver;
use super::traffic::Sources;
use super::{kernel, panics, runtime, store};
use crate::checker::{self, Collection, Moment};
use crate::faults::{Fault, FaultKind};
use crate::fleet::{FleetRun, Sampler};
use crate::invariants::Findings;
use crate::net::sockets::SocketNetwork;
use crate::net::{HostId, Link};
use crate::peers::bulk::BulkMode;
use crate::peers::hostile::Hostility;
use crate::peers::reader::ReaderPlan;
use crate::peers::writer::WriterPlan;
use crate::peers::{self, Observer, Peer, Stop, Stopper};
use crate::scenario::{Role, Sim};

mod clients;
mod faults;
mod node;

use self::clients::{Holder, check_users, log_own_requests};
use self::node::Proxy;
use super::store::StoreRestore;

/// The date at the beginning of every run, since the epoch: 2030-01-01.
const START: Duration = Duration::from_secs(1_893_456_000);
/// The date at which the process starts, an hour before.
const STARTED: Duration = Duration::from_secs(1_893_452_400);
/// The time for what clients have left to end.
const REST: Duration = Duration::from_secs(60);
/// No request of jackstay's own takes longer, if its apiserver answers. A stream that is open before and after it is left
/// over.
const LONGEST_PROBE: Duration = Duration::from_secs(1);

/// The result of a run.
#[derive(Debug)]
pub struct ShellRun {
    /// What was found.
    pub findings: Findings,
    /// Packets of the network.
    pub packets: u64,
    /// The hash of the log.
    pub hash: u64,
    /// The log.
    pub log: String,
}

/// Runs a scenario for this time, then ends the clients and looks for what is left over. A process makes one run. `traces`:
/// it keeps a log.
///
/// # Errors
/// A process of the run cannot be started.
pub fn run(sim: &Sim, time: Duration, traces: bool) -> io::Result<ShellRun> {
    run_world(sim, traces, async |mut world| {
        world.start_nodes(sim)?;
        world.pass(&sim.faults, time).await?;
        Ok(world.finish(&sim.faults).await)
    })
}

/// Runs a scenario as [`run`] does for this many seconds, and counts what the apiservers bear in each.
///
/// # Errors
/// A process of the run cannot be started.
pub fn run_fleet(sim: &Sim, seconds: usize) -> io::Result<FleetRun> {
    let time = Duration::from_secs(seconds as u64);
    run_world(sim, false, async |mut world| {
        world.start_nodes(sim)?;
        let sampler = world.sampler();
        let (passed, load) = tokio::join!(world.pass(&sim.faults, time), sampler.run(seconds));
        passed?;
        Ok(FleetRun { load, run: world.finish(&sim.faults).await })
    })
}

/// Runs `main` with the apiservers of a scenario on virtual time.
pub(crate) fn run_world<T>(
    sim: &Sim,
    traces: bool,
    main: impl AsyncFnOnce(World) -> io::Result<T>,
) -> io::Result<T> {
    panics::record();
    kernel::begin_run(sim.seed, STARTED);
    // The clock of the metrics is compared with that of the processor, which takes some time on both.
    drop(Metrics::new());
    kernel::stop_clocks();
    kernel::set_time(START);
    let hosts = sim.endpoints + sim.nodes;
    let network = |start| SocketNetwork::new(sim.seed, start, hosts, sim.endpoints);
    runtime::run(START, network, |network| async move {
        let _run = SimulatedRun::begin();
        let world = World::start(sim, network)?;
        if traces {
            world.network.set_tracing(true);
            world.observer.log_lines();
        }
        main(world).await
    })
}

/// The processes of a run.
pub(crate) struct World {
    start: Instant,
    pub(crate) network: SocketNetwork,
    pub(crate) cluster: Cluster,
    pub(crate) servers: Vec<Apiserver>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) observer: Observer,
    stopper: Stopper,
    stop: Stop,
    pub(crate) certificates: Rc<Certificates>,
    /// The clients of all nodes.
    holders: Vec<Holder>,
    /// The last backup of etcd, and its version.
    backup: Option<(Snapshot, u64)>,
    restores: Vec<StoreRestore>,
    /// The groups of clients whose floors were lost, and when.
    forgotten: Vec<(u32, Moment)>,
}

/// jackstay on a host, and its clients.
pub(crate) struct Node {
    proxy: Proxy,
    _clients: Vec<Process>,
}

impl World {
    fn start(sim: &Sim, network: SocketNetwork) -> io::Result<Self> {
        network.change_all_links(|link| {
            link.rate = sim.rate;
            if let Some((latency, jitter)) = sim.link {
                (link.latency, link.jitter) = (latency, jitter);
            }
        });
        let certificates = Rc::new(Certificates::new()?);
        let cluster = store::filled(UNIX_EPOCH + START)?;
        if sim.roles().any(|role| role == Role::Bulk) {
            store::add_secrets(&cluster)?;
        }
        let mut servers = Vec::new();
        for host in 0..sim.endpoints as HostId {
            let max_streams = sim.max_streams as u32;
            let server = Apiserver::start(&network, host, &cluster, &certificates, max_streams)?;
            servers.push(server);
        }
        let (stopper, stop) = peers::stop_signal();
        Ok(Self {
            start: clock::now(),
            network,
            cluster,
            servers,
            nodes: Vec::new(),
            observer: Observer::new(),
            stopper,
            stop,
            certificates,
            holders: Vec::new(),
            backup: None,
            restores: Vec::new(),
            forgotten: Vec::new(),
        })
    }

    /// Counts what the apiservers bear.
    fn sampler(&self) -> Sampler {
        Sampler {
            network: self.network.clone(),
            servers: self.servers.iter().map(|server| server.server().clone()).collect(),
            programs: self.nodes.iter().map(Node::program).collect(),
        }
    }

    fn start_nodes(&mut self, sim: &Sim) -> io::Result<()> {
        for _ in 0..sim.nodes {
            self.start_node(sim, |_| {})?;
        }
        Ok(())
    }

    /// Starts jackstay and the clients of the next node. `change` changes its configuration.
    pub(crate) fn start_node(&mut self, sim: &Sim, change: fn(&mut Config)) -> io::Result<()> {
        let node = self.nodes.len();
        let host = (sim.endpoints + node) as HostId;
        let servers = (0..sim.endpoints as HostId).map(SocketNetwork::address_of);
        let configuration = Configuration {
            endpoints: servers.map(|server| SocketAddr::new(server, APISERVER_PORT)).collect(),
            ping_interval: sim.ping_interval,
            max_connections: sim.max_connections,
            has_identities: sim.has_identities,
            has_identity_lane: sim.has_identity_lane,
            drain_timeout: sim.drain_timeout,
            state_dir: self.certificates.directory().join(format!("state-{node}")),
            change,
        };
        let of = (&self.network, host);
        let proxy = Proxy::start(of, node, configuration, &self.certificates, &self.observer)?;
        let mut clients = Vec::new();
        for (at, role) in sim.roles().enumerate() {
            let number = (node * sim.roles().count() + at) as u16;
            let peer = self.peer((host, number), (node, sim.credential_of(at)))?;
            clients.push(Process::start(run_client(peer, role)));
        }
        self.nodes.push(Node { proxy, _clients: clients });
        Ok(())
    }

    /// Lets the time pass, in which the faults begin and end.
    async fn pass(&mut self, faults: &[Fault], time: Duration) -> io::Result<()> {
        let start = clock::now();
        let mut changes: Vec<_> = faults
            .iter()
            .flat_map(|fault| [(Some(fault.at), fault, true), (fault.until, fault, false)])
            .filter_map(|(at, fault, begins)| Some((at?, fault, begins)))
            .collect();
        // The order of faults that begin together is that of the scenario.
        changes.sort_by_key(|(at, ..)| *at);
        for (at, fault, begins) in changes.into_iter().filter(|(at, ..)| *at <= time) {
            sleep_until((start + at).into()).await;
            self.change(fault, begins)?;
        }
        sleep_until((start + time).into()).await;
        Ok(())
    }

    /// Begins or ends a fault.
    pub(crate) fn change(&mut self, fault: &Fault, begins: bool) -> io::Result<()> {
        let host = fault.server as HostId;
        self.observer.log(|| format!("fault {:?} of {host}: {begins}", fault.kind));
        match fault.kind {
            FaultKind::Blackhole => {
                self.network.change_links(host, |link| link.blocked = begins);
            }
            FaultKind::BlackholeOneWay => {
                self.network.change_links_to(host, |link| link.blocked = begins);
            }
            FaultKind::ForgetFlows { dropped } if begins => {
                self.network.forget_flows(host, dropped);
            }
            FaultKind::ForgetFlows { .. } => {}
            FaultKind::Remove if begins => {
                let address = SocketNetwork::address_of(host);
                self.nodes.iter().for_each(|node| node.program().remove_endpoint(address));
            }
            FaultKind::ReplaceUpstream if begins => {
                for node in &self.nodes {
                    node.program().replace_upstream()?;
                }
            }
            FaultKind::Loss(loss) => {
                let loss = if begins { loss } else { 0.0 };
                self.network.change_links(host, |link| link.loss = loss);
            }
            FaultKind::Latency(latency) => {
                let latency = if begins { latency } else { Link::local_network().latency };
                self.network.change_links(host, |link| link.latency = latency);
            }
            kind if kind.is_of_no_server() => self.change_other(fault, begins)?,
            kind => self.servers[fault.server].set_fault(kind, begins)?,
        }
        Ok(())
    }

    /// Whether a server has requests or watches left over, except one that hears of no end.
    fn has_leftovers(&self, number: usize, faults: &[Fault]) -> bool {
        let is_deaf = |fault: &Fault| fault.server == number && fault.drops_packets();
        self.servers[number].open_requests() > 0 && !faults.iter().any(is_deaf)
    }

    /// Ends the clients, waits, and judges the run.
    pub(crate) async fn finish(mut self, faults: &[Fault]) -> ShellRun {
        let time = clock::elapsed(self.start);
        self.stopper.stop();
        self.holders.iter_mut().for_each(Holder::let_go);
        sleep(REST).await;
        let streams: Vec<_> = self.nodes.iter().map(Node::streams).collect();
        sleep(LONGEST_PROBE).await;
        if self.observer.is_logging() {
            log_own_requests(&self.cluster, &self.observer);
        }
        let mut record = self.observer.take();
        let mut history = store::history(&self.cluster, &self.restores);
        history.forgotten.clone_from(&self.forgotten);
        checker::check(&history, &record.observations, &mut record.findings);
        check_users(&self.cluster, &self.holders, &record.observations, &mut record.findings);
        let records = self.cluster.audit().records();
        for (number, node) in self.nodes.iter().enumerate() {
            node.check(number, &streams[number], faults, &mut record.findings);
            let sources = Sources {
                records: &records,
                connects: &self.network.connects_of(node.proxy.number()),
                metrics: &node.program().metrics.render(),
                faults,
                servers: self.servers.len(),
                time,
                start: (self.start, UNIX_EPOCH + START),
            };
            sources.traffic(number).check(number, &mut record.findings);
        }
        for number in 0..self.servers.len() {
            if self.has_leftovers(number, faults) {
                let count = self.servers[number].open_requests();
                let text = format!("apiserver {number} has {count} streams left over");
                record.findings.violation(text);
            }
        }
        for panic in panics::take() {
            record.findings.violation(panic);
        }
        let mut hasher = DefaultHasher::new();
        self.network.hash().hash(&mut hasher);
        record.observations.hash(&mut hasher);
        let lines = record.lines.unwrap_or_default();
        let lines = lines.into_iter().map(|(at, line)| format!("{at:?} {line}\n"));
        ShellRun {
            packets: self.network.packets(),
            hash: hasher.finish(),
            log: self.network.log() + &lines.collect::<String>(),
            findings: record.findings,
        }
    }
}

impl Node {
    /// jackstay as it runs now.
    pub(crate) fn program(&self) -> Rc<Program> {
        self.proxy.program()
    }

    /// The endpoints to which streams are open.
    fn streams(&self) -> Vec<EndpointKey> {
        let upstreams = self.program().upstreams();
        let endpoints = upstreams.iter().flat_map(|upstream| upstream.endpoints().to_vec());
        endpoints.filter(|one| one.status().streams > 0).map(|one| one.key()).collect()
    }

    /// Every endpoint without a fault that lasts is ready again a minute after the end of the scenario, and nothing of the
    /// clients is left over.
    fn check(
        &self,
        number: usize,
        streams: &[EndpointKey],
        faults: &[Fault],
        findings: &mut Findings,
    ) {
        let program = self.program();
        for upstream in &program.upstreams() {
            for (server, endpoint) in upstream.endpoints().iter().enumerate() {
                let lasts = |fault: &Fault| fault.server == server && fault.lasts();
                let state = endpoint.state();
                if state != EndpointState::Ready && !faults.iter().any(lasts) {
                    let state = state.as_str();
                    let text = format!("node {number}: endpoint {server} is {state} at the end");
                    findings.violation(text);
                }
                // Its own requests hang, too.
                let hangs = |fault: &Fault| fault.kind == FaultKind::Hang && lasts(fault);
                let open = endpoint.status().streams;
                let are_left = open > 0 && streams.contains(&endpoint.key());
                if are_left && !faults.iter().any(hangs) {
                    let text =
                        format!("node {number}: {open} streams to endpoint {server} are left over");
                    findings.violation(text);
                }
            }
        }
        let metrics = program.scrape();
        for line in metrics.lines().filter(|line| is_left_over(line)) {
            findings.violation(format!("node {number}: {line} is left over"));
        }
    }
}

/// What is zero when all clients have gone.
const EMPTY_GAUGES: [&str; 7] = [
    "jackstay_requests_in_flight",
    "jackstay_watches",
    "jackstay_held_watches",
    "jackstay_held_body_bytes",
    "jackstay_held_frame_bytes",
    "jackstay_tunnels",
    "jackstay_downstream_connections",
];

/// Whether a line of the metrics is one of [`EMPTY_GAUGES`] and not zero.
fn is_left_over(line: &str) -> bool {
    let Some((series, value)) = line.rsplit_once(' ') else { return false };
    let name = series.split('{').next().unwrap_or(series);
    EMPTY_GAUGES.contains(&name) && value != "0"
}

/// What a client does until it is stopped.
async fn run_client(peer: Peer, role: Role) {
    let number = peer.id.number;
    match role {
        Role::Readers | Role::VersionReaders => {
            let names_versions = matches!(role, Role::VersionReaders);
            // By turns, because only config maps change.
            let (collection, objects) = if names_versions || number.is_multiple_of(2) {
                (Collection::CONFIG_MAPS, store::CONFIG_MAPS)
            } else {
                (Collection::PODS, store::PODS)
            };
            let interval = Duration::from_millis(100);
            let plan = ReaderPlan { collection, objects, interval, names_versions };
            peers::reader::run(peer, plan).await;
        }
        Role::Writers => {
            let plan = WriterPlan {
                collection: Collection::CONFIG_MAPS,
                objects: store::CONFIG_MAPS,
                interval: Duration::from_millis(200),
            };
            peers::writer::run(peer, plan).await;
        }
        Role::Informers if number.is_multiple_of(4) => {
            peers::informer::run(peer, Collection::PODS).await;
        }
        Role::Informers => peers::informer::run(peer, Collection::CONFIG_MAPS).await,
        Role::ShortWatches => {
            peers::informer::run_short_watches(peer, Collection::CONFIG_MAPS).await;
        }
        Role::Uploaders => peers::upload::run(peer, Collection::CONFIG_MAPS).await,
        Role::Kubelets => {
            let name = format!("node-{number}");
            peers::lease::run_kubelet(peer, Collection::NODE_LEASES, name).await;
        }
        Role::Leaders => {
            let name = format!("leader-{number}");
            peers::lease::run_leader(peer, Collection::LEADER_LEASES, name).await;
        }
        Role::Bulk => {
            let modes = [BulkMode::Pages, BulkMode::Whole, BulkMode::Slow];
            let mode = modes[usize::from(number) % modes.len()];
            peers::bulk::run(peer, Collection::SECRETS, mode).await;
        }
        Role::Hostile => {
            peers::hostile::run(peer, Collection::PODS, store::PODS, Hostility::Burst).await;
        }
    }
}
