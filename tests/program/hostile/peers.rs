//! `HAProxy` and Envoy as targets of the same attacks. They authenticate to the apiservers with the identity's
//! certificate.

use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use crate::support::peers::{Peer, Pem, Terminate, Upstream};

/// The peer that `JACKSTAY_HOSTILE_PEER` names.
pub fn from_env() -> Option<Peer> {
    match std::env::var("JACKSTAY_HOSTILE_PEER").ok()?.as_str() {
        "haproxy" => Some(Peer::HaProxy),
        "envoy" => Some(Peer::Envoy),
        other => panic!("JACKSTAY_HOSTILE_PEER={other}: neither haproxy nor envoy"),
    }
}

/// The command that runs `peer` in front of the apiservers. `dir` has the certificates.
pub fn command(peer: Peer, dir: &Path, listen: SocketAddr, servers: &[SocketAddr]) -> Command {
    let (ca, file) = (dir.join("ca.crt"), dir.join("peer").with_extension(peer.extension()));
    let configuration = peer.terminate(&Terminate {
        listen,
        serving: Pem { dir, name: "serving" },
        client_ca: Some(&ca),
        servers,
        upstream: Upstream::Http2Tls {
            ca: &ca,
            server_name: None,
            certificate: Some(Pem { dir, name: "admin" }),
        },
    });
    std::fs::write(&file, configuration).unwrap();
    let program = peer.program().unwrap_or_else(|| panic!("{peer:?}: run benches/setup"));
    peer.command(&program, &file)
}
