//! The source of a client connection, among which limits are shared.

use std::cell::OnceCell;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::peer_uid::PeerUids;
use super::stream::TcpStream;

/// Who opened a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// A process of this user, over loopback.
    User(u32),
    /// An address that is a source of its own.
    Address(IpAddr),
    /// The IPv6 network with this address and prefix length. A host may use all addresses of its network, which
    /// usually has 64 bits of prefix (RFC 4291, section 2.5.4).
    Network(Ipv6Addr, u8),
}

impl Source {
    /// The source of a client with this address. IPv6 addresses with the same first `prefix_v6` bits are one source.
    pub fn from_ip(ip: IpAddr, prefix_v6: u8) -> Self {
        match ip.to_canonical() {
            IpAddr::V6(ip) if !ip.is_loopback() && prefix_v6 < 128 => {
                let host_bits = u128::MAX.checked_shr(prefix_v6.into()).unwrap_or(0);
                Self::Network(Ipv6Addr::from_bits(ip.to_bits() & !host_bits), prefix_v6)
            }
            ip => Self::Address(ip),
        }
    }

    /// A number of its own for each source of one prefix length. IPv6 has no source addresses that begin with 0xff
    /// (RFC 4291, section 2.7).
    pub fn key(self) -> u128 {
        match self {
            Self::User(uid) => (0xff << 120) | u128::from(uid),
            Self::Address(IpAddr::V4(ip)) => ip.to_ipv6_mapped().to_bits(),
            Self::Address(IpAddr::V6(ip)) | Self::Network(ip, _) => ip.to_bits(),
        }
    }

    /// The user, if it is known.
    pub fn uid(self) -> Option<u32> {
        match self {
            Self::User(uid) => Some(uid),
            Self::Address(_) | Self::Network(..) => None,
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(uid) => write!(f, "uid {uid}"),
            Self::Address(ip) => write!(f, "{ip}"),
            Self::Network(ip, prefix) => write!(f, "{ip}/{prefix}"),
        }
    }
}

/// Finds the sources of the connections of one worker.
#[derive(Debug, Default)]
pub struct SourceLookup(OnceCell<Option<PeerUids>>);

impl SourceLookup {
    /// The source of a connection that was accepted from `peer`; `None` if its client on this host has closed it already,
    /// which reads no answer. A loopback connection whose user cannot be found, such as one from another network
    /// namespace, has its address as source. `prefix_v6` is the length of the prefix that the IPv6 addresses of one
    /// source have in common.
    pub fn source(&self, stream: &TcpStream, peer: SocketAddr, prefix_v6: u8) -> Option<Source> {
        let local = stream.local_addr().ok()?;
        if stream.is_simulated() {
            let uid = stream.simulated_peer_uid();
            return Some(uid.map_or_else(|| Source::from_ip(peer.ip(), prefix_v6), Source::User));
        }
        self.source_by_addresses(peer, local, prefix_v6)
    }

    /// The same, for a connection of the kernel that was accepted on `local`.
    pub fn source_by_addresses(
        &self,
        peer: SocketAddr,
        local: SocketAddr,
        prefix_v6: u8,
    ) -> Option<Source> {
        // Both ends of a connection to an address of this host are in this network namespace.
        let is_local = peer.ip().to_canonical().is_loopback() || peer.ip() == local.ip();
        let uids =
            is_local.then(|| self.0.get_or_init(|| PeerUids::open().ok()).as_ref()).flatten();
        match uids.map(|uids| uids.get(peer, local)) {
            Some(Ok(uid)) => Some(Source::User(uid)),
            Some(Err(error)) if error.kind() == io::ErrorKind::NotConnected => None,
            Some(Err(_)) | None => Some(Source::from_ip(peer.ip(), prefix_v6)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn loopback_connection_has_the_user_of_the_client() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let uid = rustix::process::getuid().as_raw();
        let accepted = accepted.into();
        let source = |from| SourceLookup::default().source(&accepted, from, 64);
        assert_eq!(source(from), Some(Source::User(uid)));
        let remote = source("[2001:db8::1]:1".parse().unwrap()).unwrap();
        assert_eq!(remote.to_string(), "2001:db8::/64");
    }

    /// Thousands of connections that were closed while they waited to be accepted must not delay those behind them.
    #[tokio::test]
    async fn connection_that_its_client_has_closed_has_no_source() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (accepted, from) = listener.accept().await.unwrap();
        let accepted = accepted.into();
        let source = || SourceLookup::default().source(&accepted, from, 64);
        client.shutdown().await.unwrap();
        assert!(source().is_some(), "a client that has sent all still reads the answer");
        drop(client);
        assert_eq!(source(), None);
    }

    #[test]
    fn ipv6_addresses_are_grouped_by_the_prefix_and_others_are_not() {
        let source = |ip: &str, prefix| Source::from_ip(ip.parse().unwrap(), prefix).to_string();
        for prefix in [32, 64, 128] {
            assert_eq!(source("10.0.0.5", prefix), "10.0.0.5");
            assert_eq!(source("::ffff:10.0.0.5", prefix), "10.0.0.5");
            assert_eq!(source("::1", prefix), "::1");
        }
        for (prefix, expected) in [
            (32, "2001:db8::/32"),
            (56, "2001:db8:1:ff00::/56"),
            (64, "2001:db8:1:ffff::/64"),
            (127, "2001:db8:1:ffff:3:4:5:6/127"),
            (128, "2001:db8:1:ffff:3:4:5:7"),
        ] {
            assert_eq!(source("2001:db8:1:ffff:3:4:5:7", prefix), expected);
        }
    }

    #[test]
    fn key_differs_between_the_sources_of_a_prefix() {
        let key = |ip: &str, prefix| Source::from_ip(ip.parse().unwrap(), prefix).key();
        assert_eq!(key("2001:db8::1", 64), key("2001:db8::2", 64));
        assert_ne!(key("2001:db8::1", 128), key("2001:db8::2", 128));
        assert_ne!(key("2001:db8:0:1::1", 64), key("2001:db8::1", 64));
    }
}
