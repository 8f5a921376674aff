//! The processes of a run.

use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use jackstay_apiserver::cluster::{Cluster, Snapshot};
use jackstay_apiserver::pki::Issued;
use jackstay_sys::clock;
use tokio::time::sleep_until;

use super::clients::Holder;
use super::node::Proxy;
use crate::balancer::{Balancer, Distinction};
use crate::checker::Moment;
use crate::faults::Fault;
use crate::fleet::Sampler;
use crate::invariants::Promises;
use crate::net::HostId;
use crate::net::sockets::SocketNetwork;
use crate::peers::{self, Observer, Stop, Stopper};
use crate::scenario::{Role, Sim};
use crate::shell::certificates::Certificates;
use crate::shell::kernel::START;
use crate::shell::process::Process;
use crate::shell::program::Program;
use crate::shell::servers::Apiserver;
use crate::shell::store::{self, StoreRestore};

/// Writes by which the version of a store is above that of the cluster before, so that no version of one is taken for
/// one of the other.
const WRITES_BEFORE: u64 = 500;

/// The processes of a run.
pub(crate) struct World {
    pub(super) start: Instant,
    /// Requests share one stream of one connection to one apiserver, which has no fault.
    pub(super) has_one_stream: bool,
    /// The balancer in front of the apiservers.
    pub(super) balancer: Option<Balancer>,
    /// Apiservers compress watches that begin with all objects.
    pub(super) is_compressed: bool,
    pub(crate) network: SocketNetwork,
    pub(crate) clusters: Vec<ClusterState>,
    pub(crate) servers: Vec<Apiserver>,
    pub(crate) nodes: Vec<Node>,
    pub(super) stopper: Stopper,
    pub(super) stop: Stop,
    pub(crate) certificates: Rc<Certificates>,
    /// The clients of all nodes.
    pub(super) holders: Vec<Holder>,
    /// The last backup of etcd, and its version.
    pub(super) backup: Option<(Snapshot, u64)>,
    pub(super) restores: Vec<StoreRestore>,
    /// The groups of clients whose floors were lost, and when.
    pub(super) forgotten: Vec<(u32, Moment)>,
    /// The promises of the clusters after the first one.
    pub(super) other_promises: Promises,
}

/// A cluster.
pub(crate) struct ClusterState {
    pub(crate) store: Cluster,
    /// What its clients see.
    pub(crate) observer: Observer,
}

/// jackstay on a host, and its clients.
pub(crate) struct Node {
    pub(super) proxy: Proxy,
    pub(super) _clients: Vec<Process>,
}

impl World {
    pub(super) fn start(sim: &Sim, network: SocketNetwork) -> io::Result<Self> {
        network.change_all_links(|link| {
            link.rate = sim.rate;
            if let Some((latency, jitter)) = sim.link {
                (link.latency, link.jitter) = (latency, jitter);
            }
        });
        let certificates = Rc::new(Certificates::new()?);
        let shared = add_balancer(sim, &network, &certificates)?;
        let (mut clusters, mut servers) = (Vec::new(), Vec::new());
        for (number, apiservers) in sim.apiservers().into_iter().enumerate() {
            let writes_before = WRITES_BEFORE * number as u64;
            let store = store::filled(UNIX_EPOCH + START, sim.bookmark_interval, writes_before)?;
            if sim.roles().any(|role| role == Role::Bulk) {
                store::add_secrets(&store)?;
            }
            if sim.has_group() {
                store::add_widgets(&store)?;
            }
            for host in apiservers {
                let options = (sim.max_streams as u32, sim.is_compressed);
                let host = host as HostId;
                let certificate = match &shared {
                    Some(shared) => shared.clone(),
                    None => serving_certificate(&certificates, host)?,
                };
                let of = (&*certificates, certificate);
                let server = Apiserver::start(&network, host, &store, of, options)?;
                if sim.balancer.is_some_and(|one| one.distinction == Distinction::Nothing) {
                    server.advertise("balancer");
                }
                servers.push(server);
            }
            let first: Option<&ClusterState> = clusters.first();
            let observer = first.map(|first| first.observer.beside()).unwrap_or_default();
            clusters.push(ClusterState { store, observer });
        }
        let (stopper, stop) = peers::stop_signal();
        Ok(Self {
            start: clock::now(),
            has_one_stream: sim.has_one_stream(),
            balancer: sim.balancer,
            is_compressed: sim.is_compressed,
            network,
            clusters,
            servers,
            nodes: Vec::new(),
            stopper,
            stop,
            certificates,
            holders: Vec::new(),
            backup: None,
            restores: Vec::new(),
            forgotten: Vec::new(),
            other_promises: sim.other_promises,
        })
    }

    /// The store of the first cluster.
    pub(crate) fn store(&self) -> &Cluster {
        &self.clusters[0].store
    }

    /// Turns the log on.
    pub(super) fn log_lines(&self) {
        self.network.set_tracing(true);
        self.clusters.iter().for_each(|cluster| cluster.observer.log_lines());
    }

    /// What the clients of the first cluster see.
    pub(crate) fn observer(&self) -> &Observer {
        &self.clusters[0].observer
    }

    /// Counts what the apiservers bear.
    pub(super) fn sampler(&self) -> Sampler {
        Sampler {
            network: self.network.clone(),
            servers: self.servers.iter().map(|server| server.server().clone()).collect(),
            programs: self.nodes.iter().map(Node::program).collect(),
        }
    }

    /// Lets the time pass, in which the faults begin and end.
    pub(super) async fn pass(&mut self, faults: &[Fault], time: Duration) -> io::Result<()> {
        let start = clock::now();
        let mut changes: Vec<_> = faults
            .iter()
            .flat_map(|fault| [(Some(fault.at), fault, true), (fault.until, fault, false)])
            .filter_map(|(at, fault, begins)| Some((at?, fault, Some(begins))))
            .collect();
        if let Some(balancer) = self.balancer {
            let of_checks = |fault| balancer.changes(fault).map(move |at| (at, fault, None));
            changes.extend(faults.iter().flat_map(of_checks));
        }
        // The order of faults that begin together is that of the scenario.
        changes.sort_by_key(|(at, ..)| *at);
        for (at, fault, begins) in changes.into_iter().filter(|(at, ..)| *at <= time) {
            sleep_until((start + at).into()).await;
            match (begins, self.balancer) {
                (Some(begins), _) => self.change(fault, begins)?,
                (None, Some(balancer)) => {
                    let is_in = balancer.is_in(faults, fault.server, at);
                    self.observer().log(|| format!("backend {} is in: {is_in}", fault.server));
                    self.network.set_backend(fault.server as HostId, is_in);
                }
                (None, None) => {}
            }
        }
        sleep_until((start + time).into()).await;
        Ok(())
    }
}

/// Adds the balancer of a scenario. Returns the serving certificate that all apiservers behind it have.
fn add_balancer(
    sim: &Sim,
    network: &SocketNetwork,
    certificates: &Certificates,
) -> io::Result<Option<Issued>> {
    let Some(balancer) = sim.balancer else { return Ok(None) };
    let hosts: Vec<_> = (0..sim.endpoints as HostId).collect();
    network.add_balancer(&hosts, balancer.is_sticky, sim.seed);
    let is_shared = balancer.distinction != Distinction::Certificate;
    is_shared.then(|| serving_certificate(certificates, 0)).transpose()
}

/// A serving certificate for a host, and for the balancer that leads to it.
pub(super) fn serving_certificate(certificates: &Certificates, host: HostId) -> io::Result<Issued> {
    let (own, balancer) = (SocketNetwork::address_of(host), SocketNetwork::balancer_address());
    certificates.serving(&[&own.to_string(), &balancer.to_string()])
}

impl Node {
    /// jackstay as it runs now.
    pub(crate) fn program(&self) -> Rc<Program> {
        self.proxy.program()
    }
}
