//! The authority that kubectl sends to the `server` of a cluster.
//!
//! client-go makes each request with `http.NewRequest`, which takes `Host` from the URL without an empty port
//! (`removeEmptyPort`). Over HTTP/2 Go sends it as `:authority`, over HTTP/1.1 without the zone of an IPv6 address
//! (`removeZone`; a zone has a meaning on the sending host only). A port is sent as the URL has it, also 443, and so is
//! the case of a name.

use http::uri::Authority;

/// The authority that kubectl sends to `server`; `None` if it cannot be one.
pub fn sent_authority(server: &str) -> Option<Authority> {
    let rest = server.split_once("://").map_or(server, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let authority = authority.strip_suffix(':').unwrap_or(authority);
    let without_zone = match (authority.find('%'), authority.rfind(']')) {
        (Some(zone), Some(end)) if authority.starts_with('[') && zone < end => {
            [&authority[..zone], &authority[end..]].concat()
        }
        _ => authority.to_owned(),
    };
    Authority::try_from(without_zone).ok().filter(|authority| !authority.host().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sent_authority_is_that_of_kubectl() {
        for (server, expected) in [
            ("https://10.0.0.1:6443", Some("10.0.0.1:6443")),
            ("https://rancher.example.com/k8s/clusters/c-1", Some("rancher.example.com")),
            ("https://rancher.example.com:443/", Some("rancher.example.com:443")),
            ("https://rancher.example.com:", Some("rancher.example.com")),
            ("https://API.Example.com.:8443", Some("API.Example.com.:8443")),
            ("https://[fd00::1]:6443", Some("[fd00::1]:6443")),
            ("https://[fd00::1]", Some("[fd00::1]")),
            ("https://[fe80::1%25eth0]:6443", Some("[fe80::1]:6443")),
            ("lb.example:8443", Some("lb.example:8443")),
            ("https://", None),
            ("https://a b", None),
        ] {
            let sent = sent_authority(server);
            assert_eq!(sent.as_ref().map(Authority::as_str), expected, "{server}");
        }
    }
}
