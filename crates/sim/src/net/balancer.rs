//! A load balancer of the network: an address whose new connections lead to one of several hosts. As destination NAT, it
//! selects the host for the first SYN of a connection, and changes nothing for connections that are established.

use std::net::{IpAddr, Ipv4Addr};

use super::ids::HostId;

/// The address of the balancer.
pub(super) const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 0, 1));

/// See the module.
#[derive(Debug)]
pub(super) struct Balancer {
    /// The hosts, and whether each gets new connections.
    backends: Vec<(HostId, bool)>,
    /// All connections of a client lead to one host, as long as it gets new connections.
    is_sticky: bool,
    /// Apart from the random numbers of the links, so that runs without a balancer do not depend on it.
    rng: fastrand::Rng,
}

impl Balancer {
    /// A balancer for these hosts.
    pub(super) fn new(backends: &[HostId], is_sticky: bool, seed: u64) -> Self {
        let backends = backends.iter().map(|&host| (host, true)).collect();
        Self { backends, is_sticky, rng: fastrand::Rng::with_seed(seed ^ 0xba1a) }
    }

    /// Sets whether a host gets new connections.
    pub(super) fn set_backend(&mut self, host: HostId, is_in: bool) {
        for (backend, in_use) in &mut self.backends {
            if *backend == host {
                *in_use = is_in;
            }
        }
    }

    /// The host of a new connection of a client. `None` if no host gets new connections.
    pub(super) fn select(&mut self, client: HostId) -> Option<HostId> {
        let hosts = self.backends.iter().filter(|(_, in_use)| *in_use).map(|(host, _)| *host);
        let hosts: Vec<_> = hosts.collect();
        if hosts.is_empty() {
            return None;
        }
        let at = if self.is_sticky {
            usize::from(client) % hosts.len()
        } else {
            self.rng.usize(0..hosts.len())
        };
        Some(hosts[at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(balancer: &mut Balancer, client: HostId) -> Vec<HostId> {
        let mut hosts: Vec<_> = (0..64).filter_map(|_| balancer.select(client)).collect();
        hosts.sort_unstable();
        hosts.dedup();
        hosts
    }

    #[test]
    fn select_leads_to_all_hosts_that_get_new_connections() {
        let mut balancer = Balancer::new(&[0, 1, 2], false, 7);
        assert_eq!(selected(&mut balancer, 3), [0, 1, 2]);
        balancer.set_backend(1, false);
        assert_eq!(selected(&mut balancer, 3), [0, 2]);
        balancer.set_backend(0, false);
        balancer.set_backend(2, false);
        assert_eq!(selected(&mut balancer, 3), [0_u16; 0]);
        balancer.set_backend(1, true);
        assert_eq!(selected(&mut balancer, 3), [1]);
    }

    #[test]
    fn select_of_a_sticky_balancer_leads_a_client_to_one_host() {
        let mut balancer = Balancer::new(&[0, 1, 2], true, 7);
        assert_eq!(selected(&mut balancer, 3), [0]);
        assert_eq!(selected(&mut balancer, 4), [1]);
        balancer.set_backend(0, false);
        assert_eq!(selected(&mut balancer, 3).len(), 1);
    }
}
