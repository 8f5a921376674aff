//! Addresses of apiservers: host and port.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Longest text of a message that is quoted, in characters.
const MAX_QUOTE: usize = 80;
/// The name of both loopback addresses (RFC 6761 section 6.3).
const LOCALHOST: &str = "localhost";

/// Why a text is not a host and a port.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} {}: write it as {example}", quote(.text), .mistake.as_str())]
pub struct HostPortError {
    /// The text.
    pub text: String,
    /// The mistake in it.
    pub mistake: HostPortMistake,
    /// Correct texts, for the message.
    pub example: &'static str,
}

/// What is wrong with a text that should be a host and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostPortMistake {
    /// It contains `//`.
    Url,
    /// It is an IPv6 address.
    Ipv6WithoutPort,
    /// Its host is an IPv6 address without brackets.
    Ipv6WithoutBrackets,
    /// It has brackets around something else than an IPv6 address.
    NoIpv6InBrackets,
    /// It has no port.
    NoPort,
    /// Its port is not a number of 16 bits.
    InvalidPort,
    /// Nothing precedes its port.
    NoHost,
}

impl HostPortMistake {
    /// The mistake as the predicate of a sentence about the text.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Url => "is a URL, not an address and a port",
            Self::Ipv6WithoutPort => "is an IPv6 address without brackets and port",
            Self::Ipv6WithoutBrackets => "is an IPv6 address without brackets",
            Self::NoIpv6InBrackets => "has no IPv6 address in its brackets",
            Self::NoPort => "has no port",
            Self::InvalidPort => "has no valid port (0 to 65535)",
            Self::NoHost => "has no address",
        }
    }
}

/// Why a text is not the address of an apiserver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// It is not a host and a port.
    #[error("{0}")]
    HostPort(#[from] HostPortError),
    /// Its port is 0.
    #[error("{} has port 0, which accepts no connections", quote(.text))]
    PortZero {
        /// The text.
        text: String,
    },
    /// Its IP address is unspecified, a multicast address or the broadcast address.
    #[error("{} cannot be the address of an apiserver", quote(.text))]
    NotUnicast {
        /// The text.
        text: String,
    },
    /// Its host is neither an IP address nor a DNS name.
    #[error("{} is neither an IP address nor a DNS name", quote(.host))]
    InvalidHost {
        /// The host.
        host: String,
    },
}

/// Address of an apiserver.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointAddress {
    /// IP address without brackets, `localhost`, or a DNS name in lower case. A final dot is kept: such a name has no
    /// [search list](super::search_list). A link-local IPv6 address may have a zone, as `fe80::1%eth0`.
    pub host: String,
    /// TCP port.
    pub port: u16,
}

impl fmt::Display for EndpointAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl EndpointAddress {
    /// Reads the address of an apiserver: an IP address, `localhost` or a DNS name, and a port.
    ///
    /// # Errors
    /// `text` is not such an address.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        let (host, port) = split_host_port(text, "10.0.0.11:6443 or \"[fd00::13]:6443\"")?;
        if port == 0 {
            return Err(AddressError::PortZero { text: text.to_owned() });
        }
        match parse_ip(host) {
            Some(ip) if ip.is_unspecified() || ip.is_multicast() || ip == Ipv4Addr::BROADCAST => {
                Err(AddressError::NotUnicast { text: text.to_owned() })
            }
            _ => match normal_host(host) {
                Some(host) => Ok(Self { host, port }),
                None => Err(AddressError::InvalidHost { host: host.to_owned() }),
            },
        }
    }

    /// The host as certificates and SNI name it (RFC 6066 section 3): without a final dot.
    pub fn tls_name(&self) -> &str {
        tls_name(&self.host)
    }

    /// The IP address of the host, without its zone.
    pub fn ip(&self) -> Option<IpAddr> {
        split_zone(&self.host).0.parse().ok()
    }

    /// The zone of the IP address.
    pub fn zone(&self) -> Option<&str> {
        split_zone(&self.host).1
    }

    /// Whether the host needs a DNS lookup: it is neither an IP address nor `localhost`.
    pub fn is_name(&self) -> bool {
        self.host != LOCALHOST && self.ip().is_none()
    }

    /// Whether clients reach the same server at both addresses: the final dot of a name does not matter.
    pub fn is_same(&self, other: &Self) -> bool {
        self.port == other.port
            && self.tls_name() == other.tls_name()
            && self.zone() == other.zone()
    }
}

/// The normal form of a host, in which equal hosts are equal texts: an IP address without its other spellings,
/// `localhost`, or a DNS name in lower case. `None` if it is none of these.
pub fn normal_host(host: &str) -> Option<String> {
    match parse_ip(host) {
        Some(ip) => Some(with_zone(ip, host)),
        None if is_localhost(host) => Some(LOCALHOST.to_owned()),
        None => is_dns_name(host).then(|| host.to_ascii_lowercase()),
    }
}

/// Splits the zone off an IPv6 address (RFC 4007 section 11).
pub fn split_zone(host: &str) -> (&str, Option<&str>) {
    match host.split_once('%') {
        Some((ip, zone)) if is_zone(zone) && ip.parse::<Ipv6Addr>().is_ok() => (ip, Some(zone)),
        _ => (host, None),
    }
}

/// Whether a text can be the name of an interface (`dev_valid_name` of Linux) that a URL may contain.
fn is_zone(zone: &str) -> bool {
    (1..16).contains(&zone.len())
        && zone.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '~'))
}

fn with_zone(ip: IpAddr, host: &str) -> String {
    match split_zone(host).1 {
        Some(zone) if ip.is_ipv6() => format!("{ip}%{zone}"),
        _ => ip.to_string(),
    }
}

fn is_localhost(host: &str) -> bool {
    host.strip_suffix('.').unwrap_or(host).eq_ignore_ascii_case(LOCALHOST)
}

/// See [`EndpointAddress::tls_name`]. A zone is not part of a certificate.
pub fn tls_name(host: &str) -> &str {
    let host = split_zone(host).0;
    host.strip_suffix('.').unwrap_or(host)
}

/// Whether `name` is a DNS name: labels of letters, digits, dashes and underscores.
pub fn is_dns_name(name: &str) -> bool {
    let name = name.strip_suffix('.').unwrap_or(name);
    let label = |label: &str| {
        let dash = |c: char| c == '-';
        (1..=63).contains(&label.len())
            && label.chars().all(|c| c.is_ascii_alphanumeric() || dash(c) || c == '_')
            && !label.starts_with(dash)
            && !label.ends_with(dash)
    };
    let all_digits = name.chars().all(|c| c.is_ascii_digit() || c == '.');
    name.len() <= 253 && name.split('.').all(label) && !all_digits
}

/// Splits a text into the host, without the brackets of IPv6, and the port. The error contains `example`.
///
/// # Errors
/// `text` is not a host and a port.
pub fn split_host_port<'a>(
    text: &'a str,
    example: &'static str,
) -> Result<(&'a str, u16), HostPortError> {
    let fail = |mistake| Err(HostPortError { text: text.to_owned(), mistake, example });
    if text.contains("//") {
        return fail(HostPortMistake::Url);
    }
    let is_ipv6 = |text: &str| split_zone(text).0.parse::<Ipv6Addr>().is_ok();
    if is_ipv6(text) {
        return fail(HostPortMistake::Ipv6WithoutPort);
    }
    let Some((host, port)) = text.rsplit_once(':').filter(|(_, port)| !port.contains(']')) else {
        return fail(HostPortMistake::NoPort);
    };
    let digits = !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    let Some(port) = port.parse::<u16>().ok().filter(|_| digits) else {
        return fail(HostPortMistake::InvalidPort);
    };
    match host.strip_prefix('[').map(|host| host.strip_suffix(']')) {
        Some(Some(host)) if is_ipv6(host) => Ok((host, port)),
        Some(_) => fail(HostPortMistake::NoIpv6InBrackets),
        None if host.is_empty() => fail(HostPortMistake::NoHost),
        None if host.contains(':') => fail(HostPortMistake::Ipv6WithoutBrackets),
        None => Ok((host, port)),
    }
}

/// Parses an IP address, which may have a zone. An IPv4-mapped IPv6 address (RFC 4291 section 2.5.5.2) becomes the IPv4
/// address.
pub fn parse_ip(host: &str) -> Option<IpAddr> {
    split_zone(host).0.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Quotes foreign text for a message: escaped, on one line, at most 80 characters.
pub fn quote(text: &str) -> String {
    if text.chars().count() <= MAX_QUOTE {
        return format!("{text:?}");
    }
    let start: String = text.chars().take(MAX_QUOTE).collect();
    format!("{start:?}…")
}
