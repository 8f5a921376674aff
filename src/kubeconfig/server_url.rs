//! The URL of an apiserver in a kubeconfig.

use std::error::Error;
use std::fmt;

/// The `server` of a cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerUrl {
    /// Name or IP address, without brackets.
    pub host: String,
    /// Port; 443 if the URL has none.
    pub port: u16,
    /// The path without its last slash, such as `/k8s/clusters/c-1`; usually empty.
    pub path: String,
}

/// Why the `server` of a cluster is not an https URL that jackstay can use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerUrlError {
    /// It has a user; the URL is left out because a password may follow.
    User,
    /// It has another mistake.
    Url(String, ServerUrlMistake),
}

/// A mistake in the URL of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerUrlMistake {
    /// The scheme is http.
    Unencrypted,
    /// The scheme is neither http nor https.
    NotHttps,
    /// It has a query or a fragment.
    Query,
    /// The brackets around its IPv6 address are not closed.
    BrokenIpv6,
    /// Its IPv6 address has no brackets.
    Ipv6WithoutBrackets,
    /// It has no host or no valid port.
    NotAddress,
}

impl fmt::Display for ServerUrlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (text, mistake) = match self {
            Self::User => {
                return f.write_str(
                    "server has a user in its URL, which Kubernetes clients do not send",
                );
            }
            Self::Url(text, mistake) => (text, mistake),
        };
        let mistake = match mistake {
            ServerUrlMistake::Unencrypted => "is not encrypted: jackstay speaks TLS only",
            ServerUrlMistake::NotHttps => "is not an https URL",
            ServerUrlMistake::Query => "has a query",
            ServerUrlMistake::BrokenIpv6 => "has a broken IPv6 address",
            ServerUrlMistake::Ipv6WithoutBrackets => "has an IPv6 address without brackets",
            ServerUrlMistake::NotAddress => "is not an address such as https://10.0.0.1:6443",
        };
        write!(f, "server {text:?} {mistake}")
    }
}

impl Error for ServerUrlError {}

impl ServerUrl {
    /// Parses an https URL. The scheme may be missing, as in client-go.
    ///
    /// # Errors
    /// The text is not an https URL that jackstay can use.
    pub fn parse(text: &str) -> Result<Self, ServerUrlError> {
        let fail = |mistake| Err(ServerUrlError::Url(text.to_owned(), mistake));
        let rest = match text.split_once("://") {
            Some(("https", rest)) => rest,
            Some(("http", _)) => return fail(ServerUrlMistake::Unencrypted),
            Some(_) => return fail(ServerUrlMistake::NotHttps),
            None => text,
        };
        let (authority, path) = match rest.find(['/', '?', '#']) {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        if authority.contains('@') {
            return Err(ServerUrlError::User);
        }
        if path.contains(['?', '#']) {
            return fail(ServerUrlMistake::Query);
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => match rest.split_once(']') {
                Some((host, "")) => (host, None),
                Some((host, port)) => (host, port.strip_prefix(':')),
                None => return fail(ServerUrlMistake::BrokenIpv6),
            },
            None => match authority.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => {
                    return fail(ServerUrlMistake::Ipv6WithoutBrackets);
                }
                Some((host, port)) => (host, Some(port)),
                None => (authority, None),
            },
        };
        let port = match port {
            None => Ok(443),
            Some(port) => port.parse(),
        };
        match port {
            Ok(port) if port > 0 && !host.is_empty() => Ok(Self {
                host: host.to_owned(),
                port,
                path: path.trim_end_matches('/').to_owned(),
            }),
            _ => fail(ServerUrlMistake::NotAddress),
        }
    }

    /// Host and port, as an endpoint of the configuration is written.
    pub fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }
}

/// A URL without its user and password.
pub(super) fn without_user(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    format!("{scheme}://{host}{path}")
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}{}", self.address(), self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_valid_url_returns_host_port_and_path() {
        for (text, address, shown) in [
            ("https://10.0.0.1:6443", "10.0.0.1:6443", "https://10.0.0.1:6443"),
            ("https://lb.example", "lb.example:443", "https://lb.example:443"),
            ("https://[fd00::1]:6443/", "[fd00::1]:6443", "https://[fd00::1]:6443"),
            ("https://[fd00::1]", "[fd00::1]:443", "https://[fd00::1]:443"),
            ("lb.example:8443", "lb.example:8443", "https://lb.example:8443"),
            ("https://r/k8s/clusters/c-1", "r:443", "https://r:443/k8s/clusters/c-1"),
        ] {
            let server = ServerUrl::parse(text).unwrap();
            assert_eq!((server.address().as_str(), server.to_string().as_str()), (address, shown));
        }
    }

    #[test]
    fn without_user_keeps_scheme_host_and_path() {
        for (url, expected) in [
            ("http://u:s3@cret@proxy:3128/a@b", "http://proxy:3128/a@b"),
            ("socks5://proxy", "socks5://proxy"),
            ("proxy:3128", "proxy:3128"),
        ] {
            assert_eq!(without_user(url), expected);
        }
    }

    #[test]
    fn parse_url_other_than_https_fails_without_a_secret() {
        for text in [
            "http://10.0.0.1:8080",
            "ftp://x",
            "https://",
            "https://a:b",
            "https://a:0",
            "https://fd00::1:6443",
            "https://h/?q",
            "https://[::1",
            "https://h:99999",
        ] {
            assert!(ServerUrl::parse(text).is_err(), "{text}");
        }
        assert_eq!(ServerUrl::parse("https://user:s3cret@h"), Err(ServerUrlError::User));
    }
}
