//! Recognizes a server that selects the back end by the host of a request: an ingress, a gateway, the endpoint of a
//! cloud.
//!
//! Such a server answers 404 or 421 (RFC 9110, section 15.5.20) to another host. In mode terminate jackstay sends
//! `upstreams[].authority`; in mode passthrough the clients write the host, which is the address of jackstay.

use std::net::SocketAddr;

use http::uri::Authority;
use jackstay_sys::clock;

use super::observations::HostRouting;
use super::probe::{PeerConfig, StepTimer, open};
use super::version::{self, VersionResponseError};

/// Compares the responses to different hosts. Those to `clients` are compared if the server answers as an apiserver to
/// that of `peer`, else those to `candidates`.
///
/// Each request has a connection of its own: after an anonymous one, kube-apiserver ends the connection
/// (`UnauthenticatedHTTP2DOSMitigation`).
pub(super) async fn compare(
    address: SocketAddr,
    peer: &PeerConfig,
    clients: &[Authority],
    candidates: &[Authority],
) -> Option<HostRouting> {
    let own = who_answers(address, peer).await?;
    let others = match own {
        Served::Apiserver => clients,
        Served::Other(_) => candidates,
    };
    for other in others.iter().filter(|other| **other != peer.root.authority) {
        let mut with_other = peer.clone();
        with_other.root.authority = other.clone();
        let answer = who_answers(address, &with_other).await?;
        let (own_host, other_host) = (peer.root.authority.to_string(), other.to_string());
        match (own, answer) {
            (Served::Apiserver, Served::Other(status)) => {
                return Some(HostRouting { served: own_host, refused: other_host, status });
            }
            (Served::Other(status), Served::Apiserver) => {
                return Some(HostRouting { served: other_host, refused: own_host, status });
            }
            _ => {}
        }
    }
    None
}

/// Who answers `/version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Served {
    Apiserver,
    /// Another server, with this status.
    Other(u16),
}

/// Requests `/version` over a new connection; `None` if there is no response.
async fn who_answers(address: SocketAddr, peer: &PeerConfig) -> Option<Served> {
    let mut opened = open(&mut StepTimer::start(clock::now()), address, peer).await.ok()?;
    match version::request(&mut opened, peer).await {
        Ok(_) => Some(Served::Apiserver),
        Err(VersionResponseError::Response(status)) => Some(Served::Other(status.as_u16())),
        Err(VersionResponseError::Etcd | VersionResponseError::Request(_)) => None,
    }
}
