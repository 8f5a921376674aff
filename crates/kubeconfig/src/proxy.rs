//! The proxy that the environment selects for kubectl.
//!
//! Without a `proxy-url`, client-go takes the proxy of the environment (`http.ProxyFromEnvironment`): `HTTPS_PROXY` or
//! `https_proxy`, except for `localhost`, loopback addresses and the hosts of `NO_PROXY`
//! (`golang.org/x/net/http/httpproxy`, `config.useProxy`). jackstay connects directly, and kubectl connects to a local
//! listener directly.

use std::net::IpAddr;

use jackstay_core::discovery::address::{parse_ip, tls_name};

use super::server_url::{ServerUrl, without_user};

/// The proxy settings of the environment.
#[derive(Debug, Default)]
pub struct ProxyEnvironment {
    /// The variable that names the proxy, and the proxy.
    https: Option<(&'static str, String)>,
    /// The hosts for which it is not used.
    exceptions: String,
}

impl ProxyEnvironment {
    /// The settings of this process.
    pub fn of_process() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set =
            |name: &&'static str| Some((*name, variable(name).filter(|value| !value.is_empty())?));
        let first = |names: [&'static str; 2]| names.iter().find_map(set);
        Self {
            https: first(["HTTPS_PROXY", "https_proxy"]),
            exceptions: first(["NO_PROXY", "no_proxy"]).map(|(_, value)| value).unwrap_or_default(),
        }
    }

    /// What follows for the `apiserver` of a cluster and for clients of the local endpoint.
    pub fn notes(&self, apiserver: &ServerUrl, local: &ServerUrl) -> Vec<String> {
        let Some((variable, proxy)) = &self.https else { return Vec::new() };
        let proxy = without_user(proxy);
        let mut notes = Vec::new();
        if self.is_used_for(apiserver) {
            notes.push(format!(
                "kubectl connects to {} through the proxy {proxy} ({variable}), and jackstay connects directly: it needs \
                 a path of its own to the apiservers",
                apiserver.address()
            ));
        }
        if self.is_used_for(local) {
            notes.push(format!(
                "clients with {variable} connect to jackstay at {0} through the proxy {proxy}: add {1} to NO_PROXY",
                local.address(),
                local.host
            ));
        }
        notes
    }

    fn is_used_for(&self, server: &ServerUrl) -> bool {
        let host = tls_name(&server.host);
        let ip = parse_ip(host);
        if host == "localhost" || ip.is_some_and(|ip| ip.is_loopback()) {
            return false;
        }
        !self.exceptions.split(',').any(|exception| {
            let exception = exception.trim().to_ascii_lowercase();
            let (pattern, port) = match exception.rsplit_once(':') {
                Some((pattern, port))
                    if !exception.contains('/') && parse_ip(&exception).is_none() =>
                {
                    (pattern, Some(port))
                }
                _ => (exception.as_str(), None),
            };
            let is_port = port.is_none_or(|port| port.parse() == Ok(server.port));
            is_port && matches_exception(pattern, host, ip)
        })
    }
}

/// Whether an entry of `NO_PROXY` without its port matches a host: `*`, an IP address, a CIDR, or a name and the names
/// below it.
fn matches_exception(pattern: &str, host: &str, ip: Option<IpAddr>) -> bool {
    let bare = pattern.trim_start_matches('[').trim_end_matches(']');
    match (bare, ip) {
        ("", _) => false,
        ("*", _) => true,
        (pattern, Some(ip)) => match pattern.split_once('/') {
            Some((network, bits)) => is_in_network(ip, network, bits),
            None => parse_ip(pattern) == Some(ip),
        },
        (pattern, None) => {
            let name = pattern.strip_prefix('*').unwrap_or(pattern);
            let below = name.strip_prefix('.').unwrap_or(name);
            // `.example.com` does not match `example.com` itself.
            host == name || host.strip_suffix(below).is_some_and(|rest| rest.ends_with('.'))
        }
    }
}

fn is_in_network(ip: IpAddr, network: &str, bits: &str) -> bool {
    let Ok(bits) = bits.parse::<u32>() else { return false };
    let is_equal = |a: u128, b: u128, width: u32| {
        bits <= width && (bits == 0 || (a ^ b) >> (width - bits) == 0)
    };
    match (ip, network.parse::<IpAddr>()) {
        (IpAddr::V4(a), Ok(IpAddr::V4(b))) => is_equal(a.to_bits().into(), b.to_bits().into(), 32),
        (IpAddr::V6(a), Ok(IpAddr::V6(b))) => is_equal(a.to_bits(), b.to_bits(), 128),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(variables: &[(&str, &str)], server: &str, local: &str) -> Vec<String> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let parse = |url| ServerUrl::parse(url).unwrap();
        ProxyEnvironment::of(variable).notes(&parse(server), &parse(local))
    }

    #[test]
    fn notes_name_the_proxy_that_go_would_use() {
        for (exceptions, server, expected) in [
            ("", "https://10.0.0.1:6443", true),
            ("", "https://localhost:6443", false),
            ("", "https://127.0.0.9:6443", false),
            ("", "https://[::1]:6443", false),
            ("*", "https://10.0.0.1:6443", false),
            ("10.0.0.1", "https://10.0.0.1:6443", false),
            ("10.0.0.2, 10.0.0.0/8", "https://10.0.0.1:6443", false),
            ("11.0.0.0/8,10.0.0.0/33", "https://10.0.0.1:6443", true),
            ("10.0.0.1:6443", "https://10.0.0.1:6443", false),
            ("10.0.0.1:443", "https://10.0.0.1:6443", true),
            ("fd00::1", "https://[fd00::1]:6443", false),
            ("[fd00::1]:6443", "https://[fd00::1]:6443", false),
            ("fd00::/8", "https://[fd00::1]:6443", false),
            ("Example.com", "https://lb.example.com", false),
            ("example.com", "https://example.com.", false),
            (".example.com", "https://lb.example.com", false),
            (".example.com", "https://example.com", true),
            ("*.example.com", "https://lb.example.com", false),
            ("ample.com", "https://lb.example.com", true),
        ] {
            let variables =
                [("https_proxy", "http://u:s3cret@proxy:3128"), ("NO_PROXY", exceptions)];
            let found = notes(&variables, server, "127.0.0.1:7443");
            assert_eq!(found.len(), usize::from(expected), "{exceptions} {server}: {found:?}");
            let named = "through the proxy http://proxy:3128 (https_proxy)";
            assert!(
                found.iter().all(|note| note.contains(named) && !note.contains("s3cret")),
                "{found:?}"
            );
        }
        let found = notes(&[("HTTPS_PROXY", "proxy:1")], "https://10.0.0.1", "10.0.0.9:7443");
        assert!(
            found[1].ends_with("through the proxy proxy:1: add 10.0.0.9 to NO_PROXY"),
            "{found:?}"
        );
        assert_eq!(notes(&[("HTTP_PROXY", "p:1")], "https://10.0.0.1", "10.0.0.9:7443"), [""; 0]);
    }
}
