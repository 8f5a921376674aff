//! The source of a client connection, among which limits are shared.

use std::cell::OnceCell;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use tokio::net::TcpStream;

use super::peer_uid::PeerUids;

/// Who opened a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A process of this user, over loopback.
    User(u32),
    /// An address; of IPv6 the first 64 bits, because a host may use all addresses of its network (RFC 4291,
    /// section 2.5.4).
    Address(IpAddr),
}

impl Source {
    /// The source of a client with this address, and this uid if it is a process of this host.
    pub fn new(ip: IpAddr, uid: Option<u32>) -> Self {
        uid.map_or_else(|| Self::from_ip(ip), Self::User)
    }

    fn from_ip(ip: IpAddr) -> Self {
        Self::Address(match ip.to_canonical() {
            IpAddr::V6(ip) if !ip.is_loopback() => {
                Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into()
            }
            ip => ip,
        })
    }

    /// A number of its own for each source. IPv6 has no source addresses that begin with 0xff (RFC 4291,
    /// section 2.7).
    pub fn key(self) -> u128 {
        match self {
            Self::User(uid) => (0xff << 120) | u128::from(uid),
            Self::Address(IpAddr::V4(ip)) => ip.to_ipv6_mapped().to_bits(),
            Self::Address(IpAddr::V6(ip)) => ip.to_bits(),
        }
    }

    /// The user, if it is known.
    pub fn uid(self) -> Option<u32> {
        match self {
            Self::User(uid) => Some(uid),
            Self::Address(_) => None,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::Address(IpAddr::V6(ip)) if !ip.is_loopback() => write!(f, "{ip}/64"),
            Self::Address(ip) => write!(f, "{ip}"),
        }
    }
}

/// Finds the sources of the connections of one worker.
#[derive(Debug, Default)]
pub struct SourceLookup(OnceCell<Option<PeerUids>>);

impl SourceLookup {
    /// The source of a connection that was accepted from `peer`. A loopback connection whose user cannot be found,
    /// such as one from another network namespace, has its address as source.
    pub fn source(&self, stream: &TcpStream, peer: SocketAddr) -> Option<Source> {
        let local = stream.local_addr().ok()?;
        // Both ends of a connection to an address of this host are in this network namespace.
        let is_local = peer.ip().to_canonical().is_loopback() || peer.ip() == local.ip();
        let uids =
            is_local.then(|| self.0.get_or_init(|| PeerUids::open().ok()).as_ref()).flatten();
        let uid = uids.and_then(|uids| uids.get(peer, local).ok());
        Some(Source::new(peer.ip(), uid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn loopback_connection_has_the_user_of_the_client() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let uid = rustix::process::getuid().as_raw();
        assert_eq!(SourceLookup::default().source(&accepted, from), Some(Source::User(uid)));
    }

    #[test]
    fn addresses_are_grouped_by_network() {
        let source = |ip: &str| Source::from_ip(ip.parse().unwrap()).to_string();
        assert_eq!(source("10.0.0.5"), "10.0.0.5");
        assert_eq!(source("::ffff:10.0.0.5"), "10.0.0.5");
        assert_eq!(source("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
        assert_eq!(source("::1"), "::1");
    }
}
