//! The addresses of this process's own listeners. They must not be endpoints, because requests would
//! loop.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::address::EndpointAddress;

/// The addresses of this process's listeners.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OwnAddresses {
    bound: Vec<SocketAddr>,
    /// Addresses of this host's interfaces; empty unless a listener is bound to the unspecified address.
    host: Vec<IpAddr>,
}

impl OwnAddresses {
    /// The addresses of listeners that are bound to `bound`. `host`: the addresses of this host's interfaces, which count
    /// for listeners that are bound to the unspecified address.
    pub fn new(bound: Vec<SocketAddr>, host: Vec<IpAddr>) -> Self {
        Self { bound, host }
    }

    /// Whether a connection to `address` would arrive at a listener of this process.
    pub fn contains(&self, address: &EndpointAddress) -> bool {
        targets(address)
            .iter()
            .any(|target| self.bound.iter().any(|bind| self.reaches(*target, *bind)))
    }

    fn reaches(&self, target: SocketAddr, bind: SocketAddr) -> bool {
        let ip = target.ip();
        target.port() == bind.port()
            && target.is_ipv4() == bind.is_ipv4()
            && (ip == bind.ip()
                || (bind.ip().is_unspecified() && (ip.is_loopback() || self.host.contains(&ip))))
    }
}

/// The socket addresses of an endpoint address. Its host is an IP address or `localhost`.
fn targets(address: &EndpointAddress) -> Vec<SocketAddr> {
    let ips = match address.ip() {
        Some(ip) => vec![ip.to_canonical()],
        None => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
    };
    ips.into_iter().map(|ip| SocketAddr::new(ip, address.port)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> EndpointAddress {
        EndpointAddress::parse(text).unwrap()
    }

    #[test]
    fn contains_matches_bound_loopback_and_host_addresses() {
        let own = |bound: &[&str], host: &[&str]| OwnAddresses {
            bound: bound.iter().map(|b| b.parse().unwrap()).collect(),
            host: host.iter().map(|h| h.parse().unwrap()).collect(),
        };
        let loopback = own(&["127.0.0.1:6443", "[::1]:6443"], &["10.0.0.5", "fd00::5"]);
        let wildcard = own(&["0.0.0.0:6443"], &["10.0.0.5", "fd00::5"]);
        let both = own(&["0.0.0.0:6443", "[::]:6443"], &["10.0.0.5", "fd00::5"]);
        for (text, expected) in [
            ("127.0.0.1:6443", [true, true, true]),
            ("127.0.0.2:6443", [false, true, true]),
            ("localhost:6443", [true, true, true]),
            ("10.0.0.5:6443", [false, true, true]),
            ("10.0.0.5:6444", [false, false, false]),
            ("10.0.0.6:6443", [false, false, false]),
            ("[fd00::5]:6443", [false, false, true]),
            ("[::1]:6443", [true, false, true]),
            ("[::ffff:10.0.0.5]:6443", [false, true, true]),
        ] {
            let contained = [&loopback, &wildcard, &both].map(|own| own.contains(&address(text)));
            assert_eq!(contained, expected, "{text}");
        }
    }
}
