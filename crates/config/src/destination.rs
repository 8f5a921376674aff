//! Matches the original destination of a redirected connection by its address or network, and
//! optionally its port.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use jackstay_core::discovery::address::{HostPortError, quote, split_host_port};

/// Correct texts, for messages.
const EXAMPLES: &str = "10.0.0.5:6443, \"[fd00::5]:6443\" or 10.0.0.0/24";

/// A set of original destinations of redirected connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The address of the network, or a single address; the bits after the prefix are 0.
    network: IpAddr,
    /// Prefix length in bits.
    prefix: u8,
    /// `None` matches any port.
    port: Option<u16>,
}

/// Why a text is not a [`Destination`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    /// It is neither an IP address nor a network, and not an address and a port.
    #[error("{0}")]
    HostPort(#[source] HostPortError),
    /// The text after the slash is not a number of 8 bits.
    #[error("{} has no valid prefix length: write it as {EXAMPLES}", quote(.0))]
    InvalidPrefix(String),
    /// The prefix has more bits than the address.
    #[error("{} has a prefix that is too long: write it as {EXAMPLES}", quote(.0))]
    PrefixTooLong(String),
    /// The address has bits beyond the prefix.
    #[error("{} has bits beyond its prefix: {network}/{prefix}?", quote(.text))]
    BitsBeyondPrefix {
        /// The text.
        text: String,
        /// The network that contains the address.
        network: IpAddr,
        /// The length of its prefix in bits.
        prefix: u8,
    },
    /// The host is not an IP address.
    #[error("{} has no IP address: write it as {EXAMPLES}", quote(.0))]
    NoIp(String),
    /// The port is 0.
    #[error("{} has port 0, which accepts no connections: write it as {EXAMPLES}", quote(.0))]
    PortZero(String),
}

impl Destination {
    /// Whether the set contains the address.
    pub fn contains(&self, address: SocketAddr) -> bool {
        masked(address.ip().to_canonical(), self.prefix) == Some(self.network)
            && self.port.is_none_or(|port| port == address.port())
    }

    /// Reads a text such as `10.96.0.1:443`, `[fd00::5]:6443`, `10.0.0.5`, `10.0.0.0/24` or
    /// `fd00::/64`.
    ///
    /// # Errors
    /// The text is not such a set.
    pub fn parse(text: &str) -> Result<Self, DestinationError> {
        let fail = |mistake: fn(String) -> DestinationError| Err(mistake(text.to_owned()));
        let (ip, prefix, port) = if let Some((ip, prefix)) = text.split_once('/') {
            let digits = !prefix.is_empty() && prefix.bytes().all(|b| b.is_ascii_digit());
            let Some(prefix) = prefix.parse::<u8>().ok().filter(|_| digits) else {
                return fail(DestinationError::InvalidPrefix);
            };
            (ip, Some(prefix), None)
        } else if text.parse::<IpAddr>().is_ok() {
            (text, None, None)
        } else {
            let (ip, port) = split_host_port(text, "10.0.0.5:6443 or \"[fd00::5]:6443\"")
                .map_err(DestinationError::HostPort)?;
            (ip, None, Some(port))
        };
        let Ok(ip) = ip.parse::<IpAddr>() else { return fail(DestinationError::NoIp) };
        let prefix = prefix.unwrap_or(address_bits(ip));
        match masked(ip, prefix) {
            None => fail(DestinationError::PrefixTooLong),
            Some(network) if network != ip => {
                let text = text.to_owned();
                Err(DestinationError::BitsBeyondPrefix { text, network, prefix })
            }
            Some(_) if port == Some(0) => fail(DestinationError::PortZero),
            Some(network) => Ok(Self { network, prefix, port }),
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => SocketAddr::new(self.network, port).fmt(f),
            None if self.prefix == address_bits(self.network) => self.network.fmt(f),
            None => write!(f, "{}/{}", self.network, self.prefix),
        }
    }
}

fn address_bits(ip: IpAddr) -> u8 {
    if ip.is_ipv4() { 32 } else { 128 }
}

/// The address with the bits after the prefix cleared; `None` if the prefix is too long.
fn masked(ip: IpAddr, prefix: u8) -> Option<IpAddr> {
    let host_bits = u32::from(address_bits(ip).checked_sub(prefix)?);
    Some(match ip {
        IpAddr::V4(ip) => {
            IpAddr::V4((ip.to_bits() & u32::MAX.checked_shl(host_bits).unwrap_or(0)).into())
        }
        IpAddr::V6(ip) => {
            IpAddr::V6((ip.to_bits() & u128::MAX.checked_shl(host_bits).unwrap_or(0)).into())
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destination_contains_its_addresses_only() {
        for (text, inside, outside) in [
            ("10.96.0.1:443", "10.96.0.1:443", "10.96.0.1:444"),
            ("10.96.0.1:443", "10.96.0.1:443", "10.96.0.2:443"),
            ("10.96.0.1", "10.96.0.1:9", "10.96.0.2:9"),
            ("10.0.0.0/24", "10.0.0.255:1", "10.0.1.0:1"),
            ("0.0.0.0/0", "203.0.113.9:1", "[::1]:1"),
            ("[fd00::5]:6443", "[fd00::5]:6443", "[fd00::5]:443"),
            ("fd00::/64", "[fd00::ffff:1]:1", "[fd00:0:0:1::]:1"),
            ("::/0", "[2001:db8::1]:1", "10.0.0.1:1"),
        ] {
            let destination = Destination::parse(text).unwrap();
            assert!(destination.contains(inside.parse().unwrap()), "{inside} in {text}");
            assert!(!destination.contains(outside.parse().unwrap()), "{outside} in {text}");
            assert_eq!(destination.to_string(), text);
        }
    }

    #[test]
    fn destination_refuses_malformed_text() {
        for (text, expected) in [
            ("10.0.0.1/24", "bits beyond its prefix: 10.0.0.0/24?"),
            ("10.0.0.0/33", "a prefix that is too long"),
            ("10.0.0.0/+8", "no valid prefix length"),
            ("10.0.0.0/", "no valid prefix length"),
            ("10.0.0.0/8:443", "no valid prefix length"),
            ("10.0.0.1:0", "port 0"),
            ("lb.example.com:443", "no IP address"),
            ("lb.example.com", "no port"),
            ("https://10.0.0.1", "no valid prefix length"),
            ("", "no port"),
            ("fd00::/129", "a prefix that is too long"),
        ] {
            let error = Destination::parse(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
