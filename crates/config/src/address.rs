//! Addresses of listeners, and addresses that collide.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use jackstay_core::discovery::address::{
    EndpointAddress, HostPortError, parse_ip, quote, split_host_port,
};

/// Why a text is not an address to listen on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum BindError {
    /// It is not a host and a port.
    #[error("{0}")]
    HostPort(#[source] HostPortError),
    /// Its host is `localhost`, which means two addresses.
    #[error(
        "{} is a name; write its addresses: 127.0.0.1:{port} and \"[::1]:{port}\"",
        quote(.text)
    )]
    Localhost { text: String, port: u16 },
    /// Its host is not an IP address.
    #[error("{} is not an IP address to listen on", quote(.host))]
    NotIp { host: String },
}

/// Reads an address to listen on: an IP address and a port; port 0 takes any free port.
pub(super) fn parse_bind(text: &str) -> Result<SocketAddr, BindError> {
    let (host, port) =
        split_host_port(text, "127.0.0.1:7443 or \"[::1]:7443\"").map_err(BindError::HostPort)?;
    match parse_ip(host) {
        Some(ip) => Ok(SocketAddr::new(ip, port)),
        None if host == "localhost" => Err(BindError::Localhost { text: text.to_owned(), port }),
        None => Err(BindError::NotIp { host: host.to_owned() }),
    }
}

/// The addresses of an endpoint that are known without a DNS lookup: both loopback addresses for
/// `localhost`, none for a DNS name.
pub(super) fn addresses_of(endpoint: &EndpointAddress) -> Vec<SocketAddr> {
    let ips = match endpoint.ip() {
        Some(ip) => vec![ip],
        None if endpoint.is_name() => vec![],
        None => vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
    };
    ips.into_iter().map(|ip| SocketAddr::new(ip, endpoint.port)).collect()
}

/// Whether only one of two addresses can be bound: they have the same port and family, and the same
/// IP address or a wildcard.
pub fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    let wildcard = a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() != 0
        && a.port() == b.port()
        && a.is_ipv4() == b.is_ipv4()
        && (a.ip() == b.ip() || wildcard)
}

/// Whether a socket bound to `bind` receives connections to `target`. A wildcard bind counts for
/// loopback targets only: the addresses of this host are not known here.
pub(super) fn reaches(target: SocketAddr, bind: SocketAddr) -> bool {
    collide(target, bind) && (target.ip() == bind.ip() || target.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hickory_resolver::proto::rr::Name;

    #[test]
    fn parse_dns_name_is_ascii_and_equals_the_resolver_name() {
        for host in [
            "lb.example.com",
            "LB.Example.com.",
            "n-1",
            "1.example",
            "a_b.example",
            "_https._tcp.example",
            "xn--bcher-kva.example",
        ] {
            let endpoint = EndpointAddress::parse(&format!("{host}:6443")).unwrap();
            let name = Name::from_ascii(&endpoint.host).unwrap();
            assert_eq!(name.to_ascii(), endpoint.host, "{host}");
        }
        let error = EndpointAddress::parse("bücher.example:6443").unwrap_err();
        assert_eq!(error.to_string(), "\"bücher.example\" is neither an IP address nor a DNS name");
    }
}
