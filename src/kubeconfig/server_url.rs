//! The URL of an apiserver in a kubeconfig.

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

impl ServerUrl {
    /// Parses an https URL. The scheme may be missing, as in client-go.
    ///
    /// # Errors
    /// Why the text is not an https URL that jackstay can use.
    pub fn parse(text: &str) -> Result<Self, String> {
        let fail = |why: &str| Err(format!("server {text:?} {why}"));
        let rest = match text.split_once("://") {
            Some(("https", rest)) => rest,
            Some(("http", _)) => return fail("is not encrypted: jackstay speaks TLS only"),
            Some(_) => return fail("is not an https URL"),
            None => text,
        };
        let (authority, path) = match rest.find(['/', '?', '#']) {
            Some(at) => rest.split_at(at),
            None => (rest, ""),
        };
        if authority.contains('@') {
            return Err("server has a user in its URL, which Kubernetes clients do not send".into());
        }
        if path.contains(['?', '#']) {
            return fail("has a query");
        }
        let (host, port) = match authority.strip_prefix('[') {
            Some(rest) => match rest.split_once(']') {
                Some((host, "")) => (host, None),
                Some((host, port)) => (host, port.strip_prefix(':')),
                None => return fail("has a broken IPv6 address"),
            },
            None => match authority.rsplit_once(':') {
                Some((host, _)) if host.contains(':') => {
                    return fail("has an IPv6 address without brackets");
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
            _ => fail("is not an address such as https://10.0.0.1:6443"),
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
        let error = ServerUrl::parse("https://user:s3cret@h").unwrap_err();
        assert!(!error.contains("s3cret"), "{error}");
    }
}
