//! Requests the addresses of a cluster's apiservers: from the `EndpointSlices` of the Service
//! `default/kubernetes`, which the apiservers maintain, or from its `Endpoints` if there are no slices.

use std::net::{IpAddr, SocketAddr};

use http::StatusCode;
use serde_json::Value;

use super::probe::{PeerConfig, ProbeConnection, get};

/// Reads the addresses in a response.
type Reader = fn(&Value) -> Vec<SocketAddr>;

/// The path of each kind of object and its reader, in the order of preference.
const OBJECTS: [(&str, Reader); 2] = [
    (
        "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices\
         ?labelSelector=kubernetes.io%2Fservice-name%3Dkubernetes",
        of_slices,
    ),
    ("/api/v1/namespaces/default/endpoints/kubernetes", of_endpoints),
];

/// Why the addresses of a cluster's apiservers are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MembersError {
    /// There is no connection to the apiserver; the text is that of the failure.
    #[error("{0}")]
    NoConnection(String),
    /// The apiserver did not respond in time.
    #[error("the apiserver did not respond")]
    NoResponse,
    /// There is no credential for the request.
    #[error("there is no credential for the request")]
    NoCredential,
    /// The request failed; the text is that of the HTTP/2 error.
    #[error("{0}")]
    Request(String),
    /// The response contains no address.
    #[error("the response contains no address")]
    Empty,
    /// The apiserver does not accept the credential.
    #[error("the apiserver does not accept the credential (401)")]
    Unauthorized,
    /// The user may not list the objects.
    #[error("the user may not list the EndpointSlices of the namespace default (403)")]
    Forbidden,
    /// The apiserver responds with another status.
    #[error("the apiserver responds with {0}")]
    Status(u16),
    /// The server has the API below this path, which the apiservers do not serve.
    #[error(
        "those that it names do not serve the path {0} of the server, so they are no endpoints"
    )]
    BelowPath(String),
    /// They were not requested, for this reason.
    #[error("{0}")]
    NotRequested(String),
}

/// Requests the addresses over an open connection.
///
/// # Errors
/// Why the last request returned no address.
pub(super) async fn request(
    opened: &mut ProbeConnection,
    peer: &PeerConfig,
) -> Result<Vec<SocketAddr>, MembersError> {
    let mut reason = MembersError::Empty;
    for (path, read) in OBJECTS {
        let response = get(&mut opened.send, path, peer).await;
        let (status, body, _) =
            response.map_err(|error| MembersError::Request(error.to_string()))?;
        reason = match status {
            status if status.is_success() => match serde_json::from_str(&body).map(|v| read(&v)) {
                Ok(found) if !found.is_empty() => return Ok(found),
                _ => MembersError::Empty,
            },
            StatusCode::UNAUTHORIZED => MembersError::Unauthorized,
            StatusCode::FORBIDDEN => MembersError::Forbidden,
            other => MembersError::Status(other.as_u16()),
        };
    }
    Err(reason)
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// The port named `https`, else the first.
fn port(ports: &Value) -> Option<u16> {
    let ports = list(ports);
    let port = ports.iter().find(|port| port["name"] == "https").or(ports.first())?;
    u16::try_from(port["port"].as_u64()?).ok().filter(|port| *port != 0)
}

fn address(ip: &Value, port: u16) -> Option<SocketAddr> {
    Some(SocketAddr::new(ip.as_str()?.parse::<IpAddr>().ok()?, port))
}

fn of_slices(slices: &Value) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for slice in list(&slices["items"]) {
        let Some(port) = port(&slice["ports"]) else { continue };
        let ready = list(&slice["endpoints"]).iter().filter(|e| e["conditions"]["ready"] != false);
        let ips = ready.flat_map(|endpoint| list(&endpoint["addresses"]));
        for address in ips.filter_map(|ip| address(ip, port)) {
            // An address may be in two slices while the slice controller moves it.
            if !found.contains(&address) {
                found.push(address);
            }
        }
    }
    found
}

fn of_endpoints(endpoints: &Value) -> Vec<SocketAddr> {
    let mut found = Vec::new();
    for subset in list(&endpoints["subsets"]) {
        let Some(port) = port(&subset["ports"]) else { continue };
        let ips = list(&subset["addresses"]).iter().map(|entry| &entry["ip"]);
        found.extend(ips.filter_map(|ip| address(ip, port)));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn of_slices_yields_each_ready_address_once() {
        let https = json!([{ "name": "other", "port": 1 }, { "name": "https", "port": 6443 }]);
        let slices = json!({ "items": [
            { "ports": https, "endpoints": [
                { "addresses": ["10.0.0.1"], "conditions": { "ready": true } },
                { "addresses": ["10.0.0.2"], "conditions": {} },
                { "addresses": ["10.0.0.3"], "conditions": { "ready": false } },
                { "addresses": ["x", 5] },
            ]},
            { "ports": https, "endpoints": [{ "addresses": ["fd00::1"] }, { "addresses": ["10.0.0.1"] }] },
            { "ports": [], "endpoints": [{ "addresses": ["10.0.0.9"] }] },
        ]});
        let expected = ["10.0.0.1:6443", "10.0.0.2:6443", "[fd00::1]:6443"];
        assert_eq!(of_slices(&slices), addresses(&expected));
        assert_eq!(of_slices(&json!({ "items": 3 })), []);
    }

    #[test]
    fn of_endpoints_yields_every_address() {
        let endpoints = json!({ "subsets": [
            { "addresses": [{ "ip": "10.0.0.1" }, { "ip": "fd00::1" }, { "ip": "x" }],
              "ports": [{ "name": "other", "port": 1 }, { "name": "https", "port": 6443 }] },
            { "addresses": [{ "ip": "10.0.0.2" }], "ports": [] },
        ]});
        assert_eq!(of_endpoints(&endpoints), addresses(&["10.0.0.1:6443", "[fd00::1]:6443"]));
        assert_eq!(of_endpoints(&json!({ "subsets": 3 })), []);
    }
}
