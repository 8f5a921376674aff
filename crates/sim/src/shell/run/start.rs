//! Starts jackstay and the clients of a node.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use jackstay_config::{Config, EndpointKind};
use rustls::pki_types::ServerName;

use super::clients::Holder;
use super::node::Proxy;
use super::world::{ClusterState, Node, World};
use crate::checker::{ClientId, Collection};
use crate::credential::Credential;
use crate::net::sockets::SocketNetwork;
use crate::net::{HostId, SocketOptions};
use crate::peers::bulk::BulkMode;
use crate::peers::reader::ReaderPlan;
use crate::peers::transport::{Client, ClientOptions};
use crate::peers::writer::WriterPlan;
use crate::peers::{self, Peer};
use crate::scenario::{Role, Sim};
use crate::shell::process::Process;
use crate::shell::program::{APISERVER_PORT, Configuration, port_of};
use crate::shell::{store, traffic};

impl World {
    pub(super) fn start_nodes(&mut self, sim: &Sim) -> io::Result<()> {
        for _ in 0..sim.nodes {
            self.start_node(sim, sim.change)?;
        }
        Ok(())
    }

    /// Starts jackstay and the clients of the next node. `change` changes its configuration.
    pub(crate) fn start_node(&mut self, sim: &Sim, change: fn(&mut Config)) -> io::Result<()> {
        let node = self.nodes.len();
        let host = (sim.endpoints + node) as HostId;
        let address =
            |server| SocketAddr::new(SocketNetwork::address_of(server as HostId), APISERVER_PORT);
        let clusters = sim.apiservers().into_iter();
        let clusters = match sim.balancer {
            Some(_) => {
                vec![vec![SocketAddr::new(SocketNetwork::balancer_address(), APISERVER_PORT)]]
            }
            None => clusters.map(|servers| servers.map(address).collect()).collect(),
        };
        let configuration = Configuration {
            clusters,
            kind: sim.balancer.map_or(EndpointKind::Apiserver, |balancer| balancer.kind),
            ping_interval: sim.ping_interval,
            max_connections: sim.max_connections,
            has_identities: sim.has_identities,
            has_identity_lane: sim.has_identity_lane,
            drain_timeout: sim.drain_timeout,
            state_dir: self.certificates.directory().join(format!("state-{node}")),
            change,
        };
        let of = (&self.network, host);
        let proxy = Proxy::start(of, node, configuration, &self.certificates, self.observer())?;
        let mut clients = Vec::new();
        for cluster in 0..self.clusters.len() {
            for (at, role) in sim.roles().enumerate() {
                let peer = self.peer(sim, (node, cluster, at))?;
                clients.push(Process::start(run_client(peer, role)));
            }
        }
        self.nodes.push(Node { proxy, _clients: clients });
        Ok(())
    }

    /// What a client has. `at`: its number among those of its cluster on its node.
    fn peer(&mut self, sim: &Sim, (node, cluster, at): (usize, usize, usize)) -> io::Result<Peer> {
        let host = (sim.endpoints + node) as HostId;
        let before = (node * self.clusters.len() + cluster) * sim.roles().count();
        let number = u16::try_from(before + at).map_err(io::Error::other)?;
        let credential = sim.credential_of(at);
        let network = &self.network;
        let network = network.of_process_with(network.add_process(host), SocketOptions::go());
        let ClusterState { store, observer, .. } = &self.clusters[cluster];
        let address = (Ipv4Addr::LOCALHOST, port_of(cluster)).into();
        let name = ServerName::try_from("localhost").map_err(io::Error::other)?;
        let tls = match credential {
            Credential::Certificate => self.certificates.client()?,
            _ => self.certificates.anonymous()?,
        };
        let options = ClientOptions {
            token: credential.token(number, 0),
            name: Some(traffic::client_name(node, number)),
            // A run without a compressed watch or list breaks a rule.
            accepts_gzip: sim.is_compressed && number % 3 != 1,
            ..ClientOptions::default()
        };
        let client = Client::new(network, address, tls, name, options);
        let holder = Holder::new((store, cluster), (node, number), credential, client.clone());
        self.holders.push(holder);
        Ok(Peer {
            id: ClientId { number, group: Some(credential.group(node)) },
            client,
            observer: observer.clone(),
            stop: self.stop.clone(),
        })
    }
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
        Role::GroupReaders | Role::GroupWriters | Role::GroupInformers => {
            run_group_client(peer, role).await;
        }
        Role::Informers if number.is_multiple_of(4) => {
            peers::informer::run(peer, Collection::PODS).await;
        }
        Role::Informers => peers::informer::run(peer, Collection::CONFIG_MAPS).await,
        Role::WatchLists => peers::informer::run_watch_lists(peer, Collection::CONFIG_MAPS).await,
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
            peers::hostile::run(peer, Collection::PODS, store::PODS).await;
        }
    }
}

/// What a client of the aggregated group does.
async fn run_group_client(peer: Peer, role: Role) {
    let (collection, objects) = (Collection::WIDGETS, store::WIDGETS);
    match role {
        Role::GroupReaders => {
            let interval = Duration::from_millis(100);
            let plan = ReaderPlan { collection, objects, interval, names_versions: false };
            peers::reader::run(peer, plan).await;
        }
        Role::GroupWriters => {
            let interval = Duration::from_millis(200);
            peers::writer::run(peer, WriterPlan { collection, objects, interval }).await;
        }
        _ => peers::informer::run(peer, collection).await,
    }
}
