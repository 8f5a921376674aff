//! The URL of an apiserver in a kubeconfig.

use std::fmt;

use jackstay_core::discovery::address::{normal_host, parse_ip, quote, split_zone};

/// The `server` of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerUrl {
    /// Name or IP address in its normal form ([`normal_host`]), without brackets; its zone follows a `%`.
    pub host: String,
    /// Port; 443 if the URL has none.
    pub port: u16,
    /// The path as it is written, without its last slashes, such as `/k8s/clusters/c-1`; usually empty.
    pub path: String,
}

/// Why the `server` of a cluster is not an https URL that jackstay can use. A user in it is not part of the text,
/// because a password may follow.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("server {} {}", quote(.0), .1.as_str())]
pub struct ServerUrlError(pub String, pub ServerUrlMistake);

/// A mistake in the URL of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerUrlMistake {
    /// The scheme is http.
    Unencrypted,
    /// The scheme is neither http nor https.
    NotHttps,
    /// No `//` follows the scheme.
    NoSlashes,
    /// It has a space or a control character.
    Space,
    /// The brackets do not contain an IPv6 address.
    BrokenIpv6,
    /// The zone of its IPv6 address is not escaped.
    Zone,
    /// Its IPv6 address has no brackets.
    Ipv6WithoutBrackets,
    /// It has no host.
    NoHost,
    /// Its host is neither an IP address nor a DNS name.
    InvalidHost,
    /// Its host is a name that is not ASCII.
    InternationalName,
    /// Its port is not a number from 1 to 65535.
    InvalidPort,
}

impl ServerUrlMistake {
    fn as_str(self) -> &'static str {
        match self {
            Self::Unencrypted => {
                "is not encrypted: jackstay connects with TLS only, so write the https address of the apiserver"
            }
            Self::NotHttps => "has a scheme other than https: write it as https://10.0.0.1:6443",
            Self::NoSlashes => "has no // after its scheme: write it as https://10.0.0.1:6443",
            Self::Space => "has a space or a control character, which no URL may have: remove it",
            Self::BrokenIpv6 => {
                "has no IPv6 address in its brackets: write it as https://[fd00::1]:6443"
            }
            Self::Zone => {
                "has a zone that is not escaped or no interface: write it as https://[fe80::1%25eth0]:6443"
            }
            Self::Ipv6WithoutBrackets => {
                "has an IPv6 address without brackets: write it as https://[fd00::1]:6443"
            }
            Self::NoHost => "has no host: write it as https://10.0.0.1:6443",
            Self::InvalidHost => "has a host that is neither an IP address nor a DNS name",
            Self::InternationalName => {
                "has a host that is not ASCII: write the name as DNS has it, with labels that begin with xn--"
            }
            Self::InvalidPort => "has a port that is not a number from 1 to 65535",
        }
    }
}

impl ServerUrl {
    /// Parses an https URL as client-go does (`rest.DefaultServerURL`, `net/url`): the scheme has no case, an empty
    /// port is 443, and a query and a fragment are not used. A user is accepted; [`user_in`] returns it. Without a
    /// scheme kubectl uses http, and jackstay https.
    ///
    /// # Errors
    /// The text is not an https URL that jackstay can use.
    pub fn parse(text: &str) -> Result<Self, ServerUrlError> {
        Self::parse_parts(text).map_err(|mistake| ServerUrlError(without_user(text), mistake))
    }

    fn parse_parts(text: &str) -> Result<Self, ServerUrlMistake> {
        if text.starts_with(char::is_whitespace) {
            return Err(ServerUrlMistake::Space);
        }
        let (scheme, authority, rest) = split(text);
        match scheme.map(str::to_ascii_lowercase).as_deref() {
            None | Some("https") => {}
            Some("http") => return Err(ServerUrlMistake::Unencrypted),
            Some(_) => return Err(ServerUrlMistake::NotHttps),
        }
        let is_space = |c: char| c.is_control() || c.is_whitespace();
        let path = rest.split(['?', '#']).next().unwrap_or_default();
        if authority.contains(is_space) || path.contains(is_space) {
            return Err(ServerUrlMistake::Space);
        }
        let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        // `https:lb`, `https/lb` and a scheme that is written twice.
        if authority.split(':').next().is_some_and(|host| host.eq_ignore_ascii_case("https")) {
            return Err(ServerUrlMistake::NoSlashes);
        }
        let (host, port) = split_authority(authority)?;
        Ok(Self { host, port, path: path.trim_end_matches('/').to_owned() })
    }

    /// Host and port, as an endpoint of the configuration is written. Linux connects to the unspecified address by
    /// loopback, and no endpoint can have it.
    pub fn address(&self) -> String {
        let host = match self.host.as_str() {
            "0.0.0.0" => "127.0.0.1",
            "::" => "::1",
            host => host,
        };
        host_and_port(host, self.port)
    }
}

fn host_and_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// The scheme, the authority and the rest of a URL.
fn split(url: &str) -> (Option<&str>, &str, &str) {
    let (scheme, rest) = match url.split_once("://") {
        Some((scheme, rest)) if !scheme.contains(['/', '?', '#']) => (Some(scheme), rest),
        _ => (None, url),
    };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    (scheme, authority, path)
}

fn split_authority(authority: &str) -> Result<(String, u16), ServerUrlMistake> {
    let (host, port) = match authority.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']').ok_or(ServerUrlMistake::BrokenIpv6)?;
            let host = match host.split_once('%') {
                None => host.to_owned(),
                Some((ip, zone)) => {
                    let zone = zone.strip_prefix("25").ok_or(ServerUrlMistake::Zone)?;
                    let host = format!("{ip}%{zone}");
                    split_zone(&host).1.ok_or(ServerUrlMistake::Zone)?;
                    host
                }
            };
            if parse_ip(&host).is_none() {
                return Err(ServerUrlMistake::BrokenIpv6);
            }
            let port = match port {
                "" => "",
                port => port.strip_prefix(':').ok_or(ServerUrlMistake::BrokenIpv6)?,
            };
            (host, port)
        }
        None => match authority.rsplit_once(':') {
            Some((host, _)) if host.contains(':') => {
                return Err(ServerUrlMistake::Ipv6WithoutBrackets);
            }
            Some((host, port)) => (host.to_owned(), port),
            None => (authority.to_owned(), ""),
        },
    };
    if host.is_empty() {
        return Err(ServerUrlMistake::NoHost);
    }
    let port = match port {
        "" => 443,
        port if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            port.parse().ok().filter(|port| *port > 0).ok_or(ServerUrlMistake::InvalidPort)?
        }
        _ => return Err(ServerUrlMistake::InvalidPort),
    };
    match normal_host(&host) {
        Some(host) => Ok((host, port)),
        // A URL may have the bytes of such a name in percent-encoding.
        None if !host.is_ascii() || host.contains('%') => Err(ServerUrlMistake::InternationalName),
        None => Err(ServerUrlMistake::InvalidHost),
    }
}

/// The user of a URL with the `@` that follows it; empty if there is none.
pub fn user_in(url: &str) -> &str {
    let (_, authority, _) = split(url);
    authority.rfind('@').map_or("", |at| &authority[..=at])
}

/// A URL without its user and password.
pub fn without_user(url: &str) -> String {
    let user = user_in(url);
    if user.is_empty() { url.to_owned() } else { url.replacen(user, "", 1) }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A zone is escaped in a URL (RFC 6874).
        let authority = host_and_port(&self.host, self.port).replacen('%', "%25", 1);
        write!(f, "https://{authority}{}", self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_valid_url_returns_host_port_and_path() {
        for (text, address, path) in [
            ("https://10.0.0.1:6443", "10.0.0.1:6443", ""),
            ("https://lb.example", "lb.example:443", ""),
            ("https://lb.example:", "lb.example:443", ""),
            ("https://127.0.0.1:016443", "127.0.0.1:16443", ""),
            ("HTTPS://LB.Example.:6443/", "lb.example.:6443", ""),
            ("Https://LocalHost.:6443//", "localhost:6443", ""),
            ("lb.example:8443", "lb.example:8443", ""),
            ("https://[fd00::1]:6443/", "[fd00::1]:6443", ""),
            ("https://[2001:0DB8:0:0::10]", "[2001:db8::10]:443", ""),
            ("https://[::ffff:10.0.0.1]:6443", "10.0.0.1:6443", ""),
            ("https://[fe80::1%25eth0]:6443", "[fe80::1%eth0]:6443", ""),
            ("https://0.0.0.0:6443", "127.0.0.1:6443", ""),
            ("https://[::]:6443", "[::1]:6443", ""),
            ("https://r/k8s/clusters/c-1/", "r:443", "/k8s/clusters/c-1"),
            ("https://r/a%2Fb/../c//d?x=1#y", "r:443", "/a%2Fb/../c//d"),
            ("https://h?q", "h:443", ""),
            ("https://h#f", "h:443", ""),
            ("https://user:s3@cret@h:1/p", "h:1", "/p"),
            ("https://a_b.example:1", "a_b.example:1", ""),
        ] {
            let server = ServerUrl::parse(text).unwrap();
            assert_eq!(
                (server.address().as_str(), server.path.as_str()),
                (address, path),
                "{text}"
            );
        }
    }

    #[test]
    fn without_user_keeps_scheme_host_and_path() {
        for (url, expected) in [
            ("http://u:s3@cret@proxy:3128/a@b", "http://proxy:3128/a@b"),
            ("socks5://proxy", "socks5://proxy"),
            ("proxy:3128", "proxy:3128"),
            ("u:s3cret@proxy:3128", "proxy:3128"),
        ] {
            assert_eq!(without_user(url), expected);
        }
    }

    #[test]
    fn parse_url_that_cannot_be_used_says_what_is_wrong_without_a_secret() {
        use ServerUrlMistake as Mistake;
        for (text, expected) in [
            ("http://10.0.0.1:8080", Mistake::Unencrypted),
            ("HTTP://user:s3cret@h", Mistake::Unencrypted),
            ("ftp://x", Mistake::NotHttps),
            ("https:h:1", Mistake::NoSlashes),
            ("https:/h:1", Mistake::NoSlashes),
            ("https/k8s", Mistake::NoSlashes),
            ("https://https:443", Mistake::NoSlashes),
            ("https://", Mistake::NoHost),
            ("https://:1", Mistake::NoHost),
            ("https:///x", Mistake::NoHost),
            ("", Mistake::NoHost),
            ("https://a:b", Mistake::InvalidPort),
            ("https://a:+1", Mistake::InvalidPort),
            ("https://a:0", Mistake::InvalidPort),
            ("https://user:s3cret@a:65536", Mistake::InvalidPort),
            ("https://fd00::1:6443", Mistake::Ipv6WithoutBrackets),
            ("https://[::1", Mistake::BrokenIpv6),
            ("https://[::1]6443", Mistake::BrokenIpv6),
            ("https://[h]:1", Mistake::BrokenIpv6),
            ("https://[fe80::1%eth0]:1", Mistake::Zone),
            ("https://[fe80::1%25]:1", Mistake::Zone),
            ("https://[fe80::1%25a/b]:1", Mistake::BrokenIpv6),
            ("https://h:1 ", Mistake::Space),
            (" https://h:1", Mistake::Space),
            ("https://h:1\n", Mistake::Space),
            ("https://h/a b", Mistake::Space),
            ("https://exa mple", Mistake::Space),
            ("https://b\u{fc}cher.example", Mistake::InternationalName),
            ("https://b%C3%BCcher.example", Mistake::InternationalName),
            ("https://256.1.1.1", Mistake::InvalidHost),
            ("https://a..b", Mistake::InvalidHost),
        ] {
            let error = ServerUrl::parse(text).unwrap_err();
            assert_eq!(error.1, expected, "{text}");
            assert!(!error.to_string().contains("s3cret"), "{error}");
        }
    }
}
