//! What a script acts on: apiservers with their faults, jackstay, and clients.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant, SystemTime};

use jackstay::observe::events::{Event, EventKind};
use jackstay::upstream::Upstream;
use jackstay::upstream::group_failures::FailingGroupStatus;
use jackstay_apiserver::audit::Record;
use jackstay_apiserver::cluster::Cluster;
use jackstay_apiserver::identity::User;
use jackstay_apiserver::kinds;
use jackstay_apiserver::{ApiServer, Faults};
use jackstay_config::Config;
use serde_json::{Value, json};

use jackstay_sys::clock;
use jackstay_sys::sockets::virtual_network::VirtualNetwork;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::time::sleep;

use super::objects::{CONFIG_MAPS, config_map, widget};
use crate::faults::{Fault, FaultKind};
use crate::net::sockets::SocketNetwork;
use crate::net::{HostId, ProcessId, SocketOptions};
use crate::peers::transport::{Client, ClientOptions};
use crate::scenario::Sim;
use crate::shell::program::{PORT, Program};
use crate::shell::run::world::World;

/// How long [`until`] waits.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time between two looks of [`until`].
const LOOK: Duration = Duration::from_millis(1);
/// The time between two looks at metrics, which take longer.
const LOOK_AT_METRICS: Duration = Duration::from_millis(20);

/// The apiservers and the nodes of a script.
pub struct Testbed {
    sim: Sim,
    world: RefCell<World>,
    faults: RefCell<Vec<Fault>>,
    figures: RefCell<BTreeMap<String, Figure>>,
    began: Instant,
}

/// A measured time and its promise.
#[derive(Debug, Clone, Copy)]
pub struct Figure {
    /// The time.
    pub took: Duration,
    /// The longest time that is promised.
    pub promise: Duration,
}

/// A jackstay of a script.
#[derive(Clone)]
pub struct Proxy {
    program: Rc<Program>,
    host: HostId,
}

impl Testbed {
    pub(crate) fn new(sim: Sim, world: World) -> Self {
        let (world, faults, figures) =
            (RefCell::new(world), RefCell::default(), RefCell::default());
        Self { sim, world, faults, figures, began: clock::now() }
    }

    /// The processes, the faults, and the measured times.
    pub(crate) fn into_parts(self) -> (World, Vec<Fault>, BTreeMap<String, Figure>) {
        (self.world.into_inner(), self.faults.into_inner(), self.figures.into_inner())
    }

    /// A number below `count`, by turns of the seeds.
    pub fn choose(&self, count: usize) -> usize {
        (self.sim.seed % count as u64) as usize
    }

    /// The store.
    pub fn cluster(&self) -> Cluster {
        self.world.borrow().store().clone()
    }

    /// The number of apiservers.
    pub fn servers(&self) -> usize {
        self.sim.endpoints
    }

    /// An apiserver.
    pub fn server(&self, number: usize) -> ApiServer {
        self.world.borrow().servers[number].server().clone()
    }

    /// Changes the faults of the program of an apiserver.
    pub fn set_faults(&self, server: usize, change: impl FnOnce(&mut Faults)) {
        self.server(server).set_faults(change);
    }

    /// Begins a fault.
    pub fn begin(&self, server: usize, kind: FaultKind) {
        let fault = Fault { kind, server, at: clock::elapsed(self.began), until: None };
        self.faults.borrow_mut().push(fault);
        self.change(&fault, true);
    }

    /// Ends a fault.
    pub fn end(&self, server: usize, kind: FaultKind) {
        let mut faults = self.faults.borrow_mut();
        let mut faults = faults.iter_mut().rev();
        let fault = faults.find(|one| one.server == server && one.kind == kind);
        let fault = fault.expect("a fault that has begun");
        fault.until = Some(clock::elapsed(self.began));
        self.change(fault, false);
    }

    /// Begins a fault of every apiserver.
    pub fn begin_all(&self, kind: FaultKind) {
        (0..self.servers()).for_each(|server| self.begin(server, kind));
    }

    /// Ends a fault of every apiserver.
    pub fn end_all(&self, kind: FaultKind) {
        (0..self.servers()).for_each(|server| self.end(server, kind));
    }

    fn change(&self, fault: &Fault, begins: bool) {
        self.world.borrow_mut().change(fault, begins).expect("the process can be started");
    }

    /// All packets of the established connections to the apiservers are dropped. New connections work.
    pub fn lose_flows(&self) {
        self.begin_all(FaultKind::ForgetFlows { dropped: [true; 2] });
    }

    /// The packets of these connections arrive again.
    pub fn restore_flows(&self) {
        let network = self.network();
        (0..self.servers()).for_each(|server| network.remember_flows(server as HostId));
        // What is left over there is found at the end.
        let is_lost = |fault: &Fault| matches!(fault.kind, FaultKind::ForgetFlows { .. });
        self.faults.borrow_mut().retain(|fault| !is_lost(fault));
    }

    /// The network.
    pub fn network(&self) -> SocketNetwork {
        self.world.borrow().network.clone()
    }

    /// The date of the clocks of the apiservers.
    pub fn date(&self) -> SystemTime {
        self.cluster().clock().now()
    }

    /// A new process on the host of an apiserver.
    pub fn process_beside(&self, server: usize) -> ProcessId {
        self.network().add_process(server as HostId)
    }

    /// Starts jackstay on the next node, with a configuration that `change` changes.
    pub fn start(&self, change: fn(&mut Config)) -> Proxy {
        let mut world = self.world.borrow_mut();
        world.start_node(&self.sim, change).expect("jackstay starts");
        let node = world.nodes.len() - 1;
        let program = world.nodes[node].program();
        Proxy { program, host: (self.sim.endpoints + node) as HostId }
    }

    /// Starts jackstay, waits until it is connected to all apiservers, and up to a second more.
    pub async fn start_connected(&self, change: fn(&mut Config)) -> Proxy {
        let proxy = self.start(change);
        proxy.until_connected(self.servers()).await;
        sleep(Duration::from_secs(1).mul_f64(fastrand::f64())).await;
        proxy
    }

    /// A client of jackstay with the certificate of the node.
    pub fn client(&self, proxy: &Proxy) -> Client {
        client_with(self.network_of(proxy), self.tls(), ClientOptions::default())
    }

    /// A client of jackstay with a token, which becomes that of a user.
    pub fn token_client(&self, proxy: &Proxy, token: &str) -> Client {
        let window = ClientOptions::default().stream_window;
        self.client_with_token(self.network_of(proxy), token, window)
    }

    /// [`Self::token_client`] that is a process of this user.
    pub fn user_client(&self, proxy: &Proxy, token: &str, user: u32) -> Client {
        self.narrow_client(proxy, (token, user), ClientOptions::default().stream_window)
    }

    /// [`Self::user_client`] whose streams have a window of so many bytes.
    pub fn narrow_client(&self, proxy: &Proxy, (token, user): (&str, u32), window: u32) -> Client {
        let network = self.network();
        let process = network.add_process_of(proxy.host, user);
        let network = network.of_process_with(process, SocketOptions::go());
        self.client_with_token(network, token, window)
    }

    fn client_with_token(
        &self,
        network: Arc<dyn VirtualNetwork>,
        token: &str,
        stream_window: u32,
    ) -> Client {
        self.cluster().add_token(token, User::new(token, &[]));
        let tls = self.world.borrow().certificates.anonymous().expect("a trusted authority");
        let token = Some(token.to_owned());
        client_with(
            network,
            tls,
            ClientOptions { token, stream_window, ..ClientOptions::default() },
        )
    }

    /// The network as a new process on the host of a jackstay sees it.
    pub fn network_of(&self, proxy: &Proxy) -> Arc<dyn VirtualNetwork> {
        let network = self.network();
        network.of_process_with(network.add_process(proxy.host), SocketOptions::go())
    }

    /// TLS of a client with the certificate of the node.
    pub fn tls(&self) -> ClientConfig {
        self.world.borrow().certificates.client().expect("a certificate")
    }

    /// The requests that match, oldest first.
    pub fn received(&self, wanted: impl Fn(&Record) -> bool) -> Vec<Record> {
        self.cluster().audit().select(wanted)
    }

    /// Creates a config map without a request. Returns its version.
    pub fn create(&self, name: &str) -> u64 {
        self.create_with(name, "1")
    }

    /// [`Self::create`] with this content.
    pub fn create_with(&self, name: &str, value: &str) -> u64 {
        let object = config_map(name, value);
        let created = self.cluster().create(&kinds::CONFIG_MAPS, "default", object, false);
        created.expect("a new name").version
    }

    /// Creates an object of the aggregated group without a request. Returns its version.
    pub fn create_widget(&self, name: &str) -> u64 {
        let created = self.cluster().create(&kinds::WIDGETS, "default", widget(name), false);
        created.expect("a new name").version
    }

    /// A watch of the config maps from the present version.
    pub fn watch_path(&self) -> String {
        format!("{CONFIG_MAPS}?watch=1&resourceVersion={}", self.cluster().version())
    }

    /// The number of watches on an apiserver.
    pub fn watches(&self, server: usize) -> u64 {
        self.server(server).counters().watches.load(Relaxed)
    }

    /// The number of watches on each apiserver.
    pub fn all_watches(&self) -> Vec<u64> {
        (0..self.servers()).map(|server| self.watches(server)).collect()
    }

    /// The apiserver with most watches.
    pub fn with_most_watches(&self) -> usize {
        let watches = self.all_watches();
        (0..watches.len()).max_by_key(|&at| watches[at]).expect("an apiserver")
    }

    /// Records a time, and compares it with its promise.
    #[track_caller]
    pub fn check(&self, what: &str, took: Duration, promise: Duration) {
        let mut figures = self.figures.borrow_mut();
        let figure = figures.entry(what.to_owned()).or_insert(Figure { took, promise });
        figure.took = figure.took.max(took);
        assert!(took <= promise, "{what}: {took:.3?}, promised {promise:?}");
    }
}

fn client_with(
    network: Arc<dyn VirtualNetwork>,
    tls: ClientConfig,
    options: ClientOptions,
) -> Client {
    let options = ClientOptions { retries_after: false, ..options };
    let name = ServerName::try_from("localhost").expect("a name");
    Client::new(network, Proxy::address(), tls, name, options)
}

impl Proxy {
    /// The address that its clients connect to.
    pub fn address() -> SocketAddr {
        (Ipv4Addr::LOCALHOST, PORT).into()
    }

    fn upstream(&self) -> Arc<Upstream> {
        self.program.upstreams().swap_remove(0)
    }

    /// What `/status` says of the endpoint of an apiserver.
    pub fn endpoint(&self, server: usize) -> Value {
        json!(self.upstream().endpoints()[server].status())
    }

    /// Why the endpoint of an apiserver is in its state.
    pub fn reason(&self, server: usize) -> String {
        self.upstream().endpoints()[server].status().reason
    }

    /// The state of the endpoint of an apiserver.
    pub fn state(&self, server: usize) -> &'static str {
        self.upstream().endpoints()[server].state().as_str()
    }

    /// Whether an endpoint serves clients. If none does, `/readyz` fails.
    pub fn is_serving(&self) -> bool {
        self.upstream().is_serving()
    }

    /// The state changes, oldest first.
    pub fn events(&self) -> Vec<Event> {
        self.program.metrics.events().last(usize::MAX)
    }

    /// The connections of clients that were found dead or have drained. Each row names the latest one of a burst.
    pub fn lost_connections(&self) -> Vec<String> {
        let events = self.events().into_iter();
        let lost = events.filter(|event| {
            event.kind == EventKind::Connection
                && matches!(&*event.to, "dead" | "draining")
                && !event.detail.starts_with("class probe")
        });
        lost.map(|event| format!("{} to {}: {}", event.name, event.to, event.reason)).collect()
    }

    /// The number of open streams on each connection of clients in this state.
    pub fn streams_in_state(&self, state: &str) -> Vec<usize> {
        let endpoints = self.upstream().endpoints();
        let connections = endpoints.iter().flat_map(|endpoint| endpoint.status().connections);
        let in_state = connections.filter(|one| one.state == state && one.class != "probe");
        in_state.map(|connection| connection.streams).collect()
    }

    /// The sum of all series that begin with `name`, which may include labels. They are whole numbers.
    pub fn metric(&self, name: &str) -> u64 {
        let metrics = self.program.scrape();
        let lines = metrics.lines().filter(|line| line.starts_with(name));
        let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok());
        values.map(|value| value as u64).sum()
    }

    /// The API groups that fail at an endpoint.
    pub fn failing_groups(&self) -> Vec<FailingGroupStatus> {
        self.upstream().group_failures.list()
    }

    /// The number of watches that continued elsewhere for this reason.
    pub fn resumes(&self, outcome: &str) -> u64 {
        self.metric(&format!("jackstay_watch_resumes_total{{outcome=\"{outcome}\""))
    }

    /// Waits until so many watches are held. Returns how long that took.
    pub async fn until_held(&self, count: u64) -> Duration {
        let began = clock::now();
        while self.metric("jackstay_held_watches") != count {
            assert!(clock::elapsed(began) < PATIENCE, "{count} watches are not held");
            sleep(LOOK_AT_METRICS).await;
        }
        clock::elapsed(began)
    }

    /// Begins to drain, as SIGTERM does.
    pub fn drain(&self) {
        self.program.begin_drain();
    }

    /// Waits until so many endpoints are ready and have a connection for clients.
    pub async fn until_connected(&self, count: usize) {
        let connected = || {
            let endpoints = self.upstream().endpoints();
            let statuses = endpoints.iter().map(|endpoint| endpoint.status());
            let ready = statuses.filter(|endpoint| endpoint.state == "ready");
            let is_connected = ready.filter(|endpoint| {
                let mut connections = endpoint.connections.iter();
                connections.any(|one| one.state == "live" && one.class.starts_with("identity"))
            });
            is_connected.count()
        };
        until(&format!("{count} endpoints are connected"), || connected() >= count).await;
    }

    /// Waits until the endpoint of an apiserver has this state.
    pub async fn until_state(&self, server: usize, state: &str) {
        until(&format!("endpoint {server} is {state}"), || self.state(server) == state).await;
    }
}

/// Waits until a condition holds, which is looked at each millisecond. Returns how long that took.
#[track_caller]
pub fn until(what: &str, condition: impl FnMut() -> bool) -> impl Future<Output = Duration> {
    until_within(PATIENCE, what, condition)
}

/// [`until`] with a limit.
async fn until_within(limit: Duration, what: &str, mut holds: impl FnMut() -> bool) -> Duration {
    let began = clock::now();
    while !holds() {
        assert!(clock::elapsed(began) < limit, "not within {limit:?}: {what}");
        sleep(LOOK).await;
    }
    clock::elapsed(began)
}

/// Runs futures together, and returns their results in their order.
pub async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.into_iter().map(|one| (Box::pin(one), None)).collect();
    std::future::poll_fn(|cx| {
        for (future, result) in &mut running {
            if result.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(cx)
            {
                *result = Some(value);
            }
        }
        if running.iter().any(|(_, result)| result.is_none()) {
            return std::task::Poll::Pending;
        }
        let results = running.iter_mut().filter_map(|(_, result)| result.take());
        std::task::Poll::Ready(results.collect())
    })
    .await
}
