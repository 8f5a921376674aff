//! The zone of a link-local IPv6 address (RFC 4007 section 11): the interface by which it is reached.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};

use rustix::net::{AddressFamily, SocketFlags, SocketType, netdevice, socket_with};

/// The socket address of a host, whose zone is the number or the name of an interface. A zone without its interface has
/// the index 0, with which connect(2) fails.
pub fn socket_address(ip: IpAddr, port: u16, zone: Option<&str>) -> SocketAddr {
    match (ip, zone) {
        (IpAddr::V6(ip), Some(zone)) => {
            SocketAddrV6::new(ip, port, 0, interface_index(zone).unwrap_or(0)).into()
        }
        _ => SocketAddr::new(ip, port),
    }
}

fn interface_index(zone: &str) -> Option<u32> {
    if let Ok(index) = zone.parse() {
        return Some(index);
    }
    let socket =
        socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()?;
    netdevice::name_to_index(socket, zone).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_address_has_the_index_of_the_interface() {
        let ip: IpAddr = "fe80::1".parse().unwrap();
        let scope = |zone| match socket_address(ip, 1, zone) {
            SocketAddr::V6(address) => address.scope_id(),
            SocketAddr::V4(address) => panic!("{address}"),
        };
        let loopback = std::fs::read_to_string("/sys/class/net/lo/ifindex").unwrap();
        assert_eq!(scope(Some("lo")), loopback.trim().parse::<u32>().unwrap());
        assert_eq!(scope(Some("7")), 7);
        assert_eq!((scope(Some("none0")), scope(None)), (0, 0));
        let v4: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!(socket_address(v4, 1, Some("lo")).to_string(), "10.0.0.1:1");
    }
}
