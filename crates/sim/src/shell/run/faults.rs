//! Faults of paths, apiservers, the store, credentials and jackstay.

use std::io;

use super::world::{World, serving_certificate};
use crate::faults::{Fault, FaultKind};
use crate::net::sockets::SocketNetwork;
use crate::net::{HostId, Link};
use crate::shell::store::StoreRestore;

impl World {
    /// Begins or ends a fault.
    pub(crate) fn change(&mut self, fault: &Fault, begins: bool) -> io::Result<()> {
        let host = fault.server as HostId;
        self.observer().log(|| format!("fault {:?} of {host}: {begins}", fault.kind));
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
                    node.proxy.replace_upstream()?;
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
            FaultKind::RenewCertificate if begins => {
                let certificate = serving_certificate(&self.certificates, host)?;
                self.servers[fault.server].renew_certificate(&certificate)?;
            }
            kind if kind.is_of_no_server() => self.change_other(fault, begins)?,
            kind => self.servers[fault.server].set_fault(kind, begins)?,
        }
        Ok(())
    }

    /// Begins or ends a fault that is not one of an apiserver ([`FaultKind::is_of_no_server`]).
    fn change_other(&mut self, fault: &Fault, begins: bool) -> io::Result<()> {
        let node = fault.server;
        match fault.kind {
            FaultKind::RevokeTokens if begins => {
                for holder in &self.holders {
                    holder.revoke(&self.clusters[holder.cluster()].store);
                }
            }
            FaultKind::RevokeTokens => {
                for holder in &mut self.holders {
                    holder.renew(&self.clusters[holder.cluster()].store);
                }
            }
            FaultKind::BackUpEtcd if begins => {
                self.backup = Some((self.store().snapshot(), self.store().version()));
            }
            FaultKind::RestoreEtcd if begins => self.restore_etcd(),
            FaultKind::ProxyStop => self.nodes[node].proxy.stop(begins),
            FaultKind::ProxyKill if begins => {
                self.nodes[node].proxy.kill();
                let now = self.observer().moment();
                let holders = self.holders.iter().filter(|holder| holder.node() == node);
                self.forgotten.extend(holders.map(|holder| (holder.group(), now)));
            }
            FaultKind::ProxyKill => self.nodes[node].proxy.restart()?,
            FaultKind::ProxyDrain if begins => self.nodes[node].proxy.drain(),
            _ => {}
        }
        Ok(())
    }

    /// Restores etcd from the backup, if there is one.
    fn restore_etcd(&mut self) {
        let Some((backup, version)) = self.backup.take() else { return };
        let lost = self.store().version() - version;
        self.observer().log(|| format!("etcd goes back to {version}, {lost} versions are lost"));
        self.store().restore(backup);
        let commits = self.store().commits().commits.len();
        self.restores.push(StoreRestore { at: self.observer().moment(), commits, version });
    }
}
