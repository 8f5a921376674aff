//! Faults of the store, of credentials and of jackstay.

use std::io;

use super::World;
use crate::faults::{Fault, FaultKind};
use crate::shell::store::StoreRestore;

impl World {
    /// Begins or ends a fault that is not one of an apiserver ([`FaultKind::is_of_no_server`]).
    pub(super) fn change_other(&mut self, fault: &Fault, begins: bool) -> io::Result<()> {
        let node = fault.server;
        match fault.kind {
            FaultKind::RevokeTokens if begins => {
                self.holders.iter().for_each(|holder| holder.revoke(&self.cluster));
            }
            FaultKind::RevokeTokens => {
                self.holders.iter_mut().for_each(|holder| holder.renew(&self.cluster));
            }
            FaultKind::BackUpEtcd if begins => {
                self.backup = Some((self.cluster.snapshot(), self.cluster.version()));
            }
            FaultKind::RestoreEtcd if begins => self.restore_etcd(),
            FaultKind::ProxyStop => self.nodes[node].proxy.stop(begins),
            FaultKind::ProxyKill if begins => {
                self.nodes[node].proxy.kill();
                let now = self.observer.moment();
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
        let lost = self.cluster.version() - version;
        self.observer.log(|| format!("etcd goes back to {version}, {lost} versions are lost"));
        self.cluster.restore(backup);
        let commits = self.cluster.commits().commits.len();
        self.restores.push(StoreRestore { at: self.observer.moment(), commits, version });
    }
}
